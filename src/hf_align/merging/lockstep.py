"""Models of one architecture, run side by side through its graph, as far as the weights of each are known.

Nodes of the merge run as soon as their operands are there, those of the models once they are asked for, part by part of
the inputs; a value is held until everything that reads it has run, and each weight is asked for once in a stage.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from hf_align.errors import CannotRun, HfAlignError
from hf_align.running.chosen import call, chooses_matrices
from hf_align.running.network import Batch, Network, Weights, batches, in_dtype, predictions
from hf_align.tracing.build import build_without_weights
from hf_align.tracing.example import Example
from hf_align.tracing.program import Program, upstream
from hf_align.tracing.tokens import end_of_text
from hf_align.tracing.trace import trace_call

ROWS = 32
"""Examples that run at once."""
_ALIKE = 1e-2
"""How far the graph and the modelling code may be apart, against the largest output: both are in float32."""
Values = dict[fx.Node, Any]
Lookup = Callable[[fx.Node], Any]
"""The value of a node in one model, on one part of the inputs."""


class Lockstep:
    """The values of several models on the same inputs.

    Args:
        program: of one part of the inputs.
        parts: the inputs, each part as many examples.
        needed: the nodes that are of any use; all others are never run.
    """

    def __init__(
        self, program: Program, network: Network, parts: Sequence[Batch], models: Sequence[Weights],
        needed: Collection[fx.Node],
    ) -> None:  # fmt: skip
        self.program = program
        self.parts = parts
        self._network = network
        self._models = models
        wanted, self._of_weights = upstream(needed, program), of_weights(program)
        ran = (n for n in program.graph.nodes if n in wanted and n.op == "call_function")
        self._left = [n for n in ran if n not in self._of_weights]
        self._left_ahead = list(self._left)
        self._choosing = {n for n in self._left if chooses_matrices(n, program)}
        self._values: list[list[Values]] = [[{} for _ in parts] for _ in models]
        self.constants = {n: self.placed(v) for n, v in program.constants.items() if isinstance(v, Tensor)}
        self._known = set(program.inputs)
        self._waiting: Collection[str] = ()

    def placed(self, value: Tensor) -> Tensor:
        """As the network runs with it."""
        return in_dtype(value.to(self._network.device), self._network.dtype)

    def is_known(self, node: fx.Node) -> bool:
        """Whether a value can be looked up in the next stage, or now."""
        names = self._of_weights.get(node)
        return node in self._known if names is None else names.isdisjoint(self._waiting)

    def stage(self, waiting: Collection[str] = ()) -> list[fx.Node]:
        """The nodes that run next: all that depend on no weight that waits to be found."""
        run, self._waiting = [], waiting
        for node in self._left:
            if all(map(self.is_known, node.all_input_nodes)):
                self._known.add(node)
                run.append(node)
        taken = set(run)
        self._left = [n for n in self._left if n not in taken]
        return run

    def _stage_ahead(self, asked: Collection[fx.Node]) -> list[fx.Node]:
        """The nodes that the models run next: those that some values depend on and that did not run yet."""
        wanted = upstream(asked, self.program)
        stage = [n for n in self._left_ahead if n in wanted]
        self._left_ahead = [n for n in self._left_ahead if n not in wanted]
        return stage

    @torch.no_grad()
    def run(
        self, nodes: Sequence[fx.Node], asked: Collection[fx.Node] = (), keep: Collection[fx.Node] = ()
    ) -> Iterator[list[Lookup]]:
        """Run a stage: for every part of the inputs, what looks values up in each model.

        Args:
            nodes: that the last model runs.
            asked: nodes whose values are looked up in all models but the last. These wait for no weight, and run no
                further than that.
            keep: nodes whose values are looked up now or in a later stage.
        """
        weights: list[Values] = [{} for _ in self._models]
        ahead = [_Order.of(self._stage_ahead(asked), self._left_ahead, keep)] * (len(self._models) - 1)
        orders = [*ahead, _Order.of(nodes, self._left, keep)]
        for number, part in enumerate(self.parts):
            placed = {k: self.placed(t) for k, t in part.items()}
            lookups: list[Lookup] = []
            for model, order, values, own in zip(self._models, orders, self._values, weights, strict=True):
                lookup = _Held(self, values[number], own, model, placed)
                for operand in order.operands & self._of_weights.keys():
                    lookup(operand)  # now: what is made in a transform of torch.func cannot be kept
                for node in order.nodes:
                    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lookup)
                    values[number][node] = call(node, args, kwargs, chooses=node in self._choosing)
                    for operand in node.all_input_nodes:
                        if order.last.get(operand) is node:
                            values[number].pop(operand, None)
                lookups.append(lookup)
            yield lookups
            for values, order in zip(self._values, orders, strict=True):
                values[number] = {n: v for n, v in values[number].items() if n in order.held}


@dataclass(frozen=True)
class _Order:
    """What one model runs in a stage.

    Attributes:
        held: the nodes whose values are held for all inputs.
        last: of each operand that is not held, the node that reads it last.
    """

    nodes: Sequence[fx.Node]
    operands: Set[fx.Node]
    held: Collection[fx.Node]
    last: Mapping[fx.Node, fx.Node]

    @classmethod
    def of(cls, nodes: Sequence[fx.Node], left: Iterable[fx.Node], keep: Collection[fx.Node]) -> _Order:
        """Of nodes, of those that are left behind them, and of those whose values are looked up."""
        held = {*keep, *(a for n in left for a in n.all_input_nodes)}
        last = {a: n for n in nodes for a in n.all_input_nodes if a not in held}
        return cls(nodes, {a for n in nodes for a in n.all_input_nodes}, held, last)


@dataclass(frozen=True)
class _Held:
    """What looks values up in one model, on one part of the inputs.

    It is no function within another: one that calls itself is a cycle, which would hold all values until it is found.

    Attributes:
        weights: and what is computed from them alone, as far as it was asked for.
    """

    steps: Lockstep
    values: Values
    weights: Values
    model: Weights
    part: Batch

    def __call__(self, node: fx.Node) -> Any:
        steps, program = self.steps, self.steps.program
        for known in (self.values, self.weights, steps.constants, program.constants):
            if node in known:
                return known[node]
        if node in program.inputs:
            return self.part[program.inputs[node]]
        name = program.parameters.get(node)
        self.weights[node] = steps.placed(self.model[name]) if name is not None else _computed(node, self)
        return self.weights[node]


@dataclass(frozen=True)
class WithWeights:
    """A lookup with some weights in place of others, and what is computed from them alone.

    Attributes:
        known: as `of_weights` gives it.
    """

    program: Program
    known: Mapping[fx.Node, frozenset[str]]
    weights: Mapping[str, Tensor]
    lookup: Lookup

    def __call__(self, node: fx.Node) -> Any:
        if self.known.get(node, frozenset()).isdisjoint(self.weights):
            return self.lookup(node)
        name = self.program.parameters.get(node)
        return self.weights[name] if name is not None else _computed(node, self)


def of_weights(program: Program) -> Mapping[fx.Node, frozenset[str]]:
    """The values that no input has a part in, with the names of the parameters that have one.

    They are computed anew in each stage: a weight that is transposed before it is multiplied is another one once it
    has been found.
    """
    found = {node: frozenset((name,)) for node, name in program.parameters.items()}
    found |= dict.fromkeys(program.constants, frozenset())
    for node in program.graph.nodes:
        plain = node.op == "call_function" and not chooses_matrices(node, program)
        if plain and all(a in found for a in node.all_input_nodes):
            found[node] = frozenset().union(*(found[a] for a in node.all_input_nodes))
    return found


def _computed(node: fx.Node, lookup: Lookup) -> Any:
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lookup)
    return call(node, args, kwargs, chooses=False)


def divided(inputs: Batch, rows: int = ROWS) -> list[Batch]:
    """Parts of as many examples each; the first ones come again where the last part would be short."""
    count = len(next(iter(inputs.values())))
    rows = min(rows, count)
    missing = -count % rows
    filled = {k: torch.cat([t, t[:missing]]) if missing else t for k, t in inputs.items()}
    return list(batches(filled, rows))


def program_of(network: Network, part: Batch) -> Program:
    """The graph of a call with one part of the inputs, in which every argument is free, but for what ends its texts.

    Raises:
        CannotRun: there is none.
    """
    model, errors = build_without_weights(network.config), list[Exception]()
    for example in _examples(part, end_of_text(network.config)):
        try:
            return trace_call(model, example)
        except Exception as error:  # tracing fails in as many ways as there are models
            errors.append(error)
    raise CannotRun(f"{type(model).__name__} has no graph for {', '.join(part)}: {errors[0]}") from errors[0]


def _examples(part: Batch, end: int | None) -> Iterator[Example]:
    """A call with one part of the inputs; if a token ends all texts, then also one that knows this."""
    tokens = {k: torch.unique(t) for k, t in part.items() if not t.is_floating_point()}
    example = Example(dict(part), tokens)
    yield example
    if end is not None and (ended := [k for k in tokens if _ends_all(part[k], end)]):
        yield example.ended_by(end, ended)


def _ends_all(ids: Tensor, end: int) -> bool:
    """Whether a token ends each text, [texts, tokens], and stands nowhere else in it."""
    return ids.dim() > 1 and bool(((ids == end).sum(1) == 1).all() and (ids[:, -1] == end).all())


@torch.no_grad()
def require_same(program: Program, network: Network, weights: Weights, part: Batch) -> None:
    """See that the graph computes what the modelling code computes.

    Raises:
        HfAlignError: it does not.
    """
    alone = Lockstep(program, network, [part], [weights], [program.output])
    (lookups,) = alone.run(alone.stage())
    found: Tensor = lookups[0](program.output)
    expected = predictions(network(network.placed(weights), {k: t.to(network.device) for k, t in part.items()}))
    # no more copies than one: of a large vocabulary they are larger than the model
    largest = torch.stack(torch.aminmax(expected)).abs().max()
    largest = largest.clamp(min=torch.finfo(expected.dtype).tiny)  # a model of zeros answers with zeros
    apart = float((found - expected).abs_().max() / largest) if found.shape == expected.shape else 1.0
    if not apart < _ALIKE:
        raise HfAlignError(f"the graph of this model does not compute what the model computes (apart by {apart:.1e})")
