"""The files that go with the weights of a model: what loads its tokenizer, and what stands behind it."""

from __future__ import annotations

import json
from contextlib import suppress
from fnmatch import fnmatch
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import run, save, tiny_bert
from safetensors.torch import save_file
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES
from transformers.utils import AUDIO_TOKENIZER_NAME, PROCESSOR_NAME, VIDEO_PROCESSOR_NAME

from hf_align.checkpoints.companions import COPIED, companions

MODULES = ("", "1_Pooling", "2_Dense", "../outside", "linked")


@pytest.fixture
def embedders(tmp_path: Path) -> list[Path]:
    """Two Sentence Transformers, with a dense layer of their own each, and paths that lead out of their folders."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "config.json").write_text("{}")
    return [_embedder(tmp_path / name, seed) for seed, name in enumerate("ab")]


def _embedder(folder: Path, seed: int) -> Path:
    save(folder, tiny_bert(), seed)
    (folder / "modules.json").write_text(json.dumps([{"idx": i, "path": path} for i, path in enumerate(MODULES)]))
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 8}')
    (folder / "notes.json").write_text('{"private": true}')
    for module in MODULES[1:3]:
        (folder / module).mkdir()
        (folder / module / "config.json").write_text("{}")
    save_file({"linear.weight": torch.full((2, 8), float(seed))}, folder / "2_Dense" / "model.safetensors")
    (folder / "linked").symlink_to(folder.parent / "outside")
    return folder


def _notes(*arguments: object, capsys: pytest.CaptureFixture[str]) -> list[str]:
    assert run(*arguments, "--quiet", "--json", "--overwrite") == 0
    return list(json.loads(capsys.readouterr().out)["notes"])


@pytest.mark.parametrize(
    ("command", "whose", "is_said"),
    [(["align"], 1, False), (["merge", "--effort", "quick"], 0, True), (["merge", "--match", "none"], 0, True)],
    ids=["align", "merge", "plain merge"],
)
def test_what_stands_behind_a_model_goes_with_it(
    command: list[str], whose: int, is_said: bool, embedders: list[Path], tmp_path: Path, capsys: Any
) -> None:
    """A merge has that of A and says so where B has another; aligned B has its own."""
    out = tmp_path / "out"
    notes = _notes(command[0], *embedders, "-o", out, *command[1:], capsys=capsys)
    for name in ("modules.json", "sentence_bert_config.json", "1_Pooling/config.json", "2_Dense/model.safetensors"):
        assert (out / name).read_bytes() == (embedders[whose] / name).read_bytes()
    assert not (out / "notes.json").exists() and not (out / "linked").exists()
    assert any("the models differ in 2_Dense/model.safetensors" in note for note in notes) is is_said


def test_another_module_behind_a_model_is_another_input(embedders: list[Path], tmp_path: Path) -> None:
    command = ("align", *embedders, "-o", tmp_path / "out", "--quiet", "--no-witness")
    assert run(*command) == 0 and run(*command) == 0
    (embedders[1] / "1_Pooling" / "config.json").write_text('{"pooling_mode_cls_token": true}')
    assert run(*command) == 2


@pytest.mark.parametrize("said", ['[{"path": 3}, "x"]', "{}", "[", "[[[[null]]]]"])
def test_a_list_of_modules_that_is_none_is_copied_as_it_is(said: str, tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text(said)
    assert companions(tmp_path, with_code=False) == ([tmp_path / "modules.json"], [])


def test_whatever_a_tokenizer_or_processor_reads_is_copied() -> None:
    """By the tables of transformers itself."""
    names = {AUDIO_TOKENIZER_NAME, PROCESSOR_NAME, VIDEO_PROCESSOR_NAME, "preprocessor_config.json", "tekken.json"}
    for model_type in (name.replace("-", "_") for name in TOKENIZER_MAPPING_NAMES):
        with suppress(ImportError):  # the tokenizer of another type, or one that needs a package
            read = import_module(f"transformers.models.{model_type}.tokenization_{model_type}")
            names |= {*getattr(read, "VOCAB_FILES_NAMES", {}).values()}
    assert {"source.spm", "bpe.codes", "entity_vocab.json", "spiece.model"} <= names
    assert not [name for name in names if not any(fnmatch(name, pattern) for pattern in COPIED)]
