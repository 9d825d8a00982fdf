"""Shared fixtures: the trained models that the repository ships, and tiny architectures."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from by_weights import by_weights
from hub_server import HUB, Hub, start

os.environ["HF_ENDPOINT"] = start(HUB)  # read when huggingface_hub is imported: no test speaks to the real Hub
os.environ["HF_HUB_DISABLE_XET"] = "1"
if "PYTEST_XDIST_WORKER" not in os.environ:  # what one command of a session has derived, all others find
    os.environ["HF_ALIGN_CACHE"] = tempfile.mkdtemp(prefix="hf-align-specs-")
    atexit.register(shutil.rmtree, os.environ["HF_ALIGN_CACHE"], ignore_errors=True)

import once  # noqa: F401
import pytest
import torch
import transformers
from huggingface_hub import constants
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from hf_align.__main__ import _NEW_OBJECTS
from hf_align.cli.app import main
from hf_align.matching.balanced import Balanced
from hf_align.matching.descent import Progress
from hf_align.matching.match import Match
from hf_align.matching.weights import match_weights
from hf_align.symmetry.spec import SymmetrySpec
from hf_align.tracing.build import model_class
from hf_align.tracing.small.reduce import reduced

ROOT = Path(__file__).parent.parent
SLOW = frozenset((Path(__file__).parent / "slow.txt").read_text().splitlines())
MODELS = ROOT / "examples" / "models"
DATA = ROOT / "examples" / "data"

Tiny = Callable[..., PretrainedConfig]


def tiny_llama(**changes: object) -> PretrainedConfig:
    sizes = dict(vocab_size=11, hidden_size=8, intermediate_size=6, num_hidden_layers=1, num_attention_heads=2,
                 num_key_value_heads=1, head_dim=4, max_position_embeddings=16, tie_word_embeddings=False)  # fmt: skip
    return transformers.LlamaConfig(**{**sizes, "architectures": ["LlamaForCausalLM"], **changes})


def tiny_gpt2(**changes: object) -> PretrainedConfig:
    sizes = dict(vocab_size=11, n_embd=8, n_layer=1, n_head=2, n_inner=6, n_positions=10, bos_token_id=0,
                 eos_token_id=0, tie_word_embeddings=False)  # fmt: skip
    return transformers.GPT2Config(**{**sizes, "architectures": ["GPT2LMHeadModel"], **changes})


def tiny_bert(**changes: object) -> PretrainedConfig:
    sizes = dict(vocab_size=11, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=6,
                 max_position_embeddings=10)  # fmt: skip
    return transformers.BertConfig(**{**sizes, "architectures": ["BertForMaskedLM"], **changes})


def tiny_vit(**changes: object) -> PretrainedConfig:
    sizes = dict(hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=6, image_size=4,
                 patch_size=2, num_channels=1, num_labels=9)  # fmt: skip
    return transformers.ViTConfig(**{**sizes, "architectures": ["ViTForImageClassification"], **changes})


def tiny_mixtral(**changes: object) -> PretrainedConfig:
    sizes = dict(vocab_size=11, hidden_size=8, intermediate_size=6, num_hidden_layers=1, num_attention_heads=2,
                 num_key_value_heads=1, num_local_experts=3, max_position_embeddings=16)  # fmt: skip
    return transformers.MixtralConfig(**{**sizes, "architectures": ["MixtralForCausalLM"], **changes})


def tiny_t5(**changes: object) -> PretrainedConfig:
    sizes = dict(vocab_size=11, d_model=8, d_kv=4, d_ff=6, num_layers=2, num_heads=2, decoder_start_token_id=0)
    return transformers.T5Config(**{**sizes, "architectures": ["T5ForConditionalGeneration"], **changes})


def small(model_type: str, architecture: str) -> PretrainedConfig:
    """The smallest copy of a default config."""
    config = transformers.CONFIG_MAPPING[model_type]()
    config.architectures = [architecture]
    found = reduced(config)
    assert found is not None
    return found


def save(folder: Path, config: PretrainedConfig, seed: int = 0) -> Path:
    """A model as trained: what a norm, a softmax or an activation does must show."""
    torch.manual_seed(seed)
    model = getattr(transformers, config.architectures[0])(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    model.save_pretrained(folder)
    return folder


def built(config: PretrainedConfig, seed: int) -> PreTrainedModel:
    """A live model whose weights all say something."""
    torch.manual_seed(seed)
    model: PreTrainedModel = model_class(config).__self__(config)  # type: ignore[attr-defined]
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.2 * torch.randn(weight.shape))
    return model.eval()


def run(*arguments: object) -> int:
    """The command line, in this process; its exit status. Merges that leave it open are matched by weights."""
    sys.argv = ["hf-align", *by_weights(list(map(str, arguments)))]
    try:
        main()
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def matched(
    spec: SymmetrySpec, a: Mapping[str, Tensor], b: Mapping[str, Tensor], progress: Progress | None = None
) -> Match:
    """Two models matched by their weights."""
    models = Balanced.of(spec, a, b)
    return models.match(*match_weights(models, progress))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is known to take long is slow; of all tests, those of the file that takes longest come first, or one process
    would end with them alone."""
    items.sort(key=lambda item: item.path.name != "test_random_architectures.py")
    for item in items:
        if item.nodeid in SLOW and item.get_closest_marker("quick") is None:
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """The libraries and the tests themselves stay: no collection of garbage looks through them again, and as seldom as
    in the command looks through the rest."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_NEW_OBJECTS)


@pytest.fixture(scope="session")
def models() -> Path:
    return MODELS


@pytest.fixture(scope="session")
def data() -> Path:
    return DATA


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """An empty Hub, an empty cache, and the token of alice."""
    HUB.clear()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_TOKEN", "hf_alice")
    monkeypatch.setattr("hf_align.checkpoints.hub._WAITS", (0.01,) * 3)
    yield HUB
    HUB.clear()
