"""Recipes with slices for architectures that mergekit does not know: layers of the models, cut and stacked here.

The layers of a model are the one list of modules that its parameters are numbered by. What comes before them is of the
first slice, what comes after them of the last. Which entry of the config counts them is found by trying.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from hf_align.checkpoints.companions import write_companions
from hf_align.checkpoints.naming import DiskWeights
from hf_align.checkpoints.shards import Claim, ShardPlan, whole, write_with_bar
from hf_align.errors import HfAlignError, IncompatibleModels
from hf_align.mergekit.basis import Inputs
from hf_align.mergekit.methods import Settings, fill_output, layer_of, layers_of, mixed
from hf_align.ondemand import OnDemand
from hf_align.options import Options
from hf_align.pipeline import Say
from hf_align.tracing.shrink import with_fields
from hf_align.tracing.trace import build_without_weights, inventory


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
    def of(cls, config: Any, inputs: Inputs) -> Stack:
        """Lay out the output and see that it is a model.

        Raises:
            HfAlignError: slices of different lengths, beyond the layers, or of layers that do not match; more than one
                list of layers, or a config that cannot be given another number of them.
        """
        name, count = _only_stack(inputs)
        layers = tuple(_layers(config, count))
        settings = tuple(Settings.of_slice(config, s.sources, s.parameters, s.base_model or config.base_model)
                         for s in config.slices)  # fmt: skip
        names = list(inputs.pair.spec.parameters)
        after = max(i for i, n in enumerate(names) if n.startswith(f"{name}."))
        changed = _changed(inputs.pair.config, name, count, [layer.layout for layer in layers])
        stack = cls(name, layers, settings, changed, frozenset(names[after:]))
        stack._require_bound(config, inputs)
        return stack

    def moved(self, parameter: str, layer: int) -> str:
        """The name of a parameter in another layer."""
        return f"{self.name}.{layer}.{parameter.removeprefix(f'{self.name}.').partition('.')[2]}"

    def sources(self, parameter: str, place: int | None) -> tuple[Settings, float, dict[str, str]]:
        """What goes into a parameter of the output: settings, depth, and its name in each model.

        Args:
            parameter: named as in the layer of the reference that it is written like.
            place: the layer of the output; None outside of all layers.
        """
        if place is None:
            settings = self.settings[-1 if parameter in self.last else 0]
            return settings, 0.0, dict.fromkeys(settings.models, parameter)
        layer = self.layers[place]
        named = {model: self.moved(parameter, number) for model, number in layer.sources.items()}
        return self.settings[layer.part], layer.depth, named

    def _require_bound(self, config: Any, inputs: Inputs) -> None:
        """See that the method takes what every slice gives it, and that layers that meet have the same tensors."""
        from mergekit import merge_methods

        spec = inputs.pair.spec
        known = spec.parameters.keys()
        try:
            for part in self.settings:
                merge_methods.get(config.merge_method).validate_inputs(part.models, part.base)
                part.of(next(iter(known)), 0.0)
        except (RuntimeError, ValueError, TypeError) as error:
            raise HfAlignError(f"the recipe does not fit its method: {str(error).splitlines()[0]}") from error
        for layer in self.layers:
            for parameter in (n for n in known if n.startswith(f"{self.name}.{layer.layout}.")):
                for number in layer.sources.values():
                    other = self.moved(parameter, number)
                    if other not in known or spec.shape(other) != spec.shape(parameter):
                        raise HfAlignError(f"{other} and {parameter} differ in kind or size; they cannot be one layer")


def stack_here(
    config: Any,
    inputs: Inputs,
    output: Path,
    options: Options,
    say: Say,
    seed: int = 0,
    document: Callable[[], object] = lambda: None,
) -> None:
    """Every tensor of the stacked model, by the method and the parameters that a recipe gives it; see `merge_here`.

    Raises:
        HfAlignError: as `Stack.of`; the output cannot be written.
    """
    stack, pair = Stack.of(config, inputs), inputs.pair

    def produce(name: str, place: int | None) -> Tensor:
        settings, depth, sources = stack.sources(name, place)
        out = name if place is None else stack.moved(name, place)
        parameters = settings.of(out, depth, sources)
        return mixed(config, inputs, sources, parameters, settings.base, out, f"{seed} {out}")

    def fill(claim: Claim) -> None:
        say(f"writing {len(tensors)} tensors in {len(stack.layers)} layers to {output}")
        write_with_bar(claim, plan, whole(tensors.__getitem__), quiet=options.quiet)
        if claim.processes.leads:
            untied = {"tie_word_embeddings": False} if pair.untied else {}
            write_companions(output, pair.a.folder, {**untied, **stack.changed})

    tensors = _Stacked(stack, inputs, produce, options.dtype)
    plan = ShardPlan.build([(name, *tensors.info(name)) for name in sorted(tensors)], options.max_shard_size)
    fill_output(config, inputs, output, options, say, seed, plan, fill, document)


class _Stacked(OnDemand):
    """The stacked model in the names and layout of the reference, by name on disk."""

    def __init__(self, stack: Stack, inputs: Inputs, produce: Any, dtype: torch.dtype | None) -> None:
        a, parameters = inputs.pair.a, inputs.pair.spec.parameters
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


def _only_stack(inputs: Inputs) -> tuple[str, int]:
    stacks = layers_of(inputs.pair.spec.parameters)
    if len(stacks) != 1:
        names = ", ".join(stacks) or "none"
        raise HfAlignError(f"slices need one list of layers, and this architecture has {names}; use models:")
    ((name, numbers),) = stacks.items()
    return name, len(numbers)


def _layers(config: Any, count: int) -> Iterator[Layer]:
    for part, each in enumerate(config.slices):
        ranges = {str(source.model): tuple(source.layer_range) for source in each.sources}
        lengths = {stop - start for start, stop in ranges.values()}
        if len(ranges) != len(each.sources) or len(lengths) != 1 or min(lengths) < 1:
            raise HfAlignError(f"slice {part}: its sources are not as many layers of each of different models")
        if any(start < 0 or stop > count for start, stop in ranges.values()):
            raise HfAlignError(f"slice {part}: layer_range goes beyond the {count} layers that there are")
        (length,) = lengths
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
