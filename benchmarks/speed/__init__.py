"""Speed and memory against named alternatives."""
