"""What an op gives, as far as it is known before it runs, or told from what it gave for operands of the same kinds."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from hf_align.tracing.nested import leaves, mapped
from hf_align.tracing.ops import Trait, traits_of
from hf_align.tracing.reasons import DoesNotRunError

_PLAIN = frozenset((bool, int, float, str, type(None), torch.dtype, torch.layout, torch.device, torch.memory_format))


@dataclass(frozen=True)
class Given:
    """What an op makes of operands of some kinds.

    Attributes:
        shown: the number of the operand in whose memory it lies; None where it is new.
        start: where in that memory.
    """

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    shown: int | None
    start: int

    @classmethod
    def of(cls, operands: Sequence[Any], result: Tensor) -> Given | None:
        """None for what shows an operand in another way than by shape."""
        memory = [leaf.untyped_storage()._cdata if isinstance(leaf, Tensor) else None for leaf in operands]
        own = result.untyped_storage()._cdata
        shown = memory.index(own) if own in memory else None
        if shown is not None and (result.is_conj() or result.is_neg() or result.dtype != operands[shown].dtype):
            return None
        return cls(result.shape, result.stride(), result.dtype, shown, int(result.storage_offset()))

    def again(self, operands: Sequence[Any]) -> Tensor:
        """The result for other operands of the same kinds, on no device."""
        if self.shown is None:
            return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")
        memory = operands[self.shown].untyped_storage()
        return torch.empty(0, dtype=self.dtype, device="meta").set_(memory, self.start, self.shape, self.stride)


Known = Given | int | list["Known"] | tuple["Known", ...]
"""What an op gives: something new or a view, the operand of some number itself, or several of these."""


_TRIED = 2**24
"""Bytes of operands up to which an op is tried."""
_GIVES: dict[Hashable, Known | None] = {}
"""What ops make of operands of some kinds; None where that is asked each time."""


def result_of(func: Any, args: Any, kwargs: Any, faked: Callable[[Tensor], FakeTensor]) -> Any:
    """What an op gives; it is asked once for operands of the same kinds.

    Args:
        faked: makes a fake tensor of one on no device.
    """
    op, operands = behaviour_of(func), leaves((args, kwargs))
    real = FakeTensor if op.asks_for_values else Tensor
    if Trait.MUST_FIT in op.traits and not all(type(leaf) is FakeTensor or type(leaf) in _PLAIN for leaf in operands):
        _try(func, args, kwargs)  # numbers are no part of its kind
    if not all(isinstance(leaf, real) or type(leaf) in _PLAIN for leaf in operands):
        return func(*args, **kwargs)
    key = op, _signature(args), _signature(kwargs)
    if key not in _GIVES:
        if Trait.MUST_FIT in op.traits:
            _try(func, args, kwargs)
        _GIVES[key] = _known_without_device(func, args, kwargs)
        if _GIVES[key] is None:
            result = func(*args, **kwargs)
            _GIVES[key] = _known(func, operands, result)
            return result
    known = _GIVES[key]
    return func(*args, **kwargs) if known is None else _again(known, operands, faked)


def _must_fit(base: Tensor, indices: Sequence[Tensor | None], values: Tensor) -> None:
    """Refuse values that have no place where they are put, as a run does: on no device nobody looks.

    How many entries a mask without value holds only a run decides: there may be as many values as it has entries.
    """
    masks = [i for i in indices if i is not None and i.dtype in (torch.bool, torch.uint8)]
    if not all(mask.dim() for mask in masks):  # one that adds an axis
        return
    numbers = list[Any]()
    for index in indices:
        masked = any(index is mask for mask in masks)
        shape = () if index is None else (index.numel(),) if masked else index.shape
        number = slice(None) if index is None else torch.empty(shape, dtype=torch.long, device="meta")
        numbers += [number] * (index.dim() if index is not None and masked else 1)
    room = torch.empty(base.shape, device="meta")[tuple(numbers)].shape
    most = {mask.numel() for mask in masks}
    pairs = zip(values.shape[::-1], room[::-1], strict=False)
    fit = all(size in (1, place) or (place in most and size < place) for size, place in pairs)
    if values.dim() > len(room) or not fit:
        raise DoesNotRunError(f"values of shape {[*values.shape]} cannot be put where there is room for {[*room]}")


def _try(func: Any, args: Any, kwargs: Any) -> None:
    """Have an op run once, on zeros in place of what has no value, unless it is too large for a try, or goes by a mask
    without value, of which only a run decides how many entries it holds.

    Raises:
        DoesNotRunError: it refuses its operands.
    """
    if Trait.PUTS_ENTRIES in behaviour_of(func).traits:
        _must_fit(*args[:3])
    operands = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    masked = Trait.PUTS_ENTRIES in behaviour_of(func).traits and any(
        isinstance(t, FakeTensor) and t.dtype in (torch.bool, torch.uint8) for t in operands)  # fmt: skip
    if masked or sum(t.untyped_storage().nbytes() for t in operands) > _TRIED:
        return
    args, kwargs = mapped(Tensor, _tried, (args, kwargs))
    try:
        func(*args, **kwargs)
    except (RuntimeError, IndexError) as error:
        raise DoesNotRunError(str(error)) from error


def _tried(value: Tensor) -> Tensor:
    """Zeros laid out as a value that there is not; a copy of one that there is, which may be written to."""
    if not isinstance(value, FakeTensor):
        return value.clone()
    memory = torch.zeros(value.untyped_storage().nbytes() // value.dtype.itemsize, dtype=value.dtype)
    return memory.as_strided(value.shape, value.stride(), value.storage_offset())


def _again(known: Known, operands: Sequence[Any], faked: Callable[[Tensor], FakeTensor]) -> Any:
    if isinstance(known, Given):
        return faked(known.again(operands))
    return operands[known] if isinstance(known, int) else type(known)(_again(k, operands, faked) for k in known)


def _known(func: Any, operands: Sequence[Any], result: Any) -> Known | None:
    """What an op gives for operands of the same kinds, by what it gave; None if that cannot be told."""
    if type(result) in (list, tuple):
        parts = [_known(func, operands, part) for part in result]
        new = [part.untyped_storage()._cdata for part, told in zip(result, parts, strict=True)
               if isinstance(told, Given) and told.shown is None]  # fmt: skip
        return None if None in parts or len(set(new)) < len(new) else type(result)(parts)
    if not isinstance(result, Tensor) or torch.Tag.inplace_view in func.tags:
        return None
    handed_on = next((i for i, leaf in enumerate(operands) if leaf is result), None)
    if handed_on is not None:
        return handed_on
    return None if func._schema.is_mutable else Given.of(operands, result)


def _known_without_device(func: Any, args: Any, kwargs: Any) -> Known | None:
    """What an op gives on no device, where that is what it gives on any; a tenth of what fake tensors take to say."""
    op, operands = behaviour_of(func), leaves((args, kwargs))
    tensors = [leaf for leaf in operands if isinstance(leaf, Tensor)]
    if not op.is_alike_everywhere or not all(isinstance(t, FakeTensor) and not t.is_conj() and not t.is_neg()
                                             for t in tensors) or kwargs.get("device") is not None:  # fmt: skip
        return None
    args, kwargs = mapped(FakeTensor, _on_no_device, (args, kwargs))
    try:
        return _known(func, leaves((args, kwargs)), func(*args, **kwargs))
    except (NotImplementedError, RuntimeError):  # a fake tensor knows more, or says better what is wrong
        return None


def _on_no_device(value: FakeTensor) -> Tensor:
    memory = value.untyped_storage()
    return torch.empty(0, dtype=value.dtype, device="meta").set_(
        memory, value.storage_offset(), value.shape, value.stride()
    )


@dataclass(frozen=True)
class Made:
    """How a real tensor was computed, and the versions of all that took part: nothing may have been written since."""

    func: Any
    args: Any
    kwargs: Any
    versions: tuple[tuple[Tensor, int], ...]
    result: Tensor
    version: int

    @classmethod
    def by(cls, func: Any, args: Any, kwargs: Any, result: Tensor) -> Made:
        operands = [t for t in leaves((args, kwargs)) if isinstance(t, Tensor)]
        return cls(func, args, kwargs, tuple((t, t._version) for t in operands), result, result._version)

    def still_gives(self, value: Tensor) -> bool:
        """Whether it would come out again; what an op only hands on it has not made."""
        if value is not self.result or any(t is value for t, _ in self.versions):
            return False
        return value._version == self.version and all(t._version == version for t, version in self.versions)


def _signature(value: Any) -> Hashable:
    """What the shape of a result may depend on: how operands are nested, and of what kind each is."""
    if isinstance(value, Tensor):
        start, flags = value.storage_offset(), (value.is_conj(), value.is_neg())
        return value.shape, value.stride(), value.dtype, start, flags
    if isinstance(value, (list, tuple)):
        return type(value), *[_signature(part) for part in value]
    if isinstance(value, dict):
        return dict, *[(name, _signature(part)) for name, part in value.items()]
    return type(value), value


def described(value: Tensor) -> Tensor:
    """A tensor of the same kind that holds no memory; one that has a value is its own description."""
    if not isinstance(value, FakeTensor):
        return value
    return without_memory(tuple(value.shape), value.stride(), value.dtype)


@lru_cache(maxsize=4096)
def without_memory(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """One for all nodes whose values are alike."""
    return torch.empty_strided(shape, stride, dtype=dtype, device="meta")


def blank_like(value: Tensor) -> Tensor:
    """Zeros in the shape of another tensor."""
    return _zeros(tuple(value.shape), value.dtype)


@lru_cache(maxsize=4096)
def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """One for all, of a single entry: there may be many as large as a text times all heads."""
    return torch.zeros((), dtype=dtype).expand(shape)


_PLAINLY_COMPOSED = Trait.AFFINE | Trait.CONTRACTS | Trait.MOVES
"""Of ops that are made of others, those that choose them by shapes alone."""
_OF_A_DEVICE = Trait.CONVOLVES | Trait.NORMALISES | Trait.STORED_STATISTICS
"""Of ops whose results are laid out, or kept for a gradient, as the device likes it."""
_DEPENDS_ON_VALUES = frozenset((torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output))


@dataclass(frozen=True, eq=False)
class Behaviour:
    """What is known of an op before it runs; there is one for each op.

    Attributes:
        asks_for_values: whether a shape may depend on numbers in an operand; of an op that is made of others nobody
            knows.
        is_alike_everywhere: whether the shape and the layout of its result do not depend on the device.
        written_to: the arguments that it writes to, by place and name.
    """

    traits: Trait
    makes: bool
    is_indexing: bool
    compares_with_number: bool
    is_mutable: bool
    asks_for_values: bool
    is_alike_everywhere: bool
    written_to: tuple[tuple[int, str], ...]


@cache
def behaviour_of(func: Any) -> Behaviour:
    """Of an op, whatever it is called with."""
    traits = traits_of(func._opname)
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
    asks_for_values = bool(composite) or not _DEPENDS_ON_VALUES.isdisjoint(func.tags)
    arguments = enumerate(func._schema.arguments)
    return Behaviour(
        traits,
        Trait.MAKES in traits,
        bool(traits & (Trait.TAKES_ENTRIES | Trait.PUTS_ENTRIES)),
        bool(traits & (Trait.EQUAL | Trait.UNEQUAL)) and func._overloadname == "Scalar",
        func._schema.is_mutable,
        asks_for_values,
        not traits & _OF_A_DEVICE and (not asks_for_values or bool(traits & _PLAINLY_COMPOSED)),
        tuple((i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write),
    )


def targets_of(op: Behaviour, args: Any, kwargs: Any) -> Iterator[Tensor]:
    """The tensors that a call writes to."""
    for i, name in op.written_to:
        value = args[i] if i < len(args) else kwargs.get(name)
        yield from (leaf for leaf in leaves(value) if isinstance(leaf, Tensor))
