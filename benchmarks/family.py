"""Any two models of one family: other tokenizers, other depths, other widths, experts; and of several families.

    python benchmarks/train_decoder.py TEXT out/family/tokens  --seed 4 --vocabulary 640 --steps 3000
    python benchmarks/train_decoder.py TEXT out/family/deep    --seed 5 --layers 4       --steps 2500
    python benchmarks/train_decoder.py TEXT out/family/experts-0 --seed 10 --experts 4   --steps 2500
    python benchmarks/train_decoder.py TEXT out/family/experts-1 --seed 11 --experts 4   --steps 2500
    python benchmarks/train_decoder.py TEXT out/family/neox-0 --seed 12 --family gpt_neox --steps 2500
    python benchmarks/train_decoder.py TEXT out/family/neox-1 --seed 13 --family gpt_neox --steps 2500
    python benchmarks/train_decoder.py TEXT out/family/qwen3-0 --seed 14 --family qwen3 --tied --steps 2500
    python benchmarks/train_decoder.py TEXT out/family/qwen3-1 --seed 15 --family qwen3 --tied --steps 2500
    OMP_NUM_THREADS=1 python benchmarks/family.py out/family     # writes family.md; ten minutes on one core

`kjv.py` says where TEXT is. Losses are of the second half of the held-out text, in nats per byte, for tokens differ.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import typer
from kjv import ROOT
from revision import revision
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from hf_align.checkpoints.ondemand import Computed
from hf_align.jobs.opened import Basis, Opened
from hf_align.merging.regression import regression_of
from hf_align.merging.samples import MORE, Samples
from hf_align.running.evaluate import Evaluator
from hf_align.settings.options import Options

LLAMA, WIDE = ROOT / "examples" / "models" / "llama", ROOT / "examples" / "models" / "llama-wide" / "3"
HELD_OUT = ROOT / "examples" / "data" / "eval_lm_kjv.safetensors"
TABLE = Path(__file__).with_suffix(".md")
POINTS = 11


@dataclass(frozen=True)
class Row:
    """A pair, and what it comes to; all losses in nats per byte.

    Attributes:
        own: of B as it is, in its own tokens.
        naive, aligned: barriers over the line between A and B as they are opened.
        regressed: of their merge by regression.
    """

    pair: str
    a: float
    own: float
    b: float
    naive: float
    aligned: float
    regressed: float
    seconds: float

    def line(self, equal: Row) -> str:
        """The cells of a table; barriers beside those of two equal Llamas."""
        over = self.regressed - (self.a + self.b) / 2
        rest = equal.regressed - (equal.a + equal.b) / 2
        return (f"| {self.pair} | {self.a:.3f} | {self.own:.3f} | {self.b:.3f} | {self.naive:.3f} | {self.aligned:.3f} "
                f"({self.aligned / equal.aligned:.2f}) | {self.regressed:.3f} | {over:.3f} ({over / rest:.2f}) | "
                f"{self.seconds:.0f} |")  # fmt: skip


def texts() -> list[str]:
    """The second half of the held-out text."""
    rows = load_file(HELD_OUT)["input_ids"].long()
    return [AutoTokenizer.from_pretrained(LLAMA / "0").decode(row) for row in rows[len(rows) // 2 :]]


def rows_of(folder: Path, held_out: list[str]) -> tuple[Tensor, float]:
    """The text in the tokens of a model, [rows, 64], and bytes per token that is predicted."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("".join(held_out), return_tensors="pt", verbose=False)["input_ids"][0]
    rows = ids[: len(ids) // 64 * 64].view(-1, 64)
    size = sum(len(tokenizer.decode(row[1:]).encode()) for row in rows)
    return rows, size / rows[:, 1:].numel()


@torch.no_grad()
def loss_of(folder: Path, held_out: list[str]) -> float:
    """Of a model as it is."""
    rows, size = rows_of(folder, held_out)
    model = AutoModelForCausalLM.from_pretrained(folder)
    losses = [float(model(batch, labels=batch).loss) * len(batch) for batch in rows.split(64)]
    return sum(losses) / len(rows) / size


def measure(pair: str, a: Path, b: Path, held_out: list[str]) -> Row:
    start = time.process_time()
    opened = Opened.open({"A": str(a), "B": str(b)}, Options(retokenize=True, quiet=True))
    basis = Basis(opened, opened.find())
    rows, size = rows_of(a, held_out)
    evaluator, names = Evaluator(opened.network, {"input_ids": rows}), opened.spec.parameters

    def placed(weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        return opened.network.placed(Computed(names, weights.__getitem__))

    raw, moved = (tuple(map(placed, of.weights)) for of in (Basis(opened), basis))
    samples = Samples.of(moved, opened.network, None, lambda _: None, MORE)
    merged = regression_of(moved, (0.5, 0.5), samples, opened.spec)
    seconds = time.process_time() - start
    found = evaluator.compare((raw[0], raw[1]), (moved[0], moved[1]), POINTS)
    loss = evaluator.loss(Computed(names, merged.__getitem__))
    return Row(pair, found.naive.losses[0] / size, loss_of(b, held_out), found.naive.losses[-1] / size,
               found.naive.barrier / size, found.aligned.barrier / size, loss / size, seconds)  # fmt: skip


def main(trained: Path, output: Path = TABLE) -> None:
    torch.manual_seed(0)
    tokens, deep = trained / "tokens", trained / "deep"
    pairs = {
        "Llama, Llama": (LLAMA / "0", LLAMA / "1"),
        "Llama, one with 640 tokens of its own": (LLAMA / "0", tokens),
        "the same two, the other tokens kept": (tokens, LLAMA / "0"),
        "Llama 192 wide, the one with its own tokens": (WIDE, tokens),
        "Llama with 4 layers, Llama with 3": (deep, LLAMA / "0"),
        "Llama with 4 layers, another with 3": (deep, LLAMA / "1"),
        "Llama with 4 layers, the one with its own tokens": (deep, tokens),
        "Mixtral, Mixtral": (trained / "experts-0", trained / "experts-1"),
        "GPT-NeoX, GPT-NeoX": (trained / "neox-0", trained / "neox-1"),
        "Qwen 3 with a tied table, another": (trained / "qwen3-0", trained / "qwen3-1"),
    }
    held_out, found = texts(), list[Row]()
    for pair, (a, b) in pairs.items():
        found.append(measure(pair, a, b, held_out))
        typer.echo(found[-1].line(found[0]), err=True)
    text = [
        "# Any two models of one family",
        "",
        f"`OMP_NUM_THREADS=1 python benchmarks/family.py out/family` at {revision()}; the script says how",
        "the models are trained. Losses and barriers are in nats per byte of the second half of the held-out text.",
        "*B, own* is B as it is, *B* as it is merged: in the tokens of A, with tables that are fitted to what B writes",
        "itself. Barriers are over the line between A and B; *over* is what the merge by regression loses over the",
        "mean of A and B. In brackets: times that of two Llamas that differ in their seeds alone. No data, and no",
        "gradients but for the tables.",
        "",
        "| A, B | A | B, own | B | not aligned | aligned | regression | over | s |",
        "| --- " * 9 + "|",
        *(row.line(found[0]) for row in found),
        "",
    ]
    output.write_text("\n".join(text), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
