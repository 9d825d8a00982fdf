"""A merge as a mergekit recipe says: by mergekit where it gives a whole model, by its methods in our loop elsewhere."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from hf_align.card import document
from hf_align.config import Align, read_recipe
from hf_align.errors import HfAlignError, OutputError
from hf_align.mergekit.basis import Inputs, open_inputs
from hf_align.mergekit.extra import dtype_of, models_of, parse, require
from hf_align.mergekit.loaders import renamed, run_mergekit
from hf_align.mergekit.methods import merge_here
from hf_align.options import Options
from hf_align.pipeline import Say
from hf_align.provenance import Input

_STAGE = ".mergekit"


def run_recipe(
    path: Path,
    output: Path,
    *,
    say: Say = lambda _: None,
    seed: int | None = None,
    trust_remote_code: bool = False,
    overwrite: bool = False,
    quiet: bool = False,
) -> list[str]:
    """Merge as a mergekit recipe says, with all models in one basis if it has the key `align`.

    Without the key the result is mergekit's own, tensor for tensor, wherever mergekit gives all tensors.

    Args:
        seed: of methods that draw random numbers.

    Returns: what there is to say of the result.

    Raises:
        HfAlignError: mergekit is not there, the recipe or a model is not usable; nothing is written then.
    """
    require()
    recipe, align = read_recipe(path)
    config = parse(recipe)
    _require_free(output, overwrite)
    dtype_of(config, "out_dtype", "dtype")  # one that is none is said before models are opened
    names = models_of(config)
    options = _options(align, trust_remote_code, quiet)
    reference = _reference(names, config, align)
    named = {name: name for name in names}
    data = align.data if align else None
    inputs: Inputs | None = None
    if align is not None and len(names) > 1:
        inputs = open_inputs(reference, named, options, data, say)
    stage = output / _STAGE
    shutil.rmtree(stage, ignore_errors=True)
    try:
        fault = run_mergekit(recipe, inputs, stage, seed, trust_remote_code, quiet)
        if fault is None:
            _move(stage, output)
            if inputs is not None:
                _document(output, recipe, align, inputs, say)
            how = "merged by mergekit"
        else:
            shutil.rmtree(stage, ignore_errors=True)
            say(f"mergekit does not merge this architecture whole ({fault}); merging with its methods here")
            inputs = opened = inputs or open_inputs(reference, named, options, data, say)
            here = replace(options, overwrite=overwrite, dtype=dtype_of(config, "out_dtype", "dtype"))
            merge_here(config, opened, output, here, say, seed or 0,
                       lambda: _document(output, recipe, align, opened, say))  # fmt: skip
            how = "merged by the methods of mergekit, tensor by tensor"
    finally:
        shutil.rmtree(stage, ignore_errors=True)
        if output.is_dir() and not any(output.iterdir()):
            output.rmdir()
    return [how, *([f"all models are in the basis of {reference}"] if align is not None and inputs else [])]


def _options(align: Align | None, trust_remote_code: bool, quiet: bool) -> Options:
    if align is None:
        return Options(match="none", untie=False, trust_remote_code=trust_remote_code, quiet=quiet)
    return Options(match=align.match, residual=align.residual, untie=align.untie, specs=align.specs,
                   trust_remote_code=trust_remote_code, quiet=quiet)  # fmt: skip


def _reference(names: Sequence[str], config: Any, align: Align | None) -> str:
    reference = (align and align.reference) or str(config.base_model or names[0])
    if reference not in names:
        raise HfAlignError(f"align: reference {reference} is none of the recipe's models ({', '.join(names)})")
    return reference


def _require_free(output: Path, overwrite: bool) -> None:
    if output.exists() and not output.is_dir():
        raise OutputError(f"{output} is no folder; choose another")
    if not overwrite and output.is_dir() and any(p.name not in (_STAGE, ".hf-align") for p in output.iterdir()):
        raise OutputError(f"{output} is not empty; choose another folder, or --overwrite")


def _move(stage: Path, output: Path) -> None:
    for old in output.glob("*.safetensors*"):
        old.unlink()
    for file in stage.iterdir():
        os.replace(file, output / file.name)


def _document(output: Path, recipe: Mapping[str, Any], align: Align | None, inputs: Inputs, say: Say) -> None:
    """The recipe, without local paths, and where its models came from."""
    sources = {name: model.source for name, model in inputs.models.items()}
    asked = align.model_dump(mode="json", exclude_none=True) if align else {}
    asked |= {key: Path(asked[key]).name for key in ("data", "specs") if key in asked}
    public = {name: Input.of(source, None).name for name, source in sources.items()}
    shown = renamed({**recipe, **({"align": asked} if align else {})}, public)
    (output / "mergekit_config.yml").write_text(yaml.safe_dump(shown, sort_keys=False), encoding="utf-8")
    document(output, list(sources.values()), say, model_type=inputs.pair.spec.model_type, untied=inputs.pair.untied,
             command="hf-align mergekit mergekit_config.yml OUT",
             strategy={"method": recipe["merge_method"], **renamed(asked, public)})  # fmt: skip
