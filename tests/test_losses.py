"""Losses on held-out data: the mean over labels, whatever parts the data is run in."""

from __future__ import annotations

import pytest
import torch
from conftest import built, tiny_bert, tiny_llama
from test_chosen import Largest
from torch import Tensor
from transformers import MixtralConfig

from hf_align.errors import HfAlignError
from hf_align.running.evaluate import Evaluator
from hf_align.running.network import Network, batches


@pytest.mark.parametrize("make", [tiny_llama, tiny_bert], ids=["next tokens", "tokens in place"])
def test_every_label_counts_alike(make: object) -> None:
    """Rows have none to eight labels, and the first part none at all; a whole run of the model is the reference."""
    config = make()  # type: ignore[operator]
    network, rng = Network(config), torch.Generator().manual_seed(0)
    weights = {n: p.detach() for n, p in built(config, 0).named_parameters()}
    tokens = torch.randint(11, (53, 8), generator=rng)
    kept = torch.rand(53, 1, generator=rng) > torch.rand(53, 8, generator=rng)
    data = {"input_ids": tokens, "labels": tokens.where(kept & (torch.arange(53) >= 16)[:, None], -100)}
    with torch.no_grad():
        expected = float(network.loss(weights, data))
    evaluator = Evaluator(network, data)
    assert evaluator.loss(weights) == pytest.approx(expected, rel=1e-5)
    assert evaluator.ensemble([weights, weights], (0.4, 0.6)) == pytest.approx(expected, rel=1e-5)


def test_a_part_in_which_it_makes_no_difference_where_labels_are_counts_as_much() -> None:
    """Where all tokens are one, those in place are predicted as well as the next ones."""
    config, rng = tiny_llama(), torch.Generator().manual_seed(0)
    network = Network(config)
    weights = {n: p.detach() for n, p in built(config, 0).named_parameters()}
    tokens = torch.cat([torch.full((16, 8), 3), torch.randint(11, (16, 8), generator=rng)])
    with torch.no_grad():
        expected = float(network.loss(weights, {"input_ids": tokens, "labels": tokens}))
    evaluator = Evaluator(network, {"input_ids": tokens})
    assert evaluator.loss(weights) == pytest.approx(expected, rel=1e-5)
    assert evaluator.loss(weights) == pytest.approx(expected, rel=1e-5)
    assert Evaluator(network, {"input_ids": tokens}).ensemble([weights], (1.0,)) == pytest.approx(expected, rel=1e-5)


def test_data_without_any_label_is_refused() -> None:
    none = {"input_ids": torch.zeros(2, 8, dtype=torch.long), "labels": torch.full((2, 8), -100)}
    with pytest.raises(HfAlignError, match="stands for none"):
        Evaluator(Network(tiny_llama()), none)


@pytest.mark.parametrize(("shape", "rows"), [((100, 64), 16), ((100, 512), 4), ((5, 4096), 1), ((40,), 16)])
def test_long_rows_run_in_small_parts(shape: tuple[int, ...], rows: int) -> None:
    data: dict[str, Tensor] = {"input_ids": torch.zeros(shape, dtype=torch.long)}
    found = [len(part["input_ids"]) for part in batches(data)]
    assert found[0] == rows and sum(found) == shape[0]


def test_experts_are_run_without_a_copy_of_them_for_each_token() -> None:
    config = MixtralConfig(
        vocab_size=11, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=4, architectures=["MixtralForCausalLM"],
    )  # fmt: skip
    weights = {n: p.detach() for n, p in built(config, 0).named_parameters()}
    tokens = torch.randint(11, (4, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), Largest() as largest:
        Network(config)(weights, {"input_ids": tokens})
    assert 0 < largest.entries <= tokens.numel() * 2 * 32, "two experts for each token, each of twice 16 units"
