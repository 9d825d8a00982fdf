"""What stands beside a model and reads more of it than its answers: heads by their numbers, states before its head.

A change of basis keeps answers alone. So where the files that are copied with aligned B name more, it is refused.
"""

from __future__ import annotations

import math
from typing import Any

from hf_align.checkpoints.own_files import is_own, own_json
from hf_align.errors import IncompatibleModels
from hf_align.matching.head_families import HeadFamily, head_families
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
    heads = max((_moving_heads(family, spec) for family in head_families(spec)), default=0)
    if named := [key for key, value in (own_json(folder, _GENERATION) or {}).items() if _names_heads(value, heads)]:
        raise IncompatibleModels(
            f"{model.ref}: {_GENERATION} names heads by their numbers ({named[0]}), and heads move; "
            "--heads monotonic keeps them in their places"
        )


def _moving_heads(family: HeadFamily, spec: SymmetrySpec) -> int:
    """How many heads of a layer move, query heads that share a key among them."""
    spaces = [spec.spaces[name] for name in (family.heads, family.subheads) if name is not None]
    return math.prod(space.size for space in spaces) if any(space.group for space in spaces) else 0


def _names_heads(value: Any, heads: int) -> bool:
    """Whether a value is a list of pairs of a layer and one of so many heads in it."""
    return isinstance(value, list) and bool(value) and all(
        isinstance(pair, list) and len(pair) == 2 and all(type(n) is int for n in pair) and pair[1] < heads
        for pair in value
    )  # fmt: skip
