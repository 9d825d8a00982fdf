"""Decoders in which one layer of many behaves otherwise, said in as many ways as Python has."""

from __future__ import annotations

import enum
import functools
import types
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from .tower import MLP, Attention, Tower, towers


class Folded(MLP):
    """Its hidden units are no set any more: neighbours are multiplied."""

    def activate(self, h: Tensor) -> Tensor:
        return h * h.roll(1, -1)


class InSet(MLP):
    def activate(self, h: Tensor) -> Tensor:
        return h * h.roll(1, -1) if self.index in (self.config.special,) else functional.silu(h)


class ByLambda(MLP):
    def __init__(self, config: Any, index: int) -> None:
        super().__init__(config, index)
        self.act = (lambda h: functional.silu(h)) if index != 2 else (lambda h: h * h.roll(1, -1))

    def activate(self, h: Tensor) -> Tensor:
        return self.act(h)


class Kind(enum.Enum):
    PLAIN = 0
    FOLDED = 1


class ByEnum(MLP):
    def __init__(self, config: Any, index: int) -> None:
        super().__init__(config, index)
        self.kind = Kind.FOLDED if index == config.special else Kind.PLAIN

    def activate(self, h: Tensor) -> Tensor:
        return h * h.roll(1, -1) if self.kind is Kind.FOLDED else functional.silu(h)


def folded(h: Tensor, by: int) -> Tensor:
    return h * h.roll(by, -1)


class ByPartial(MLP):
    """A product with itself in all layers but one."""

    def __init__(self, config: Any, index: int) -> None:
        super().__init__(config, index)
        self.act = functools.partial(folded, by=1 if index == config.special else 0)

    def activate(self, h: Tensor) -> Tensor:
        return self.act(h)


class ByFloat(MLP):
    """Positive scales of h go through the first power and not through the second."""

    def __init__(self, config: Any, index: int) -> None:
        super().__init__(config, index)
        self.power = 2.0 if index == config.special else 1.0

    def activate(self, h: Tensor) -> Tensor:
        return functional.relu(h).pow(self.power)


class ByThreshold(MLP):
    """Two positive numbers, of which one bends the function within reach."""

    def __init__(self, config: Any, index: int) -> None:
        super().__init__(config, index)
        self.ceiling = 0.5 if index == config.special else 1e9

    def activate(self, h: Tensor) -> Tensor:
        return functional.relu(h).clamp(max=self.ceiling)


class ByConfig(MLP):
    """A pattern that is shorter than the model is deep, read when it runs."""

    def activate(self, h: Tensor) -> Tensor:
        pattern = self.config.pattern
        return functional.silu(h) if pattern[self.index % len(pattern)] == "plain" else h * h.roll(1, -1)


class ByPrivate(MLP):
    def __init__(self, config: Any, index: int) -> None:
        super().__init__(config, index)
        self._fold = index == config.special

    def activate(self, h: Tensor) -> Tensor:
        return h * h.roll(1, -1) if self._fold else functional.silu(h)


class ByMethod(MLP):
    """A method that one instance has of its own."""

    def __init__(self, config: Any, index: int) -> None:
        super().__init__(config, index)
        if index == config.special:
            self.__dict__["activate"] = types.MethodType(Folded.activate, self)


class ByArithmetic(MLP):
    """The third of every four, from the second on."""

    def activate(self, h: Tensor) -> Tensor:
        return h * h.roll(1, -1) if (self.index + 2) % 4 == 0 and self.index > 1 else functional.silu(h)


class BySize(MLP):
    """Deep in the model only."""

    def activate(self, h: Tensor) -> Tensor:
        return h * h.roll(1, -1) if self.index / self.config.num_hidden_layers > 0.45 else functional.silu(h)


class ByDict(MLP):
    def activate(self, h: Tensor) -> Tensor:
        return h * h.roll(1, -1) if self.config.folds.get(str(self.index)) else functional.silu(h)


class ByObject(MLP):
    """A setting that is an object of its own, of the same class in all layers."""

    def __init__(self, config: Any, index: int) -> None:
        super().__init__(config, index)
        self.settings = types.SimpleNamespace(fold=index == 3)

    def activate(self, h: Tensor) -> Tensor:
        return h * h.roll(1, -1) if self.settings.fold else functional.silu(h)


class ByHook(MLP):
    """What is registered on one module, and is not of its class."""

    def __init__(self, config: Any, index: int) -> None:
        super().__init__(config, index)
        if index == config.special:
            self.gate.register_forward_hook(lambda module, args, h: h * h.roll(1, -1))


class NoRotation(Attention):
    """One layer without rotary embedding: its queries may turn freely, those of the others may not."""

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        return super().rotate(x, positions) if self.index != self.config.special else x


class OneRotation(Attention):
    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        return super().rotate(x, positions) if self.index == self.config.special else x


class OtherFrequencies(Attention):
    """The planes of one layer all turn alike; in others they do not."""

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        angles = positions[:, None, :, None] * (
            torch.tensor([1.0, 1.0]) if self.index != 2 else torch.tensor([1.0, 0.1])
        )
        first, second = x.chunk(2, -1)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class Softcap(Attention):
    """In one layer the values are squashed, which fixes their basis."""

    def mix(self, shares: Tensor, v: Tensor) -> Tensor:
        return shares @ (torch.tanh(v) if self.index == self.config.special else v)


class OwnLoop(Tower):
    """The layers are all alike; what the model does between two of them is not."""

    def run(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x, positions, seen, cache)
            if i == self.config.special:
                x = x + 0.3 * x.flip(-1)
        return x


class Detour(Tower):
    """The stream of an early layer comes back later, bent."""

    def run(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        kept = x
        for i, layer in enumerate(self.layers):
            x = layer(x, positions, seen, cache)
            kept = x if i == 1 else kept
            x = x + torch.tanh(kept) if i == self.config.special else x
        return x


class Borrowed(Tower):
    """One layer runs the MLP of another once more, on values."""

    def run(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = layer(x, positions, seen, cache)
            if i == self.config.special:
                x = x + self.layers[1].mlp.down(self.layers[2].mlp.hidden(x))
        return x


class Twice(Tower):
    """Some layers run twice, and one not at all."""

    def run(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        for i in (0, 1, 2, 2, 4, 1):
            x = self.layers[i](x, positions, seen, None)
        return x


class Mixture(Tower):
    """The head reads all layers by weights of its own, one of them through a sign."""

    def more(self, config: Any) -> None:
        self.shares = nn.Parameter(torch.zeros(config.num_hidden_layers))

    def run(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        stages = []
        for i, layer in enumerate(self.layers):
            x = layer(x, positions, seen, cache)
            stages.append(x.abs() if i == self.config.special else x)
        return (torch.stack(stages, -1) * self.shares.softmax(0)).sum(-1)


class Counted(MLP):
    """A class that counts its calls: the third layer is the third call."""

    calls: ClassVar[int] = 0

    def activate(self, h: Tensor) -> Tensor:
        turn = type(self).calls % self.config.num_hidden_layers
        type(self).calls += 1
        return h * h.roll(1, -1) if turn == self.config.special else functional.silu(h)


globals().update(towers(
    __name__, InSetTower=InSet, ByLambdaTower=ByLambda, ByEnumTower=ByEnum, ByPartialTower=ByPartial,
    ByFloatTower=ByFloat, ByThresholdTower=ByThreshold, ByConfigTower=ByConfig, ByPrivateTower=ByPrivate,
    ByMethodTower=ByMethod, ByArithmeticTower=ByArithmetic, BySizeTower=BySize, ByDictTower=ByDict,
    ByObjectTower=ByObject, ByHookTower=ByHook, CountedTower=Counted, NoRotationTower=NoRotation,
    OneRotationTower=OneRotation, OtherFrequenciesTower=OtherFrequencies, SoftcapTower=Softcap,
))  # fmt: skip
