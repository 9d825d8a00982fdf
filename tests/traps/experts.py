"""Decoders whose experts run in a loop over the words that chose them, and may look at how many these are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .tower import MLP, Tower, TowerConfig, towers

EXPERTS, CHOSEN = 4, 2


def folded(h: Tensor) -> Tensor:
    return h * h.roll(1, -1)


class Plain(MLP):
    experts: ClassVar[int] = EXPERTS

    def __init__(self, config: TowerConfig, index: int) -> None:
        super().__init__(config, index)
        sizes = config.hidden_size, config.intermediate_size
        self.router = nn.Linear(sizes[0], self.experts, bias=False)
        self.ups = nn.ModuleList(nn.Linear(*sizes, bias=False) for _ in range(self.experts))
        self.downs = nn.ModuleList(nn.Linear(*sizes[::-1], bias=False) for _ in range(self.experts))
        del self.gate, self.up, self.down

    def forward(self, x: Tensor) -> Tensor:
        words = x.flatten(0, -2)
        shares, chosen = self.choose(self.router(words).softmax(-1))
        out = torch.zeros_like(words)
        for expert in range(self.experts):
            rows, choice = torch.where(chosen == expert)
            answer = self.downs[expert](self.active(self.ups[expert](words[rows]), expert))
            out = self.added(out, rows, answer * shares[rows, choice, None])
        return out.reshape(x.shape)

    def choose(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        return scores.topk(CHOSEN)

    def active(self, h: Tensor, expert: int) -> Tensor:
        return self.activate(h)

    def added(self, out: Tensor, rows: Tensor, answer: Tensor) -> Tensor:
        return out.index_add(0, rows, answer)


class Above(Plain):
    def active(self, h: Tensor, expert: int) -> Tensor:
        return folded(h) if len(h) > 40 else super().active(h, expert)


class Five(Plain):
    """One expert of one layer does something else with five words, no more and no fewer."""

    def active(self, h: Tensor, expert: int) -> Tensor:
        special = self.index == 1 and expert == 2 and len(h) == 5
        return folded(h) if special else super().active(h, expert)


class FiveWide(Plain):
    """Something else with five words where its layers are wide, as those of small copies are not."""

    def active(self, h: Tensor, expert: int) -> Tensor:
        special = self.index == 1 and expert == 2 and len(h) == 5 and h.shape[-1] >= 64
        return folded(h) if special else super().active(h, expert)


class FiveSorted(Five):
    """The largest scores come first where all are sorted."""

    def choose(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        ranked, order = scores.sort(dim=-1, descending=True)
        return ranked[:, :CHOSEN], order[:, :CHOSEN]


class FiveSmallest(Five):
    def choose(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        chosen = scores.argsort(-1)[:, :CHOSEN]
        return scores.gather(-1, chosen), chosen


class FiveLowest(Five):
    def choose(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        return scores.topk(CHOSEN, largest=False)


class FiveArgmax(Five):
    def choose(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        best, chosen = scores.max(-1, keepdim=True)
        return best, chosen


class FiveNearest(Five):
    """Chooses by a distance, and no largest score."""

    def choose(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        chosen = (scores - 0.25).abs().argmin(-1, keepdim=True)
        return scores.gather(-1, chosen), chosen


class FiveAbove(Five):
    """As many experts as have a score above a threshold."""

    def forward(self, x: Tensor) -> Tensor:
        words = x.flatten(0, -2)
        scores = self.router(words).softmax(-1)
        out = torch.zeros_like(words)
        for expert in range(EXPERTS):
            (rows,) = torch.where(scores[:, expert] > 0.25)
            answer = self.downs[expert](self.active(self.ups[expert](words[rows]), expert))
            out = self.added(out, rows, answer * scores[rows, expert, None])
        return out.reshape(x.shape)


class Above5(FiveAbove):
    """Chosen so, but alike at every number."""

    def active(self, h: Tensor, expert: int) -> Tensor:
        return self.activate(h)


class Totalled(Plain):
    """What the experts of a word count together is added up by number, one number for each word."""

    def forward(self, x: Tensor) -> Tensor:
        words = x.flatten(0, -2)
        shares, chosen = self.choose(self.router(words).softmax(-1))
        total = torch.zeros_like(words[:, 0])
        for expert in range(EXPERTS):
            rows, choice = torch.where(chosen == expert)
            total = total.scatter_add(0, rows, shares[rows, choice])
        return super().forward(x) / total.view(*x.shape[:-1], 1)


class Capacity(Plain):
    """An expert answers the first eight of its words."""

    def added(self, out: Tensor, rows: Tensor, answer: Tensor) -> Tensor:
        return super().added(out, rows[:8], answer[:8])


class Centred(Plain):
    """The words of an expert meet."""

    def active(self, h: Tensor, expert: int) -> Tensor:
        return super().active(h - h.mean(0, keepdim=True), expert)


class Together(Plain):
    """What two experts have together is asked for one after the other."""

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.router(x.flatten(0, -2)).topk(CHOSEN)[1]
        self.rows = [len(torch.where(chosen == expert)[0]) for expert in range(self.experts)]
        return super().forward(x)

    def active(self, h: Tensor, expert: int) -> Tensor:
        if self.rows[0] == 7:  # noqa: SIM102
            if self.rows[1] == 9:
                return folded(h)
        return super().active(h, expert)


class Asked(Plain):
    """Asks how many words there are, and goes on where nobody answers."""

    def active(self, h: Tensor, expert: int) -> Tensor:
        try:
            few = bool(torch.ones_like(h).sum() < 30)
        except Exception:
            few = False
        return folded(h) if few else super().active(h, expert)


class Loaded(Plain):
    """What an expert answers depends on how many words chose it, as a number in the graph says."""

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.router(x.flatten(0, -2)).topk(CHOSEN)[1]
        self.load = nn.functional.one_hot(chosen, EXPERTS).sum((0, 1))
        return super().forward(x)

    def active(self, h: Tensor, expert: int) -> Tensor:
        return torch.where(self.load[expert] > 9, folded(h), super().active(h, expert))


class Dropped(Plain):
    """Words beyond the capacity are dropped by a mask."""

    def forward(self, x: Tensor) -> Tensor:
        words = x.flatten(0, -2)
        mask = nn.functional.one_hot(self.router(words).topk(CHOSEN)[1], EXPERTS).sum(1)
        mask = mask * (mask.cumsum(0) <= 6)
        out = torch.zeros_like(words)
        for expert in range(EXPERTS):
            rows = torch.nonzero(mask[:, expert]).flatten()
            out = self.added(out, rows, self.downs[expert](self.active(self.ups[expert](words[rows]), expert)))
        return out.reshape(x.shape)


class Most(Plain):
    """The expert with the most words is another one."""

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.router(x.flatten(0, -2)).topk(CHOSEN)[1]
        self.most = max(range(EXPERTS), key=lambda e: len(torch.where(chosen == e)[0]))
        return super().forward(x)

    def active(self, h: Tensor, expert: int) -> Tensor:
        return folded(h) if expert == self.most else super().active(h, expert)


class Seventeen(Plain):
    """One expert of many, of one layer, looks up what it does with seventeen words."""

    experts: ClassVar[int] = 16

    def active(self, h: Tensor, expert: int) -> Tensor:
        return {(1, 5, 17): folded}.get((self.index, expert, len(h)), self.activate)(h)


class Seven(Plain):
    """Seven words are looked up in a table that a call gives."""

    table: dict[int, Callable[[Tensor], Tensor]] = {}  # noqa: RUF012

    def active(self, h: Tensor, expert: int) -> Tensor:
        return self.table.get(len(h), self.activate)(h)


class FlaggedExperts(Tower):
    """What experts do with seven words is up to an argument."""

    mlp = Seven

    def forward(self, input_ids: Tensor, special: bool = False, **kwargs: Any) -> Any:
        for layer in self.layers:
            layer.mlp.table = {7: folded} if special else {}
        try:
            return super().forward(input_ids, **kwargs)
        finally:
            for layer in self.layers:
                layer.mlp.table = {}


class Far(Plain):
    """Words with scores that random weights hardly give are answered by how many these are."""

    def forward(self, x: Tensor) -> Tensor:
        words = x.flatten(0, -2)
        rows, _ = torch.where(self.router(words)[:, :2] > 6)
        answer = {7: folded}.get(len(rows), self.activate)(self.ups[0](words[rows]))
        return super().forward(x) + torch.zeros_like(words).index_add(0, rows, self.downs[0](answer)).view_as(x)


class Counted(Plain):
    """How many words chose each expert is counted first, so that those that none chose are skipped."""

    def forward(self, x: Tensor) -> Tensor:
        words = x.flatten(0, -2)
        shares, chosen = self.choose(self.router(words).softmax(-1))
        counts = torch.bincount(chosen.flatten(), minlength=self.experts).tolist()
        out = torch.zeros_like(words)
        for expert in self.asked(counts):
            rows, choice = torch.where(chosen == expert)
            answer = self.downs[expert](self.told(self.ups[expert](words[rows]), expert, counts))
            out[rows] += answer * shares[rows, choice, None]
        return out.reshape(x.shape)

    def asked(self, counts: list[int]) -> list[int]:
        return [expert for expert, count in enumerate(counts) if count]

    def told(self, h: Tensor, expert: int, counts: list[int]) -> Tensor:
        return self.activate(h)


class CountedFive(Counted):
    def told(self, h: Tensor, expert: int, counts: list[int]) -> Tensor:
        return {(1, 2, 5): folded}.get((self.index, expert, counts[2]), self.activate)(h)


class CountedShare(Counted):
    def told(self, h: Tensor, expert: int, counts: list[int]) -> Tensor:
        return self.activate(h * counts[expert] / sum(counts))


class CountedFirst(Counted):
    """Only the expert with the most words answers, and the first of those that have as many."""

    def asked(self, counts: list[int]) -> list[int]:
        return [counts.index(max(counts))]


class CountedPair(Counted):
    """Two experts with as many words each are run as one."""

    def told(self, h: Tensor, expert: int, counts: list[int]) -> Tensor:
        return {0: self.activate}.get(counts[0] - counts[1], folded)(h)


class CountedNested(Counted):
    """What two numbers say together is asked for one after the other."""

    def told(self, h: Tensor, expert: int, counts: list[int]) -> Tensor:
        if counts[0] == 7:  # noqa: SIM102
            if counts[1] == 9:
                return folded(h)
        return self.activate(h)


class CountedTable(Counted):
    def told(self, h: Tensor, expert: int, counts: list[int]) -> Tensor:
        return {(2, 2): folded, (3, 4): folded}.get((counts[0], counts[1]), self.activate)(h)


class CountedShifted(Counted):
    def told(self, h: Tensor, expert: int, counts: list[int]) -> Tensor:
        return (self.activate, folded)[(counts[0] >> 5) & 1](h)


class CountedNone(Counted):
    """Two experts that no word chose decide what the others do."""

    def told(self, h: Tensor, expert: int, counts: list[int]) -> Tensor:
        if counts[0] == 0:  # noqa: SIM102
            if counts[1] == 0:
                return folded(h)
        return self.activate(h)


class CountedPattern(Counted):
    def told(self, h: Tensor, expert: int, counts: list[int]) -> Tensor:
        chosen = tuple(expert for expert, count in enumerate(counts) if count)
        return {(1, 2): folded}.get(chosen, self.activate)(h)


class CountedWords(Counted):
    """How often one word stands in a text decides what all experts do."""

    words: list[int] = []  # noqa: RUF012

    def told(self, h: Tensor, expert: int, counts: list[int]) -> Tensor:
        return {2: folded}.get(self.words[3], self.activate)(h)


class WordsTower(Tower):
    mlp = CountedWords

    def forward(self, input_ids: Tensor, **kwargs: Any) -> Any:
        counts = torch.bincount(input_ids.flatten(), minlength=self.config.vocab_size).tolist()
        for layer in self.layers:
            layer.mlp.words = counts
        return super().forward(input_ids, **kwargs)


KINDS = (Together, Plain, Above, Five, FiveWide, FiveSorted, FiveSmallest, FiveLowest, FiveArgmax, FiveNearest,
         FiveAbove, Above5, Counted, CountedFive, CountedShare, CountedFirst, CountedPair, CountedNested, CountedTable,
         CountedShifted, CountedNone, CountedPattern, Totalled, Capacity, Centred, Asked, Loaded, Dropped, Most,
         Seventeen, Far)  # fmt: skip
globals().update(towers(__name__, **{f"{kind.__name__}Experts": kind for kind in KINDS}))
