"""Models from the Hub: the real client, over TCP, against the small server of hub_server.py."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import MODELS, run, tiny_llama
from hub_server import Fault, Hub
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from hf_align.checkpoints import hub as hub_module
from hf_align.checkpoints.checkpoint import Checkpoint
from hf_align.checkpoints.hub import resolve
from hf_align.errors import CheckpointError, HfAlignError
from hf_align.opening.pairs import open_pair

LLAMA = MODELS / "llama"


@pytest.fixture(autouse=True)
def two_models(hub: Hub, tmp_path: Path) -> None:
    """Two small models, sharded, as folders and on the Hub."""
    for seed, name in enumerate("ab"):
        torch.manual_seed(seed)
        folder = tmp_path / name
        LlamaForCausalLM(tiny_llama(num_hidden_layers=3)).save_pretrained(folder, max_shard_size="2KB")
        (folder / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
        (folder / "training_args.bin").write_bytes(b"pickle")
        (folder / "onnx").mkdir()
        (folder / "onnx" / "config.json").write_text("{}")
        hub.add(f"org/{name}", folder)


def cached(tmp_path: Path) -> set[str]:
    """The files in the cache."""
    return {p.name for p in (tmp_path / "cache").rglob("snapshots/*/*")}


def blobs(tmp_path: Path) -> int:
    return sum(p.stat().st_size for p in (tmp_path / "cache").rglob("blobs/*"))


def test_a_folder_wins_over_a_repository(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("org/a").mkdir(parents=True)
    Path("org/a/config.json").write_text("{}")
    assert resolve("org/a").folder == Path("org/a")
    assert not hub.requests


def test_only_what_is_small_is_fetched(hub: Hub, tmp_path: Path) -> None:
    source = resolve("org/a")
    assert cached(tmp_path) == {"config.json", "generation_config.json", "model.safetensors.index.json", "README.md"}
    assert source.commit == hub.repositories["org/a"].at("main").oid
    assert source.repository == "org/a"


def test_what_stands_behind_a_model_is_fetched_with_it(hub: Hub, tmp_path: Path) -> None:
    """The folders that modules.json names, not others."""
    folder = tmp_path / "a"
    (folder / "modules.json").write_text('[{"path": ""}, {"path": "1_Dense"}]')
    (folder / "1_Dense").mkdir()
    (folder / "1_Dense" / "config.json").write_text("{}")
    save_file({"linear.weight": torch.ones(1)}, folder / "1_Dense" / "model.safetensors")
    hub.add("org/embeds", folder)
    found = resolve("org/embeds").folder
    assert {p.relative_to(found).as_posix() for p in found.glob("*/*")} == {
        "1_Dense/config.json", "1_Dense/model.safetensors"}  # fmt: skip


def test_headers_are_read_by_ranges_and_shards_when_they_are_reached(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(hub_module, "_HEADER", 1500)
    source = resolve("org/a")
    checkpoint = Checkpoint.open(source.folder, source.shards)
    shards = {checkpoint.info(name).shard for name in checkpoint}
    assert len(shards) > 2 and not cached(tmp_path) & shards
    asked = [(path, given) for path, given in hub.ranges if path in shards]
    assert sorted(path for path, _ in asked) == sorted(shards)
    assert all(given == "bytes=0-1499" for _, given in asked)
    local = load_file(tmp_path / "a" / checkpoint.info("model.norm.weight").shard)
    assert torch.equal(checkpoint["model.norm.weight"], local["model.norm.weight"])
    assert cached(tmp_path) & shards == {checkpoint.info("model.norm.weight").shard}


def test_a_header_longer_than_the_first_range(hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(hub_module, "_HEADER", 16)
    source = resolve("org/a")
    assert set(Checkpoint.open(source.folder, source.shards)) == set(Checkpoint.open(tmp_path / "a"))


@pytest.mark.parametrize("revision", ["v1", "refs/pr/1", "commit"])
@pytest.mark.parametrize("scheme", ["", "hf://"])
def test_revisions(hub: Hub, revision: str, scheme: str) -> None:
    files = dict(hub.files("org/a"))
    config = json.loads(files["config.json"])
    files["config.json"] = json.dumps({**config, "rms_norm_eps": 0.25}).encode()
    hub.repositories["org/a"].branch("v1" if revision == "commit" else revision, files)
    if revision == "commit":
        revision = hub.repositories["org/a"].at("v1").oid
    source = resolve(f"{scheme}org/a@{revision}")
    assert json.loads((source.folder / "config.json").read_text())["rms_norm_eps"] == 0.25
    assert json.loads((resolve("org/a").folder / "config.json").read_text())["rms_norm_eps"] != 0.25


def test_offline_the_cache_is_enough(hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = resolve("org/a")
    checkpoint = Checkpoint.open(source.folder, source.shards)
    for name in checkpoint:
        checkpoint[name]
    hub.requests.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    again = resolve("org/a")
    offline = Checkpoint.open(again.folder, again.shards)
    assert all(torch.equal(offline[name], checkpoint[name]) for name in checkpoint)
    assert not hub.requests
    shutil.rmtree(tmp_path / "cache")
    with pytest.raises(HfAlignError, match="cannot be reached"):
        resolve("org/a")


def test_offline_a_shard_that_is_not_in_the_cache(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    resolve("org/a")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    source = resolve("org/a")
    with pytest.raises(HfAlignError, match="cannot be reached"):
        Checkpoint.open(source.folder, source.shards)


@pytest.mark.parametrize(
    ("reference", "token", "message"),
    [
        ("org/none", "hf_alice", "org/none is not a folder or an accessible repository on the Hub"),
        ("org/a@v9", "hf_alice", "org/a has no revision v9"),
        ("lab/gated", "hf_bob", "lab/gated is gated; accept its terms on the Hub and log in"),
        ("lab/gated", "", "lab/gated is gated; accept its terms on the Hub and log in"),
        ("lab/private", "hf_bob", "is not a folder or an accessible repository on the Hub"),
        ("./no/such/folder", "", "neither a folder nor a Hub id"),
        ("org/a", "hf_expired", "the Hub rejects this token; log in again (hf auth login), or unset HF_TOKEN"),
    ],
)
def test_what_the_hub_refuses_is_one_line(
    hub: Hub, reference: str, token: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("lab/gated", dict(hub.files("org/a")), gated=True)
    hub.add("lab/private", dict(hub.files("org/a")), private=True)
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(HfAlignError, match=re.escape(message)) as caught:
        resolve(reference)
    assert "\n" not in str(caught.value)


def test_with_a_token_private_and_gated_models_open(hub: Hub) -> None:
    hub.add("lab/gated", dict(hub.files("org/a")), gated=True)
    hub.add("lab/private", dict(hub.files("org/b")), private=True)
    assert len(open_pair("lab/gated", "lab/private").a.checkpoint) > 0


@pytest.mark.parametrize(
    "fault",
    [
        Fault("GET /api/models/org/a/tree", 429, headers={"Retry-After": "0"}),
        Fault("GET /api/models/org/a", 503),
        Fault("GET /api/models/org/a", None),
        Fault("HEAD .*config.json", 500),
        Fault("GET .*config.json", None),
        Fault("GET /cdn/", 429, headers={"Retry-After": "0"}),
        Fault("GET /cdn/", None, 2),
        Fault("HEAD .*safetensors$", None),
        Fault("HEAD .*safetensors$", 502),
    ],
    ids=lambda fault: f"{fault.pattern} {fault.status}",
)
def test_rate_limits_and_broken_connections_are_tried_again(hub: Hub, fault: Fault) -> None:
    hub.faults.append(fault)
    source = resolve("org/a")
    checkpoint = Checkpoint.open(source.folder, source.shards)
    assert all(bool(torch.isfinite(checkpoint[name]).all()) for name in checkpoint)
    assert fault.times == 0


def test_a_hub_that_stays_out_of_order_is_one_line(hub: Hub) -> None:
    hub.faults.append(Fault("GET /api/models/org/a", 429, 99, {"Retry-After": "0"}))
    with pytest.raises(HfAlignError, match=r"the Hub refused org/a: .*429"):
        resolve("org/a")
    assert hub.faults[0].times < 98


@pytest.mark.parametrize("reference", ["", "+org/a", "org/a+"])
def test_no_name_is_no_model(hub: Hub, reference: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(hub.files("org/a")["config.json"])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(HfAlignError, match="the name of a model is empty"):
        resolve(reference)


def test_a_hub_that_is_not_there_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert run("spec", "org/a") == 2
    said = capsys.readouterr().err.strip()
    assert said == "hf-align: org/a is not a folder and not in the cache, and the Hub cannot be reached"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"pytorch_model.bin": b"x"}, "^org/c has pickled weights only"),
        ({"pytorch_model.bin.index.json": b"{}"}, "^org/c has pickled weights only"),
        ({}, "^org/c has neither model.safetensors nor"),
        ({"model.safetensors": b"x" * 200}, "truncated or not a safetensors file"),
    ],
)
def test_repositories_without_usable_weights(hub: Hub, files: dict[str, bytes], message: str) -> None:
    hub.add("org/c", {"config.json": hub.files("org/a")["config.json"], **files})
    source = resolve("org/c")
    with pytest.raises(CheckpointError, match=message):
        Checkpoint.open(source.folder, source.shards)


def test_a_repository_without_a_config_is_called_by_its_name(hub: Hub) -> None:
    hub.add("org/c", {"README.md": b"# nothing yet"})
    with pytest.raises(CheckpointError, match=r"^org/c has no config\.json$"):
        resolve("org/c")


def test_a_shard_that_was_cut_off_when_it_was_uploaded(hub: Hub) -> None:
    files = dict(hub.files("org/a"))
    shard = next(name for name in files if name.endswith(".safetensors"))
    hub.add("org/c", {**files, shard: files[shard][:-8]})
    source = resolve("org/c")
    with pytest.raises(CheckpointError, match="truncated"):
        Checkpoint.open(source.folder, source.shards)


# Dropping what was read --------------------------------------------------------------------------------------------


def test_shards_are_dropped_once_they_are_read(hub: Hub, tmp_path: Path) -> None:
    source = resolve("org/a")
    small = blobs(tmp_path)
    checkpoint = Checkpoint.open(source.folder, source.shards)
    checkpoint.drop_when_read(list(checkpoint))
    by_shard = sorted(checkpoint, key=lambda name: checkpoint.info(name).shard)
    read = {}
    for name in by_shard:
        read[name] = checkpoint[name]
        assert len([f for f in cached(tmp_path) if f.endswith(".safetensors")]) <= 1
    assert blobs(tmp_path) == small
    local = Checkpoint.open(tmp_path / "a")
    assert all(torch.equal(read[name], local[name]) for name in local)


def test_a_dropped_shard_is_fetched_again(hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("hf_align.checkpoints.checkpoint._SMALL", 100)
    source = resolve("org/a")
    checkpoint = Checkpoint.open(source.folder, source.shards)
    checkpoint.drop_when_read(list(checkpoint))
    for _ in range(2):
        for name in checkpoint:
            checkpoint[name]
        assert not any(f.endswith(".safetensors") for f in cached(tmp_path))
    shards = {checkpoint.info(name).shard for name in checkpoint}
    assert hub.count("GET /cdn/.*") == 3 * len(shards)  # the header, and twice the whole


def test_a_gain_is_not_fetched_again(hub: Hub, tmp_path: Path) -> None:
    source = resolve("org/a")
    checkpoint = Checkpoint.open(source.folder, source.shards)
    checkpoint.drop_when_read(list(checkpoint))
    for name in checkpoint:
        checkpoint[name]
    hub.requests.clear()
    assert torch.equal(checkpoint["model.norm.weight"], Checkpoint.open(tmp_path / "a")["model.norm.weight"])
    assert not hub.requests


def test_a_blob_that_another_revision_shares_stays(hub: Hub, tmp_path: Path) -> None:
    files = dict(hub.files("org/a"))
    hub.repositories["org/a"].branch("v1", {**files, "config.json": files["config.json"] + b"\n"})
    first, second = (resolve(reference) for reference in ("org/a", "org/a@v1"))
    assert first.shards and second.shards
    shard = next(name for name in files if name.endswith(".safetensors"))
    first.shards.fetch(shard)
    kept = second.shards.fetch(shard)
    first.shards.drop(shard)
    assert not (first.folder / shard).exists()
    assert kept.read_bytes() == files[shard]
    second.shards.drop(shard)
    assert not any(p.stat().st_size == len(files[shard]) for p in (tmp_path / "cache").rglob("blobs/*"))


def test_a_folder_of_the_user_is_never_dropped(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(3)}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint.open(tmp_path)
    checkpoint.drop_when_read(["w"])
    assert checkpoint["w"].shape == (3,)
    assert (tmp_path / "model.safetensors").is_file()


# The command ---------------------------------------------------------------------------------------------------------


def test_spec_of_a_repository_reads_no_weights(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("spec", "org/a", "--json") == 0
    assert json.loads(capsys.readouterr().out)["model_type"] == "llama"
    assert not hub.count("safetensors$")


def test_a_fine_tune_is_read_at_the_revision_that_is_asked_for(hub: Hub, tmp_path: Path) -> None:
    """What names a revision itself keeps it."""
    files = dict(hub.repositories["org/b"].at("main").files)
    hub.repositories["org/a"].branch("tuned", files)
    asked = ("--base", "org/a@main", "--onto", "org/a@main", "--method", "task_arithmetic", "--no-witness", "--quiet")
    assert run("transport", "org/a", *asked, "--revision", "tuned", "-o", tmp_path / "asked") == 0
    assert run("transport", "org/a@tuned", *asked, "-o", tmp_path / "named") == 0
    found, named = (load_file(tmp_path / name / "model.safetensors") for name in ("asked", "named"))
    assert all(torch.equal(found[name], named[name]) for name in named)


def test_a_merge_from_the_hub_is_that_of_the_folders(hub: Hub, tmp_path: Path) -> None:
    """In a process of its own, told of the Hub by the environment alone."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    env = {**kept, "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-m", "hf_align", "merge", "--match", "weight", "--quiet", "-o", "remote",
               "org/a", "hf://org/b@main"]  # fmt: skip
    subprocess.run(command, cwd=tmp_path, env=env, check=True)
    assert run("merge", "--quiet", "-o", tmp_path / "local", tmp_path / "a", tmp_path / "b") == 0
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("remote", "local"))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    assert (tmp_path / "home" / "hub").is_dir()
