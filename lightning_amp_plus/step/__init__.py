"""An optimizer step: what is tried, what follows, what the run remembers. Plain torch."""
