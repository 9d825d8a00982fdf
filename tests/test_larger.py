"""Merges that are larger than both models: room for units of both."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import DATA, MODELS, run, save, small, tiny_llama, tiny_mixtral
from safetensors.torch import load_file
from transformers import PretrainedConfig

import hf_align


def tiny_llava() -> PretrainedConfig:
    return small("llava", "LlavaForConditionalGeneration")


CASES: dict[str, tuple[Callable[..., PretrainedConfig], list[Mapping[str, Any]], str, int]] = {
    "hidden units": (tiny_llama, [{}, {}], "intermediate_size", 9),
    "the stream": (tiny_llama, [{}, {}], "hidden_size", 12),
    "experts that are stored one by one": (tiny_mixtral, [{}, {}], "intermediate_size", 9),
    "a config in the config": (tiny_llava, [{}, {}], "text_config.intermediate_size", 9),
    "three models": (tiny_llama, [{}, {}, {}], "intermediate_size", 9),
    "two that are not as wide": (tiny_llama, [{}, {"intermediate_size": 8}], "intermediate_size", 9),
    "two that are not as deep": (tiny_llama, [{}, {"num_hidden_layers": 2}], "intermediate_size", 9),
}


@pytest.mark.parametrize("case", CASES)
def test_a_merge_has_the_sizes_that_are_asked_for(case: str, tmp_path: Path) -> None:
    """All weights are of the architecture that the config describes, and the deeper model's layers are there."""
    build, changes, field, size = CASES[case]
    folders = [save(tmp_path / str(i), build(**c), seed=i) for i, c in enumerate(changes)]
    out = tmp_path / "out"
    assert run("merge", *folders, "-o", out, "--quiet", "--method", "regression", "--widen", f"{field}={size}") == 0
    config = transformers.AutoConfig.from_pretrained(out)
    found = json.loads((out / "config.json").read_text())
    for name in field.split("."):
        found = found[name]
    assert found == size
    kind = getattr(transformers, config.architectures[0])
    model, loading = kind.from_pretrained(out, output_loading_info=True)
    assert not any(loading.values())
    assert {tuple(p.shape) for p in model.parameters()} == {tuple(p.shape) for p in kind(config).parameters()}
    layers = [c.get("num_hidden_layers") for c in changes if c]
    assert layers in ([], [None]) or config.num_hidden_layers == max(filter(None, layers))


def test_copies_merge_to_what_they_compute(tmp_path: Path) -> None:
    """What nothing of is lost fits into more room as well."""
    model = save(tmp_path / "a", tiny_llama(num_hidden_layers=2))
    again = save(tmp_path / "b", tiny_llama(num_hidden_layers=2))
    report = hf_align.merge([model, again], method="regression", output_dir=tmp_path / "out",
                            widen={"intermediate_size": 9})  # fmt: skip
    assert any("hidden 6 to 9" in note for note in report.notes)
    ids = torch.arange(11)[None]
    before, after = (
        transformers.AutoModelForCausalLM.from_pretrained(f)(ids).logits for f in (model, tmp_path / "out")
    )
    torch.testing.assert_close(after, before, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_a_quarter_more_units_take_a_tenth_of_the_barrier_at_least(tmp_path: Path) -> None:
    models, held_out = [MODELS / "gpt2" / seed for seed in "01"], load_file(DATA / "eval_lm_kjv.safetensors")
    ids = held_out["input_ids"][-64:].long()

    def loss(folder: Path) -> float:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        with torch.no_grad():
            return float(model(input_ids=ids, labels=ids).loss)

    barriers = []
    for options in ([], ["--widen", "n_inner=640"]):
        out = tmp_path / str(len(barriers))
        assert run("merge", *models, "-o", out, "--quiet", "--effort", "good", *options) == 0
        barriers.append(loss(out) - sum(map(loss, models)) / 2)
    assert barriers[1] < 0.9 * barriers[0]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--method", "regression", "--widen", "intermediate_size"], "intermediate_size=1280"),
        (["--method", "regression", "--widen", "width=9"], "LlamaConfig has no size of that name"),
        (["--method", "regression", "--widen", "hidden_act=9"], "has no size of that name"),
        (["--method", "regression", "--widen", "intermediate_size=6"], "it is 6 already"),
        (["--method", "regression", "--widen", "num_key_value_heads=7"], "--widen num_key_value_heads=7: "),
        (["--method", "regression", "--widen", "max_position_embeddings=32"], "no weight becomes larger"),
        (
            ["--method", "regression", "--widen", "intermediate_size=9", "--widen", "max_position_embeddings=32"],
            "no weight becomes larger by max_position_embeddings",
        ),
        (["--method", "regression", "--widen", "vocab_size=14"], "vocab_size (11 and 14)"),
        (["--method", "regression", "--widen", "num_hidden_layers=2"], "configs differ in num_hidden_layers"),
        (["--method", "linear", "--widen", "intermediate_size=9"], "--method linear takes none"),
        (["--method", "ties", "--widen", "intermediate_size=9"], "--method ties takes none"),
        (["--effort", "quick", "--widen", "intermediate_size=9"], "--method linear takes none"),
        (["--effort", "quick", "--widen", "intermediate_size=9", "--dry-run"], "--method linear takes none"),
        (["--widen", "intermediate_size=9", "--widen", "intermediate_size=12"], "a field has one size"),
    ],
)
def test_what_cannot_be_larger_is_refused(
    options: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [save(tmp_path / str(i), tiny_llama(), seed=i) for i in range(2)]
    assert run("merge", *folders, "-o", tmp_path / "out", *options) == 2
    assert said in capsys.readouterr().err.replace("\n", " ")
    assert not (tmp_path / "out").exists()


def test_a_plan_counts_what_is_larger(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [save(tmp_path / str(i), tiny_llama(), seed=i) for i in range(2)]
    found = []
    for options in ([], ["--widen", "intermediate_size=9"]):
        assert run("merge", *folders, "--method", "regression", "--dry-run", "--json", *options) == 0
        found.append(json.loads(capsys.readouterr().out)["bytes_to_write"])
    stored = load_file(folders[0] / "model.safetensors")
    mlp = sum(tensor.nbytes for name, tensor in stored.items() if ".mlp." in name)
    assert abs(found[1] - found[0] - mlp // 2) < 64
