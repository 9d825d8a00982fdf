"""What a process of `forks.py` has loaded, and has derived, before it starts."""

from __future__ import annotations

from pathlib import Path

import forks  # noqa: F401
import once  # noqa: F401

from hf_align.cli import app
from hf_align.jobs import aligned, merge  # noqa: F401
from hf_align.symmetry.overrides.overrides import symmetries
from hf_align.tracing.build import read_config

app._program()
symmetries(read_config(str(Path(__file__).parent.parent / "examples" / "models" / "llama" / "0")))
