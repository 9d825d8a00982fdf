"""Where things are computed, with an accelerator and without one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hf_align.devices import CPU, Devices


@pytest.mark.parametrize("chosen", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_with_an_accelerator(chosen: str) -> None:
    checks = Path(__file__).with_name("elsewhere_checks.py")
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "--show-capture=no", "-m", chosen, str(checks)]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0 and " passed" in ran.stdout, ran.stdout


def test_without_one() -> None:
    assert Devices.choose() == Devices(CPU, CPU)
