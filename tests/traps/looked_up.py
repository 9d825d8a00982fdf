"""Decoders whose experts are looked up by number: the units of one are another's only where both numbers are alike."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .tower import MLP, TowerConfig, towers

EXPERTS, CHOSEN = 4, 2


class Plain(MLP):
    def __init__(self, config: TowerConfig, index: int) -> None:
        super().__init__(config, index)
        width, hidden = config.hidden_size, config.intermediate_size
        self.router = nn.Linear(width, EXPERTS, bias=False)
        self.other = nn.Linear(width, EXPERTS, bias=False)
        self.ups = nn.Parameter(torch.zeros(EXPERTS, width, hidden))
        self.downs = nn.Parameter(torch.zeros(EXPERTS, hidden, width))
        del self.gate, self.up, self.down

    def forward(self, x: Tensor) -> Tensor:
        words = x.flatten(0, -2)
        shares, chosen = self.choose(self.router(words).softmax(-1))
        h = self.active(torch.einsum("tw,tcwh->tch", words, self.ups[chosen]), words, chosen)
        out = torch.einsum("tch,tchw->tcw", h, self.downs[self.again(chosen, words)])
        return (out * shares[..., None]).sum(1).reshape(x.shape)

    def choose(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        return scores.topk(CHOSEN)

    def active(self, h: Tensor, words: Tensor, chosen: Tensor) -> Tensor:
        return self.activate(h)

    def again(self, chosen: Tensor, words: Tensor) -> Tensor:
        """Whose units are read."""
        return chosen


class Largest(Plain):
    def choose(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        best = scores.max(-1, keepdim=True)
        return best.values, best.indices


class InTurn(Plain):
    """The best, and the best of all others."""

    def choose(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        first = scores.max(-1, keepdim=True)
        second = scores.scatter(-1, first.indices, -1.0).max(-1, keepdim=True)
        return tuple(torch.cat(pair, -1) for pair in zip(first, second, strict=True))


class Gated(Plain):
    """A product of three, as in GPT-OSS."""

    def active(self, h: Tensor, words: Tensor, chosen: Tensor) -> Tensor:
        return (h + 1) * (h * torch.sigmoid(1.7 * h))


class TwoRouters(Plain):
    """The units of one expert are read by another, whom a router of its own has chosen."""

    def again(self, chosen: Tensor, words: Tensor) -> Tensor:
        return self.other(words).topk(CHOSEN).indices


class TwoMaxima(Largest):
    def again(self, chosen: Tensor, words: Tensor) -> Tensor:
        return self.other(words).max(-1, keepdim=True).indices


class Exchanged(Plain):
    """The second choice reads the units of the first."""

    def again(self, chosen: Tensor, words: Tensor) -> Tensor:
        return chosen.flip(-1)


class Cross(InTurn):
    def again(self, chosen: Tensor, words: Tensor) -> Tensor:
        first, second = chosen.chunk(2, -1)
        return torch.cat((second, first), -1)


class Next(Plain):
    def again(self, chosen: Tensor, words: Tensor) -> Tensor:
        return (chosen + 1) % EXPERTS


class Before(Plain):
    """The choice of the word before."""

    def again(self, chosen: Tensor, words: Tensor) -> Tensor:
        return chosen.roll(1, 0)


class Both(Plain):
    """Units of two experts meet in a product."""

    def active(self, h: Tensor, words: Tensor, chosen: Tensor) -> Tensor:
        others = self.ups[self.other(words).topk(CHOSEN).indices]
        return h * torch.einsum("tw,tcwh->tch", words, others)


class BothMaxima(Largest):
    def active(self, h: Tensor, words: Tensor, chosen: Tensor) -> Tensor:
        others = self.ups[self.other(words).max(-1, keepdim=True).indices]
        return h * torch.einsum("tw,tcwh->tch", words, others)


class Sum(Plain):
    """Units of all choices are added before they are read."""

    def active(self, h: Tensor, words: Tensor, chosen: Tensor) -> Tensor:
        return self.activate(h.sum(1, keepdim=True).expand_as(h))


class Carried(Plain):
    """Units of a choice meet those of the choice before."""

    def active(self, h: Tensor, words: Tensor, chosen: Tensor) -> Tensor:
        return self.activate(h + h.roll(1, 1))


class CarriedWords(Plain):
    """Units of a word meet those of the word before."""

    def active(self, h: Tensor, words: Tensor, chosen: Tensor) -> Tensor:
        return self.activate(h + h.roll(1, 0))


class MeanWords(Plain):
    def active(self, h: Tensor, words: Tensor, chosen: Tensor) -> Tensor:
        return self.activate(h) + h.mean(0, keepdim=True)


class Running(Plain):
    def active(self, h: Tensor, words: Tensor, chosen: Tensor) -> Tensor:
        return self.activate(h.cumsum(0))


class Attending(Plain):
    """Words read units of each other, by the places where they stand."""

    def active(self, h: Tensor, words: Tensor, chosen: Tensor) -> Tensor:
        near = torch.ones(len(h), len(h)).tril()
        return self.activate(torch.einsum("ts,sch->tch", near.to(h), h))


class Biased(Plain):
    """Units and gates of one expert, each with a bias of its own."""

    def __init__(self, config: TowerConfig, index: int) -> None:
        super().__init__(config, index)
        self.gates = nn.Parameter(torch.zeros(EXPERTS, config.hidden_size, config.intermediate_size))
        self.biases = nn.Parameter(torch.zeros(EXPERTS, config.intermediate_size))

    def active(self, h: Tensor, words: Tensor, chosen: Tensor) -> Tensor:
        gate = torch.einsum("tw,tcwh->tch", words, self.gates[chosen]) + self.biases[chosen]
        return self.activate(gate) * h


class Flat(Plain):
    """All choices of all words one behind the other, as transformers runs them."""

    def forward(self, x: Tensor) -> Tensor:
        words = x.flatten(0, -2)
        shares, chosen = self.choose(self.router(words).softmax(-1))
        each = chosen.flatten()
        h = torch.bmm(words.repeat_interleave(CHOSEN, 0)[:, None], self.ups[each])
        out = torch.bmm(self.activate(h), self.downs[each]).squeeze(1)
        return (out.unflatten(0, (-1, CHOSEN)) * shares[..., None]).sum(1).reshape(x.shape)


class Loop(Plain):
    """Each expert in turn."""

    def forward(self, x: Tensor) -> Tensor:
        words = x.flatten(0, -2)
        shares = self.router(words).softmax(-1)
        out = torch.zeros_like(words)
        for expert in range(EXPERTS):
            up, down = self.matrix(self.ups, expert), self.matrix(self.downs, self.reader(expert))
            out = out + self.activate(words @ up) @ down * shares[:, expert, None]
        return out.reshape(x.shape)

    def reader(self, expert: int) -> int:
        return expert

    def matrix(self, stack: Tensor, expert: int) -> Tensor:
        return stack[expert]


class LoopNext(Loop):
    def reader(self, expert: int) -> int:
        return (expert + 1) % EXPERTS


class Below(Loop):
    """Matrices are stored one below the other, as in DBRX."""

    def __init__(self, config: TowerConfig, index: int) -> None:
        super().__init__(config, index)
        width, hidden = config.hidden_size, config.intermediate_size
        self.ups = nn.Parameter(torch.zeros(EXPERTS * hidden, width))
        self.downs = nn.Parameter(torch.zeros(EXPERTS * hidden, width))

    def matrix(self, stack: Tensor, expert: int) -> Tensor:
        found = stack.view(EXPERTS, -1, stack.shape[1])[expert]
        return found.T if stack is self.ups else found


class BelowNext(Below):
    def reader(self, expert: int) -> int:
        return (expert + 1) % EXPERTS


KINDS = (Plain, Largest, InTurn, Gated, TwoRouters, TwoMaxima, Exchanged, Cross, Next, Before, Both, BothMaxima, Sum,
         Carried, CarriedWords, MeanWords, Running, Attending, Biased, Flat, Loop, LoopNext,
         Below, BelowNext)  # fmt: skip
globals().update(towers(__name__, **{f"LookedUp{kind.__name__}Tower": kind for kind in KINDS}))
