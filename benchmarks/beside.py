"""Packages that some classes of transformers need and that `make coverage` puts beside the environment, not into it."""

import sys
from pathlib import Path

import torch

_FOLDER = Path(__file__).parents[1] / ".venv/coverage"

if _FOLDER.exists():
    sys.path.append(str(_FOLDER))
    # Wheels of torchvision are built for CUDA. Beside a torch without it they load no ops, and refuse to be imported
    # where not even these two are known. No class runs them.
    for op in ("nms", "qnms"):
        torch.library.define(f"torchvision::{op}", "(Tensor boxes, Tensor scores, float iou_threshold) -> Tensor")
    from hf_align.tracing.branches import taken  # here, for transformers looks for packages once

    taken.INSTALLED = (*taken.INSTALLED, f"{_FOLDER}/")
