"""The curve between two models: its ends are they, its middle is lower than the line's, and a killed run goes on."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
import transformers
from conftest import DATA, MODELS, run, tiny_gpt2
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from hf_align.jobs import job, merge
from hf_align.jobs.opened import Basis, Opened
from hf_align.matching.descent import State
from hf_align.matching.objectives import TowardsSources
from hf_align.merging.aligned import Aligned
from hf_align.merging.curve import _Offset, along, learn_curve
from hf_align.opening.pairs import Pair, open_pair
from hf_align.running.evaluate import Evaluator
from hf_align.running.network import Network
from hf_align.settings.options import Options
from hf_align.settings.schedule import Schedule

SHORT = Schedule(steps=6, rows=8, checkpoint_every=2)


@dataclass(frozen=True)
class Case:
    """Two aligned models, inputs to learn on, and a loss on others."""

    pair: Pair
    network: Network
    a: dict[str, Tensor]
    b: dict[str, Tensor]
    objective: TowardsSources
    evaluator: Evaluator

    def offsets(self, schedule: Schedule = SHORT, **more: object) -> dict[str, Tensor]:
        return learn_curve((self.a, self.b), self.network, self.objective, schedule, **more)  # type: ignore[arg-type]

    def loss(self, offsets: dict[str, Tensor], weight: float) -> float:
        mix = along(Aligned(self.pair.spec, self.a, self.b), offsets)
        return self.evaluator.loss({n: mix(n, weight) for n in self.pair.spec.parameters})


@cache
def case(family: str) -> Case:
    pair = open_pair(str(MODELS / family / "0"), str(MODELS / family / "1"))
    network = Network(pair.config)
    options = Options(quiet=True)
    models = Opened((pair,), options)
    aligned = Basis(models, models.find()).weights
    a, b = (network.placed({n: w[n] for n in pair.spec.parameters}) for w in aligned)
    data = load_file(DATA / ("eval_digits.safetensors" if family == "vit" else "eval_lm_kjv.safetensors"))
    data = {k: t if t.is_floating_point() else t.long() for k, t in data.items()}
    learned = {k: t[:64] for k, t in data.items() if k != "labels"}
    held_out = Evaluator(network, {k: t[-64:] for k, t in data.items()})
    return Case(pair, network, dict(a), dict(b), TowardsSources((a, b), (learned, learned)), held_out)


@pytest.mark.parametrize(
    ("family", "share"), [("gpt2", 0.6), pytest.param("llama", 0.6, marks=pytest.mark.slow), ("vit", 0.3)]
)
def test_the_ends_are_the_models_and_the_middle_is_low(family: str, share: float) -> None:
    found = case(family)
    ends = [found.evaluator.loss(w) for w in (found.a, found.b)]
    offsets = found.offsets(Schedule(steps=40, rows=16, offset_rate=0.015))
    assert found.loss(offsets, 0.0) == pytest.approx(ends[0], abs=1e-5)
    assert found.loss(offsets, 1.0) == pytest.approx(ends[1], abs=1e-5)
    over = [found.loss(b, 0.5) - sum(ends) / 2 for b in ({}, offsets)]
    assert over[1] < share * over[0]


def test_what_both_share_does_not_bend() -> None:
    """A model and itself, and all weights that two fine-tunes have left alone."""
    found = case("llama")
    frozen = {n: found.a[n] if "mlp" not in n else t for n, t in found.b.items()}
    offsets = learn_curve((found.a, frozen), found.network, found.objective, SHORT)
    assert offsets and all("mlp" in name for name in offsets)
    assert learn_curve((found.a, dict(found.a)), found.network, found.objective, SHORT) == {}


def test_a_step_is_as_long_as_the_models_are_apart() -> None:
    """Entries move by the rate times the size of those of B - A, whatever the shape."""
    found = case("gpt2")
    for name, offset in found.offsets(Schedule(steps=1, warmup=1, offset_rate=0.01)).items():
        apart = (found.b[name] - found.a[name]).square().mean().sqrt()
        rank = min(offset.shape) if offset.ndim > 1 else 1
        share = float(offset.norm() / (0.01 * apart * (max(offset.shape) * rank) ** 0.5))
        assert 0.3 < share < 1.3, name


def test_curves_of_weights_of_any_strides_can_be_kept(tmp_path: Path) -> None:
    """As moving a weight may leave them."""
    a, b = (torch.randn(4, 6, generator=torch.Generator().manual_seed(i)).T for i in range(2))
    offset = _Offset.between(a, b)
    assert offset is not None and not a.is_contiguous()
    save_file({"w": offset.value.detach()}, tmp_path / "offsets.safetensors")


def test_statistics_stay_on_the_line() -> None:
    config = transformers.ResNetConfig(
        num_channels=1, embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], layer_type="basic", num_labels=3
    )
    network = Network(config)
    torch.manual_seed(0)
    states = [transformers.ResNetForImageClassification(config).state_dict() for _ in range(2)]
    a, b = ({n: t.float() for n, t in state.items() if t.is_floating_point()} for state in states)
    b["resnet.embedder.embedder.normalization.running_mean"] += 1
    images = {"pixel_values": torch.randn(8, 1, 16, 16)}
    offsets = learn_curve((a, b), network, TowardsSources((a, b), (images, images)), SHORT)
    assert offsets and not any("running" in name for name in offsets)
    kernels = [n for n, m in transformers.ResNetForImageClassification(config).named_modules()
               if isinstance(m, nn.Conv2d)]  # fmt: skip
    assert all(f"{name}.weight" in offsets for name in kernels)


def test_a_killed_descent_goes_on_where_it_stopped(tmp_path: Path) -> None:
    found = case("gpt2")
    whole = found.offsets()
    state = State(tmp_path / "progress", "these two")

    def killed(step: int, _: float) -> None:
        if step == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        found.offsets(state=state, progress=killed)
    at: list[int] = []
    resumed = found.offsets(state=state, progress=lambda step, _: at.append(step))
    assert at == [5, 6]
    found.offsets(state=state, progress=lambda step, _: at.append(step))
    assert at == [5, 6], "what is found and not yet kept is not lost"
    for name, offset in whole.items():
        torch.testing.assert_close(resumed[name], offset, rtol=1e-4, atol=1e-6)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two models that write short sequences, with opinions that their mean does not share."""
    folders = tmp_path_factory.mktemp("a"), tmp_path_factory.mktemp("b")
    for seed, folder in enumerate(folders):
        torch.manual_seed(seed)
        transformers.GPT2LMHeadModel(tiny_gpt2(initializer_range=0.5)).save_pretrained(folder)
    return folders


def written(folder: Path, rows: int) -> list[list[int]]:
    """What a model writes."""
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel.from_pretrained(folder)
    start = torch.randint(11, (rows, 1))
    whole = model.generate(start, do_sample=True, min_new_tokens=9, max_new_tokens=9, pad_token_id=0)
    return whole.tolist()  # type: ignore[no-any-return, union-attr]


def test_the_command_says_what_the_curve_gains(
    tiny: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = [row for folder in tiny for row in written(folder, 32)]
    (tmp_path / "data.jsonl").write_text("\n".join(json.dumps({"input_ids": row}) for row in ids))
    arguments = ("merge", *tiny, "--method", "curve", "--steps", "20", "--data", tmp_path / "data.jsonl", "--json")
    assert run(*arguments, "-o", tmp_path / "out") == 0
    report = json.loads(capsys.readouterr().out)
    assert any(note.startswith("curve merges to a loss of") for note in report["notes"])
    assert not (tmp_path / "out" / ".hf-align").exists()
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| steps | 20 |" in card and "| offset_rate | " in card and "trained" in card


class Stopped(BaseException):
    """Nothing catches it."""


def test_a_killed_merge_keeps_its_match_and_its_curve(
    tiny: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("merge", *tiny, "--method", "curve", "--steps", "4", "-o", tmp_path / "out")

    def stopped(*_: object, **__: object) -> None:
        raise Stopped

    def not_again(*_: object, **__: object) -> None:
        raise AssertionError("computed twice")

    with monkeypatch.context() as patched:
        patched.setattr(merge, "learn_curve", stopped)
        with pytest.raises(Stopped):
            run(*arguments)
    with monkeypatch.context() as patched:
        patched.setattr(Opened, "find", not_again)
        patched.setattr(job, "write_with_bar", stopped)
        with pytest.raises(Stopped):
            run(*arguments)
    monkeypatch.setattr(Opened, "find", not_again)
    monkeypatch.setattr(merge, "learn_curve", not_again)
    assert run(*arguments) == 0
    assert not (tmp_path / "out" / ".hf-align").exists()


def test_three_models_have_a_simplex_whose_centre_is_lower(tiny: tuple[Path, Path], tmp_path: Path) -> None:
    """No edge of it moves: what is learned vanishes where a model has no share."""
    torch.manual_seed(2)
    third = transformers.GPT2LMHeadModel(tiny_gpt2(initializer_range=0.5))
    third.save_pretrained(tmp_path / "c")
    folders, losses = (*tiny, tmp_path / "c"), {}
    rows = [torch.tensor(written(folder, 64)) for folder in folders]
    for method in ("linear", "curve"):
        steps = ("--steps", "60") if method == "curve" else ()
        assert (
            run("merge", *folders, "--method", method, "--match", "weight", *steps, "-o", tmp_path / method, "--quiet")
            == 0
        )
        model = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / method)
        with torch.no_grad():
            losses[method] = sum(float(model(x, labels=x).loss) for x in rows)
    assert losses["curve"] < losses["linear"] - 0.5, losses


def test_where_the_loss_of_a_simplex_is_taken() -> None:
    rng = torch.Generator().manual_seed(0)
    for sampling, spread in (("midpoint", 0.0), ("near-midpoint", 0.1), ("uniform", 1.0)):
        schedule = Schedule(lambda_sampling=sampling)  # type: ignore[arg-type]
        drawn = torch.tensor([schedule.shares(3, rng) for _ in range(100)])
        torch.testing.assert_close(drawn.sum(1), torch.ones(100))
        assert bool(((drawn - 1 / 3).abs() <= spread + 1e-6).all()) and (
            spread == 0 or float(drawn.std()) > spread / 10
        )


def test_an_offset_is_as_long_as_models_are_apart() -> None:
    a, b, c = torch.zeros(3, 3), torch.ones(3, 3), 7**0.5 * torch.ones(3, 3)
    for others, apart in (((b,), 1.0), ((c,), 7**0.5), ((b, c), 2.0)):
        found = _Offset.between(a, *others)
        assert found is not None and float(found.unit) == pytest.approx(apart * 3**0.5)
    assert _Offset.between(a, a, a) is None
