"""Calls in which more may be asked for, and which may change by themselves what a model does: tokens behind a cache,
masks that hide the one end or the other, another number of texts.

A text is answered alike whether it is read at once or in steps, alone or among others. Where it is not, that call is
one more that must be answered as before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_align.tracing.asked import Ask
from hf_align.tracing.example import Example
from hf_align.tracing.mode import Mode
from hf_align.tracing.steps import in_steps, last_tokens
from hf_align.tracing.ways import numbers_beside

_BEHIND = {1: "the last token", 2: "the last two tokens", 5: "the last five tokens"}
_TEXTS = {1: "one text", 5: "five texts"}
_FEW = 64
"""Texts, and tokens behind a cache, of which a short call has no more."""
_MANY = 4000
"""Texts that are tried at most."""
LONGEST = 4200
"""Tokens of a text that is tried because the code names its length."""
_LARGEST = 2**20
"""The largest number that is tried as the type of a token."""
_ASKED_BEHIND = 2
"""Tokens behind a cache up to which more is asked for: all of it in all calls would take seconds."""
_PREFIX = 5
"""Tokens before those whose number is the question."""


@dataclass(frozen=True)
class Context:
    """A call in which more may be asked for.

    Attributes:
        arguments: that it has besides those of the first call.
        behind: tokens that are read behind a cache; 0 where there is none.
        texts: how many of them there are; 0 where they are as many as in the first call.
        tokens: how long they are; 0 where they are as long as in the first call.
        is_asked: whether anything more is asked for.
        is_new: whether it is to be tried as it is, since no mode is alike.
        whole: the same of all tokens at once, or of other texts beside these, which is answered alike.
    """

    said: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    behind: int = 0
    texts: int = 0
    tokens: int = 0
    is_asked: bool = True
    is_new: bool = False
    whole: Context | None = None

    def mode(self, base: Example, asked: Sequence[Ask] = ()) -> Mode:
        """The call that asks for something besides."""
        said = " and ".join(filter(None, [self.said, *(ask.said for ask in asked)]))
        given = {**self.arguments, **{name: value for ask in asked for name, value in ask.ways[0].items()}}
        example = replace(base, arguments={**base.arguments, **given}, held=base.held | given.keys())
        turns = [ask.turned for ask in asked if ask.turned is not None]

        def turned(model: Any, arguments: dict[str, Any]) -> dict[str, Any]:
            arguments = _texts(arguments, self.texts) if self.texts else arguments
            arguments = _tokens(arguments, self.tokens) if self.tokens else arguments
            for turn in (*turns, *([in_steps(self.behind)] if self.behind else [])):
                arguments = turn(model, arguments)
            return arguments

        @contextmanager
        def within(model: Any) -> Iterator[None]:
            with ExitStack() as stack:
                for surrounds in (ask.within for ask in asked if ask.within is not None):
                    stack.enter_context(surrounds(model))
                yield

        name = f"{base.said} with {said}"
        return Mode(name, example, sure=True, asks=said, turned=turned, within=within, sized=self.tokens > 0)

    def goes_with(self, ask: Ask) -> bool:
        """Whether something may be asked for here."""
        return self.is_asked and not self.arguments.keys() & ask.ways[0].keys()


def contexts(
    model: PreTrainedModel, base: Example, sizes: Sequence[int] = (), values: Sequence[int] = ()
) -> Iterator[Context]:
    """The first call and all others that go with it, the plainest first.

    Args:
        sizes: numbers that code compares sizes with.
        values: numbers that code compares tensors of whole numbers with.
    """
    of_one = base.rows_of_one == 1
    for whole in _wholes(model, base):
        several = {n: None for n in _near(sizes, _MANY if not whole.said else _FEW) if n > 2 and n not in _TEXTS}
        for steps in (whole, *(_in_steps(whole, count) for count in (_BEHIND if base.tokens else ()))):
            yield steps
            yield from (_of_texts(steps, count) for count in (_TEXTS if of_one else ()))
            if of_one and steps.behind < _ASKED_BEHIND and not whole.is_new:
                yield from (_of_texts(steps, count) for count in several)
        if base.tokens and whole.is_asked:
            yield from _of_sizes(whole, sizes, of_one)
    yield from _seldom_given(model, base, values)


def _near(sizes: Sequence[int], most: int) -> dict[int, None]:
    """Numbers and the next ones: what is compared with a number changes at one of them, and what counts from zero one
    later."""
    return dict.fromkeys(n for size in sizes if size <= most for n in range(size, size + 3))


def _of_sizes(whole: Context, sizes: Sequence[int], of_one: bool) -> Iterator[Context]:
    """Texts of some lengths, also one alone and others of some number; and so many tokens behind a cache or in it.

    Args:
        of_one: whether a text is one row.
    """
    for n in _near(sizes, LONGEST if not whole.said else _FEW):
        is_short = n <= _FEW + 1
        long = _sized(whole, n, 0 if is_short else 1)
        yield long
        if is_short and of_one and not whole.said:
            yield _of_texts(long, 1)
            yield from (_of_texts(long, size + (n not in sizes)) for size in sizes if size <= _FEW)
        for read, behind in ((n, 1), (n, 3), (_PREFIX, n)) if is_short else ((n, 3), (n, 1)) if n not in sizes else ():
            both = _sized(whole, read + behind, long.texts)
            said = f"{both.said}, the last {behind} behind a cache"
            yield replace(both, said=said, behind=behind, whole=both)


def _sized(whole: Context, tokens: int, texts: int) -> Context:
    said = " and ".join(filter(None, [whole.said, f"{tokens} tokens"]))
    return replace(whole, said=said, tokens=tokens, texts=texts, is_asked=False, whole=whole)


def _wholes(model: PreTrainedModel, base: Example) -> Iterator[Context]:
    """The first call, and what else it may be given for each token."""
    yield Context("")
    for name, value in numbers_beside(model, base):
        if name.endswith("attention_mask") and "global" not in name:
            yield Context(f"{name} that hides some", {name: value})
            yield Context(f"{name} that hides what comes first", {name: _left(value)}, is_asked=False, is_new=True)
            last = _left(value).flip(1)
            yield Context(f"{name} that hides what comes last", {name: last}, is_asked=False, is_new=True)
        else:
            yield Context(name, {name: value}, is_asked=False)


def _seldom_given(model: PreTrainedModel, base: Example, numbers: Sequence[int]) -> Iterator[Context]:
    """Masks that hide all, or nearly all, and types that are the same for all tokens, also those that code compares
    something with: each by itself, for code may ask for one of them."""
    in_base = ((name, value) for name, value in base.arguments.items() if name.endswith("type_ids"))
    for name, value in (*in_base, *numbers_beside(model, base)):
        values: dict[str, Tensor] = {}
        if name.endswith("attention_mask") and "global" not in name:
            first = torch.tensor([0])
            values["hides all but one"] = torch.zeros_like(value).index_fill(1, first, 1)
            values["hides all"] = torch.zeros_like(value)
            values["hides a whole text"] = torch.ones_like(value).index_fill(0, first, 0)
        elif name.endswith("type_ids"):
            kinds = dict.fromkeys((*value.unique().tolist(), *_near(numbers, _LARGEST)))
            values = {f"are all {kind}": torch.full_like(value, kind) for kind in kinds}
        for said, given in values.items():
            yield Context(f"{name} that {said}", {name: given}, is_asked=False, is_new=True)


def _in_steps(whole: Context, count: int) -> Context:
    said = " and ".join(filter(None, [whole.said, f"{_BEHIND[count]} behind a cache"]))
    is_asked = whole.is_asked and count <= _ASKED_BEHIND
    return replace(whole, said=said, behind=count, is_asked=is_asked, whole=whole)


def _of_texts(context: Context, count: int) -> Context:
    said = " and ".join(filter(None, [context.said, _TEXTS.get(count, f"{count} texts")]))
    return replace(context, said=said, texts=count, is_asked=False, whole=context)


def _left(mask: Tensor) -> Tensor:
    """A mask [rows, length] that hides the first third of the first row, as of a shorter text."""
    hidden = torch.ones_like(mask)
    hidden[0, : mask.shape[1] // 3] = 0
    return hidden


def _texts(arguments: Mapping[str, Any], count: int) -> dict[str, Any]:
    """So many texts, those of a call in turn, and what belongs to them; the last one first, for one that begins with
    what is hidden may have no answer alone."""
    rows = next(t.shape[0] for t in arguments.values() if isinstance(t, Tensor) and t.dim())
    taken = (rows - 1 - torch.arange(count)) % rows
    return {n: t[taken.to(t.device)] if isinstance(t, Tensor) and t.dim() and t.shape[0] == rows else t
            for n, t in arguments.items()}  # fmt: skip


def _tokens(arguments: Mapping[str, Any], count: int) -> dict[str, Any]:
    """So many tokens, those of a call over and over, and what stands beside them."""
    length = arguments[last_tokens(arguments)].shape[1]
    taken = torch.arange(count) % length

    def beside(value: Any) -> bool:
        return isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == length

    return {n: t[:, taken.to(t.device)] if beside(t) else t for n, t in arguments.items()}
