"""From a config to a model without weights: parameters take no memory, the buffers that a model computes stay real."""

from __future__ import annotations

import copy
import importlib
import io
import logging
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import torch
import transformers
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.overrides import TorchFunctionMode
from transformers import PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from hf_align.errors import HfAlignError, IncompatibleModels, first_line
from hf_align.runtime.devices import CPU
from hf_align.tracing.budget import bounded_memory, entries_of
from hf_align.tracing.fields import parts
from hf_align.tracing.modules import ModuleConfig, build_module
from hf_align.tracing.own_classes import class_of_its_own, only_if_trusted, trust
from hf_align.tracing.program import Inventory
from hf_align.tracing.reasons import FROM_WEIGHTS, place, reason
from hf_align.tracing.stored import load_stored

ELSEWHERE = "where it will be"
"""Stands for the folder from which what is written will be loaded: no file that code may read lies there."""


_FILLED = frozenset((torch.zeros, torch.ones, torch.full, torch.rand, torch.randn))
_LARGE = 2**24
"""Entries: what is larger, and filled when it is made, is rather the weights of experts than a table."""


class _WeightsOnMeta(TorchFunctionMode):
    """Weights come from `torch.empty`, which costs nothing here; computed buffers stay real.

    Args:
        largest: entries of what may be filled when it is made; what has more is taken for weights.

    Attributes:
        filled: empty tensors that were made a copy of a real one: by id, with the version and the value from then on.
        left_empty: whether something was left empty that a class fills.
    """

    def __init__(self, largest: float = math.inf) -> None:
        super().__init__()
        self.filled: dict[int, tuple[Tensor, int, Tensor]] = {}
        self.left_empty = False
        self._largest = largest

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty:
            kwargs["device"] = "meta"
        is_filled = func in _FILLED and self._largest < math.inf
        if is_filled and (entries_of(func, args, kwargs) or 0) > self._largest:
            self.left_empty = True
            kwargs["device"] = "meta"
        result = func(*args, **kwargs)
        if func is torch.Tensor.copy_ and args[0].is_meta and not args[1].is_meta:
            self.filled[id(args[0])] = args[0], args[0]._version, args[1].detach().to(args[0].dtype).expand_as(args[0])
        return result

    def fill(self, model: PreTrainedModel) -> PreTrainedModel:
        """Give a model the values of buffers that it does not save, where they were made empty and then filled."""
        for module in model.modules():
            for name in module._non_persistent_buffers_set:
                empty = module._buffers.get(name)
                made, version, value = self.filled.get(id(empty), (None, 0, torch.empty(0)))
                if empty is not None and made is empty and empty._version == version:
                    module._buffers[name] = value.clone()
        return model


@contextmanager
def quiet() -> Iterator[None]:
    """Constructors warn about sizes that are unusual only because they are small, exports about why they fail; and some
    models print, where the result of a command is to stand.

    `logging.disable` would have thousands of loggers forget what they know, twice each time.
    """
    unheard = patch.object(logging.Logger, "handle", lambda logger, record: None)
    with unheard, warnings.catch_warnings(), redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        yield


def read_config(model: str | Path, *, trust_remote_code: bool = False) -> PretrainedConfig:
    """The config of a folder, a Hub id, or a registered model type (its default config).

    Raises:
        HfAlignError: there is no such config, or it needs code that was not trusted.
    """
    if str(model) in transformers.CONFIG_MAPPING and not Path(model).exists():
        try:
            return transformers.AutoConfig.for_model(str(model))
        except Exception as error:  # some classes refuse what they themselves propose
            raise HfAlignError(
                f"{model}: its default config is refused by its own class ({_last_line(error)})"
            ) from error
    try:
        with quiet(), bounded_memory():
            config = transformers.AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
    except HfAlignError:
        raise
    except Exception as error:  # a config may be anything, and so may what its class says of it
        if not trust_remote_code and "trust_remote_code" in str(error):
            raise HfAlignError(only_if_trusted(model)) from error
        raise HfAlignError(f"{model}: no usable config.json ({first_line(error)})") from error
    named = config.architectures
    if not (named is None or (isinstance(named, list | tuple) and all(isinstance(name, str) for name in named))):
        raise HfAlignError(f"{model}: architectures in its config.json is not a list of names")
    if trust_remote_code:
        trust(config)
    return config


def _last_line(error: Exception) -> str:
    """Where what checks a config says what is wrong with it."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1].strip()


def model_class(config: PretrainedConfig) -> Callable[..., PreTrainedModel]:
    """How the config says its model is built: the class it was saved from, else the base model; of a plain module, by
    copying it.

    Raises:
        IncompatibleModels: the class is not known to this version of transformers.
    """
    if isinstance(config, ModuleConfig):
        return cast(Callable[..., PreTrainedModel], build_module)
    for name in config.architectures or ():
        with quiet():
            found = class_of_its_own(config, name) or _class_of_transformers(config, name)
        found = found or _registered_class(config, name)
        if found is None:
            raise IncompatibleModels(f"architecture {name} is unknown to transformers {transformers.__version__}")
        return found._from_config
    for auto in (transformers.AutoModelForCausalLM, transformers.AutoModelForMaskedLM,
                 transformers.AutoModelForImageClassification, transformers.AutoModel):  # fmt: skip
        if type(config) in auto._model_mapping:
            return auto.from_config
    raise IncompatibleModels(f"no model class for configs of type {config.model_type}")


def _class_of_transformers(config: PretrainedConfig, name: str) -> Any:
    """A class that transformers exports, or that stands unexported beside the config's own class, as parts of models
    do."""
    found = getattr(transformers, name, None)
    package, _, module = type(config).__module__.rpartition(".configuration_")
    if found is not None or not package.startswith("transformers."):
        return found
    try:
        found = getattr(importlib.import_module(f"{package}.modeling_{module}"), name, None)
    except ImportError:
        return None
    return found if isinstance(found, type) and issubclass(found, PreTrainedModel) else None


def _registered_class(config: PretrainedConfig, name: str) -> Any:
    """A class that the user registered with an Auto class."""
    for auto in (transformers.AutoModelForCausalLM, transformers.AutoModel):
        found = auto._model_mapping._extra_content.get(type(config))
        if found is not None and getattr(found, "__name__", "") == name:
            return found
    return None


def build_without_weights(config: PretrainedConfig) -> PreTrainedModel:
    """The model in evaluation mode with weights that take no memory (fake CPU tensors) and real buffers: those that
    the config notes, else freshly computed ones."""
    build = model_class(config)
    try:
        model = _empty(lambda: _with_plain_parts(build, config))
    except (HfAlignError, MemoryError):
        raise
    except Exception as error:  # what a class says of a config that it does not take may be anything
        if isinstance(error, RuntimeError) and "meta" in str(error):
            raise IncompatibleModels(f"{place(error)}: {FROM_WEIGHTS}") from error
        named = config._name_or_path or config.model_type
        raise IncompatibleModels(f"{named}: no model can be built from its config ({reason(error)})") from error
    return _with_fake_weights(model, config)


def _empty(build: Callable[[], PreTrainedModel]) -> PreTrainedModel:
    """What is built, without the values of its weights. Large ones that a class fills at once are not filled, unless
    it computes something else from them."""
    with quiet(), no_init_weights():
        with _WeightsOnMeta(_LARGE) as made:
            try:
                model = made.fill(build())
            except (HfAlignError, MemoryError):
                raise
            except Exception:
                if not made.left_empty:
                    raise
            else:
                if not (made.left_empty and any(tensor.is_meta for tensor in _computed(model))):
                    return model
        with _WeightsOnMeta() as made:
            return made.fill(build())


def _computed(model: PreTrainedModel) -> Iterator[Tensor]:
    """The buffers of a model, and what its parts hold beside them."""
    yield from model.buffers()
    for module in model.modules():
        yield from (value for value in vars(module).values() if isinstance(value, Tensor))


def build_as_loaded(
    config: PretrainedConfig, dtype: torch.dtype = torch.float32, folder: str | None = None
) -> PreTrainedModel:
    """As `build_without_weights`, but as `from_pretrained` builds it: attention and caches of its own choice, whatever
    kernels its config asks for. Experts run one after the other: grouped products do not take every size and dtype.

    Args:
        dtype: of the weights, and of buffers that follow it.
        folder: where it is loaded from, by default where the config was read.
    """
    config, kind = copy.deepcopy(config), model_class(config)
    config._name_or_path = config._name_or_path if folder is None else folder
    for part in parts(config):
        part._attn_implementation = None
        part._experts_implementation = "eager"
    model = _empty(lambda: kind(config, dtype=dtype).eval())
    return _with_fake_weights(model, config)


def build_to_run(config: PretrainedConfig) -> PreTrainedModel:
    """As `build_as_loaded`, where whole texts are read at once: keys and values are not kept."""
    config = copy.deepcopy(config)
    _keep_nothing(config)
    return build_as_loaded(config)


def _keep_nothing(config: PretrainedConfig) -> None:
    """Turn caches off in a config and its parts. A part that says nothing of them keeps none, and may hand whatever it
    is told to functions that take no such argument."""
    for part in parts(config):
        if hasattr(part, "use_cache"):
            part.use_cache = False


def _with_fake_weights(model: PreTrainedModel, config: PretrainedConfig) -> PreTrainedModel:
    _compute_what_is_not_saved(model)
    load_stored(model, config)
    fake = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(tracked_fakes=[]))
    replaced: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, weight in list(module._parameters.items()):
            if weight is not None:
                if id(weight) not in replaced:
                    replaced[id(weight)] = _fake_parameter(fake, weight)
                module._parameters[name] = replaced[id(weight)]
    _fill_as_loaded(model, fake)
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = _fake_statistic(fake, module, name, buffer)
    model.tie_weights()
    return model


def _compute_what_is_not_saved(model: PreTrainedModel) -> None:
    """Weights that a class says it does not save are tables that it computes, as positions by sines and cosines."""
    for name in getattr(model, "_keys_to_ignore_on_save", None) or ():
        path, _, key = name.rpartition(".")
        try:
            module = model.get_submodule(path)
        except AttributeError:  # of a class with fewer parts
            continue
        weight = module._parameters.pop(key, None)
        if weight is not None:
            module.register_buffer(key, weight.data, persistent=False)


def unsaved_tables(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Buffers that a class computes and does not save, by name; transformers reads them from a checkpoint all the
    same."""
    tables = dict(model.named_buffers())
    return {name: tables[name] for name in tables.keys() & {*(getattr(model, "_keys_to_ignore_on_save", None) or ())}}


def _fill_as_loaded(model: PreTrainedModel, weights: FakeTensorMode) -> None:
    """Fill empty tables as `from_pretrained` does: it has a model initialise what no checkpoint holds.

    Args:
        weights: the mode of all that has no value, from which nothing may be computed.
    """
    parts_of = {owner: owner.modules() for owner in model.modules() if isinstance(owner, PreTrainedModel)}
    for module, owner in {part: owner for owner, within in parts_of.items() for part in within}.items():
        tables = {n: b for n in module._non_persistent_buffers_set if (b := module._buffers.get(n)) is not None}
        empty = {name: table for name, table in tables.items() if table.is_meta}
        if not empty:
            continue
        made = {name: torch.zeros(table.shape, dtype=table.dtype) for name, table in empty.items()}
        module._buffers.update(made)
        try:
            with quiet(), no_init_weights(), patch.object(weights, "allow_non_fake_inputs", False):
                owner._init_weights(module)
        except Exception:  # as many ways to want a weight's value as there are models
            module._buffers.update(empty)
        for name, table in made.items():
            filled = module._buffers[name]
            if isinstance(filled, FakeTensor) or (filled is table and not table._version):
                module._buffers[name] = empty[name]


def _fake_parameter(fake: FakeTensorMode, like: Tensor) -> torch.nn.Parameter:
    """What `Parameter(torch.empty(…))` is under the mode, without the dozen ops that this takes there."""
    empty: Any = FakeTensor(fake, torch.empty(like.shape, dtype=like.dtype, device="meta"), CPU)
    empty._is_param = True
    assert isinstance(empty, torch.nn.Parameter)
    return empty


def _fake_statistic(fake: FakeTensorMode, module: torch.nn.Module, name: str, buffer: Tensor) -> Tensor:
    """A saved buffer that was computed from weights, as spectral norms have them, is one itself."""
    if name in module._non_persistent_buffers_set or not buffer.is_floating_point():
        raise IncompatibleModels(f"the buffer {name} of {type(module).__name__}: {FROM_WEIGHTS}")
    with fake:
        return torch.empty(buffer.shape, dtype=buffer.dtype)


def _with_plain_parts(build: Callable[..., PreTrainedModel], config: PretrainedConfig) -> PreTrainedModel:
    """Attention as separate products, experts as batched ones (a loop over them depends on the data), no caches."""
    config = copy.deepcopy(config)
    _keep_nothing(config)
    for part in parts(config):
        part._experts_implementation = "batched_mm"
    try:
        return build(config, attn_implementation="eager", dtype=torch.float32).eval()
    except ValueError:  # some models know only one kind of attention
        return build(config, dtype=torch.float32).eval()


def inventory(model: PreTrainedModel) -> Inventory:
    """What a model saves."""
    statistics = trained_buffers(model)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()} | statistics
    saved = model.state_dict(keep_vars=True)
    buffers = {n: tuple(b.shape) for n, b in model.named_buffers() if n in saved and n not in statistics}
    return Inventory(shapes, canonical_names(model)[1], buffers)


def by_inputs(model: nn.Module) -> frozenset[str]:
    """The matrices that an adapter takes for [inputs, outputs]: those of modules other than torch's linear layers and
    tables."""
    return frozenset(
        f"{path}.weight"
        for path, part in model.named_modules()
        if (weight := part._parameters.get("weight")) is not None and weight.dim() == 2
        and not isinstance(part, (nn.Linear, nn.Embedding))
    )  # fmt: skip


def trained_buffers(model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    """Saved floating point buffers: no gradient reaches them, but training does (running means, routing biases). What
    is infinite is a limit that nothing reaches."""
    saved = model.state_dict(keep_vars=True)
    floating = {n: b for n, b in model.named_buffers() if n in saved and b.is_floating_point()}
    return {n: tuple(b.shape) for n, b in floating.items() if isinstance(b, FakeTensor) or not b.isinf().any()}


def canonical_names(model: PreTrainedModel) -> tuple[dict[str, str], dict[str, str]]:
    """Every parameter name -> the name that is kept, and the ties alone."""
    first: dict[int, str] = {}
    names = {name: first.setdefault(id(p), name) for name, p in model.named_parameters(remove_duplicate=False)}
    return names, {name: kept for name, kept in names.items() if name != kept}
