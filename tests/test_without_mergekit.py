"""mergekit is an extra: without it the command says what to install."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest
from conftest import run

from hf_align.mergekit.folders import _told


def test_the_extra_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    (tmp_path / "recipe.yml").write_text("merge_method: linear\nmodels: []\n")
    assert run("mergekit", tmp_path / "recipe.yml", tmp_path / "out") == 2
    assert capsys.readouterr().err == "hf-align: mergekit is not installed; pip install 'hf-align[mergekit]'\n"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("errors", "told"),
    [
        ("INFO:root:loading\nERROR:root:None fits.\nERROR:root:All of them:\nERROR:root:  * Mixtral\n", "None fits"),
        ("Traceback (most recent call last):\n  File\nKeyError: 'w'\n\n", "KeyError: 'w'"),
        ("\n", "it failed"),
    ],
)
def test_what_a_script_of_mergekit_says_went_wrong(errors: str, told: str) -> None:
    assert _told(errors) == told
