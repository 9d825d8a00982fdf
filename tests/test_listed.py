"""Experts in a loop over those that were chosen: how many rows each takes only a run decides."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import one_hot
from transformers import PretrainedConfig

from hf_align.errors import IncompatibleModels
from hf_align.symmetry.certificate.random_copy import random_inputs, random_weights
from hf_align.symmetry.certificate.soundness import soundness
from hf_align.symmetry.derivation.derive import derive
from hf_align.symmetry.groups import Permutation
from hf_align.tracing import held
from hf_align.tracing import trace as tracing
from hf_align.tracing.example import Example
from hf_align.tracing.execute import execute
from hf_align.tracing.program import Program
from hf_align.tracing.tokens import announcing_tokens
from hf_align.tracing.trace import trace_call

WORDS, WIDTH, HIDDEN, EXPERTS, CHOSEN = 13, 6, 5, 4, 2


class Routed(nn.Module):
    """Each word is answered by the experts that it chooses; `add` is what one of them does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.config = PretrainedConfig()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH))
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids).flatten(0, 1)
        shares, chosen = self.router(x).softmax(-1).topk(CHOSEN)
        mask = functional.one_hot(chosen, EXPERTS).permute(2, 1, 0)
        out = torch.zeros_like(x)
        for row in self.hit(mask):
            expert = int(row)
            choice, words = torch.where(mask[expert])
            out = self.add(out, words, self.answer(expert, x[words]) * shares[words, choice, None], expert)
        return x + out

    def hit(self, mask: Tensor) -> Tensor:
        return (mask.sum((-1, -2)) > 0).nonzero()

    def answer(self, expert: int, x: Tensor) -> Tensor:
        return functional.silu(x @ self.up[expert].T) @ self.down[expert].T

    def add(self, out: Tensor, words: Tensor, answers: Tensor, expert: int) -> Tensor:
        return out.index_add_(0, words, answers)


class Put(Routed):
    """A word may choose an expert once: what it adds to is put back."""

    def add(self, out: Tensor, words: Tensor, answers: Tensor, expert: int) -> Tensor:
        out[words] = out[words] + answers
        return out


class Accumulated(Routed):
    def add(self, out: Tensor, words: Tensor, answers: Tensor, expert: int) -> Tensor:
        return out.index_put((words,), answers, accumulate=True)


class ByMask(Routed):
    """Rows are taken and put by masks."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids).flatten(0, 1)
        chosen = self.router(x).argmax(-1)
        out = torch.zeros_like(x)
        for expert in range(EXPERTS):
            out[chosen == expert] = self.answer(expert, x[chosen == expert])
        return x + out


class Scattered(Routed):
    """Rows are taken by a mask, and put by it in their order."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids).flatten(0, 1)
        chosen = self.router(x).argmax(-1)
        out = torch.zeros_like(x)
        for expert in range(EXPERTS):
            mask = chosen == expert
            out = out.masked_scatter(self.where(mask), self.answer(expert, x[mask]))
        return x + out

    def where(self, mask: Tensor) -> Tensor:
        return mask[:, None]


class Spread(Scattered):
    def where(self, mask: Tensor) -> Tensor:
        return mask[:, None].expand(-1, WIDTH)


class Reversed(Scattered):
    """The rows of an expert go back in another order."""

    def answer(self, expert: int, x: Tensor) -> Tensor:
        return super().answer(expert, x).flip(0)


class Misplaced(Scattered):
    """They go to others that the expert has not seen."""

    def where(self, mask: Tensor) -> Tensor:
        return mask.flip(0)[:, None]


class Announced(Scattered):
    """Words that announce a sound are answered by another expert, which a text without them does not show."""

    def __init__(self) -> None:
        super().__init__()
        self.config = PretrainedConfig(vocab_size=WORDS)
        self.config.audio_token_id = 5

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids).flatten(0, 1)
        sounds, text = ((input_ids == self.config.audio_token_id) == is_sound for is_sound in (True, False))
        out = x.masked_scatter(sounds.flatten()[:, None], self.answer(1, x[sounds.flatten()]))
        return out.masked_scatter(text.flatten()[:, None], self.answer(0, x[text.flatten()]))


class Plain(Routed):
    """Has such words, and asks for none."""

    def __init__(self) -> None:
        super().__init__()
        self.config = Announced().config


class AnnouncedTogether(Announced):
    """Sounds meet."""

    def answer(self, expert: int, x: Tensor) -> Tensor:
        return super().answer(expert, x) - (x.mean(0) if expert and len(x) else 0.0)


class Spare(Routed):
    """The mask has a place for an expert that there is not."""

    def forward(self, input_ids: Tensor) -> Tensor:
        with patch.object(functional, "one_hot", lambda chosen, count: one_hot(chosen, count + 1)):
            return super().forward(input_ids)


class HandedOn(Routed):
    """What chooses the first expert goes to a place behind all, which hands it on."""

    def forward(self, input_ids: Tensor) -> Tensor:
        def behind(chosen: Tensor, count: int) -> Tensor:
            return one_hot(chosen.masked_fill_(chosen == 0, count), count + 1)

        with patch.object(functional, "one_hot", behind):
            return super().forward(input_ids)

    def answer(self, expert: int, x: Tensor) -> Tensor:
        return x if expert == EXPERTS else super().answer(expert, x)


class Counted(Routed):
    """Divides by how many rows there are."""

    def add(self, out: Tensor, words: Tensor, answers: Tensor, expert: int) -> Tensor:
        return super().add(out, words, answers / max(1, len(words)), expert)


class Alone(Routed):
    """A word that is the only one to choose an expert is answered in another way."""

    def add(self, out: Tensor, words: Tensor, answers: Tensor, expert: int) -> Tensor:
        return super().add(out, words, answers.tanh() if len(words) == 1 else answers, expert)


class Centred(Routed):
    """The rows of an expert meet."""

    def add(self, out: Tensor, words: Tensor, answers: Tensor, expert: int) -> Tensor:
        return super().add(out, words, answers - answers.mean(0), expert)


class Compared(Routed):
    def add(self, out: Tensor, words: Tensor, answers: Tensor, expert: int) -> Tensor:
        return super().add(out, words, answers.softmax(0), expert)


class Everywhere(Routed):
    """An expert that was chosen at all changes every word."""

    def add(self, out: Tensor, words: Tensor, answers: Tensor, expert: int) -> Tensor:
        return super().add(out, words, answers, expert) + self.down[expert, :, 0]


class FirstOnly(Routed):
    """Experts run if some word prefers them, and then for all words."""

    def hit(self, mask: Tensor) -> Tensor:
        return (mask[:, 0].sum(-1) > 0).nonzero()


class Last(Routed):
    """Only the last of the rows is changed."""

    def add(self, out: Tensor, words: Tensor, answers: Tensor, expert: int) -> Tensor:
        return super().add(out, words[-1:], answers[-1:], expert)


class Five(Routed):
    """One expert does something else with five rows, no more and no fewer."""

    def answer(self, expert: int, x: Tensor) -> Tensor:
        return super().answer(expert, x.flip(-1) if expert == 2 and len(x) == 5 else x)


class Preferred(Five):
    """Each word chooses one expert."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids).flatten(0, 1)
        _, chosen = self.router(x).max(-1)
        out = torch.zeros_like(x)
        for expert in range(EXPERTS):
            out[chosen == expert] = self.answer(expert, x[chosen == expert])
        return x + out


class Read(Routed):
    """A recurrence reads what experts write: it is taken apart by export."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = super().forward(input_ids).unflatten(0, input_ids.shape)
        return x + self.loop(x)[0]


class ReadAlone(Read, Alone):
    pass


class Beside(Routed):
    """What its experts hold goes out beside the answer."""

    def forward(self, input_ids: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        self.load = torch.zeros(())
        return super().forward(input_ids), self.load

    def answer(self, expert: int, x: Tensor) -> Tensor:
        hidden = functional.silu(x @ self.up[expert].T)
        self.load = self.load + hidden.sum()
        return hidden @ self.down[expert].T


class Seeing(Routed):
    """A word that would see no other sees all; `unhide` says so by a list of these words."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids).flatten(0, 1)
        scores = self.router(x) @ self.router(x.flip(-1)).T
        hidden = scores < scores.mean().abs()
        self.unhide(hidden, (hidden.sum(-1) > 6).nonzero(as_tuple=True))
        return x + scores.masked_fill(hidden, -1e4).softmax(-1) @ functional.silu(x @ self.up[0].T) @ self.down[0].T

    def unhide(self, hidden: Tensor, words: tuple[Tensor, ...]) -> None:
        hidden[words] = False


class SeeingNext(Seeing):
    """The list is of the words after these."""

    def unhide(self, hidden: Tensor, words: tuple[Tensor, ...]) -> None:
        words[0].add_(1).remainder_(len(hidden))
        super().unhide(hidden, words)


class SeeingTurned(Seeing):
    """What is put is put across."""

    def unhide(self, hidden: Tensor, words: tuple[Tensor, ...]) -> None:
        super().unhide(hidden.T, words)


def traced(model: Routed) -> Program:
    ids, announcing = torch.arange(12).reshape(2, 6) % WORDS, announcing_tokens(model.config).tolist()
    words = torch.tensor([word for word in range(WORDS) if word not in announcing])
    return trace_call(model, Example({"input_ids": ids}, {"input_ids": words}))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [Routed, Put, Accumulated, ByMask, Scattered, Spread, Spare, HandedOn, Read])
def test_a_loop_over_chosen_experts_is_traced(kind: type[Routed]) -> None:
    model = kind()
    program = traced(model)
    for ids in torch.tensor([[[3] * 6] * 2, [[0, 5, 1, 7, 2, 12], [4] * 6]]):
        with torch.no_grad():
            given = execute(program, dict(model.named_parameters()), {"input_ids": ids})
            torch.testing.assert_close(given, model(ids))
    spec, rng = derive(program), torch.Generator().manual_seed(0)
    assert not spec.unknown_ops
    ((name, space),) = [(n, space) for n, space in spec.spaces.items() if space.group is not None]
    assert isinstance(space.group, Permutation) and spec.index_shape(name) == (EXPERTS,)
    assert soundness(program, spec, random_weights(spec, rng), random_inputs(program, rng), rng) < 1e-12


@pytest.mark.parametrize("kind", [Seeing, SeeingTurned])
def test_a_truth_value_put_by_a_list_is_traced(kind: type[Seeing]) -> None:
    model, listed = kind(), set[int]()
    program = traced(model)
    with patch.object(model, "unhide", side_effect=lambda hidden, words: listed.add(len(words[0]))):
        for ids in torch.randint(WORDS, (9, 2, 6), generator=torch.Generator().manual_seed(0)):
            model(ids)
            with torch.no_grad(), patch.object(model, "unhide", partial(kind.unhide, model)):
                given = execute(program, dict(model.named_parameters()), {"input_ids": ids})
                torch.testing.assert_close(given, model(ids))
    assert len(listed - {0, 12}) > 1
    spec, rng = derive(program), torch.Generator().manual_seed(0)
    assert not spec.unknown_ops
    assert soundness(program, spec, random_weights(spec, rng), random_inputs(program, rng), rng) < 1e-12


@pytest.mark.parametrize("kind", [Counted, Alone, Centred, Compared, Everywhere, FirstOnly, Last, Five, Preferred,
                                  ReadAlone, Beside, Reversed, Misplaced, AnnouncedTogether, SeeingNext])  # fmt: skip
def test_what_the_length_of_a_list_decides_is_refused(kind: type[Routed]) -> None:
    with pytest.raises(IncompatibleModels, match=r"test_listed.py:\d+ .* needs numbers that only a run computes"):
        traced(kind())


def test_words_that_announce_other_data_are_among_those_of_the_example_where_lists_are_of_them() -> None:
    model = Announced()
    program = traced(model)
    assert 5 in program.example.tokens["input_ids"].tolist()
    ids = torch.tensor([[5, 1, 5, 2, 3, 5], [1, 2, 3, 4, 6, 7]])
    with torch.no_grad():
        given = execute(program, dict(model.named_parameters()), {"input_ids": ids})
        torch.testing.assert_close(given, model(ids))
    assert 5 not in traced(Plain()).example.tokens["input_ids"].tolist()


def test_a_list_that_no_run_makes_shorter_is_refused() -> None:
    class All(Routed):
        def hit(self, mask: Tensor) -> Tensor:
            return (mask.sum((-1, -2)) >= 0).nonzero()

    with pytest.raises(IncompatibleModels, match="needs numbers"):
        traced(All())


class Chosen(Routed):
    """Rows by a mask: export leaves open how many there are."""

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids).flatten(0, 1)
        return x + x[self.router(x)[:, 0] > 0].sum(0)


class Exported(Chosen):
    def forward(self, input_ids: Tensor) -> Tensor:
        return super().forward(input_ids) * (2 if torch.compiler.is_exporting() else 1)


@pytest.mark.parametrize(("kind", "holds"), [(Chosen, True), (Exported, False)])
def test_a_size_that_export_leaves_open_is_measured(kind: type[Routed], holds: bool) -> None:
    example = Example({"input_ids": torch.arange(12).reshape(2, 6) % WORDS}, {"input_ids": torch.arange(WORDS)})
    program = tracing._traced(kind().eval(), example, tracing._EXPORTED[:1], [])  # type: ignore[arg-type]
    assert (program is not None) == holds


class Twelve(Routed):
    """Of twelve layers, the eighth does something else with three rows."""

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        self.config, self.layer = config, 0

    def forward(self, input_ids: Tensor) -> Tensor:
        found = torch.zeros(())
        for layer in range(self.config.num_hidden_layers):
            self.layer = layer
            found = found + super().forward(input_ids)
        return found

    def answer(self, expert: int, x: Tensor) -> Tensor:
        return super().answer(expert, x.flip(-1) if self.layer == 7 and len(x) == 3 else x)


@pytest.mark.parametrize("kind", [Routed, Twelve])
def test_the_copy_of_a_large_model_is_as_deep(kind: type[Routed], monkeypatch: pytest.MonkeyPatch) -> None:
    def built(config: PretrainedConfig) -> Any:
        model = (kind(config) if kind is Twelve else kind()).eval()  # type: ignore[call-arg]
        model.main_input_name = "input_ids"  # type: ignore[assignment]
        return model

    config = PretrainedConfig(num_hidden_layers=12, vocab_size=WORDS)
    config.copy_of = kind.__name__  # type: ignore[attr-defined]
    monkeypatch.setattr(held, "build_without_weights", built)
    assert bool(held._measured_on_a_copy(config, tracing._traced_copy).places) == (kind is Routed)


def test_a_large_model_is_measured_on_a_small_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: dict[str, Any] = {"vocab_size": 64, "d_model": 16, "d_kv": 4, "num_heads": 4, "d_ff": 24, "num_experts": 6}
    layers = {"num_layers": 2, "num_sparse_encoder_layers": 2, "num_decoder_layers": 1, "num_sparse_decoder_layers": 0}
    config = transformers.SwitchTransformersConfig(**sizes, **layers, architectures=["SwitchTransformersEncoderModel"])
    monkeypatch.setattr(held, "LARGEST", 4000)
    assert sum(torch.Size(shape).numel() for shape in tracing.trace(config).shapes.values()) > 4000
    monkeypatch.setattr(held, "_COPIES", {})
    monkeypatch.setattr(held, "shrink", lambda config, *_: config)  # no copy is small enough
    with pytest.raises(IncompatibleModels, match="needs numbers"):
        tracing.trace(config)
