"""How a trunk's features reach a loss."""
