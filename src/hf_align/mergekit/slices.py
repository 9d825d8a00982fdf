"""Recipes with slices for architectures that mergekit does not know: layers of the models, cut and stacked here.

The layers of a model are the one list of modules that its parameters are numbered by. What comes before them is of the
first slice, what comes after them of the last. Which entry of the config counts them is found by trying.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from hf_align.checkpoints.naming import DiskWeights
from hf_align.checkpoints.ondemand import OnDemand
from hf_align.checkpoints.plan import ShardPlan
from hf_align.checkpoints.shards import whole
from hf_align.errors import HfAlignError, IncompatibleModels
from hf_align.jobs.job import Draft
from hf_align.jobs.opened import Basis
from hf_align.jobs.writing import config_changes
from hf_align.mergekit.methods import Loop, Settings, fitting, layer_of, layers_of, mixed, names_of, require_bound
from hf_align.opening.pairs import Pair
from hf_align.settings.options import Options
from hf_align.symmetry.spec import SymmetrySpec
from hf_align.tracing.build import build_without_weights, inventory
from hf_align.tracing.small.shrink import with_fields


@dataclass(frozen=True)
class Layer:
    """A layer of the output.

    Attributes:
        part: the slice that it is of.
        depth: in that slice, from 0 to 1.
        sources: model -> its layer that goes in.
        layout: the layer of the reference whose files it is written like.
    """

    part: int
    depth: float
    sources: Mapping[str, int]
    layout: int


@dataclass(frozen=True)
class Stack:
    """The output of a recipe: its layers, one on the other.

    Attributes:
        name: the list of modules that the layers are in.
        settings: of each slice.
        changed: entries of the config that the new layers need.
        last: names of parameters that come after the layers.
    """

    name: str
    layers: tuple[Layer, ...]
    settings: tuple[Settings, ...]
    changed: Mapping[str, Any]
    last: frozenset[str]

    @classmethod
    def of(cls, config: Any, pair: Pair) -> Stack:
        """Lay out the output and see that it is a model.

        Raises:
            HfAlignError: slices of different lengths, beyond the layers, or of layers that do not match; more than one
                list of layers, or a config that cannot be given another number of them.
        """
        name, count = _only_stack(pair.spec)
        require_bound(config, names_of(pair))
        layers = tuple(_layers(config))
        settings = tuple(Settings.of_part(config, part) for part in config.slices)
        names = list(pair.spec.parameters)
        after = max(i for i, n in enumerate(names) if n.startswith(f"{name}."))
        changed = _changed(pair.config, name, count, [layer.layout for layer in layers])
        stack = cls(name, layers, settings, changed, frozenset(names[after:]))
        stack._require_bound(pair.spec)
        return stack

    def moved(self, parameter: str, layer: int) -> str:
        """The name of a parameter in another layer."""
        return f"{self.name}.{layer}.{parameter.removeprefix(f'{self.name}.').partition('.')[2]}"

    def made_of(self, parameter: str, place: int | None) -> tuple[str, Settings, dict[str, str], dict[str, Any]]:
        """A tensor of the output: its name, the settings it has, its name in each model, and the method's parameters.

        Args:
            parameter: named as in the layer of the reference that it is written like.
            place: the layer of the output; None outside of all layers.
        """
        if place is None:
            name, depth, settings = parameter, 0.0, self.settings[-1 if parameter in self.last else 0]
            sources = dict.fromkeys(settings.models, parameter)
        else:
            layer = self.layers[place]
            name, depth, settings = self.moved(parameter, place), layer.depth, self.settings[layer.part]
            sources = {model: self.moved(parameter, number) for model, number in layer.sources.items()}
        return name, settings, sources, settings.of(name, depth, sources)

    def _require_bound(self, spec: SymmetrySpec) -> None:
        """See that the method takes what every slice gives it, and that layers that meet have the same tensors."""
        known = spec.parameters.keys()
        with fitting():
            for name in known:
                if _number(name, self.name) is None:
                    self.made_of(name, None)
        for place, layer in enumerate(self.layers):
            for parameter in (n for n in known if n.startswith(f"{self.name}.{layer.layout}.")):
                for number in layer.sources.values():
                    other = self.moved(parameter, number)
                    if other not in known or spec.shape(other) != spec.shape(parameter):
                        raise HfAlignError(f"{other} and {parameter} differ in kind or size; they cannot be one layer")
                with fitting():
                    self.made_of(parameter, place)


def stack_here(config: Any, pair: Pair, options: Options, seed: int = 0) -> Loop:
    """Every tensor of the stacked model, by the method and the parameters that a recipe gives it; see `merge_here`.

    Raises:
        HfAlignError: as `Stack.of`.
    """
    stack = Stack.of(config, pair)

    def tensors(moved: Basis | None) -> _Stacked:
        weights = {} if moved is None else moved.by_name

        def produce(name: str, place: int | None) -> Tensor:
            out, settings, sources, parameters = stack.made_of(name, place)
            return mixed(config, weights, sources, parameters, settings.base, out, f"{seed} {out}")

        return _Stacked(stack, pair, produce, options.torch_dtype)

    laid_out = tensors(None)
    plan = ShardPlan.build([(name, *laid_out.info(name)) for name in sorted(laid_out)], options.max_shard_size)
    changed = {**config_changes(pair, pair.a, options), **stack.changed}
    draft = Draft(plan, pair.a.folder, changed, f" in {len(stack.layers)} layers")
    return Loop(draft, lambda moved: whole(tensors(moved).__getitem__))


class _Stacked(OnDemand):
    """The stacked model in the names and layout of the reference, by name on disk."""

    def __init__(self, stack: Stack, pair: Pair, produce: Any, dtype: torch.dtype | None) -> None:
        a, parameters = pair.a, pair.spec.parameters
        outside = DiskWeights(a.checkpoint, a.names, lambda name: produce(name, None), parameters, dtype)
        by_layer: dict[int | None, list[str]] = {}
        for link in a.names.links:
            number, *others = {_number(name, stack.name) for name in link.memory}
            if others:
                raise HfAlignError(f"{link.sources[0]} is of several layers at once; use models:")
            by_layer.setdefault(number, []).extend(link.targets)
        self._found = {name: (outside, name) for name in by_layer.get(None, ())}
        super().__init__(self._found)
        for place, layer in enumerate(stack.layers):

            def produced(name: str, place: int = place) -> Tensor:
                return produce(name, place)

            weights = DiskWeights(a.checkpoint, a.names, produced, parameters, dtype)
            for name in by_layer.get(layer.layout, ()):
                self._found[_renumbered(name, layer.layout, place)] = (weights, name)

    def info(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """Shape and dtype."""
        weights, source = self._found[name]
        return weights.info(source)

    def __getitem__(self, name: str) -> Tensor:
        weights, source = self._found[name]
        return weights[source]


def _only_stack(spec: SymmetrySpec) -> tuple[str, int]:
    stacks = layers_of(spec.parameters)
    if len(stacks) != 1:
        names = ", ".join(stacks) or "none"
        raise HfAlignError(f"slices need one list of layers, and this architecture has {names}; use models:")
    ((name, numbers),) = stacks.items()
    return name, len(numbers)


def _layers(config: Any) -> Iterator[Layer]:
    for part, each in enumerate(config.slices):
        ranges = {str(source.model): tuple(source.layer_range) for source in each.sources}
        length = next(stop - start for start, stop in ranges.values())
        for i in range(length):
            sources = {model: start + i for model, (start, _) in ranges.items()}
            yield Layer(part, i / (length - 1) if length > 1 else 1.0, sources, next(iter(sources.values())))


def _changed(config: PretrainedConfig, stack: str, count: int, order: Sequence[int]) -> dict[str, Any]:
    """Entries of a config for layers in another order, and another number of them.

    Raises:
        HfAlignError: no entry changes how many there are, or the model would not be the old one otherwise.
    """
    fields = config.to_dict()
    lists = {k: [v[i] for i in order] for k, v in fields.items() if isinstance(v, list) and len(v) == count}
    lists = {k: v for k, v in lists.items() if v != fields[k]}
    if len(order) == count:
        return lists
    for key in [k for k, v in fields.items() if isinstance(v, int) and not isinstance(v, bool) and v == count]:
        changed = {**lists, key: len(order)}
        try:
            made = inventory(build_without_weights(with_fields(config, {**fields, **changed})))
        except (IncompatibleModels, ValueError, TypeError, IndexError, KeyError):
            continue  # what a config class says of a number that it does not take
        if len(layers_of(made.shapes).get(stack, ())) == len(order):
            return changed
    raise HfAlignError(
        f"no entry of this config changes the number of its {count} layers; keep as many, or use models:"
    )


def _number(parameter: str, stack: str) -> int | None:
    found = layer_of(parameter)
    return found[1] if found and found[0] == stack else None


def _renumbered(name: str, layer: int, place: int) -> str:
    """A name on disk, in another layer.

    Raises:
        HfAlignError: its first number is not that of the layer.
    """
    found = re.match(r"(.*?)\.(\d+)\.", name)
    if found is None or int(found[2]) != layer:
        raise HfAlignError(f"{name} is stored under a name that does not tell its layer; use models:")
    return f"{found[1]}.{place}.{name[found.end() :]}"
