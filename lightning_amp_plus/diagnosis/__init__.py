"""Why a step was not finite, where, and the words for it; modules that compute in float32. Plain torch."""
