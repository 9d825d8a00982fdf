"""Whether a model answers as before where it is loaded in dtypes of fewer bits than the witness runs it in.

Code may ask for the dtype and do something else. What rounding does there is no measure of a basis, so that half of the
rows of the answers must change by far more than what rounding all weights once more changes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch

from hf_align.running.network import Network, Weights
from hf_align.witness.calls import Case
from hf_align.witness.noise import Jittered, changes

_FACTOR = 4.0
"""How much more than rounding an alignment may cost. The trained models of this project's benchmarks change by as much
as rounding does (0.7 to 1.0 times, in bfloat16 and in float16), random ones of 30 architectures by no more."""
_EPS = torch.finfo(torch.float32).eps


def dtypes_of_fewer_bits(loaded: Mapping[str, torch.dtype]) -> tuple[torch.dtype, ...]:
    """What models are loaded in to save memory; first the dtype of most weights by files and config, if it is one."""
    kinds = Counter(dtype for dtype in loaded.values() if dtype.is_floating_point)
    most = max(kinds, key=kinds.__getitem__, default=torch.float32)
    own = [most] if most.itemsize < torch.float32.itemsize else []
    return tuple(dict.fromkeys((*own, torch.bfloat16, torch.float16)))


def excess(case: Case, networks: tuple[Network, Network], before: Weights, after: Weights) -> tuple[float, float]:
    """How far half of the rows of an answer move at least, relative to its largest entry, and the most that is none.

    Args:
        networks: of the config before and after, in the dtype.
        before, after: the weights, in any dtype.
    """
    own, written = networks
    plain, eps = case.answers_of(own, before), torch.finfo(own.dtype).eps
    rounded = changes(plain, case.answers_of(own, Jittered(before, eps / _EPS)))
    moved = changes(plain, case.answers_of(written, after))
    return float(moved.median()), _FACTOR * float(rounded.median()) + eps
