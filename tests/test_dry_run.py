"""--dry-run: what it says comes true, and it reads no weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from conftest import MODELS, run
from hub_server import Hub
from test_plain import model, noise, peak

PAIR = (MODELS / "llama" / "0", MODELS / "llama" / "1")


def planned(capsys: pytest.CaptureFixture[str], *arguments: object, status: int = 0) -> dict[str, object]:
    assert run("merge", *arguments, "--dry-run", "--json") == status
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("matching", ["none", "weight"])
def test_the_plan_comes_true(matching: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (*PAIR, "-o", tmp_path / "out", "--match", matching, "--max-shard-size", "1MB")
    found = planned(capsys, *arguments)
    assert found["compatible"] and not (tmp_path / "out").exists()
    assert run("merge", *arguments, "--quiet") == 0
    sizes = {p.name: p.stat().st_size for p in (tmp_path / "out").glob("*.safetensors")}
    assert found["shards"] == sizes and len(sizes) > 1
    assert found["bytes_to_write"] == found["disk_needed"] == sum(sizes.values())
    inputs = [folder / "model.safetensors" for folder in PAIR]
    headers = [8 + int.from_bytes(file.read_bytes()[:8], "little") for file in inputs]
    assert found["bytes_to_read"] == sum(file.stat().st_size for file in inputs) - sum(headers)
    assert found["bytes_to_fetch"] == 0
    assert bool(found["spaces"]) == (matching == "weight")


def test_no_weights_are_read(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.preadv", None)
    for matching in ("none", "weight"):
        assert planned(capsys, *PAIR, "--match", matching)["compatible"]


def test_what_does_not_fit_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = planned(capsys, PAIR[0], MODELS / "gpt2" / "0", status=2)
    assert not other["compatible"] and "they do not merge" in str(other["reason"])
    bad = tmp_path / "bad"
    shutil.copytree(PAIR[1], bad)
    (bad / "model.safetensors").write_bytes((bad / "model.safetensors").read_bytes()[:-1])
    assert "truncated" in str(planned(capsys, PAIR[0], bad, status=2)["reason"])
    assert run("merge", *PAIR, "--dry-run", "--max-shard-size", "much") == 2
    assert "not a shard size" in capsys.readouterr().err


def test_it_reads_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("merge", *PAIR, "--dry-run") == 0
    printed = capsys.readouterr().out
    assert "llama: compatible" in printed and "memory" in printed and "RotaryCommutant" in printed
    assert ": 30 tensors in 1 file\n" in printed
    assert max(map(len, printed.splitlines())) <= 80
    assert "and both models" not in printed
    assert run("merge", *PAIR, "--dry-run", "--match", "learned") == 0
    assert "and both models" in capsys.readouterr().out


def test_of_the_hub_only_headers_are_read(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    for name, folder in zip("ab", PAIR, strict=True):
        hub.add(f"org/{name}", folder)
    for matching in ("none", "weight"):
        found = planned(capsys, "org/a", "org/b", "--match", matching)
        assert found["compatible"] and found["bytes_to_fetch"] == found["bytes_to_read"]
    assert all(given for path, given in hub.ranges if path.endswith(".safetensors"))


@pytest.mark.parametrize("method", ["linear", "slerp"])
def test_the_bound_on_memory_holds_without_alignment(
    method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small, large = ([model(tmp_path / f"{n}{size}", {"w": noise(i, size).bfloat16()}) for i, n in enumerate("ab")]
                    for size in (64, 2**24))  # fmt: skip
    options = ("--match", "none", "--method", method)
    bound = int(planned(capsys, *large, *options)["peak_bytes"])  # type: ignore[call-overload]
    base, taken = (peak("merge", *pair, "-o", f"{pair[0]}.out", *options, "--quiet") for pair in (small, large))
    assert taken - base <= bound


@pytest.mark.slow
@pytest.mark.parametrize(("vocabulary", "units"), [(2**16, 96), (64, 2560)])
def test_the_bound_on_memory_holds_with_alignment(
    vocabulary: int, units: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A table of 32 MiB in float64 beside little else; cross matrices of 50 MiB, two layers of three each."""
    for seed in range(4):
        torch.manual_seed(seed)
        config = transformers.LlamaConfig(
            vocab_size=vocabulary if seed < 2 else 64, hidden_size=64, intermediate_size=units if seed < 2 else 96,
            num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=False,
            dtype="bfloat16",
        )  # fmt: skip
        transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(tmp_path / str(seed))
    large, small = (tmp_path / "0", tmp_path / "1"), (tmp_path / "2", tmp_path / "3")
    options = ("--match", "weight")
    bound = int(planned(capsys, *large, *options)["peak_bytes"])  # type: ignore[call-overload]
    base, taken = (
        peak("merge", *pair, "-o", tmp_path / f"out{pair[0].name}", *options, "--quiet") for pair in (small, large)
    )
    assert 0.2 * bound < taken - base <= bound
