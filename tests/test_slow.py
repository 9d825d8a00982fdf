"""What `make test` leaves out: the tests that take long, and no others."""

from __future__ import annotations

from pathlib import Path

from conftest import SLOW
from slow import seconds_of, slow

SAID = """
3.50s call     tests/test_a.py::test_one[x y]
0.90s call     tests/test_a.py::test_one[z]
2.00s setup    tests/test_a.py::test_two
1.50s call     tests/test_a.py::test_two
0.01s teardown tests/test_a.py::test_two
0.10s call     tests/test_a.py::test_three
"""


def test_the_quickest_case_of_a_function_stays() -> None:
    assert slow(seconds_of(SAID)) == ["tests/test_a.py::test_one[x y]", "tests/test_a.py::test_two"]


def test_what_is_left_out_exists() -> None:
    root = Path(__file__).parent.parent
    gone = [test for test in SLOW if not _defines(root / test.split("::")[0], test.split("::")[1].partition("[")[0])]
    assert not gone, "run make durations, or drop them from tests/slow.txt"


def _defines(file: Path, test: str) -> bool:
    return file.exists() and f"def {test}(" in file.read_text()
