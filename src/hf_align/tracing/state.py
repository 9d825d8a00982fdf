"""What a model remembers from one call to the next besides its weights: tables, masks and biases that it has computed.

Where values are fake such a memory is wrong for the next call, or holds what the next call cannot use.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn


@contextmanager
def left_as_found(model: nn.Module) -> Iterator[None]:
    """Take back, after the block, what it sets on modules and puts into their dictionaries, lists and sets."""
    before = [(vars(module), {**vars(module)}, [*_containers(module)]) for module in model.modules()]
    try:
        yield
    finally:
        for attributes, values, containers in before:
            attributes.clear()
            attributes.update(values)
            for container, contents in containers:
                if container or contents:
                    container.clear()
                    (container.extend if isinstance(container, list) else container.update)(contents)


@contextmanager
def forgetting(model: nn.Module) -> Iterator[None]:
    """As `left_as_found`, where values are real: what the block writes into buffers is taken back, too."""
    with left_as_found(model):
        copies: dict[int, Tensor] = {}  # of one buffer that several modules have, one
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = copies.setdefault(id(buffer), buffer.clone())
        yield


def _containers(module: nn.Module) -> Iterator[tuple[Any, Any]]:
    """What of a module can be written into, and what it holds."""
    return ((value, value.copy() if value else ()) for value in vars(module).values()
            if isinstance(value, (dict, list, set)))  # fmt: skip
