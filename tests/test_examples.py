"""Every example runs as it stands, and the command is one of `hf` where it is installed as an extension."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from forks import forked, script

EXAMPLES = sorted(p.name for p in (ROOT / "examples").iterdir() if p.suffix in (".sh", ".py"))
SAYS = {
    "two_models.sh": r"alignment lowers the barrier from 1\.[78]\d\d to 0\.4\d\d",
    "three_models.sh": r"aligned, the mean of 3 models has loss 3\.\d+",
    "python_api.py": r"alignment lowers the barrier from 2\.\d+ to 1\.\d+",
    "live_models.py": r"changed by \d\.\de-0[567]\nbarrier 1\.[78]\d as they are, 0\.4\d aligned",
    "plain_modules.py": r"barrier 0\.[3-6]\d as they are, 0\.0\d aligned\n.* tells [34]\d\d of .*\n.* 4[5-9]\d of",
    "federated.py": r"as they are: [45]\.\d+\naligned: 3\.\d+\none client: 2\.\d+",
    "new_architecture.py": r"distance of the weights \S+ -> \d\.?\d*e-\d\d",
    "data_free.sh": r"is written",
    "mergekit_recipe.sh": r"merged by mergekit",
}


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """With `hf-align` and `python` on the path."""
    bin_folder = tmp_path_factory.mktemp("bin")
    command = bin_folder / "hf-align"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m hf_align "$@"\n')
    command.chmod(0o755)
    return {**os.environ, "PATH": f"{bin_folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"}


def test_the_table_has_them_all() -> None:
    table = (ROOT / "examples" / "README.md").read_text()
    assert sorted(re.findall(r"^\| `(.+?)` \|", table, re.M)) == EXAMPLES == sorted(SAYS)


IN_MEMORY = ("live_models.py", "plain_modules.py", "federated.py", "new_architecture.py")
SLOW = set(SAYS) - {"new_architecture.py"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in EXAMPLES])
def test_an_example_runs(name: str, environment: dict[str, str], tmp_path: Path) -> None:
    if name.startswith("mergekit"):
        pytest.importorskip("mergekit")
    if name.endswith(".sh"):
        done = subprocess.run(["sh", f"examples/{name}", tmp_path / "out"], cwd=ROOT, env=environment, check=True,
                              capture_output=True, text=True)  # fmt: skip
    else:
        done = forked(script, f"examples/{name}", tmp_path / "out", cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert re.search(SAYS[name], done.stdout), done.stdout
    assert name in IN_MEMORY or list((tmp_path / "out").rglob("model.safetensors"))


def test_hf_finds_the_command(environment: dict[str, str], tmp_path: Path) -> None:
    """`hf extensions install` leaves a manifest that names the console script; `hf align` runs it."""
    folder = tmp_path / ".local" / "share" / "hf" / "extensions" / "hf-align"
    folder.mkdir(parents=True)
    script = environment["PATH"].split(":")[0] + "/hf-align"
    manifest = {"owner": "o", "repo": "hf-align", "repo_id": "o/hf-align", "short_name": "align", "type": "python",
                "executable_path": script, "installed_at": "2026-01-01T00:00:00+00:00"}  # fmt: skip
    (folder / "manifest.json").write_text(json.dumps(manifest))
    env = {**environment, "HOME": str(tmp_path), "HF_HUB_DISABLE_UPDATE_CHECK": "1"}
    hf = Path(sys.executable).parent / "hf"
    if not hf.exists():
        pytest.skip("no hf command beside this interpreter")
    shown = subprocess.run([hf, "align", "--version"], env=env, check=True, capture_output=True, text=True).stdout
    assert shown.startswith("hf-align ")


def test_the_project_is_an_extension() -> None:
    """What `hf extensions install` asks of a repository: its console script, and no script of that name in it."""
    project = (ROOT / "pyproject.toml").read_text()
    assert re.search(r'^hf-align = "hf_align.__main__:main"$', project, re.M)
    assert not (ROOT / "hf-align").exists()
