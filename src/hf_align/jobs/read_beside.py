"""What stands beside a model and reads more of it than its answers: heads by their numbers, states before its head.

A change of basis keeps answers alone. So where the files that are copied with aligned B name more, it is refused.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hf_align.checkpoints.own_files import is_own, own_json
from hf_align.errors import IncompatibleModels
from hf_align.matching.head_families import spaces_of_heads
from hf_align.opening.models import Model
from hf_align.symmetry.spec import SymmetrySpec
from hf_align.tracing.build import build_without_weights

_MODULES, _GENERATION = "modules.json", "generation_config.json"


def require_answers_alone(model: Model, spec: SymmetrySpec) -> None:
    """See that nothing beside a model that is moved reads what moves.

    Args:
        spec: with the groups that move it.

    Raises:
        IncompatibleModels: Sentence Transformers reads its states before its head, or its generation config names heads
            that move.
    """
    folder = model.source.folder
    if spec.spaces and is_own(folder, folder / _MODULES):
        built = build_without_weights(model.config)
        if built.base_model is not built:
            raise IncompatibleModels(
                f"{model.ref}: {_MODULES} reads the states before the head of {type(built).__name__}, and these come "
                f"into another basis; name {type(built.base_model).__name__} under architectures in its config.json"
            )
    require_no_named_heads(model.ref, own_json(folder, _GENERATION) or {}, spec)


def require_no_named_heads(ref: str, generation: Mapping[str, Any], spec: SymmetrySpec) -> None:
    """See that no head that moves is read by its number, as Whisper's timestamps are.

    Args:
        ref: what messages call the model.
        generation: its generation config.
        spec: with the groups that move it.

    Raises:
        IncompatibleModels: a list of the config names such heads.
    """
    heads = _moving_heads(spec)
    if named := [key for key, value in generation.items() if _names_heads(value, heads)]:
        raise IncompatibleModels(
            f"{ref}: its generation config names heads by their numbers ({named[0]}), and heads move; "
            '--heads monotonic (heads="monotonic") keeps them in their places'
        )


def _moving_heads(spec: SymmetrySpec) -> int:
    """How many heads the largest layer has whose heads move, query heads that share a key one by one."""
    moving = spaces_of_heads(spec)
    segments = (segment for axes in spec.parameters.values() for axis in axes for segment in axis)
    heads = (segment[: at + 1] for segment in segments for at, factor in enumerate(segment) if factor.space in moving)
    return max((math.prod(factor.size for factor in each) for each in heads), default=0)


def _names_heads(value: Any, heads: int) -> bool:
    """Whether a value is a list of pairs of a layer and one of so many heads in it."""
    return isinstance(value, list) and bool(value) and all(
        isinstance(pair, list) and len(pair) == 2 and all(type(n) is int for n in pair) and pair[1] < heads
        for pair in value
    )  # fmt: skip
