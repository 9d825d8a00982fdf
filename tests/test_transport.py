"""A fine-tune carried to another base."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import built, run, tiny_bert, tiny_gpt2, tiny_llama, tiny_vit
from test_api import answers
from transformers import PretrainedConfig, PreTrainedModel

import hf_align
from hf_align.jobs import pipeline
from hf_align.jobs.outcome import Report
from hf_align.merging.transport import Carried, Change, Texts
from hf_align.running.network import Network
from hf_align.settings.options import Options
from hf_align.settings.schedule import Schedule

FAMILIES = {"llama": tiny_llama, "gpt2": tiny_gpt2, "bert": tiny_bert, "vit": tiny_vit}
METHODS = ["regression", "task_arithmetic"]


def tuned(base: PreTrainedModel, config: PretrainedConfig, seed: int = 9) -> PreTrainedModel:
    """The base with a small change of every weight."""
    made, noise = built(config, 0), built(config, seed)
    with torch.no_grad():
        for weight, start, other in zip(made.parameters(), base.parameters(), noise.parameters(), strict=True):
            weight.copy_(start + 0.05 * other)
    return made


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("family", FAMILIES)
def test_onto_its_own_base_in_another_basis_it_is_the_fine_tune(family: str, method: str) -> None:
    config = FAMILIES[family]()
    base = built(config, 0)
    finetuned, onto = tuned(base, config), hf_align.randomize(base, seed=3)
    fitted = {} if method == "task_arithmetic" else {"keep": 0}
    carried = hf_align.transport(finetuned, base=base, onto=onto, method=method, witness=False, **fitted)
    expected, found = answers(finetuned), answers(carried)
    assert float((found - expected).abs().max()) < 2e-3 * float(expected.abs().max())
    assert float((answers(onto) - expected).abs().max()) > 0.05 * float(expected.abs().max())


@pytest.mark.parametrize("method", METHODS)
def test_a_fine_tune_that_learned_nothing_leaves_the_other_base(method: str) -> None:
    base, onto = built(tiny_llama(), 0), built(tiny_llama(), 1)
    carried = hf_align.transport(base, base=base, onto=onto, method=method, strength=2.0)
    torch.testing.assert_close(answers(carried), answers(onto), rtol=1e-3, atol=1e-4)


def test_a_base_that_the_fine_tune_was_not_tuned_from_is_doubted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = built(tiny_llama(), 0), built(tiny_llama(), 1)
    models = {"a": a, "b": b, "f": tuned(a, tiny_llama())}
    for name, model in models.items():
        model.save_pretrained(tmp_path / name)
    asked = ["transport", tmp_path / "f", "--method", "task_arithmetic", "--overwrite", "-o", tmp_path / "out"]
    for base, onto, doubted in (("a", "b", False), ("b", "a", True), ("a", "a", False)):
        assert run(*asked, "--base", tmp_path / base, "--onto", tmp_path / onto) == 0
        assert ("the fine-tune do not look as if they came from" in capsys.readouterr().out) == doubted
    with pytest.warns(UserWarning, match="the fine-tune do not look as if they came from its base") as warned:
        hf_align.transport(models["f"], base=b, onto=a, method="task_arithmetic", witness=False)
    assert warned[0].filename == __file__


def test_a_model_that_answers_nothing_takes_a_fine_tune() -> None:
    base, onto = built(tiny_llama(), 0), built(tiny_llama(), 1)
    with torch.no_grad():
        onto.get_submodule("model.norm").weight.zero_()
    carried = hf_align.transport(tuned(base, tiny_llama()), base=base, onto=onto)
    assert answers(carried).isfinite().all()


def test_regression_brings_the_answers_nearer_to_what_they_should_be() -> None:
    """What B should answer on the inputs that are regressed on: its own answers and what the fine-tune changed."""
    base, onto = built(tiny_llama(), 0), built(tiny_llama(), 1)
    finetuned = tuned(base, tiny_llama())
    rows = {"input_ids": torch.randint(11, (64, 16), generator=torch.Generator().manual_seed(5))}
    with torch.no_grad():
        wanted = sum(sign * m(**rows).logits for sign, m in ((1, onto), (-1, base), (1, finetuned)))
        apart = {}
        for method in METHODS:
            data = rows if method == "regression" else None
            carried = hf_align.transport(finetuned, base=base, onto=onto, data=data, method=method, witness=False)
            apart[method] = float((carried(**rows).logits - wanted).square().mean())
    assert apart["regression"] < 0.5 * apart["task_arithmetic"]


def apart(told: torch.Tensor, other: torch.Tensor) -> float:
    """KL of what two models predict."""
    p, q = told.log_softmax(-1), other.log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


def written(model: PreTrainedModel, rows: int) -> torch.Tensor:
    """What a model writes."""
    torch.manual_seed(0)
    first = torch.randint(11, (rows, 1))
    found: torch.Tensor = model.generate(first, do_sample=True, top_k=0, min_length=8, max_length=8, pad_token_id=0)  # type: ignore[operator]
    return found


def loud(seed: int) -> PreTrainedModel:
    """A model with opinions."""
    return built(tiny_gpt2(initializer_range=0.5), seed)


def test_it_answers_as_the_fine_tune_where_that_speaks_and_as_the_other_base_where_that_does() -> None:
    """The fine-tune is far from its base: nothing of A is left in what is aimed at."""
    base, onto, finetuned = loud(0), loud(1), loud(2)
    x, y = written(finetuned, 128), written(onto, 128)
    far = {}
    for keep in (0.0, 1.0):
        carried = hf_align.transport(finetuned, base=base, onto=onto, keep=keep, witness=False)
        with torch.no_grad():
            far[keep] = apart(finetuned(x).logits, carried(x).logits), apart(onto(y).logits, carried(y).logits)
    with torch.no_grad():
        before, lost = apart(finetuned(x).logits, onto(x).logits), apart(onto(y).logits, finetuned(y).logits)
    assert far[0.0][0] < 0.5 * before, "nearer to the fine-tune than B was"
    assert far[1.0][0] < before and far[1.0][1] < 0.8 * far[0.0][1], "and keeping is nearer to B on what B writes"
    assert far[1.0][1] < lost


@pytest.mark.parametrize(("noise", "least", "most"), [(0.0, 0.0, 1e-6), (0.05, 1e-6, 0.2), (1.0, 0.5, 1.0)])
def test_how_far_a_fine_tune_is_from_its_base_decides_what_is_aimed_at(noise: float, least: float, most: float) -> None:
    base, other = loud(0), loud(1)
    weights = [{n: w.detach() for n, w in m.named_parameters()} for m in (base, other)]
    tuned = {n: torch.lerp(w, weights[1][n], noise) for n, w in weights[0].items()}
    carried = Carried(weights[1], (Change(weights[0], tuned, 2.0),))
    texts = Texts.of(carried, Network(base.config), [({"input_ids": written(base, 32)},)], 0.5)
    assert least <= texts.apart[0] <= most
    assert texts.known is not None and texts.known["input_ids"].shape == (16, 8)
    shares = carried.shares(0, texts.apart[0])
    assert sum(shares) == pytest.approx(1) and shares[2] == 2.0 and shares[0] == pytest.approx(1 - 2 * texts.apart[0])


def test_what_other_arguments_than_text_need_is_not_made_up() -> None:
    """A padded text has a mask, which a written one gets; what token types B's text has nobody knows."""
    base, other = loud(0), loud(1)
    weights = [{n: w.detach() for n, w in m.named_parameters()} for m in (base, other)]
    rows = {"input_ids": written(base, 8)}
    for more, kept in (("attention_mask", True), ("token_type_ids", False)):
        inputs = {**rows, more: torch.ones_like(rows["input_ids"])}
        carried = Carried(weights[1], (Change(weights[0], weights[1]),))
        texts = Texts.of(carried, Network(base.config), [(inputs,)], 0.5)
        assert (texts.known is not None and texts.known.keys() == inputs.keys()) == kept
        assert (texts.apart[0] > 0) == kept


def test_several_fine_tunes_of_several_bases_are_carried_at_once() -> None:
    """Each is heard where it speaks; carried alone, the other is not."""
    bases, onto, finetuned = [loud(0), loud(3)], loud(1), [loud(2), loud(4)]
    texts = [written(model, 256) for model in finetuned]
    both = hf_align.transport(finetuned, base=bases, onto=onto, keep=0, witness=False)
    alone = [hf_align.transport(f, base=a, onto=onto, keep=0, witness=False)
             for f, a in zip(finetuned, bases, strict=True)]  # fmt: skip
    with torch.no_grad():
        for number, (model, rows) in enumerate(zip(finetuned, texts, strict=True)):
            told = model(rows).logits
            far = [apart(told, m(rows).logits) for m in (both, alone[1 - number], onto)]
            assert far[0] < 0.7 * far[1] and far[0] < 0.7 * far[2], far


@pytest.mark.parametrize("strengths", [(1.0, 1.0), (0.5, 2.0)])
def test_the_changes_of_several_are_added(strengths: tuple[float, float]) -> None:
    """Of one base in another basis: what they sum to there is what they sum to here."""
    base = built(tiny_llama(), 0)
    finetuned = [tuned(base, tiny_llama(), seed) for seed in (8, 9)]
    onto, summed = hf_align.randomize(base, seed=3), built(tiny_llama(), 0)
    with torch.no_grad():
        for w, start, *others in zip(*(m.parameters() for m in (summed, base, *finetuned)), strict=True):
            w.copy_(start + sum(s * (other - start) for s, other in zip(strengths, others, strict=True)))
    carried = hf_align.transport(finetuned, base=base, onto=onto, strength=strengths, method="task_arithmetic")
    assert float((answers(carried) - answers(summed)).abs().max()) < 0.05 * float(
        (answers(onto) - answers(summed)).abs().max()
    )


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"base": [0]}, "2 fine-tunes have 1 bases"),
        ({"strength": [1.0, 2.0, 3.0]}, "and 3 strengths"),
        ({"strength": [1.0, float("inf")]}, "strength is inf"),
        ({"strength": [1.0, -1e4]}, "strength is -10000.0; it must lie between"),
        ({"data": {"input_ids": torch.zeros(2, 4, dtype=torch.long)}}, "of several, each writes its own"),
        ({"keep": 0.3, "method": "task_arithmetic"}, "fits nothing"),
    ],
    ids=["bases", "strengths", "infinite", "too strong", "data", "nothing to keep"],
)
def test_what_does_not_fit_several(asked: dict[str, object], message: str) -> None:
    model = built(tiny_llama(), 0)
    given = {"base": model, **{k: [model] if k == "base" else v for k, v in asked.items()}}
    with pytest.raises(ValueError, match=message):
        hf_align.transport([model, model], onto=model, **given)  # type: ignore[arg-type]


def save(folder: Path, model: PreTrainedModel) -> Path:
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def three(tmp_path: Path) -> list[Path]:
    """A fine-tune, its base, and another base."""
    base = built(tiny_llama(), 0)
    models = {"tuned": tuned(base, tiny_llama()), "base": base, "other": built(tiny_llama(), 1)}
    return [save(tmp_path / name, model) for name, model in models.items()]


def test_the_command_writes_what_the_library_gives(three: list[Path], tmp_path: Path) -> None:
    finetuned, base, onto = three
    data = tmp_path / "data.jsonl"
    assert run("transport", finetuned, "--base", base, "--onto", onto, "-o", tmp_path / "out", "--quiet") == 0
    written = type(built(tiny_llama(), 0)).from_pretrained(tmp_path / "out")
    torch.testing.assert_close(answers(written), answers(hf_align.transport(finetuned, base=base, onto=onto)),
                               rtol=1e-3, atol=1e-3)  # fmt: skip
    card = (tmp_path / "out" / "README.md").read_text()
    assert "hf-align transport tuned --base base --onto other" in card and str(tmp_path) not in card
    assert not data.exists()


def test_what_it_gains_is_measured(three: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from safetensors.torch import save_file

    finetuned, base, onto = three
    save_file({"input_ids": torch.randint(11, (8, 16))}, tmp_path / "rows.safetensors")
    assert run("transport", finetuned, "--base", base, "--onto", onto, "-o", tmp_path / "out", "--data",
               tmp_path / "rows.safetensors", "--method", "task_arithmetic", "--quiet") == 0  # fmt: skip
    said = " ".join(capsys.readouterr().out.split())
    assert "the result has loss" in said and "added without alignment" in said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--base", "GPT2", "--onto", "OTHER"], "they do not merge"),
        (["--base", "BASE", "--onto", "OTHER", "--strength", "nan"], "--strength is nan"),
        (["--base", "BASE", "--onto", "OTHER", "--strength", "1e38"], "--strength is 1e+38; it must lie between"),
        (["--base", "BASE", "--onto", "OTHER", "--keep", "2"], "--keep is 2"),
        (["--base", "BASE", "--onto", "OTHER", "--method", "ties"], "'ties'"),
        (["--base", "BASE"], "--onto"),
    ],
    ids=["another architecture", "strength", "too strong", "keep", "method", "no other base"],
)
def test_what_cannot_be_carried(
    options: list[str], message: str, three: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finetuned, base, onto = three
    gpt2 = save(tmp_path / "gpt2", built(tiny_gpt2(), 0))
    places = {"BASE": base, "OTHER": onto, "GPT2": gpt2}
    assert run("transport", finetuned, *(places.get(o, o) for o in options), "-o", tmp_path / "out") == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()
    with pytest.raises(ValueError, match="method is 'ties'"):
        hf_align.transport(finetuned, base=base, onto=onto, method="ties")  # type: ignore[arg-type]


@pytest.mark.parametrize(("typed", "steps", "rows"), [((), 200, 16), (("--steps", 30), 30, 16)])
def test_the_descent_is_the_one_that_was_measured(
    typed: tuple[object, ...], steps: int, rows: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The command went on for ten times as long as the table that the documentation quotes."""
    asked = []

    def transport(*given: object, **_: object) -> Report:
        asked.append(given[4])
        return Report(str(tmp_path), "llama")

    monkeypatch.setattr(pipeline, "transport", transport)
    assert run("transport", "F", "--base", "A", "--onto", "B", "-o", tmp_path, "--method", "distil", *typed) == 0
    (options,) = asked
    assert isinstance(options, Options) and (options.schedule.steps, options.schedule.rows) == (steps, rows)
    assert Schedule.of_transport("distil") == Schedule(steps=200, rows=16)  # of the table


def test_the_card_says_what_was_carried(three: list[Path], tmp_path: Path) -> None:
    finetuned, base, onto = three
    asked = ("--base", base, "--onto", onto, "-o", tmp_path / "out", "--method", "task_arithmetic", "--quiet")
    assert run("transport", finetuned, *asked) == 0
    card = " ".join((tmp_path / "out" / "README.md").read_text().split())
    assert "`other` with what `tuned` learned on `base`" in card and "the change was carried over" in card
    assert "weights were mixed" not in card and "| weight | 0.5 |" not in card
