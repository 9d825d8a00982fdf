"""What the documentation of `forward` says of its arguments: their shapes, in names that are those of a config."""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_align.tracing.example import Example
from hf_align.tracing.fields import parts
from hf_align.tracing.inputs import Reader, media, reader
from hf_align.tracing.mode import extent
from hf_align.tracing.tokens import announcing_tokens

FLAG = re.compile("^(output|return|use)_")
"""Arguments that turn something on or off."""
NOT_ASKED = re.compile(f"{FLAG.pattern}|_to_keep$|labels?$|loss")
"""Arguments that only ask for more results, or fewer."""
_DOCUMENTED = re.compile(r"^\s*(\w+) \((.*?) of shape `?\(([^)]*)\)", re.MULTILINE)
OF_TEXT = ("input_ids", "attention_mask")
_ANNOUNCES = re.compile("(.+)_token_(id|index)$")
_FRAMES = 4
"""Vectors of what stands in a text."""
_LAYOUT = 4
"""Numbers at most that say where something lies, or how large it is: more of them are places that are looked up."""


def _said(model: PreTrainedModel) -> dict[str, tuple[str, list[str]]]:
    """The type of each argument, and its dimensions."""
    found = _DOCUMENTED.finditer(inspect.getdoc(model.forward) or "")
    return {m[1]: (m[2], [dim.strip() for dim in m[3].split(",") if dim.strip()]) for m in found}


def documented_width(model: PreTrainedModel, name: str) -> int | None:
    """How wide the vectors are that an argument holds for each text, where the config tells."""
    _, dims = _said(model).get(name, ("", []))
    width = reader(model, 1, 1).number(dims[-1].removeprefix("config."), default=0) if len(dims) == 3 else 0
    return width or None


def announced_media(model: PreTrainedModel) -> Iterator[tuple[str, int, dict[str, Tensor]]]:
    """What a model of text takes besides, as `media`; also vectors of whatever kind its config has a token for."""
    yield from media(model)
    announcing = announcing_tokens(model.config).tolist()
    tokens = {m[1]: value for config in parts(model.config) for name, value in vars(config).items()
              if (m := _ANNOUNCES.match(name)) and value in announcing}  # fmt: skip
    for name in inspect.signature(model.forward).parameters:
        kind = max((kind for kind in tokens if name.startswith((f"{kind}_", f"{kind}s"))), key=len, default="")
        width = documented_width(model, name) if kind and not NOT_ASKED.search(name) else None
        if width:
            vectors = torch.zeros(1, _FRAMES, width)
            yield kind, tokens[kind], {name: vectors.to(_dtype(_said(model)[name][0], [vectors]))}


def documented(model: PreTrainedModel, name: str, example: Example) -> Iterator[Tensor]:
    """What the documentation of `forward` says of an argument: sizes that it names otherwise than the config does are
    looked for among those that are given."""
    if name not in (said := _said(model)):
        return
    kind, dims = said[name]
    read = reader(model, *extent(example))
    dtype = _dtype(kind, [t for n, t in example.arguments.items() if isinstance(t, Tensor) and name.endswith(f"_{n}")])
    others = [t for n, t in example.arguments.items() if isinstance(t, Tensor) and n not in OF_TEXT]
    sizes = sorted({size for t in others for size in t.shape}, reverse=True)
    pictures = [t for t in others if t.is_floating_point() and t.dim() > 3]
    choices = [_sizes(dim, read, sizes) for dim in dims]
    for shape in itertools.product(*choices):
        value = torch.ones(shape, dtype=dtype)
        if "size" in name and pictures and shape and shape[-1] == 2:
            value = torch.tensor(pictures[0].shape[-2:]).expand(shape).contiguous()
        if dtype == torch.long and len(shape) == 2 and shape[-1] > _LAYOUT and not name.endswith(("mask", "ids")):
            value = torch.arange(shape[-1]).expand(shape).contiguous()
        yield value
        if dtype == torch.bool and shape:
            yield every_second(shape)


def every_second(shape: Sequence[int]) -> Tensor:
    """Truth values of this shape, every second one along the last axis true."""
    return (torch.arange(shape[-1]) % 2 == 0).expand(*shape).contiguous()


def _dtype(kind: str, alike: Sequence[Tensor]) -> torch.dtype:
    """What a documented type holds; where it does not tell, what others of this name hold."""
    kinds = {"Bool": torch.bool, "Float": torch.float32, "Long": torch.long}
    other = alike[0].dtype if alike else torch.long
    return next((dtype for word, dtype in kinds.items() if word in kind), other)


def _sizes(dim: str, read: Reader, others: Sequence[int]) -> list[int]:
    """What a documented dimension may be."""
    if dim.isdigit():
        return [int(dim)]
    if dim in ("batch_size", "batch", "bsz"):
        return [read.batch]
    if dim in ("sequence_length", "seq_length", "seq_len"):
        return [read.length]
    fields = (getattr(part, dim, None) for part in parts(read.config))
    if numbers := dict.fromkeys(n for n in fields if isinstance(n, int) and n > 0):
        return [*numbers]
    return [1, *others] if "num" in dim else [*others, 1]
