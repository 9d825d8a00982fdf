"""Fine-tunes carried to another base, with live models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from hf_align.api.align import align, moved_of
from hf_align.api.alignment import Alignment
from hf_align.api.examples import Data, called_with, examples
from hf_align.api.given import Given, Kind, Model
from hf_align.api.module_data import reusable
from hf_align.checkpoints.ondemand import Computed
from hf_align.errors import OptionError
from hf_align.jobs.job import silent
from hf_align.merging.distil import distilled
from hf_align.merging.methods import DISTIL, REGRESSION
from hf_align.merging.transport import Carried, Change, descent_towards, samples_of
from hf_align.running.offload import network_for
from hf_align.runtime.alone import alone, warn_the_caller
from hf_align.runtime.devices import Devices
from hf_align.settings.choices import KEEP, Match, TransportMethod, checked, share, whole
from hf_align.settings.choices import strength as checked_strength
from hf_align.settings.schedule import Schedule
from hf_align.symmetry.action import Elements
from hf_align.tracing.module_calls import Inputs
from hf_align.witness.witness import hold_all


@alone
def transport(
    finetuned: Model | Sequence[Model],
    *,
    base: Model | Sequence[Model],
    onto: Kind,
    data: Data | None = None,
    strength: float | Sequence[float] = 1.0,
    keep: float | None = None,
    method: TransportMethod = "regression",
    match: Match = "weight",
    steps: int | None = None,
    inputs: Inputs | None = None,
    device: str | None = None,
    config: PretrainedConfig | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    witness: bool = True,
) -> Kind:
    """Carry what fine-tunes learned on their bases to another base.

    Args:
        finetuned: the fine-tune: a live model, a state dict, a folder or a Hub id; or a list of several.
        base: what it was tuned from; a list where not all of them have one base.
        onto: what it is carried to; of the same architecture and vocabulary.
        data: text like what the fine-tune was trained on; without it each fine-tune writes its own.
        strength: how much of the change is carried over; a list of as many as there are fine-tunes, or one for all.
        keep: examples that `onto` writes, and answers on as before, for each of the others, by default 0.3. It has an
            effect on models that generate.
        method: "regression" fits every weight so that B does on top of its own what the fine-tune does on top of its
            base; "task_arithmetic" only adds the change of the weights, in B's basis; "distil" goes on from what
            regression gives by a descent, with all models in memory.
        match: how the bases are matched.
        steps: of "distil".
        inputs: what plain modules are called with; by default it is taken from the first batch of `data`.
        device: where models run; an accelerator if there is one.
        config: of state dicts.
        tokenizer: for data that is text.
        witness: run every model before and after it is aligned, and refuse what changed.

    Returns:
        The same kind of thing as `onto`, live for a folder or an id.

    Raises:
        ValueError: an option has no such choice; models or data do not fit.
        IncompatibleModels: the models compute differently with the same weights.
        FunctionChanged: a model no longer answers as before.
        CannotRun: the models do not fit into memory, which "distil" needs.
    """
    checked("method", method, TransportMethod)
    checked("witness", witness, (True, False))
    if steps is not None and method != DISTIL:
        raise OptionError('steps needs method="distil"')
    schedule = Schedule.of_transport(DISTIL, **({} if steps is None else {"steps": whole("steps", steps, 1)}))
    tuned_from = _changes(finetuned, base, strength)
    if data is not None and method not in (REGRESSION, DISTIL):
        raise OptionError(f'data is not used by method="{method}"')
    if data is not None and len(tuned_from) > 1:
        raise OptionError("data is what one fine-tune was trained on; of several, each writes its own")
    if keep is not None and method not in (REGRESSION, DISTIL):
        raise OptionError(f'keep is of what is fitted, and method="{method}" fits nothing')
    keep = share("keep", KEEP if keep is None else keep)
    data = reusable(data)
    called = called_with(inputs, data, onto)
    running = Devices.choose(device).running
    alignments: dict[int, Alignment] = {}
    changes: list[Change] = []
    given: list[Change] = []
    for model, before, scale in tuned_from:
        if id(before) not in alignments:
            alignments[id(before)] = align(before, to=onto, match=match, inputs=called, device=device, config=config,
                                           tokenizer=tokenizer, witness=witness)  # fmt: skip
        found = alignments[id(before)]
        tuned, last = (found.taken(m, config, called=part) for m, part in ((model, "finetuned"), (before, "base")))
        given.append(Change(last.weights, tuned.weights))
        changes.append(Change(_weights(found, last, found.elements), _weights(found, tuned, found.elements), scale))
        if witness:  # of weights that are seen to fit
            hold_all([moved_of(tuned, found.config, found.spec, found.elements)], running)
    first = found.taken(onto, config, called="onto")
    carried = Carried(_weights(found, first, found.reference), tuple(changes))
    as_given = Carried(first.weights, tuple(given))
    for number in range(len(given)):
        if not as_given.is_tuned(number):
            called = f"fine-tune {number + 1}" if len(given) > 1 else "the fine-tune"
            warn_the_caller(f"the weights of {called} do not look as if they came from its base")
    solved: dict[str, Tensor] = {}
    start = carried.by_vector
    made = Computed(found.spec.parameters, lambda n: solved[n] if n in solved else start[n])
    if method in (REGRESSION, DISTIL):
        network, batch = network_for(found.config, running), examples(data, tuned, tokenizer)
        if method == DISTIL:
            network.must_hold('method="distil" holds all models in memory')
        carried.solve(samples_of(carried, network, batch, keep, silent), solved)
        if method == DISTIL:
            objective = descent_towards(carried.placed(network), network, batch, keep)
            solved |= distilled(network.placed(made), network, objective, schedule)
    result: Any = first.with_weights(made, found.config, found.spec)
    return result


def _changes(
    finetuned: Model | Sequence[Model], base: Model | Sequence[Model], strength: float | Sequence[float]
) -> list[tuple[Any, Any, float]]:
    """Each fine-tune with its base, and how much of it is carried over.

    Raises:
        ValueError: a strength is no number, or too large, or there are other numbers of them.
    """
    models = list(finetuned) if isinstance(finetuned, list | tuple) else [finetuned]
    bases = list(base) if isinstance(base, list | tuple) else [base] * len(models)
    several = list(strength) if isinstance(strength, list | tuple) else [strength] * len(models)
    strengths = [checked_strength("strength", each) for each in several]
    if not models or not len(models) == len(bases) == len(strengths):
        found = f"{len(models)} fine-tunes have {len(bases)} bases and {len(strengths)} strengths"
        raise OptionError(f"{found}; each fine-tune needs one of both")
    return list(zip(models, bases, strengths, strict=True))


def _weights(found: Alignment, given: Given, elements: Elements) -> Mapping[str, Tensor]:
    return Computed(found.spec.parameters, found.weights_of(given, elements).__getitem__)
