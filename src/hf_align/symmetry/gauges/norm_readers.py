"""What reads whole normalised vectors in the end, however these are moved, laid side by side, or scaled before."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx
from torch.nn.functional import interpolate

from hf_align.symmetry.gauges.folds import Read
from hf_align.symmetry.gauges.index_provenance import every_entry, follow, moved_alone
from hf_align.symmetry.interpreter.values import Interpretation, LinearUse
from hf_align.symmetry.rules.patterns import keeps_last, pads, scales
from hf_align.tracing.execute import run_node
from hf_align.tracing.ops import Trait, does, factors_of


@dataclass(frozen=True)
class Reading:
    """A linear reader of normalised vectors, how it reads several of them at once, and whether scaled (`Read`)."""

    use: LinearUse
    before: int = 1
    behind: int = 1
    scaled: bool = False

    def read(self, scaled: Collection[str], found: Interpretation) -> Read:
        """What it reads; its bias takes no constant up where a convolution also reads the padding, or where vectors are
        scaled.

        Args:
            scaled: the weights of all readers of scaled vectors.
        """
        use, is_scaled = self.use, self.use.weight in scaled
        takes = use.bias and not is_scaled and (len(found.weights[use.weight].axes) == 2 or not pads(use.node))
        return Read(use.weight, use.in_axis, use.bias if takes else None, self.before, self.behind, is_scaled)


def terminal_readings(node: fx.Node, found: Interpretation, scaled: bool = False) -> Iterator[Reading | None]:
    """The linear readers of vectors along the last axis, behind ops that only move or scale them; None for all else.

    Args:
        scaled: whether they have been scaled before.
    """
    for user in node.users:
        if (reading := _reading(user, node, found)) is not None:
            yield _along_last(reading, node, found, scaled)
        elif does(user, Trait.MOVES) and user.all_input_nodes[0] is node and keeps_last(user):
            yield from terminal_readings(user, found, scaled)
        elif does(user, Trait.MOVES) and user.all_input_nodes == [node] and isinstance(node.meta["val"], Tensor):
            yield from (r and replace(r, scaled=scaled) for r in _readings_elsewhere(node, user, found))
        elif scales(user, node):
            yield from terminal_readings(user, found, True)
        else:
            yield None


def _reading(user: fx.Node, value: fx.Node, found: Interpretation) -> LinearUse | None:
    """What an op reads of a value by a weight, or by one matrix of a table for each vector, as numbers choose it."""
    use = found.reading(user, value)
    return use if use is not None else _by_chosen_matrices(user, value, found)


def _by_chosen_matrices(user: fx.Node, value: fx.Node, found: Interpretation) -> LinearUse | None:
    """y = T[i] x, for vectors [n, inputs, 1], or y = x T[i], for [n, 1, inputs]; the node is the lookup of T[i]."""
    factors = factors_of(user) if does(user, Trait.BATCHED) else None
    if factors is None:
        return None
    left, right = (user.args[at] for at in factors[:2])
    lookup, axis, single = (left, 2, 2) if right is value else (right, 1, 1)
    while _swaps_last(lookup) and len(lookup.users) == 1:  # type: ignore[union-attr]
        lookup, axis = lookup.all_input_nodes[0], 3 - axis  # type: ignore[union-attr]
    if not (isinstance(lookup, fx.Node) and does(lookup, Trait.TAKES_ENTRIES) and len(lookup.users) == 1):
        return None
    table = lookup.all_input_nodes[0]
    name = found.program.parameters.get(table)
    whole = lookup.meta["val"].shape[1:] == table.meta["val"].shape[1:] and len(lookup.args[1]) == 1  # type: ignore[arg-type]
    if name is None or not whole or value.meta["val"].shape[single] != 1:
        return None
    return LinearUse(lookup, value, name, axis, None, out_axis=-single)


def _swaps_last(node: object) -> bool:
    """Whether an op exchanges the last two axes of its one operand."""
    if not isinstance(node, fx.Node) or not does(node, Trait.REORDERS_AXES) or len(node.all_input_nodes) != 1:
        return False
    entries = every_entry(node.all_input_nodes[0])
    return entries.dim() > 1 and torch.equal(run_node(node, lambda _: entries), entries.mT)


def _along_last(reading: LinearUse, node: fx.Node, found: Interpretation, scaled: bool) -> Reading | None:
    """What reads vectors along the last axis; a kernel may read one entry of each of several."""
    if len(found.weights[reading.weight].axes) == 2:
        return Reading(reading, scaled=scaled)
    read = reading_of_all(reading, every_entry(node), node.meta["val"].shape[-1], found)
    return read and replace(read, scaled=scaled)


def _readings_elsewhere(node: fx.Node, user: fx.Node, found: Interpretation) -> Iterator[Reading | None]:
    """The same for what one op shows of vectors whose entries it lays along another axis, or several side by side."""
    size = node.meta["val"].shape[-1]
    labels = moved_alone(user, node, every_entry(node), found)
    if labels is None:
        yield None
        return
    for use in follow({user: labels}, found, _nearest):
        reading = _reading(use.user, use.value, found)
        yield reading_of_all(reading, use.labels, size, found) if reading is not None else None


def _nearest(user: fx.Node, node: fx.Node, labels: Tensor) -> Tensor | None:
    """The labels of vectors that are resampled from place to place: each becomes a mean of such, by factors that sum to
    one; it is called as the nearest of them."""
    if not does(user, Trait.RESAMPLES) or user.args[0] is not node:
        return None
    return interpolate(labels.double(), user.meta["val"].shape[2:]).long()


def reading_of_all(reading: LinearUse, labels: Tensor, size: int, found: Interpretation) -> Reading | None:
    """How the inputs of a linear map are vectors' entries in order, each of them whole, and alike wherever it reads.

    Args:
        labels: entries of all vectors by number, one vector after the other; below zero where there is none.
        size: of a vector.
    """
    inputs = labels.movedim(reading.out_axis, -1)
    count = found.weights[reading.weight].axes[reading.in_axis].size
    if inputs.shape[-1] != count or not inputs.numel() or count % size or bool((inputs < 0).any()):
        return None
    first = inputs.reshape(-1, count)[0] % size
    behind = int((first != 0).nonzero()[0]) if bool(first.any()) else count
    if not behind or count % (size * behind):
        return None
    parts = inputs.unflatten(-1, (count // (size * behind), size, behind))
    starts = parts - torch.arange(size)[:, None]
    first = starts[..., :1, :]
    in_order = bool((first % size == 0).all()) and bool((starts == first).all())
    return Reading(reading, parts.shape[-3], behind) if in_order else None
