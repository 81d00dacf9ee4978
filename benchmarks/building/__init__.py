"""Builds the images, network, objective and optimizer of a run from its settings."""
