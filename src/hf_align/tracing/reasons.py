"""Why a model cannot be built or traced, in one line: which line of its modelling code, and what to do about it."""

from __future__ import annotations

import linecache
import re
import traceback
from pathlib import Path

import torch
import transformers
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from hf_align.errors import IncompatibleModels

HELPERS = (
    f"{Path(__file__).parents[1]}/",
    f"{Path(torch.__file__).parent}/",
    *(f"{Path(transformers.__file__).parent}/{part}/" for part in ("exporters", "integrations", "utils")),
    f"{Path(transformers.__file__).parent}/modeling_utils.py",
)
"""Where a frame says less about a model than the frame that called it."""

NEEDS_NUMBERS = (
    "needs numbers that only a run computes; compute every case and choose with torch.where, or merge with --match none"
)
KEEPS_NUMBERS = (
    "writes what a call computes to a tensor that the model keeps for the next; hand it on as an argument, or merge"
    " with --match none"
)
FROM_WEIGHTS = (
    "what is computed from weights while a model is built cannot be known; take parametrizations out"
    " (torch.nn.utils.parametrize.remove_parametrizations) and save the model again"
)
NOT_ITS_OWN = (
    "reads weights that the model neither saves nor loads; keep modules in torch.nn.ModuleList, not in a plain list"
)
TAKES_CODE = (
    "hands code to an op that runs it (flex_attention), which is not followed; write it out, or merge with --match none"
)
_OTHER_TENSOR = "computes with a {}, a kind of tensor that is not followed; use plain ones, or merge with --match none"
_KINDS = re.compile(r"Cannot access storage of (\w+)|Creating a new Tensor subclass (\w+)")
"""How torch says that memory is laid out otherwise (sparse tensors, those of torch.func), or that a class is given."""
_DATA_DEPENDENT = (GuardOnDataDependentSymNode, DataDependentOutputException, DynamicOutputShapeException)
_HIGHER_ORDER = ("HigherOrderOperator", "Current active mode")
"""How torch says that an op takes code, and has no rule for it here."""
_TAKEN_OUT = (".item()", ".numpy()", "data-dependent", "to contain only concrete integers", NEEDS_NUMBERS)
"""How torch says in other errors that a number is wanted where there is none."""


class DoesNotRunError(RuntimeError):
    """An op refuses what it is given, and would in every run."""


def is_about_numbers(error: BaseException) -> bool:
    """Whether tracing failed because a branch, a size or a loop depends on what the model computes."""
    return isinstance(error, _DATA_DEPENDENT) or any(words in str(error) for words in _TAKEN_OUT)


def needs_numbers(line: str) -> IncompatibleModels:
    """The refusal of a line of modelling code, `/…/modeling_x.py:12`."""
    return _refusal(line, NEEDS_NUMBERS)


def keeps_numbers(line: str) -> IncompatibleModels:
    """The refusal of a line of modelling code that writes what a call computes to memory from before it."""
    return _refusal(line, KEEPS_NUMBERS)


def _refusal(line: str, words: str) -> IncompatibleModels:
    path, _, number = line.rpartition(":")
    code = linecache.getline(path, int(number)).strip()
    return IncompatibleModels(f"{Path(path).name}:{number}{f' ({code})' if code else ''} {words}")


def reason(error: BaseException) -> str:
    """The line of modelling code, as far as one is known, what is wrong with it, and what to do."""
    where = place(error)
    if "cpu and meta" in str(error):  # weights that are not the model's have no place in memory
        return f"{where or 'its code'} {NOT_ITS_OWN}"
    if isinstance(error, IncompatibleModels):
        return str(error)
    if is_about_numbers(error):
        return f"{where or 'its code'} {NEEDS_NUMBERS}"
    lines = str(error).strip().splitlines()
    if isinstance(error, KeyError) and "weakref" in str(error):
        return f"{where or 'its code'} does something that is not followed, in another thread or by torch.func"
    if any(words in str(error) for words in _HIGHER_ORDER):
        return f"{where or 'its code'} {TAKES_CODE}"
    if kinds := _KINDS.search(str(error)):
        return f"{where or 'its code'} {_OTHER_TENSOR.format(kinds[kinds.lastindex or 0])}"
    kind = "it does not run" if isinstance(error, DoesNotRunError) else type(error).__name__
    found = f"{kind}: {lines[0]}" if lines else kind
    loops = "; torch.vmap does less than the same written out" if "vmap" in found else ""
    return f"{found}{f', in {where}' if where else ''}{loops}"


def place(error: BaseException) -> str:
    """`modeling_x.py:12 (if x.sum() > 0:)`: where the modelling code was last."""
    frames = traceback.extract_tb(error.__traceback__)
    inside = next((i for i, f in enumerate(frames) if f.filename.startswith(HELPERS)), len(frames))
    own = [f for f in frames[inside:] if f.filename.endswith(".py") and not f.filename.startswith(HELPERS)]
    if not own:
        return ""
    return f"{Path(own[-1].filename).name}:{own[-1].lineno}" + (f" ({own[-1].line})" if own[-1].line else "")
