"""Functions: tensors in, tensors out, without state."""
