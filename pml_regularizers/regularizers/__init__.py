"""Regularizers, to be added to a metric loss."""
