"""Speed and memory against named alternatives, and what needs a GPU: `python -m speed`."""
