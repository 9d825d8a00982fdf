"""Several names that torch has for one op: the graph knows each op by one of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

_TURNED = (torch.ops.aten.mT.default, torch.ops.aten.mH.default, torch.ops.aten.adjoint.default)
"""Of a matrix whose axes change places, if it is real."""
_SHAPED_LIKE = {torch.ops.aten.expand_as.default: torch.ops.aten.expand.default,
                torch.ops.aten.view_as.default: torch.ops.aten.view.default}  # fmt: skip
"""What reads only a shape of its second operand, and the op on the first alone."""
_PUTS = {torch.ops.aten.index_put.default: torch.ops.aten.masked_fill.Tensor,
         torch.ops.aten.index_put_.default: torch.ops.aten.masked_fill_.Tensor}  # fmt: skip
"""What puts a number into the entries that a mask says."""


def plainly(func: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """An op and its operands under the name that rules know; as they are where there is no other."""
    if func is torch.ops.aten.numpy_T.default:
        return torch.ops.aten.permute.default, (args[0], [*range(args[0].dim())][::-1])
    if func in _TURNED and not args[0].is_complex():
        return torch.ops.aten.transpose.int, (args[0], -2, -1)
    if func in _SHAPED_LIKE and not isinstance(args[0], FakeTensor):
        return _SHAPED_LIKE[func], (args[0], [*args[1].shape])
    if func is torch.ops.aten.narrow.Tensor and not isinstance(args[2], FakeTensor):
        return torch.ops.aten.narrow.default, (*args[:2], int(args[2]), args[3])
    if func in _PUTS and _puts_a_number_by_one_mask(*args):
        return _PUTS[func], (args[0], args[1][0], args[2])
    if func is torch.ops.aten.linear.default and args[1].dim() == 1 and len(args) == 2:  # to one number
        return torch.ops.aten.matmul.default, args
    return func, args


def _puts_a_number_by_one_mask(base: Tensor, index: Sequence[Tensor | None], value: Tensor, adds: bool = False) -> bool:
    """Whether a mask of all entries says which of them become a number."""
    if adds or len(index) != 1 or index[0] is None or value.dim() or value.dtype != base.dtype:
        return False
    return index[0].dtype is torch.bool and index[0].shape == base.shape
