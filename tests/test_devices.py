"""Where things are computed, with an accelerator and without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import run, save, tiny_bert, tiny_llama, tiny_mixtral, tiny_t5, tiny_vit
from forks import forked, pytest_main
from transformers import PretrainedConfig

from hf_align.runtime.alone import alone
from hf_align.runtime.devices import CPU, Devices


@pytest.mark.parametrize(
    "chosen", [pytest.param("not slow", marks=pytest.mark.quick), pytest.param("slow", marks=pytest.mark.slow)]
)
def test_with_an_accelerator(chosen: str) -> None:
    checks = Path(__file__).with_name("elsewhere_checks.py")
    ran = forked(pytest_main, "-q", "--tb=short", "--show-capture=no", "-p", "no:cacheprovider", "-m", chosen, checks)
    assert ran.returncode == 0 and " passed" in ran.stdout, ran.stdout


is_there = pytest.mark.skipif(not torch.accelerator.is_available(), reason="there is no accelerator")


@is_there
@pytest.mark.parametrize("config", [tiny_llama(), tiny_mixtral(), tiny_t5(), tiny_vit(), tiny_bert()],
                         ids=lambda config: config.model_type)  # fmt: skip
def test_on_a_real_one(config: PretrainedConfig, tmp_path: Path) -> None:
    models = [save(tmp_path / str(seed), config, seed) for seed in (0, 1)]
    assert run("merge", *models, "-o", tmp_path / "out", "--effort", "good", "--quiet") == 0


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is one")
def test_without_one() -> None:
    assert Devices.choose() == Devices(CPU, CPU)


def test_products_are_full_whatever_the_caller_allows() -> None:
    """Both of torch's ways to say that float32 may be rounded are taken back in a call, and stand again after it."""
    backends: Any = torch.backends
    said: list[tuple[object, ...]] = []

    def precisions() -> tuple[object, ...]:
        return (torch.get_float32_matmul_precision(), backends.cudnn.allow_tf32, backends.cudnn.conv.fp32_precision,
                backends.mkldnn.matmul.fp32_precision, backends.mkldnn.conv.fp32_precision)  # fmt: skip

    torch.set_float32_matmul_precision("medium")
    backends.mkldnn.conv.fp32_precision = "bf16"
    before = precisions()
    try:
        alone(lambda: said.append(precisions()))()
        assert precisions() == before and before[-1] == "bf16" and before[1] is True
    finally:
        torch.set_float32_matmul_precision("highest")
        backends.mkldnn.conv.fp32_precision = "none"
    assert said == [("highest", False, "ieee", "ieee", "ieee")]
