"""Ops that are made of others: what has rules is what they are written out as."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import linear

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


def _read(x: Tensor, h: Tensor, w: Tensor, u: Tensor, b: Tensor | None, c: Tensor | None) -> tuple[Tensor, Tensor]:
    """W x + b and U h + c."""
    return linear(x, w, b), linear(h, u, c)


@written_out("rnn_tanh_cell")
def tanh_cell(
    input: Tensor, hx: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
) -> Tensor:
    """h' = tanh(W x + b + U h + c)."""
    return torch.tanh(torch.add(*_read(input, hx, w_ih, w_hh, b_ih, b_hh)))


@written_out("rnn_relu_cell")
def relu_cell(
    input: Tensor, hx: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
) -> Tensor:
    """h' = max(0, W x + b + U h + c)."""
    return torch.relu(torch.add(*_read(input, hx, w_ih, w_hh, b_ih, b_hh)))


@written_out("gru_cell")
def gated_cell(
    input: Tensor, hx: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
) -> Tensor:
    """h' = z ⊙ h + (1 - z) ⊙ tanh(n_x + r ⊙ n_h), with r and z from the first two thirds of what is read."""
    given, kept = (read.chunk(3, -1) for read in _read(input, hx, w_ih, w_hh, b_ih, b_hh))
    reset, update = (torch.sigmoid(a + b) for a, b in zip(given[:2], kept[:2], strict=True))
    new = torch.tanh(given[2] + reset * kept[2])
    return update * hx + (1 - update) * new


@written_out("lstm_cell")
def memory_cell(
    input: Tensor, hx: list[Tensor], w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """c' = f ⊙ c + i ⊙ g, h' = o ⊙ tanh(c'), with i, f, g and o the quarters of what is read."""
    hidden, memory = hx
    gates = torch.add(*_read(input, hidden, w_ih, w_hh, b_ih, b_hh)).chunk(4, -1)
    put, keep, out = (torch.sigmoid(gates[i]) for i in (0, 1, 3))
    memory = keep * memory + put * torch.tanh(gates[2])
    return out * torch.tanh(memory), memory
