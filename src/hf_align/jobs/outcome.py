"""What happened, for people and for --json."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hf_align.publishing.provenance import Provenance


@dataclass
class Report:
    """What a merge or an alignment reports."""

    output: str
    model_type: str
    seconds: dict[str, float] = field(default_factory=dict)
    distance_before: float | None = None
    distance_after: float | None = None
    untied: bool = False
    pinned_by_unknown_ops: dict[str, str] = field(default_factory=dict)
    certificate: dict[str, Any] | None = None
    witness: dict[str, Any] | None = None
    comparison: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)

    @classmethod
    def again(cls, output: Path) -> Report:
        """What the run that wrote a merge reported of it.

        Raises:
            HfAlignError: as `Provenance.load`.
        """
        made = Provenance.load(output)
        return cls(str(output), made.model_type, distance_before=made.distance_before,
                   distance_after=made.distance_after, untied=made.untied, certificate=made.certificate,
                   witness=made.witness, comparison=made.comparison, notes=made.notes)  # fmt: skip

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def facts(self) -> dict[str, Any]:
        """What the model card says of it."""
        return {k: v for k, v in self.as_json().items() if k not in ("output", "seconds", "pinned_by_unknown_ops")}
