"""Commands of one process certify an architecture once."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from transformers import PretrainedConfig

from hf_align.symmetry.certificate import small_copy
from hf_align.symmetry.interpreter.call import RULES


def once(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of a config that gives again what it gave for the same config, options and rules."""
    found: dict[object, Any] = {}

    def kept(config: PretrainedConfig, **options: Any) -> Any:
        settings = {k: v for k, v in config.to_dict().items() if k not in ("_name_or_path", "transformers_version")}
        own_code = config._name_or_path if getattr(config, "auto_map", None) else ""
        described = json.dumps(settings, sort_keys=True, default=repr)
        key = (type(config), described, own_code, *options.items(), frozenset(RULES.items()))
        if key not in found:
            found[key] = function(config, **options)
        return found[key]

    return kept


small_copy.certify = once(small_copy.certify)
