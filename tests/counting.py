"""The command line, and beside it RANK.json: how much of matching this process has done, and RANK.end: whether it was
still connected to the others in the end. Run by test_processes.py."""

from __future__ import annotations

import atexit
import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import distributed

from hf_align.cli.app import main as hf_align
from hf_align.matching import anchors, balanced, cross, solver

COUNTED = {
    "steps": (solver.Solver, "_one"),
    "stream": (anchors, "_image"),
    "products": (cross, "_sum_over"),
    "gauges": (balanced, "balance"),
}


def main() -> None:
    done: Counter[str] = Counter()

    def counted(kind: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def hooked(*arguments: Any, **options: Any) -> Any:
            done[kind] += 1
            return work(*arguments, **options)

        return hooked

    for kind, (module, name) in COUNTED.items():
        setattr(module, name, counted(kind, getattr(module, name)))
    rank = os.environ.get("RANK", "0")
    atexit.register(lambda: Path(f"{rank}.end").write_text(str(distributed.is_initialized())))
    try:
        hf_align()
    finally:
        Path(f"{rank}.json").write_text(json.dumps(done))


if __name__ == "__main__":
    main()
