"""Metrics, curves and pictures of a trained model."""
