"""What the architecture of two checkpoints that are merged as they are asks for, and neither stores; and what it does
not ask for, and both store.

Only the modelling code knows, and loading it takes longer than many such merges. So where it is not loaded anyway,
another process asks it while the tensors are written, and what it says is kept for the next merge of checkpoints that
store the same.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from hf_align.checkpoints.checkpoint import NAMES, Checkpoint, TensorInfo, bytes_of
from hf_align.checkpoints.companions import brings_code
from hf_align.checkpoints.own_files import own_json
from hf_align.errors import HfAlignError
from hf_align.runtime.kept import keep, kept_folder

NOTED = ("transformers_version", "dtype", "torch_dtype", "_name_or_path")
"""What is noted in a config when a model is saved, whatever it is."""
_LOADED = "hf_align.tracing.build"
"""Where this is loaded, as in a notebook, so is what takes long to load."""
_UNKNOWN = "it is not known whether both models lack weights of their architecture"
_NO_ANSWER = f"{_UNKNOWN}: its code cannot be asked"
_ASK = "import sys; sys.path[:] = filter(None, sys.path); from hf_align.jobs.lacking import answer; answer()"
"""Whatever lies in the folder where a command is given is no module of it."""


@contextmanager
def asked_of_code(folder: Path, stored: Checkpoint, *, trust_remote_code: bool) -> Iterator[Callable[[], list[str]]]:
    """Begin to ask; what is given waits for a sentence for each thing that is wrong, or one that it is not known.

    Args:
        folder: of the config, and of modelling code that a model brings along.
        stored: the tensors that are merged, and that a checkpoint of such a model should have.
    """
    layout = {name: (NAMES[stored.info(name).dtype], stored.info(name).shape) for name in stored}
    kept = kept_folder()
    path = None if kept is None else kept / "lacking" / f"{_key(folder, layout, trust_remote_code)}.json"
    if (found := _kept(path)) is not None:
        yield lambda: found
        return
    if _LOADED in sys.modules:
        yield lambda: _heard_here(folder, stored, path, trust_remote_code=trust_remote_code)
        return
    paths = os.pathsep.join(filter(None, sys.path))
    with TemporaryFile("w+") as asked:
        json.dump([str(folder), trust_remote_code, layout], asked)
        asked.seek(0)
        process = subprocess.Popen([sys.executable, "-c", _ASK], text=True, stdin=asked, stdout=subprocess.PIPE,
                                   stderr=subprocess.DEVNULL, env={**os.environ, "PYTHONPATH": paths})  # fmt: skip
        with process:
            try:
                yield lambda: _heard(process, path)
            finally:
                process.kill()


def _kept(path: Path | None) -> list[str] | None:
    with suppress(OSError, ValueError):
        if path is not None and isinstance(found := json.loads(path.read_bytes()), list):
            return [str(said) for said in found]
    return None


def _heard(process: subprocess.Popen[str], path: Path | None) -> list[str]:
    out, _ = process.communicate()
    if process.returncode:
        return [_NO_ANSWER]
    return _noted([str(said) for said in json.loads(out)], path)


def _heard_here(folder: Path, stored: Checkpoint, path: Path | None, *, trust_remote_code: bool) -> list[str]:
    try:
        return _noted(_said(folder, stored, trust_remote_code=trust_remote_code), path)
    except Exception:  # modelling code fails in its own ways
        return [_NO_ANSWER]


def _noted(said: list[str], path: Path | None) -> list[str]:
    if path is not None:
        keep(path, json.dumps(said).encode())
    return said


def answer() -> None:
    """Of the process that asks the modelling code: read a question, and write what there is to say."""
    folder, trust_remote_code, layout = json.load(sys.stdin)
    out, sys.stdout = sys.stdout, sys.stderr  # modelling code may print
    infos = {name: _info(*described) for name, described in layout.items()}
    found = _said(Path(folder), Checkpoint(Path(folder), infos), trust_remote_code=trust_remote_code)
    json.dump(found, out)


def _info(dtype: str, shape: Sequence[int]) -> TensorInfo:
    found = next(dtype_ for dtype_, name in NAMES.items() if name == dtype)
    return TensorInfo(found, tuple(shape), bytes_of(tuple(shape), found), "")


def _said(folder: Path, stored: Checkpoint, *, trust_remote_code: bool) -> list[str]:
    from hf_align.checkpoints.naming import NamedWeights, match_names
    from hf_align.tracing.budget import Budget, within
    from hf_align.tracing.build import build_without_weights, inventory, read_config

    try:
        with within(Budget.of_stored(len(stored), stored.entries_in_all), folder.name):
            model = build_without_weights(read_config(folder, trust_remote_code=trust_remote_code))
        found = inventory(model)
    except HfAlignError:
        is_trusted = trust_remote_code or not brings_code(folder)
        return [f"{_UNKNOWN}: its code {'cannot be loaded' if is_trusted else 'runs only with --trust-remote-code'}"]
    try:
        names = match_names(model, stored, found.ties, {})
    except HfAlignError as error:
        return [f"what both models store is not what their architecture loads: {error}"]
    weights, said = NamedWeights(stored, names), []
    if missing := [name for name in names.missing if name in found.shapes]:
        said.append(f"both models lack {in_short(missing, 'weights')} of their architecture, and so does the result: "
                    "they are drawn at random when it is loaded")  # fmt: skip
    if foreign := [name for name in names.unused if not _is_ignored(name, model)]:
        said.append(f"both models hold {in_short(foreign, 'tensors')} that their architecture does not have: they are "
                    "mixed like all others, and nothing reads them when the result is loaded")  # fmt: skip
    other = [name for name in found.shapes.keys() & weights.keys() if weights.stored(name).shape != found.shapes[name]]
    if other:
        name = min(other)
        said.append(f"{in_short(sorted(other), 'weights')} have other sizes in both models than their config.json "
                    f"says: {list(weights.stored(name).shape)}, not {list(found.shapes[name])}; "
                    "the result cannot be loaded as it is")  # fmt: skip
    return said


def in_short(names: Sequence[str], things: str) -> str:
    """The first of some names, and how many more there are."""
    return names[0] + (f" and {len(names) - 1} more {things}" if len(names) > 1 else "")


def _is_ignored(name: str, model: Any) -> bool:
    """Whether a class says itself that older checkpoints of it have such a tensor, as transformers asks it, or loads
    what it does not save."""
    from hf_align.tracing.build import unsaved_tables

    patterns: Iterable[str] = model._keys_to_ignore_on_load_unexpected or ()
    return name in unsaved_tables(model) or any(
        re.search(pattern, name) for pattern in (*patterns, r"rotary_emb\.inv_freq")
    )


def _key(folder: Path, *asked: object) -> str:
    """What stands for all that the answer depends on."""
    code = {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in folder.glob("*.py") if f.is_file()}
    config = {key: value for key, value in (own_json(folder, "config.json") or {}).items() if key not in NOTED}
    facts = [version("transformers"), version("hf-align"), config, code, asked]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
