"""What a command says: progress and notes on stderr, its result on stdout."""

from __future__ import annotations

import errno
import json
import logging
import sys
import tempfile
import textwrap
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import typer

from hf_align.errors import first_line, one_line
from hf_align.runtime.processes import current

_SHOWN = 200
"""Characters of an error of another library."""
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def speaker(quiet: bool) -> Callable[[str], None]:
    """What says a line on stderr while something is computed, in the leading process; if quiet, warnings alone."""
    if not current().leads:
        return lambda _: None
    return _warn if quiet else _above_bars


def _warn(line: str) -> None:
    if line.startswith("warning: "):
        _above_bars(line)


def _above_bars(line: str) -> None:
    from huggingface_hub.utils import tqdm

    tqdm.write(one_line(line), file=sys.stderr)


def unexpected(error: Exception) -> str:
    """One line on an error that nobody foresaw; where it came from is in a file for whoever mends it."""
    if isinstance(error, OSError) and error.strerror and error.filename:
        return one_line(f"{error.filename}: {error.strerror}")
    if isinstance(error, OSError) and error.errno in _NO_ROOM:  # of what is open already, as stdout is
        return f"{error.strerror}, be it of stdout or of {tempfile.gettempdir()}"
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "allocate memory" in str(error)):
        return "there is not enough memory for this"
    if isinstance(error, getattr(sys.modules.get("torch"), "OutOfMemoryError", ())):
        return "the device has not enough memory for this; --offload needs less, and --device cpu none of it"
    with tempfile.NamedTemporaryFile("w", prefix="hf-align-", suffix=".log", delete=False, errors="replace") as log:
        log.write("".join(traceback.format_exception(error)))
    logging.getLogger("hf_align").debug("", exc_info=error)
    what = f"{type(error).__name__}: {first_line(error)}"[:_SHOWN]
    return one_line(f"this is a fault of hf-align ({what}); please report it with {log.name}")


def emit(result: dict[str, Any], as_json: bool, lines: list[str]) -> None:
    """The result of a command on stdout, as JSON or as lines."""
    if current().leads:
        typer.echo(json.dumps(result, indent=2) if as_json else "\n".join(map(one_line, lines)))


def merge_lines(report: dict[str, Any]) -> list[str]:
    """What a report says, from its JSON."""
    lines = []
    if report["distance_after"] is not None:
        lines.append(f"weight distance {report['distance_before']:.4g} -> {report['distance_after']:.4g}")
    if report["witness"]:
        lines += wrapped(report["witness"]["sentence"])
    if report["comparison"]:
        lines += [*comparison_lines(report["comparison"]), ""]
    lines += [line for note in report["notes"] for line in wrapped(note)]
    seconds = ", ".join(f"{stage} {s:.1f}" for stage, s in report["seconds"].items())
    if not seconds:  # a run that found its output complete took no stage
        return [*lines, f"{report['output']} is already complete: a {report['model_type']} that the same command made"]
    return [*lines, f"seconds: {seconds}", f"{report['output']} is written"]


def wrapped(sentence: str) -> list[str]:
    """A sentence in lines of at most 80 characters."""
    return textwrap.wrap(sentence, 80, break_long_words=False, break_on_hyphens=False)


def comparison_lines(comparison: dict[str, Any]) -> list[str]:
    """Barriers as they are and, if anything was aligned, aligned, from the JSON of a comparison."""
    rows = [f"{'':10}{'barrier':>10}{'over mean':>12}{'at 1/2':>10}"]
    ways = ("naive",) if comparison["helps"] is None else ("naive", "aligned")
    for name in ways:
        path = comparison[name]
        middle = path["losses"][len(path["losses"]) // 2]
        rows.append(f"{name:10}{path['barrier']:10.4f}{path['barrier_over_mean']:12.4f}{middle:10.4f}")
    ends = f"loss of A {comparison['loss_a']:.4f}, of B {comparison['loss_b']:.4f}"
    return [ends, *rows, *_features(comparison, ways)]


def _features(comparison: dict[str, Any], ways: Sequence[str]) -> list[str]:
    """The mean over all weights of how what they read correlates."""
    found = comparison["features"].values()
    if not found:
        return []
    means = ", ".join(f"{sum(f[way] for f in found) / len(found):.3f} {way}" for way in ways)
    return [f"what weights read correlates {means} (each: --json)"]
