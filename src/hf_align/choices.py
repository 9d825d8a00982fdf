"""The choices that a caller has, as types and as values that are checked where they enter."""

from __future__ import annotations

from typing import Any, Literal, get_args

Match = Literal["weight", "activation", "learned"]
"""How a model is matched: by its weights, by what both models compute on the same inputs, or by gradient descent."""
Residual = Literal["orthogonal", "permutation", "identity"]
"""The group that is searched for the residual stream."""
AnyResidual = Literal[Residual, "first", "last", "all", "separate"]
"""With the choices of features to match by, the last of which changes B's function."""
Heads = Literal["two-stage", "circuits", "monotonic"]
"""How attention heads are paired."""
AnyHeads = Literal[Heads, "ignore-heads"]
"""With the one that changes B's function."""
Method = Literal["linear", "slerp", "circuits", "fisher", "regmean"]
"""How live models in one basis are merged."""


def checked(name: str, value: Any, choices: Any) -> Any:
    """The value, if it is one of the choices.

    Args:
        name: of the option.
        choices: a `Literal` type, or a collection of strings.

    Raises:
        ValueError: it is none; the message lists them.
    """
    allowed = get_args(choices) or tuple(choices)
    if value not in allowed:
        raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(map(repr, allowed))}")
    return value
