"""The ways in which a model may be called besides its first call: one argument more, media, a step with a cache.

Which of them a model answers is found by trying. Tracing tries them without weights, the witness with those that are
stored. What an argument looks like is read off the documentation of `forward`, the config and what a call computes;
what a call lacks, off the error with which it ends (`mending.py`).
"""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import NoneType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from hf_align.tracing.alternatives import first_guess_that_runs, first_that_answers, first_that_runs
from hf_align.tracing.amounts import amounts, widths
from hf_align.tracing.asked import asks
from hf_align.tracing.documented import NOT_ASKED, OF_TEXT, announced_media, documented, documented_width
from hf_align.tracing.example import Example
from hf_align.tracing.fields import parts
from hf_align.tracing.in_texts import attempt_with_text_for, side_by_side, try_media, with_marks
from hf_align.tracing.inputs import reader
from hf_align.tracing.mode import Attempt, Mode, NothingNew, at_its_length, extent, extent_of, of_each_choice
from hf_align.tracing.other_sizes import try_grids, try_sizes
from hf_align.tracing.own_code import code_of
from hf_align.tracing.watched import is_said, scalars

_WIDTHS_OF_STATES = ("cross_attention_dim", "encoder_hidden_size", "cross_attention_hidden_size", "hidden_size",
                     "d_model", "n_embd")  # fmt: skip
"""Config fields that may say how wide the states of another encoder are; any width of a weight may be it."""
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "encoder_layers")
_HEADS = ("num_attention_heads", "n_head", "num_heads", "encoder_attention_heads")
"""Config fields that say how many layers there are, and heads in each; of a decoder, others come first."""
_PLAIN = (bool, int, float, str)
_MASKED = re.compile("(position|(?<=_)input)_ids$")


def try_ways(model: PreTrainedModel, base: Example, extents: Sequence[int], attempt: Attempt) -> None:
    """Try all ways to call a model besides its first call: with less than that is given, and with more.

    Args:
        base: the arguments of the first call.
        extents: the lengths of what that call computes, the most frequent first.
    """
    for fewer in with_less(model, base):
        error = attempt(at_its_length(Mode(fewer.said, fewer, sure=True)))
        if len(fewer.arguments) == len(base.arguments) - 1 and not isinstance(error, NothingNew | NoneType):
            _try_in_place(model, base, fewer, attempt)
    of_one_size = not try_sizes(model, base, extents, attempt, base.arguments)
    if base.tokens:
        attempt(Mode("a step with a cache", base, goes_on=True, sure=True))
    main, has_text, asked = base.said, "input_ids" in base.arguments, inspect.signature(model.forward).parameters
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
            try_sizes(model, ran.example, extents, attempt, [name])
        if of_one_size and _is_flag(asked[name]):  # what makes a table of places fit other pictures
            try_grids(_with(model, base, {name: not asked[name].default}), extents, attempt)
    for name in _not_given(model, base):
        for value in _in_words(model, base, name):
            attempt(Mode(f"{main} with {_said(name, value)}", _with(model, base, {name: value})))
    for ask in asks(model, base):
        first_that_answers(ask.modes(base), attempt)
    if has_text:
        found = try_media(model, attempt)
        for mode in found:
            in_text = attempt_with_text_for(model, mode, attempt)
            try_sizes(model, mode.example, extents, in_text, mode.example.arguments)
            _try_with_media(model, mode, attempt)
            if (marked := with_marks(model, mode)) is not None:
                attempt(marked)
        if len(found) > 1:
            attempt(side_by_side(model, found))


def _try_in_place(model: PreTrainedModel, base: Example, fewer: Example, attempt: Attempt) -> None:
    """Try a call that cannot do without an argument with another in place of that one: a second picture for a text."""
    for name in _not_given(model, base):
        for value in _like(name, base):
            given = _with(model, fewer, {name: value})
            attempt(Mode(given.said, given, sure=True))


def _not_given(model: PreTrainedModel, base: Example) -> list[str]:
    """The arguments that a call leaves out, but for those that only ask for more results."""
    asked = inspect.signature(model.forward).parameters
    return [name for name in asked if name not in base.arguments and not NOT_ASKED.search(name)]


def _in_words(model: PreTrainedModel, base: Example, name: str) -> Iterator[Any]:
    """Words and numbers for an argument, and others than the config has under its name."""
    yield from _other_than_in_config(model, name)
    parameter = inspect.signature(model.forward).parameters.get(name)
    if parameter is not None:
        yield from dict.fromkeys((*scalars(parameter, model, base), *amounts(parameter, model, base)))


def _other_than_in_config(model: PreTrainedModel, name: str) -> Iterator[Any]:
    """The numbers beside the one that a config has under the name of an argument, or lists of them: it is where a model
    finds what it is not given."""
    for held in (vars(part).get(name) for part in parts(model.config)):
        if type(held) is int:
            yield from (held + 1, held - 1)
        elif isinstance(held, (list, tuple)) and held and all(type(value) is int for value in held):
            yield from ([value + step for value in held] for step in (1, -1))


def _named_by_methods(model: PreTrainedModel) -> list[str]:
    """The arguments that `forward` takes without naming them and a method of the model names, with a value in the
    config."""
    named = inspect.signature(model.forward).parameters
    if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in named.values()):
        return []
    methods = [code for code in code_of(model) if code.co_varnames[:1] == ("self",) and code.co_name != "__init__"]
    taken = dict.fromkeys(
        n for code in methods for n in code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]
    )
    return [name for name in taken if name not in named and any(_other_than_in_config(model, name))]


def _try_with_media(model: PreTrainedModel, mode: Mode, attempt: Attempt) -> None:
    """Try a text with media in it and one flag, word or number more: some act on nothing but media."""
    asked = inspect.signature(model.forward).parameters
    for name in (*_not_given(model, mode.example), *_named_by_methods(model)):
        flags = [not asked[name].default] if name in asked and isinstance(asked[name].default, bool) else []
        for value in flags or _in_words(model, mode.example, name):
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
            masks[mask] = of_each_choice(torch.ones(extent_of(name, base), dtype=torch.long), base)
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


def _is_flag(parameter: inspect.Parameter) -> bool:
    return isinstance(parameter.default, bool) or is_said(parameter, bool)


def _arguments(
    model: PreTrainedModel, forward: Callable[..., Any], base: Example, extents: Sequence[int]
) -> Iterator[tuple[str, bool, Iterator[Tensor | bool]]]:
    """The optional arguments of a function besides what it is given, each with values that it may want, and whether
    their meaning is known."""
    for name, parameter in inspect.signature(forward).parameters.items():
        optional = parameter.default is None or isinstance(parameter.default, bool)
        if name in base.arguments or not optional or NOT_ASKED.search(name):
            continue
        if _is_flag(parameter):
            yield name, False, iter([not parameter.default])
        elif parameter.annotation is parameter.empty or "Tensor" in str(parameter.annotation):
            known = _known(model, name, base, extents)
            values = known if known is not None else _guesses(model, name, base, extents)
            yield name, known is not None, (of_each_choice(value, base) for value in values)


def numbers_beside(model: PreTrainedModel, base: Example) -> Iterator[tuple[str, Tensor]]:
    """Arguments of known meaning that hold a whole number for each token: masks, positions, types."""
    for name, sure, values in _arguments(model, model.forward, base, ()):
        value = next(values, None) if sure and not _is_text(name) else None
        each = of_each_choice(torch.ones(extent_of(name, base)), base)
        if isinstance(value, Tensor) and not value.is_floating_point() and value.shape == each.shape:
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
    yield from _like(name, base)
    yield first
    for size in dict.fromkeys((length, *extents)):
        yield (torch.arange(size) % 3 == 1).expand(rows, size).contiguous()
    yield read.floats(length)
    for size in dict.fromkeys((documented_width(model, name) or width, width)):
        yield read.floats(length, size)
    yield read.floats(width)
    yield read.floats(length, length)
    yield torch.arange(rows)
    yield from (torch.linspace(0.5, 1.5, size) for size in widths(model))  # a share of each unit


def _like(name: str, base: Example) -> Iterator[Tensor]:
    """Another of what is given already under the end of a name: `pixel_values` for `conditional_pixel_values`."""
    yield from (value.roll(1, 0) for given, value in base.arguments.items() if name.endswith(f"_{given}"))


def positions(config: PretrainedConfig) -> int | None:
    """The fewest positions that a part of a model has, as far as its config says."""
    names = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length")
    found = [v for p in parts(config) for n in names if isinstance(v := getattr(p, n, None), int) and v > 2]
    return min(found, default=None)
