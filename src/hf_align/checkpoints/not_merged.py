"""What goes with the weights of models and differs between them: a merge has that of the first."""

from __future__ import annotations

import filecmp
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_align.checkpoints.companions import TERMS, brings_code, companions
from hf_align.checkpoints.own_files import is_own, parsed

_TOKENIZER = "tokenizer.json"
_NOTED = frozenset({"transformers_version", "torch_dtype", "dtype", "name_or_path", "special_tokens_map_file",
                    "tokenizer_file", "version", "truncation", "padding"})  # fmt: skip
"""Entries that say where a file is from, or what every call says anew; and all that begin with an underscore."""
_SHOWN = 2


def not_merged(folders: Sequence[Path], *, without: Sequence[str] = ()) -> list[str]:
    """A sentence on how inputs are prepared and answers are used where models differ in it, if they do.

    Terms of use are not spoken of, nor what only one of the models has; but for modules of a Sentence Transformer,
    which are all needed.

    Args:
        folders: of the models.
        without: patterns of files that are not looked at.
    """
    first, *others = folders
    files = [file for file in companions(first, with_code=brings_code(first))[0]
             if not any(file.match(pattern) for pattern in (*TERMS, *without))]  # fmt: skip
    found = {file.relative_to(first).as_posix(): sorted({p for other in others for p in _differing(first, file, other)})
             for file in files}  # fmt: skip
    named = [name + (f" ({_some(parts)})" if any(parts) else "") for name, parts in found.items() if parts]
    if not named:
        return []
    verb = "differs" if len(named) == 1 else "differ"
    return [f"{_some(named)} {verb} between the models and {'is' if len(named) == 1 else 'are'} not merged: the result "
            "has what the first model has"]  # fmt: skip


def _differing(folder: Path, file: Path, other: Path) -> Iterator[str]:
    """The entries of a file that differ in another model; an empty name where the file has none."""
    theirs = other / file.relative_to(folder)
    if not is_own(other, theirs):
        yield from [""] if file.parent != folder else []
    elif not filecmp.cmp(file, theirs, shallow=False):
        ours, others = (_entries(each) for each in (file, theirs))
        if ours is None or others is None:
            yield ""
            return
        names = (n for n in ours.keys() | others.keys() if n not in _NOTED and not n.startswith("_"))
        yield from (name for name in names if ours.get(name) != others.get(name))


def _entries(file: Path) -> Mapping[str, Any] | None:
    """Of a JSON object; those of a tokenizer in one form, and but for its vocabulary, which is compared elsewhere."""
    try:
        found = parsed(_in_one_form(file) if file.name == _TOKENIZER else file.read_bytes())
    except ValueError:  # whoever loads it says what is wrong
        return None
    if not isinstance(found, dict):
        return None
    model = found.pop("model", None) if file.name == _TOKENIZER else None
    return {**found, **({k: v for k, v in model.items() if k != "vocab"} if isinstance(model, dict) else {})}


def _in_one_form(file: Path) -> bytes | str:
    """The file of a tokenizer as today's library writes it: older ones leave out defaults, and join merges."""
    from tokenizers import Tokenizer

    try:
        return str(Tokenizer.from_file(str(file)).to_str())
    except Exception:  # the library raises nothing narrower
        return file.read_bytes()


def _some(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return (", " if more else " and ").join(names[:_SHOWN]) + more
