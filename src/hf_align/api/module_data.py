"""Data and losses of modules that transformers does not know: batches as a DataLoader gives them."""

from __future__ import annotations

import inspect
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from hf_align.errors import OptionError
from hf_align.running.data import load_data
from hf_align.running.network import Batch, Loss, floating, predictions
from hf_align.tracing.build import build_without_weights
from hf_align.tracing.module_calls import Inputs, bound
from hf_align.tracing.modules import ModuleConfig, ModuleModel

_ROWS = 4
"""Of a first batch, with which a module is traced."""
MOST = 4096
"""Examples that are read of what may have no end."""
_AT_ONCE = 256
"""Examples of a dataset that are put together at once."""
LABELS = "labels"
_NONE = "data has no batches of tensors: a DataLoader, a dataset, or a list of batches is needed"


def inputs_from(data: Any, model: Any) -> Inputs | None:
    """What a module is called with, from the first batch of its data; None where it is no live one."""
    if not isinstance(model, nn.Module):
        return None
    first = next(_batches(data), None)
    if first is None:
        raise OptionError(_NONE)
    arguments, _ = _parted(first, model.forward, None)
    few = [v[:_ROWS] if isinstance(v, Tensor) else v for v in arguments.values()]
    return dict(zip(arguments, few, strict=True)) if isinstance(first, Mapping) else tuple(few)


@dataclass(frozen=True)
class ModuleData:
    """What a module is run on.

    Attributes:
        batch: its arguments by name, and what else the batches hold, [examples, ...].
        form: of the batches that the caller gave: tuple, dict, or Tensor.
    """

    batch: Batch
    form: type

    def as_given(self, batch: Batch) -> Any:
        """Rows of the data in the form of the caller's batches."""
        if self.form is dict:
            return batch
        return tuple(batch.values()) if self.form is tuple else next(iter(batch.values()))


def module_data(data: Any, config: ModuleConfig) -> ModuleData:
    """The batches of a caller, one behind the other.

    Raises:
        OptionError: they are none, or do not fit the module.
    """
    model: Any = build_without_weights(config)
    assert isinstance(model, ModuleModel)
    columns: dict[str, list[Tensor]] = {}
    rows = 0
    form: type = dict
    endless = not hasattr(data, "__len__")
    for item in _batches(data):
        form = dict if isinstance(item, Mapping) else Tensor if isinstance(item, Tensor) else tuple
        arguments, others = _parted(item, model.whole.forward, config)
        call = dict(arguments) if form is dict else tuple(arguments.values())
        found = {**bound(config, model.whole, call), **others}
        if columns and columns.keys() != found.keys():
            raise OptionError("the batches of data do not have the same arguments")
        for name, value in found.items():
            if not isinstance(value, Tensor) or not value.dim():
                raise OptionError(f"{name} is a {type(value).__name__} in data; tensors [examples, ...] are needed")
            columns.setdefault(name, []).append(value.float() if value.is_floating_point() else value)
        rows += len(next(iter(found.values())))
        if endless and rows >= MOST:
            break
    if not columns:
        raise OptionError(_NONE)
    return ModuleData({name: _joined(name, values) for name, values in columns.items()}, form)


def own_loss(objective: Loss, data: ModuleData) -> Loss:
    """The caller's loss on what the network is run on, whose batches have another form."""
    return lambda outputs, batch: objective(outputs, data.as_given(batch))


def loss_told(outputs: Any, batch: Batch) -> Tensor:
    """The loss that a module returns, or cross-entropy of labels whose classes it tells.

    Classes are the last axis of the outputs or, as in images, the second. An output that is one number is a loss.

    Raises:
        OptionError: there is neither.
    """
    named = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    if isinstance(named, Tensor) and not named.dim():
        return named
    labels, told = batch.get(LABELS), predictions(outputs)
    if labels is not None and not labels.is_floating_point():
        if told.shape[:-1] == labels.shape:
            return cross_entropy(told.flatten(0, -2), labels.flatten().long())
        if told.shape[:1] + told.shape[2:] == labels.shape:
            return cross_entropy(told, labels.long())
    numbers = [v for v in floating(outputs) if not v.dim()]
    if len(numbers) == 1:
        return numbers[0]
    found = "data has no labels to compute a loss from"
    if labels is not None:
        found = f"labels {list(labels.shape)} are no classes of outputs {list(told.shape)}"
    raise OptionError(f"{found}: give objective=, a function of outputs and batch")


def _batches(data: Any) -> Iterator[Any]:
    """A list of batches, a loader, a dataset of single examples, or tensors that are one batch, perhaps in a file."""
    if isinstance(data, (str, os.PathLike)):
        data = load_data(Path(data), None, ModuleConfig())
    if isinstance(data, (Tensor, Mapping)) or (isinstance(data, tuple) and all(isinstance(t, Tensor) for t in data)):
        return iter([data])
    if not isinstance(data, (list, tuple, DataLoader)) and hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        data = DataLoader(data, batch_size=_AT_ONCE)
    if isinstance(data, bytes) or not isinstance(data, Iterable):
        raise OptionError(f"data is {data!r}; a DataLoader, a dataset, a list of batches or tensors are needed")
    return iter(data)


def reusable(data: Any) -> Any:
    """Data that can be read more than once: of what can be read only once, its first examples."""
    return list(itertools.islice(data, MOST)) if isinstance(data, Iterator) else data


def _parted(item: Any, forward: Any, config: ModuleConfig | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arguments in a batch, and what else it holds.

    Args:
        config: says how many arguments are given by their places; without it those that `forward` needs.
    """
    signature = inspect.signature(forward).parameters
    if isinstance(item, Mapping):
        known = {name for _, call in config.calls for name, _ in call} | config.nested.keys() if config else signature
        return {n: v for n, v in item.items() if n in known}, {n: v for n, v in item.items() if n not in known}
    if isinstance(item, Tensor):
        return {"0": item}, {}
    if not isinstance(item, (tuple, list)):
        raise OptionError(f"a batch of data is a {type(item).__name__}; a tensor, a tuple or a dict is needed")
    needed = [n for n, p in signature.items()
              if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]  # fmt: skip
    count = min(len(config.by_place) if config and config.by_place else max(1, len(needed)), len(item))
    rest = item[count:]
    names = [LABELS] if len(rest) == 1 else [f"{LABELS}_{i}" for i in range(len(rest))]
    return {str(i): v for i, v in enumerate(item[:count])}, dict(zip(names, rest, strict=True))


def _joined(name: str, values: list[Tensor]) -> Tensor:
    if len({value.shape[1:] for value in values}) > 1:
        raise OptionError(f"{name} is not of one shape in all of data: pad it, or cut it")
    return torch.cat(values).cpu()
