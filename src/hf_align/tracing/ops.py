"""What is known of ops, by name. The files of their families in `symmetry/rules/` say it; everything else asks here.

An op is described once, beside its rule: by traits, by where a product takes its factors, and by how it runs where
torch's own way would round. So nothing else in the house names ops, and a new op is one entry.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Flag, auto
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, fx
from torch._decomp import decomposition_table

Run = Callable[[fx.Node, Any, Any], Any]
"""From a node, its positional and its keyword arguments to what the op gives."""


class Trait(Flag):
    """Something that code elsewhere may ask of an op."""

    SAME = auto()
    """y = x, as long as the dtype can hold it."""
    CASTS = auto()
    """Gives x another dtype."""
    DROPS_OUT = auto()
    """Dropout: in evaluation mode y = x."""
    MOVES = auto()
    """Shows entries of its first operand elsewhere, or several times, and no others."""
    PADS = auto()
    """Puts numbers beside its operand, or, as its mode says, entries of it."""
    RESHAPES = auto()
    """The same entries in row-major order under another shape."""
    REORDERS_AXES = auto()
    ADDS_UNIT_AXES = auto()
    """Adds or drops axes of size one."""
    COPIES = auto()
    """Repeats entries along axes of size one."""
    LIKE = auto()
    """Reads only the shape or the dtype of its second operand."""
    TAKES_ENTRIES = auto()
    """Entries by lists of numbers or masks, one for each axis."""
    PUTS_ENTRIES = auto()
    """Entries replaced by lists of numbers or masks, one for each axis."""
    PUTS_IN_ORDER = auto()
    """Entries replaced, one after the other, where a mask says so."""
    LISTS = auto()
    """With one operand, numbers of the entries that are not zero: one list for each axis."""
    ONE_HOT = auto()
    """Ones at some numbers along a new axis, and zeros elsewhere."""
    GROWS = auto()
    """Does not fall where its first operand grows, if that is nowhere below zero."""
    ADDS_ROWS = auto()
    """Adds entries along an axis to those that have some numbers."""
    ADDS_ENTRIES = auto()
    """Likewise, with a number for each entry."""
    SORTS = auto()
    """Entries in order, and their numbers."""
    COUNTS = auto()
    """How often each whole number is there."""
    CUTS = auto()
    """Runs of entries along an axis."""
    LOOKS_UP = auto()
    """Entries along an axis, by numbers that must not lie outside of it."""
    LOOKS_UP_ROWS = auto()
    """Rows of a table."""
    GATHERS = auto()
    """One number for every entry of the result."""
    CHOOSES_LARGEST = auto()
    """The largest entries along an axis, and their numbers."""
    POINTS_TO_LARGEST = auto()
    """Gives the numbers of the largest entries along an axis, perhaps beside these."""
    JOINS = auto()
    """Operands one behind the other along an axis."""
    STACKS = auto()
    """Operands along a new axis."""
    REPLACES = auto()
    """A run of entries replaced by another operand."""
    ROLLS = auto()
    LINEAR = auto()
    """Linear in what is no constant, by coefficients that can be read off."""
    ADDS = auto()
    SUBTRACTS = auto()
    MULTIPLIES = auto()
    DIVIDES = auto()
    SUMS_PLACES = auto()
    """Where an axis survives, only adds up entries that lie at other places beside it."""
    AVERAGES = auto()
    """Means of entries."""
    RESAMPLES = auto()
    """Means of entries along the axes behind the second, by weights that sum to one."""
    TOTALS = auto()
    """Sums of entries."""
    MEASURES = auto()
    """Lengths: (Σ |x|^p)^(1/p) over entries."""
    FLOORS = auto()
    """y = x, or a number where x is below that."""
    RUNNING_SUM = auto()
    CONTRACTS = auto()
    """The product of two matrices, perhaps in a batch."""
    BATCHED = auto()
    """One matrix for each of a batch."""
    AFFINE = auto()
    """x W + b."""
    NAMES_AXES = auto()
    """Says by letters which axes of its operands and its result run together."""
    OUTPUTS_FIRST = auto()
    """Its weight is [outputs, inputs]."""
    CONVOLVES = auto()
    TRANSPOSED = auto()
    """A convolution that spreads each place over several."""
    NORMALISES = auto()
    """Divides by a length, with an ε."""
    SETS_LENGTHS = auto()
    """Its first operand, made as long along one axis, or as a whole, as the second says."""
    CENTRES = auto()
    """Normalises, and subtracts the mean of, the last axes."""
    ALONG_CHANNELS = auto()
    """Normalises; its gain and its bias lie along the second axis."""
    STORED_STATISTICS = auto()
    """Normalises by a mean and a variance that are stored."""
    SOFTMAX = auto()
    ZERO_WHERE_HIDDEN = auto()
    """Gives zeros, and not NaN, where all that goes in is -inf."""
    KINKED = auto()
    """Linear on either side of zero."""
    LIMITS = auto()
    """y = x between limits, and constant beyond."""
    COMPARES = auto()
    """Whether numbers are larger or smaller than others, or the same."""
    SATURATES = auto()
    """No two numbers give the same, but far from zero the results are rounded to one."""
    OF_POSITIVES = auto()
    """Not a number below zero."""
    SELECTS = auto()
    """One of two values, by a condition."""
    FILLS = auto()
    """A number where a mask says so."""
    LARGER = auto()
    """The larger of two values."""
    EQUAL = auto()
    UNEQUAL = auto()
    ANY = auto()
    """Whether one of several values is true."""
    NAN = auto()
    """Which entries are no numbers."""
    MAKES = auto()
    """Reads nothing of a tensor but its shape and kind; noise is drawn once."""
    DRAWS_PLACES = auto()
    """Draws places of its first operand at random: those where it is not zero."""
    BLANK = auto()
    """Memory that may hold anything."""
    COMPOSITE = auto()
    """Written out, it is made of ops that have rules."""
    AS_PAIRS = auto()
    """Complex numbers as pairs of reals."""
    MUST_FIT = auto()
    """Refuses operands whose shapes or numbers do not go together, which tensors without a device do not check."""
    PASSES_NUMBERS = auto()
    """A number that points to an axis may go through."""


NO_TRAITS = Trait(0)
_CASTS, _PADS, _MOVES = Trait.CASTS.value, Trait.PADS.value, Trait.MOVES.value
Factors = tuple[int, int, int | None]
"""Where a product takes what it reads, what it multiplies it by, and what it adds."""
_Function = Callable[..., Any]
_TRAITS: dict[str, Trait] = {}
_FACTORS: dict[str, Factors] = {}
_RUNS: dict[str, Run] = {}
_WRITTEN_OUT: dict[str, _Function] = {}


def describe(*ops: str, traits: Trait = NO_TRAITS, factors: Factors | None = None) -> None:
    """Say what is known of aten ops, by name, all overloads; several descriptions of one op add up."""
    for op in ops:
        _TRAITS[op] = _TRAITS.get(op, NO_TRAITS) | traits
        if factors is not None:
            _FACTORS[op] = factors


def runs(*ops: str) -> Callable[[Run], Run]:
    """Register how ops run without rounding, and so that torch.func can differentiate them."""

    def register(function: Run) -> Run:
        _RUNS.update(dict.fromkeys(ops, function))
        return function

    return register


def written_out(op: str) -> Callable[[_Function], _Function]:
    """Register what an op is made of; or one overload of it, such as `gru.input`."""

    def register(function: _Function) -> _Function:
        describe(op.partition(".")[0], traits=Trait.COMPOSITE)
        _WRITTEN_OUT[op] = function
        return function

    return register


@cache
def read_families() -> None:
    """Have all families say what they know; they import what is built on this."""
    import_module("hf_align.symmetry.rules")


def traits_of(op: str) -> Trait:
    """All traits of an op; none of one that nobody has described."""
    read_families()
    return _TRAITS.get(op, NO_TRAITS)


def does(node: object, traits: Trait) -> bool:
    """Whether a node calls an op that has one of some traits; one that rounds what it casts has no other."""
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return False
    known = traits_of(op_name(node)).value  # asked a million times for one spec: with whole numbers, half as long
    if known & _CASTS and rounds(node):
        known = _CASTS
    if known & _PADS and _shows_only_its_own(node):
        known |= _MOVES
    return bool(known & traits.value)


def _shows_only_its_own(pad: fx.Node) -> bool:
    """Whether an op that pads puts nothing beside its operand but entries of it."""
    mode = pad.args[2] if len(pad.args) > 2 else pad.kwargs.get("mode", "constant")
    return mode != "constant" or max(pad.args[1], default=0) <= 0  # type: ignore[arg-type]


def rounds(node: fx.Node) -> bool:
    """Whether an op makes of numbers such as have fewer bits than weights are moved with, or whole ones."""
    before, after = (n.meta.get("val") for n in (node.args[0], node) if isinstance(n, fx.Node))
    if not isinstance(before, Tensor) or not isinstance(after, Tensor) or not before.is_floating_point():
        return False
    is_float = after.is_floating_point() or after.is_complex()
    return not is_float or after.dtype.itemsize < min(before.dtype.itemsize, torch.float32.itemsize)


def is_pointwise(node: fx.Node) -> bool:
    """Whether each entry of a result comes from those at its place."""
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


def factors_named(op: str) -> Factors | None:
    """Where an op takes the factors of a product, if it is one."""
    read_families()
    return _FACTORS.get(op)


def factors_of(node: fx.Node) -> Factors | None:
    """As `factors_named`, for the op that a node calls."""
    return factors_named(op_name(node)) if node.op == "call_function" else None


def run_of(node: fx.Node) -> Run | None:
    """How an op runs, if not as torch runs it."""
    read_families()
    return _RUNS.get(op_name(node))


def written_out_as(node: fx.Node) -> _Function:
    """What a composite op is made of: as its family says, else as torch takes it apart."""
    own = made_of(node.target)
    return own if own is not None else decomposition_table[node.target]  # type: ignore[index]


def made_of(op: Any) -> _Function | None:
    """What a family says that an op, or an overload of it, is made of, if it is."""
    read_families()
    name = getattr(op, "_opname", "")
    return _WRITTEN_OUT.get(name) or _WRITTEN_OUT.get(f"{name}.{getattr(op, '_overloadname', '')}")


def op_name(node: fx.Node) -> str:
    """`layer_norm` for `torch.ops.aten.layer_norm.default`; `getitem` for tuple access."""
    target = node.target
    return str(getattr(target, "_opname", getattr(target, "__name__", target)))
