"""Reading damaged checkpoints, and writing shards that survive a kill."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_align.checkpoint import INDEX, SINGLE, Checkpoint, ShardPlan, require_finite, write_shards
from hf_align.errors import CheckpointError, OutputError

TENSORS = {
    "a.weight": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "b.weight": torch.ones(5, dtype=torch.bfloat16),
    "c.steps": torch.tensor([7]),
    "d.weight": torch.randn(4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0)),
}


def plan(size: str = "5GB") -> ShardPlan:
    return ShardPlan.build([(n, tuple(t.shape), t.dtype) for n, t in TENSORS.items()], size)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    write_shards(plan("60"), TENSORS.__getitem__, tmp_path / "model", fingerprint="x")
    return tmp_path / "model"


def read(folder: Path) -> dict[str, torch.Tensor]:
    return {n: t for file in folder.glob("*.safetensors") for n, t in load_file(file).items()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[n], right[n]) for n in left)


@pytest.mark.parametrize(("size", "files"), [("5GB", 1), ("60", 3), ("150", 2)])
def test_what_is_written_is_read(tmp_path: Path, size: str, files: int) -> None:
    write_shards(plan(size), TENSORS.__getitem__, tmp_path, fingerprint="x")
    assert len(list(tmp_path.glob("*.safetensors"))) == files
    assert (tmp_path / INDEX).is_file() == (files > 1)
    assert not (tmp_path / ".hf-align").exists()
    checkpoint = Checkpoint.open(tmp_path)
    assert same(dict(checkpoint), TENSORS)
    assert same(read(tmp_path), TENSORS)
    assert checkpoint.info("b.weight").dtype == torch.bfloat16
    assert checkpoint.info("a.weight").shape == (3, 4)


def test_a_killed_run_goes_on_and_gives_the_same_bytes(tmp_path: Path, sharded: Path) -> None:
    computed: list[str] = []
    output = tmp_path / "again"

    def until(count: int) -> Callable[[str], torch.Tensor]:
        def produce(name: str) -> torch.Tensor:
            if len(computed) == count:
                raise KeyboardInterrupt
            computed.append(name)
            return TENSORS[name]

        return produce

    with pytest.raises(KeyboardInterrupt):
        write_shards(plan("60"), until(2), output, fingerprint="x")
    assert len(list(output.glob("*.safetensors"))) == 1
    write_shards(plan("60"), until(99), output, fingerprint="x")
    assert sorted(computed) == sorted(TENSORS)
    for file in sharded.iterdir():
        assert (output / file.name).read_bytes() == file.read_bytes()


def test_a_run_begun_with_other_inputs_is_refused(tmp_path: Path) -> None:
    def fail(name: str) -> torch.Tensor:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_shards(plan(), fail, tmp_path, fingerprint="x")
    with pytest.raises(OutputError, match="other inputs"):
        write_shards(plan(), TENSORS.__getitem__, tmp_path, fingerprint="y")


def test_a_second_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / ".hf-align").mkdir()
    (tmp_path / ".hf-align" / "plan.json").write_text('{"fingerprint": "x"}')
    with (tmp_path / ".hf-align" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(OutputError, match="another run"):
            write_shards(plan(), TENSORS.__getitem__, tmp_path, fingerprint="x")


def test_a_full_folder_is_refused_unless_overwritten(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "model-00009-of-00009.safetensors").write_bytes(b"old")
    with pytest.raises(OutputError, match="not empty"):
        write_shards(plan(), TENSORS.__getitem__, tmp_path, fingerprint="x")
    write_shards(plan(), TENSORS.__getitem__, tmp_path, fingerprint="x", overwrite=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == [SINGLE, "notes.txt"]


def test_a_wrong_tensor_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="came out as"):
        write_shards(plan(), lambda name: TENSORS[name].reshape(-1), tmp_path, fingerprint="x")


def test_an_unwritable_output_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot be written"):
        write_shards(plan(), TENSORS.__getitem__, tmp_path / "file" / "out", fingerprint="x")


def test_a_small_disk_is_noticed_before_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=10))
    computed: list[str] = []
    with pytest.raises(OutputError, match="GB free"):
        write_shards(plan(), lambda n: computed.append(n) or TENSORS[n], tmp_path, fingerprint="x")  # type: ignore[func-returns-value]
    assert not computed


def test_a_shard_size_must_be_one() -> None:
    with pytest.raises(OutputError, match="no shard size"):
        plan("five")


def damage_missing(folder: Path) -> None:
    next(folder.glob("*.safetensors")).unlink()


def damage_truncated(folder: Path) -> None:
    file = next(folder.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-3])


def damage_header(folder: Path) -> None:
    file = next(folder.glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:8] + b"x" + file.read_bytes()[9:])


def damage_empty(folder: Path) -> None:
    next(folder.glob("*.safetensors")).write_bytes(b"\x00\xff\xff\xff\xff\xff\xff\x7f")


def point_outside(folder: Path) -> None:
    rewrite_index(folder, lambda shard: "../" + shard)


def point_absolute(folder: Path) -> None:
    rewrite_index(folder, lambda shard: "/etc/" + shard)


def promise_more(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["z.weight"] = index["weight_map"]["a.weight"]
    (folder / INDEX).write_text(json.dumps(index))


def rewrite_index(folder: Path, change: Callable[[str], str]) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] = {n: change(s) for n, s in index["weight_map"].items()}
    (folder / INDEX).write_text(json.dumps(index))


def quantise(folder: Path) -> None:
    (folder / "config.json").write_text('{"quantization_config": {"bits": 4}}')


def break_index(folder: Path) -> None:
    (folder / INDEX).write_text("{")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_missing, "missing"),
        (damage_truncated, "truncated"),
        (damage_header, "header"),
        (damage_empty, "truncated"),
        (point_outside, "outside"),
        (point_absolute, "outside"),
        (promise_more, "z.weight"),
        (quantise, "quantised"),
        (break_index, "no safetensors index"),
    ],
)
def test_a_damaged_checkpoint_is_refused(sharded: Path, damage: Callable[[Path], None], message: str) -> None:
    Checkpoint.open(sharded)
    damage(sharded)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(sharded)


def test_pickled_weights_and_no_weights_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="neither"):
        Checkpoint.open(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match="pickled"):
        Checkpoint.open(tmp_path)


def test_an_unknown_dtype_is_refused(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(4).to(torch.float8_e4m3fn)}, tmp_path / SINGLE)
    with pytest.raises(CheckpointError, match="quantised"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_entries_must_be_finite(bad: float) -> None:
    with pytest.raises(CheckpointError, match=r"w in file has NaN"):
        require_finite("w", torch.tensor([1.0, bad]), "file")
