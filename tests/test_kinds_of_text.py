"""Texts that are more than one row of ids: a row for each codebook, or a second text with a mask of its own."""

from __future__ import annotations

import pytest
import torch
import transformers as hf
from torch import Generator, Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from hf_align.symmetry.certificate.random_copy import random_inputs, random_weights
from hf_align.symmetry.certificate.soundness import soundness
from hf_align.symmetry.derivation.derive import derive
from hf_align.tracing.build import build_without_weights
from hf_align.tracing.modes import trace_modes
from hf_align.tracing.program import Program


class CodesConfig(PretrainedConfig):
    model_type = "of-codes"

    def __init__(self, num_codebooks: int = 3, turns: bool = False, **rest: object) -> None:
        super().__init__(**rest)
        self.num_codebooks, self.turns, self.vocab_size = num_codebooks, turns, 11


class OfCodes(PreTrainedModel):
    """Adds what the tables of all codebooks have for a place; may turn its coordinates where some are hidden, or where
    there is one text of many places."""

    config_class = CodesConfig

    def __init__(self, config: CodesConfig) -> None:
        super().__init__(config)
        self.tables = nn.ModuleList(nn.Embedding(11, 8) for _ in range(config.num_codebooks))
        self.up, self.head = nn.Linear(8, 6), nn.Linear(6, 11)
        self.post_init()

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> dict[str, Tensor]:
        books = input_ids.reshape(-1, self.config.num_codebooks, input_ids.shape[-1])
        hidden = torch.relu(self.up(sum(table(books[:, i]) for i, table in enumerate(self.tables))))
        if attention_mask is not None:
            hidden = hidden * attention_mask[..., None]
        if self.config.turns and len(books) == 1 and books.shape[-1] > 40:
            hidden = hidden.flip(-1)
        return {"logits": self.head(hidden)}


class SecondConfig(PretrainedConfig):
    model_type = "of-a-second-text"

    def __init__(self, **rest: object) -> None:
        super().__init__(**rest)
        self.vocab_size = 11


class OfASecondText(PreTrainedModel):
    """Reads another text only with a mask of it."""

    config_class = SecondConfig

    def __init__(self, config: SecondConfig) -> None:
        super().__init__(config)
        self.table, self.second = nn.Embedding(11, 8), nn.Embedding(11, 8)
        self.up, self.head = nn.Linear(8, 6), nn.Linear(6, 11)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor,
        other_input_ids: Tensor | None = None,
        other_attention_mask: Tensor | None = None,
    ) -> dict[str, Tensor]:
        x = self.table(input_ids)
        if other_input_ids is not None and other_attention_mask is not None:
            x = x + (self.second(other_input_ids) * other_attention_mask[..., None]).sum(1, keepdim=True)
        return {"logits": self.head(torch.relu(self.up(x)))}


for config, model in ((CodesConfig, OfCodes), (SecondConfig, OfASecondText)):
    hf.AutoConfig.register(config.model_type, config)
    hf.AutoModel.register(config, model)


def modes_of(config: PretrainedConfig, architecture: str) -> Program:
    config.architectures = [architecture]
    program = trace_modes(build_without_weights(config))
    spec, rng = derive(program), Generator().manual_seed(0)
    assert not spec.unread
    assert soundness(program, spec, random_weights(spec, rng), random_inputs(program, rng), rng) < 1e-9
    return program


@pytest.mark.parametrize("books", [1, 3])
def test_a_text_has_a_row_for_each_codebook_and_a_mask_one_for_all(books: int) -> None:
    program = modes_of(CodesConfig(books), "OfCodes")
    assert program.example.arguments["input_ids"].shape == (2 * books, 12)
    assert {"input_ids, 2 × 12", "input_ids with attention_mask"} <= {*program.modes}


@pytest.mark.parametrize("turns", [False, True])
def test_longer_calls_have_whole_texts(turns: bool) -> None:
    """Of one text, which is three rows: units may not move where some call turns them."""
    config = CodesConfig(turns=turns, architectures=["OfCodes"])
    program = trace_modes(build_without_weights(config))
    (factor,) = derive(program).parameters["up.weight"][0][0]
    assert (factor.space is None or derive(program).spaces[factor.space].group is None) == turns


def test_a_second_text_is_read_with_its_mask() -> None:
    program = modes_of(SecondConfig(), "OfASecondText")
    assert "input_ids with other_input_ids" in program.modes
    assert any(name.endswith("other_input_ids") for name in program.example.tokens)
