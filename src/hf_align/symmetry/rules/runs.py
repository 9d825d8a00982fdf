"""Looking ahead from a view: are only runs along one of its axes ever used?

Models that compute queries, keys and values (or values and gates) in one product view the result with an axis for the
choice and take them apart afterwards. What is taken apart shares no space.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from hf_align.tracing.ops import op_name

_STILL = frozenset(("contiguous", "clone", "to", "_to_copy", "alias", "detach", "dropout"))
_VIEWS = frozenset(("view", "reshape", "_unsafe_view", "flatten"))
_MERGED = -1
"""Of an axis that a view made of others."""


def runs_along(node: fx.Node, constants: Mapping[fx.Node, Any]) -> tuple[int, list[int]] | None:
    """(axis, sizes of the runs between all boundaries) if every user of a value takes runs along the same axis.

    A loop views its weights anew each time: the users of all views alike are meant.
    """
    shape = node.meta["val"].shape
    boundaries: dict[int, set[int]] = {}
    call = node.target, node.args, node.kwargs
    alike = [n for n in node.all_input_nodes[0].users if (n.target, n.args, n.kwargs) == call]
    if not all(_collect(n, list(range(len(shape))), boundaries, constants) for n in alike) or len(boundaries) != 1:
        return None
    ((dim, ends),) = boundaries.items()
    if dim == _MERGED:
        return None
    marks = sorted(ends | {0, shape[dim]})
    sizes = [b - a for a, b in itertools.pairwise(marks)]
    return (dim, sizes) if len(sizes) > 1 and dim < len(shape) - 1 else None


def _collect(
    node: fx.Node, order: list[int], boundaries: dict[int, set[int]], constants: Mapping[fx.Node, Any]
) -> bool:
    """Follow all users; `order` says which axis of the view each axis is. False if one does anything else."""
    for user in node.users:
        name = op_name(user)
        if name in ("permute", "transpose"):
            if not _collect(user, _reordered(user, order), boundaries, constants):
                return False
        elif name in ("unsqueeze", "squeeze"):
            if not _collect(user, _with_unit_axes(user, order), boundaries, constants):
                return False
        elif name in _STILL or (name in _VIEWS and user.args[0] is node):
            kept = order if name in _STILL else [_MERGED if i is None else order[i] for i in axes_kept(user)]
            if not _collect(user, kept, boundaries, constants):
                return False
        else:
            taken = _taken(user, node, constants)
            if taken is None:
                return False
            boundaries.setdefault(order[taken[0]], set()).update(taken[1])
    return bool(node.users)


def _with_unit_axes(user: fx.Node, order: list[int]) -> list[int]:
    """The axes behind an op that adds or drops those of size one."""
    before, after = user.all_input_nodes[0].meta["val"].shape, user.meta["val"].shape
    dims: Any = user.args[1] if len(user.args) > 1 else range(len(before))
    rank = max(len(before), len(after), 1)
    chosen: set[int] = {d % rank for d in ([dims] if isinstance(dims, int) else dims)}
    if op_name(user) == "unsqueeze":
        (at,) = chosen
        return [*order[:at], _MERGED, *order[at:]]
    return [axis for i, axis in enumerate(order) if not (i in chosen and before[i] == 1)]


def axes_kept(view: fx.Node) -> list[int | None]:
    """For each axis of a view, which axis of its operand it is, if it is one of them as it was."""
    before, after = view.all_input_nodes[0].meta["val"].shape, view.meta["val"].shape
    place = {(math.prod(before[:i]), n): i for i, n in enumerate(before) if n > 1}
    return [place.get((math.prod(after[:i]), n)) for i, n in enumerate(after)]


def merged_behind(node: fx.Node, dim: int) -> int | None:
    """The end of the axes from `dim` on (two at least) that a view makes one, with all others as they are."""
    if op_name(node) not in _VIEWS:
        return None
    before, after = node.all_input_nodes[0].meta["val"].shape, node.meta["val"].shape
    behind = len(before) - len(after) + dim + 1
    same = before[:dim] == after[:dim] and before[behind:] == after[dim + 1 :]
    return behind if behind > dim + 1 and same else None


def _reordered(user: fx.Node, order: list[int]) -> list[int]:
    if op_name(user) == "permute":
        return [order[i] for i in user.args[1]]  # type: ignore[union-attr, index]
    order = list(order)
    i, j = user.args[1], user.args[2]
    if order:  # a single number has none
        order[i], order[j] = order[j], order[i]  # type: ignore[index]
    return order


def _taken(user: fx.Node, node: fx.Node, constants: Mapping[fx.Node, Any]) -> tuple[int, set[int]] | None:
    """(axis, boundaries) of the runs that an op takes."""
    shape, name = tuple(node.meta["val"].shape), op_name(user)
    args: list[Any] = [*user.args, *[None] * 5]
    if name == "select":
        dim = args[1] % len(shape)
        at = args[2] % shape[dim]
        return dim, {at, at + 1}
    if name == "unbind":
        dim = int(args[1] or user.kwargs.get("dim", 0)) % len(shape)  # type: ignore[arg-type]
        return dim, set(range(shape[dim]))
    if name == "slice" and (args[4] or 1) == 1:
        dim = (args[1] or 0) % len(shape)
        start, stop, _ = slice(args[2], args[3]).indices(shape[dim])
        return dim, {start, stop}
    if name in ("split", "split_with_sizes", "chunk"):
        dim = int(args[2] or user.kwargs.get("dim", 0)) % len(shape)  # type: ignore[arg-type]
        sizes = [piece.shape[dim] for piece in user.meta["val"]]
        return dim, {sum(sizes[:i]) for i in range(len(sizes) + 1)}
    if name == "index":
        used = [i for i, number in enumerate(args[1]) if number is not None]
        run = constant_run(constants.get(args[1][used[0]]), shape[used[0]]) if len(used) == 1 else None
        return (used[0], set(run)) if run is not None else None
    return None


def constant_run(numbers: Any, size: int) -> tuple[int, int] | None:
    """[start, stop) if constant numbers are consecutive entries of an axis."""
    if not isinstance(numbers, Tensor) or numbers.dim() != 1 or numbers.dtype != torch.long or not len(numbers):
        return None
    first = int(numbers[0]) % size
    if not torch.equal(numbers % size, torch.arange(first, first + len(numbers))):
        return None
    return first, first + len(numbers)
