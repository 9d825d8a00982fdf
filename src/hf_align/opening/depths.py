"""A model of one depth in the architecture of a deeper one, its function unchanged.

Where layers add to a stream that is normalised before it is read, a layer that writes zero is the identity. So the
shallower model gets layers whose writing weights are zero; what their other weights are is all one. Which weights have
to be zero is found on a small copy: all of them make the layer silent, and in the order in which they are used every
one gets its weights back with which it stays so. Where nothing makes it silent (norms after the block), the models are
refused. Which layers of both correspond is what their weights say, matched once for every shift of one against the
other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor
from transformers import PretrainedConfig

from hf_align.checkpoints.ondemand import OnDemand
from hf_align.errors import IncompatibleModels
from hf_align.matching.balanced import Balanced
from hf_align.matching.weights import match_weights
from hf_align.opening.widths import UNCHANGED, outputs
from hf_align.running.generate import noise
from hf_align.symmetry.spec import SymmetrySpec
from hf_align.tracing.build import build_without_weights, inventory
from hf_align.tracing.fields import differences, with_values
from hf_align.tracing.layers import kinds_of_layers, layer_in
from hf_align.tracing.small.shrink import shrink
from hf_align.tracing.trace import trace

_TRIED = 1
"""Layers of the small copy to which one is added: every deeper model has more."""
Places = tuple[int | None, ...]
"""For each layer of a deeper model, the layer of the shallower one that is there; None for a silent one."""


@dataclass(frozen=True)
class Layers:
    """The list of layers in which two configs differ.

    Attributes:
        path: of the list in the model.
    """

    path: str
    shallow: int
    deep: int

    @classmethod
    def between(cls, shallow: Collection[str], deep: Collection[str]) -> Layers | None:
        """The one list that is longer in a deeper model, by the names of weights; None where there is no such list."""
        more = {path for name in set(deep) - set(shallow) for path in _lists(name)}
        for path in sorted(more):
            counts = [len({at[0] for name in names if (at := layer_in(path, name))}) for names in (shallow, deep)]
            kept = {name for name in deep if not name.startswith(f"{path}.")}
            if 0 < counts[0] < counts[1] and kept == {n for n in shallow if not n.startswith(f"{path}.")}:
                return cls(path, *counts)
        return None

    def inside(self, name: str) -> tuple[int, str] | None:
        """The layer that a weight is of, and its name in it; None outside of the list."""
        return layer_in(self.path, name)

    def named(self, layer: int, rest: str) -> str:
        """The name of a weight of a layer."""
        return f"{self.path}.{layer}.{rest}"


@dataclass(frozen=True)
class Deepening:
    """What makes a model as deep as another.

    Attributes:
        silent: weights within a layer that are zero where it does nothing.
        config: of the model, at its new depth.
    """

    layers: Layers
    silent: frozenset[str]
    config: PretrainedConfig

    def described(self, places: Places) -> str:
        """What is done, in words that follow the name of a model."""
        added = [str(i) for i, place in enumerate(places) if place is None]
        named = f"layer {added[0]} writes" if len(added) == 1 else f"layers {', '.join(added)} write"
        return f"is made deeper ({self.layers.shallow} layers to {self.layers.deep}; {named} nothing)"

    def shifted(self) -> list[Places]:
        """All layers in a row, with the silent ones before and after them."""
        count, more = self.layers.shallow, self.layers.deep - self.layers.shallow
        return [(None,) * before + tuple(range(count)) + (None,) * (more - before) for before in range(more + 1)]

    def idle(self, places: Places) -> frozenset[str]:
        """The weights of silent layers that nothing depends on."""
        names = inventory(build_without_weights(self.config)).shapes
        silent = [_of_layer(self.layers, layer, names) for layer, place in enumerate(places) if place is None]
        return frozenset(name for own in silent for name, rest in own.items() if rest not in self.silent)


class DeepenedWeights(OnDemand):
    """The weights of a shallow model with its layers in some places of a deep one, made when they are asked for."""

    def __init__(self, weights: Mapping[str, Tensor], deepening: Deepening, places: Places) -> None:
        layers = deepening.layers
        inside = {rest for name in weights for _, rest in [layers.inside(name) or (0, "")] if rest}
        everywhere = [layers.named(layer, rest) for layer in range(layers.deep) for rest in sorted(inside)]
        super().__init__(dict.fromkeys([*(name for name in weights if layers.inside(name) is None), *everywhere]))
        self._weights = weights
        self._deepening = deepening
        self._places = places

    def __getitem__(self, name: str) -> Tensor:
        layers = self._deepening.layers
        at = layers.inside(name)
        if at is None:
            return self._weights[name]
        place = self._places[at[0]]
        if place is not None:
            return self._weights[layers.named(place, at[1])]
        beside = self._weights[layers.named(self._nearest(at[0]), at[1])]
        return torch.zeros_like(beside) if at[1] in self._deepening.silent else beside

    def _nearest(self, layer: int) -> int:
        """The layer of the shallow model next to a silent one."""
        known = [i for i, place in enumerate(self._places) if place is not None]
        nearest = self._places[min(known, key=lambda i: abs(i - layer))]
        assert nearest is not None
        return nearest


def deepenings_of(configs: Sequence[PretrainedConfig]) -> tuple[Deepening | None, Deepening | None]:
    """What makes the shallower one of two models as deep as the other; None for a model that is no shallower.

    Raises:
        IncompatibleModels: as `deepening_of`.
    """
    first, second = configs
    if not any(type(n) in (int, list) for values in differences(first, second).values() for n in values):
        return None, None  # no entry counts anything
    return deepening_of(first, second), deepening_of(second, first)


def deepening_of(shallow: PretrainedConfig, deep: PretrainedConfig) -> Deepening | None:
    """What makes a model as deep as another; None where it is no shallower.

    Raises:
        IncompatibleModels: no entries of the config change the depth alone, or no weights make a layer silent.
    """
    names = [inventory(build_without_weights(c)).shapes.keys() for c in (shallow, deep)]
    layers = Layers.between(*names)
    if layers is None:
        return None
    counted = {
        path: values[1]
        for path, values in differences(shallow, deep).items()
        if _counts(values[0], layers.shallow) and _counts(values[1], layers.deep)
    }
    made = with_values(shallow, counted)
    if inventory(build_without_weights(made)).shapes.keys() != names[1]:
        raise IncompatibleModels(
            f"no entries of the config of {shallow.model_type} change the number of {layers.path} alone"
        )
    return Deepening(layers, _silent(made), made)


def places_for(
    deepening: Deepening,
    spec: SymmetrySpec,
    models: Callable[[Places], Sequence[Mapping[str, Tensor]]],
    allowed: Callable[[Places], bool],
) -> Places:
    """Where the layers of the shallower model belong, by how much their weights agree once they are matched.

    Args:
        spec: of both, in one size.
        models: the weights of both by name in memory, one of them with its layers in some places.
        allowed: whether a model stays what it is with its layers there.

    Raises:
        IncompatibleModels: it does so nowhere.
    """
    scores: list[dict[int, float]] = [{} for _ in range(deepening.layers.deep)]
    shifts = [places for places in deepening.shifted() if allowed(places)]
    for places in shifts:
        balanced = Balanced.of(spec, *models(places))
        moved = balanced.moved(match_weights(balanced)[0])
        for layer, place in enumerate(places):
            if place is not None:
                names = _of_layer(deepening.layers, layer, spec.parameters)
                scores[layer][place] = _cosine(balanced.a, moved, names)
    found = corresponding(scores) if shifts else ()
    if not found or not allowed(found):
        raise IncompatibleModels(
            f"layers of {deepening.config.model_type} are not the same at another depth, even if those that are added "
            "write nothing: models of different depth do not merge"
        )
    return found


def _cosine(a: Mapping[str, Tensor], b: Mapping[str, Tensor], names: Collection[str]) -> float:
    """Of the weights of a layer, taken together."""
    both = xx = yy = 0.0
    for name in names:
        x, y = a[name].double(), b[name].double()
        both, xx, yy = both + float((x * y).sum()), xx + float(x.square().sum()), yy + float(y.square().sum())
    return both / max(math.sqrt(xx * yy), 1e-30)


def corresponding(scores: Sequence[Mapping[int, float]]) -> Places:
    """The layers of the shallower model in order, each where it fits best all in all: dynamic programming.

    Args:
        scores: for each layer of the deeper model, how well the layers of the other fit there.
    """
    best: dict[int, tuple[float, Places]] = {0: (0.0, ())}
    for fits in scores:
        following: dict[int, tuple[float, Places]] = {}
        for used, (total, places) in best.items():
            options = [(used, total, (*places, None))]
            if used in fits:
                options.append((used + 1, total + fits[used], (*places, used)))
            for after, value, chosen in options:
                if after not in following or value > following[after][0]:
                    following[after] = value, chosen
        best = following
    return best[max(best)][1]


def is_unchanged(
    raw: Mapping[str, Tensor], before: PretrainedConfig, after: PretrainedConfig, deepening: Deepening, places: Places
) -> bool:
    """Whether silent layers leave a model as it is.

    Layers must be of the kind that they were (windows that no short input reaches beyond), and both depths are run once
    on the same few random inputs.

    Args:
        raw: weights of the shallow model by name in memory, which must fit into memory.
        before, after: its config, and that of the deeper model.
    """
    models = [build_without_weights(config) for config in (before, after)]
    shallow, deep = kinds_of_layers(deepening.layers.path, models)
    if any(place is not None and shallow[place] != deep[i] for i, place in enumerate(places)):
        return False
    inputs = noise(trace(before))
    first = outputs(before, raw, inputs)
    second = outputs(after, DeepenedWeights(raw, deepening, places), inputs)
    return float((second - first).abs().max()) < UNCHANGED * float(first.abs().max())


def _silent(config: PretrainedConfig) -> frozenset[str]:
    """The weights within a layer that have to be zero for it to do nothing, on a small copy with random weights."""
    shallow, deep = shrink(config, _TRIED), shrink(config, _TRIED + 1)
    shapes = inventory(build_without_weights(deep)).shapes
    layers = Layers.between(inventory(build_without_weights(shallow)).shapes, shapes)
    program = trace(deep)
    added = _TRIED  # the last one
    if layers is None or len({frozenset(_of_layer(layers, i, shapes).values()) for i in range(_TRIED + 1)}) > 1:
        raise IncompatibleModels(f"layers of {config.model_type} differ in their weights: other depths do not merge")
    rng = Generator().manual_seed(0)
    weights = {name: 0.5 * torch.randn(shape, generator=rng) for name, shape in shapes.items()}
    inputs = noise(program)
    own = _of_layer(layers, added, shapes)
    expected = outputs(shallow, {name: t for name, t in weights.items() if name not in own}, inputs)
    zero = set(own.values())

    def is_silent(zero: Collection[str]) -> bool:
        tried = {layers.named(added, rest): 0.0 for rest in zero}
        found = outputs(deep, {n: tried.get(n, 1.0) * t for n, t in weights.items()}, inputs)
        return float((found - expected).abs().max()) <= UNCHANGED * float(expected.abs().max())

    if not is_silent(zero):
        raise IncompatibleModels(
            f"a layer of {config.model_type} whose weights are zero still does something (norms come after it): models "
            "of different depth do not merge"
        )
    first_use = {name: min(map(program.order.__getitem__, node.users)) for node, name in program.parameters.items()}
    for name, rest in sorted(own.items(), key=lambda item: first_use.get(item[0], 0)):
        if name in first_use and is_silent(zero - {rest}):
            zero = zero - {rest}
    return frozenset(zero)


def _of_layer(layers: Layers, number: int, names: Collection[str]) -> dict[str, str]:
    """The weights of a layer: name -> name within it."""
    found = ((name, layers.inside(name)) for name in names)
    return {name: at[1] for name, at in found if at is not None and at[0] == number}


def _counts(value: object, count: int) -> bool:
    """Whether a value of a config says how many layers there are, or has an entry for each."""
    return (isinstance(value, list) and len(value) == count) or (type(value) is int and value == count)


def _lists(name: str) -> list[str]:
    """The paths of module lists that a dotted name may go through."""
    parts = name.split(".")
    return [".".join(parts[:i]) for i, part in enumerate(parts) if part.isdigit()]
