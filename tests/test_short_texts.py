"""What is zero in all short texts is not taken for zero: a mask of positions may begin behind any that are tried."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from traps.tower import MLP, Tower, TowerConfig

from hf_align.symmetry.derivation.derive import derive
from hf_align.symmetry.groups import GeneralLinear
from hf_align.symmetry.spec import SymmetrySpec
from hf_align.tracing.trace import trace_first_call


def late(x: Tensor) -> Tensor:
    """[length, 1]: one for places behind 5000 others."""
    return (torch.arange(x.shape[1], device=x.device) > 5000).to(x)[:, None]


def never(x: Tensor) -> Tensor:
    return x.new_zeros(x.shape[1], 1)


def spec_of(hidden: Callable[[MLP, Tensor], Tensor]) -> SymmetrySpec:
    part = type("Part", (MLP,), {"hidden": hidden})
    with torch.device("meta"):
        model = type("Late", (Tower,), {"mlp": part})(TowerConfig(num_hidden_layers=1)).eval()
    return derive(trace_first_call(model))


def units(spec: SymmetrySpec, name: str) -> set[str]:
    (weight,) = [n for n in spec.parameters if n.endswith(name)]
    return {space for space in spec.carried(weight) if spec.spaces[space].size == 10}


@pytest.mark.parametrize(("factor", "one"), [(late, True), (never, False)])
def test_units_that_only_late_words_pass_keep_together(factor: Callable[[Tensor], Tensor], one: bool) -> None:
    spec = spec_of(lambda part, x: torch.tanh(part.up(x)) * factor(x))
    assert (units(spec, "up.weight") == units(spec, "down.weight")) == one


@pytest.mark.parametrize(("constant", "free"), [(late, False), (never, True)])
@pytest.mark.parametrize("way", ["added", "in its place", "beside it"])
def test_units_that_only_late_words_shift_do_not_rotate(
    way: str, constant: Callable[[Tensor], Tensor], free: bool
) -> None:
    def hidden(part: MLP, x: Tensor) -> Tensor:
        h = part.up(x)
        if way == "added":
            return h + constant(x)
        if way == "in its place":
            return torch.where(torch.arange(x.shape[1])[:, None] < 1, constant(x), h)
        return torch.cat((h, constant(x).expand_as(h)), 1).unflatten(1, (2, -1)).sum(1)

    spec = spec_of(hidden)
    (space,) = units(spec, "up.weight")
    assert isinstance(spec.group(space), GeneralLinear) == free


def _units_of_heads(x: Tensor) -> Tensor:
    return torch.arange(10, device=x.device).to(x)


@pytest.mark.parametrize(
    ("constant", "varies"),
    [
        (lambda x: (torch.arange(x.shape[1]) / 3000).floor().to(x)[:, None] * _units_of_heads(x), True),
        (lambda x: (torch.arange(x.shape[1]) - 3000.0).relu().to(x)[:, None] * _units_of_heads(x), True),
        (lambda x: (torch.ones(x.shape[1]).cumsum(0) > 3000).to(x)[:, None] * _units_of_heads(x), True),
        (lambda x: (torch.arange(x.shape[0]) // 33).to(x)[:, None, None] * _units_of_heads(x), True),
        (lambda x: (torch.arange(x.shape[1]) / 3000).floor().to(x)[:, None], False),
        (lambda x: torch.zeros(x.shape[1]).to(x)[:, None] * _units_of_heads(x), False),
    ],
)
def test_what_is_alike_for_all_units_in_short_texts_only_tells_them_apart(
    constant: Callable[[Tensor], Tensor], varies: bool
) -> None:
    spec = spec_of(lambda part, x: torch.tanh(part.up(x)) * (1 + constant(x)))
    assert (not units(spec, "up.weight")) == varies
