"""Which gauges an architecture has, found in its graph."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx

from hf_align.symmetry.gauges.angle_tables import turned_tables
from hf_align.symmetry.gauges.canonical import Gauge
from hf_align.symmetry.gauges.carried_biases import carried_biases
from hf_align.symmetry.gauges.common_scales import common_scales
from hf_align.symmetry.gauges.constant_queries import read_constants, seen_keys
from hf_align.symmetry.gauges.constants import moved_constants
from hf_align.symmetry.gauges.folds import Carried, FoldIntoWriter, FoldNorm, FoldStatistics
from hf_align.symmetry.gauges.free_scores import free_scores
from hf_align.symmetry.gauges.idle_masks import idle_masks
from hf_align.symmetry.gauges.inputs import folded_inputs
from hf_align.symmetry.gauges.kept_norms import kept_norms, norms_that_stay
from hf_align.symmetry.gauges.kernels import level_kernels
from hf_align.symmetry.gauges.lengths import level_lengths
from hf_align.symmetry.gauges.level_norms import level_norms
from hf_align.symmetry.gauges.linked_gains import linked_gains
from hf_align.symmetry.gauges.masked_readers import masked_readers
from hf_align.symmetry.gauges.mean_moves import moved_means, with_constants
from hf_align.symmetry.gauges.moves import Constant, Stored
from hf_align.symmetry.gauges.narrow_values import narrow_readers
from hf_align.symmetry.gauges.norm_readers import terminal_readings
from hf_align.symmetry.gauges.parts import on_wholes, taken_apart
from hf_align.symmetry.gauges.read_streams import Streams, sheared_streams, shortened_writers
from hf_align.symmetry.gauges.row_means import CentreWriter, centred_rows
from hf_align.symmetry.gauges.shears import shears_along_means
from hf_align.symmetry.gauges.shortened_constants import shortened_constants
from hf_align.symmetry.gauges.spectra import level_spectra
from hf_align.symmetry.interpreter.spaces import Axis, Kind
from hf_align.symmetry.interpreter.values import Gain, Interpretation, LinearUse, Product, Value, aligned, members
from hf_align.symmetry.rules.gains import link_of_gain
from hf_align.symmetry.rules.patterns import (
    centres,
    gives_only_its_shape,
    is_centred,
    scales,
    subtracts_mean,
    used_only_by,
)
from hf_align.tracing.arguments import Arguments
from hf_align.tracing.execute import run_node
from hf_align.tracing.ops import Trait, does, factors_of
from hf_align.tracing.program import Program


@dataclass(frozen=True)
class Folding:
    """A gain that leaves: into what reads its target, or into the weight that writes its source.

    Attributes:
        gains: every use of the one parameter.
        carriers: the weights along the target, when it was still a space of its own, or those that write the source.
        writer: the reading that produces the source, if the gain goes there.
    """

    gains: tuple[Gain, ...]
    carriers: tuple[Carried, ...]
    writer: LinearUse | None = None


def find_gauges(found: Interpretation, folded: list[Folding], between: Collection[Gain]) -> tuple[Gauge, ...]:
    """The gauges of an architecture in the order in which they must be fixed.

    Args:
        between: gains between two streams that could turn without them.
    """
    apart, parts = taken_apart(replace(found, program=replace(found.program, idle=idle_masks(found))))
    return tuple(on_wholes(_find_gauges(apart, folded, between), parts))


def _find_gauges(found: Interpretation, folded: list[Folding], between: Collection[Gain]) -> tuple[Gauge, ...]:
    statistics = (FoldStatistics(s.gain, s.bias, s.mean, s.variance, s.eps) for s in found.statistics)
    gains = tuple(_gains(found, folded))
    gone = {g.gain for g in gains if isinstance(g, FoldIntoWriter) or (isinstance(g, FoldNorm) and g.exclusive)}
    folds = [g for g in gains if isinstance(g, FoldNorm)]
    kept = {
        Constant(r.weight, Stored.READER, r.axis)
        for g in folds
        if g.keeps_constants
        for r in g.reads
        if not (r.bias or r.scaled) and r.before == r.behind == 1 and _is_matrix(r.weight, found)
    }
    scaled = {g.gain for g in folds if g.bias and any(r.scaled for r in g.reads)}
    taken = {g.bias for g in folds if g.exclusive and g.bias}
    still = {g.node for f in folded for g in f.gains if does(g.node, Trait.STORED_STATISTICS)}
    constants = tuple(moved_constants(found, kept, taken, still))
    moved = {g.source.parameter for g in constants}
    zero = {
        g.source.parameter for g in constants if g.entries == ((0, found.weights[g.source.parameter].axes[-1].size),)
    }
    readers = tuple(kept_norms(found, gone, zero))
    norms = norms_that_stay(found, gone, zero)
    ones = {g.node: _multiplied(g, found)[0] for f in folded if f.writer is not None for g in f.gains}
    means = _Means(found, frozenset(ones))
    centred = {r.weight for g in folds if g.centred and g.exclusive for r in g.reads if r.bias or not g.bias}
    narrow = tuple(narrow_readers(found, zero, centred, means.is_lost_by))
    shears = tuple(shears_along_means(found, gone, zero, means.is_lost_by))
    writers = tuple(_centred_writers(found, means))
    streams = Streams(found, means.is_lost_by, ones)
    without_mean = {(w.parameter, w.axis) for w in writers}
    read = tuple(read_constants(found))
    return (
        *statistics,
        *read,
        *folded_inputs(found),
        *gains,
        *linked_gains(found, {f.gains[0].parameter for f in folded}),
        *common_scales(found, {f.gains[0].parameter for f in folded}),
        *(g for g in readers if g.norm_bias is not None),  # these change biases
        *masked_readers(norms_that_stay(found, gone - scaled, zero), found, still),  # and these
        *carried_biases(found, gone, zero, still, means.is_lost_by),  # and these
        *constants,
        *(g for g in readers if g.norm_bias is None),
        *free_scores(norms, found),
        *level_norms(found, gone, zero),
        *narrow,
        *shears,
        *level_spectra(found, between, gone | {g.gain for g in folds}, shears, means.is_lost_by),
        *sheared_streams(streams, {name for g in (*narrow, *shears) for name in g.targets}),
        *writers,
        *centred_rows(found),
        *with_constants(moved_means(found, kept, taken | moved, means.is_lost_by), constants),
        *shortened_constants(found, kept, taken | moved, without_mean),
        *shortened_writers(streams, without_mean),
        *level_kernels(found),
        *level_lengths(found, norms),
        *turned_tables(found),
        *seen_keys(found, read),
    )


def _gains(found: Interpretation, folded: list[Folding]) -> Iterator[Gauge]:
    for folding in folded:
        if folding.writer is not None:
            weight = folding.writer
            yield FoldIntoWriter(folding.gains[0].parameter, weight.weight, 1 - weight.in_axis, weight.bias)
        else:
            yield _norm(found, folding)


def _is_matrix(weight: str, found: Interpretation) -> bool:
    return len(found.weights[weight].axes) == 2


def _norm(found: Interpretation, folding: Folding) -> FoldNorm:
    gain, nodes = folding.gains[0], [g.node for g in folding.gains]
    centred = all(does(n, Trait.CENTRES) or any(is_centred(a) for a in n.all_input_nodes) for n in nodes)
    biases = {_bias_of(n, found) for n in nodes}
    bias = biases.pop()
    readings = [r for node in nodes for r in terminal_readings(node, found)]
    read = [r for r in readings if r is not None]
    names = {name for r in read for name in (r.use.weight, r.use.bias)}
    exclusive = None not in readings and not biases and used_only_by(names, {r.use.node for r in read}, found.program)
    if not all(_is_along_last(g, found) for g in folding.gains):
        exclusive = False
    if len({(r.use.weight, r.before, r.behind) for r in read}) > len({r.use.weight for r in read}):
        exclusive = False
    scaled = {r.use.weight for r in read if r.scaled}
    reads = tuple(dict.fromkeys(r.read(scaled, found) for r in read))
    if bias is not None and not centred and any(r.bias is None for r in reads):
        exclusive = False  # only what is centred leaves a reader room for a constant
    reads = reads if exclusive else ()
    others = tuple(c for c in folding.carriers if c.weight not in (gain.parameter, bias) and not exclusive)
    return FoldNorm(gain.parameter, bias, reads, others, centred, exclusive, gain.offset, link_of_gain(gain))


def _is_along_last(gain: Gain, found: Interpretation) -> bool:
    """Whether what a gain multiplies are vectors along the last axis, as their readers here take them."""
    value = found.values[gain.node]
    axes = (value[0] if isinstance(value, tuple) else value).axes  # some norms give their statistics, too
    return bool(axes) and axes[-1] == gain.target


def _bias_of(node: fx.Node, found: Interpretation) -> str | None:
    """The parameter that a norm adds in the end."""
    bias = Arguments(node).ask("bias", None)
    return found.values[bias].parameter if isinstance(bias, fx.Node) and bias in found.values else None


def writer_of(gains: Sequence[Gain], found: Interpretation) -> LinearUse | None:
    """The one weight that writes what a gain multiplies, wherever it does, if nothing else sees it."""
    writers = [_writer_of(gain, found) for gain in gains]
    first = writers[0]
    if first is None or {(w.weight, w.in_axis, w.bias) for w in writers if w} != {
        (first.weight, first.in_axis, first.bias)
    }:
        return None
    nodes = [w.node for w in writers if w]
    alone = len(nodes) == len(gains) and used_only_by((first.weight, first.bias), nodes, found.program)
    return first if alone else None


def _multiplied(gain: Gain, found: Interpretation) -> list[fx.Node]:
    """What a gain is a factor of: the one operand that is no weight."""
    values = {a: found.values.get(a) for a in gain.node.all_input_nodes}
    return [a for a, value in values.items() if isinstance(value, Value) and value.parameter is None]


def _writer_of(gain: Gain, found: Interpretation) -> LinearUse | None:
    sources = _multiplied(gain, found)
    if len(sources) != 1:
        return None
    node = sources[0]
    while len(node.users) == 1:
        reading = found.linear_uses.get(node)
        if reading is not None:
            is_along = found.values[node].axes[reading.out_axis].root == gain.source.root
            return reading if is_along else None
        if not does(node, Trait.SAME):
            return None
        node = node.all_input_nodes[0]
    return None


def _centred_writers(found: Interpretation, means: _Means) -> Iterator[CentreWriter]:
    for node, name in found.program.parameters.items():
        for i, axis in enumerate(found.weights[name].axes):
            if axis.size > 1 and means.is_lost(node, _parts(axis)):
                yield CentreWriter(name, i)


_Parts = tuple[Kind, tuple[tuple[int, bool], ...]]


def _parts(axis: Axis) -> _Parts:
    """What an axis consists of, in order: spaces, and whether they are dual."""
    return axis.root.space.kind, tuple((a.root.space.serial, a.root.is_dual) for a in axis.atoms)


class _Means:
    """Follows the mean of a value along an axis to where it is subtracted, or seen.

    Attributes:
        ones: products by gains that are one by the time that writers are centred.
    """

    def __init__(self, found: Interpretation, ones: frozenset[fx.Node]) -> None:
        self.found = found
        self.ones = ones
        self.memo: dict[tuple[fx.Node, _Parts], bool] = {}

    def is_lost(self, node: fx.Node, parts: _Parts) -> bool:
        """Whether every use of a node's value is blind to its mean along the axis that consists of these parts."""
        key = (node, parts)
        if key not in self.memo:
            axes = [_axes(v) for v in members(self.found.values.get(node)) if isinstance(v, (Value, Product))]
            at = [i for i, a in enumerate(axes[0]) if _parts(a) == parts] if axes else []
            place = at[0] - len(axes[0]) if len(at) == 1 else 0
            found = bool(node.users) and place < 0
            self.memo[key] = found and all(self._use(u, node, parts, place) for u in node.users)
        return self.memo[key]

    def is_lost_by(self, user: fx.Node, node: fx.Node) -> bool:
        """Whether one use of a value is blind to its mean along the last axis."""
        value = self.found.values.get(node)
        axes = _axes(value) if isinstance(value, (Value, Product)) else ()
        return bool(axes) and self._use(user, node, _parts(axes[-1]), -1)

    def _use(self, user: fx.Node, node: fx.Node, parts: _Parts, place: int) -> bool:
        if _is_blind(user, node, place) or gives_only_its_shape(node, user):
            return True
        if does(user, Trait.CHOOSES_LARGEST):
            along = Arguments(user).ask("dim", -1)
            return along in (place, node.meta["val"].dim() + place) and self._chosen(user, place)
        scaled = user in self.ones or scales(user, node, place)
        passes = scaled or _passes(user, node, place, self.found.program)
        return (passes or _is_chosen_whole(user, node, place, self.found.program)) and self.is_lost(user, parts)

    def _chosen(self, user: fx.Node, place: int) -> bool:
        """The largest entries are the same ones; their own mean must be lost."""
        for child in user.users:
            value = self.found.values[child]
            if child.args[1] == 0 and not self.is_lost(child, _parts(value.axes[place])):
                return False
        return True


def _axes(value: Value | Product) -> tuple[Axis, ...]:
    """The axes of a value; of an open product, those of its wider factor."""
    if isinstance(value, Value):
        return value.axes
    return tuple(y if x.size == 1 else x for x, y in aligned(value.left.axes, value.right.axes))


def _is_blind(user: fx.Node, node: fx.Node, axis: int) -> bool:
    """Whether an op subtracts the mean along an axis (counted from behind), or only computes it for that."""
    if centres(user, node, axis):
        return True
    if does(user, Trait.AVERAGES):
        return axis == -1 and all(subtracts_mean(u) and u.args[1] is user for u in user.users)
    return axis == -1 and subtracts_mean(user)


def _is_chosen_whole(user: fx.Node, node: fx.Node, axis: int, program: Program) -> bool:
    """Whether fixed numbers choose entries along other axes, the same all along this one (counted from behind)."""
    if not does(user, Trait.GATHERS) or user.args[0] is not node:
        return False
    dim, numbers = user.args[1], program.constants.get(user.args[2])  # type: ignore[arg-type]
    at = node.meta["val"].dim() + axis
    if not isinstance(numbers, Tensor) or dim in (axis, at):
        return False
    return bool((numbers == numbers.narrow(axis, 0, 1)).all())


def _has_blocks(convolution: fx.Node) -> bool:
    """Whether each block of outputs reads inputs of its own: what is added to all rows is no constant of the result."""
    value, weight = convolution.all_input_nodes[:2]
    spatial = weight.meta["val"].dim() - 2
    if not does(convolution, Trait.CONVOLVES) or does(convolution, Trait.TRANSPOSED):
        return False
    return bool(weight.meta["val"].shape[1] != value.meta["val"].shape[-1 - spatial])


def _is_put_among_zeros(user: fx.Node, node: fx.Node, program: Program) -> bool:
    """Whether a value is put, by fixed numbers, where all others stay zero."""
    base, numbers, value = user.args[:3]
    blank = program.constants.get(base)  # type: ignore[arg-type]
    fixed = all(n is None or n in program.constants for n in numbers)  # type: ignore[union-attr]
    return value is node and fixed and isinstance(blank, Tensor) and not bool(blank.any())


def _leaves_alike(user: fx.Node, node: fx.Node, axis: int) -> bool:
    """Whether sums of places give the same all along an axis (counted from behind) where they are given that."""
    given = node.meta["val"]
    if user.meta["val"].dim() != given.dim():
        return True
    shape = [*given.shape]
    shape[axis] = 1
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    summed = run_node(user, {node: numbers.expand(given.shape)}.__getitem__)
    return bool(torch.allclose(summed, summed.narrow(axis, 0, 1)))


def _passes(user: fx.Node, node: fx.Node, axis: int, program: Program) -> bool:
    """Whether what an op makes of a value is linear in it and keeps the axis."""
    result = user.meta.get("val")
    if isinstance(result, Tensor) and not result.is_floating_point():  # a cast to integers sees the mean
        return False
    if does(user, Trait.MOVES | Trait.ADDS | Trait.SUBTRACTS | Trait.JOINS | Trait.REPLACES):
        return True
    if does(user, Trait.SUMS_PLACES):
        return all(a is node for a in user.all_input_nodes) and _leaves_alike(user, node, axis)
    if does(user, Trait.LOOKS_UP_ROWS):
        return user.args[0] is node
    if does(user, Trait.PUTS_ENTRIES):
        return _is_put_among_zeros(user, node, program)
    factors = factors_of(user)
    if factors is None:
        return False
    if does(user, Trait.AFFINE | Trait.CONVOLVES):
        return user.args[factors[0]] is not node and not (user.args[factors[1]] is node and _has_blocks(user))
    return factors[2] is None and axis == (-1 if user.args[factors[1]] is node else -2)
