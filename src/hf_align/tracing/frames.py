"""Which line of modelling code runs, while a model is recorded."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

import torch

from hf_align.tracing.reasons import HELPERS

_RECORDING = (str(Path(torch.__file__).parent), __file__, str(Path(__file__).with_name("recorder.py")))


def modelling_frame() -> FrameType | None:
    """The innermost frame of modelling code; of helpers, where there is none."""
    return _innermost_outside(HELPERS) or calling_frame()


def calling_frame() -> FrameType | None:
    """The innermost frame that is neither torch's nor the recorder's."""
    return _innermost_outside(_RECORDING)


def line() -> str:
    """`/…/modeling_x.py:12`: where the modelling code is."""
    frame = modelling_frame()
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else ""


def _innermost_outside(files: tuple[str, ...]) -> FrameType | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(files):
        frame = frame.f_back
    return frame
