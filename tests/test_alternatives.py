"""Alternatives for one call: which are tried, and when they are given up."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from hf_align.tracing.alternatives import first_guess_that_runs
from hf_align.tracing.example import Example
from hf_align.tracing.first_calls import error_of
from hf_align.tracing.mode import Mode


class Refusing(PreTrainedModel):
    """Refuses an argument that is given without another, or that has too few columns."""

    config_class = PretrainedConfig
    main_input_name = "pixel_values"

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        self.read = nn.Linear(3, 4)
        self.post_init()

    def forward(self, pixel_values: Tensor, extra: Tensor | None = None, shown: Tensor | None = None) -> Tensor:
        """Args:
        shown (`torch.BoolTensor` of shape `(batch_size, 9)`): what is read.
        """
        if self.config.never and extra is not None:
            raise ValueError("one of the two")
        if self.config.beside and extra is not None and shown is None:
            raise ValueError("not like this")
        if extra is not None and extra.shape[-1] < 3:
            raise ValueError("not like this")
        return self.read(pixel_values if extra is None else pixel_values + extra.mean())  # type: ignore[no-any-return]


def tried(*, never: bool = False, beside: bool = False) -> tuple[Mode | None, list[Mode]]:
    """What runs of five guesses, of which those of three columns and more do, and all calls that were tried."""
    model = Refusing(PretrainedConfig(never=never, beside=beside))
    plain, calls = torch.zeros(2, 9, 3), list[Mode]()

    def attempt(mode: Mode) -> Exception | None:
        calls.append(mode)
        return error_of(model, mode.example)

    guesses = [Mode("", Example({"pixel_values": plain, "extra": torch.ones(2, n)}, {}), adds=(("extra", n),))
               for n in range(1, 6)]  # fmt: skip
    return first_guess_that_runs(model, guesses, attempt), calls


def test_a_call_that_fails_whatever_it_is_given_is_tried_once() -> None:
    found, calls = tried(never=True)
    assert found is None and len({mode.adds for mode in calls}) == 1


def test_an_error_that_never_changes_may_still_be_of_what_was_given() -> None:
    found, calls = tried()
    assert found is not None and found.adds == (("extra", 3),) and len(calls) == 3


def test_what_fails_for_what_it_lacks_is_tried_again_with_that() -> None:
    found, _ = tried(beside=True)
    assert found is not None and {"extra", "shown"} <= found.example.arguments.keys()
    assert found.example.arguments["extra"].shape[1] == 3
