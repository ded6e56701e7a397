"""What became of a run, and the magnitudes in it: measured, kept small, handed on. Plain torch."""
