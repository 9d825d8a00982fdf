"""Which parts of a graph compute something of which anything is left."""

from __future__ import annotations

from torch import Tensor, fx


def shown_by(graph: fx.Graph) -> set[fx.Node]:
    """The nodes of which something is left: not those that only become tensors without entries, as what is done with
    the rows of a kind that no call has, or with blocks that no text fills."""
    shown = set[fx.Node]()
    for node in reversed(graph.nodes):
        value = node.meta.get("val")
        is_empty = isinstance(value, Tensor) and any(type(size) is int and size == 0 for size in value.shape)
        if not is_empty and (not node.users or not shown.isdisjoint(node.users)):
            shown.add(node)
    return shown
