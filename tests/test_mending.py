"""What torch says of sizes that do not go together is read the same, with values and without."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import conv2d, layer_norm, linear

from hf_align.tracing.mending import _lengths_told, widths_told

IN_MODES = pytest.mark.parametrize("fake", [False, True], ids=["with values", "without"])
READERS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "a matrix": lambda x, read: linear(x[0], torch.zeros(3, read)),
    "a matrix with a bias": lambda x, read: linear(x[0], torch.zeros(3, read), torch.zeros(3)),
    "a matrix of rows of rows": lambda x, read: linear(x, torch.zeros(3, read), torch.zeros(3)),
    "products": lambda x, read: torch.bmm(x, torch.zeros(2, read, 3)),
    "a convolution": lambda x, read: conv2d(x.transpose(1, 2)[..., None], torch.zeros(3, read, 1, 1)),
    "a norm": lambda x, read: layer_norm(x, (read,)),
    "something beside it": lambda x, read: torch.cat([torch.zeros(2, 5, x.shape[2]), torch.zeros(2, 4, read)], 1),
}


def _said(call: Callable[[], Tensor], fake: bool) -> str:
    mode = FakeTensorMode()
    with pytest.raises(Exception) as error:
        if fake:
            with mode:
                call()
        else:
            call()
    return str(error.value)


@IN_MODES
@pytest.mark.parametrize("reader", READERS)
def test_both_widths_are_read_off_an_error(reader: str, fake: bool) -> None:
    said = _said(lambda: READERS[reader](torch.zeros(2, 4, 24), 6), fake)
    assert widths_told(said) == (24, 6), said


@IN_MODES
def test_both_lengths_are_read_off_an_error(fake: bool) -> None:
    said = _said(lambda: torch.zeros(2, 9, 3) + torch.zeros(1, 7, 3), fake)
    told = _lengths_told(said)
    assert told is not None and {*told} == {7, 9}, said
    assert widths_told(said) is None
