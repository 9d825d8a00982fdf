"""Examples that models run on: tensors, text, JSON lines or images, as arguments of `forward`."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoImageProcessor, AutoTokenizer, PretrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from hf_align.errors import HfAlignError
from hf_align.running.network import Batch
from hf_align.tracing.build import build_without_weights, quiet
from hf_align.tracing.tokens import NO_LABEL

_CONTEXT = 512
"""Tokens of a row of text at most."""
_MASKED = 0.15
"""The share of tokens that a masked language model is to predict; all others have no label."""
_TAKEN = "--data takes .safetensors, .jsonl, text, or a folder of images"
_TABLES = (".csv", ".tsv", ".parquet", ".xlsx")
_LINES = (".jsonl", ".ndjson", ".json")
_IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")


def load_data(
    path: Path, tokenizer_from: Path | None, config: PretrainedConfig, *, trust_remote_code: bool = False
) -> Batch:
    """Held-out examples as arguments of `forward`, [examples, ...].

    Args:
        path: safetensors with tensors named after the arguments, a text file, JSON lines (a "text" field, or one field
            for each argument), or a folder of images.
        tokenizer_from: the folder whose tokenizer reads text, or whose image processor reads images.
        config: of the model, which says how long a context is, and whether tokens of text are to be masked.
        trust_remote_code: run the code of a tokenizer that comes with the folder.

    Raises:
        HfAlignError: the file is missing, empty, a table, or needs a tokenizer that is not there.
    """
    try:
        is_folder, is_file = path.is_dir(), path.is_file()
    except OSError as error:  # a text is no path
        raise HfAlignError(f"{str(path)[:40]}… is no path ({error.strerror}); {_TAKEN}") from error
    if is_folder:
        return _images(path, tokenizer_from, trust_remote_code)
    if not is_file:
        raise HfAlignError(f"{path}: no such file; {_TAKEN}")
    kind = path.suffix.lower()
    if kind in _TABLES:  # as text, its header and separators would be part of what is predicted
        raise HfAlignError(f"{path} is a table; {_TAKEN}")
    if kind == ".safetensors":
        try:
            tensors = load_file(path)
        except SafetensorError as error:
            raise HfAlignError(f"{path} is not a safetensors file: {error}") from error
        return {k: t if t.is_floating_point() else t.long() for k, t in tensors.items()}
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise HfAlignError(f"{path} is no text in UTF-8 (byte {error.start}); {_TAKEN}") from error
    if kind in _LINES:
        rows = _rows(text, path)
        if "text" not in rows[0]:
            return _columns(rows, path)
        if not all(isinstance(row.get("text"), str) for row in rows):
            raise HfAlignError(f'{path}: not every line has a "text" that is a text')
        text = "\n".join(row["text"] for row in rows)
    tokenizer = _tokenizer(tokenizer_from, path, trust_remote_code)
    tokens = _contexts(text, tokenizer, config, path)
    return _masked(tokens, tokenizer) if _is_masked_lm(config) else {"input_ids": tokens}


def require_fit(data: Batch, path: Path, config: PretrainedConfig) -> Batch:
    """The data, if a model can run on it.

    Raises:
        HfAlignError: it is empty, or ragged, has arguments that `forward` does not take, token ids that are none, or
            more tokens than there are positions.
    """
    model = build_without_weights(config)
    known = inspect.signature(model.forward).parameters
    if other := [name for name in data if name not in known]:
        raise HfAlignError(f"{path}: {other[0]} is not an argument of {type(model).__name__}")
    shapes = {name: list(t.shape) for name, t in data.items()}
    rows = {shape[0] if shape else 0 for shape in shapes.values()}
    if len(rows) != 1 or rows == {0} or not all(t.numel() for t in data.values()):
        raise HfAlignError(f"{path} holds {shapes or 'nothing'}; [examples, …] are needed, as many of each")
    if not all(bool(t.isfinite().all()) for t in data.values()):
        raise HfAlignError(f"{path} contains NaN or infinite values")
    tokens, labels = data.get("input_ids"), data.get("labels")
    if tokens is not None:
        _require_tokens(tokens, path, model, config)
    if (
        labels is not None
        and not labels.is_floating_point()
        and bool((wrong := (labels < 0) & (labels != NO_LABEL)).any())
    ):
        raise HfAlignError(f"{path}: {int(labels[wrong][0])} is no label; what has none is {NO_LABEL}")
    return data


def _require_tokens(tokens: Tensor, path: Path, model: Any, config: PretrainedConfig) -> None:
    if tokens.ndim != 2 or tokens.is_floating_point():
        raise HfAlignError(f"{path}: input_ids is {list(tokens.shape)} {tokens.dtype}; [examples, tokens] are needed")
    size = getattr(model.get_input_embeddings(), "num_embeddings", None)
    if int(tokens.min()) < 0 or (size is not None and int(tokens.max()) >= size):
        bad = int(tokens.min()) if int(tokens.min()) < 0 else int(tokens.max())
        raise HfAlignError(f"{path}: {bad} is not a token of this model, which has {size}")
    longest = getattr(config, "max_position_embeddings", None)
    if isinstance(longest, int) and 0 < longest < tokens.shape[1]:
        raise HfAlignError(f"{path}: examples of {tokens.shape[1]} tokens; this model has {longest} positions")


def _rows(text: str, path: Path) -> list[dict[str, Any]]:
    """The objects of JSON lines, at least one."""
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except (ValueError, RecursionError) as error:
                raise HfAlignError(f"{path}: line {number} is not valid JSON") from error
    if not rows or not all(isinstance(row, dict) and row for row in rows):
        raise HfAlignError(f"{path}: every line must be a JSON object, and there must be one")
    return rows


def _columns(rows: list[dict[str, Any]], path: Path) -> Batch:
    """One tensor for each field."""
    if any(row.keys() != rows[0].keys() for row in rows):
        raise HfAlignError(f"{path}: not all lines have the same fields")
    return {name: _column([row[name] for row in rows], name, path) for name in rows[0]}


def _column(values: list[Any], name: str, path: Path) -> Tensor:
    try:
        return torch.tensor(values)
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        what = f"{name} is not numbers, as many in each line"
        raise HfAlignError(f'{path}: {what}; lines hold a "text", or arguments of the model') from error


def _images(folder: Path, model: Path | None, trusted: bool) -> Batch:
    files = sorted(f for f in folder.iterdir() if f.suffix.lower() in _IMAGES)
    if not files:
        raise HfAlignError(f"{folder} holds no images ({', '.join(_IMAGES)}); {_TAKEN}")
    try:
        from PIL import Image

        with quiet():
            processor = AutoImageProcessor.from_pretrained(model, trust_remote_code=trusted)
        pixels: Tensor = processor([Image.open(f) for f in files], return_tensors="pt")["pixel_values"]
    except Exception as error:  # an image, or a processor's config, may be anything
        raise HfAlignError(f"{folder} cannot be read by the image processor of {model}: {error}") from error
    return {"pixel_values": pixels}


def _tokenizer(folder: Path | None, path: Path, trusted: bool) -> Any:
    try:
        with quiet():
            return AutoTokenizer.from_pretrained(folder, trust_remote_code=trusted)
    except Exception as error:  # its files may be anything
        if not trusted and "trust_remote_code" in str(error):
            raise HfAlignError(
                f"the tokenizer of {folder} is code, which runs only with --trust-remote-code"
            ) from error
        raise HfAlignError(
            f"{path} is text, but {folder} has no tokenizer that can be read; give token ids as safetensors"
        ) from error


def _contexts(text: str, tokenizer: Any, config: PretrainedConfig, path: Path) -> Tensor:
    """Text cut into contexts, [contexts, tokens]."""
    ids: Tensor = tokenizer(text, return_tensors="pt", verbose=False)["input_ids"][0]
    length = min(getattr(config, "max_position_embeddings", _CONTEXT), _CONTEXT)
    if len(ids) < length:
        raise HfAlignError(f"{path} has {len(ids)} tokens; one context of {length} is needed")
    return ids[: len(ids) // length * length].reshape(-1, length)


def _is_masked_lm(config: PretrainedConfig) -> bool:
    """Whether transformers lists the model's class as one that predicts masked tokens in place."""
    classes = set(config.architectures or ())
    masked, written = MODEL_FOR_MASKED_LM_MAPPING_NAMES, MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    return bool(classes & set(masked.values()) - set(written.values()))


def _masked(tokens: Tensor, tokenizer: Any) -> Batch:
    """Always the same share of the tokens hidden, and only they to be predicted (Devlin et al., 1810.04805, 3.1)."""
    if tokenizer.mask_token_id is None:
        raise HfAlignError("the tokenizer has no mask token; give input_ids and labels as safetensors")
    hidden = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(0)) < _MASKED
    labels = tokens.masked_fill(~hidden, NO_LABEL)
    return {"input_ids": tokens.masked_fill(hidden, tokenizer.mask_token_id), "labels": labels}


def with_labels(data: Batch) -> Batch:
    """Data with something to predict: the tokens themselves, where it has no labels; of padding nothing is predicted.

    Raises:
        HfAlignError: it has neither labels nor tokens, or no token behind another.
    """
    if "labels" in data:
        return data
    if "input_ids" not in data:
        raise HfAlignError(f"the data has {', '.join(data)} but no labels to compute a loss from")
    tokens, mask = data["input_ids"], data.get("attention_mask")
    labels = tokens if mask is None or mask.shape != tokens.shape else tokens.masked_fill(mask == 0, NO_LABEL)
    if bool((labels[..., 1:] == NO_LABEL).all()):
        raise HfAlignError("the data has no token behind another, so there is none to predict")
    return {**data, "labels": labels}
