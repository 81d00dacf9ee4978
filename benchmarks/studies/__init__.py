"""Many runs: planned from recipes, seeds, folds or a search, and run side by side or on Ray."""
