"""What a merge holds to whatever the models are: precision, and memory that neither depth nor shards move."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from conftest import MODELS, run
from safetensors.torch import load_file, save_file

from hf_align.jobs.opened import Basis, Opened
from hf_align.matching.memory import of_matching
from hf_align.matching.weights import steps_of
from hf_align.opening.pairs import open_pair
from hf_align.settings.options import Options

LLAMA = MODELS / "llama"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def stored(folder: Path, index: int, dtype: torch.dtype) -> Path:
    """A model that ships, in another dtype."""
    folder.mkdir()
    for file in (LLAMA / str(index)).iterdir():
        if file.suffix == ".json":
            (folder / file.name).write_bytes(file.read_bytes())
    tensors = {n: t.to(dtype) for n, t in load_file(LLAMA / str(index) / "model.safetensors").items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def alignment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("matched") / "out"
    assert run("align", LLAMA / "0", LLAMA / "1", "-o", out, "--quiet") == 0
    return out / "alignment.safetensors"


@pytest.mark.parametrize("kept", [DTYPES[0], *(pytest.param(d, marks=pytest.mark.slow) for d in DTYPES[1:])])
def test_an_aligned_merge_computes_in_float32_and_rounds_once(
    kept: torch.dtype, alignment: Path, tmp_path: Path
) -> None:
    """From every dtype into every dtype: what is written is the float32 result, rounded."""
    pair = [stored(tmp_path / str(i), i, kept) for i in range(2)]
    written = {}
    for dtype in (None, *DTYPES):
        out = tmp_path / f"out {dtype}"
        chosen = () if dtype is None else ("--dtype", str(dtype).removeprefix("torch."))
        assert run("merge", *pair, "-o", out, "--alignment", alignment, "--quiet", *chosen) == 0
        written[dtype] = load_file(out / "model.safetensors")
    exact = written[torch.float32]
    options = Options(alignment=alignment, device="cpu")
    models = Opened((open_pair(*map(str, pair)),), options)
    a, b = Basis(models, models.find()).weights
    for name, tensor in exact.items():
        expected = torch.lerp(a[name], b[name], 0.5)
        assert expected.dtype == torch.float32 and torch.equal(tensor, expected), name
        for dtype in (None, *DTYPES):
            found = written[dtype][name]
            assert found.dtype == (dtype or kept) and torch.equal(found, tensor.to(found.dtype)), (name, dtype)


MEASURED = """
import sys
from pathlib import Path
from hf_align import matching
from hf_align.matching import memory, weight_cache
weight_cache.CACHED = memory.CACHED = 0  # as for models of which what is kept is next to nothing
from hf_align.cli.app import main
try:
    main()
finally:
    status = Path("/proc/self/status").read_text().splitlines()
    print(next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) * 1024, file=sys.stderr)
"""


@pytest.mark.slow
def test_memory_of_an_aligned_merge_does_not_grow_with_depth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight layers take what two take, and their elements; the bound says so, and it is held."""
    monkeypatch.setattr("hf_align.matching.memory.CACHED", 0)
    taken, bounds = [], []
    for layers in (2, 8):
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=128, hidden_size=512, intermediate_size=768, num_hidden_layers=layers, num_attention_heads=8,
            num_key_value_heads=8, tie_word_embeddings=False, dtype="bfloat16",
        )  # fmt: skip
        model = transformers.LlamaForCausalLM(config).bfloat16()
        pair = [str(tmp_path / f"{layers} {side}") for side in "ab"]
        model.save_pretrained(pair[0])
        for parameter in model.parameters():  # a pair that is matched in few sweeps
            parameter.data.add_(0.01 * torch.randn_like(parameter))
        model.save_pretrained(pair[1])
        spec = open_pair(*pair).spec
        bounds.append(of_matching(spec, steps_of(spec)))
        command = [sys.executable, "-c", MEASURED, "merge", *pair, "-o", str(tmp_path / f"out {layers}"), "--quiet"]
        # Of tensors below 32 MB malloc keeps what was freed, unless it is told otherwise.
        environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000"}
        ran = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
        taken.append(int(ran.stderr.splitlines()[-1]))
    models = 6 * 8 * (4 * 512**2 + 3 * 512 * 768)  # what six layers are in float64
    assert taken[1] - taken[0] < 0.5 * models, (taken, models)  # nearly three times `models` if weights were kept
    assert bounds[1] - bounds[0] < 0.3 * models
