"""Token ids: which of them stand for text, and which announce a picture, a sound or a video."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from hf_align.tracing.fields import parts

NO_LABEL = -100
"""The label of a token that no loss counts."""
_CODEBOOKS = ("codebook_vocab_size", "codebook_size")
"""Config fields that say how many codes there are for a moment of sound."""
_MODALITIES = ("image", "audio", "video", "vision", "speech")


def text_tokens(config: PretrainedConfig) -> Tensor:
    """Ids that every table has and that stand for text: those that announce another modality come with its data."""
    announcing = {*announcing_tokens(config).tolist()}
    return torch.tensor([i for i in range(_table(config)) if i not in announcing] or [0])


def sound_tokens(config: PretrainedConfig) -> Tensor:
    """Those that every codebook has, too."""
    named = (getattr(part, name, None) for part in parts(config) for name in _CODEBOOKS)
    sizes = [size for size in named if isinstance(size, int)]
    tokens = text_tokens(config)
    heard = tokens[tokens < min(sizes)] if sizes else tokens
    return heard if len(heard) else torch.tensor([0])


def announcing_tokens(config: PretrainedConfig) -> Tensor:
    """Ids that every table has and that announce another modality."""
    announcing = {
        v for c in parts(config) for k, v in {**vars(c), **_other_names(c)}.items()
        if k.endswith(("token_id", "token_index")) and k.startswith(_MODALITIES) and isinstance(v, int)
    }  # fmt: skip
    return torch.tensor([i for i in range(_table(config)) if i in announcing], dtype=torch.long)


def end_of_text(config: PretrainedConfig) -> int | None:
    """The id that ends a text, if there is one, and one that does not, and every table has them."""
    token = getattr(config, "eos_token_id", None)
    return token if isinstance(token, int) and {*text_tokens(config).tolist()} > {token} else None


def _other_names(config: PretrainedConfig) -> dict[str, Any]:
    """The fields that a config has another name for, by that name."""
    return {name: getattr(config, field, None) for name, field in (config.attribute_map or {}).items()}


def _table(config: PretrainedConfig) -> int:
    sizes = (getattr(c, "vocab_size", None) for c in parts(config))
    return min((s for s in sizes if isinstance(s, int) and s > 1), default=2)
