"""Constants of a text as they would be in a far longer one.

A mask or a bias that is computed of positions may be the same for all entries in every text that is traced, and not
behind thousands of tokens. So numbers that count places are multiplied, and what is computed of them is computed again.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from hf_align.tracing.nested import told_apart

_STRIDE = 131_071
"""From one place to the next: odd, and beyond the longest texts that there are."""
_COUNTING = (torch.int32, torch.int64, torch.float32, torch.float64)
"""Dtypes in which such numbers fit."""


def farther(nodes: Iterable[fx.Node], constants: Mapping[fx.Node, Any]) -> dict[fx.Node, Any]:
    """The constants that have other values where places are far apart; those whose op refuses such places are left out.

    Args:
        nodes: of the graph, in order.
    """
    found, computed = dict[fx.Node, Any](), dict[Hashable, Any]()
    with torch.no_grad():
        for node in nodes:
            if node not in constants:
                continue
            if any(before in found for before in node.all_input_nodes):
                operands = fx.node.map_arg((node.args, node.kwargs), lambda n: found.get(n, constants.get(n)))
                call = told_apart(node.target, operands)
                if call not in computed:
                    computed[call] = _computed(node, *operands)
                if computed[call] is not None:
                    found[node] = computed[call]
            elif _counts(constants[node]):
                found[node] = constants[node] * _STRIDE
    return found


def _computed(node: fx.Node, args: Any, kwargs: Any) -> Any:
    schema = getattr(node.target, "_schema", None)
    is_of_numbers = torch.Tag.dynamic_output_shape in getattr(node.target, "tags", ())  # as many as they say
    if is_of_numbers or (schema is not None and schema.is_mutable):
        return None
    try:
        return node.target(*args, **kwargs)  # type: ignore[operator]
    except (RuntimeError, IndexError):  # no table has so many rows
        return None


def _counts(value: Any) -> bool:
    """Whether it holds whole numbers that go up, or down, in steps of one length along its last axis."""
    if not isinstance(value, Tensor) or value.dtype not in _COUNTING or not value.dim() or value.shape[-1] < 2:
        return False
    steps = value.diff(dim=-1).flatten()
    is_whole = not value.is_floating_point() or bool((value == value.round()).all())
    return is_whole and bool(steps.numel()) and bool((steps == steps[0]).all() and steps[0] != 0)
