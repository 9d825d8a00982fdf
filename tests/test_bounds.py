"""Nothing believed: what a few bytes say is held against what is there before anything is done with it."""

from __future__ import annotations

import json
import shutil
import struct
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from conftest import MODELS, run
from hub_server import Hub
from safetensors.torch import save_file

from hf_align.checkpoints import hub as hub_client
from hf_align.checkpoints.checkpoint import SINGLE, Checkpoint
from hf_align.errors import CheckpointError, HfAlignError, IncompatibleModels
from hf_align.settings.plain_yaml import read_yaml
from hf_align.tracing.budget import Budget, within

LLAMA = MODELS / "llama"


def with_header(path: Path, header: bytes, data: bytes = b"\0" * 16, length: int | None = None) -> Path:
    path.mkdir(exist_ok=True)
    size = len(header) if length is None else length
    (path / SINGLE).write_bytes(struct.pack("<Q", size) + header + data)
    return path


def entry(shape: str, dtype: str = '"F32"', offsets: str = "[0, 16]") -> str:
    return f'{{"dtype": {dtype}, "shape": {shape}, "data_offsets": {offsets}}}'


@pytest.mark.parametrize(
    "header",
    [
        *(f'{{"w": {entry(shape)}}}' for shape in ("[4.0]", "[-2, -2]", "[2.5]", "[true, 4]", '["4"]', "[[4]]", "4",
                                                    "null", "[1e0, 4]", "[4, 1000000000000000000000]", "{}")),
        *(f'{{"w": {entry("[4]", offsets=o)}}}' for o in ("[0.0, 16]", "[16, 0]", "[-16, 0]", "[0]", "16", "[0, 17]",
                                                          "[0, 1e400]", "[1, 17]")),
        *(f'{{"w": {entry("[4]", dtype=d)}}}' for d in ("[]", "{}", "null", "7", '"F33"')),
        f'{{"w": {entry("[4]")}, "w": {entry("[4]")}}}',
        '{"w": {"dtype": "F32", "dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}',
        "[" * 100_000, '{"a":' * 100_000, "[]", "null", "", '{"w": 3}', '{"__metadata__": 3, "w": []}', "\udcff",
    ],
)  # fmt: skip
def test_headers_that_are_none(header: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError):
        Checkpoint.open(with_header(tmp_path / "m", header.encode("utf-8", "surrogateescape")))


def test_a_header_is_read_only_if_it_is_of_a_size_that_safetensors_writes(tmp_path: Path) -> None:
    """The file is as large as its header says, and sparse: nothing of it is read."""
    folder = with_header(tmp_path / "m", b"", length=4 << 30)
    with (folder / SINGLE).open("r+b") as file:
        file.truncate(5 << 30)
    began = time.process_time()
    with pytest.raises(CheckpointError, match="its header has an impossible size"):
        Checkpoint.open(folder)
    assert time.process_time() - began < 1


def changed(tmp_path: Path, family: str = "llama", **changes: object) -> Path:
    folder = tmp_path / "changed"
    shutil.copytree(MODELS / family / "0", folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


SIZES = [("llama", "hidden_size", 10**9), ("llama", "num_hidden_layers", 10**5), ("llama", "num_hidden_layers", 10**9),
         ("llama", "head_dim", 10**9), ("llama", "vocab_size", 10**15), ("gpt2", "n_positions", 10**6),
         ("gpt2", "n_layer", 10**5), ("vit", "image_size", 10**6), ("bert", "num_hidden_layers", 10**6),
         ("llama", "hidden_size", -8), ("llama", "hidden_size", 0), ("llama", "num_attention_heads", 0),
         ("llama", "hidden_size", "64"), ("llama", "hidden_size", 64.5), ("llama", "vocab_size", None),
         ("llama", "num_hidden_layers", [3])]  # fmt: skip


@pytest.mark.parametrize(("family", "key", "value"), SIZES)
@pytest.mark.parametrize("command", ["merge", "spec"])
def test_configs_are_held_against_the_weights_before_anything_is_built(
    command: str, family: str, key: str, value: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, began = changed(tmp_path, family, **{key: value}), time.process_time()
    merging = ("merge", model, MODELS / family / "1", "-o", tmp_path / "out", "--quiet")
    if command == "spec" and (key, value) in (("n_positions", 10**6), ("hidden_size", 0)):
        assert run("spec", model, "--quiet") == 0  # symmetries of another size, which is no fault
        return
    assert run(*(merging if command == "merge" else (command, model, "--quiet"))) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1 and not (tmp_path / "out").exists()
    assert time.process_time() - began < 30


def test_a_budget_counts_what_is_made(tmp_path: Path) -> None:
    with within(Budget.of_stored(10, 1000), "x"):
        torch.empty(1000, 60, device="meta")
        torch.arange(2**20)
    with (
        pytest.raises(IncompatibleModels, match=r"asks for far more"),
        within(Budget(5, 1, ""), "x"),
    ):
        torch.zeros(2)
    with pytest.raises(IncompatibleModels), within(Budget(5, 10**20, ""), "x"):
        torch.arange(10**12)
    with pytest.raises(IncompatibleModels), within(Budget(5, 10**20, ""), "x"):
        [None] * 10**10
    torch.arange(5)


# YAML -----------------------------------------------------------------------------------------------------------------

BOMB = "\n".join(["a0: &a0 [x, x]", *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 30))])


@pytest.mark.parametrize(
    "text", [BOMB, "[" * 10_000, "- " * 5_000, "a: &a [*a]", "a: &a {b: *a}", "x: 2001-99-99", "{[1]: 2}", "a: *b",
             "\x00", "!!python/object/apply:os.system [ls]", "a: 1\n\tb: 2", "#" * 2_000_000, "? [a]\n: b"]
)  # fmt: skip
def test_yaml_that_stands_for_more_than_anyone_writes(text: str, tmp_path: Path) -> None:
    file = tmp_path / "r.yml"
    file.write_text(text)
    with pytest.raises(HfAlignError):
        read_yaml(file)
    assert run("mergekit", file, tmp_path / "out") == 2 and not (tmp_path / "out").exists()


def test_a_key_that_is_given_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "r.yml").write_text("models: [{model: a, model: b}]\nalign: true\nalign: false\n")
    with pytest.raises(HfAlignError, match="gives align twice, again in line 3"):
        read_yaml(tmp_path / "r.yml")
    (tmp_path / "r.yml").write_text("models: [{model: a, model: b}, {model: a}]\nalign: true\n")
    with pytest.raises(HfAlignError, match="gives model twice, again in line 1"):
        read_yaml(tmp_path / "r.yml")


def test_yaml_as_people_write_it(tmp_path: Path) -> None:
    (tmp_path / "r.yml").write_text("a: &a {x: [1, 2]}\nb: *a\nc: [*a, *a]\n")
    found = read_yaml(tmp_path / "r.yml")
    assert found["b"] == found["a"] == found["c"][1] == {"x": [1, 2]}


# Servers --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def silent() -> Any:
    """A server that takes every request, and never answers."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            time.sleep(5)

        do_HEAD = do_POST = do_GET  # noqa: N815

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def test_no_request_waits_for_ever(silent: str, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_client, "_SILENCE", 0.2)
    hub_client._limit_time.cache_clear()
    try:
        hub_client._limit_time()
        began = time.monotonic()
        with pytest.raises(HfAlignError), hub_client.plain_errors("org/a"):
            hub_client.retrying(lambda: hub_client.HfApi(endpoint=silent).model_info("org/a"))
        assert time.monotonic() - began < 20
    finally:
        monkeypatch.undo()
        hub_client._limit_time.cache_clear()


@pytest.mark.parametrize("size", ["*", "", "x", "-1"])
def test_a_server_that_says_no_size(
    size: str, hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_file({"w": torch.zeros(4)}, tmp_path / "w.safetensors")

    class Answer:
        headers: ClassVar = {"Content-Range": f"bytes */{size}"}
        content = (tmp_path / "w.safetensors").read_bytes()

        def raise_for_status(self) -> None: ...

    answer: Callable[..., Answer] = lambda *_, **__: Answer()  # noqa: E731
    monkeypatch.setattr(hub_client, "http_backoff", answer)
    monkeypatch.setattr(hub_client, "hf_raise_for_status", lambda _: None)
    start, found = hub_client.HubShards("org/a", "0" * 40).head(SINGLE)
    assert found == len(start)
