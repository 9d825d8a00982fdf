"""Matching that runs the models: planted symmetries are found, functions unchanged, barriers lower than by weights."""

from __future__ import annotations

import json
import shutil
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from conftest import DATA, MODELS, run, tiny_gpt2
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

from hf_align.errors import HfAlignError
from hf_align.jobs.opened import Basis, Opened, examples
from hf_align.matching.activations import agreement, match_activations
from hf_align.matching.balanced import Balanced
from hf_align.matching.descent import State
from hf_align.matching.features import Moments, as_weights, compare, watch
from hf_align.matching.find import Search, find
from hf_align.matching.latent import Arranging, Stretching, Turning
from hf_align.matching.learned import learn
from hf_align.matching.objectives import OnLabels, TowardsSources
from hf_align.matching.steepest import Steepest, even
from hf_align.matching.stream import residual
from hf_align.matching.weights import match_weights
from hf_align.opening.pairs import Pair, open_pair
from hf_align.running.data import load_data, require_fit
from hf_align.running.evaluate import Evaluator
from hf_align.running.generate import own_inputs
from hf_align.running.network import Network, batches
from hf_align.settings.options import Options
from hf_align.settings.schedule import LAMBDA, Schedule
from hf_align.symmetry import groups as g
from hf_align.symmetry.action import act
from hf_align.symmetry.alignment import compose, inverse
from hf_align.symmetry.certificate.random_copy import random_elements
from hf_align.symmetry.elements import DUAL, PRIMAL, Matrix
from hf_align.symmetry.interpreter.bounds import Scalars
from hf_align.symmetry.interpreter.rotations import Rotations
from hf_align.symmetry.spec import Factor
from hf_align.tracing.build import read_config

FAMILIES = ("llama", "gpt2", "vit")
PROCESSOR = {"image_processor_type": "ViTImageProcessor", "do_resize": False, "do_rescale": True,
             "rescale_factor": 1 / 255, "do_normalize": True, "image_mean": [0.5], "image_std": [0.5]}  # fmt: skip
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def pairs() -> dict[str, Pair]:
    return {f: open_pair(str(MODELS / f / "0"), str(MODELS / f / "1")) for f in FAMILIES}


def balanced(pair: Pair) -> Balanced:
    return Balanced.of(pair.spec, pair.a.weights, pair.b.weights)


def inputs(family: str, rows: int) -> dict[str, Tensor]:
    data = load_file(DATA / ("eval_digits.safetensors" if family == "vit" else "eval_lm_kjv.safetensors"))
    return {k: t[-rows:] if t.is_floating_point() else t[-rows:].long() for k, t in data.items()}


def single(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: t.float() for n, t in weights.items()}


@pytest.mark.parametrize("group", [g.Orthogonal(5), g.OrthogonalFixingOnes(5), g.GeneralLinear(5)], ids=repr)
def test_a_turning_element_moves_along_its_gradient_and_stays_in_its_group(group: g.Group) -> None:
    rng = torch.Generator().manual_seed(0)
    start, goal = group.random((2,), rng), torch.randn(2, 5, 5, generator=rng)
    latent = Turning(group, start, CPU)
    optimiser = torch.optim.SGD(latent.turns, lr=0.02)
    values = []
    for _ in range(50):
        value = (latent.element().as_matrix() - goal).square().sum()
        values.append(value.item())
        optimiser.zero_grad()
        value.backward()
        optimiser.step()
        latent.retract()
    settled = latent.resolved(group)
    assert values == sorted(values, reverse=True) and values[-1] < values[0] - 0.1
    torch.testing.assert_close(latent.element().as_matrix().double(), settled.as_matrix(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(latent.element().as_matrix(DUAL).double(), settled.as_matrix(DUAL), atol=1e-4, rtol=1e-4)
    if not group.has_gauge:
        torch.testing.assert_close(settled.as_matrix() @ settled.as_matrix().mT, torch.eye(5).double().expand(2, 5, 5))
    if isinstance(group, g.OrthogonalFixingOnes):
        torch.testing.assert_close(settled.as_matrix().sum(-1), torch.ones(2, 5).double())


def walked(steps: int) -> Turning:
    """An element of GL(6) after a walk over steps that always stretch the same way, and turn anyhow."""
    rng = torch.Generator().manual_seed(0)
    ways = torch.diag(torch.tensor([1.0, 0.6, 0.2, -0.2, -0.6, -1.0]))
    latent = Turning(g.GeneralLinear(6), Matrix(torch.eye(6).double()), CPU, Schedule(steps=steps).stretching)
    for _ in range(steps):
        turn = torch.randn(6, 6, generator=rng)
        with torch.no_grad():
            latent.turns[0].copy_(0.01 * ways + 0.05 * (turn - turn.mT))
        latent.retract()
    return latent


def test_a_long_walk_ends_at_an_element_and_its_own_dual() -> None:
    latent = walked(1600)
    primal, dual = (latent.element().as_matrix(power).detach().double() for power in (PRIMAL, DUAL))
    torch.testing.assert_close(primal @ dual.mT, torch.eye(6).double(), atol=1e-4, rtol=0)


def test_a_long_walk_stretches_no_further_than_a_shorter_one() -> None:
    short, long = (torch.linalg.cond(walked(steps).element().as_matrix()).item() for steps in (400, 3200))
    assert 1.5 < long < 2 * short


PLANES = Rotations(6, planes=(((0, 3), (1, 4)), ((2, 5),)), still=())


@pytest.mark.parametrize(
    "group",
    [g.Orthogonal(6), g.OrthogonalFixingOnes(6), g.RotaryCommutant(6, PLANES), g.RotaryUnitary(6, PLANES)],
    ids=repr,
)
def test_an_even_step_goes_equally_far_in_all_directions_of_its_algebra(group: g.Group) -> None:
    step = group.algebra(torch.randn(3, 6, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    found = even(step)
    before, after = torch.linalg.svdvals(step), torch.linalg.svdvals(found)
    lost = before < 1e-5
    torch.testing.assert_close(group.algebra(found), found, atol=1e-5, rtol=0)
    assert float(before.amax() / before[~lost].min()) > 2
    assert float(after[~lost].min()) > 0.6 and float(after.max()) < 1.3 and float(after[lost].sum()) < 1e-3


def test_the_path_of_steepest_descent_does_not_depend_on_the_basis() -> None:
    rng = torch.Generator().manual_seed(0)
    goal, basis = torch.randn(2, 5, 5, generator=rng).double(), g.Orthogonal(5).random((), rng).matrix
    ends = []
    for turned in (torch.eye(5).double(), basis):
        x = torch.zeros(2, 5, 5, dtype=torch.float64, requires_grad=True)
        optimiser = Steepest([x], lr=0.1)
        for _ in range(10):
            optimiser.zero_grad()
            (turned.T @ x @ turned - goal).square().sum().backward()
            optimiser.step()
        ends.append((turned.T @ x @ turned).detach())
    assert float((ends[0] - goal).norm()) < 0.9 * float(goal.norm())
    torch.testing.assert_close(ends[0], ends[1], atol=1e-8, rtol=1e-8)


def test_a_stretching_element_scales_what_may_scale() -> None:
    group = g.TorusPermutation(4, (Scalars.NONZERO, Scalars.SIGN))
    latent = Stretching(group, group.random((), torch.Generator().manual_seed(1)), CPU)  # type: ignore[arg-type]
    before = latent.resolved(group)
    with torch.no_grad():
        latent.stretches[0].add_(0.5)
    latent.retract()
    after = latent.resolved(group)
    torch.testing.assert_close(after.scale[0], before.scale[0] * torch.tensor(0.5).exp().double(), rtol=1e-6, atol=0)
    assert torch.equal(after.scale[1], before.scale[1]) and torch.equal(after.order, before.order)


def test_a_latent_permutation_goes_where_its_gradient_points() -> None:
    group = g.Permutation(6)
    goal = torch.eye(6)[torch.tensor([1, 0, 2, 4, 5, 3])]
    latent = Arranging(group, group.identity(()), CPU)
    optimiser = torch.optim.Adam(latent.choices, lr=0.01)
    points = torch.randn(6, 20, generator=torch.Generator().manual_seed(0))
    for _ in range(100):
        moved = latent.element().act(points.T, PRIMAL).T
        optimiser.zero_grad()
        (moved - goal @ points).square().sum().backward()
        optimiser.step()
        latent.retract()
    torch.testing.assert_close(latent.resolved(group).as_matrix(), goal.double())


@pytest.mark.parametrize("family", FAMILIES)
def test_features_are_what_weights_read_and_move_with_them(family: str, pairs: dict[str, Pair]) -> None:
    """x in the new basis is g x: moved weights read moved features."""
    pair, network = pairs[family], Network(pairs[family].config)
    models, batch = balanced(pair), inputs(family, 4)
    batch.pop("labels", None)
    elements = random_elements(pair.spec, torch.Generator().manual_seed(0))
    before = watch(network, single(dict(models.a)), batch)
    after = watch(network, single({n: act(t, n, pair.spec, elements) for n, t in models.a.items()}), batch)
    assert {s.weight for s in before} >= {n for n in pair.spec.parameters if "mlp" in n and n.endswith("weight")}
    assert list(before) == list(after)
    for site, x in before.items():
        moments = Moments()
        moments.add(x, x)
        spec, _, _ = as_weights(pair.spec, {site: moments})
        axes = (((Factor(len(x)),),), spec.parameters[site.name][1])
        spec = replace(spec, parameters={site.name: axes})
        expected = act(x.double(), site.name, spec, elements)
        torch.testing.assert_close(after[site].double(), expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))


def test_moments_in_parts_are_those_of_the_whole() -> None:
    rng = torch.Generator().manual_seed(0)
    x, y = (5 + torch.randn(100, 4, generator=rng, dtype=torch.float64) for _ in range(2))
    moments = Moments()
    for part in range(0, 100, 30):
        moments.add(x[part : part + 30], y[part : part + 30])
    expected = torch.corrcoef(torch.cat([x.T, y.T]))[:4, 4:]
    torch.testing.assert_close(moments.correlation, expected)
    torch.testing.assert_close(moments.second_moment, x.T @ y / (x.norm() * y.norm()))


@pytest.mark.parametrize("family", FAMILIES)
def test_activations_find_a_planted_symmetry(family: str, pairs: dict[str, Pair]) -> None:
    pair = pairs[family]
    elements = random_elements(pair.spec, torch.Generator().manual_seed(2))
    original = {n: pair.a.weights[n].double() for n in pair.spec.parameters}
    first = Balanced.of(pair.spec, original, original)
    planted = {n: act(t, n, pair.spec, elements) for n, t in first.a.items()}
    models = Balanced.of(pair.spec, original, planted)
    batch = inputs(family, 64)
    batch.pop("labels", None)
    network = Network(pair.config)
    moments = compare(network, single(dict(models.a)), single(dict(models.b)), batches(batch))
    found, sweeps = match_activations(models, moments)
    match = models.match(found, sweeps)
    assert match.before is not None and match.after is not None
    assert match.after / match.before < 1e-3
    again = compare(network, single(dict(models.a)), single(models.moved(found)), batches(batch))
    assert min(agreement(again).values()) > 0.999
    assert statistics.median(agreement(moments).values()) < 0.5


def test_models_write_their_own_inputs(pairs: dict[str, Pair]) -> None:
    """What a model writes it finds likely; another model's random tokens it does not."""
    pair = pairs["llama"]
    weights = {n: pair.a.weights[n] for n in pair.spec.parameters}
    written = own_inputs(Network(pair.config), weights, count=32, length=48, seed=3)
    assert written["input_ids"].shape == (32, 48)
    assert torch.equal(written["input_ids"], own_inputs(Network(pair.config), weights, 32, 48, seed=3)["input_ids"])
    assert not torch.equal(written["input_ids"], own_inputs(Network(pair.config), weights, 32, 48, seed=4)["input_ids"])
    tokens = torch.randint(pair.config.vocab_size, (32, 48), generator=torch.Generator().manual_seed(0))
    losses = [Evaluator(Network(pair.config), {"input_ids": x}).loss(weights) for x in (written["input_ids"], tokens)]
    assert losses[0] < 4 < losses[1] - 2
    noise = own_inputs(
        Network(pairs["vit"].config), {n: pairs["vit"].a.weights[n] for n in pairs["vit"].spec.parameters}, 5, 0, 0
    )
    assert noise["pixel_values"].shape == (5, 1, 8, 8) and float(noise["pixel_values"].std()) > 0.5


def test_texts_to_choose_from_are_drawn_as_such() -> None:
    """Of as many rows as tokens divide, a head would take each token for a text."""
    config = transformers.BertConfig(vocab_size=23, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
                                     intermediate_size=6, max_position_embeddings=20)  # fmt: skip
    config.architectures = ["BertForMultipleChoice"]
    model = transformers.BertForMultipleChoice(config).eval()
    drawn = own_inputs(Network(config), dict(model.named_parameters()), count=32, length=16, seed=3)
    assert drawn["input_ids"].shape == (32, 3, 16) and len(drawn["input_ids"].unique(dim=1)[0]) == 3
    assert model(**drawn).logits.shape == (32, 3)


def test_learning_lowers_the_loss_and_leaves_the_function_alone(pairs: dict[str, Pair]) -> None:
    pair = pairs["gpt2"]
    models, network = balanced(pair), Network(pair.config)
    start, _ = match_weights(models)
    data = {"input_ids": (rows := inputs("gpt2", 128)["input_ids"]), "labels": rows}
    losses: list[float] = []
    (found,) = learn(
        models, [start], network, OnLabels(data), Schedule(steps=30, warmup=3), progress=lambda _, x: losses.append(x)
    )
    assert sum(losses[-5:]) < sum(losses[:5]) - 0.5
    evaluator = Evaluator(Network(pair.config), {"input_ids": inputs("gpt2", 256)["input_ids"][:128]})
    ends = [evaluator.path(single(dict(models.a)), single(models.moved(e)), (0.0, 0.5, 1.0)) for e in (start, found)]
    assert ends[1].losses[1] < ends[0].losses[1] - 0.05
    assert ends[1].losses[2] == pytest.approx(ends[0].losses[2], abs=1e-4)
    assert any(not torch.allclose(found[s].as_matrix(), start[s].as_matrix()) for s in start)


def test_learning_does_not_depend_on_the_basis_that_both_models_come_in(pairs: dict[str, Pair]) -> None:
    pair = pairs["vit"]
    models, network = balanced(pair), Network(pair.config)
    stream = residual(pair.spec)
    assert stream is not None
    turn = {stream: pair.spec.group(stream).random((), torch.Generator().manual_seed(0))}
    turned = replace(models, models=tuple(models.moved(turn, i) for i in range(2)))
    start, _ = match_weights(models)
    starts = [start, compose(pair.spec, turn, compose(pair.spec, start, inverse(pair.spec, turn)))]
    losses: list[list[float]] = [[], []]
    for each, first, seen in zip((models, turned), starts, losses, strict=True):
        learn(
            each,
            [first],
            network,
            OnLabels(inputs("vit", 64)),
            Schedule(steps=8, rows=16, warmup=2),
            progress=lambda _, loss, seen=seen: seen.append(loss),
        )  # type: ignore[misc]
    assert losses[0][-1] < 0.9 * losses[0][0]
    assert losses[1] == pytest.approx(losses[0], rel=0.02)


def test_a_killed_search_goes_on_where_it_stopped(pairs: dict[str, Pair], tmp_path: Path) -> None:
    pair = pairs["vit"]
    models, network = balanced(pair), Network(pair.config)
    start, _ = match_weights(models)
    schedule = Schedule(steps=6, rows=8, checkpoint_every=2, order_rate=1e-3)
    objective = OnLabels(inputs("vit", 64))
    (whole,) = learn(models, [start], network, objective, schedule)
    state = State(tmp_path / "work" / "learned.pt", "these two")
    steps: list[int] = []

    def killed(step: int, _: float) -> None:
        steps.append(step)
        if step == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        learn(models, [start], network, objective, schedule, state=state, progress=killed)
    assert state.path.exists()
    (other,) = learn(models, [start], network, objective, schedule, state=replace(state, made_of="others"))
    with pytest.raises(KeyboardInterrupt):
        learn(models, [start], network, objective, schedule, state=state, progress=killed)
    at: list[int] = []
    (resumed,) = learn(models, [start], network, objective, schedule, state=state, progress=lambda s, _: at.append(s))
    assert at == [5, 6]
    learn(models, [start], network, objective, schedule, state=state, progress=lambda s, _: at.append(s))
    assert at == [5, 6], "what is found and not yet kept is not lost"
    for space, element in whole.items():
        torch.testing.assert_close(resumed[space].as_matrix(), element.as_matrix(), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(other[space].as_matrix(), element.as_matrix(), rtol=1e-4, atol=1e-5)


def test_mixing_weights_lie_where_they_say() -> None:
    rng = torch.Generator().manual_seed(0)
    drawn = {name: [draw(rng) for _ in range(200)] for name, draw in LAMBDA.items()}
    assert min(drawn["near-midpoint"]) >= 0.4 and max(drawn["near-midpoint"]) <= 0.6
    assert min(drawn["uniform"]) < 0.1 and max(drawn["uniform"]) > 0.9
    assert set(drawn["midpoint"]) == {0.5}


def test_without_data_each_half_is_taught_by_its_own_source(pairs: dict[str, Pair]) -> None:
    """At an endpoint the loss towards that source is its entropy, which nothing undercuts."""
    pair = pairs["gpt2"]
    models, network = balanced(pair), Network(pair.config)
    a, b = single(dict(models.a)), single(dict(models.b))
    ids = {"input_ids": inputs("gpt2", 8)["input_ids"]}

    def loss(first: dict[str, Tensor], second: dict[str, Tensor], merged: dict[str, Tensor]) -> float:
        objective = TowardsSources((first, second), (ids, ids))
        return float(objective.loss(network, merged, 8, torch.Generator().manual_seed(0)))

    assert loss(a, a, a) < loss(a, a, b) - 0.1
    assert loss(a, b, a) == pytest.approx((loss(a, a, a) + loss(b, b, a)) / 2, abs=0.3)
    assert loss(b, b, b) < loss(b, b, a) - 0.1


@pytest.mark.parametrize("options", [["activation"], ["learned", "--steps", "40"]], ids=lambda options: options[0])
def test_strategies_lower_the_barrier(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["evaluate", MODELS / "vit" / "0", MODELS / "vit" / "1", "--data", DATA / "eval_digits.safetensors",
                 "--match", *options, "--points", "3", "--json", "--quiet"]  # fmt: skip
    assert run(*arguments) == 0
    found = json.loads(capsys.readouterr().out)
    reads = found["features"]["vit.layers.1.mlp.fc2.weight"]
    assert reads["aligned"] > reads["naive"] + 0.05
    assert found["aligned"]["barrier"] < 2 < 2.5 < found["naive"]["barrier"]


def test_one_example_cannot_be_matched_and_reported_on(pairs: dict[str, Pair], tmp_path: Path) -> None:
    save_file({k: t[:1].contiguous() for k, t in inputs("gpt2", 1).items()}, tmp_path / "one.safetensors")
    options = Options(match="learned")
    with pytest.raises(HfAlignError, match="holds one example"):
        examples(pairs["gpt2"], options, tmp_path / "one.safetensors")


def test_searching_without_data_needs_none(pairs: dict[str, Pair]) -> None:
    said: list[str] = []
    pair = pairs["gpt2"]
    models = balanced(pair)
    search = Search("learned", Schedule(steps=2, rows=4), own=8, length=16)
    (found,), steps = find(models, Network(pair.config), search, None, said.append)
    assert steps == 2 and set(found) == {s for s in pair.spec.spaces if pair.spec.spaces[s].group is not None}
    assert any("each model generates 8 sequences" in line for line in said)


def test_models_write_beside_a_text_but_not_beside_labels(pairs: dict[str, Pair]) -> None:
    text = {"input_ids": inputs("gpt2", 8)["input_ids"]}
    for family, data, own, written in (
        ("gpt2", text, 8, True),
        ("gpt2", text, 0, False),
        ("gpt2", {**text, "labels": text["input_ids"]}, 8, False),
        ("vit", {"pixel_values": inputs("vit", 8)["pixel_values"]}, 8, False),
    ):
        said: list[str] = []
        search = Search("learned", Schedule(steps=1, rows=4), own=own, length=16)
        find(balanced(pairs[family]), Network(pairs[family].config), search, data, said.append)
        writing = [line for line in said if "each model generates" in line]
        assert ["each model generates 8 sequences" in line for line in writing] == [True] * written


def test_there_must_be_something_to_descend_on(pairs: dict[str, Pair]) -> None:
    search = Search("learned", Schedule(steps=1, rows=4), own=0)
    with pytest.raises(HfAlignError, match="own is 0"):
        find(balanced(pairs["gpt2"]), Network(pairs["gpt2"].config), search, None)


@pytest.mark.parametrize("residual", ["identity", "first", "last", "all"])
@pytest.mark.parametrize("heads", ["two-stage", "monotonic"])
def test_the_paper_s_choices_leave_the_function_alone(residual: str, heads: str, pairs: dict[str, Pair]) -> None:
    pair, batch = pairs["gpt2"], {"input_ids": inputs("gpt2", 16)["input_ids"]}
    options = Options(match="activation", residual=residual, heads=heads)
    models = Opened((pair,), options)
    (match,) = models.find(batch)
    moved = dict(Basis(models, [match]).weights[1])
    evaluator = Evaluator(Network(pair.config), batch)
    raw = {n: pair.b.weights[n] for n in pair.spec.parameters}
    assert evaluator.loss(moved) == pytest.approx(evaluator.loss(raw), abs=1e-4)
    stays = torch.allclose(moved["transformer.wte.weight"], raw["transformer.wte.weight"], atol=0.5)
    assert stays is (residual == "identity")
    order = (
        match.b["transformer.h.0.attn.heads"].tensors()["order"] if "transformer.h.0.attn.heads" in match.b else None
    )
    assert (order is None) is (heads == "monotonic")


@pytest.mark.parametrize(("residual", "heads"), [("separate", "two-stage"), ("all", "ignore-heads")])
def test_baselines_change_the_function_and_say_so(residual: str, heads: str, pairs: dict[str, Pair]) -> None:
    pair, batch = pairs["gpt2"], {"input_ids": inputs("gpt2", 16)["input_ids"]}
    with pytest.raises(HfAlignError, match="--allow-inexact"):
        Options(match="activation", residual=residual, heads=heads)
    options = Options(match="activation", residual=residual, heads=heads, baseline=True)
    models = Opened((pair,), options)
    (match,) = models.find(batch)
    evaluator = Evaluator(Network(pair.config), batch)
    losses = [evaluator.loss({n: w[n] for n in pair.spec.parameters})
              for w in (pair.b.weights, Basis(models, [match]).weights[1])]  # fmt: skip
    assert losses[1] > losses[0] + 0.3


def test_choosing_among_features_needs_features() -> None:
    with pytest.raises(HfAlignError, match="needs --match activation"):
        Options(residual="first")


def test_only_the_spaces_that_are_asked_for_move(pairs: dict[str, Pair]) -> None:
    pair = pairs["gpt2"]
    models = Opened((pair,), Options(spaces=("*.h.1.mlp.*",)))
    (match,) = models.find()
    moved = Basis(models, [match]).weights[1]
    still = Basis(Opened((pair,), Options()), [replace(match, b={})]).weights[1]
    changed = {n for n in pair.spec.parameters if not torch.equal(moved[n], still[n])}
    assert changed == {f"transformer.h.1.mlp.{n}" for n in ("c_fc.weight", "c_fc.bias", "c_proj.weight")}
    with pytest.raises(HfAlignError, match="no space is called nothing"):
        Opened((pair,), Options(spaces=("nothing",))).find()


def test_a_folder_of_images_is_data(pairs: dict[str, Pair], tmp_path: Path) -> None:
    model, images = tmp_path / "model", tmp_path / "images"
    shutil.copytree(MODELS / "vit" / "0", model)
    (model / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    images.mkdir()
    pixels = inputs("vit", 3)["pixel_values"]
    for i, image in enumerate(pixels):
        Image.fromarray(((image[0] + 1) * 127.5).round().to(torch.uint8).numpy()).save(images / f"{i}.png")
    found = load_data(images, model, read_config(model))
    torch.testing.assert_close(found["pixel_values"], pixels, atol=0.01, rtol=0)
    first = pairs["vit"].a
    unlabelled = replace(pairs["vit"], a=replace(first, source=replace(first.source, folder=model)))
    assert examples(unlabelled, Options(match="learned"), images)[1] is None
    (tmp_path / "empty").mkdir()
    with pytest.raises(HfAlignError, match=r"holds no images .*; --data takes"):
        load_data(tmp_path / "empty", model, read_config(model))
    with pytest.raises(HfAlignError, match="image processor"):
        load_data(images, MODELS / "vit" / "0", read_config(model))


@pytest.mark.parametrize("name", ["held_out.csv", "held_out.CSV", "held_out.parquet"])
def test_a_table_is_no_text(name: str, tmp_path: Path) -> None:
    (table := tmp_path / name).write_text("text,label\n" + "a b c,1\n" * 2000)
    with pytest.raises(HfAlignError, match=rf"{name} is a table; --data takes"):
        load_data(table, MODELS / "gpt2" / "0", read_config(MODELS / "gpt2" / "0"))


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.JSONL", "rows.ndjson"])
def test_lines_are_read_as_such_whatever_their_file_is_called(name: str, tmp_path: Path) -> None:
    (file := tmp_path / name).write_text('{"input_ids": [1, 2, 3]}\n{"input_ids": [4, 5, 6]}\n')
    found = load_data(file, None, tiny_gpt2())
    assert found["input_ids"].tolist() == [[1, 2, 3], [4, 5, 6]]


def test_a_label_that_is_none_is_refused() -> None:
    data = {"input_ids": torch.tensor([[1, 2, 3]]), "labels": torch.tensor([[-100, 1, 2]])}
    assert require_fit(data, Path("x.jsonl"), tiny_gpt2()) is data
    with pytest.raises(HfAlignError, match=r"x.jsonl: -5 is no label; what has none is -100"):
        require_fit({**data, "labels": torch.tensor([[-5, 1, 2]])}, Path("x.jsonl"), tiny_gpt2())


def test_text_is_masked_for_what_predicts_masked_tokens(tmp_path: Path) -> None:
    folder, text = MODELS / "bert" / "0", DATA / "kjv_sample.txt"
    data = load_data(text, folder, read_config(folder))
    mask = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]["[MASK]"]
    hidden = data["input_ids"] == mask
    assert 0.12 < float(hidden.float().mean()) < 0.18
    assert bool(torch.all((data["labels"] >= 0) == hidden)) and mask not in data["labels"]
    assert load_data(text, MODELS / "gpt2" / "0", read_config(MODELS / "gpt2" / "0")).keys() == {"input_ids"}
    bare = tmp_path / "bare"
    shutil.copytree(folder, bare)
    settings = json.loads((bare / "tokenizer_config.json").read_text())
    (bare / "tokenizer_config.json").write_text(json.dumps({**settings, "mask_token": None}))
    with pytest.raises(HfAlignError, match="no mask token"):
        load_data(text, bare, read_config(bare))
