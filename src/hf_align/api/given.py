"""A model as a caller hands it in, and the same kind of thing with other weights as it goes out."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

from hf_align.api.loading import class_of, loaded
from hf_align.checkpoints.checkpoint import is_finite
from hf_align.checkpoints.ondemand import Computed
from hf_align.errors import IncompatibleModels, OptionError, first_line
from hf_align.running.network import Network, predictions
from hf_align.symmetry.spec import SymmetrySpec
from hf_align.tracing.build import build_without_weights, inventory, quiet
from hf_align.tracing.first_calls import first_calls
from hf_align.tracing.module_calls import Inputs, as_described, described
from hf_align.tracing.modules import ModuleConfig, tensors_of
from hf_align.tracing.own_classes import named_code, trust_what_ran
from hf_align.tracing.program import Inventory
from hf_align.tracing.stored import with_stored

Reference = str | os.PathLike[str]
Model = nn.Module | Mapping[str, Tensor] | Reference
"""A live model, a state dict (its config is given beside it), a folder or a Hub id."""
Kind = TypeVar("Kind", bound=Model)
_UNLIKE = 1e-3
"""By which part of its answers a live model may differ from what its config says that it computes: kernels of attention
round otherwise, in half precision too. Another activation, or an adapter, changes more."""
_ROWS, _TOKENS = 2, 7
"""Of the example that a live model is run on to see that it is the one of its config."""


@dataclass(frozen=True)
class Given:
    """A model that was taken in.

    Attributes:
        called: what messages call it.
        model: the live model or the state dict.
        config: its own, with the class that it is built by, and the buffers that it holds beside its weights.
        holds: its parameters, ties and buffers.
    """

    called: str
    model: nn.Module | Mapping[str, Tensor]
    config: PretrainedConfig
    holds: Inventory

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """By name in memory, on the CPU, in float32 or wider; a tied weight under each of its names."""
        held = _tensors(self.model)
        found = {n: held[n] if n in held else held[kept] for n, kept in self._kept.items()}
        return Computed(found, lambda name: _read(name, found[name]))

    @property
    def generation(self) -> dict[str, Any]:
        """What `generate` goes by, if the model is a live one that can."""
        found = getattr(self.model, "generation_config", None)
        return found.to_dict() if isinstance(found, GenerationConfig) else {}

    @property
    def sizes(self) -> dict[str, list[int]]:
        """The shape of every weight; of a tied weight under each of its names."""
        return {name: list(self.holds.shapes[kept]) for name, kept in self._kept.items()}

    @property
    def _kept(self) -> dict[str, str]:
        """The name of every weight -> the one that is kept of those that are tied."""
        return {name: name for name in self.holds.shapes} | dict(self.holds.ties)

    def with_weights(self, weights: Mapping[str, Tensor], config: PretrainedConfig, spec: SymmetrySpec) -> Any:
        """The same kind of thing with other weights, in the dtypes and on the devices of its own.

        Args:
            weights: every parameter of the spec, in the shape that it has here.
            config: what it computes with them by; its head may be untied.
        """
        if isinstance(self.model, nn.Module):
            return _live(self.model, weights, config, spec)
        for name, other in _shared({n: t for n, t in self.model.items() if n in spec.parameters}):
            warnings.warn(f"{name} and {other} are one in the state dict and two in the new one: load it by the config "
                          "of the alignment, which does not tie them", stacklevel=3)  # fmt: skip
        names = {name: name for name in spec.parameters} | dict(spec.ties)
        known = {**self.model, **{n: self.model[kept] for n, kept in self.holds.ties.items() if kept in self.model}}
        alike = {n: torch.empty_like(known[n] if n in known else known[kept]) for n, kept in names.items()}
        replaced = {n: _fill(tensor, weights[names[n]]) for n, tensor in alike.items()}
        return {n: replaced.get(n, t) for n, t in self.model.items()} | {
            n: t for n, t in replaced.items() if n in spec.parameters
        }


def take(
    model: Model, config: PretrainedConfig | None = None, *, inputs: Inputs | None = None, called: str = "the model"
) -> Given:
    """A model as the library works with it.

    Args:
        model: a live model; a state dict, in memory names; a folder or a Hub id, with `@revision` or without, which is
            loaded.
        config: of a state dict; of a plain module, what describes another one that is called in the same way.
        inputs: what a module is called with that transformers does not know.
        called: what messages call it.

    Raises:
        TypeError: it is none of these.
        ValueError: a state dict without a config, or whose tensors are not those of the config; a module without
            inputs, or that cannot be traced; weights that are not finite.
        IncompatibleModels: a live model that does not compute what its config says.
        HfAlignError: as `loaded`.
    """
    if config is not None and not isinstance(config, PretrainedConfig):
        raise OptionError(f"config is {config!r}; a config of transformers is needed, or that of hf_align.symmetries")
    if isinstance(model, (str, os.PathLike)):
        return take(loaded(os.fspath(model)), called=str(model))
    if isinstance(model, nn.Module):
        _require_readable(model, called)
    if isinstance(model, nn.Module) and inputs is not None:
        return _given(called, model, described(model, inputs))
    if isinstance(model, nn.Module) and isinstance(config, ModuleConfig):
        return _given(called, model, as_described(model, config))
    if isinstance(model, PreTrainedModel):
        own = copy.deepcopy(model.config)
        own.architectures = [type(model).__name__]
        if not trust_what_ran(own, type(model)):
            vars(own).pop("auto_map", None)  # code that did not run is not that of this model
        if _class_named(own) is not type(model):
            raise IncompatibleModels(
                f"{type(model).__name__} is not known to transformers: register it with AutoModel.register, or give "
                "inputs= with it, what it is called with"
            )
        given = _given(called, model, own)
        _require_as_configured(model, given)
        return given
    if isinstance(model, Mapping):
        if config is None:
            raise OptionError("a state dict says nothing of its architecture: give config= with it")
        require_code(config)
        return _given(called, model, config)
    if isinstance(model, nn.Module):
        raise OptionError(
            f"{called} is a {type(model).__name__}, which no config describes: give inputs= with it, what it is called "
            "with (a tensor, a tuple of arguments, or a dict of named ones)"
        )
    raise TypeError(f"{called} is a {type(model).__name__}; a transformers model, a state dict, a folder or a Hub id "
                    "is needed")  # fmt: skip


def _class_named(config: PretrainedConfig) -> Any:
    """The class of the name that a config gives; none if nothing of that name is known."""
    try:
        return class_of(config)
    except IncompatibleModels:
        return None


def require_code(config: PretrainedConfig) -> None:
    """
    Raises:
        OptionError: a config names code that came with its model, and that code has not run: transformers may have a
            class of the same name, which computes something else.
    """
    if not trust_what_ran(config, type(config)) and (code := named_code(config)) is not None:
        raise OptionError(
            f"the config names {code} under auto_map, code that came with the model: give the live model, or take "
            "auto_map out of the config if a class of transformers is meant"
        )


def _require_readable(model: nn.Module, called: str) -> None:
    """
    Raises:
        OptionError: its code or its weights are in a form that only runs.
    """
    if isinstance(model, torch.jit.ScriptModule):
        raise OptionError(f"{called} is compiled by torch.jit; give the module that it was made of")
    for name, module in model.named_modules():
        held = (*module._parameters.values(), *module._buffers.values())
        found = f"{name or called} is a {type(module).__name__}"
        if any(is_lazy(tensor) for tensor in held):
            raise OptionError(f"{found} whose sizes are not known yet: call {called} once first")
        if any(isinstance(value, torch.ScriptObject) for value in vars(module).values()):
            raise OptionError(f"{found}; quantised models cannot be moved")
        copied = module.__getstate__()
        if isinstance(copied, dict) and isinstance(copied.get("forward"), FunctionType):  # it runs this very module
            raise OptionError(f"{found} whose forward was replaced by a function; give it with its own")


def _read(name: str, tensor: Tensor) -> Tensor:
    if tensor.is_meta:
        raise OptionError(f"{name} has a shape and no numbers: it is on the meta device")
    found = tensor.detach().cpu()
    return found if found.dtype == torch.float64 else found.float()


def is_plain(model: object) -> bool:
    """Whether it is a live module that transformers does not know."""
    return isinstance(model, nn.Module) and not isinstance(model, PreTrainedModel)


def _given(called: str, model: nn.Module | Mapping[str, Tensor], config: PretrainedConfig) -> Given:
    found, held = inventory(build_without_weights(config)), _tensors(model)
    for name, shape in found.shapes.items():
        stored = held.get(name, next((held[n] for n, kept in found.ties.items() if kept == name and n in held), None))
        if stored is None:
            raise OptionError(f"{called} lacks {name}, which its config asks for")
        if tuple(stored.shape) != shape:
            raise OptionError(f"{name} is {list(stored.shape)} in {called}, but {list(shape)} by its config")
        if not isinstance(stored, Tensor):
            raise TypeError(f"{name} is a {type(stored).__name__} in {called}; a tensor is needed")
        if not stored.is_floating_point():
            raise OptionError(f"{name} is stored as {stored.dtype} in {called}; quantised models cannot be moved")
        if not (stored.is_meta or is_finite(stored)):
            raise OptionError(f"{name} has NaN or infinite entries in {called}")
    for alias, name in found.ties.items():
        if alias in held and name in held and not _is_one(held[alias], held[name]):
            raise OptionError(f"{alias} and {name} differ in {called}, but are one by its config")
    buffers = {n: held[n].detach().cpu() for n in found.buffers if n in held}
    return Given(called, model, with_stored(config, buffers), found)


def _is_one(alias: Tensor, kept: Tensor) -> bool:
    """Whether two tensors of one name hold the same; of those without numbers nothing is known."""
    if alias is kept or kept.is_meta or alias.is_meta:
        return True
    other = alias.to(kept)
    return alias.shape == kept.shape and bool(((other == kept) | (other.isnan() & kept.isnan())).all())


def _tensors(model: nn.Module | Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    return model.state_dict(keep_vars=True) if isinstance(model, nn.Module) else model


@torch.no_grad()
def _fill(held: Tensor | None, new: Tensor) -> Tensor:
    """Write numbers into a tensor: what refers to it, its layout, dtype, device and class stay."""
    assert held is not None
    return held.copy_(new)


def _shared(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
    """The names of tensors that lie in the same memory, with the name of the first that does."""
    first = dict[int, str]()
    for name, tensor in tensors.items():
        if tensor.numel() and not tensor.is_meta and first.setdefault(tensor.data_ptr(), name) != name:
            yield name, first[tensor.data_ptr()]


def _live(model: nn.Module, weights: Mapping[str, Tensor], config: PretrainedConfig, spec: SymmetrySpec) -> nn.Module:
    """A copy with other weights; what was one parameter and is none any more becomes two."""
    of_last_call = {id(t): t.detach().clone() for t in tensors_of(model) if not t.is_leaf}  # deepcopy refuses them
    made = copy.deepcopy(model, dict(of_last_call))
    if not isinstance(config, ModuleConfig):
        cast(Any, made).config.tie_word_embeddings = getattr(config, "tie_word_embeddings", False)
        if not trust_what_ran(config, type(model)):
            vars(made.config).pop("auto_map", None)
    _part_modules(made, spec.parameters)
    filled = set[int]()
    for name in spec.parameters:
        module, key = made.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
        held = module._parameters[key] if key in module._parameters else module._buffers[key]
        if id(held) in filled and held is not None:
            held = module._parameters[key] = nn.Parameter(torch.empty_like(held), requires_grad=held.requires_grad)
        filled.add(id(held))
        _fill(held, weights[name])
    for alias, name in spec.ties.items():
        shared = made.get_parameter(name)
        made.get_submodule(alias.rpartition(".")[0])._parameters[alias.rpartition(".")[2]] = shared
    return made


def _part_modules(model: nn.Module, names: Container[str]) -> None:
    """Give each place of a model a module of its own, where one at several places holds weights that are several."""
    seen = set[int]()
    for path in [path for path, _ in model.named_modules(remove_duplicate=False)]:
        module = model.get_submodule(path)
        if id(module) in seen and any(f"{path}.{name}" in names for name, _ in module.named_parameters()):
            home, _, key = path.rpartition(".")
            module = model.get_submodule(home)._modules[key] = copy.deepcopy(module)
        seen.add(id(module))


def _require_as_configured(model: PreTrainedModel, given: Given) -> None:
    """Run a live model once beside what its config describes.

    Raises:
        IncompatibleModels: they answer otherwise: its modules were replaced, wrapped or hooked.
    """
    device, dtype = model.device, model.dtype
    described, faults = Network(given.config, device, dtype), list[str]()
    placed = described.placed({n: given.weights[n] for n in given.holds.shapes})
    for example in first_calls(build_without_weights(given.config), _ROWS, _TOKENS):
        rng = torch.Generator().manual_seed(0)
        batch = {n: t.to(device, dtype if t.is_floating_point() else None)
                 for n, t in {**example.arguments, **example.drawn(rng)}.items()}  # fmt: skip
        training = [module.training for module in model.modules()]
        try:
            with torch.no_grad(), quiet():
                expected = predictions(described(placed, batch))
                found = predictions(model.eval()(**batch))
        except Exception as error:  # an example that its code does not take
            faults.append(first_line(error))
            continue
        finally:
            for module, was in zip(model.modules(), training, strict=True):  # some may be frozen
                module.training = was
        largest = expected.double().abs().max().clamp(min=torch.finfo(torch.double).tiny)  # some answer with zeros
        change = float((found.double() - expected.double()).abs().max() / largest)
        if not change < max(_UNLIKE, 30 * torch.finfo(dtype).eps):
            raise IncompatibleModels(
                f"{given.called} does not compute what its config describes: its answers differ by {change:.0e}; were"
                " modules replaced, hooked or wrapped (adapters: merge_and_unload first)?"
            )
        return
    fault = faults[0] if faults else "nothing is known to call it with"
    raise IncompatibleModels(f"{given.called} cannot be run beside what its config describes: {fault}")
