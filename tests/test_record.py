"""One forward pass, written down as it runs."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import DataDependentOutputException
from transformers import PretrainedConfig, PreTrainedModel

from hf_align.errors import IncompatibleModels
from hf_align.symmetry.certificate.random_copy import random_inputs, random_weights
from hf_align.symmetry.certificate.soundness import soundness
from hf_align.symmetry.derivation.derive import derive
from hf_align.tracing import record as record_module
from hf_align.tracing.example import Example
from hf_align.tracing.execute import execute
from hf_align.tracing.ops import op_name
from hf_align.tracing.reasons import DoesNotRunError
from hf_align.tracing.record import record
from hf_align.tracing.trace import trace, trace_call


class Branch(nn.Module):
    """Does what some value says."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, kind: Tensor) -> Tensor:
        return self.linear(x) if kind.sum() > 0 else x


class Rows(nn.Module):
    """Writes what it computes into rows of a tensor of zeros, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        out = torch.zeros(int(lengths.sum()), 4)
        start = 0
        for length in lengths.tolist():
            out[start : start + length] = self.linear(x[start : start + length])
            start += length
        kept = torch.ones_like(x[:, 0]).bool()
        kept[0] = False
        out[kept] *= 2
        return torch.softmax(out, -1)


class Hidden(nn.Module):
    """Puts numbers where a mask of all entries says so."""

    def __init__(self, number: Tensor, adds: bool) -> None:
        super().__init__()
        self.linear, self.number, self.adds = nn.Linear(4, 4), number, adds

    def forward(self, x: Tensor, kept: Tensor) -> Tensor:
        out: Tensor = self.linear(x)
        mask = ~kept[:, None].repeat(1, 4)
        return out.index_put_((mask,), self.number, accumulate=self.adds)


class Doubled(torch.autograd.Function):
    """Brings its own derivative, and goes through vmap."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass


class Mapped(nn.Module):
    """Makes a mask position by position."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + torch.vmap(Doubled.apply)(torch.arange(float(len(x))))[:, None]


def recorded(model: nn.Module, free: str, **arguments: Tensor) -> fx.GraphModule:
    return record(model, arguments, [name for name, _ in model.named_parameters()], [free])


def test_a_function_with_a_derivative_of_its_own_is_written_down_inside_of_vmap() -> None:
    """Masks of transformers look things up by one."""
    model, x = Mapped(), torch.randn(3, 4)
    graph = recorded(model, "x", x=x)
    torch.testing.assert_close(graph(x)[0], model(x))


@pytest.mark.parametrize("kind", [0, 1])
def test_a_branch_on_the_question_is_taken(kind: int) -> None:
    model, x = Branch(), torch.randn(3, 4)
    graph = recorded(model, "x", x=x, kind=torch.tensor([kind]))
    torch.testing.assert_close(graph(x)[0], model(x, torch.tensor([kind])))
    assert [op_name(n) for n in graph.graph.nodes if n.op == "call_function"] == ["linear"] * kind


def test_a_branch_on_an_input_is_refused() -> None:
    with pytest.raises(DataDependentOutputException):
        recorded(Branch(), "kind", x=torch.randn(3, 4), kind=torch.tensor([1]))


def test_a_branch_on_a_weight_is_refused() -> None:
    class Gate(Branch):
        def forward(self, x: Tensor, kind: Tensor) -> Tensor:
            return super().forward(x, self.linear.weight)

    with pytest.raises(DataDependentOutputException):
        recorded(Gate(), "x", x=torch.randn(3, 4), kind=torch.tensor([1]))


@pytest.mark.parametrize(
    ("number", "adds", "op"),
    [(torch.tensor(2.0), False, "masked_fill"), (torch.tensor(2.0), True, "index_put"),
     (torch.ones(8), False, "index_put")],
)  # fmt: skip
def test_a_number_behind_a_mask_is_chosen_entry_by_entry(number: Tensor, adds: bool, op: str) -> None:
    """So that axes along which the mask does not vary stay free."""
    model, x, kept = Hidden(number, adds), torch.randn(3, 4), torch.tensor([True, False, False])
    graph = recorded(model, "x", x=torch.zeros(3, 4), kept=kept)
    assert op in {op_name(n) for n in graph.graph.nodes if n.op == "call_function"}
    torch.testing.assert_close(graph(x)[0], model(x, kept))


def test_what_is_written_into_zeros_is_written_down() -> None:
    model, lengths = Rows(), torch.tensor([2, 3, 1])
    graph = recorded(model, "x", x=torch.zeros(6, 4), lengths=lengths)
    x = torch.randn(6, 4)
    torch.testing.assert_close(graph(x)[0], model(x, lengths))
    ops = [op_name(n) for n in graph.graph.nodes if n.op == "call_function"]
    assert ops.count("linear") == 3
    assert ops.count("softmax") == 1


class Views(nn.Module):
    """Takes views of what it computed and views of those, at random, and writes to some of them in between."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.seed = seed

    def forward(self, x: Tensor) -> Tensor:
        rng = random.Random(self.seed)
        views = [rng.choice((self.linear(x), torch.ones(4, 6)))]
        for _ in range(16):
            value = rng.choice(views)
            if rng.random() < 0.6:
                views.append(rng.choice(TAKES)(value, rng.randrange(max(1, value.dim()))))
            else:
                rng.choice(WRITES)(value, self.linear(x[rng.randrange(4)]).sum())
        return torch.cat([torch.zeros(1), *(v.flatten() for v in views)])


TAKES: tuple[Callable[[Tensor, int], Tensor], ...] = (
    lambda v, axis: v.narrow(axis, v.shape[axis] // 2, v.shape[axis] - v.shape[axis] // 2) if v.dim() else v,
    lambda v, axis: v[..., ::2] if v.dim() else v,
    lambda v, axis: v.select(axis, -1) if v.dim() else v,
    lambda v, axis: v.transpose(axis, -1) if v.dim() else v,
    lambda v, axis: v.permute([(i + axis) % v.dim() for i in range(v.dim())]),
    lambda v, axis: v.unsqueeze(axis),
    lambda v, axis: v.squeeze(),
    lambda v, axis: v.reshape(-1),
    lambda v, axis: v.diagonal() if v.dim() > 1 else v,
    lambda v, axis: v.detach(),
)
WRITES: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    lambda v, by: v.copy_(by),
    lambda v, by: v.add_(by),
    lambda v, by: v.mul_(1.5),
    lambda v, by: v.fill_(2.0),
    lambda v, by: v.masked_fill_(torch.ones(v.shape) > 0, 3.0),
)


@pytest.mark.parametrize("seed", range(20))
def test_writes_through_views_change_all_that_shows_the_memory(seed: int) -> None:
    model = Views(seed).requires_grad_(False)
    graph = recorded(model, "x", x=torch.zeros(4, 6))
    assert not [n for n in graph.graph.nodes if getattr(getattr(n.target, "_schema", None), "is_mutable", False)]
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))
    torch.testing.assert_close(graph(x)[0], model(x))


class Fills(PreTrainedModel):
    """Reads what is made of a value by an op that fills a tensor of its own, or that writes through many views."""

    config_class = PretrainedConfig

    def __init__(self, config: PretrainedConfig, fill: Callable[[Tensor], Tensor]) -> None:
        super().__init__(config)
        self.written, self.reader, self.fill = nn.Linear(4, 6), nn.Linear(6, 4), fill

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (self.reader(self.fill(self.written(x))),)


def _into(write: Callable[[Tensor, Tensor], object]) -> Callable[[Tensor], Tensor]:
    """Zeros that a value is written to."""

    def fill(value: Tensor) -> Tensor:
        zeros = torch.zeros(value.shape)
        write(zeros, value)
        return zeros

    return fill


FILLS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows of several lengths": lambda v: nn.utils.rnn.pad_sequence([v[:1], v], batch_first=True, padding_value=0.5),
    "several tensors at once": _into(lambda zeros, v: torch._foreach_add_([zeros], [v])),
    "a chunk": _into(lambda zeros, v: zeros.chunk(2, -1)[0].add_(v[..., :3])),
    "a part": _into(lambda zeros, v: zeros.split([2, 4], -1)[1].copy_(v[..., 2:])),
    "a row": _into(lambda zeros, v: zeros.unbind(0)[1].copy_(v[1])),
    "a stride": _into(lambda zeros, v: zeros.as_strided((6,), (1,), 6).copy_(v[0])),
    "windows": _into(lambda zeros, v: zeros.unfold(1, 2, 2)[..., 0].copy_(v[:, ::2])),
    "a result": _into(lambda zeros, v: torch.mul(v, 2.0, out=zeros)),
}


@pytest.mark.parametrize("fill", FILLS)
def test_what_is_filled_with_computed_values_is_no_constant(fill: str) -> None:
    """Also in the first pass through a class, of which nothing is known."""
    model = Fills(PretrainedConfig(), FILLS[fill]).requires_grad_(False).eval()
    empty = Fills(PretrainedConfig(), FILLS[fill]).to("meta")
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    record_module._MIXED.pop(Fills, None)
    program = trace_call(empty, Example({"x": torch.zeros(3, 4)}, {}))
    found = execute(program, dict(model.named_parameters()), {"x": x})
    torch.testing.assert_close(found, model(x)[0])


TOWERS: dict[str, tuple[str, dict[str, Any]]] = {
    "grid_thw": (
        "Qwen3VLVisionModel",
        dict(depth=1, hidden_size=8, num_heads=2, intermediate_size=6, patch_size=2, out_hidden_size=8,
             num_position_embeddings=16, deepstack_visual_indexes=[]),
    ),
    "spatial_shapes": (
        "Siglip2VisionModel",
        dict(num_hidden_layers=1, hidden_size=8, num_attention_heads=2, intermediate_size=6, patch_size=2,
             num_patches=16),
    ),
}  # fmt: skip


@pytest.mark.parametrize("argument", TOWERS)
def test_a_tower_whose_shapes_an_argument_decides(argument: str) -> None:
    name, sizes = TOWERS[argument]
    build: type[PreTrainedModel] = getattr(transformers, name)
    config = build.config_class(**sizes, architectures=[name])
    program = trace(config)
    assert argument in program.example.arguments
    assert argument not in program.inputs.values()

    model = build._from_config(config, attn_implementation="eager").eval()
    rng = torch.Generator().manual_seed(0)
    inputs = {n: v.float() for n, v in random_inputs(program, rng).items()}
    with torch.no_grad():
        expected = model(**{**program.example.arguments, **inputs})[0]
        found = execute(program, dict(model.named_parameters()), inputs)
    torch.testing.assert_close(found, expected)

    spec = derive(program)
    assert not spec.unknown_ops
    assert soundness(program, spec, random_weights(spec, rng), random_inputs(program, rng), rng) < 1e-9


class Remembers(nn.Module):
    """Keeps what it computes from a weight for the next call, in a dictionary and as an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.kept: dict[str, Tensor] = {}
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if "square" not in self.kept:
            self.kept["square"] = self.linear.weight**2
        self.last = self.linear(x) if self.last is None else self.last
        return self.last @ self.kept["square"]


def test_what_a_model_remembers_of_a_call_is_forgotten() -> None:
    model = Remembers()
    names = [name for name, _ in model.named_parameters()]
    graphs = [record(model, {"x": torch.zeros(size, 4)}, names, ["x"]).graph for size in (2, 3)]
    assert [[op_name(n) for n in graph.nodes] for graph in graphs[:1]] * 2 == [
        [op_name(n) for n in graph.nodes] for graph in graphs
    ]
    assert not model.kept and model.last is None


class Doubles(nn.Module):
    """Writes to a part of what it has computed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        y[1:].mul_(2)
        return y


def test_what_an_op_is_known_to_show_is_memory_of_this_call() -> None:
    model, x = Doubles(), torch.randn(3, 4)
    for _ in range(2):  # what ops give is asked in the first pass, and known in the second
        torch.testing.assert_close(recorded(model, "x", x=x)(x)[0], model(x))


class Sometimes(nn.Module):
    """Writes what it computes to a tensor of zeros, or asks it how much it holds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, writes: Tensor) -> Tensor:
        kept = torch.zeros(4, 4)
        if writes:
            kept[:2] = self.linear(x)
        else:
            kept[:2] = 1.0
            if kept.sum() > 3:
                return self.linear(x) * 2
        return kept


@pytest.mark.parametrize("order", [(True, False, True), (False, True, False)])
def test_what_one_call_writes_to_is_but_a_guess_for_the_next(order: tuple[bool, ...]) -> None:
    model, x = Sometimes(), torch.randn(2, 4)
    for writes in order:
        given = {"x": x, "writes": torch.tensor(writes)}
        torch.testing.assert_close(recorded(model, "x", **given)(x)[0], model(**given))


class Passes(nn.Module):
    """Takes new memory for what it computes, again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            kept = x.new_empty(x.shape)
            kept[:] = self.linear(x)
            x = kept
        return x


def test_what_a_call_writes_to_is_known_when_it_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, calls = Passes(), torch.randn(2, 4), list[int]()
    forward = Passes.forward
    monkeypatch.setattr(Passes, "forward", lambda self, x: (calls.append(1), forward(self, x))[1])
    for _ in range(2):
        torch.testing.assert_close(recorded(model, "x", x=x)(x)[0], forward(model, x))
    assert len(calls) == 3  # twice at first, once then


class Places(nn.Module):
    """Puts what it computes where a mask says, in the place of what it is given."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.linear = nn.Linear(4, wide)

    def forward(self, x: Tensor, media: Tensor, mask: Tensor) -> Tensor:
        x = x.clone()
        x[mask if mask.dtype == torch.bool else mask > 0] = self.linear(media)
        return x


@pytest.mark.parametrize(
    ("rows", "wide", "mask", "runs"),
    [
        (3, 4, torch.tensor([True, True, True, False, False]), True),
        (1, 4, torch.tensor([True, True, True, False, False]), True),
        (4, 4, torch.tensor([True, True, True, False, False]), False),
        (3, 6, torch.tensor([True, True, True, False, False]), False),
        (3, 4, torch.ones(5), True),  # without value: how many it holds only a run decides
        (6, 4, torch.ones(5), False),
        (3, 6, torch.ones(5), False),
        (3, 3, torch.ones(5), False),
    ],
)
def test_values_have_a_place_where_they_are_put(rows: int, wide: int, mask: Tensor, runs: bool) -> None:
    model = Places(wide)
    given = {"x": torch.randn(5, 4), "media": torch.randn(rows, 4), "mask": mask}
    free = ["x", "media", *(["mask"] if mask.is_floating_point() else [])]

    def put() -> fx.GraphModule:
        return record(model, given, [n for n, _ in model.named_parameters()], free)

    if runs:
        assert any(op_name(node).startswith("index_put") for node in put().graph.nodes)
        return
    with pytest.raises(RuntimeError, match="cannot be put"):
        put()


class Odd(nn.Module):
    """Does one more thing to what it computes, [5, 8]."""

    def __init__(self, does: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.does = nn.Linear(4, 8), does

    def forward(self, x: Tensor) -> Tensor:
        return self.does(self.inner(x))


FIRST, BEYOND = torch.tensor([0, 2]), torch.tensor([0, 8])


@pytest.mark.parametrize(
    "does",
    [
        lambda h: h.index_add(0, FIRST, h[:2, :7]),
        lambda h: h.index_add(1, BEYOND, h[:, :2]),
        lambda h: h.slice_scatter(h[:, :3], 1, 0, 4),
        lambda h: h.select_scatter(h[:1, 0], 1, 0),
        lambda h: h.diagonal_scatter(h[:1, 0]),
        lambda h: h.index_select(1, torch.arange(8)[None]),
        lambda h: h.masked_scatter(torch.ones(5, 8, dtype=torch.bool), h[:1]),
        lambda h: h.index_fill(1, BEYOND, 0.0),
        lambda h: h.gather(1, torch.full((5, 1), 8)),
        lambda h: h.scatter_add(1, BEYOND.expand(5, 2), h[:, :2]),
        lambda h: h[:, BEYOND],
        lambda h: h.index_put((FIRST, BEYOND), h[0, 0]),
        lambda h: nn.functional.embedding(BEYOND, h),
    ],
)
def test_what_a_run_refuses_is_refused(does: Callable[[Tensor], Tensor]) -> None:
    """Shapes are computed on no device, where nobody looks whether operands go together."""
    model, x = Odd(does), torch.randn(5, 4)
    with pytest.raises((RuntimeError, IndexError)):
        model(x)
    with pytest.raises(DoesNotRunError):
        record(model, {"x": x}, [n for n, _ in model.named_parameters()], ["x"])


@pytest.mark.parametrize(
    "does",
    [
        lambda h: h.index_add(0, FIRST, h[:2]),
        lambda h: h.slice_scatter(h[:, :4], 1, 0, 4),
        lambda h: h.masked_scatter(h > 100, h[:1, :1]),  # how many it takes only a run decides
        lambda h: h.index_put((h.argmax(0), FIRST.repeat(4)), h[0]),
        lambda h: nn.functional.embedding(h.argmax(1), h.T),
    ],
)
def test_what_runs_is_written_down(does: Callable[[Tensor], Tensor]) -> None:
    model, x = Odd(does), torch.randn(5, 4)
    model(x)
    record(model, {"x": x}, [n for n, _ in model.named_parameters()], ["x"])


class Padded(nn.Module):
    """Fills up its scores with what no score is."""

    def __init__(self, filling: float) -> None:
        super().__init__()
        self.inner, self.outer, self.filling = nn.Linear(4, 6), nn.Linear(6, 3), filling
        self.config = transformers.PretrainedConfig()

    def forward(self, x: Tensor) -> Tensor:
        scores = torch.full((2, 8), self.filling)
        scores[:, :3] = self.outer(torch.relu(self.inner(x)))
        return scores


@pytest.mark.parametrize("filling", [-torch.inf, torch.nan])
def test_infinite_scores_have_to_stay_and_none_shows_nothing(filling: float) -> None:
    program = trace_call(Padded(filling), Example({"x": torch.randn(2, 4)}, {}))  # type: ignore[arg-type]
    spec, rng = derive(program), torch.Generator().manual_seed(0)
    weights = random_weights(spec, rng)
    error = soundness(program, spec, weights, random_inputs(program, rng), rng)
    assert error < 1e-12 if filling == -torch.inf else math.isnan(error)
    assert any(space.group for space in spec.spaces.values())


class Watchful(nn.Module):
    """Asks whether a length was zero, and does something about it."""

    def __init__(self, mend: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.mend = nn.Linear(4, 3), mend

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        h = h / h.norm(dim=-1, keepdim=True)
        return self.mend(h) if h.isnan().any() else torch.tanh(h)


def give_up(h: Tensor) -> Tensor:
    raise ValueError("no number")


def complain(h: Tensor) -> Tensor:
    warnings.warn("no number", stacklevel=1)
    return torch.tanh(h)


def look_closer(h: Tensor) -> Tensor:
    return torch.tanh(h) if h[0].isfinite().all() else h


def mend_elsewhere(h: Tensor) -> Tensor:
    return torch.from_numpy(np.nan_to_num(h.numpy(), nan=0.3))


@pytest.mark.parametrize(
    ("mend", "refused"),
    [
        (give_up, False),
        (complain, False),
        (torch.sin, True),
        (lambda h: torch.tanh(torch.nan_to_num(h, 0.3)), True),
        (lambda h: torch.tanh(h * 2.0), True),
        (look_closer, True),
        (mend_elsewhere, True),
    ],
)
def test_code_that_mends_what_is_no_number_is_refused(mend: Callable[[Tensor], Tensor], refused: bool) -> None:
    said = pytest.raises(IncompatibleModels, match="needs numbers") if refused else nullcontext()
    with said, warnings.catch_warnings(action="ignore"):
        recorded(Watchful(mend), "x", x=torch.zeros(2, 4))


class Drawing(nn.Module):
    """Bends what it computes where something that is drawn says so."""

    def __init__(self, bends: Callable[[], Any]) -> None:
        super().__init__()
        self.linear, self.bends = nn.Linear(4, 4), bends

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.linear(x)
        return h.sin() if self.bends() else h


_SHOWN = torch.arange(6) % 3 > 0


def _hidden(count: int = 2) -> Tensor:
    """Places that a mask hides, drawn one by one."""
    return torch.multinomial((~_SHOWN).float(), count)


def _padded() -> Tensor:
    """A place that a mask shows, then some that it hides, [places, row and column]."""
    places = torch.stack([torch.zeros(6, dtype=torch.long), torch.arange(6)], 1)
    return torch.cat([places[1:2], places[~_SHOWN][torch.multinomial(torch.ones(2), 2)]])


def _marked() -> Tensor:
    marks = torch.zeros(3)
    marks[torch.randperm(3)[:1]] = 1.0
    return marks[0] > 0


def _overwritten() -> Tensor:
    hidden = _hidden()
    hidden[0] = torch.randint(6, ())
    return _SHOWN[hidden].any()


def _of_its_own() -> Tensor:
    return torch.rand((), generator=torch.Generator().manual_seed(3)) < 0.5


@pytest.mark.parametrize(
    ("bends", "refused"),
    [
        (lambda: torch.rand(()) < 0.02, True),
        (lambda: torch.rand(3).max().item() > 0.5, True),
        (lambda: torch.zeros(3).uniform_()[0] > 0.5, True),
        (lambda: torch.bernoulli(torch.full((), 0.3)), True),
        (lambda: torch.randint(3, ()) == 1, True),
        (_of_its_own, False),
        (lambda: torch.rand(()).shape == (), False),
        (lambda: torch.ones(()) > 0.5, False),
        (lambda: torch.ones(3)[torch.randperm(3)].all(), False),
        (lambda: torch.arange(3)[torch.randperm(3)][0] > 0, True),
        (lambda: _SHOWN[_hidden()].any(), False),
        (lambda: ~_SHOWN[torch.stack([_hidden(), _hidden()]).flatten()].any(), False),
        (lambda: (_padded()[:, 0] == 0).all(), False),
        (lambda: _SHOWN[None][_padded()[:, 0], _padded()[:, 1]].sum() == 1, False),
        (lambda: _hidden()[0] == 0, True),
        (lambda: _hidden()[0] == _hidden()[1], True),
        (lambda: _padded()[1, 1] > 0, True),
        (lambda: torch.arange(6)[_hidden()].sum() > 3, True),
        (_overwritten, True),
        (_marked, True),
        (lambda: torch.zeros(3).index_put((torch.randperm(3)[:1],), torch.ones(1))[0] > 0, True),
        (lambda: len(torch.arange(6)[torch.rand(6) > 0.5]) > 3, True),
        (lambda: len((_hidden() > 0).nonzero()) > 3, True),
        (lambda: len(torch.arange(2)[_SHOWN[_hidden()]]) > 0, False),
    ],
)
def test_a_branch_on_what_is_drawn_is_refused(bends: Callable[[], Any], refused: bool) -> None:
    with pytest.raises(IncompatibleModels, match="needs numbers") if refused else nullcontext():
        recorded(Drawing(bends), "x", x=torch.zeros(2, 4))


def test_layers_of_torch_are_written_down_step_by_step() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
    with torch.no_grad():
        graph = recorded(nn.TransformerEncoder(layer.eval(), 1).eval(), "src", src=torch.zeros(2, 3, 8))
    named = {op_name(node) for node in graph.graph.nodes if node.op == "call_function"}
    assert named >= {"linear", "softmax", "layer_norm"} or named >= {"linear", "scaled_dot_product_attention"}
    assert not {name for name in named if name.startswith(("_transformer", "_native"))}
    assert torch.backends.mha.get_fastpath_enabled()
