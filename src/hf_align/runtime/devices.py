"""Where to compute: the one place that chooses.

Models run, and weights are moved, on an accelerator if there is one. Products of weights and what is solved from
them, in float64, go there too if it has float64, and stay on the CPU if not. What comes of it comes back to the CPU. A
process that accelerate has started among others has the device that accelerate gives it.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_align.errors import OptionError
from hf_align.runtime.processes import current

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Devices:
    """Where this process computes.

    Attributes:
        running: models, and weights that are moved, in float32.
        solving: products of weights and polar factors, in float64.
    """

    running: torch.device = CPU
    solving: torch.device = CPU

    @classmethod
    def choose(cls, asked: str | None = None) -> Devices:
        """As asked, such as "cpu" or "cuda:1"; else the accelerator, else the CPU.

        Raises:
            OptionError: what is asked for is not there.
        """
        if asked is None:
            running = _accelerator()
        else:
            running = named(asked)
            try:
                torch.zeros(1, device=running)
            except (RuntimeError, AssertionError, TypeError) as error:  # the second where torch is built without it
                why = str(error).splitlines()[0]
                raise OptionError(f"device {asked} is not available: {why}; cpu always is") from error
        return cls(running, for_solving(running))


def named(device: str) -> torch.device:
    """The device of a name.

    Raises:
        OptionError: no device has such a name.
    """
    try:
        return torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise OptionError(f"{device} is no device; write cpu, cuda, cuda:1, mps or the like") from error


def for_solving(device: torch.device) -> torch.device:
    """Where what lies on a device is solved in float64: there if it has that, else on the CPU."""
    return device if device.type == "cpu" or _has_double(device) else CPU


def as_double(tensor: Tensor) -> Tensor:
    """In float64, on the CPU where its device has none."""
    return tensor.to(for_solving(tensor.device)).double()


def threads(count: int) -> ThreadPoolExecutor:
    """A pool of threads that share out those with which torch computes; each would start as many, and they would wait
    for each other."""
    each = max(1, torch.get_num_threads() // count)
    return ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(each,))


@contextmanager
def drawing(device: torch.device, seed: int) -> Iterator[None]:
    """What is drawn in the block from the generators of torch, on the CPU and on a device, starts from a seed; they
    are left as they were found, and those of other devices are not touched."""
    there = [device] if device.type != "cpu" else []
    with torch.random.fork_rng(there, device_type=device.type if there else None):
        torch.default_generator.manual_seed(seed)  # `torch.manual_seed` would seed, or wake, every device
        if there:
            with torch.accelerator.device_index(device.index):
                torch.get_device_module(device).manual_seed(seed)
        yield


def _accelerator() -> torch.device:
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if device is None:
        return CPU
    if current().count == 1:
        return device
    from accelerate import PartialState

    return torch.device(PartialState().device)


def _has_double(device: torch.device) -> bool:
    try:
        torch.zeros(1, dtype=torch.float64, device=device)
    except (TypeError, RuntimeError):  # as Metal says it
        return False
    return True
