"""mergekit's methods inside our own loop over shards: for every architecture, whole."""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from hf_align.checkpoints.checkpoint import Checkpoint
from hf_align.checkpoints.hub import Source
from hf_align.checkpoints.shards import Source as Entries
from hf_align.errors import HfAlignError
from hf_align.jobs.job import Draft
from hf_align.jobs.opened import Basis
from hf_align.jobs.writing import draft_of, entries_of
from hf_align.mergekit.extra import dtype_of
from hf_align.opening.pairs import Pair
from hf_align.settings.choices import finite, share
from hf_align.settings.options import Options


def merge_tensors(
    tensors: Mapping[str, Tensor], method: str, parameters: Mapping[str, Any], base: str | None, name: str
) -> Tensor:
    """One tensor of each model, mixed by a method of mergekit; all of one shape and float dtype, and so the result."""
    from mergekit.merge_methods import merge_tensors as mix

    ids = list(tensors)
    merged: Tensor = mix(
        list(tensors.values()), method, parameters=parameters, ids=ids, name=name,
        base_index=ids.index(base) if base is not None else None,
    )  # fmt: skip
    return merged


@dataclass(frozen=True)
class Loop:
    """A result of our own loop, laid out and checked.

    Attributes:
        entries: what is written, from models that are in one basis.
    """

    draft: Draft
    entries: Callable[[Basis], Entries]


def require_done_here(config: Any) -> None:
    """
    Raises:
        HfAlignError: the recipe asks for a tokenizer or a chat template of the result, which only mergekit makes,
            together with the rows of the tokens; or it lists modules, which only mergekit knows.
    """
    asked = {name: getattr(config, name) for name in ("modules", "tokenizer_source", "tokenizer", "chat_template")}
    if made := [name for name, value in asked.items() if value is not None and value != "base"]:
        raise HfAlignError(
            f"the recipe asks for {made[0]}, which only mergekit itself does, and it does not merge this model whole"
        )


def merge_here(config: Any, pair: Pair, options: Options, seed: int = 0) -> Loop:
    """Every tensor of the architecture, by the method and the parameters that a recipe gives it.

    Args:
        seed: of methods that draw random numbers; each tensor starts from it, so that an interrupted run resumes
            to the same result.

    Raises:
        HfAlignError: the merge does not fit its method.
    """
    names = names_of(pair)
    require_bound(config, names)
    settings = Settings.of_whole(config, names)
    assert settings is not None, "slices that are stacked"

    def entries(moved: Basis) -> Entries:
        weights = moved.by_name

        def produce(name: str) -> Tensor:
            parameters = settings.of(names[name], _depth(name, names))
            sources = dict.fromkeys(settings.models, name)
            return mixed(config, weights, sources, parameters, settings.base, names[name], f"{seed} {name}")

        return entries_of(pair, pair.a, options, produce)

    return Loop(draft_of(pair, pair.a, options), entries)


def names_of(pair: Pair) -> dict[str, str]:
    """The parameters of an architecture: name in memory -> name on disk, which recipes go by."""
    on_disk = {name: link.sources[0] for name, link in pair.a.names.by_memory().items()}
    return {name: on_disk.get(name, name) for name in pair.spec.parameters}


def mixed(
    config: Any,
    weights: Mapping[str, Mapping[str, Tensor]],
    sources: Mapping[str, str],
    parameters: Mapping[str, Any],
    base: str | None,
    name: str,
    seed: str,
) -> Tensor:
    """One tensor of the result, by the method of a recipe.

    Args:
        weights: by model and name in memory, in one basis.
        sources: what it is made of: a parameter's name in memory, by model.
        parameters: of the method.
        name: that the method knows it by.
        seed: that random numbers start from.
    """
    before = dtype_of(config, "dtype")
    tensors = {model: weights[model][source] for model, source in sources.items()}
    if before is not None:
        tensors = {model: tensor.to(before) for model, tensor in tensors.items()}
    torch.manual_seed(zlib.crc32(seed.encode()))
    return merge_tensors(tensors, config.merge_method, parameters, base, name)


def require_bound(config: Any, names: Mapping[str, str]) -> None:
    """See that the method takes the models of a recipe, and that every tensor has its parameters.

    Args:
        names: as `names_of`.

    Raises:
        HfAlignError: they do not fit; layers that are not there.
    """
    if config.modules:  # mergekit's own, which knows what they are
        return
    settings = Settings.of_whole(config, names)
    if settings is not None:
        with fitting():
            settings.require_models(config)
            for name in names.values():
                settings.of(name, 0.0)
        return
    counts = [len(numbers) for numbers in layers_of(names).values()]
    for part, each in enumerate(config.slices):
        ranges = {str(source.model): source.layer_range for source in each.sources}
        lengths = {stop - start for start, stop in ranges.values()}
        if len(ranges) != len(each.sources) or len(lengths) != 1 or min(lengths) < 1:
            raise HfAlignError(f"slice {part}: its sources must be equally many layers of different models")
        if len(counts) == 1 and any(start < 0 or stop > counts[0] for start, stop in ranges.values()):
            raise HfAlignError(f"slice {part}: layer_range goes beyond the {counts[0]} layers of the model")
        with fitting():
            Settings.of_part(config, each).require_models(config)


@contextmanager
def fitting() -> Iterator[None]:
    """What mergekit does not take is one line."""
    try:
        yield
    except ValidationError as error:
        first = error.errors()[0]
        raise HfAlignError(f"the merge does not fit its method: {first['input']!r}: {first['msg']}") from error
    except (RuntimeError, ValueError, TypeError) as error:
        raise HfAlignError(f"the merge does not fit its method: {str(error).splitlines()[0]}") from error


@dataclass(frozen=True)
class Settings:
    """The parameters of a recipe.

    Attributes:
        of: they, by a tensor's name, its depth (0 for the first layer and 1 for the last), and its name in each model
            where that is another.
        models: that go into each tensor; the base model among them, if there is one.
        base: which of them that is.
    """

    models: tuple[str, ...]
    base: str | None
    of: Callable[..., dict[str, Any]]

    @classmethod
    def of_whole(cls, config: Any, names: Iterable[str]) -> Settings | None:
        """Of whole models, which the base model joins, or of an only slice that is all layers; None where slices are
        stacked."""
        if not config.models:
            return cls.of_part(config, config.slices[0]) if is_whole(config.slices, names) else None
        entries = list(config.models)
        if config.base_model and all(entry.model != config.base_model for entry in entries):
            entries.append(SimpleNamespace(model=config.base_model, parameters=None))
        return cls.of_slice(config, entries, None, config.base_model)

    @classmethod
    def of_part(cls, config: Any, part: Any) -> Settings:
        """Of one slice."""
        return cls.of_slice(config, part.sources, part.parameters, part.base_model or config.base_model)

    def require_models(self, config: Any) -> None:
        """See that the method takes these models, by an error of mergekit's."""
        from mergekit import merge_methods

        merge_methods.get(config.merge_method).validate_inputs(self.models, self.base)

    @classmethod
    def of_slice(cls, config: Any, sources: Sequence[Any], parameters: Any, base: Any) -> Settings:
        """Of entries with a model and its parameters, and of the slice that they are in."""
        from mergekit import merge_methods
        from mergekit.config import ConfigReader, InputSliceDefinition, OutputSliceDefinition
        from mergekit.parameter_resolver import resolve_parameters

        spec = merge_methods.get(config.merge_method).spec
        ends = (0, 1)
        inputs = [InputSliceDefinition(model=e.model, layer_range=ends, parameters=e.parameters) for e in sources]
        out = OutputSliceDefinition(sources=inputs, parameters=parameters)

        def of(name: str, depth: float, named: Mapping[str, str] | None = None) -> dict[str, Any]:
            each_name = {e.model: (named or {}).get(str(e.model), name) for e in sources}
            reader = ConfigReader(config=config, t=depth, slice_out=out)
            shared, each = resolve_parameters(
                spec, tensor_name=name, inputs=each_name, sources=reader.parameter_sources, base_model=base, t=depth
            )  # fmt: skip
            by_name: dict[str, dict[str, Any]] = {}
            for model, values in each.items():
                for parameter, value in values.items():
                    by_name.setdefault(parameter, {})[str(model)] = value
            return _in_bounds({**shared, **by_name})

        return cls(tuple(str(e.model) for e in sources), str(base) if base else None, of)


def _in_bounds(parameters: dict[str, Any]) -> dict[str, Any]:
    """Parameters of a method, if all numbers are finite, and densities are shares; mergekit takes others, and gives the
    base model for a density below zero.

    Raises:
        OptionError: one is not.
    """
    for name, value in parameters.items():
        for number in value.values() if isinstance(value, Mapping) else [value]:
            if name == "density":
                share(name, number)
            elif isinstance(number, float):
                finite(name, number)
    return parameters


def is_whole(slices: Sequence[Any], names: Iterable[str]) -> bool:
    """Whether there is one slice, of all layers."""
    layers = max((len(family) for family in layers_of(names).values()), default=0)
    return len(slices) == 1 and all(tuple(source.layer_range) == (0, layers) for source in slices[0].sources)


def least_bytes(recipe: Mapping[str, Any], source: Source) -> int:
    """Bytes that the result of a recipe takes at least.

    They are those of the reference in the recipe's dtype, and of slices, those of as many layers as they have. Of a
    recipe that lists its modules nothing is known, and of a mixture nothing but its base model.
    """
    if recipe.get("modules"):
        return 0
    stored = Checkpoint.open(source.folder, source.shards)
    named = getattr(torch, str(recipe.get("out_dtype") or recipe.get("dtype")).removeprefix("torch."), None)
    families = layers_of(stored)
    count = max(map(len, families.values()), default=1)
    ranges = [part["sources"][0].get("layer_range") or (0, count) for part in recipe.get("slices") or ()]
    total = 0.0
    for name in stored:
        info, layer = stored.info(name), layer_of(name)
        repeated = ranges and layer is not None and len(families[layer[0]]) == count
        share = sum(int(stop) - int(start) for start, stop in ranges) / count if repeated else 1.0
        dtype = named if isinstance(named, torch.dtype) and info.dtype.is_floating_point else info.dtype
        total += share * math.prod(info.shape) * dtype.itemsize
    return int(total)


def _depth(name: str, names: Iterable[str]) -> float:
    """Where the layer of a parameter stands, from 0 to 1; 0 for what is in no layer."""
    found = layer_of(name)
    if found is None:
        return 0.0
    last = max(layers_of(names)[found[0]])
    return found[1] / last if last else 1.0


def layers_of(names: Iterable[str]) -> dict[str, set[int]]:
    """The numbers of the layers below each list of modules."""
    families: dict[str, set[int]] = {}
    for found in map(layer_of, names):
        if found is not None:
            families.setdefault(found[0], set()).add(found[1])
    return families


def layer_of(name: str) -> tuple[str, int] | None:
    """The outermost list of modules that a tensor is in, and its number there."""
    found = re.match(r"(.*?)\.(\d+)\.", name)
    return (found[1], int(found[2])) if found else None
