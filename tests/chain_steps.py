"""Steps of random chains: single ops, and whole blocks of architectures, on operands of any shape that they take.

A step takes a value and a function that hands out weights of the shapes that it asks for.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from test_chains import centred, chosen, normed, rotated, scores
from torch import Tensor
from torch.nn import functional

Stored = Callable[..., Tensor]
"""A weight of a shape."""
Step = Callable[[Tensor, Stored], Tensor]


def _last(x: Tensor) -> int:
    return x.shape[-1]


OPS: tuple[Step, ...] = (
    lambda x, w: functional.linear(x, w(4, _last(x)), w(4)),
    lambda x, w: functional.linear(x, w(1, _last(x))),
    lambda x, w: x * w(_last(x)),
    lambda x, w: x * w(1),
    lambda x, w: x * w(),
    lambda x, w: x + w(_last(x)),
    lambda x, w: x + w(1),
    lambda x, w: x - w(),
    lambda x, w: x * w(x.shape[0], *[1] * (x.dim() - 1)),
    lambda x, w: x + w(*x.shape),
    lambda x, w: x / (w(_last(x)).abs() + 0.5),
    lambda x, w: functional.rms_norm(x, [_last(x)], w(_last(x)), 1e-2),
    lambda x, w: functional.rms_norm(x, [_last(x)], None, 1e-2),
    lambda x, w: functional.layer_norm(x, [_last(x)], w(_last(x)), w(_last(x)), 1e-2),
    lambda x, w: functional.layer_norm(x, [_last(x)], w(_last(x)), None, 1e-2),
    lambda x, w: functional.layer_norm(x, x.shape[-2:], None, None, 1e-2),
    lambda x, w: centred(x) * w(_last(x)),
    lambda x, w: normed(x) * w(_last(x)),
    lambda x, w: functional.normalize(x, dim=-1),
    lambda x, w: x / (x.abs().sum(-1, keepdim=True) + 0.1),
    lambda x, w: functional.group_norm(x, 1, w(x.shape[1]), w(x.shape[1])),
    lambda x, w: functional.group_norm(x, 2, w(x.shape[1]), w(x.shape[1])),
    lambda x, w: functional.batch_norm(x, w(x.shape[1]), w(x.shape[1]).abs() + 0.5, w(x.shape[1]), w(x.shape[1])),
    lambda x, w: torch.relu(x),
    lambda x, w: torch.tanh(x),
    lambda x, w: torch.exp(x),
    lambda x, w: x.square(),
    lambda x, w: x.abs(),
    lambda x, w: torch.sin(x) * w(_last(x)),
    lambda x, w: functional.prelu(x, w(1)),
    lambda x, w: torch.softmax(x, -1),
    lambda x, w: torch.softmax(x, 0),
    lambda x, w: x.sum(-1),
    lambda x, w: x.mean(0),
    lambda x, w: x.amax(-1, keepdim=True),
    lambda x, w: x.logsumexp(-1, keepdim=True),
    lambda x, w: torch.linalg.vector_norm(x, dim=-1, keepdim=True),
    lambda x, w: x - x.mean(-1, keepdim=True),
    lambda x, w: x.squeeze(),
    lambda x, w: x.unsqueeze(0),
    lambda x, w: x.unsqueeze(-1),
    lambda x, w: x.flatten(),
    lambda x, w: x.flatten(-2),
    lambda x, w: x.unflatten(-1, (2, -1)),
    lambda x, w: x.unflatten(-1, (-1, 1)),
    lambda x, w: x.transpose(-1, -2),
    lambda x, w: x.transpose(0, -1),
    lambda x, w: x[..., : max(1, _last(x) // 2)],
    lambda x, w: x[0],
    lambda x, w: x[..., -1],
    lambda x, w: x[..., ::2],
    lambda x, w: x[..., [0, _last(x) - 1, 0]],
    lambda x, w: x.roll(1, -1),
    lambda x, w: x.flip(-1),
    lambda x, w: x.cumsum(0),
    lambda x, w: x.cumsum(-1),
    lambda x, w: x.tril(),
    lambda x, w: x.expand(2, *x.shape),
    lambda x, w: x.repeat_interleave(2, -1),
    lambda x, w: functional.pad(x, (1, 0)),
    lambda x, w: torch.where(x > 0, x, 0.1 * x),
    lambda x, w: x.clamp(min=-0.5),
    lambda x, w: x.topk(max(1, _last(x) // 2), -1)[0],
    lambda x, w: x.gather(-1, x.argsort(-1)),
    lambda x, w: chosen(x, w(_last(x), 3)),
    lambda x, w: functional.conv1d(x, w(3, x.shape[-2], 1)),
    lambda x, w: functional.conv1d(x, w(x.shape[-2], 1, 3), groups=x.shape[-2], padding=1),
    lambda x, w: functional.conv2d(x, w(3, x.shape[-3], 2, 2), w(3), stride=2),
    lambda x, w: functional.conv_transpose1d(x, w(x.shape[1], 2, 2), stride=2),
    lambda x, w: functional.max_pool1d(x, 2),
    lambda x, w: functional.avg_pool1d(x, 2),
    lambda x, w: functional.interpolate(x, scale_factor=2, mode="nearest"),
    lambda x, w: rotated(x),
    lambda x, w: scores(x),
    lambda x, w: torch.sigmoid(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
    lambda x, w: x * functional.linear(x, w(1, _last(x))),
    lambda x, w: x * x.sum(-1, keepdim=True),
    lambda x, w: torch.einsum("...ij,ik->...kj", x, w(x.shape[-2], 3)),
    lambda x, w: torch.einsum("...i,oij,...j->...o", x, w(2, _last(x), _last(x)), x),
    lambda x, w: (x.unsqueeze(-1) * x.unsqueeze(-2)).flatten(-2),
)
AROUND: tuple[Callable[[Step], Step], ...] = (
    lambda inner: lambda x, w: x + inner(x, w),
    lambda inner: lambda x, w: x * inner(x, w),
    lambda inner: lambda x, w: torch.cat([x, inner(x, w)], -1),
    lambda inner: lambda x, w: torch.cat([x, inner(x, w)], 0),
    lambda inner: lambda x, w: torch.stack([x, inner(x, w)], 0),
    lambda inner: lambda x, w: x + inner(functional.rms_norm(x, [_last(x)], w(_last(x)), 1e-2), w),
    lambda inner: lambda x, w: functional.layer_norm(x + inner(x, w), [_last(x)], w(_last(x)), w(_last(x)), 1e-2),
)


def attention(x: Tensor, w: Stored, heads: int = 2, shared: int = 1, size: int = 2) -> Tensor:
    def split(count: int) -> Tensor:
        return functional.linear(x, w(count * size, _last(x))).unflatten(-1, (count, size)).transpose(-2, -3)

    q, k, v = split(heads), split(shared), split(shared)
    k, v = (y.repeat_interleave(heads // shared, -3) for y in (k, v))
    mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return functional.linear(mixed.transpose(-2, -3).flatten(-2), w(_last(x), heads * size))


def mlp(x: Tensor, w: Stored) -> Tensor:
    return functional.linear(torch.relu(functional.linear(x, w(3, _last(x)), w(3))), w(_last(x), 3), w(_last(x)))


def gated(x: Tensor, w: Stored) -> Tensor:
    hidden = functional.silu(functional.linear(x, w(3, _last(x)))) * functional.linear(x, w(3, _last(x)))
    return functional.linear(hidden, w(_last(x), 3))


def experts(x: Tensor, w: Stored, count: int = 3, asked: int = 2) -> Tensor:
    logits = functional.linear(x, w(count, _last(x)))
    values, numbers = logits.topk(asked, -1)
    shares = torch.zeros_like(logits).scatter(-1, numbers, values.softmax(-1))
    hidden = torch.relu(torch.einsum("...d,ehd->...eh", x, w(count, 2, _last(x))))
    return torch.einsum("...eh,edh,...e->...d", hidden, w(count, _last(x), 2), shares)


def recurrence(x: Tensor, w: Stored) -> Tensor:
    """An LSTM over at most four words."""
    h = c = torch.zeros(*x.shape[:-2], 2, dtype=x.dtype)
    inner, outer, bias, states = w(8, _last(x)), w(8, 2), w(8), []
    for word in x.unbind(-2)[:4]:
        i, g, o, f = (functional.linear(word, inner) + functional.linear(h, outer) + bias).chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        states.append(h)
    return torch.stack(states, -2)


def state_space(x: Tensor, w: Stored) -> Tensor:
    x = x.tanh()
    decay = -w(_last(x), 2).exp()
    b, c = functional.linear(x, w(2, _last(x))), functional.linear(x, w(2, _last(x)))
    step = functional.softplus(functional.linear(x, w(_last(x), _last(x)), w(_last(x))))
    h, states = torch.zeros_like(decay), []
    for word, b_t, c_t, s in list(zip(x.unbind(-2), b.unbind(-2), c.unbind(-2), step.unbind(-2), strict=True))[:4]:
        h = (s[..., None] * decay).exp() * h + s[..., None] * b_t[..., None, :] * word[..., None]
        states.append((h * c_t[..., None, :]).sum(-1))
    return torch.stack(states, -2)


def tied(x: Tensor, w: Stored) -> Tensor:
    weight = w(_last(x), _last(x))
    return functional.linear(functional.linear(x, weight), weight)


def there_and_back(x: Tensor, w: Stored) -> Tensor:
    weight = w(5, _last(x))
    return functional.linear(torch.relu(functional.linear(x, weight)), weight.T)


def siamese(x: Tensor, w: Stored) -> Tensor:
    weight = w(4, _last(x))
    return functional.linear(x, weight).tanh() * functional.linear(x.flip(0), weight).sigmoid()


def excited(x: Tensor, w: Stored) -> Tensor:
    hidden = torch.relu(functional.linear(x.mean(-2, keepdim=True), w(2, _last(x))))
    return x * functional.linear(hidden, w(_last(x), 2)).sigmoid()


def nearest(x: Tensor, w: Stored) -> Tensor:
    book = w(5, _last(x))
    return functional.embedding((x.unsqueeze(-2) - book).square().sum(-1).argmin(-1), book)


BLOCKS: tuple[Step, ...] = (
    attention,
    lambda x, w: attention(x, w, shared=2, size=3),
    mlp,
    gated,
    experts,
    lambda x, w: experts(x, w, asked=1),
    recurrence,
    state_space,
    tied,
    there_and_back,
    siamese,
    excited,
    nearest,
    lambda x, w: functional.linear(x, functional.normalize(w(4, _last(x)), dim=1) * w(4, 1)),
    lambda x, w: functional.linear(x, w(4, _last(x)) + w(4, 2) @ w(2, _last(x))),
    lambda x, w: functional.linear(x, w(3, _last(x))).softmax(-1) @ w(3, 5),
    lambda x, w: torch.softmax(scores(x), -1) @ functional.linear(x, w(3, _last(x))),
    lambda x, w: x + w(9, _last(x))[: x.shape[-2]],
    lambda x, w: torch.cat([w(1, _last(x)).expand(*x.shape[:-2], 1, _last(x)), x], -2),
)
