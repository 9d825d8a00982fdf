"""What the token ids of two models mean: whether rows of their embeddings correspond."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hf_align.checkpoints.companions import companions
from hf_align.checkpoints.own_files import is_own, own_json
from hf_align.errors import CheckpointError, IncompatibleModels, first_line

_FAST = "tokenizer.json"
_VOCABULARIES = (_FAST, "vocab*", "*_vocab.json", "*.model", "*.spm", "*.tokenizer", "*.tiktoken", "tekken.json",
                 "dict.txt", "byte_maps.json")  # fmt: skip
"""The files among them that number tokens; what is added to these is in those of `_ADDING`."""
_SECOND = ("entity_vocab.json", "target_vocab.json", "vocab-src.json", "vocab-tgt.json")
"""Those of tokenizers with two vocabularies, of which a tokenizer tells one alone."""
_ADDING = ("tokenizer_config.json", "added_tokens.json")


def require_same_vocabulary(refs: tuple[str, str], folders: list[Path]) -> None:
    """Token ids must mean the same in both; only where both folders have a tokenizer.

    Raises:
        IncompatibleModels: they do not.
        CheckpointError: a tokenizer is damaged.
    """
    if not same_vocabulary(folders):
        raise IncompatibleModels(
            f"{refs[0]} and {refs[1]} have different vocabularies, so their tokens do not correspond; with "
            f"--retokenize, merge, align and evaluate bring {refs[1]} into that of {refs[0]}"
        )


def same_vocabulary(folders: list[Path]) -> bool:
    """Whether token ids mean the same in two models, as far as both have a tokenizer.

    Raises:
        CheckpointError: a tokenizer is damaged, or nothing tells what its ids are.
    """
    found = _vocabularies(folders)
    return found is None or found[0].agrees(found[1])


def renamed_tokens(folders: list[Path]) -> list[str]:
    """A sentence on what tokenizers of one vocabulary add under one number and call otherwise, if anything."""
    found = _vocabularies(folders)
    if found is None:
        return []
    names, others = ({number: token for token, number in each.added.items()} for each in found)
    other = [n for n in sorted(names.keys() & others.keys()) if names[n] != others[n]]
    if not other:
        return []
    return [f"{len(other)} of the tokens that tokenizers add are called otherwise in {folders[1].name}, as {other[0]}: "
            f"{others[other[0]]} for {names[other[0]]}; their rows are taken to correspond"]  # fmt: skip


@dataclass(frozen=True)
class _Vocabulary:
    """What the ids of a tokenizer mean.

    Attributes:
        words: whatever is equal where the tokens of the model itself are.
        added: the numbers of the tokens that were added.
    """

    words: Any
    added: Mapping[str, int]

    def agrees(self, other: _Vocabulary) -> bool:
        """Whether ids mean the same in both; one of them may have more added tokens."""
        same = (other.added.get(token, number) == number for token, number in self.added.items())
        return self.words == other.words and all(same)


def _vocabularies(folders: Sequence[Path]) -> tuple[_Vocabulary, _Vocabulary] | None:
    """The vocabularies of two models in one form, the cheapest that tells; None where one has no tokenizer."""
    first, second = folders
    files, others = _vocabulary_files(first), _vocabulary_files(second)
    if not files or not others:
        return None
    if _FAST in files and _FAST in others:
        return _fast(first), _fast(second)
    if files.keys() == others.keys() and all(file.read_bytes() == others[n].read_bytes() for n, file in files.items()):
        return _Vocabulary(None, _added(first)), _Vocabulary(None, _added(second))
    return _as_read(first, second)


def _vocabulary_files(folder: Path) -> dict[str, Path]:
    """The folder's own files that a tokenizer may have its ids from, by name."""
    found = {file.name: file for pattern in _VOCABULARIES for file in folder.glob(pattern)}
    return {name: file for name, file in sorted(found.items()) if is_own(folder, file)}


def _fast(folder: Path) -> _Vocabulary:
    """That of a fast tokenizer, from its file alone."""
    said = own_json(folder, _FAST) or {}
    model, added = said.get("model"), said.get("added_tokens") or []
    if not isinstance(model, dict):
        raise CheckpointError(f"{folder / _FAST} has no vocabulary; fetch it again")
    try:
        return _Vocabulary(model.get("vocab"), {token["content"]: token["id"] for token in added})
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{folder / _FAST} adds tokens without a number; fetch it again") from error


def _added(folder: Path) -> dict[str, int]:
    """The tokens that are added to a vocabulary by files beside it; the config of a tokenizer goes before."""
    config, more = (own_json(folder, name) if is_own(folder, folder / name) else None for name in _ADDING)
    listed = (config or {}).get("added_tokens_decoder")
    try:
        if listed is None:
            return {token: int(number) for token, number in (more or {}).items()}
        return {token["content"]: int(number) for number, token in listed.items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{folder} adds tokens without a number ({', '.join(_ADDING)}); fetch it again"
        ) from error


def _as_read(*folders: Path) -> tuple[_Vocabulary, _Vocabulary]:
    """Two vocabularies as transformers reads them: files of other forms may say the same.

    A token that only one of the two adds may be one of the other's words. So it is an added one in both.
    """
    read = []
    for folder in folders:
        try:
            read.append(_read(folder))
        except Exception as error:  # the files of a tokenizer may be anything
            both = " and ".join(each.name for each in folders)
            raise CheckpointError(
                f"nothing tells whether {both} have one vocabulary: the tokenizer of {folder.name} cannot be read "
                f"({first_line(error)})"
            ) from error
    apart = {token for _, added in read for token in added}
    names = set(_SECOND).intersection(*map(_vocabulary_files, folders))
    first, second = (
        _Vocabulary(
            ({t: n for t, n in tokens.items() if t not in apart}, {name: own_json(folder, name) for name in names}),
            {t: n for t, n in tokens.items() if t in apart},
        )
        for folder, (tokens, _) in zip(folders, read, strict=True)
    )
    return first, second


def _read(folder: Path) -> tuple[dict[str, int], set[str]]:
    """The ids of all tokens of a tokenizer, and which of these tokens were added.

    Where transformers finds no vocabulary that it knows, it makes up one of special tokens alone, in silence. So the
    files must say more than their absence does.

    Raises:
        Exception: any, if the tokenizer cannot be read.
    """
    vocabulary = set(_vocabulary_files(folder).values())
    beside = {file for file in companions(folder, with_code=False)[0] if file.parent == folder} - vocabulary
    if is_own(folder, folder / "config.json"):
        beside.add(folder / "config.json")
    found = _tokens_of(folder, beside | vocabulary)
    try:
        made_up = _tokens_of(folder, beside)
    except Exception:  # nothing can be made up
        return found
    if found == made_up:
        raise ValueError("its kind of tokenizer has other files")
    return found


def _tokens_of(folder: Path, files: Collection[Path]) -> tuple[dict[str, int], set[str]]:
    """The ids of all tokens, and the added ones, by some files alone: the folder may also hold links that lead away."""
    from transformers import AutoTokenizer

    with TemporaryDirectory(prefix="hf-align-") as alone:
        for file in files:
            (Path(alone) / file.name).symlink_to(file.resolve())
        try:
            tokenizer = AutoTokenizer.from_pretrained(alone, trust_remote_code=False, local_files_only=True)
        except Exception as error:  # it names a place that nobody knows
            raise ValueError(first_line(error).replace(alone, folder.name)) from error
        return tokenizer.get_vocab(), set(tokenizer.get_added_vocab())
