"""Random weights at which null directions are counted, until a count is the model's own.

At some weights there are null directions that are gone at almost all others (a ReLU that never opens), and with few
tokens there are some that are gone with more (on what depends on the token alone, a quadratic form may vanish), or with
larger pictures (attention that falls on a single place sees no more than the product of two maps). So the
smallest count is the model's own, and it is looked for where the first one leaves open directions: at weights that are
drawn with more care, then with more tokens and places, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import Generator
from transformers import PretrainedConfig

from hf_align.symmetry.certificate.kinks import kinks
from hf_align.symmetry.certificate.null_directions import NullDirections, null_directions
from hf_align.symmetry.certificate.random_copy import with_room, with_tokens
from hf_align.symmetry.spec import SymmetrySpec
from hf_align.tracing.program import Program

_MANY_TOKENS = 128
"""Of a copy in which some directions seem open: what a block makes of single tokens it can show for so many at most."""
_FEW_TOKENS = 2
"""Draws of a copy as it is at most; all others have more tokens."""
_DRAWS = 7
_ALIKE = 3
"""As many draws that all leave the fewest open directions settle that these are the model's own."""


@dataclass(frozen=True)
class Draw:
    """A copy, and the random numbers that its weights are drawn with.

    Attributes:
        thorough: whether weights are drawn with more care (`null_directions`).
    """

    program: Program
    spec: SymmetrySpec
    rng: Generator
    thorough: bool

    def count(self) -> NullDirections:
        """The null directions at these weights."""
        return null_directions(self.program, self.spec, self.rng, thorough=self.thorough)


def draws(
    config: PretrainedConfig,
    copy: tuple[Program, SymmetrySpec],
    derived: Callable[[PretrainedConfig], tuple[Program, SymmetrySpec]],
) -> Iterator[Draw]:
    """What to count, the cheapest first.

    Args:
        copy: the program and the spec of the config.
        derived: those of another config, which is larger.
    """
    few = _FEW_TOKENS if kinks(copy[0]) else 1  # where nothing has a kink, care draws the same weights
    for number in range(_DRAWS):
        if number == few:
            copy = _larger(config, copy, derived)
        yield Draw(*copy, Generator().manual_seed(number), thorough=number > 0)


def _larger(
    config: PretrainedConfig,
    copy: tuple[Program, SymmetrySpec],
    derived: Callable[[PretrainedConfig], tuple[Program, SymmetrySpec]],
) -> tuple[Program, SymmetrySpec]:
    """A copy with more tokens, and with more room for pictures where it runs with that."""
    tokens = with_tokens(config, _MANY_TOKENS)
    room = with_room(tokens or config)
    if room is not None:
        try:
            return derived(room)
        except Exception:  # sizes that do not go together fail in their own way
            pass
    return derived(tokens) if tokens is not None else copy


def fewest(drawn: Sequence[NullDirections]) -> NullDirections:
    """The count that leaves fewest directions open."""
    return min(drawn, key=lambda found: len(found.open))


def settled(drawn: Sequence[NullDirections]) -> bool:
    """Whether no direction is open, or no further draw is expected to leave fewer."""
    least = len(fewest(drawn).open)
    return not least or sum(len(found.open) == least for found in drawn[1:]) >= _ALIKE
