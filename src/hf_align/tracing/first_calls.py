"""What a model may be called with first: likely arguments, then, where none will do, each with what it lacks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

import torch
from transformers import PreTrainedModel

from hf_align.tracing.build import quiet
from hf_align.tracing.example import Example
from hf_align.tracing.inputs import examples
from hf_align.tracing.mending import mended
from hf_align.tracing.mode import Mode
from hf_align.tracing.modules import ModuleModel
from hf_align.tracing.state import left_as_found

_MOST = 4
"""Changes of a call that failed which are tried."""
_TIMES = 2
"""Changes of one call, each for what it lacks after the last."""


def first_calls(model: PreTrainedModel, rows: int, length: int) -> Iterator[Example]:
    """The likely ones in their order, and then those that are mended."""
    likely = list[Example]()
    for example in examples(model, rows, length):
        likely.append(example)
        yield example
    yield from mended_calls(model, ((example, error_of(model, example)) for example in likely))


def mended_calls(model: PreTrainedModel, ended: Iterable[tuple[Example, Exception | None]]) -> Iterator[Example]:
    """The calls that failed, with an argument more that their errors name, or the lines of code that failed.

    Args:
        ended: calls, each with the error in which it ends, if it does.
    """
    for example, error in ended if not isinstance(model, ModuleModel) else ():
        if error is not None:
            yield from _mended(model, Mode(example.said, example), error, _TIMES)


def _mended(model: PreTrainedModel, mode: Mode, error: Exception, times: int) -> Iterator[Example]:
    """A call that failed, changed as its error suggests, and changed again where it then fails otherwise."""
    for changed in islice(mended(model, mode, error), _MOST):
        yield changed.example
        if times > 1 and (other := error_of(model, changed.example)) is not None and str(other) != str(error):
            yield from _mended(model, changed, other, times - 1)


def error_of(model: PreTrainedModel, example: Example) -> Exception | None:
    """The error in which a call ends that nobody writes down."""
    try:
        with torch.no_grad(), quiet(), left_as_found(model):
            model(**example.arguments)
    except Exception as error:  # as many ways to fail as there are models
        return error
    return None
