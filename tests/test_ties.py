"""Units that are chosen by what may tie keep their order: of those that tie, the first is chosen."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from traps.tower import Tower, TowerConfig

from hf_align.symmetry.derivation.derive import derive
from hf_align.symmetry.spec import SymmetrySpec
from hf_align.tracing.trace import trace_first_call


class Peak(nn.Module):
    """The vectors of some units, looked up by number."""

    choose: Callable[[Tensor], Tensor]

    def __init__(self, config: TowerConfig, index: int) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden_size, 7)
        self.values = nn.Parameter(torch.zeros(7, config.hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        return self.values[type(self).choose(self.up(x))]


def spec_of(choose: Callable[[Tensor], Tensor]) -> SymmetrySpec:
    part = type("Part", (Peak,), {"choose": staticmethod(choose)})
    with torch.device("meta"):
        model = type("Ties", (Tower,), {"mlp": part})(TowerConfig(num_hidden_layers=1)).eval()
    return derive(trace_first_call(model))


def moves(spec: SymmetrySpec) -> bool:
    (name,) = [n for n in spec.parameters if n.endswith("values")]
    return any(space in spec.spaces and spec.spaces[space].size == 7 for space in spec.carried(name))


def earlier(h: Tensor) -> Tensor:
    """The mean of each word and those before it."""
    return torch.ones(h.shape[-2], h.shape[-2]).tril().softmax(-1) @ h


CHOICES: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "argmax": (lambda h: h.argmax(-1), True),
    "argmax of a monotone function": (lambda h: h.softmax(-1).argmax(-1), True),
    "argmax within what a float16 can hold": (lambda h: h.clamp(-65504.0, 65504.0).argmax(-1), True),
    "argmax below what a float16 can hold": (lambda h: h.clamp_max(65504.0).argmax(-1), True),
    "argmax of relu within what a float16 can hold": (lambda h: torch.relu(h).clamp(max=65504.0).argmax(-1), False),
    "argmax of relu times a gate": (lambda h: (torch.relu(h) * torch.sigmoid(h)).argmax(-1), False),
    "argmax of what a gate may close": (lambda h: (h * (h > 0)).argmin(-1), False),
    "argmax of a value of length one": (lambda h: (h / h.square().sum(-1, keepdim=True).sqrt()).argmax(-1), True),
    "argmax within limits": (lambda h: h.clamp(max=8.0).argmax(-1), False),
    "argmax of a function of what is limited": (lambda h: h.clamp(-9, 9).softmax(-1).argmax(-1), False),
    "argmin of relu": (lambda h: torch.relu(h).argmin(-1), False),
    "max of rounded": (lambda h: h.round().max(-1).indices, False),
    "argmax within limits, shifted": (lambda h: (h.clamp(-9, 9) + h.norm(dim=-1, keepdim=True)).argmax(-1), False),
    "argmax within limits, shifted apart": (lambda h: (h.clamp(-9, 9) + h.sin()).argmax(-1), True),
    "argmax below another": (lambda h: torch.minimum(h, torch.full_like(h, 9.0)).argmax(-1), False),
    "argmax of the less of two": (lambda h: torch.stack((h, torch.full_like(h, 9.0))).amin(0).argmax(-1), False),
    "argmax where it is small": (lambda h: torch.where(h > 9, 9.0, h).argmax(-1), False),
    "argmax but for the large": (lambda h: h.masked_fill(h > 9, 9.0).argmax(-1), False),
    "argmax but for the large and the small": (lambda h: h.masked_fill((h > 9) | (h < -9), 8.0).argmax(-1), False),
    "argmax within limits that are farther": (lambda h: (h.clamp(max=5000.0) / 100).argmax(-1), False),
    "argmax of a flat side": (lambda h: -nn.functional.leaky_relu(9.0 - h, 0.0).argmax(-1), False),
    "argmax of the shrunk": (lambda h: nn.functional.hardshrink(h, 0.02).argmax(-1), False),
    "argmax of whole numbers": (lambda h: h.long().argmax(-1), False),
    "argmax within far limits": (lambda h: h.clamp(-100, 100).argmax(-1), False),
    "argmax of a ratio of exponentials": (lambda h: (h.exp() / h.exp().sum(-1, keepdim=True)).argmax(-1), True),
    "argmax of a swish": (lambda h: nn.functional.silu(h).argmax(-1), True),
    "argmax of a gate": (lambda h: h.sigmoid().argmax(-1), True),
    "argmax of a saturating function": (lambda h: (9 * torch.tanh(h / 2)).argmax(-1), True),
    "argmax of groups": (lambda h: h.tile(1, 1, 2).unflatten(-1, (7, 2)).amax(-1).argmax(-1), False),
    "argmax of a mean over words": (lambda h: earlier(h).argmax(-1), True),
    "argmax of a mean of relu over words": (lambda h: earlier(torch.relu(h)).argmax(-1), False),
    "median": (lambda h: h.median(-1).indices, True),
    "median within limits": (lambda h: torch.where(h > 8, 8.0, h).median(-1).indices, False),
    "kth": (lambda h: torch.where(h > 8, 8.0, h).kthvalue(3, -1).indices, False),
    "topk": (lambda h: h.topk(1, -1).indices[..., 0], True),
    "topk within limits": (lambda h: nn.functional.relu6(h).topk(1, -1).indices[..., 0], False),
    "argsort of what is compared": (lambda h: (h > 0).float().argsort(-1)[..., 0], False),
}  # fmt: skip


@pytest.mark.parametrize("choice", CHOICES)
def test_units_that_may_tie_keep_their_order(choice: str) -> None:
    choose, free = CHOICES[choice]
    assert moves(spec_of(choose)) == free


class Routed(nn.Module):
    """Vectors that are looked up by what other units say."""

    act: Callable[[Tensor], Tensor]
    bias = False

    def __init__(self, config: TowerConfig, index: int) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden_size, 5)
        self.router = nn.Linear(5, 7, bias=self.bias)
        self.values = nn.Parameter(torch.zeros(7, config.hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        return self.values[self.router(type(self).act(self.up(x))).argmax(-1)]


@pytest.mark.parametrize(
    ("act", "bias", "free"),
    [
        (torch.relu, False, False),
        (torch.relu, True, True),
        (lambda h: h.relu().square(), False, False),
        (lambda h: (-h).relu(), False, False),
        (nn.functional.hardswish, False, False),
        (nn.functional.silu, False, True),
        (nn.functional.gelu, False, True),
        (lambda h: h, False, True),
    ],
)
def test_units_that_may_all_be_off_tie_what_they_choose(
    act: Callable[[Tensor], Tensor], bias: bool, free: bool
) -> None:
    part = type("Part", (Routed,), {"act": staticmethod(act), "bias": bias})
    with torch.device("meta"):
        model = type("Off", (Tower,), {"mlp": part})(TowerConfig(num_hidden_layers=1)).eval()
    assert moves(derive(trace_first_call(model))) == free


class Computed(nn.Module):
    """Vectors that are looked up by what a router says whose rows, or whose biases, are computed."""

    rows: Callable[[Tensor], Tensor]
    bias: Callable[[Tensor], Tensor]
    act: Callable[[Tensor], Tensor]

    def __init__(self, config: TowerConfig, index: int) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden_size, 5)
        self.router = nn.Linear(5, 7)
        self.values = nn.Parameter(torch.zeros(7, config.hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        part = type(self)
        weight, bias = part.rows(self.router.weight), part.bias(self.router.bias)
        return self.values[nn.functional.linear(part.act(self.up(x)), weight, bias).argmax(-1)]


def first_and_zeros(w: Tensor) -> Tensor:
    return torch.cat((w[:3], w.new_zeros(4, *w.shape[1:])))


def same(w: Tensor) -> Tensor:
    return w


@pytest.mark.parametrize(
    ("rows", "bias", "act", "free"),
    [
        (first_and_zeros, first_and_zeros, same, False),
        (lambda w: w.mean(0, keepdim=True).expand(7, 5), lambda b: b * 0, same, False),
        (lambda w: w.clamp(-9, 9) * 2, same, same, True),
        (same, lambda b: b.mean().expand(7), torch.relu, False),
        (same, lambda b: b.mean().expand(7), same, True),
        (same, lambda b: b + 1, torch.relu, True),
        (lambda w: nn.functional.normalize(w, dim=-1), same, torch.relu, True),
        (lambda w: w - w.mean(0), lambda b: b.relu(), torch.relu, False),
    ],
)  # fmt: skip
def test_units_whose_routers_are_computed_may_tie(
    rows: Callable[[Tensor], Tensor], bias: Callable[[Tensor], Tensor], act: Callable[[Tensor], Tensor], free: bool
) -> None:
    chosen = {"rows": staticmethod(rows), "bias": staticmethod(bias), "act": staticmethod(act)}
    part = type("Part", (Computed,), chosen)
    with torch.device("meta"):
        model = type("Computed", (Tower,), {"mlp": part})(TowerConfig(num_hidden_layers=1)).eval()
    assert moves(derive(trace_first_call(model))) == free
