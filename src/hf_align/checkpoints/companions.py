"""The files beside the weights of a model: its config, as plain JSON, its tokenizer, and what stands behind it.

Only regular files of the folder itself are read and copied. A cloned repository may hold a link to anything on this
disk, and what is copied is published.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_align.checkpoints.own_files import is_own, own_json, parsed
from hf_align.errors import CheckpointError, IncompatibleModels

if TYPE_CHECKING:
    import torch

COPIED = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "*_vocab.json", "merges.txt",
          "*.model", "*.spm", "*.codes", "*.tokenizer", "*.tiktoken", "tekken.json", "dict.txt", "normalizer.json",
          "word_*.json", "emoji.json", "byte_maps.json", "chat_template*", "generation_config.json",
          "*processor_config.json", "audio_tokenizer_config.json", "modules.json", "*sentence_*.json",
          "LICENSE*", "NOTICE*", "USE_POLICY*")  # fmt: skip
"""What tokenizers, processors and Sentence Transformers read, and the terms that a copy is under."""
_OF_A_MODULE = ("*.json", "*.txt", "*.safetensors", "pytorch_model.bin")


def write_companions(
    folder: Path, source: Path, changed: Mapping[str, Any], say: Callable[[str], None] = lambda _: None
) -> None:
    """A's config as it is on disk, so that nothing is lost or added but what `changed` says; and what goes with it.

    The place that a config was once loaded from is left out: it may be a path of somebody's disk.

    Raises:
        CheckpointError: the config cannot be read.
    """
    config = _with(own_json(source, "config.json") or {}, changed)
    config.pop("_name_or_path", None)
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    own, foreign = companions(source, with_code="auto_map" in config)
    for file in own:
        copy = folder / file.relative_to(source)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, copy)
    if foreign:
        say(f"left out: {foreign[0].relative_to(source)}, which is not a regular file inside {source}")


def _with(entries: Mapping[str, Any], changed: Mapping[str, Any]) -> dict[str, Any]:
    """With other entries in their place, also within each other."""
    inner = {k: _with(entries.get(k) or {}, v) for k, v in changed.items() if isinstance(v, Mapping)}
    return {**entries, **changed, **inner}


def stored_as(folder: Path, dtype: torch.dtype | None) -> dict[str, str]:
    """The entries of a model's config that change if its weights are stored in another dtype.

    transformers loads weights in the dtype that the config names, whatever they are stored in, and a loss of digits or
    an overflow is silent. `torch_dtype` is the entry's older name.
    """
    if dtype is None:
        return {}
    named = (own_json(folder, "config.json") or {}).keys() & {"dtype", "torch_dtype"}
    return dict.fromkeys(sorted(named) or ["dtype"], str(dtype).removeprefix("torch."))


def companions(folder: Path, *, with_code: bool) -> tuple[list[Path], list[Path]]:
    """Files of a model that go with its weights: its own, and those that are links out of the folder or no files."""
    patterns = (*COPIED, *(["*.py"] if with_code else []), *behind_the_model(folder))
    found = sorted({file for pattern in patterns for file in folder.glob(pattern)})
    own = [file for file in found if is_own(folder, file)]
    return own, [file for file in found if file not in own and (file.is_symlink() or not file.is_dir())]


def behind_the_model(folder: Path) -> list[str]:
    """Patterns of what a Sentence Transformer does with the answer of its model: pooling, a dense layer."""
    if not is_own(folder, folder / "modules.json"):
        return []
    try:
        listed = parsed((folder / "modules.json").read_bytes())
    except ValueError:  # whoever loads it says what is wrong
        return []
    paths = [module.get("path") for module in listed if isinstance(module, dict)] if isinstance(listed, list) else []
    inside = [path for path in paths if isinstance(path, str) and re.fullmatch(r"\w[\w.-]*", path)]
    return [f"{path}/{pattern}" for path in inside for pattern in _OF_A_MODULE]


def not_merged(folders: Sequence[Path]) -> list[str]:
    """A sentence on what stands behind models and differs, if anything: the result has that of the first."""
    first, *others = [_behind(folder) for folder in folders]
    differing = sorted(name for name in first if any(first[name] != other.get(name) for other in others))
    if not differing:
        return []
    more = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
    return [f"the models differ in {differing[0]}{more}, and the result has that of the first: what a Sentence "
            "Transformer does behind its model is not merged"]  # fmt: skip


def _behind(folder: Path) -> dict[str, bytes]:
    """Digests of the files of the modules behind a model, by their path in the folder."""
    files = [file for file in companions(folder, with_code=False)[0] if file.parent != folder]
    return {f.relative_to(folder).as_posix(): hashlib.sha256(f.read_bytes()).digest() for f in files}


def digest(folder: Path) -> str:
    """What stands for the contents of all files that a result takes over from a folder."""
    found = hashlib.sha256()
    readme = folder / "README.md"
    for file in (*companions(folder, with_code=True)[0], *([readme] if is_own(folder, readme) else [])):
        name, content = file.relative_to(folder).as_posix(), hashlib.sha256(file.read_bytes()).hexdigest()
        found.update(json.dumps([name, content]).encode())
    return found.hexdigest()


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
        CheckpointError: a tokenizer is damaged.
    """
    first, second = (_vocabulary(folder) for folder in folders)
    if first is None or second is None:
        return True
    (words, added), (others, more) = first, second
    return words == others and all(more.get(token, number) == number for token, number in added.items())


def renamed_tokens(folders: list[Path]) -> list[str]:
    """A sentence on what tokenizers of one vocabulary add under one number and call otherwise, if anything."""
    first, second = (_vocabulary(folder) for folder in folders)
    if first is None or second is None:
        return []
    names, others = ({number: token for token, number in added.items()} for _, added in (first, second))
    other = [n for n in sorted(names.keys() & others.keys()) if names[n] != others[n]]
    if not other:
        return []
    return [f"{len(other)} of the tokens that tokenizers add are called otherwise in {folders[1].name}, as {other[0]}: "
            f"{others[other[0]]} for {names[other[0]]}; their rows are taken to correspond"]  # fmt: skip


def _vocabulary(folder: Path) -> tuple[Any, dict[str, int]] | None:
    """The vocabulary of a fast tokenizer, and the numbers of the tokens that were added; None without one."""
    if not is_own(folder, folder / "tokenizer.json"):
        return None
    said = own_json(folder, "tokenizer.json") or {}
    model, added = said.get("model"), said.get("added_tokens") or []
    if not isinstance(model, dict):
        raise CheckpointError(f"{folder / 'tokenizer.json'} has no vocabulary; fetch it again")
    try:
        return model.get("vocab"), {token["content"]: token["id"] for token in added}
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{folder / 'tokenizer.json'} adds tokens without a number; fetch it again") from error
