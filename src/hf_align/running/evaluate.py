"""Does it help? Losses along the straight line between two models, and the barrier in between."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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
from hf_align.ondemand import Computed
from hf_align.running.network import Batch, Network, batches

_BATCH = 64
_CONTEXT = 512
_MASKED, _NO_LABEL = 0.15, -100
"""The share of tokens that a masked language model is to predict, and the label of all others."""
_IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")


@dataclass(frozen=True)
class Path1D:
    """Losses (nats per label) along λ, where λ = 0 is A and λ = 1 is B."""

    lambdas: tuple[float, ...]
    losses: tuple[float, ...]

    @property
    def barrier(self) -> float:
        """The largest rise over the line between the endpoint losses (Frankle et al., arXiv 1912.05671)."""
        first, last = self.losses[0], self.losses[-1]
        return max(x - ((1 - t) * first + t * last) for t, x in zip(self.lambdas, self.losses, strict=True))

    @property
    def barrier_over_mean(self) -> float:
        """The largest rise over the mean of the endpoint losses."""
        return max(self.losses) - (self.losses[0] + self.losses[-1]) / 2

    def as_json(self) -> dict[str, Any]:
        return {"losses": list(self.losses), "barrier": self.barrier, "barrier_over_mean": self.barrier_over_mean}


@dataclass(frozen=True)
class Comparison:
    """The two paths between A and B: as they are, and aligned.

    Attributes:
        features: by the weight that reads them, the mean correlation of A's features with B's, as they are and aligned.
    """

    naive: Path1D
    aligned: Path1D
    features: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    @property
    def helps(self) -> bool:
        """Whether alignment lowered the barrier."""
        return self.aligned.barrier < self.naive.barrier

    def as_json(self) -> dict[str, Any]:
        """The contract of `hf-align evaluate --json`."""
        return {
            "loss_a": self.naive.losses[0],
            "loss_b": self.naive.losses[-1],
            "lambdas": list(self.naive.lambdas),
            "naive": self.naive.as_json(),
            "aligned": self.aligned.as_json(),
            "helps": self.helps,
            "features": {name: {"naive": x, "aligned": y} for name, (x, y) in self.features.items()},
        }


def lambdas(count: int) -> tuple[float, ...]:
    """`count` equally spaced mixing weights from 0 to 1."""
    return tuple(i / (count - 1) for i in range(count))


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


class Evaluator:
    """Losses of one architecture on held-out data.

    Args:
        network: the architecture.
        data: arguments of `forward`, [examples, ...]; without `labels`, the tokens themselves are predicted.
    """

    def __init__(self, network: Network, data: Batch) -> None:
        self.network = network
        self.data = with_labels(data)

    def path(
        self,
        a: Mapping[str, Tensor],
        b: Mapping[str, Tensor],
        at: Sequence[float],
        tick: Callable[[], object] | None = None,
    ) -> Path1D:
        """Losses of (1-λ)·a + λ·b; weights by name in memory."""
        losses = []
        for t in at:
            losses.append(self.loss(Computed(a, lambda n, t=t: torch.lerp(a[n].float(), b[n].float(), t))))  # type: ignore[misc]
            if tick is not None:
                tick()
        return Path1D(tuple(at), tuple(losses))

    @torch.no_grad()
    def loss(self, weights: Mapping[str, Tensor]) -> float:
        """The model's own loss with these weights, averaged over the data."""
        device = self.network.device
        placed = self.network.placed(weights)
        total = count = 0.0
        for batch in batches(self.data, _BATCH):
            size = len(next(iter(batch.values())))
            total += float(self.network.loss(placed, {k: t.to(device) for k, t in batch.items()})) * size
            count += size
        return total / count


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
