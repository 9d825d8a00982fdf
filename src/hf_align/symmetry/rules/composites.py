"""Ops that are made of others: what has rules is what they are written out as."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hf_align.tracing.ops import Trait, describe, written_out

describe("lstm", "gru", "rnn_tanh", "rnn_relu", traits=Trait.COMPOSITE)


@written_out("scaled_dot_product_attention")
def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """softmax(s q kᵀ + m) v, [batch, heads, positions, channels], as separate products; zero where a mask hides all."""
    repeats = query.shape[-3] // key.shape[-3] if enable_gqa else 1
    if repeats > 1:
        key, value = (t.repeat_interleave(repeats, -3) for t in (key, value))
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).tril().logical_not(), -math.inf)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(attn_mask.logical_not(), -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    shares = torch.softmax(scores, -1) if attn_mask is None else torch._safe_softmax(scores, -1)
    return shares @ value
