"""Every architecture that transformers registers: is it traced, known, sound, complete?

    .venv/bin/python benchmarks/coverage.py            # all (half an hour on two cores), writes coverage.md
    .venv/bin/python benchmarks/coverage.py llama t5   # some model types, printed

One class for each model type (causal LM first, then masked LM, seq2seq, image classification, speech, the base model,
sequence classification), in the smallest copy that its config class accepts. Each runs in a process of its own, with a
limit of time and memory. `--results FILE` keeps what was measured, one JSON object a line; classes found there are not
measured again. `--counted 0` is quick and only checks soundness; a later run without it adds the counts.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import multiprocessing.connection
import os
import resource
import signal
import statistics
import subprocess
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import transformers
from transformers import CONFIG_MAPPING, PretrainedConfig
from transformers.models.auto import modeling_auto

from hf_align.errors import HfAlignError
from hf_align.symmetry.certificate.certify import certify, soundness
from hf_align.symmetry.certificate.random_copy import random_inputs, random_weights
from hf_align.symmetry.derive import derive
from hf_align.symmetry.spec import SymmetrySpec
from hf_align.tracing.inputs import parts
from hf_align.tracing.reduce import reduced
from hf_align.tracing.shrink import ROOMY, TINY, shallow, shrink
from hf_align.tracing.trace import Program, trace

MAPPINGS = ("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_CLASSIFICATION", "SPEECH_SEQ_2_SEQ", None,
            "SEQUENCE_CLASSIFICATION")  # fmt: skip
RUN = 50_000_000
"""Parameters up to which the model is run."""


@dataclass
class Row:
    """What was measured for one class."""

    name: str
    model_type: str
    copy: str = ""
    parameters: int = 0
    traced: bool = False
    unknown: list[str] = field(default_factory=list)
    spaces: int = 0
    groups: list[str] = field(default_factory=list)
    error: float | None = None
    found: int | None = None
    nullity: int | None = None
    leak: float = 0.0
    missing: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    reason: str = ""
    revision: str = ""

    @property
    def sound(self) -> bool:
        return self.error is not None and self.error < 1e-9

    @property
    def complete(self) -> bool:
        return self.nullity is not None and self.found == self.nullity and self.leak < 1e-6


def classes() -> dict[str, str]:
    """Class name -> model type: one class for each model type, by the order of the mappings."""
    primary: dict[str, str] = {}
    for mapping in MAPPINGS:
        name = f"MODEL_FOR_{mapping}_MAPPING_NAMES" if mapping else "MODEL_MAPPING_NAMES"
        for model_type, found in getattr(modeling_auto, name).items():
            primary.setdefault(model_type, found if isinstance(found, str) else found[0])
    by_class: dict[str, str] = {}
    for model_type, name in primary.items():
        by_class.setdefault(name, model_type)
    return by_class


def copies(row: Row) -> Iterator[tuple[str, PretrainedConfig]]:
    """Copies of the default config, likely ones first, by how they were made; those that are refused left out."""
    default = CONFIG_MAPPING[row.model_type]()
    wanted = getattr(getattr(transformers, row.name, None), "config_class", type(default))
    if not isinstance(default, wanted):
        default = next((c for c in parts(default) if isinstance(c, wanted)), default)
    default.architectures = [row.name]
    makers = {"reduced": lambda: reduced(default), "tiny": lambda: shrink(default, 2, TINY),
              "roomy": lambda: shrink(default, 2, ROOMY), "shallow": lambda: shallow(default)}  # fmt: skip
    for kind, make in makers.items():
        try:
            config = make()
        except Exception as error:
            row.reason = row.reason or f"config: {type(error).__name__}: {str(error).splitlines()[0][:150]}"
            continue
        if config is not None:
            yield kind, config


def measure(row: Row, counted: int) -> Iterator[Row]:
    """Fill a row in, as far as it gets; it is given out at every stage."""
    for kind, config in copies(row):
        program = _traced(row, config)
        if program is None:
            continue
        smaller = None if kind == "reduced" else reduced(config, example=program.candidate)
        found = None if smaller is None else _traced(row, smaller)
        if smaller is not None and found is not None:
            kind, config, program = "reduced", smaller, found
        row.copy, row.traced, row.reason = kind, True, ""
        yield row
        yield from _analyse(row, config, program, counted)
        return


def _traced(row: Row, config: PretrainedConfig) -> Program | None:
    try:
        return trace(config, length=10)
    except (HfAlignError, AssertionError, RuntimeError, ValueError, TypeError, KeyError, IndexError,
            AttributeError, ZeroDivisionError, NotImplementedError) as error:  # fmt: skip
        row.reason = row.reason or f"trace: {type(error).__name__}: {str(error).splitlines()[0][:200]}"
        return None


def _analyse(row: Row, config: PretrainedConfig, program: Program, counted: int) -> Iterator[Row]:
    spec = derive(program)
    row.parameters = sum(torch.Size(shape).numel() for shape in program.shapes.values())
    row.unknown, row.spaces = sorted(spec.unknown_ops), len(spec.spaces)
    row.groups = sorted({type(s.group).__name__ for s in spec.spaces.values() if s.group is not None})
    if row.parameters > RUN:
        row.reason = "too large to run"
        return
    row.error = _error(config, program, spec)
    yield row
    if row.parameters <= counted and row.sound:
        certificate = certify(config)
        row.error = max(row.error, certificate.max_error)
        row.found, row.nullity, row.leak = certificate.found, certificate.nullity, certificate.leak
        row.missing = dict(list(certificate.missing.items())[:6])


def _error(config: PretrainedConfig, program: Program, spec: SymmetrySpec) -> float:
    rng = torch.Generator().manual_seed(0)
    weights = random_weights(spec, rng)
    return soundness(program, spec, weights, random_inputs(program, rng), rng)


def _worker(row: Row, pipe: Any, memory: int, counted: int) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    started = time.perf_counter()
    try:
        for so_far in measure(row, counted):
            pipe.send(so_far)
    except BaseException as error:
        lines = str(error).splitlines() or [""]
        frames = [f"{Path(f.filename).name}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__)]
        row.reason = f"{type(error).__name__}: {lines[0][:200]} ({' '.join(frames[-2:])})"
    row.seconds = round(time.perf_counter() - started, 1)
    pipe.send(row)


def sweep(rows: Iterable[Row], workers: int, limit: float, memory: int, counted: int) -> Iterator[Row]:
    """Measure rows in processes, `workers` at a time."""
    context = multiprocessing.get_context("fork")
    waiting = list(rows)
    running: dict[Any, tuple[Any, Row, float]] = {}
    while waiting or running:
        while waiting and len(running) < workers:
            row = waiting.pop(0)
            receive, send = context.Pipe(duplex=False)
            process = context.Process(target=_worker, args=(row, send, memory, counted))
            process.start()
            send.close()
            running[receive] = (process, row, time.monotonic())
        for pipe in multiprocessing.connection.wait(list(running), timeout=1.0):
            process, row, since = running[pipe]
            try:
                running[pipe] = process, pipe.recv(), since
            except EOFError:
                process.join()
                del running[pipe]
                row.reason = row.reason if row.seconds else "the process died (memory)"
                yield row
        for pipe, (process, row, since) in list(running.items()):
            if time.monotonic() - since > limit:
                os.kill(process.pid, signal.SIGKILL)
                process.join()
                del running[pipe]
                row.reason = f"not done in {limit:.0f} s"
                row.seconds = limit
                yield row


def render(rows: list[Row], counted: int) -> str:
    """The table of coverage.md."""
    traced = [r for r in rows if r.traced]
    known = [r for r in traced if not r.unknown]
    sound = [r for r in known if r.sound]
    complete = [r for r in sound if r.complete]
    seconds = statistics.median(r.seconds for r in rows)
    counted_rows = [r for r in sound if r.nullity is not None]
    lines = [
        "# Coverage",
        "",
        f"`python benchmarks/coverage.py`, transformers {transformers.__version__}, torch {torch.__version__}: "
        f"{len(rows)} classes, one for each model type; {seconds:.1f} s each (median).",
        "",
        "| traced | no unknown op | and sound below 1e-9 | counted | and complete to the last dimension |",
        "| --- | --- | --- | --- | --- |",
        f"| {len(traced)} | {len(known)} | {len(sound)} | {len(counted_rows)} | {len(complete)} |",
        "",
        f"Null directions are counted up to {counted} parameters; larger copies are only checked for soundness. "
        "*reduced* copies are tiny ones (width 8), or have sizes that were lowered by trying (`reduce.py`); *tiny*, "
        "*roomy* (width 32) and *shallow* ones (default sizes in two layers) could not be lowered. "
        f"Rows may come from several runs (`--results`); they are of {_revisions(rows)}.",
        "",
    ]
    for title, chosen in (
        ("Not measured yet", [r for r in rows if not r.copy and not r.reason and not r.seconds]),
        ("Not traced", [r for r in rows if not r.traced and (r.reason or r.seconds)]),
        ("Ops without a rule (what they touch is pinned)", [r for r in traced if r.unknown]),
        ("Not shown to be sound", [r for r in known if not r.sound]),
        ("Incomplete", [r for r in sound if r.nullity is not None and not r.complete]),
        ("Not counted", [r for r in sound if r.nullity is None]),
    ):
        lines += [f"## {title} ({len(chosen)})", "", *(f"* {_line(r)}" for r in chosen), ""]
    lines += ["## All", "",
              "| model type | class | copy | parameters | traced | error | found / nullity | spaces | groups | s |",
              "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"]  # fmt: skip
    for r in rows:
        count = f"{r.found} / {r.nullity}" if r.nullity is not None else ""
        error = f"{r.error:.0e}" if r.error is not None else ""
        lines.append(f"| {r.model_type} | {r.name} | {r.copy} | {r.parameters} | {'yes' if r.traced else ''} | {error} "
                     f"| {count} | {r.spaces} | {', '.join(r.groups)} | {r.seconds} |")  # fmt: skip
    return "\n".join(lines) + "\n"


def _revisions(rows: list[Row]) -> str:
    found = Counter(row.revision or "an unknown one" for row in rows).most_common()
    if len(found) == 1:
        return f"one revision of the rules, {found[0][0]}"
    return "these revisions of the rules: " + ", ".join(f"{revision} ({count})" for revision, count in found)


def _revision() -> str:
    """The commit that the rules are of."""
    describe = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    return subprocess.run(describe, cwd=Path(__file__).parent, capture_output=True, text=True).stdout.strip()


def _line(row: Row) -> str:
    if not row.traced or row.error is None:
        return f"{row.model_type} ({row.name}): {row.reason}"
    if row.unknown:
        return f"{row.model_type}: {', '.join(row.unknown)} (error {row.error:.0e})"
    if not row.sound:
        return f"{row.model_type}: error {row.error:.0e} {row.reason}"
    if row.nullity is None:
        return f"{row.model_type}: {row.parameters} parameters {row.reason}"
    if row.leak >= 1e-6:
        return f"{row.model_type}: {row.found} of {row.nullity}; a generated direction has an effect of {row.leak:.0e}"
    where = ", ".join(f"{n} {m:g}" for n, m in list(row.missing.items())[:3])
    return f"{row.model_type}: {row.found} of {row.nullity}; missing in {where}"


def _uncounted(row: Row, counted: int) -> bool:
    """Whether a row comes from a run that only checked soundness."""
    return row.sound and row.nullity is None and row.parameters <= counted and not row.reason


def _better(before: Row | None, row: Row) -> Row:
    """The later row, unless it only ran out of time where an earlier one got farther."""
    stages = [(r.nullity is not None, r.error is not None, r.traced) for r in (before, row) if r is not None]
    return before if before is not None and row.reason.startswith("not done") and stages[0] > stages[1] else row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("only", nargs="*", help="model types or classes; all if none is given")
    parser.add_argument("--results", type=Path, default=Path("out/coverage.jsonl"))
    parser.add_argument("--report", type=Path, default=Path("benchmarks/coverage.md"))
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--limit", type=float, default=240.0, help="seconds for each class")
    parser.add_argument("--memory", type=float, default=10.0, help="GiB for each class")
    parser.add_argument("--counted", type=int, default=5000, help="parameters up to which null directions are counted")
    parser.add_argument("--only-report", action="store_true", help="measure nothing, write the table again")
    parser.add_argument("--again", action="store_true", help="measure also what the results hold already")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    revision = _revision()
    everything = [Row(name, model_type, revision=revision) for name, model_type in classes().items()]
    rows = [r for r in everything if not chosen.only or r.model_type in chosen.only or r.name in chosen.only]
    chosen.results.parent.mkdir(parents=True, exist_ok=True)
    done: dict[str, Row] = {}
    if chosen.results.exists():
        for line in chosen.results.read_text().splitlines():
            found = Row(**json.loads(line))
            done[found.name] = _better(done.get(found.name), found)
    todo = [
        r for r in rows if chosen.again or chosen.only or r.name not in done or _uncounted(done[r.name], chosen.counted)
    ]
    todo.sort(key=lambda r: done[r.name].parameters if r.name in done else 0)
    for row in sweep(
        [] if chosen.only_report else todo, chosen.workers, chosen.limit, int(chosen.memory * 2**30), chosen.counted
    ):
        done[row.name] = _better(done.get(row.name), row)
        with chosen.results.open("a") as file:
            file.write(json.dumps(asdict(row)) + "\n")
        print(
            f"{row.model_type:28} {row.copy:8} {_line(row) if not row.complete else 'complete'} [{row.seconds} s]",
            flush=True,
        )
    if not chosen.only:
        chosen.report.write_text(render([done.get(r.name, r) for r in everything], chosen.counted))


if __name__ == "__main__":
    main()
