"""Norms that are read along another axis, as by a map from places to places: one scale and one constant are free.

Every output of such a reader W is of one channel c, W (γ_c n_c + β_c 1) + b. So γ and β may be divided by a number that
W is multiplied by, and what all of β have in common goes into b.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from torch import Tensor, fx

from hf_align.symmetry.gauges.canonical import Gauge, Get, Shape
from hf_align.symmetry.gauges.folds import Read
from hf_align.symmetry.gauges.index_provenance import NOBODY, entries_of, follow
from hf_align.symmetry.gauges.kept_norms import KeptNorm, norms_that_stay
from hf_align.symmetry.interpreter.values import Interpretation, LinearUse
from hf_align.symmetry.rules.patterns import used_only_by


@dataclass(frozen=True)
class LevelNorm(Gauge):
    """γ/l and (β - m)/l replace γ and β, lW replaces W, and b + mW1 replaces b, for what reads W (γ_c n_c + β_c 1) + b.

    l is the root mean square of γ. m is the mean of β, or zero where some W has no bias.

    Attributes:
        levelled: β, if its mean goes.
        bias: β.
    """

    gain: str
    levelled: str | None
    bias: str | None
    offset: float
    reads: tuple[Read, ...]

    said = "a scale and a constant of a norm that is read along places, moved into what reads it"
    counts_on_others = False

    @property
    def targets(self) -> tuple[str, ...]:
        taken = [r.bias for r in self.reads if r.bias is not None and self.levelled is not None]
        norm = (self.gain, self.bias) if self.bias is not None else (self.gain,)
        return (*norm, *(r.weight for r in self.reads), *taken)

    def seen_sizes(self, shape: Shape) -> Collection[int]:
        return {shape(self.gain)[-1]}

    def fix(self, name: str, get: Get) -> Tensor:
        gain = get(self.gain) + self.offset
        length = gain.square().mean().sqrt()
        if not bool(length):
            return get(name)
        if name == self.gain:
            return gain / length - self.offset
        mean = get(self.levelled).mean() if self.levelled is not None else 0.0
        if name == self.bias:
            return (get(name) - mean) / length
        for read in self.reads:
            if name == read.weight:
                return get(name) * length
            if name == read.bias:
                return get(name) + mean * get(read.weight).sum(read.axis)
        raise KeyError(name)


def level_norms(found: Interpretation, gone: Collection[str], zero: Collection[str]) -> Iterator[LevelNorm]:
    """The gauges of norms that are read in no other way; the arguments as for `kept_norms`."""
    places: dict[KeptNorm, set[fx.Node]] = defaultdict(set)
    for node, norm in norms_that_stay(found, gone, zero).items():
        places[norm].add(node)
    for norm, nodes in places.items():
        readings = _read_along_places(nodes, found)
        if not readings or not used_only_by((norm.gain, norm.bias), nodes, found.program):
            continue
        reads = tuple(dict.fromkeys(Read(r.weight, r.in_axis, r.bias) for r in readings))
        weights, biases = [r.weight for r in reads], [r.bias for r in reads if r.bias is not None]
        at = {r.node for r in readings}
        apart = len({*weights, *biases}) == len(weights) + len(biases)
        if apart and used_only_by((*weights, *biases), at, found.program):
            yield LevelNorm(norm.gain, norm.bias if len(biases) == len(reads) else None, norm.bias, norm.offset, reads)


def _read_along_places(nodes: Collection[fx.Node], found: Interpretation) -> list[LinearUse]:
    """The linear maps of what a norm writes, if all of them read one channel at a time and nothing else reads it."""
    readings = []
    for use in follow({node: entries_of(node) for node in nodes}, found):
        reading = found.reading_by_matrix(use.user, use.value)
        if reading is None or NOBODY in use.labels or not bool((use.labels == use.labels[..., :1]).all()):
            return []
        readings.append(reading)
    return readings
