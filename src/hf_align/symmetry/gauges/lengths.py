"""Lengths that are divided out: of v = Wx + b only v/|v| is seen, so that W and b have a factor that nothing sees.

So it is with queries and keys of which a model takes the cosine, with what attention mixes before it is normalised, and
with projections into a space in which texts are held against images. And so it is with weights that are stored as a
direction and a length (Salimans and Kingma, arXiv 1602.07868, equation 2).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from hf_align.symmetry.gauges.canonical import Gauge, Get, Shape, Slices, along, root_mean_squares
from hf_align.symmetry.gauges.degrees import cancels, drawn_powers, sliced_along
from hf_align.symmetry.gauges.index_provenance import only_moves, rows_shown, slices_of
from hf_align.symmetry.gauges.kept_norms import KeptNorm
from hf_align.symmetry.interpreter.values import Interpretation, LinearUse
from hf_align.symmetry.rules.links import is_length_of
from hf_align.tracing.ops import Trait, does, factors_of

_SHORT = 1e-6
"""What shorter rows write may be below the floor that a model puts under lengths."""
_SUMS = Trait.AVERAGES | Trait.TOTALS | Trait.MULTIPLIES | Trait.DIVIDES
"""What a mean of vectors is made with, of all or of those that a mask leaves."""
_STEPS = 8
"""Products between what a weight writes and where its length is divided out, at most."""


@dataclass(frozen=True)
class LevelLength(Gauge):
    """W/l and b/l replace some rows of W and of b, for l² the mean square of these; nothing sees their length.

    Rows that are nearly zero stay.

    Attributes:
        axis: along which W writes.
        rows: each set of rows that has a length of its own.
    """

    weight: str
    axis: int
    bias: str | None
    rows: tuple[Slices, ...]

    said = "made as long as nothing that reads it can tell"
    counts_on_others = False

    @property
    def targets(self) -> tuple[str, ...]:
        return (self.weight, self.bias) if self.bias is not None else (self.weight,)

    def seen_sizes(self, shape: Shape) -> Collection[int]:
        return {shape(self.weight)[self.axis]}

    def fix(self, name: str, get: Get) -> Tensor:
        weight = get(self.weight).double().movedim(self.axis, 0)
        weight = weight.reshape(len(weight), -1)
        every = weight if self.bias is None else torch.cat([weight, get(self.bias).double()[:, None]], 1)
        factors = torch.ones_like(every[:, 0])
        for slices in self.rows:
            rows = torch.cat([torch.arange(start, stop, device=every.device) for start, stop in slices])
            chosen = every[rows]
            if bool(chosen.detach().abs().max() > _SHORT):
                factors = factors.index_copy(0, rows, (1 / root_mean_squares(chosen.reshape(1, -1))).expand(len(rows)))
        return along(get(name).double(), self.axis if name == self.weight else 0, factors).to(get(name).dtype)


@dataclass(frozen=True)
class LevelDirection(Gauge):
    """v/l replaces each slice of v, which is made as long as another weight says before anything reads it.

    Attributes:
        axis: along which the slices lie; None if all of v is one.
    """

    weight: str
    axis: int | None

    said = "made as long as nothing that reads it can tell"
    counts_on_others = False

    @property
    def targets(self) -> tuple[str, ...]:
        return (self.weight,)

    def seen_sizes(self, shape: Shape) -> Collection[int]:
        return ()

    def fix(self, name: str, get: Get) -> Tensor:
        weight = get(name)
        slices = weight.reshape(1, -1) if self.axis is None else weight.movedim(self.axis, 0)
        lengths = root_mean_squares(slices)
        return along(weight.double(), self.axis or 0, 1 / torch.where(lengths > 0, lengths, 1.0)).to(weight.dtype)


def level_lengths(found: Interpretation, norms: Mapping[fx.Node, KeptNorm]) -> Iterator[Gauge]:
    """The gauges of all that is divided by its own length, as far as one weight writes it, or a norm.

    Args:
        norms: those whose gain stays, by what they write.
    """
    yield from _directions(found)
    done = set[str]()
    for value in _normalised(found):
        for gauge in (*_of_maps(value, found), *_of_norms(value, found, norms)):
            if done.isdisjoint(gauge.targets) and _has_lengths_of_its_own(gauge, found):
                done |= set(gauge.targets)
                yield gauge


def _of_maps(value: fx.Node, found: Interpretation) -> Iterator[LevelLength]:
    for use, rows in _writers(value, found, _STEPS):
        for apart in (rows, [torch.cat(rows).sort().values])[: len(rows)]:
            yield LevelLength(use.weight, 1 - use.in_axis, use.bias, tuple(map(slices_of, apart)))


def _of_norms(value: fx.Node, found: Interpretation, norms: Mapping[fx.Node, KeptNorm]) -> Iterator[LevelLength]:
    """A norm of which a value shows vectors, or sums and means of them."""
    while value not in norms and (only_moves(value, value.all_input_nodes[:1], found) or does(value, _SUMS)):
        value = value.all_input_nodes[0]
    norm = norms.get(value)
    if norm is not None and not norm.offset:
        yield LevelLength(norm.gain, 0, norm.bias, (((0, found.program.shapes[norm.gain][0]),),))


def _directions(found: Interpretation) -> Iterator[LevelDirection]:
    """Weights that are stored as directions, if no output changes with any of their lengths."""
    done = set[str]()
    for node in found.program.graph.nodes:
        weight = found.program.parameters.get(node.args[0]) if does(node, Trait.SETS_LENGTHS) else None
        if weight is not None and weight not in done:
            axis, shape = sliced_along(node), node.args[0].meta["val"].shape
            powers = 2 * drawn_powers(1 if axis is None else shape[axis])
            if _are_unseen({weight: (axis or 0, powers)}, found):
                done.add(weight)
                yield LevelDirection(weight, axis)


def _normalised(found: Interpretation) -> Iterator[fx.Node]:
    """Values that are divided by their lengths; nothing that a call takes none of."""
    for node in found.program.graph.nodes:
        if not does(node, Trait.DIVIDES | Trait.MULTIPLIES) or len(node.args) != 2 or node.kwargs:
            continue
        value, other = node.args
        for one, length in ((value, other), (other, value))[: 2 if does(node, Trait.MULTIPLIES) else 1]:
            has_entries = isinstance(one, fx.Node) and one.meta["val"].numel() > 0
            if has_entries and one is not length and is_length_of(length, one):
                yield one


def _writers(value: fx.Node, found: Interpretation, steps: int) -> Iterator[tuple[LinearUse, list[Tensor]]]:
    """The weights of which a factor would be one of the value, and which of their rows it shows together."""
    written = rows_shown(value, found)
    if written is not None:
        use, shown = written
        yield use, _together(shown.movedim(use.out_axis, -1) if value is use.node else shown)
        return
    node = value
    while only_moves(node, node.all_input_nodes[:1], found):
        node = node.all_input_nodes[0]
    if steps and does(node, Trait.CONTRACTS | Trait.MULTIPLIES | Trait.DIVIDES):
        factors = factors_of(node)
        operands = [node.args[i] for i in factors[:2]] if factors is not None else node.args[:2]
        for operand in operands[:1] if does(node, Trait.DIVIDES) else operands:
            if isinstance(operand, fx.Node) and operand not in found.program.constants:
                yield from _writers(operand, found, steps - 1)


def _together(labels: Tensor) -> list[Tensor]:
    """Rows that lie side by side along the last axis somewhere, as sets that do not meet."""
    sets: list[set[int]] = []
    rows = labels.reshape(-1, labels.shape[-1] if labels.dim() else 1)
    for row in torch.unique(rows, dim=0).tolist():
        met = [s for s in sets if not s.isdisjoint(row)]
        sets = [s for s in sets if s not in met] + [set(row).union(*met)]
    return [torch.tensor(sorted(s)) for s in sorted(sets, key=min)]


def _has_lengths_of_its_own(gauge: LevelLength, found: Interpretation) -> bool:
    """Whether no output changes with any of the lengths that a gauge fixes."""
    shape = next(n.meta["val"].shape for n, name in found.program.parameters.items() if name == gauge.weight)
    powers = torch.zeros(shape[gauge.axis], dtype=torch.long)
    for slices, power in zip(gauge.rows, (2 * drawn_powers(len(gauge.rows))).tolist(), strict=True):
        for start, stop in slices:
            powers[start:stop] = power
    return _are_unseen({name: (gauge.axis if name == gauge.weight else 0, powers) for name in gauge.targets}, found)


def _are_unseen(powers: Mapping[str, tuple[int, Tensor]], found: Interpretation) -> bool:
    """Whether no output changes if weights, by name, are multiplied along an axis by powers that are drawn."""
    starts = {}
    for node, name in found.program.parameters.items():
        if name in powers:
            starts[node] = along(torch.ones(node.meta["val"].shape, dtype=torch.long), *powers[name])
    return cancels(starts, found)
