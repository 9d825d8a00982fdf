"""The files that go with the weights of a model: what loads its tokenizer, and what stands behind it."""

from __future__ import annotations

import json
from contextlib import suppress
from fnmatch import fnmatch
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from conftest import run, save, tiny_bert
from safetensors.torch import save_file
from transformers import AutoTokenizer
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING_NAMES
from transformers.utils import AUDIO_TOKENIZER_NAME, PROCESSOR_NAME, VIDEO_PROCESSOR_NAME

from hf_align.checkpoints.companions import COPIED, companions
from hf_align.checkpoints.not_merged import not_merged

MODULES = ("", "1_Pooling", "2_Dense", "../outside", "linked")


@pytest.fixture
def embedders(tmp_path: Path) -> list[Path]:
    """Two Sentence Transformers, with a dense layer of their own each, and paths that lead out of their folders."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "config.json").write_text("{}")
    return [_embedder(tmp_path / name, seed) for seed, name in enumerate("ab")]


def _embedder(folder: Path, seed: int) -> Path:
    save(folder, tiny_bert(architectures=["BertModel"]), seed)
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
    assert any("2_Dense/model.safetensors differs between the models" in note for note in notes) is is_said


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


def _prepared(folder: Path, **changed: object) -> Path:
    """What prepares inputs: a tokenizer, and a processor of pictures."""
    folder.mkdir(exist_ok=True)
    words = tokenizers.models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")])
    tokenizer = json.loads(tokenizers.Tokenizer(words).to_str())
    tokenizer |= {name: value for name, value in changed.items() if name in tokenizer}
    tokenizer["model"] |= {name: value for name, value in changed.items() if name in tokenizer["model"]}
    picture = {"image_mean": changed.get("image_mean", 0.5), "_processor_class": folder.name}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "preprocessor_config.json").write_text(json.dumps(picture))
    (folder / "LICENSE").write_text(folder.name)
    return folder


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({}, None),
        ({"merges": ["a b"], "padding": None}, None),
        ({"normalizer": {"type": "Lowercase"}}, "tokenizer.json (normalizer) differs"),
        ({"merges": []}, "tokenizer.json (merges) differs"),
        ({"image_mean": 0.4}, "preprocessor_config.json (image_mean) differs"),
        ({"image_mean": 0.4, "merges": []}, "preprocessor_config.json (image_mean) and tokenizer.json (merges) differ"),
    ],
)
def test_inputs_that_are_prepared_in_another_way(changed: dict[str, object], named: str | None, tmp_path: Path) -> None:
    """Merges joined by a space are those of older files."""
    found = not_merged([_prepared(tmp_path / "a"), _prepared(tmp_path / "b"), _prepared(tmp_path / "c", **changed)])
    assert [note.startswith(named or "?") for note in found] == [True] * (named is not None)


def test_files_of_one_model_alone_are_not_spoken_of(tmp_path: Path) -> None:
    a, b = _prepared(tmp_path / "a"), _prepared(tmp_path / "b", image_mean=0.4)
    assert not_merged([a, b]) and not not_merged([a, b], without=["preprocessor*"])
    (b / "preprocessor_config.json").unlink()
    assert not not_merged([a, b])


SPELLER = """
import json
from transformers import PreTrainedTokenizer

print("a tokenizer is read")


class Speller(PreTrainedTokenizer):
    vocab_files_names = {"words": "letters.json"}

    def __init__(self, words, **kwargs):
        self.ids = json.load(open(words))
        super().__init__(**kwargs)

    def get_vocab(self):
        return self.ids

    @property
    def vocab_size(self):
        return len(self.ids)

    def _tokenize(self, text):
        return list(text)

    def _convert_token_to_id(self, token):
        return self.ids[token]

    def _convert_id_to_token(self, index):
        return "abcd"[index]
"""


def _spelling(folder: Path, seed: int, letters: str = "abcd") -> Path:
    """A model that transformers knows, with a tokenizer of its own."""
    save(folder, tiny_bert(), seed)
    (folder / "speller.py").write_text(SPELLER)
    (folder / "letters.json").write_text(json.dumps({letter: i for i, letter in enumerate(letters)}))
    (folder / "diary.json").write_text("{}")
    said = {"auto_map": {"AutoTokenizer": ["speller.Speller", None]}, "tokenizer_class": "Speller"}
    (folder / "tokenizer_config.json").write_text(json.dumps(said))
    return folder


def test_a_tokenizer_of_its_own_goes_with_a_model_and_what_its_code_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = _spelling(tmp_path / "a", 0), _spelling(tmp_path / "b", 1, "badc")
    (note,) = (n for n in _notes("merge", a, b, "-o", tmp_path / "out", capsys=capsys) if "letters.json" in n)
    assert note.startswith("letters.json (a, b and 2 more) differs between the models")
    assert not (tmp_path / "out" / "diary.json").exists()
    found = AutoTokenizer.from_pretrained(tmp_path / "out", trust_remote_code=True)
    assert found("dab", add_special_tokens=False)["input_ids"] == [3, 0, 1]
