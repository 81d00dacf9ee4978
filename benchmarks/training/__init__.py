"""The training loop and its state."""
