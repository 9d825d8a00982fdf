"""What a model computes, in a few bytes: two calls of one fingerprint run the same ops on the same constants.

The call is recorded as it runs, with weights and inputs that have no values. Every op counts, with its arguments, and
every constant by its value; weights count by their names. What leaves all results alone is passed over: dropout that
is off, and the padding index of a table, which only gradients look at.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from transformers.utils.generic import ModelOutput

from hf_align.runtime.devices import CPU, drawing
from hf_align.tracing.branches.taken import branching
from hf_align.tracing.build import quiet
from hf_align.tracing.example import Example
from hf_align.tracing.mode import Mode
from hf_align.tracing.ops import Trait, does
from hf_align.tracing.record import record

_OFF_AT = 2
"""Where a dropout is told that it is off."""
_KEPT = "past_key_values"
"""What a call leaves to the next one, which is compared by what that returns."""


class CannotRecord(Exception):
    """A call that fails, or asks for the value of a weight or an input."""


@dataclass(frozen=True)
class Fingerprint:
    """A call's.

    Attributes:
        digest: equal if two calls compute the same.
        weights: the parameters and saved floating point buffers that bear on the result.
        results: the names of what is returned; none where that has no names.
        ops: how many there are.
    """

    digest: str
    weights: frozenset[str]
    ops: int = field(compare=False)
    results: frozenset[str] = field(default=frozenset(), compare=False)


@dataclass(frozen=True, eq=False)
class Call:
    """A way to call a model.

    Attributes:
        example: the arguments of the first call.
        steps: calls with one token more each, which go on from the cache of the first.
        part: the path of the module that is called, the whole model by default.
        results: the names of what counts of that which is returned, by default all.
        mode: what else is given, or done, when the whole model is called.
    """

    example: Example
    steps: int = 0
    part: str = ""
    results: frozenset[str] | None = None
    mode: Mode | None = None

    def fingerprint(
        self, model: nn.Module, names: Mapping[str, str] | None = None, without_values: Collection[str] = ()
    ) -> Fingerprint:
        """What the call computes.

        Args:
            model: without weights, of the architecture that the example fits.
            names: other names of some weights, which count instead.
            without_values: buffers that are taken for weights, whatever they hold.

        Raises:
            CannotRecord: the call cannot be recorded.
        """
        module: nn.Module = model.get_submodule(self.part)
        saved = module.state_dict(keep_vars=True)
        weights = {n for n, _ in module.named_parameters()}
        weights |= {n for n, b in module.named_buffers() if n in saved and b.is_floating_point()}
        prefix = f"{self.part}." if self.part else ""
        weights |= {n for n in saved if f"{prefix}{n}" in without_values}
        returned = set[str]()
        called = _Called(module, self.steps, self.results, returned.update)
        weights = {f"model.{n}" for n in weights}
        free = [n for n in self.example.arguments if self.example.is_free(n)]
        try:
            prepared = nullcontext() if self.mode is None else self.mode.prepared(module)
            turns = () if self.mode is None else self.mode.turned_at
            turned = branching(module, turns) if turns else nullcontext()
            with torch.no_grad(), drawing(CPU, 0), quiet(), turned, prepared:  # noise that is drawn once is a constant
                recorded = record(called, self.example.arguments, weights, free)
        except Exception as error:  # recording fails in as many ways as there are models
            raise CannotRecord(str(error)) from error

        def name(target: str) -> str:
            found = prefix + target.removeprefix("model.")
            return (names or {}).get(found, found)

        recorded.graph.eliminate_dead_code()
        return replace(_of_graph(recorded, {w: name(w) for w in weights}), results=frozenset(returned))


class _Called(nn.Module):
    """A model called once, and then for one token after the other with what it has kept.

    Args:
        counting: the names of what counts of the results; None for all.
        note: takes the names of what is returned, but for what is kept.
    """

    def __init__(
        self, model: nn.Module, steps: int, counting: frozenset[str] | None, note: Callable[[Iterable[str]], None]
    ) -> None:
        super().__init__()
        self.model = model
        self.steps, self.counting, self.note = steps, counting, note

    def forward(self, **arguments: Tensor) -> list[Any]:
        given = {"use_cache": True} if self.steps else {}
        result = self.model(**arguments, **given)
        results = [self._counted(result)]
        name = "decoder_input_ids" if "decoder_input_ids" in arguments else "input_ids"
        again = {k: v for k, v in arguments.items() if "mask" not in k and "position" not in k}
        for _ in range(self.steps):
            if result.past_key_values is None:
                raise CannotRecord("nothing is kept")
            again |= {name: arguments[name][:, -1:], _KEPT: result.past_key_values}
            result = self.model(**again, use_cache=True)
            results.append(self._counted(result))
        return results

    def _counted(self, result: Any) -> Any:
        """What counts of a result: not what is kept, which the call that goes on writes to."""
        if not isinstance(result, ModelOutput):
            return result
        found = {n: result[n] for n in result if n != _KEPT or not self.steps}
        self.note(found)
        return [v for n, v in found.items() if self.counting is None or n in self.counting]


def _of_graph(recorded: fx.GraphModule, weights: Mapping[str, str]) -> Fingerprint:
    """By the ops in order, each given by what it is and by what it reads: weights by name, constants by value."""
    digest, known, read, ops = hashlib.sha256(), dict[fx.Node, str](), set[str](), 0
    for node in recorded.graph.nodes:
        if node.op == "get_attr" and node.target in weights:
            known[node] = weights[node.target]
            read.add(weights[node.target])
        elif node.op == "get_attr":
            known[node] = digest_of(getattr(recorded, node.target))
        elif _changes_nothing(node):
            known[node] = known[node.all_input_nodes[0]]
        else:
            known[node] = f"%{ops}"
            ops += 1
            args = node.args[:2] if does(node, Trait.LOOKS_UP_ROWS) else node.args
            said = _said((args, node.kwargs), known)
            digest.update(f"{known[node]} = {node.op} {node.target} {said}\n".encode())
    return Fingerprint(digest.hexdigest(), frozenset(read), ops)


def _changes_nothing(node: fx.Node) -> bool:
    return does(node, Trait.DROPS_OUT) and len(node.args) > _OFF_AT and node.args[_OFF_AT] is False


def _said(arguments: Any, known: Mapping[fx.Node, str]) -> str:
    return str(fx.node.map_arg(arguments, lambda node: _Word(known[node])))


class _Word(str):
    """Shown without quotes: no argument that is text looks like it."""

    def __repr__(self) -> str:
        return str(self)


def digest_of(value: Tensor) -> str:
    """Of its shape, its dtype and its entries."""
    raw = value.detach().contiguous().reshape(-1).view(torch.uint8)
    return f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(raw.numpy().tobytes()).hexdigest()}"
