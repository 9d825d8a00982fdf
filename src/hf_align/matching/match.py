"""The result of matching two models: an element for each space of each, saved and used again."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from hf_align.errors import HfAlignError
from hf_align.runtime.saving import save_tensors
from hf_align.symmetry.elements import Element, load_element
from hf_align.symmetry.spec import SymmetrySpec

_FORMAT = "hf-align alignment"
_SAME = 4e-3
"""By which part two distances of the same weights may differ: devices round otherwise, and so do dtypes of files, of
which bfloat16 moves every weight by up to a 512th part."""


@dataclass(frozen=True)
class Match:
    """Two models brought together.

    Attributes:
        a: elements that balance A; its function is left alone.
        b: elements that bring B to A; its function is left alone.
        before, after: distance of the canonical weights, balanced but unmatched, and matched; None if not known.
        sweeps: passes over all spaces.
    """

    a: Mapping[str, Element]
    b: Mapping[str, Element]
    before: float | None = None
    after: float | None = None
    sweeps: int = 0

    @property
    def distance(self) -> tuple[float, float] | None:
        """Before and after; None if not known."""
        return None if self.before is None or self.after is None else (self.before, self.after)

    def laid_out(self) -> Match:
        """The same as it comes back from a file: on how factors lie in memory the last place of a product depends."""
        a, b = ({space: element.laid_out() for space, element in side.items()} for side in (self.a, self.b))
        return replace(self, a=a, b=b)

    def save(self, path: Path, spec: SymmetrySpec) -> None:
        """Write all elements as safetensors, keys `a|b/space/array`; the metadata names the spaces."""
        arrays = {
            f"{side}/{space}/{key}": t
            for side, elements in (("a", self.a), ("b", self.b))
            for space, element in elements.items()
            for key, t in element.laid_out().tensors().items()
        }
        about = {"spaces": _spaces(spec), "before": self.before, "after": self.after, "sweeps": self.sweeps}
        # One entry: safetensors writes several in any order.
        save_tensors(arrays, path, {_FORMAT: json.dumps(about)})

    @classmethod
    def load(cls, path: Path, spec: SymmetrySpec) -> Match:
        """Read what `save` wrote.

        Raises:
            HfAlignError: it is no alignment, or was made for another architecture.
        """
        sides: dict[str, dict[str, dict[str, Tensor]]] = {"a": {}, "b": {}}
        try:
            with safe_open(path, "pt") as file:
                metadata = file.metadata() or {}
                for key in file.keys():  # noqa: SIM118  (a safetensors file is no mapping)
                    side, _, rest = key.partition("/")
                    space, _, array = rest.rpartition("/")
                    sides[side].setdefault(space, {})[array] = file.get_tensor(key).clone()  # as `read_tensors`
        except (OSError, SafetensorError, KeyError) as error:
            raise HfAlignError(f"{path} is not an alignment file") from error
        about = json.loads(metadata.get(_FORMAT, "{}"))
        if about.pop("spaces", None) != _spaces(spec):
            raise HfAlignError(f"{path} was made for another architecture, or with another --residual")
        a, b = ({s: load_element(t) for s, t in sides[side].items()} for side in ("a", "b"))
        return cls(a, b, **about)


def are_same(one: float, other: float, before: float) -> bool:
    """Whether two distances may be of the same weights.

    Args:
        before: their distance unmatched: beside it, that of copies is nothing once they are matched.
    """
    return math.isclose(one, other, rel_tol=_SAME, abs_tol=_SAME * before)


def of_others(found: Match, here: Match) -> list[str]:
    """A sentence if a match was found for other weights than those that it is used for.

    Args:
        found: with the distances of the models that it was found for.
        here: with those of the models at hand.
    """
    if found.before is None or found.after is None or here.before is None or here.after is None:
        return []
    if are_same(found.before, here.before, found.before) and are_same(found.after, here.after, found.before):
        return []
    return [f"--alignment was found for other weights: the distance of those went from {found.before:.4g} to "
            f"{found.after:.4g}, and that of these goes from {here.before:.4g} to {here.after:.4g}"]  # fmt: skip


def _spaces(spec: SymmetrySpec) -> str:
    return json.dumps({n: f"{s.group_name}({s.size})" for n, s in spec.spaces.items()}, sort_keys=True)
