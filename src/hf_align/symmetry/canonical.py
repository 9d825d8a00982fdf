"""Gauges: choices of the weights that the function does not see, and one canonical choice for each.

Raw weights of two models differ in these for no reason; fixed, the models become comparable and the groups larger.
Every gauge rewrites single tensors, from a few others, so that a checkpoint is canonicalised tensor by tensor.

* the gain of a norm moves into its readers, and its bias into theirs;
* what writes a LayerNorm stream loses its mean, and so do the readers of its output;
* the key bias is dropped (softmax does not see it), the value bias moves into the output bias (attention rows sum
  to one).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from hf_align.errors import HfAlignError
from hf_align.symmetry.interpreter import Gain, Interpretation, Reading, Value
from hf_align.symmetry.spaces import Axis, Kind, Space
from hf_align.trace import Program, op_name

Get = Callable[[str], Tensor]


class Gauge(ABC):
    """One choice, fixed: new values for `targets`, from the old values of some tensors."""

    @property
    @abstractmethod
    def targets(self) -> tuple[str, ...]: ...

    @abstractmethod
    def fix(self, name: str, get: Get) -> Tensor:
        """The new value of one target; `get` reads tensors as they were before this gauge."""


@dataclass(frozen=True)
class Read:
    """A weight that reads a normalised value along `axis`, and the bias added to what it reads."""

    weight: str
    axis: int
    bias: str | None


@dataclass(frozen=True)
class FoldNorm(Gauge):
    """W diag(γ) replaces W, one replaces γ, and the bias β leaves the norm.

    LayerNorm's normalised value n has mean zero, so a reader's mean along the axis is free. Where a reader has no
    bias of its own to take Wβ up, it is stored there: with β = 1/√d · 1 and Wγ centred, the mean direction of W
    contributes exactly Wβ to the output and nothing else.

    Attributes:
        exclusive: the reads are all that ever happens to the normalised value; else β stays, as β/γ.
        centred: the norm subtracts the mean.
        offset: what the architecture adds to the stored gain (γ = 1 + w).
        others: (parameter, axis, power) of weights on the target that are no linear readers.
    """

    gain: str
    bias: str | None
    reads: tuple[Read, ...]
    others: tuple[tuple[str, int, int], ...]
    centred: bool
    exclusive: bool
    offset: float = 0.0

    @property
    def targets(self) -> tuple[str, ...]:
        biases = [r.bias for r in self.reads if r.bias and self.bias]
        norm = [self.gain] + ([self.bias] if self.bias else [])
        return (*norm, *(r.weight for r in self.reads), *biases, *(name for name, _, _ in self.others))

    def fix(self, name: str, get: Get) -> Tensor:
        gain = get(self.gain) + self.offset
        if name == self.gain:
            return torch.full_like(gain, 1 - self.offset)
        if name == self.bias:
            return self._norm_bias(get(name), gain)
        for read in self.reads:
            if name == read.weight:
                return self._reader(read, get(name), gain, get)
            if name == read.bias:
                assert self.bias is not None
                return get(name) + get(read.weight).movedim(read.axis, -1) @ get(self.bias)
        axis, power = next((a, p) for n, a, p in self.others if n == name)
        return _along(get(name), axis, gain ** (-power))

    def _norm_bias(self, bias: Tensor, gain: Tensor) -> Tensor:
        if not self.exclusive:
            if bool((gain == 0).any()):
                raise HfAlignError(f"{self.gain} has entries that are exactly zero, so its bias cannot be folded")
            return bias / gain
        carried = any(r.bias is None for r in self.reads)
        return torch.full_like(bias, 1 / math.sqrt(len(bias)) if carried else 0.0)

    def _reader(self, read: Read, weight: Tensor, gain: Tensor, get: Get) -> Tensor:
        folded = _along(weight, read.axis, gain)
        if not (self.centred and self.exclusive):
            return folded
        folded = folded - folded.mean(read.axis, keepdim=True)
        if self.bias is None or read.bias is not None:
            return folded
        constant = weight.movedim(read.axis, -1) @ get(self.bias)
        return folded + constant.unsqueeze(read.axis) / math.sqrt(weight.shape[read.axis])


@dataclass(frozen=True)
class CentreWriter(Gauge):
    """w - mean(w) along the axis that it writes: every LayerNorm downstream subtracts the mean anyway."""

    parameter: str
    axis: int

    @property
    def targets(self) -> tuple[str, ...]:
        return (self.parameter,)

    def fix(self, name: str, get: Get) -> Tensor:
        weight = get(name)
        return weight - weight.mean(self.axis, keepdim=True)


@dataclass(frozen=True)
class DropKeyBias(Gauge):
    """b[start:stop] = 0: q·b is the same for all keys, and softmax subtracts it."""

    bias: str
    start: int
    stop: int

    @property
    def targets(self) -> tuple[str, ...]:
        return (self.bias,)

    def fix(self, name: str, get: Get) -> Tensor:
        bias = get(name).clone()
        bias[self.start : self.stop] = 0.0
        return bias


@dataclass(frozen=True)
class MoveValueBias(Gauge):
    """b_o + W_o b_v replaces b_o and zero replaces b_v = bias[start:stop]: the rows of attention sum to one.

    `repeats` lists the factors of W_o's input as (size, whether b_v has it): query heads share a KV head's value.
    """

    bias: str
    start: int
    stop: int
    weight: str
    axis: int
    output_bias: str
    repeats: tuple[tuple[int, bool], ...]

    @property
    def targets(self) -> tuple[str, ...]:
        return (self.bias, self.output_bias)

    def fix(self, name: str, get: Get) -> Tensor:
        if name == self.bias:
            bias = get(name).clone()
            bias[self.start : self.stop] = 0.0
            return bias
        moved = get(self.bias)[self.start : self.stop].reshape([n if own else 1 for n, own in self.repeats])
        moved = moved.expand([n for n, _ in self.repeats]).reshape(-1)
        return get(name) + get(self.weight).movedim(self.axis, -1) @ moved


def _along(tensor: Tensor, axis: int, factors: Tensor) -> Tensor:
    shape = [1] * tensor.dim()
    shape[axis] = -1
    return tensor * factors.reshape(shape)


class CanonicalWeights(Mapping[str, Tensor]):
    """Weights with every gauge fixed, computed from `raw` tensor by tensor as they are asked for."""

    def __init__(self, raw: Mapping[str, Tensor], gauges: tuple[Gauge, ...]) -> None:
        self._raw = raw
        self._gauges = gauges
        self._moves: dict[str, list[int]] = {}
        for i, gauge in enumerate(gauges):
            for name in gauge.targets:
                self._moves.setdefault(name, []).append(i)

    def __getitem__(self, name: str) -> Tensor:
        return self._before(name, len(self._gauges))

    def _before(self, name: str, stage: int) -> Tensor:
        earlier = [i for i in self._moves.get(name, ()) if i < stage]
        if not earlier:
            return self._raw[name]
        last = earlier[-1]
        return self._gauges[last].fix(name, lambda other: self._before(other, last))

    def __iter__(self) -> Iterator[str]:
        return iter(self._raw)

    def __len__(self) -> int:
        return len(self._raw)


# Finding them -----------------------------------------------------------------------------------------------------

_PASSES = frozenset(
    [
        "view",
        "reshape",
        "_unsafe_view",
        "flatten",
        "unflatten",
        "transpose",
        "permute",
        "unsqueeze",
        "squeeze",
        "expand",
        "slice",
        "select",
        "split",
        "split_with_sizes",
        "chunk",
        "getitem",
        "dropout",
        "to",
        "_to_copy",
        "contiguous",
        "clone",
        "alias",
        "detach",
        "type_as",
    ]
)


def find_gauges(found: Interpretation, folded: list[Gain]) -> tuple[Gauge, ...]:
    """The gauges of an architecture in the order in which they must be fixed."""
    return (*_norms(found, folded), *_value_biases(found), *_centred_writers(found))


def _norms(found: Interpretation, folded: list[Gain]) -> Iterator[Gauge]:
    for gain in folded:
        node = gain.node
        centred = op_name(node) == "layer_norm"
        bias_node = node.args[3] if centred and len(node.args) > 3 else None
        bias = found.values[bias_node].parameter if bias_node is not None else None  # type: ignore[index]
        readings = list(_terminal_readings(node, found))
        exclusive = None not in readings and all(_read_once(r, found) for r in readings if r)
        reads = tuple(Read(r.weight, r.in_axis, r.bias) for r in readings if r) if exclusive else ()
        names = {gain.parameter, bias} | {r.weight for r in reads}
        others = tuple((n, i, -1 if a.root.is_dual else 1) for n, v in found.weights.items() if n not in names
                       for i, a in enumerate(v.axes) if _carries(a, gain, found) and not exclusive)  # fmt: skip
        yield FoldNorm(gain.parameter, bias, reads, others, centred, exclusive, gain.offset)


def _carries(axis: Axis, gain: Gain, found: Interpretation) -> bool:
    """Whether the axis was unified with the target of the gain itself (not only, after folding, with its source)."""
    return any(axis.space is link for link in _chain(gain.target)) or any(
        link is gain.target.space for link in _chain(axis)
    )


def _chain(axis: Axis) -> Iterator[object]:
    yield axis.space
    while axis.space.link is not None:
        axis = axis.space.link
        yield axis.space


def _terminal_readings(node: fx.Node, found: Interpretation) -> Iterator[Reading | None]:
    """The linear readers of a value behind ops that only pass it on; None for any other consumer."""
    by_node = {r.node: r for r in found.readings}
    for user in node.users:
        if user in by_node and by_node[user].input is node:
            yield by_node[user]
        elif op_name(user) in _PASSES and _keeps_last_axis(node, user):
            yield from _terminal_readings(user, found)
        else:
            yield None


def _keeps_last_axis(node: fx.Node, user: fx.Node) -> bool:
    before, after = node.meta["val"], user.meta["val"]
    dims = {a % before.dim() for a in user.args[1:] if isinstance(a, int)} if "transpose" in op_name(user) else set()
    return isinstance(after, Tensor) and before.shape[-1] == after.shape[-1] and before.dim() - 1 not in dims


def _read_once(reading: Reading, found: Interpretation) -> bool:
    """Whether the weight and the bias of a reading have no other use."""
    placeholders = [n for n, name in found.program.parameters.items() if name in (reading.weight, reading.bias)]
    return all(len(p.users) == 1 for p in placeholders)


def _centred_writers(found: Interpretation) -> Iterator[CentreWriter]:
    memo: dict[tuple[fx.Node, Space], bool] = {}
    for node, name in found.program.parameters.items():
        for i, axis in enumerate(found.weights[name].axes):
            atom = axis.root
            if (
                atom.space.kind is Kind.ATOM
                and node.users
                and all(_mean_is_lost(u, atom, found, memo) for u in node.users)
            ):
                yield CentreWriter(name, i)


def _mean_is_lost(node: fx.Node, atom: Axis, found: Interpretation, memo: dict[tuple[fx.Node, Space], bool]) -> bool:
    """Whether every use of a node's value subtracts the mean along the axis with this atom."""
    key = (node, atom.space)
    if key in memo:
        return memo[key]
    values = found.values.get(node)
    axes = [v.axes for v in (values if isinstance(values, tuple) else (values,)) if isinstance(v, Value)]
    carried = bool(axes) and all(any(a.root.space is atom.space for a in x) for x in axes)
    memo[key] = carried and bool(node.users) and all(
        (op_name(u) == "layer_norm" and u.args[0] is node and axes[0][-1].root.space is atom.space)
        or (op_name(u) in _PASSES | {"add", "sub", "cat"} and _mean_is_lost(u, atom, found, memo))
        for u in node.users
    )  # fmt: skip
    return memo[key]


def _value_biases(found: Interpretation) -> Iterator[Gauge]:
    """Key and value biases, found by following what they are added to into attention."""
    for reading in found.readings:
        if reading.bias is None or not _read_once(reading, found):
            continue
        size = reading.node.meta["val"].shape[-1]
        fates: dict[tuple[int, int], list[Gauge | None]] = {}
        for span, gauge in _fates(reading.node, (0, size), reading, found):
            fates.setdefault(span, []).append(gauge)
        for gauges in fates.values():
            if len(gauges) == 1 and gauges[0] is not None:
                yield gauges[0]


def _fates(
    node: fx.Node, span: tuple[int, int], reading: Reading, found: Interpretation
) -> Iterator[tuple[tuple[int, int], Gauge | None]]:
    """What becomes of a constant added to node[..., span], for each way that it takes."""
    for user in node.users:
        if op_name(user) in ("split", "split_with_sizes", "chunk") and _splits_last(user):
            for child in user.users:
                which = child.args[1]
                assert isinstance(which, int)
                sizes = [piece.shape[-1] for piece in user.meta["val"]]
                start = span[0] + sum(sizes[:which])
                yield from _fates(child, (start, start + sizes[which]), reading, found)
        elif op_name(user) in _PASSES:
            yield from _fates(user, span, reading, found)
        elif op_name(user) == "matmul" and user.args[1] is node and node is not user.args[0]:
            yield span, _key_or_value(user, span, reading, found)
        else:
            yield span, None


def _splits_last(node: fx.Node) -> bool:
    source = node.all_input_nodes[0]
    dim = node.args[2] if len(node.args) > 2 else node.kwargs.get("dim", 0)
    return isinstance(dim, int) and dim % source.meta["val"].dim() == source.meta["val"].dim() - 1


def _key_or_value(product: fx.Node, span: tuple[int, int], reading: Reading, found: Interpretation) -> Gauge | None:
    assert reading.bias is not None
    if reaches_softmax(product, found.program):
        return DropKeyBias(reading.bias, *span)
    left = product.args[0]
    while isinstance(left, fx.Node) and op_name(left) in ("dropout", "to", "_to_copy", "contiguous"):
        left = left.args[0]
    if not (isinstance(left, fx.Node) and op_name(left) == "softmax" and left.args[1] in (-1, 3)):
        return None
    readings = list(_terminal_readings_any_shape(product, found))
    if len(readings) != 1 or readings[0] is None or readings[0].bias is None or not _read_once(readings[0], found):
        return None
    output = readings[0]
    assert output.bias is not None
    own = {f.space for f in _span_factors(found.weights[reading.bias].axes[0], span)}
    factors = found.weights[output.weight].axes[output.in_axis].factors
    repeats = tuple((f.size, f.root.space in own) for f in factors)
    return MoveValueBias(reading.bias, *span, output.weight, output.in_axis, output.bias, repeats)


def _span_factors(axis: Axis, span: tuple[int, int]) -> tuple[Axis, ...]:
    start = 0
    for segment in axis.segments:
        if (start, start + segment.size) == span:
            return segment.factors
        start += segment.size
    return ()


def reaches_softmax(node: fx.Node, program: Program) -> bool:
    """Whether a constant along the last axis is lost in a softmax on every way."""
    constants = program.constants

    def ok(user: fx.Node) -> bool:
        if op_name(user) == "softmax":
            return user.args[1] in (-1, user.meta["val"].dim() - 1)
        scalar = op_name(user) in ("mul", "div") and not any(
            a is not node and (a not in constants or constants[a].numel() > 1) for a in user.all_input_nodes
        )
        mask = op_name(user) in ("add", "masked_fill") and all(
            a is node or a in constants for a in user.all_input_nodes
        )
        passes = op_name(user) in ("to", "_to_copy", "dropout", "contiguous")
        return (scalar or mask or passes) and reaches_softmax(user, program)  # fmt: skip

    return bool(node.users) and all(ok(u) for u in node.users)


def _terminal_readings_any_shape(node: fx.Node, found: Interpretation) -> Iterator[Reading | None]:
    """As `_terminal_readings`, through reshapes that merge heads as well."""
    by_node = {r.node: r for r in found.readings}
    for user in node.users:
        if user in by_node and by_node[user].input is node:
            yield by_node[user]
        elif op_name(user) in _PASSES:
            yield from _terminal_readings_any_shape(user, found)
        else:
            yield None
