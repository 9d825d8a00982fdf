"""Decoders that set padding to zero before each layer and behind it: masks that hide only what nobody sees anyway.

Each part has somebody see it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .carried import Behind
from .tower import MLP, Attention, Tower, TowerConfig


class Biased(Attention):
    """All that reads the stream has a bias."""

    def __init__(self, config: TowerConfig, index: int) -> None:
        super().__init__(config, index)
        for name in "qkvo":
            linear = getattr(self, name)
            setattr(self, name, nn.Linear(linear.in_features, linear.out_features))


class Padded(Behind):
    def forward(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        x = self.first(x) * self.factors
        x = self.between(
            self.attn_norm(x + self.attn(self.read(x), positions, self.keys(self.factors.mT[:, None] != 0), cache))
        )
        return self.hide_again(self.mlp_norm(x + self.mlp(x)))

    def hide_again(self, x: Tensor) -> Tensor:
        return x * self.factors

    def keys(self, seen: Tensor) -> Tensor | None:
        return seen

    def read(self, x: Tensor) -> Tensor:
        return x

    def between(self, x: Tensor) -> Tensor:
        return x


class IdleTower(Tower):
    block, attention = Padded, Biased

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Any:
        for layer in self.layers:
            layer.factors = self.factors(input_ids).unsqueeze(-1)
        return super().forward(input_ids, **kwargs)

    def factors(self, ids: Tensor) -> Tensor:
        return ids > 5


class Ahead(Padded):
    """Attention leaves padding out only if it comes later."""

    def keys(self, seen: Tensor) -> Tensor | None:
        return None


class First(Padded):
    """The first key is always seen."""

    def keys(self, seen: Tensor) -> Tensor | None:
        return seen | (torch.arange(seen.shape[-1]) == 0)


class Unless(Padded):
    """Attention leaves padding out unless the first key is shown."""

    def keys(self, seen: Tensor) -> Tensor | None:
        return seen | seen[..., :1]


class Returned(Padded):
    """Nothing hides what comes of it."""

    def hide_again(self, x: Tensor) -> Tensor:
        return x


class Otherwise(Padded):
    """Other places are hidden behind."""

    def hide_again(self, x: Tensor) -> Tensor:
        return x * self.factors.roll(1, 1)


class Mixed(Padded):
    """All places see a mean of all."""

    def between(self, x: Tensor) -> Tensor:
        return x + x.mean(1, keepdim=True)


class Shifted(Padded):
    """All places see the one before."""

    def between(self, x: Tensor) -> Tensor:
        return x + x.roll(1, 1)


class Multiplied(Padded):
    """All places see a sum of all, by a product of matrices."""

    def between(self, x: Tensor) -> Tensor:
        return x + (x.mT @ torch.ones(x.shape[1], x.shape[1])).mT


class Convolved(Padded):
    """A convolution sees one place at a time."""

    width = 1

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        size = self.first.normalized_shape[0]
        self.convolution = nn.Conv1d(size, size, self.width, padding="same")

    def between(self, x: Tensor) -> Tensor:
        return x + self.convolution(x.mT).mT


class Widened(Convolved):
    """It sees the places beside it, too."""

    width = 3


class Recurrent(Padded):
    """Beside it stands a number that comes out of a long recurrence, which reads each of its values twice."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.state = nn.Parameter(torch.zeros(1))

    def between(self, x: Tensor) -> Tensor:
        state = self.state
        for _ in range(600):
            state = torch.tanh(state * state + state)
        return x + 0 * state


class Lowered(Biased):
    """Scores of padding are lowered by a number that leaves nothing of them."""

    by: float = -1e9

    def forward(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        self.lower = None if seen is None else (~seen).to(x.dtype) * self.by
        return super().forward(x, positions, None, cache)

    def score(self, q: Tensor, k: Tensor, positions: Tensor) -> Tensor:
        scores = super().score(q, k, positions)
        return scores if self.lower is None else scores + self.lower


class Fainter(Lowered):
    """Something is left of them."""

    by = -5.0


class Louder(Biased):
    """Shares of padding count again where values are mixed."""

    def mix(self, shares: Tensor, v: Tensor) -> Tensor:
        return (shares + 0.1) @ v


class Summed(MLP):
    """A number of all places goes into each."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.sigmoid(x.sum((1, 2), keepdim=True))


class Square(Returned):
    """Padding sees nothing in particular, and nothing sees padding; but it is returned."""

    def keys(self, seen: Tensor) -> Tensor | None:
        return seen & seen.mT


class SquareTwice(Square):
    """Attention hides other places, too, and only leaves out those."""

    def read(self, x: Tensor) -> Tensor:
        self.others = self.factors.roll(1, 1)
        return x * self.others

    def keys(self, seen: Tensor) -> Tensor | None:
        shown = self.others.mT[:, None] != 0
        return shown & shown.mT


class SquareTurned(Square):
    """Attention reads the entries of a vector in another order."""

    def read(self, x: Tensor) -> Tensor:
        return x.roll(1, -1)


class SquareBeside(Square):
    """Attention reads something else, too."""

    def between(self, x: Tensor) -> Tensor:
        return x + self.attn.proj(torch.tanh(x)).mean(-1, keepdim=True)


class Fused(Attention):
    """Queries, keys and values of a head come out of one map, and only what is added to queries is a bias."""

    def __init__(self, config: TowerConfig, index: int) -> None:
        super().__init__(config, index)
        del self.q, self.k, self.v
        self.heads = config.num_attention_heads
        self.proj = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=False)
        self.bias = nn.Parameter(torch.zeros(config.hidden_size))
        self.o = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        assert seen is not None
        q, k, v = self.proj(x).unflatten(-1, (self.heads, -1)).transpose(1, 2).chunk(3, -1)
        scores = self.score(self.query(q), k, positions).masked_fill(~seen, torch.finfo(x.dtype).min)
        return self.o(self.mix(scores.softmax(-1), v).transpose(1, 2).flatten(2))

    def query(self, q: Tensor) -> Tensor:
        return q + self.split_bias()

    def split_bias(self) -> Tensor:
        return self.bias.view(1, 1, self.heads, -1).transpose(1, 2)


class FusedUnbiased(Fused):
    """What is added to queries is more than the bias."""

    def query(self, q: Tensor) -> Tensor:
        return q + torch.tanh(self.split_bias())


class FusedLocal(Fused):
    """Scores of keys depend on where these are, too."""

    def score(self, q: Tensor, k: Tensor, positions: Tensor) -> Tensor:
        near = torch.arange(k.shape[2] * k.shape[3]).reshape(k.shape[2:]).cos()
        return super().score(q, k, positions) + (k * near).sum(-1)[:, :, None]


class FusedKept(Fused):
    """Something else sees what queries are where padding is."""

    def forward(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        q = self.query(self.proj(x).unflatten(-1, (self.heads, -1)).transpose(1, 2).chunk(3, -1)[0])
        return super().forward(x, positions, seen, cache) + q.transpose(1, 2).flatten(2)


PARTS: dict[str, dict[str, type[nn.Module]]] = {
    **{f"Idle{part.__name__}": {"block": part}
       for part in (Ahead, First, Unless, Returned, Otherwise, Mixed, Shifted, Multiplied, Convolved, Widened,
                    Recurrent)},
    **{f"Idle{part.__name__}": {"attention": part} for part in (Lowered, Fainter, Louder)},
    "IdleSummed": {"mlp": Summed},
    "IdleSquare": {"block": Square},
    **{f"Idle{part.__name__}": {"block": Square, "attention": part}
       for part in (Fused, FusedUnbiased, FusedLocal, FusedKept)},
    **{f"Idle{part.__name__}": {"block": part, "attention": Fused}
       for part in (SquareTwice, SquareTurned, SquareBeside)},
}  # fmt: skip
globals().update({f"{name}Tower": type(f"{name}Tower", (IdleTower,), {**parts, "__module__": __name__})
                  for name, parts in PARTS.items()})  # fmt: skip


class IdleWeighedTower(IdleTower):
    """What is shown is multiplied, too."""

    def factors(self, ids: Tensor) -> Tensor:
        return (ids - 5).clamp(min=0) / 5


class IdleUnboundTower(IdleTower):
    """The mask is one of several that come out of one op."""

    def factors(self, ids: Tensor) -> Tensor:
        return torch.stack((ids > 5, ids > 3)).unbind()[0]


class IdleFixedTower(IdleTower):
    """The same places are shown in all texts."""

    def factors(self, ids: Tensor) -> Tensor:
        return (torch.arange(ids.shape[1]) < 6).expand(ids.shape)


class IdleFixedAheadTower(IdleFixedTower):
    """They would not be if they were others."""

    block = Ahead


class IdleFixedWeighedTower(IdleFixedTower):
    def factors(self, ids: Tensor) -> Tensor:
        return super().factors(ids) / 2
