"""The barrier between two seeds against the width of the model: python benchmarks/width.py TEXT WORK

TEXT is the King James Bible (`kjv.py` says where it is). Models are trained into WORK, half an hour of one core in all,
and WORK/rows.jsonl keeps each row: a run that was stopped goes on. Writes benchmarks/width.md.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import typer
from kjv import TOKENIZER, verses, windows
from revision import revision
from safetensors.torch import load_file
from torch import Tensor
from train_decoder import HEAD, HELD_OUT, LENGTH, WIDTH, Recipe, decoder, train, untrained
from transformers import AutoTokenizer, GPT2Config, PretrainedConfig

from hf_align.jobs.opened import Basis, Opened
from hf_align.merging.regression import mean_of, regression_of
from hf_align.merging.samples import MORE, Samples
from hf_align.running.data import load_data
from hf_align.running.evaluate import Evaluator
from hf_align.settings.options import Options

TABLE = Path(__file__).with_suffix(".md")
WIDTHS, SEEDS, LAYERS, VOCABULARY = (64, 128, 256, 512), (0, 1), 2, 512
STEPS, ROWS = 400, 16
HALF = (0.5, 0.5)


def gpt2(width: int) -> PretrainedConfig:
    return GPT2Config(vocab_size=VOCABULARY, n_embd=width, n_layer=LAYERS, n_head=width // HEAD, n_positions=LENGTH,
                      bos_token_id=0, eos_token_id=0, pad_token_id=0, resid_pdrop=0, embd_pdrop=0,
                      attn_pdrop=0)  # fmt: skip


FAMILIES: dict[str, Callable[[int], PretrainedConfig]] = {
    "GPT-2": gpt2,
    "Llama": lambda width: decoder(VOCABULARY, LAYERS, width),
}


@dataclass(frozen=True)
class Row:
    """One pair: its losses, what its merges lose over the mean of both, and CPU seconds of matching and regression."""

    revision: str
    family: str
    width: int
    parameters: int
    parents: tuple[float, float]
    ensemble: float
    mean: float
    aligned: float
    regression: float
    matching_seconds: float
    regression_seconds: float


def recipe(width: int) -> Recipe:
    """The rate falls with the root of the width."""
    return Recipe(STEPS, ROWS, 3e-3 * (WIDTH / width) ** 0.5)


def trained(work: Path, family: str, width: int, rows: Tensor) -> list[Path]:
    """Folders of a model of each seed."""
    folders = [work / f"{family}-{width}-{seed}" for seed in SEEDS]
    for folder, seed in zip(folders, SEEDS, strict=True):
        if not folder.exists():
            model = untrained(FAMILIES[family](width), seed)
            train(model, rows, recipe(width), seed)
            partial = folder.with_suffix(".partial")
            model.save_pretrained(partial)
            partial.rename(folder)
    return folders


def measured(family: str, width: int, folders: list[Path]) -> Row:
    """Losses on the second half of the held-out text."""
    opened = Opened.open(dict(zip("AB", map(str, folders), strict=True)), Options(quiet=True))
    names, began = opened.spec.parameters, time.process_time()
    bases = Basis(opened), Basis(opened, opened.find())
    raw, moved = ([{n: w[n].float() for n in names} for w in basis.weights] for basis in bases)
    matching = time.process_time() - began
    data = load_data(HELD_OUT, None, opened.first.config)
    half = len(data["input_ids"]) // 2
    evaluator = Evaluator(opened.network, {k: t[half:] for k, t in data.items()})
    began = time.process_time()
    samples = Samples.of(moved, opened.network, None, lambda _: None, MORE)
    regression = regression_of(moved, HALF, samples, opened.spec)
    solving = time.process_time() - began
    first, second = (evaluator.loss(weights) for weights in raw)
    lost = [evaluator.loss(w) - (first + second) / 2 for w in (mean_of(raw, HALF), mean_of(moved, HALF), regression)]
    ensemble = evaluator.ensemble(raw, HALF)
    assert ensemble is not None
    parameters = sum(tensor.numel() for tensor in raw[0].values())
    return Row(revision(), family, width, parameters, (first, second), ensemble, *lost, matching, solving)


def kept(file: Path) -> Iterator[Row]:
    """The rows that there are."""
    for line in file.read_text(encoding="utf-8").splitlines() if file.exists() else []:
        found = json.loads(line)
        yield Row(**{**found, "parents": tuple(found["parents"])})


def main(text: Path, work: Path, output: Path = TABLE) -> None:
    torch.set_num_threads(1)
    work.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    tokens = torch.tensor(tokenizer("\n".join(verses(text.read_text(encoding="utf-8"))), verbose=False)["input_ids"])
    rows = windows(tokens, load_file(HELD_OUT)["input_ids"].long(), LENGTH)
    results = work / "rows.jsonl"
    for width in WIDTHS:
        for family in FAMILIES:
            found = list(kept(results))
            if not any((row.family, row.width) == (family, width) for row in found):
                row = measured(family, width, trained(work, family, width, rows))
                with results.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(row)) + "\n")
                output.write_text(table([*found, row], len(rows)), encoding="utf-8")
                typer.echo(f"{row}", err=True)


def table(rows: list[Row], windows_there_are: int) -> str:
    revisions = ", ".join(dict.fromkeys(row.revision for row in rows))
    text = [
        "# The barrier against the width",
        "",
        "`OMP_NUM_THREADS=1 python benchmarks/width.py TEXT WORK`: two seeds each of a GPT-2 and of a Llama of",
        f"{LAYERS} layers, heads of {HEAD} and {VOCABULARY} tokens, trained for {STEPS} steps of {ROWS} × {LENGTH},",
        f"{STEPS * ROWS / windows_there_are:.1f} times through the King James Bible: much less than the models of the",
        "other tables. The rate falls with the root of the width. Losses (nats) are of the second half of the held-out",
        "text; the barrier is the loss of a merge over the mean of its two models': of the plain mean, of the mean",
        "after weight matching, and after the",
        "regression that `--effort good` takes, on what the models write. CPU seconds, one thread. One pair each.",
        f"Measured at revision {revisions}.",
        "",
        "| family | width | parameters | losses | ensemble | plain mean | after matching | after regression "
        "| s of matching | s of regression |",
        "| --- " * 10 + "|",
    ]
    for row in sorted(rows, key=lambda row: row.family):
        barriers = " | ".join(f"{found:.3f}" for found in (row.mean, row.aligned, row.regression))
        losses = ", ".join(f"{loss:.3f}" for loss in row.parents)
        text.append(f"| {row.family} | {row.width} | {row.parameters:,} | {losses} | {row.ensemble:.3f} | {barriers} "
                    f"| {row.matching_seconds:.0f} | {row.regression_seconds:.0f} |")  # fmt: skip
    return "\n".join([*text, ""])


if __name__ == "__main__":
    typer.run(main)
