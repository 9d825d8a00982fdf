"""Write tests/slow.txt, the tests that `make test` leaves to `make test-slow`, from what pytest says of durations.

A test is quick if it takes less than `QUICK` seconds. Where no case of a test function is, the quickest case of it
stays in `make test` as long as it takes less than `BEARABLE` seconds. Tests marked slow in the code are slow anyway;
those marked quick never are. What was not run keeps its place, so that `make durations` looks at the quick tests alone
and `make durations WHICH='-m ""'` at all.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from pathlib import Path

QUICK, BEARABLE = 0.35, 1.5
LIST = Path(__file__).with_suffix(".txt")


def seconds_of(said: str) -> dict[str, float]:
    """The seconds of each test, setup and teardown included, in what `pytest --durations=0` prints."""
    seconds = defaultdict[str, float](float)
    for taken, test in re.findall(r"^([\d.]+)s (?:call|setup|teardown) +(\S.*)$", said, re.MULTILINE):
        seconds[test.rstrip()] += float(taken)
    return dict(seconds)


def slow(seconds: dict[str, float]) -> list[str]:
    """The tests that are not quick, but for the quickest case of each function."""
    cases = defaultdict[str, list[str]](list)
    for test in sorted(seconds, key=lambda test: seconds[test]):
        cases[test.partition("[")[0]].append(test)
    stay = {quickest for quickest, *_ in cases.values() if seconds[quickest] < BEARABLE}
    return sorted(test for test in seconds if seconds[test] >= QUICK and test not in stay)


if __name__ == "__main__":
    measured = seconds_of(Path(sys.argv[1]).read_text())
    kept = set(LIST.read_text().splitlines()) - measured.keys()
    LIST.write_text("\n".join(sorted(kept.union(slow(measured)))) + "\n")
