"""Specs that were derived before, by all that they were derived from.

The key covers the config, the modelling code, this package's own code, and the versions of torch and transformers. So
an entry is never out of date: it is found, or it is not. Entries are written under another name and moved into place,
so two writers do no harm, and what cannot be read is derived again.
"""

from __future__ import annotations

import gzip
import hashlib
import inspect
import json
import logging
import sys
from collections.abc import Hashable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig
from transformers.utils.hub import HF_MODULES_CACHE

from hf_align.runtime.kept import keep, kept_folder
from hf_align.symmetry.derivation.depth import derive_by_depth
from hf_align.symmetry.derivation.plain_data import from_plain, to_plain
from hf_align.symmetry.interpreter.call import RULES
from hf_align.symmetry.spec import SymmetrySpec
from hf_align.tracing.build import model_class
from hf_align.tracing.fields import parts
from hf_align.tracing.given import GivenCall
from hf_align.tracing.modules import ModuleConfig

logger = logging.getLogger(__name__)
_WITH_A_VERSION = ("torch", "builtins", "abc", "typing", "huggingface_hub")
"""Packages whose classes are the same while torch and transformers are."""
_ROOMS = (Path(__file__).parents[2] / room for room in ("symmetry", "tracing", "witness"))
_OWN = {file.parent for room in _ROOMS for file in room.rglob("*.py")}
"""The folders of the code that derives, and that asks models."""
_OF_MODULES: dict[Hashable, SymmetrySpec] = {}
_SAYS_NOTHING = ("_name_or_path", "transformers_version")
"""Fields of a config that no model reads."""


def derived_spec(
    config: PretrainedConfig, calls: tuple[GivenCall, ...] = (), unused: tuple[str, ...] = ()
) -> SymmetrySpec:
    """As `derive_by_depth`, or what that gave before for the same config, calls and code.

    Raises:
        IncompatibleModels: the architecture cannot be traced.
        HfAlignError: one of `calls` fails, or there are no weights as `unused` says.
    """
    if isinstance(config, ModuleConfig):
        return _of_module(config)
    folder = kept_folder()
    key = key_of(config, [to_plain(calls), *unused]) if folder is not None else None
    if folder is None or key is None:
        return derive_by_depth(config, calls, unused)
    path = folder / f"{key}.json.gz"
    found = _read(path)
    if found is None:
        found = derive_by_depth(config, calls, unused)
        _write(path, found)
    return found


def _of_module(config: ModuleConfig) -> SymmetrySpec:
    """While this process runs: its code may be typed in, and the lines that a spec names move."""
    key = config.program, frozenset(RULES.items())
    if key not in _OF_MODULES:
        _OF_MODULES[key] = derive_by_depth(config)
    return _OF_MODULES[key]


def _read(path: Path) -> SymmetrySpec | None:
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            found = from_plain(json.load(file))
    except FileNotFoundError:
        return None
    except Exception as error:  # whatever a broken file makes of it: it is derived again
        logger.info("%s is derived again: %s", path.name, error)
        return None
    return found if isinstance(found, SymmetrySpec) else None


def _write(path: Path, spec: SymmetrySpec) -> None:
    """Keep a spec, if it comes back as it was."""
    plain = to_plain(spec)
    if from_plain(plain) != spec:
        logger.warning("the spec of %s is not kept: it does not come back as it was", spec.model_type)
        return
    keep(path, gzip.compress(json.dumps(plain).encode(), compresslevel=1))


def key_of(config: PretrainedConfig, asked: list[Any]) -> str | None:
    """What stands for a model's config and code, and for what is asked of them.

    None where it is not known which code a model runs: of classes that were typed in there is no file.
    """
    described = [
        [type(part).__qualname__, {n: v for n, v in part.to_dict().items() if n not in _SAYS_NOTHING},
         getattr(part, "_attn_implementation", None)]
        for part in parts(config)
    ]  # fmt: skip
    build = model_class(config)
    kinds = [*inspect.getmro(type(config)), *inspect.getmro(getattr(build, "__self__", object))]
    modules = {kind.__module__ for kind in kinds} | {rule.__module__ for rule in RULES.values()}
    folders = {_folder_of(module) for module in modules if module.partition(".")[0] not in _WITH_A_VERSION}
    if None in folders:
        return None
    code = [_code_in(folder) for folder in sorted(filter(None, folders | _OWN))]
    rules = sorted((op, rule.__qualname__) for op, rule in RULES.items())
    versions = [*sys.version_info[:2], torch.__version__, transformers.__version__]
    content = json.dumps([described, asked, code, rules, versions], sort_keys=True, default=repr)
    return hashlib.sha256(content.encode()).hexdigest()[:32]


def _folder_of(module: str) -> Path | None:
    file = getattr(sys.modules.get(module), "__file__", None)
    return Path(file).resolve().parent if file else None


@cache
def _code_in(folder: Path) -> str:
    """A digest of the Python files of a folder; of code that came with a model also of those below."""
    digest = hashlib.sha256()
    is_of_a_model = folder.is_relative_to(Path(HF_MODULES_CACHE).resolve())
    for file in sorted(folder.rglob("*.py") if is_of_a_model else folder.glob("*.py")):
        digest.update(str(file.relative_to(folder)).encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()
