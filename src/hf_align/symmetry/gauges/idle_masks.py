"""Masks that hide only what nobody sees: x ⊙ m, m of zeros and ones, whose outputs are the same with x in its place.

As of layers that set padding to zero, which attention leaves out and a later mask hides again. With x there, it is
clear what becomes of a constant that is added to x.

What depends on the hidden entries is followed entry by entry for some values of m, through ops that are known to keep
it apart, and through what other masks make of it that come from the same source.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Any

import torch
from torch import Tensor, fx

from hf_align.symmetry.gauges.index_provenance import NOBODY, moved, only_moves
from hf_align.symmetry.gauges.softmax_shift import MASKED
from hf_align.symmetry.interpreter.values import Interpretation
from hf_align.symmetry.rules.patterns import gives_only_its_shape, is_softmax, scales
from hf_align.tracing.execute import call_wide, run_node
from hf_align.tracing.ops import Trait, does, factors_of, is_pointwise


@dataclass(frozen=True)
class Mask:
    """x ⊙ m by the node of x, and by what m comes from with values, by each of which m is of zeros and ones."""

    value: fx.Node
    factor: fx.Node
    draws: tuple[dict[fx.Node, Tensor], ...]


def masks(found: Interpretation) -> dict[fx.Node, Mask]:
    """The products by masks that multiply each vector along the last axis as a whole."""
    products = [(node, *factors) for node in found.program.graph.nodes for factors in _factors(node)]
    by_node = {node: Mask(value, factor, tuple(_drawn(factor, found))) for node, value, factor in products}
    return {node: mask for node, mask in by_node.items() if mask.draws}


def idle_masks(found: Interpretation) -> dict[fx.Node, fx.Node]:
    """The products x ⊙ m that x could replace, all of them at once, and x."""
    return {product: mask.value for product, mask in masks(found).items() if hides_unseen(product, mask, found)}


Reached = Callable[[Tensor], Mapping[fx.Node, Tensor]]
"""From the entries of a product that its mask hides, those that are followed, by node."""


def hides_unseen(product: fx.Node, mask: Mask, found: Interpretation, reached: Reached | None = None) -> bool:
    """Whether nothing that the model returns depends on what a mask hides, or on what is reached of it."""
    for known in mask.draws:
        hidden = _Hidden(known, found)
        shown = hidden.value(mask.factor)
        if not isinstance(shown, Tensor):
            return False
        entries = (shown == 0).expand(product.meta["val"].shape)
        if not hidden.are_unseen({product: entries} if reached is None else reached(entries)):
            return False
    return True


def _factors(product: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """A value and what multiplies each vector of it along the last axis as a whole."""
    if does(product, Trait.MULTIPLIES) and len(product.all_input_nodes) == len(product.args) == 2:
        for value, mask in (product.args, product.args[::-1]):
            assert isinstance(value, fx.Node) and isinstance(mask, fx.Node)
            whole = value.meta["val"].shape == product.meta["val"].shape and value.meta["val"].dim() > 1
            if whole and value.meta["val"].is_floating_point() and scales(product, value):
                yield value, mask


def _drawn(mask: fx.Node, found: Interpretation) -> Iterator[dict[fx.Node, Tensor]]:
    """What a mask comes from, with values that make it one: its own if it is constant, and none if it hides nothing."""
    value = found.program.constants.get(mask)
    if isinstance(value, Tensor):
        if bool(((value == 0) | (value == 1)).all()) and bool((value == 0).any()):
            yield {}
        return
    source = mask
    while does(source, Trait.SAME | Trait.CASTS | Trait.MOVES) and len(before := source.all_input_nodes) == 1:
        if not isinstance(before[0].meta["val"], Tensor):
            break
        (source,) = before
    if source.meta["val"].dtype is torch.bool:
        yield from ({source: shown} for shown in _separating(source.meta["val"].shape))


def _separating(shape: torch.Size) -> Iterator[Tensor]:
    """Masks that tell any two places apart: one shows the first alone, and one the other. Some hide whole texts."""
    for axis, size in enumerate(shape):
        numbers = torch.arange(size).reshape(-1, *[1] * (len(shape) - axis - 1)).expand(shape)
        for bit in range((size - 1).bit_length()):
            shown = (numbers >> bit) % 2 == 1
            yield shown
            yield ~shown


class _Hidden:
    """What hidden entries decide, for one value of a mask: by node, whether each entry may depend on them.

    Attributes:
        low: scores of which a softmax leaves nothing beside others.
        zero: what it leaves of those.
    """

    def __init__(self, known: Mapping[fx.Node, Tensor], found: Interpretation) -> None:
        self.found = found
        self.known: dict[fx.Node, Any] = dict(known)
        self.depends: dict[fx.Node, Tensor] = {}
        self.low: dict[fx.Node, Tensor] = {}
        self.zero: dict[fx.Node, Tensor] = {}

    def are_unseen(self, starts: Mapping[fx.Node, Tensor]) -> bool:
        """Whether nothing that the model returns depends on these entries."""
        self.depends.update(starts)
        order = self.found.program.order
        waiting = [(order[user], user) for node in starts for user in node.users]
        heapify(waiting)
        seen = set[fx.Node]()
        while waiting:
            _, user = heappop(waiting)
            carried = [a for a in user.all_input_nodes if self._matters(a)]
            if user in seen or not [a for a in carried if not gives_only_its_shape(a, user)]:
                continue
            seen.add(user)
            after = self._behind(user, carried)
            if after is None:
                return False
            for node in after:
                for later in node.users:
                    heappush(waiting, (order[later], later))
        return True

    def _matters(self, node: fx.Node) -> bool:
        return any(node in kept and bool(kept[node].any()) for kept in (self.depends, self.low, self.zero))

    def _behind(self, user: fx.Node, carried: list[fx.Node]) -> list[fx.Node] | None:
        """The results of an op, followed; none if nobody knows what becomes of the entries, or the model returns it."""
        if only_moves(user, carried, self.found):
            return self._moved(user, carried)
        result = user.meta.get("val")
        if not isinstance(result, Tensor) or (after := self._decided(user, carried)) is None:
            return None
        self.depends[user] = after.expand(result.shape)
        return [user]

    def _moved(self, user: fx.Node, carried: list[fx.Node]) -> list[fx.Node]:
        for kept in (self.depends, self.low, self.zero):
            labels = {a: kept[a].long() + NOBODY for a in carried if a in kept}
            labels |= {a: torch.tensor(NOBODY).expand(a.meta["val"].shape) for a in carried if a not in kept}
            after = list(moved(user, labels, self.found))
            kept.update((node, part > NOBODY) for node, part in after)
        return [node for node, _ in after]

    def _decided(self, user: fx.Node, carried: list[fx.Node]) -> Tensor | None:
        """Which entries of a result depend on hidden ones; none if that is unknown."""
        if does(user, Trait.SELECTS):
            return self._selected(user)
        if is_softmax(user):
            return self._weighed(user)
        if does(user, Trait.CONTRACTS):
            return self._contracted(user)
        alone = carried == [user.args[0]] and isinstance(carried[0], fx.Node)
        first = self._of(self.depends, carried[0])
        if does(user, Trait.CONVOLVES):
            ones = torch.ones(user.args[1].meta["val"].shape).double()  # type: ignore[union-attr]
            known = alone and not user.kwargs
            return call_wide(user, (first.double(), ones, None, *user.args[3:]), {}) > 0 if known else None
        if does(user, Trait.AFFINE):
            return first.any(-1, keepdim=True) if alone and does(user, Trait.OUTPUTS_FIRST) else None
        if does(user, Trait.CENTRES):
            return first.any(-1, keepdim=True) if alone and len(user.args[1]) == 1 else None  # type: ignore[arg-type]
        if does(user, Trait.AVERAGES | Trait.TOTALS):
            return call_wide(user, (first.double(), *user.args[1:]), {}) > 0 if alone and not user.kwargs else None
        return self._entry_by_entry(user) if is_pointwise(user) else None

    def _entry_by_entry(self, user: fx.Node) -> Tensor:
        shape = user.meta["val"].shape
        after = torch.zeros(shape, dtype=torch.bool)
        for a in user.all_input_nodes:
            after = after | self._of(self.depends, a)
        values = [self.value(a) for a in user.args]
        known = [torch.as_tensor(v) for v in values if v is not None]
        if does(user, Trait.MULTIPLIES) and len(user.args) == 2 and len(known) == 1:
            (factor,) = known
            return after & (factor != 0)
        if does(user, Trait.ADDS) and not user.kwargs and len(user.args) == 2:
            low = torch.stack([self._low(a).expand(shape) for a in user.args]).any(0)
            self.low[user] = low
        return after

    def _selected(self, user: fx.Node) -> Tensor | None:
        """One of two values by a condition that is known."""
        fills = does(user, Trait.FILLS)
        condition, one, other = (user.args[i] for i in ((1, 2, 0) if fills else (0, 1, 2)))
        chosen = self.value(condition)
        if not isinstance(chosen, Tensor) or user.kwargs:
            return None
        shape = user.meta["val"].shape
        self.low[user] = torch.where(chosen, self._low(one), self._low(other)).expand(shape)
        return torch.where(chosen, self._of(self.depends, one), self._of(self.depends, other))

    def _weighed(self, user: fx.Node) -> Tensor:
        """By a softmax, which leaves nothing of scores that are low if one of the row is not.

        A key that only some queries do not see, as in causal attention, may be seen if the mask is another one.
        """
        scores = user.args[0]
        depends, low = self._of(self.depends, scores), self._low(scores)
        low = low.expand(depends.shape)
        by_all = low.all(-2, keepdim=True) if low.dim() > 1 else low
        self.zero[user] = zero = low & by_all & ~low.all(-1, keepdim=True)
        return (depends & ~zero).any(-1, keepdim=True) & ~zero

    def _contracted(self, user: fx.Node) -> Tensor | None:
        """Sums of products: what depends on hidden entries is lost where it meets zeros."""
        factors = factors_of(user)
        if factors is None or factors[2] is not None or len(user.args) != 2 or user.kwargs:
            return None
        left, right = (user.args[i] for i in factors[:2])
        through = [
            self._of(self.depends, one).double() @ (~self._of(self.zero, other)).double() if first else
            (~self._of(self.zero, other)).double() @ self._of(self.depends, one).double()
            for one, other, first in ((left, right, True), (right, left, False))
        ]  # fmt: skip
        return (through[0] + through[1]) > 0

    def _low(self, value: object) -> Tensor:
        known = self.value(value)
        return torch.as_tensor(known) <= MASKED if known is not None else self._of(self.low, value)

    def _of(self, kept: dict[fx.Node, Tensor], value: object) -> Tensor:
        """What is kept of a value, else false throughout."""
        if not isinstance(value, fx.Node):
            return torch.tensor(False)
        return kept[value] if value in kept else torch.tensor(False).expand(value.meta["val"].shape)

    def value(self, value: object) -> Any:
        """A number, or what a node gives if it comes from the mask and constants alone; else none."""
        if not isinstance(value, fx.Node):
            return value
        waiting = [value]
        while waiting:  # not by recursion: a recurrence is longer than the stack, and reads a value many times
            node = waiting[-1]
            unsettled = [] if self._is_settled(node) else [a for a in self._read(node) if not self._is_settled(a)]
            if unsettled:
                waiting.append(unsettled[0])
                continue
            if not self._is_settled(waiting.pop()):
                self.known[node] = self._computed(node)
        return self._settled(value)

    def _is_settled(self, node: fx.Node) -> bool:
        return node in self.known or node in self.found.program.constants

    def _settled(self, node: fx.Node) -> Any:
        constants = self.found.program.constants
        return constants[node] if node in constants else self.known[node]

    def _read(self, node: fx.Node) -> list[fx.Node]:
        """What a value is computed from; nothing where something is known to have no value, as what depends on hidden
        entries."""
        if node.op != "call_function" or node in self.depends:
            return []
        inputs = node.all_input_nodes
        return [] if any(self._is_settled(a) and self._settled(a) is None for a in inputs) else inputs

    def _computed(self, node: fx.Node) -> Any:
        inputs = {a: self._settled(a) for a in self._read(node)}
        if not inputs or any(v is None for v in inputs.values()):
            return None
        return run_node(node, inputs.__getitem__)
