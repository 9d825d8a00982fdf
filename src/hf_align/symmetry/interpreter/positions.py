"""What a graph computes from positions, at other positions than those that were traced.

The tables of a rotary embedding are constants of a graph, made from position ids and frequencies that are constants,
too. A frequency says little at the few positions of a trace: slow planes hardly turn, close ones turn nearly alike. So
the constants are computed once more, in float64, with position ids far out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Generator, Tensor, fx

from hf_align.tracing.execute import run_node

Maps = Callable[[Mapping[fx.Node, Any]], Tensor | None]
"""From the values of constants to what a region of the graph makes of them: one matrix for each place, [*, n, n]."""

_STRIDES = (61, 2003, 131071)
"""How far apart positions are put, as far as the tables of the graph reach. There float64 shows many times over by what
frequencies differ that differ in the last place of float32."""
_PLACES = 64
"""Matrices to look at in each row of positions far apart."""
_SAME = 1e-6
"""Up to where matrices made from tables in float32 are the same."""


class Recomputed(Mapping[fx.Node, Any]):
    """Constants, some of them changed, and all that are made of these."""

    def __init__(self, known: Mapping[fx.Node, Any], changes: Mapping[fx.Node, Any], wanted: Iterable[fx.Node]) -> None:
        self.known = known
        self._values = {node: _wide(value) for node, value in changes.items()}
        for node in sorted(_above(wanted, known)):
            if node not in self._values and any(a in self._values for a in node.all_input_nodes):
                self._values[node] = _wide(run_node(node, lambda n: _wide(self[n])))

    def __getitem__(self, node: fx.Node) -> Any:
        return self._values[node] if node in self._values else self.known[node]

    def __contains__(self, node: object) -> bool:
        return node in self.known

    def __iter__(self) -> Iterator[fx.Node]:
        return iter(self.known)

    def __len__(self) -> int:
        return len(self.known)


class Places:
    """One region of the graph at the positions of the trace and at others.

    Attributes:
        coefficients: the constants that it reads.
        sources: the position ids that these are made of, with their values; none if they cannot be told.
    """

    def __init__(self, maps: Maps, known: Mapping[fx.Node, Any], coefficients: Iterable[fx.Node]) -> None:
        self.maps = maps
        self.known = known
        self.coefficients = [c for c in coefficients if _is_inexact(known[c])]
        above = _above(self.coefficients, known)
        self.leaves = [n for n in sorted(above) if not n.all_input_nodes and isinstance(known[n], Tensor)]
        self.sources = {n: known[n] for n in self.leaves if self._is_position(n)}

    def far(self) -> list[Tensor]:
        """The matrices of some positions further and further apart, [places, n, n] each."""
        found = (self._at(self._positions(stride)) for stride in _STRIDES if self.sources)
        return [_some(maps) for maps in found if maps is not None]

    def with_other_coefficients(self) -> Tensor | None:
        """The matrices if the region read random numbers: what they have in common with the true ones is structure."""
        return self._at(_stirred(self.known, self.coefficients))

    def with_other_frequencies(self) -> Tensor | None:
        """The matrices at positions far apart if no constant that they are made of were what it is."""
        if not self.sources:
            return None
        leaves = [n for n in self.leaves if n not in self.sources]
        return self._at({**_stirred(self.known, leaves), **self._positions(_STRIDES[0])})

    def _positions(self, stride: int) -> dict[fx.Node, Tensor]:
        """Other numbers in the place of position ids; a single one may be zero, and is counted on."""
        strides = {node: stride + 2 * k for k, node in enumerate(self.sources)}
        return {n: v * strides[n] if len(v.unique()) > 1 else v + strides[n] for n, v in self.sources.items()}

    def _at(self, changes: Mapping[fx.Node, Any]) -> Tensor | None:
        try:
            maps = self.maps(Recomputed(self.known, changes, self.coefficients))
        except (IndexError, RuntimeError):  # a table ends before
            return None
        return None if maps is None else maps.reshape(-1, *maps.shape[-2:])

    def _is_position(self, leaf: fx.Node) -> bool:
        """Whether to add one to what a constant counts turns everything once more by the same.

        Where there is one place, it is added twice. What is whole by its dtype turns so, too, and is no frequency.
        """
        value = self.known[leaf]
        if value.is_complex() or value.dtype == torch.bool or not torch.equal(value, value.round()):
            return False
        here, there = self._at({leaf: value}), self._at({leaf: value + 1})
        if here is None or there is None or here.shape != there.shape or torch.equal(here, there):
            return False
        if len(here) == 1:
            further = self._at({leaf: value + 2})
            if value.is_floating_point() or further is None:
                return False
            here, there = torch.cat([here, there]), torch.cat([there, further])
        elif len(value.unique()) < 2:
            return False
        step, info = torch.linalg.solve_ex(_some(here).mT, _some(there).mT)
        return not bool(info.any()) and bool(torch.allclose(step, step[:1].expand_as(step), rtol=_SAME, atol=_SAME))


def _some(maps: Tensor) -> Tensor:
    """The matrices of some of all places."""
    return maps[torch.linspace(0, len(maps) - 1, min(len(maps), _PLACES)).long()]


def _above(nodes: Iterable[fx.Node], known: Mapping[fx.Node, Any]) -> set[fx.Node]:
    """What constants are made of, themselves included."""
    found, stack = set[fx.Node](), [n for n in nodes if n in known]
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack.extend(node.all_input_nodes)
    return found


def with_other_numbers(known: Mapping[fx.Node, Any], coefficients: Iterable[fx.Node]) -> Recomputed:
    """Constants among which random numbers stand in place of the coefficients of a region."""
    return Recomputed(known, _stirred(known, coefficients), ())


def _stirred(known: Mapping[fx.Node, Any], nodes: Iterable[fx.Node]) -> dict[fx.Node, Tensor]:
    """Other numbers in the place of some, none of them zero."""
    rng, values = Generator().manual_seed(0), {n: known[n] for n in nodes}
    return {n: v + 1 + torch.rand(v.shape, generator=rng).to(v.dtype) for n, v in values.items() if _is_inexact(v)}


def _is_inexact(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def _wide(value: Any) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value.double()
    if isinstance(value, Tensor) and value.is_complex():
        return value.to(torch.complex128)
    return tuple(map(_wide, value)) if isinstance(value, tuple) else value
