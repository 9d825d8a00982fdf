"""Models of the library that lie in folders and repositories."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import save, tiny_vit
from hub_server import Hub
from safetensors.torch import load_file, save_file

import hf_align
from hf_align.errors import CheckpointError, HfAlignError


def test_no_weight_of_a_folder_is_drawn_at_random(tmp_path: Path) -> None:
    """Transformers fills in what is lacking, and says so in a line that most callers never see."""
    a, b = (save(tmp_path / str(seed), tiny_vit(), seed) for seed in range(2))
    weights = load_file(b / "model.safetensors")
    lacking = next(name for name in weights if name.endswith("weight"))
    save_file({n: t for n, t in weights.items() if n != lacking}, b / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"1 lacks .*weight, which ViTForImageClassification needs"):
        hf_align.merge([a, b])
    (b / "model.safetensors").write_bytes((a / "model.safetensors").read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="1 cannot be loaded: "):
        hf_align.align(b, to=a)


def test_a_revision_of_a_repository(hub: Hub, tmp_path: Path) -> None:
    first = hub.add("org/a", save(tmp_path / "a", tiny_vit(), 0))
    second = hub.add("org/a", save(tmp_path / "b", tiny_vit(), 1))
    assert hf_align.align(f"org/a@{first}", to=tmp_path / "a").distance == pytest.approx((0, 0), abs=1e-6)
    assert hf_align.align(f"org/a@{second}", to=tmp_path / "b").distance == pytest.approx((0, 0), abs=1e-6)
    with pytest.raises(HfAlignError, match="has no revision v9"):
        hf_align.align("org/a@v9", to=tmp_path / "a")
