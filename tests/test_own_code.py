"""The numbers that code compares with are those that it names, and those that modules hold."""

from __future__ import annotations

from torch import Tensor, nn

from hf_align.tracing.own_code import numbers_compared


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.most, self.unused, self.share = 37, 41, 0.5

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > self.most or x.shape[1] % 11 == 3:
            return -x
        return x * self.unused * self.share


def test_numbers_that_code_compares_with_are_named_or_held() -> None:
    assert numbers_compared(nn.Sequential(Counting())) >= {37, 11, 3}
    assert 41 not in numbers_compared(nn.Sequential(Counting()))
