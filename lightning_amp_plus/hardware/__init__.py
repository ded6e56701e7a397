"""What this machine runs natively, and how fast. Plain torch."""
