"""Uploads: the real client, over TCP, against the small server of hub_server.py."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch
from conftest import run
from hub_server import Fault, Hub
from huggingface_hub import constants
from safetensors.torch import save_file

from hf_align.errors import HfAlignError
from hf_align.publishing.push import Destination, default_name, push, user


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What a merge leaves behind."""
    made = tmp_path / "merged"
    (made / "hf-align").mkdir(parents=True)
    (made / ".hf-align").mkdir()
    (made / ".hf-align" / "lock").write_text("")
    (made / "config.json").write_text("{}")
    (made / "README.md").write_text("---\ntags:\n- merge\n---\n# Merge\n")
    save_file({"w": torch.zeros(1200)}, made / "model.safetensors")
    (made / "hf-align" / "alignment.safetensors").write_bytes(b"e" * 3000)
    return made


def made_adapter(folder: Path) -> Path:
    (folder / "adapter_config.json").write_text("{}")
    save_file({"w": torch.zeros(3)}, folder / "adapter_model.safetensors")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    files = (p for p in folder.rglob("*") if p.is_file() and ".hf-align" not in p.parts)
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in files}


def uploaded(hub: Hub, repository: str, revision: str = "main") -> dict[str, bytes]:
    return {p: c for p, c in hub.files(repository, revision).items() if p != ".gitattributes"}


def test_a_folder_is_on_the_hub(hub: Hub, folder: Path) -> None:
    pushed = push(folder, Destination("alice/x", message="All of it"))
    assert uploaded(hub, "alice/x") == contents(folder)
    assert pushed.url == f"{hub.url}/alice/x"
    commit = hub.repositories["alice/x"].at("main")
    assert (commit.oid, commit.message) == (pushed.commit, "All of it")
    assert not hub.repositories["alice/x"].private
    assert hub.count("POST .*/lfs/objects/verify") == 2


def test_an_adapter_is_on_the_hub(hub: Hub, tmp_path: Path) -> None:
    adapter = made_adapter(tmp_path)
    push(adapter, Destination("alice/lora"))
    assert uploaded(hub, "alice/lora") == contents(adapter)


def test_again_nothing_is_sent(hub: Hub, folder: Path) -> None:
    first = push(folder, Destination("alice/x"))
    hub.requests.clear()
    assert push(folder, Destination("alice/x")) == first
    assert not hub.count("PUT |POST .*/commit/")


def test_weights_of_an_older_upload_go_away(hub: Hub, folder: Path) -> None:
    stale = ["model-00001-of-00002.safetensors", "model.safetensors.index.json", "model.fp16.safetensors",
             "pytorch_model.bin", "pytorch_model.bin.index.json"]  # fmt: skip
    kept = ["notes.txt", "onnx/model.safetensors", "model/part.safetensors", "models.safetensors",
            "model_card.safetensors", "pytorch_model_notes.txt"]  # fmt: skip
    hub.add("alice/x", dict.fromkeys([*stale, *kept], b"theirs"))
    push(folder, Destination("alice/x"))
    assert uploaded(hub, "alice/x") == {**contents(folder), **dict.fromkeys(kept, b"theirs")}


def test_an_adapter_and_a_whole_model_do_not_meet(
    hub: Hub, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever loads a whole model gets an adapter beside it applied."""
    hub.add("alice/lora", {"adapter_config.json": b"{}", "adapter_model.safetensors": b"theirs"})
    hub.add("alice/x", {"model.safetensors": b"theirs", "config.json": b"{}"})
    before = {name: uploaded(hub, name) for name in ("alice/lora", "alice/x")}
    assert run("push", folder, "alice/lora") == 2
    error = capsys.readouterr().err
    assert "alice/lora holds an adapter" in error and f"hf-align push {folder} ORG/NAME" in error
    assert run("push", made_adapter(tmp_path), "alice/x") == 2
    assert "alice/x holds a whole model" in capsys.readouterr().err
    assert before == {name: uploaded(hub, name) for name in before}


@pytest.mark.parametrize("damage", ["cut off", "missing", "unfinished"])
def test_what_is_not_whole_is_not_uploaded(hub: Hub, folder: Path, damage: str) -> None:
    weights = folder / "model.safetensors"
    if damage == "cut off":
        weights.write_bytes(weights.read_bytes()[:-8])
    elif damage == "missing":
        weights.unlink()
    else:
        (folder / ".hf-align" / "plan.json").write_text("{}")
    with pytest.raises(HfAlignError, match="is not finished" if damage == "unfinished" else "is not whole"):
        push(folder, Destination("alice/x"))
    assert not hub.requests


def test_private(hub: Hub, folder: Path) -> None:
    push(folder, Destination("lab/x", private=True))
    assert hub.repositories["lab/x"].private
    hub.add("lab/public", {})
    with pytest.raises(HfAlignError, match=r"lab/public exists and is public.* upload it with: .* ORG/NAME --private"):
        push(folder, Destination("lab/public", private=True))
    assert not uploaded(hub, "lab/public")


def test_a_pull_request_to_a_repository_of_others(hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add("lab/x", {"README.md": b"theirs"})
    monkeypatch.setenv("HF_TOKEN", "hf_bob")
    pushed = push(folder, Destination("lab/x", create_pr=True, message="A merge"))
    assert pushed.pull_request == 1 and pushed.url == f"{hub.url}/lab/x/discussions/1"
    assert uploaded(hub, "lab/x") == {"README.md": b"theirs"}
    assert uploaded(hub, "lab/x", "refs/pr/1") == contents(folder)
    request = hub.repositories["lab/x"].pull_requests[1]
    assert (request["status"], request["title"]) == ("open", "A merge")


@pytest.mark.parametrize(
    "fault",
    [
        Fault("POST /api/repos/create", 429, headers={"Retry-After": "0"}),
        Fault("POST /api/validate-yaml", None),
        Fault("POST .*/preupload/", 429, headers={"Retry-After": "0"}),
        Fault("POST .*/objects/batch", 503, headers={"Retry-After": "0"}),
        Fault("PUT /lfs/", None),
        Fault("PUT /lfs/", 500, 2, {"Retry-After": "0"}),
        Fault("POST .*/objects/verify", None),
        Fault("POST .*/commit/main", 502),
        Fault("POST .*/commit/main", 429, headers={"Retry-After": "0"}),
        Fault("POST .*/commit/main", None),
        Fault("POST .*/commit/main", None, after_work=True),
        Fault("POST /api/repos/create", None, after_work=True),
    ],
    ids=lambda fault: f"{fault.pattern} {fault.status} {fault.after_work}",
)
def test_rate_limits_and_broken_connections_are_tried_again(hub: Hub, folder: Path, fault: Fault) -> None:
    hub.faults.append(fault)
    push(folder, Destination("alice/x"))
    assert fault.times == 0
    assert uploaded(hub, "alice/x") == contents(folder)
    assert len(hub.repositories["alice/x"].branches["main"]) == 2


def test_what_failed_is_finished_by_the_command_that_it_names(
    hub: Hub, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.faults.append(Fault("POST .*/commit/", 500, 99))
    before = contents(folder)
    assert run("push", folder, "alice/x", "--private", "--commit-message", "two words") == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert contents(folder) == before
    command = error.partition("upload it with: ")[2]
    assert command == f"hf-align push {folder} alice/x --private --commit-message 'two words'"
    hub.faults.clear()
    hub.requests.clear()
    assert run(*shlex.split(command)[1:]) == 0
    assert uploaded(hub, "alice/x") == before
    assert hub.repositories["alice/x"].at("main").message == "two words"
    assert not hub.count("PUT ")  # the weights were there already


def test_a_pull_request_that_broke_off_is_gone_on_with(
    hub: Hub, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.add("lab/x", {})
    hub.faults.append(Fault("POST .*/commit/", 500, 99))
    assert run("push", folder, "lab/x", "--create-pr") == 2
    command = capsys.readouterr().err.strip().splitlines()[-1].partition("upload it with: ")[2]
    assert command == f"hf-align push {folder} lab/x --revision refs/pr/1"
    assert hub.repositories["lab/x"].pull_requests[1]["status"] == "draft"
    hub.faults.clear()
    assert run(*shlex.split(command)[1:]) == 0
    assert len(hub.repositories["lab/x"].pull_requests) == 1
    assert hub.repositories["lab/x"].pull_requests[1]["status"] == "open"
    assert uploaded(hub, "lab/x", "refs/pr/1") == contents(folder)


def test_no_rights(hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_bob")
    with pytest.raises(HfAlignError, match=r"403.*; the model is in .*, upload it with: hf-align push") as caught:
        push(folder, Destination("lab/x"))
    assert "\n" not in str(caught.value)


def test_a_card_that_the_hub_does_not_accept(hub: Hub, folder: Path) -> None:
    (folder / "README.md").write_text("---\nbase_model_relation: cousin\n---\n")
    with pytest.raises(HfAlignError, match=r"Invalid metadata in README.md"):
        push(folder, Destination("alice/x"))
    assert not uploaded(hub, "alice/x")


def test_who_uploads(hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert user() == "alice"
    monkeypatch.setenv("HF_TOKEN", "hf_nobody")
    with pytest.raises(HfAlignError, match="rejects this token"):
        user()
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    with pytest.raises(HfAlignError, match="no token to upload with; log in"):
        user()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HfAlignError, match="HF_HUB_OFFLINE is set"):
        user()


def test_the_right_to_write_is_asked_for_before_anything_is_computed(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ("merge", "no/a", "no/b", "-o", tmp_path / "out", "--push", "somebody/else")
    assert run(*command) == 2 and "alice may not write to somebody" in capsys.readouterr().err
    assert run(*command, "--create-pr") == 2 and "no/a" in capsys.readouterr().err  # that is the next thing
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["no name", "lab/x@main", "lab/x/y", "lab/x--y"])
def test_a_name_that_no_repository_can_have_is_refused_before_anything_is_computed(
    name: str, hub: Hub, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("merge", "no/a", "no/b", "-o", tmp_path / "out", "--push", name, "--create-pr") == 2
    assert run("push", folder, name) == 2
    for line in capsys.readouterr().err.splitlines():
        assert f"{name!r} is no name of a repository" in line and "upload it with" not in line
    assert not hub.count("POST")


def test_a_token_that_may_only_read(hub: Hub) -> None:
    hub.roles["hf_alice"] = "read"
    with pytest.raises(HfAlignError, match="is read-only"):
        user()


@pytest.mark.parametrize(
    ("models", "name"),
    [
        (["org/a", "lab/b"], "alice/a-b-merge"),
        (["My Model", "b"], "alice/My-Model-b-merge"),
        (["a" * 90, "b" * 90], f"alice/{'a' * 84}-merge"),
        (["--a..b--", "c"], "alice/a-b-c-merge"),
    ],
)
def test_names(models: list[str], name: str) -> None:
    assert default_name("alice", models) == name
    assert len(name) <= 96 and re.fullmatch(r"alice/[\w.-]+", name)


def test_a_folder_without_a_model(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(HfAlignError, match="holds no model"):
        push(tmp_path, Destination("alice/x"))
    assert not hub.requests


def test_what_goes_wrong_half_way_is_said(
    hub: Hub, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        hub, "fault", lambda request, after_work: hub.repositories.clear() if "PUT" in request else None
    )
    assert run("push", folder, "alice/x") == 2
    assert "alice/x is not on the Hub any more" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (Fault("PUT /lfs/", 403, 9), r"Error while uploading '.*' to the Hub: 403 Forbidden.*planted"),
        (Fault("POST .*/commit/", 400, 9), "the Hub refused alice/x: Bad request for commit endpoint: planted"),
    ],
)
def test_the_reason_of_the_hub_is_said(hub: Hub, folder: Path, fault: Fault, message: str) -> None:
    hub.faults.append(fault)
    with pytest.raises(HfAlignError, match=message):
        push(folder, Destination("alice/x"))


def test_a_revision_that_is_not_there(hub: Hub, folder: Path) -> None:
    with pytest.raises(HfAlignError, match="alice/x has no revision v9"):
        push(folder, Destination("alice/x", revision="v9"))


def test_a_name_without_its_owner_is_of_the_user(hub: Hub, folder: Path) -> None:
    assert push(folder, Destination("x")).repository == "alice/x"
    assert uploaded(hub, "alice/x") == contents(folder)
