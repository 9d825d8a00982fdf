"""Whether two models differ in nothing but dropout, also where no call is known that runs it.

What a config says while a model is built ends in the attributes of its modules. Where those that differ belong to
modules that hand on what they are given, as dropout does when nothing is trained, no call can tell the two apart.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import type_before_parametrizations
from transformers import PretrainedConfig

from hf_align.tracing.example import Example
from hf_align.tracing.fingerprint import Call, CannotRecord

_GIVEN = Example({"input": torch.zeros(2, 3, 4)}, {})
_OF_TORCH = (
    *("_modules", "_parameters", "_buffers"),
    *("_state_dict_hooks", "_state_dict_pre_hooks"),
    *("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)
"""Attributes that are compared apart, or that only bear on how weights are stored."""


def differ_in_dropout_alone(first: nn.Module, second: nn.Module) -> bool:
    """Whether all modules that were built otherwise hand on what they are given, in evaluation mode.

    Args:
        first, second: of one class, without weights.
    """
    ours, theirs = dict(first.named_modules()), dict(second.named_modules())
    if ours.keys() != theirs.keys():
        return False
    differing = [(m, theirs[n]) for n, m in ours.items() if not _built_alike(m, theirs[n])]
    return bool(differing) and all(_hands_on(m) for both in differing for m in both)


def _built_alike(first: nn.Module, second: nn.Module) -> bool:
    ours, theirs = (
        {n: v for n, v in vars(m).items() if n not in _OF_TORCH and not isinstance(v, PretrainedConfig)}
        for m in (first, second)
    )
    held, others = (dict(m.named_buffers(recurse=False)) for m in (first, second))
    return (
        type_before_parametrizations(first) is type_before_parametrizations(second)
        and ours.keys() == theirs.keys()
        and held.keys() == others.keys()
        and all(_equal(v, theirs[n]) for n, v in ours.items())
        and all(_equal(t, others[n]) for n, t in held.items())
    )


def _equal(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return first.shape == second.shape and first.dtype == second.dtype and torch.equal(first, second)
    try:
        return bool(first == second)
    except Exception:  # what cannot be compared is not known to be equal
        return False


def _hands_on(module: nn.Module) -> bool:
    if any(True for _ in module.children()) or module.state_dict():
        return False
    try:
        found = Call(_GIVEN).fingerprint(nn.Sequential(module))
    except CannotRecord:
        return False
    return found == Call(_GIVEN).fingerprint(nn.Sequential())
