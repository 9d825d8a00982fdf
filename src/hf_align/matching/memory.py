"""How much memory matching takes: what `--dry-run` states, and what keeps steps that run side by side within it."""

from __future__ import annotations

import math
import os
from collections.abc import Collection

import torch

from hf_align.matching.head_families import HeadFamily
from hf_align.matching.heads import numbers_of_pair, pairs_at_once
from hf_align.matching.stream import streams
from hf_align.matching.weight_cache import CACHED
from hf_align.running.offload import room as free_on
from hf_align.runtime.devices import CPU
from hf_align.symmetry.groups import ScaledPermutation
from hf_align.symmetry.spec import SymmetrySpec

_DOUBLE = torch.float64.itemsize
_WEIGHTS = 8
"""Copies of a weight: A's and B's, each as read, in canonical gauge, moved and laid out for a product."""
_TERM, _SOLVING = 1, 5
"""Of a cross matrix: a term as it is computed, and what solves it."""
_ELEMENTS = 8
"""Of all elements: both models' gauges, what is being solved, its composition with them, and what steps have seen."""
_KEPT = 4
"""Matrices of a stream that are kept: the cross matrices of its tables, and of what only permutations share with it;
and its element as it was a sweep ago, and as it goes on."""
_SHARE = 1 / 4
"""Of the machine's memory, for steps side by side: an assignment, which takes longest, has one thread."""
Step = HeadFamily | str
"""What is solved at once: heads with all that is inside, or a space by itself."""


def spaces_of(step: Step) -> Collection[str]:
    """The spaces that a step solves."""
    return step.spaces if isinstance(step, HeadFamily) else (step,)


def weights_of(spec: SymmetrySpec, step: Step) -> set[str]:
    """The parameters that a step moves."""
    return {name for space in spaces_of(step) for name in spec.uses(space)}


def of_step(spec: SymmetrySpec, step: Step) -> int:
    """The most bytes of solving a step: copies of its largest weight, and its cross matrices."""
    weights = max((math.prod(spec.shape(name)) for name in weights_of(spec, step)), default=0)
    return (_WEIGHTS * weights + _crosses(spec, step)) * _DOUBLE


def _crosses(spec: SymmetrySpec, step: Step) -> int:
    if not isinstance(step, HeadFamily):
        blocks = (block for name in spec.uses(step) for block in spec.blocks(name))
        powers = len({move.power for block in blocks for move in block.moves if move.space == step})
        copies = powers + max(powers + _TERM, _SOLVING)  # the sum so far, and that of a part or what solves it
        return copies * spec.spaces[step].size ** 2 * math.prod(spec.index_shape(step))
    at_once = min(spec.spaces[step.heads].size ** 2, pairs_at_once(spec, step))
    laid_out = sum(math.prod(spec.shape(name)) for name in weights_of(spec, step))
    return (_TERM + _SOLVING) * at_once * numbers_of_pair(spec, step) + laid_out


def of_matching(spec: SymmetrySpec, steps: list[Step]) -> int:
    """The most bytes of matching by weights and of moving them: what is kept, the elements, and the largest step."""
    elements = sum(
        (space.size if isinstance(space.group, ScaledPermutation) else space.size**2)
        * math.prod(spec.index_shape(name))
        for name, space in spec.spaces.items()
        if space.group is not None
    )
    sizes = [math.prod(spec.shape(name)) for name in spec.parameters]
    kept = sum(_KEPT * spec.spaces[name].size ** 2 for name in streams(spec))
    own = (_ELEMENTS * elements + kept) * _DOUBLE
    return 2 * min(CACHED, sum(sizes) * torch.float32.itemsize) + own + room(spec, steps)


def room(spec: SymmetrySpec, steps: list[Step], device: torch.device = CPU) -> int:
    """Bytes for steps that are solved side by side: what one for each thread takes, up to a share of the memory that is
    free on an accelerator, or of all that the machine has; what the largest step, or moving the largest weight, takes
    is needed in any case."""
    largest = max(math.prod(spec.shape(name)) for name in spec.parameters)
    step = max((of_step(spec, step) for step in steps), default=0)
    free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if device == CPU else free_on(device)
    return max(_WEIGHTS * largest * _DOUBLE, step, min(torch.get_num_threads() * step, int(_SHARE * free)))


def at_once(spec: SymmetrySpec, together: list[Step], most: int) -> int:
    """How many of these steps fit into `most` bytes side by side; at least one, at most the threads there are."""
    largest = max(of_step(spec, step) for step in together)
    return max(1, min(torch.get_num_threads(), len(together), most // largest))
