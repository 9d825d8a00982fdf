"""Models run without being held: the same statistics, in less memory than a model takes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from conftest import MODELS, run, tiny_bert, tiny_gpt2, tiny_llama, tiny_vit
from transformers import PretrainedConfig

from hf_align.matching.balanced import Balanced
from hf_align.matching.features import compare, watch
from hf_align.merging.regmean import grams
from hf_align.opening.pairs import Pair, open_pair
from hf_align.running import offload
from hf_align.running.evaluate import Evaluator
from hf_align.running.generate import noise, own_inputs
from hf_align.running.network import Network, batches
from hf_align.running.offload import OffloadedNetwork, network_for
from hf_align.tracing.build import build_without_weights, inventory
from hf_align.tracing.trace import trace


def pair_of(family: str) -> Pair:
    return open_pair(str(MODELS / family / "0"), str(MODELS / family / "1"))


def some() -> dict[str, torch.Tensor]:
    return {"input_ids": torch.randint(60, (6, 12), generator=torch.Generator().manual_seed(0))}


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_statistics_are_those_of_models_in_memory(family: str) -> None:
    """Of balanced models, made from the files as they run; what weights read is known by which weight reads it."""
    pair, inputs = pair_of(family), some()
    models = Balanced.of(pair.spec, pair.a.weights, pair.b.weights)
    here, there = Network(pair.config), OffloadedNetwork(pair.config)
    held, streamed = (compare(n, n.placed(models.a), n.placed(models.b), batches(inputs, 2)) for n in (here, there))
    assert list(held) == list(streamed) and len(held) > 12
    for site, moments in held.items():
        assert torch.equal(moments.correlation, streamed[site].correlation), site
        assert torch.equal(moments.second_moment, streamed[site].second_moment), site
    ours, theirs = (grams(n, n.placed(pair.a.weights), inputs) for n in (here, there))
    assert list(ours) == list(theirs) and all(torch.equal(ours[s], theirs[s]) for s in ours)
    assert Evaluator(here, inputs).loss(pair.a.weights) == Evaluator(there, inputs).loss(pair.a.weights)
    written = [own_inputs(n, n.placed(pair.a.weights), 3, 8, seed=1)["input_ids"] for n in (here, there)]
    assert torch.equal(*written)


@pytest.mark.parametrize(
    "config",
    [tiny_llama(tie_word_embeddings=True), tiny_gpt2(tie_word_embeddings=True), tiny_bert(), tiny_vit()],
    ids=lambda config: config.model_type,
)
def test_what_weights_read_is_known_by_their_names(config: PretrainedConfig) -> None:
    """Tied weights too, which two modules load."""
    rng = torch.Generator().manual_seed(0)
    shapes = inventory(build_without_weights(config)).shapes
    weights = {name: 0.1 * torch.randn(shape, generator=rng) for name, shape in shapes.items()}
    batch = noise(trace(config))
    here, there = (watch(n, n.placed(weights), batch) for n in (Network(config), OffloadedNetwork(config)))
    assert list(here) == list(there) and len(here) > 4
    assert all(torch.equal(here[site], there[site]) for site in here)


def test_nothing_is_held() -> None:
    pair = pair_of("llama")
    network = OffloadedNetwork(pair.config)
    placed = network.placed(pair.a.weights)
    network(placed, some())
    assert all(p.is_meta for p in network.module(placed).parameters()) and not network.names(placed)


@pytest.mark.parametrize(
    "options",
    [
        ("--match", "activation"),
        pytest.param(("--match", "weight", "--method", "regmean"), marks=pytest.mark.slow),
        pytest.param(("--match", "weight", "--method", "regression"), marks=pytest.mark.slow),
    ],
)
def test_a_merge_has_the_same_bytes(options: tuple[str, ...], tmp_path: Path) -> None:
    common = ("merge", MODELS / "llama" / "0", MODELS / "llama" / "1", *options, "--quiet")
    for how in ("--offload", "--no-offload"):
        assert run(*common, how, "-o", tmp_path / how) == 0
    one, other = ((tmp_path / how / "model.safetensors").read_bytes() for how in ("--offload", "--no-offload"))
    assert one == other


@pytest.mark.parametrize("options", [("--match", "learned"), ("--match", "none", "--method", "fisher")])
def test_what_holds_models_says_so(
    options: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ("merge", MODELS / "llama" / "0", MODELS / "llama" / "1", *options, "--quiet", "--offload")
    assert run(*common, "-o", tmp_path / "out") == 2
    assert "where they do not fit or --offload is given" in capsys.readouterr().err


def test_models_that_do_not_fit_are_offloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_llama()
    size = 4 * sum(p.numel() for p in build_without_weights(config).parameters())
    for free, kind in ((100 * size, Network), (2 * size, OffloadedNetwork)):
        monkeypatch.setattr(offload, "get_max_memory", lambda free=free: {"cpu": free})
        assert type(network_for(config, torch.device("cpu"))) is kind
    assert type(network_for(config, torch.device("cpu"), offload=False)) is Network


MEASURED = """
import sys
from pathlib import Path
import torch
from hf_align.matching.features import compare, watch
from hf_align.opening.pairs import open_pair
from hf_align.running.network import Network, batches
from hf_align.running.offload import OffloadedNetwork

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024

pair = open_pair(*sys.argv[2:])
network = {"held": Network, "offloaded": OffloadedNetwork}[sys.argv[1]](pair.config)
before = peak()
inputs = {"input_ids": torch.arange(32).view(2, 16)}
found = compare(network, network.placed(pair.a.weights), network.placed(pair.b.weights), batches(inputs))
print(peak() - before, sum(float(m.second_moment.sum()) for m in found.values()))
"""


@pytest.mark.slow
def test_collecting_activations_takes_less_memory_than_a_model(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=1024, intermediate_size=1536, num_hidden_layers=10, num_attention_heads=8,
        num_key_value_heads=8, tie_word_embeddings=False, dtype="bfloat16",
    )  # fmt: skip
    size = 0
    for seed in range(2):
        torch.manual_seed(seed)
        model = transformers.LlamaForCausalLM(config).bfloat16()
        size = 4 * sum(p.numel() for p in model.parameters())
        model.save_pretrained(tmp_path / str(seed), max_shard_size="100MB")
    taken: dict[str, float] = {}
    found = set()
    for how in ("held", "offloaded"):
        command = [sys.executable, "-c", MEASURED, how, str(tmp_path / "0"), str(tmp_path / "1")]
        # Of tensors below 32 MB, which those of such models are not, malloc keeps what was freed.
        environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000"}
        ran = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
        grown, total = ran.stdout.split()
        taken[how] = int(grown) / size
        found.add(total)
    assert len(found) == 1
    assert taken["offloaded"] < 0.25 and taken["held"] > 2, taken
