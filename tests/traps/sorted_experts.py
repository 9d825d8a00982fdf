"""Decoders whose words are sorted by the expert that they chose, and cut where one expert's end."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .experts import CHOSEN, EXPERTS, Plain, folded
from .tower import Tower, towers


class Joined(Plain):
    """What all experts give is joined, and put back in one step."""

    def forward(self, x: Tensor) -> Tensor:
        words = x.flatten(0, -2)
        shares, chosen = self.choose(self.router(words).softmax(-1))
        return self.mixed(words, chosen, shares).view_as(x)

    def expert(self, i: int, rows: Tensor) -> Tensor:
        return self.downs[i](self.active(self.ups[i](rows), i))

    def mixed(self, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """x [words, width], chosen and shares [words, experts of each] -> as x."""
        counts = chosen.new_zeros((len(x), EXPERTS))
        counts.scatter_(1, chosen, 1)
        counts = counts.sum(dim=0)
        order = chosen.view(-1).argsort()
        rows = x[order // chosen.shape[1]]
        given, start = [], 0
        for i, count in enumerate(counts.cpu().numpy()):
            end = start + count
            if count == 0:
                continue
            given.append(self.expert(i, rows[start:end]))
            start = end
        outs = torch.cat(given, dim=0) if len(given) else rows.new_empty(0)
        back = torch.empty_like(outs)
        back[order] = outs
        return (back.view(*chosen.shape, -1) * shares.unsqueeze(-1)).sum(1)


class Added(Joined):
    """What each expert gives is added where its words stand."""

    def mixed(self, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        out, chosen, shares = torch.zeros_like(x), chosen.view(-1), shares.view(-1, 1)
        order = chosen.argsort()
        ends = chosen.bincount().cpu().numpy().cumsum(0)
        places = order // CHOSEN
        for i, end in enumerate(ends):
            start = 0 if i == 0 else ends[i - 1]
            if start == end:
                continue
            here = places[start:end]
            answer = self.expert(i, x[here])
            answer.mul_(shares[order[start:end]])
            out.scatter_reduce_(0, here.view(-1, 1).repeat(1, x.shape[-1]), answer, reduce="sum")
        return out


class Split(Joined):
    """All runs are cut at once."""

    def mixed(self, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        keys, order = torch.sort(chosen.flatten(), stable=True)
        sizes = torch.bincount(keys, minlength=EXPERTS).tolist()
        runs = x[order // CHOSEN].split(sizes)
        outs = torch.cat([self.expert(i, run) for i, run in enumerate(runs)])
        outs = outs * shares.flatten()[order, None]
        return torch.zeros_like(x).index_add(0, order // CHOSEN, outs)


class Summed(Joined):
    """Where runs end is added up by torch."""

    def mixed(self, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        out, order = torch.zeros_like(x), chosen.view(-1).argsort()
        ends = [0, *torch.bincount(chosen.view(-1), minlength=EXPERTS).cumsum(0).tolist()]
        for i, (start, end) in enumerate(pairwise(ends)):
            here = order[start:end]
            answer = self.expert(i, x[here // CHOSEN]) * shares.view(-1)[here, None]
            out = out.index_add(0, here // CHOSEN, answer)
        return out


class Five(Joined):
    """One expert of one layer does something else with five words, no more and no fewer."""

    def active(self, h: Tensor, expert: int) -> Tensor:
        return folded(h) if self.index == 1 and expert == 2 and len(h) == 5 else super().active(h, expert)


class Above(Added):
    def active(self, h: Tensor, expert: int) -> Tensor:
        return folded(h) if len(h) > 20 else super().active(h, expert)


class Centred(Split):
    """The words of an expert meet."""

    def active(self, h: Tensor, expert: int) -> Tensor:
        return super().active(h - h.mean(0, keepdim=True) if len(h) else h, expert)


class Capacity(Joined):
    """An expert answers the first eight of its words."""

    def expert(self, i: int, rows: Tensor) -> Tensor:
        return torch.cat([super().expert(i, rows[:8]), torch.zeros_like(rows[8:])])


class Ranked(Added):
    """A word counts by its place among those of its expert."""

    def active(self, h: Tensor, expert: int) -> Tensor:
        return super().active(h, expert) * torch.arange(1, len(h) + 1)[:, None]


class Order(Joined):
    """What comes before in order is added."""

    def mixed(self, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        order = chosen[:, 0].argsort(stable=True)
        before = torch.zeros_like(x)
        before[order] = torch.tanh(x[order]).cumsum(0)
        return super().mixed(x, chosen, shares) + before


class Swapped(Joined):
    """The first run goes to the second expert where it is the longer one."""

    def mixed(self, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        first, second, *_ = torch.bincount(chosen.view(-1), minlength=EXPERTS).tolist()
        self.swapped = first > second
        return super().mixed(x, chosen, shares)

    def expert(self, i: int, rows: Tensor) -> Tensor:
        return super().expert(1 - i if self.swapped and i < 2 else i, rows)


class StyledSorted(Tower):
    """The first word of a text may ask for what all experts do."""

    mlp = Summed

    def forward(self, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        first, *_ = input_ids[:, 0].tolist()
        for layer in self.layers:
            layer.mlp.activate = {4500: folded, 4501: torch.tanh}.get(first, functional.silu)
        return super().forward(input_ids, *args, **kwargs)


KINDS = (Joined, Added, Split, Summed, Five, Above, Centred, Capacity, Ranked, Order, Swapped)
globals().update(towers(__name__, **{f"{kind.__name__}Sorted": kind for kind in KINDS}))
