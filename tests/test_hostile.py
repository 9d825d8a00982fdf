"""Whatever a file holds, a command ends with exit status 0 or 2, says one line, and writes nothing at 2."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import MODELS, run
from faults import contents
from hub_server import Hub
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from hf_align.checkpoints.checkpoint import SINGLE
from hf_align.cli.app import main
from hf_align.errors import HfAlignError
from hf_align.running.data import load_data, require_fit
from hf_align.tracing.build import read_config

LLAMA = MODELS / "llama"
QUICK = settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
LONG = settings(QUICK, max_examples=3000)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
NUMBERS = st.integers(-3, 200) | st.sampled_from([10**5, 10**9, 2**63, 2**64, -(2**63)]) | st.floats() | JSON


def refused_or_done(*arguments: object, out: Path | None = None) -> int:
    """The status of a command that is held to all of it."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        status = run(*arguments)
    lines = [line for line in said.getvalue().splitlines() if line.startswith("hf-align: ")]
    assert status in (0, 2), said.getvalue()
    assert len(lines) == (status == 2), said.getvalue()
    assert "fault of hf-align" not in said.getvalue() and "Traceback" not in said.getvalue(), said.getvalue()
    assert status == 0 or out is None or not out.exists()
    return status


@contextlib.contextmanager
def model() -> Iterator[Path]:
    """A copy that may be damaged."""
    with tempfile.TemporaryDirectory() as root:
        shutil.copytree(LLAMA / "0", Path(root) / "model")
        yield Path(root) / "model"


def both(strategy: st.SearchStrategy[Any]) -> Callable[[Callable[[Any], None]], Callable[[], None]]:
    """A few examples in every run, and many in the slow ones."""

    def decorate(check: Callable[[Any], None]) -> Callable[[], None]:
        @pytest.mark.parametrize(
            "how",
            [
                pytest.param(QUICK, id="few"),
                pytest.param(LONG, id="many", marks=[pytest.mark.slow, pytest.mark.timeout(3600)]),
            ],
        )
        def test(how: settings) -> None:
            how(given(strategy)(check))()

        return test  # type: ignore[return-value]

    return decorate


ENTRIES = st.fixed_dictionaries({}, optional={"dtype": st.sampled_from(["F32", "BF16", "I8", "F8_E4M3", "x"]) | JSON,
                                              "shape": st.lists(NUMBERS, max_size=4) | JSON,
                                              "data_offsets": st.lists(NUMBERS, max_size=3) | JSON})  # fmt: skip


@pytest.mark.quick
@both(st.dictionaries(st.sampled_from(["lm_head.weight", "__metadata__", "", "a\nb"]), ENTRIES | JSON, max_size=3))
def test_headers(header: Any) -> None:
    text = json.dumps(header).encode()
    with model() as folder:
        (folder / SINGLE).write_bytes(struct.pack("<Q", len(text)) + text + bytes(64))
        out = folder.parent / "out"
        refused_or_done("merge", folder, LLAMA / "1", "-o", out, "--match", "none", "--quiet", out=out)


@both(JSON | st.fixed_dictionaries({"weight_map": st.dictionaries(st.text(max_size=5), JSON, max_size=3)}))
def test_indexes(index: Any) -> None:
    with model() as folder:
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        out = folder.parent / "out"
        refused_or_done("merge", folder, LLAMA / "1", "-o", out, "--match", "none", "--quiet", out=out)


FIELDS = sorted(json.loads((LLAMA / "0" / "config.json").read_text()))


@pytest.mark.quick
@both(st.dictionaries(st.sampled_from(FIELDS), NUMBERS, min_size=1, max_size=2))
def test_configs(changes: Any) -> None:
    with model() as folder:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **changes}))
        out = folder.parent / "out"
        refused_or_done("merge", folder, LLAMA / "1", "-o", out, "--match", "none", "--quiet", out=out)


@both(st.dictionaries(st.sampled_from(["model", "version", "added_tokens"]), JSON, max_size=3) | JSON)
def test_tokenizers(tokenizer: Any) -> None:
    with model() as folder:
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
        out = folder.parent / "out"
        refused_or_done("merge", folder, folder, "-o", out, "--match", "none", "--quiet", out=out)
        (folder.parent / "text.txt").write_text("a b c " * 200)
        with contextlib.suppress(HfAlignError):
            load_data(folder.parent / "text.txt", folder, read_config(folder))


KEYS = st.sampled_from(["merge_method", "models", "base_model", "align", "slices", "dtype", "parameters"])


@both(st.dictionaries(KEYS, JSON | st.sampled_from(["linear", "ties", "float32"]), max_size=5) | JSON)
def test_recipes(recipe: Any) -> None:
    with tempfile.TemporaryDirectory() as root:
        file, out = Path(root) / "r.yml", Path(root) / "out"
        file.write_text(json.dumps(recipe))
        refused_or_done("mergekit", file, out, "--quiet", out=out)


@both(st.dictionaries(st.sampled_from(["overrides", "a"]), JSON, max_size=2) | JSON)
def test_specs(spec: Any) -> None:
    with tempfile.TemporaryDirectory() as root:
        (Path(root) / "llama.yaml").write_text(json.dumps(spec))
        refused_or_done("spec", LLAMA / "0", "--specs", root, "--quiet", "-o", Path(root) / "found.yaml")


FULL = st.builds(
    lambda shape, value, dtype: torch.full(shape, value).to(dtype), st.lists(st.integers(0, 3), max_size=3),
    st.integers(-200, 2000), st.sampled_from([torch.int64, torch.int32, torch.float32, torch.bool]),
)  # fmt: skip
ARGUMENTS = st.sampled_from(["input_ids", "labels", "attention_mask", "tokens", "pixel_values"])
TENSORS = st.dictionaries(ARGUMENTS, FULL, max_size=3)
LINES = st.lists(st.dictionaries(st.sampled_from(["text", "input_ids", "labels"]), JSON, max_size=2) | JSON, max_size=4)


@both(TENSORS | LINES | st.binary(max_size=40))
def test_data(found: Any) -> None:
    config = read_config(LLAMA / "0")
    with tempfile.TemporaryDirectory() as root:
        if isinstance(found, dict):
            file = Path(root) / "data.safetensors"
            save_file({k: t.contiguous() for k, t in found.items()}, file)
        elif isinstance(found, list):
            file = Path(root) / "data.jsonl"
            file.write_text("\n".join(map(json.dumps, found)))
        else:
            file = Path(root) / "data.txt"
            file.write_bytes(found)
        try:
            data = require_fit(load_data(file, LLAMA / "0", config), file, config)
        except HfAlignError as error:
            assert len(str(error).splitlines()) == 1
        else:
            assert {len(t) for t in data.values()} != {0}


# What is found where a file is expected -------------------------------------------------------------------------------


@pytest.mark.parametrize("data", ["[-1, 2]", "[100000, 2]", "[[], []]", "[[1, 2], [3]]", "1", "[1.5]"])
def test_data_is_checked_before_anything_is_written(data: str, tmp_path: Path) -> None:
    file, out = tmp_path / "d.jsonl", tmp_path / "out"
    file.write_text(f'{{"input_ids": {data}}}\n{{"input_ids": {data}}}\n')
    assert refused_or_done("merge", LLAMA / "0", LLAMA / "1", "-o", out, "--data", file, "--quiet", out=out) == 2


def test_what_nobody_foresaw_is_one_line_that_asks_for_a_report(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise TypeError("a\nb")

    monkeypatch.setattr("hf_align.jobs.plain.merge", broken)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert run("merge", LLAMA / "0", LLAMA / "1", "-o", tmp_path / "out", "--match", "none") == 2
    (line,) = capsys.readouterr().err.splitlines()
    (log,) = tmp_path.glob("hf-align-*.log")
    assert "please report it with" in line and str(log) in line and "Traceback" in log.read_text()
    assert callable(main)


def test_a_download_that_is_not_what_the_hub_states(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.add("org/a", LLAMA / "0")
    hub.add("org/b", LLAMA / "1")
    weights = (LLAMA / "0" / SINGLE).read_bytes()
    served = type(hub).objects if isinstance(getattr(type(hub), "objects", None), dict) else hub.objects

    class Turned(dict):  # type: ignore[type-arg]
        """One bit of the weights, and neither size nor header."""

        def __getitem__(self, key: str) -> bytes:
            found = super().__getitem__(key)
            return found[:-1] + bytes([found[-1] ^ 1]) if found == weights else found

    hub.objects = Turned(served)
    try:
        assert run("merge", "org/a", "org/b", "-o", tmp_path / "out", "--match", "none", "--quiet") == 2
        assert "differs from what the Hub describes" in capsys.readouterr().err
    finally:
        hub.objects = dict(hub.objects)
    assert run("merge", "org/a", "org/b", "-o", tmp_path / "out", "--match", "none", "--quiet") == 0
    assert contents(tmp_path / "out")


def test_data_that_is_one_number(tmp_path: Path) -> None:
    config = read_config(LLAMA / "0")
    with pytest.raises(HfAlignError, match=r"\[examples, …\] are needed"):
        require_fit({"labels": torch.tensor(0)}, tmp_path / "d.safetensors", config)


@pytest.mark.parametrize("kernels", ["eager", "flash_attention_2"])
def test_which_kernels_of_attention_a_config_asks_for_does_not_count(kernels: str, tmp_path: Path) -> None:
    shutil.copytree(LLAMA / "1", tmp_path / "b")
    config = json.loads((tmp_path / "b" / "config.json").read_text())
    (tmp_path / "b" / "config.json").write_text(json.dumps(config | {"_attn_implementation": kernels}))
    for pair in ((LLAMA / "0", tmp_path / "b"), (tmp_path / "b", LLAMA / "0")):
        assert run("merge", *pair, "-o", tmp_path / "out", "-q", "--method", "linear", "--overwrite") == 0


@pytest.mark.parametrize(
    ("name", "damaged"),
    [
        ("llama/model.embed_tokens.weight", (0,)),
        ("llama/lm_head.weight", (1,)),
        ("llama/model.layers.0.input_layernorm.weight", (0, 1)),
        ("gpt2/transformer.h.0.mlp.c_fc.bias", (0, 1)),
    ],
)
def test_entries_whose_products_overflow(
    name: str, damaged: tuple[int, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    family, _, weight = name.partition("/")
    refs = [shutil.copytree(LLAMA.parent / family / str(i), tmp_path / str(i)) for i in range(2)]
    for ref in (refs[i] for i in damaged):
        weights = load_file(ref / SINGLE)
        weights[weight].view(-1)[5] = 3e38
        save_file(weights, ref / SINGLE, {"format": "pt"})
    capsys.readouterr()
    assert run("align", *refs, "-o", tmp_path / "out", "-q") == 2
    said = capsys.readouterr().err.strip()
    assert "products with them overflow" in said
    assert "\n" not in said
    assert not (tmp_path / "out").exists()
