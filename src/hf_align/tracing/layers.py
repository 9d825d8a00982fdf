"""The layers that a model repeats, and the model with only some of them.

Nothing goes by the name of a class or a field. A module list is a stack of layers; two of its layers are of one kind
if their modules, weights and settings agree, and so do their entries in every list of the config that has one for each
layer. Shortened, the model is what its class would have built from a config with fewer layers.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers import PretrainedConfig, PreTrainedModel

from hf_align.errors import IncompatibleModels

_EACH = 2
"""Layers of every kind that stay: what the first hands to the second shows as well."""
Place = tuple[str, str]
"""A module's path within its layer, and one of its attributes."""
Around = tuple[int | None, int, int | None]
"""The kinds of the layer before, of a layer, and of the one after."""


@dataclass(frozen=True)
class Stack:
    """A module list in which layers repeat.

    Attributes:
        path: of the list in the model.
        chosen: the layers that stand for all, in order.
        source: for each layer, the first of the chosen that it repeats.
    """

    path: str
    chosen: tuple[int, ...]
    source: tuple[int, ...]

    @property
    def depth(self) -> int:
        return len(self.source)

    def layer(self, name: str) -> tuple[int, str] | None:
        """The layer that a dotted name lies in and the name within it; None outside of the stack."""
        return layer_in(self.path, name)


def layer_in(path: str, name: str) -> tuple[int, str] | None:
    """The number of the layer of a module list that a dotted name lies in, and the name within it; None outside of the
    list."""
    if not name.startswith(f"{path}."):
        return None
    index, _, rest = name[len(path) + 1 :].partition(".")
    return (int(index), rest) if index.isdigit() else None


def find_stacks(model: PreTrainedModel) -> tuple[Stack, ...]:
    """The module lists in which layers repeat.

    Lists inside of layers stay whole (an expert is no layer), and so do lists whose layers share weights with others.
    """
    stacks: list[Stack] = []
    lists: list[str] = []
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not any(path.startswith(f"{outer}.") for outer in lists):
            lists.append(path)
            stack = _stack(path, _kinds(module, model))
            if len(stack.chosen) < stack.depth and not _shares_weights(stack, model):
                stacks.append(stack)
    return tuple(stacks)


def shorten(model: PreTrainedModel, stacks: tuple[Stack, ...]) -> None:
    """Leave only the chosen layers, numbered anew, in the model and in the configs that its modules read.

    Raises:
        IncompatibleModels: stacks of one depth, which must be cut differently, cannot be told apart in the config.
    """
    cuts: dict[int, tuple[int, ...]] = {}
    for stack in stacks:
        if cuts.setdefault(stack.depth, stack.chosen) != stack.chosen:
            raise IncompatibleModels(f"two stacks of {stack.depth} layers repeat in different ways")
    for config in configs_of(model):
        for key, entries in _lists(config):
            if len(entries) in cuts:  # past the setters, which would check the number against other fields
                vars(config)[key] = type(entries)(entries[i] for i in cuts[len(entries)])
    for stack in stacks:
        layers = model.get_submodule(stack.path)
        assert isinstance(layers, nn.ModuleList)
        for place, offset in counters(layers).items():
            for position, i in enumerate(stack.chosen):
                _renumber(layers[i], place, position + offset)
        for i in sorted(set(range(stack.depth)) - set(stack.chosen), reverse=True):
            del layers[i]


def _stack(path: str, kinds: tuple[int, ...]) -> Stack:
    """Two layers of each kind *and neighbourhood*: what follows a layer decides whether its last norm can be folded."""
    around: list[Around] = list(zip([None, *kinds], kinds, [*kinds[1:], None], strict=False))
    chosen = _contracted(kinds, around)
    first = {around[i]: i for i in reversed(chosen)}
    return Stack(path, chosen, tuple(first[a] for a in around))


def _contracted(kinds: tuple[int, ...], around: list[Around]) -> tuple[int, ...]:
    """Leave out stretches of layers, the longest first, so that all that stay keep their neighbourhood, and two of
    each stay."""
    chosen = list(range(len(kinds)))
    left = Counter(around)
    while True:
        for start, stop in _stretches(chosen, kinds):
            gone = Counter(around[i] for i in chosen[start:stop])
            if all(left[a] - n >= _EACH for a, n in gone.items()):
                break
        else:
            return tuple(chosen)
        del chosen[start:stop]
        left -= gone


def _stretches(chosen: list[int], kinds: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """What can go without giving a layer that stays a neighbour of another kind; the longest and last first."""
    for size in range(len(chosen) - 2, 0, -1):
        for start in range(len(chosen) - size - 1, 0, -1):
            before, first, last, after = (kinds[chosen[i]] for i in (start - 1, start, start + size - 1, start + size))
            if first == after and before == last:
                yield start, start + size


def _kinds(layers: nn.ModuleList, model: PreTrainedModel) -> tuple[int, ...]:
    numbers = counters(layers)
    entries = [e for config in configs_of(model) for _, e in _lists(config) if len(e) == len(layers)]
    first: dict[Hashable, int] = {}
    kinds: list[int] = []
    for i, layer in enumerate(layers):
        kind = (frozenset(signature(layer, numbers)), tuple(_plain(e[i]) for e in entries))
        kinds.append(first.setdefault(kind, i))
    return tuple(kinds)


def signature(layer: nn.Module | None, numbers: Mapping[Place, int]) -> Iterator[tuple[Any, ...]]:
    """Everything about a layer that may change what it computes, but for its weights and its number; nothing of a place
    in a list that is left empty."""
    for path, module in () if layer is None else layer.named_modules():
        yield path, type(module)
        for name, weight in module._parameters.items():
            yield path, name, None if weight is None else tuple(weight.shape)
        for name, buffer in module._buffers.items():
            yield path, name, None if buffer is None else _digest(buffer)
        for name, value in _attributes(module):
            if (path, name) not in numbers:
                yield path, name, _plain(value)


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    return ((name, value) for name, value in vars(module).items() if not name.startswith("_"))


def _plain(value: Any) -> Hashable:
    """A setting, as far as it bears on symmetries: of a real number only the sign (rates, factors)."""
    if isinstance(value, float):
        return (value > 0) - (value < 0)
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, (list, tuple)):
        return tuple(_plain(v) for v in value)
    return getattr(value, "__qualname__", type(value).__qualname__)


def _digest(buffer: Tensor) -> Hashable:
    """Buffers are tables that the model computed for itself: compared by value, where that is not computed from
    weights."""
    if buffer.device.type == "meta" or isinstance(buffer, FakeTensor):
        return tuple(buffer.shape)
    return tuple(buffer.shape), hashlib.sha256(buffer.detach().contiguous().flatten().numpy().tobytes()).hexdigest()


def kinds_of_layers(path: str, models: Sequence[PreTrainedModel]) -> list[list[Hashable]]:
    """What tells the layers of a list from one another, for each of some models that differ in how many they have.

    The last model has at least two; what numbers the layers there is no difference.
    """
    lists = [module for model in models if isinstance(module := model.get_submodule(path), nn.ModuleList)]
    numbers = counters(lists[-1])
    entries = [{k: e for config in configs_of(model) for k, e in _lists(config) if len(e) == len(layers)}
               for model, layers in zip(models, lists, strict=True)]  # fmt: skip
    common = set.intersection(*(set(each) for each in entries))
    return [
        [(frozenset(signature(layer, numbers)), frozenset((k, _plain(each[k][i])) for k in common))
         for i, layer in enumerate(layers)]
        for layers, each in zip(lists, entries, strict=True)
    ]  # fmt: skip


def counters(layers: nn.ModuleList) -> dict[Place, int]:
    """Attributes that number the layers, with where they start."""
    found: dict[Place, set[int]] = defaultdict(set)
    for i, layer in enumerate(layers):
        for path, module in () if layer is None else layer.named_modules():
            for name, value in _attributes(module):
                if isinstance(value, int) and not isinstance(value, bool):
                    found[path, name].add(value - i)
    return {place: next(iter(starts)) for place, starts in found.items() if len(starts) == 1}


def _renumber(layer: nn.Module | None, place: Place, number: int) -> None:
    path, name = place
    modules = {} if layer is None else dict(layer.named_modules())
    if path in modules and name in vars(modules[path]):
        setattr(modules[path], name, number)


def _shares_weights(stack: Stack, model: PreTrainedModel) -> bool:
    owners: dict[int, set[int | None]] = defaultdict(set)
    for name, weight in model.named_parameters(remove_duplicate=False):
        found = stack.layer(name)
        owners[id(weight)].add(found[0] if found else None)
    return any(len(layers) > 1 for layers in owners.values())


def configs_of(model: PreTrainedModel) -> list[PretrainedConfig]:
    """Every config that a module holds, once, with the configs inside."""
    found: dict[int, PretrainedConfig] = {}

    def visit(value: Any) -> None:
        if isinstance(value, PretrainedConfig) and id(value) not in found:
            found[id(value)] = value
            for inner in vars(value).values():
                visit(inner)

    for module in model.modules():
        for value in vars(module).values():
            visit(value)
    return list(found.values())


def _lists(config: PretrainedConfig) -> Iterator[tuple[str, list[Any] | tuple[Any, ...]]]:
    """The lists of a config, but for those that only count."""
    for key, value in list(vars(config).items()):
        if isinstance(value, (list, tuple)) and list(value) != list(range(len(value))):
            yield key, value
