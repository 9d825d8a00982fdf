"""Inputs without data: what a model writes by itself, or noise where it does not write."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Generator, Tensor, nn
from transformers import GenerationConfig, PretrainedConfig

from hf_align.network import Batch, in_float32
from hf_align.symmetry.certificate.random_copy import random_inputs
from hf_align.trace import Program, build_without_weights, quiet, trace

_AT_ONCE = 256


def own_inputs(config: PretrainedConfig, weights: Mapping[str, Tensor], count: int, length: int, seed: int) -> Batch:
    """Inputs that a model gives itself.

    A causal language model writes sequences from a random first token, by ancestral sampling; any other
    gets random tokens or Gaussian noise in the shape of its inputs.

    Args:
        weights: by name in memory, on the device to generate on.
        length: tokens of each sequence; fewer where the model has fewer positions.

    Returns:
        arguments of `forward`, [count, ...], on the CPU.
    """
    model = _filled(config, weights)
    device = next(iter(weights.values())).device
    if not _writes(model):
        return noise(trace(config, batch=count, length=length), seed)
    text = config.get_text_config()
    length = min(length, getattr(text, "max_position_embeddings", None) or length)
    first = torch.randint(text.vocab_size, (count, 1), generator=Generator().manual_seed(seed)).to(device)
    # generate draws from the global generators, and has no other way to be told.
    with torch.random.fork_rng(), torch.no_grad(), quiet():
        torch.manual_seed(seed)
        chunks = [_written(model, chunk, length) for chunk in first.split(_AT_ONCE)]
    return {"input_ids": torch.cat(chunks).cpu()}


def noise(program: Program, seed: int = 0) -> Batch:
    """The arguments that a program was traced with, random where they are free: tokens, or Gaussian noise."""
    free = random_inputs(program, Generator().manual_seed(seed))
    return {n: in_float32(t) for n, t in {**program.example.arguments, **free}.items()}


def _writes(model: nn.Module) -> bool:
    return bool(model.can_generate()) and not model.config.is_encoder_decoder  # type: ignore[operator, union-attr]


def _written(model: nn.Module, first: Tensor, length: int) -> Tensor:
    """Plain ancestral sampling to the full length: no cut of the tail, no end."""
    settings = GenerationConfig(do_sample=True, top_k=0, top_p=1.0, temperature=1.0, use_cache=True, pad_token_id=0,
                                eos_token_id=None, bos_token_id=None, min_length=length, max_length=length)  # fmt: skip
    written: Tensor = model.generate(first, generation_config=settings, attention_mask=torch.ones_like(first))  # type: ignore[operator]
    return written


def _filled(config: PretrainedConfig, weights: Mapping[str, Tensor]) -> nn.Module:
    """The model with these weights: generation cannot be given them from outside."""
    model = build_without_weights(config)
    device = next(iter(weights.values())).device
    for path, module in model.named_modules():
        for slots in (module._parameters, module._buffers):
            for key, slot in slots.items():
                name = f"{path}.{key}" if path else key
                if name in weights:
                    real = weights[name]
                    slots[key] = nn.Parameter(real, requires_grad=False) if isinstance(slot, nn.Parameter) else real
                elif slot is not None and slots is module._buffers:
                    slots[key] = slot.to(device)
    model.tie_weights()
    return model
