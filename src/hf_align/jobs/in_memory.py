"""Two checkpoints of different layouts side by side: what each stores of the weights that their architecture has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hf_align.checkpoints.adapters import adapted
from hf_align.checkpoints.checkpoint import Checkpoint
from hf_align.checkpoints.hub import resolve
from hf_align.checkpoints.naming import Names, match_names
from hf_align.checkpoints.token_ids import same_vocabulary
from hf_align.tracing.budget import Budget, within
from hf_align.tracing.build import build_without_weights, by_inputs, inventory, read_config


@dataclass(frozen=True)
class InMemory:
    """A checkpoint by its names in memory.

    Attributes:
        checkpoint: with what an adapter adds to it.
        tied: whether any weights are.
        shapes: of the weights, by their names in memory.
    """

    folder: Path
    checkpoint: Checkpoint
    names: Names
    tied: bool
    shapes: Mapping[str, tuple[int, ...]]

    @classmethod
    def open(cls, reference: str, *, trust_remote_code: bool) -> InMemory:
        """Read headers alone.

        Raises:
            HfAlignError: any bad input.
        """
        source = resolve(reference)
        stored = Checkpoint.open(source.folder, source.shards)
        config = read_config(source.folder, trust_remote_code=trust_remote_code)
        with within(Budget.of_stored(len(stored), stored.entries_in_all), reference):
            model = build_without_weights(config)
        found = inventory(model)
        names = match_names(model, stored, found.ties, {})
        checkpoint = adapted(stored, source, names.alone(), by_inputs(model))
        return cls(source.folder, checkpoint, names, bool(found.ties), found.shapes)

    def is_like(self, other: InMemory) -> bool:
        """Whether both have the same weights and read the same tokens."""
        same = self.shapes == other.shapes and self.tied == other.tied
        return same and same_vocabulary([self.folder, other.folder])

    def beside(self, other: InMemory) -> list[tuple[str, str]]:
        """The names on disk, here and there, of each tensor that both store as it is."""
        mine, theirs = self.names.alone(), other.names.alone()
        return [(mine[n], theirs[n]) for n in sorted(mine.keys() & theirs.keys())]
