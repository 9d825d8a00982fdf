"""Sequential regression: sites are linear maps, copies merge to themselves, streams come to the mean, runs go on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from conftest import run, tiny_bert, tiny_gpt2, tiny_llama, tiny_vit
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.pytorch_utils import Conv1D

import hf_align
from hf_align.errors import HfAlignError
from hf_align.merging import regression
from hf_align.merging.aligned import Aligned
from hf_align.merging.lockstep import divided, program_of, require_same
from hf_align.merging.regression import Regressed, mean_of, regress, ridge
from hf_align.merging.samples import Samples
from hf_align.merging.sites import sites
from hf_align.running.generate import noise
from hf_align.running.network import Network, predictions
from hf_align.symmetry.overrides import symmetries
from hf_align.tracing.execute import run as run_program
from hf_align.tracing.inputs import Example
from hf_align.tracing.trace import Program, build_without_weights, inventory, op_name, trace


def tiny_mixtral() -> PretrainedConfig:
    return transformers.MixtralConfig(
        vocab_size=11, hidden_size=8, intermediate_size=6, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=3, num_experts_per_tok=2, max_position_embeddings=16,
        architectures=["MixtralForCausalLM"])  # fmt: skip


def tiny_convnext() -> PretrainedConfig:
    return transformers.ConvNextConfig(num_channels=1, hidden_sizes=[4, 6], depths=[1, 1], num_stages=2, patch_size=2,
                                       image_size=16, num_labels=3,
                                       architectures=["ConvNextForImageClassification"])  # fmt: skip


CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": tiny_llama,
    "gpt2": tiny_gpt2,
    "tied": lambda: tiny_gpt2(tie_word_embeddings=True),
    "bert": tiny_bert,
    "vit": tiny_vit,
    "mixtral": tiny_mixtral,
    "convnext": tiny_convnext,
}


def weights_of(config: PretrainedConfig, seed: int) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    shapes = inventory(build_without_weights(config)).shapes
    return {n: 0.3 * torch.randn(shape, generator=rng) + ("norm" in n) for n, shape in shapes.items()}


def samples_of(config: PretrainedConfig, count: int = 40) -> Samples:
    inputs = noise(trace(config, batch=count, length=8))
    return Samples(Network(config), inputs, inputs)


def solved(models: Aligned, samples: Samples, weight: float = 0.5) -> Regressed:
    found: dict[str, Tensor] = {}
    regress((models.a, models.b), (1 - weight, weight), samples, mean_of(models, weight), found)
    return Regressed(models, found)


def model_of(config: PretrainedConfig, seed: int) -> nn.Module:
    return Network(config).module(weights_of(config, seed))


@torch.no_grad()
def outputs(model: nn.Module, config: PretrainedConfig) -> Tensor:
    return predictions(model(**noise(trace(config))))


@pytest.mark.parametrize("family", CONFIGS)
def test_copies_merge_to_themselves(family: str) -> None:
    """Copies in another basis, too: the merge computes what they compute."""
    config = CONFIGS[family]()
    a = model_of(config, 0)
    b = hf_align.randomize(a, seed=1)
    expected, naive, found = (
        outputs(m, config)
        for m in (a, hf_align.merge([a, b], align="none"), hf_align.merge([a, b], method="regression"))
    )
    scale = float(expected.abs().max())
    assert float((naive - expected).abs().max()) > 0.05 * scale
    torch.testing.assert_close(found, expected, atol=1e-3 * scale, rtol=0)


@pytest.mark.parametrize(("family", "share"), [("llama", 0.8), ("gpt2", 0.6), ("vit", 0.5), ("mixtral", 0.8)])
def test_the_stream_comes_to_the_mean(family: str, share: float) -> None:
    config = CONFIGS[family]()
    samples = samples_of(config, 250)
    models = Aligned(symmetries(config), weights_of(config, 0), weights_of(config, 1))
    mix = solved(models, samples)
    program = trace(config, batch=250, length=8)
    last = [site for site in sites(program) if site.beside][-1]
    (stream,) = last.node.users

    def streams(weights: dict[str, Tensor]) -> Tensor:
        found: Tensor = run_program(program, weights, samples.a)[stream]
        return found

    aim = (streams(dict(models.a)) + streams(dict(models.b))) / 2
    mean, found = (
        float((streams({n: m(n, 0.5) for n in models.a}) - aim).norm()) for m in (Regressed(models, {}), mix)
    )
    assert found < share * mean


MODULES: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "groups": (nn.Conv2d(4, 6, 2, stride=2, groups=2), (3, 4, 6, 6)),
    "padded": (nn.Conv1d(3, 5, 3, padding=1), (3, 3, 7)),
    "dilated": (nn.Conv3d(2, 4, 2, dilation=2, bias=False), (3, 2, 4, 4, 4)),
    "linear": (nn.Linear(4, 3), (3, 5, 4)),
    "conv1d of gpt2": (Conv1D(3, 4), (3, 5, 4)),
}


@pytest.mark.parametrize("kind", MODULES)
def test_a_site_is_a_product_of_rows(kind: str) -> None:
    module, shape = MODULES[kind]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    exported = torch.export.export(module, (x,))
    names = {n: n.name.removeprefix("p_") for n in exported.graph.nodes if n.name.startswith("p_")}
    shapes = {n: tuple(p.shape) for n, p in module.named_parameters()}
    program = Program(PretrainedConfig(), exported.graph, names, {}, shapes, {}, {}, {}, Example({}, {}))
    (site,) = sites(program)
    weight = site.results(module(x)) - (0 if module.bias is None else module.bias.reshape(site.groups, 1, -1))
    solved = torch.linalg.lstsq(site.rows(x), weight).solution
    assert site.bias == (None if module.bias is None else "bias")
    torch.testing.assert_close(site.stored(solved), dict(module.named_parameters())[site.parameter], atol=1e-4, rtol=0)


def test_a_weight_that_is_read_twice_keeps_the_mean() -> None:
    config = tiny_gpt2(tie_word_embeddings=True)
    models = Aligned(symmetries(config), weights_of(config, 0), weights_of(config, 1))
    mix = solved(models, samples_of(config))
    assert "transformer.wte.weight" not in mix.solved and "transformer.wte.weight" in mix.note
    assert "transformer.h.0.attn.c_attn.weight" in mix.solved and "c_attn" not in mix.note


def test_the_graph_must_compute_what_the_model_computes() -> None:
    config = tiny_llama()
    weights, samples = weights_of(config, 0), samples_of(config)
    part = divided(samples.a)[0]
    program = program_of(samples.network, part)
    require_same(program, samples.network, weights, part)
    silu = next(n for n in program.graph.nodes if n.op == "call_function" and op_name(n) == "silu")
    silu.target = torch.ops.aten.relu.default
    with pytest.raises(HfAlignError, match="does not compute"):
        require_same(program, samples.network, weights, part)


def test_the_first_examples_fill_the_last_part() -> None:
    parts = divided({"x": torch.arange(70)})
    assert [len(p["x"]) for p in parts] == [32, 32, 32]
    assert parts[2]["x"].tolist() == [*range(64, 70), *range(26)]
    assert len(divided({"x": torch.arange(5)})[0]["x"]) == 5


def test_a_model_at_either_end(family: str = "llama") -> None:
    config = CONFIGS[family]()
    models = Aligned(symmetries(config), weights_of(config, 0), weights_of(config, 1))
    for weight, own in ((0.0, models.a), (1.0, models.b)):
        mix = solved(models, samples_of(config), weight)
        for name, tensor in own.items():
            torch.testing.assert_close(mix(name, weight), tensor, atol=1e-3, rtol=0)


@pytest.mark.parametrize("half", [0, 1], ids=["between weights", "between a weight and its bias"])
def test_what_is_solved_is_not_solved_again(half: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that goes on ends in the same bits."""
    config = tiny_vit()
    models, samples = Aligned(symmetries(config), weights_of(config, 0), weights_of(config, 1)), samples_of(config)
    whole = solved(models, samples).solved
    found = dict(list(whole.items())[: len(whole) // 2 + half])
    calls = []
    monkeypatch.setattr(regression, "ridge", lambda *x: calls.append(x) or ridge(*x))
    regress((models.a, models.b), (0.5, 0.5), samples, mean_of(models, 0.5), found)
    assert 0 < len(calls) < len(whole) and found.keys() == whole.keys()
    assert all(torch.equal(found[n], whole[n]) for n in whole)


def test_the_command_says_what_keeps_the_mean(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in (0, 1):
        model_of(tiny_llama(), seed).save_pretrained(tmp_path / str(seed))
    folders = tmp_path / "0", tmp_path / "1"
    assert run("merge", *folders, "--method", "regression", "-o", tmp_path / "out", "--json") == 0
    (note,) = json.loads(capsys.readouterr().out)["notes"]
    assert "regression solves 8 of 12 weights; the mean is kept of model.embed_tokens.weight" in note
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "Regression solves 8 of 12 weights" in card
