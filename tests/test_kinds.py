"""A small copy has every kind of layer that its model has, or says which it lacks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import PretrainedConfig

from hf_align.api.symmetries import certify
from hf_align.cli.certify import _lines
from hf_align.symmetry.derivation.depth import derive_by_depth
from hf_align.tracing.build import build_without_weights
from hf_align.tracing.small.kinds import Layers, layers_of
from hf_align.tracing.small.reduce import reduced
from hf_align.tracing.small.shrink import shrink


def lacking(config: PretrainedConfig, copy: PretrainedConfig) -> dict[str, tuple[int, int]]:
    return layers_of(config).lacking(build_without_weights(copy))


@pytest.mark.parametrize(
    ("model_type", "architecture", "layers", "lacked"),
    [
        ("recurrent_gemma", "RecurrentGemmaForCausalLM", 3, {"model.layers": (1, 2)}),  # attention is in every third
        ("mllama", "MllamaForCausalLM", 4, {"model.layers": (1, 2)}),  # layers that see pictures are numbered
        ("modernbert", "ModernBertForMaskedLM", 4, {"model.layers": (2, 3)}),  # no norm in the first
        ("afmoe", "AfmoeForCausalLM", 3, {"model.layers": (2, 3)}),  # two lists: windows, and experts
        ("jamba", "JambaForCausalLM", 5, {"model.layers": (2, 3)}),  # two periods
    ],
)
def test_copies_are_as_deep_as_their_kinds_of_layers_ask(
    model_type: str, architecture: str, layers: int, lacked: dict[str, tuple[int, int]]
) -> None:
    config = transformers.AutoConfig.for_model(model_type, architectures=[architecture])
    assert lacking(config, shrink(config)) == lacked
    copy = reduced(config)
    assert copy is not None and lacking(config, copy) == {}
    assert copy.get_text_config().num_hidden_layers == layers


class ManyKindsConfig(PretrainedConfig):
    model_type = "many-kinds"

    def __init__(self, hidden_size: int = 32, num_hidden_layers: int = 10, first: int = 9, **rest: Any) -> None:
        self.hidden_size, self.num_hidden_layers, self.first, self.vocab_size = (
            hidden_size,
            num_hidden_layers,
            first,
            40,
        )
        super().__init__(**rest)


class ManyKinds(transformers.PreTrainedModel):
    """The layers from a certain number on have another activation; no small copy comes as far as the tenth."""

    config_class = ManyKindsConfig

    def __init__(self, config: ManyKindsConfig) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.embed = nn.Embedding(config.vocab_size, width)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.GELU() if i >= config.first else nn.Tanh())
            for i in range(config.num_hidden_layers)
        )
        self.head = nn.Linear(width, config.vocab_size)
        self.post_init()

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids).cumsum(1)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits


transformers.AutoConfig.register("many-kinds", ManyKindsConfig)
transformers.AutoModel.register(ManyKindsConfig, ManyKinds)


def test_a_copy_is_as_deep_as_the_first_layer_of_another_kind() -> None:
    config = ManyKindsConfig(first=4, architectures=["ManyKinds"])
    copy = reduced(config)
    assert copy is not None and copy.num_hidden_layers == 5 and lacking(config, copy) == {}


def test_a_certificate_says_which_kinds_of_layers_it_is_not_of() -> None:
    found = certify(ManyKindsConfig(architectures=["ManyKinds"]))
    assert found.lacking == {"layers": (1, 2)} and found.as_json()["lacking"] == {"layers": [1, 2]}
    said = "the copy has 1 of the 2 kinds of layers in layers; nothing is shown of the others"
    assert said in "\n".join(_lines(found))
    assert certify(ManyKindsConfig(first=2, architectures=["ManyKinds"])).lacking == {}


class PartsConfig(PretrainedConfig):
    model_type = "parts-of-some-kinds"


class Parts(transformers.PreTrainedModel):
    """Layers that differ in width, in the number of their parts, by their own number, in dropout, or in all."""

    config_class = PartsConfig

    def __init__(self, config: PartsConfig) -> None:
        super().__init__(config)
        self.wide = nn.ModuleList(nn.Linear(3, i + 1) for i in range(4))
        self.long = nn.ModuleList(nn.ModuleList(nn.Linear(3, 3) for _ in range(i + 1)) for i in range(4))
        self.other = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3, bias=False), nn.Tanh()])
        self.dropped = nn.ModuleList([nn.Identity(), nn.Dropout(0.1), nn.Dropout(0.2)])
        self.empty = nn.ModuleList([None, nn.Tanh(), None])  # type: ignore[list-item]
        self.shifted = nn.ModuleList(nn.ModuleList([nn.Tanh(), nn.Tanh()]) for _ in range(2))
        for number, layer in enumerate(self.wide):
            layer.number = number  # type: ignore[assignment]
        for stage in self.shifted:
            stage[0].shift, stage[1].shift = 0, config.shift


transformers.AutoConfig.register("parts-of-some-kinds", PartsConfig)
transformers.AutoModel.register(PartsConfig, Parts)


def test_sizes_and_numbers_and_dropout_make_no_kind() -> None:
    found = layers_of(PartsConfig(architectures=["Parts"], shift=3)).kinds
    assert found == {
        "wide": 1,
        "long": 1,
        "long.*": 1,
        "other": 3,
        "dropped": 1,
        "empty": 2,
        "shifted": 1,
        "shifted.*": 2,
    }


def test_what_is_a_setting_in_the_model_numbers_no_layer_of_its_copy() -> None:
    """Every second block is shifted, in the copy by one."""
    config, copy = (PartsConfig(architectures=["Parts"], shift=shift) for shift in (3, 1))
    assert lacking(config, copy) == {}
    assert lacking(config, PartsConfig(architectures=["Parts"], shift=0)) == {"shifted.*": (1, 2)}


class Counting(nn.Module):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x


def test_a_model_is_left_as_it_was() -> None:
    model = Parts(PartsConfig(architectures=["Parts"], shift=3)).eval()
    model.dropped.append(Counting())
    assert Layers.of(model).kinds["dropped"] == 1
    assert "calls" not in vars(model.dropped[-1])


def test_lists_of_a_config_that_tell_layers_apart_are_read() -> None:
    """Layers that are built alike, and of which the forward asks the config what they are."""
    words = ["full_attention", *["sliding_attention"] * 3, "full_attention", "full_attention"]
    config = ManyKindsConfig(num_hidden_layers=6, layer_types=words, first=99, architectures=["ManyKinds"])
    copy = reduced(config)
    assert layers_of(config).kinds == {"layers": 2}
    assert copy is not None and copy.layer_types == ["full_attention", "sliding_attention"]
    assert lacking(config, copy) == {}
    copy.layer_types = ["full_attention"] * 2
    assert lacking(config, copy) == {"layers": (1, 2)}


class MarkedConfig(PretrainedConfig):
    model_type = "marked-now-and-then"

    def __init__(self, num_hidden_layers: int = 2, every: int = 3, least: int = 1, **rest: Any) -> None:
        self.hidden_size, self.num_hidden_layers, self.every, self.vocab_size = 96, num_hidden_layers, every, 400
        self.least = least
        super().__init__(**rest)


class MarkedLayer(nn.Module):
    def __init__(self, width: int, marks: bool) -> None:
        super().__init__()
        self.linear, self.marks = nn.Linear(width, width), marks

    def forward(self, x: Tensor, **said: Any) -> Tensor:
        if self.marks and said.get("marked"):
            x = x + torch.arange(x.shape[-1], dtype=x.dtype)
        return x + torch.tanh(self.linear(x))


class Marked(transformers.PreTrainedModel):
    """Some layers add a number of its own to each channel, if a call asks for it by a name that only they know."""

    config_class = MarkedConfig

    def __init__(self, config: MarkedConfig) -> None:
        super().__init__(config)
        if config.hidden_size < config.least:
            raise ValueError(f"it is narrower than {config.least}")
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            MarkedLayer(config.hidden_size, i % config.every == config.every - 1)
            for i in range(config.num_hidden_layers)
        )
        self.head = nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()

    def forward(self, input_ids: Tensor, **said: Any) -> Tensor:
        x = self.embed(input_ids).cumsum(1)
        for layer in self.layers:
            x = layer(x, **said)
        logits: Tensor = self.head(x)
        return logits


transformers.AutoConfig.register("marked-now-and-then", MarkedConfig)
transformers.AutoModel.register(MarkedConfig, Marked)


@pytest.mark.parametrize(("layers", "every"), [(9, 3), (12, 11)], ids=["in every third layer", "in the eleventh"])
def test_what_changes_one_kind_of_layer_alone_is_asked_for(layers: int, every: int) -> None:
    """Of a copy that has such a layer, be it as deep as the model."""
    spec = derive_by_depth(MarkedConfig(layers, every, architectures=["Marked"]))
    assert any("marked" in mode for mode in spec.modes)


def test_a_copy_that_lacks_a_kind_of_layer_is_not_asked() -> None:
    """What runs goes by the defaults of its class, and has two layers."""
    spec = derive_by_depth(MarkedConfig(9, 3, least=64, architectures=["Marked"]))
    assert any("marked" in mode for mode in spec.modes)
