"""The ways in which a model may be called besides its first call: one argument more, media, a step with a cache.

Which of them a model answers is found by trying. Tracing tries them without weights, the witness with those that are
stored. What an argument looks like is read off the documentation of `forward`, the config and what a call computes;
what a call lacks, off the error with which it ends (`mending.py`).
"""

from __future__ import annotations

import inspect
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from hf_align.tracing.alternatives import first_guess_that_runs, first_that_answers, first_that_runs
from hf_align.tracing.asked import asks
from hf_align.tracing.documented import NOT_ASKED, OF_TEXT, announced_media, documented, documented_width
from hf_align.tracing.example import Example
from hf_align.tracing.fields import parts
from hf_align.tracing.in_texts import side_by_side, try_media
from hf_align.tracing.inputs import reader
from hf_align.tracing.mode import Attempt, Mode, NothingNew, at_its_length, extent, extent_of
from hf_align.tracing.resized import axes_by_size, numbers_in_code, numbers_noted, resized, spread
from hf_align.tracing.watched import is_said, scalars

_WIDTHS_OF_STATES = ("cross_attention_dim", "encoder_hidden_size", "cross_attention_hidden_size", "hidden_size",
                     "d_model", "n_embd")  # fmt: skip
"""Config fields that may say how wide the states of another encoder are; any width of a weight may be it."""
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "encoder_layers")
_HEADS = ("num_attention_heads", "n_head", "num_heads", "encoder_attention_heads")
"""Config fields that say how many layers there are, and heads in each; of a decoder, others come first."""
_SIZES = 2
"""Of pictures and sounds that are larger still, because the code has numbers like theirs."""
_MOST_SIDE = 16
"""Larger numbers in the code are not what the side of a square of places is a multiple of."""
_MOST_NUMBERS = 2**18
"""In a picture or a sound that is made larger, if it is more than four times as large."""
_PLAIN = (bool, int, float, str)
_MASKED = re.compile("(position|(?<=_)input)_ids$")


def try_ways(model: PreTrainedModel, base: Example, extents: Sequence[int], attempt: Attempt) -> None:
    """Try all ways to call a model besides its first call: with less than that is given, and with more.

    Args:
        base: the arguments of the first call.
        extents: the lengths of what that call computes, the most frequent first.
    """
    for fewer in with_less(model, base):
        attempt(at_its_length(Mode(fewer.said, fewer, sure=True)))
    _try_sizes(model, base, extents, attempt, base.arguments)
    if base.tokens:
        attempt(Mode("a step with a cache", base, goes_on=True, sure=True))
    main, has_text = base.said, "input_ids" in base.arguments
    in_texts = (
        {name for _, _, given in announced_media(model) for name in given}.difference(OF_TEXT) if has_text else set()
    )
    for name, sure, values in _arguments(model, model.forward, base, extents):
        if name in in_texts:
            continue
        modes = (Mode(f"{main} with {_said(name, value)}", _with(model, base, {name: value}), sure=sure,
                      adds=((name, i),)) for i, value in enumerate(values))  # fmt: skip
        ran = (first_that_runs if sure else first_guess_that_runs)(model, modes, attempt)
        if ran is not None:
            _try_sizes(model, ran.example, extents, attempt, [name])
    for name in _not_given(model, base):
        for value in scalars(model.forward, model, base, name):
            attempt(Mode(f"{main} with {_said(name, value)}", _with(model, base, {name: value})))
    for ask in asks(model, base):
        first_that_answers(ask.modes(base), attempt)
    if has_text:
        found = try_media(model, attempt)
        for mode in found:
            _try_sizes(model, mode.example, extents, attempt, mode.example.arguments)
            _try_with_media(model, mode, attempt)
        if len(found) > 1:
            attempt(side_by_side(model, found))


def _not_given(model: PreTrainedModel, base: Example) -> list[str]:
    """The arguments that a call leaves out, but for those that only ask for more results."""
    asked = inspect.signature(model.forward).parameters
    return [name for name in asked if name not in base.arguments and not NOT_ASKED.search(name)]


def _try_with_media(model: PreTrainedModel, mode: Mode, attempt: Attempt) -> None:
    """Try a text with media in it and one flag, word or number more: some act on nothing but media."""
    asked = inspect.signature(model.forward).parameters
    for name in _not_given(model, mode.example):
        flags = [not asked[name].default] if isinstance(asked[name].default, bool) else []
        for value in flags or scalars(model.forward, model, mode.example, name):
            given = _with(model, mode.example, {name: value})
            attempt(replace(mode, name=f"{mode.name} with {_said(name, value)}", example=given))


def with_less(model: PreTrainedModel, base: Example) -> Iterator[Example]:
    """A call without one thing that it may do without, with only one of these, and with none: a text may go another way
    without the picture before it, or without a mask."""
    asked = inspect.signature(model.forward).parameters
    optional = [n for n in base.arguments if n in asked and asked[n].default is not inspect.Parameter.empty]
    counts = {1, len(optional) - 1, len(optional)} & {*range(1, len(base.arguments))}
    for count in sorted(counts):
        for left_out in itertools.combinations(optional, count):
            kept = {name: value for name, value in base.arguments.items() if name not in left_out}
            yield replace(base, arguments=kept, tokens={n: ids for n, ids in base.tokens.items() if n in kept},
                          ends={n: end for n, end in base.ends.items() if n in kept})  # fmt: skip


def _try_sizes(
    model: PreTrainedModel, base: Example, extents: Sequence[int], attempt: Attempt, names: Collection[str]
) -> None:
    """Try pictures, sounds and states of other sizes: twice as large along all axes that are as long, and along each of
    the last two alone; where a model takes that, half and three times as large, too, in other grids, and beyond what
    the code may compare a number of places with.

    Args:
        names: of the arguments that are made larger.
    """
    if not any(base.is_free(name) and name not in base.tokens for name in names):
        return
    numbers = numbers_in_code(model) | numbers_noted(model)
    for size, axes in axes_by_size(base).items():
        inner = [(name, axis) for name, axis in axes if axis and name not in base.tokens]
        free = [(name, axis) for name, axis in inner if base.is_free(name) and name in names]
        beyond = {size * ((n + 1) // places + 1) for n in numbers for places in (size, *extents[:1])} - {size, 2 * size}
        near = [size // 2, 3 * size, *(_of_other_grids(size, extents[:1], numbers) if len(free) > 1 else ())]
        near = [other for other in dict.fromkeys(near) if other not in (size, 2 * size)]
        for group in dict.fromkeys((tuple(inner), *((axis,) for axis in free[:-3:-1]))) if free else ():
            whole = group == tuple(inner)
            larger = _sized(base, group, 2 * size, sure=whole)
            if larger is not None and isinstance(attempt(larger), NothingNew | NoneType) and whole:
                closer, others = (
                    [mode for other in sizes if (mode := _sized(base, group, other)) is not None]
                    for sizes in (near, sorted(beyond.difference(near)))
                )
                for mode in (*closer, *spread(others, _SIZES)):
                    attempt(mode)


def _of_other_grids(size: int, extents: Sequence[int], numbers: Collection[int]) -> Iterator[int]:
    """Sizes of a picture of which a model makes a square of places, so that the side of that square is a multiple of a
    number in the code, or one more than it was; and a picture of one dot more."""
    for places in (n - more for n in extents for more in (0, 1)):
        side = math.isqrt(max(places, 0))
        if side > 1 and side**2 == places and size % side == 0 and size > side:
            sides = [n * max(1, side // n) for n in sorted(numbers) if n <= _MOST_SIDE]
            yield from (size // side * other for other in (side + 1, *sides[:_SIZES]) if other != side)
            yield size + 1
            return


def _sized(base: Example, axes: Sequence[tuple[str, int]], size: int, *, sure: bool = False) -> Mode | None:
    """A call of another size; None if it is too large, or a mask would have to grow."""
    counts, (first, axis) = Counter(name for name, _ in axes), axes[0]
    factor = size / base.arguments[first].shape[axis]
    sizes = ((base.arguments[name].numel(), factor**count) for name, count in counts.items())
    example = None
    if all(numbers * growth <= max(_MOST_NUMBERS, 4 * numbers) for numbers, growth in sizes):
        example = resized(base, axes, size)
    if example is None:
        return None
    shapes = (" × ".join(map(str, example.arguments[name].shape[1:])) for name in counts)
    return Mode(f"{base.said} of {' and '.join(shapes)}", example, sure=sure)


def _said(name: str, value: Any) -> str:
    return name if isinstance(value, (Tensor, bool)) else f"{name} = {value!r}"


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
    main = f"{plain.example.said} with " if plain.announced is None else f"{plain.name} and "
    return replace(plain, name=main + " and ".join(given), example=_with(model, plain.example, given),
                   adds=tuple((n, chosen[n]) for n in given))  # fmt: skip


def _with(model: PreTrainedModel, base: Example, more: Mapping[str, Any]) -> Example:
    """A call with more arguments; with a mask beside positions: without one, texts that start anew are kept apart.
    Beside a text of its own, too, which may count for nothing without."""
    asked, masks = inspect.signature(model.forward).parameters, dict[str, Tensor]()
    for name in more:
        mask = _MASKED.sub("attention_mask", name)
        if mask in asked and mask != name:
            masks[mask] = torch.ones(extent_of(name, base), dtype=torch.long)
    texts = {n: ids for n in more if _is_text(n) for ids in list(base.tokens.values())[:1]}
    return replace(base, arguments={**masks, **base.arguments, **more}, tokens={**base.tokens, **texts})


def try_parts(
    model: PreTrainedModel, base: Example, extents: Sequence[int], paths: Iterable[str], attempt: Attempt
) -> None:
    """Try the first call with one argument more of a module in the model, for which the model has no argument itself.

    What one module does not take, another like it is not asked for.

    Args:
        paths: of modules.
    """
    main = base.said
    own = inspect.signature(model.forward).parameters
    refused = set[tuple[Hashable, str]]()
    for path in paths:
        module = model.get_submodule(path)
        kind = _kind(module)
        for name, _, values in _arguments(model, module.forward, base, extents):
            if name in own or (kind, name) in refused:
                continue
            tensors = (value for value in values if isinstance(value, Tensor))
            modes = (Mode(f"{main} with {name} of {path}", base, part=path, extra=((name, t),)) for t in tensors)
            if first_that_runs(model, modes, attempt) is None:
                refused.add((kind, name))


def _kind(module: nn.Module) -> Hashable:
    """What a module has in common with others of its code that do the same: sizes, flags and numbers, and so within."""
    plain = tuple(sorted((n, repr(v)) for n, v in vars(module).items() if v is None or isinstance(v, _PLAIN)))
    held = tuple((n, tuple(t.shape)) for n, t in module.named_parameters(recurse=False))
    held += tuple((n, tuple(t.shape)) for n, t in module.named_buffers(recurse=False))
    return type(module), plain, held, tuple((name, _kind(part)) for name, part in module.named_children())


def owners_of(weights: Iterable[str]) -> list[str]:
    """The modules that hold some weights, the innermost first."""
    found: dict[str, None] = {}
    for name in weights:
        path = name.rpartition(".")[0]
        while path:
            found[path] = None
            path = path.rpartition(".")[0]
    return list(found)


def _arguments(
    model: PreTrainedModel, forward: Callable[..., Any], base: Example, extents: Sequence[int]
) -> Iterator[tuple[str, bool, Iterator[Tensor | bool]]]:
    """The optional arguments of a function besides what it is given, each with values that it may want, and whether
    their meaning is known."""
    for name, parameter in inspect.signature(forward).parameters.items():
        flag = isinstance(parameter.default, bool) or is_said(parameter, bool)
        optional = parameter.default is None or isinstance(parameter.default, bool)
        if name in base.arguments or not optional or NOT_ASKED.search(name):
            continue
        if flag:
            yield name, False, iter([not parameter.default])
        elif parameter.annotation is parameter.empty or "Tensor" in str(parameter.annotation):
            known = _known(model, name, base, extents)
            yield name, known is not None, known if known is not None else _guesses(model, name, base, extents)


def numbers_beside(model: PreTrainedModel, base: Example) -> Iterator[tuple[str, Tensor]]:
    """Arguments of known meaning that hold a whole number for each token: masks, positions, types."""
    for name, sure, values in _arguments(model, model.forward, base, ()):
        value = next(values, None) if sure and not _is_text(name) else None
        if isinstance(value, Tensor) and not value.is_floating_point() and value.shape == extent_of(name, base):
            yield name, value


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
    if name.endswith("head_mask"):
        of_decoder = ([], []) if name.startswith("head") else (["decoder_layers"], ["decoder_attention_heads"])
        layers, heads = (read.number(*first, *names, default=1)
                         for first, names in zip(of_decoder, (_LAYERS, _HEADS), strict=True))  # fmt: skip
        return iter([torch.zeros(layers, heads), torch.zeros(heads)])
    if _is_text(name):
        return itertools.chain([read.ids(length)], documented(model, name, base))
    if name == "encoder_hidden_states":
        widths = [read.number(n, default=0) for n in _WIDTHS_OF_STATES]
        widths += sorted({p.shape[-1] for p in model.parameters() if p.dim() == 2})
        return (read.floats(5, width) for width in dict.fromkeys(widths) if width)
    return None


def _is_text(name: str) -> bool:
    """Whether an argument is a text besides the first one."""
    return name.endswith("_input_ids")


def padded(rows: int, length: int) -> Tensor:
    """A mask [rows, length > 2] that hides the first third of the first row, and the end of the last."""
    mask = torch.ones(rows, length, dtype=torch.long)
    mask[0, : length // 3] = 0
    mask[-1, -1:] = 0
    return mask


def _guesses(model: PreTrainedModel, name: str, base: Example, extents: Sequence[int]) -> Iterator[Tensor]:
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
    for size in dict.fromkeys((documented_width(model, name) or width, width)):
        yield read.floats(length, size)
    yield read.floats(width)
    yield read.floats(length, length)
    yield torch.arange(rows)


def positions(config: PretrainedConfig) -> int | None:
    """The fewest positions that a part of a model has, as far as its config says."""
    names = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length")
    found = [v for p in parts(config) for n in names if isinstance(v := getattr(p, n, None), int) and v > 2]
    return min(found, default=None)
