"""The ways in which a model may be called besides its first call: one argument more, media, a step with a cache.

Which of them a model answers is found by trying. Tracing tries them without weights, the witness with those that are
stored. What an argument looks like is read off the documentation of `forward`, the config and what a call computes;
what a call lacks, off the error with which it ends.
"""

from __future__ import annotations

import inspect
import itertools
import linecache
import re
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode
from torch.nn.utils.stateless import _reparametrize_module
from transformers import PretrainedConfig, PreTrainedModel

from hf_align.tracing.build import quiet, trained_buffers
from hf_align.tracing.example import Example
from hf_align.tracing.fields import parts
from hf_align.tracing.inputs import Reader, media, reader
from hf_align.tracing.mode import Attempt, Mode, NothingNew, extent, extent_of

_WIDTHS_OF_STATES = ("cross_attention_dim", "encoder_hidden_size", "cross_attention_hidden_size", "hidden_size",
                     "d_model", "n_embd")  # fmt: skip
"""Config fields that may say how wide the states of another encoder are; any width of a weight may be it."""
_NOT_ASKED = re.compile("^(output|return|use)_|labels?$|loss")
"""Arguments that only ask for more results."""
_DOCUMENTED = re.compile(r"^\s*(\w+) \((.*?) of shape `?\(([^)]*)\)", re.MULTILINE)
_RANK = re.compile(r"values to unpack \(expected (\d+), got (\d+)")
_PLACES = 4096
"""Places in a text at most."""
_ITEMS = 2**20
"""Numbers in all pictures or sounds of a text at most: more of them say nothing that fewer do not."""
_ATTEMPTS = 40
"""Calls that are tried at most before one is given up; most fail at their first line."""
_TRIALS = 6
"""Shapes of an argument that a call lacks."""
_OF_TEXT = ("input_ids", "attention_mask")
_TORCH = str(Path(torch.__file__).parent)


def try_ways(model: PreTrainedModel, base: Example, extents: Sequence[int], attempt: Attempt) -> None:
    """Try all ways to call a model besides its first call.

    Args:
        base: the arguments of the first call.
        extents: the lengths of what that call computes, the most frequent first.
    """
    if base.tokens:
        attempt(Mode("a step with a cache", base, goes_on=True, sure=True))
    main, has_text = " and ".join(base.arguments), "input_ids" in base.arguments
    in_texts = {name for _, _, given in media(model) for name in given}.difference(_OF_TEXT) if has_text else set()
    for name, sure, values in _arguments(model, model.forward, base, extents):
        if name in in_texts:
            continue
        modes = (Mode(f"{main} with {name}", _with(model, base, {name: value}), sure=sure, adds=((name, i),))
                 for i, value in enumerate(values))  # fmt: skip
        (_first_that_runs if sure else _first_guess_that_runs)(model, modes, attempt)
    if has_text:
        try_media(model, attempt)


def try_media(model: PreTrainedModel, attempt: Attempt) -> None:
    """Try a text with each kind of what else may stand in it: a picture, a video, a sound."""
    for kind, found in itertools.groupby(media(model), lambda found: found[0]):
        modes = (mode for _, token, given in found for mode in _announced(model, kind, token, given))
        _first_that_runs(model, modes, attempt)


def try_together(
    model: PreTrainedModel, plain: Mode, extents: Sequence[int], alone: Sequence[Mode], attempt: Attempt
) -> None:
    """Try one call with all arguments that a model takes each alone; else with as many as go together.

    Args:
        plain: a call that has none of them.
        extents: the lengths of what it computes.
        alone: calls with one of them each.
    """
    adds = [mode.adds[0] for mode in alone if len(mode.adds) == 1]
    whole = together(model, plain, extents, adds)
    if len(adds) < 2 or whole is None or attempt(whole) is None:
        return
    kept = adds[:1]
    for add in adds[1:]:
        more = together(model, plain, extents, [*kept, add])
        if more is not None and attempt(more) is None:
            kept.append(add)


def together(
    model: PreTrainedModel, plain: Mode, extents: Sequence[int], adds: Sequence[tuple[str, int]]
) -> Mode | None:
    """A call with some arguments more; None where it has them already.

    Args:
        extents: the lengths of what the plain call computes.
        adds: as of a mode.
    """
    chosen, given = dict(adds), dict[str, Any]()
    for name, _, values in _arguments(model, model.forward, plain.example, extents):
        if name in chosen:
            given.update((name, value) for value in itertools.islice(values, chosen[name], chosen[name] + 1))
    if not given:
        return None
    main = f"{' and '.join(plain.example.arguments)} with " if plain.announced is None else f"{plain.name} and "
    return replace(plain, name=main + " and ".join(given), example=_with(model, plain.example, given),
                   adds=tuple((n, chosen[n]) for n in given))  # fmt: skip


def _with(model: PreTrainedModel, base: Example, more: Mapping[str, Any]) -> Example:
    """A call with more arguments; with a mask beside positions: without one, texts that start anew are kept apart."""
    asked, masks = inspect.signature(model.forward).parameters, dict[str, Tensor]()
    for name in more:
        mask = name.replace("position_ids", "attention_mask")
        if mask in asked and mask != name:
            masks[mask] = torch.ones(extent_of(name, base), dtype=torch.long)
    return Example({**masks, **base.arguments, **more}, base.tokens)


def try_parts(
    model: PreTrainedModel, base: Example, extents: Sequence[int], paths: Iterable[str], attempt: Attempt
) -> None:
    """Try the first call with one argument more of a module in the model, for which the model has no argument itself.

    Args:
        paths: of modules.
    """
    main = " and ".join(base.arguments)
    own = inspect.signature(model.forward).parameters
    for path in paths:
        for name, _, values in _arguments(model, model.get_submodule(path).forward, base, extents):
            if name in own:
                continue
            tensors = (value for value in values if isinstance(value, Tensor))
            modes = (Mode(f"{main} with {name} of {path}", base, part=path, extra=((name, t),)) for t in tensors)
            _first_that_runs(model, modes, attempt)


def _first_that_runs(model: PreTrainedModel, alternatives: Iterable[Mode], attempt: Attempt) -> None:
    """Try alternatives until one is a mode, each also with what it turns out to lack."""
    tried = 0
    for alternative in alternatives:
        waiting = [alternative]
        while waiting and tried < _ATTEMPTS:
            mode, tried = waiting.pop(0), tried + 1
            error = attempt(mode)
            if error is None:
                return
            waiting = [*_mended(model, mode, error), *waiting]


def _first_guess_that_runs(model: PreTrainedModel, guesses: Iterable[Mode], attempt: Attempt) -> None:
    """Try guesses until one is a mode: all as they are before any with what it turns out to lack, for a wrong one
    seems to lack much."""
    failed = list[tuple[Mode, Exception]]()
    for guess in guesses:
        error = attempt(guess)
        if error is None:
            return
        failed.append((guess, error))
    _first_that_runs(model, (mended for guess, error in failed for mended in _mended(model, guess, error)), attempt)


def _mended(model: PreTrainedModel, mode: Mode, error: Exception) -> Iterator[Mode]:
    """A call that failed, changed as its error suggests: an argument more, more items, more places in a text."""
    given, asked = mode.example.arguments, inspect.signature(model.forward).parameters
    if mode.part or isinstance(error, NothingNew):
        return
    kind = mode.announced[0] if mode.announced is not None else ""
    for name in _named(error, asked.keys() - given.keys(), kind):
        for value in itertools.islice(_documented(model, name, mode.example), _TRIALS):
            yield _changed(model, mode, {name: value})
    if mode.announced is not None:
        yield from _enlarged(model, mode, mode.announced[1], str(error))


def _enlarged(model: PreTrainedModel, mode: Mode, token: int, said: str) -> Iterator[Mode]:
    """A text with media in it whose error tells of other numbers: of items, of dimensions, of places in the text."""
    given = mode.example.arguments
    media_given = {n: t for n, t in given.items() if isinstance(t, Tensor) and t.is_floating_point()}
    told = dict.fromkeys(int(number) for number in re.findall(r"\b\d+\b", said))
    numbers = [number for number in told if 1 < number <= _PLACES]
    for name, items in media_given.items():
        for number in numbers if len(items) in told else ():
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
            yield replace(mode, example=_with_places(model, given, token, number))


def _changed(model: PreTrainedModel, mode: Mode, more: Mapping[str, Tensor]) -> Mode:
    """A call with other arguments, and as many places in its text as those ask for."""
    arguments = {**mode.example.arguments, **more}
    if mode.announced is None:
        return replace(mode, example=Example(arguments, mode.example.tokens))
    kind, token = mode.announced
    return replace(mode, example=_with_places(model, arguments, token, _vectors_made(model, kind, arguments) or 1))


def _named(error: Exception, missing: Collection[str], kind: str) -> list[str]:
    """The missing arguments that an error names: in its message, else in the innermost statement that names one.

    Args:
        kind: what a name may begin with there and not here: sizes are `image_sizes`.
    """
    texts = [str(error)]
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith(_TORCH) and Path(__file__).parent not in Path(frame.filename).parents:
            first = frame.lineno or 0
            lines = range(first, (frame.end_lineno or first) + 1)
            texts.append("".join(linecache.getline(frame.filename, number) for number in lines))
    for text in texts:
        words = [name for word in re.findall(r"\w+", text) for name in (word, f"{kind}_{word}")]
        if found := [n for n in dict.fromkeys(words) if n in missing and not _NOT_ASKED.search(n)]:
            return found
    return []


def _documented(model: PreTrainedModel, name: str, example: Example) -> Iterator[Tensor]:
    """What the documentation of `forward` says of an argument: sizes that it names otherwise than the config does are
    looked for among those that are given."""
    found = next((m for m in _DOCUMENTED.finditer(inspect.getdoc(model.forward) or "") if m[1] == name), None)
    if found is None:
        return
    read = reader(model, *extent(example))
    kinds = {"Bool": torch.bool, "Float": torch.float32}
    dtype = next((dtype for word, dtype in kinds.items() if word in found[2]), torch.long)
    others = [t for n, t in example.arguments.items() if isinstance(t, Tensor) and n not in _OF_TEXT]
    sizes = sorted({size for t in others for size in t.shape}, reverse=True)
    pictures = [t for t in others if t.is_floating_point() and t.dim() > 3]
    choices = [_sizes(dim.strip(), read, sizes) for dim in found[3].split(",") if dim.strip()]
    for shape in itertools.product(*choices):
        value = torch.ones(shape, dtype=dtype)
        if "size" in name and pictures and shape and shape[-1] == 2:
            value = torch.tensor(pictures[0].shape[-2:]).expand(shape).contiguous()
        yield value


def _sizes(dim: str, read: Reader, others: Sequence[int]) -> list[int]:
    """What a documented dimension may be."""
    if dim.isdigit():
        return [int(dim)]
    if dim in ("batch_size", "batch", "bsz"):
        return [read.batch]
    if dim in ("sequence_length", "seq_length", "seq_len"):
        return [read.length]
    number = read.number(dim, default=0)
    if number:
        return [number]
    return [1, *others] if "num" in dim else [*others, 1]


def _arguments(
    model: PreTrainedModel, forward: Callable[..., Any], base: Example, extents: Sequence[int]
) -> Iterator[tuple[str, bool, Iterator[Tensor | bool]]]:
    """The optional arguments of a function besides what it is given, each with values that it may want, and whether
    their meaning is known."""
    for name, parameter in inspect.signature(forward).parameters.items():
        optional = parameter.default is None or isinstance(parameter.default, bool)
        if name in base.arguments or not optional or _NOT_ASKED.search(name):
            continue
        if isinstance(parameter.default, bool):
            yield name, False, iter([not parameter.default])
        elif parameter.annotation is parameter.empty or "Tensor" in str(parameter.annotation):
            known = _known(model, name, base, extents)
            yield name, known is not None, known if known is not None else _guesses(model, base, extents)


def _known(model: PreTrainedModel, name: str, base: Example, extents: Sequence[int]) -> Iterator[Tensor] | None:
    """Values of an argument that has one meaning wherever it occurs."""
    rows, length = extent_of(name, base)
    read = reader(model, rows, length)
    main = next(iter(base.arguments.values()))
    if name.endswith("global_attention_mask"):
        return iter([(torch.arange(length) < 1).long().expand(rows, length).contiguous()])
    if name.endswith("attention_mask"):
        sizes = dict.fromkeys([length] if base.tokens or main.dim() == 2 else [*extents, *main.shape[1:]])
        return (padded(rows, size) for size in sizes if size > 2)
    if name.endswith("position_ids"):
        stride = max(1, (min(positions(model.config) or 2**17, 2**17) - 1) // max(1, length - 1))
        places = torch.arange(length) * stride, torch.arange(length).flip(0)
        return (row.expand(rows, length).contiguous() for row in places)
    if name.endswith("type_ids"):
        kinds = read.number("type_vocab_size", default=2)
        return iter([(torch.arange(length) % max(1, kinds)).expand(rows, length).contiguous()])
    if name == "encoder_hidden_states":
        widths = [read.number(n, default=0) for n in _WIDTHS_OF_STATES]
        widths += sorted({p.shape[-1] for p in model.parameters() if p.dim() == 2})
        return (read.floats(5, width) for width in dict.fromkeys(widths) if width)
    return None


def padded(rows: int, length: int) -> Tensor:
    """A mask [rows, length > 2] that hides the first third of the first row, and the end of the last."""
    mask = torch.ones(rows, length, dtype=torch.long)
    mask[0, : length // 3] = 0
    mask[-1, -1:] = 0
    return mask


def _guesses(model: PreTrainedModel, base: Example, extents: Sequence[int]) -> Iterator[Tensor]:
    """What any other argument may want: masks, numbers and vectors."""
    read = reader(model, *extent(base))
    rows, length = read.batch, read.length
    width = read.number("hidden_size", "d_model", "n_embd", default=8)
    first = torch.zeros(rows, length, dtype=torch.long)
    first[:, :1] = 1
    yield first
    for size in dict.fromkeys((length, *extents)):
        yield (torch.arange(size) % 3 == 1).expand(rows, size).contiguous()
    yield read.floats(length)
    yield read.floats(length, width)
    yield read.floats(width)
    yield read.floats(length, length)
    yield torch.arange(rows)


def positions(config: PretrainedConfig) -> int | None:
    """The fewest positions that a part of a model has, as far as its config says."""
    names = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length")
    found = [v for p in parts(config) for n in names if isinstance(v := getattr(p, n, None), int) and v > 2]
    return min(found, default=None)


def _announced(model: PreTrainedModel, kind: str, token: int, given: Mapping[str, Tensor]) -> Iterator[Mode]:
    """Something else in a text, which holds a token for each vector that the model makes of it."""
    asked = inspect.signature(model.forward).parameters
    if not given.keys() <= asked.keys():
        return
    count = _vectors_made(model, kind, given)
    marks = {n: torch.ones(1, 1).long() for n in ("mm_token_type_ids", "token_type_ids") if n in asked}
    mask = {"attention_mask": torch.ones(1, 1).long()} if "attention_mask" in asked else {}
    for extra in ({**mask, **marks}, mask, marks, {}) if count else ({**mask, **marks},):
        example = _with_places(model, {"input_ids": torch.ones(1, 1).long(), **given, **extra}, token, count or 1)
        yield Mode(f"input_ids with {kind}", example, sure=True, announced=(kind, token))


def _with_places(model: PreTrainedModel, arguments: Mapping[str, Tensor], token: int, count: int) -> Example:
    """Arguments with a text in which `count` places are kept for something else; these ids are no free input."""
    around = reader(model, 1, 3).ids(3)
    ids = torch.cat([around, torch.full((1, count), token), around], 1)
    texts = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    marked = {n: (ids == token).long() for n in arguments if n.endswith("token_type_ids")}
    return Example({**arguments, **{n: t for n, t in texts.items() if n in arguments}, **marked}, {})


def _vectors_made(model: PreTrainedModel, kind: str, arguments: Mapping[str, Tensor]) -> int:
    """How many vectors a model makes of what it is given besides its text; zero where it makes none."""
    name = f"get_{kind}_features"
    compute = getattr(model, name, None) or getattr(model.base_model, name, None)
    if compute is None:
        return 0
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
