"""Examples that models run on: tensors, text, JSON lines or images, as arguments of `forward`."""

from __future__ import annotations

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

_CONTEXT = 512
_MASKED, _NO_LABEL = 0.15, -100
"""The share of tokens that a masked language model is to predict, and the label of all others."""
_IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")


def load_data(path: Path, tokenizer_from: Path | None, config: PretrainedConfig) -> Batch:
    """Held-out examples as arguments of `forward`, [examples, ...].

    Args:
        path: safetensors with tensors named after the arguments, a text file, JSON lines (a "text" field, or one field
            for each argument), or a folder of images.
        tokenizer_from: the folder whose tokenizer reads text, or whose image processor reads images.
        config: of the model, which says how long a context is, and whether tokens of text are to be masked.

    Raises:
        HfAlignError: the file is missing, empty, or needs a tokenizer that is not there.
    """
    if path.is_dir():
        return _images(path, tokenizer_from)
    if not path.is_file():
        raise HfAlignError(f"{path}: no such file; --data takes .safetensors, .jsonl, text, or a folder of images")
    if path.suffix == ".safetensors":
        try:
            tensors = load_file(path)
        except SafetensorError as error:
            raise HfAlignError(f"{path} is not a safetensors file: {error}") from error
        return {k: t if t.is_floating_point() else t.long() for k, t in tensors.items()}
    text = path.read_text(encoding="utf-8")
    if path.suffix in (".jsonl", ".json"):
        rows = [json.loads(line) for line in text.splitlines() if line.strip()]
        if rows and "text" not in rows[0]:
            return {k: torch.tensor([row[k] for row in rows]) for k in rows[0]}
        text = "\n".join(row["text"] for row in rows)
    tokenizer = _tokenizer(tokenizer_from, path)
    tokens = _contexts(text, tokenizer, config, path)
    return _masked(tokens, tokenizer) if _is_masked_lm(config) else {"input_ids": tokens}


def _images(folder: Path, model: Path | None) -> Batch:
    files = sorted(f for f in folder.iterdir() if f.suffix.lower() in _IMAGES)
    if not files:
        raise HfAlignError(f"{folder} holds no images ({', '.join(_IMAGES)})")
    try:
        from PIL import Image

        processor = AutoImageProcessor.from_pretrained(model)
        pixels: Tensor = processor([Image.open(f) for f in files], return_tensors="pt")["pixel_values"]
    except (ImportError, OSError, ValueError) as error:
        raise HfAlignError(f"{folder} cannot be read by the image processor of {model}: {error}") from error
    return {"pixel_values": pixels}


def _tokenizer(folder: Path | None, path: Path) -> Any:
    try:
        return AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise HfAlignError(f"{path} is text, but {folder} has no tokenizer; give token ids as safetensors") from error


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
    labels = tokens.masked_fill(~hidden, _NO_LABEL)
    return {"input_ids": tokens.masked_fill(hidden, tokenizer.mask_token_id), "labels": labels}


def with_labels(data: Batch) -> Batch:
    """Data with something to predict: the tokens themselves, where it has no labels.

    Raises:
        HfAlignError: it has neither labels nor tokens.
    """
    if "labels" in data:
        return data
    if "input_ids" not in data:
        raise HfAlignError(f"the data has {', '.join(data)} but no labels to compute a loss from")
    return {**data, "labels": data["input_ids"]}
