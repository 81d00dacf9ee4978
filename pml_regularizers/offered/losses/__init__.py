"""Losses that are offered to pytorch-metric-learning."""
