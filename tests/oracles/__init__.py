"""The papers' equations again, in float64 loops, knowing nothing of the library."""
