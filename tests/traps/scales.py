"""Blocks in which some values have one factor in common, and blocks in which they nearly have.

Slopes of an activation, a gate, and what a recurrence passes by: each may give its factor to a linear map, if all that
meets it is linear in it. Each part here that comes after the first of its kind breaks that.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from .tower import MLP, Tower, TowerConfig


class Sloped(MLP):
    """An activation with slopes that are learned, two of them through a softplus."""

    def __init__(self, config: TowerConfig, index: int) -> None:
        super().__init__(config, index)
        del self.gate
        self.beta = nn.Parameter(torch.tensor(0.5))
        self.above, self.below = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))

    def hidden(self, x: Tensor) -> Tensor:
        h = self.up(x)
        above = functional.softplus(self.above) * h * h + self.beta * h
        below = (torch.expm1(h.clamp(max=0.0)) - h) * (self.beta + functional.softplus(self.below)) + self.beta * h
        return torch.where(h > 0, above, below)


class SlopedBent(Sloped):
    """What has the factor is bent."""

    def hidden(self, x: Tensor) -> Tensor:
        return torch.tanh(super().hidden(x))


class SlopedBeside(Sloped):
    """Something without the factor is added."""

    def hidden(self, x: Tensor) -> Tensor:
        return super().hidden(x) + torch.sigmoid(self.up(x))


class SlopedUp(Sloped):
    """A number is added."""

    def hidden(self, x: Tensor) -> Tensor:
        return super().hidden(x) + 1.0


class SlopedShown(Sloped):
    """A slope is read in a second way."""

    def hidden(self, x: Tensor) -> Tensor:
        return super().hidden(x) * torch.sigmoid(self.above)


class SlopedTwice(Sloped):
    """What reads it also reads something else."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.hidden(x)) + self.down(torch.sigmoid(self.up(x)))


class SlopedByItself(Sloped):
    """It is read, and squared, too."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.hidden(x)
        return self.down(h) + self.down(h * h)


class SlopedOtherwise(Sloped):
    """A softplus of another sharpness is no function that the gauge can invert."""

    def hidden(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return functional.softplus(self.above, beta=2.0) * h * h + self.beta * h


class Valve(MLP):
    """A gate, closed at first, on what the block writes, bias and all."""

    def __init__(self, config: TowerConfig, index: int) -> None:
        super().__init__(config, index)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size)
        self.open = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.open) * self.written(x)

    def written(self, x: Tensor) -> Tensor:
        return self.down(self.hidden(x))


class ValveHidden(Valve):
    """Some of what it writes is set to zero."""

    fill = 0.0

    def written(self, x: Tensor) -> Tensor:
        written = super().written(x)
        odd = torch.arange(x.shape[1], device=x.device) % 2 == 1
        return written.masked_fill(odd[None, :, None], self.fill)


class ValveFilled(ValveHidden):
    """Or to one."""

    fill = 1.0


class ValveOpen(Valve):
    def forward(self, x: Tensor) -> Tensor:
        return (1 + torch.tanh(self.open)) * self.written(x)


class ValveBeside(Valve):
    """All of it passes beside the gate, too."""

    def forward(self, x: Tensor) -> Tensor:
        written = self.written(x)
        return torch.tanh(self.open) * written + written


class ValveAgain(Valve):
    """It goes through the gate twice."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.open) * super().forward(x)


class ValveNormed(Valve):
    def written(self, x: Tensor) -> Tensor:
        return functional.normalize(super().written(x), dim=-1)


class ValveSeen(Valve):
    """Its direction is seen, which turns round with the sign of the gate."""

    def forward(self, x: Tensor) -> Tensor:
        written = self.written(x)
        return torch.tanh(self.open) * written + torch.tanh(functional.normalize(written, dim=-1))


class ValveShared(Valve):
    """The same map writes without a gate."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.down(torch.sigmoid(self.up(x)))


class Bypass(MLP):
    """Half of what is read is multiplied by the other half, half passes by."""

    def __init__(self, config: TowerConfig, index: int) -> None:
        super().__init__(config, index)
        del self.gate
        self.up = nn.Linear(config.hidden_size, 2 * config.intermediate_size)
        self.by = nn.Parameter(torch.ones(config.intermediate_size))

    def hidden(self, x: Tensor) -> Tensor:
        first, second = self.up(x).chunk(2, -1)
        return second * torch.sigmoid(first).cumsum(1) + functional.silu(first) * self.by


class BypassSeen(Bypass):
    """What should take the factor is seen by something else."""

    def hidden(self, x: Tensor) -> Tensor:
        return super().hidden(x) * torch.sigmoid(self.up(x).chunk(2, -1)[1])


class BypassMixed(Bypass):
    """It is not told apart from the other half."""

    def hidden(self, x: Tensor) -> Tensor:
        first, second = self.up(x).chunk(2, -1)
        return (second + first) * torch.sigmoid(first) + functional.silu(first) * self.by


class Taps(MLP):
    """A convolution of single channels, two of each unit, with a gain that both share."""

    def __init__(self, config: TowerConfig, index: int) -> None:
        super().__init__(config, index)
        self.kernel = nn.Conv1d(config.intermediate_size, config.intermediate_size, 2, padding=1,
                                groups=config.intermediate_size, bias=False)  # fmt: skip
        self.unit = nn.Parameter(torch.ones(config.intermediate_size // 2))

    def written(self, x: Tensor) -> Tensor:
        return self.up(x)

    def read(self, x: Tensor) -> Tensor:
        return self.kernel(x.mT)[..., : x.shape[1]].mT

    def hidden(self, x: Tensor) -> Tensor:
        heads = functional.silu(self.read(self.written(x))).unflatten(-1, (2, -1))
        size = (heads.square().mean(-1, keepdim=True) + 0.1).sqrt()
        return (heads / size * self.unit).flatten(-2) * self.gate(x)


class TapsShifted(Taps):
    """A number is added before."""

    def written(self, x: Tensor) -> Tensor:
        return self.up(x) + 1.0


class TapsShown(Taps):
    """What the channels are written with is seen beside them."""

    def hidden(self, x: Tensor) -> Tensor:
        return super().hidden(x) + self.up(x)


class TapsPassing(Taps):
    """Taps go past their kernels, too."""

    def read(self, x: Tensor) -> Tensor:
        return super().read(x) + x


class TapsSized(Taps):
    """The size of the kernels is read, too."""

    def hidden(self, x: Tensor) -> Tensor:
        return super().hidden(x) * self.kernel.weight.square().mean()


class Dials(MLP):
    """Two numbers in one vector: each multiplies one half of what is written, behind a number that all of it has."""

    def __init__(self, config: TowerConfig, index: int) -> None:
        super().__init__(config, index)
        self.mix = nn.Linear(config.hidden_size, 2 * config.hidden_size, bias=False)
        self.dials = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        first, second = (self.mix(x) * self.length(x)).chunk(2, -1)
        one, other = self.dials.unbind(0)
        return torch.sigmoid(first * one) - torch.tanh(second * other)

    def length(self, x: Tensor) -> Tensor:
        return torch.rsqrt(x.square().mean(-1, keepdim=True) + 0.1)


class DialsBeside(Dials):
    """Both halves are also seen without their numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.sigmoid(self.mix(x)).chunk(2, -1)[0] + self.mix(x).tanh().chunk(2, -1)[1]


class DialsCrossed(Dials):
    """Each number meets a half, and the first one the other half as well."""

    def forward(self, x: Tensor) -> Tensor:
        first, second = (self.mix(x) * self.length(x)).chunk(2, -1)
        one, other = self.dials.unbind(0)
        return torch.sigmoid(first * one) - torch.tanh(second * other) + torch.sigmoid(second * one + 1)


class DialsAdded(Dials):
    """The numbers are also added to each other."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.dials.sum().sigmoid()


for _part in list(globals().values()):
    if isinstance(_part, type) and issubclass(_part, MLP) and _part is not MLP:
        _name = f"{_part.__name__}Tower"
        globals()[_name] = type(_name, (Tower,), {"mlp": _part, "__module__": __name__})
