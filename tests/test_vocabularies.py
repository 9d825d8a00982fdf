"""Models with other tokenizers: what their tokens spell, and the rows that stand for them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import MODELS, run
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders
from tokenizers import models as kinds
from transformers import AutoModelForCausalLM, AutoTokenizer, BertConfig, GPT2Config, LlamaConfig, PreTrainedModel

import hf_align
from hf_align.checkpoints.token_ids import renamed_tokens, require_same_vocabulary
from hf_align.errors import CheckpointError, HfAlignError, IncompatibleModels
from hf_align.jobs import respelling
from hf_align.jobs.opened import Opened
from hf_align.opening.vocabularies import Respelling, Vocabulary, vocabulary_axes
from hf_align.settings.options import Options

LLAMA = MODELS / "llama"


def tokenizer(folder: Path, words: Sequence[str], decoder: Any, special: Sequence[str] = ()) -> Vocabulary:
    """A tokenizer that has these tokens in this order."""
    made = Tokenizer(kinds.WordPiece({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    made.decoder = decoder
    made.add_special_tokens(list(special))
    folder.mkdir(parents=True, exist_ok=True)
    made.save(str(folder / "tokenizer.json"))
    return Vocabulary.read(folder)


FALLING_BACK = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])


@pytest.mark.parametrize(
    ("decoder", "token", "text"),
    [
        (decoders.ByteLevel(), "Ġthe", b" the"),
        (decoders.ByteLevel(), "Ãł", b"\xc3\xa0"),
        (decoders.ByteLevel(), "Ã", b"\xc3"),
        (decoders.WordPiece(), "##ing", b"ing"),
        (decoders.WordPiece(), "sing", b" sing"),
        (decoders.Metaspace(), "▁the", b" the"),
        (FALLING_BACK, "▁the", b" the"),
        (FALLING_BACK, "<0x41>", b"A"),
        (FALLING_BACK, "à", "à".encode()),
        (decoders.Metaspace(), "<0x41>", b"<0x41>"),
    ],
)
def test_tokens_spell_bytes(decoder: Any, token: str, text: bytes, tmp_path: Path) -> None:
    assert tokenizer(tmp_path, ["[UNK]", token], decoder).spell(token) == text


def test_a_text_is_spelled_by_the_fewest_tokens(tmp_path: Path) -> None:
    words = ["[UNK]", *"aehtn", "th", "the", "ent"]
    vocabulary = tokenizer(tmp_path, words, decoders.Metaspace(), ["[UNK]"])
    named = {i: word for word, i in vocabulary.names.items()}
    assert [named[i] for i in vocabulary.pieces(b"then")] == ["the", "n"]
    assert [named[i] for i in vocabulary.pieces(b"thent")] == ["th", "ent"]
    assert vocabulary.pieces(b"thx") == ()
    assert vocabulary.pieces(b"[UNK]") == ()  # what stands for no text spells none


def test_a_letter_is_its_token_before_it_is_a_byte_that_a_tokenizer_falls_back_to(tmp_path: Path) -> None:
    vocabulary = tokenizer(tmp_path, ["[UNK]", "<0x41>", "A"], FALLING_BACK)
    assert vocabulary.pieces(b"A") == (2,)


def small(kind: str, size: int) -> Any:
    if kind == "bert":
        return BertConfig(vocab_size=size, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
                          intermediate_size=12, architectures=["BertForMaskedLM"])  # fmt: skip
    if kind == "gpt2":
        return GPT2Config(vocab_size=size, n_embd=16, n_layer=2, n_head=2, n_positions=32, bos_token_id=0,
                          eos_token_id=0, architectures=["GPT2LMHeadModel"])  # fmt: skip
    return LlamaConfig(vocab_size=size, hidden_size=size, intermediate_size=size, num_hidden_layers=1,
                       num_attention_heads=2, architectures=["LlamaForCausalLM"])  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "size", "axes"),
    [
        (
            "bert",
            30,
            {
                "bert.embeddings.word_embeddings.weight": 0,
                "cls.predictions.bias": 0,
                "cls.predictions.decoder.weight": 0,
                "cls.predictions.decoder.bias": 0,
            },
        ),
        ("gpt2", 30, {"transformer.wte.weight": 0, "lm_head.weight": 0}),
        ("llama", 16, {"model.embed_tokens.weight": 0, "lm_head.weight": 0}),  # as wide as it has tokens
    ],
)
def test_the_axes_of_tokens_are_those_that_grow_with_the_vocabulary(
    kind: str, size: int, axes: Mapping[str, int]
) -> None:
    assert vocabulary_axes(small(kind, size)) == axes


def with_tokens_in_another_order(folder: Path, to: Path) -> None:
    """The same model: every token, and its row, is in another place."""
    shutil.copytree(folder, to)
    said = json.loads((to / "tokenizer.json").read_text())
    words, order = said["model"]["vocab"], torch.randperm(512, generator=torch.Generator().manual_seed(0))
    said["model"]["vocab"] = {word: int(order[i]) for word, i in words.items()}
    for token in said["added_tokens"]:
        token["id"] = int(order[token["id"]])
    (to / "tokenizer.json").write_text(json.dumps(said))
    weights = load_file(to / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = torch.empty_like(weights[name]).index_copy_(0, order, weights[name])
    save_file(weights, to / "model.safetensors", {"format": "pt"})
    config = json.loads((to / "config.json").read_text())
    config |= {f"{kind}_token_id": int(order[0]) for kind in ("bos", "eos", "pad")}
    (to / "config.json").write_text(json.dumps(config))


def test_the_same_tokens_in_another_order_change_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with_tokens_in_another_order(LLAMA / "1", tmp_path / "b")
    assert run("merge", LLAMA / "0", LLAMA / "1", "-o", tmp_path / "plain", "--method", "linear", "-q") == 0
    capsys.readouterr()
    assert run("merge", LLAMA / "0", tmp_path / "b", "-o", tmp_path / "out", "--method", "linear", "-q",
               "--retokenize") == 0  # fmt: skip
    assert "512 tokens are its own, 0 are made of several; it reads what it writes as before" in " ".join(
        capsys.readouterr().out.split()
    )
    expected, found = (load_file(tmp_path / f / "model.safetensors") for f in ("plain", "out"))
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-5)


def other_tokens(folder: Path, size: int, model: PreTrainedModel | None = None) -> Path:
    """A model with a byte-level tokenizer of its own, of fewer tokens than the examples have."""
    given = json.loads((LLAMA / "0" / "tokenizer.json").read_text())
    fewer = {word: i for word, i in given["model"]["vocab"].items() if i < size}
    given["model"] |= {"vocab": fewer, "merges": [m for m in given["model"]["merges"] if "".join(m) in fewer]}
    if model is None:
        shutil.copytree(LLAMA / "1", folder)
        weights = load_file(folder / "model.safetensors")
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            weights[name] = weights[name][:size].clone()
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"vocab_size": size}))
    else:
        model.save_pretrained(folder)
        shutil.copy(LLAMA / "0" / "tokenizer_config.json", folder)
    (folder / "tokenizer.json").write_text(json.dumps(given))
    return folder


def test_a_model_with_other_tokens_is_brought_into_those_of_the_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    b, out = other_tokens(tmp_path / "b", 300), tmp_path / "out"
    assert run("merge", LLAMA / "0", b, "-o", out, "-q") == 2
    error = capsys.readouterr().err
    assert "different vocabularies" in error and not out.exists()
    assert "with --retokenize, merge, align and evaluate bring" in error
    monkeypatch.setattr(respelling, "_WRITTEN", 64), monkeypatch.setattr(respelling, "_STEPS", 20)
    assert run("merge", LLAMA / "0", b, "-o", out, "-q", "--retokenize", "--method", "linear", "--json") == 0
    notes = " ".join(json.loads(capsys.readouterr().out)["notes"])
    assert "300 tokens are its own, 212 are made of several" in notes
    before, after = nats(notes)
    assert 0 < before < after < 8
    merged = AutoModelForCausalLM.from_pretrained(out)
    assert merged.config.vocab_size == 512
    assert AutoTokenizer.from_pretrained(out).get_vocab() == AutoTokenizer.from_pretrained(LLAMA / "0").get_vocab()
    assert "gets the tokenizer of the first" in (out / "README.md").read_text()


def nats(said: str) -> tuple[float, float]:
    """What a byte takes a model in its own tokens, and in those that it is given."""
    return float(said.split("these tokens, ")[1].split()[0]), float(said.split("a byte takes it ")[1].split()[0])


def test_fitting_its_tables_helps_a_model_to_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    b = other_tokens(tmp_path / "b", 300)
    monkeypatch.setattr(respelling, "_WRITTEN", 512)

    def after(steps: int) -> float:
        monkeypatch.setattr(respelling, "_STEPS", steps)
        models = Opened.open({"A": str(LLAMA / "0"), "B": str(b)}, Options(retokenize=True, quiet=True))
        return nats(models.first.b.changes[0])[1]

    assert after(60) < after(1) - 0.05


def test_a_tied_head_is_fitted_with_its_embedding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(respelling, "_WRITTEN", 64), monkeypatch.setattr(respelling, "_STEPS", 3)
    models = [AutoModelForCausalLM.from_config(small("gpt2", size)) for size in (512, 300)]
    models[0].save_pretrained(tmp_path / "a")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(LLAMA / "0" / name, tmp_path / "a")
    b = other_tokens(tmp_path / "b", 300, models[1])
    for tied in ("--tie-word-embeddings", "--untie-word-embeddings"):
        assert run("merge", tmp_path / "a", b, "-o", tmp_path / "out", "-q", "--retokenize", "--method", "linear",
                   "--weight", 1, tied, "--match", "none", "--overwrite") == 0  # fmt: skip
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        head, table = merged.get_output_embeddings().weight, merged.get_input_embeddings().weight
        assert torch.equal(head, table) and head.shape == (512, 16)
        assert not torch.equal(table[300], models[1].get_input_embeddings().weight[:2].mean(0))
    capsys.readouterr()


def test_what_no_table_has_a_row_for_is_made_of_nothing() -> None:
    """Tokens that were added without making tables longer, and those that a config names and there are not; a config
    may name several that end a text."""
    config, like = small("gpt2", 20), small("gpt2", 30)
    for each, (bos, eos, pad) in ((config, (50256, [5, 6], -1)), (like, (2, 3, 4))):
        each.bos_token_id, each.eos_token_id, each.pad_token_id = bos, eos, pad
    own, into = (Vocabulary({"a": a, "b": b}, frozenset(), str.encode) for a, b in ((7, 25), (8, 9)))
    pieces = Respelling.of(own, config, into, like).pieces
    assert {row: found for row, found in enumerate(pieces) if found} == {3: (5,), 8: (7,)}


def test_a_tokenizer_that_cuts_otherwise_into_the_same_tokens_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """There is nothing to respell, and nothing makes up for it."""
    shutil.copytree(LLAMA / "1", tmp_path / "b")
    said = json.loads((tmp_path / "b" / "tokenizer.json").read_text())
    (tmp_path / "b" / "tokenizer.json").write_text(json.dumps({**said, "normalizer": {"type": "Lowercase"}}))
    assert run("merge", LLAMA / "0", tmp_path / "b", "-o", tmp_path / "out", "--method", "linear", "-q",
               "--retokenize", "--no-witness") == 0  # fmt: skip
    found = " ".join(capsys.readouterr().out.split())
    assert "tokenizer.json (normalizer)" in found and "is not merged" in found


def test_more_rows_than_tokens_are_no_other_vocabulary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(LLAMA / "1", tmp_path / "b")
    weights = load_file(tmp_path / "b" / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = torch.cat([weights[name], torch.zeros(64, 128)])
    save_file(weights, tmp_path / "b" / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    (tmp_path / "b" / "config.json").write_text(json.dumps(config | {"vocab_size": 576}))
    assert run("merge", LLAMA / "0", tmp_path / "b", "-o", tmp_path / "out", "-q", "--method", "linear") == 2
    assert "has 512 tokens and" in capsys.readouterr().err
    assert run("merge", LLAMA / "0", tmp_path / "b", "-o", tmp_path / "out", "-q", "--method", "linear",
               "--retokenize") == 0  # fmt: skip
    assert run("merge", LLAMA / "0", LLAMA / "1", "-o", tmp_path / "plain", "-q", "--method", "linear") == 0
    expected, found = (load_file(tmp_path / f / "model.safetensors") for f in ("plain", "out"))
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-5)


def test_tokens_that_were_added_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One that has another number is another vocabulary; one that is called otherwise is said."""
    given = json.loads((LLAMA / "0" / "tokenizer.json").read_text())
    for name, added in (("a", "xy"), ("same", "xy"), ("fewer", "x"), ("renamed", "xz"), ("swapped", "yx")):
        shutil.copytree(LLAMA / ("0" if name == "a" else "1"), tmp_path / name)
        tokens = [{**dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False), "special": True,
                   "content": f"<{token}>", "id": 500 + i} for i, token in enumerate(added)]  # fmt: skip
        (tmp_path / name / "tokenizer.json").write_text(json.dumps({**given, "added_tokens": tokens}))
    for name, match, status, said in (("same", "none", 0, ""), ("fewer", "none", 0, ""),
                                      ("renamed", "none", 0, "as 501: <z> for <y>"),
                                      ("renamed", "weight", 0, "as 501: <z> for <y>"),
                                      ("swapped", "none", 2, "have different vocabularies")):  # fmt: skip
        out = tmp_path / f"out-{name}-{match}"
        assert run("merge", tmp_path / "a", tmp_path / name, "-o", out, "-q", "--method", "linear", "--match",
                   match) == status  # fmt: skip
        found = capsys.readouterr()
        found = " ".join((found.out + found.err).split())
        assert said in found and ("called otherwise" in found) == (name == "renamed")


def test_the_wider_model_must_come_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    b = other_tokens(tmp_path / "b", 300)
    assert run("merge", b, MODELS / "llama-wide" / "3", "-o", tmp_path / "out", "-q", "--method", "linear",
               "--retokenize") == 2  # fmt: skip
    assert "name the larger one first" in capsys.readouterr().err


def test_a_dry_run_fits_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    b = other_tokens(tmp_path / "b", 300)
    monkeypatch.setattr(respelling, "distilled", None)
    assert run("merge", LLAMA / "0", b, "--dry-run", "--retokenize", "-o", tmp_path / "out") == 0


def test_a_model_that_does_not_write_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bert = MODELS / "bert"
    shutil.copytree(bert / "1", tmp_path / "b")
    said = json.loads((tmp_path / "b" / "tokenizer.json").read_text())
    words = said["model"]["vocab"]
    first, second = list(words)[10:12]
    words[first], words[second] = words[second], words[first]
    (tmp_path / "b" / "tokenizer.json").write_text(json.dumps(said))
    assert run("merge", bert / "0", tmp_path / "b", "-o", tmp_path / "out", "-q", "--method", "linear",
               "--retokenize") == 0  # fmt: skip
    assert "it does not write, so nothing tells what that changes" in " ".join(capsys.readouterr().out.split())
    before, after = (load_file(f / "model.safetensors") for f in (bert / "1", tmp_path / "out"))
    assert before.keys() == after.keys()


def test_from_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    b = other_tokens(tmp_path / "b", 300)
    monkeypatch.setattr(respelling, "_WRITTEN", 64), monkeypatch.setattr(respelling, "_STEPS", 3)
    with pytest.raises(ValueError, match="retokenize, widen and dtype need output_dir"):
        hf_align.merge([LLAMA / "0", b], retokenize=True)
    with pytest.raises(HfAlignError, match="different vocabularies"):
        hf_align.merge([LLAMA / "0", b], output_dir=tmp_path / "out")
    report = hf_align.merge([LLAMA / "0", b], output_dir=tmp_path / "out", retokenize=True)
    assert any("300 tokens are its own" in note for note in report.notes)


WORDS = [*"abc", "[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
PERMUTED = [*"bca", *WORDS[3:]]
OTHER_IDS = "have different vocabularies"


def numbered(words: Sequence[str]) -> dict[str, int]:
    return {word: i for i, word in enumerate(words)}


def fast(words: Sequence[str], special: Sequence[str] = ()) -> dict[str, Any]:
    """A fast tokenizer, which has the same words as a list of them."""
    made = Tokenizer(kinds.WordPiece(numbered(words), unk_token="[UNK]"))
    made.add_special_tokens(list(special))
    return {"tokenizer.json": json.loads(made.to_str())}


def paired(words: Mapping[str, int]) -> dict[str, Any]:
    """Words and merges of a tokenizer that pairs."""
    return {"vocab.json": words, "merges.txt": "#version: 0.2\na b\n"}


PAIRS = numbered(["<|endoftext|>", *"abc", "ab"])
TWICE = paired(numbered(["<s>", "<pad>", "</s>", "<unk>", "<mask>", *"abc", "ab"]))
ENTITIES = numbered(["[PAD]", "[UNK]", "[MASK]", "[MASK2]", "x", "y"])


def folders_with(root: Path, kind: str, *files: Mapping[str, Any]) -> list[Path]:
    """Folders of models with some files: a text, bytes, words that stand one a line, or anything else as JSON."""
    found = []
    for name, each in zip("ab", files, strict=True):
        (root / name).mkdir()
        for file, content in {"config.json": {"model_type": kind}, **each}.items():
            text = "".join(f"{word}\n" for word in content) if isinstance(content, list) else content
            text = json.dumps(text) if isinstance(text, dict) else text
            (root / name / file).write_bytes(text if isinstance(text, bytes) else text.encode())
        found.append(root / name)
    return found


SAME = {
    "equal files": ("bert", {"vocab.txt": WORDS}, {"vocab.txt": WORDS}),
    "equal files that nobody can read": ("bert", {"vocab.txt": b"\xff"}, {"vocab.txt": b"\xff"}),
    "other ends of lines": ("bert", {"vocab.txt": WORDS}, {"vocab.txt": "\r\n".join([*WORDS, ""])}),
    "another order of keys": ("gpt2", paired(PAIRS), paired(dict(reversed(PAIRS.items())))),
    "a second vocabulary": ("luke", TWICE | {"entity_vocab.json": ENTITIES},
                            TWICE | {"entity_vocab.json": dict(reversed(ENTITIES.items()))}),
    "a fast one beside it": ("bert", fast(WORDS, WORDS[3:]), {"vocab.txt": WORDS}),
    "a fast one that adds nothing": ("bert", fast(WORDS), {"vocab.txt": WORDS}),
    "one that adds a word": ("bert", fast(WORDS, ["c"]), {"vocab.txt": WORDS}),
    "the same files and more": ("bert", {"vocab.txt": WORDS}, {"vocab.txt": WORDS} | fast(WORDS)),
    "more is added": ("bert", {"vocab.txt": WORDS}, {"vocab.txt": WORDS, "added_tokens.json": {"d": 8}}),
    "none in one": ("bert", {"vocab.txt": WORDS}, {"merges.txt": "", "tokenizer_config.json": {}}),
}  # fmt: skip
DIFFERENT = {
    "words": ("bert", {"vocab.txt": WORDS}, {"vocab.txt": PERMUTED}),
    "special tokens": ("bert", {"vocab.txt": WORDS}, {"vocab.txt": [*"abc", *reversed(WORDS[3:])]}),
    "pairs": ("gpt2", paired(PAIRS), paired(PAIRS | {"b": 3, "c": 2})),
    "a second vocabulary": ("luke", TWICE | {"entity_vocab.json": ENTITIES},
                            TWICE | {"entity_vocab.json": ENTITIES | {"x": 5, "y": 4}}),
    "a word less": ("bert", {"vocab.txt": WORDS}, {"vocab.txt": [*"ab", *WORDS[3:]]}),
    "a fast one beside it": ("bert", fast(WORDS, WORDS[3:]), {"vocab.txt": PERMUTED}),
    "one that adds a word": ("bert", fast(PERMUTED, ["c"]), {"vocab.txt": WORDS}),
    "added tokens": ("bert", {"vocab.txt": WORDS, "added_tokens.json": {"d": 8, "e": 9}},
                     {"vocab.txt": WORDS, "added_tokens.json": {"d": 9, "e": 8}}),
    "added tokens of a config": (
        "bert",
        {"vocab.txt": WORDS, "added_tokens.json": {"d": 8, "e": 9}},
        {"vocab.txt": WORDS, "tokenizer_config.json": {"added_tokens_decoder": {"9": {"content": "d"}}}},
    ),
}  # fmt: skip
UNREAD = {
    "no text": ("bert", {"vocab.txt": WORDS}, {"vocab.txt": b"\xff\xfe"}, "valid UTF-8"),
    "no sentencepiece": ("llama", fast(WORDS), {"tokenizer.model": b"\1"}, ""),
    "of another kind": ("bert", {"vocab.txt": WORDS}, {"own.tiktoken": "YQ== 0\n"}, "has other files"),
    "its own code": ("of nobody", {"vocab.txt": WORDS}, {"vocab.txt": PERMUTED}, ""),
}


@pytest.mark.parametrize("case", SAME)
def test_files_of_one_vocabulary_are_taken(case: str, tmp_path: Path) -> None:
    folders = folders_with(tmp_path, *SAME[case])
    for each in (folders, folders[::-1]):
        require_same_vocabulary(("a", "b"), each)
        assert renamed_tokens(each) == []


@pytest.mark.parametrize("case", DIFFERENT)
def test_files_of_another_vocabulary_are_refused(case: str, tmp_path: Path) -> None:
    folders = folders_with(tmp_path, *DIFFERENT[case])
    for each in (folders, folders[::-1]):
        with pytest.raises(IncompatibleModels, match=OTHER_IDS):
            require_same_vocabulary(("a", "b"), each)


@pytest.mark.parametrize("case", UNREAD)
def test_a_vocabulary_that_cannot_be_read_is_one_line(case: str, tmp_path: Path) -> None:
    *given, why = UNREAD[case]
    with pytest.raises(CheckpointError) as raised:
        require_same_vocabulary(("a", "b"), folders_with(tmp_path, *given))
    which = "a" if case == "its own code" else "b"
    said = f"nothing tells whether a and b have one vocabulary: the tokenizer of {which} cannot be read ("
    assert str(raised.value).startswith(said) and why in str(raised.value)
    assert len(str(raised.value).splitlines()) == 1 and "/hf-align-" not in str(raised.value)


def test_links_that_lead_away_are_no_vocabulary(tmp_path: Path) -> None:
    """Neither are they compared, nor are they read beside files that are."""
    a, b = folders_with(tmp_path, "bert", {"vocab.txt": WORDS}, {})
    (tmp_path / "away").write_text("".join(f"{word}\n" for word in PERMUTED))
    (b / "vocab.txt").symlink_to(tmp_path / "away")
    require_same_vocabulary(("a", "b"), [a, b])
    (b / "own.tiktoken").write_text("YQ== 0\n")
    with pytest.raises(CheckpointError, match="has other files"):
        require_same_vocabulary(("a", "b"), [a, b])


def test_added_tokens_of_other_names_are_said_whatever_the_files(tmp_path: Path) -> None:
    files = [{"vocab.txt": WORDS, "added_tokens.json": {token: 8}} for token in "de"]
    folders = folders_with(tmp_path, "bert", *files)
    require_same_vocabulary(("a", "b"), folders)
    assert "as 8: e for d" in renamed_tokens(folders)[0]
    (folders[1] / "vocab.txt").write_text("\r\n".join([*WORDS, ""]))
    require_same_vocabulary(("a", "b"), folders)
    assert "as 8: e for d" in renamed_tokens(folders)[0]


@pytest.mark.parametrize("match", ["none", "weight"])
def test_words_in_another_order_are_not_merged_row_by_row(
    match: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = sorted(json.loads((MODELS / "bert" / "0" / "tokenizer.json").read_text())["model"]["vocab"])
    for i, name in enumerate("ab"):
        shutil.copytree(MODELS / "bert" / str(i), tmp_path / name)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            (tmp_path / name / file).unlink()
        (tmp_path / name / "vocab.txt").write_text("\n".join(words[i:] + words[:i]))
    assert run("merge", tmp_path / "a", tmp_path / "b", "-o", tmp_path / "out", "-q", "--method", "linear", "--match",
               match) == 2  # fmt: skip
    assert OTHER_IDS in " ".join(capsys.readouterr().err.split()) and not (tmp_path / "out").exists()


def test_ids_that_nothing_respells_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tokens are brought into another vocabulary by `tokenizer.json` alone."""
    folders = folders_with(tmp_path, "bert", {"vocab.txt": WORDS}, {"vocab.txt": PERMUTED})
    sizes = dict(vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=6)
    for folder in folders:
        transformers.BertForMaskedLM(transformers.BertConfig(**sizes)).save_pretrained(folder)
    assert run("merge", *folders, "-o", tmp_path / "out", "-q", "--retokenize") == 2
    assert "--retokenize needs a tokenizer.json in both" in capsys.readouterr().err
