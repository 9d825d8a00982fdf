"""A merge as a mergekit recipe says: by mergekit where it gives a whole model, by its methods in our loop elsewhere."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from hf_align.checkpoints.hub import resolve
from hf_align.checkpoints.shards import abandon, is_left_unfinished
from hf_align.config import Align, read_recipe
from hf_align.errors import HfAlignError, OutputError
from hf_align.mergekit.basis import Inputs, open_inputs
from hf_align.mergekit.extra import dtype_of, is_known, models_of, parse, version
from hf_align.mergekit.folders import run_command, write_inputs
from hf_align.mergekit.loaders import renamed, run_mergekit
from hf_align.mergekit.methods import merge_here, whole_slice
from hf_align.mergekit.slices import stack_here
from hf_align.options import Options
from hf_align.pipeline import Say
from hf_align.publishing.card import document
from hf_align.publishing.provenance import public_name

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
    version()  # none is said before anything else
    recipe, align = read_recipe(path)
    plan = _Plan(recipe, align, seed, _options(align, trust_remote_code, quiet), output, say)
    known = is_known()
    if known:
        plan.require_sound()
    reference = plan.reference
    _require_free(output, overwrite)
    stage = output / _STAGE
    shutil.rmtree(stage, ignore_errors=True)
    try:
        how, inputs = (_by_loaders if known else _by_folders)(plan, stage, overwrite)
    finally:
        shutil.rmtree(stage, ignore_errors=True)
        if output.is_dir() and not any(output.iterdir()):
            output.rmdir()
    return [how, *([f"all models are in the basis of {reference}"] if align is not None and inputs else [])]


@dataclass(frozen=True)
class _Plan:
    """A recipe and what it takes to follow it."""

    recipe: Mapping[str, Any]
    align: Align | None
    seed: int | None
    options: Options
    output: Path
    say: Say

    @property
    def names(self) -> list[str]:
        return models_of(self.recipe)

    @property
    def reference(self) -> str:
        """The model whose basis is used.

        Raises:
            HfAlignError: it is none of the recipe's.
        """
        names = self.names
        if not names:
            raise HfAlignError("the recipe names no model")
        reference = (self.align and self.align.reference) or str(self.recipe.get("base_model") or names[0])
        if reference not in names:
            raise HfAlignError(f"align: reference {reference} is none of the recipe's models ({', '.join(names)})")
        return reference

    def require_sound(self) -> None:
        """See that mergekit accepts the recipe, before models are opened.

        Raises:
            HfAlignError: it does not.
        """
        config = parse(self.recipe)
        dtype_of(config, "out_dtype", "dtype")
        if other := {str(model) for model in config.referenced_models()} - set(self.names):
            raise HfAlignError(f"the recipe names {min(other)} as a mapping; write it as PATH@REVISION+ADAPTER")

    @property
    def needs_us(self) -> bool:
        """Whether mergekit cannot read the models by itself: they move, or have adapters to be merged in."""
        if self.align is not None and len(self.names) > 1:
            return True
        return any(resolve(name).adapter is not None for name in self.names)

    def document(self, inputs: Inputs | None) -> None:
        """Card and provenance; those of mergekit itself where it read the models itself."""
        if inputs is not None:
            _document(self.output, self.recipe, self.align, inputs, self.say)

    def open(self) -> Inputs:
        data = self.align.data if self.align else None
        return open_inputs(self.reference, {name: name for name in self.names}, self.options, data, self.say)


def _by_loaders(plan: _Plan, stage: Path, overwrite: bool) -> tuple[str, Inputs | None]:
    """By mergekit with our loaders, or by its methods in our own loop where that gives no whole model."""
    options = plan.options
    inputs = plan.open() if plan.needs_us else None
    fault = run_mergekit(plan.recipe, inputs, stage, plan.seed, options.trust_remote_code, options.quiet)
    if fault is None:
        _move(stage, plan.output)
        plan.document(inputs)
        return "merged by mergekit", inputs
    shutil.rmtree(stage, ignore_errors=True)
    plan.say(f"mergekit does not merge this architecture whole ({fault}); merging with its methods here")
    opened, config = inputs or plan.open(), parse(plan.recipe)
    here = replace(options, overwrite=overwrite, dtype=dtype_of(config, "out_dtype", "dtype"))
    stacks = config.slices and whole_slice(config, opened) is None
    (stack_here if stacks else merge_here)(config, opened, plan.output, here, plan.say, plan.seed or 0,
                                           lambda: plan.document(opened))  # fmt: skip
    return "merged by the methods of mergekit, tensor by tensor", opened


def _by_folders(plan: _Plan, stage: Path, overwrite: bool) -> tuple[str, Inputs | None]:
    """By the command of a mergekit whose loaders are not known, on models that were moved into folders."""
    inputs, folders = None, {}
    if plan.needs_us:
        plan.say(
            f"mergekit {version()} is not one whose loaders are known (0.1.5): inputs are aligned into folders first"
        )
        inputs = plan.open()
        folders = write_inputs(inputs, stage / "inputs", plan.options, plan.say)
    _move(run_command(plan.recipe, folders, stage, plan.seed, plan.options.trust_remote_code), plan.output)
    plan.document(inputs)
    return f"merged by mergekit {version()}", inputs


def _options(align: Align | None, trust_remote_code: bool, quiet: bool) -> Options:
    if align is None:
        return Options(match="none", untie=False, trust_remote_code=trust_remote_code, quiet=quiet)
    return Options(match=align.match, residual=align.residual, untie=align.untie, specs=align.specs,
                   trust_remote_code=trust_remote_code, quiet=quiet)  # fmt: skip


def _require_free(output: Path, overwrite: bool) -> None:
    if output.exists() and not output.is_dir():
        raise OutputError(f"{output} is no folder; choose another")
    if not overwrite and output.is_dir() and any(output.iterdir()) and not _is_begun(output):
        raise OutputError(f"{output} is not empty; choose another folder, or --overwrite")


def _is_begun(output: Path) -> bool:
    """Whether a run that was killed left what is there: the loop goes on with it, mergekit starts again."""
    return (output / _STAGE).exists() or is_left_unfinished(output)


def _move(stage: Path, output: Path) -> None:
    abandon(output)
    for old in output.glob("*.safetensors*"):
        old.unlink()
    for file in stage.iterdir():
        os.replace(file, output / file.name)


def _document(output: Path, recipe: Mapping[str, Any], align: Align | None, inputs: Inputs, say: Say) -> None:
    """The recipe, without local paths, and where its models came from."""
    sources = {name: model.source for name, model in inputs.models.items()}
    asked = align.model_dump(mode="json", exclude_none=True) if align else {}
    asked |= {key: Path(asked[key]).name for key in ("data", "specs") if key in asked}
    public = {name: public_name(source) for name, source in sources.items()}
    shown = renamed({**recipe, **({"align": asked} if align else {})}, public)
    (output / "mergekit_config.yml").write_text(yaml.safe_dump(shown, sort_keys=False), encoding="utf-8")
    document(output, list(sources.values()), say, model_type=inputs.pair.spec.model_type, untied=inputs.pair.untied,
             command="hf-align mergekit mergekit_config.yml OUT",
             strategy={"method": recipe["merge_method"], **renamed(asked, public)})  # fmt: skip
