"""Modules as researchers of linear mode connectivity write them: no config, no class that transformers knows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


def mlp(bias: bool = True) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8, bias), nn.ReLU(), nn.Linear(8, 7, bias), nn.ReLU(), nn.Linear(7, 3, bias))


class WithLoss(nn.Module):
    """Returns its loss beside its logits where it is told the labels, as a Trainer wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.body(x)
        return {"logits": logits} if labels is None else {"loss": 2 * functional.cross_entropy(logits, labels),
                                                          "logits": logits}  # fmt: skip


class WithTargets(WithLoss):
    """Returns a pair, as nanoGPT does."""

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Any:
        told = super().forward(x, targets)
        return told["logits"], told.get("loss")


class Block(nn.Module):
    """Two convolutions beside a shortcut, as in ResNets."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(after)
        self.second = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(after)
        self.shortcut: nn.Module = nn.Identity()
        if before != after:
            self.shortcut = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        inner = functional.relu(self.first_norm(self.first(x)), inplace=True)
        inner = self.second_norm(self.second(inner))
        inner += self.shortcut(x)
        return functional.relu(inner)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)
        self.blocks = nn.Sequential(Block(4, 4, 1), Block(4, 6, 2))
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(functional.relu(self.norm(self.stem(x))))
        return self.head(functional.adaptive_avg_pool2d(x, 1).flatten(1))


class Encoder(nn.Module):
    """Attention of torch's own, with positions that are learned."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(11, 8), nn.Parameter(torch.zeros(9, 8))
        layer = nn.TransformerEncoderLayer(8, 2, 6, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 11, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids) + self.places[: ids.shape[1]]
        return self.head(self.norm(self.layers(x, mask=nn.Transformer.generate_square_subsequent_mask(ids.shape[1]))))


class Decoder(nn.Module):
    """Attention written by hand, a mask in a buffer, a head that is the table; it returns a loss beside its logits."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(11, 8), nn.Embedding(9, 8)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.norm, self.last_norm = nn.LayerNorm(8), nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 6), nn.Linear(6, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.table.weight
        self.register_buffer("mask", torch.tril(torch.ones(9, 9, dtype=torch.bool)))
        self.mask: Tensor

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> dict[str, Any]:
        rows, length = ids.shape
        x = self.table(ids) + self.places(torch.arange(length, device=ids.device))
        q, k, v = (t.view(rows, length, 2, 4).transpose(1, 2) for t in self.qkv(self.norm(x)).split(8, 2))
        scores = (q @ k.transpose(-2, -1) / 2).masked_fill(~self.mask[:length, :length], float("-inf"))
        x = x + self.out((scores.softmax(-1) @ v).transpose(1, 2).reshape(rows, length, 8))
        x = x + self.down(functional.gelu(self.up(x)))
        logits = self.head(self.last_norm(x))
        loss = None if targets is None else functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return {"scores": logits, "loss": loss}


class Fused(Decoder):
    """As nanoGPT does it: attention is one op, and its answer a view of what that gives; (logits, loss)."""

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Any:
        rows, length = ids.shape
        x = self.table(ids) + self.places(torch.arange(length, device=ids.device))
        q, k, v = (t.view(rows, length, 2, 4).transpose(1, 2) for t in self.qkv(self.norm(x)).split(8, dim=2))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).contiguous().view(rows, length, 8))
        logits = self.head(self.last_norm(x + self.down(functional.gelu(self.up(x)))))
        loss = None if targets is None else functional.cross_entropy(logits.view(-1, 11), targets.view(-1))
        return logits, loss


class Variational(nn.Module):
    """Returns what it is made of beside what it makes; what it draws at random is drawn while it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.mean, self.log = nn.Linear(6, 9), nn.Linear(9, 4), nn.Linear(9, 4)
        self.inner, self.head = nn.Linear(4, 7), nn.Linear(7, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        hidden = torch.relu(self.body(x))
        mean, log = self.mean(hidden), self.log(hidden)
        z = mean + torch.randn_like(mean) * log.exp() if self.training else mean
        return self.head(torch.relu(self.inner(z))), {"mean": mean, "log": log}


class Noisy(nn.Module):
    """Adds noise to what a convolution writes: it is drawn in the order in which that lies in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Conv1d(3, 6, 2), nn.Conv1d(6, 4, 2)

    def forward(self, x: Tensor) -> Tensor:
        written = self.head(torch.relu(self.body(x)))
        return written + torch.randn_like(written)


class Narrow(nn.Module):
    """More room than its inputs fill and its head reads, which returns its attention as well."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(5, 8), nn.Linear(8, 2)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.body(x)
        mixed, weights = self.attention(y, y, y)
        return self.head(mixed), weights


class Codes(nn.Module):
    """Returns which of its codes is the nearest, and which of its units is the largest."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.codes, self.head = nn.Linear(6, 5), nn.Embedding(7, 5), nn.Linear(5, 3)
        self.wide, self.narrow = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        found = torch.cdist(self.body(x), self.codes.weight).argmin(-1)
        wide = torch.relu(self.wide(x))
        return self.head(self.codes(found)) + self.narrow(wide), found, wide.argmax(-1)


class Counted(nn.Module):
    """Numbers of two routers in one tensor, and a row of the same table for each."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 4), nn.Linear(5, 4)
        self.table, self.other = nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(4, 3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.body(x))
        routers = [router(hidden).argmax(-1, keepdim=True) for router in (self.first, self.second)]
        stacked = torch.stack([routers[1], routers[0]])
        return self.table[torch.cat(routers, -1)].sum(1) + self.other[routers[0][:, 0]], stacked


class Emptied(nn.Module):
    """Keys have no bias: its part is set to zero on the way, as torchvision's Swin V2 does."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out, self.head = nn.Linear(6, 18), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        bias = self.qkv.bias.clone()
        bias[6:12].zero_()
        q, k, v = functional.linear(x, self.qkv.weight, bias).chunk(3, -1)
        return self.head(torch.relu(self.out((q @ k.mT).softmax(-1) @ v)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.loop, self.head = nn.LSTM(3, 5, batch_first=True), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        return self.head(self.loop(x)[0][:, -1]), x.shape[1]


class Cell(nn.Module):
    """A recurrence, one step after the other."""

    def __init__(self, cell: nn.RNNCellBase) -> None:
        super().__init__()
        self.cell, self.head = cell, nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        return self.head(state[0] if isinstance(state, tuple) else state)


class Shared(nn.Module):
    """Two branches with one matrix between them, under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = nn.Linear(6, 5), nn.Linear(6, 5), nn.Linear(5, 2)
        self.second, self.third = nn.Linear(5, 5), nn.Linear(5, 5)
        self.third.weight = self.second.weight

    def forward(self, x: Tensor) -> Tensor:
        first, other = self.second(torch.relu(self.left(x))), self.third(torch.relu(self.right(x)))
        return self.head(torch.relu(first) - torch.relu(other))


class ByLength(nn.Module):
    """Long inputs go another way, on which single entries count."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.relu(self.up(x))
        if x.shape[1] > 12:
            inner = inner * torch.arange(6, dtype=x.dtype)
        return self.down(inner)


class Flagged(nn.Module):
    """One batch size goes another way, if a flag says so, and so do batches beyond a limit that stands in a list."""

    def __init__(self, flag: bool = False, limit: int = 40) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 2)
        self.flag, self.limits = flag, [limit]

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.relu(self.up(x))
        folded = (self.flag and len(x) == 37) or len(x) > self.limits[0]
        return self.down(inner.cumsum(-1) if folded else inner)


class ByData(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x) if x.sum() > 0 else -self.up(x)


class Masked(nn.Module):
    """Weights that a buffer prunes."""

    def __init__(self, kept: int = 3) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 2)
        self.register_buffer("pruned", torch.arange(6) >= kept)
        self.pruned: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)).masked_fill(self.pruned, 0.0))


class Several(nn.Module):
    """Arguments in a pair and by name, and a flag."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = nn.Linear(3, 5), nn.Linear(2, 5), nn.Linear(5, 2)

    def forward(self, pair: tuple[Tensor, Tensor], *, scale: Tensor, doubled: bool = False) -> list[Tensor]:
        inner = torch.tanh(self.left(pair[0]) + self.right(pair[1])) * scale
        return [self.head(2 * inner if doubled else inner)]


def seeded(make: Any, seed: int) -> Any:
    """A module in float64 whose weights and statistics all say something."""
    torch.manual_seed(seed)
    module = make()
    with torch.no_grad():
        for name, tensor in module.state_dict(keep_vars=True).items():
            if tensor.is_floating_point():
                tensor.add_(0.3 * torch.randn(tensor.shape).abs() if "var" in name else 0.3 * torch.randn(tensor.shape))
    return module.double().eval()
