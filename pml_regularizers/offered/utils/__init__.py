"""A layer and an accuracy calculator that are offered to pytorch-metric-learning."""
