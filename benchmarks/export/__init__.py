"""Export of a trained network, for use without this package."""
