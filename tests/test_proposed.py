"""What coverage gives to config classes that propose nothing that a model can be built from."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from transformers import CONFIG_MAPPING, PretrainedConfig

from hf_align.errors import IncompatibleModels
from hf_align.tracing.build import build_without_weights
from hf_align.tracing.small.reduce import reduced

_BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
_CLASSES = {"pp_ocrv6_medium_det": "PPOCRV6MediumDetModel", "t5gemma2_encoder": "T5Gemma2Encoder"}


def _named(config: PretrainedConfig, model_type: str) -> PretrainedConfig:
    config.architectures = [_CLASSES[model_type]]
    return config


@pytest.mark.parametrize("model_type", _CLASSES)
def test_model_is_built_from_what_checkpoints_say_and_not_from_what_its_class_proposes(model_type: str) -> None:
    proposed = runpy.run_path(str(_BENCHMARKS / "proposed.py"))["proposed"]
    with pytest.raises(IncompatibleModels, match="no model can be built"):
        build_without_weights(_named(CONFIG_MAPPING[model_type](), model_type))
    assert reduced(_named(proposed(model_type), model_type), wanted=200_000) is not None
