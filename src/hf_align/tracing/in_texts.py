"""Texts with something else in them: a picture, a video, a sound, and all that a model takes, one behind the other."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_align.tracing.alternatives import first_that_runs
from hf_align.tracing.documented import OF_TEXT, announced_media
from hf_align.tracing.fields import parts
from hf_align.tracing.inputs import reader
from hf_align.tracing.mending import vectors_made, with_places
from hf_align.tracing.mode import Attempt, Mode

_OF_DECODER = 4
"""Tokens that a decoder reads beside a text with media in it."""


def try_media(model: PreTrainedModel, attempt: Attempt) -> list[Mode]:
    """Try a text with each kind of what else may stand in it, a picture, a video, a sound; the modes that there are."""
    ran = list[Mode | None]()
    for kind, found in itertools.groupby(announced_media(model), lambda found: found[0]):
        modes = (mode for _, token, given in found for mode in _announced(model, kind, token, given))
        ran.append(first_that_runs(model, modes, attempt))
    return [mode for mode in ran if mode is not None]


def attempt_with_text_for(model: PreTrainedModel, media: Mode, attempt: Attempt) -> Attempt:
    """Attempts of media of other sizes, in a text that has a place for each vector that the model makes of them."""
    kind, token = media.announced or ("", 0)
    texts = {name: value for name, value in media.example.arguments.items() if name in OF_TEXT}

    def with_text(sized: Mode) -> Exception | None:
        given = {name: value for name, value in sized.example.arguments.items() if name not in texts}
        count = vectors_made(model, kind, given)
        example = with_places(model, {**texts, **given}, {token: count}) if count else sized.example
        return attempt(replace(sized, example=example))

    return with_text


def with_marks(model: PreTrainedModel, media: Mode) -> Mode | None:
    """A text with media in it, and each token that a list in the config names, as what stands around a picture; None
    where there is no such list."""
    lists = (v for part in parts(model.config) for k, v in vars(part).items() if k.endswith("_token_ids"))
    marks = {token: 1 for each in lists if isinstance(each, (list, tuple)) for token in each if type(token) is int}
    if not marks or media.announced is None:
        return None
    _, token = media.announced
    places = {token: int((media.example.arguments["input_ids"] == token).sum()), **marks}
    example = with_places(model, media.example.arguments, places)
    return replace(media, name=f"{media.name} and marks around it", example=example)


def side_by_side(model: PreTrainedModel, media: Sequence[Mode]) -> Mode:
    """A text with several kinds of what may stand in it, one behind the other."""
    announced = [mode.announced for mode in media if mode.announced is not None]
    arguments = {name: value for mode in reversed(media) for name, value in mode.example.arguments.items()}
    places = {token: sum(int((mode.example.arguments["input_ids"] == token).sum()) for mode in media)
              for _, token in announced}  # fmt: skip
    name = f"input_ids with {' and '.join(kind for kind, _ in announced)}"
    return replace(media[0], name=name, example=with_places(model, arguments, places))


def _announced(model: PreTrainedModel, kind: str, token: int, given: Mapping[str, Tensor]) -> Iterator[Mode]:
    """Something else in a text, which holds a token for each vector that the model makes of it."""
    asked = inspect.signature(model.forward).parameters
    if not given.keys() <= asked.keys():
        return
    count = vectors_made(model, kind, given)
    texts = {"input_ids": torch.ones(1, 1).long()}
    if "decoder_input_ids" in asked:
        texts["decoder_input_ids"] = reader(model, 1, _OF_DECODER).ids(_OF_DECODER)
    marks = {n: torch.ones(1, 1).long() for n in ("mm_token_type_ids", "token_type_ids") if n in asked}
    mask = {"attention_mask": torch.ones(1, 1).long()} if "attention_mask" in asked else {}
    for extra in ({**mask, **marks}, mask, marks, {}) if count else ({**mask, **marks},):
        example = with_places(model, {**texts, **given, **extra}, {token: count or 1})
        yield Mode(f"input_ids with {kind}", example, sure=True, announced=(kind, token))
