"""A device that is not the CPU and needs no hardware: real tensors that say they are elsewhere, and refuse company.

As on a GPU, an op takes tensors of one device (single numbers and indices may come from the CPU), and numpy none. Which
ops ran there, in which dtypes, is noted. Once loaded the device is there for the whole process: the tests that use it
(elsewhere_checks.py) run in one of their own.
"""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "elsewhere"


_SEEDS: list[int] = []


class _Backend:
    """What `torch.get_device_module` gives: one device, whose random numbers are those of the CPU."""

    get_rng_state = staticmethod(lambda device=None: torch.get_rng_state())
    set_rng_state = staticmethod(lambda state, device=None: torch.set_rng_state(state))
    manual_seed = staticmethod(lambda seed: _SEEDS.append(seed))
    manual_seed_all = staticmethod(lambda seed: None)
    is_available = is_initialized = staticmethod(lambda: True)
    current_device = staticmethod(lambda: 0)
    device_count = staticmethod(lambda: 1)
    _is_in_bad_fork = staticmethod(lambda: False)


_setup_privateuseone_for_python_backend(NAME, _Backend())
_BETWEEN = ("aten._to_copy", "aten.copy_")
_INDEXED = ("aten.index", "aten.index_put_", "aten._index_put_impl_")


class Held(Tensor):
    """A tensor elsewhere."""

    @staticmethod
    def __new__(cls, held: Tensor) -> Held:
        return Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, held.size(), strides=held.stride(), dtype=held.dtype, device=f"{NAME}:0"
        )

    def __init__(self, held: Tensor) -> None:
        self.held = held

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} elsewhere, in a thread that does not know of it")


class _FromData(TorchFunctionMode):
    """Tensors of Python's numbers are made at home and then brought there: what makes them passes by no dispatch."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.tensor, torch.as_tensor, torch.asarray) and kwargs.get("device") is not None:
            device = kwargs.pop("device")
            return func(*args, **kwargs).to(device)
        if func == Tensor.new_tensor:
            device = kwargs.pop("device", args[0].device)
            return torch.tensor(*args[1:], **{"dtype": args[0].dtype, **kwargs}).to(device)
        return func(*args, **kwargs)


class Elsewhere(TorchDispatchMode):
    """While it is on there is such a device.

    Attributes:
        ran: op -> the dtypes that it took there.
        seeds: that its random numbers were to start from.
        has_ended: whether an index was out of range, after which a GPU does nothing more.
    """

    def __init__(self, *, has_double: bool = True, ends: bool = False) -> None:
        super().__init__()
        self.ran: dict[str, set[torch.dtype]] = {}
        self._has_double = has_double
        self._from_data = _FromData()
        self._ends = ends
        self.has_ended = False
        self.seeds = _SEEDS
        _SEEDS.clear()

    def __enter__(self) -> Self:
        self._from_data.__enter__()
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._from_data.__exit__(*raised)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), str(func).rpartition(".")[0]
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        is_there = any(isinstance(t, Held) for t in tensors)
        goes = kwargs.get("device")
        lands = is_there if goes is None else torch.device(goes).type == NAME
        if lands and goes is not None:
            kwargs["device"] = "cpu"
        if is_there and name not in _BETWEEN:
            with_company = [args[0], *args[2:]] if name in _INDEXED else tensors
            if any(isinstance(t, Tensor) and not isinstance(t, Held) and t.dim() for t in with_company):
                raise RuntimeError(f"{name}: expected all tensors to be on the same device")
            self.ran.setdefault(name, set()).update(t.dtype for t in tensors)
        if self.has_ended:
            raise RuntimeError("device-side assert triggered")
        try:
            found = func(*tree_map(_held, args), **tree_map(_held, kwargs))
        except (IndexError, RuntimeError):
            self.has_ended = self._ends and is_there
            if not self.has_ended:
                raise
            raise RuntimeError("device-side assert triggered") from None
        return tree_map(self._placed, found) if lands else found

    def _placed(self, found: Any) -> Any:
        if not isinstance(found, Tensor):
            return found
        if found.dtype == torch.float64 and not self._has_double:
            raise TypeError("cannot convert a tensor to float64, which this device does not have")
        return Held(found)


def _held(value: Any) -> Any:
    return value.held if isinstance(value, Held) else value
