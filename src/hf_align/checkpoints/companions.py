"""The files beside the weights of a model: its config, as plain JSON, its tokenizer, and what stands behind it.

Only regular files of the folder itself are read and copied. A cloned repository may hold a link to anything on this
disk, and what is copied is published.
"""

from __future__ import annotations

import glob
import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_align.checkpoints.own_files import is_own, own_json, parsed

if TYPE_CHECKING:
    import torch

TOKENIZERS = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab*", "*_vocab.json", "merges.txt",
              "*.model", "*.spm", "*.codes", "*.tokenizer", "*.tiktoken", "tekken.json", "dict.txt", "normalizer.json",
              "word_*.json", "emoji.json", "byte_maps.json")  # fmt: skip
TERMS = ("LICENSE*", "NOTICE*", "USE_POLICY*")
COPIED = (*TOKENIZERS, "chat_template*", "generation_config.json", "*processor_config.json",
          "audio_tokenizer_config.json", "modules.json", "*sentence_*.json", *TERMS)  # fmt: skip
"""What tokenizers, processors and Sentence Transformers read, and the terms that a copy is under."""
_WRITTEN = re.compile(r"^(config\.json|README\.md)$|\.index\.json$|\.(safetensors|bin|pt|pth|gguf|msgpack|h5|onnx)$")
"""What is written anew, and what holds weights: no such file is code's own, whatever names it."""
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
    own, foreign = companions(source, with_code=bool(config.get("auto_map")) or _brings_code_beside(source))
    _copy(own, source, folder)
    if foreign:
        say(f"left out: {foreign[0].relative_to(source)}, which is not a regular file inside {source}")


def write_code(folder: Path, source: Path) -> None:
    """The code that a model brings along, and what that reads, where it is not there yet."""
    for file in _own_files(source, code_of(source)) if brings_code(source) else ():
        if not (folder / file.name).exists():
            _copy([file], source, folder)


def _copy(files: Iterable[Path], source: Path, folder: Path) -> None:
    for file in files:
        copy = folder / file.relative_to(source)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, copy)


def _with(entries: Mapping[str, Any], changed: Mapping[str, Any]) -> dict[str, Any]:
    """With other entries in their place, also within each other; without those that become None."""
    inner = {k: _with(entries.get(k) or {}, v) or None for k, v in changed.items() if isinstance(v, Mapping)}
    left = {k: v for k, v in entries.items() if k not in changed}
    return left | {k: v for k, v in {**changed, **inner}.items() if v is not None}


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
    patterns = (*COPIED, *(code_of(folder) if with_code else []), *behind_the_model(folder))
    own, found = _own_files(folder, patterns), sorted({file for p in patterns for file in folder.glob(p)})
    return own, [file for file in found if file not in own and (file.is_symlink() or not file.is_dir())]


def _own_files(folder: Path, patterns: Iterable[str]) -> list[Path]:
    return [f for f in sorted({f for pattern in patterns for f in folder.glob(pattern)}) if is_own(folder, f)]


def brings_code(folder: Path) -> bool:
    """Whether a model, its tokenizer or its processor is of a class that comes with it."""
    config = folder / "config.json"
    return (is_own(folder, config) and _has_code(config)) or _brings_code_beside(folder)


def _brings_code_beside(folder: Path) -> bool:
    said = [*folder.glob("tokenizer_config.json"), *folder.glob("*processor_config.json")]
    return any(is_own(folder, file) and _has_code(file) for file in said)


def model_code(folder: Path) -> list[str]:
    """The classes of transformers that would load code which comes with the model itself, as its config says."""
    said = (own_json(folder, "config.json") or {}).get("auto_map")
    names = said if isinstance(said, dict) else ()
    return [name for name in names if name == "AutoConfig" or name.startswith("AutoModel")]


def _has_code(file: Path) -> bool:
    try:
        found = parsed(file.read_bytes())
    except ValueError:  # whoever loads it says what is wrong
        return False
    return isinstance(found, dict) and bool(found.get("auto_map"))


def code_not_run(called: str, model_type: str) -> str:
    """What is said of a model with code that comes with it, if transformers has one of that type itself."""
    place = f"{model_type} of transformers takes its place"
    return f"{called} brings its own code, which is not run: {place}, and what is written names no such code"


def code_of(folder: Path) -> list[str]:
    """Patterns of the code that comes with a model, and of the files that it names, such as a vocabulary."""
    sources = [file.read_text("utf-8", "replace") for file in _own_files(folder, ["*.py"])]
    named = {name for source in sources for name in re.findall(r"""["']([\w.-]+\.\w+)["']""", source)}
    return ["*.py", *(glob.escape(name) for name in sorted(named) if not _WRITTEN.search(name))]


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


def digest(folder: Path) -> str:
    """What stands for the contents of all files that a result takes over from a folder."""
    found = hashlib.sha256()
    readme = folder / "README.md"
    for file in (*companions(folder, with_code=True)[0], *([readme] if is_own(folder, readme) else [])):
        name, content = file.relative_to(folder).as_posix(), hashlib.sha256(file.read_bytes()).hexdigest()
        found.update(json.dumps([name, content]).encode())
    return found.hexdigest()
