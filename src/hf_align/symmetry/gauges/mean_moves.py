"""Means of constants that norms along a stream lose, but that linear maps behind it see: as of a classifier that reads
the stream as it is."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

from torch import Tensor, fx

from hf_align.symmetry.gauges.canonical import Gauge
from hf_align.symmetry.gauges.constant_sources import Starts, sources
from hf_align.symmetry.gauges.constants import passed_on
from hf_align.symmetry.gauges.index_provenance import LosesMean, follow, in_order, row_of
from hf_align.symmetry.gauges.moves import Constant, MoveConstant, MoveMean, Taken
from hf_align.symmetry.interpreter.values import Interpretation
from hf_align.symmetry.rules.patterns import used_only_by


def moved_means(
    found: Interpretation,
    kept: Collection[Constant],
    gone: Collection[str],
    loses_mean: LosesMean,
) -> Iterator[MoveMean]:
    """The gauges of all such constants.

    Args:
        kept: as for `moved_constants`.
        gone: biases of norms whose readers have taken them up, and constants that move as a whole.
    """
    for source, starts in sources(found, kept, gone):
        taken = _taken(starts, found, loses_mean)
        if taken and source.parameter not in (gauge := MoveMean(source, taken)).given:
            yield gauge


def with_constants(mean_moves: Iterable[MoveMean], constants: Sequence[MoveConstant]) -> Iterator[Gauge]:
    """Moves of means, and once more those of constants that have taken one up since: a softmax loses the bias of keys.

    Constants that go into the source of a mean move before it does.
    """
    changed = set[str]()
    for gauge in mean_moves:
        giving = [i for i, c in enumerate(constants) if gauge.source.parameter in c.given]
        yield from _again(constants[: max(giving, default=-1) + 1], changed)
        yield gauge
        changed |= gauge.given
    yield from _again(constants, changed)


def _again(constants: Iterable[MoveConstant], changed: set[str]) -> Iterator[MoveConstant]:
    """Those of which a source has changed; they change others in turn."""
    for gauge in constants:
        sources = {c.parameter for c in (gauge.source, *gauge.alike)}
        if not changed.isdisjoint(sources):
            changed -= sources
            changed |= gauge.given
            yield gauge


def _taken(starts: Starts, found: Interpretation, loses_mean: LosesMean) -> tuple[Taken, ...] | None:
    """The biases of all that reads a constant, if nothing else sees its mean."""

    def is_lost(user: fx.Node, value: fx.Node, labels: Tensor) -> bool:
        return in_order(labels) and loses_mean(user, value)

    def goes_on(user: fx.Node, value: fx.Node, labels: Tensor) -> Tensor | None:
        return None if is_lost(user, value, labels) else passed_on(found.program, user, value, labels)

    readers: dict[Taken, set[fx.Node]] = {}
    for use in follow(starts, found, goes_on):
        if (reading := found.reading(use.user, use.value)) is not None:
            whole = ((0, found.weights[reading.weight].axes[reading.in_axis].size),)
            if reading.bias is None or row_of(reading, use.labels, found) != whole:
                return None
            taken = Taken(reading.bias, (), reading.weight, reading.in_axis, whole)
            readers.setdefault(taken, set()).add(reading.node)
        elif not is_lost(use.user, use.value, use.labels):
            return None
    once = len({t.bias for t in readers}) == len(readers)
    alone = all(used_only_by((taken.bias,), nodes, found.program) for taken, nodes in readers.items())
    return tuple(readers) if once and alone else None
