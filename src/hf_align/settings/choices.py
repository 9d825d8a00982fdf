"""The choices that a caller has, on the command line and in Python: one type for each, checked where values enter."""

from __future__ import annotations

import math
import warnings
from numbers import Integral, Real
from typing import Any, Literal, get_args

from hf_align.errors import OptionError

Match = Literal["weight", "activation", "learned"]
"""How a model is matched: by its weights, by what both models compute on the same inputs, or by gradient descent."""
AnyMatch = Literal[Match, "none"]
"""With leaving models as they are."""
Residual = Literal["orthogonal", "permutation", "identity"]
"""The group that is searched for the residual stream."""
AnyResidual = Literal[Residual, "first", "last", "all", "separate"]
"""With the choices of features to match by, the last of which changes B's function."""
Heads = Literal["two-stage", "circuits", "monotonic"]
"""How attention heads are paired."""
AnyHeads = Literal[Heads, "ignore-heads"]
"""With the one that changes B's function."""
Method = Literal["linear", "slerp", "circuits", "fisher", "regmean", "regression"]
"""How live models in one basis are merged."""
OwnMethod = Literal[Method, "curve", "distil", "ot-fusion", "ot-fusion-activations", "semi-permutation"]
"""How models on disk are merged by what is here."""
MergekitMethod = Literal[
    "ties", "dare_ties", "dare_linear", "della", "della_linear", "task_arithmetic", "breadcrumbs", "breadcrumbs_ties",
    "sce", "model_stock", "karcher", "multislerp", "nuslerp", "nearswap", "arcee_fusion", "ram", "ramplus_tl",
]  # fmt: skip
"""How they are merged by mergekit."""
TransportMethod = Literal["regression", "task_arithmetic", "distil"]
"""How a fine-tune is carried to another base."""
KEEP = 0.3
"""Of a transport: examples that the other base writes, and answers on as before, for each of the fine-tune's."""
_LARGEST_SEED = 2**62
"""Torch takes twice as much; other seeds are counted on from it."""
_STRONGEST = 1000.0
"""Times that a change is added at most: no fine-tune is so little, and soon after numbers overflow."""
AnyMethod = Literal[OwnMethod, MergekitMethod]
Effort = Literal["quick", "good", "best"]
"""How much a merge may take: seconds, what the models compute without gradients, or minutes of a descent."""
LambdaSampling = Literal["near-midpoint", "midpoint", "uniform"]
"""Where between two models a descent takes the loss: λ in (0.4, 0.6), 0.5, or in (0, 1)."""
BY_SITE = frozenset(("first", "last", "all", "separate"))
"""Choices of features for the residual stream, which need features to match by."""
DESCENDING = frozenset(("curve", "distil"))
"""Methods that go down a loss."""
OF_MANY = ("linear", "regression", "curve", "distil")
"""Methods that merge any number of models."""
CHOOSING = ("regression", "distil")
"""Methods that choose units out of all models."""
BASELINES = frozenset(("separate", "ignore-heads"))
"""Choices that change B's function."""
Dtype = Literal["float64", "float32", "float16", "bfloat16"]
"""What a result is stored in."""

RENAMED_METHODS = {"transport": "ot-fusion", "transport-activations": "ot-fusion-activations"}
"""Names that methods had; they will be removed in version 0.2."""


def present_method(name: Any) -> Any:
    """The name that a method has today; a warning says so of an old one."""
    if name not in RENAMED_METHODS:
        return name
    warnings.warn(
        f"{name} is now called {RENAMED_METHODS[name]}; the old name goes away in version 0.2", FutureWarning, 3
    )
    return RENAMED_METHODS[name]


def checked(name: str, value: Any, choices: Any) -> Any:
    """The value, if it is one of the choices.

    Args:
        name: of the option.
        choices: a `Literal` type, or a collection of strings.

    Raises:
        OptionError: it is none; the message lists them.
    """
    allowed = get_args(choices) or tuple(choices)
    if value not in allowed:
        raise OptionError(f"{name} is {value!r}; it must be one of {', '.join(map(repr, allowed))}")
    return value


def finite(name: str, value: Any) -> float:
    """The value, if it is a finite number.

    Raises:
        OptionError: it is none.
    """
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise OptionError(f"{name} is {value!r}; a finite number is needed")
    return value if isinstance(value, int) else float(value)


def share(name: str, value: Any) -> float:
    """The value, if it is a number between 0 and 1.

    Raises:
        OptionError: it is none.
    """
    if not 0 <= finite(name, value) <= 1:
        raise OptionError(f"{name} is {value}; it must lie between 0 and 1")
    return float(value)


def strength(name: str, value: Any) -> float:
    """The value, if it is a number of times that a change may be added and leave a model.

    Raises:
        OptionError: it is none.
    """
    if abs(finite(name, value)) > _STRONGEST:
        raise OptionError(f"{name} is {value}; it must lie between {-_STRONGEST} and {_STRONGEST}")
    return value


def whole(name: str, value: Any, least: int | None = None) -> int:
    """The value, if it is a whole number, and no smaller than the least.

    Raises:
        OptionError: it is none.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or (least is not None and value < least):
        wanted = "a whole number is needed" if least is None else f"a whole number is needed, at least {least}"
        raise OptionError(f"{name} is {value!r}; {wanted}")
    return int(value)


def seed(name: str, value: Any) -> int:
    """The value, if random numbers can be drawn from it.

    Raises:
        OptionError: it is no whole number, or more than torch takes.
    """
    if abs(whole(name, value)) > _LARGEST_SEED:
        raise OptionError(f"{name} is {value}; it must lie between {-_LARGEST_SEED} and {_LARGEST_SEED}")
    return value
