"""The calls that a model is tried with: its modes, as tracing knows them, with real values, and what it answers."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PretrainedConfig, PreTrainedModel

from hf_align.errors import first_line
from hf_align.running.network import Batch, Network, Weights
from hf_align.runtime.devices import drawing
from hf_align.tracing.answers import answers_by_name
from hf_align.tracing.build import quiet
from hf_align.tracing.example import Example
from hf_align.tracing.first_calls import first_calls
from hf_align.tracing.given import GivenCall
from hf_align.tracing.mode import Mode, NothingNew, at_length, cut, extent, of_each_choice, without_length
from hf_align.tracing.modules import ModuleModel
from hf_align.tracing.own_code import numbers_compared
from hf_align.tracing.returned import returned
from hf_align.tracing.state import forgetting
from hf_align.tracing.steps import asking_for_a_cache, handed_on
from hf_align.tracing.ways import positions, try_parts, try_together, try_ways, with_less
from hf_align.witness.noise import changes
from hf_align.witness.together import calls_together

WRITTEN = 32
"""Tokens that are written with a cache."""
_SHORT = 17
"""Tokens of inputs whose length is not the question: odd, and more than most convolutions see at once."""
_ROWS = 2
"""Three of odd lengths, one of long ones: code may depend on how many there are."""
_STRIDES = (1, 100, 2000)
"""Between positions: what turns with them slowly shows at long distances alone."""
_NAMED, _FARTHEST = 8, 2**20
"""Numbers that code compares something with around which positions are tried, and what none of them reaches."""
_PROMPT = 7
"""Tokens before those that are generated, and of models that have room for few."""
_BEHIND_MANY = 3
"""Tokens that are generated behind a long text: code may look at how much a cache holds."""
_MANY = 2**22
"""Entries of an answer that are kept of each: 16 MiB, 32 tokens of a vocabulary of 128 thousand."""


@dataclass(frozen=True, eq=False)
class Case:
    """A mode with its inputs.

    Attributes:
        asked: the length that was asked for, None for the mode's own; the model may have fewer positions.
        forced: the tokens that the model goes on with, [rows, tokens]; None where it does not write.
        seed: of what is drawn.
    """

    mode: Mode
    asked: int | None
    arguments: Batch
    forced: Tensor | None = None
    seed: int = 0

    @property
    def length(self) -> int | None:
        """In tokens; None of inputs that are none."""
        tokens = self.arguments.get("input_ids")
        return None if tokens is None else tokens.shape[self.mode.example.axis_of_tokens]

    @property
    def described(self) -> str:
        return self.mode.name if self.length is None else f"{self.mode.name}, length {self.length}"

    def shown(self, answers: Mapping[str, Tensor]) -> Tensor:
        """Which rows of answers are those of tokens that the only mask of the call shows; [rows], bool."""
        masks = [t.bool() for n, t in self.arguments.items() if n.endswith("mask") and isinstance(t, Tensor)]
        whole = masks[0] if len(masks) == 1 and masks[0].dim() == 2 else None
        found = []
        for name, answer in answers.items():
            if whole is not None and answer.dim() == 3 and answer.shape[:2] == whole.shape:
                found.append(whole.flatten().cpu())
            else:
                found.append(changes({name: answer}, {name: answer}) > 0)  # none
        return torch.cat(found)

    def answers(self, model: nn.Module, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        """What the model answers, by name, on the CPU. Whatever it draws at random it draws alike every time."""
        return self._run(model, device, dtype, _answers)

    def answers_of(self, network: Network, weights: Weights) -> dict[str, Tensor]:
        """As `answers`, of a network with some weights."""
        return self.answers(network.module(network.placed(weights)), network.device, network.dtype)

    def returned(self, model: nn.Module, device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
        """All tensors that the model returns by name, answers or not."""
        return self._run(model, device, dtype, _tensors)

    @torch.no_grad()
    def _run(
        self,
        model: nn.Module,
        device: torch.device,
        dtype: torch.dtype,
        chosen: Callable[[nn.Module, Any], dict[str, Tensor]],
    ) -> dict[str, Tensor]:
        arguments = {n: t.to(device, dtype if t.is_floating_point() else None) if isinstance(t, Tensor) else t
                     for n, t in self.arguments.items()}  # fmt: skip
        with drawing(device, 0), quiet(), forgetting(model), self.mode.prepared(model):
            if self.forced is not None:
                return {"logits": _few(_written(model, arguments, self.forced.to(device)))}
            return {name: _few(t) for name, t in chosen(model, model(**arguments)).items()}


def modes(
    model: PreTrainedModel,
    traced: Collection[str],
    answers: Callable[[Case], Mapping[str, Tensor]],
    given: Iterable[GivenCall] = (),
) -> tuple[list[Mode], dict[str, str]]:
    """The ways to call a model that there are inputs for, the plainest first; and those that were traced, but fail.

    Args:
        traced: names of modes that tracing found. Arguments with a meaning of their own need not be among them.
        answers: what the model answers, or raises: which of some likely arguments it wants is found by trying.
        given: calls that were added to those that are found.
    """
    failed: dict[str, str] = {}
    if isinstance(model, ModuleModel):
        return _of_module(model, answers)
    first, lengths = None, list[int]()
    for example in _first_calls(model, traced):
        try:
            with _lengths_computed(extent(example)[0], lengths):
                first = answers(_case(Mode("", example), model.config))
        except Exception as error:
            failed.setdefault("", f"{type(error).__name__}: {first_line(error)}")
            lengths.clear()
            continue
        break
    if first is None:
        return [], failed
    found = [Mode(example.said, example)]
    failed = {}

    def attempt(mode: Mode) -> Exception | None:
        if mode.goes_on:
            if "input_ids" in mode.example.tokens and model.can_generate():
                found.append(mode)
            return None
        if not mode.sure and mode.name not in traced:
            return NothingNew()
        try:
            answer = answers(_case(mode, model.config))
        except Exception as error:  # models refuse arguments in as many ways as there are models
            failed.setdefault(mode.name, f"{type(error).__name__}: {first_line(error)}")
            return error
        if answer.keys() == first.keys() and all(torch.equal(answer[n], first[n]) for n in first):
            return NothingNew()
        found.extend(_strides(model, mode))
        return None

    for call in given:
        attempt(replace(call.mode(model, example), sure=True))
    extents = [n for n, _ in Counter(lengths).most_common(3)]
    try_ways(model, example, extents, attempt)
    for mode in [mode for mode in found if mode.announced is not None]:
        for fewer in with_less(model, mode.example):
            attempt(replace(mode, name=f"{fewer.said} alone", example=fewer))
    try_together(model, found[0], extents, [mode for mode in found if mode.adds], attempt)
    ends = dict.fromkeys(name.rpartition(" of ")[2] for name in traced)
    inside = dict(model.named_modules())
    try_parts(model, example, extents, [path for path in ends if path in inside], attempt)
    for mode in calls_together(model, example):
        attempt(mode)
    missed = set(traced) - {mode.name for mode in found}
    return found, {name: why for name, why in failed.items() if name in missed}


def _first_calls(model: PreTrainedModel, traced: Collection[str]) -> Iterator[Example]:
    """Likely first calls: those with the arguments of a mode that was traced before any other, for a short text may do
    where a longer one has no positions, and embeddings that are given in its place are in a basis of their own."""
    known = {without_length(name) for name in traced}
    for is_known, rows, length in itertools.product((True, False), (_ROWS, 1), (_SHORT, _PROMPT)):
        for example in first_calls(model, rows, length):
            if (example.said in known) is is_known:
                yield example


def _of_module(
    model: ModuleModel, answers: Callable[[Case], Mapping[str, Tensor]]
) -> tuple[list[Mode], dict[str, str]]:
    """What a plain module was called with, in the caller's numbers and in random ones, and its calls of other sizes."""
    found, failed = [], dict[str, str]()
    for mode in (Mode(name, example) for name, example in {**model.given, **model.calls}.items()):
        try:
            answers(_case(mode, model.config))
        except Exception as error:  # modules fail in as many ways as there are modules
            failed[mode.name] = f"{type(error).__name__}: {first_line(error)}"
            continue
        found.append(mode)
    return found, failed


@contextmanager
def _lengths_computed(rows: int, lengths: list[int]) -> Iterator[None]:
    """Note the lengths of what modules compute, [rows, length, width]."""

    def note(module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.dim() == 3 and len(output) == rows:
            lengths.append(output.shape[1])

    hook = register_module_forward_hook(note)
    try:
        yield
    finally:
        hook.remove()


def _strides(model: PreTrainedModel, mode: Mode) -> Iterator[Mode]:
    """A mode with positions once for each of some distances between neighbours, and on both sides of numbers that the
    code compares something with: it may ask for the largest one."""
    given = next((n for n in mode.example.arguments if mode.name.endswith(f"with {n}") and "position_ids" in n), None)
    if given is None:
        yield mode
        return
    rows, length = extent(mode.example)
    last = positions(model.config)
    most = max(_STRIDES) if last is None else max(1, (last - 1) // (length - 1))
    along = torch.arange(length)
    ways = {f"{stride} apart": along * stride for stride in (min(stride, most) for stride in _STRIDES)}
    named = sorted(number for number in numbers_compared(model) if length < number < _FARTHEST)
    around = {f"around {number}": along + number - length // 2 for number in named[:_NAMED]}
    ways |= {
        said: places for said, places in around.items() if not _leaves_a_table(model, last or 1, int(places.max()))
    }
    for said, places in ways.items():
        held = {**mode.example.arguments, given: of_each_choice(places.expand(rows, length).contiguous(), mode.example)}
        yield replace(mode, name=f"{mode.name} {said}", example=replace(mode.example, arguments=held))


def _leaves_a_table(model: PreTrainedModel, known: int, farthest: int) -> bool:
    """Whether a position may lie outside of some table with a row for each that is known: on a GPU, the process can ask
    nothing more after that."""
    held = (value for module in model.modules()
            for value in (*vars(module).values(), *module._parameters.values(), *module._buffers.values()))  # fmt: skip
    sizes = (size for value in held if isinstance(value, Tensor) for size in value.shape)
    return any(known <= size <= farthest for size in sizes)


def cases(mode: Mode, lengths: tuple[int, ...] | None, config: PretrainedConfig, seed: int = 0) -> Iterator[Case]:
    """A mode at some lengths, or at its own; each size of inputs once. What is generated goes on from the longest."""
    seen = set()
    room = positions(config)
    for asked in (None,) if lengths is None else lengths[-1:] if mode.goes_on else lengths:
        rng = Generator().manual_seed(seed)
        example = mode.example
        if mode.goes_on:
            prompt = _PROMPT if asked is None else max(_PROMPT, min(asked, room or asked) - _BEHIND_MANY)
            example = at_length(example, prompt, 1) or example
        elif asked is not None:
            length = min(asked, room or asked)
            rows = _ROWS + length % 2 if length <= _SHORT else 1
            example = at_length(example, length, rows) or cut(example, length) or example
        arguments = _drawn(example, rng)
        shapes = tuple(tuple(t.shape) for t in arguments.values() if isinstance(t, Tensor))
        if shapes in seen:
            continue
        seen.add(shapes)
        forced = None
        if mode.goes_on:
            tokens = arguments["input_ids"]
            most = WRITTEN if asked is None else _BEHIND_MANY
            count = min(most, (room or tokens.shape[1] + most) - tokens.shape[1])
            if count < 1:
                continue
            forced = tokens.flatten()[torch.randint(tokens.numel(), (len(tokens), count), generator=rng)]
        yield Case(mode, asked, arguments, forced, seed)


def _case(mode: Mode, config: PretrainedConfig) -> Case:
    return next(cases(mode, None, config))


def _drawn(example: Example, rng: Generator) -> Batch:
    """Values of all arguments; what ends the text is anywhere in it where that has an odd length."""
    given, length = {**example.arguments, **example.drawn(rng)}, extent(example)[1]
    if example.ends and length % 2:
        behind = int(torch.randint(length, (), generator=rng))
        given |= {name: given[name].roll(-behind, -1) for name in example.ends}
    return given


def _tensors(model: nn.Module, output: Any) -> dict[str, Tensor]:
    if isinstance(model, ModuleModel) or not isinstance(output, Mapping):
        output = dict(enumerate(returned(model, output)))
    return {str(name): t for name, t in output.items() if isinstance(t, Tensor)}


def _answers(model: nn.Module, output: Any) -> dict[str, Tensor]:
    """The tensors that a model is asked for: all of a plain module; of one of transformers its first, or the several
    that come first under one name, those that are answers by name, and choices, which are whole numbers. Of one that
    returns what each of its parts does, those of the last.

    What else that returns, hidden states, embeddings and scores of experts, are stages on the way, in a basis of their
    own.
    """
    if isinstance(model, ModuleModel):
        return _tensors(model, output)
    named = output if isinstance(output, Mapping) else _tensors(model, output)
    of_name = {str(n): _of_one_name(str(n), value) for n, value in named.items()}
    real = (
        several
        for n, several in of_name.items()
        if n != "loss" and any(map(Tensor.is_floating_point, several.values()))
    )
    first, parts = next(real, {}), [value for value in named.values() if isinstance(value, Mapping)]
    if not first and parts:
        return _answers(model, parts[-1])
    whole = {n: t for n, t in _tensors(model, named).items() if not t.is_floating_point()}
    return first | answers_by_name(model, output) | whole


def _of_one_name(name: str, value: Any) -> dict[str, Tensor]:
    """The tensors that are returned under a name: itself, or several in a row."""
    if isinstance(value, Tensor):
        return {name: value}
    several = value if isinstance(value, tuple | list) else ()
    return {f"{name} {n}": t for n, t in enumerate(several) if isinstance(t, Tensor)}


def _few(answer: Tensor) -> Tensor:
    """An answer on the CPU; of a large one as many rows as are quickly compared, the last among them."""
    rows = answer.reshape(-1, answer.shape[-1]) if answer.dim() > 1 else answer[None]
    if answer.numel() <= _MANY:
        return answer.cpu()
    every = -(-answer.numel() // _MANY)
    return rows[range(len(rows) - 1, -1, -every)].cpu()


class _Forced(LogitsProcessor):
    """The next token is the one that is given, whatever the model would write."""

    def __init__(self, tokens: Tensor) -> None:
        self._tokens = tokens
        self._at = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        forced = torch.full_like(scores, -torch.inf).scatter(1, self._tokens[:, self._at, None], 0.0)
        self._at += 1
        return forced


def _written(model: nn.Module, arguments: Batch, forced: Tensor) -> Tensor:
    """Logits [rows, tokens, vocabulary] while the model writes what it is given: first all arguments at once, then
    token by token with the cache."""
    count = forced.shape[1]
    settings = GenerationConfig(do_sample=False, use_cache=True, pad_token_id=0, eos_token_id=None, bos_token_id=None,
                                decoder_start_token_id=0, min_new_tokens=count, max_new_tokens=count,
                                return_dict_in_generate=True, output_logits=True)  # fmt: skip
    try:
        written = model.generate(**arguments, generation_config=settings,  # type: ignore[operator]
                                 logits_processor=LogitsProcessorList([_Forced(forced)]))  # fmt: skip
    except Exception:  # `generate` gives models arguments that not all of them take
        if [*arguments] != ["input_ids"]:
            raise
        return _written_by_hand(model, arguments["input_ids"], forced)
    return torch.stack(written.logits, 1)


def _written_by_hand(model: nn.Module, tokens: Tensor, forced: Tensor) -> Tensor:
    """As `_written`, by what a step returns that the next one takes."""
    flags, logits = asking_for_a_cache(model.forward), []
    found = model(input_ids=tokens, **flags)
    for token in forced.T:
        logits.append(found["logits"][:, -1])
        found = model(input_ids=token[:, None], **handed_on(model.forward, found, {}), **flags)
    return torch.stack(logits, 1)
