"""Copies of a model that are tried: the smallest so far that runs."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

import torch
from transformers import PretrainedConfig, PreTrainedModel

from hf_align.errors import HfAlignError
from hf_align.tracing.build import build_without_weights, inventory
from hf_align.tracing.reasons import NOT_ITS_OWN
from hf_align.tracing.small.answers import media_answered, run_on_zeros
from hf_align.tracing.small.config_sizes import (
    Fields,
    is_same_kind,
    with_the_width_given,
)
from hf_align.tracing.small.kinds import Kinds, Layers
from hf_align.tracing.small.shrink import (
    with_fields,
)

_TRIALS = 500
"""Copies that are tried at most, each a few hundredths of a second."""
MENDED = 8
"""Widths of one copy that are mended at most."""
LARGEST = 1_000_000_000
"""Parameters of a copy that is still run: its weights are views of one zero, its activations are not."""


@dataclass
class Search:
    """The smallest config found so far that runs.

    Attributes:
        layers: of the model.
        example: the number among `inputs.examples` that it is run with; None takes the first that works.
        rows: texts or pictures at once that it is run with.
        failures: what is wrong with the fields that failed.
        media: with which it must answer texts, in so many tries.
        kinds: of layers that the smallest has, and that what is smaller must have.
    """

    config: PretrainedConfig
    layers: Layers
    wanted: int
    example: int | None = None
    rows: int = 2
    fields: Fields = field(default_factory=dict)
    parameters: int | None = None
    trials: int = _TRIALS
    seen: set[str] = field(default_factory=set)
    failures: dict[str, str] = field(default_factory=dict)
    until: float = math.inf
    media: frozenset[str] = frozenset()
    tries: int = 0
    kinds: Kinds = field(default_factory=dict)

    @property
    def done(self) -> bool:
        return (
            self.trials <= 0
            or time.process_time() > self.until
            or (self.parameters is not None and self.parameters <= self.wanted)
        )

    def attempt(self, fields: Fields, *, allow_equal: bool = False) -> bool:
        """Take these fields if the model runs with them and is smaller."""
        key = repr(fields)
        if self.done or key in self.seen:
            return False
        self.seen.add(key)
        if self.parameters is not None and not is_same_kind(self.fields, fields, self.config.to_dict()):
            return False
        self.trials -= 1
        limit = None if self.parameters is None else self.parameters - (not allow_equal)
        try:
            parameters = self._run(fields, limit)
        except Exception as error:  # a model that does not go together fails in its own way
            self.failures[key] = str(error)
            return False
        if parameters is None:
            return False
        self.fields, self.parameters = fields, parameters
        return True

    def attempt_mended(self, fields: Fields, most: int = MENDED) -> bool:
        """Take fields that failed with a width as wide as what it reads, as the error says, and so on."""
        said = self.failures.get(repr(fields), "")
        for changed in with_the_width_given(fields, said) if most else ():
            if self.attempt(changed):
                return True
            if self.failures.get(repr(changed), said) != said and self.attempt_mended(changed, most - 1):
                return True
        return False

    def _run(self, fields: Fields, limit: int | None) -> int | None:
        """The number of parameters; None if there are more than the limit, or too many to run."""
        model = build_without_weights(with_fields(self.config, fields))
        shapes = inventory(model).shapes
        parameters = sum(torch.Size(shape).numel() for shape in shapes.values())
        if limit is not None and parameters > limit:
            return None
        if parameters > LARGEST:
            return None
        if _holds_what_it_does_not_save(model):
            raise HfAlignError(f"it {NOT_ITS_OWN}")
        kinds = self.layers.kinds_of(model)
        if any(kinds.get(path, 0) < known for path, known in self.kinds.items()):
            raise HfAlignError("it has fewer kinds of layers")
        self.example = run_on_zeros(model, self.example, self.rows)
        if self.media and not self.media <= media_answered(model, self.tries).answered:
            raise HfAlignError("it answers fewer kinds of media")
        self.kinds = kinds
        return parameters


def _holds_what_it_does_not_save(model: PreTrainedModel) -> bool:
    """Whether modules in a plain list have weights of their own: some do at sizes that no checkpoint has."""
    saved = {id(p) for p in model.parameters()}
    listed = (part for module in model.modules() for value in vars(module).values() if type(value) is list
              for part in value if isinstance(part, torch.nn.Module))  # fmt: skip
    return any(id(p) not in saved for part in listed for p in part.parameters())
