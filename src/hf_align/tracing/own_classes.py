"""Classes of modelling code that came with a config, and whether that code may run."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

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


def class_of_its_own(config: PretrainedConfig, name: str) -> Any:
    """A class from modelling code that came with the config, if that code was trusted when the config was read."""
    reference = _reference(config, name)
    if reference is None or config._name_or_path not in _TRUSTED:
        return None
    files = [(file.name, file.stat().st_mtime_ns) for file in sorted(Path(config._name_or_path).glob("*.py"))]
    return _loaded_class(reference, config._name_or_path, tuple(files))


def _reference(config: PretrainedConfig, name: str) -> str | None:
    """The file and the class that a config names for an architecture."""
    references = (getattr(config, "auto_map", None) or {}).values()
    return next((r for r in references if isinstance(r, str) and r.rpartition(".")[2] == name), None)


@cache
def _loaded_class(reference: str, model: str, files: tuple[tuple[str, int], ...]) -> Any:
    """Reading all imports of the modelling code takes longer than a trace, and each build of a model asks for it."""
    return get_class_from_dynamic_module(reference, model)
