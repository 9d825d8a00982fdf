"""Merging checkpoints as they are: the arithmetic, the slices, and what is refused."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from conftest import MODELS, run
from safetensors.torch import load_file, save_file
from torch import Tensor

from hf_align.checkpoints.checkpoint import INDEX, SINGLE
from hf_align.errors import CheckpointError
from hf_align.jobs import lacking, plain
from hf_align.jobs.job import Asked
from hf_align.settings.options import Options

LLAMA = MODELS / "llama"
LOW = (torch.bfloat16, torch.float16)
FLOATS = (*LOW, torch.float32, torch.float64)


def model(folder: Path, tensors: dict[str, Tensor]) -> str:
    folder.mkdir()
    save_file(tensors, folder / SINGLE)
    (folder / "config.json").write_text(json.dumps({"model_type": "x", "architectures": ["X"]}))
    return str(folder)


def noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def asked(**changes: object) -> Asked:
    return Asked(Options(**{"match": "none", "quiet": True, "weight": 0.3, **changes}))  # type: ignore[arg-type]


def test_mixes_in_float32_and_rounds_once(tmp_path: Path) -> None:
    """All pairs of dtypes, to all dtypes: the entries of wide sums, not of sums of narrow ones."""
    a = {f"{x} {y}": noise(0, 7, 11).to(x) for x in FLOATS for y in FLOATS}
    b = {f"{x} {y}": noise(1, 7, 11).to(y) for x in FLOATS for y in FLOATS}
    refs = model(tmp_path / "a", a), model(tmp_path / "b", b)
    for dtype in (None, *FLOATS):
        out = tmp_path / str(dtype)
        assert plain.merge(*refs, out, asked(dtype=dtype and str(dtype).removeprefix("torch."))) is not None
        found = load_file(out / SINGLE)
        for name in a:
            wide = torch.float64 if torch.float64 in (a[name].dtype, b[name].dtype) else torch.float32
            exact = torch.lerp(a[name].to(wide), b[name].to(wide), 0.3).to(dtype or a[name].dtype)
            assert torch.equal(found[name], exact) and found[name].dtype == exact.dtype, name


def test_slices_and_threads_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [{str(n): noise(s, n).bfloat16() for n in (0, 1, 99, 100, 101, 5000)} for s in range(2)]
    for t in tensors:
        t["count"] = torch.arange(300)
    refs = model(tmp_path / "a", tensors[0]), model(tmp_path / "b", tensors[1])
    assert plain.merge(*refs, tmp_path / "whole", asked()) is not None
    monkeypatch.setattr(plain, "SLICE", 100)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    assert plain.merge(*refs, tmp_path / "sliced", asked()) is not None
    assert (tmp_path / "sliced" / SINGLE).read_bytes() == (tmp_path / "whole" / SINGLE).read_bytes()
    found = load_file(tmp_path / "sliced" / SINGLE)
    assert torch.equal(
        found["5000"], torch.lerp(tensors[0]["5000"].float(), tensors[1]["5000"].float(), 0.3).bfloat16()
    )
    assert torch.equal(found["count"], torch.arange(300))


@pytest.mark.parametrize("method", ["linear", "slerp"])
def test_the_pipeline_writes_the_same_bytes(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    common = ("merge", LLAMA / "0", LLAMA / "1", "--match", "none", "--method", method, "--max-shard-size", "1MB")
    assert run(*common, "-o", tmp_path / "plain") == 0
    monkeypatch.setattr(plain, "merge", lambda *_, **__: None)
    assert run(*common, "-o", tmp_path / "traced") == 0
    files = sorted(p.name for p in (tmp_path / "plain").iterdir())
    assert INDEX in files and files == sorted(p.name for p in (tmp_path / "traced").iterdir())
    for file in set(files) - {"README.md", "hf-align"}:  # these have the command
        assert (tmp_path / "plain" / file).read_bytes() == (tmp_path / "traced" / file).read_bytes(), file


@pytest.mark.parametrize("more", [[], ["--dry-run"]], ids=["merge", "dry run"])
def test_no_modelling_code_is_loaded(more: list[str], tmp_path: Path) -> None:
    code = f"""
        import sys
        sys.argv = ["hf-align", "merge", {str(LLAMA / "0")!r}, {str(LLAMA / "1")!r}, "-o", {str(tmp_path / "out")!r},
                    "--match", "none", "--quiet", *{more!r}]
        from hf_align.cli.app import main
        try:
            main()
        finally:
            print(*sys.modules)
    """
    loaded = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, capture_output=True, text=True)
    assert "hf_align.jobs.plain" in loaded.stdout.split()
    assert not {"transformers", "scipy", "hf_align.tracing.build"} & set(loaded.stdout.split())


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("weight", [0.0, 0.5, 1.0])
def test_one_bad_entry_is_named(side: int, bad: float, weight: float, tmp_path: Path) -> None:
    tensors = [{"w": noise(s, 50).bfloat16()} for s in range(2)]
    tensors[side]["w"][17] = bad
    refs = model(tmp_path / "a", tensors[0]), model(tmp_path / "b", tensors[1])
    with pytest.raises(CheckpointError, match=r"w in model.safetensors has NaN or infinite"):
        plain.merge(*refs, tmp_path / "out", asked(weight=weight))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("dtype", [None, "float16"])
def test_a_limit_that_neither_model_reaches_stays(dtype: str | None, tmp_path: Path) -> None:
    inf, kept = float("inf"), {"w": noise(0, 50)}
    refs = [model(tmp_path / n, {"most": torch.tensor([inf, -inf, float(i)])} | kept) for i, n in enumerate("ab")]
    plain.merge(*refs, tmp_path / "out", asked(weight=0.5, dtype=dtype))
    assert load_file(tmp_path / "out" / "model.safetensors")["most"].tolist() == [inf, -inf, 0.5]


def test_what_a_dtype_cannot_hold_is_named(tmp_path: Path) -> None:
    refs = [model(tmp_path / n, {"w": torch.full((5,), 1e6)}) for n in "ab"]
    with pytest.raises(CheckpointError, match=r"w has entries that torch.float16 cannot hold"):
        plain.merge(*refs, tmp_path / "out", asked(dtype="float16"))
    common = ("merge", *refs, "-o", tmp_path / "out", "--quiet", "--match", "none")
    assert run(*common, "--dtype", "float16") == 2 and run(*common, "--dtype", "bfloat16") == 0


def test_an_error_in_one_thread_stops_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refs = [model(tmp_path / n, {f"w{i}": noise(i, 100) for i in range(500)}) for n in "ab"]
    tried: list[str] = []

    def entries(self: object, name: str, start: int, stop: int) -> Tensor:
        tried.append(name)
        raise CheckpointError(f"{name} is bad")

    monkeypatch.setattr(plain._Mixing, "entries", entries)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    with pytest.raises(CheckpointError, match="is bad"):
        plain.merge(*refs, tmp_path / "out", asked())
    assert len(tried) <= 4 and not (tmp_path / "out").exists()


def test_checkpoints_of_other_layouts_are_left_to_the_modelling_code(tmp_path: Path) -> None:
    a = model(tmp_path / "a", {"w": noise(0, 4)})
    for i, tensors in enumerate([{"v": noise(0, 4)}, {"w": noise(0, 5)}, {"w": noise(0, 4), "v": noise(0, 4)}]):
        assert plain.merge(a, model(tmp_path / f"b{i}", tensors), tmp_path / "out", asked()) is None
    other = model(tmp_path / "c", {"w": noise(0, 4)})
    (tmp_path / "c" / "config.json").write_text(json.dumps({"model_type": "y"}))
    assert plain.merge(a, other, tmp_path / "out", asked()) is None
    assert not (tmp_path / "out").exists()


MEASURED = """
import sys
from pathlib import Path
from hf_align.cli.app import main
try:
    main()
finally:
    status = Path("/proc/self/status").read_text().splitlines()
    print(next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) * 1024, file=sys.stderr)
"""


def peak(*arguments: object) -> int:
    """The most memory that the command takes in a process of its own, in bytes."""
    command = [sys.executable, "-c", MEASURED, *map(str, arguments)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stderr.splitlines()[-1])


@pytest.mark.parametrize(("field", "more", "status", "said"), [
    ("intermediate_size", 8, 2, "of different sizes"),
    ("num_hidden_layers", 1, 2, "lacks model.layers.3"),
    ("num_hidden_layers", -1, 0, "is made deeper"),
])  # fmt: skip
def test_a_config_that_asks_for_other_weights_than_are_stored_counts(
    field: str, more: int, status: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both models store the same, and entry would belong to entry."""
    shutil.copytree(LLAMA / "1", tmp_path / "b")
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    (tmp_path / "b" / "config.json").write_text(json.dumps(config | {field: config[field] + more}))
    options = ["-o", tmp_path / "out", "-q", "--match", "none", "--method", "linear"]
    assert run("merge", LLAMA / "0", tmp_path / "b", *options) == status
    found = capsys.readouterr()
    assert said in found.out + found.err


@pytest.fixture
def not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a command: modelling code is asked in another process, and nothing is kept."""
    monkeypatch.setattr(lacking, "_LOADED", "nowhere")
    monkeypatch.setenv("HF_ALIGN_CACHE", "off")


@pytest.mark.parametrize(("lost", "gained", "config", "said"), [
    ("lm_head.weight", (), {}, "both models lack lm_head.weight of their architecture"),
    ("model.norm.weight", (), {}, "both models lack model.norm.weight of their architecture"),
    ("layers.1.mlp.up_proj", (), {}, "both models lack model.layers.1.mlp.up_proj.weight of their architecture"),
    ("mlp.down_proj", (), {}, "lack model.layers.0.mlp.down_proj.weight and 2 more weights of their architecture"),
    ("nothing", ("model.extra.weight",), {}, "hold model.extra.weight that their architecture does not have"),
    ("nothing", ("model.rotary_emb.inv_freq",), {}, None),
    ("nothing", (), {"hidden_size": 60}, "other sizes in both models than their config.json says: [512, 128], not"),
    ("nothing", (), {"num_hidden_layers": 4}, "lack model.layers.3.input_layernorm.weight and 8 more weights"),
    ("nothing", (), {"num_hidden_layers": 2}, "hold model.layers.2.input_layernorm.weight and 8 more tensors"),
])  # fmt: skip
def test_what_is_not_the_architecture_of_both_is_named(
    lost: str, gained: tuple[str, ...], config: dict[str, int], said: str | None, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """The result would be loaded with weights that are drawn at random, as both models would, or not at all."""
    for n in "01":
        shutil.copytree(LLAMA / n, tmp_path / n)
        stored = load_file(tmp_path / n / SINGLE) | dict.fromkeys(gained, torch.ones(4))
        save_file({name: t for name, t in stored.items() if lost not in name}, tmp_path / n / SINGLE)
        own = json.loads((tmp_path / n / "config.json").read_text())
        (tmp_path / n / "config.json").write_text(json.dumps({**own, "_name_or_path": n, **config}))
    for again in range(2):  # the second time no modelling code is asked
        options = ["-o", tmp_path / f"out{again}", "-q", "--match", "none", "--method", "linear"]
        with pytest.MonkeyPatch.context() as patch:
            if again:
                patch.setattr(subprocess, "Popen", None)
                patch.setattr(lacking, "_said", None)
            assert run("merge", tmp_path / f"{again}", tmp_path / f"{1 - again}", *options) == 0
        printed = " ".join(capsys.readouterr().out.split())
        assert "architecture" not in printed and "sizes" not in printed if said is None else said in printed


@pytest.mark.usefixtures("not_loaded")
def test_another_process_says_what_is_not_the_architecture(tmp_path: Path) -> None:
    for n in "01":
        shutil.copytree(LLAMA / n, tmp_path / n)
        stored = load_file(tmp_path / n / SINGLE)
        save_file({name: t for name, t in stored.items() if "mlp.down_proj" not in name}, tmp_path / n / SINGLE)
    report = plain.merge(str(tmp_path / "0"), str(tmp_path / "1"), tmp_path / "out", asked())
    assert report is not None and "both models lack model.layers.0.mlp.down_proj.weight" in report.notes[-1]


@pytest.mark.usefixtures("not_loaded")
def test_nothing_is_loaded_from_where_a_command_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch.py").write_text("open('loaded', 'w')")
    monkeypatch.chdir(tmp_path)
    report = plain.merge(str(LLAMA / "0"), str(LLAMA / "1"), tmp_path / "out", asked())
    assert report is not None and not report.notes and not (tmp_path / "loaded").exists()


@pytest.mark.parametrize("where", ["elsewhere", "here"])
def test_who_cannot_be_asked_is_named(where: str, tmp_path: Path, request: pytest.FixtureRequest,
                                      monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    if where == "elsewhere":
        request.getfixturevalue("not_loaded")
        monkeypatch.setattr(lacking, "_ASK", "raise SystemExit(1)")
    else:
        monkeypatch.setenv("HF_ALIGN_CACHE", "off")
        monkeypatch.setattr(lacking, "_said", Mock(side_effect=RecursionError))
    report = plain.merge(str(LLAMA / "0"), str(LLAMA / "1"), tmp_path / "out", asked())
    assert report is not None and "its code cannot be asked" in report.notes[-1]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_of_whole_and_tied_models_nothing_lacks(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = [MODELS / family / n for n in "01"]
    assert run("merge", *pair, "-o", tmp_path / "out", "-q", "--match", "none", "--method", "linear") == 0
    assert "lack" not in capsys.readouterr().out


def test_code_that_cannot_be_loaded_is_named(tmp_path: Path) -> None:
    pair = [model(tmp_path / f"{n}", {"w": noise(n, 4)}) for n in range(2)]
    report = plain.merge(*pair, tmp_path / "out", asked())
    assert report is not None and "its code cannot be loaded" in report.notes[-1]


def test_memory_does_not_grow_with_tensors(tmp_path: Path) -> None:
    """A tensor of 128 MiB takes a few MiB: nothing is held whole, and no page of a file is this process' own."""
    grown = []
    for entries in (2**16, 2**26):
        pair = [model(tmp_path / f"{n}{entries}", {"w": torch.zeros(entries, dtype=torch.bfloat16)}) for n in "ab"]
        grown.append(peak("merge", *pair, "-o", tmp_path / f"o{entries}", "--match", "none", "--quiet"))
    assert grown[1] - grown[0] < 48 * 2**20
