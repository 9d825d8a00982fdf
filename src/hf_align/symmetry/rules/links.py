"""Links: one-to-one functions by which a model reads a number that it stores, softplus where it must be positive."""

from __future__ import annotations

from enum import Enum

import torch
from torch import Tensor, fx

from hf_align.tracing.ops import op_name

_LINEAR_ABOVE = 20.0
"""From where on softplus is x, if nothing else is asked for."""


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

    def times(self, stored: Tensor, factor: Tensor) -> Tensor:
        """f⁻¹(c f(x)), for a positive c where f is."""
        match self:
            case Link.EXP:
                return stored + factor.log()
            case Link.SOFTPLUS:
                read = factor * self.read(stored)
                small = read.clamp_max(_LINEAR_ABOVE)
                return torch.where(read > _LINEAR_ABOVE, read, small + (-torch.expm1(-small)).log())
            case Link.TANH:
                return (factor * self.read(stored)).atanh()
        return factor * stored


def link_of(node: fx.Node) -> Link | None:
    """The link that an op is, with nothing but its operand asked for."""
    name = op_name(node) if node.op == "call_function" and len(node.args) == 1 and not node.kwargs else None
    return next((link for link in Link if link.value == name and link is not Link.SAME), None)
