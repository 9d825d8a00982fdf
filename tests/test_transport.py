"""A fine-tune carried to another base."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import built, run, tiny_bert, tiny_gpt2, tiny_llama, tiny_vit
from test_api import answers
from transformers import PretrainedConfig, PreTrainedModel

import hf_align

FAMILIES = {"llama": tiny_llama, "gpt2": tiny_gpt2, "bert": tiny_bert, "vit": tiny_vit}
METHODS = ["regression", "task_arithmetic"]


def tuned(base: PreTrainedModel, config: PretrainedConfig, seed: int = 9) -> PreTrainedModel:
    """The base with a small change of every weight."""
    made, noise = built(config, 0), built(config, seed)
    with torch.no_grad():
        for weight, start, other in zip(made.parameters(), base.parameters(), noise.parameters(), strict=True):
            weight.copy_(start + 0.05 * other)
    return made


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", FAMILIES)
def test_onto_its_own_base_in_another_basis_it_is_the_fine_tune(family: str, method: str) -> None:
    config = FAMILIES[family]()
    base = built(config, 0)
    finetuned, onto = tuned(base, config), hf_align.randomize(base, seed=3)
    carried = hf_align.transport(finetuned, base=base, onto=onto, method=method, witness=False)
    expected, found = answers(finetuned), answers(carried)
    assert float((found - expected).abs().max()) < 2e-3 * float(expected.abs().max())
    assert float((answers(onto) - expected).abs().max()) > 0.05 * float(expected.abs().max())


@pytest.mark.parametrize("method", METHODS)
def test_a_fine_tune_that_learned_nothing_leaves_the_other_base(method: str) -> None:
    base, onto = built(tiny_llama(), 0), built(tiny_llama(), 1)
    carried = hf_align.transport(base, base=base, onto=onto, method=method, strength=2.0)
    torch.testing.assert_close(answers(carried), answers(onto), rtol=1e-3, atol=1e-4)


def test_regression_brings_the_answers_nearer_to_what_they_should_be() -> None:
    """What B should answer on the inputs that are regressed on: its own answers and what the fine-tune changed."""
    base, onto = built(tiny_llama(), 0), built(tiny_llama(), 1)
    finetuned = tuned(base, tiny_llama())
    rows = {"input_ids": torch.randint(11, (64, 16), generator=torch.Generator().manual_seed(5))}
    with torch.no_grad():
        wanted = sum(sign * m(**rows).logits for sign, m in ((1, onto), (-1, base), (1, finetuned)))
        apart = {}
        for method in METHODS:
            data = rows if method == "regression" else None
            carried = hf_align.transport(finetuned, base=base, onto=onto, data=data, method=method, witness=False)
            apart[method] = float((carried(**rows).logits - wanted).square().mean())
    assert apart["regression"] < 0.5 * apart["task_arithmetic"]


def save(folder: Path, model: PreTrainedModel) -> Path:
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def three(tmp_path: Path) -> list[Path]:
    """A fine-tune, its base, and another base."""
    base = built(tiny_llama(), 0)
    models = {"tuned": tuned(base, tiny_llama()), "base": base, "other": built(tiny_llama(), 1)}
    return [save(tmp_path / name, model) for name, model in models.items()]


def test_the_command_writes_what_the_library_gives(three: list[Path], tmp_path: Path) -> None:
    finetuned, base, onto = three
    data = tmp_path / "data.jsonl"
    assert run("transport", finetuned, "--base", base, "--onto", onto, "-o", tmp_path / "out", "--quiet") == 0
    written = type(built(tiny_llama(), 0)).from_pretrained(tmp_path / "out")
    torch.testing.assert_close(answers(written), answers(hf_align.transport(finetuned, base=base, onto=onto)),
                               rtol=1e-3, atol=1e-3)  # fmt: skip
    card = (tmp_path / "out" / "README.md").read_text()
    assert "hf-align transport tuned --base base --onto other" in card and str(tmp_path) not in card
    assert not data.exists()


def test_what_it_gains_is_measured(three: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from safetensors.torch import save_file

    finetuned, base, onto = three
    save_file({"input_ids": torch.randint(11, (8, 16))}, tmp_path / "rows.safetensors")
    assert run("transport", finetuned, "--base", base, "--onto", onto, "-o", tmp_path / "out", "--data",
               tmp_path / "rows.safetensors", "--method", "task_arithmetic", "--quiet") == 0  # fmt: skip
    said = " ".join(capsys.readouterr().out.split())
    assert "the result has loss" in said and "added without alignment" in said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--base", "GPT2", "--onto", "OTHER"], "they do not merge"),
        (["--base", "BASE", "--onto", "OTHER", "--strength", "nan"], "--strength is nan"),
        (["--base", "BASE", "--onto", "OTHER", "--method", "ties"], "'ties'"),
        (["--base", "BASE"], "--onto"),
    ],
    ids=["another architecture", "strength", "method", "no other base"],
)
def test_what_cannot_be_carried(
    options: list[str], message: str, three: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finetuned, base, onto = three
    gpt2 = save(tmp_path / "gpt2", built(tiny_gpt2(), 0))
    places = {"BASE": base, "OTHER": onto, "GPT2": gpt2}
    assert run("transport", finetuned, *(places.get(o, o) for o in options), "-o", tmp_path / "out") == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match="method is 'ties'"):
        hf_align.transport(finetuned, base=base, onto=onto, method="ties")  # type: ignore[arg-type]
