"""What the tests compare with: python tests/golden/regenerate.py writes tests/golden/*.json and what is in specs/."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import transformers
import yaml

sys.path.insert(0, str(Path(__file__).parent.parent))

from conftest import ROOT, tiny_bert, tiny_gpt2, tiny_llama, tiny_vit
from transformers import AutoConfig, PretrainedConfig

from hf_align.symmetry.derivation.depth import derive_by_depth
from hf_align.symmetry.overrides.override_file import OverrideFile

GOLDEN = ROOT / "tests" / "golden"
CONFIGS = {
    "llama": tiny_llama(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2),
    "gpt2": tiny_gpt2(n_layer=2),
    "gpt2_tied": tiny_gpt2(n_layer=2, tie_word_embeddings=True),
    "bert": tiny_bert(num_hidden_layers=2),
    "vit": tiny_vit(),
    "mixtral": transformers.MixtralConfig(
        vocab_size=11, hidden_size=8, intermediate_size=6, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=4, max_position_embeddings=16, num_local_experts=4,
        architectures=["MixtralForCausalLM"],
    ),
}  # fmt: skip


def derived(config: PretrainedConfig) -> str:
    return json.dumps(derive_by_depth(config).as_json(), indent=1) + "\n"


FAMILIES = ("bert", "gemma2", "gpt2", "llama", "mistral", "mixtral", "qwen3", "t5", "vit", "whisper")
"""Whose specs people read, in specs/derived/."""
_DEPTHS = ("num_hidden_layers", "num_layers", "num_decoder_layers", "n_layer", "encoder_layers", "decoder_layers")
_HEADER = """\
# The symmetries of {family} in its default sizes, with two layers. tests/golden/regenerate.py derives this file.
# An axis is written as its size, the space that moves it, and how: ^1 with the element, ^-1 against it.
"""


def readable(family: str) -> str:
    config = AutoConfig.for_model(family)
    config.update({field: 2 for field in _DEPTHS if hasattr(config, field)})
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:2]
    text = yaml.safe_dump(derive_by_depth(config).as_json(), sort_keys=False, width=120, allow_unicode=True)
    return _HEADER.format(family=family) + text


def schema() -> str:
    return json.dumps(OverrideFile.model_json_schema(), indent=2) + "\n"


GENERATED: dict[Path, Callable[[], str]] = {
    **{GOLDEN / f"{name}.json": partial(derived, config) for name, config in CONFIGS.items()},
    **{ROOT / "specs" / "derived" / f"{family}.yaml": partial(readable, family) for family in FAMILIES},
    ROOT / "specs" / "schema.json": schema,
}
"""Every generated file, and what makes its text."""


if __name__ == "__main__":
    for path, text in GENERATED.items():
        path.write_text(text(), encoding="utf-8")
        print(path.relative_to(ROOT))
