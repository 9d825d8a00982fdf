"""One small function for each op, by family. Its first line is the mathematics of the op."""

from hf_align.symmetry.rules import contraction, normalise, pointwise, views

__all__ = ["contraction", "normalise", "pointwise", "views"]
