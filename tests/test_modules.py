"""The library on plain modules: no config describes them, so what they compute does."""

from __future__ import annotations

import copy
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import built, tiny_gpt2
from plain_modules import (
    ByData,
    ByLength,
    Cell,
    Codes,
    Counted,
    Decoder,
    Emptied,
    Encoder,
    Flagged,
    Fused,
    Masked,
    Narrow,
    Noisy,
    Recurrent,
    ResNet,
    Several,
    Shared,
    Variational,
    WithLoss,
    WithTargets,
    mlp,
    seeded,
)
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2LMHeadModel

import hf_align
from hf_align.errors import OptionError
from hf_align.tracing.branches.taken import brought
from hf_align.tracing.build import build_without_weights

EXACT = 1e-11
"""Of outputs in float64."""
CLOSE = 1e-4
"""Of weights: matching holds them in single precision."""


def numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


def tokens(*shape: int) -> Tensor:
    return torch.randint(11, shape, generator=torch.Generator().manual_seed(7))


KINDS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "mlp": (mlp, numbers(4, 6)),
    "mlp without biases": (lambda: mlp(bias=False), numbers(4, 6)),
    "resnet": (ResNet, numbers(2, 3, 6, 6)),
    "encoder": (Encoder, tokens(2, 5)),
    "decoder": (Decoder, {"ids": tokens(2, 5)}),
    "fused": (Fused, tokens(2, 5)),
    "fused with a loss": (Fused, {"ids": tokens(2, 5), "targets": tokens(2, 5)}),
    "variational": (Variational, numbers(4, 6)),
    "counted": (Counted, numbers(9, 6)),
    "codes": (Codes, numbers(9, 6)),
    "lstm": (Recurrent, numbers(2, 2, 3)),
    "tanh cell": (lambda: Cell(nn.RNNCell(3, 5)), numbers(2, 3, 3)),
    "gru cell": (lambda: Cell(nn.GRUCell(3, 5)), numbers(2, 3, 3)),
    "lstm cell": (lambda: Cell(nn.LSTMCell(3, 5)), numbers(2, 3, 3)),
    "shared": (Shared, numbers(4, 6)),
    "several": (Several, {"pair": (numbers(4, 3), numbers(4, 2)), "scale": numbers(4, 5), "doubled": True}),
}


@torch.no_grad()
def answer(module: nn.Module, inputs: Any) -> Tensor:
    """All that it returns, in evaluation mode."""
    module = copy.deepcopy(module).eval()
    out = tree_leaves(module(**inputs) if isinstance(inputs, dict) else module(inputs))
    return torch.cat([t.double().flatten() for t in out if isinstance(t, Tensor)])


def assert_same(module: nn.Module, other: nn.Module, inputs: Any) -> None:
    torch.testing.assert_close(answer(module, inputs), answer(other, inputs), rtol=EXACT, atol=EXACT)


def largest(module: nn.Module, other: nn.Module) -> float:
    """How far any saved number lies from its counterpart."""
    pairs = zip(module.state_dict().values(), other.state_dict().values(), strict=True)
    return max(float((x.double() - y.double()).abs().max()) for x, y in pairs)


@pytest.mark.parametrize("kind", KINDS)
def test_a_twin_in_another_basis_is_found_again(kind: str, tmp_path: Path) -> None:
    make, inputs = KINDS[kind]
    a, c = seeded(make, 0), seeded(make, 1)
    twin = hf_align.randomize(a, seed=1, inputs=inputs)
    assert type(twin) is type(a) and largest(twin, a) > 0.1
    assert_same(twin, a, inputs)
    alignment = hf_align.align(twin, to=a, inputs=inputs)
    moved, reference = alignment.apply(twin), alignment.apply_to_reference(a)
    assert_same(moved, twin, inputs), assert_same(reference, a, inputs)
    assert largest(moved, reference) < CLOSE
    other = hf_align.align(c, to=a, inputs=inputs)
    assert_same(other.apply(c), c, inputs)
    assert other.witness is not None and any("as given" in case for case in other.witness["models"][0]["cases"])
    assert largest(other.apply(c), c) > 0.1
    other.save_pretrained(tmp_path)
    again = hf_align.Alignment.from_pretrained(tmp_path)
    assert largest(again.apply(c), other.apply(c)) == 0.0 and again.distance == other.distance
    assert_same((other.inverse() @ other).apply(c), c, inputs)
    merged = hf_align.merge([a, twin], align=alignment)
    torch.testing.assert_close(answer(merged, inputs), answer(a, inputs), rtol=CLOSE, atol=CLOSE)


def test_what_is_drawn_at_random_is_drawn_alike() -> None:
    x = numbers(2, 3, 9)
    assert hf_align.align(seeded(Noisy, 1), to=seeded(Noisy, 0), inputs=x).witness is not None


def test_room_that_nothing_fills_is_no_danger() -> None:
    """What is neither written nor read has no size of its own, and no twin can be found in it again."""
    a, c, x = seeded(Narrow, 0), seeded(Narrow, 1), numbers(2, 6, 5)
    assert_same(hf_align.align(c, to=a, inputs=x).apply(c), c, x)


def test_a_cell_that_is_homogeneous_may_be_scaled() -> None:
    """What units write and read is scaled at once, and where that is best is no permutation's to say."""
    make, x = lambda: Cell(nn.RNNCell(3, 5, nonlinearity="relu")), numbers(2, 3, 3)
    a, c = seeded(make, 0), seeded(make, 1)
    alignment = hf_align.align(c, to=a, inputs=x)
    assert_same(alignment.apply(c), c, x)
    assert largest(alignment.apply(c), c) > 0.1 and hf_align.certify(a, inputs=x).complete


@pytest.mark.parametrize("kind", ["mlp", "resnet", "decoder", "lstm", "shared"])
def test_the_certificate_holds(kind: str) -> None:
    make, inputs = KINDS[kind]
    proof = hf_align.certify(seeded(make, 0), inputs=inputs)
    assert proof.sound and proof.complete and proof.modes and proof.found > 0


@pytest.mark.parametrize("slopes", [1, 6])
def test_slopes_that_are_learned_are_counted(slopes: int) -> None:
    """Inside of vmap torch does not add up their derivatives over the rows."""
    proof = hf_align.certify(nn.Sequential(nn.Linear(4, 6), nn.PReLU(slopes), nn.Linear(6, 3)), inputs=numbers(5, 4))
    assert proof.sound and not proof.not_counted
    assert proof.nullity == 6


def test_a_certificate_says_nothing_of_how_torch_computes(capfd: pytest.CaptureFixture[str]) -> None:
    bag = nn.Sequential(nn.EmbeddingBag(9, 4, mode="mean"), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert hf_align.certify(bag, inputs=torch.arange(8).view(2, 4)).sound
    assert not [w for w in warned if "performance" in str(w.message)] and "performance" not in capfd.readouterr().err


def test_a_part_that_is_emptied_on_the_way_pins_nothing() -> None:
    """An op without a rule would keep all that it reads where it is; so would one of the names of a transpose."""
    a, c, x = seeded(Emptied, 0), seeded(Emptied, 1), numbers(2, 5, 6)
    proof = hf_align.certify(a, inputs=x)
    assert proof.sound and proof.unknown_ops == () and proof.moved == 36 + 36 + 6  # queries, values, units
    moved = hf_align.align(c, to=a, inputs=x).apply(c)
    assert largest(moved, c) > 0.1
    assert_same(moved, c, x)


def test_units_that_are_always_open_or_shut_are_no_symmetries() -> None:
    """Behind a ReLU and a pool all features are positive, and most random units look at one side of their kink."""
    head = [nn.Flatten(), nn.Linear(24, 6), nn.ReLU(), nn.Linear(6, 3)]
    net = nn.Sequential(nn.Conv2d(2, 6, 3, padding=1), nn.ReLU(True), nn.MaxPool2d(2), *head)
    proof = hf_align.certify(net, inputs=torch.randn(2, 2, 4, 4))
    assert proof.sound and proof.complete and proof.moved == 12


def test_large_modules_are_proved_sound_and_not_counted() -> None:
    proof = hf_align.certify(nn.Sequential(nn.Linear(90, 90), nn.ReLU(), nn.Linear(90, 9)), inputs=torch.randn(2, 90))
    assert proof.sound and not proof.complete
    assert "9009 parameters" in proof.not_counted and proof.as_json()["complete"] == {"not_counted": proof.not_counted}


def test_data_in_a_file(tmp_path: Path) -> None:
    a, b = seeded(mlp, 0).float(), seeded(mlp, 1).float()
    x, y = loaders()["pair"]
    save_file({"input": x, "labels": y}, tmp_path / "data.safetensors")
    found = hf_align.evaluate(a, b, tmp_path / "data.safetensors", points=3)
    assert found.naive.losses == pytest.approx(hf_align.evaluate(a, b, [(x, y)], points=3).naive.losses)
    with pytest.raises(hf_align.HfAlignError, match="no such file"):
        hf_align.evaluate(a, b, tmp_path / "nowhere.safetensors")


def loaders() -> dict[str, Any]:
    x, y = numbers(40, 6).float(), torch.arange(40) % 3
    return {"loader": DataLoader(TensorDataset(x, y), batch_size=16), "dataset": TensorDataset(x, y),
            "list": [(x[:20], y[:20]), (x[20:], y[20:])], "dicts": [{"input": x, "labels": y}], "pair": (x, y),
            "generator": (batch for batch in [(x[:20], y[:20]), (x[20:], y[20:])])}  # fmt: skip


@pytest.mark.parametrize("form", loaders())
def test_losses_on_the_line_are_those_of_the_module(form: str) -> None:
    a, b = seeded(mlp, 0).float(), seeded(mlp, 1).float()
    (x, y), data = loaders()["pair"], loaders()[form]
    found = hf_align.evaluate(a, b, data, points=3)
    for module, loss in ((a, found.naive.losses[0]), (b, found.naive.losses[-1]), (b, found.aligned.losses[-1])):
        assert loss == pytest.approx(float(cross_entropy(module(x), y)), rel=1e-5)
    halfway = hf_align.interpolate(a, b, 0.5, inputs=x)
    assert found.aligned.losses[1] == pytest.approx(float(cross_entropy(halfway(x), y)), rel=1e-5)
    twin = hf_align.randomize(a, seed=3, inputs=x)
    twins = hf_align.evaluate(a, twin, loaders()["pair"], points=5)
    assert twins.aligned.barrier < 1e-5


def test_a_loss_of_the_callers_own_gets_batches_as_they_were_given() -> None:
    a, b = seeded(mlp, 0).float(), seeded(mlp, 1).float()
    seen = []

    def objective(outputs: Tensor, batch: Any) -> Tensor:
        x, y = batch
        seen.append((outputs.shape, x.shape, y.shape))
        return cross_entropy(outputs, y)

    alignment = hf_align.align(b, to=a, match="learned", data=loaders()["loader"], objective=objective, steps=3)
    assert len(seen) == 3 and seen[0][0][1:] == (3,) and seen[0][1][1:] == (6,)
    assert_same(alignment.apply(b.double()), b, numbers(4, 6))
    own = hf_align.evaluate(a, b, loaders()["loader"], points=3, align=alignment, objective=objective)
    assert own.naive.losses == pytest.approx(hf_align.evaluate(a, b, loaders()["loader"], points=3).naive.losses)


@pytest.mark.parametrize("kind", [WithLoss, WithTargets])
def test_a_loss_that_the_module_returns_is_the_one(kind: Callable[[], nn.Module]) -> None:
    a, b = seeded(kind, 0).float(), seeded(kind, 1).float()
    x, y = loaders()["pair"]
    call: Any = {"x": x, "labels": y} if kind is WithLoss else (x, y)
    lines = hf_align.evaluate(a, b, [call], points=3, inputs=call)
    for module, loss in ((a, lines.naive.losses[0]), (b, lines.aligned.losses[-1])):
        assert loss == pytest.approx(2 * float(cross_entropy(module.body(x), y)), rel=1e-5)


@pytest.mark.parametrize("match", ["activation", "learned"])
def test_matching_by_what_modules_compute(match: Any) -> None:
    a, c, x = seeded(mlp, 0), seeded(mlp, 1), numbers(4, 6)
    steps = {"steps": 2} if match == "learned" else {}
    for data in (None, loaders()["loader"], [numbers(40, 6)]):
        inputs = x if data is None else None
        alignment = hf_align.align(c, to=a, match=match, data=data, inputs=inputs, **steps)
        assert_same(alignment.apply(c), c, x)


@pytest.mark.parametrize("method", ["linear", "slerp", "circuits", "fisher", "regmean", "regression"])
def test_methods(method: Any) -> None:
    a, x = seeded(ResNet, 0), numbers(2, 3, 6, 6)
    merged = hf_align.merge([a, hf_align.randomize(a, seed=1, inputs=x)], method=method, inputs=x)
    torch.testing.assert_close(answer(merged, x), answer(a, x), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("method", ["task_arithmetic", "regression"])
def test_transport(method: Any) -> None:
    base, fine, x = seeded(ResNet, 0), seeded(ResNet, 0), numbers(6, 3, 6, 6)
    with torch.no_grad():
        fine.head.bias.add_(1.0)
        fine.blocks[1].second.weight.mul_(1.1)
    onto = hf_align.randomize(base, seed=2, inputs=x)
    carried = hf_align.transport(fine, base=base, onto=onto, method=method, inputs=x)
    left = (answer(carried, x) - answer(fine, x)).norm() / (answer(base, x) - answer(fine, x)).norm()
    assert left < {"task_arithmetic": CLOSE, "regression": 0.05}[method]


def test_several_models() -> None:
    base, x = seeded(mlp, 0), numbers(4, 6)
    models = [base, *(hf_align.randomize(base, seed=s, inputs=x) for s in (1, 2))]
    torch.testing.assert_close(answer(hf_align.merge(models, inputs=x), x), answer(base, x), rtol=CLOSE, atol=CLOSE)


def test_modules_that_hold_what_they_computed_are_copied() -> None:
    a, x = torch.nn.utils.weight_norm(nn.Linear(6, 4)).double(), numbers(3, 6)
    a.seen = [a(x)]  # type: ignore[assignment]
    torch.testing.assert_close(hf_align.randomize(a, seed=1, inputs=x)(x), a(x), rtol=EXACT, atol=EXACT)


def test_state_dicts_of_modules() -> None:
    a, x = seeded(mlp, 0), numbers(4, 6)
    config = hf_align.symmetries(a, inputs=x).config
    twin = hf_align.randomize(a.state_dict(), seed=1, config=config)
    moved = hf_align.align(twin, to=a.state_dict(), config=config).apply(twin)
    module = mlp().double()
    module.load_state_dict(moved)
    assert_same(module, a, x)


def test_what_the_caller_has_is_kept() -> None:
    a, b, x = seeded(ResNet, 0), seeded(ResNet, 1).bfloat16(), numbers(2, 3, 6, 6)
    b.train(), b.norm.eval(), b.stem.weight.requires_grad_(False)
    before = {n: t.clone() for n, t in b.state_dict().items()}
    for moved in (hf_align.align(b, to=a, inputs=x).apply(b), hf_align.randomize(b, inputs=x)):
        assert [m.training for m in moved.modules()] == [m.training for m in b.modules()]
        assert [p.requires_grad for p in moved.parameters()] == [p.requires_grad for p in b.parameters()]
        assert {t.dtype for t in moved.parameters()} == {torch.bfloat16}
    assert all(torch.equal(t, before[n]) for n, t in b.state_dict().items()) and b.training and not b.norm.training


def test_flags_of_frozen_parts_are_kept() -> None:
    model = built(tiny_gpt2(), 0).train()
    model.transformer.ln_f.eval()
    hf_align.symmetries(model)
    assert model.training and not model.transformer.ln_f.training


def test_an_alignment_is_applied_in_another_process(tmp_path: Path) -> None:
    a, b, x = seeded(Decoder, 0), seeded(Decoder, 1), tokens(2, 5)
    alignment = hf_align.align(b, to=a, inputs=x)
    alignment.save_pretrained(tmp_path)
    torch.save(alignment.apply(b).state_dict(), tmp_path / "moved.pt")
    code = (
        "import sys, torch, hf_align; sys.path.insert(0, sys.argv[2]); from plain_modules import *\n"
        "alignment = hf_align.Alignment.from_pretrained(sys.argv[1])\n"
        "try: alignment.apply(seeded(Decoder, 1).state_dict())\n"
        "except ValueError as error: print(error)\n"
        "found = alignment.apply(seeded(Decoder, 1)).state_dict()\n"
        "print(all(torch.equal(t, found[n]) for n, t in torch.load(f'{sys.argv[1]}/moved.pt').items()))\n"
        "try: alignment.apply(seeded(Shared, 1))\n"
        "except ValueError as error: print(error)"
    )
    ran = subprocess.run([sys.executable, "-c", code, tmp_path, Path(__file__).parent], capture_output=True, text=True)
    assert "give a live Decoder first" in ran.stdout and "True" in ran.stdout, ran.stdout + ran.stderr
    assert "Shared cannot be traced" in ran.stdout, ran.stdout


def test_a_mask_in_a_buffer_stays_where_it_is() -> None:
    """Units that it prunes and units that it keeps do not change places."""
    a, b, x = seeded(Masked, 0), seeded(Masked, 1), numbers(3, 4)
    assert_same(hf_align.randomize(a, seed=1, inputs=x), a, x)
    moved = hf_align.align(b, to=a, inputs=x).apply(b)
    assert_same(moved, b, x)
    assert torch.equal(moved.pruned, b.pruned)


def test_a_way_that_only_long_inputs_take_counts() -> None:
    """Traced at four places alone, the hidden entries seem to be free."""
    a, x = seeded(ByLength, 0), numbers(2, 4, 4)
    found = hf_align.symmetries(a, inputs=x)
    assert not any(space.group is not None and space.group.permutes for space in found.spec.spaces.values())
    twin = hf_align.randomize(a, seed=1, inputs=x)
    for length in (3, 12, 13, 20):
        assert_same(twin, a, numbers(2, length, 4))


def test_what_a_module_notes_counts_at_every_size() -> None:
    x = numbers(4, 4)
    a = seeded(Flagged, 0)
    with pytest.raises(hf_align.IncompatibleModels, match="compute differently"):
        hf_align.align(seeded(lambda: Flagged(flag=True), 1), to=a, inputs=x)
    twin = hf_align.randomize(a, seed=1, inputs=x)
    for rows in (1, 37, 40, 41, 60):
        assert_same(twin, a, numbers(rows, 4))


class FlagInBuffer(Flagged):
    """The flag is saved with the weights."""

    def __init__(self, flag: bool = False, limit: int = 40) -> None:
        super().__init__(limit=limit)
        del self.flag
        self.register_buffer("flag", torch.tensor(flag))


@pytest.mark.parametrize("kind", [Flagged, FlagInBuffer])
def test_an_alignment_takes_no_module_that_does_something_else_at_another_size(kind: type[Flagged]) -> None:
    x = numbers(4, 4)
    a, b, other = (seeded(lambda f=flag: kind(flag=f, limit=1000), i) for i, flag in enumerate((False, False, True)))
    alignment = hf_align.align(b, to=a, inputs=x)
    assert_same(alignment.apply(b), b, numbers(37, 4))
    with pytest.raises(OptionError, match=r"does something else with x \[37, 4\]"):
        alignment.apply(other)
    with pytest.raises(hf_align.IncompatibleModels, match="compute differently"):
        hf_align.align(other, to=a, inputs=x)


def with_another_forward(module: nn.Module) -> nn.Module:
    """As loggers and profilers wrap it: a copy would run the weights of the original."""
    own = module.forward
    module.forward = lambda *args: own(*args)
    return module


@pytest.mark.parametrize(
    ("of", "said"),
    [
        (torch.jit.script, "A is compiled by torch.jit"),
        (lambda module: module.to("meta"), "0.weight has a shape and no numbers"),
        (lambda module: torch.ao.quantization.quantize_dynamic(module, {nn.Linear}), "quantised models cannot be"),
        (with_another_forward, "A is a Sequential whose forward was replaced by a function"),
    ],
)
def test_modules_that_cannot_be_read_are_refused_in_plain_words(of: Callable[[Any], Any], said: str) -> None:
    module = of(seeded(mlp, 0).float())
    with pytest.raises(OptionError, match=said):
        hf_align.align(module, to=module, inputs=numbers(4, 6).float())


@pytest.mark.parametrize("inputs", [numbers(0, 6), numbers(4, 6).to("meta")])
def test_inputs_without_numbers_are_refused_in_plain_words(inputs: Tensor) -> None:
    with pytest.raises(OptionError, match="holds no numbers"):
        hf_align.symmetries(seeded(mlp, 0), inputs=inputs)


def test_a_module_without_sizes_is_refused_in_plain_words() -> None:
    lazy = nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(3))
    with pytest.raises(OptionError, match="0 is a LazyLinear whose sizes are not known yet: call A once"):
        hf_align.align(lazy, to=lazy, inputs=numbers(4, 4))
    lazy(numbers(4, 4).float())
    assert hf_align.certify(lazy.double(), inputs=numbers(4, 4)).sound


@pytest.mark.parametrize("verb", ["symmetries", "certify", "randomize"])
def test_what_cannot_be_described_is_refused_in_plain_words(verb: str) -> None:
    call = getattr(hf_align, verb)
    with pytest.raises(ValueError, match=r"the model is a Sequential.*give inputs="):
        call(mlp())
    with pytest.raises(ValueError, match=r"ByData cannot be traced: plain_modules\.py:\d+ .*torch\.where"):
        call(ByData(), inputs=torch.randn(2, 4))
    with pytest.raises(ValueError, match="Sequential cannot be called with these inputs"):
        call(mlp(), inputs=(torch.randn(2, 6), torch.randn(2, 6)))
    with pytest.raises(ValueError, match="Sequential cannot be traced"):
        call(mlp(), inputs=torch.randn(2, 5))
    with pytest.raises(ValueError, match="no tensor"):
        call(mlp(), inputs=3.0)
    with pytest.raises(ValueError, match="no call"):
        call(mlp(), inputs=[])


class Otherwise(nn.Sequential):
    """The weights of an MLP under the same names."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input)


def test_programs_are_compared_and_not_names() -> None:
    x = numbers(4, 6)
    a = seeded(mlp, 0)
    same = seeded(lambda: Otherwise(*mlp()), 1)
    assert_same(hf_align.align(same, to=a, inputs=x).apply(same), same, x)
    curved = seeded(lambda: nn.Sequential(*(nn.GELU() if isinstance(m, nn.ReLU) else m for m in mlp())), 1)
    with pytest.raises(hf_align.IncompatibleModels, match="A and B compute differently"):
        hf_align.align(curved, to=a, inputs=x)
    with pytest.raises(ValueError, match="the model does not compute what Sequential does"):
        hf_align.align(same, to=a, inputs=x).apply(curved)
    with pytest.raises(hf_align.IncompatibleModels, match=r"0\.bias"):
        hf_align.align(seeded(lambda: mlp(bias=False), 1), to=a, inputs=x)
    with pytest.raises(hf_align.IncompatibleModels, match=r"\[6, 8\] in A, but \[6, 9\] in B|is \[8, 6\] in A"):
        hf_align.align(seeded(lambda: nn.Sequential(nn.Linear(6, 9), *mlp()[1:2], nn.Linear(9, 7), *mlp()[3:]), 1),
                       to=a, inputs=x)  # fmt: skip
    with pytest.raises(hf_align.IncompatibleModels, match="compute differently"):  # the masks differ, in a buffer
        hf_align.align(seeded(lambda: Masked(2), 1), to=seeded(Masked, 0), inputs=numbers(3, 4))
    with pytest.raises(hf_align.HfAlignError):
        hf_align.align(a, to=built(tiny_gpt2(), 0), inputs=x)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda a, x: hf_align.symmetries(a, inputs=x, specs=Path()), "specs holds overrides by model type"),
        (lambda a, x: hf_align.align(a, to=a, inputs=x, untie=True), "untie is for models"),
        (lambda a, x: hf_align.evaluate(a, a, [x]), "no labels"),
        (lambda a, x: hf_align.evaluate(a, a, [(x, x)]), "are no classes"),
        (lambda a, x: hf_align.evaluate(a, a, ["a text"]), "a tensor, a tuple or a dict"),
        (lambda a, x: hf_align.evaluate(a, a, []), "no batches"),
        (lambda a, x: hf_align.evaluate(a, a, [(x, x)], objective="ce"), "a function of outputs"),
        (lambda a, x: hf_align.align(a, to=a, match="learned", data=[(x, x), (x[:, :5], x)]), "not of one shape"),
        (lambda a, x: hf_align.align(a, to=a, inputs=x, match="activation", data=5), "data is 5"),
        (lambda a, x: hf_align.merge([a, a], inputs=x, output_dir="out"), "save_pretrained"),
    ],
)
def test_what_does_not_go_with_a_module(call: Callable[[Any, Tensor], Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        call(mlp(), torch.randn(4, 6))


def test_a_model_of_transformers_is_a_plain_module_with_inputs() -> None:
    """With a layer in place of its own; nothing of what holds it here is its code."""
    a, b = (GPT2LMHeadModel(tiny_gpt2(initializer_range=0.5)).eval() for _ in range(2))
    for model in (a, b):
        model.transformer.h[0].mlp.act = nn.Tanh()
    x = torch.arange(8)[None]
    alignment = hf_align.align(b, to=a, inputs={"input_ids": x})
    torch.testing.assert_close(alignment.apply(b)(x).logits, b(x).logits, rtol=1e-4, atol=1e-4)
    assert not brought(build_without_weights(alignment.config))
