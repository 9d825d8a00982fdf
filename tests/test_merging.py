"""Merging beyond the mean: planted solutions are found, copies merge to themselves, midpoints are lower."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import transformers
from conftest import DATA, MODELS, run, tiny_bert, tiny_llama
from safetensors.torch import load_file
from torch import Tensor

from hf_align.jobs.opened import Basis, Opened
from hf_align.matching.soft import favourites, likeness, sinkhorn
from hf_align.merging.aligned import Aligned, Mix
from hf_align.merging.circuits import best_split, circuits
from hf_align.merging.fisher import information
from hf_align.merging.fusion import fused, fused_by_activations, semi_permuted
from hf_align.merging.methods import FROM_SAMPLES, FROM_WEIGHTS, INEXACT, mix_of
from hf_align.merging.regmean import OFF_DIAGONAL, grams, regress, regression_mean
from hf_align.merging.samples import Samples
from hf_align.opening.pairs import Pair, open_pair
from hf_align.running.evaluate import Evaluator
from hf_align.running.network import Network
from hf_align.settings.options import Options
from hf_align.symmetry.action import act
from hf_align.symmetry.overrides.overrides import symmetries

FAMILIES = ("llama", "gpt2", "vit")
METHODS = (*FROM_WEIGHTS, *FROM_SAMPLES)


@dataclass(frozen=True)
class Case:
    """A pair of models aligned by weights, with data on either side of the line."""

    pair: Pair
    models: Aligned
    samples: Samples
    evaluator: Evaluator

    def merger(self, method: str, models: Aligned | None = None) -> Mix:
        models = models or self.models
        return mix_of(method, models, lambda: self.samples)

    def loss(self, mix: Mix, weight: float = 0.5) -> float:
        return self.evaluator.loss({n: mix(n, weight).float() for n in self.pair.spec.parameters})


def case(family: str) -> Case:
    pair = open_pair(str(MODELS / family / "0"), str(MODELS / family / "1"))
    data = load_file(DATA / ("eval_digits.safetensors" if family == "vit" else "eval_lm_kjv.safetensors"))
    data = {k: t if t.is_floating_point() else t.long() for k, t in data.items()}
    rows = 250 if family == "vit" else 48
    fit = {k: t[:rows] for k, t in data.items() if k != "labels"}
    models = Opened((pair,), Options())
    weights = [{n: w[n] for n in pair.spec.parameters} for w in Basis(models, models.find()).weights]
    return Case(pair, Aligned(pair.spec, *weights), Samples(Network(pair.config), (fit, fit)),
                Evaluator(Network(pair.config), {k: t[-rows:] for k, t in data.items()}))  # fmt: skip


@pytest.fixture(scope="module")
def cases() -> dict[str, Case]:
    return {family: case(family) for family in FAMILIES}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", [m for m in METHODS if "fusion" not in m])
def test_copies_of_one_model_merge_to_it(method: str, family: str, cases: dict[str, Case]) -> None:
    case = cases[family]
    mix = case.merger(method, Aligned(case.pair.spec, case.models.a, case.models.a))
    for name, tensor in case.models.a.items():
        torch.testing.assert_close(mix(name, 0.3), tensor, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("method", [m for m in METHODS if m not in INEXACT])
def test_the_ends_are_the_models(method: str, family: str, cases: dict[str, Case]) -> None:
    case = cases[family]
    mix = case.merger(method)
    for weight, model in ((0.0, case.models.a), (1.0, case.models.b)):
        assert case.loss(mix, weight) == pytest.approx(case.evaluator.loss(model), abs=1e-3)


@pytest.mark.parametrize(
    ("method", "family", "gain"),
    [("regmean", "vit", 0.3), ("regmean", "gpt2", 0.08), ("regmean", "llama", 0.04), ("fisher", "llama", 0.012),
     ("fisher", "gpt2", 0.01), ("circuits", "gpt2", 0.02), ("regression", "vit", 1.3), ("regression", "gpt2", 0.2),
     ("regression", "llama", 0.45)],
)  # fmt: skip
def test_midpoints_are_lower(method: str, family: str, gain: float, cases: dict[str, Case]) -> None:
    case = cases[family]
    assert case.loss(case.merger(method)) < case.loss(case.merger("linear")) - gain


def test_a_planted_regression_is_solved_exactly() -> None:
    """Two models that agree on a plane each: one matrix does what both do."""
    rng = torch.Generator().manual_seed(0)
    common = torch.randn(6, 4, generator=rng, dtype=torch.float64)
    reads = [torch.randn(30, 3, generator=rng, dtype=torch.float64) @ torch.randn(3, 6, generator=rng).double()
             for _ in range(2)]  # fmt: skip
    a, b = (common + (torch.eye(6).double() - torch.linalg.pinv(x) @ x) @ torch.randn(6, 4, generator=rng).double()
            for x in reads)  # fmt: skip
    found = regress(a, b, *(x.T @ x for x in reads), 0.3)
    for x, w in zip(reads, (a, b), strict=True):
        torch.testing.assert_close(x @ found, x @ w)
        assert (x @ torch.lerp(a, b, 0.3) - x @ w).norm() > 1


@pytest.mark.parametrize("family", FAMILIES)
def test_regression_is_best_on_what_is_read(family: str, cases: dict[str, Case]) -> None:
    """The sum of squared errors, which Gram matrices give, is lower than the mean's for every matrix, by a lot."""
    case = cases[family]
    mix = regression_mean(case.models, case.samples, off_diagonal=1.0)
    network = case.samples.network
    both = [grams(network, w, case.samples.all) for w in (case.models.a, case.models.b)]
    shares = []
    for site in both[0]:
        a, b, mean = (t.movedim(site.axis, 0).double() for t in (
            case.models.a[site.weight], case.models.b[site.weight],
            torch.lerp(case.models.a[site.weight], case.models.b[site.weight], 0.5)))  # fmt: skip
        if a.dim() == 2:
            found = mix(site.weight, 0.5).movedim(site.axis, 0).double()
            errors = [sum(float(((w - t).T @ g[site] @ (w - t)).trace()) for g, t in zip(both, (a, b), strict=True))
                      for w in (found, mean)]  # fmt: skip
            shares.append(errors[0] / errors[1])
    assert len(shares) > 10 and max(shares) < 1 and min(shares) < 0.8
    assert OFF_DIAGONAL < 1


def test_tied_tables_are_averaged(tmp_path: Path) -> None:
    for seed in (0, 1):
        torch.manual_seed(seed)
        config = tiny_llama(tie_word_embeddings=True)
        transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / str(seed))
    pair = open_pair(str(tmp_path / "0"), str(tmp_path / "1"), untie=False)
    ids = {"input_ids": torch.randint(11, (4, 10), generator=torch.Generator().manual_seed(0))}
    weights = [{n: m.weights[n] for n in pair.spec.parameters} for m in (pair.a, pair.b)]
    mix = regression_mean(Aligned(pair.spec, *weights), Samples(Network(pair.config), (ids, ids)))
    tied = set(pair.spec.ties.values())
    assert len(tied) == 1
    for name in pair.spec.parameters:
        mean = torch.lerp(weights[0][name], weights[1][name], 0.5)
        is_matrix = mean.dim() == 2 and name not in tied and "embed" not in name
        assert torch.equal(mix(name, 0.5), mean) != is_matrix


@pytest.mark.parametrize("of_classes", [True, False])
def test_information_is_the_squared_slope_of_the_log_likelihood(of_classes: bool) -> None:
    """Many samples of one example: the mean over the model's own predictions, by enumeration."""
    torch.manual_seed(0)
    architecture = transformers.BertForSequenceClassification if of_classes else transformers.BertModel
    config = tiny_bert(architectures=[architecture.__name__], num_labels=3)
    model = architecture(config).eval()
    weights = {n: p.detach() for n, p in model.named_parameters()}
    ids = torch.tensor([[1, 2, 3]])
    found = information(Network(config), weights, {"input_ids": ids.expand(400, -1)}, torch.Generator().manual_seed(0))
    expected = {n: torch.zeros_like(p) for n, p in weights.items()}
    output = model(ids)
    if of_classes:
        terms = [
            (p, log) for p, log in zip(output.logits.softmax(-1)[0], output.logits.log_softmax(-1)[0], strict=True)
        ]
    else:
        terms = [(torch.tensor(1.0), x) for x in output.last_hidden_state.flatten()]
    for share, value in terms:
        slopes = torch.autograd.grad(value, list(model.parameters()), retain_graph=True, allow_unused=True)
        for name, slope in zip(weights, slopes, strict=True):
            expected[name] += 0 if slope is None else float(share) * slope.square()
    one, other = (torch.cat([t[n].flatten() for n in weights]) for t in (found, expected))
    assert torch.corrcoef(torch.stack([one, other]))[0, 1] > 0.97
    assert one.mean() == pytest.approx(1, abs=0.01)


def test_the_best_split_is_that_of_the_dense_mean() -> None:
    rng = torch.Generator().manual_seed(0)
    primal, dual = ([torch.randn(2, 3, n, generator=rng, dtype=torch.float64) for _ in "ab"] for n in (7, 5))
    p, d = best_split(primal, dual, 0.3)
    mean = 0.7 * dual[0].mT @ primal[0] + 0.3 * dual[1].mT @ primal[1]
    u, s, vh = torch.linalg.svd(mean, full_matrices=False)
    torch.testing.assert_close(d.mT @ p, u[..., :3] * s[..., None, :3] @ vh[..., :3, :])
    torch.testing.assert_close(p @ p.mT, d @ d.mT)
    assert float(s[..., 3].min()) > 0.1


def test_circuits_are_where_nothing_stands_between_two_weights() -> None:
    found = {kind: circuits(symmetries(config)) for kind, config in (
        ("rotary", tiny_llama()), ("plain", tiny_bert()))}  # fmt: skip
    assert {s.rsplit(".", 1)[-1] for s in found["rotary"]} == {"value"}
    assert {s.rsplit(".", 1)[-1] for s in found["plain"]} == {"qk", "value"}


@pytest.mark.parametrize(
    "method",
    [pytest.param("fisher", marks=pytest.mark.slow), "regmean", pytest.param("circuits", marks=pytest.mark.slow)],
)
def test_the_command_line_merges_by_every_method(
    method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = load_file(DATA / "eval_lm_kjv.safetensors")["input_ids"][:48].tolist()
    (tmp_path / "data.jsonl").write_text("\n".join(json.dumps({"input_ids": row}) for row in ids))
    models = MODELS / "llama" / "0", MODELS / "llama" / "1"
    arguments = ["merge", *models, "--method", method, "-o", tmp_path / "out", "--json"]
    assert run(*arguments, "--data", tmp_path / "data.jsonl") == 0
    report = json.loads(capsys.readouterr().out)
    assert any(note.startswith(method) and "the mean of the aligned models" in note for note in report["notes"])
    written = load_file(tmp_path / "out" / "model.safetensors")
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    again = [*arguments[:-3], "-o", tmp_path / "again", "--data", tmp_path / "data.jsonl"]
    assert run(*again) == 0
    for name, tensor in load_file(tmp_path / "again" / "model.safetensors").items():
        assert torch.equal(tensor, written[name])


def test_without_alignment_methods_see_the_models_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = MODELS / "llama" / "0"
    assert run("merge", copy, copy, "--match", "none", "--method", "regmean", "-o", tmp_path / "out") == 0
    assert "no data" in capsys.readouterr().err
    written, own = (load_file(f / "model.safetensors") for f in (tmp_path / "out", copy))
    for name, tensor in own.items():
        torch.testing.assert_close(written[name], tensor, atol=1e-6, rtol=1e-6)


def test_one_example_cannot_be_run_on_and_reported_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "one.jsonl").write_text(json.dumps({"input_ids": [1, 2, 3]}))
    models = MODELS / "llama" / "0", MODELS / "llama" / "1"
    assert run("merge", *models, "--method", "fisher", "--data", tmp_path / "one.jsonl", "-o", tmp_path / "out") == 2
    assert "--method fisher needs some to run on" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def lower(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: t.bfloat16() for n, t in tensors.items()}


TIPPED = ("semi-permutation", "regression")
"""Methods whose choices rounding tips."""


@pytest.mark.parametrize("method", [m for m in METHODS if m not in TIPPED])
def test_low_precision_stays(method: str, cases: dict[str, Case]) -> None:
    case = cases["llama"]
    models = Aligned(case.pair.spec, lower(dict(case.models.a)), lower(dict(case.models.b)))
    mix, whole = case.merger(method, models), case.merger(method)
    for name in case.pair.spec.parameters:
        found = mix(name, 0.5)
        assert found.dtype == torch.bfloat16
        assert (found.double() - whole(name, 0.5).double()).norm() <= 0.05 * whole(name, 0.5).double().norm()


# Inexact maps ------------------------------------------------------------------------------------------------------


def test_ot_fusion_is_doubly_stochastic_and_sharpens_into_an_assignment() -> None:
    fit = torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for temperature in (0.1, 1.0):
        soft = sinkhorn(fit, temperature)
        torch.testing.assert_close(soft.sum(-1), torch.ones(3, 8).double())
        torch.testing.assert_close(soft.sum(-2), torch.ones(3, 8).double(), atol=1e-2, rtol=0)
        assert float(soft.min()) > 0 or temperature < 1
    assert float(sinkhorn(fit, 1.0).max()) < 0.9
    order = torch.stack([torch.randperm(8, generator=torch.Generator().manual_seed(i)) for i in range(3)])
    planted = torch.eye(8, dtype=torch.float64)[order]
    torch.testing.assert_close(sinkhorn(planted, 0.02), planted)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_cold_fusion_of_copies_leaves_them_and_warm_fusion_does_not(family: str, cases: dict[str, Case]) -> None:
    case = cases[family]
    models = Aligned(case.pair.spec, case.models.a, case.models.a)
    loss = case.evaluator.loss(case.models.a)
    assert case.loss(fused(models, 0.002), 1.0) == pytest.approx(loss, abs=1e-2)
    assert case.loss(fused_by_activations(models, case.samples, 0.002), 1.0) == pytest.approx(loss, abs=2e-2)
    assert case.loss(fused(models, 1.0), 1.0) > loss + 0.5


def test_a_semi_permutation_in_which_nobody_is_left_out_is_exact(cases: dict[str, Case]) -> None:
    """A permuted copy: every unit is found, and the copy's function is kept at weight one."""
    case = cases["gpt2"]
    spec = case.pair.spec
    hidden = [n for n, s in spec.spaces.items() if n in likeness(spec, case.models.a, case.models.a)]
    rng = torch.Generator().manual_seed(0)
    elements = {n: spec.spaces[n].group.random((), rng) for n in hidden}  # type: ignore[union-attr]
    shuffled = {n: act(t, n, spec, elements) for n, t in case.models.a.items()}
    mix = semi_permuted(Aligned(spec, case.models.a, shuffled), case.samples)
    for name, tensor in case.models.a.items():
        torch.testing.assert_close(mix(name, 1.0), tensor)


def test_what_reads_a_unit_is_shared_by_all_that_take_it(cases: dict[str, Case]) -> None:
    """With A's units doubled, two of them take one of B: each is read with half of its weight."""
    case = cases["gpt2"]
    spec, b = case.pair.spec, case.models.b
    name = next(n for n in likeness(spec, b, b))
    uses = list(spec.uses(name))
    double = torch.arange(spec.spaces[name].size)
    double[1] = 0
    a = {n: t if n not in uses else t.index_select(t.shape.index(len(double)), double) for n, t in b.items()}
    counts = favourites(likeness(spec, a, b)[name]).sum(0)
    assert counts[0] == 2 and counts[1] == 0
    mix = semi_permuted(Aligned(spec, a, b), case.samples)
    halves = 0
    for n in uses:
        axis = b[n].shape.index(len(double))
        found, own = (t.select(axis, 0) for t in (mix(n, 1.0), b[n]))
        halves += bool(torch.allclose(found, own / 2))
        assert torch.allclose(found, own / 2) or torch.allclose(found, own)
    assert halves == 1


def test_inexact_methods_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By the name that they had before, too."""
    models = MODELS / "llama" / "0", MODELS / "llama" / "1"
    assert run("merge", *models, "--method", "transport", "-o", tmp_path / "out") == 0
    said = capsys.readouterr().err
    assert "not symmetries" in said and "transport is now called ot-fusion" in said
    with pytest.warns(FutureWarning, match="ot-fusion-activations"):
        assert Options(method="transport-activations").method == "ot-fusion-activations"
