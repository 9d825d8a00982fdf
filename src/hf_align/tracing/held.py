"""What programs take for granted, held against runs of their model, or of a small copy of it where that is large."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, MutableMapping
from dataclasses import replace
from weakref import WeakKeyDictionary

from transformers import PretrainedConfig, PreTrainedModel

from hf_align.errors import IncompatibleModels, first_line
from hf_align.tracing.build import build_without_weights
from hf_align.tracing.measured import LARGEST, Measured, agrees_with_runs, needs_ends, parameters_of
from hf_align.tracing.program import Program
from hf_align.tracing.reasons import needs_numbers
from hf_align.tracing.small.field_roles import ROOMY, TINY
from hf_align.tracing.small.shrink import depth_of, shrink
from hf_align.tracing.tokens import announcing_tokens

logger = logging.getLogger(__name__)
_MEASURED: MutableMapping[PreTrainedModel, Measured] = WeakKeyDictionary()
"""What runs of each model have shown."""
_COPIES: dict[Hashable, Measured] = {}
"""By config, what runs of a copy have shown."""
Trace = Callable[[PreTrainedModel], object]
"""Traces the first call of a copy, which is then measured."""


def hold_lists(model: PreTrainedModel, program: Program, places: set[str], trace: Trace) -> Program:
    """Hold a program with lists of what its data chooses against runs of the model, or of a small copy of it.

    Args:
        places: the lines that make them.

    Returns:
        The program; its texts have those tokens, too, without which not all lists were measured.

    Raises:
        IncompatibleModels: it does not give what the model gives, or nothing could be run.
    """
    if not places:
        return program
    before = _measured(model, trace)
    if parameters_of(model) > LARGEST:
        places = places - before.places
    elif agrees_with_runs(model, program, places, before):
        places = set()
    if places:
        raise needs_numbers(min(places & before.refuted or places))
    if not before.announcing:
        return program
    return replace(program, example=program.example.with_tokens(announcing_tokens(model.config)))


def hold_ends(model: PreTrainedModel, program: Program, trace: Trace) -> None:
    """Hold a program of texts that end with a token of their own against runs with other texts.

    Raises:
        IncompatibleModels: the model answers some of them, and not as the program would.
    """
    measured = _measured(model, trace)
    if parameters_of(model) <= LARGEST:
        measured.needs_ends = needs_ends(model, program)
    if not measured.needs_ends:
        token = min(program.example.ends.values())
        raise IncompatibleModels(f"what it computes depends on where token {token} stands in a text")


def require_lists_held(model: PreTrainedModel) -> None:
    """Refuse a model with a call that runs have shown to do more with its lists than is written down.

    Raises:
        IncompatibleModels: there was such a call.
    """
    known = _MEASURED.get(model)
    if known is not None and known.refuted:
        raise needs_numbers(min(known.refuted))


def _measured(model: PreTrainedModel, trace: Trace) -> Measured:
    """What runs have shown of a model, or of a small copy of it."""
    if parameters_of(model) > LARGEST:
        return _measured_on_a_copy(model.config, trace)
    return _MEASURED.setdefault(model, Measured())


def _measured_on_a_copy(config: PretrainedConfig, trace: Trace) -> Measured:
    """What runs have shown of the lists of a copy of a large model, which is small, but as deep: one layer alone may
    do something else."""
    key = type(config), config.to_json_string(use_diff=False)
    if key not in _COPIES:
        _COPIES[key] = Measured()
        for sizes in (replace(TINY, positions=ROOMY.positions), ROOMY):
            try:
                small = build_without_weights(shrink(config, depth_of(config), replace(sizes, kinds_come_soon=False)))
                if parameters_of(small) <= LARGEST:
                    trace(small)
                    _COPIES[key] = _MEASURED[small]
                    break
            except Exception as error:  # sizes that do not go together fail in their own way
                logger.info("%s: no copy to measure (%s)", config.model_type, first_line(error))
    return _COPIES[key]
