"""Fused attention makes zeros of a row in which all is hidden: a bias of values then reaches nobody there."""

from __future__ import annotations

import math

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from hf_align.symmetry.derivation.derive import derive
from hf_align.symmetry.gauges.moves import MoveConstant
from hf_align.tracing.build import build_without_weights
from hf_align.tracing.trace import trace_first_call


class Config(PretrainedConfig):
    model_type = "hidden_rows"
    vocab_size, hidden_size = 11, 8


class Attentive(PreTrainedModel):
    """One block of fused attention, with a mask of truth values unless it is made another."""

    config_class = Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(11, 8)
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 11, bias=False)
        self.post_init()

    def hidden(self, input_ids: Tensor) -> Tensor:
        raise NotImplementedError

    def mask(self, seen: Tensor) -> Tensor:
        return seen

    def attend(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=self.mask(seen))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        q, k, v = (part(x).unflatten(-1, (2, 4)).transpose(1, 2) for part in (self.q, self.k, self.v))
        places = torch.arange(x.shape[1], device=x.device)
        past = places <= places[:, None]
        seen = self.attend(q, k, v, past & ~self.hidden(input_ids))
        return self.head(torch.tanh(x + self.o(seen.transpose(1, 2).flatten(2))))


class Never(Attentive):
    def hidden(self, input_ids: Tensor) -> Tensor:
        return torch.arange(input_ids.shape[1], device=input_ids.device) < 0


class Word(Attentive):
    def hidden(self, input_ids: Tensor) -> Tensor:
        return (input_ids == 1)[:, None, None]


class Added(Word):
    def mask(self, seen: Tensor) -> Tensor:
        return torch.zeros(seen.shape).masked_fill(~seen, -math.inf)


class Chosen(Word):
    def mask(self, seen: Tensor) -> Tensor:
        return torch.where(seen, 0.0, -math.inf)


class Lowered(Word):
    """Words that hide all leave the mean of all, as scores of one size do."""

    def mask(self, seen: Tensor) -> Tensor:
        return torch.where(seen, 0.0, torch.finfo(torch.float32).min)


class Logarithm(Word):
    def mask(self, seen: Tensor) -> Tensor:
        return seen.float().log()


class Twice(Lowered):
    """Lower than what a number can be."""

    def mask(self, seen: Tensor) -> Tensor:
        return 2 * super().mask(seen)


class State(Never):
    """Words with little in them are not seen."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        return super().attend(q, k, v, seen & (k.detach().square().sum(-1) > 1e-2)[..., None, :])


class Biased(Never):
    """Scores have a bias of places, as those of T5."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.places = nn.Parameter(torch.zeros(64))

    def mask(self, seen: Tensor) -> Tensor:
        return self.places[: seen.shape[-1]].expand(seen.shape)


class Always(Never):
    mask = Added.mask


class Before(Never):
    """The first word attends to nothing."""

    def mask(self, seen: Tensor) -> Tensor:
        return seen.tril(-1)


class AddedBefore(Never):
    def mask(self, seen: Tensor) -> Tensor:
        return torch.zeros(seen.shape).masked_fill(~seen.tril(-1), -math.inf)


class Near(Never):
    """Words of long texts say nothing."""

    def near(self, places: Tensor) -> Tensor:
        return (places < 5000).float()

    def attend(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        factor = self.near(torch.arange(v.shape[-2]))[:, None].expand(v.shape)
        return super().attend(q, k, v * factor, seen)


class All(Near):
    def near(self, places: Tensor) -> Tensor:
        return torch.ones(len(places))


@pytest.mark.parametrize(
    ("kind", "free"),
    [
        (Never, True),
        (Word, False),
        (Added, False),
        (Chosen, False),
        (Lowered, True),
        (Always, True),
        (Logarithm, False),
        (Twice, False),
        (State, False),
        (Biased, True),
        (Before, False),
        (AddedBefore, False),
        (Near, False),
        (All, True),
    ],
)
def test_a_bias_of_values_moves_where_no_word_hides_all(kind: type[Attentive], free: bool) -> None:
    config = type(f"{kind.__name__}Config", (Config,), {"model_type": f"hidden_{kind.__name__}"})
    model = type(kind.__name__, (kind,), {"config_class": config})
    transformers.AutoModelForCausalLM.register(config, model)
    gauges = derive(trace_first_call(build_without_weights(config(architectures=[kind.__name__])))).gauges
    moved = [g for g in gauges if isinstance(g, MoveConstant) and g.source.parameter == "v.bias"]
    assert bool(moved) == free
