"""Inputs that weights centre and scale: of W (x - μ)/σ + p a map may take σ up, and what is added behind it μ.

So models keep the mean and the deviation of the pixels that they were trained on, channel by channel.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from hf_align.errors import HfAlignError
from hf_align.symmetry.gauges.canonical import Gauge, Get, Slices, along
from hf_align.symmetry.gauges.index_provenance import entries_of, follow, moved, moved_alone, numbered, slices_of
from hf_align.symmetry.interpreter.values import Interpretation, LinearUse
from hf_align.symmetry.rules.patterns import is_sum, pads, used_only_by
from hf_align.tracing.ops import Trait, does


@dataclass(frozen=True)
class Shown:
    """A weight that reads a value along `axis`, and which entry of another weight each of its inputs met before."""

    weight: str
    axis: int
    entries: Slices

    def chosen(self, vector: Tensor) -> Tensor:
        """The entries of a vector that the inputs have met."""
        return torch.cat([vector[start:stop] for start, stop in self.entries])


@dataclass(frozen=True)
class FoldDivisor(Gauge):
    """W diag(1/σ) replaces each W that reads x/σ, and one replaces σ."""

    divisor: str
    reads: tuple[Shown, ...]

    said = "what inputs are divided by, moved into what reads them"
    counts_on_others = False

    @property
    def targets(self) -> tuple[str, ...]:
        return (self.divisor, *(r.weight for r in self.reads))

    def fix(self, name: str, get: Get) -> Tensor:
        divisor = get(self.divisor).flatten()
        if bool((divisor == 0).any()):
            raise HfAlignError(f"{self.divisor} has entries that are exactly zero, and the model divides by them")
        if name == self.divisor:
            return torch.ones_like(get(name))
        (read,) = (r for r in self.reads if r.weight == name)
        return along(get(name), read.axis, 1 / read.chosen(divisor))


@dataclass(frozen=True)
class MoveSubtrahend(Gauge):
    """p - Wμ replaces what is added to W (x - μ), a bias or every row of a table, and zero replaces μ."""

    subtrahend: str
    reads: tuple[tuple[Shown, str], ...]

    said = "what is subtracted from inputs, moved into biases"
    counts_on_others = False

    @property
    def targets(self) -> tuple[str, ...]:
        return (self.subtrahend, *(added for _, added in self.reads))

    def fix(self, name: str, get: Get) -> Tensor:
        if name == self.subtrahend:
            return torch.zeros_like(get(name))
        ((read, _),) = ((r, added) for r, added in self.reads if added == name)
        weight = get(read.weight).movedim(read.axis, 1).flatten(2) if get(read.weight).dim() > 2 else None
        matrix = weight.sum(2) if weight is not None else get(read.weight).movedim(read.axis, 1)
        return get(name) - matrix @ read.chosen(get(self.subtrahend).flatten())


def folded_inputs(found: Interpretation) -> Iterator[FoldDivisor | MoveSubtrahend]:
    """The gauges of all weights that are subtracted from a value, or that divide one, if then it is only read."""
    gains = {gain.parameter for gain in found.gains}
    folded = set[fx.Node]()
    for name, starts in _operands(Trait.DIVIDES, found).items():
        reads = _reads(starts, found, frozenset()) if name not in gains else None
        if reads and used_only_by((name,), starts, found.program):
            folded |= set(starts)
            yield FoldDivisor(name, tuple(dict.fromkeys(shown for shown, _ in reads)))
    for name, starts in _operands(Trait.SUBTRACTS, found).items():
        reads = _reads(starts, found, folded)
        found_behind = [(shown, _added_behind(use, found)) for shown, use in reads or ()]
        behind = [(shown, added) for shown, added in found_behind if added is not None]
        pairs = {(shown, added.name) for shown, added in behind}
        once = len({added for _, added in pairs}) == len(pairs) == len({shown.weight for shown, _ in pairs})
        way = {node for _, added in behind for node in added.nodes}
        apart = used_only_by({added for _, added in pairs}, way, found.program)
        if (
            pairs
            and once
            and apart
            and len(behind) == len(found_behind)
            and used_only_by((name,), starts, found.program)
        ):
            yield MoveSubtrahend(name, tuple(sorted(pairs, key=str)))


@dataclass(frozen=True)
class _Added:
    """What is added to all that a linear map writes in one place, and the nodes on its way there."""

    name: str
    nodes: tuple[fx.Node, ...]


def _operands(trait: Trait, found: Interpretation) -> dict[str, dict[fx.Node, Tensor]]:
    """The weights that are the second operand of such an op, by name, and which of their entries meets each entry of
    the result."""
    operands: dict[str, dict[fx.Node, Tensor]] = defaultdict(dict)
    for node in found.program.graph.nodes:
        if not does(node, trait) or len(node.args) != 2 or node.kwargs:
            continue
        value, views = node.args[0], [node.args[1]]
        while does(views[-1], Trait.MOVES | Trait.SAME) and len(views[-1].all_input_nodes) == 1:
            views += views[-1].all_input_nodes
        name = found.program.parameters.get(views[-1])
        size = views[-1].meta["val"].numel() if name is not None else 0
        if name is not None and size > 1 and isinstance(value, fx.Node) and value not in views:
            labels = {views[-1]: torch.arange(size).reshape(views[-1].meta["val"].shape)}
            for view in views[-2::-1]:
                labels.update(moved(view, labels, found))
            operands[name][node] = torch.broadcast_to(labels[views[0]], node.meta["val"].shape)
    return operands


def _reads(
    starts: Mapping[fx.Node, Tensor], found: Interpretation, ones: Collection[fx.Node]
) -> list[tuple[Shown, LinearUse]] | None:
    """The linear maps that read some values; none if anything else does.

    Args:
        ones: divisions by what is one.
    """
    reads = []
    for use in follow(starts, found, lambda user, _, labels: labels if user in ones else None):
        if (reading := found.reading(use.user, use.value)) is None:
            return None
        rows = use.labels.movedim(reading.out_axis, -1)
        rows = rows.reshape(-1, rows.shape[-1])
        if not bool((rows == rows[:1]).all()) or bool((rows < 0).any()):
            return None
        reads.append((Shown(reading.weight, reading.in_axis, slices_of(rows[0])), reading))
    weights = {shown.weight: shown for shown, _ in reads}
    alike = all(weights[shown.weight] == shown for shown, _ in reads)
    return reads if alike and used_only_by(weights, {use.node for _, use in reads}, found.program) else None


def _added_behind(use: LinearUse, found: Interpretation) -> _Added | None:
    """The bias of a linear map that reads one place, or the table that is added to all that it writes."""
    if len(found.weights[use.weight].axes) > 2 and pads(use.node):
        return None
    if use.bias is not None:
        return _Added(use.bias, (use.node,))
    uses = list(follow({use.node: numbered(use)}, found))
    if len(uses) != 1 or not is_sum(uses[0].user):
        return None
    ((user, value, labels),) = ((u.user, u.value, u.labels) for u in uses)
    (table,) = (a for a in user.all_input_nodes if a is not value)
    way = [user]
    while len(table.all_input_nodes) == 1 and len(table.users) == 1:
        way.append(table)
        (table,) = table.all_input_nodes
    name = found.program.parameters.get(table)
    shown = _channels(table, way[::-1], found) if name is not None else None
    size = found.weights[use.weight].axes[1 - use.in_axis].size
    whole = shown is not None and table.meta["val"].shape[-1] == size
    return _Added(name, tuple(way)) if whole and torch.equal(torch.broadcast_to(shown, labels.shape), labels) else None  # type: ignore[arg-type]


def _channels(table: fx.Node, way: Sequence[fx.Node], found: Interpretation) -> Tensor | None:
    """The channel of a table, its last axis, that each entry of it shows where a way ends in a sum; its places may be
    resampled on it."""
    labels, node = entries_of(table), table
    for user in way[:-1]:
        if does(user, Trait.RESAMPLES):
            first = labels[:, :, *[slice(1)] * (labels.dim() - 2)]
            after = first.expand(user.meta["val"].shape) if bool((labels == first).all()) else None
        else:
            after = moved_alone(user, node, labels, found)
        if after is None:
            return None
        labels, node = after, user
    return labels
