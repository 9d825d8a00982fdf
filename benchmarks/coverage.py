"""Every architecture that transformers registers, in all of its modes: is it traced, known, sound, complete?

    .venv/bin/python benchmarks/coverage.py            # all, two at a time; writes coverage.md
    .venv/bin/python benchmarks/coverage.py llama t5   # some model types or classes, printed
    .venv/bin/python benchmarks/coverage.py --count 0  # all, without counting null directions

One class for each model type (causal LM first, then masked LM, seq2seq, image classification, speech, the base model,
sequence classification), in the smallest copy that its config class accepts. Each is derived from all of its modes, and
a random element of the whole group is held against every mode alone. Each runs in a process of its own, with a limit of
processor time and memory. What was measured is kept, one JSON object a line, in `--results`: a run that was stopped
goes on there. Rows of another revision are measured again; the table is of one revision only.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import multiprocessing.connection
import os
import re
import resource
import signal
import statistics
import time
import traceback
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import beside  # noqa: F401  before transformers, which looks for packages once
import torch
import transformers
from proposed import proposed
from revision import revision
from transformers import PretrainedConfig
from transformers.models.auto import modeling_auto

from hf_align.errors import first_line
from hf_align.symmetry.certificate.draws import draws, fewest, settled
from hf_align.symmetry.certificate.null_directions import NullDirections
from hf_align.symmetry.certificate.random_copy import (
    SIZES,
    lower_limits,
    raise_epsilons,
    random_inputs,
    random_weights,
    with_eps,
)
from hf_align.symmetry.certificate.soundness import decided_soundness
from hf_align.symmetry.derivation.derive import derive
from hf_align.symmetry.derivation.unseen import without_unseen
from hf_align.symmetry.spec import SymmetrySpec
from hf_align.tracing.build import build_without_weights
from hf_align.tracing.fields import parts
from hf_align.tracing.join import join
from hf_align.tracing.modes import Mode, find_modes
from hf_align.tracing.program import Program
from hf_align.tracing.small.field_roles import ROOMY, TINY
from hf_align.tracing.small.reduce import reduced
from hf_align.tracing.small.shrink import shallow, shrink

MAPPINGS = ("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_CLASSIFICATION", "SPEECH_SEQ_2_SEQ", None,
            "SEQUENCE_CLASSIFICATION")  # fmt: skip
LARGEST = 50_000_000
"""Parameters up to which the copy is run."""
SMALL = 3000
"""Parameters of copies than which smaller ones are not looked for."""
KINDS = ("moved", "fixed", "flat", "open")
EPSILON = 1e-2
"""What every norm's epsilon is raised to: where it is forgotten, that shows."""
EXACT = 1e-9
"""Relative changes below are rounding."""


@dataclass
class Row:
    """What was measured for one class.

    Attributes:
        copy: how the copy was made; empty if nothing could be traced.
        modes: name of each mode -> largest change of an output under a random element, over the largest output.
        undecided: by name of the mode, what rounding alone does to the model, where that is as much.
        unread: parameters that no mode reads.
        counted: dimensions of the null space that are moved, fixed, flat and open; empty if they were not counted.
        seconds: of processor time.
        reason: why it went no farther.
    """

    name: str
    model_type: str
    revision: str
    copy: str = ""
    parameters: int = 0
    modes: dict[str, float | None] = field(default_factory=dict)
    undecided: dict[str, str] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    spaces: int = 0
    groups: list[str] = field(default_factory=list)
    counted: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    reason: str = ""

    @property
    def error(self) -> float | None:
        """Of the worst mode; None if not all were measured."""
        errors = [e for e in self.modes.values() if e is not None]
        return max(errors, key=lambda e: (e != e, e)) if errors and len(errors) == len(self.modes) else None

    @property
    def sound(self) -> bool:
        return self.error is not None and self.error < EXACT

    @property
    def is_cut_off(self) -> bool:
        """Whether the count was not done in time, so that some of what is open may not be."""
        return bool(self.counted) and bool(self.reason)

    @property
    def only_undecided(self) -> bool:
        """Whether nothing speaks against it but modes in which the model itself is undecided."""
        rest = [e for name, e in self.modes.items() if name not in self.undecided]
        return bool(self.undecided) and all(e is not None and e < EXACT for e in rest)


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
    try:
        default = proposed(row.model_type)
    except Exception as error:  # what is wrong with it stands last
        row.reason = f"its class refuses its own default config: {str(error).strip().splitlines()[-1].strip()[:150]}"
        return
    wanted = getattr(getattr(transformers, row.name, None), "config_class", type(default))
    if not isinstance(default, wanted):
        default = next((c for c in parts(default) if isinstance(c, wanted)), default)
    default.architectures = [row.name]
    makers = {"reduced": lambda: reduced(default, wanted=SMALL), "tiny": lambda: shrink(default, 2, TINY),
              "roomy": lambda: shrink(default, 2, ROOMY), "shallow": lambda: shallow(default)}  # fmt: skip
    for kind, make in makers.items():
        try:
            config = make()
        except Exception as error:  # a config class may say anything of sizes that it does not take
            row.reason = row.reason or f"config: {type(error).__name__}: {first_line(error)[:150]}"
            continue
        if config is not None:
            yield kind, config


def measure(row: Row, *, count: int = 0, seconds: int = 0) -> Iterator[Row]:
    """Fill a row in, as far as it gets; it is given out at every stage.

    Args:
        count: null directions, too, of a copy with at most so many parameters.
        seconds: of processor time for that, without a limit if 0: the best count until then stands.
    """
    for kind, config in copies(row):
        found = _traced(row, config)
        if not found:
            continue
        if kind != "reduced":
            smaller = reduced(config, wanted=SMALL, example=found[0][1].candidate)
            again = _traced(row, smaller) if smaller is not None else []
            kind, found = ("reduced", again) if again else (kind, found)
        row.copy, row.reason, row.modes = kind, "", {mode.name: None for mode, _ in found}
        yield row
        yield from _analyse(row, config, found, count=count, seconds=seconds)
        return


def _traced(row: Row, config: PretrainedConfig) -> list[tuple[Mode, Program]]:
    try:
        return find_modes(build_without_weights(with_eps(config, EPSILON)))
    except Exception as error:  # models fail in as many ways as there are models
        row.reason = row.reason or f"{type(error).__name__}: {first_line(error)[:250]}"
        return []


def _analyse(
    row: Row, config: PretrainedConfig, found: list[tuple[Mode, Program]], *, count: int, seconds: int
) -> Iterator[Row]:
    modes, spec = _derived(config, found)
    row.parameters = sum(torch.Size(spec.shape(name)).numel() for name in spec.parameters)
    row.unknown, row.unread, row.spaces = sorted(spec.unknown_ops), list(spec.unread), len(spec.spaces)
    row.groups = sorted({type(s.group).__name__ for s in spec.spaces.values() if s.group is not None})
    if row.parameters > LARGEST:
        row.reason = "too large to run"
        return
    yield row
    weights = cache(lambda size: random_weights(spec, torch.Generator().manual_seed(0), size))
    for name, program in modes.items():
        for size in SIZES:
            rng = torch.Generator().manual_seed(1)
            inputs = random_inputs(program, rng)
            row.modes[name], undecided = decided_soundness(program, spec, weights(size), inputs, rng)
            if undecided is None:
                break
        row.undecided |= {} if undecided is None else {name: str(undecided)}
    yield row
    if row.parameters <= count and row.sound:
        if seconds:
            _hurry(seconds)
        for directions in _counted(config, (join(modes), spec)):
            row.counted = {kind: len(getattr(directions, kind)) for kind in KINDS}
            yield row


def _derived(config: PretrainedConfig, found: list[tuple[Mode, Program]]) -> tuple[dict[str, Program], SymmetrySpec]:
    modes = {mode.name: lower_limits(raise_epsilons(program, EPSILON)) for mode, program in found}
    return modes, without_unseen(derive(join(modes)), model=build_without_weights(config))


def _counted(config: PretrainedConfig, copy: tuple[Program, SymmetrySpec]) -> Iterator[NullDirections]:
    """The null directions, each count at least as good as the one before it: what is gone at other weights, or with
    more tokens, is not the model's."""

    def derived(larger: PretrainedConfig) -> tuple[Program, SymmetrySpec]:
        modes, spec = _derived(larger, find_modes(build_without_weights(with_eps(larger, EPSILON))))
        return join(modes), spec

    drawn: list[NullDirections] = []
    for draw in draws(config, copy, derived):
        drawn.append(draw.count())
        yield fewest(drawn)
        if settled(drawn):
            return


def _hurry(seconds: int) -> None:
    """Lower the limit of processor time of this process to so many seconds from now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_CPU)
    last = int(time.process_time()) + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (last if soft == resource.RLIM_INFINITY else min(soft, last), hard))


class _OutOfTimeError(BaseException):
    """No `except Exception` of a model may swallow it."""


def _worker(row: Row, pipe: Any, chosen: argparse.Namespace) -> None:
    def stop(*_: Any) -> None:
        signal.signal(signal.SIGXCPU, signal.SIG_IGN)  # which comes again every second
        raise _OutOfTimeError(f"not done in {time.process_time() - before:.0f} s of processor time")

    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGXCPU, stop)
    before, memory = time.process_time(), int(chosen.memory * 2**30)
    last = int(before) + chosen.limit
    resource.setrlimit(resource.RLIMIT_CPU, (last, last + 10))
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    try:
        for so_far in measure(row, count=chosen.count, seconds=chosen.counting):
            row.seconds = round(time.process_time() - before, 1)
            pipe.send(so_far)
    except _OutOfTimeError as error:
        row.reason = str(error)
    except BaseException as error:
        frames = [f"{Path(f.filename).name}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__)]
        row.reason = f"{type(error).__name__}: {first_line(error)[:200]} ({' '.join(frames[-2:])})"
    row.seconds = round(time.process_time() - before, 1)
    pipe.send(row)


def sweep(rows: Iterable[Row], chosen: argparse.Namespace) -> Iterator[Row]:
    """Measure rows in processes, so many at a time.

    Args:
        chosen: `jobs`, `limit`, `memory`, `count` and `counting` of the command line.
    """
    context = multiprocessing.get_context("fork")
    waiting = list(rows)
    running: dict[Any, tuple[Any, Row]] = {}
    while waiting or running:
        while waiting and len(running) < chosen.jobs:
            row = waiting.pop(0)
            receive, send = context.Pipe(duplex=False)
            process = context.Process(target=_worker, args=(row, send, chosen))
            process.start()
            send.close()
            running[receive] = process, row
        for pipe in multiprocessing.connection.wait(list(running)):
            process, row = running[pipe]
            try:
                running[pipe] = process, pipe.recv()
            except EOFError:
                process.join()
                del running[pipe]
                if process.exitcode:
                    row.reason = row.reason or f"the process died ({process.exitcode})"
                yield row


def preload() -> None:
    """Import, once for all children, what tracing and measuring import when they are first used."""
    for name, model_type in (("BertForMaskedLM", "bert"), ("ViTForImageClassification", "vit")):
        for _ in measure(Row(name, model_type, "")):
            pass


_FOLDER = re.compile(r"(?<![\w.])/(?:[\w.-]+/)+\S*")
"""A path on this machine, in the words of an error."""


def render(rows: list[Row], revision: str, count: int) -> str:
    """The table of coverage.md.

    Args:
        count: parameters of a copy up to which null directions were counted.
    """
    measured = [r for r in rows if r.seconds or r.reason]
    traced = [r for r in measured if r.copy]
    known = [r for r in traced if not r.unknown]
    sound = [r for r in known if r.sound]
    counted = [r for r in sound if r.counted]
    complete = [r for r in counted if not r.counted["open"]]
    modes = [len(r.modes) for r in traced]
    left = [r for r in sound if not r.counted and r.parameters <= count]
    cut = [r for r in counted if r.is_cut_off]
    counting = (
        f" Of copies with at most {count} parameters the null directions of the weights are counted, as `certify` "
        "does: *moved* by groups, *fixed* by the canonical form, *flat* (they change no mean), and *open*. "
        f"{len(left)} of them were not counted in the time that there was, and {len(cut)} counts were cut off: of what "
        "is open there, more draws show some to be none of the model's."
    ) if count else ""  # fmt: skip
    lines = [
        "# Coverage",
        "",
        f"`make coverage`, transformers {transformers.__version__}, torch {torch.__version__}, revision {revision} in "
        f"all rows: {len(measured)} of {len(rows)} classes, one for each model type; "
        f"{statistics.median(r.seconds for r in measured):.1f} s of processor time each (median), "
        f"{sum(r.seconds for r in measured) / 60:.0f} minutes together.",
        "",
        "| classes measured | traced | and no unknown op | and sound below 1e-9 in every mode | and counted "
        "| and none open | modes, together |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        f"| {len(measured)} | {len(traced)} | {len(known)} | {len(sound)} | {len(counted)} | {len(complete)} "
        f"| {sum(modes)} |",
        "",
        "Each class is derived from all of its modes together; a random element of the whole group is then held "
        "against every mode alone, in float64, on the copy, once more with weights half as large where rounding alone "
        "changes the outputs as much. *reduced* copies are tiny ones (width 8), or have sizes "
        "that were lowered by trying (`reduce.py`); *tiny*, *roomy* (width 32) and *shallow* ones (default sizes in "
        "two layers) could not be lowered. Where the defaults of a config class are nothing that a model can be built "
        "from, `proposed.py` gives it others. A weight that no mode reads stands still." + counting,
        "",
    ]  # fmt: skip
    waiting = [r.model_type for r in rows if not r.seconds and not r.reason]
    if waiting:
        lines += [f"## Not measured at this revision ({len(waiting)})", "",
                  "What took least time at an earlier revision comes first, so the rows here are the easy ones. The "
                  f"command goes on with {', '.join(waiting)}.", ""]  # fmt: skip
    for title, chosen in (
        ("Not traced", [r for r in measured if not r.copy]),
        ("Ops without a rule (what they touch is pinned)", [r for r in traced if r.unknown]),
        ("Not shown to be sound", [r for r in known if not r.sound and not r.only_undecided]),
        ("Undecided: rounding alone changes the model as much", [r for r in known if r.only_undecided]),
        ("With open directions", [r for r in counted if r.counted["open"]]),
    ):
        lines += [f"## {title} ({len(chosen)})", "", *(f"* {_line(r)}" for r in chosen), ""]
    unread = [r for r in traced if r.unread]
    lines += [f"## Weights that no mode reads ({len(unread)})", "",
              *(f"* {r.model_type}: {_some(r.unread)}" for r in unread), "",
              "## All", "",
              "| model type | class | copy | parameters | modes | error | moved | fixed | flat | open | unread "
              "| spaces | groups | s |",
              f"|{' --- |' * 14}"]  # fmt: skip
    for r in measured:
        error = f"{r.error:.0e}" if r.error is not None else ""
        counts = " | ".join(str(r.counted.get(kind, "")) for kind in KINDS)
        lines.append(f"| {r.model_type} | {r.name} | {r.copy} | {r.parameters} | {len(r.modes)} | {error} | {counts} "
                     f"| {len(r.unread)} | {r.spaces} | {', '.join(r.groups)} | {r.seconds} |")  # fmt: skip
    return _FOLDER.sub("…", "\n".join(lines) + "\n")


def _line(row: Row) -> str:
    if not row.copy or row.error is None:
        return f"{row.model_type} ({row.name}){f': {row.reason}' if row.reason else ''}"
    if row.unknown:
        return f"{row.model_type}: {', '.join(row.unknown)} (error {row.error:.0e})"
    if row.counted.get("open"):
        cut_off = " (cut off)" if row.is_cut_off else ""
        return f"{row.model_type}: {', '.join(f'{n} {kind}' for kind, n in row.counted.items())}{cut_off}"
    if row.sound:
        return f"{row.model_type}: sound in {len(row.modes)} modes, {len(row.unread)} weights unread"
    if row.only_undecided:
        return f"{row.model_type}: {next(iter(row.undecided.values()))}"
    worst = {name: e for name, e in row.modes.items() if e is None or not e < EXACT}
    return f"{row.model_type}: {', '.join(f'{name}: {e:.0e}' for name, e in worst.items())} {row.reason}"


def _some(names: list[str]) -> str:
    """The first names, and how many more there are."""
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def _kept(path: Path) -> list[Row]:
    if not path.exists():
        return []
    return [Row(**json.loads(line)) for line in path.read_text().splitlines()]


def fill(done: dict[str, Row], rows: list[Row], chosen: argparse.Namespace) -> None:
    """Measure rows, and keep each as soon as it is there."""
    chosen.results.parent.mkdir(parents=True, exist_ok=True)
    for row in sweep(rows, chosen):
        done[row.name] = row
        with chosen.results.open("a") as file:
            file.write(json.dumps(asdict(row)) + "\n")
        print(f"{row.name:40} {row.copy:8} {_line(row)} [{row.seconds} s]", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("only", nargs="*", help="model types or classes, measured in any case; all if none is given")
    parser.add_argument("--results", type=Path, default=Path("out/coverage.jsonl"))
    parser.add_argument("--report", type=Path, default=Path("benchmarks/coverage.md"))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--limit", type=int, default=240, help="seconds of processor time for each class")
    parser.add_argument("--memory", type=float, default=8.0, help="GiB for each class")
    parser.add_argument("--revision", default=revision(), help="what the rows are kept under")
    parser.add_argument(
        "--count", type=int, default=3000, help="parameters up to which null directions are counted, too"
    )
    parser.add_argument(
        "--counting", type=int, default=60, help="seconds of processor time for that: the best count until then stands"
    )
    parser.add_argument("--only-report", action="store_true", help="measure nothing, write the table again")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    everything = {n: Row(n, model_type, chosen.revision) for n, model_type in classes().items()}
    kept = _kept(chosen.results)
    done = {row.name: row for row in kept if row.revision == chosen.revision}
    before = {row.name: row.seconds for row in kept}
    todo = [r for r in everything.values() if (r.name not in done and not chosen.only) or
            {r.name, r.model_type} & {*chosen.only}]  # fmt: skip
    todo.sort(key=lambda row: before.get(row.name, 0.0))
    if not chosen.only_report:
        preload()
        fill(done, todo, chosen)
    if not chosen.only:
        chosen.report.write_text(
            render([done.get(r.name, r) for r in everything.values()], chosen.revision, chosen.count)
        )


if __name__ == "__main__":
    main()
