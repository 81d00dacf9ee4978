"""Records of a run: writing and reading."""
