"""What a step changes besides parameters and gradients, remembered and put back. Plain torch and torchmetrics."""
