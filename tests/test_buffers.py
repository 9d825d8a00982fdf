"""Masks and tables that are saved with the weights: what is stored counts, not what the config would give."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from conftest import run
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto import configuration_auto, modeling_auto

from hf_align.opening.pairs import open_pair
from hf_align.running.network import Network

UNITS = 6
IDS = torch.randint(11, (3, 5), generator=torch.Generator().manual_seed(0))


class StoredConfig(PretrainedConfig):
    model_type = "stored"

    def __init__(self, **rest: object) -> None:
        self.vocab_size, self.hidden_size = 11, 4
        super().__init__(**rest)


class StoredModel(PreTrainedModel):
    """Units that a mask leaves out, words that a table stands others in for, and a counter that nothing reads."""

    config_class = StoredConfig

    def __init__(self, config: StoredConfig) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.up = nn.Linear(config.hidden_size, UNITS)
        self.down = nn.Linear(UNITS, config.vocab_size)
        self.register_buffer("mask", torch.ones(UNITS, dtype=torch.bool))
        self.register_buffer("table", torch.arange(config.vocab_size))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.post_init()

    def forward(self, input_ids: Tensor) -> SimpleNamespace | transformers.utils.ModelOutput:
        hidden = torch.relu(self.up(self.embed(self.table[input_ids])))
        return transformers.modeling_outputs.CausalLMOutput(logits=self.down(hidden.masked_fill(~self.mask, 0.0)))


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    transformers.AutoConfig.register("stored", StoredConfig)
    transformers.AutoModelForCausalLM.register(StoredConfig, StoredModel)
    yield
    configuration_auto.CONFIG_MAPPING._extra_content.pop("stored")
    modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING._extra_content.pop(StoredConfig)


def save(folder: Path, seed: int, **stored: Tensor) -> Path:
    torch.manual_seed(seed)
    model = StoredModel(StoredConfig(architectures=["StoredModel"]))
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    values = {"mask": torch.arange(UNITS) < 4, "table": torch.arange(11).flip(0), "count": torch.tensor(seed)}
    for name, value in {**values, **stored}.items():
        getattr(model, name).copy_(value)
    model.save_pretrained(folder)
    return folder


def logits(folder: Path) -> Tensor:
    with torch.no_grad():
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)(IDS).logits


def test_aligned_b_is_b_with_its_own_mask_and_table(tmp_path: Path) -> None:
    a, b = (save(tmp_path / name, seed) for seed, name in enumerate("ab"))
    assert run("align", a, b, "-o", tmp_path / "out", "--quiet") == 0
    before, after = logits(b), logits(tmp_path / "out")
    assert float((after - before).abs().max()) < 1e-5 * float(before.abs().max())
    written, own = (load_file(f / "model.safetensors") for f in (tmp_path / "out", b))
    assert all(torch.equal(written[name], own[name]) for name in ("mask", "table", "count"))
    assert not torch.equal(written["up.weight"], own["up.weight"])


def test_what_is_run_has_what_is_stored(tmp_path: Path) -> None:
    folder = save(tmp_path / "a", 0)
    pair = open_pair(str(folder), str(folder))
    weights = {name: pair.a.weights[name] for name in pair.spec.parameters}
    found = Network(pair.config)(weights, {"input_ids": IDS}).logits
    assert float((found - logits(folder)).abs().max()) < 1e-5


@pytest.mark.parametrize("command", ["align", "merge", "merge --match none"])
@pytest.mark.parametrize("name", ["mask", "table"])
def test_what_is_not_the_same_is_refused_by_its_name(
    name: str, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = {"mask": torch.arange(UNITS) < 3, "table": torch.arange(11)}
    refs = save(tmp_path / "a", 0), save(tmp_path / "b", 1, **{name: other[name]})
    assert run(*command.split()[:1], *refs, "-o", tmp_path / "out", *command.split()[1:]) == 2
    assert f"hold different values in {name}, which is no weight" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("match", ["none", "weight"])
@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.int64])
def test_weights_that_are_no_floating_point_numbers_are_refused(
    dtype: torch.dtype, match: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refs = [save(tmp_path / name, seed) for seed, name in enumerate("ab")]
    for ref in refs:
        file = ref / "model.safetensors"
        tensors = load_file(file)
        save_file({**tensors, "up.weight": (tensors["up.weight"] > 0).to(dtype)}, file, {"format": "pt"})
    assert run("merge", *refs, "-o", tmp_path / "out", "--match", match) == 2
    assert "up.weight is stored as" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
