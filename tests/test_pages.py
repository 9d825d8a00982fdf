"""The pages: their links lead somewhere, their first steps run, and they build without a warning."""

from __future__ import annotations

import itertools
import json
import operator
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from conftest import ROOT, built, tiny_llama
from forks import forked, hf_align, script
from typer.main import get_command

from hf_align.cli.app import app

PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "examples" / "README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
FIRST = (ROOT / "docs" / "index.md").read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        assert target.startswith("https://") or (page.parent / target).exists(), target


def test_rooms_and_files_that_are_named_are_there() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    for name in re.findall(r"`((?:[a-z_]+/)+(?:[a-z_]+\.py)?|[a-z_]+/[a-z_]+\.py)`", text):
        assert (ROOT / name).exists() or (ROOT / "src" / "hf_align" / name).exists(), name


SHELL = [
    pytest.param(line, id=f"{page.stem}: {line}")
    for page in PAGES
    for block in re.findall(r"^```sh\n(.*?)^```", page.read_text(), re.M | re.S)
    for line in block.splitlines()
]
ELSEWHERE = {"pip install .": "test_packaging.py", "hf-align evaluate org/a org/b --tasks": "test_tasks.py"}
"""How lines begin that other files run."""


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the pages name, and what is there."""
    folder = tmp_path_factory.mktemp("org")
    for seed, name in enumerate(("a", "b", "new")):
        built(tiny_llama(), seed).save_pretrained(folder / name)
    rows = torch.randint(11, (8, 8), generator=torch.Generator().manual_seed(0)).tolist()
    (folder / "rows.jsonl").write_text("\n".join(json.dumps({"input_ids": row}) for row in rows))
    return {**{f"org/{name}": str(folder / name) for name in ("a", "b", "new")},
            "held_out.txt": str(folder / "rows.jsonl")}  # fmt: skip


@pytest.mark.parametrize("line", SHELL)
def test_what_the_pages_say_to_a_shell_runs(line: str, stand_ins: dict[str, str], tmp_path: Path) -> None:
    if file := next((file for begin, file in ELSEWHERE.items() if line.startswith(begin)), None):
        assert (ROOT / "tests" / file).is_file()
        return
    program, *words = (stand_ins.get(word, word) for word in shlex.split(line))
    assert program == "hf-align"
    for option in {"-o"} & {*words}:
        words[words.index(option) + 1] = str(tmp_path / "out")
    ran = forked(hf_align, *words, cwd=ROOT)
    assert ran.returncode == 0, ran.stderr


def test_the_first_steps_in_python_run(tmp_path: Path) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```", FIRST, re.M | re.S)
    (tmp_path / "first.py").write_text(code.replace("out/merged", str(tmp_path / "merged")))
    ran = forked(script, str(tmp_path / "first.py"), cwd=ROOT)
    assert ran.returncode == 0 and "aligned B and A answer as they did" in ran.stdout, ran.stdout + ran.stderr
    assert (tmp_path / "merged" / "model.safetensors").is_file()


def test_commands_on_the_pages_have_only_options_that_there_are() -> None:
    commands: Any = get_command(app)
    every = {o for c in commands.commands.values() for p in c.params for o in (*p.opts, *p.secondary_opts)}
    seen = set()
    for page in PAGES:
        alone = set(re.findall(r"`(--[a-z][\w-]*)", page.read_text()))
        assert alone <= {*every, "--multi_gpu", "--help"}, page.name
        for name, rest in re.findall(r"hf-align ([a-z]+) ([^`\n]*)", page.read_text()):
            if name in commands.commands:
                known = {o for p in commands.commands[name].params for o in (*p.opts, *p.secondary_opts)}
                assert set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", rest)) <= {*known, "-h", "--help"}, (page.name, rest)
                seen.add(name)
    assert {"merge", "align", "transport", "evaluate", "mergekit", "certify"} <= seen


def test_every_block_is_run() -> None:
    languages = [(page.name, kind) for page in PAGES for kind in re.findall(r"^```(\w+)\n", page.read_text(), re.M)]
    assert {kind for _, kind in languages} == {"sh", "python"}
    assert [name for name, kind in languages if kind == "python"] == ["README.md", "index.md", "modules.md"]


def test_the_certificate_that_is_shown_is_printed() -> None:
    page = (ROOT / "docs" / "certificate.md").read_text()
    ((command, block),) = re.findall(r"^    \$ hf-align (.*)\n((?:    .*\n)+)", page, re.M)
    shown = re.sub(r"^    ", "", block, flags=re.M)
    ran = forked(hf_align, *command.split(), cwd=ROOT)
    printed, expected = (re.sub(r"change \S+", "change", text).strip() for text in (ran.stdout, shown))
    assert printed == expected, ran.stdout


def test_the_python_of_the_readme_runs() -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    tokens = torch.arange(32).reshape(4, 8) % 11
    names: dict[str, Any] = {"a": built(tiny_llama(), 0), "b": built(tiny_llama(), 1), "data": {"input_ids": tokens}}
    exec(code, names)
    assert type(names["merged"]) is type(names["a"]) and names["losses"].naive.barrier >= 0


def test_the_python_of_the_page_on_modules_runs() -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "modules.md").read_text(), re.M | re.S)
    names: dict[str, Any] = {}
    exec(code, names)
    assert torch.allclose(names["moved"](names["x"]), names["b"](names["x"]), atol=1e-5)


def test_the_picture_has_the_numbers_of_two_models() -> None:
    drawn = (ROOT / "docs" / "barriers.svg").read_text()
    steps = [re.findall(rf"{words}: (?:barrier )?(\d\.\d\d)<", drawn) for words in ("are", "aligned", "regression")]
    assert all(len(numbers) == 2 for numbers in steps)
    assert all(all(map(operator.gt, before, after)) for before, after in itertools.pairwise(steps))


def test_the_citation_has_the_version() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert f'__version__ = "{cited["version"]}"' in (ROOT / "src" / "hf_align" / "__init__.py").read_text()


@pytest.mark.skipif(find_spec("mkdocs") is None, reason="pages are built with the extra docs")
def test_the_pages_build_without_a_warning(tmp_path: Path) -> None:
    ran = subprocess.run([sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path],
                         cwd=ROOT, capture_output=True, text=True)  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert "hf_align.api.align.align" in (tmp_path / "reference" / "index.html").read_text()
