"""The flags of mergekit that people type, for mergekit's library and for its command."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hf_align.errors import OptionError

_PARAMETERS = re.compile(r"[1-9][0-9]*[kKmMbB]?")
"""As mergekit reads a number of them."""


@dataclass(frozen=True)
class Flags:
    """What mergekit is told beside a recipe; None for its own default.

    Attributes:
        random_seed: of methods that draw random numbers; always set, so that an interrupted run resumes to the same
            result.
        device: where it computes.
        out_shard_size: parameters of a shard, as "5B".
        allow_crimes: whether models of several architectures may be mixed where nothing is aligned.
        copy_tokenizer: whether the tokenizer goes with the result.

    Raises:
        OptionError: a size is none.
    """

    random_seed: int = 0
    device: str | None = None
    out_shard_size: str | None = None
    allow_crimes: bool | None = None
    copy_tokenizer: bool | None = None

    def __post_init__(self) -> None:
        if self.out_shard_size is not None and not _PARAMETERS.fullmatch(self.out_shard_size):
            raise OptionError(f"--out-shard-size is {self.out_shard_size}; write a number of parameters, such as 5B")

    @property
    def given(self) -> Mapping[str, Any]:
        """Those that are not mergekit's defaults."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @property
    def for_library(self) -> dict[str, Any]:
        """As fields of `MergeOptions`."""
        from mergekit.common import parse_kmb

        return {k: parse_kmb(v) if k == "out_shard_size" else v for k, v in self.given.items()}

    @property
    def for_command(self) -> list[str]:
        """As words of mergekit's command."""
        found = []
        for field, value in self.given.items():
            name = field.replace("_", "-")
            if isinstance(value, bool):
                found.append(f"--{name}" if value else f"--no-{name}")
            else:
                found += [f"--{name}", str(value)]
        return found
