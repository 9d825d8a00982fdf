"""Arguments of a model of time series: what was, what is known of other times, and what is told of a series."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from hf_align.tracing.inputs import Reader


def series(read: Reader) -> Iterator[dict[str, Tensor]]:
    """Candidate arguments, those with most first."""
    context = read.number("context_length", default=24)
    horizon = read.number("prediction_length", default=8)
    past = context + max(read.field("lags_sequence", default=None) or [0])
    channels = read.number("num_input_channels", "input_size", default=1)
    times = sum(read.number(name, default=0) for name in ("num_time_features", "num_dynamic_real_features"))
    tail = () if channels == 1 and "past_time_features" in read.parameters else (channels,)
    values = {"past_values": read.floats(past, *tail)}
    if "past_time_features" in read.parameters:
        timed = {
            **values,
            "past_time_features": read.floats(past, times),
            "past_observed_mask": torch.ones(read.batch, past, *tail, dtype=torch.long),
            "future_time_features": read.floats(horizon, times),
            "future_values": read.floats(horizon, *tail),
        }
        if static := _static(read):
            yield {**timed, **static}
        yield timed
    yield {**values, "past_observed_mask": torch.ones(read.batch, past, *tail, dtype=torch.long)}
    yield values
    yield {"past_values": read.floats(context)}
    plain = {"past_values": read.floats(context)}
    yield {**plain, "past_values_padding": torch.zeros(read.batch, context, dtype=torch.long),
           "freq": torch.zeros(read.batch, 1, dtype=torch.long)}  # fmt: skip


def _static(read: Reader) -> dict[str, Tensor]:
    """What is told of a whole series: the numbers of the kinds that it is of, and real numbers."""
    kinds, reals = (read.number(f"num_static_{name}_features", default=0) for name in ("categorical", "real"))
    most = min(read.field("cardinality", default=None) or [1])
    told = {}
    if kinds:
        numbers = torch.arange(read.batch)[:, None] + torch.arange(kinds)
        told["static_categorical_features"] = numbers % most
    if reals:
        told["static_real_features"] = read.floats(reals)
    return told
