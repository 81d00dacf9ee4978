"""The datasets that a benchmark can train and test on, one file each."""

from benchmarks.datasets.glyphs import Glyphs, Split

__all__ = ["Glyphs", "Split"]
