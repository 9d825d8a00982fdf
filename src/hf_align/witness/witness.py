"""The witness: a model before and after it is moved, given the same inputs, and how far its answers change.

Weights are run before the output's dtype rounds them. One model is in memory at a time, and once more what it was moved
to; where that does not fit, weights are read as they are needed, and moved ones are kept in temporary files.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import cast

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from hf_align.checkpoints.ondemand import Computed, OnDemand, Recalled
from hf_align.errors import HfAlignError, first_line
from hf_align.running.network import Network, Weights
from hf_align.running.offload import OffloadedNetwork, network_for
from hf_align.runtime.first_at_home import first_at_home
from hf_align.symmetry.action import Elements
from hf_align.symmetry.alignment import AlignedWeights
from hf_align.symmetry.spec import SymmetrySpec
from hf_align.tracing.build import ELSEWHERE, build_as_loaded, build_without_weights
from hf_align.tracing.measured import LARGEST, lists_of_data, parameters_of
from hf_align.tracing.mode import Mode, extent
from hf_align.witness.as_loaded import dtypes_of_fewer_bits, excess
from hf_align.witness.blame import first_moved, recorded
from hf_align.witness.calls import Case, cases, modes
from hf_align.witness.effort import COPIES, lengths, loads
from hf_align.witness.extremes import of_extreme_tokens
from hf_align.witness.findings import Held, Witness
from hf_align.witness.noise import FAR, MEANINGLESS, Answers, Jittered, bound, calm, changes

_DRAWS = 3
"""Inputs that must all show a change before it is one: where a router is undecided on the first, it is decided on the
next."""
_FEWEST, _LENGTHS = 2, 8
"""Tokens of the shortest input whose words an expert may count, and how many lengths there are from there on."""
_SHORT = 32
"""Tokens up to which rounding is measured in the plainest mode; it hardly depends on either."""


class FunctionChanged(HfAlignError):
    """A model that was moved answers otherwise than before."""


@dataclass(frozen=True)
class Moved:
    """A model, and what it is moved to.

    Attributes:
        called: what messages call it.
        config: its own.
        weights: its own, by name in memory, with the buffers that are stored.
        written: the config that it has then.
        elements: that move it.
        dtype: that it is run in.
        loaded: the dtypes that transformers gives its weights: those they are written in, or fewer bits by its config.
        aligned: what it is moved to, for what is done with it next.
    """

    called: str
    config: PretrainedConfig
    weights: Weights
    written: PretrainedConfig
    spec: SymmetrySpec
    elements: Elements
    dtype: torch.dtype
    loaded: Mapping[str, torch.dtype]
    aligned: Recalled | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """What is run: the weights, and buffers that are stored."""
        return (*self.spec.parameters, *(n for n in self.spec.buffers if n in self.weights))


def hold(moved: Moved, device: torch.device, offload: bool | None = None) -> Held:
    """Run a model before and after it is moved.

    Args:
        device: where it is run.
        offload: whether weights are read as they are needed; None where they do not fit.

    Raises:
        FunctionChanged: it answers otherwise; the message says where.
        HfAlignError: no inputs are known that it answers.
    """
    with tempfile.TemporaryDirectory(prefix="hf-align-") as folder:
        trial = _Trial(moved, device, offload, Path(folder))
        held = trial.held()
        trial.keep()
        return held


def hold_all(models: Sequence[Moved], device: torch.device, offload: bool | None = None) -> Witness:
    """As `hold`, of one model after another; what the first one is moved to stays in memory where it fits, since that
    has taken longest."""
    kinds = {str(dtype).removeprefix("torch.") for moved in models for dtype in moved.loaded.values()}
    held = list[Held]()
    for number, moved in reversed([*enumerate(models)]):
        held.insert(0, hold(moved, device, offload))
        if moved.aligned is not None and number:
            moved.aligned.keep({})
    return Witness(tuple(held), tuple(sorted(kinds)))


class OnDisk(OnDemand):
    """Weights that are made once, and kept in files that the system may take out of memory."""

    def __init__(self, weights: Weights, folder: Path) -> None:
        super().__init__(weights)
        self._weights = weights
        self._folder = folder
        self._made: dict[str, tuple[Path, torch.Size, torch.dtype]] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._made:
            weight = self._weights[name]
            self._made[name] = self._folder / str(len(self._made)), weight.shape, weight.dtype
            self._mapped(name).copy_(weight)
        return self._mapped(name)

    def _mapped(self, name: str) -> Tensor:
        file, shape, dtype = self._made[name]
        return torch.from_file(str(file), shared=True, size=shape.numel(), dtype=dtype).view(shape)


class _Trial:
    """A model before and after, its weights laid out as they are loaded: what is computed with other strides has other
    strides too, and `randn_like` draws in the order of memory."""

    def __init__(self, moved: Moved, device: torch.device, offload: bool | None, folder: Path) -> None:
        self._moved = moved
        self._offloaded = offload
        how = partial(network_for, device=device, offload=offload, copies=COPIES, dtype=moved.dtype)
        as_loaded = partial(build_as_loaded, dtype=moved.dtype)
        self._own = how(moved.config, build=as_loaded)
        self._written = how(moved.written, build=partial(as_loaded, folder=ELSEWHERE))
        self._written_out = how(moved.config, build=build_without_weights)
        self._folder = folder
        self._before = Computed(moved.names, lambda name: moved.weights[name].contiguous())

    @cached_property
    def _after(self) -> Weights:
        """Made once: moving weights takes longer than running them."""
        aligned = self._in_basis(self._moved.elements)
        return OnDisk(aligned, self._folder) if isinstance(self._written, OffloadedNetwork) else dict(aligned)

    def keep(self) -> None:
        """Leave what the model is moved to for what is done with it next, if it is in memory."""
        if self._moved.aligned is not None and isinstance(self._after, dict):
            self._moved.aligned.keep({name: self._after[name] for name in self._moved.spec.parameters})

    def _in_basis(self, elements: Elements) -> Weights:
        spec, weights = self._moved.spec, self._moved.weights
        aligned = AlignedWeights(weights, spec, elements, self._written.device)
        return Computed(self._moved.names, lambda n: (aligned if n in spec.parameters else weights)[n].contiguous())

    def held(self) -> Held:
        """As `hold`."""
        asked, not_run = self._asked()
        if not asked:
            why = next(iter(not_run.values()), "no inputs are known")
            raise HfAlignError(f"{self._moved.called} cannot be run to check that its outputs stay the same: {why} "
                               "(--no-witness skips the check)")  # fmt: skip
        first = next(iter(asked)).mode
        short = {c: answers for c, answers in asked.items() if c.mode is first and (c.length or 0) <= _SHORT}
        noise = torch.cat(list(self._changes(short, self._own, Jittered(self._before)).values()))
        typical = float(noise.median())
        rounding = float(noise[calm(noise, typical)].max())
        if not rounding <= MEANINGLESS:
            raise HfAlignError(f"{self._moved.called} cannot be checked to answer as before: rounding its weights "
                               f"moves outputs by {rounding:.0e} of the largest (--no-witness skips it)")  # fmt: skip
        most = bound(rounding)
        moved = self._changes(asked, self._written, self._after)
        found = {c: self._largest(c, answers, moved[c], first, most) for c, answers in asked.items()}
        for case in [c for c, change in found.items() if change > most]:
            found[case] = self._looked_at_again(case, first, typical, most)
        for dtype in dtypes_of_fewer_bits(self._moved.loaded):
            self._hold_as_loaded(max(short or asked, key=lambda case: case.length or 0), dtype)
        by_mode: dict[str, dict[str, float]] = {}
        for case, change in found.items():
            at = by_mode.setdefault(case.mode.name, {})
            at[str(case.length or "")] = max(change, at.get(str(case.length or ""), 0.0))
        tokens = max((c.forced.shape[1] for c in asked if c.forced is not None), default=0)
        return Held(self._moved.called, max(found.values()), rounding, most, self._rounded(short), by_mode, not_run,
                    tokens, self._rebased(*next(iter((short or asked).items())), most))  # fmt: skip

    def _asked(self) -> tuple[dict[Case, Answers], dict[str, str]]:
        """What the model answers in its modes; and the modes in which it does not, and why."""
        asked: dict[Case, Answers] = {}
        tried: dict[Mode, tuple[Case, Answers]] = {}
        network, spec = self._own, self._moved.spec
        model = cast(PreTrainedModel, network.module(network.placed(self._before)))

        def answers(case: Case) -> Answers:
            with first_at_home(network.device):
                found = case.answers(model, network.device, network.dtype)
            if not found:
                raise ValueError("no output is a floating point tensor")
            tried[case.mode] = case, found
            return found

        def run(mode: Mode, *chosen: tuple[int, ...] | None) -> None:
            for case in chain.from_iterable(cases(mode, each, network.config) for each in chosen):
                try:
                    asked[case] = answers(case)
                except Exception as error:  # models refuse arguments in as many ways as there are models
                    not_run[mode.name] = f"{type(error).__name__}: {first_line(error)}"

        found, not_run = modes(model, spec.modes, answers, spec.given)
        at = lengths(network.config, spec)
        for mode in found:
            if mode in tried:
                case, answer = tried[mode]
                asked[case] = answer
                asked.update(self._one_token_less(mode, answers))
                continue
            run(mode, *((None, at) if mode.goes_on else (at,) if mode is found[0] else (None,)))
            if not asked:  # it reads texts of no other length than its own
                run(mode, None)
        for mode in chain.from_iterable(of_extreme_tokens(mode, model, self._before) for mode in found[:1]):
            run(mode, None)
        for case in self._of_every_load(found[:1], model):
            with suppress(Exception):
                asked[case] = answers(case)
        ran = {case.mode.name for case in asked}  # at some length, if not at each that was asked for
        return asked, {name: why for name, why in not_run.items() if name not in ran}

    def _of_every_load(self, plainest: Sequence[Mode], model: PreTrainedModel) -> Iterator[Case]:
        """Short inputs of many lengths for a model that lists what its data chooses, as the words of an expert.

        What it does with one number of words shows with no other, and the runs that looked for it were those of a
        narrower copy, where a model is large.
        """
        if parameters_of(model) <= LARGEST:
            return
        for mode in plainest:
            for seed in range(1, 1 + loads(self._moved.spec)):
                case = next(cases(mode, (_FEWEST + seed % _LENGTHS,), self._moved.config, seed))
                if seed == 1 and not lists_of_data(partial(case.answers_of, self._own, self._before)):
                    return
                yield case

    def _one_token_less(self, mode: Mode, answers: Callable[[Case], Answers]) -> dict[Case, Answers]:
        """A mode at an even length too, if its own is odd: code may depend on its arguments and on how many there are.
        Some calls cannot be cut."""
        found: dict[Case, Answers] = {}
        if mode.sized:
            return found
        fewer = extent(mode.example)[1] - 1
        with suppress(Exception):
            for case in cases(mode, (fewer,), self._moved.config) if fewer else ():
                found[case] = answers(case)
        return found

    def _changes(self, before: Mapping[Case, Answers], network: Network, weights: Weights) -> dict[Case, Tensor]:
        """How far answers move with other weights, by row."""
        model = network.module(network.placed(weights))
        return {case: changes(answers, case.answers(model, network.device, network.dtype))
                for case, answers in before.items()}  # fmt: skip

    def _largest(self, case: Case, answers: Answers, change: Tensor, plain: Mode, most: float) -> float:
        """The largest change in the rows that the model decides."""
        largest = float(change.max())
        decided = change if largest <= most else change[self._decided(case, answers, plain, most)]
        return max(decided.tolist(), default=0.0)

    def _decided(self, case: Case, answers: Answers, plain: Mode, most: float) -> Tensor:
        """Which rows of answers the model decides, and not how attention is computed; [rows], bool.

        A token that may look at no other, as in front of a text that is padded on the left, gets zero where attention
        is one product, and the mean of all values where it is written out. What depends on it is no answer, but for
        tokens that are shown: a recurrence hands on what stands in front. All rows count where none would be left, but
        for what is asked for besides: a text may be padded where it is read, and written-out attention refuse a mask.
        """
        every = torch.ones(len(changes(answers, answers)), dtype=torch.bool)
        if case.mode is plain:
            return every
        try:
            alike = changes(answers, case.answers_of(self._written_out, self._before)) <= most
        except Exception:  # some models have one way to compute attention
            return ~every if case.mode.asks and self._runs_written_out(plain) else every
        decided = alike | case.shown(answers)
        return decided if case.mode.asks or bool(decided.any()) else every

    def _runs_written_out(self, mode: Mode) -> bool:
        """Whether the model can be run with attention written out."""
        with suppress(Exception):
            return bool(next(cases(mode, None, self._moved.config)).answers_of(self._written_out, self._before))
        return False

    def _looked_at_again(self, case: Case, plain: Mode, typical: float, most: float) -> float:
        """A change that is too large, on more inputs; rows that rounding moves far by itself are left out.

        Raises:
            FunctionChanged: it is too large on more than half of them.
        """
        moved, passed, failed = self._moved, list[float](), list[float]()
        asked = None if case.asked is None else (case.asked,)
        draws = (case.seed,) if case.seed else range(_DRAWS)
        for draw in draws:
            drawn = next(cases(case.mode, asked, moved.config, seed=draw))
            before = {drawn: drawn.answers_of(self._own, self._before)}
            both = [self._changes(before, self._own, Jittered(self._before, far)) for far in (FAR, -FAR)]
            noise = torch.maximum(*(rows[drawn] / FAR for rows in both))
            change = self._changes(before, self._written, self._after)[drawn]
            decided = self._decided(drawn, before[drawn], plain, most)
            noise, change = (rows[decided] if decided.any() else rows for rows in (noise, change))
            still = calm(noise, typical)
            if not bool(still.any()):  # then it may be no more than rounding makes of it
                still, most = torch.ones_like(still), float(noise.max()) * FAR
            largest = float(change[still].max())
            most = max(most, bound(float(noise[still].max())))
            (passed if largest <= most < torch.inf else failed).append(largest)
            if len(failed) > len(draws) / 2:
                raise self._changed(drawn, max(failed), most)
        return max(passed)

    def _changed(self, case: Case, change: float, most: float) -> FunctionChanged:
        """The refusal, which names the first module whose output moves otherwise than its basis."""
        moved = self._moved
        tolerance = math.sqrt(change * most) if change < torch.inf else most
        outputs, answers = [], []
        for weights in (self._in_basis({}), self._after):
            model = self._written.module(self._written.placed(weights))
            with recorded(model) as found:
                answers.append(case.answers(model, self._written.device, moved.dtype))
            outputs.append(found)
        own = case.answers_of(self._own, self._before)
        nudged = float(self._changes({case: own}, self._own, Jittered(self._before, alike=True))[case].max())
        tie = "" if nudged <= tolerance else (
            f"; {moved.called} itself is undecided (moving its weights by 1e-7 changes them by {nudged:.0e}), as where "
            "experts score alike and their order decides")  # fmt: skip
        if float(changes(own, answers[0]).max()) > tolerance:
            where = "before any basis is changed (by a gauge, or the config that is written)"
        else:
            module = first_moved(outputs[0], outputs[1], moved.spec, moved.elements, tolerance)
            where = f"from {module} on" if module else "in no module with weights"
        return FunctionChanged(
            f"aligned {moved.called} is not {moved.called}: with {case.described} its outputs change by {change:.1e} "
            f"of the largest (rounding explains {most:.0e}), {where}{tie}; nothing is written"
        )

    def _hold_as_loaded(self, case: Case, dtype: torch.dtype) -> None:
        """Ask both once more in a dtype of fewer bits.

        Raises:
            FunctionChanged: they answer otherwise there, and in numbers if it is not what weights are loaded in.
        """
        moved = self._moved
        own, written = (network_for(config, self._own.device, self._offloaded, copies=COPIES, dtype=dtype,
                                    build=partial(build_as_loaded, dtype=dtype))
                        for config in (moved.config, moved.written))  # fmt: skip
        asked, found = None if case.asked is None else (case.asked,), list[tuple[float, float]]()
        with suppress(Exception):  # not every model runs in every dtype on every device
            for draw in range(_DRAWS):
                drawn = next(cases(case.mode, asked, moved.config, draw))
                change, most = excess(drawn, (own, written), self._before, self._after)
                if change <= most or not (math.isfinite(change) or dtype in moved.loaded.values()):
                    return
                found.append((change, most))
        if found:
            change, most = max(found)
            raise FunctionChanged(
                f"aligned {moved.called} is not {moved.called}: loaded as {str(dtype).removeprefix('torch.')}, with "
                f"{case.described} half of its outputs change by {change:.1e} of the largest or more (rounding "
                f"explains {most:.0e}), while in {str(moved.dtype).removeprefix('torch.')} they do not; nothing is "
                "written"
            )

    def _rebased(self, case: Case, answers: Answers, most: float) -> tuple[str, ...]:
        """What is returned beside answers, and changes."""

        def beside(network: Network, weights: Weights) -> Answers:
            model = network.module(network.placed(weights))
            found = case.returned(model, network.device, network.dtype)
            return {name: t for name, t in found.items() if name not in answers}

        if not (before := beside(self._own, self._before)):
            return ()
        after = beside(self._written, self._after)
        return tuple(n for n in before if n in after and float(changes({n: before[n]}, {n: after[n]}).max()) > most)

    def _rounded(self, short: Mapping[Case, Answers]) -> float | None:
        """The change with weights as they are loaded, on short inputs; None where that rounds none."""
        moved = self._moved
        if all(dtype == moved.dtype for dtype in moved.loaded.values()):
            return None
        weights = Computed(moved.names, lambda n: self._after[n].to(moved.loaded.get(n)))
        return max(float(rows.max()) for rows in self._changes(short, self._written, weights).values())
