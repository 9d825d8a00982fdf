"""A language model that transformers does not know, of parts in a mix that no shipped model has.

Attention and MLP read one norm and write side by side; squared ReLU; rotary embedding of half of each head, with
neighbours as pairs; norms of queries and keys whose gain all heads share; a tied head. It is also the modelling file
of a checkpoint that brings its own code, so that it must not import anything of the tests.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput


class OddballConfig(PretrainedConfig):
    model_type = "oddball"

    def __init__(
        self,
        vocab_size: int = 11,
        hidden_size: int = 8,
        intermediate_size: int = 6,
        num_hidden_layers: int = 1,
        num_attention_heads: int = 2,
        head_dim: int = 6,
        rotary_dim: int = 4,
        max_position_embeddings: int = 16,
        norm_eps: float = 1e-5,
        tie_word_embeddings: bool = True,
        **kwargs: object,
    ) -> None:
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.head_dim = head_dim
        self.rotary_dim = rotary_dim
        self.max_position_embeddings = max_position_embeddings
        self.norm_eps = norm_eps
        self.tie_word_embeddings = tie_word_embeddings
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


def rotate(x: Tensor, size: int) -> Tensor:
    """The first `size` coordinates of x [batch, heads, positions, head_dim], neighbours as pairs."""
    turned, rest = x[..., :size], x[..., size:]
    frequencies = 100.0 ** (-torch.arange(0, size, 2, device=x.device) / size)
    angles = torch.arange(x.shape[-2], device=x.device)[:, None] * frequencies
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    even, odd = turned[..., 0::2], turned[..., 1::2]
    turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)
    return torch.cat((turned, rest), -1)


class Block(nn.Module):
    def __init__(self, config: OddballConfig) -> None:
        super().__init__()
        self.heads, self.head_dim, self.rotary_dim = config.num_attention_heads, config.head_dim, config.rotary_dim
        inner = self.heads * self.head_dim
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.qkv = nn.Linear(config.hidden_size, 3 * inner, bias=False)
        self.q_norm = RMSNorm(self.head_dim, config.norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.norm_eps)
        self.out = nn.Linear(inner, config.hidden_size)
        self.up = nn.Linear(config.hidden_size, config.intermediate_size)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        n = self.norm(x)
        return x + self.attend(n) + self.down(torch.relu(self.up(n)).square())

    def attend(self, n: Tensor) -> Tensor:
        batch, length, _ = n.shape
        q, k, v = self.qkv(n).view(batch, length, 3, self.heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k = rotate(self.q_norm(q), self.rotary_dim), rotate(self.k_norm(k), self.rotary_dim)
        scores = q @ k.transpose(-1, -2) / self.head_dim**0.5
        later = torch.ones(length, length, dtype=torch.bool, device=n.device).triu(1)
        mixed = scores.masked_fill(later, float("-inf")).softmax(-1) @ v
        return self.out(mixed.transpose(1, 2).reshape(batch, length, -1))


class OddballForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = OddballConfig
    base_model_prefix = "model"
    _tied_weights_keys = {"head.weight": "embed.weight"}  # noqa: RUF012

    def __init__(self, config: OddballConfig) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: Tensor, **kwargs: object) -> CausalLMOutput:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return CausalLMOutput(logits=self.head(self.norm(x)))
