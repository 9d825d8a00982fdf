"""What a call of a model lacks, as the error with which it ends tells: an argument more, more items or wider ones, more
places in a text for what stands there."""

from __future__ import annotations

import ast
import inspect
import itertools
import json
import linecache
import re
import traceback
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.nn.utils.stateless import _reparametrize_module
from transformers import PreTrainedModel

from hf_align.tracing.build import quiet, trained_buffers
from hf_align.tracing.documented import NOT_ASKED, OF_TEXT, announced_media, documented, every_second
from hf_align.tracing.example import Example
from hf_align.tracing.inputs import reader
from hf_align.tracing.mode import Mode, NothingNew, extent

_RANK = re.compile(r"values to unpack \(expected (\d+), got (\d+)")
_WIDTHS = [
    re.compile(r"but got \[\d+, (?P<given>\d+)\] X \[(?P<read>\d+), \d+\]"),
    re.compile(r"cannot be multiplied \(\d+x(?P<given>\d+) and (?P<read>\d+)x\d+\)"),
    re.compile(r"of batch2 tensor to be: \[\d+, (?P<given>\d+)\] but got: \[\d+, (?P<read>\d+)\]"),
    re.compile(r"to have (?P<read>\d+) channels, but got (?P<given>\d+) channels"),
    re.compile(r"normalized_shape=\[(?P<read>\d+)\].* got input of size[^\[]*\[(?:\d+, )*(?P<given>\d+)\]"),
    re.compile(r"Expected size (?P<given>\d+) but got size (?P<read>\d+) for tensor number"),
    re.compile(r"Expected (?P<given>\d+) in dimension \d+ but got (?P<read>\d+) for tensor number"),
]
"""In an error of a matrix, a convolution or a norm that is given something narrower or wider than it reads, or of what
is put beside something that is."""
_LENGTHS = [
    re.compile(r"of tensor a \((\d+)\) must match the size of tensor b \((\d+)\) at non-singleton"),
    re.compile(r"of length (\d+) at (?P<axis>-\d+)!.* broadcastable to (?P<shape>\[[\d, ]+\])", re.DOTALL),
    re.compile(r"mask \D*\[(?:\d+, )*(\d+)\].* indexed tensor \D*(?P<shape>\[[\d, ]+\])\D* at index (?P<axis>\d+)"),
]
"""In an error of two values that do not go together, with values and without them, and of marks and what they mark."""
_CONVOLVED = re.compile(r"input to conv(\d)d, but got input of size: \[([\d, ]+)\]")
_PUT = re.compile(r"shape \[(\d+)[\d, ]*\] cannot be (?:put|broadcast)")
"""In an error of vectors for which a text has too few places."""
_PLACES = 4096
"""Places in a text at most."""
_ITEMS = 2**22
"""Numbers in all pictures or sounds of a text at most: more of them say nothing that fewer do not."""
_TRIALS = 6
"""Shapes of an argument that a call lacks."""
_TORCH = str(Path(torch.__file__).parent)


def mended(model: PreTrainedModel, mode: Mode, error: Exception) -> Iterator[Mode]:
    """A call that failed, changed as its error suggests: an argument more, more items, more places in a text."""
    if mode.part or isinstance(error, NothingNew):
        return
    if mode.announced is not None:
        yield from _of_sizes_told(model, mode, str(error))
    words = {*re.findall(r"\w+", str(error))}
    missing = _missing(model, mode)
    if "NoneType" in words or words & missing or any(map(_condition_of, _frames_of(error)[-1:])):
        yield from _with_named(model, mode, error, missing)
    yield from _lengthened(model, mode, _marks(mode.example.arguments), str(error))
    if mode.announced is not None:
        yield from _with_truth_values(model, mode, str(error))
        yield from _enlarged(model, mode, mode.announced[1], str(error))
    else:
        yield from _widened(model, mode, _vectors(mode.example.arguments), str(error))


def with_missing(model: PreTrainedModel, mode: Mode, error: Exception) -> Iterator[Mode]:
    """A call that failed, with an argument more that its error names, or the code that failed: this may name much that
    it does not lack."""
    if not mode.part and not isinstance(error, NothingNew):
        yield from _with_named(model, mode, error, _missing(model, mode))


def _with_named(model: PreTrainedModel, mode: Mode, error: Exception, missing: Collection[str]) -> Iterator[Mode]:
    kind = mode.announced[0] if mode.announced is not None else ""
    for name in _named(error, missing, kind):
        values = [*itertools.islice(documented(model, name, mode.example), _TRIALS)]
        for value in values or _undocumented(model, name, mode.example):
            yield _changed(model, mode, {name: value})


def _undocumented(model: PreTrainedModel, name: str, example: Example) -> Iterator[Tensor]:
    """What an argument of which nothing is said may be, if it is a tensor: a number for each text."""
    said = inspect.signature(model.forward).parameters[name].annotation
    if said is inspect.Parameter.empty or "Tensor" in str(said):
        yield torch.ones(extent(example)[0], dtype=torch.long)


def _missing(model: PreTrainedModel, mode: Mode) -> set[str]:
    """The arguments that a call may lack."""
    given, parameters = mode.example.arguments, inspect.signature(model.forward).parameters
    kind = mode.announced[0] if mode.announced is not None else ""
    asked = {name for name, parameter in parameters.items() if parameter.kind is not parameter.VAR_KEYWORD}
    instead = {"inputs_embeds"} if "input_ids" in given else set()
    return asked - given.keys() - instead - _of_other_media(model, kind, asked)


def _of_other_media(model: PreTrainedModel, kind: str, asked: Collection[str]) -> set[str]:
    """The arguments that belong to media of another kind than what stands in a text."""
    given, others = dict[str, set[str]](), set[str]()
    for other, _, arguments in announced_media(model) if kind else ():
        given.setdefault(other, set()).update(arguments)
    for other in given.keys() - {kind}:
        others |= given[other] | {name for name in asked if name.startswith(f"{other}_")}
    return others.difference(given.get(kind, ()), OF_TEXT)


def _of_sizes_told(model: PreTrainedModel, mode: Mode, said: str) -> Iterator[Mode]:
    """A text with media in it that are as wide, as long, or as many-dimensional as an error tells."""
    given = _vectors(mode.example.arguments)
    yield from _widened(model, mode, given, said)
    yield from _lengthened(model, mode, given | _places(mode.example.arguments), said)
    yield from _unflattened(model, mode, given, said)
    for name, items in given.items() if "too many values to unpack" in said else ():
        if items.dim() > 3:
            yield _changed(model, mode, {name: items.flatten(0, 1)})


def _with_truth_values(model: PreTrainedModel, mode: Mode, said: str) -> Iterator[Mode]:
    """Masks of media that hold truth values, where an error asks for such."""
    given = mode.example.arguments
    counted = {n: t for n, t in given.items() if n.endswith("_mask") and n not in OF_TEXT and t.dtype == torch.long}
    if counted and "bool" in said:
        yield _changed(model, mode, {n: t.bool() for n, t in counted.items()})


def _enlarged(model: PreTrainedModel, mode: Mode, token: int, said: str) -> Iterator[Mode]:
    """A text with media in it whose error tells of other numbers: of items, of dimensions, of places in the text."""
    given = mode.example.arguments
    media_given = _vectors(given)
    told = dict.fromkeys(int(number) for number in re.findall(r"\b\d+\b", said))
    numbers = [number for number in told if 1 < number <= _PLACES]
    if (put := _PUT.search(said)) is not None and int(put[1]) <= _PLACES:
        yield replace(mode, example=with_places(model, given, {token: int(put[1])}))
    yield from _with_one_more(model, mode, said)
    for name, items in (media_given | _places(given)).items():
        for number in numbers if len(items) in told and widths_told(said) is None else ():
            if number > len(items) and number * items[0].numel() <= _ITEMS:
                yield _changed(model, mode, {name: items[:1].expand(number, *items.shape[1:]).contiguous()})
    unpacked = _RANK.search(said)
    if unpacked is not None:
        expected, rank = map(int, unpacked.groups())
        low = {n: t for n, t in media_given.items() if t.dim() == rank}
        for count in (1, 2) if low and expected > rank else ():
            more = (1,) * (expected - rank - 1) + (count,)
            yield _changed(model, mode, {n: t.new_zeros(t.shape[0], *more, *t.shape[1:]) for n, t in low.items()})
    for number in numbers if "token" in said else ():
        if (given["input_ids"] == token).sum() != number:
            yield replace(mode, example=with_places(model, given, {token: number}))


def _vectors(given: Mapping[str, Any]) -> dict[str, Tensor]:
    """Pictures, sounds, and vectors of them."""
    return {n: t for n, t in given.items() if isinstance(t, Tensor) and t.is_floating_point()}


def _marks(given: Mapping[str, Any]) -> dict[str, Tensor]:
    """Truth values, one for each place."""
    return {n: t for n, t in given.items() if isinstance(t, Tensor) and t.dtype == torch.bool and n not in OF_TEXT}


def _places(given: Mapping[str, Any]) -> dict[str, Tensor]:
    """Tables of whole numbers, and masks, that go with media."""
    tensors = {n: t for n, t in given.items() if isinstance(t, Tensor) and n not in OF_TEXT}
    return {n: t for n, t in tensors.items() if t.dim() and not t.is_floating_point()}


def _with_one_more(model: PreTrainedModel, mode: Mode, said: str) -> Iterator[Mode]:
    """Layouts of media with a row more, where an error tells of an empty list: the last may be that of what is to be
    made."""
    for name, rows in _places(mode.example.arguments).items() if "non-empty list" in said else ():
        if len(rows) == 1 and rows.dim() == 2 and not name.endswith("_ids"):
            yield _changed(model, mode, {name: rows.expand(2, -1).contiguous()})


def widths_told(said: str) -> tuple[int, int] | None:
    """How wide something is, and how wide what reads it wants it to be, where an error tells both."""
    found = next(filter(None, (widths.search(said) for widths in _WIDTHS)), None)
    return None if found is None else (int(found["given"]), int(found["read"]))


def _widened(model: PreTrainedModel, mode: Mode, given: Mapping[str, Tensor], said: str) -> Iterator[Mode]:
    """Media as wide as what reads them, or as several of them laid side by side, where an error tells both widths."""
    width, read = widths_told(said) or (0, 0)
    for name, items in given.items():
        together, rest = divmod(width, items.shape[-1]) if items.dim() and items.numel() else (0, 0)
        if together and not rest and not read % together:
            yield from _of_length(model, mode, name, -1, read // together)


def _lengthened(model: PreTrainedModel, mode: Mode, given: Mapping[str, Tensor], said: str) -> Iterator[Mode]:
    """Media, or what goes with them, with as many places as what meets them, where an error tells two lengths; what was
    added last comes first."""
    told = _lengths_told(said)
    for length, other in (told, told[::-1]) if told is not None else ():
        for name, items in reversed([*given.items()]):
            for axis in range(1, items.dim()):
                if items.shape[axis] == length:
                    yield from _of_length(model, mode, name, axis, other)


def _lengths_told(said: str) -> tuple[int, int] | None:
    with_values, *of_shapes = (lengths.search(said) for lengths in _LENGTHS)
    for found in filter(None, of_shapes):
        return int(found[1]), json.loads(found["shape"])[int(found["axis"])]
    return None if with_values is None else (int(with_values[1]), int(with_values[2]))


def _of_length(model: PreTrainedModel, mode: Mode, name: str, axis: int, length: int) -> Iterator[Mode]:
    """A call with something of another length along an axis."""
    items = mode.example.arguments[name]
    if items.numel() // items.shape[axis] * length <= _ITEMS:
        shape = [*items.shape]
        shape[axis] = length
        longer = items.narrow(axis, 0, 1).expand(shape).contiguous()
        yield _changed(model, mode, {name: every_second(shape) if longer.dtype == torch.bool else longer})


def _unflattened(model: PreTrainedModel, mode: Mode, given: Mapping[str, Tensor], said: str) -> Iterator[Mode]:
    """Patches as a convolution as large as them reads them, where an error tells that it was given rows of numbers."""
    if (told := _CONVOLVED.search(said)) is None:
        return
    shape = torch.Size(map(int, told[2].split(",")))
    kernels = {p.shape[1:] for p in model.parameters() if p.dim() == 2 + int(told[1])}
    patches = [kernel for kernel in kernels if kernel.numel() == shape[-1]]
    for name, items in given.items():
        for patch in patches if items.shape == shape else ():
            yield _changed(model, mode, {name: items.unflatten(-1, patch)})


def _changed(model: PreTrainedModel, mode: Mode, more: Mapping[str, Tensor]) -> Mode:
    """A call with other arguments, and as many places in its text as those ask for."""
    arguments = {**mode.example.arguments, **more}
    if mode.announced is None:
        return replace(mode, example=Example(arguments, mode.example.tokens))
    kind, token = mode.announced
    count = vectors_made(model, kind, arguments) or 1
    return replace(mode, example=with_places(model, arguments, {token: count}))


def _named(error: Exception, missing: Collection[str], kind: str) -> list[str]:
    """The missing arguments that an error names: in its message, else in the innermost statement that names one.

    Args:
        kind: what a name may begin with there and not here: sizes are `image_sizes`.
    """
    texts = [str(error)]
    for frame in reversed(_frames_of(error)):
        first = frame.lineno or 0
        lines = range(first, (frame.end_lineno or first) + 1)
        texts += [_condition_of(frame), "".join(linecache.getline(frame.filename, number) for number in lines)]
    for text in texts:
        words = [name for word in re.findall(r"\w+", text) for name in (word, f"{kind}_{word}")]
        if found := [n for n in dict.fromkeys(words) if n in missing and not NOT_ASKED.search(n)]:
            return found
    return []


def _frames_of(error: Exception) -> list[traceback.FrameSummary]:
    """The modelling code that an error went through, the innermost last."""
    found = traceback.extract_tb(error.__traceback__)
    ours = Path(__file__).parent
    return [f for f in found if not f.filename.startswith(_TORCH) and ours not in Path(f.filename).parents]


def _condition_of(frame: traceback.FrameSummary) -> str:
    """The condition under which a line raises an error: `mask is None`; empty if it raises none, or always does."""
    code = linecache.getlines(frame.filename)
    line = frame.lineno or 0
    if not (0 < line <= len(code) and code[line - 1].lstrip().startswith("raise ")):
        return ""
    return _conditions("".join(code)).get(line, "")


@cache
def _conditions(code: str) -> dict[int, str]:
    """By the number of a line that raises an error, the condition under which it does."""
    branches = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.If)]
    return {s.lineno: ast.unparse(n.test) for n in branches for s in n.body if isinstance(s, ast.Raise)}


def with_places(model: PreTrainedModel, arguments: Mapping[str, Tensor], places: Mapping[int, int]) -> Example:
    """Arguments with a text in which places are kept for something else; these ids are no free input.

    Args:
        places: tokens that stand for something else, and how many there are of each.
    """
    around = reader(model, 1, 3).ids(3)
    kept = [part for token, count in places.items() for part in (torch.full((1, count), token), around)]
    ids = torch.cat([around, *kept], 1)
    texts = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "position_ids": torch.arange(ids.shape[1])[None]}
    marks = torch.isin(ids, torch.tensor([*places])).long()
    marked = {n: marks for n in arguments if n.endswith("token_type_ids")}
    return Example({**arguments, **{n: t for n, t in texts.items() if n in arguments}, **marked}, {})


def vectors_made(model: PreTrainedModel, kind: str, arguments: Mapping[str, Tensor]) -> int:
    """How many vectors a model makes of what it is given besides its text; zero where it makes none."""
    name = f"get_{kind}_features"
    computes = [getattr(owner, name) for owner in (model, model.base_model) if hasattr(owner, name)]
    if not computes:
        return 0
    # a head may hand on whatever it is given
    compute = max(computes, key=lambda f: len(inspect.signature(f).parameters.keys() & arguments.keys()))
    asked = inspect.signature(compute).parameters
    seen = {n: torch.rand_like(t) if t.is_floating_point() else t for n, t in arguments.items() if n in asked}
    shapes = {n: p.shape for n, p in model.named_parameters()} | trained_buffers(model)
    zeros = {n: torch.zeros(()).expand(shape) for n, shape in shapes.items()}
    for weights in ({}, zeros):  # where weights have no values, how many vectors there are may have none
        try:
            with torch.no_grad(), quiet(), _reparametrize_module(model, weights, tie_weights=True):
                made = compute(**seen)
            return _count(made)
        except GuardOnDataDependentSymNode:
            continue
        except Exception:
            return 0
    return 0


def _count(made: Any) -> int:
    """The vectors in what a model makes of media."""
    if isinstance(made, dict):
        made = made.get("pooler_output", next(iter(made.values()), None))
    vectors = [t for t in (made if isinstance(made, (list, tuple)) else [made]) if isinstance(t, Tensor)]
    return int(sum(t.numel() // t.shape[-1] for t in vectors))
