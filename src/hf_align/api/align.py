"""Bring models into the basis of another one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from string import ascii_uppercase
from typing import Any, overload

import torch
from torch import Generator, Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from hf_align.api.alignment import Alignment
from hf_align.api.examples import Data, called_with, examples_and_loss
from hf_align.api.given import Given, Model, take
from hf_align.api.module_data import reusable
from hf_align.errors import OptionError
from hf_align.jobs.read_beside import require_no_named_heads
from hf_align.matching.balanced import Balanced
from hf_align.matching.choices import as_chosen
from hf_align.matching.find import Search, find
from hf_align.matching.objectives import Objective, drawn
from hf_align.opening.agreement import require_alike
from hf_align.opening.heads import choose_heads
from hf_align.running.network import Batch, Loss, Network
from hf_align.running.offload import network_for
from hf_align.runtime.alone import alone
from hf_align.runtime.devices import Devices
from hf_align.settings.choices import Heads, Match, Residual, checked, whole
from hf_align.settings.choices import seed as as_seed
from hf_align.settings.schedule import Schedule
from hf_align.symmetry.action import Elements
from hf_align.symmetry.spec import SymmetrySpec
from hf_align.tracing.module_calls import Inputs
from hf_align.tracing.modules import ModuleConfig
from hf_align.witness.witness import Moved, hold_all


@dataclass(frozen=True)
class _OfTheCaller(Objective):
    """A loss of the caller's own on rows of data."""

    compute: Loss
    data: Batch

    def loss(self, network: Network, merged: Mapping[str, Tensor], rows: int, rng: Generator) -> Tensor:
        batch = drawn(self.data, rows, rng, network.device)
        return self.compute(network(merged, batch), batch)


@overload
def align(model: Sequence[Model], *, to: Model, **options: Any) -> list[Alignment]: ...
@overload
def align(model: Model, *, to: Model, **options: Any) -> Alignment: ...
@alone  # type: ignore[misc]  # the options are listed once, here
def align(
    model: Model | Sequence[Model],
    *,
    to: Model,
    match: Match = "weight",
    data: Data | None = None,
    objective: Loss | None = None,
    steps: int | None = None,
    seed: int = 0,
    residual: Residual = "orthogonal",
    heads: Heads = "two-stage",
    spaces: str | Sequence[str] = (),
    untie: bool | None = None,
    inputs: Inputs | None = None,
    device: str | None = None,
    config: PretrainedConfig | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    witness: bool = True,
) -> Alignment | list[Alignment]:
    """Find what brings a model closest to another one and leaves its function alone.

    Args:
        model: what is aligned; a list of models is matched together, through a basis that favours none of them.
        to: the reference. Models are live ones, state dicts, folders or Hub ids.
        match: "weight" (no data), "activation", or "learned": gradient descent on the loss of the merged model.
        data: for "activation" and "learned"; without it the models write their own. Plain modules take a DataLoader, a
            dataset or a list of batches as for training; without data they are given noise.
        objective: the loss that "learned" lowers, on `data`: a function of outputs and a batch as the data has it. By
            default the model's own, or cross-entropy where a plain module comes with labels.
        steps: of "learned".
        residual: the group that is searched for the residual stream.
        heads: how attention heads are paired.
        spaces: patterns of the names of the spaces that may move; all of them without one.
        untie: align the head apart from the embedding that it is tied to; None decides by what that gains, and leaves
            the two tied in state dicts, with which no config goes that would say it.
        inputs: what plain modules are called with: a tensor, a tuple of arguments, a dict of named ones, or a list of
            such calls; by default it is taken from the first batch of `data`.
        device: where models run; an accelerator if there is one.
        config: of state dicts.
        tokenizer: for data that is text.
        witness: run every model before and after, and refuse what changed.

    Returns:
        An alignment, or a list of them for a list of models.

    Raises:
        ValueError: an option has no such choice; models or data do not fit.
        IncompatibleModels: the models compute differently with the same weights.
        FunctionChanged: a model no longer answers as before.
    """
    checked("match", match, Match), checked("residual", residual, Residual), checked("heads", heads, Heads)
    if objective is not None and (match != "learned" or data is None):
        raise OptionError('an objective needs match="learned", and data to be computed on')
    if objective is not None and not callable(objective):
        raise OptionError(f"objective is {objective!r}; a function of outputs and a batch is needed")
    if steps is not None and match != "learned":
        raise OptionError('steps needs match="learned"')
    if data is not None and match == "weight":
        raise OptionError('data is not used by match="weight"; it needs "activation" or "learned"')
    if not isinstance(spaces, (str, list, tuple)) or not all(isinstance(s, str) for s in spaces):
        raise OptionError(f"spaces is {spaces!r}; a pattern of names or a list of them is needed")
    as_seed("seed", seed), whole("steps", 1 if steps is None else steps, 1)
    checked("untie", untie, (None, True, False)), checked("witness", witness, (True, False))
    several, data = isinstance(model, (list, tuple)), reusable(data)
    given: list[Any] = list(model) if isinstance(model, (list, tuple)) else [model]
    names = called_beside(len(given))
    if not given:
        raise OptionError("there is no model to align")
    if untie is None and any(isinstance(each, Mapping) for each in (to, *given)):
        untie = False
    inputs = called_with(inputs, data, to)
    reference = take(to, config, inputs=inputs, called="A")
    others = [take(m, config, inputs=inputs, called=name) for m, name in zip(given, names, strict=True)]
    common = _in_common(reference, others, untie)
    aligned_config, spec = choose_heads(common, untie)
    spec = as_chosen(spec, residual, heads, (spaces,) if isinstance(spaces, str) else tuple(spaces))
    for other in others:
        require_no_named_heads(other.called, other.generation, spec)
    devices = Devices.choose(device)
    network = network_for(aligned_config, devices.running)
    batch, loss = examples_and_loss(data, objective, reference, tokenizer)
    schedule = replace(Schedule(), steps=steps or Schedule().steps, seed=seed)
    own = None if loss is None or batch is None else _OfTheCaller(loss, batch)
    search = Search(match, schedule, residual=residual, heads=heads, objective=own)
    models = Balanced.of(spec, reference.weights, *(other.weights for other in others), device=devices.solving)
    found, sweeps = find(models, network, search, batch)
    alignments = []
    for number, (other, elements) in enumerate(zip(others, found, strict=True), start=1):
        matched = models.match(elements, sweeps, number)
        moved = [moved_of(g, aligned_config, spec, e) for g, e in ((other, matched.b), (reference, matched.a))]
        said = hold_all(moved, devices.running).as_json() if witness else None
        alignments.append(Alignment(aligned_config, spec, matched.b, matched.a, matched.distance, said))
    return alignments if several else alignments[0]


def called_beside(count: int) -> list[str]:
    """What messages call models beside the first one, which is A: B, C and so on."""
    return [ascii_uppercase[i] if i < len(ascii_uppercase) else f"model {i + 1}" for i in range(1, count + 1)]


def _in_common(reference: Given, others: Sequence[Given], untie: bool | None) -> PretrainedConfig:
    """The config that all models can be aligned in.

    Raises:
        ValueError: they are of different sizes.
        IncompatibleModels: they compute differently.
    """
    config = reference.config
    if isinstance(config, ModuleConfig) and untie:
        raise OptionError("untie is for models that a config unties; shared weights of a plain module stay shared")
    for other in others:
        refs = (reference.called, other.called)
        config, _ = require_alike(refs, reference.config, other.config, untie)
        for name in {**other.sizes, **reference.sizes}:
            found, wanted = (model.sizes.get(name) for model in (other, reference))
            if found != wanted:
                raise OptionError(f"{name} is {found} in {refs[1]}, but {wanted} in {refs[0]}; models of two sizes are "
                                 "merged from folders")  # fmt: skip
    return config


def moved_of(given: Given, written: PretrainedConfig, spec: SymmetrySpec, elements: Elements) -> Moved:
    """A model as it was taken in, and as it will be: weights wider than float32 stay so."""
    weights = given.weights
    stored = {n: torch.float64 if weights[n].dtype == torch.float64 else torch.float32 for n in spec.parameters}
    wide = max(stored.values(), key=lambda dtype: dtype.itemsize)
    return Moved(given.called, given.config, weights, written, spec, elements, wide, stored)
