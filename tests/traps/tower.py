"""A small decoder whose parts are methods, so that a trap is a subclass that overrides one of them.

It is the modelling code of checkpoints that bring their own, so it imports nothing of the tests. Plain as it is, it is
a Llama: RMSNorm before attention and MLP, rotary embedding, grouped queries, a gated MLP, a head of its own.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast


class TowerConfig(PretrainedConfig):
    model_type = "tower"

    def __init__(
        self,
        vocab_size: int = 17,
        hidden_size: int = 12,
        intermediate_size: int = 10,
        num_hidden_layers: int = 2,
        num_attention_heads: int = 2,
        num_key_value_heads: int = 1,
        head_dim: int = 4,
        rope_theta: float = 100.0,
        max_position_embeddings: int = 64,
        use_cache: bool = True,
        tie_word_embeddings: bool = False,
        **kwargs: object,
    ) -> None:
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.num_key_value_heads = num_key_value_heads
        self.head_dim = head_dim
        self.rope_theta = rope_theta
        self.max_position_embeddings = max_position_embeddings
        self.use_cache = use_cache
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)


class RMSNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))


class Attention(nn.Module):
    def __init__(self, config: TowerConfig, index: int) -> None:
        super().__init__()
        self.config, self.index = config, index
        inner, shared = (config.head_dim * n for n in (config.num_attention_heads, config.num_key_value_heads))
        self.q = nn.Linear(config.hidden_size, inner, bias=False)
        self.k = nn.Linear(config.hidden_size, shared, bias=False)
        self.v = nn.Linear(config.hidden_size, shared, bias=False)
        self.o = nn.Linear(inner, config.hidden_size, bias=False)

    def forward(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: DynamicCache | None) -> Tensor:
        """x [batch, length, width], positions [batch, length], seen [batch, 1, length, keys] -> as x."""
        q, k, v = (self.split(part(x)) for part in (self.q, self.k, self.v))
        q, k = self.rotate(q, positions), self.rotate(k, positions)
        if cache is not None:
            k, v = cache.update(k, v, self.index)
        repeats = q.shape[1] // k.shape[1]
        k, v = (t.repeat_interleave(repeats, 1) for t in (k, v))
        scores = self.score(q, k, positions)
        ahead = torch.arange(k.shape[2], device=x.device) > positions[:, None, :, None]
        scores = scores.masked_fill(ahead if seen is None else ahead | ~seen, torch.finfo(x.dtype).min)
        return self.o(self.mix(scores.softmax(-1), v).transpose(1, 2).flatten(2))

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)

    def rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """x [batch, heads, length, head_dim]: the first half against the second."""
        half = x.shape[-1] // 2
        frequencies = self.config.rope_theta ** -(torch.arange(half, device=x.device) / half)
        angles = positions[:, None, :, None] * frequencies
        first, second = x.chunk(2, -1)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)

    def score(self, q: Tensor, k: Tensor, positions: Tensor) -> Tensor:
        return q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5

    def mix(self, shares: Tensor, v: Tensor) -> Tensor:
        return shares @ v


class MLP(nn.Module):
    def __init__(self, config: TowerConfig, index: int) -> None:
        super().__init__()
        self.config, self.index = config, index
        self.gate = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.hidden(x))

    def hidden(self, x: Tensor) -> Tensor:
        return self.activate(self.gate(x)) * self.up(x)

    def activate(self, h: Tensor) -> Tensor:
        return nn.functional.silu(h)


class Block(nn.Module):
    def __init__(self, config: TowerConfig, index: int, attention: type[Attention], mlp: type[MLP]) -> None:
        super().__init__()
        self.config, self.index = config, index
        self.attn_norm = RMSNorm(config.hidden_size)
        self.attn = attention(config, index)
        self.mlp_norm = RMSNorm(config.hidden_size)
        self.mlp = mlp(config, index)

    def forward(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: DynamicCache | None) -> Tensor:
        x = x + self.attn(self.attn_norm(x), positions, seen, cache)
        return x + self.mlp(self.mlp_norm(x))


class Tower(PreTrainedModel, GenerationMixin):
    config_class = TowerConfig
    base_model_prefix = "tower"
    attention: ClassVar[type[Attention]] = Attention
    mlp: ClassVar[type[MLP]] = MLP
    block: ClassVar[type[Block]] = Block
    _tied_weights_keys: ClassVar[dict[str, str]] = {"head.weight": "embed.weight"}

    def __init__(self, config: TowerConfig) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        layers = (self.block(config, i, self.attention, self.mlp) for i in range(config.num_hidden_layers))
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(config.hidden_size)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.more(config)
        self.post_init()

    def more(self, config: TowerConfig) -> None:
        """What a subclass adds."""

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: DynamicCache | None = None,
        use_cache: bool | None = None,
        **kwargs: object,
    ) -> CausalLMOutputWithPast:
        use_cache = self.config.use_cache if use_cache is None else use_cache
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache()
        past = 0 if past_key_values is None else past_key_values.get_seq_length()
        if position_ids is None:
            position_ids = torch.arange(past, past + input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        seen = None if attention_mask is None else attention_mask[:, None, None].bool()
        x = self.run(self.embed(input_ids), position_ids, seen, past_key_values)
        return CausalLMOutputWithPast(logits=self.head(self.norm(x)), past_key_values=past_key_values)

    def run(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: DynamicCache | None) -> Tensor:
        for layer in self.layers:
            x = layer(x, positions, seen, cache)
        return x


def towers(module: str, **parts: type[Attention] | type[MLP] | type[Block]) -> dict[str, type[Tower]]:
    """A tower with each of some parts, by the names of their classes, which `module` gives to transformers."""
    kinds = {"attention": Attention, "mlp": MLP, "block": Block}

    def tower(name: str, part: type[nn.Module]) -> type[Tower]:
        place = next(place for place, kind in kinds.items() if issubclass(part, kind))
        return type(name, (Tower,), {place: part, "__module__": module})

    return {name: tower(name, part) for name, part in parts.items()}
