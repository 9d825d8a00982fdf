"""Sequential regression: sites are linear maps, copies merge to themselves, streams come to the mean, runs go on."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
import torch
import transformers
from conftest import run, tiny_bert, tiny_gpt2, tiny_llama, tiny_mixtral, tiny_vit
from torch import Tensor, fx, nn
from transformers import PretrainedConfig
from transformers.pytorch_utils import Conv1D

import hf_align
from hf_align.errors import HfAlignError
from hf_align.merging import choice, experts, fits, readings, regression
from hf_align.merging.aligned import Aligned
from hf_align.merging.experts import expert_sites
from hf_align.merging.fits import raised, ridge
from hf_align.merging.lockstep import Lockstep, Lookup, divided, program_of, require_same
from hf_align.merging.regression import Regressed, mean_of, regress, regression_of
from hf_align.merging.samples import Samples
from hf_align.merging.selection import FromGram, FromRows, Given, costs, disjoint, eliminated, independent, units
from hf_align.merging.sites import arrivals, sites
from hf_align.running.generate import noise
from hf_align.running.network import Gram, Network, predictions
from hf_align.symmetry.derivation.derive import derive
from hf_align.symmetry.overrides.overrides import symmetries
from hf_align.tracing.build import build_without_weights, inventory
from hf_align.tracing.example import Example
from hf_align.tracing.execute import run as run_program
from hf_align.tracing.ops import op_name
from hf_align.tracing.program import Program
from hf_align.tracing.trace import trace


def tiny_qwen2_moe() -> PretrainedConfig:
    """An expert that all tokens share is added before what all of them write is laid out anew."""
    return transformers.Qwen2MoeConfig(
        vocab_size=11, hidden_size=8, moe_intermediate_size=6, shared_expert_intermediate_size=5, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, num_experts=3, num_experts_per_tok=2, max_position_embeddings=16,
        architectures=["Qwen2MoeForCausalLM"])  # fmt: skip


def tiny_convnext() -> PretrainedConfig:
    return transformers.ConvNextConfig(num_channels=1, hidden_sizes=[4, 6], depths=[1, 1], num_stages=2, patch_size=2,
                                       image_size=16, num_labels=3,
                                       architectures=["ConvNextForImageClassification"])  # fmt: skip


def tiny_falcon() -> PretrainedConfig:
    """It transposes its weights before it multiplies by them."""
    return transformers.FalconConfig(vocab_size=11, hidden_size=8, num_hidden_layers=2, num_attention_heads=2,
                                     ffn_hidden_size=6, architectures=["FalconForCausalLM"])  # fmt: skip


def tiny_siglip() -> PretrainedConfig:
    """One table of positions is added to the patches of every picture."""
    return transformers.SiglipVisionConfig(hidden_size=8, num_hidden_layers=2, num_attention_heads=2, image_size=8,
                                           intermediate_size=6, patch_size=2,
                                           architectures=["SiglipVisionModel"])  # fmt: skip


CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": tiny_llama,
    "gpt2": tiny_gpt2,
    "tied": lambda: tiny_gpt2(tie_word_embeddings=True),
    "bert": tiny_bert,
    "vit": tiny_vit,
    "mixtral": tiny_mixtral,
    "shared expert": tiny_qwen2_moe,
    "convnext": tiny_convnext,
    "falcon": tiny_falcon,
    "siglip": tiny_siglip,
}


def weights_of(config: PretrainedConfig, seed: int) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    shapes = inventory(build_without_weights(config)).shapes
    return {n: 0.3 * torch.randn(shape, generator=rng) + ("norm" in n) for n, shape in shapes.items()}


def samples_of(config: PretrainedConfig, count: int = 40) -> Samples:
    inputs = noise(trace(config, batch=count, length=8))
    return Samples(Network(config), (inputs, inputs))


def solved(models: Aligned, samples: Samples, weight: float = 0.5) -> Regressed:
    return regression_of((models.a, models.b), (1 - weight, weight), samples, models.spec)


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
    copies = [a, *(hf_align.randomize(a, seed=seed) for seed in range(1, 3 if family == "llama" else 2))]
    expected, naive, found = (
        outputs(m, config)
        for m in (a, hf_align.merge(copies, align="none"), hf_align.merge(copies, method="regression"))
    )
    scale = float(expected.abs().max())
    assert float((naive - expected).abs().max()) > 0.05 * scale
    torch.testing.assert_close(found, expected, atol=1e-5 * scale, rtol=0)


@pytest.mark.parametrize("family", [name for name in CONFIGS if name != "tied"])  # of that all are chosen
def test_weights_are_fitted_to_what_the_merged_model_computes(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a weight reads changes no more once it has been fitted. Weights that are transposed before they are
    multiplied were fitted, and all that followed was fitted as if they had not been."""
    config, read = CONFIGS[family](), dict[tuple[fits.Fit, str], list[Tensor]]()

    for kind in (fits.WeightFit, readings.ReadFit):
        counted = kind.add

        def add(
            self: fits.Fit, lookups: Sequence[Lookup], steps: Lockstep, shares: Sequence[float], counted: Any = counted
        ) -> None:
            for value in self.reads:
                read.setdefault((self, value.name), []).append(lookups[-1](value))
            counted(self, lookups, steps, shares)

        monkeypatch.setattr(kind, "add", add)
    models, samples = [weights_of(config, seed) for seed in (0, 1)], samples_of(config, 16)
    samples = Samples(samples.network, (samples.each[0],) * 2)
    found = dict(regression_of(models, (0.5, 0.5), samples, symmetries(config)))
    computed = run_program(program_of(samples.network, samples.all), found, samples.all)
    by_name = {node.name: value for node, value in computed.items()}
    assert read
    for (_, name), parts in read.items():
        torch.testing.assert_close(torch.cat(parts), by_name[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "share", "parts"),
    [
        ("llama", 0.8, (0.5, 0.5)),
        ("gpt2", 0.6, (0.5, 0.5)),
        ("vit", 0.5, (0.5, 0.5)),
        ("mixtral", 0.8, (0.5, 0.5)),
        ("llama", 0.7, (0.1, 0.1, 0.8)),
    ],
    ids=["llama", "gpt2", "vit", "mixtral", "three llamas"],
)
def test_the_stream_comes_to_the_mean(family: str, share: float, parts: tuple[float, ...]) -> None:
    config = CONFIGS[family]()
    samples = samples_of(config, 250)
    models = [weights_of(config, seed) for seed, _ in enumerate(parts)]
    found = regression_of(models, parts, samples, symmetries(config))
    program = trace(config, batch=250, length=8)
    last = [site for site in sites(program) if site.beside][-1]
    (stream,) = last.node.users

    def streams(weights: dict[str, Tensor]) -> Tensor:
        found: Tensor = run_program(program, weights, samples.all)[stream]
        return found

    aim = sum(part * streams(model) for part, model in zip(parts, models, strict=True))
    apart, of_mean = (float((streams(dict(m)) - aim).norm()) for m in (found, mean_of(models, parts)))
    assert apart < share * of_mean


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
    part = divided(samples.all)[0]
    program = program_of(samples.network, part)
    require_same(program, samples.network, weights, part)
    silu = next(n for n in program.graph.nodes if n.op == "call_function" and op_name(n) == "silu")
    silu.target = torch.ops.aten.relu.default
    with pytest.raises(HfAlignError, match="does not compute"):
        require_same(program, samples.network, weights, part)


def test_numbers_that_overflow_are_no_fault() -> None:
    """A change that is added 1e38 times left a Gram matrix without factors, and a message that asked for a report."""
    config = tiny_llama()
    models = Aligned(symmetries(config), weights_of(config, 0), weights_of(config, 1))
    with pytest.raises(HfAlignError, match=r"no regression finds .*: numbers that the models compute are not finite"):
        solved(models, samples_of(config), 1e38)


def test_low_precision_stays() -> None:
    config = tiny_llama()
    whole, low = (
        Aligned(symmetries(config), *({n: t.to(dtype) for n, t in weights_of(config, seed).items()} for seed in (0, 1)))
        for dtype in (torch.float32, torch.bfloat16)
    )
    found, mix = (solved(models, samples_of(config)) for models in (low, whole))
    assert all(found[n].dtype == torch.bfloat16 for n in whole.a)
    apart = [outputs(Network(config).module({n: m[n].float() for n in whole.a}), config) for m in (found, mix)]
    assert float((apart[0] - apart[1]).norm()) < 0.5 * float(apart[1].norm())


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
            torch.testing.assert_close(mix[name], tensor, atol=1e-3, rtol=0)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_statistics_of_one_layer_are_held(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def held(depth: int) -> int:
        """The most entries of statistics that are alive at once."""
        config = CONFIGS[family]()
        config.num_hidden_layers = depth
        alive, most = WeakSet[Gram](), 0

        class Counted(Gram):
            def add(self, x: Tensor, y: Tensor) -> None:
                nonlocal most
                super().add(x, y)
                alive.add(self)
                most = max(most, sum(gram.total.numel() for gram in alive))

        monkeypatch.setattr(Network, "gram", lambda _: Counted())
        models = [weights_of(config, seed) for seed in (0, 1)]
        regression_of(models, (0.5, 0.5), samples_of(config), derive(trace(config)))
        return most

    assert held(4) == held(2) > 0


def test_what_units_compute_is_not_held_for_all_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was, of every model and every step of the activation: thirteen gigabytes for a GPT-2 of 25 MB."""

    def held(units: int) -> int:
        """The most entries of values that wait for what reads them."""
        config, most = tiny_gpt2(n_inner=units), 0

        class Watched(Lockstep):
            def stage(self, stop: Collection[fx.Node]) -> list[fx.Node]:
                nonlocal most
                values = [v for model in self._values for part in model for v in part.values()]
                most = max(most, sum(v.numel() for v in values if isinstance(v, Tensor)))
                return super().stage(stop)

        monkeypatch.setattr(regression, "Lockstep", Watched)
        models = [weights_of(config, seed) for seed in (0, 1)]
        regression_of(models, (0.5, 0.5), samples_of(config), derive(trace(config)))
        return most

    assert held(60) == held(6) > 0


@pytest.mark.parametrize("half", [0, 1], ids=["between weights", "between a weight and its bias"])
def test_what_is_solved_is_not_solved_again(half: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that goes on ends in the same bits."""
    config = tiny_vit()
    models, samples = Aligned(symmetries(config), weights_of(config, 0), weights_of(config, 1)), samples_of(config)
    calls, solution = [], regression._solution
    monkeypatch.setattr(regression, "_solution", lambda fit: calls.append(fit) or solution(fit))
    whole = solved(models, samples).solved
    fits_of_all = len(calls)
    found = dict(list(whole.items())[: len(whole) // 2 + half])
    calls.clear()
    both = (models.a, models.b)
    regress(both, (0.5, 0.5), samples, mean_of(both, (0.5, 0.5)), found, choosing=models.spec)
    assert 0 < len(calls) < fits_of_all and found.keys() == whole.keys()
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


# Experts ------------------------------------------------------------------------------------------------------------


def test_products_with_experts_go_into_their_sums() -> None:
    config = tiny_mixtral()
    program = trace(config, batch=3, length=8)
    weights, inputs = weights_of(config, 0), noise(program)
    values = run_program(program, weights, inputs)
    first, second = expert_sites(program)
    for site in (first, second):
        weight, numbers, value = weights[site.parameter], values[site.numbers], values[site.value]
        torch.testing.assert_close(site.product(weight, numbers, value), values[site.node])
        rows, results = site.rows(value).flatten(0, 1), site.rows(values[site.node]).flatten(0, 1)
        assert rows.shape[1] == site.inputs and site.experts == 3
        matrices = torch.randn(3, rows.shape[1], results.shape[1], generator=torch.Generator().manual_seed(0))
        given = site.product(site.stored(matrices), numbers, value)
        torch.testing.assert_close(site.rows(given).flatten(0, 1), (rows[:, None] @ matrices[numbers])[:, 0])
    assert not first.way and second.way and second.beside
    result, end = values[second.node], values[second.way[-1]]
    factors, places = arrivals(second.way, result, second.node, {**weights_by_node(program, weights), **values}.get)
    sums = torch.zeros(end.numel()).double().index_add(0, places.flatten(), (factors * result).flatten())
    torch.testing.assert_close(sums.view_as(end).float(), end)


def weights_by_node(program: Program, weights: Mapping[str, Tensor]) -> dict[fx.Node, Tensor]:
    return {node: weights[name] for node, name in program.parameters.items()}


@pytest.mark.parametrize(("columns", "least", "most"), [(1, 0.1, 0.28), (experts.COLUMNS, 0.0, 0.02)],
                         ids=["one by one", "together"])  # fmt: skip
def test_experts_make_up_for_what_their_sums_lack(
    columns: int, least: float, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two models apart in what experts write: starting at the one, the other is found again, if all are found
    together."""
    monkeypatch.setattr(experts, "COLUMNS", columns)
    config, written = tiny_mixtral(), "model.layers.0.mlp.experts.down_proj"
    samples = samples_of(config, 250)
    start = weights_of(config, 0)
    aim = {**start, written: weights_of(config, 1)[written]}
    found: dict[str, Tensor] = {}
    regress((start, aim), (0.0, 1.0), samples, start, found)
    apart = [outputs(Network(config).module(w), config) for w in ({**start, **found}, start, aim)]
    missing, before = (float((out - apart[2]).norm()) for out in apart[:2])
    assert least * before <= missing < most * before


def test_an_expert_that_no_token_chooses_keeps_the_mean() -> None:
    config = tiny_mixtral()
    config.num_experts_per_tok = 1
    models = [weights_of(config, seed) for seed in (0, 1)]
    router = "model.layers.0.mlp.gate.weight"
    for model in models:
        model[router][1], model[router][2] = -model[router][0], 0
    mean = mean_of(models, (0.5, 0.5))
    found = regression_of(models, (0.5, 0.5), samples_of(config, 250), symmetries(config))
    for name in (n for n in mean if "experts" in n):
        torch.testing.assert_close(found[name][2], mean[name][2])
        assert not torch.allclose(found[name][:2], mean[name][:2], atol=1e-2)


# Units chosen out of both -------------------------------------------------------------------------------------------


def program_and_weights(module: nn.Module, x: Tensor) -> tuple[Program, dict[str, Tensor]]:
    exported = torch.export.export(module.eval(), (x,))
    signature = exported.graph_signature
    nodes = {n.name: n for n in exported.graph.nodes}
    names = {nodes[k]: v for k, v in signature.inputs_to_parameters.items()}
    weights = {n: p.detach() for n, p in module.named_parameters()}
    inputs = {nodes[k]: "x" for k in signature.user_inputs}
    shapes = {n: tuple(p.shape) for n, p in weights.items()}
    example, read = Example({"x": x}, {}), frozenset(shapes)
    return Program(PretrainedConfig(), exported.graph, names, inputs, shapes, {}, {}, {}, example, opened=read), weights


@pytest.mark.parametrize("between", [nn.GELU(), nn.Softmax(-1)], ids=["alone", "seen by all"])
def test_units_that_see_each_other_are_not_chosen(between: nn.Module) -> None:
    torch.manual_seed(0)
    x = torch.randn(32, 5)
    program, a = program_and_weights(nn.Sequential(nn.Linear(5, 6), between, nn.Linear(6, 3)), x)
    spec = derive(program)
    b = {n: torch.randn(t.shape) for n, t in a.items()}
    found = list(units(program, spec, sites(program)))
    assert len(found) == 1
    kept = list(independent(found, (a, b), program, Network(PretrainedConfig()), {"x": x}))
    assert len(kept) == (1 if isinstance(between, nn.GELU) else 0)


@pytest.mark.parametrize(("layers", "chosen"), [(2, 1), (3, 1), (4, 2), (5, 2)])
def test_of_maps_one_after_another_every_other_width_is_chosen(layers: int, chosen: int) -> None:
    """A weight that reads one width writes the next, and is solved once."""
    torch.manual_seed(0)
    sizes = [5, *[6] * (layers - 1), 3]
    maps = [nn.Linear(i, o) for i, o in itertools.pairwise(sizes)]
    model = nn.Sequential(*(part for each in maps for part in (each, nn.Tanh())))
    x = torch.randn(256, 5)
    program, _ = program_and_weights(model, x)
    spec = derive(program)
    found = list(units(program, spec, sites(program)))
    kept = disjoint(found, program)
    assert len(found) == layers - 1 and len(kept) == chosen
    nodes = [site.node for each in kept for site in each.sites]
    assert len(nodes) == len(set(nodes))
    twin = hf_align.randomize(model, seed=1, inputs=x)
    merged = hf_align.merge([model, twin], inputs=x, method="regression", data=[(x,)])
    torch.testing.assert_close(merged(x), model(x), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("size", [1, 3], ids=["units", "heads"])
def test_the_units_that_the_target_is_made_of_are_chosen(size: int) -> None:
    """Some of A and some of B; the others are as large, and alike in part."""
    rng = torch.Generator().manual_seed(0)
    count, rows = 6, 400
    h = torch.randn(rows, 2 * count * size, generator=rng, dtype=torch.float64)
    h = h + 0.5 * torch.randn(rows, 1, generator=rng, dtype=torch.float64)
    columns = torch.arange(2 * count * size).reshape(2 * count, size)
    wanted = torch.tensor([0, 2, 3, 7, 10, 11])
    true = torch.zeros(2 * count * size, 4, dtype=torch.float64)
    true[columns[wanted].flatten()] = torch.randn(len(wanted) * size, 4, generator=rng, dtype=torch.float64)
    start = torch.randn(2 * count * size, 4, generator=rng, dtype=torch.float64)
    chosen = eliminated(FromGram(h.T @ h, h.T @ (h @ true - h @ start)), start, columns, count)
    assert chosen.tolist() == wanted.tolist()


def test_of_two_units_that_do_the_same_one_is_left() -> None:
    rng = torch.Generator().manual_seed(0)
    h = torch.randn(100, 40, generator=rng, dtype=torch.float64)
    both = torch.cat([h, h], 1)
    half = torch.randn(40, 3, generator=rng, dtype=torch.float64) / 2
    given = FromGram(both.T @ both, torch.zeros(80, 3).double())
    chosen = eliminated(given, torch.cat([half, half]), torch.arange(80)[:, None], 40)
    assert sorted((chosen % 40).tolist()) == list(range(40))


def test_the_costs_are_those_of_the_least_squares() -> None:
    """What the squares grow by when a head of two columns is left out, by solving anew."""
    rng = torch.Generator().manual_seed(0)
    h, y = (torch.randn(50, n, generator=rng, dtype=torch.float64) for n in (7, 3))
    columns = torch.arange(6).reshape(3, 2)

    def squares(kept: list[int]) -> float:
        part = h[:, kept]
        return float((y - part @ torch.linalg.lstsq(part, y).solution).square().sum())

    step, blocks = FromGram(h.T @ h, h.T @ y, ridge=1e-12).solution(columns)
    for unit, cost in zip(columns.tolist(), costs(blocks, step[columns]).tolist(), strict=True):
        assert cost == pytest.approx(squares([i for i in range(7) if i not in unit]) - squares(list(range(7))))


@pytest.mark.parametrize("rows", [5, 12])
def test_rows_give_what_their_products_give(rows: int) -> None:
    """Of all columns and of some, whose coefficients start elsewhere."""
    rng = torch.Generator().manual_seed(0)
    h, y, start, new = (torch.randn(size, generator=rng, dtype=torch.float64)
                        for size in ((rows, 9), (rows, 3), (9, 3), (5, 3)))  # fmt: skip
    missing = y - h @ start
    both: tuple[Given, Given] = FromGram(h.T @ h, h.T @ missing, ridge=0.1), FromRows(h, missing, ridge=0.1)
    taken, columns = torch.tensor([0, 1, 4, 6, 8]), torch.arange(8).reshape(4, 2)
    of_gram, of_rows = (given.solution(columns) for given in both)
    torch.testing.assert_close(of_gram[0], of_rows[0])
    torch.testing.assert_close(of_gram[1] / of_gram[1][0, 0, 0], of_rows[1] / of_rows[1][0, 0, 0])
    less = start.index_put((taken,), -new, accumulate=True)
    part = h[:, taken]
    held = raised(part.T @ part, 0.1)
    for given in both:
        step, _ = given.narrowed(taken, less).solution(taken[:0, None])
        torch.testing.assert_close(step, torch.linalg.solve(held, part.T @ (y - part @ new)))


def test_choices_are_alike_with_few_inputs_and_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are held instead of products where they are fewer than columns."""
    config, kinds = tiny_llama(), list[type]()
    models, samples = [weights_of(config, seed) for seed in (0, 1)], samples_of(config, 1)

    def found(most: float) -> Regressed:
        monkeypatch.setattr(choice, "ROWS_PER_COLUMN", most)
        return regression_of(models, (0.5, 0.5), samples, symmetries(config))

    monkeypatch.setattr(choice, "eliminated", lambda given, *x: kinds.append(type(given)) or eliminated(given, *x))
    few, many = found(1e9), found(0)
    assert set(kinds[: len(kinds) // 2]) == {FromRows} and set(kinds[len(kinds) // 2 :]) == {FromGram}
    for name in few.solved:
        torch.testing.assert_close(few[name], many[name], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("large", [0, 100, 1e4])
def test_float32_is_enough_where_one_direction_is_large(large: float) -> None:
    """Sums are float32: what is fitted is as near as with float64, though activations go far in one direction."""
    rng = torch.Generator().manual_seed(0)
    small = torch.randn(800, 300, generator=rng)
    x = small + large * torch.randn(800, 1, generator=rng) @ torch.randn(1, 300, generator=rng)
    y = small[:, :20]

    def left(wide: torch.dtype) -> float:
        rows, gram, product = x.to(wide), Gram(), Gram()
        gram.add(rows, rows)
        product.add(rows, y.to(wide))
        return float((y.double() - x.double() @ ridge(gram.total, product.total).double()).norm())

    assert left(torch.float32) == pytest.approx(left(torch.float64), rel=1e-3, abs=1e-3 * float(y.norm()))


@pytest.mark.parametrize("size", [5, 256, 300, 2500])
def test_a_gram_matrix_is_symmetric_and_whole(size: int) -> None:
    gram, rng = Gram(), torch.Generator().manual_seed(0)
    parts = [torch.randn(7, size, generator=rng) for _ in range(2)]
    for x in parts:
        gram.add(x, x)
    torch.testing.assert_close(gram.total, sum(x.T @ x for x in parts))
    gram.add(parts[0], parts[0])
    torch.testing.assert_close(gram.total, 2 * parts[0].T @ parts[0] + parts[1].T @ parts[1])


def test_heads_and_units_are_chosen_in_every_architecture() -> None:
    for family, spaces in (("llama", 2), ("vit", 4)):
        config = CONFIGS[family]()
        program = trace(config)
        found = list(units(program, symmetries(config), sites(program)))
        assert len(found) == spaces, family
