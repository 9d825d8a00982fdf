"""Time and memory of `hf-align spec` on architectures at their true sizes: python benchmarks/size.py

Reads no weights. Writes benchmarks/size.md and exits with status 1 if a limit is not met.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import typer

TABLE = Path(__file__).with_suffix(".md")
MODELS = ("llama", "mixtral", "deepseek_v3")
SECONDS, GIB = 15.0, 2.0
HEADER = "| model type | layers | parameters | tensors | spaces | seconds | peak GiB |"


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
    """One run of the command in a process of its own; the peak is what the system counted for that process."""
    from transformers import AutoConfig

    from hf_align.tracing.build import build_without_weights, inventory

    config = AutoConfig.for_model(model)
    command = [sys.executable, "-m", "hf_align", "spec", model, "--json"]
    began = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        printed = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.perf_counter() - began
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed")
    found = json.loads(printed)
    shapes = inventory(build_without_weights(config)).shapes
    if set(found["parameters"]) != set(shapes):
        raise SystemExit(f"{model}: the spec does not name every parameter")
    parameters = sum(math.prod(s) for s in shapes.values())
    return Row(model, config.num_hidden_layers, parameters, len(shapes), len(found["spaces"]), seconds,
               usage.ru_maxrss / 2**20)  # fmt: skip


def main() -> None:
    rows = []
    for model in MODELS:
        rows.append(measure(model))
        typer.echo(rows[-1], err=True)
    lines = [f"| {r.model} | {r.layers} | {r.parameters / 1e9:.1f} B | {r.tensors} | {r.spaces} | {r.seconds:.1f} | "
             f"{r.gib:.2f} |" for r in rows]  # fmt: skip
    text = (
        "# Size\n\n`hf-align spec` on the default configs, from the config alone, a process each, in one run of "
        f"`python benchmarks/size.py`; the limits are {SECONDS:g} s and {GIB:g} GiB.\n\n"
    )
    TABLE.write_text("\n".join([text + HEADER, "|" + " --- |" * HEADER.count(" |"), *lines]) + "\n", encoding="utf-8")
    if any(r.seconds > SECONDS or r.gib > GIB for r in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    typer.run(main)
