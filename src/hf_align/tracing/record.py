"""One forward pass written down as it runs, where torch.export cannot say beforehand what it will do.

Weights and free arguments are fake: they have shapes but no values. Everything else is real, so that lengths, grids
and masks may decide shapes and branches, as they do in the modelling code. An op is written down if it reads something
fake; the others just run, and what they give is a constant. A branch that asks for the value of something fake raises:
nothing that depends on weights or inputs is ever taken for granted.
"""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx, nn
from torch._C._functorch import is_batchedtensor
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode, PythonKeyTracer
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

ONLY_SHAPES = frozenset(("zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full",
                         "new_empty", "rand_like", "randn_like"))  # fmt: skip
"""Ops that read nothing of a tensor but its shape and kind; noise is drawn once."""

_INDEXING = frozenset(("index", "index_put", "index_put_"))


def record(
    model: nn.Module, arguments: Mapping[str, Tensor], weights: Collection[str], free: Sequence[str]
) -> fx.GraphModule:
    """The graph of `model(**arguments)`: placeholders are the free arguments, by name, attributes the weights, by name.

    Args:
        arguments: by name.
        weights: the parameters and buffers that have no value.
        free: the arguments that have no value.

    Raises:
        Exception: whatever the forward pass raises, also where it asks for the value of what has none.
    """
    mixed: set[int] = set()
    while True:
        recorder = _Recorder(mixed)
        try:
            graph = recorder.run(model, arguments, weights, free)
        except Exception:
            if recorder.mixed == mixed:
                raise
        else:
            if recorder.mixed == mixed:
                return graph
        mixed = recorder.mixed


class _Recorder(ProxyTorchDispatchMode):
    """Sees every op before torch takes it apart: layer_norm, linear and softmax stay whole.

    A tensor that is born real may be written to later with what is fake. By then it is too late to write it down, so
    its birth is noted, and the pass is run again.

    Attributes:
        mixed: the calls, by number, that such tensors are born in.
    """

    def __init__(self, mixed: set[int]) -> None:
        self.writer = PythonKeyTracer()
        super().__init__(self.writer, "real", pre_dispatch=True)
        self.writer.root = nn.Module()
        self.writer.graph = fx.Graph()
        self.writer.record_stack_traces = True
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.nodes = WeakIdKeyDictionary()
        self.attributes: dict[str, Tensor] = {}
        self.copies: dict[tuple[int, int], fx.Node] = {}
        self.alive: list[Tensor] = []
        self.births: dict[int, int] = {}
        self.calls = 0
        self.known, self.mixed = mixed, set(mixed)

    def run(
        self, model: nn.Module, arguments: Mapping[str, Tensor], weights: Collection[str], free: Sequence[str]
    ) -> fx.GraphModule:
        """One pass."""
        given = dict(arguments)
        for name in free:
            given[name] = self._without_value(arguments[name], self.writer.graph.placeholder(name))
        held = dict(model.named_parameters()) | dict(model.named_buffers())
        empty = {n: self._without_value(held[n], self._attribute(n, held[n])) for n in held if n in weights}
        stay = patch.object(nn.Module, "_apply", lambda module, *_, **__: module)  # a cast of weights is none of ours
        with stay, self._module_paths(model), enable_python_dispatcher(), self:
            results = torch.func.functional_call(model, empty, (), given, tie_weights=True)
        outputs = [t for t in tree_leaves(results) if isinstance(t, Tensor)]
        self.writer.graph.output(tuple(self._node(t) for t in outputs))
        return fx.GraphModule(self.attributes, self.writer.graph)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.calls += 1
        if not any(isinstance(leaf, FakeTensor) for leaf in tree_leaves((args, kwargs))):
            return self._born(func(*args, **kwargs))
        if func._opname in ONLY_SHAPES:
            args, kwargs = tree_map_only(FakeTensor, _zeros, (args, kwargs))
            return self._born(func(*args, **kwargs))
        if func._opname in _INDEXING:
            args = (args[0], [i for index in args[1] for i in _numbered(index)], *args[2:])
        for target in _targets(func, args, kwargs):
            if not isinstance(target, FakeTensor):
                self.mixed.add(self.births[target.untyped_storage()._cdata])
                return target
        result = func(*args, **kwargs)
        if not any(isinstance(leaf, Tensor) for leaf in tree_leaves(result)):
            return result
        args, kwargs = tree_map_only(Tensor, self._node, (args, kwargs))
        node = self.writer.create_node("call_function", func, args, kwargs)
        if isinstance(result, Tensor):
            self.nodes[result] = node
        else:
            for i, part in enumerate(result):
                if isinstance(part, Tensor):
                    self.nodes[part] = self.writer.create_node("call_function", operator.getitem, (node, i), {})
        return result

    def _born(self, result: Any) -> Any:
        """What a call without fake operands gives."""
        if self.calls in self.known:
            return tree_map_only(Tensor, self._emptied, result)
        for part in tree_leaves(result):
            if isinstance(part, Tensor) and not is_batchedtensor(part):  # inside of vmap nothing is written to
                self.alive.append(part)
                self.births.setdefault(part.untyped_storage()._cdata, self.calls)
        return result

    def _emptied(self, value: Tensor) -> Tensor:
        """A tensor that starts as a constant and is written to."""
        clone = self.writer.create_node("call_function", torch.ops.aten.clone.default, (self._node(value),), {})
        return self._without_value(value, clone)

    def _without_value(self, value: Tensor, node: fx.Node) -> Tensor:
        with self.fake:
            empty = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
        self.nodes[empty] = node
        return empty

    def _node(self, value: Tensor) -> fx.Node:
        """Where a tensor comes from; what is real comes from a copy of it, as it is now."""
        if isinstance(value, FakeTensor):
            return self.nodes[value]
        key = id(value), value._version
        if key not in self.copies:
            self.alive.append(value)
            self.copies[key] = self._attribute(f"_constant_{len(self.copies)}", value.detach().clone())
        return self.copies[key]

    def _attribute(self, name: str, value: Tensor) -> fx.Node:
        self.attributes[name] = value
        return self.writer.graph.create_node("get_attr", name)

    @contextmanager
    def _module_paths(self, model: nn.Module) -> Iterator[None]:
        """Say of each op which modules it runs in."""
        paths = {module: name for name, module in model.named_modules()}
        stack: OrderedDict[str, tuple[str, Any]] = self.writer.module_stack

        def enter(module: nn.Module, args: Any) -> None:
            stack[f"{len(stack)}"] = (paths.get(module, ""), type(module).__qualname__)

        def leave(module: nn.Module, args: Any, result: Any) -> None:
            stack.popitem()

        hooks = register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def _zeros(like: Tensor) -> Tensor:
    return torch.zeros(like.shape, dtype=like.dtype)


def _numbered(index: Tensor | None) -> tuple[Tensor | None, ...]:
    """A mask whose values are known as the indices of what it keeps."""
    if index is None or isinstance(index, FakeTensor) or index.dtype not in (torch.bool, torch.uint8):
        return (index,)
    return index.nonzero(as_tuple=True)


def _targets(func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    """The tensors that a call writes to."""
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
