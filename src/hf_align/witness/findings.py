"""What the witness found, for people and as data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Held:
    """How a model answers that was moved.

    Attributes:
        model: what it is called.
        change: the largest of an answer, over the largest entry of that answer.
        rounding: the same of the model as it was, with every weight moved by a random half unit in the last place.
        bound: the largest change that is one of rounding.
        rounded: the change with weights as they are written, on short inputs; None where that rounds none.
        cases: the changes, by mode and number of tokens (empty for inputs of other kinds).
        not_run: modes in which the model does not answer, and why.
        written: tokens that were written with a cache.
        rebased: what it returns beside its answers in another basis than before: embeddings, states of an encoder.
    """

    model: str
    change: float
    rounding: float
    bound: float
    rounded: float | None
    cases: dict[str, dict[str, float]]
    not_run: dict[str, str]
    written: int
    rebased: tuple[str, ...] = ()


@dataclass(frozen=True)
class Witness:
    """Models that were moved and answer as before.

    Attributes:
        models: each of them; what was moved to the others first, what only its gauge was chosen for behind.
        rounded_to: the dtypes that weights are loaded in.
    """

    models: tuple[Held, ...]
    rounded_to: tuple[str, ...]

    @property
    def sentence(self) -> str:
        """One line."""
        names = [held.model for held in self.models]
        one = f"aligned {names[0]} answers as {names[0]} does"
        who = one if len(names) == 1 else f"aligned {_list(names)} answer as they did"
        rounded = max((held.rounded for held in self.models if held.rounded is not None), default=None)
        stored = "" if rounded is None else f"; as {_list(self.rounded_to)}: {rounded:.0e}"
        lengths = sorted({int(n) for held in self.models for lengths in held.cases.values() for n in lengths if n})
        written = max(held.written for held in self.models)
        rebased = list(dict.fromkeys(name for held in self.models for name in held.rebased))
        modes = len({mode for held in self.models for mode in held.cases})
        left_out = list(dict.fromkeys(mode for held in self.models for mode in held.not_run))
        return ", ".join([
            f"witness: {who}",
            f"largest change {max(h.change for h in self.models):.0e} of the largest output "
            f"(rounding alone: {max(h.rounding for h in self.models):.0e}{stored})",
            f"{modes} mode{'s' if modes > 1 else ''}",
            *([f"lengths {lengths[0]} to {lengths[-1]}"] if lengths else []),
            *([f"{written} tokens with a cache"] if written else []),
            *([f"{_list(rebased)} returned in another basis"] if rebased else []),
            *([f"not run: {_list(left_out)}"] if left_out else []),
        ])  # fmt: skip

    def as_json(self) -> dict[str, Any]:
        """The contract of `witness` in reports and provenance."""
        return {"sentence": self.sentence, **asdict(self)}


def _list(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
