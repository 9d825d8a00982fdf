"""Alignments, one element for each space, on whole models: applied, composed, balanced."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hf_align.checkpoints.ondemand import OnDemand
from hf_align.runtime.devices import CPU
from hf_align.symmetry.action import Elements, act, occurrences
from hf_align.symmetry.elements import Element, Monomial, Power, load_element
from hf_align.symmetry.gauges.canonical import CanonicalWeights
from hf_align.symmetry.groups import ScaledPermutation
from hf_align.symmetry.spec import SymmetrySpec


class MovedWeights(OnDemand):
    """Weights moved by an alignment, tensor by tensor as they are asked for."""

    def __init__(self, weights: Mapping[str, Tensor], spec: SymmetrySpec, elements: Elements) -> None:
        super().__init__(weights)
        self._weights = weights
        self._spec = spec
        self._elements = elements

    def __getitem__(self, name: str) -> Tensor:
        return act(self._weights[name], name, self._spec, self._elements)


class AlignedWeights(MovedWeights):
    """A model's raw weights in canonical gauge, moved by an alignment, in row-major order: on how its factors lie in
    memory depends the last place of a product.

    Args:
        device: where they are moved; they are given on the CPU.
    """

    def __init__(
        self, raw: Mapping[str, Tensor], spec: SymmetrySpec, elements: Elements, device: torch.device = CPU
    ) -> None:
        super().__init__(CanonicalWeights(raw, spec.gauges), spec, elements)
        self._device = device

    def __getitem__(self, name: str) -> Tensor:
        return act(self._weights[name].to(self._device), name, self._spec, self._elements).contiguous().cpu()


def compose(spec: SymmetrySpec, later: Elements, earlier: Elements) -> dict[str, Element]:
    """The single elements that act as `earlier` and then `later`.

    An inner element belongs to a position of its index spaces; the later permutation of those carries it along.
    """
    composed: dict[str, Element] = {}
    for name, space in spec.spaces.items():
        first = earlier.get(name)
        if first is not None:
            first = _carried(first, [later.get(outer) for outer in space.index])
        second = later.get(name)
        if first is not None or second is not None:
            composed[name] = second @ first if first is not None and second is not None else first or second  # type: ignore[assignment]
    return composed


def inverse(spec: SymmetrySpec, elements: Elements) -> dict[str, Element]:
    """The elements that undo `elements`: inner ones first, and then those that carried them along."""
    undone: dict[str, Element] = {}
    for name in reversed([s for s in spec.spaces if s in elements]):
        undone = compose(spec, {name: elements[name].inverse()}, undone)
    return undone


def _carried(element: Element, outer: list[Element | None]) -> Element:
    """Reindex the leading axes of an element by the permutations of its index spaces, one axis for each; that of one
    which differs along those before it has their axes in front of its own."""
    tensors = element.tensors()
    for axis, permutation in enumerate(outer):
        if isinstance(permutation, Monomial):
            order = permutation.order
            order = order.reshape(*(1,) * (axis + 1 - order.dim()), *order.shape)
            tensors = {k: torch.take_along_dim(t, order.reshape(*order.shape, *(1,) * (t.dim() - order.dim())), axis)
                       for k, t in tensors.items()}  # fmt: skip
    return load_element(tensors)


def balance(spec: SymmetrySpec, weights: Mapping[str, Tensor], name: str) -> Element:
    """The gauge of a general linear, rotary or scaled space in which what writes it and what reads it have the same
    Gram matrix, so that what is left to match is an orthogonal map, a phase, a sign."""
    total: dict[Power, Tensor] = {}
    group = spec.group(name)
    for parameter in spec.uses(name):
        for power, rows in occurrences(weights[parameter].double(), parameter, spec, name):
            found = rows.square().sum(-1) if isinstance(group, ScaledPermutation) else rows @ rows.mT
            total[power] = total.get(power, torch.zeros(())) + found
    total = {power: found.cpu() for power, found in total.items()}
    return group.even(total) if isinstance(group, ScaledPermutation) else group.balance(total)


def squared_distance(a: Mapping[str, Tensor], b: Mapping[str, Tensor], name: str) -> float:
    """What a weight adds to the square of the Euclidean distance of two sets of weights."""
    return float((a[name].double() - b[name].double()).pow(2).sum())
