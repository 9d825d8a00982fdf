"""Processor time and memory of `hf-align spec` on architectures at their true sizes: python benchmarks/size.py

Reads no weights. Writes benchmarks/size.md and exits with status 1 if a limit is not met.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import typer

TABLE = Path(__file__).with_suffix(".md")
SECONDS = {"llama": 8.0, "mixtral": 10.0, "deepseek_v3": 20.0}
GIB = 2.0
HEADER = "| model type | layers | parameters | tensors | spaces | CPU seconds | limit | peak GiB |"


@dataclass(frozen=True)
class Row:
    model: str
    layers: int
    parameters: float
    tensors: int
    spaces: int
    seconds: float
    gib: float


def measure(model: str) -> Row:
    """One run of the command in a process of its own, in one thread, with no spec that was derived before.

    Time and peak are what the system counted for that process.
    """
    from transformers import AutoConfig

    from hf_align.runtime.kept import VARIABLE
    from hf_align.tracing.build import build_without_weights, inventory

    config = AutoConfig.for_model(model)
    command = [sys.executable, "-m", "hf_align", "spec", model, "--json"]
    alone = {**os.environ, VARIABLE: "off", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=alone) as process:
        assert process.stdout is not None
        printed = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed")
    found = json.loads(printed)
    shapes = inventory(build_without_weights(config)).shapes
    if set(found["parameters"]) != set(shapes):
        raise SystemExit(f"{model}: the spec does not name every parameter")
    parameters = sum(math.prod(s) for s in shapes.values())
    return Row(model, config.num_hidden_layers, parameters, len(shapes), len(found["spaces"]),
               usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 2**20)  # fmt: skip


def main() -> None:
    rows = []
    for model in SECONDS:
        rows.append(measure(model))
        typer.echo(rows[-1], err=True)
    lines = [f"| {r.model} | {r.layers} | {r.parameters / 1e9:.1f} B | {r.tensors} | {r.spaces} | {r.seconds:.1f} | "
             f"{SECONDS[r.model]:g} | {r.gib:.2f} |" for r in rows]  # fmt: skip
    text = (
        "# Size\n\n`hf-align spec` on the default configs, from the config alone and uncached, a process each, in one "
        f"run of `python benchmarks/size.py`; the limit of memory is {GIB:g} GiB.\n\n"
    )
    TABLE.write_text("\n".join([text + HEADER, "|" + " --- |" * HEADER.count(" |"), *lines]) + "\n", encoding="utf-8")
    if any(r.seconds > SECONDS[r.model] or r.gib > GIB for r in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    typer.run(main)
