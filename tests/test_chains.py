"""Ops behind each other: what the rules and gauges of each allow together changes nothing.

Found by drawing chains of ops at random, most of them over axes of one entry, axes that come twice, and tables.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from op_program import Data, Operand, OpExample, Weight, draw_inputs, draw_weights, trace_op
from torch import Generator, Tensor
from torch.nn import functional

from hf_align.symmetry.certificate.soundness import soundness
from hf_align.symmetry.derivation.derive import derive
from hf_align.symmetry.gauges.folds import FoldNorm

Chain = tuple[Callable[..., Tensor], tuple[Operand, ...]]


def centred(x: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True, unbiased=False) + 1e-2)


def normed(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-2)


def rotated(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    angle = torch.arange(float(len(x))).double().reshape(-1, *[1] * (x.dim() - 1))
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


def beside(x: Tensor) -> Tensor:
    return torch.cat([x, rotated(x)], -1)


def chosen(scores: Tensor, table: Tensor) -> Tensor:
    return functional.embedding(scores.argmax(-1), table)


def scores(x: Tensor) -> Tensor:
    return x @ x.transpose(-1, -2)


def without_mean(x: Tensor) -> Tensor:
    return x - x.mean(-1, keepdim=True)


def attended(x: Tensor, weight: Tensor) -> Tensor:
    """Attention of a single text with two heads, of queries, keys and values in one weight."""
    together = functional.linear(x, weight).reshape(1, len(x), 3, 2, -1).permute(2, 0, 3, 1, 4)
    queries, keys, values = together.reshape(3, 2, len(x), -1).unbind(0)
    return torch.softmax(queries @ keys.mT, -1) @ values


def scores_of_heads(x: Tensor, queries: Tensor, keys: Tensor, gain: Tensor, again: Tensor) -> Tensor:
    """Attention scores of two heads, whose queries and keys are normed."""
    q, k = (functional.linear(x, w).view(len(x), 2, -1) for w in (queries, keys))
    return torch.softmax((normed(q) * gain).movedim(1, 0) @ (normed(k) * again).movedim(1, 0).mT, -1).flatten(0, 1)


def attended_to_itself(x: Tensor, gain: Tensor) -> Tensor:
    """Attention of which queries and keys are what it reads, each times one gain."""
    return torch.softmax((x * (1 + gain)) @ (x * (1 + gain)).mT, -1) @ x


def normed_beside(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
    """Halves of two values side by side, normed together, and the rest of the first."""
    halves = torch.cat([y[:, :2], z[:, 2:4]], -1)
    return torch.cat([functional.layer_norm(halves, [4], eps=1e-2), torch.tanh(y[:, 4:]), x], -1)


def chosen_matrices(table: Tensor) -> Tensor:
    return table[torch.tensor([2, 0, 2])]


def column_of(x: Tensor, gain: Tensor, bias: Tensor) -> Tensor:
    return functional.layer_norm(x, x.shape[-1:], gain, bias, 1e-2).unsqueeze(-1)


_MATRICES = (Data((3, 4)), Weight((4,)), Weight((4,)), Weight((3, 5, 4)))
EXPERTS: dict[str, Chain] = {
    "a matrix that numbers choose for each vector": (
        lambda x, g, b, t: torch.bmm(chosen_matrices(t), column_of(x, g, b)).squeeze(-1),
        _MATRICES,
    ),
    "the same, of rows": (
        lambda x, g, b, t: torch.bmm(column_of(x, g, b).mT, chosen_matrices(t)).squeeze(1),
        (*_MATRICES[:3], Weight((3, 4, 5))),
    ),
    "the same, of rows and transposed matrices": (
        lambda x, g, b, t: torch.bmm(column_of(x, g, b).mT, chosen_matrices(t).mT).squeeze(1),
        _MATRICES,
    ),
}
"""In which a norm's bias goes into the matrices."""

CHAINS: dict[str, Chain] = EXPERTS | {
    "a gain of which one entry comes twice": (
        lambda x, g, w: functional.linear(normed(x) * g[torch.tensor([0, 1, 1, 3])], w),
        (Data((3, 4)), Weight((4,)), Weight((5, 4))),
    ),
    "a gain in another order, with a number added": (
        lambda x, g, w: functional.linear(normed(x) * (1 + g[torch.tensor([1, 2, 3, 0])]), w),
        (Data((3, 4)), Weight((4,)), Weight((5, 4))),
    ),
    "a gain for each head, chosen for its entries": (
        lambda x, g, w: functional.linear(normed(x) * g[torch.tensor([0, 0, 1, 1])], w),
        (Data((3, 4)), Weight((2,)), Weight((5, 4))),
    ),
    "rows of a map in another order, behind a norm": (
        lambda x, g, b, w, c: torch.tanh(
            functional.linear(functional.layer_norm(x, [4], g, b, 1e-2), w[torch.tensor([1, 0, 2, 3])], c)
        ),
        (Data((3, 4)), Weight((4,)), Weight((4,)), Weight((4, 4)), Weight((4,))),
    ),
    "one row of a map twice, behind a norm": (
        lambda x, g, b, w, c: torch.tanh(
            functional.linear(functional.layer_norm(x, [4], g, b, 1e-2), w[torch.tensor([1, 1, 2, 3])], c)
        ),
        (Data((3, 4)), Weight((4,)), Weight((4,)), Weight((4, 4)), Weight((4,))),
    ),
    "a norm of which gain and bias are two copies of one weight": (
        lambda x, g, w: functional.linear(functional.layer_norm(x, [4], g.clone(), g, 1e-2), w),
        (Data((3, 4)), Weight((4,)), Weight((5, 4))),
    ),
    "a bias that is a gain elsewhere": (
        lambda x, g, b, w: functional.linear((x * g + b).roll(1, 0), w) * b,
        (Data((3, 4)), Weight((4,)), Weight((4,)), Weight((4, 4))),
    ),
    "a norm's bias that is the gain of another": (
        lambda x, g, b, w: functional.layer_norm(functional.layer_norm(x, [4], g, b, 1e-2) @ w, [4], b, None, 1e-2),
        (Data((3, 4)), Weight((4,)), Weight((4,)), Weight((4, 4))),
    ),
    "entries of each row by the same numbers, of which the first goes everywhere": (
        lambda x, w: functional.linear(
            torch.take_along_dim(x, torch.tensor([[3, 2, 0, 1]]), -1)[:, :1].expand(3, 4), w
        ),
        (Data((3, 4)), Weight((5, 4))),
    ),
    "a norm of entries of two tokens, of a part of a map": (
        lambda x, w, g: functional.layer_norm(functional.linear(x, w)[:, :4].roll(1), [4], g, eps=1e-2),
        (Data((3, 4)), Weight((5, 4)), Weight((4,))),
    ),
    "a norm of halves of two tokens": (
        lambda x, w: normed_beside(x[1:], functional.linear(x, w)[1:], functional.linear(x, w)[:-1]),
        (Data((3, 4)), Weight((8, 4))),
    ),
    "a norm of halves of one token": (
        lambda x, w: normed_beside(x, functional.linear(x, w), functional.linear(x, w)),
        (Data((3, 4)), Weight((8, 4))),
    ),
    "a norm of halves that one map makes of two values": (
        lambda x, w: normed_beside(x, functional.linear(x, w), functional.linear(x.tanh(), w)),
        (Data((3, 4)), Weight((8, 4))),
    ),
    "a norm of a part of a map, and one of it beside something else": (
        lambda x, w: torch.cat(
            [
                normed_beside(x, functional.linear(x, w), functional.linear(x, w)),
                functional.layer_norm(torch.cat([functional.linear(x, w)[:, :4], x], -1), [8], eps=1e-2),
            ],
            -1,
        ),
        (Data((3, 4)), Weight((8, 4))),
    ),
    "a gain that is stored as a table, between two norms": (
        lambda x, g, b, h: functional.layer_norm(
            functional.layer_norm(x, [4], g.view(4), b, 1e-2), [4], h, eps=1e-2
        ),
        (Data((3, 4)), Weight((1, 4)), Weight((4,)), Weight((4,))),
    ),
    "one gain of queries and of keys": (
        lambda x, q, k, g: scores_of_heads(x, q, k, g, g),
        (Data((3, 4)), Weight((4, 4)), Weight((4, 4)), Weight((2,))),
    ),
    "one gain and one map of queries and of keys": (
        lambda x, q, g: scores_of_heads(x, q, q, g, g),
        (Data((3, 4)), Weight((4, 4)), Weight((2,))),
    ),
    "two gains of queries and of keys": (
        scores_of_heads,
        (Data((3, 4)), Weight((4, 4)), Weight((4, 4)), Weight((2,)), Weight((2,))),
    ),
    "matrices that are chosen, and seen elsewhere": (
        lambda x, g, b, t: torch.bmm(chosen_matrices(t), column_of(x, g, b)).squeeze(-1) * t.tanh().sum(),
        _MATRICES,
    ),
    "a matrix that is chosen for several columns": (
        lambda x, g, b, t: torch.bmm(t[torch.tensor([1])], column_of(x, g, b).squeeze(-1)[None])[0],
        (Data((4, 4)), Weight((4,)), Weight((4,)), Weight((3, 5, 4))),
    ),
    "matrices that read normed vectors, and others": (
        lambda x, g, b, t: torch.bmm(chosen_matrices(t), column_of(x, g, b) + x.unsqueeze(-1)).squeeze(-1),
        _MATRICES,
    ),
    "matrices that a mask chooses along two axes": (
        lambda x, g, b, t: torch.bmm(
            t[torch.tensor([[True, False], [False, True], [True, False]])], column_of(x, g, b)
        ).squeeze(-1),
        (*_MATRICES[:3], Weight((3, 2, 4, 4))),
    ),
    "queries, keys and values of a single text": (attended, (Data((4, 5)), Weight((18, 5)))),
    "a gain, flattened, and another": (
        lambda x, g, h: (x * g).flatten() * h,
        (Data((1, 3, 4)), Weight((4,)), Weight((12,))),
    ),
    "a gain, padded, and another": (
        lambda x, g, h: functional.pad(x * g, (1, 0)) * h,
        (Data((3, 4)), Weight((4,)), Weight((5,))),
    ),
    "normed vectors that go round by one": (
        lambda x, g, b, w, c: functional.linear(
            functional.pad(functional.layer_norm(x, [4], g, b, 1e-2), (1, -1), "circular"), w, c
        ),
        (Data((2, 3, 4)), Weight((4,)), Weight((4,)), Weight((5, 4)), Weight((5,))),
    ),
    "a gain on vectors that are mirrored and cut": (
        lambda x, g, w: functional.linear(functional.pad(normed(x) * g, (2, -2), "reflect"), w),
        (Data((2, 3, 4)), Weight((4,)), Weight((5, 4))),
    ),
    "normed vectors of which the first and the last come twice": (
        lambda x, g, b, w, c: functional.linear(
            functional.pad(functional.layer_norm(x, [4], g, b, 1e-2), (0, 0, 1, 1), "replicate"), w, c
        ),
        (Data((1, 2, 3, 4)), Weight((4,)), Weight((4,)), Weight((5, 4)), Weight((5,))),
    ),
    "normed vectors that are scaled one by one": (
        lambda x, g, b, s: functional.layer_norm(x, [3], g, b, 1e-2) * s,
        (Data((2, 1, 3)), Weight((3,)), Weight((3,)), Weight((2, 1, 1))),
    ),
    "a norm along the places of a convolution": (
        lambda x, g, w: functional.conv1d(normed(x) * g, w),
        (Data((2, 3, 3)), Weight((3,)), Weight((3, 3, 1))),
    ),
    "a norm along fewer places than channels": (
        lambda x, g, w: functional.conv1d(normed(x) * g, w),
        (Data((2, 4, 3)), Weight((3,)), Weight((3, 4, 1))),
    ),
    "a convolution, and a gain along its places": (
        lambda x, w, g: (functional.conv1d(x, w) * g).sigmoid(),
        (Data((2, 4, 3)), Weight((3, 4, 1)), Weight((3,))),
    ),
    "a convolution, and a gain along fewer places": (
        lambda x, w, g: (functional.conv1d(x, w) * g).sigmoid(),
        (Data((2, 4, 2)), Weight((3, 4, 1)), Weight((2,))),
    ),
    "a bias of one number behind a norm": (
        lambda x, g, b, w: functional.linear(centred(x) * g + b, w),
        (Data((3, 4)), Weight((4,)), Weight((1,)), Weight((5, 4))),
    ),
    "rows of a table by the rows of scores": (
        lambda x, t: chosen(scores(x), t),
        (Data((2, 2, 2, 2)), Weight((2, 3))),
    ),
    "rows beside their columns": (
        lambda x, t: torch.cat([chosen(x, t), chosen(x, t).T], -1).tanh(),
        (Data((3, 4)), Weight((4, 3))),
    ),
    "rows that are chosen twice": (
        lambda x, t, v: chosen(chosen(x, t).T, v),
        (Data((3, 4)), Weight((4, 3)), Weight((3, 3))),
    ),
    "a convolution of scores": (
        lambda x, w: functional.conv1d(scores(torch.tanh(x)), w),
        (Data((2, 3, 4)), Weight((3, 3, 1))),
    ),
    "a rotation and a softmax": (
        lambda x: torch.softmax(rotated(x), 2),
        (Data((2, 2, 2, 2)),),
    ),
    "a rotation beside what it turns": (
        lambda x, g: beside(x * g),
        (Data((2, 3, 4)), Weight(())),
    ),
    "lengths of one number": (lambda x: functional.normalize(x[0], dim=-1), (Data((4,)),)),
    "a constant of one number": (lambda x, t, g: chosen(x, t)[0] * g, (Data((4,)), Weight((4, 3)), Weight((1,)))),
    "rows that are chosen among copies, behind a product": (
        lambda x, w, t: chosen(functional.conv1d(x.repeat_interleave(2, -1), w), t),
        (Data((2, 3, 4)), Weight((3, 3, 1)), Weight((8, 3))),
    ),
    "rows that are chosen by maps of units that are off": (
        lambda x, w, v, t: chosen(functional.linear(functional.linear(torch.relu(x), w), v), t),
        (Data((3, 2)), Weight((4, 2)), Weight((4, 4)), Weight((4, 3))),
    ),
    "rows that are chosen where a mask hides everything": (
        lambda x, w, t: chosen(functional.linear(x.tril(-1), w), t),
        (Data((3, 3)), Weight((4, 3)), Weight((4, 3))),
    ),
    "rows that are chosen by what gates and attention make of units that are off": (
        lambda x, w, v, u, t: chosen(scores(x).softmax(-1) @ (torch.tanh(x.relu() @ w) @ v) @ u, t),
        (Data((2, 1)), Weight((1, 4)), Weight((4, 4)), Weight((4, 4)), Weight((4, 3))),
    ),
    "rows that are chosen by a gate of what is always zero": (
        lambda x, w, g, t: chosen(torch.tanh(functional.layer_norm(x, [1]) @ w) * g, t),
        (Data((3, 1)), Weight((1, 4)), Weight((4,)), Weight((4, 3))),
    ),
    "blocks of scores": (
        lambda x, w: functional.conv_transpose1d(scores(x).unsqueeze(-1), w, stride=2).tanh(),
        (Data((4, 5)), Weight((4, 2, 2))),
    ),
    "a norm of running sums": (
        lambda x, g, b: torch.tanh(functional.layer_norm(x + x.cumsum(-1), [4], g, b, 1e-2)),
        (Data((4,)), Weight((4,)), Weight((4,))),
    ),
    "every other column of scores": (lambda x: scores(x)[..., ::2], (Data((4, 4)),)),
    "a norm, less its mean, read with a bias": (
        lambda x, g, b, w, c: functional.linear(without_mean(functional.layer_norm(x, [3], g, b, 1e-2)), w, c).tanh(),
        (Data((4, 3)), Weight((3,)), Weight((3,)), Weight((5, 3)), Weight((5,))),
    ),
    "the largest of each channel, less the mean of channels": (
        lambda x, w: without_mean(functional.conv1d(x, w).topk(2)[0].sum(-1)).tanh(),
        (Data((2, 1, 4)), Weight((3, 1, 1))),
    ),
    "a choice between two rows, place by place": (
        lambda x, y, w: torch.where(y[..., :1] > 0, x, w).flatten(),
        (Data((3,)), Data((4, 2)), Weight((3,))),
    ),
    "a choice between two numbers, entry by entry": (
        lambda x, y: torch.where(y > 0, x, 0.5),
        (Data((4, 1)), Data((4, 3))),
    ),
    "entries that come as often as a table says": (
        lambda x: torch.ops.aten.repeat_interleave(x, torch.tensor([1, 2, 0, 1]), 1, output_size=4),
        (Data((1, 4)),),
    ),
    "one row of shares": (
        lambda x, y, w, b, v: functional.linear(torch.softmax(x, -1) @ functional.linear(y, w, b), v),
        (Data((4,)), Data((4, 3)), Weight((3, 3)), Weight((3,)), Weight((5, 3))),
    ),
    "one row of shares of numbers": (
        lambda x, y, b, v: (torch.softmax(x, -1) @ (y + b)) * v,
        (Data((4,)), Data((4,)), Weight(()), Weight((3,))),
    ),
}  # fmt: skip
ALONG: dict[str, Chain] = {
    "a gain of scores behind one that is added to each token": (
        lambda x, g, h: attended_to_itself(x.tanh() * g, h) + g[:, None],
        (Data((4, 4)), Weight((4,)), Weight((4,))),
    ),
    "a gain of scores between others that keep the order of channels": (
        lambda x, g, h, w: functional.linear(
            attended_to_itself(torch.tanh(functional.linear(x * g, w)) * x * g, h) + g[:, None], w
        ),
        (Data((4, 4)), Weight((4,)), Weight((4,)), Weight((4, 4))),
    ),
    "a gain of scores before a kink, and one for each token": (
        lambda x, g, h: torch.relu(attended_to_itself(x * g, h) + g[:, None]),
        (Data((4, 4)), Weight((4,)), Weight((4,))),
    ),
    "a norm that reads what another reads, and is read by it": (
        lambda x, g, b, h, c: torch.stack([functional.layer_norm(x, [4], h, c, 1e-2), functional.layer_norm(
            functional.layer_norm(x, [4], g, b, 1e-2), [4], h, c, 1e-2)]),
        (Data((3, 4)), Weight((4,)), Weight((4,)), Weight((4,)), Weight((4,))),
    ),
    "a norm beside another value, read along places": (
        lambda x, g: torch.cat([x, functional.layer_norm(x, [4], g, None, 1e-2)], -1).unsqueeze(-1),
        (Data((4,)), Weight((4,))),
    ),
    "a map with a bias that is scaled": (
        lambda x, w, b: functional.linear(x, w, 2.0 * b),
        (Data((3, 4)), Weight((5, 4)), Weight((5,))),
    ),
    "a map with a bias of ones": (
        lambda x, w: functional.linear(x, w, torch.ones(5, dtype=torch.float64)),
        (Data((3, 4)), Weight((5, 4))),
    ),
    "a map with one number for a bias": (
        lambda x, w, b: functional.linear(x, w, b),
        (Data((4,)), Weight((5, 4)), Weight((1,))),
    ),
    "a map with a weight less its mean": (
        lambda x, w, b, v, c: functional.linear(functional.linear(x, w, b), without_mean(v), c),
        (Data((3, 4)), Weight((5, 4)), Weight((5,)), Weight((3, 5)), Weight((3,))),
    ),
    "a map with a weight that is stored flat": (
        lambda x, w, v: functional.linear(functional.linear(x, w.view(5, 4)), v),
        (Data((3, 4)), Weight((20,)), Weight((4, 5))),
    ),
    "channels each with a kernel that is stored as one number": (
        lambda x, w: functional.conv1d(x, w.view(4, 1, 1).expand(4, 1, 3), padding=1, groups=4),
        (Data((4, 3)), Weight((4,))),
    ),
    "a norm with a computed bias": (
        lambda x, g, b: functional.layer_norm(x, [4], g, b, 1e-2),
        (Data((3, 4)), Weight((4,)), Data((4,))),
    ),
    "a norm with a row of a table for a bias": (
        lambda x, g, t: functional.layer_norm(x, [4], g, t[1], 1e-2),
        (Data((3, 4)), Weight((4,)), Weight((3, 4))),
    ),
    "a norm with a bias that is stored as a row": (
        lambda x, g, b: functional.layer_norm(x, [4], g, b.view(4), 1e-2),
        (Data((3, 4)), Weight((4,)), Weight((1, 4))),
    ),
    "a norm with a bias of zeros": (
        lambda x, g: functional.layer_norm(x, [4], g, torch.zeros(4, dtype=torch.float64), 1e-2),
        (Data((3, 4)), Weight((4,))),
    ),
    "a norm with a gain that is stored as a table": (
        lambda x, g: functional.rms_norm(x, [4], g.view(4), 1e-2),
        (Data((3, 4)), Weight((2, 2))),
    ),
    "channels with a gain that is stored as a row": (
        lambda x, g, b: functional.group_norm(x, 1, g.view(4), b),
        (Data((3, 4)), Weight((1, 4)), Weight((4,))),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", [*CHAINS, *ALONG])
def test_what_is_allowed_of_a_chain_changes_nothing(name: str) -> None:
    call, operands = (CHAINS | ALONG)[name]
    example = OpExample(name, call, operands, "", along=name in ALONG)
    program = trace_op(example)
    spec = derive(program)
    for seed in range(6):
        rng = Generator().manual_seed(seed)
        weights = draw_weights(example, program, rng)
        assert soundness(program, spec, weights, draw_inputs(rng), rng) < 1e-9, seed


@pytest.mark.parametrize("name", EXPERTS)
def test_a_bias_of_a_norm_goes_into_the_matrices_that_numbers_choose(name: str) -> None:
    spec = derive(trace_op(OpExample("chain", *EXPERTS[name], "")))
    (fold,) = (gauge for gauge in spec.gauges if isinstance(gauge, FoldNorm))
    assert fold.exclusive
    assert [read.weight for read in fold.reads] == ["stored.3"]
