"""Which traps are quick, and which the package still falls into."""

from __future__ import annotations

QUICK = frozenset((
    "depth: ByEnum", "depth: NoRotation",
    "lengths: Above-8", "lengths: LateMask", "lengths: Stretched",
    "buffers: Mask", "buffers: Order", "buffers: Branch",
    "paths: Cached", "paths: TryExcept", "paths: Segments",
    "arguments: Hidden_add_alpha", "arguments: Hidden_topk", "arguments: Hidden_outer",
    "arguments: Hidden_repeat_interleave", "arguments: Stream_layer_norm_shape",
    "biases: plain", "biases: Faded",
    "experts: Plain", "experts: Five",
    "modes: gpt2 decoder", "modes: dinov2",
    "families: yarn", "families: llama3 scaling",
    "turns: Scaled_softplus_query_first", "turns: Wide_softplus_queries_first of three heads",
    "random: bias of a convolution", "random: a map of each half of a token",
    "looking: EightTexts", "looking: Training", "looking: Computed",
    "asked: AWordOrNone", "asked: Labelled", "asked: Nameless",
    "asked: Share", "set later: Width",
    "closed: Closed", "closed: Early",
    "looked up: Gated", "looked up: Exchanged",
    "pictured: PicturedReader", "pictured: Seeing",
    "rarer: LateTower", "pictured: SeeingTall", "branching: FifthTower", "branching: HandedTower",
    "pairs: activation", "pairs: heads", "pairs: theta", "pairs: names",
))  # fmt: skip
BROKEN: dict[str, str] = {}
"""What goes wrong, by trap."""
