"""At which lengths models are run, so that it costs little beside matching them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from transformers import PretrainedConfig

from hf_align.running.offload import room
from hf_align.symmetry.spec import SymmetrySpec
from hf_align.tracing.fields import parts
from hf_align.tracing.ways import positions

COPIES = 2
"""Of a model that are held at most: what it was moved to, as it is and rounded."""
KEPT = 2**28
"""Bytes of answers that are kept."""
_SLACK = 1.15
"""What is freed is not given back at once: of the same run peaks differed by as much."""
LONGEST = 2048
_LENGTHS = (1, 2, 7, 16, 17, 65, 256, 1023)
"""Odd and even, four times as long each time."""
_ALWAYS = 5
"""The first so many of them cost nothing."""
_LEAST_LOADS, _MOST_LOADS = 4, 32
_WORDS = 16
"""Of a short input."""
_WINDOWS = ("window", "chunk", "local", "block", "segment", "original_max_position")
"""Parts of names of config fields that say up to where a position sees, or a rule holds."""
_LITTLE = 2e10
"""Multiplications by weights that are always few: less than a second."""
_SHARE = 0.5
"""Of what moving a model costs, for running it once: matching compares all weights several times over."""


def lengths(config: PretrainedConfig, spec: SymmetrySpec) -> tuple[int, ...]:
    """Lengths of inputs: short ones, an odd and an even one beyond each window that the config names, and the longest
    that is affordable, where every weight is multiplied once for each token."""
    most = min(LONGEST, positions(config) or LONGEST)
    affordable = _affordable(spec)
    chosen = {n for n in _LENGTHS[:_ALWAYS] if n <= most}
    longest = min(most, max(affordable, max(chosen)))
    chosen.add(longest)
    beyond = {w + n for w in windows(config) for n in (1, 2)} | {longest - 1}
    for length in sorted(beyond | set(_LENGTHS), reverse=True):
        if length < longest and sum(chosen) + length <= affordable:
            chosen.add(length)
    return tuple(sorted(chosen))


def loads(spec: SymmetrySpec) -> int:
    """How many short inputs are run so that experts get as many different numbers of words."""
    return max(_LEAST_LOADS, min(_MOST_LOADS, _affordable(spec) // _WORDS))


def _affordable(spec: SymmetrySpec) -> int:
    """Tokens for which every weight is multiplied once."""
    parameters = sum(math.prod(spec.shape(name)) for name in spec.parameters)
    return int(max(_LITTLE, _SHARE * _moving(spec)) / max(parameters, 1))


def memory(spec: SymmetrySpec, device: torch.device, offload: bool | None) -> int:
    """Bytes that running one model before and after takes at most, on the CPU."""
    copies = COPIES * torch.float32.itemsize
    entries = [math.prod(spec.shape(name)) for name in spec.parameters]
    reads = offload or (offload is None and copies * sum(entries) > room(device))
    widest = max(max(spec.shape(name), default=1) for name in spec.parameters)
    answer = widest * min(LONGEST, _affordable(spec)) * torch.float32.itemsize
    return int(_SLACK * (KEPT + answer + copies * (max(entries) if reads else sum(entries))))


def _moving(spec: SymmetrySpec) -> float:
    """Multiplications that move a model's weights once, by the spaces with matrices."""
    dense = {s.name: s.size for s in spec.spaces.values() if s.group is not None and s.group.dimension > s.size}
    total = 0.0
    for name, axes in spec.parameters.items():
        sizes = {f.space: dense[f.space] for axis in axes for part in axis for f in part if f.space in dense}
        total += math.prod(spec.shape(name)) * sum(sizes.values())
    return total


def windows(config: PretrainedConfig) -> Iterator[int]:
    """Numbers of tokens up to which the config says that a position sees, or a rule holds."""
    for part in parts(config):
        for name, value in _numbers(part.to_dict()):
            if any(word in name for word in _WINDOWS):
                yield value


def _numbers(fields: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """The whole numbers of a config by name, those in mappings (of rotary scaling) among them."""
    for name, value in fields.items():
        if isinstance(value, int) and not isinstance(value, bool) and value > 1:
            yield str(name), value
        elif isinstance(value, Mapping):
            yield from _numbers(value)
