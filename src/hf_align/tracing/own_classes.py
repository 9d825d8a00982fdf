"""Classes of modelling code that came with a config, and whether that code may run."""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import transformers
from transformers import PretrainedConfig
from transformers.dynamic_module_utils import get_class_from_dynamic_module

_TRUSTED: set[str] = set()
"""Where configs were read whose modelling code may run."""
_DYNAMIC = "transformers_modules."
"""What the Python modules begin with that transformers makes of code that came with a model."""


def trust(config: PretrainedConfig) -> None:
    """Let the code run that came with a config."""
    _TRUSTED.add(config._name_or_path)


def trust_what_ran(config: PretrainedConfig, kind: type) -> bool:
    """Whether a class is of code that came with a config: that has run already, and may run again."""
    ran = kind.__module__.startswith(_DYNAMIC)
    if ran:
        trust(config)
    return ran


def named_code(config: PretrainedConfig) -> str | None:
    """Where the modelling code is that a config names for its class, if that code may not run."""
    for name in config.architectures or ():
        if config._name_or_path not in _TRUSTED and (found := _reference(config, name)) is not None:
            return found
    return None


def only_if_trusted(model: object) -> str:
    """What is said of a folder or a repository whose modelling code may not run."""
    return f"{model} brings its own code, which runs only with --trust-remote-code (in Python: trust_remote_code=True)"


def class_of_its_own(config: PretrainedConfig, name: str) -> Any:
    """A class from modelling code that came with the config, if that code was trusted when the config was read."""
    reference = _reference(config, name)
    if reference is None or config._name_or_path not in _TRUSTED:
        return None
    files = [(file.name, file.stat().st_mtime_ns) for file in sorted(Path(config._name_or_path).glob("*.py"))]
    return _loaded_class(reference, config._name_or_path, tuple(files))


def _reference(config: PretrainedConfig, name: str) -> str | None:
    """The file and the class that a config names for an architecture: one of that name; that of the Auto class which
    would load the architecture; of one that transformers does not know, that of the first Auto class."""
    said = getattr(config, "auto_map", None) or {}
    own = {auto: where for auto, where in said.items() if auto.startswith("AutoModel") and isinstance(where, str)}
    named = (where for where in said.values() if isinstance(where, str) and where.rpartition(".")[2] == name)
    loading = (where for auto, where in own.items() if name in _classes_of(auto))
    first = (own[auto] for auto in sorted(own, key=_is_bare) if not hasattr(transformers, name))
    return next(chain(named, loading, first), None)


def _is_bare(auto: str) -> bool:
    return auto == transformers.AutoModel.__name__


def _classes_of(auto: str) -> Collection[str]:
    """The classes of transformers that an Auto class loads."""
    mapping = getattr(getattr(transformers, auto, None), "_model_mapping", None)
    known = getattr(mapping, "_model_mapping", {}).values()
    return {name for names in known for name in ((names,) if isinstance(names, str) else names)}


@cache
def _loaded_class(reference: str, model: str, files: tuple[tuple[str, int], ...]) -> Any:
    """Reading all imports of the modelling code takes longer than a trace, and each build of a model asks for it."""
    return get_class_from_dynamic_module(reference, model)
