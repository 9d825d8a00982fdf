"""What each layer of a stack runs: its ops with their arguments and constants, as one call shows it.

Two layers repeat only if they run the same code with the same numbers. Whether they do is read off the call itself. Ops
that the model runs between two layers belong to the layer before.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from torch import Tensor, fx
from torch.utils.weak import WeakIdKeyDictionary

from hf_align.tracing.layers import Stack, layer_in
from hf_align.tracing.nested import mapped
from hf_align.tracing.program import Program

Code = tuple[Hashable, ...]
Layer = tuple[str, int]
"""The path of a stack, and the number of one of its layers."""
_DIGESTS = WeakIdKeyDictionary()
"""Of tensors, with the version of each."""


def code_of_layers(program: Program, paths: Sequence[str]) -> Mapping[Layer, Code]:
    """The ops of every layer in order, in terms that do not depend on the number of the layer.

    Args:
        paths: of the stacks.
    """
    depth = {p: 1 + max((at[0] for n in program.shapes if (at := layer_in(p, n))), default=0) for p in paths}
    reader = _Reader(program, depth)
    current: Layer | None = None
    for node in program.graph.nodes:
        if node.op == "call_function" and node not in program.constants:
            current = _layer_of(node, paths) or current
            reader.add(node, current)
    return {layer: tuple(code) for layer, code in reader.code.items() if layer is not None}


def layers_that_differ(full: Program, short: Program, stacks: Sequence[Stack]) -> list[str]:
    """The layers of a model that do not run what stands for them in the shortened model, by their paths.

    Args:
        full, short: the same call of both models.
    """
    paths = [stack.path for stack in stacks]
    whole, known = code_of_layers(full, paths), code_of_layers(short, paths)
    return [
        f"{stack.path}.{number}"
        for stack in stacks
        for number, source in enumerate(stack.source)
        if whole.get((stack.path, number)) != known.get((stack.path, stack.chosen.index(source)))
    ]


class _Reader:
    """Names every value by the layer and the place at which it is computed."""

    def __init__(self, program: Program, depth: Mapping[str, int]) -> None:
        self.program = program
        self.depth = depth
        self.code: dict[Layer | None, list[Hashable]] = defaultdict(list)
        self.place: dict[fx.Node, tuple[Layer | None, int]] = {}

    def add(self, node: fx.Node, layer: Layer | None) -> None:
        self.place[node] = layer, len(self.code[layer])
        arguments = mapped(fx.Node, lambda a: self._named(a, layer), (node.args, node.kwargs))
        self.code[layer].append((str(node.target), repr(arguments)))

    def _named(self, argument: fx.Node, layer: Layer | None) -> Any:
        if argument in self.program.parameters:
            name = self.program.parameters[argument]
            own = f"{layer[0]}.{layer[1]}." if layer else None
            return name.removeprefix(own) if own and name.startswith(own) else f"/{name}"
        if argument in self.program.constants:
            return digest(self.program.constants[argument])
        if argument not in self.place:
            return self.program.inputs.get(argument)
        origin, number = self.place[argument]
        if layer is None or origin is None or origin[0] != layer[0]:
            return origin and origin[0], number
        if origin[1] > layer[1]:  # by a call that went through all layers before: told from the last one
            return f"{origin[1] - self.depth[layer[0]]} from the end", number
        if origin[1] == 0 and layer[1] > 1:  # what the first layer makes for all
            return "the first", number
        return layer[1] - origin[1], number


def _layer_of(node: fx.Node, paths: Sequence[str]) -> Layer | None:
    modules = [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
    return next(((path, at[0]) for path in paths for module in modules if (at := layer_in(path, module))), None)


def digest(value: Any) -> Hashable:
    """The same for constants of one type and shape that are equal bit by bit, and for no others; of what shows one
    entry everywhere only that is looked at, and it is told from what holds it many times."""
    if not isinstance(value, Tensor):
        return repr(value)
    version, known = _DIGESTS.get(value, (-1, None))
    if version != value._version:  # layers share their constants
        shown = value[(slice(1),) * value.dim()] if value.dim() and not any(value.stride()) else value
        content = shown.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
        known = *_kind(value), *_kind(shown), hashlib.sha256(content.numpy().tobytes()).hexdigest()
        _DIGESTS[value] = value._version, known
    return known


def _kind(value: Tensor) -> tuple[str, tuple[int, ...]]:
    return str(value.dtype), tuple(value.shape)
