"""Convolutions of single channels: what writes a channel has a factor that its kernel may take back.

A group moves such factors where each goes with a unit. Heads whose units are exchanged together have one for each unit
of each head, and those are fixed here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from hf_align.symmetry.gauges.canonical import Gauge, Get, along, root_mean_squares
from hf_align.symmetry.gauges.degrees import cancels, drawn_powers
from hf_align.symmetry.gauges.index_provenance import NOBODY, follow, numbered
from hf_align.symmetry.interpreter.values import Interpretation, LinearUse
from hf_align.tracing.arguments import Arguments
from hf_align.tracing.ops import Trait, does

_Rows = tuple[int, ...]
"""For each channel, the row that writes it, or nobody's."""


@dataclass(frozen=True)
class ChannelWriter:
    """A weight of which some rows write channels, along `axis`."""

    weight: str
    axis: int
    bias: str | None
    rows: _Rows

    def shown(self, by_row: Tensor) -> Tensor:
        """From a number for each row to one for each channel; zero where no row writes it."""
        rows = torch.tensor(self.rows, device=by_row.device)
        return torch.where(rows != NOBODY, by_row[rows.clamp_min(0)], 0.0)

    def spread(self, by_channel: Tensor, count: int) -> Tensor:
        """From a number for each channel to one for each of so many rows; one where a row writes none."""
        rows = torch.tensor(self.rows, device=by_channel.device)
        written = rows != NOBODY
        return by_channel.new_ones(count).index_copy(0, rows[written], by_channel[written])


@dataclass(frozen=True)
class LevelKernels(Gauge):
    """K/l replaces the kernel K of each channel, and lw the row w that writes it, so that both have one mean square.

    Channels of which either is zero stay.
    """

    kernel: str
    writers: tuple[ChannelWriter, ...]

    said = "kernels of single channels, made as large as what writes these"
    counts_on_others = False

    @property
    def targets(self) -> tuple[str, ...]:
        return (self.kernel, *(n for w in self.writers for n in (w.weight, w.bias) if n is not None))

    def fix(self, name: str, get: Get) -> Tensor:
        kernels = root_mean_squares(get(self.kernel))
        rows = torch.zeros_like(kernels)
        for writer in self.writers:
            rows = rows + writer.shown(root_mean_squares(get(writer.weight).movedim(writer.axis, 0)))
        level = (kernels > 0) & (rows > 0)
        lengths = torch.where(level, kernels, 1.0).sqrt() / torch.where(level, rows, 1.0).sqrt()
        if name == self.kernel:
            return along(get(name).double(), 0, 1 / lengths).to(get(name).dtype)
        (writer,) = (w for w in self.writers if name in (w.weight, w.bias))
        axis = writer.axis if name == writer.weight else 0
        return along(get(name).double(), axis, writer.spread(lengths, get(name).shape[axis])).to(get(name).dtype)


def _written(writers: tuple[ChannelWriter, ...]) -> list[bool]:
    return [any(row != NOBODY for row in rows) for rows in zip(*(w.rows for w in writers), strict=True)]


def level_kernels(found: Interpretation) -> Iterator[LevelKernels]:
    """The gauges of all convolutions whose every output is of one channel, as far as linear maps write these."""
    kernels: dict[str, set[fx.Node]] = defaultdict(set)
    for node in found.program.graph.nodes:
        if (name := _kernel(node, found)) is not None:
            kernels[name].add(node)
    for name, nodes in kernels.items():
        writers = _writers(nodes, found)
        weights = [n for w in writers or () for n in (w.weight, w.bias) if n is not None]
        if writers and len({name, *weights}) == len(weights) + 1:
            gauge = LevelKernels(name, tuple(writers))
            if _is_unseen(gauge, found):
                yield gauge


def _kernel(node: fx.Node, found: Interpretation) -> str | None:
    """The weight of a convolution of single channels."""
    if not does(node, Trait.CONVOLVES) or does(node, Trait.TRANSPOSED):
        return None
    kernel = weight = node.all_input_nodes[1]
    while does(weight, Trait.MOVES) and len(weight.all_input_nodes) == 1:
        (weight,) = weight.all_input_nodes
    name = found.program.parameters.get(weight)
    if name is None or (shape := found.program.shapes[name]) != kernel.meta["val"].shape:
        return None
    alone = shape[1] == 1 and Arguments(node).ask("groups", 1) == shape[0]
    return name if alone else None


def _writers(nodes: set[fx.Node], found: Interpretation) -> list[ChannelWriter] | None:
    """The weights of all that such convolutions read; none if two uses of one do not agree."""
    written: dict[tuple[str, int, str | None], _Rows] = {}
    for use in found.linear_uses.values():
        if len(found.weights[use.weight].axes) != 2:
            continue
        for rows in _rows(use, nodes, found):
            key = (use.weight, 1 - use.in_axis, use.bias)
            if written.setdefault(key, rows) != rows:
                return None
    writers = [ChannelWriter(*key, rows) for key, rows in written.items()]
    met = [sum(row != NOBODY for row in rows) for rows in zip(*written.values(), strict=True)]
    own = all(len(kept) == len(set(kept)) for kept in ([r for r in w.rows if r != NOBODY] for w in writers))
    return writers if own and set(met) <= {0, 1} else None


def _rows(use: LinearUse, nodes: set[fx.Node], found: Interpretation) -> Iterator[_Rows]:
    """Which row of a weight writes each channel of what such convolutions read of one result."""
    for reading in follow({use.node: numbered(use)}, found):
        if reading.user in nodes and reading.user.args[0] is reading.value:
            spatial = reading.user.args[1].meta["val"].dim() - 2  # type: ignore[union-attr]
            by_channel = reading.labels.movedim(-1 - spatial, 0).flatten(1)
            yield tuple(by_channel.amax(1).tolist())


def _is_unseen(gauge: LevelKernels, found: Interpretation) -> bool:
    """Whether no output changes with any of the lengths, followed as powers that are drawn."""
    written = torch.tensor(_written(gauge.writers))
    drawn = drawn_powers(len(written)) * written
    starts = {}
    for node, name in found.program.parameters.items():
        shape = node.meta["val"].shape
        if name == gauge.kernel:
            starts[node] = along(torch.ones(shape, dtype=torch.long), 0, -drawn)
        for writer in gauge.writers:
            if name in (writer.weight, writer.bias):
                axis = writer.axis if name == writer.weight else 0
                powers = writer.spread(drawn + 1, shape[axis]) - 1
                starts[node] = along(torch.ones(shape, dtype=torch.long), axis, powers)
    return cancels(starts, found)
