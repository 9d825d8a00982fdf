"""One forward pass written down as it runs, where torch.export cannot say beforehand what it will do.

Weights and free arguments are fake: they have shapes but no values. Everything else is real, so that lengths, grids
and masks may decide shapes and branches, as they do in the modelling code. An op is written down if it reads something
fake; the others just run, and what they give is a constant. A branch that asks for the value of something fake raises:
nothing that depends on weights or inputs is ever taken for granted.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, NoReturn

import torch
from torch import Tensor, fx, nn
from torch._C._functorch import is_batchedtensor
from torch._dispatch.python import enable_python_dispatcher, no_python_dispatcher
from torch._functorch.autograd_function import custom_function_call
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.experimental.proxy_tensor import ProxyTorchDispatchMode, PythonKeyTracer
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.weak import WeakIdKeyDictionary, WeakIdRef

from hf_align.runtime.devices import CPU
from hf_align.tracing.answers import ANSWER, answers_by_name, value_shown
from hf_align.tracing.as_called import as_called
from hf_align.tracing.assigned import assignments_seen
from hf_align.tracing.drawn import Draws
from hf_align.tracing.frames import calling_frame, line, modelling_frame
from hf_align.tracing.listed import LISTED_AT, Lists
from hf_align.tracing.memory import can_be_put_back, owner, remember_view, written_anew
from hf_align.tracing.nested import leaves, mapped
from hf_align.tracing.ops import Trait, does, made_of
from hf_align.tracing.parted import Parts, Some, numbers_told
from hf_align.tracing.program import WORKED_OUT
from hf_align.tracing.reasons import keeps_numbers, needs_numbers
from hf_align.tracing.results import Made, behaviour_of, blank_like, described, result_of, targets_of
from hf_align.tracing.returned import returned
from hf_align.tracing.synonyms import plainly


class Recorder(ProxyTorchDispatchMode):
    """Sees every op before torch takes it apart: layer_norm, linear and softmax stay whole.

    A tensor that is born real may be written to later with what is fake. By then it is too late to write it down, so
    its birth is noted, and the pass is run again.

    Attributes:
        within: the modules that run, from the outside in; the nodes share it.
        mixed: the ops, each in its line of code, that such tensors are born of.
        written: those that were known beforehand, and whose tensors what depends on weights or inputs is written to.
        varying: the nodes that depend on weights or inputs.
        showing: the values that were seen in each memory.
        broken: whether there is said to be an entry that is no number, where the modelling code asks.
        supposed: the line of modelling code that asked first.
        unequal: whether an entry was taken to be unlike a constant that it is compared with.
        drawn: the values that another run would draw otherwise.
        asked: a question about a value that there is not, whatever the modelling code made of the refusal.
    """

    def __init__(
        self,
        mixed: frozenset[Hashable],
        generic: bool,
        ends: Mapping[str, int],
        *,
        broken: bool = False,
        stay: bool = False,
        skips: bool = False,
    ) -> None:
        self.writer = PythonKeyTracer()
        self.generic, self.ends, self.broken = generic, ends, broken
        self.supposed: str | None = None
        self.unequal = False
        super().__init__(self.writer, "real", pre_dispatch=True)
        self.writer.root = nn.Module()
        self.writer.graph = fx.Graph()
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.blank = vars(FakeTensor(self.fake, torch.empty(0, device="meta"), CPU))
        self.nodes = WeakIdKeyDictionary()
        self.showing: dict[int, list[WeakIdRef]] = defaultdict(list)
        self.within: Mapping[str, tuple[str, str]] = {}
        self.attributes: dict[str, Tensor] = {}
        self.copies: dict[tuple[int, int], fx.Node] = {}
        self.alive: list[Tensor] = []
        self.births: dict[int, Hashable] = {}
        self.drawn = Draws()
        self.made: dict[int, Made] = {}
        self.lists = Lists(self.seen, line)
        self.parts = Parts(self.seen, self.nodes, line, self.lists, self._refuse_numbers, stay=stay, skips=skips)
        self.known, self.mixed = mixed, set(mixed)
        self.written: set[Hashable] = set()
        self.varying: set[fx.Node] = set()
        self.emptied: dict[fx.Node, Hashable] = {}
        self.asked: Exception | None = None

    def run(
        self, model: nn.Module, arguments: Mapping[str, Tensor], weights: Collection[str], free: Sequence[str]
    ) -> fx.GraphModule:
        """One pass."""
        given = dict(arguments)
        for name in free:
            given[name] = self._without_value(arguments[name], self.writer.graph.placeholder(name))
        held = dict(model.named_parameters()) | dict(model.named_buffers())
        empty = {n: self._without_value(held[n], self._attribute(n, held[n])) for n in held if n in weights}
        self.varying.update(self.nodes[value] for value in (*(given[n] for n in free), *empty.values()))
        assigned, told = assignments_seen(self._assigned), numbers_told(self._numbers)
        with as_called(self, self.seen), assigned, told, self._module_paths(model), enable_python_dispatcher(), self:
            results = torch.func.functional_call(model, empty, (), given, tie_weights=True)
        if (at := self.parts.open_question) is not None:
            raise needs_numbers(at)
        outputs = returned(model, results)
        end = self.writer.graph.output(tuple(self._node(t) for t in outputs))
        end.meta[WORKED_OUT] = [(tuple(t.shape), t.nbytes) for t in self.alive if not isinstance(t, FakeTensor)]
        for answer in answers_by_name(model, results).values():
            self._node(answer).meta[ANSWER] = True
        recorded = _LazyGraphModule(self.attributes, self.writer.graph)  # few are ever run
        recorded.meta[LISTED_AT] = self.lists.places
        return recorded

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with no_python_dispatcher():  # what an op is made of concerns nobody here
            return self.seen(func, args, kwargs or {})

    def seen(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What an op gives; it is written down if it reads something fake."""
        func, args = plainly(func, args)
        op = behaviour_of(func)
        if op.compares_with_number and (equal := self._where_equal(*args)) is not None:
            return self._born(func, equal ^ (Trait.UNEQUAL in op.traits))
        if Trait.ANY in op.traits and len(args) == 1 and self._is_nan(args[0]):
            self.supposed = self.supposed or line()
            return self._born(func, torch.tensor(self.broken))
        if (cut := self.parts.cut(op, args, kwargs)) is not None:
            return cut
        if op.makes or not any(isinstance(leaf, FakeTensor) for leaf in leaves((args, kwargs))):
            args, kwargs = mapped(FakeTensor, _unread, (args, kwargs))
            result = func(*args, **kwargs)
            if not self.drawn.see(func, args, kwargs, result):  # some runs go another way
                self.asked = needs_numbers(line())
                raise self.asked
            if not op.makes and isinstance(result, Tensor) and not op.is_mutable:
                before = self.made.get(id(result))
                if before is None or before.result is not result:  # some ops only hand on what they are given
                    self.made[id(result)] = Made.by(func, args, kwargs, result)
            self.lists.hand_on((args, kwargs), result)
            return self._born(func, result, blank=Trait.BLANK in op.traits)
        if (apart := made_of(func)) is not None:
            with enable_python_dispatcher(), self:
                return apart(*args, **kwargs)
        if op.is_indexing:
            args = (args[0], [i for index in args[1] for i in _numbered(index)], *args[2:])
        listed = self.parts.instead(func, op, args, kwargs)
        if listed is None:
            listed = self.lists.instead(func, op, args, kwargs)
        if listed is not None:
            return listed
        for target in targets_of(op, args, kwargs):
            if not isinstance(target, FakeTensor):
                memory = target.untyped_storage()._cdata
                if memory not in self.births:
                    raise keeps_numbers(line())
                self.mixed.add(self.births[memory])
                return target
        try:
            result = result_of(func, args, kwargs, self._faked)
        except (DataDependentOutputException, DynamicOutputShapeException) as question:
            self.asked = question
            raise
        if not op.written_to and not any(isinstance(leaf, Tensor) for leaf in leaves(result)):
            return result
        result = self._without_values(result, (args, kwargs))
        self.lists.bound(func, op, args, kwargs, result)
        shown = args[0] if args else None
        args, kwargs = mapped(Tensor, self._node, (args, kwargs))
        if op.is_mutable and self._written_anew(func, result, args, kwargs):
            return result
        node = self._op(func, args, kwargs)
        if isinstance(result, Tensor):
            self._noted(result, node)
            if isinstance(shown, Tensor) and shown.untyped_storage()._cdata == result.untyped_storage()._cdata:
                remember_view(node)
        elif result is not None:
            for i, part in enumerate(result):
                if isinstance(part, Tensor):
                    self._noted(part, self._op(operator.getitem, (node, i), {}))
            node.meta["val"] = mapped(Tensor, described, result)
        return result

    def _without_values(self, result: Any, operands: Any) -> Any:
        """A result without the values that it has where an op makes a tensor of its own and writes to it what has none.
        What nothing was written to keeps them, and what shows an operand that has values."""
        if all(isinstance(leaf, FakeTensor) for leaf in leaves(result) if isinstance(leaf, Tensor)):
            return result
        known = set(_memories(operands))

        def without(value: Tensor) -> Tensor:
            if isinstance(value, FakeTensor) or not value._version or value.untyped_storage()._cdata in known:
                return value
            return self._faked(torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta"))

        return mapped(Tensor, without, result)

    def _where_equal(self, value: Any, number: Any) -> Tensor | None:
        """Where a free argument equals a number, as far as that is known of all values that it may have."""
        node = self.nodes[value] if isinstance(value, FakeTensor) else None
        if node is not None and self.generic and value.is_floating_point() and value_shown(node).op == "placeholder":
            self.unequal = True
            return torch.zeros(value.shape, dtype=torch.bool)
        if node is not None and node.op == "placeholder" and self.ends.get(str(node.target)) == number:
            return torch.eye(value.shape[-1], dtype=torch.bool)[-1].expand(value.shape).contiguous()
        return None

    def _is_nan(self, value: Any) -> bool:
        """Whether it says which entries are no numbers."""
        return isinstance(value, FakeTensor) and does(self.nodes[value], Trait.NAN)

    def _numbers(self, value: FakeTensor) -> list[int] | list[Some]:
        """What code is told that asks for the numbers of something without value."""
        numbers = self.parts.numbers(value)
        return self._refuse_numbers() if numbers is None else numbers

    def _refuse_numbers(self) -> NoReturn:
        self.asked = needs_numbers(line())
        raise self.asked

    def _op(self, func: Any, args: Any, kwargs: Any) -> fx.Node:
        """A new node, with the modules and the line of the modelling code that it comes from."""
        node = self.writer.graph.create_node("call_function", func, args, kwargs, _node_name(func))
        if self.known and not self.varying.isdisjoint(node.all_input_nodes):
            self.varying.add(node)
        if self.within:
            node.meta["nn_module_stack"] = self.within
        frame = modelling_frame()
        if frame is not None:
            code = frame.f_code
            node.stack_trace = f'File "{code.co_filename}", line {frame.f_lineno}, in {code.co_name}'
        return node

    def _written_anew(self, func: Any, result: Any, args: Any, kwargs: Any) -> bool:
        """Write down an op that writes to memory as one that gives a new value, and all that shows this memory anew;
        False where it is not known how to put the new value back."""
        plain = getattr(torch.ops.aten, func._opname[:-1], None) if func._opname.endswith("_") else None
        overload = getattr(plain, func._overloadname, None)
        if overload is None or overload._schema.is_mutable or not isinstance(result, FakeTensor):
            return False
        memory, view = result.untyped_storage()._cdata, self.nodes[result]
        showing = dict.fromkeys(value() for value in self.showing[memory])
        shown = [t for t in showing if t is not None and t is not result and t.untyped_storage()._cdata == memory]
        if not can_be_put_back(view) or any(owner(self.nodes[t]) is not owner(view) for t in shown):
            return False
        node = self._noted(result, self._op(overload, args, kwargs))
        born = self.emptied.get(owner(view))
        anew = written_anew(view, node, [self.nodes[t] for t in shown], self._op)
        if born is not None:
            self.emptied[owner(anew[view])] = born
            self.written |= {born} if node in self.varying else set()
        for value in shown:
            self._noted(value, anew[self.nodes[value]])
        return True

    def _noted(self, value: Tensor, node: fx.Node) -> fx.Node:
        """Remember where a value comes from; the node does not hold it, so that it is known when nobody else does."""
        self.nodes[value] = node
        self.showing[value.untyped_storage()._cdata].append(WeakIdRef(value))
        node.meta["val"] = described(value)
        return node

    def _assigned(self, target: FakeTensor, value: Tensor) -> Tensor:
        """Remember what a tensor holds from now on, in the memory of that."""
        node = self._node(value)
        held = value if isinstance(value, FakeTensor) else self._without_value(value, node)
        self.nodes[target] = node
        self.showing[held.untyped_storage()._cdata].append(WeakIdRef(target))
        return held

    def _born(self, func: Any, result: Any, *, blank: bool = False) -> Any:
        """What a call without fake operands gives; zeros where memory may hold anything."""
        born = [t for t in leaves(result) if isinstance(t, Tensor) and not is_batchedtensor(t)]
        new = [t for t in born if t.untyped_storage()._cdata not in self.births]  # inside of vmap nothing is written to
        if new:
            frame = calling_frame()
            birth = frame and (frame.f_code.co_filename, frame.f_lineno), func
            if birth in self.known:
                return mapped(Tensor, lambda value: self._emptied(value, birth, blank), result)
            self.births.update((t.untyped_storage()._cdata, birth) for t in new)
        self.alive += born
        return result.zero_() if blank else result

    def _emptied(self, value: Tensor, birth: Hashable, blank: bool) -> Tensor:
        """A tensor that starts as a constant and is written to."""
        name = f"_blank_{len(self.emptied)}"
        start = self._attribute(name, blank_like(value)) if blank else self._node(value)
        clone = self._op(torch.ops.aten.clone.default, (start,), {})
        self.emptied[clone] = birth
        return self._without_value(value, clone)

    def _without_value(self, value: Tensor, node: fx.Node) -> Tensor:
        made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        empty = self._faked(made)
        self._noted(empty, node)
        return empty

    def _faked(self, made: Tensor) -> FakeTensor:
        """A tensor on no device as one of this mode: what the class looks up for each is the same for all."""
        fake: FakeTensor = Tensor._make_subclass(
            FakeTensor, made, False, dispatch_device=True, device_for_backend_keys=CPU
        )
        torch._C._set_throw_on_mutable_data_ptr(fake)
        vars(fake).update(self.blank)
        return fake

    def _node(self, value: Tensor) -> fx.Node:
        """Where a tensor comes from; what is real is made again of what it was made of, or is a copy of what it is."""
        if isinstance(value, FakeTensor):
            return self.nodes[value]
        key = id(value), value._version
        if key not in self.copies:
            self.alive.append(value)
            made = self.made.get(id(value))
            if made is not None and made.still_gives(value):
                args, kwargs = mapped(Tensor, self._node, (made.args, made.kwargs))
                self.copies[key] = self._op(made.func, args, kwargs)
                self.copies[key].meta["val"] = value
            else:
                self.copies[key] = self._attribute(f"_constant_{len(self.copies)}", value.detach().clone())
        return self.copies[key]

    def _attribute(self, name: str, value: Tensor) -> fx.Node:
        self.attributes[name] = value
        node = self.writer.graph.create_node("get_attr", name)
        node.meta["val"] = value
        return node

    @contextmanager
    def _module_paths(self, model: nn.Module) -> Iterator[None]:
        """Say of each op which modules it runs in."""
        paths = {module: name for name, module in model.named_modules()}
        around: list[Mapping[str, tuple[str, str]]] = []

        def enter(module: nn.Module, args: Any) -> None:
            around.append(self.within)
            self.within = {**self.within, f"{len(around) - 1}": (paths.get(module, ""), type(module).__qualname__)}

        def leave(module: nn.Module, args: Any, result: Any) -> None:
            self.within = around.pop()

        hooks = register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


@custom_function_call.py_impl(Recorder)
def _forward_alone(recorder: Recorder, function: Any, *args: Any) -> Any:
    """Of a function that brings its own derivative, inside of vmap, what it computes."""
    with recorder:
        return function.forward(*args)


@cache
def _node_name(func: Any) -> str:
    """What a graph calls an op."""
    return fx.Graph()._target_to_str(func)


def _memories(values: Any) -> list[int]:
    """Where tensors lie."""
    return [leaf.untyped_storage()._cdata for leaf in leaves(values) if isinstance(leaf, Tensor)]


def _unread(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype)


def _numbered(index: Tensor | None) -> tuple[Tensor | None, ...]:
    """A mask whose values are known as the indices of what it keeps."""
    if index is None or isinstance(index, FakeTensor) or index.dtype not in (torch.bool, torch.uint8):
        return (index,)
    return index.nonzero(as_tuple=True)
