"""Links: one-to-one functions by which a model reads a number that it stores, softplus where it must be positive.

And powers: functions of one entry that make of a factor of it one of theirs.
"""

from __future__ import annotations

from enum import Enum
from fractions import Fraction

import torch
from torch import Tensor, fx

from hf_align.symmetry.rules.patterns import gives_only_its_shape, uncast
from hf_align.tracing.ops import Trait, does, op_name

_LINEAR_ABOVE = 20.0
"""From where on softplus is x, if nothing else is asked for."""
_EXPONENTS = {"square": Fraction(2), "sqrt": Fraction(1, 2), "sqrt_": Fraction(1, 2), "rsqrt": Fraction(-1, 2),
              "reciprocal": Fraction(-1), "abs": Fraction(1)}  # fmt: skip
_LARGEST = 64
"""Numerator or denominator of exponents: those of lengths are small."""
_UNREACHED = 1e-8
"""No length falls below so low a floor, unless it is zero: rounding of what is summed keeps it above; of squares, its
square."""
_KEEPS_FACTORS = (
    Trait.SAME | Trait.MOVES | Trait.COPIES | Trait.TOTALS | Trait.AVERAGES | Trait.MEASURES | Trait.MULTIPLIES
)
"""What a length is made of beside powers."""


class Link(Enum):
    """What is read of what is stored."""

    SAME = "same"
    EXP = "exp"
    SOFTPLUS = "softplus"
    TANH = "tanh"

    @property
    def is_positive(self) -> bool:
        """Whether it reads positive numbers, all of them; what is no such link reads either sign."""
        return self in (Link.EXP, Link.SOFTPLUS)

    def read(self, stored: Tensor) -> Tensor:
        """y = f(x)."""
        match self:
            case Link.EXP:
                return stored.exp()
            case Link.SOFTPLUS:
                return torch.nn.functional.softplus(stored)
            case Link.TANH:
                return stored.tanh()
        return stored

    def stored(self, read: Tensor) -> Tensor:
        """x = f⁻¹(y)."""
        match self:
            case Link.EXP:
                return read.log()
            case Link.SOFTPLUS:
                small = read.clamp_max(_LINEAR_ABOVE)
                return torch.where(read > _LINEAR_ABOVE, read, small + (-torch.expm1(-small)).log())
            case Link.TANH:
                return read.atanh()
        return read

    def times(self, stored: Tensor, factor: Tensor) -> Tensor:
        """f⁻¹(c f(x)), for a positive c where f is."""
        return stored + factor.log() if self is Link.EXP else self.stored(factor * self.read(stored))


def link_of(node: fx.Node) -> Link | None:
    """The link that an op is, with nothing but its operand asked for."""
    name = op_name(node) if node.op == "call_function" and len(node.args) == 1 and not node.kwargs else None
    return next((link for link in Link if link.value == name and link is not Link.SAME), None)


def exponent_of(node: fx.Node) -> Fraction | None:
    """The p for which an op f of its first operand alone has f(cx) = c^p f(x), entry by entry, for all c > 0."""
    if node.op != "call_function" or len(node.all_input_nodes) != 1 or node.kwargs:
        return None
    beside = node.args[1:]
    if op_name(node) in ("pow", "pow_"):
        power = beside[0] if len(beside) == 1 and node.all_input_nodes == [node.args[0]] else None
        exact = Fraction(power) if isinstance(power, (int, float)) and not isinstance(power, bool) else None
        return exact if exact is not None and max(abs(exact.numerator), exact.denominator) <= _LARGEST else None
    if does(node, Trait.FLOORS):
        floor = beside[0] if beside else None
        return Fraction(1) if floor == 0 or _is_unreached(floor, _power_of_size(node.args[0])) else None
    if does(node, Trait.KINKED):
        return Fraction(1)
    return _EXPONENTS.get(op_name(node)) if not beside else None


def exponent_of_any(node: fx.Node) -> Fraction | None:
    """The same, for factors below zero as well: of whole powers alone."""
    exponent = exponent_of(node)
    whole = exponent is not None and exponent.denominator == 1 and op_name(node) != "abs"
    return None if not whole or does(node, Trait.KINKED | Trait.FLOORS) else exponent


def _is_unreached(floor: object, power: Fraction | None) -> bool:
    return isinstance(floor, (int, float)) and power is not None and 0 < floor <= _UNREACHED ** float(power)


def _power_of_size(node: object) -> Fraction | None:
    """The power of a length that a value is made of; None if it is not made of absolute values, squares or roots, which
    are not below zero, and hardly ever near it."""
    power, is_size = Fraction(1), False
    while isinstance(node, fx.Node):
        exponent = None if does(node, Trait.KINKED | Trait.FLOORS) else exponent_of(node)
        if does(node, Trait.MULTIPLIES) and node.args[0] is node.args[1]:
            exponent = Fraction(2)
        if exponent is not None:
            power *= abs(exponent)
            is_size |= op_name(node) == "abs" or exponent.numerator * exponent.denominator % 2 == 0
        elif does(node, Trait.MEASURES):
            return power
        elif not does(node, Trait.SAME | Trait.MOVES | Trait.COPIES | Trait.TOTALS | Trait.AVERAGES | Trait.FLOORS):
            break
        node = node.args[0]
    return power if is_size else None


def is_length_of(node: object, value: fx.Node) -> bool:
    """Whether a divisor, or a factor, is made of nothing but the entries of a value, and has a power of any factor that
    these have: as their length has."""
    while isinstance(node, fx.Node) and uncast(node) is not uncast(value):
        made_of = {a for a in node.all_input_nodes if not gives_only_its_shape(a, node)}
        if len(made_of) != 1 or not (does(node, _KEEPS_FACTORS) or exponent_of(node) is not None):
            return False
        (node,) = made_of
    return isinstance(node, fx.Node)
