"""What is built: the wheel has what it needs, and works from another folder with nothing but what it requires.

An environment here is a folder of links to the distributions that the wheel, or one of its extras, requires: what
happens to be installed beside them is not in it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path

import pytest
from conftest import MODELS, ROOT
from packaging.requirements import Requirement

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(find_spec("hatchling") is None, reason="needs hatchling, which is in the extra test"),
]
PATH = "p = Path1D((0, 0.5, 1), (1, 2, 1))"
PAIR = [str(MODELS / "llama" / seed) for seed in "01"]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The sdist, and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", folder], cwd=ROOT, check=True)
    (sdist,) = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    source = folder / sdist.name.removesuffix(".tar.gz")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder], cwd=source, check=True)
    return sdist, next(folder.glob("*.whl"))


def required(by: Iterable[Requirement], found: dict[str, Distribution] | None = None) -> dict[str, Distribution]:
    """The distributions that requirements lead to, by name; those of extras that they do not ask for left out."""
    found = {} if found is None else found
    for requirement in by:
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        key = requirement.name.lower().replace("_", "-")
        if key in found and not requirement.extras:
            continue
        own = found[key] = distribution(requirement.name)
        more = [Requirement(line) for line in own.requires or ()]
        wanted = [r for r in more if r.marker is None or r.marker.evaluate({"extra": ""})]
        wanted += [r for r in more for extra in requirement.extras if r.marker and r.marker.evaluate({"extra": extra})]
        for each in wanted:
            each.marker = None
        required(wanted, found)
    return found


def environment(wheel: Path, folder: Path, extra: str = "") -> Path:
    """The interpreter of an environment with the wheel, what it requires, and what one of its extras does."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (site,) = folder.glob("lib/python3*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = archive.read(metadata).decode().splitlines()
    requirements = [Requirement(line.partition(": ")[2]) for line in lines if line.startswith("Requires-Dist: ")]
    asked = [r for r in requirements if r.marker is None or r.marker.evaluate({"extra": extra})]
    for each in asked:
        each.marker = None
    for own in required(asked).values():
        for top in {file.parts[0] for file in own.files or () if file.parts[0] not in ("..", "__pycache__")}:
            if not (site / top).exists():
                (site / top).symlink_to(Path(str(own.locate_file(top))).resolve())
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def bare(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environment(built[1], tmp_path_factory.mktemp("bare") / "env")


def said(python: Path, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return subprocess.run([python, *arguments], cwd=cwd, env=env, capture_output=True, text=True)


def test_the_wheel_has_all_of_the_program(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[1]) as archive:
        there = {name for name in archive.namelist() if ".dist-info/" not in name}
    source = ROOT / "src" / "hf_align"
    mine = {
        f"hf_align/{p.relative_to(source)}" for p in source.rglob("*") if p.is_file() and "__pycache__" not in p.parts
    }
    specs = {f"hf_align/specs/{p.relative_to(ROOT / 'specs')}" for p in (ROOT / "specs").rglob("*") if p.is_file()}
    assert there == mine | specs
    with tarfile.open(built[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "tests/test_packaging.py", "docs/index.md"} <= names


def test_commands_and_the_library_run_elsewhere(bare: Path, tmp_path: Path) -> None:
    loaded = "import hf_align; print(hf_align.__file__)"
    assert str(bare.parent.parent) in said(bare, "-c", loaded, cwd=tmp_path).stdout
    merge = said(bare, "-m", "hf_align", "merge", *PAIR, "-o", "out", "--quiet", cwd=tmp_path)
    assert merge.returncode == 0 and "out is written" in merge.stdout, merge.stderr
    report = said(bare, "-m", "hf_align", "report", "out", cwd=tmp_path)
    assert report.returncode == 0 and (tmp_path / "out" / "report.html").is_file(), report.stderr
    merged = f"hf_align.merge({PAIR}, align='none')"
    code = f"import hf_align; print(hf_align.certify('llama', layers=1).sound, type({merged}).__name__)"
    assert said(bare, "-c", code, cwd=tmp_path).stdout.split() == ["True", "LlamaForCausalLM"]


WITHOUT = {
    "mergekit": ["-m", "hf_align", "merge", *PAIR, "-o", "out", "--method", "nuslerp"],
    "plots": ["-c", f"from hf_align.running.evaluate import Comparison, Path1D; {PATH}; Comparison(p, p).plot()"],
    "tasks": ["-c", f"import hf_align; hf_align.score({{'a': {PAIR[0]!r}}}, ['arc_easy'])"],
}
WITH = {"mergekit": "is written", "plots": ""}


@pytest.mark.parametrize("extra", WITHOUT)
def test_what_needs_an_extra_names_it(extra: str, bare: Path, tmp_path: Path) -> None:
    ran = said(bare, *WITHOUT[extra], cwd=tmp_path)
    assert ran.returncode and f"pip install 'hf-align[{extra}]'" in ran.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize("extra", WITH)
def test_with_the_extra_it_runs(extra: str, built: tuple[Path, Path], tmp_path: Path) -> None:
    try:
        python = environment(built[1], tmp_path / "env", extra)
    except PackageNotFoundError as missing:
        pytest.skip(f"{missing} is not installed")
    ran = said(python, *WITHOUT[extra], cwd=tmp_path)
    assert ran.returncode == 0 and WITH[extra] in ran.stdout, ran.stderr
    shutil.rmtree(tmp_path / "env")
