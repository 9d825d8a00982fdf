"""Inputs without data: what a model writes by itself, or noise if it cannot generate."""

from __future__ import annotations

import torch
from torch import Generator, Tensor, nn
from transformers import GenerationConfig, PretrainedConfig

from hf_align.running.network import Batch, Network, Weights, in_dtype
from hf_align.runtime.devices import drawing
from hf_align.symmetry.certificate.random_copy import random_inputs
from hf_align.tracing.build import quiet
from hf_align.tracing.mode import at_length, extent
from hf_align.tracing.program import Program
from hf_align.tracing.trace import trace

_AT_ONCE = 256
"""Texts that are written side by side: their caches are held together."""


def own_inputs(network: Network, weights: Weights, count: int, length: int, seed: int) -> Batch:
    """Inputs that a model gives itself.

    A causal language model writes sequences from a random first token, by ancestral sampling; any other
    gets random tokens or Gaussian noise in the shape of its inputs.

    Args:
        weights: placed for the network.
        length: tokens of each sequence; fewer where the model has fewer positions.

    Returns:
        arguments of `forward`, [count, ...], on the CPU.
    """
    config, model = network.config, network.module(weights)
    if not writes(model):
        return _drawn(config, count, length, seed)
    text = config.get_text_config()
    length = min(length, getattr(text, "max_position_embeddings", None) or length)
    first = torch.randint(text.vocab_size, (count, 1), generator=Generator().manual_seed(seed)).to(network.device)
    # generate draws from the global generators, and has no other way to be told.
    with drawing(network.device, seed), torch.no_grad(), quiet():
        chunks = [_written(model, chunk, length) for chunk in first.split(_AT_ONCE)]
    return {"input_ids": torch.cat(chunks).cpu()}


@torch.no_grad()
def continued(network: Network, weights: Weights, prompt: Tensor, most: int) -> Tensor | None:
    """The most probable token, one after another.

    Args:
        weights: placed for the network.
        prompt: token ids, [1, tokens]; what the encoder reads where there is one.

    Returns:
        What comes after the prompt, [1, up to `most`]; None where the model writes nothing.
    """
    model = network.module(weights)
    if not model.can_generate():  # type: ignore[operator]
        return None
    room = getattr(network.config.get_text_config(), "max_position_embeddings", None) or prompt.shape[1] + most
    config, mask = network.config, torch.ones_like(prompt)
    settings = GenerationConfig(do_sample=False, use_cache=True, max_new_tokens=min(most, room - prompt.shape[1]),
                                pad_token_id=getattr(config, "pad_token_id", None) or 0,
                                eos_token_id=getattr(config, "eos_token_id", None),
                                decoder_start_token_id=getattr(config, "decoder_start_token_id", None))  # fmt: skip
    with quiet():
        told: Tensor = model.generate(prompt, generation_config=settings, attention_mask=mask)  # type: ignore[operator]
    return told if config.is_encoder_decoder else told[:, prompt.shape[1] :]


def _drawn(config: PretrainedConfig, count: int, length: int, seed: int) -> Batch:
    """Random inputs; where a head chooses among texts, of a call with few rows: of many, as many tokens as divide them
    would be taken for texts."""
    few = trace(config, length=length)
    if few.example.choices == 1:
        return noise(trace(config, batch=count, length=length), seed)
    many = at_length(few.example, extent(few.example)[1], count) or few.example
    return {**many.arguments, **many.drawn(Generator().manual_seed(seed))}


def noise(program: Program, seed: int = 0) -> Batch:
    """The arguments that a program was traced with, random where they are free: tokens, or Gaussian noise."""
    free = random_inputs(program, Generator().manual_seed(seed))
    return {n: in_dtype(t, torch.float32) for n, t in {**program.example.arguments, **free}.items()}


def writes(model: nn.Module) -> bool:
    """Whether a model goes on from tokens by itself."""
    return bool(model.can_generate()) and not model.config.is_encoder_decoder  # type: ignore[operator, union-attr]


def _written(model: nn.Module, first: Tensor, length: int) -> Tensor:
    """Plain ancestral sampling to the full length: no cut of the tail, no end."""
    settings = GenerationConfig(do_sample=True, top_k=0, top_p=1.0, temperature=1.0, use_cache=True, pad_token_id=0,
                                eos_token_id=None, bos_token_id=None, min_length=length, max_length=length)  # fmt: skip
    written: Tensor = model.generate(first, generation_config=settings, attention_mask=torch.ones_like(first))  # type: ignore[operator]
    return written
