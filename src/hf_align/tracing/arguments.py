"""The arguments of one call, by their names in the op's schema, and which of them a rule has asked for."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor, fx

_STORAGE = frozenset((
    "layout", "device", "pin_memory", "non_blocking", "copy", "memory_format", "implicit", "sparse", "sparse_grad",
    "cudnn_enable", "cudnn_enabled", "scale_grad_by_freq",
))  # fmt: skip
"""How and where any op stores its result, computes it, or takes its gradient: no part of the function."""
_CASTS = frozenset(("dtype", "out_dtype", "half_to_float"))
"""These round, which is no part of the function either, as long as the result is no integer."""


class Arguments:
    """What one node was called with.

    Ops without a schema (`getitem`) have arguments by place alone.
    """

    def __init__(self, node: fx.Node) -> None:
        schema = getattr(node.target, "_schema", None)
        declared = list(schema.arguments) if schema is not None else []
        self.names = [a.name for a in declared] or [str(i) for i in range(len(node.args))]
        self.defaults = {a.name: a.default_value for a in declared if a.has_default_value()}
        self.given = {**dict(zip(self.names, node.args, strict=False)), **node.kwargs}
        self._result = node.meta.get("val")
        self._asked: set[str] = set()

    def ask(self, which: int | str, default: Any) -> Any:
        """The value of an argument: as given, else the op's default, else `default` if the op has no such argument."""
        name = which if isinstance(which, str) else self.names[which] if which < len(self.names) else ""
        self._asked.add(name)
        return self.given.get(name, self.defaults.get(name, default))

    def ask_for_all_with(self, operands: Collection[fx.Node]) -> None:
        """Ask for every argument that holds nothing but some of these values."""
        for name, value in self.given.items():
            nodes = [v for v in (value if isinstance(value, (list, tuple)) else (value,)) if v is not None]
            if nodes and all(isinstance(v, fx.Node) and v in operands for v in nodes):
                self._asked.add(name)

    def unseen(self, harmless: Collection[str]) -> list[str]:
        """What differs from the op's default although nobody asked for it, nor is any value of it as good."""
        seen = self._asked | _STORAGE | (set(harmless) - (set() if self._stays_float() else _CASTS))
        return [name for name, value in self.given.items() if name not in seen and not self._is_default(name, value)]

    def _is_default(self, name: str, value: Any) -> bool:
        if value is None:  # how an argument that must be given is left out
            return True
        return name in self.defaults and not isinstance(value, fx.Node) and bool(value == self.defaults[name])

    def _stays_float(self) -> bool:
        results = self._result if isinstance(self._result, (tuple, list)) else (self._result,)
        return any(isinstance(r, Tensor) and (r.is_floating_point() or r.is_complex()) for r in results)
