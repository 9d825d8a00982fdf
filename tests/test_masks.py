"""Masks that hide all that a text has: what attends to nothing is no number, and shows nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers as hf
from conftest import run, save, small
from torch import Generator, Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from hf_align.symmetry.certificate.random_copy import random_inputs, random_weights
from hf_align.symmetry.certificate.soundness import soundness
from hf_align.symmetry.derivation.depth import derive_by_depth
from hf_align.symmetry.derivation.derive import derive
from hf_align.tracing.build import build_without_weights
from hf_align.tracing.example import Example
from hf_align.tracing.execute import execute
from hf_align.tracing.join import join
from hf_align.tracing.mode import cut
from hf_align.tracing.modes import find_modes
from hf_align.tracing.trace import trace
from hf_align.tracing.ways import padded


class SeesConfig(PretrainedConfig):
    model_type = "sees"

    def __init__(self, mistaken: bool = False, **rest: object) -> None:
        super().__init__(**rest)
        self.mistaken = mistaken


class Layer(nn.Module):
    def __init__(self, config: SeesConfig) -> None:
        super().__init__()
        self.config = config
        self.up, self.down = nn.Linear(8, 6), nn.Linear(6, 8)

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        bias = torch.zeros(seen.shape).masked_fill(seen.logical_not(), -torch.inf)
        if self.config._attn_implementation == "eager":
            mixed = (x @ x.transpose(1, 2) + bias).softmax(-1) @ x
        else:
            mixed = nn.functional.scaled_dot_product_attention(x, x, x, bias, scale=1.0)
        return x + self.down(torch.relu(self.up(mixed)))


class Sees(PreTrainedModel):
    """Attends to what is not padding; where it is mistaken, a mask of zeros and infinities is read as one of truth."""

    config_class = SeesConfig
    _supports_sdpa = True

    def __init__(self, config: SeesConfig) -> None:
        super().__init__(config)
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
        self.layers = nn.ModuleList(Layer(config) for _ in range(6))
        self.post_init()

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> dict[str, Tensor]:
        x = self.embed(input_ids)
        given = torch.ones(input_ids.shape) if attention_mask is None else attention_mask
        seen = given[:, None].bool().expand(-1, x.shape[1], -1)
        if self.config.mistaken and self.config._attn_implementation == "eager":
            seen = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)
        for layer in self.layers:
            x = layer(x, seen)
        return {"logits": self.head(x if x.shape[1] > 5 else x * torch.arange(8.0))}


hf.AutoConfig.register("sees", SeesConfig)
hf.AutoModel.register(SeesConfig, Sees)


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_a_text_that_is_cut_keeps_tokens_that_count(rows: int) -> None:
    ids, mask = torch.arange(12).expand(rows, 12), padded(rows, 12)
    shorter = cut(Example({"input_ids": ids, "attention_mask": mask}, {"input_ids": torch.arange(12)}), 4)
    assert shorter is not None
    left = shorter.arguments
    assert left["attention_mask"].shape == (rows, 4) and (left["attention_mask"].sum(1) >= 2).all()
    assert left["attention_mask"].equal(mask.gather(1, left["input_ids"]))
    assert not left["attention_mask"].all()


def test_masks_that_show_other_ends_are_cut_together() -> None:
    """No tokens that follow each other have one of each."""
    first = (torch.arange(12) < 1).long().expand(2, 12)
    given = {"input_ids": torch.arange(12).expand(2, 12), "mask": padded(2, 12), "first": first}
    shorter = cut(Example(given, {"input_ids": torch.arange(12)}), 4)
    assert shorter is not None
    assert shorter.arguments["mask"].any(1).all() and shorter.arguments["first"].any(1).all()
    assert shorter.arguments["input_ids"].tolist() == [[0, 1, 2, 4]] * 2


def test_what_masks_hide_that_show_too_many_places_is_cut_from_the_start() -> None:
    given = {"input_ids": torch.arange(9)[None], "mask": torch.eye(9).long()[None, ::3]}
    shorter = cut(Example(given, {"input_ids": torch.arange(9)}), 2)
    assert shorter is not None and shorter.arguments["input_ids"].tolist() == [[0, 1]]


def test_a_text_that_is_cut_begins_as_it_did_where_nothing_is_hidden() -> None:
    ids, square = torch.arange(6)[None], torch.ones(6, 6).tril()[None].long()
    shorter = cut(Example({"input_ids": ids, "mask": square}, {"input_ids": ids[0]}), 4)
    assert shorter is not None and shorter.arguments["input_ids"].equal(ids[:, :4])
    assert shorter.arguments["mask"].equal(square[:, :4, :4])


@pytest.mark.parametrize("mistaken", [False, True])
def test_every_call_of_a_model_with_masks_gives_numbers(mistaken: bool) -> None:
    """The short calls do something else, with a mask as without."""
    found = find_modes(build_without_weights(SeesConfig(mistaken, architectures=["Sees"])))
    short = {mode.name for mode, _ in found if mode.extent[1] == 4}
    assert len(short) == 2 and any("attention_mask" in name for name in short)
    program, rng = join({mode.name: program for mode, program in found}), Generator().manual_seed(0)
    spec = derive(program)
    assert soundness(program, spec, random_weights(spec, rng), random_inputs(program, rng), rng) < 1e-9


def test_what_is_shortened_attends_as_the_whole_does(caplog: pytest.LogCaptureFixture) -> None:
    config = SeesConfig(mistaken=True, architectures=["Sees"])
    program, spec, rng = trace(config), derive_by_depth(config), Generator().manual_seed(0)
    assert "in full" not in caplog.text
    weights, inputs = random_weights(spec, rng), random_inputs(program, rng)
    assert execute(program, weights, inputs).isfinite().all()
    assert soundness(program, spec, weights, inputs, rng) < 1e-9


def test_a_mask_that_only_one_way_of_attention_takes_is_no_call(tmp_path: Path) -> None:
    """Of the length of another axis: attention in one product fills it up, and written out it is refused."""
    config = small("voxtral_realtime_encoder", "VoxtralRealtimeEncoder")
    a, b = (save(tmp_path / n, config, seed) for seed, n in enumerate("ab"))
    assert run("align", a, b, "-o", tmp_path / "out", "--quiet") == 0
