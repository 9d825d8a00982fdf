"""What the outputs of a program show of its weights: Jacobians on random contexts, as few as tell."""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Generator, Tensor
from torch.fx import Node

from hf_align.symmetry.certificate.null_space import without_effect
from hf_align.symmetry.certificate.random_copy import Weights, random_inputs
from hf_align.tracing.execute import run
from hf_align.tracing.program import Program, upstream

_OUTPUTS_MIXED = 4
"""Combinations of the outputs at one position that the count looks at: more of them see less that is new than others of
another context do, and cost as much."""
_FIRST_OUTPUTS = 2
"""Of each result that are looked at for an effect first."""
_MORE_OUTPUTS = 4
"""Times as many, after a look that has found one."""
_FEW = 4
"""Contexts after which it is first asked whether some weights are still unread; then after twice as many, and so on."""
_MANY = 64
"""Contexts: where more than that, as many as all before them together, read nothing new, no others are asked."""
_MANY_NUMBERS = 2**20
"""In the values of one run: from there on an output costs what its run does, however many outputs that shows."""
_NUMBERS = 2**22
"""Numbers in memory at once, about: outputs are differentiated as many together as this allows."""


@dataclass(frozen=True)
class Look:
    """Some results of a program, on so many contexts; few outputs of each where no more are wanted."""

    results: tuple[Node, ...]
    contexts: int
    wanted: float = math.inf


def looks(program: Program, sizes: Mapping[str, int], share: float, *, spare: int = 0) -> Iterator[Look]:
    """Enough contexts for as many outputs as there are parameters, times a share.

    One result may follow from another, so that several together show no more than the largest of them. What only some
    of the smaller results see needs contexts of its own, or it would seem to have no effect.

    Args:
        sizes: entries of each parameter, by name.
        spare: contexts beyond that.
    """
    results = _real(program)
    wanted = share * sum(sizes.values())
    rows = {result: _rows(result, wanted) for result in results}
    read = {result: _read(program, [result]) for result in rows}
    seen = 0
    for least in sorted(set(rows.values()), reverse=True):
        few = tuple(result for result in rows if rows[result] <= least)
        beside = frozenset[str]().union(*(read[result] for result in rows if rows[result] > least))
        numbers = sum(size for name, size in sizes.items() if name not in beside)
        contexts = math.ceil(share * numbers / least) + spare
        if contexts > seen and numbers:
            yield Look(few, contexts - seen, wanted)
            seen = contexts


def telling_looks(
    program: Program, share: float, *, spare: int = 0, most: int, read: Mapping[Node, frozenset[str]] | None = None
) -> Iterator[Look]:
    """Looks at a few results that depend on all parameters that any result depends on: of several calls that see the
    same, at the one that shows most for what it costs; at others for what that one does not see.

    Args:
        share: outputs for each direction.
        spare: contexts beyond that.
        most: in how many directions the parameters can move at most.
        read: the parameters that each result depends on, if it is known better than by the graph (`moving`).
    """
    results = _real(program)
    read = read or {result: _read(program, [result]) for result in results}
    numbers = {result: _numbers_of_run(result, program) for result in results}
    price = {result: (n // _MANY_NUMBERS, n / max(1, _rows(result))) for result, n in numbers.items()}
    left = frozenset[str]().union(*read.values())
    while left:
        result = max(results, key=lambda result: (_entries(program, read[result] & left), *(-p for p in price[result])))
        wanted = share * min(most, _entries(program, read[result] & left))
        yield _look(result, wanted, wanted, spare)
        left -= read[result]


def _look(result: Node, rows: float, outputs: float, spare: int) -> Look:
    """At a result in as many contexts as it takes for so many rows, with so many outputs in each, and in some more."""
    return Look((result,), math.ceil(rows / max(1, _rows(result, outputs))) + spare, outputs)


def glances(program: Program, weights: Weights, rng: Generator) -> dict[Node, Tensor]:
    """The derivatives of an output of each result in a few contexts, as `jacobian` gives them."""
    return {result: _jacobian(program, weights, result, Look((result,), _FEW, 1), rng) for result in _real(program)}


def moving(glanced: Mapping[Node, Tensor], weights: Weights) -> dict[Node, frozenset[str]]:
    """The parameters that each result depends on at a glance: where a mask hides all of the input, what reads the input
    changes nothing."""
    found = dict[Node, frozenset[str]]()
    for result, rows in glanced.items():
        parts = rows.split([w.numel() for w in weights.values()], dim=1)
        found[result] = frozenset(n for n, part in zip(weights, parts, strict=True) if part.any())
    return found


def _real(program: Program) -> list[Node]:
    """The results that have a derivative."""
    return [result for result in program.interface if result.meta["val"].is_floating_point()]


def _entries(program: Program, names: Iterable[str]) -> int:
    return sum(math.prod(program.shapes[name]) for name in names)


def _numbers(nodes: Iterable[Node]) -> int:
    """How many there are in the values of some nodes."""
    values = (node.meta.get("val") for node in nodes)
    return sum(value.numel() for value in values if isinstance(value, Tensor))


def _numbers_of_run(result: Node, program: Program) -> int:
    return _numbers(upstream([result], program))


def _rows(result: Node, wanted: float = math.inf) -> int:
    """Outputs that one context adds to the Jacobian."""
    places, _, combinations = _mixed(result, wanted)
    return places * combinations


def _mixed(result: Node, wanted: float) -> tuple[int, int, int]:
    """Outputs that are mixed with each other: how many such sets there are, the entries of each, and combinations of
    them. They are those at one position, or all where fewer are wanted than there are positions."""
    *places, size = _shape(result)
    count = torch.Size(places).numel()
    if wanted < count:
        return 1, count * size, math.ceil(wanted)
    return count, size, math.ceil(min(size, _OUTPUTS_MIXED, wanted / max(1, count)))


def _shape(result: Node) -> torch.Size:
    """Of something that the model returns; a number is a vector."""
    shape = result.meta["val"].shape
    return shape if len(shape) else torch.Size((1,))


def without_derivative(program: Program) -> frozenset[str]:
    """The parameters that only decide choices (which experts, which tokens): no floating point way leads from them to
    a result."""
    return frozenset(program.parameters.values()) - _read(program, program.interface)


def _read(program: Program, results: Sequence[Node]) -> frozenset[str]:
    """The parameters from which a floating point way leads to some results."""
    differentiable, stack = set(), list(results)
    while stack:
        node = stack.pop()
        value = node.meta.get("val")
        if node not in differentiable and not (isinstance(value, Tensor) and not value.is_floating_point()):
            differentiable.add(node)
            stack.extend(node.all_input_nodes)
    return frozenset(name for node, name in program.parameters.items() if node in differentiable)


def jacobian(program: Program, weights: Weights, looks: Iterable[Look], rng: Generator) -> Tensor:
    """The derivatives of outputs on random contexts by the weights, [outputs, parameters], float64.

    Reverse mode, with the ops of many contexts and many of their outputs run as one: at these sizes a run costs its
    ops, and an output's derivative need not go through contexts or calls that it does not depend on.
    """
    return torch.cat([_jacobian(program, weights, result, look, rng) for look in looks for result in look.results])


def _jacobian(program: Program, weights: Weights, result: Node, look: Look, rng: Generator) -> Tensor:
    needed = upstream([result], program)
    at_once = 1 + _NUMBERS // _numbers(needed)
    mixes = torch.randn(look.contexts, *_mixed(result, look.wanted), generator=rng, dtype=torch.float64)

    def at(inputs: Mapping[str, Tensor], mix: Tensor) -> Tensor:
        def seen(leaves: Weights) -> Tensor:
            value = run(program, leaves, inputs, needed)[result]
            return (value.reshape(len(mix), 1, -1) @ mix).reshape(-1)

        shown, pull_back = torch.func.vjp(seen, weights)  # type: ignore[misc]

        def derivative(one: Tensor) -> Tensor:
            gradients = pull_back(one)[0]
            # Detached: each would keep all that it was computed from, in order to be differentiated once more.
            return torch.cat([gradients[name].detach().reshape(-1) for name in weights])

        return torch.func.vmap(derivative, chunk_size=at_once)(torch.eye(len(shown)).double())

    contexts = [random_inputs(program, rng) for _ in range(look.contexts)]
    return torch.cat([*in_each(at, contexts, (mixes,), at_once // (_rows(result, look.wanted) + 1))])


def reached(program: Program, weights: Weights, contexts: int, rng: Generator) -> Tensor:
    """Which weights some of so many contexts read, [parameters], bool.

    A weight that is read and then lost (a key's bias) is a null direction; one that is not read (the row of a table
    that no input looks up), or that only decides choices, is only not there.
    """
    choosing = without_derivative(program)
    able = torch.cat([torch.full((w.numel(),), n not in choosing) for n, w in weights.items()])
    found, count = torch.zeros_like(able), _FEW
    while contexts > 0 and (readers := _readers(program, _holding(able & ~found, weights))):
        few = [random_inputs(program, rng) for _ in range(min(contexts, count))]
        more = _read_in_some(program, weights, readers, few) & ~found
        if count > _MANY and not more.any():
            break
        found |= more
        contexts, count = contexts - count, 2 * count
    return found & able


def _holding(some: Tensor, weights: Weights) -> set[str]:
    """The parameters that hold some of all entries."""
    parts = some.split([w.numel() for w in weights.values()])
    return {name for name, part in zip(weights, parts, strict=True) if part.any()}


def _readers(program: Program, names: Container[str]) -> list[Node]:
    """What is computed from some parameters directly."""
    users = {user for node, name in program.parameters.items() if name in names for user in node.users}
    return [node for node in program.graph.nodes if node in users and node.op == "call_function"]


def _read_in_some(
    program: Program, weights: Weights, readers: Sequence[Node], contexts: Sequence[Mapping[str, Tensor]]
) -> Tensor:
    """Which weights some nodes depend on in some of the contexts, [parameters], bool."""
    needed = upstream(readers, program)

    def at(inputs: Mapping[str, Tensor]) -> Tensor:
        def noise(leaves: Weights) -> Tensor:
            return _noise(run(program, leaves, inputs, needed), readers)

        shown, pull_back = torch.func.vjp(noise, weights)  # type: ignore[misc]
        gradients = pull_back(torch.ones_like(shown))[0]
        return torch.cat([gradients[name].reshape(-1) for name in weights])

    at_once = 1 + _NUMBERS // _numbers(needed)
    return torch.stack([*in_each(at, contexts, (), at_once)]).ne(0).any(0)


def in_each(
    at: Callable[..., Tensor], contexts: Sequence[Mapping[str, Tensor]], more: tuple[Tensor, ...], at_once: int
) -> Iterator[Tensor]:
    """What a function says of each context, of as many at once as can be.

    Args:
        more: what else it is told, [contexts, ...].
    """
    stacked = {name: torch.stack([inputs[name] for inputs in contexts]) for name in contexts[0]}
    runs = torch.func.vmap(at, chunk_size=1 + at_once, randomness="different")
    try:
        with _without_a_word_on_speed():
            found = runs(stacked, *more)
        yield from found
    except RuntimeError as error:
        if "dynamic shape" not in str(error):
            raise
        # How many rows a mask lets through depends on the context: one after the other.
        yield from (at(*arguments) for arguments in zip(contexts, *more, strict=True))


@contextmanager
def _without_a_word_on_speed() -> Iterator[None]:
    """While torch does not warn of each op that it runs copy by copy."""
    warn_of_each = torch._C._functorch._set_vmap_fallback_warning_enabled  # type: ignore[attr-defined]
    warn_of_each(False)
    try:
        yield
    finally:
        warn_of_each(True)


def _noise(values: Mapping[Node, object], nodes: Iterable[Node]) -> Tensor:
    """A random combination of all numbers in the values of some nodes, [1]."""
    rng = Generator().manual_seed(0)
    total = torch.zeros(1, dtype=torch.float64)
    for node in nodes:
        value = values[node]
        for part in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(part, Tensor) and part.is_floating_point():
                total = total + (part * torch.randn(part.shape, generator=rng, dtype=part.dtype)).sum()
    return total


def without_any_effect(
    directions: Tensor,
    program: Program,
    jacobians: Callable[[Look], Sequence[Tensor]],
    share: float,
    *,
    zero: float,
    spare: int = 0,
) -> Tensor:
    """What of some orthonormal directions moves no output of any result.

    A single random combination of a result's outputs shows whether the result sees any direction, and one of those
    that it sees. So few are looked at first, and more as long as a look finds an effect; results that cost most come
    last, when there are few directions left that they may see.

    Args:
        jacobians: of a look, at one point or at several, as `without_effect` takes them.
        share: outputs for each direction.
        spare: contexts beyond that.
        zero: as in `without_effect`.
    """
    for result in sorted(_real(program), key=lambda result: _numbers_of_run(result, program)):
        before, most, outputs = math.inf, 1, _FIRST_OUTPUTS
        while 0 < len(directions) < before:
            before = len(directions)
            look = _look(result, share * min(most, before), outputs, spare)
            directions = without_effect(directions, jacobians(look), zero=zero)
            most, outputs = most * _MORE_OUTPUTS, outputs * _MORE_OUTPUTS
    return directions
