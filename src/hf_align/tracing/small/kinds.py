"""The kinds of layers that a model has, whatever their sizes: a small copy shows nothing of a kind that it lacks.

Layers of one kind have the same modules and weights, and the same settings where these are words, switches or the sign
of a number: whether there is a window, not how wide it is. What numbers the layers is no difference, nor is what gives
what it is given.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from hf_align.tracing.build import build_without_weights
from hf_align.tracing.layers import configs_of, counters, signature
from hf_align.tracing.small.field_roles import ROOMY, TINY, Sizes
from hf_align.tracing.small.shrink import depth_of, nested, shrink, small_fields, with_fields
from hf_align.tracing.state import left_as_found

Kinds = Mapping[str, int]
"""How many kinds of modules a list holds, by its path with a star for each number."""
_DEEPEST = 8
"""Layers of a copy that is still counted on."""
_GIVEN = torch.linspace(-1, 1, 24).reshape(2, 3, 4)
_NUMBER = re.compile(r"\d+")
_PLACE = re.compile(r"(?<![^.])\d+(?![^.])")


@dataclass(frozen=True)
class Layers:
    """The layers of a model, beside which those of its copies are held.

    Attributes:
        kinds: that it has.
        told_by: fields of its config that say of each layer what it is.
        numbered_by: attributes that number the layers of a list, by the path of each list; paths have stars.
    """

    kinds: Kinds
    told_by: frozenset[str]
    numbered_by: Mapping[str, frozenset[tuple[str, str]]]

    @staticmethod
    def of(model: PreTrainedModel) -> Layers:
        numbered = {path: frozenset.intersection(*(_numbers(layers) for layers in lists))
                    for path, lists in _lists(model).items()}  # fmt: skip
        told_by = _fields_that_tell(model.config)
        return Layers(_kinds_in_lists(model, told_by, numbered), told_by, numbered)

    def kinds_of(self, copy: PreTrainedModel) -> Kinds:
        return _kinds_in_lists(copy, self.told_by, self.numbered_by)

    def lacking(self, copy: PreTrainedModel) -> dict[str, tuple[int, int]]:
        """How many kinds a copy has where the model has more of them: in the copy, and in the model."""
        found = self.kinds_of(copy)
        return {path: (found.get(path, 0), kinds) for path, kinds in self.kinds.items() if found.get(path, 0) < kinds}


class Depth(NamedTuple):
    """How deep a copy is.

    Attributes:
        layers: of each part.
        blocks: in each stage of a part that has stages.
        kinds_come_soon: a layer of another kind comes as soon as it can; else where it comes in the model.
    """

    layers: int
    blocks: int = 1
    kinds_come_soon: bool = True

    def of(self, sizes: Sizes) -> Sizes:
        """Sizes of a copy that is so deep."""
        return replace(sizes, blocks=self.blocks, kinds_come_soon=self.kinds_come_soon)


def layers_of(config: PretrainedConfig) -> Layers:
    """Those of the model; nothing is known of one that cannot be built, or is too large to."""
    try:
        return Layers.of(build_without_weights(config))
    except Exception:  # each class refuses what does not go together in its own way
        return Layers({}, frozenset(), {})


def depth_with_all_kinds(config: PretrainedConfig, whole: Layers, layers: int = 2) -> Depth | None:
    """The least depth, of at least so many layers, at which a small copy has every kind that the model has; None if it
    would be deeper than what is counted on."""
    tried = list[Any]()
    for choice in product(range(layers, _DEEPEST + 1), (1, 2), (True, False)):
        depth = Depth(*choice)
        for sizes in (TINY, ROOMY):
            fields = small_fields(config, depth.layers, depth.of(sizes))
            if fields in tried:
                break
            tried.append(fields)
            try:
                copy = build_without_weights(with_fields(config, fields))
            except Exception:  # sizes that do not go together fail in their own way
                continue
            if not whole.lacking(copy):
                return depth
            break
    return None


def with_all_kinds(config: PretrainedConfig, whole: Layers) -> PretrainedConfig:
    """The config with tiny sizes and every kind of layer, as deep as the model if need be.

    Args:
        whole: the layers of the model.
    """
    depth = depth_with_all_kinds(config, whole) or Depth(depth_of(config), kinds_come_soon=False)
    return shrink(config, depth.layers, depth.of(TINY))


def _fields_that_tell(config: PretrainedConfig) -> frozenset[str]:
    """The fields that hold a word or a switch for each layer, some of them alike."""
    return frozenset(
        key for group in nested(config.to_dict()) for key, value in group.items()
        if isinstance(value, (list, tuple)) and all(isinstance(v, (str, bool)) for v in value)
        and len(set(value)) < len(value)
    )  # fmt: skip


def _lists(model: PreTrainedModel) -> Mapping[str, list[nn.ModuleList]]:
    found = defaultdict[str, list[nn.ModuleList]](list)
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList):
            found[_PLACE.sub("*", path)].append(module)
    return found


def _numbers(layers: nn.ModuleList) -> frozenset[tuple[str, str]]:
    return frozenset((_PLACE.sub("*", path), name) for path, name in counters(layers))


def _kinds_in_lists(
    model: PreTrainedModel, told_by: frozenset[str], numbered_by: Mapping[str, frozenset[tuple[str, str]]]
) -> Kinds:
    fields = [v for config in configs_of(model) for k, v in vars(config).items() if k in told_by]
    return {
        path: len({kind for layers in lists for kind in _kinds(layers, fields, numbered_by.get(path, frozenset()))})
        for path, lists in _lists(model).items()
    }


def _kinds(
    layers: nn.ModuleList, fields: Sequence[Any], numbers: frozenset[tuple[str, str]]
) -> Iterator[tuple[Hashable, ...]]:
    words = [entries for entries in fields if len(entries or ()) == len(layers)]
    for i, layer in enumerate(layers):
        modules = () if layer is None else layer.named_modules()
        idle = {path for path, module in modules if _hands_on(module)}
        settings = ((_PLACE.sub("*", path), *map(_without_size, entry))
                    for path, *entry in signature(layer, {}) if path not in idle)  # fmt: skip
        yield frozenset(s for s in settings if s[:2] not in numbers), *(entries[i] for entries in words)


def _hands_on(module: nn.Module) -> bool:
    """Whether a module gives what it is given, as dropout does when nothing is trained."""
    if any(True for _ in module.children()) or module.state_dict():
        return False
    try:
        with left_as_found(module):
            return torch.equal(module(_GIVEN), _GIVEN)
    except Exception:  # it takes something else
        return False


def _without_size(value: Hashable) -> Hashable:
    if isinstance(value, tuple):
        return bool(value)
    if isinstance(value, str):
        return _NUMBER.sub("*", value)
    return (value > 0) - (value < 0) if type(value) is int else value
