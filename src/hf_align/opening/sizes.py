"""Two models of other sizes: the smaller one is made as deep and as wide as the other."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from transformers import PretrainedConfig

from hf_align.errors import IncompatibleModels
from hf_align.opening.depths import DeepenedWeights, Deepening, Places, is_unchanged, places_for
from hf_align.opening.heads import choose_heads, is_tied
from hf_align.opening.models import Model
from hf_align.opening.widths import Architecture, described, widen
from hf_align.runtime.progress import waiting
from hf_align.symmetry.widening import WidenedWeights, is_wider
from hf_align.tracing.build import build_without_weights
from hf_align.tracing.fields import differences

_SHOWN = 4
"""Fields that a message names."""


@dataclass(frozen=True)
class Sizes:
    """The architectures of two models, of which one may be smaller.

    Attributes:
        stored_as: on disk.
        architectures: the same at the depth of the deeper one.
        deepenings: what makes a model as deep as the other, where it is not.
        narrow: which one is narrower; None where both are as wide.
    """

    stored_as: Sequence[Architecture]
    architectures: Sequence[Architecture]
    deepenings: Sequence[Deepening | None]
    narrow: int | None

    @classmethod
    def of(
        cls,
        stored: Sequence[PretrainedConfig],
        alike: Sequence[PretrainedConfig],
        deepenings: Sequence[Deepening | None],
        untie: bool | None,
        specs: Path | None,
    ) -> Sizes:
        """Derive the symmetries of both.

        Args:
            stored: their configs on disk.
            alike: those at the depth of the deeper one, with heads that are tied alike.
            untie, specs: as for `choose_heads`.
        """
        first = second = Architecture(*choose_heads(alike[0], untie, specs))
        if _shapes(alike[0]) != _shapes(alike[1]):
            second = _tied_as(first, alike[1], specs)
        both = first, second
        stored_as = [x if d is None else _tied_as(first, own, specs)
                     for own, x, d in zip(stored, both, deepenings, strict=True)]  # fmt: skip
        return cls(stored_as, both, deepenings, None if second is first else int(is_wider(first.spec, second.spec)))

    @property
    def large(self) -> Architecture:
        """That of both when they are as deep and as wide."""
        return self.architectures[0 if self.narrow is None else 1 - self.narrow]

    def require_one_small(self, refs: tuple[str, str], *, respelled: bool) -> None:
        """Refuse two models of which each has something that the other lacks: a result is written like one of them.

        Args:
            respelled: whether the second is brought into the vocabulary of the first.

        Raises:
            IncompatibleModels: they are such.
        """
        small = {i for i, deepening in enumerate(self.deepenings) if deepening is not None}
        small |= set() if self.narrow is None else {self.narrow}
        if len(small) > 1:
            raise IncompatibleModels(f"{refs[0]} and {refs[1]}: one is deeper and the other wider; they do not merge")
        if respelled and 0 in small:
            raise IncompatibleModels(
                f"neither {refs[0]} nor {refs[1]} has the layers, the widths and the tokenizer of the result: name the "
                "larger one first"
            )

    def places(self, models: Sequence[Model]) -> Places:
        """Where the layers of the shallower one belong; none where both are as deep."""
        for model, own, made, deepening in zip(
            models, self.stored_as, self.architectures, self.deepenings, strict=True
        ):
            if deepening is not None:
                with waiting("looking for layers that correspond"):
                    return places_for(
                        deepening, self.large.spec,
                        lambda places: [each.weights for each in self.fitted(models, places)],
                        partial(is_unchanged, model.weights, own.config, made.config, deepening),
                    )  # fmt: skip
        return ()

    def fitted(self, models: Sequence[Model], places: Places) -> list[Model]:
        """Both in one size, the layers of the shallower one in some places."""
        made = [
            model if deepening is None else _deepened(model, deepening, places)
            for model, deepening in zip(models, self.deepenings, strict=True)
        ]
        if self.narrow is not None:
            small = made[self.narrow]
            weights, grew = widened(small, self.architectures[self.narrow], self.large)
            words = grew if small.widened is None else f"{small.widened}, and {grew}"
            made[self.narrow] = replace(small, weights=weights, widened=words)
        return made


def _tied_as(other: Architecture, config: PretrainedConfig, specs: Path | None) -> Architecture:
    """An architecture whose head is untied where that of another is."""
    return Architecture(*choose_heads(config, is_tied(config) and not is_tied(other.config), specs))


def _deepened(model: Model, deepening: Deepening, places: Places) -> Model:
    return replace(model, weights=DeepenedWeights(model.weights, deepening, places), config=deepening.config,
                   widened=deepening.described(places), idle=deepening.idle(places))  # fmt: skip


def widened(model: Model, own: Architecture, wide: Architecture) -> tuple[WidenedWeights, str]:
    """A model's weights in the sizes of a wider architecture, and what grew, in words that follow its name.

    Raises:
        IncompatibleModels: that changes what it computes; the message names the fields of the config that differ.
    """
    try:
        weights, change = widen(model.weights, own, wide)
    except IncompatibleModels as error:
        sizes = {p: v for p, v in differences(own.config, wide.config).items() if {*map(type, v)} == {int}}
        named = ", ".join(f"{'.'.join(p)} ({n} and {w})" for p, (n, w) in itertools.islice(sizes.items(), _SHOWN))
        raise IncompatibleModels(f"{error}; their configs differ in {named}" if sizes else str(error)) from error
    return weights, f"is widened ({described(own.spec, wide.spec)}); its outputs change by {change:.0e}"


def _shapes(config: PretrainedConfig) -> dict[str, tuple[int, ...]]:
    return {n: tuple(p.shape) for n, p in build_without_weights(config).named_parameters()}
