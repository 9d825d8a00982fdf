"""Weights that a class does not save, and computes when a model is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from conftest import run, save, small
from safetensors.torch import load_file, save_file


def marian(folder: Path, seed: int) -> Path:
    """A model whose class does not save its positions, and computes them when it is loaded."""
    return save(folder, small("marian", "MarianMTModel"), seed)


def test_what_a_class_computes_and_does_not_save_is_no_weight_that_a_checkpoint_lacks(tmp_path: Path) -> None:
    a, b = (marian(tmp_path / n, seed) for seed, n in enumerate("ab"))
    assert not any("positions" in name for name in load_file(a / "model.safetensors"))
    assert run("align", a, b, "-o", tmp_path / "out", "--quiet") == 0
    ids = torch.arange(3, 12)[None]
    before, after = (
        transformers.MarianMTModel.from_pretrained(f)(input_ids=ids, decoder_input_ids=ids).logits
        for f in (b, tmp_path / "out")
    )
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("factor", "status"), [(1.0, 0), (1.5, 2)])
def test_what_a_checkpoint_holds_all_the_same_must_be_what_its_class_computes(
    factor: float, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = (marian(tmp_path / n, seed) for seed, n in enumerate("ab"))
    model, name = transformers.MarianMTModel.from_pretrained(b), "model.encoder.embed_positions.weight"
    weights = load_file(b / "model.safetensors") | {name: factor * model.state_dict()[name]}
    save_file(weights, b / "model.safetensors", {"format": "pt"})
    assert run("align", a, b, "-o", tmp_path / "out", "--quiet") == status
    assert ("holds other values in model.encoder.embed_positions" in capsys.readouterr().err) is (status == 2)


def test_what_a_checkpoint_holds_all_the_same_is_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "model.encoder.embed_positions.weight"
    for seed, n in enumerate("ab"):
        file = marian(tmp_path / n, seed) / "model.safetensors"
        table = transformers.MarianMTModel.from_pretrained(file.parent).state_dict()[name]
        save_file({**load_file(file), name: table, "foreign.weight": torch.ones(2)}, file, {"format": "pt"})
    assert run("merge", tmp_path / "a", tmp_path / "b", "-o", tmp_path / "out", "--match", "none") == 0
    said = capsys.readouterr()
    assert "hold foreign.weight that their architecture does not have" in " ".join((said.out + said.err).split())
