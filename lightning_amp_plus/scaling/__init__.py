"""Loss scaling, and what gradients go through from a backward to the optimizer. Plain torch, no policy."""
