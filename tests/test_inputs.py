"""Example arguments: what models ask for together is among the candidates."""

from __future__ import annotations

from typing import Any, ClassVar, cast

import pytest
import transformers
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_align.tracing.example import Example
from hf_align.tracing.inputs import examples, media
from hf_align.tracing.trace import trace


class Asks(nn.Module):
    """A model that says what it reads, and no more."""

    main_input_name: ClassVar[str | list[str]] = "pixel_values"

    def __init__(self, **sizes: object) -> None:
        super().__init__()
        build: Any = transformers.PretrainedConfig
        self.config = build(vocab_size=11, image_size=8, hidden_size=8, **sizes)


class WithTask(Asks):
    main_input_name: ClassVar[str | list[str]] = ["pixel_values", "task_inputs"]

    def forward(self, pixel_values: Tensor, task_inputs: Tensor) -> None: ...


class WithQueries(Asks):
    def forward(self, pixel_values: Tensor, qformer_input_ids: Tensor, input_ids: Tensor | None = None) -> None: ...


class OfLatents(Asks):
    main_input_name: ClassVar[str | list[str]] = "latents"

    def forward(self, latents: Tensor) -> None: ...


class OfSpectra(Asks):
    """Of as many numbers as its first layer reads, which the config does not say."""

    main_input_name: ClassVar[str | list[str]] = "input_features"

    def __init__(self) -> None:
        super().__init__(num_mel_bins=8)
        self.stack = nn.Linear(24, 8)

    def forward(self, input_features: Tensor) -> None: ...


class WithTower(Asks):
    """Of another library, whose tower alone notes how large images are."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Module()
        self.tower.img_size = (40, 40)  # type: ignore[assignment]

    def forward(self, pixel_values: Tensor) -> None: ...


class WithTracks(Asks):
    """Of a film and its sound, which come together."""

    main_input_name: ClassVar[str | list[str]] = ["input_values", "pixel_values_videos"]

    def forward(self, input_values: Tensor, pixel_values_videos: Tensor) -> None: ...


def shapes(model: Asks) -> list[dict[str, tuple[int, ...]]]:
    found: list[Example] = list(examples(cast(PreTrainedModel, model), 2, 10))
    return [{name: tuple(value.shape) for name, value in e.arguments.items()} for e in found]


CASES: dict[str, tuple[Asks, dict[str, Any]]] = {
    "an image and a task": (WithTask(task_seq_len=5), {"pixel_values": (2, 3, 8, 8), "task_inputs": (2, 5)}),
    "a film and a question": (
        WithQueries(),
        {"pixel_values": (2, 2, 3, 8, 8), "qformer_input_ids": (2, 10), "input_ids": (2, 10)},
    ),
    "what the first layer reads": (OfSpectra(), {"input_features": (2, 64, 24)}),
    "an image as large as a module notes": (WithTower(), {"pixel_values": (2, 3, 40, 40)}),
    "a film and its sound": (WithTracks(), {"input_values": (2, 1, 2000), "pixel_values_videos": (2, 2, 3, 8, 8)}),
    "latents": (OfLatents(), {"latents": (2, 8, 10)}),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_asked_for_together_is_offered(case: str) -> None:
    model, wanted = CASES[case]
    assert wanted in shapes(model)


class WithLayout(Asks):
    """Of text and patches, with what says where these lie."""

    def forward(
        self, input_ids: Tensor, pixel_values: Tensor, spatial_shapes: Tensor, pixel_attention_mask: Tensor
    ) -> None: ...


def test_media_come_first_with_what_says_where_they_lie() -> None:
    model = cast(PreTrainedModel, WithLayout(image_token_id=4))
    taken = [given.keys() for *_, given in media(model) if given.keys() <= model.forward.__annotations__.keys()]
    assert taken[0] == {"pixel_values", "spatial_shapes", "pixel_attention_mask"}


@pytest.mark.parametrize(("source", "target"), [(11, 17), (17, 11)])
def test_tokens_are_in_every_table_in_which_they_are_looked_up(source: int, target: int) -> None:
    config = transformers.FSMTConfig(
        langs=["a", "b"], src_vocab_size=source, tgt_vocab_size=target, d_model=8, encoder_layers=1, decoder_layers=1,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=6, decoder_ffn_dim=6, pad_token_id=1,
        tie_word_embeddings=False, architectures=["FSMTForConditionalGeneration"],
    )  # fmt: skip
    example = trace(config).example
    for name, rows in (("input_ids", source), ("decoder_input_ids", target)):
        assert example.tokens[name].max() < rows
        assert example.arguments[name].max() < rows


def test_pages_are_read_with_their_pictures() -> None:
    config = transformers.LayoutLMv3Config(
        vocab_size=17, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
        coordinate_size=2, shape_size=4, input_size=16, patch_size=8, architectures=["LayoutLMv3Model"],
    )  # fmt: skip
    assert {"input_ids", "bbox", "pixel_values"} == trace(config).example.arguments.keys()
