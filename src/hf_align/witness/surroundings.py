"""What a call finds around it, besides its arguments: whether gradients are computed, what the model was asked before,
and flags of the config and of modules that are turned over after a model was loaded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_align.tracing.asked import OF_ANY, Ask
from hf_align.tracing.fields import parts

_OF_MODULES = ("gradient_checkpointing",)


def surroundings(model: PreTrainedModel) -> Iterator[Ask]:
    """What may surround a call of a model and should leave the answer as it is."""
    yield Ask("gradients that are computed", ({},), within=lambda _: torch.enable_grad())
    yield Ask("inference mode", ({},), within=lambda _: torch.inference_mode())
    yield Ask("the same call before", ({},), turned=_called_before)
    for name in (*OF_ANY, *_OF_MODULES):
        if any(True for _ in _holders(model, name)):
            yield Ask(f"{name} turned over after it was loaded", ({},), within=partial(_turned_over, name=name))


def _called_before(model: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments as they are, to a model that may remember them."""
    model(**arguments)
    return arguments


def _holders(model: nn.Module, name: str) -> Iterator[Any]:
    """The parts of a model's config, or its modules, that have a flag of a name."""
    everything = model.modules() if name in _OF_MODULES else parts(model.config)  # type: ignore[arg-type]
    return (part for part in everything if isinstance(getattr(part, name, None), bool))


@contextmanager
def _turned_over(model: nn.Module, name: str) -> Iterator[None]:
    with ExitStack() as stack:
        for part in [*_holders(model, name)]:
            before = getattr(part, name)
            stack.callback(setattr, part, name, before)
            setattr(part, name, not before)
        yield
