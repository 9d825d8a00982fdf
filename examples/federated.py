"""Federated averaging of clients that did not start from the same weights: the server aligns before it averages."""

from collections.abc import Sequence

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig

import hf_align

StateDict = dict[str, Tensor]


def aggregate(results: Sequence[tuple[StateDict, int]], config: PretrainedConfig, **how: str) -> StateDict:
    """What a strategy calls with the weights and the number of examples of each client (arXiv 1602.05629)."""
    examples = sum(count for _, count in results)
    states, shares = [state for state, _ in results], [count / examples for _, count in results]
    merged: StateDict = hf_align.merge(states, weights=shares, config=config, **how)
    return merged


@torch.no_grad()
def loss(state: StateDict, tokens: Tensor) -> float:
    model = AutoModelForCausalLM.from_pretrained("examples/models/llama/0")
    model.load_state_dict(state)
    return float(model(tokens, labels=tokens).loss)


clients = [AutoModelForCausalLM.from_pretrained(f"examples/models/llama/{seed}") for seed in "012"]
results = [(client.state_dict(), count) for client, count in zip(clients, (500, 300, 200), strict=True)]
tokens = load_file("examples/data/eval_lm_kjv.safetensors")["input_ids"][:64].long()
for name, how in {"as they are": "none", "aligned": "weight"}.items():
    print(f"{name}: {loss(aggregate(results, clients[0].config, align=how), tokens):.2f}")
print(f"one client: {loss(clients[0].state_dict(), tokens):.2f}")
