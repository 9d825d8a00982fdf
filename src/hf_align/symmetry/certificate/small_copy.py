"""The certificate of an architecture of any size: measured on a small copy, which says what it lacks."""

from __future__ import annotations

from dataclasses import replace

from transformers import PretrainedConfig

from hf_align.symmetry.certificate.certify import Certificate, certify
from hf_align.symmetry.overrides.overrides import Review
from hf_align.tracing.build import build_without_weights
from hf_align.tracing.small.kinds import layers_of
from hf_align.tracing.small.reduce import reduced
from hf_align.tracing.small.shrink import shrink


def certify_small_copy(config: PretrainedConfig, review: Review, layers: int = 2) -> Certificate:
    """Measure soundness and completeness on a copy that has every kind of layer, where a small one can have them all.

    Args:
        config: any config; not modified.
        layers: of the copy, if it needs no more than that.

    Raises:
        IncompatibleModels: no small copy of it runs.
    """
    copy = reduced(config, layers) or shrink(config, layers)
    return replace(certify(copy, review=review), lacking=layers_of(config).lacking(build_without_weights(copy)))
