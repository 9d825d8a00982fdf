"""Models of billions of parameters on an accelerator: python benchmarks/accelerator.py [--billions 8] [--folder DIR]

Synthetic Llamas of random weights, bfloat16, in shards: one, and the same in another basis with noise of the size of
every matrix, so that they have as much in common as they have apart. `hf-align align` writes the second in the basis of
the first, witness and all. Writes benchmarks/accelerator.md, where rows of other sizes and devices stay. What it makes
is in a temporary folder, under `--folder`: four bytes for each parameter, and two for the result.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from engine import sizes_of
from matching import write
from revision import revision

HERE = Path(__file__)
TABLE = HERE.with_suffix(".md")
LLAMA_3_8B = {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
              "num_attention_heads": 32, "num_key_value_heads": 8}  # fmt: skip
STAGES = ("open", "match", "witness", "write")
HEADER = f"| billion parameters | device | {' | '.join(STAGES)} | all | peak GiB | revision |"
ABOUT = """# On an accelerator

    python benchmarks/accelerator.py --billions 1 --billions 8

Seconds of `hf-align align` for two Llamas that have as much in common as they have apart (random weights, bfloat16;
the second is the first in another basis, with noise of the size of every matrix), and the most memory of the process,
the accelerator's not counted. Files were in the page cache. A row without a witness is of `--no-witness`.

"""


def make(billions: float, folder: Path) -> None:
    """Both models."""
    import torch
    import transformers
    from huggingface_hub import save_torch_state_dict

    from hf_align.runtime.devices import Devices
    from hf_align.symmetry.alignment import AlignedWeights
    from hf_align.symmetry.derivation.spec_cache import derived_spec

    device = Devices.choose().running
    sizes: dict[str, Any] = LLAMA_3_8B if billions == 8 else sizes_of(billions)
    config = transformers.LlamaConfig(
        **sizes, tie_word_embeddings=False, architectures=["LlamaForCausalLM"], dtype="bfloat16"
    )
    spec = derived_spec(config)
    rng = torch.Generator(device).manual_seed(0)

    def noise(name: str) -> torch.Tensor:
        return 0.02 * torch.randn(spec.shape(name), generator=rng, device=device)

    a = {n: (noise(n) + (len(spec.shape(n)) == 1)).bfloat16() for n in spec.parameters}
    noisy = {n: t.float() + noise(n) for n, t in a.items()}
    drawn = torch.Generator().manual_seed(0)
    elements = {n: s.group.random(spec.index_shape(n), drawn) for n, s in spec.spaces.items() if s.group}
    b = AlignedWeights(noisy, spec, elements, device)
    for name, weights in (("a", a), ("b", b)):
        config.save_pretrained(folder / name)
        save_torch_state_dict({n: weights[n].bfloat16().cpu().contiguous() for n in a}, folder / name)


def measure(folder: Path, device: str, *, witness: bool) -> dict[str, float]:
    """Seconds of each stage and in all, and the peak of memory in GiB."""
    began = time.perf_counter()
    command = [sys.executable, "-m", "hf_align", "align", folder / "a", folder / "b", "-o", folder / "out",
               "--overwrite", "--json", "--device", device, *([] if witness else ["--no-witness"])]  # fmt: skip
    child = subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    told = child.stdout.read()
    _, status, usage = os.wait4(child.pid, 0)
    if status:
        raise typer.Exit(1)
    seconds: dict[str, float] = json.loads(told)["seconds"]
    if not witness:
        del seconds["witness"]
    return {**seconds, "all": time.perf_counter() - began, "gib": usage.ru_maxrss / 2**20}


def row(billions: float, device: str, found: dict[str, float]) -> str:
    """A line of the table."""
    times = " | ".join(f"{found[stage]:.0f}" if stage in found else "" for stage in (*STAGES, "all"))
    return f"| {billions:g} | {device} | {times} | {found['gib']:.1f} | {revision()} |"


def main(
    part: Annotated[str | None, typer.Argument(help="make: the models of one size, in --folder.")] = None,
    billions: Annotated[list[float] | None, typer.Option(help="Parameters: 8, or a size of engine.py.")] = None,
    device: Annotated[list[str] | None, typer.Option(help="By default the accelerator.")] = None,
    folder: Annotated[Path | None, typer.Option(help="Where the temporary folder goes.")] = None,
    witness: Annotated[bool, typer.Option(help="Whether aligned models are run.")] = True,
) -> None:
    import torch

    there = torch.accelerator.current_accelerator()
    named = torch.cuda.get_device_name() if there is not None and there.type == "cuda" else str(there)
    if part == "make":
        return make((billions or [8])[0], Path(str(folder)))
    rows = {}
    for size in billions or [8]:
        with tempfile.TemporaryDirectory(dir=folder) as place:
            command = [sys.executable, str(HERE), "make", "--billions", str(size), "--folder", place]
            subprocess.run(command, check=True)
            for each in device or [str(there)]:
                label = named if each == str(there) else each
                rows[f"{size:g}", label] = row(size, label, measure(Path(place), each, witness=witness))
                typer.echo(rows[f"{size:g}", label])
                write(rows, TABLE, ABOUT, HEADER)


if __name__ == "__main__":
    typer.run(main)
