"""The random copy that a certificate is measured on: generic weights, inputs and elements in float64."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Generator, Tensor
from torch.fx import Node
from transformers import PretrainedConfig

from hf_align.symmetry.action import act
from hf_align.symmetry.elements import Element
from hf_align.symmetry.spec import SymmetrySpec
from hf_align.tracing.arguments import Arguments
from hf_align.tracing.fields import parts
from hf_align.tracing.ops import Trait, does
from hf_align.tracing.program import Program

Weights = dict[str, Tensor]
_SMALL_SIDE = 16
"""Of pictures: in the last stage of a copy no more than one place may be left of them, which all attention falls on."""
SIZES = (1.0, 0.5)
"""Of random weights; the second where a model overflows or is undecided at the first: from layer to layer numbers and
their rounding grow as weights do. Of much smaller ones no unit would reach a limit."""
NO_LIMIT = 100.0
"""What is larger keeps numbers from overflowing, or hides scores, and limits no unit."""
_LIMIT = 0.7
"""Of what random weights make, about as much is larger as is smaller: nearly every unit comes to lie on both sides."""


def with_eps(config: PretrainedConfig, eps: float) -> PretrainedConfig:
    """A copy whose every epsilon is `eps`."""
    config = copy.deepcopy(config)
    for part in parts(config):
        for key in list(vars(part)):
            if "eps" in key.lower() and isinstance(getattr(part, key), float):
                setattr(part, key, eps)
    return config


def with_tokens(config: PretrainedConfig, tokens: int) -> PretrainedConfig | None:
    """A copy with vocabularies of at least so many tokens; None if they are as large already."""
    larger = copy.deepcopy(config)
    few = [p for p in parts(larger) if 1 < (getattr(p, "vocab_size", None) or 0) < tokens]
    for part in few:
        size = part.vocab_size
        part.vocab_size = tokens
        for name, value in list(vars(part).items()):  # of the other language, of the decoder, of each layer
            if "vocab_size" in name and value == size:
                setattr(part, name, tokens)
    return larger if few else None


def with_room(config: PretrainedConfig) -> PretrainedConfig | None:
    """A copy with pictures of twice the side where that is small, and two layers in the last of several stages: in the
    first of them no input may change the only query that is seen. None if neither is so."""
    larger, changed = copy.deepcopy(config), False
    for part in parts(larger):
        for name, value in list(vars(part).items()):
            sides = [value] if isinstance(value, int) else value
            if (
                name in ("image_size", "img_size")
                and isinstance(sides, (list, tuple))
                and 0 < max(sides) <= _SMALL_SIDE
            ):
                setattr(part, name, 2 * value if isinstance(value, int) else [2 * n for n in sides])
                changed = True
            elif name == "depths" and isinstance(value, (list, tuple)) and len(value) > 1 and value[-1] == 1:
                setattr(part, name, [*value[:-1], 2])
                changed = True
    return larger if changed else None


def raise_epsilons(program: Program, eps: float) -> Program:
    """Raise also the epsilons that the modelling code writes as numbers, or leaves to an op's default: without, a
    stream may be scaled at will."""
    for node in program.graph.nodes:
        if does(node, Trait.NORMALISES):
            node.args = _with_defaults(node, "eps")
        if does(node, Trait.ADDS | Trait.NORMALISES):
            node.args = tuple(eps if isinstance(a, float) and 0 < a < eps else a for a in node.args)
    return program


def _with_defaults(node: Node, last: str) -> tuple[Any, ...]:
    """The arguments of a node, with the op's defaults up to that of this name; as they are where it has none."""
    arguments = Arguments(node)
    if last in node.kwargs or not isinstance(arguments.defaults.get(last), float):
        return node.args
    left = arguments.names[len(node.args) : arguments.names.index(last) + 1]
    return (*node.args, *(arguments.defaults[name] for name in left))


def lower_limits(program: Program) -> Program:
    """Bring limits within the reach of random values: below one that none reaches, units seem to have scales."""
    for node in program.graph.nodes:
        if does(node, Trait.LIMITS) and node not in program.constants:
            node.args = tuple(map(_within_reach, node.args))
            node.kwargs = {name: _within_reach(value) for name, value in node.kwargs.items()}
    return program


def _within_reach(limit: Any) -> Any:
    far = isinstance(limit, float) and _LIMIT < abs(limit) < NO_LIMIT
    return math.copysign(_LIMIT, limit) if far else limit


def random_weights(spec: SymmetrySpec, rng: Generator, size: float = 1.0) -> Weights:
    """Generic float64 weights: gains around one (they must not vanish), what has a root or a logarithm
    above zero, the rest around it."""
    shapes = {name: spec.shape(name) for name in spec.parameters}
    noise = {n: size * _scale(s) * torch.randn(s, generator=rng, dtype=torch.float64) for n, s in shapes.items()}
    weights = {n: 1 - spec.gains[n] + t if n in spec.gains else t for n, t in noise.items()}
    return weights | {n: 0.5 + noise[n].abs() for n in spec.positive}


def _scale(shape: tuple[int, ...]) -> float:
    """Biases smaller than matrices, so that hardly any ReLU is open for all inputs or for none; convolutions smaller
    the more they add up, so that nothing behind them saturates."""
    if len(shape) < 2:
        return 0.2
    return 0.6 * min(1.0, math.sqrt(12 / max(1, math.prod(shape[1:])))) if len(shape) > 2 else 0.6


def random_inputs(program: Program, rng: Generator) -> dict[str, Tensor]:
    """Random tokens or pixels for every input of a program."""
    shapes = {name: tuple(node.meta["val"].shape) for node, name in program.inputs.items()}
    return program.example.random(shapes, rng)


def random_elements(spec: SymmetrySpec, rng: Generator) -> dict[str, Element]:
    """A random element of every group."""
    return {s.name: s.group.random(spec.index_shape(s.name), rng) for s in spec.spaces.values() if s.group}


def transform(spec: SymmetrySpec, weights: Mapping[str, Tensor], elements: Mapping[str, Element]) -> Weights:
    """Every parameter moved."""
    return {n: act(w, n, spec, elements) for n, w in weights.items()}
