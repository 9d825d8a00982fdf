"""Data as a caller has it, as arguments of `forward`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hf_align.api.given import Given, is_plain
from hf_align.api.module_data import LABELS, MOST, inputs_from, loss_told, module_data, own_loss
from hf_align.checkpoints.ondemand import Computed
from hf_align.errors import HfAlignError, OptionError
from hf_align.running.data import load_data, require_fit
from hf_align.running.network import Batch, Loss, Network
from hf_align.running.trial import require_runs
from hf_align.tracing.module_calls import Inputs
from hf_align.tracing.modules import ModuleConfig

Data = str | os.PathLike[str] | Mapping[str, Tensor] | Iterable[Any]
"""A file or folder as `--data` takes it; tensors by the names of arguments, [examples, ...]; a DataLoader or any other
iterable of such batches; a dataset whose rows have them, or have a "text"; or a list of texts."""


def examples(
    data: Data | None, given: Given, tokenizer: PreTrainedTokenizerBase | None = None, *, labelled: bool = True
) -> Batch | None:
    """Arguments of `forward`, [examples, ...]; None for no data.

    Args:
        given: the model that reads them.
        tokenizer: for texts; that of the model's folder by default.
        labelled: whether labels are for the model's own loss.

    Raises:
        ValueError: it is of another kind, or its rows are not of one length.
        HfAlignError: the model cannot run on it.
    """
    if data is None:
        return None
    if isinstance(given.config, ModuleConfig):
        return module_data(data, given.config).batch
    if isinstance(data, (str, os.PathLike)):
        read = load_data(Path(data), _folder_of(given), given.config)
        found = require_fit(read, called := Path(data), given.config)
    else:
        found = require_fit(_batch(data, given, tokenizer), called := Path("data"), given.config)
    read_by_it = {k: t for k, t in found.items() if labelled or k != LABELS}
    own, weights = given.holds.shapes, given.weights  # tied ones once
    require_runs(Network(given.config), Computed(own, weights.__getitem__), [read_by_it], called)
    return found


def called_with(inputs: Inputs | None, data: Any, *models: Any) -> Inputs | None:
    """What plain modules are called with: the first batch of their data, where nothing else is said."""
    if inputs is None and data is not None and any(is_plain(model) for model in models):
        return next((found for model in models if (found := inputs_from(data, model)) is not None), None)
    return inputs


def examples_and_loss(
    data: Data | None, objective: Loss | None, given: Given, tokenizer: PreTrainedTokenizerBase | None = None
) -> tuple[Batch | None, Loss | None]:
    """Arguments of `forward`, and what is computed on them besides; None is a model's own loss."""
    objective = None if objective is None else _of_one_number(objective)
    if data is None or not isinstance(given.config, ModuleConfig):
        return examples(data, given, tokenizer, labelled=objective is None), objective
    found = module_data(data, given.config)
    if objective is not None:
        return found.batch, own_loss(objective, found)
    return found.batch, loss_told if LABELS in found.batch else None


def _of_one_number(objective: Loss) -> Loss:
    """The caller's loss, which must be one."""

    def loss(outputs: Any, batch: Batch) -> Tensor:
        found: Any = objective(outputs, batch)
        if isinstance(found, float):
            return torch.tensor(found)
        if not isinstance(found, Tensor) or found.numel() != 1:
            shape = f" of {list(found.shape)}" if isinstance(found, Tensor) else ""
            raise OptionError(f"objective gives a {type(found).__name__}{shape}; a tensor of one number is needed")
        return found.squeeze()

    return loss


def _in_long(values: Tensor) -> Tensor:
    """Whole numbers as 64-bit ones, which losses ask for."""
    return values if values.is_floating_point() or values.dtype == torch.bool else values.long()


def _batch(data: Any, given: Given, tokenizer: PreTrainedTokenizerBase | None) -> Batch:
    if isinstance(data, Mapping):
        return {name: _in_long(torch.as_tensor(value)) for name, value in data.items()}
    if isinstance(data, Tensor):
        raise OptionError('data is a tensor; say which argument it is, as in {"input_ids": tensor}')
    if not isinstance(data, Iterable):
        raise OptionError(f"data is {data!r}; a path, texts, a dataset, a DataLoader or tensors by name are needed")
    found: list[Any] = []
    rows = 0
    for item in data:
        found.append(item)
        rows += _rows(item)
        if rows >= MOST:
            break
    if not found:
        raise OptionError("data has no examples")
    if all(isinstance(item, str) for item in found):
        return _of_texts(found, given, tokenizer)
    if all(isinstance(item, Mapping) and isinstance(item.get("text"), str) for item in found):
        return _of_texts([item["text"] for item in found], given, tokenizer)
    if not all(isinstance(item, Mapping) and item.keys() == found[0].keys() for item in found):
        raise OptionError("data gives neither texts nor batches with the same arguments")
    batches = all(map(_is_batch, found))
    return {name: _joined(name, [item[name] for item in found], batches) for name in found[0]}


def _is_batch(item: Mapping[str, Any]) -> bool:
    """Whether it holds several rows: all of its values are as long as each other, and not all are lists of numbers,
    as those of one row of tokens are. The labels of a batch of images are such a list, those of one image are none."""
    if any(isinstance(value, (str, bytes)) for value in item.values()):
        return False
    shapes = [torch.as_tensor(value).shape for value in item.values()]
    return any(len(shape) > 1 for shape in shapes) and len({shape[:1] for shape in shapes}) == 1


def _rows(item: Any) -> int:
    return len(next(iter(item.values()))) if isinstance(item, Mapping) and _is_batch(item) else 1


def _joined(name: str, values: list[Any], batches: bool) -> Tensor:
    """Batches one behind the other, or single rows on top of each other."""
    if other := next((value for value in values if isinstance(value, (str, bytes))), None):
        raise OptionError(f'{name} is text ({other[:20]!r}) in data; a column of text is called "text"')
    tensors = [torch.as_tensor(value) for value in values]
    if len({t.shape[1:] if batches else t.shape for t in tensors}) > 1:
        raise OptionError(f"{name} is not of one length in all of data: pad it, or cut it")
    return _in_long(torch.cat(tensors) if batches else torch.stack(tensors))


def _of_texts(texts: list[str], given: Given, tokenizer: PreTrainedTokenizerBase | None) -> Batch:
    """As a text file of them would be read."""
    with TemporaryDirectory() as made:
        if tokenizer is not None:
            tokenizer.save_pretrained(made)
        folder = Path(made) if tokenizer is not None else _folder_of(given)
        if folder is None:
            raise OptionError("texts need a tokenizer: give tokenizer= with them")
        file = Path(made, "texts.txt")
        file.write_text("\n".join(texts), encoding="utf-8")
        try:
            return load_data(file, folder, given.config)
        except HfAlignError as error:
            raise OptionError(str(error).replace(str(file), "data")) from error


def _folder_of(given: Given) -> Path | None:
    """Where a model was loaded from, if it was."""
    named = given.config._name_or_path
    return Path(named) if named and Path(named).is_dir() else None
