"""What is published is the model's own: no file from elsewhere, no local path, no markup that others wrote."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
from pathlib import Path

import pytest
import yaml
from conftest import MODELS, run
from faults import contents
from hub_server import Hub
from huggingface_hub import ModelCard
from test_output import ALL_BUT_SLOW, COMMANDS, PLAIN, recipe_of

from hf_align.checkpoints.own_files import is_own
from hf_align.errors import HfAlignError, one_line
from hf_align.publishing.markdown import block, code, plain
from hf_align.publishing.provenance import Provenance

LLAMA = MODELS / "llama"
SECRET = b'{"token": "hf_secret"}'


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    for seed in "01":
        shutil.copytree(LLAMA / seed, tmp_path / "in" / seed)
    return tmp_path / "in" / "0", tmp_path / "in" / "1"


# Only the model's own files -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ALL_BUT_SLOW)
@pytest.mark.parametrize("which", [0, 1])
def test_links_out_of_a_folder_are_not_followed(
    command: str, which: int, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "token").write_bytes(SECRET)
    model = pair[which]
    for name in ("tokenizer.model", "tokenizer_config.json", "chat_template.jinja", "vocab.txt", "code.py"):
        (model / name).unlink(missing_ok=True)
        (model / name).symlink_to(tmp_path / "home" / "token")
    (model / "added_tokens.json").symlink_to(os.path.relpath(tmp_path / "home" / "token", model))
    (model / "merges.txt").symlink_to(tmp_path / "home")
    os.mkfifo(model / "special_tokens_map.json")
    assert run(*COMMANDS[command](*pair, tmp_path / "out")) == 0
    for name, content in contents(tmp_path / "out").items():
        assert b"hf_secret" not in content, name


def test_links_inside_a_folder_and_those_of_the_hubs_cache_are(hub: Hub, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(LLAMA / "0", folder)
    (folder / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    (folder / "tokenizer_config.json").unlink(missing_ok=True)
    (folder / "tokenizer_config.json").symlink_to("tokenizer.json")
    assert run("merge", folder, folder, "-o", tmp_path / "out", *PLAIN) == 0
    assert (tmp_path / "out" / "tokenizer_config.json").read_text() == (folder / "tokenizer.json").read_text()
    (folder / "tokenizer_config.json").unlink()
    hub.add("org/a", folder)
    assert run("merge", "org/a", "org/a", "-o", tmp_path / "from the hub", *PLAIN) == 0
    assert (tmp_path / "from the hub" / "tokenizer.json").is_file()


def test_a_cache_cannot_be_made_up(tmp_path: Path) -> None:
    """A clone with the layout of the cache, whose blobs are a link."""
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "token").write_bytes(SECRET)
    model = tmp_path / "clone" / "snapshots" / "main"
    model.mkdir(parents=True)
    (tmp_path / "clone" / "blobs").symlink_to(tmp_path / "home")
    (model / "tokenizer.model").symlink_to("../../blobs/token")
    assert not is_own(model, model / "tokenizer.model")


@pytest.mark.parametrize("command", ["plain", "merge", "recipe"])
def test_a_config_from_elsewhere_is_refused(
    command: str, pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.move(pair[0] / "config.json", tmp_path / "config.json")
    (pair[0] / "config.json").symlink_to(tmp_path / "config.json")
    assert run(*COMMANDS[command](*pair, tmp_path / "out")) == 2
    assert "is not a regular file inside" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_folder_with_links_out_of_it_is_not_uploaded(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("merge", LLAMA / "0", LLAMA / "1", "-o", tmp_path / "out", *PLAIN) == 0
    (tmp_path / "token").write_bytes(SECRET)
    (tmp_path / "out" / "tokenizer.model").symlink_to(tmp_path / "token")
    assert run("push", tmp_path / "out", "alice/x", "--quiet") == 2
    assert "is a link to outside of" in capsys.readouterr().err and "alice/x" not in hub.repositories


# No local path --------------------------------------------------------------------------------------------------------


def assert_no_path(out: Path, *paths: Path) -> None:
    for file in out.rglob("*"):
        for path in (*paths, Path.home()):
            assert file.is_dir() or str(path).encode() not in file.read_bytes(), file


@pytest.mark.parametrize("command", COMMANDS)
def test_nothing_that_is_written_has_a_local_path(command: str, pair: tuple[Path, Path], tmp_path: Path) -> None:
    config = json.loads((pair[0] / "config.json").read_text())
    (pair[0] / "config.json").write_text(json.dumps({**config, "_name_or_path": str(tmp_path / "in")}))
    assert run(*COMMANDS[command](*pair, tmp_path / "out")) == 0
    assert_no_path(tmp_path / "out", tmp_path, MODELS)


@pytest.mark.parametrize("option", ["-o", "--output", "--output=", "-o="])
def test_the_command_is_the_same_when_the_output_is_there(
    option: str, pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = []
    out = "sub/folder/out"
    written = [option.rstrip("=") + ("=" if option.startswith("--") else "") + out] if "=" in option else [option, out]
    for more in ((), ("--overwrite",)):
        assert run("merge", "in/0", "in/1", *written, *PLAIN, *more) == 0
        said.append(Provenance.load(tmp_path / out).command)
    command = f"hf-align merge 0 1 {option.rstrip('=')} out --match none --quiet"
    assert said == [command, f"{command} --overwrite"]


def test_widened_models_go_by_their_names(tmp_path: Path) -> None:
    for name, source in {"wide": MODELS / "llama-wide" / "3", "narrow": LLAMA / "0"}.items():
        shutil.copytree(source, tmp_path / "in" / name)
    assert run("merge", tmp_path / "in" / "wide", tmp_path / "in" / "narrow", "-o", tmp_path / "out", "--quiet") == 0
    assert "is widened" in " ".join(Provenance.load(tmp_path / "out").notes)
    assert_no_path(tmp_path / "out", tmp_path)


def test_paths_in_a_recipe_go_by_their_names(pair: tuple[Path, Path], tmp_path: Path) -> None:
    recipe = recipe_of(*pair, tmp_path / "r.yml", tokenizer_source=str(pair[1]))
    assert run("mergekit", recipe, tmp_path / "out", "--quiet") == 0
    assert_no_path(tmp_path / "out", tmp_path)
    shown = yaml.safe_load((tmp_path / "out" / "mergekit_config.yml").read_text())
    assert shown["tokenizer_source"] == "1"


# No markup that others wrote ------------------------------------------------------------------------------------------

NASTY = ["<script>alert(1)</script>", "a\n---\nlicense: mit\n---\n# b", "![x](https://e.org/x.png)", "`` ` ```",
         "a | b", "[a](javascript:x)", "**bold**", "\u202e\u2028x", "<img src=x onerror=y>", "_a_ __b__",
         "\x1b[2J"]  # fmt: skip


@pytest.mark.parametrize("text", NASTY)
def test_text_in_markdown(text: str) -> None:
    shown = plain(text)
    assert "\n" not in shown and "<" not in shown and "\x1b" not in shown
    assert not re.search(r"(?<!\\)[\[\]|`*]", shown)
    assert "\n" not in code(text) and block(text).count("\n") == 2
    assert "\n" not in one_line(text) and one_line(text).isprintable()
    assert len(str(HfAlignError(text)).splitlines()) == 1


@pytest.mark.parametrize("name", ["<script>x<", "a\nb", "---", "a|b", "![x](y)", "```", "\u202eevil"])
@pytest.mark.parametrize("command", ["plain", "recipe"])
def test_folders_with_such_names(
    command: str, name: str, pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = pair[0].rename(pair[0].with_name(name))
    license_ = "mit\n---\n<b>x</b>"
    (a / "README.md").write_text("---\n" + yaml.safe_dump({"license": license_}) + "---\n")
    config = json.loads((a / "config.json").read_text())
    arguments = COMMANDS[command](a, pair[1], tmp_path / "out")
    assert run(*arguments) == 0
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert card.data.to_dict().keys() == {"base_model_relation", "tags", "library_name"}
    assert not re.search(r"<(script|b|img)", re.sub(r"(`+)[^`]+?\1", "", card.text))
    assert card.text.count("\n# ") == 1 or card.text.startswith("# ")
    rows = [line for line in card.text.splitlines() if line.startswith("|") and "local folder" in line]
    assert len(rows) == 2 and all(len(re.findall(r"(?<!\\)\|", row)) == 4 for row in rows)
    (a / "config.json").write_text(json.dumps({**config, "model_type": "gpt2\n<script>"}))
    assert run(*arguments[:-1], "--overwrite") == 2
    assert len([line for line in capsys.readouterr().err.splitlines() if line.startswith("hf-align:")]) == 1


def test_a_licence_that_is_another_licence_a_thousand_times(tmp_path: Path) -> None:
    """Aliases of YAML: a card of half a kilobyte that would take gigabytes."""
    shutil.copytree(LLAMA / "0", tmp_path / "a")
    lines = ["a0: &a0 [x, x]", *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 30))]
    (tmp_path / "a" / "README.md").write_text("---\n" + "\n".join(lines) + "\nlicense: *a29\n---\n")
    assert run("merge", tmp_path / "a", LLAMA / "1", "-o", tmp_path / "out", *PLAIN) == 0


# Modes ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ALL_BUT_SLOW)
def test_files_have_the_mode_that_the_umask_says(command: str, pair: tuple[Path, Path], tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        assert run(*COMMANDS[command](*pair, tmp_path / "out")) == 0
    finally:
        os.umask(before)
    for path in (tmp_path / "out").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o750 if path.is_dir() else 0o640), path
