"""Reading and writing checkpoints: every bad input is named, and a killed run ends in the same bytes."""

from __future__ import annotations

import fcntl
import itertools
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from hf_align.checkpoints.checkpoint import INDEX, SINGLE, Checkpoint, require_finite
from hf_align.checkpoints.claim import claimed
from hf_align.checkpoints.plan import ShardPlan
from hf_align.checkpoints.shards import whole, write_shards
from hf_align.errors import CheckpointError, OptionError, OutputError

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8)


def weights() -> dict[str, Tensor]:
    """Every dtype, odd sizes, a scalar and an empty tensor: whatever may upset offsets and alignment."""
    rng = torch.Generator().manual_seed(0)
    floats = {f"float.{d}": torch.randn(3, 5, generator=rng).to(d) for d in FLOATS}
    integers = {f"int.{d}": torch.randint(0, 100, (7,), generator=rng).to(d) for d in INTEGERS}
    odd = {"bool": torch.tensor([True, False, True]), "scalar": torch.tensor(3.5), "empty": torch.zeros(0, 4)}
    return {**odd, **floats, **integers}


def plan_of(tensors: Mapping[str, Tensor], size: str = "5GB") -> ShardPlan:
    return ShardPlan.build([(n, tuple(t.shape), t.dtype) for n, t in tensors.items()], size)


def write(tensors: Mapping[str, Tensor], folder: Path, size: str = "5GB", **options: object) -> None:
    write_all(plan_of(tensors, size), tensors.__getitem__, folder, **options)  # type: ignore[arg-type]


def write_all(
    plan: ShardPlan,
    produce: Callable[[str], Tensor],
    folder: Path,
    *,
    inputs: str = "f",
    overwrite: bool = False,
    progress: Callable[[int], object] | None = None,
) -> None:
    with claimed(folder, {"inputs": inputs}, overwrite=overwrite) as claim:
        write_shards(claim, plan, whole(produce), progress)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)


class Killed(BaseException):
    """As SIGINT: nothing in the program catches it."""


def killed_after(tensors: Mapping[str, Tensor], count: int) -> Callable[[str], Tensor]:
    left = iter(range(count))

    def produce(name: str) -> Tensor:
        if next(left, None) is None:
            raise Killed
        return tensors[name]

    return produce


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A good checkpoint of several shards."""
    write(weights(), tmp_path / "model", size="100")
    return tmp_path / "model"


# Reading ----------------------------------------------------------------------------------------------------------


def test_reads_what_safetensors_wrote(tmp_path: Path) -> None:
    save_file(weights(), tmp_path / SINGLE)
    checkpoint = Checkpoint.open(tmp_path)
    assert set(checkpoint) == set(weights()) and len(checkpoint) == len(weights())
    for name, tensor in weights().items():
        assert same(checkpoint[name], tensor)
        info = checkpoint.info(name)
        assert (info.dtype, info.shape, info.nbytes, info.shard) == (
            tensor.dtype, tuple(tensor.shape), tensor.nbytes, SINGLE)  # fmt: skip
    with pytest.raises(KeyError):
        checkpoint["no such tensor"]


def test_open_reads_headers_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file(weights(), tmp_path / SINGLE)
    read: list[object] = []
    monkeypatch.setattr("os.preadv", lambda *args: read.append(args) or 0)
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.info("scalar").shape == () and not read
    with pytest.raises(CheckpointError, match="the file has become shorter"):
        checkpoint["scalar"]
    assert read


def test_reads_any_part_of_a_tensor(folder: Path) -> None:
    checkpoint, memory = Checkpoint.open(folder), torch.empty(1000, dtype=torch.uint8)
    for name, tensor in weights().items():
        for start, stop in itertools.combinations_with_replacement(range(tensor.numel() + 1), 2):
            assert same(checkpoint.entries(name, start, stop), tensor.reshape(-1)[start:stop])
            assert same(checkpoint.entries(name, start, stop, memory), tensor.reshape(-1)[start:stop])


def test_a_file_that_shrinks_while_it_is_read_is_named(folder: Path) -> None:
    checkpoint = Checkpoint.open(folder)
    shard = folder / checkpoint.info("float.torch.float64").shard
    shard.write_bytes(shard.read_bytes()[:-200])
    with pytest.raises(CheckpointError, match="the file has become shorter"):
        [checkpoint[n] for n in checkpoint if checkpoint.info(n).shard == shard.name]


def test_links_as_in_the_hub_cache_are_followed(tmp_path: Path, folder: Path) -> None:
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for file in folder.iterdir():
        (snapshot / file.name).symlink_to(file)
    assert all(same(Checkpoint.open(snapshot)[n], t) for n, t in weights().items())


SHARD = "model-00002-of-00007.safetensors"


def rewrite(change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda folder: (folder / SHARD).write_bytes(change((folder / SHARD).read_bytes()))


def with_header(text: bytes) -> Callable[[Path], object]:
    return rewrite(lambda _: len(text).to_bytes(8, "little") + text)


def edit_header(folder: Path, change: Callable[[dict[str, object]], object]) -> None:
    """Change what the header says of the first tensor."""
    file = folder / SHARD
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(next(entry for name, entry in header.items() if name != "__metadata__"))
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def edit_index(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def only_pickled(folder: Path) -> None:
    for file in folder.glob("*.*"):
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"pickle")


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "moved tensor": (
        lambda f: edit_header(f, lambda entry: entry.update(data_offsets=[8, 8 + entry["data_offsets"][1]])),
        "overlap or leave gaps",
    ),
    "missing shard": (lambda f: (f / SHARD).unlink(), f"{SHARD} is missing"),
    "truncated data": (rewrite(lambda data: data[:-1]), f"{SHARD} is truncated"),
    "truncated header": (rewrite(lambda data: data[:20]), f"{SHARD} is truncated"),
    "endless header": (rewrite(lambda data: b"\xff" * 8 + data[8:]), f"{SHARD} is truncated"),
    "empty shard": (rewrite(lambda _: b""), f"{SHARD} is truncated"),
    "trailing bytes": (rewrite(lambda data: data + b"x"), f"{SHARD} is damaged"),
    "header not JSON": (with_header(b"{,,}"), f"{SHARD} has no valid safetensors header"),
    "header a list": (with_header(b"[]"), f"{SHARD} has no valid safetensors header"),
    "no offsets": (lambda f: edit_header(f, lambda t: t.pop("data_offsets")), f"{SHARD} has no valid"),
    "shape and bytes differ": (lambda f: edit_header(f, lambda t: t.update(shape=[99])), f"{SHARD} has no valid"),
    "float8": (lambda f: edit_header(f, lambda t: t.update(dtype="F8_E4M3")), f"{SHARD} is stored as F8_E4M3"),
    "absolute path": (lambda f: edit_index(f, lambda m: m.update(scalar="/etc/x")), f"{INDEX} points outside"),
    "path upwards": (lambda f: edit_index(f, lambda m: m.update(scalar="a/../../x")), f"{INDEX} points outside"),
    "tensor not in shard": (lambda f: edit_index(f, lambda m: m.update(new=SHARD)), f"lists new in {SHARD}"),
    "path not text": (lambda f: edit_index(f, lambda m: m.update(scalar=3)), f"{INDEX} has no weight_map"),
    "no weight map": (lambda f: (f / INDEX).write_text("{}"), f"{INDEX} has no weight_map"),
    "index not JSON": (lambda f: (f / INDEX).write_text("{"), f"{INDEX} is not valid JSON"),
    "index a list": (lambda f: (f / INDEX).write_text("[]"), f"{INDEX} does not contain a JSON object"),
    "pickled only": (only_pickled, "pickled weights only; convert them to safetensors"),
    "no weights": (lambda f: [p.unlink() for p in f.iterdir() if p.is_file()], f"has neither {SINGLE} nor {INDEX}"),
    "no folder": (shutil.rmtree, f"has neither {SINGLE} nor {INDEX}"),
    "quantised": (lambda f: (f / "config.json").write_text('{"quantization_config": {"bits": 4}}'), "is quantised"),
    "config not JSON": (lambda f: (f / "config.json").write_bytes(b"\xff"), "config.json is not valid JSON"),
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_checkpoints_are_refused_in_one_line(folder: Path, kind: str) -> None:
    damage, message = DAMAGE[kind]
    assert len(Checkpoint.open(folder)) == len(weights())
    damage(folder)
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(folder)
    assert message in str(caught.value) and str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_tensor_in_two_shards_is_refused(folder: Path) -> None:
    shard = folder / Checkpoint.open(folder).info("scalar").shard
    other = next(file for file in sorted(folder.glob("model-*")) if file != shard)
    save_file(load_file(other) | {"scalar": torch.tensor(3.0)}, other)
    with pytest.raises(CheckpointError, match=f"scalar is stored in .*{other.name}, and in the shard that .* lists"):
        Checkpoint.open(folder)


def test_a_tensor_that_is_listed_in_the_wrong_shard_is_not_said_to_be_in_two(folder: Path) -> None:
    index = json.loads((folder / INDEX).read_text())
    shards = sorted(set(index["weight_map"].values()))
    moved = next(name for name, shard in index["weight_map"].items() if shard == shards[0])
    (folder / INDEX).write_text(json.dumps({**index, "weight_map": {**index["weight_map"], moved: shards[-1]}}))
    with pytest.raises(CheckpointError, match=f"lists {moved} in {shards[-1]}, which does not contain it"):
        Checkpoint.open(folder)


def test_a_file_of_its_own_is_read_as_transformers_does_and_no_index_beside_it(folder: Path) -> None:
    save_file({"scalar": torch.tensor(3.0)}, folder / SINGLE)
    assert dict(Checkpoint.open(folder)) == {"scalar": torch.tensor(3.0)}


def test_an_unquantised_config_may_say_so(folder: Path) -> None:
    (folder / "config.json").write_text('{"quantization_config": null}')
    assert len(Checkpoint.open(folder)) == len(weights())


def test_a_shard_that_goes_away_after_open_is_named(folder: Path) -> None:
    checkpoint = Checkpoint.open(folder)
    shard = checkpoint.info("scalar").shard
    (folder / shard).unlink()
    with pytest.raises(CheckpointError, match=f"scalar cannot be read from .*{shard}"):
        checkpoint["scalar"]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", FLOATS)
def test_one_bad_entry_is_named(bad: float, dtype: torch.dtype) -> None:
    tensor = torch.ones(3, 4, dtype=dtype)
    assert require_finite("w", tensor, "a.safetensors") is tensor
    tensor[1, 2] = bad
    with pytest.raises(CheckpointError, match=r"w in a\.safetensors has NaN or infinite"):
        require_finite("w", tensor, "a.safetensors")


def test_digests_tell_other_files_apart(tmp_path: Path, folder: Path) -> None:
    before = Checkpoint.open(folder).digests
    assert Checkpoint.open(folder).digests == before and len(before) == 7
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)  # same names, sizes and times
    assert Checkpoint.open(copy).digests != before
    write({n: t + 1 if t.dtype == torch.float32 else t for n, t in weights().items()}, folder, "100", overwrite=True)
    assert Checkpoint.open(folder).digests != before


# Planning and writing ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", ["5GB", "100"])
def test_safetensors_reads_what_was_written(tmp_path: Path, size: str) -> None:
    write(weights(), tmp_path / "out", size)
    shards = [load_file(file) for file in (tmp_path / "out").glob("*.safetensors")]
    read = {name: tensor for shard in shards for name, tensor in shard.items()}
    assert sum(map(len, shards)) == len(read) and read.keys() == weights().keys()
    assert all(same(read[n], t) for n, t in weights().items())
    assert not (tmp_path / "out" / ".hf-align").exists()


def test_one_shard_has_the_bytes_of_safetensors_own_writer(tmp_path: Path) -> None:
    tensors = {n: t for n, t in weights().items() if t.dtype == torch.float32}
    write(tensors, tmp_path / "out")
    save_file(tensors, tmp_path / "theirs", {"format": "pt"})
    assert (tmp_path / "out" / SINGLE).read_bytes() == (tmp_path / "theirs").read_bytes()


def test_every_tensor_is_aligned_to_its_dtype() -> None:
    """So that readers can map it into memory without a copy, whatever the length of the names before it."""
    for length in range(8):
        (shard,) = plan_of({f"{name}{'_' * length}": t for name, t in weights().items()}).shards
        start = len(shard.header)
        entries = json.loads(shard.header[8:])
        assert start % 8 == 0
        for name, _, dtype in shard.tensors:
            assert (start + entries[name]["data_offsets"][0]) % dtype.itemsize == 0


def test_shards_keep_to_their_size_and_the_index_to_the_layout() -> None:
    tensors = {f"layer.{i}": torch.zeros(100) for i in range(10)}
    plan = plan_of({**tensors, "large": torch.zeros(1000)}, "1KB")
    assert [s.file for s in plan.shards] == [f"model-{i:05}-of-00006.safetensors" for i in range(1, 7)]
    assert all(s.nbytes <= 1000 or len(s.tensors) == 1 for s in plan.shards)
    assert plan.nbytes == 4 * 2000
    assert plan.index()["metadata"] == {"total_size": 8000}
    assert plan.index()["weight_map"].keys() == {*tensors, "large"}


@pytest.mark.parametrize(("size", "count"), [("4KB", 1), ("0.004MB", 1), ("4 kb", 1), ("2000", 2), ("2KB", 2)])
def test_sizes(size: str, count: int) -> None:
    assert len(plan_of({"a": torch.zeros(500), "b": torch.zeros(500)}, size).shards) == count


@pytest.mark.parametrize("size", ["", "GB", "five", "5GiB", "-5GB", "1e3"])
def test_sizes_that_are_none(size: str) -> None:
    with pytest.raises(OptionError, match="is not a shard size"):
        plan_of({}, size)


def test_tensors_are_written_as_they_come(tmp_path: Path) -> None:
    """Strided views and parameters, as `produce` may well return."""
    square = torch.arange(12.0).reshape(3, 4)
    made = {"strided": square.T, "every second": square.flatten()[::2], "parameter": torch.nn.Parameter(square)}
    write(made, tmp_path / "out")
    read = load_file(tmp_path / "out" / SINGLE)
    assert all(torch.equal(read[name], tensor) for name, tensor in made.items())


@pytest.mark.parametrize("wrong", [torch.zeros(4, 3), torch.zeros(3, 4, dtype=torch.float16)])
def test_a_tensor_that_is_not_as_planned_is_refused(tmp_path: Path, wrong: Tensor) -> None:
    with pytest.raises(OutputError, match=r"w came out as .* planned \[3, 4\] torch.float32"):
        write_all(plan_of({"w": torch.zeros(3, 4)}), lambda _: wrong, tmp_path / "out")
    assert not (tmp_path / "out" / SINGLE).exists()


def test_one_tensor_at_a_time_and_no_file_before_it_is_whole(tmp_path: Path) -> None:
    """Bytes reach the disk tensor by tensor, and a final name is never that of a part."""
    tensors, out = {str(i): torch.randn(3_000) for i in range(4)}, tmp_path / "out"
    written: list[int] = []

    def produce(name: str) -> Tensor:
        assert not (out / SINGLE).exists()
        content = (out / ".hf-align" / SINGLE).read_bytes()
        written.append(sum(tensor.numpy().tobytes() in content for tensor in tensors.values()))
        return tensors[name]

    steps: list[int] = []
    write_all(plan_of(tensors), produce, out, progress=steps.append)
    assert written == [0, 1, 2, 3]
    assert sum(steps) == plan_of(tensors).nbytes and len(steps) == 5


# Runs that stop, and folders that are taken -----------------------------------------------------------------------


@pytest.mark.parametrize("stop", [0, 1, 4, 8, 14])
def test_a_killed_run_resumes_to_the_same_bytes(tmp_path: Path, stop: int) -> None:
    tensors, plan = weights(), plan_of(weights(), "100")
    write(tensors, tmp_path / "whole", "100")
    out = tmp_path / "out"
    with pytest.raises(Killed):
        write_all(plan, killed_after(tensors, stop), out)
    done = [s for s in plan.shards if (out / s.file).exists()]
    produced: list[str] = []
    steps: list[int] = []
    write_all(plan, lambda n: produced.append(n) or tensors[n], out, progress=steps.append)  # type: ignore[func-returns-value]
    assert contents(out) == contents(tmp_path / "whole")
    assert len(produced) == len(tensors) - sum(len(s.tensors) for s in done)
    assert sum(steps) == plan.nbytes
    if stop >= 8:
        assert done


def test_a_shard_that_does_not_fit_the_plan_is_written_again(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(Killed):
        write_all(plan_of(weights(), "100"), killed_after(weights(), 14), out)
    kept = out / plan_of(weights(), "100").shards[0].file
    kept.write_bytes(kept.read_bytes()[:-1])
    write(weights(), out, "100")
    assert len(Checkpoint.open(out)) == len(weights())


def test_shards_of_other_inputs_are_never_kept(tmp_path: Path) -> None:
    """Same names, shapes and sizes: only the fingerprint tells them apart."""
    old, new = ({n: torch.full((30,), v) for n in "abc"} for v in (1.0, 2.0))
    out = tmp_path / "out"
    with pytest.raises(Killed):
        write_all(plan_of(old, "120"), killed_after(old, 2), out, inputs="old")
    before = contents(out)
    with pytest.raises(OutputError, match="was started with other inputs or options; choose another -o"):
        write(new, out, "120", inputs="new")
    assert contents(out) == before
    write(new, out, "120", inputs="new", overwrite=True)
    assert all(torch.equal(Checkpoint.open(out)[n], t) for n, t in new.items())


def test_what_is_put_aside_serves_the_same_run_only(tmp_path: Path) -> None:
    """Also before a shard is begun; a run that comes to its end leaves nothing of it."""
    out = tmp_path / "out"
    with pytest.raises(Killed), claimed(out, {"inputs": "old"}) as claim:
        claim.keep("found", lambda path: path.write_text("what took long"))
        raise Killed
    with claimed(out, {"inputs": "new"}) as claim:
        assert claim.kept("found") is None
    assert not claim.work.exists()
    with pytest.raises(Killed), claimed(out, {"inputs": "old"}, overwrite=True) as claim:
        claim.keep("found", lambda path: path.write_text("what took long"))
        raise Killed
    with claimed(out, {"inputs": "old"}, overwrite=True) as claim:
        kept = claim.kept("found")
        assert kept is not None and kept.read_text() == "what took long"
    assert not claim.work.exists()


def test_overwriting_leaves_no_weights_of_the_old_model(folder: Path) -> None:
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(OutputError, match="is not empty; choose another -o"):
        write({"w": torch.ones(2)}, folder, inputs="other")
    assert len(Checkpoint.open(folder)) == len(weights())
    write({"w": torch.ones(2)}, folder, inputs="other", overwrite=True)
    assert {p.name for p in folder.iterdir()} == {SINGLE, "notes.txt", "hf-align"}


def test_bad_weights_leave_nothing_behind(tmp_path: Path) -> None:
    tensors = {n: torch.full((30,), v) for n, v in {"a": 1.0, "b": 2.0, "c": float("nan")}.items()}
    with pytest.raises(CheckpointError, match="c in x has NaN"):
        write_all(plan_of(tensors, "120"), lambda n: require_finite(n, tensors[n], "x"), tmp_path / "out",
                     )  # fmt: skip
    assert not (tmp_path / "out").exists()


def test_no_room_is_said_before_anything_is_computed(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=300))
    before = contents(folder)
    large = {"w": torch.zeros(10_000)}
    for out, options in ((tmp_path / "new", {}), (folder, {"overwrite": True})):
        with pytest.raises(OutputError, match=r"has 300 bytes free, but [34]\d\.\d\d KB are"):
            write_all(plan_of(large), killed_after(large, 0), out, **options)
    assert not (tmp_path / "new").exists()
    assert contents(folder) == before
    write({"w": torch.zeros(200)}, folder, overwrite=True)  # more than is free, less than is freed


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "out"):
        with pytest.raises(OutputError, match=f"{out} cannot be written"):
            write_all(plan_of(weights()), killed_after({}, 0), out)


def test_two_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    out = tmp_path / "out"

    def produce(name: str) -> Tensor:
        with pytest.raises(OutputError, match="another run is writing to"):
            write(weights(), out, overwrite=True)
        return weights()[name]

    write_all(plan_of(weights()), produce, out)
    assert len(Checkpoint.open(out)) == len(weights())


def test_the_lock_is_gone_with_its_run(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(Killed):
        write_all(plan_of(weights()), killed_after(weights(), 3), out)
    with (out / ".hf-align" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_transformers_loads_a_sharded_llama(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=11, hidden_size=8, intermediate_size=6, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=16,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    out = tmp_path / "out"
    write(model.state_dict(), out, "1KB")
    config.save_pretrained(out)
    assert (out / INDEX).is_file() and len(list(out.glob("model-*.safetensors"))) > 2
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert all(torch.equal(loaded.state_dict()[n], t) for n, t in model.state_dict().items())
