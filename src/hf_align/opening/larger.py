"""Two models in sizes that neither has, so that their merge has room for units of both (PLeaS, arXiv 2407.02447).

Both are widened as the narrower one of two models is: with units that nothing writes and nothing reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from transformers import PretrainedConfig

from hf_align.errors import IncompatibleModels, OptionError
from hf_align.opening.models import Model
from hf_align.opening.sizes import widened
from hf_align.opening.variant import Variant
from hf_align.opening.widths import Architecture
from hf_align.symmetry.overrides.overrides import symmetries
from hf_align.tracing.fields import Path as Field
from hf_align.tracing.fields import fields, with_values


def enlarged(
    models: Sequence[Model], own: Architecture, sizes: Mapping[Field, int], specs: Path | None
) -> tuple[list[Model], Architecture]:
    """Models of one architecture in larger sizes, and that architecture.

    Args:
        sizes: as of `larger_sizes`.
        specs: a folder of reviewed overrides.

    Raises:
        IncompatibleModels: what the models compute depends on such a size, or nothing can be widened so.
        OptionError: one of them makes no weight larger, and would only change what is computed.
    """
    try:
        _require_larger(own.config, sizes)
        config = with_values(own.config, sizes)
        wide = Architecture(config, symmetries(config, specs))
        made = [(model, *widened(model, own, wide)) for model in models]
    except IncompatibleModels as error:
        asked = " ".join(f"--widen {'.'.join(path)}={size}" for path, size in sizes.items())
        raise IncompatibleModels(f"{asked}: {error}") from error
    return [replace(model, weights=weights, enlarged=words) for model, weights, words in made], wide


def _require_larger(config: PretrainedConfig, sizes: Mapping[Field, int]) -> None:
    before = Variant(config)
    for path, size in sizes.items():
        if before.having({path: size}).shapes == before.shapes:
            raise OptionError(f"--widen: no weight becomes larger by {'.'.join(path)}")


def larger_sizes(config: PretrainedConfig, widths: Mapping[str, int]) -> dict[Field, int]:
    """Where the fields stand that are to become larger, and how large.

    Args:
        widths: fields of the config, with dots where it holds others.

    Raises:
        OptionError: there is no such field, or it is as large already.
    """
    known, found = fields(config), dict[Field, int]()
    for name, size in widths.items():
        path = tuple((config.attribute_map or {}).get(name, name).split("."))
        now = found.get(path, known.get(path, ""))
        if now is not None and (not isinstance(now, int) or isinstance(now, bool)):
            raise OptionError(f"--widen {name}={size}: {type(config).__name__} has no size of that name")
        if now is not None and now >= size:
            raise OptionError(f"--widen {name}={size}: it is {now} already, and can only become larger")
        found[path] = size
    return found
