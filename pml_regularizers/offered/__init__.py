"""What is offered to pytorch-metric-learning, in its style: each file as it would stand there, except for its imports.

The library's classes extend these. `tools/upstream.py` copies them into a clone of pytorch-metric-learning.
"""
