"""From two models and a choice of strategy to a match."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from huggingface_hub.utils import tqdm
from transformers import PretrainedConfig

from hf_align.errors import CheckpointError, HfAlignError
from hf_align.matching.activations import match_activations
from hf_align.matching.balanced import Balanced
from hf_align.matching.choices import chosen_sites
from hf_align.matching.descent import Progress, State
from hf_align.matching.features import Site, compare, watch
from hf_align.matching.heads import PAIRINGS, best_fit
from hf_align.matching.learned import learn
from hf_align.matching.objectives import Objective, OnLabels, TowardsSources
from hf_align.matching.universe import match_universe
from hf_align.matching.weights import match_weights
from hf_align.running.decoder_inputs import unlabelled
from hf_align.running.generate import noise, own_inputs, writes
from hf_align.running.network import Batch, Network, Weights, batches, joined
from hf_align.runtime.processes import ALONE
from hf_align.settings.schedule import Schedule
from hf_align.symmetry.alignment import compose, inverse
from hf_align.symmetry.elements import Element
from hf_align.tracing.build import build_without_weights
from hf_align.tracing.trace import trace

Say = Callable[[str], None]


@dataclass(frozen=True)
class Search:
    """How to look for a match.

    Attributes:
        strategy: "weight", "activation" or "learned".
        residual: which features of the residual stream to match by: "first", "last", or any other for all.
        heads: a key of `PAIRINGS`, by which weight matching pairs heads; any other for the best fit.
        own: sequences that each model writes for learned matching, where there are no labels; 0 for data alone. A
            quarter of them serves activation matching, where there is no data.
        length: tokens of each.
        examples: rows of data whose activations are compared.
        state: where learned matching keeps how far it got.
        objective: what learned matching lowers; the loss on labels, or distillation, by default.
    """

    strategy: str = "weight"
    schedule: Schedule = field(default_factory=Schedule)
    residual: str = "all"
    heads: str = "two-stage"
    own: int = 512
    length: int = 64
    examples: int = 256
    state: State | None = None
    objective: Objective | None = None
    quiet: bool = True


Found = tuple[list[dict[str, Element]], int]


def find(models: Balanced, network: Network, search: Search, data: Batch | None, say: Say = lambda _: None) -> Found:
    """The elements that bring every balanced model but the first to the first, and the number of sweeps or steps.

    Weights are matched by all processes; what runs the models runs on the first one.

    Args:
        network: of their architecture, on the device to compute on.
        data: arguments of `forward`, for strategies that run the models; without it the models' own inputs are used.

    Raises:
        CheckpointError: entries are so large that their products overflow.
    """
    try:
        return _found(models, network, search, data, say)
    except (torch.linalg.LinAlgError, OverflowError) as error:  # type: ignore[attr-defined]
        raise CheckpointError(
            "entries of a model are so large that products with them overflow; its checkpoint is damaged"
        ) from error


def _found(models: Balanced, network: Network, search: Search, data: Batch | None, say: Say) -> Found:
    if search.strategy == "activation":
        alone = replace(models, processes=ALONE)
        return models.processes.by_the_first(lambda: _by_activations(alone, network, search, data, say))
    found, sweeps = _by_weights(models, search, say)
    if search.strategy == "weight":
        return found, sweeps
    network.must_hold("--match learned holds all models in memory")
    return models.processes.by_the_first(lambda: _learned(models, found, network, search, data, say))


def _learned(
    models: Balanced, found: list[dict[str, Element]], network: Network, search: Search, data: Batch | None, say: Say
) -> Found:
    objective = search.objective or _objective(models, network, search, data, say)
    with searching(search, "matching") as progress:
        learned = learn(models, found, network, objective, search.schedule, state=search.state, progress=progress)
    return learned, search.schedule.steps


@contextmanager
def searching(search: Search, what: str) -> Iterator[Progress]:
    """A bar of the steps of a descent, with the loss beside it."""
    with tqdm(total=search.schedule.steps, desc=what, unit="step", disable=search.quiet) as bar:

        def progress(step: int, loss: float) -> None:
            bar.update(step - bar.n)
            bar.set_postfix(loss=f"{loss:.4f}")

        yield progress


def _by_weights(models: Balanced, search: Search, say: Say) -> Found:
    pairing = PAIRINGS.get(search.heads, best_fit)
    if len(models.models) == 2:
        found, sweeps = match_weights(models, lambda sweep, fit: say(f"sweep {sweep}: agreement {fit:.6g}"), pairing)
        return [found], sweeps
    elements, rounds = match_universe(models, lambda number, value: say(f"round {number}: agreement {value:.6g}"))
    home = inverse(models.spec, elements[0])
    return [compose(models.spec, home, e) for e in elements[1:]], rounds


def _by_activations(models: Balanced, network: Network, search: Search, data: Batch | None, say: Say) -> Found:
    """Each model to the first: features have no mean to match to before they are matched."""
    placed = tuple(network.placed(m) for m in models.models)
    if data is None:
        written = own(network, search, placed, max(1, search.own // 4), say)
        data = joined(written)
    inputs = unlabelled(data, network.config, search.examples)
    found, sweeps = [], 0
    for number, weights in enumerate(placed[1:], start=1):
        pair = replace(models, models=(models.a, models.models[number]))
        moments = compare(network, placed[0], weights, batches(inputs))
        elements, more = match_activations(pair, chosen_sites(models.spec, moments, search.residual))
        found.append(elements)
        sweeps += more
    return found, sweeps


def _objective(models: Balanced, network: Network, search: Search, data: Batch | None, say: Say) -> Objective:
    if data is not None and "labels" in data:
        return OnLabels(data)
    return towards(tuple(network.placed(m) for m in models.models), network, search, data, say)


def towards(sources: tuple[Weights, ...], network: Network, search: Search, data: Batch | None, say: Say) -> Objective:
    """Distillation towards all sources, without labels.

    Args:
        sources: placed for the network.
        data: inputs for all of them; where there are none, or the models write, each has its own as well.

    Raises:
        HfAlignError: there is nothing to descend on.
    """
    if data is None and not search.own:
        raise HfAlignError("a descent without data needs sequences that the models write; own is 0")
    data = None if data is None else unlabelled(data, network.config)
    if data is not None and not (search.own and "input_ids" in data and writes(build_without_weights(network.config))):
        return TowardsSources(sources, (data,) * len(sources))
    written = tuple(own(network, search, sources, search.own, say))
    if data is None:
        return TowardsSources(sources, written)
    # A text is one of many that the merged model will meet, and a short one is soon known by heart.
    return TowardsSources(sources * 2, (data,) * len(sources) + written)


def own(network: Network, search: Search, sources: tuple[Weights, ...], count: int, say: Say) -> list[Batch]:
    """What each source writes by itself, `count` rows each."""
    say(f"each model generates {count} sequences of {search.length} tokens, or noise if it cannot generate")
    seed = search.schedule.seed
    return [own_inputs(network, w, count, search.length, seed + i) for i, w in enumerate(sources)]


def site_order(config: PretrainedConfig, weights: Weights) -> list[Site]:
    """All sites of an architecture in the order in which they run, seen on random inputs."""
    program = trace(config)
    network = Network(config)
    return list(watch(network, network.placed({n: weights[n] for n in program.shapes}), noise(program)))
