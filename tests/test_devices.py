"""Where things are computed, with an accelerator and without one."""

from __future__ import annotations

from pathlib import Path

import pytest
from forks import forked, pytest_main

from hf_align.runtime.devices import CPU, Devices


@pytest.mark.parametrize("chosen", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_with_an_accelerator(chosen: str) -> None:
    checks = Path(__file__).with_name("elsewhere_checks.py")
    ran = forked(pytest_main, "-q", "--tb=short", "--show-capture=no", "-p", "no:cacheprovider", "-m", chosen, checks)
    assert ran.returncode == 0 and " passed" in ran.stdout, ran.stdout


def test_without_one() -> None:
    assert Devices.choose() == Devices(CPU, CPU)
