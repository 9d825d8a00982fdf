"""Experts of a traced graph are multiplied by without being copied for each token."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import built
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GptOssConfig, MixtralConfig

from hf_align.merging.lockstep import Lockstep, program_of, require_same
from hf_align.running.chosen import Chosen
from hf_align.running.network import Network

SMALL = {"vocab_size": 11, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1,
         "num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4}  # fmt: skip
CONFIGS = {
    "mixtral": MixtralConfig(**SMALL, architectures=["MixtralForCausalLM"]),
    "mixtral that answers a loss first": MixtralConfig(
        **SMALL, output_router_logits=True, architectures=["MixtralForCausalLM"]
    ),
    "gpt-oss": GptOssConfig(**SMALL, head_dim=4, num_experts_per_tok=2, architectures=["GptOssForCausalLM"]),
}


class Largest(TorchDispatchMode):
    """How many entries the largest tensor has that an op gives."""

    entries = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = op(*args, **kwargs or {})
        for tensor in found if isinstance(found, (tuple, list)) else (found,):
            self.entries = max(self.entries, tensor.numel() if isinstance(tensor, Tensor) else 0)
        return found


def test_products_with_chosen_matrices() -> None:
    rng = torch.Generator().manual_seed(0)
    matrices, numbers = torch.randn(5, 3, 4, generator=rng), torch.tensor([4, 0, 0, 2, 4, 4])
    chosen, x = Chosen(matrices, numbers), torch.randn(6, 4, 2, generator=rng)
    torch.testing.assert_close(chosen.times(x), matrices[numbers] @ x)
    torch.testing.assert_close(chosen.transposed.behind(x.mT), x.mT @ matrices[numbers].mT)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_graph_with_experts(name: str) -> None:
    network = Network(CONFIGS[name])
    weights = {n: p.detach() for n, p in built(CONFIGS[name], 0).named_parameters()}
    tokens = torch.randint(11, (4, 32), generator=torch.Generator().manual_seed(0))
    program = program_of(network, {"input_ids": tokens})
    require_same(program, network, weights, {"input_ids": tokens})
    lockstep = Lockstep(program, network, [{"input_ids": tokens}], [weights], [program.output])
    with Largest() as largest:
        list(lockstep.run(lockstep.stage(())))
    copied = 2 * tokens.numel() * 2 * 12 * 8  # two experts for each token, each with twice 12 units of 8 entries
    assert 0 < largest.entries < copied / 4
