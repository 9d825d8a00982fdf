"""A config as a model without weights, and what its calls compute."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from typing import Any

from transformers import PretrainedConfig, PreTrainedModel

from hf_align.errors import IncompatibleModels
from hf_align.tracing.build import build_without_weights, inventory
from hf_align.tracing.fields import Path, with_values
from hf_align.tracing.fingerprint import Call, CannotRecord, Fingerprint
from hf_align.tracing.first_calls import first_calls
from hf_align.tracing.in_texts import try_media
from hf_align.tracing.layers import find_stacks, shorten
from hf_align.tracing.mode import Mode, NothingNew
from hf_align.tracing.modes import find_modes
from hf_align.tracing.trace import trace_call
from hf_align.tracing.ways import owners_of, try_parts, try_ways

_OF_DECODER = "decoder_input_ids"
_BATCH = 2
"""Rows of a call."""
Shapes = dict[str, tuple[int, ...]]


class Variant:
    """A config as a model, and the fingerprints of its calls."""

    def __init__(self, config: PretrainedConfig) -> None:
        self.config = config
        self._known: dict[Call, Fingerprint | None] = {}

    @cached_property
    def model(self) -> PreTrainedModel:
        return build_without_weights(self.config)

    @cached_property
    def shapes(self) -> Shapes | None:
        """Of the weights; None if no such model can be built."""
        try:
            return inventory(self.model).shapes
        except Exception:  # constructors fail in as many ways as there are models
            return None

    def fingerprint(self, call: Call) -> Fingerprint | None:
        """What a call computes; None if it fails."""
        if call not in self._known:
            try:
                self._known[call] = call.fingerprint(self.model) if self.shapes is not None else None
            except CannotRecord:
                self._known[call] = None
        return self._known[call]

    def having(self, values: dict[Path, Any]) -> Variant:
        """With other values of some fields."""
        return Variant(with_values(self.config, values))

    def calls(self, length: int, like: PreTrainedModel | None = None) -> list[Call]:
        """Calls that can be recorded: of the model, and of models in it with weights that those do not read.

        Args:
            like: the model that inputs are made for, by default this one.
        """
        model = like if like is not None else self.model
        found = list(self._of_part(model, "", length))
        for path, part in model.named_modules():
            read = {w for call in found for w in self._read(call)}
            unread = {f"{path}.{n}" for n, _ in part.named_parameters()} - read
            if path and unread and isinstance(part, PreTrainedModel):
                found += self._of_part(part, path, length)
        return found

    def _of_part(self, part: PreTrainedModel, path: str, length: int) -> Iterator[Call]:
        for example in first_calls(part, _BATCH, length):
            for steps in (1, 0):
                call = Call(example, steps, path)
                if self.fingerprint(call) is not None:
                    yield call
                    return

    def calls_with_media(self) -> list[Call]:
        """Calls that can be recorded of texts with pictures, sounds and the like in them."""
        found = list[Call]()

        def attempt(mode: Mode) -> Exception | None:
            error = self._attempted(call := Call(mode.example))
            found.extend([call] if error is None else [])
            return error

        try_media(self.model, attempt)
        return found

    def calls_with_labels(self, calls: Iterable[Call]) -> list[Call]:
        """A call of some with labels alone for its decoder, if one can be recorded: many a model makes of its labels
        what its decoder reads, and begins that as its config says."""
        asked = inspect.signature(self.model.forward).parameters
        for call in calls if {"labels", _OF_DECODER} <= asked.keys() else ():
            given = dict(call.example.arguments)
            labels = next((given[name] for name in (_OF_DECODER, "input_ids") if name in given), None)
            others = {name: value for name, value in given.items() if not name.startswith("decoder_")}
            if call.part or labels is None:
                continue
            labelled = Call(replace(call.example, arguments={**others, "labels": labels}))
            if self._attempted(labelled) is None:
                return [labelled]
        return []

    def calls_in_all_modes(self) -> list[Call]:
        """A call of every mode that tracing finds, at the cost of two layers of each kind.

        Raises:
            IncompatibleModels: the model cannot be traced.
        """
        short = build_without_weights(self.config)
        try:
            shorten(short, find_stacks(short))
            modes = find_modes(short, config=self.config)
        except IncompatibleModels:  # its layers cannot be cut alike, or it counts on all of them
            short, modes = self.model, find_modes(self.model)
        if self.model.config._attn_implementation != short.config._attn_implementation:
            self.model.set_attn_implementation(short.config._attn_implementation)
        return [Call(mode.example, mode=mode) for mode, _ in modes]

    def calls_that_read(self, unread: Iterable[str], calls: Iterable[Call]) -> list[Call]:
        """Calls with an argument more, of the model or of a module in it, that read weights which none of some does."""
        left, found = set(unread), list[Call]()

        def attempt(mode: Mode) -> Exception | None:
            error = self._attempted(call := Call(mode.example, mode=mode))
            if error is not None:
                return error
            if not self._read(call) & left:
                return NothingNew()
            left.difference_update(self._read(call))
            found.append(call)
            return None

        example = next((call.example for call in calls if not call.part), None)
        if example is None:
            return []
        try:
            extents = trace_call(self.model, example).extents
        except Exception:  # tracing fails in as many ways as there are models
            return []
        owners = owners_of(left)
        if any("." not in name for name in left):
            try_ways(self.model, example, extents, attempt)
        try_parts(self.model, example, extents, owners, attempt)
        return found

    def _attempted(self, call: Call) -> Exception | None:
        """Record a call; what is wrong with it, if it fails."""
        try:
            self._known[call] = call.fingerprint(self.model)
        except CannotRecord as error:
            return error
        return None

    def _read(self, call: Call) -> frozenset[str]:
        found = self.fingerprint(call)
        return found.weights if found is not None else frozenset()

    def unread(self, calls: Iterable[Call]) -> set[str]:
        """The weights that no call reads."""
        return set(self.shapes or ()) - {w for call in calls for w in self._read(call)}
