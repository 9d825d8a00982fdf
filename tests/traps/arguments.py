"""Decoders whose ops are called with arguments that they are rarely called with.

`hidden` are functions of the hidden units of the MLP, [batch, length, units], after an activation that they have in
common; `stream`, of the residual stream, [batch, length, width], which is twelve wide.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .tower import MLP, Block, Tower

Odd = Callable[[Tensor], Tensor]


class Hidden(MLP):
    odd: Odd

    def activate(self, h: Tensor) -> Tensor:
        return type(self).odd(h)


class Stream(Block):
    odd: Odd

    def forward(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        return super().forward(x + type(self).odd(x), positions, seen, cache)


def softmax_of_groups(h: Tensor) -> Tensor:
    return h.unflatten(-1, (2, -1)).softmax(-2).flatten(-2)


def rotated_pairs(h: Tensor) -> Tensor:
    even, odd = h[..., ::2], h[..., 1::2]
    return torch.stack((even * odd, odd), -1).flatten(-2)


def halves_swapped(h: Tensor) -> Tensor:
    first, second = h.chunk(2, -1)
    return torch.cat((second, first * second.abs()), -1)


def scattered(h: Tensor) -> Tensor:
    index = torch.arange(h.shape[-1]).flip(0).expand_as(h)
    return h * torch.zeros_like(h).scatter(-1, index, h)


def outer(h: Tensor) -> Tensor:
    """Through an outer product that is read along the wrong axis."""
    products = h.unsqueeze(-1) * h.unsqueeze(-2)
    return products.flatten(-2)[..., : h.shape[-1]]


def interleaved(x: Tensor) -> Tensor:
    """Heads and their channels change places before they are joined."""
    return torch.tanh(x.unflatten(-1, (3, 4))).transpose(-1, -2).flatten(-2)


def regrouped(x: Tensor) -> Tensor:
    """Cut in other pieces than it was joined from."""
    return functional.layer_norm(x.unflatten(-1, (4, 3)), (3,)).flatten(-2)


def strided(x: Tensor) -> Tensor:
    wide = torch.cat((x, x), -1)
    return torch.tanh(wide.unfold(-1, 12, 5)[..., 1, :])


def along_positions(x: Tensor) -> Tensor:
    """Averages over what was read: an axis that is no channel."""
    return functional.normalize(x, p=2.0, dim=1).cumsum(1)


def weighted_mean(x: Tensor) -> Tensor:
    channels = torch.arange(12, dtype=x.dtype)
    return torch.tanh((x * channels).mean(-1, keepdim=True)).expand_as(x)


HIDDEN: dict[str, Odd] = {
    "add_alpha": lambda h: functional.relu(torch.add(h, h.roll(1, -1), alpha=2)),
    "add_alpha_self": lambda h: torch.add(functional.relu(h), h.abs(), alpha=2),
    "sub_alpha": lambda h: torch.sub(functional.relu(h), h, alpha=-3),
    "rsub_alpha": lambda h: torch.rsub(functional.relu(h), 1, alpha=2),
    "addcmul_value": lambda h: torch.addcmul(h, h, h, value=-0.5),
    "addcdiv_value": lambda h: torch.addcdiv(h, h, h.abs() + 1, value=2),
    "lerp": lambda h: torch.lerp(h, h.square(), 0.3),
    "gelu_tanh": lambda h: functional.gelu(h, approximate="tanh"),
    "elu": lambda h: functional.elu(h, alpha=2.0),
    "celu": lambda h: functional.celu(h, alpha=0.5),
    "selu": functional.selu,
    "softplus": lambda h: functional.softplus(h, beta=2, threshold=1),
    "hardtanh": lambda h: functional.hardtanh(h, -0.5, 2.0),
    "threshold": lambda h: functional.threshold(h, 0.5, 0.25),
    "softshrink": lambda h: functional.softshrink(h, 0.3),
    "leaky_abs": lambda h: functional.leaky_relu(h, -1.0),
    "leaky_steep": lambda h: functional.leaky_relu(h, 3.0),
    "clamp_min": lambda h: h.clamp(min=-0.5),
    "clamp_max": lambda h: h.clamp(max=0.0),
    "clamp_both": lambda h: h.clamp(-0.5, 0.5),
    "cube": lambda h: h.pow(3),
    "root": lambda h: h.abs().pow(0.5),
    "base": lambda h: torch.pow(2.0, h),
    "rounded": lambda h: torch.round(h, decimals=1),
    "floor_division": lambda h: torch.div(h, 0.25, rounding_mode="floor"),
    "trunc_division": lambda h: torch.div(h * 4, h.abs() + 1, rounding_mode="trunc"),
    "remainder": lambda h: torch.remainder(h, 0.7),
    "quantised": lambda h: h + (h.round() - h).detach(),
    "glu_of_units": lambda h: torch.cat([functional.glu(h, -1), functional.glu(h, -1)], -1),
    "softmax_units": lambda h: torch.softmax(h, -1, dtype=torch.float64).to(h.dtype),
    "softmax_groups": softmax_of_groups,
    "softmax_positions": lambda h: torch.softmax(h, 1) + functional.relu(h),
    "layer_norm_bare": lambda h: functional.layer_norm(h, h.shape[-1:], eps=0.1),
    "group_norm": lambda h: functional.group_norm(h.flatten(0, 1), 2).view_as(h),
    "normalize_p1": lambda h: functional.normalize(functional.relu(h), p=1.0, dim=-1),
    "normalize_inf": lambda h: functional.normalize(h, p=float("inf"), dim=-1),
    "norm_p3": lambda h: h / h.norm(p=3, dim=-1, keepdim=True),
    "logsumexp": lambda h: h - torch.logsumexp(h, -1, keepdim=True),
    "std": lambda h: h / h.std(-1, keepdim=True),
    "var_mean": lambda h: h - torch.var_mean(h, -1, correction=0, keepdim=True)[1],
    "topk": lambda h: h * (h >= h.topk(4, -1).values[..., -1:]),
    "lowest": lambda h: h * (h <= h.topk(4, -1, largest=False).values[..., -1:]),
    "kth": lambda h: h - h.kthvalue(3, -1, keepdim=True).values,
    "median": lambda h: h - h.median(-1, keepdim=True).values,
    "sorted": lambda h: h.sort(-1, descending=True).values,
    "argmax": lambda h: h * functional.one_hot(h.argmax(-1), h.shape[-1]),
    "max_pool": lambda h: functional.max_pool1d(h, 3, 1, 1),
    "average_pool": lambda h: functional.avg_pool1d(functional.relu(h), 3, 1, 1, count_include_pad=False),
    "cumsum": lambda h: functional.relu(h).cumsum(-1),
    "cumprod": lambda h: torch.tanh(h).cumprod(-1),
    "cummax": lambda h: h.cummax(-1).values,
    "flip": lambda h: h * h.flip(-1),
    "roll_both": lambda h: h * h.roll((0, 1), (1, -1)),
    "scatter": scattered,
    "index_select": lambda h: h * h.index_select(-1, torch.arange(h.shape[-1]).roll(2)),
    "repeat": lambda h: h * h[..., :5].repeat(1, 1, 2),
    "repeat_interleave": lambda h: h * h[..., :5].repeat_interleave(2, -1),
    "tile_mean": lambda h: functional.relu(h) - h.unflatten(-1, (5, 2)).mean(-1).repeat_interleave(2, -1),
    "triangular": lambda h: h @ torch.ones(10, 10, dtype=h.dtype).triu(),
    "sinusoid": lambda h: torch.sin(h) + torch.cos(h),
    "snake": lambda h: h + torch.sin(3 * h).square() / 3,
    "pairs": rotated_pairs,
    "halves": halves_swapped,
    "outer": outer,
    "logit": lambda h: torch.logit(torch.sigmoid(h), eps=0.2),
    "nan_to_num": lambda h: torch.nan_to_num(torch.where(h > 0, h, float("nan")), nan=0.25),
    "where_scalar": lambda h: torch.where(h > 0, h, 0.1),
    "maximum_const": lambda h: torch.maximum(h, torch.linspace(-1, 1, h.shape[-1], dtype=h.dtype)),
    "bucketize": lambda h: torch.bucketize(h, torch.tensor([-1.0, 0.0, 1.0], dtype=h.dtype)).to(h.dtype),
    "sign": lambda h: torch.sign(h),
    "copysign": lambda h: torch.copysign(h, h.roll(1, -1)),
    "hypot": lambda h: torch.hypot(h, h.flip(-1)),
    "atan2": lambda h: torch.atan2(h, h.roll(1, -1)),
    "cross": lambda h: h + torch.linalg.cross(h[..., :3], h[..., 3:6]).repeat(1, 1, 4)[..., : h.shape[-1]],
    "dist": lambda h: torch.cdist(h, h[:, :1].flip(-1)) + functional.relu(h),
    "fft": lambda h: torch.fft.rfft(h, dim=-1).abs().repeat(1, 1, 2)[..., : h.shape[-1]],
    "diagonal": lambda h: functional.relu(h @ torch.diag_embed(torch.arange(10, dtype=h.dtype) - 4)),
    "sum_twice": lambda h: functional.relu(h) / h.square().sum((-1, -2), keepdim=True),
    "prod": lambda h: functional.relu(h) * h.prod(-1, keepdim=True).sigmoid(),
    "bits": lambda h: h.view(torch.int64 if h.dtype == torch.float64 else torch.int32).sign() * h.relu(),
}  # fmt: skip
STREAM: dict[str, Odd] = {
    "layer_norm_shape": lambda x: functional.layer_norm(x.unflatten(-1, (3, 4)), (3, 4)).flatten(-2),
    "rms_norm_part": lambda x: torch.cat([functional.rms_norm(p, p.shape[-1:]) for p in x.split((5, 7), -1)], -1),
    "norm_p1": lambda x: x / x.norm(p=1, dim=-1, keepdim=True),
    "norm_inf": lambda x: x / x.abs().amax(-1, keepdim=True),
    "norm_stacked": lambda x: x / (x.square().sum(-1, keepdim=True) + x[..., :1].square()).sqrt(),
    "shifted_norm": lambda x: x / (x + 1).norm(dim=-1, keepdim=True),
    "weighted_mean": weighted_mean,
    "mean_skipped": lambda x: x - x[..., 1:].mean(-1, keepdim=True),
    "std_biased": lambda x: x / x.std(-1, unbiased=False, keepdim=True),
    "interleaved": interleaved,
    "regrouped": regrouped,
    "strided": strided,
    "positions": along_positions,
    "roll_channels": lambda x: x.roll(1, -1),
    "flip_channels": lambda x: 0.5 * x.flip(-1),
    "add_alpha": lambda x: torch.add(x, torch.tanh(x), alpha=0.5),
    "half_zero": lambda x: functional.pad(x[..., :6], (0, 6)),
    "half_pad": lambda x: functional.pad(x[..., 6:], (6, 0), value=0.3),
    "constant": lambda x: torch.full_like(x, 0.7),
    "ramp": lambda x: torch.linspace(-1, 1, 12, dtype=x.dtype).expand_as(x),
    "einsum_transposed": lambda x: torch.einsum("btc,bsc->bst", x, x).tril() @ x / 50,
    "matmul_const": lambda x: x @ torch.eye(12, dtype=x.dtype).roll(1, 0),
    "conv_channels": lambda x: functional.conv1d(
        x.flatten(0, 1)[:, None], torch.tensor([[[0.5, 1.0, -0.5]]], dtype=x.dtype), padding=1)[:, 0].view_as(x),
    "bmm_self": lambda x: torch.softmax(torch.bmm(x, x.mT), -1) @ x,
    "baddbmm": lambda x: torch.baddbmm(x, torch.ones(len(x), x.shape[1], x.shape[1], dtype=x.dtype) / 8, x.tanh(),
                                       beta=2, alpha=3),
}  # fmt: skip


def _towers() -> dict[str, type[Tower]]:
    """A tower for each, by names that transformers finds in this module."""
    found: dict[str, type[Tower]] = {}
    for table, base, place in ((HIDDEN, Hidden, "mlp"), (STREAM, Stream, "block")):
        for name, odd in table.items():
            part = type(f"{base.__name__}_{name}", (base,), {"odd": staticmethod(odd), "__module__": __name__})
            label = f"{part.__name__}_tower"
            found[label] = type(label, (Tower,), {place: part, "__module__": __name__})
    return found


globals().update(_towers())
