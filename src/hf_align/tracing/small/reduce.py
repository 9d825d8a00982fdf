"""A copy small enough to count null directions on, found by trying: sizes are lowered while the model still runs.

`shrink` knows what most fields are for. Where it leaves large sizes, or fields that do not go together, this is delta
debugging of the config: first what of the tiny copy goes together with the rest, then every size that is still large,
fields of one value together, then one by one. A trial builds the model and runs it on zeros, a few hundredths of a
second. The order is fixed and so is the number of trials: the same config gives the same copy.

What makes an architecture itself is kept: depth, two heads, fewer key heads than query heads, fewer experts chosen
than there are, and no size of one, at which more is symmetric than in the original.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from transformers import PretrainedConfig

from hf_align.tracing.build import build_without_weights, inventory
from hf_align.tracing.small.answers import Media, media_answered
from hf_align.tracing.small.config_sizes import (
    STAGES,
    Fields,
    Path,
    differences,
    least_size,
    lists_in,
    name_of,
    numbers_in,
    sizes_in,
    smaller_sizes,
    with_as_many_patches,
    with_changes,
    with_the_width_given,
)
from hf_align.tracing.small.field_roles import ROOMY, TINY
from hf_align.tracing.small.kinds import Depth, Layers, depth_with_all_kinds, layers_of
from hf_align.tracing.small.search import LARGEST, MENDED, Search
from hf_align.tracing.small.shrink import (
    declared_fields,
    handing_on_all_stages,
    shallow_fields,
    shallow_parts_fields,
    small_fields,
    with_all_stages,
    with_arguments_of_parts,
    with_fields,
)

WANTED = 2500
"""Parameters up to which the null directions are counted in seconds."""
_WITH_MEDIA = 100_000
"""Parameters that a copy may have because a smaller one answers no text with a picture in it."""
_SECONDS = 40.0
"""Of processor time that a search may take."""
_SLOW = 5_000_000
"""Parameters from which on all sizes are divided by one number first."""
_LARGE = 16
"""The least size that is divided."""
_RATIOS = (8, 6, 4, 3, 2)
"""What sizes are divided by, the largest first."""
_RATIO = re.compile(r"ratio|expan|mult|ffn_factor")
_MULTIPLIER = re.compile(r"multiplier|coefficient")


class _Starts(NamedTuple):
    """What is tried first: tiny sizes, less tiny ones, all that small sizes may take, and its own with few layers."""

    tiny: Fields
    roomy: Fields
    small: tuple[Fields, ...]
    as_large: tuple[Fields, ...]


def reduced(
    config: PretrainedConfig, layers: int = 2, *, wanted: int = WANTED, example: int | None = None
) -> PretrainedConfig | None:
    """A copy with at most the wanted number of parameters, or with as few as can be reached; None if nothing runs. It
    answers texts with all kinds of media that its model does, if that takes not many more.

    Args:
        config: any config; its tiny copy is returned as it is if it runs and is small enough.
        layers: of the copy, if it needs no more for every kind of layer.
        example: the number among `inputs.examples` that the copy must run with.
    """
    known = layers_of(config)
    starts = _starts(config, known, layers)
    search = _that_runs(Search(config, known, wanted, example), starts)
    if search is None:
        return None
    larger = (search.fields, starts.tiny, starts.roomy, *starts.as_large)
    found = _answering_media(search, larger, starts.tiny) or search
    return with_fields(config, found.fields)


def running_copy(config: PretrainedConfig, wanted: int, example: int) -> PretrainedConfig | None:
    """As `reduced`, with whichever kinds of media."""
    known = layers_of(config)
    search = _that_runs(Search(config, known, wanted, example), _starts(config, known, 2))
    return None if search is None else with_fields(config, search.fields)


def _starts(config: PretrainedConfig, known: Layers, layers: int) -> _Starts:
    depth = depth_with_all_kinds(config, known, layers) or Depth(layers)
    tiny, roomy = (small_fields(config, depth.layers, depth.of(sizes)) for sizes in (TINY, ROOMY))
    small = (
        *with_arguments_of_parts(tiny, TINY),
        *with_arguments_of_parts(roomy, ROOMY),
        tiny,
        roomy,
        declared_fields(config, tiny),
        declared_fields(config, roomy),
        with_all_stages(config, tiny),
        with_all_stages(config, roomy),
    )
    as_large = (
        shallow_parts_fields(config, layers),
        shallow_fields(config, layers),
        *([whole] if (whole := handing_on_all_stages(config.to_dict())) != config.to_dict() else []),
    )
    return _Starts(tiny, roomy, small, as_large)


def _that_runs(search: Search, starts: _Starts) -> Search | None:
    """The search, at a copy that runs and is as small as it gets; None where none does."""
    small, as_large = starts.small, starts.as_large
    if not any(map(search.attempt, small)):
        # some models take no more than one text or picture at a time
        alone = Search(search.config, search.layers, search.wanted, search.example, rows=1)
        if any(map(alone.attempt, small)):
            search = alone
        elif not (
            any(map(search.attempt, as_large))
            or any(map(search.attempt_mended, (*small, *as_large)))
            or any(search.attempt(with_changes(fields, _divided(fields, ratio)))
                   for ratio in reversed(_RATIOS) for fields in as_large)
        ):  # fmt: skip
            return None
    _make_small(search, starts.tiny)
    return search


def _make_small(search: Search, target: Fields) -> None:
    """Lower what runs until it is small, time is up, or nothing helps."""
    search.until = time.process_time() + _SECONDS
    if search.parameters is not None and search.parameters > _SLOW:
        _scale(search)
    _towards(search, target)
    _lower_images(search)
    _lower(search)


def _answering_media(search: Search, larger: Iterable[Fields], target: Fields) -> Search | None:
    """A copy that answers texts with more kinds of media in them than the one that was found, as small as it gets."""
    known = _answered(search.config, search.fields)
    better = list[tuple[Media, Fields]]()
    most = _SLOW if known.answered else LARGEST
    for media, fields in _with_widths_mended(search.config, larger, most) if known.failures else ():
        if len(media.answered) > len(known.answered):
            better.append((media, fields))
            if not media.failures:
                break
    for media, fields in sorted(better, key=lambda found: -len(found[0].answered)):
        copy = Search(
            search.config,
            search.layers,
            search.wanted,
            search.example,
            search.rows,
            media=media.answered,
            tries=media.tried,
        )
        if copy.attempt(fields):
            _make_small(copy, target)
        if copy.parameters is not None and copy.parameters <= _WITH_MEDIA:
            return copy
    return None


def _with_widths_mended(
    config: PretrainedConfig, copies: Iterable[Fields], most: int
) -> Iterator[tuple[Media, Fields]]:
    """Copies, and behind each the same with a width mended at which a text with media in it fails, and so on; and what
    each answers.

    Args:
        most: parameters of a copy that is asked at all; only those that are not slow are mended.
    """

    def asked(fields: Fields) -> tuple[Media, Fields, float]:
        parameters = _parameters(config, fields)
        return _answered(config, fields) if parameters <= most else Media(), fields, parameters

    for fields in copies:
        waiting, mended = [asked(fields)], set[str]()
        yield waiting[0][:2]
        while waiting and len(mended) < MENDED:
            media, known, parameters = waiting.pop(0)
            for said in media.failures if parameters <= _SLOW else ():
                for changed in with_the_width_given(known, said) if said not in mended else ():
                    mended.add(said)
                    waiting.append(asked(changed))
                    yield waiting[-1][:2]


def _parameters(config: PretrainedConfig, fields: Fields) -> float:
    try:
        shapes = inventory(build_without_weights(with_fields(config, fields))).shapes
    except Exception:  # sizes that do not go together fail in their own way
        return math.inf
    return sum(torch.Size(shape).numel() for shape in shapes.values())


def _answered(config: PretrainedConfig, fields: Fields) -> Media:
    try:
        return media_answered(build_without_weights(with_fields(config, fields)))
    except Exception:  # sizes that do not go together fail in their own way
        return Media()


def _towards(search: Search, target: Fields) -> None:
    """Take over from the target what goes together with the rest."""
    for _ in range(2):
        _adopt(search, list(differences(search.fields, target)))


def _adopt(search: Search, changes: list[tuple[Path, Any]]) -> None:
    if not changes or search.done or search.attempt(with_changes(search.fields, dict(changes)), allow_equal=True):
        return
    if len(changes) > 1:
        _adopt(search, changes[: len(changes) // 2])
        _adopt(search, changes[len(changes) // 2 :])


def _lower_images(search: Search) -> None:
    """Fewer positions save no parameter, but most of the time of the count."""
    sides = [
        path for path, value in numbers_in(search.fields) if name_of(path) in ("image_size", "img_size") and value > 8
    ]
    for side in (8, 16, 32) if sides else ():
        if search.attempt(with_changes(search.fields, dict.fromkeys(sides, side)), allow_equal=True):
            break


def _lower(search: Search) -> None:
    """Lower sizes until there are few enough parameters or nothing helps."""
    for tight in (False, True):
        before = None
        while not search.done and before != search.parameters:
            before = search.parameters
            _one_by_one(search, tight, "vocab")
            _one_by_one(search, tight, "position")
            _scale(search)
            _by_value(search, tight)
            _one_by_one(search, tight)
            _lower_ratios(search)
            _shorten(search)


def _scale(search: Search) -> None:
    """All large sizes divided by one number: what is a sum or a product of others stays so."""
    for ratio in _RATIOS:
        while _attempt_any(search, [_divided(search.fields, ratio)]):
            pass


def _divided(fields: Fields, ratio: int) -> dict[Path, Any]:
    """The large sizes that can be divided by a number, and what they are then."""
    return {path: value // ratio for path, value in sizes_in(fields)
            if value >= _LARGE and value % ratio == 0 and value // ratio >= least_size(path, tight=False)}  # fmt: skip


def _by_value(search: Search, tight: bool) -> None:
    """Fields of one value are often one size."""
    for value in sorted({v for _, v in sizes_in(search.fields)}, reverse=True):
        group = [path for path, v in sizes_in(search.fields) if v == value and v > least_size(path, tight)]
        if len(group) > 1:
            ladder = smaller_sizes(value, min(least_size(p, tight) for p in group))
            _attempt_any(search, [{p: max(n, least_size(p, tight)) for p in group} for n in ladder])


def _one_by_one(search: Search, tight: bool, word: str = "") -> None:
    for path, value in sorted(sizes_in(search.fields), key=lambda x: -x[1]):
        if word in name_of(path) and value > least_size(path, tight):
            steps = smaller_sizes(value, least_size(path, tight))
            _attempt_any(search, [with_as_many_patches(search.fields, path, n) for n in steps])


def _lower_ratios(search: Search) -> None:
    """What multiplies a width, or all of them."""
    for path, value in numbers_in(search.fields):
        if _MULTIPLIER.search(name_of(path)) and isinstance(value, float) and value > 0.01:
            _attempt_any(search, [{path: part * value} for part in (0.01, 0.05, 0.125, 0.25, 0.5)])
        if _RATIO.search(name_of(path)) and not isinstance(value, bool) and value > 2:
            _attempt_any(search, [{path: type(value)(1.5)}, {path: type(value)(2)}])


def _shorten(search: Search) -> None:
    """Lists of one length have an entry for each stage: keep the first stages or the last, and say how many."""
    lengths = {len(value) for _, value in lists_in(search.fields)}
    for length in sorted(n for n in lengths if n > 2):
        for kept in range(2, length):
            lists = [(p, v) for p, v in lists_in(search.fields) if len(v) == length]
            first: dict[Path, Any] = {p: v[:kept] for p, v in lists}
            last: dict[Path, Any] = {p: v[-kept:] for p, v in lists}
            counts: dict[Path, Any] = {
                p: v - length + kept
                for p, v in numbers_in(search.fields)
                if v in (length, length - 1) and isinstance(p[-1], str) and STAGES.search(p[-1])
            }
            all_counts = {p: n for p, n in counts.items() if n == kept}
            if _attempt_any(search, [first | all_counts, first | counts, first, last | all_counts, last]):
                break


def _attempt_any(search: Search, changes: list[dict[Path, Any]]) -> bool:
    return any(change and search.attempt(with_changes(search.fields, change)) for change in changes)
