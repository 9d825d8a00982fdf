"""What may go wrong with disks and processes: every run that is killed goes on to the same bytes, and what is damaged
is named."""

from __future__ import annotations

import errno
import json
import random
import resource
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import faults
import pytest
import torch
import yaml
from conftest import MODELS, built, run, save, tiny_vit
from faults import contents
from forks import forked
from safetensors.torch import load_file, save_file

import hf_align
from hf_align.checkpoints.checkpoint import SINGLE, Checkpoint
from hf_align.errors import CheckpointError, OutputError
from hf_align.runtime.saving import save_state, save_tensors

PAIR = [str(MODELS / "llama" / "0"), str(MODELS / "llama" / "1")]
MERGE = ["merge", *PAIR, "--match", "none"]


def killed_at(points: int, out: Path, *arguments: str) -> list[dict[str, object]]:
    ran = forked(faults.main, points, 0, out, list(arguments))
    assert ran.returncode == 0, ran.stderr
    return [json.loads(line) for line in ran.stdout.splitlines()]


def test_killed_at_twenty_points_of_a_plain_merge(tmp_path: Path) -> None:
    found = killed_at(20, tmp_path / "out", "merge", *PAIR, "--match", "none", "--max-shard-size", "200KB")
    assert len(found) == 20 and all(f["killed"] and f["same"] for f in found), found
    assert any(int(f["again"]) < int(f["of"]) for f in found), "no shard was ever kept"  # type: ignore[call-overload]


@pytest.mark.slow
def test_killed_at_twenty_points_of_an_aligned_merge(tmp_path: Path) -> None:
    found = killed_at(20, tmp_path / "out", "merge", *PAIR, "--max-shard-size", "200KB")
    assert len(found) == 20 and all(f["killed"] and f["same"] for f in found), found


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "vit"])
def test_a_recipe_that_is_killed_goes_on(family: str, tmp_path: Path) -> None:
    """mergekit starts again, and our loop, which it leaves a ViT to, goes on; what is all written is refused."""
    models = [{"model": str(MODELS / family / seed), "parameters": {"weight": 0.5}} for seed in "01"]
    recipe = tmp_path / "recipe.yml"
    recipe.write_text(yaml.safe_dump({"merge_method": "linear", "models": models, "dtype": "float32"}))
    found = killed_at(7, tmp_path / "out", "mergekit", str(recipe), "OUT")
    early = [f for f in found if int(f["of"]) - int(f["at"]) > 3]  # type: ignore[call-overload]
    assert len(early) >= 3 and all(f["killed"] and f["same"] for f in early), found


@pytest.mark.parametrize("matching", ["none", "weight"])
def test_a_run_that_is_complete_has_nothing_to_do(
    matching: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    arguments = ("merge", *PAIR, "--match", matching, "-o", out, "--max-shard-size", "1MB")
    assert run(*arguments) == 0
    first, whole, times = capsys.readouterr().out, contents(out), written(out)
    assert run(*arguments) == 0
    again = capsys.readouterr()
    assert again.out == first.split("seconds: ")[0] + f"{out} is already complete: a llama that the same command made\n"
    assert written(out) == times
    assert run(*arguments, "--weight", "0.3") == 2 and "is not empty" in capsys.readouterr().err
    assert run(*arguments, "--overwrite") == 0 and written(out) != times
    assert {k: v for k, v in contents(out).items() if k.endswith(".safetensors")} == {
        k: v for k, v in whole.items() if k.endswith(".safetensors")
    }
    (out / "report.html").write_text("")
    assert run(*arguments) == 0 and "already complete" in capsys.readouterr().out
    (out / "config.json").unlink()
    assert run(*arguments) == 2 and "is this result without its config.json; choose" in capsys.readouterr().err


def written(folder: Path) -> dict[str, int]:
    return {str(p): p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file()}


def test_other_weights_do_not_pass_for_the_complete_ones(tmp_path: Path) -> None:
    """A complete result, begun anew from other inputs, killed: the shards have the sizes that they had."""
    ran = forked(faults.begun_anew_with_another_weight, tmp_path / "out", [*MERGE, "--max-shard-size", "400KB"])
    assert ran.stdout.split() == ["0", "2", "2", "2"], ran.stderr
    assert "started with other inputs or options" in ran.stderr


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    """No file may be larger than half a shard: one line, no half file, and there is room again the run goes on."""
    ran = forked(faults.on_a_full_disk, tmp_path / "out", [*MERGE, "--max-shard-size", "400KB"])
    assert ran.stdout.split() == ["2", "[]", "0", "0"], ran.stdout
    lines = [line for line in ran.stderr.splitlines() if line.startswith("hf-align:")]
    assert len(lines) == 1 and "cannot be written: File too large" in lines[0]
    weights = [{k: v for k, v in contents(tmp_path / n).items() if k.endswith(".safetensors")} for n in ("out", "out2")]
    assert weights[0] == weights[1] and len(weights[0]) > 2


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """A larger one fails as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("write", [save_tensors, save_state])
def test_no_room_for_tensors_is_an_error_of_the_system(write: Callable[..., None], tmp_path: Path) -> None:
    with files_of_at_most(1000), pytest.raises(OSError) as raised:
        write({"x": torch.zeros(1000)}, tmp_path / "x")
    assert raised.value.errno == errno.EFBIG and raised.value.filename == str(tmp_path / "x")


def test_no_room_for_what_is_put_aside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = (save(tmp_path / str(seed), tiny_vit(), seed) for seed in range(2))
    arguments = ("merge", a, b, "--effort", "quick", "--quiet", "-o", tmp_path / "out")
    with files_of_at_most(1000):
        assert run(*arguments) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("hf-align:")]
    assert line.endswith("cannot be written: File too large")
    assert run(*arguments) == 0


def test_an_alignment_in_the_place_of_a_file(tmp_path: Path) -> None:
    found = hf_align.align(built(tiny_vit(), 1), to=built(tiny_vit(), 0), witness=False)
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="file cannot be written"):
        found.save_pretrained(tmp_path / "file")


def test_any_bit_of_a_header(tmp_path: Path) -> None:
    """Whatever bit of a header turns, it is one line or a checkpoint, never another error."""
    (tmp_path / "model").mkdir()
    file = tmp_path / "model" / SINGLE
    save_file(load_file(MODELS / "llama" / "0" / SINGLE), file)
    good, rng, refused = file.read_bytes(), random.Random(0), 0
    length = int.from_bytes(good[:8], "little")
    names = set(Checkpoint.open(tmp_path / "model"))
    for _ in range(400):
        bit = rng.randrange(8 * (8 + length))
        damaged = bytearray(good)
        damaged[bit // 8] ^= 1 << bit % 8
        file.write_bytes(damaged)
        try:
            found = Checkpoint.open(tmp_path / "model")
        except CheckpointError:
            refused += 1
        else:  # a letter of a name
            assert set(found) != names
    assert refused > 200


def test_inputs_that_change_while_a_run_is_killed_are_refused(tmp_path: Path) -> None:
    b = tmp_path / "b"
    shutil.copytree(PAIR[1], b)
    arguments = ["merge", PAIR[0], str(b), "--match", "none", "--max-shard-size", "200KB"]
    ran = forked(faults.while_an_input_changes, tmp_path / "out", arguments, b / SINGLE)
    killed, kept, status, overwritten = ran.stdout.split()
    assert (killed, status, overwritten) == ("True", "2", "0") and int(kept) > 0
    assert "was started with other inputs or options" in ran.stderr and f"{b}/{SINGLE} differs" in ran.stderr
