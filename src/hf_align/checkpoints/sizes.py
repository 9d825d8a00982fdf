"""Sizes as people write them."""

from __future__ import annotations

from hf_align.errors import OptionError

_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def bytes_in(size: str) -> int:
    """The bytes of a size such as "500MB" or "5GB", or of a number.

    Raises:
        OptionError: it is no size.
    """
    number, unit = size[:-2], size[-2:].upper()
    if unit in _UNITS and number.strip().replace(".", "", 1).isdigit():
        return int(float(number) * _UNITS[unit])
    if size.isdigit():
        return int(size)
    raise OptionError(f"{size!r} is not a shard size; write 500MB or 5GB")
