"""How much a merge may take, and what that comes to: which way to match and to merge."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from hf_align.checkpoints.checkpoint import Checkpoint
from hf_align.errors import HfAlignError
from hf_align.jobs.plain import Same
from hf_align.settings.choices import AnyMethod, Effort
from hf_align.settings.options import Options
from hf_align.settings.schedule import Schedule

METHODS: dict[Effort, AnyMethod] = {"quick": "linear", "good": "regression", "best": "distil"}
"""Of models that were trained apart (`benchmarks/regression.py`, `benchmarks/distil.py`)."""
OF_FINE_TUNES: dict[Effort, AnyMethod] = {"quick": "linear", "good": "linear", "best": "curve"}
"""Of two that share a basis (`benchmarks/finetunes.py`)."""
_ALIKE = 0.5
"""The cosine of weights from which on models share a basis: of two seeds it is about 0, of two fine-tunes 0.98."""
_LOOKED_AT, _ENTRIES = 16, 2**16
"""Matrices, and entries of each: enough to tell 0 from 1, and little to read."""


def at_effort(references: Sequence[str], options: Options, effort: Effort) -> tuple[Options, str]:
    """The options with what an effort comes to for these models, and a line on it.

    Args:
        references: of the models, folders or Hub references.
        options: with neither a way to match nor a method of the caller's.
    """
    pairs, trusted = _side_by_side(references, options.trust_remote_code), options.trust_remote_code
    if not (_share_basis_as_loaded(references, trusted) if pairs is None else _are_near(pairs)):
        apart = of_strangers(options, effort)
        return apart, f"--effort {effort}: matched by weights, merged by {apart.method}"
    method = OF_FINE_TUNES[effort] if len(references) == 2 else "linear"
    alike = "the models share a basis, as fine-tunes of one base do"
    return _by(method, replace(options, match="none")), f"--effort {effort}: {alike}; merged as they are by {method}"


def of_strangers(options: Options, effort: Effort) -> Options:
    """The options with what an effort comes to for models that were trained apart."""
    return _by(METHODS[effort], options)


def _by(method: AnyMethod, options: Options) -> Options:
    return replace(options, method=method, schedule=Schedule.of_method(method))


def share_basis(references: Sequence[str], *, trust_remote_code: bool = False) -> bool:
    """Whether models store the same tensors, and their matrices are close to the first one's: a sample of the entries
    is read."""
    pairs = _side_by_side(references, trust_remote_code)
    return pairs is not None and _are_near(pairs)


def _side_by_side(references: Sequence[str], trusted: bool) -> list[Same] | None:
    """The first model beside each of the others; None where they do not store the same tensors."""
    try:
        pairs = [Same.open(references[0], other, trust_remote_code=trusted) for other in references[1:]]
    except HfAlignError:  # whoever opens them to merge says what is wrong
        return None
    same = [pair for pair in pairs if pair is not None]
    return same if len(same) == len(pairs) else None


def _are_near(pairs: Sequence[Same]) -> bool:
    return all(_cosine(pair.a, pair.b) > _ALIKE for pair in pairs)


def _share_basis_as_loaded(references: Sequence[str], trusted: bool) -> bool:
    """As `share_basis`, of models that store the same weights by other names, or masks and heads beside them: only the
    modelling code, which takes long to load, knows that an old layout and a new one hold the same."""
    from hf_align.jobs.in_memory import InMemory

    try:
        first, *others = (InMemory.open(reference, trust_remote_code=trusted) for reference in references)
        return all(
            first.is_like(o) and _cosine(first.checkpoint, o.checkpoint, first.beside(o)) > _ALIKE for o in others
        )
    except HfAlignError:  # as above
        return False


def _cosine(a: Checkpoint, b: Checkpoint, names: Sequence[tuple[str, str]] | None = None) -> float:
    """The median over some of the matrices; 0 without one.

    Args:
        names: of the tensors, in the first and in the second; by default those of the first, in both.
    """
    pairs = [(n, n) for n in sorted(a)] if names is None else names
    matrices = [p for p in pairs if len(a.info(p[0]).shape) > 1 and a.info(p[0]).dtype.is_floating_point]
    found = []
    for in_a, in_b in matrices[:: max(1, len(matrices) // _LOOKED_AT)]:
        count = min(_ENTRIES, math.prod(a.info(in_a).shape))
        x, y = (model.entries(name, 0, count).double() for model, name in ((a, in_a), (b, in_b)))
        found.append(float(torch.nn.functional.cosine_similarity(x.flatten(), y.flatten(), 0)))
    return sorted(found)[len(found) // 2] if found else 0.0
