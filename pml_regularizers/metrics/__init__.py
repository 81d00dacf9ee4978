"""Accuracies by rank."""
