"""Merge Hugging Face models that were trained apart.

The names below are the public interface; everything else is private and may move. They are loaded when they are first
used, so that `import hf_align` loads neither torch nor transformers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_align.api.align import align
    from hf_align.api.alignment import Alignment
    from hf_align.api.callback import BarrierCallback
    from hf_align.api.evaluate import evaluate
    from hf_align.api.merge import interpolate, merge
    from hf_align.api.symmetries import Symmetries, certify, randomize, symmetries
    from hf_align.api.tasks import score
    from hf_align.api.transport import transport
    from hf_align.errors import CheckpointError, HfAlignError, IncompatibleModels, OutputError

__version__ = "0.1.0"

__all__ = [
    "Alignment",
    "BarrierCallback",
    "CheckpointError",
    "HfAlignError",
    "IncompatibleModels",
    "OutputError",
    "Symmetries",
    "align",
    "certify",
    "evaluate",
    "interpolate",
    "merge",
    "randomize",
    "score",
    "symmetries",
    "transport",
]

_HOMES = {
    "align": "api.align",
    "Alignment": "api.alignment",
    "BarrierCallback": "api.callback",
    "evaluate": "api.evaluate",
    "interpolate": "api.merge",
    "merge": "api.merge",
    "Symmetries": "api.symmetries",
    "certify": "api.symmetries",
    "randomize": "api.symmetries",
    "symmetries": "api.symmetries",
    "score": "api.tasks",
    "transport": "api.transport",
    "CheckpointError": "errors",
    "HfAlignError": "errors",
    "IncompatibleModels": "errors",
    "OutputError": "errors",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
