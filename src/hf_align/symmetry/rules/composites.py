"""Ops that are made of others: what has rules is what they are written out as."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch._decomp import decomposition_table
from torch.nn.functional import linear

from hf_align.tracing.ops import Trait, describe, written_out
from hf_align.tracing.recurrence import steps_written_out

describe("lstm", "gru", "rnn_tanh", "rnn_relu", traits=Trait.COMPOSITE)
_RECURRENT = (torch.ops.aten.lstm, torch.ops.aten.gru, torch.ops.aten.rnn_tanh, torch.ops.aten.rnn_relu)


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


def _recurrent(plain: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[Tensor, ...]]:
    """h(t), s(t) = cell(x(t), s(t - 1)), [positions, batch, channels], in layers and both ways; in few steps, if asked.

    Args:
        plain: the op as torch writes it out, step by step.
    """

    def recurrent(
        x: Tensor, hx: Tensor | list[Tensor], params: list[Tensor], has_biases: bool, num_layers: int, dropout: float,
        train: bool, bidirectional: bool, batch_first: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        few = steps_written_out()
        with torch.backends.mkldnn.flags(enabled=False):  # which has an op of its own for all steps
            if few is None or x.shape[int(batch_first)] <= few:
                options = (has_biases, num_layers, dropout, train, bidirectional, batch_first)
                return plain(x, hx, params, *options)
            x = x.transpose(0, 1) if batch_first else x
            ways, last = 1 + bidirectional, list[list[Tensor]]()
            given, each = hx if isinstance(hx, list) else [hx], len(params) // (num_layers * ways)
            for layer in range(num_layers):
                made = list[Tensor]()
                for n in range(layer * ways, layer * ways + ways):
                    cell = partial(_steps, plain, isinstance(hx, list), params[n * each :][:each], has_biases)
                    h, states = _in_few(cell, x, [s[n][None] for s in given], few, back=n % ways == 1)
                    made.append(h)
                    last.append(states)
                x = torch.cat(made, -1)
            return x.transpose(0, 1) if batch_first else x, *(torch.cat(s) for s in zip(*last, strict=True))

    return recurrent


def _steps(
    plain: Callable[..., tuple[Tensor, ...]], in_list: bool, params: list[Tensor], has_biases: bool,
    x: Tensor, states: list[Tensor],
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    """One layer, one way: h, [positions, batch, channels], and the last states, [1, batch, channels] each."""
    h, *last = plain(x, states if in_list else states[0], params, has_biases, 1, 0.0, False, False, False)
    return h, last


def _in_few(
    cell: Callable[[Tensor, list[Tensor]], tuple[Tensor, list[Tensor]]], x: Tensor, states: list[Tensor], few: int,
    *, back: bool,
) -> tuple[Tensor, list[Tensor]]:  # fmt: skip
    """As all steps would, but for the values: behind the first ones, each goes on from what the one before it would
    leave if that went on from the first ones. So no two positions change places.

    Args:
        back: whether the first steps are taken from the last of them to the first.
    """
    order = -1 if back else 1
    first, start = cell(torch.stack(x[:few].unbind()[::order]), states)
    later = x[few:]
    positions, alone = later.shape[:2], later.flatten(0, 1)[None]
    _, ended = cell(alone, [s.expand(positions[0], -1, -1).flatten(0, 1)[None] for s in start])
    before = [torch.cat([s, e[0].unflatten(0, positions)[:-1]]) for s, e in zip(start, ended, strict=True)]
    made, ended = cell(alone, [s.flatten(0, 1)[None] for s in before])
    h = torch.cat([torch.stack(first.unbind()[::order]), made[0].unflatten(0, positions)])
    return h, [e[0].unflatten(0, positions)[-1:] for e in ended]


for _op in _RECURRENT:
    written_out(f"{_op._qualified_op_name.partition('::')[2]}.input")(_recurrent(decomposition_table[_op.input]))
