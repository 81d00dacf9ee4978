"""Heads: networks between a trunk and a loss."""
