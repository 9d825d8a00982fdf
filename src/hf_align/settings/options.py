"""What to do with a pair of models, as the command line or a caller says it."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from hf_align.errors import OptionError
from hf_align.settings.choices import (
    BASELINES,
    BY_SITE,
    CHOOSING,
    DESCENDING,
    OF_MANY,
    AnyHeads,
    AnyMatch,
    AnyMethod,
    AnyResidual,
    Dtype,
    checked,
    present_method,
)
from hf_align.settings.schedule import Schedule

if TYPE_CHECKING:
    import torch

_NO_RESULT = ("overwrite", "drop_cache", "offload", "quiet")
_NO_STRATEGY = (*_NO_RESULT, "device", "max_shard_size", "points", "schedule", "strict", "trust_remote_code", "witness")


@dataclass(frozen=True)
class Options:
    """What to do with a pair; the defaults are the command line's.

    Attributes:
        match: how B is matched to A; "none" for plain averaging.
        residual: the group to search for the residual stream, "orthogonal" wherever the spec allows it, or which of
            its features to match by.
        heads: how attention heads are paired.
        spaces: patterns of the names of spaces that may move; all without one.
        baseline: allow choices that change B's function.
        schedule: of learned matching, and of a curve.
        own: sequences that each model writes itself, where a descent or matching needs inputs and there are no labels;
            0 for the data alone.
        device: where models run; an accelerator if there is one.
        offload: whether models that are run read their weights as they need them; None where they do not fit.
        weight: of B, from 0 to 1.
        points: mixing weights at which losses are measured.
        dtype: of the output; that of A by default.
        specs: a folder of reviewed overrides of the derived symmetries.
        retokenize: bring models with another vocabulary into that of the first.
        widen: fields of the merged model's config that are larger than those of the models, each as FIELD=SIZE.
        witness: see that what is aligned answers as before, before it is written.
        drop_cache: take shards from the Hub off the disk as soon as they have been read.
        quiet: no progress bars.

    Raises:
        OptionError: an option has no such value, or contradicts another one.
    """

    match: AnyMatch = "weight"
    residual: AnyResidual = "orthogonal"
    heads: AnyHeads = "two-stage"
    spaces: tuple[str, ...] = ()
    baseline: bool = False
    schedule: Schedule = field(default_factory=Schedule)
    own: int = 512
    device: str | None = None
    offload: bool | None = None
    untie: bool | None = None
    retokenize: bool = False
    widen: tuple[str, ...] = ()
    method: AnyMethod = "linear"
    weight: float = 0.5
    points: int = 21
    dtype: Dtype | None = None
    max_shard_size: str = "5GB"
    alignment: Path | None = None
    specs: Path | None = None
    witness: bool = True
    strict: bool = False
    trust_remote_code: bool = False
    overwrite: bool = False
    drop_cache: bool = False
    quiet: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "method", present_method(self.method))
        checked("match", self.match, AnyMatch)
        checked("residual", self.residual, AnyResidual)
        checked("heads", self.heads, AnyHeads)
        checked("method", self.method, AnyMethod)
        checked("dtype", self.dtype, (None, *get_args(Dtype)))
        if not 0 <= self.weight <= 1:
            raise OptionError(f"weight is {self.weight}; it must lie between 0 and 1")
        if self.points < 3:
            raise OptionError(f"points is {self.points}; at least 3 are needed")
        bytes_in(self.max_shard_size)
        _ = self.widths
        if (chosen := {self.residual, self.heads} & BASELINES) and not self.baseline:
            raise OptionError(
                f"{chosen.pop()} changes B's function; it is there to compare with, under --allow-inexact"
            )
        if self.residual in BY_SITE and self.match != "activation":
            raise OptionError(f"--residual {self.residual} chooses among features; it needs --match activation")

    @property
    def widths(self) -> dict[str, int]:
        """Fields of the merged model's config, and how large they are to be.

        Raises:
            OptionError: one is written otherwise, or twice.
        """
        split = [entry.partition("=") for entry in self.widen]
        if wrong := [entry for entry, (_, _, size) in zip(self.widen, split, strict=True) if not size.isdecimal()]:
            raise OptionError(f"--widen {wrong[0]}: write a field of the config and its size, intermediate_size=1280")
        sizes = {name: int(size) for name, _, size in split}
        if len(sizes) < len(split):
            raise OptionError(f"--widen {' --widen '.join(self.widen)}: a field has one size")
        return sizes

    def require_filled(self) -> None:
        """Refuse room that no unit comes into.

        Raises:
            OptionError: the method mixes units that models have in common, and there are no more of these.
        """
        if self.widen and self.method not in CHOOSING:
            raise OptionError(
                f"--widen makes room for units of both models; --method {self.method} takes none: choose "
                f"{' or '.join(CHOOSING)}"
            )

    @property
    def changes_function(self) -> bool:
        """Whether B is no longer B when it is aligned."""
        return bool({self.residual, self.heads} & BASELINES)

    def require_for_many(self) -> None:
        """Refuse what is for two models.

        Raises:
            OptionError: there is such an option.
        """
        if self.method not in OF_MANY:
            raise OptionError(f"--method {self.method} merges two models; more are merged by {', '.join(OF_MANY)}")
        if self.weight != 0.5:
            raise OptionError("--weight is the share of the second of two models; more have equal shares")
        if self.alignment is not None:
            raise OptionError("--alignment is for two models; more are always matched again")

    def shares(self, count: int) -> tuple[float, ...]:
        """What each of so many models has in their merge: the second of two its weight, of more each as much."""
        return (1 - self.weight, self.weight) if count == 2 else (1 / count,) * count

    @property
    def torch_dtype(self) -> torch.dtype | None:
        """Of the output, as torch has it."""
        import torch  # here, for options are made before it is known whether it is needed

        return None if self.dtype is None else getattr(torch, self.dtype)

    @property
    def result(self) -> dict[str, str]:
        """All that the result depends on, by name."""
        found = {f"--{k.replace('_', '-')}": str(v) for k, v in asdict(self).items() if k not in _NO_RESULT}
        if self.alignment is not None and self.alignment.is_file():
            found["--alignment"] = hashlib.sha256(self.alignment.read_bytes()).hexdigest()
        return found

    @property
    def reads(self) -> tuple[Path, ...]:
        """Files and folders that are read."""
        return tuple(path for path in (self.alignment, self.specs) if path is not None)

    @property
    def descends(self) -> bool:
        """Whether anything goes down a loss."""
        return self.match == "learned" or self.method in DESCENDING

    @property
    def strategy(self) -> dict[str, str | bool | float]:
        """The options that the weights depend on, without paths."""
        chosen = {k: v for k, v in asdict(self).items() if k not in _NO_STRATEGY and v is not None}
        own = chosen.pop("own")
        chosen |= self.schedule.used_by(self.match, self.method)
        chosen |= {"spaces": " ".join(self.spaces), "widen": " ".join(self.widen)}
        chosen |= {"own": own} if self.descends or self.match == "activation" else {}
        return {k: v.name if isinstance(v, Path) else v if isinstance(v, str | bool | float) else str(v)
                for k, v in chosen.items()}  # fmt: skip


_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def bytes_in(size: str) -> int:
    """The bytes of a size such as "500MB" or "5GB", or of a number.

    Raises:
        OptionError: it is no size.
    """
    number, unit = size[:-2], size[-2:].upper()
    if unit in _UNITS and number.strip().replace(".", "", 1).isdigit():
        found = int(float(number) * _UNITS[unit])
    else:
        found = int(size) if size.isdigit() else 0
    if found:
        return found
    raise OptionError(f"{size!r} is not a shard size; write 500MB or 5GB")
