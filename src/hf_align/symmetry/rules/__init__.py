"""One small function for each op, by family. Its first line is the mathematics of the op."""

from hf_align.symmetry.rules import (
    composites,
    contraction,
    convolution,
    lookup,
    normalise,
    pointwise,
    transforms,
    views,
)

__all__ = ["composites", "contraction", "convolution", "lookup", "normalise", "pointwise", "transforms", "views"]
