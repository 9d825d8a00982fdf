"""A trained LoRA carried to another base as an adapter: python benchmarks/adapters.py --models … --data …

Writes benchmarks/adapters.md. The adapter is trained by PEFT on the first part of a text that neither base has seen,
and measured on the rest, as `transport --as-adapter` carries it.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Annotated

import torch
import typer
from peft import LoraConfig, get_peft_model
from revision import revision
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from hf_align.checkpoints.adapters import WEIGHTS
from hf_align.jobs import pipeline
from hf_align.jobs.opened import Opened
from hf_align.running.evaluate import Evaluator
from hf_align.settings.choices import TransportMethod
from hf_align.settings.options import Options
from hf_align.settings.schedule import Schedule

TABLE = Path(__file__).with_suffix(".md")
TEXTS, TRAINED_ON = ("jargon", "py"), 384
METHODS: tuple[TransportMethod, ...] = ("regression", "distil")
RANKS, MODULES = (4, 16), ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
STEPS, ROWS, RATE = 200, 32, 5e-3
_KEPT = "99% is kept from rank "


def trained(base: Path, rows: Tensor, rank: int, out: Path) -> None:
    """AdamW on rows of tokens, at a rate that falls to zero."""
    torch.manual_seed(0)
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=MODULES)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    optimiser = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    for step in range(STEPS):
        optimiser.param_groups[0]["lr"] = RATE * (1 - step / STEPS)
        batch = rows[torch.randint(len(rows), (ROWS,))]
        model(input_ids=batch, labels=batch).loss.backward()
        optimiser.step()
        optimiser.zero_grad()
    model.save_pretrained(out)


def loss(base: Path, other: str, rows: Tensor) -> float:
    """Of the second of two models, which may have an adapter."""
    opened = Opened.open({"A": str(base), "B": other}, Options(quiet=True, match="none"))
    weights = opened.models[1].weights
    return Evaluator(opened.network, {"input_ids": rows}).loss({n: weights[n] for n in opened.spec.parameters})


def row(models: Path, data: Path, text: str, rank: int, folder: Path) -> str:
    base, onto = (models / "llama" / seed for seed in "01")
    tokens = load_file(data / f"eval_lm_{text}.safetensors")["input_ids"].long()
    lora, held_out = folder / f"lora-{text}-{rank}", tokens[TRAINED_ON:]
    trained(base, tokens[:TRAINED_ON], rank, lora)
    as_it_is = put_on(lora, onto, folder / f"as-it-is-{text}-{rank}")
    there, before, put = (loss(base, model, held_out) for model in (f"{base}+{lora}", str(onto), f"{onto}+{as_it_is}"))
    cells = [f"{x:.3f}" for x in (loss(base, str(base), held_out), there, before, put)]
    for method in METHODS:
        out, start = folder / f"{method}-{text}-{rank}", time.process_time()
        options = Options(method=method, quiet=True, schedule=Schedule.of_transport(method))
        report = pipeline.transport(f"{base}+{lora}", str(base), str(onto), out, options, as_adapter=True)
        seconds, found = time.process_time() - start, loss(base, f"{onto}+{out}", held_out)
        cells += [f"{found:.3f}", f"{(before - found) / (before - there):.0%}", f"{seconds:.0f}"]
        for told in (note for note in report.notes if _KEPT in note):
            kept, enough = told.partition("keeps ")[2].partition("%")[0], told.partition(_KEPT)[2].partition(" ")[0]
    return f"| {text} | {rank} | {' | '.join(cells)} | {kept}% | {enough} |"


def put_on(lora: Path, onto: Path, out: Path) -> Path:
    """The same adapter, said to be one of another base."""
    out.mkdir()
    config = json.loads((lora / "adapter_config.json").read_text(encoding="utf-8"))
    (out / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": str(onto)}))
    (out / WEIGHTS).write_bytes((lora / WEIGHTS).read_bytes())
    return out


def main(
    models: Annotated[Path, typer.Option(help="Folder with llama/0 and llama/1.")],
    data: Annotated[Path, typer.Option(help="Folder with eval_lm_jargon and eval_lm_py.")],
    output: Path = TABLE,
) -> None:
    torch.set_num_threads(1)
    text = [
        "# A trained adapter, carried to another base",
        "",
        "`OMP_NUM_THREADS=1 python benchmarks/adapters.py --models … --data …`: LoRA adapters of a small Llama A on",
        f"all linear maps of its layers, trained by PEFT for {STEPS} steps of {ROWS} on {TRAINED_ON} sequences of a",
        "text that no base has seen, and carried to B, another seed, by `transport --as-adapter` without data: by",
        "regression, and trained on from there (`--method distil`). Loss (nats) on the other sequences of the text;",
        "the gain is the share of what lies between B and A with its adapter. What the rank keeps of what is fitted,",
        "and the rank from which on 99 % would be kept, are what the command says. CPU seconds of one core.",
        f"Revision {revision()}.",
        "",
        "| text | rank | A | A with its adapter | B | B with A's adapter as it is | regression | gain | s "
        "| distil | gain | s | the rank keeps | 99 % from rank |",
        "| --- " * 14 + "|",
    ]
    with tempfile.TemporaryDirectory() as folder:
        for name in TEXTS:
            for rank in RANKS:
                text.append(row(models, data, name, rank, Path(folder)))
                output.write_text("\n".join([*text, ""]), encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
