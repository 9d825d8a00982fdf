"""Over which spaces elements differ: units of experts that are looked up by number, or taken out of a stack in turn."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import pytest
import torch
import transformers as hf
from conftest import run
from test_gauges import program
from torch import Tensor, nn
from traps.tower import MLP, Tower, TowerConfig

from hf_align.symmetry.certificate.alike import alike
from hf_align.symmetry.certificate.random_copy import random_inputs, random_weights
from hf_align.symmetry.certificate.soundness import soundness
from hf_align.symmetry.derivation.derive import derive
from hf_align.symmetry.derivation.index_sets import IndexSets
from hf_align.symmetry.groups import Orthogonal
from hf_align.tracing.trace import trace, trace_first_call


@pytest.mark.parametrize(
    ("kind", "apart"),
    [
        *((kind, True) for kind in ("Plain", "Largest", "InTurn", "Gated", "Biased", "Flat", "Loop", "Below",
                                    "BelowNext")),
        *((kind, False) for kind in ("TwoRouters", "TwoMaxima", "Exchanged", "Cross", "Next", "Before", "Both",
                                     "BothMaxima", "Sum", "Carried", "CarriedWords", "MeanWords", "Running",
                                     "Attending", "LoopNext")),
    ],
)  # fmt: skip
def test_units_differ_between_experts_unless_they_meet(kind: str, apart: bool) -> None:
    traced = program(f"LookedUp{kind}", num_hidden_layers=1)
    spec, rng = derive(traced), torch.Generator().manual_seed(0)
    weights = random_weights(spec, rng)
    assert max(soundness(traced, spec, weights, random_inputs(traced, rng), rng) for _ in range(3)) < 1e-9
    units = [space for space in spec.spaces.values() if space.size == 10]
    assert sum(prod(spec.index_shape(space.name)) for space in units) == (4 if apart else 1)


_SIZES = {"vocab_size": 17, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
_EXPERTS = {"num_key_value_heads": 1, "intermediate_size": 10, "num_local_experts": 4, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    "config",
    [
        hf.MixtralConfig(**_SIZES, **_EXPERTS, architectures=["MixtralForCausalLM"]),
        hf.GptOssConfig(**_SIZES, **_EXPERTS, head_dim=8, architectures=["GptOssForCausalLM"]),
        hf.PhimoeConfig(**_SIZES, **_EXPERTS, architectures=["PhimoeForCausalLM"]),
        hf.DbrxConfig(vocab_size=17, d_model=16, n_heads=2, n_layers=1, max_seq_len=64,
                      attn_config={"kv_n_heads": 1, "rope_theta": 1e4, "clip_qkv": 8},
                      ffn_config={"ffn_hidden_size": 10, "moe_num_experts": 4, "moe_top_k": 2},
                      architectures=["DbrxForCausalLM"]),
    ],
    ids=lambda config: config.model_type,
)  # fmt: skip
def test_each_expert_of_a_mixture_has_an_order_of_units(config: hf.PretrainedConfig) -> None:
    spec = derive(trace(config))
    units = [space for space in spec.spaces.values() if space.size == 10]
    assert sum(prod(spec.index_shape(space.name)) for space in units) == 4
    assert not list(alike(trace(config), spec, torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("kind", ["Plain", "Largest", "Biased", "Flat"])
def test_an_order_that_could_differ_from_expert_to_expert_is_named(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    traced, rng = program(f"LookedUp{kind}", num_hidden_layers=1), torch.Generator().manual_seed(0)
    assert not list(alike(traced, derive(traced), rng))
    monkeypatch.setattr(IndexSets, "_are_apart", lambda *_: False)
    spec = derive(traced)
    ((units, experts),) = alike(traced, spec, rng)
    assert (spec.spaces[units].size, spec.spaces[experts].size) == (10, 4)


@pytest.mark.slow
def test_certify_does_not_call_it_complete(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(IndexSets, "_are_apart", lambda *_: False)
    assert run("certify", "mixtral", "--quiet") == 1
    assert "experts.qk could differ along model.layers.0.mlp.heads, and does not" in capsys.readouterr().out


class Gram(MLP):
    """Units of two heads, mixed by W Wᵀ."""

    times: Callable[[Tensor], Tensor]

    def __init__(self, config: TowerConfig, index: int) -> None:
        super().__init__(config, index)
        self.w = nn.Parameter(torch.zeros(2, 5, 5))

    def hidden(self, x: Tensor) -> Tensor:
        heads = self.up(x).unflatten(-1, (2, 5)).transpose(1, 2)
        return nn.functional.silu(heads @ type(self).times(self.w)).transpose(1, 2).flatten(2)


@pytest.mark.parametrize(
    "times",
    [
        lambda w: w @ w.mT,
        lambda w: torch.einsum("hik,hjk->hij", w, w),
        lambda w: w[0] @ w[0].mT,
        lambda w: torch.einsum("ik,jk->ij", w[0], w[0]),
        lambda w: torch.inner(w[0], w[0]),
        lambda w: nn.functional.linear(w[0], w[0]),
    ],
)
def test_what_a_matrix_is_turned_by_differs_over_no_rows_that_meet(times: Callable[[Tensor], Tensor]) -> None:
    part = type("Part", (Gram,), {"times": staticmethod(times)})
    with torch.device("meta"):
        model = type("Grams", (Tower,), {"mlp": part})(TowerConfig(num_hidden_layers=1)).eval()
    traced = trace_first_call(model)
    spec, rng = derive(traced), torch.Generator().manual_seed(0)
    weights = random_weights(spec, rng)
    assert max(soundness(traced, spec, weights, random_inputs(traced, rng), rng) for _ in range(3)) < 1e-9
    (turned,) = [s for s in spec.spaces.values() if s.size == 5 and s.group == Orthogonal(5)]
    assert {spec.spaces[outer].size for outer in turned.index} <= {2}
