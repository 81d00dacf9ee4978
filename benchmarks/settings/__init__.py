"""The settings of a run: types, recipes, command line and differences."""
