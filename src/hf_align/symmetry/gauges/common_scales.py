"""Scales that whole values share: v(sθ) = s v(θ) for some weights θ, and W/s for the map W that reads v.

The slopes of an activation, or what a recurrence writes beside what passes it by, have one factor in common that no
single unit has. So has a gate, one number that multiplies what a linear map writes, and so has each of several numbers
that are stored as one vector and read one by one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from itertools import islice, product

import torch
from torch import Tensor, fx

from hf_align.symmetry.gauges.canonical import Gauge, Get, Slices
from hf_align.symmetry.gauges.degrees import cancels
from hf_align.symmetry.gauges.index_provenance import follow, moved, numbered, only_moves, present, slices_of
from hf_align.symmetry.interpreter.values import Interpretation
from hf_align.symmetry.rules.links import Link, link_of
from hf_align.symmetry.rules.patterns import gives_only_its_shape, scales
from hf_align.tracing.ops import Trait, does

_TRIED = 32
"""Ways to share a factor out that are tried at most."""


@dataclass(frozen=True)
class Part:
    """Entries of a weight along an axis, or all of a weight, which a model reads as f(w).

    Attributes:
        power: of the factor by which they are multiplied.
    """

    weight: str
    power: int
    link: Link = Link.SAME
    axis: int = 0
    entries: Slices | None = None

    def powers(self, shape: torch.Size) -> Tensor:
        """Of each entry of the weight."""
        if self.entries is None:
            return torch.full(shape, self.power)
        every = torch.zeros(shape[self.axis], dtype=torch.long)
        for start, stop in self.entries:
            every[start:stop] = self.power
        return every.reshape([-1 if i == self.axis else 1 for i in range(len(shape))]).expand(shape)


@dataclass(frozen=True)
class CommonScale(Gauge):
    """θ/l replaces θ, and lW replaces W, so that f(u) for the numbers u of one of the θ, or a few of them, has a mean
    square of one.

    Where f cannot be that large, as a gate's tanh, the one number u becomes one itself, whatever its sign.
    """

    unit: str
    link: Link
    parts: tuple[Part, ...]
    entries: Slices | None = None

    said = "a scale that slopes, gates or branches share, moved into what they meet"
    counts_on_others = False

    @property
    def targets(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(part.weight for part in self.parts))

    def fix(self, name: str, get: Get) -> Tensor:
        unit = get(self.unit).double()
        if self.entries is not None:
            unit = torch.cat([unit[start:stop] for start, stop in self.entries])
        read = self.link.read(unit)
        if self.link is Link.TANH:
            length = read.sum() / self.link.read(torch.ones_like(read).sum())
            if name == self.unit:
                return torch.ones_like(get(name))
        else:
            length = read.square().mean().sqrt()
            if not bool(length):
                return get(name)
        fixed = get(name).double()
        for part in self.parts:
            if part.weight == name:
                powers = part.powers(fixed.shape).to(length.device)
                factors = torch.where(powers > 0, length, torch.where(powers < 0, 1 / length, 1.0))
                fixed = part.link.times(fixed, factors)
        return fixed.to(get(name).dtype)


def common_scales(found: Interpretation, gone: Collection[str]) -> Iterator[CommonScale]:
    """The gauges of all numbers and vectors that multiply some value.

    Args:
        gone: gains that have gone into other weights.
    """
    taken = set(gone)
    for link in sorted(Link, key=lambda link: link is not Link.SAME):  # what is read as it is stands for the others
        for node, name in found.program.parameters.items():
            shape = node.meta["val"].shape
            size = shape.numel()
            if name in taken or not size or size not in (1, *shape[-1:]) or (link is Link.TANH and size > 1):
                continue
            for own in (*_one_by_one(Part(name, -1, link), size, found), Part(name, -1, link)):
                if own.entries is None and name in taken:  # one by one
                    continue
                parts = next((p for p in _shared(own, found) if _is_sound(p, found)), None)
                if parts is not None:
                    yield CommonScale(name, link, tuple(sorted(parts, key=str)), own.entries)
                    taken |= {part.weight for part in parts if part.power < 0}


Shares = frozenset[Part]
"""One way to multiply a value by a factor."""


def _shared(own: Part, found: Interpretation) -> Iterator[Shares]:
    """Ways in which a factor of a part may go elsewhere: into what writes the values that it multiplies, or into what
    reads the products. Whether the outputs stay is not known yet."""
    reads = [view for read in _reads(own, found) for view in _shows(own, read, found)]
    users = {u for read in reads for u in read.users if u not in reads}
    if not any(does(user, Trait.MULTIPLIES) for user in users):
        return
    if all(does(user, Trait.MULTIPLIES) for user in users):
        others = [a for user in users for a in user.args if isinstance(a, fx.Node) and a not in reads]
        yield from _together([_ways(a, 1, found, frozenset()) for a in others], own)
    if own.link is not Link.TANH:
        behind = _behind(reads, found)
        if behind is not None:
            yield from _together(behind, own)


def _together(choices: list[list[Shares]], own: Part) -> Iterator[Shares]:
    for chosen in islice(product(*choices), _TRIED):
        parts = frozenset((own,)).union(*chosen)
        if own.link is not Link.TANH or all(part.link is Link.SAME for part in parts - {own}):  # its sign goes, too
            yield parts


def _behind(reads: list[fx.Node], found: Interpretation) -> list[list[Shares]] | None:
    """What else must have a factor that some values have, so that only linear maps see it: one choice each."""
    order, marked, choices = found.program.order, set(reads), list[list[Shares]]()
    waiting = {u for read in reads for u in read.users} - marked
    while waiting:
        user = min(waiting, key=order.__getitem__)
        waiting.remove(user)
        reading = found.linear_uses.get(user)
        if reading is not None and reading.input in marked:
            choices.append([frozenset((Part(reading.weight, 1),))])
            continue
        operands = [a for a in user.all_input_nodes if not gives_only_its_shape(a, user)]
        if does(user, Trait.ADDS | Trait.SUBTRACTS | Trait.JOINS | Trait.STACKS | Trait.SELECTS):
            values = operands[1:] if does(user, Trait.SELECTS) else operands
            choices += [_ways(a, -1, found, frozenset(marked)) for a in values if a not in marked]
        elif not (does(user, Trait.MULTIPLIES | Trait.DIVIDES | Trait.CONTRACTS | Trait.MOVES) or _is_linear(user)):
            return None
        marked.add(user)
        waiting |= set(user.users) - marked
    return choices


def _ways(value: fx.Node, power: int, found: Interpretation, marked: frozenset[fx.Node]) -> list[Shares]:
    """How a factor, to some power, could come into a value: from the weights that write it.

    Args:
        marked: values that have it already.
    """
    if value in marked:
        return [frozenset()]
    if (parts := _stored(value, power, found) or _written(value, power, found)) is not None:
        return [parts]
    operands = [a for a in value.all_input_nodes if a not in found.program.constants]
    if does(value, Trait.ADDS | Trait.SUBTRACTS | Trait.JOINS | Trait.STACKS):
        ways = [_ways(a, power, found, marked) for a in operands]
        return [frozenset[Part]().union(*chosen) for chosen in islice(product(*ways), _TRIED)]
    if does(value, Trait.MULTIPLIES | Trait.CONTRACTS):
        return [way for a in operands for way in _ways(a, power, found, marked)][:_TRIED]
    if len(operands) == 1 and (does(value, Trait.MOVES | Trait.DIVIDES | Trait.FILLS) or _is_linear(value)):
        shows = does(value, Trait.MOVES) and isinstance(value.meta["val"], Tensor)
        scaled = _written(value, power, found, through_scales=True) if shows else None
        return [*([scaled] if scaled else []), *_ways(operands[0], power, found, marked)]
    return []


def _is_linear(node: fx.Node) -> bool:
    """Whether an op is linear in its only operand."""
    return does(node, Trait.LINEAR) and len(node.args) == 1 and not node.kwargs


def _stored(value: fx.Node, power: int, found: Interpretation) -> Shares | None:
    """The weight that a value shows as it is, or by a link that any positive factor can go through."""
    node, link = _before_moves(value), Link.SAME
    if node not in found.program.parameters and (through := link_of(node)) is not None and through.is_positive:
        node, link = _before_moves(node.all_input_nodes[0]), through
    name = found.program.parameters.get(node)
    return frozenset((Part(name, power, link),)) if name is not None else None


def _before_moves(node: fx.Node) -> fx.Node:
    while does(node, Trait.MOVES) and len(node.all_input_nodes) == 1:
        (node,) = node.all_input_nodes
    return node


def _written(value: fx.Node, power: int, found: Interpretation, through_scales: bool = False) -> Shares | None:
    """The outputs of a linear map that a value shows, and nothing else.

    Args:
        through_scales: whether each vector of outputs may be multiplied by a number.
    """
    steps, node = list[fx.Node](), value
    while node not in found.linear_uses:
        scaled = [a for a in node.all_input_nodes if through_scales and _scaled(node, a)]
        if not scaled and not only_moves(node, node.all_input_nodes[:1], found):
            return None
        steps.append(node)
        node = (scaled or node.all_input_nodes)[0]
    reading = found.linear_uses[node]
    labels = {node: numbered(reading)}
    for step, before in zip(reversed(steps), [node, *reversed(steps)], strict=False):
        if _scaled(step, before):
            labels[step] = labels[before]
        elif step not in labels:
            labels.update(moved(step, labels, found))
    if len(found.weights[reading.weight].axes) != 2:
        return None
    entries = slices_of(present(labels[value]))
    parts = [Part(reading.weight, power, axis=1 - reading.in_axis, entries=entries)]
    return frozenset((*parts, *([Part(reading.bias, power, entries=entries)] if reading.bias is not None else [])))


def _scaled(user: fx.Node, node: fx.Node) -> bool:
    """Whether an op multiplies each vector along the last axis of a value by a number."""
    return scales(user, node) and user.meta["val"].shape == node.meta["val"].shape


def _reads(part: Part, found: Interpretation) -> list[fx.Node]:
    """Where the weight of a part is read as the part says; nowhere if it is read in another way, too."""
    stored = [node for node, name in found.program.parameters.items() if name == part.weight]
    if part.link is Link.SAME:
        return stored
    views = [view for node in stored for view in _views(node)]
    users = [user for view in views for user in view.users if user not in views]
    return users if all(link_of(user) is part.link for user in users) else []


def _one_by_one(whole: Part, size: int, found: Interpretation) -> list[Part]:
    """The entries of a vector, if no use of it shows more than one of them."""
    shown = [labels for read in _reads(whole, found) for labels in _entries(read, found).values()] if size > 1 else []
    apart = bool(shown) and all(bool((labels == labels.flatten()[0]).all()) for labels in shown)
    return [replace(whole, entries=((i, i + 1),)) for i in range(size)] if apart else []


def _entries(read: fx.Node, found: Interpretation) -> dict[fx.Node, Tensor]:
    """Values that show entries of a vector, by number, to ops that do more than to move them."""
    shape = read.meta["val"].shape
    numbers = torch.arange(shape.numel()).reshape(shape)
    return {use.value: use.labels for use in follow({read: numbers}, found) if use.labels.numel()}


def _shows(part: Part, read: fx.Node, found: Interpretation) -> list[fx.Node]:
    """The values that show what is read of a part, and nothing else."""
    if part.entries is None:
        return _views(read)
    ((entry, _),) = part.entries
    return [value for value, labels in _entries(read, found).items() if bool((labels == entry).all())]


def _views(node: fx.Node) -> list[fx.Node]:
    """A value, and all that only shows its entries elsewhere."""
    views = [node]
    for view in views:
        views += [u for u in view.users if does(u, Trait.MOVES) and u.all_input_nodes == [view]]
    return views


def _is_sound(parts: Shares, found: Interpretation) -> bool:
    """Whether a factor that is shared out so is in no output, with its power at all places where a share is read."""
    powers: dict[fx.Node, Tensor] = {}
    for part in parts:
        reads = _reads(part, found)
        for node in reads:
            powers[node] = powers.get(node, 0) + part.powers(node.meta["val"].shape)
        if not reads:
            return False
    return cancels(powers, found, any_sign=any(part.link is Link.TANH for part in parts))
