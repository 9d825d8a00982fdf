"""The fit of units that are chosen out of several models, and of the weight that reads them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from hf_align.merging.fits import Fit, missing_to_target, ridge
from hf_align.merging.lockstep import Lockstep, Lookup, WithWeights
from hf_align.merging.readings import Reading, reading
from hf_align.merging.selection import FromGram, FromRows, Given, Units, eliminated, entries_of, put_together
from hf_align.running.network import Network, Weights
from hf_align.runtime.devices import as_double
from hf_align.tracing.program import Program

ROWS_PER_COLUMN = 1
"""Up to so many rows are held themselves, and beyond the products of their columns: these are smaller then."""


class Candidates(Fit):
    """The units of each model, rewritten so that on what the merged model reads they do what they do in their own: the
    least squares to that, drawn to the model's own weights.

    Attributes:
        weights: of the units of each model, by name.
    """

    def __init__(self, units: Units, network: Network, models: Sequence[Weights]) -> None:
        self._writers, self._models = units.writers, models
        self._readings = {reading(w): Reading(w, network, len(models)) for w in units.writers}
        self.weights: list[dict[str, Tensor]] = []
        self.names = units.names
        self.reads = tuple(dict.fromkeys(w.value for w in units.writers))
        self.ahead = ()
        self.looked_up = frozenset(self.reads)
        self.makes_up = False

    def add(self, lookups: Sequence[Lookup], steps: Lockstep, shares: Sequence[float]) -> None:
        for each in self._readings.values():
            each.add(lookups, [1.0] * len(self._models))

    def solved(self) -> dict[str, Tensor]:
        self.weights = [{} for _ in self._models]
        for key, of in self._readings.items():
            ((_, gram),) = of.own
            for own, apart, found in zip(self._models, of.apart, self.weights, strict=True):
                step = ridge(gram, apart)
                for writer in (w for w in self._writers if reading(w) == key):
                    matrix = writer.found_in(own).to(step.device)
                    found |= writer.named(matrix + step @ matrix[:, : writer.inputs])
        self._readings.clear()
        return {}


class Choice(Fit):
    """Units chosen out of the candidates of several models, and the least squares of what reads them.

    It is drawn to the models' weights times their shares; a unit stands for those counterparts that are left out.
    """

    def __init__(self, units: Units, candidates: Candidates, program: Program, network: Network,
                 models: Sequence[Weights], shares: Sequence[float], start: Weights) -> None:  # fmt: skip
        self._units, self._candidates = units, candidates
        self._program = program
        self._gram, self._product = network.gram(), network.gram()
        self._rows: list[tuple[Tensor, Tensor]] = []
        reader, self._models, self._shares = units.reader, models, shares
        self._bias = start[reader.bias].float().cpu() if reader.bias is not None else None
        self.names = units.names
        self.reads = candidates.reads
        self.ahead = (reader.node,)
        self.looked_up = frozenset((*units.given, *(b.value for b in reader.beside)))
        self.makes_up = True

    @cached_property
    def _start(self) -> Tensor:
        """What all units together are read with, [n, m]: made once the fit begins, for it is large."""
        return torch.cat([share * self._read(w) for share, w in zip(self._shares, self._models, strict=True)])

    def _read(self, weights: Weights) -> Tensor:
        """The reader's weight, [n, m]."""
        return self._units.reader.found_in(weights)[0, : self._units.reader.inputs]

    def add(self, lookups: Sequence[Lookup], steps: Lockstep, shares: Sequence[float]) -> None:
        reader, (*models, merged) = self._units.reader, lookups
        like: Tensor = models[0](reader.node)
        weights = [{k: t.to(like) for k, t in found.items()} for found in self._candidates.weights]
        both = [self._units.values(WithWeights(self._program, self._units.of_weights, w, m), merged)
                for m, w in zip(models, weights, strict=True)]  # fmt: skip
        given = torch.cat(both, -1)
        result = given @ self._start.to(given)
        result = result if self._bias is None else result + self._bias.to(result)
        result = result.to(like).reshape(like.shape)
        missing = missing_to_target(reader.node, reader.beside, result, lookups, steps, shares)
        # float64: of units that do the same, hardly more than rounding tells which goes at no cost
        given = as_double(reader.with_ones(given))
        missing = as_double(reader.results(missing)[0])
        if len(given) * len(steps.parts) <= ROWS_PER_COLUMN * given.shape[1]:
            self._rows.append((given, missing))
        else:
            self._gram.add(given, given)
            self._product.add(given, missing)

    @property
    def _given(self) -> Given:
        if not self._rows:
            return FromGram(self._gram.total, self._product.total)
        rows, missing = (torch.cat(each) for each in zip(*self._rows, strict=True))
        return FromRows(rows, missing)

    def solved(self) -> dict[str, Tensor]:
        units, reader, given = self._units, self._units.reader, self._given
        start = self._start.to(given.device)
        if self._bias is not None:
            start = torch.cat([start, torch.zeros_like(start[:1])])
        behind = len(self._start)
        columns = torch.arange(behind).reshape(-1, reader.inputs)[:, units.columns].flatten(0, 1)
        chosen = eliminated(given, start, columns, len(units.columns))
        taken = torch.cat([entries_of(units.columns, columns[chosen]), torch.arange(behind, len(start))])
        full = _standing_for_all(start, columns, chosen, len(units.columns))
        less = start.index_put((taken.to(start.device),), -full[taken], accumulate=True)
        step, _ = given.narrowed(taken, less).solution(taken[:0, None])
        found = (full[taken] + step).float().cpu()
        weights = {n: put_together([w[n] for w in self._candidates.weights], n, units, chosen) for n in units.carried}
        weights[reader.parameter] = reader.stored(found[None, : reader.inputs])
        if reader.bias is not None and self._bias is not None:
            weights[reader.bias] = self._bias + found[-1]
        return weights


def _standing_for_all(start: Tensor, columns: Tensor, chosen: Tensor, count: int) -> Tensor:
    """Coefficients [as `start`] to draw to, once only some units are left: each stands for its counterparts, too."""
    full = start.clone()
    left = torch.zeros(len(columns), dtype=torch.bool)
    left[chosen] = True
    several = left.reshape(-1, count).sum(0)
    for unit in torch.arange(len(columns))[~left & (several > 0).repeat(len(columns) // count)].tolist():
        heirs = torch.arange(unit % count, len(columns), count)
        for heir in heirs[left[heirs]].tolist():
            full[columns[heir]] += start[columns[unit]] / int(several[unit % count])
    return full
