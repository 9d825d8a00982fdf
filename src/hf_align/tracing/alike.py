"""Whether two calls of one model run the same ops, but for how many tokens there are.

A shorter call that does nothing that a longer one does not tells nothing new of an architecture: it need not be
interpreted. What is compared is the program itself; where two differ in anything else than a size, they are two.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from hf_align.tracing.mode import extent
from hf_align.tracing.nested import leaves, nesting
from hf_align.tracing.program import Program

Sizes = set[tuple[int, int]]
_SIZES = frozenset(("size", "shape", "start", "end", "length", "index", "split_size", "split_sizes", "repeats"))
"""Arguments, by their names in the schemas of ops, that say how many there are of something, or which; not of what."""

_HIDES = 1e4
"""What is added to a score is larger where it hides an entry."""


def is_part_of(short: Program, long: Program) -> bool:
    """Whether a call does with fewer tokens what another one does with more: the same ops with the same arguments, and
    constants that the other one has, too."""
    known = [value for value in long.constants.values() if isinstance(value, Tensor)]
    pairs = _constants_of_alike(short, long)
    return pairs is not None and all(
        _is_within(x, y) or _is_within_later(x, y) or any(_is_block(x, z) for z in known) for x, y in pairs
    )


def takes_as_much(one: Program, other: Program) -> bool:
    """As `is_part_of`, of a call that has as many of everything as the other one, but for tokens."""
    if not is_part_of(one, other):
        return False
    _, length = extent(other.example)
    sizes = (leaves([_shapes(node) for node in _steps(program)]) for program in (one, other))
    return all(here == there or there == length for here, there in zip(*sizes, strict=True))


def is_shown_by(one: Program, other: Program) -> bool:
    """As `is_part_of`, of a call that may have more texts than the other one, or more of anything else, where all that
    a constant holds of it are equal."""
    pairs = _constants_of_alike(one, other)
    return pairs is not None and all(_is_within(*_as_many(x, y)) for x, y in pairs)


def run_alike(one: Program, other: Program) -> bool:
    """Whether two calls run the same ops, with any constants of the same kinds."""
    pairs = _constants_of_alike(one, other)
    return pairs is not None and all(_of_one_kind(x, y) for x, y in pairs)


def goes_on_alike(short: Program, long: Program) -> bool:
    """Whether a call runs the ops of a shorter one, with constants that go on as they began: they have the same few
    numbers, or ever more of them, as positions have."""
    pairs = _constants_of_alike(short, long)
    if pairs is None or not all(_of_one_kind(x, y) for x, y in pairs):
        return False
    return all(_goes_on(x, y) for x, y in {(id(x), id(y)): (x, y) for x, y in pairs}.values())


def _goes_on(short: Any, long: Any) -> bool:
    if not isinstance(short, Tensor):
        return True
    before, after = _numbers(short), _numbers(long)
    return len(before) > 1 if len(after) > short.numel() else torch.equal(before, after)


def _numbers(value: Tensor) -> Tensor:
    """All that occur in it, in order."""
    if value.dtype == torch.bool:  # of masks with millions of entries none needs sorting
        return torch.tensor([truth for truth in (False, True) if bool((value == truth).any())])
    plain = torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
    return (plain.float() if plain.is_floating_point() and plain.itemsize == 1 else plain).unique()


def turn_alike(one: Program, other: Program) -> bool:
    """Whether two calls run alike, with constants of which the same columns are equal: angles of several axes that are
    equal in a plain text are others where a place has several numbers."""
    pairs = _constants_of_alike(one, other)
    return pairs is not None and all(_of_one_kind(x, y) and _turn_alike(x, y) for x, y in pairs)


def _of_one_kind(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and one.dim() == other.dim()
    return bool(one == other)


def _turn_alike(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor) or not one.is_floating_point() or one.shape[-1:] != other.shape[-1:]:
        return True
    return _equal_columns(one) == _equal_columns(other)


def _equal_columns(table: Tensor) -> list[int]:
    """For each column of a table, the first one that is equal to it; none of a mask, which hides by numbers, nor of a
    table without entries."""
    if table.dim() < 2 or not table.numel() or bool((table.abs() > _HIDES).any()):
        return []
    first = dict[int, int]()
    kinds = table.reshape(-1, table.shape[-1]).unique(dim=1, return_inverse=True)[1]
    return [first.setdefault(int(kind), column) for column, kind in enumerate(kinds)]


def _constants_of_alike(one: Program, other: Program) -> list[tuple[Any, Any]] | None:
    """The constants that correspond; None where the two are not alike."""
    steps = list(_steps(one)), list(_steps(other))
    if len(steps[0]) != len(steps[1]):
        return None
    places = [{node: i for i, node in enumerate(of)} for of in steps]
    sizes: Sizes = set()
    for x, y in zip(*steps, strict=True):
        shapes = _shapes(x), _shapes(y)
        if x.target != y.target or [len(s) for s in shapes[0]] != [len(s) for s in shapes[1]]:
            return None
        sizes |= {(a, b) for s, t in zip(*shapes, strict=True) for a, b in zip(s, t, strict=True) if a != b}
        if any(0 in pair for pair in sizes):  # what holds nothing shows nothing
            return None
    pairs: list[tuple[Any, Any]] = []
    for x, y in zip(*steps, strict=True):
        arguments = list(_arguments(x)), list(_arguments(y))
        if len(arguments[0]) != len(arguments[1]):
            return None
        for (name, a), (other_name, b) in zip(*arguments, strict=True):
            if name != other_name or not _same(name, a, b, (one, other), places, sizes, pairs):
                return None
    return pairs if _results(one, places[0]) == _results(other, places[1]) else None


def _same(
    name: str,
    one: Any,
    other: Any,
    programs: tuple[Program, Program],
    places: list[dict[fx.Node, int]],
    sizes: Sizes,
    pairs: list[tuple[Any, Any]],
) -> bool:
    """Whether two arguments are the same; constants are put off."""
    if not isinstance(one, fx.Node) or not isinstance(other, fx.Node):
        differ = type(one) is not type(other) or one != other
        return not differ or (name in _SIZES and (one, other) in sizes)
    if one in programs[0].constants and other in programs[1].constants:
        pairs.append((programs[0].constants[one], programs[1].constants[other]))
        return True
    kinds = [(places[i].get(n), p.parameters.get(n), p.inputs.get(n))
             for i, (n, p) in enumerate(zip((one, other), programs, strict=True))]  # fmt: skip
    return kinds[0] == kinds[1] and any(kind is not None for kind in kinds[0])


def _steps(program: Program) -> Iterator[fx.Node]:
    return (n for n in program.graph.nodes if n.op == "call_function" and n not in program.constants)


def _results(program: Program, places: dict[fx.Node, int]) -> list[int | str | None]:
    return [places.get(n, program.parameters.get(n)) for n in program.interface]


def _shapes(node: fx.Node) -> list[tuple[int, ...]]:
    return [tuple(leaf.shape) for leaf in leaves(node.meta.get("val")) if isinstance(leaf, Tensor)]


def _arguments(node: fx.Node) -> Iterator[tuple[str, Any]]:
    """Every leaf of the arguments of an op, by the name of its argument."""
    schema = getattr(node.target, "_schema", None)
    names = [a.name for a in schema.arguments] if schema is not None else []
    given = [(names[i] if i < len(names) else "", value) for i, value in enumerate(node.args)]
    for name, value in (*given, *node.kwargs.items()):
        yield f"{name} is", nesting(value)
        for leaf in leaves(value):
            yield name, leaf


def _is_within(short: Any, long: Any) -> bool:
    """Whether a constant is the beginning of another one, along each of its axes."""
    if not isinstance(short, Tensor) or not isinstance(long, Tensor):
        return bool(short == long)
    if (
        short.dtype != long.dtype
        or short.dim() != long.dim()
        or any(a > b for a, b in zip(short.shape, long.shape, strict=True))
    ):
        return False
    return short.equal(long[tuple(slice(size) for size in short.shape)])


def _is_within_later(short: Any, long: Any) -> bool:
    """Whether a constant is what another one holds of tokens that follow each other, along each axis of them: as a mask
    of who attends to whom."""
    if not isinstance(short, Tensor) or not isinstance(long, Tensor) or short.dim() != long.dim():
        return False
    left = {b - a for a, b in zip(short.shape, long.shape, strict=True) if a != b}
    if len(left) != 1 or min(left) < 0:
        return False
    longer = [a != b for a, b in zip(short.shape, long.shape, strict=True)]
    starts = (slice(start, None) for start in range(1, min(left) + 1))
    return any(_is_within(short, long[tuple(start if more else slice(None) for more in longer)]) for start in starts)


def _as_many(one: Any, other: Any) -> tuple[Any, Any]:
    """Two constants, with one entry along each axis along which the first is longer and both hold the same."""
    if isinstance(one, Tensor) and isinstance(other, Tensor) and one.dim() == other.dim():
        for axis in range(one.dim()):
            repeats = [x.stride(axis) == 0 or x.equal(x.narrow(axis, 0, 1).expand_as(x)) for x in (one, other)
                       if one.shape[axis] > other.shape[axis] > 0]  # fmt: skip
            if repeats and all(repeats):
                one, other = one.narrow(axis, 0, 1), other.narrow(axis, 0, 1)
    return one, other


def _is_block(short: Any, long: Tensor) -> bool:
    """Whether a constant is what stands somewhere in another one, that is longer along one axis."""
    if not isinstance(short, Tensor) or short.dtype != long.dtype or short.dim() != long.dim():
        return False
    longer = [i for i, (a, b) in enumerate(zip(short.shape, long.shape, strict=True)) if a != b]
    if len(longer) != 1 or short.shape[longer[0]] > long.shape[longer[0]]:
        return False
    axis, size = longer[0], short.shape[longer[0]]
    if size == 0:
        return True
    last = long.shape[axis] - size
    alike = long.narrow(axis, 0, last + 1) == short.narrow(axis, 0, 1)
    begun = alike.movedim(axis, 0).unsqueeze(-1).flatten(1).all(1)
    return any(long.narrow(axis, start, size).equal(short) for start in begun.nonzero().flatten().tolist())
