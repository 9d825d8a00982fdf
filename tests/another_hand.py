"""A function that another file calls with its modules, though it knows nothing of any."""

from __future__ import annotations

from typing import Any


def by_another_hand(module: Any, x: Any) -> Any:
    return module.in_another_hand(x)


def of_a_table(module: Any, x: Any) -> Any:
    return module.by_a_table(x)


BY_NAME = {"first": of_a_table}
