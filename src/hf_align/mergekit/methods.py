"""mergekit's methods inside our own loop over shards: for every architecture, whole."""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from hf_align.checkpoints.shards import Claim, ShardPlan, claimed
from hf_align.errors import HfAlignError
from hf_align.mergekit.basis import Inputs
from hf_align.mergekit.extra import dtype_of
from hf_align.options import Options
from hf_align.pipeline import Say
from hf_align.writing import Draft, record, write


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


def merge_here(
    config: Any,
    inputs: Inputs,
    output: Path,
    options: Options,
    say: Say,
    seed: int = 0,
    document: Callable[[], object] = lambda: None,
) -> None:
    """Every tensor of the architecture, by the method and the parameters that a recipe gives it.

    Args:
        seed: of methods that draw random numbers; each tensor starts from it, so that a run that was killed goes on
            to the same result.
        document: writes what is said of the result, while the output folder is still claimed.

    Raises:
        HfAlignError: the recipe does not fit its method, or the output cannot be written.
    """
    settings = Settings.of_models(config, config.models or whole_slice(config, inputs) or ())
    _require_bound(config, settings, inputs)
    on_disk = {name: link.sources[0] for name, link in inputs.pair.a.names.by_memory().items()}

    def produce(name: str) -> Tensor:
        known = on_disk.get(name, name)
        parameters = settings.of(known, _depth(name, inputs))
        sources = dict.fromkeys(settings.models, name)
        return mixed(config, inputs, sources, parameters, settings.base, known, f"{seed} {name}")

    def fill(claim: Claim) -> None:
        write(claim, draft, produce, say, quiet=options.quiet)

    draft = Draft.build(inputs.pair, inputs.pair.a, options.dtype, options.max_shard_size)
    fill_output(config, inputs, output, options, say, seed, draft.plan, fill, document)


def mixed(
    config: Any,
    inputs: Inputs,
    sources: Mapping[str, str],
    parameters: Mapping[str, Any],
    base: str | None,
    name: str,
    seed: str,
) -> Tensor:
    """One tensor of the result, by the method of a recipe.

    Args:
        sources: what it is made of: a parameter's name in memory, by model.
        parameters: of the method.
        name: that the method knows it by.
        seed: that random numbers start from.
    """
    before = dtype_of(config, "dtype")
    tensors = {model: inputs.weights[model][source] for model, source in sources.items()}
    if before is not None:
        tensors = {model: tensor.to(before) for model, tensor in tensors.items()}
    torch.manual_seed(zlib.crc32(seed.encode()))
    return merge_tensors(tensors, config.merge_method, parameters, base, name)


def fill_output(
    config: Any,
    inputs: Inputs,
    output: Path,
    options: Options,
    say: Say,
    seed: int,
    plan: ShardPlan,
    fill: Callable[[Claim], None],
    document: Callable[[], object],
) -> None:
    """Claim the output folder of a recipe, and `fill` it unless it is complete; arguments as `merge_here`."""
    made_of = {k: d for m in inputs.models.values() for k, d in m.checkpoint.record(m.ref).items()}
    made_of |= {"the recipe": f"{config.model_dump_json()} {seed}", **options.result}
    with claimed(output, record(inputs.pair, made_of), overwrite=options.overwrite) as claim:
        if claim.is_complete:
            return say(f"{output} is already complete")
        claim.require_room(plan)
        fill(claim)
        if claim.processes.leads:
            document()


def _require_bound(config: Any, settings: Settings, inputs: Inputs) -> None:
    """See that the method takes these models, and that every tensor has its parameters, before anything is written."""
    from mergekit import merge_methods

    try:
        merge_methods.get(config.merge_method).validate_inputs(settings.models, settings.base)
        for name in inputs.pair.spec.parameters:
            settings.of(name, 0.0)
    except (RuntimeError, ValueError, TypeError) as error:
        raise HfAlignError(f"the recipe does not fit its method: {str(error).splitlines()[0]}") from error


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
    def of_models(cls, config: Any, given: Sequence[Any]) -> Settings:
        """Of models, or of the sources of a slice; the base model joins them."""
        entries = list(given)
        if config.base_model and all(entry.model != config.base_model for entry in entries):
            entries.append(SimpleNamespace(model=config.base_model, parameters=None))
        return cls.of_slice(config, entries, config.slices[0].parameters if config.slices else None, config.base_model)

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
            return {**shared, **by_name}

        return cls(tuple(str(e.model) for e in sources), str(base) if base else None, of)


def whole_slice(config: Any, inputs: Inputs) -> list[Any] | None:
    """The sources of a recipe whose only slice is all layers; None of one that cuts and stacks them."""
    layers = max((len(family) for family in layers_of(inputs.pair.spec.parameters).values()), default=0)
    slices = config.slices or []
    if len(slices) != 1 or any(tuple(source.layer_range) != (0, layers) for source in slices[0].sources):
        return None
    return list(slices[0].sources)


def _depth(name: str, inputs: Inputs) -> float:
    """Where the layer of a parameter stands, from 0 to 1; 0 for what is in no layer."""
    found = layer_of(name)
    if found is None:
        return 0.0
    last = max(layers_of(inputs.pair.spec.parameters)[found[0]])
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
