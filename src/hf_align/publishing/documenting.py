"""What a merge says of itself: the proof of its symmetries, how alike its inputs are, before its card is written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn.functional import cosine_similarity
from transformers import PretrainedConfig

from hf_align.errors import HfAlignError, IncompatibleModels
from hf_align.opening.pairs import Pair
from hf_align.running.network import Weights
from hf_align.runtime.progress import waiting
from hf_align.symmetry.certificate.small_copy import certify_small_copy
from hf_align.symmetry.overrides.overrides import reviewer


def certified(config: PretrainedConfig, specs: Path | None, say: Callable[[str], None]) -> dict[str, Any] | None:
    """The certificate of an architecture, as `hf-align certify --json`; None where no small copy of it runs.

    Args:
        specs: a folder of reviewed overrides, which are certified too.

    Raises:
        HfAlignError: a derived symmetry changes the function.
    """
    say("certifying the symmetries on a small copy")
    try:
        with waiting("certifying"):
            result = certify_small_copy(config, reviewer(config.model_type, specs))
    except IncompatibleModels as error:
        say(f"no certificate: {error}")
        return None
    if result.undecided:
        say(f"no certificate: {result.undecided}")
        return None
    if not result.sound:
        raise HfAlignError(
            f"the symmetries derived for {result.model_type} change its function by {result.max_error:.1e}, so nothing "
            "is merged with them; hf-align certify says more"
        )
    return result.as_json()


def cosines(pair: Pair, moved_a: Weights, moved_b: Weights) -> dict[str, tuple[float, float]]:
    """Parameter -> cosine of A's weights with B's: as they are, and in the common basis.

    What is zero in the common basis (biases that moved into their readers) is left out.
    """
    found = {}
    for name in pair.spec.parameters:
        a, b = moved_a[name], moved_b[name]
        if bool(a.any()) and bool(b.any()):
            found[name] = (_cosine(pair.a.weights[name], pair.b.weights[name]), _cosine(a, b))
    return found


def _cosine(a: Tensor, b: Tensor) -> float:
    return float(cosine_similarity(a.double().flatten(), b.double().flatten(), dim=0))
