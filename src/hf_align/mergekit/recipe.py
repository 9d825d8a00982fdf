"""A merge as a mergekit recipe says: by mergekit where it gives a whole model, by its methods in our loop elsewhere."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import yaml

from hf_align.checkpoints.checkpoint import Checkpoint
from hf_align.checkpoints.claim import Claim
from hf_align.checkpoints.companions import companions
from hf_align.checkpoints.digests import of_data
from hf_align.checkpoints.hub import Source, resolve
from hf_align.checkpoints.naming import match_names
from hf_align.checkpoints.own_files import own_json
from hf_align.errors import HfAlignError
from hf_align.jobs.aligned import save_matches
from hf_align.jobs.comparing import judged, of_result
from hf_align.jobs.effort import share_basis
from hf_align.jobs.job import Asked, Job, Say, run, silent
from hf_align.jobs.opened import Basis, Opened
from hf_align.jobs.outcome import Report
from hf_align.jobs.writing import symmetries_of
from hf_align.mergekit.config import Align, read_recipes, renamed, with_words
from hf_align.mergekit.documents import in_order
from hf_align.mergekit.extra import dtype_of, is_known, models_of, parse, require_experts, unread, version
from hf_align.mergekit.flags import Flags
from hf_align.mergekit.folders import run_script, write_inputs
from hf_align.mergekit.loaders import is_planned, run_mergekit
from hf_align.mergekit.methods import (
    Loop,
    is_whole,
    least_bytes,
    merge_here,
    names_of,
    require_bound,
    require_done_here,
)
from hf_align.mergekit.own import is_own, own_job
from hf_align.mergekit.slices import stack_here
from hf_align.mergekit.taking import take
from hf_align.opening.pairs import Pair
from hf_align.publishing.card import document
from hf_align.publishing.provenance import FOLDER
from hf_align.running.network import Batch
from hf_align.runtime.devices import Devices
from hf_align.settings.choices import Dtype, checked
from hf_align.settings.options import Options
from hf_align.tracing.build import build_without_weights, inventory, read_config
from hf_align.witness.witness import Moved

_KIN = (
    "the models share a basis already, like fine-tunes of one base; they stay as they are (match: weight aligns them)"
)


def run_recipe(
    path: Path,
    output: Path,
    *,
    say: Say = silent,
    flags: Flags | None = None,
    trust_remote_code: bool = False,
    overwrite: bool = False,
    quiet: bool = False,
    witness: bool = True,
) -> dict[str, Any]:
    """Merge as a mergekit recipe says, with all models in one basis if it has the key `align`.

    Without the key the result is mergekit's own, tensor for tensor, wherever mergekit gives all tensors. Of a recipe of
    several documents the last one is written to the output, the others into a folder beside it.

    Args:
        flags: of mergekit.
        witness: see that models that are moved answer as before.

    Returns: what there is to say of the result (`notes`), and what the witness says of the models (`witness`).

    Raises:
        HfAlignError: mergekit is not there, the recipe or a model is not usable; nothing is written then.
    """
    version()  # none is said before anything else
    common = Options(trust_remote_code=trust_remote_code, quiet=quiet, overwrite=overwrite, witness=witness)
    told = flags or Flags()
    Devices.choose(told.device)
    ordered, report, idle = in_order(read_recipes(path), output), Report(str(output), ""), list[str]()
    if is_known():
        for body in (recipe.body for recipe, _ in ordered if not is_own(recipe.body)):
            if "experts" in body:
                require_experts(body)
            else:
                idle += _unread(body)
    for recipe, folder in ordered:
        align = recipe.align
        options = _options(align, common)
        asked = Asked(replace(options, device=options.device or told.device), align.data if align else None, say)
        if is_own(recipe.body):
            report = run(own_job(path, recipe.body, align, asked), folder)
            continue
        kind = _Experts if "experts" in recipe.body else _Recipe
        report = run(kind.open(path, recipe.body, align, told, asked), folder)
    for warning in idle:  # a recipe that is refused is refused in one line
        say(warning)
    return {"notes": report.notes, "witness": report.witness}


@dataclass
class _Making:
    """A recipe while it is followed.

    Attributes:
        inputs: its models; None while mergekit reads them by itself.
        how: it was followed.
    """

    inputs: Basis | None
    how: str = ""


@dataclass(frozen=True, kw_only=True)
class _Recipe(Job[_Making]):
    """A recipe, and what it takes to follow it.

    Attributes:
        names: what it calls its models, that whose basis is used first.
        models: they, where mergekit cannot read them by itself.
        fit: examples to match on.
        held_out: examples to report on.
        from_folders: whether a command of mergekit reads the models, which are written for it where they are moved.
    """

    from_folders: ClassVar[bool] = False
    path: Path
    recipe: Mapping[str, Any]
    align: Align | None
    flags: Flags
    names: Sequence[str]
    models: Opened | None
    fit: Batch | None = None
    held_out: Batch | None = None

    @classmethod
    def open(cls, path: Path, recipe: Mapping[str, Any], align: Align | None, flags: Flags, asked: Asked) -> _Recipe:
        """See that all that the recipe asks can be done, and open the models that are moved."""
        known, options = is_known(), asked.options
        reference = _reference(recipe, align)
        named = {name: resolve(name) for name in models_of(recipe)}
        names = [reference, *(name for name in named if name != reference)]
        undecided = align is not None and align.match is None and len(names) > 1
        if undecided and share_basis(names, trust_remote_code=options.trust_remote_code):
            asked.say(_KIN)
            options = replace(options, match="none", untie=False)
            asked = replace(asked, options=options)
        models = _open(names, asked) if _needs_us(align, named.values()) else None
        fit, held_out = models.examples(asked.data) if models is not None else (None, None)
        if known:
            on_disk = names_of(models.first) if models is not None else _stored(named[reference], options)
            cls.require_bound(recipe, on_disk)
        # Of models, all files: nobody knows which mergekit reads.
        record = {"the command": f"mergekit {version()}", "the recipe": json.dumps([recipe, flags.given], default=str)}
        record |= {**options.result, **({} if asked.data is None else {"--data": of_data(asked.data)})}
        record |= symmetries_of(models.first.spec) if models is not None else {}
        record |= {k: v for name, source in named.items() for k, v in source.record(name).items()}
        least = least_bytes(recipe, named[reference])
        if models is not None and (cls.from_folders or not known):
            least += len(names) * least_bytes({}, named[reference])
        job = cls(asked=asked, sources=list(named.values()), record=record, path=path, recipe=recipe, align=align,
                  flags=flags, names=names, models=models, fit=fit, held_out=held_out, least=least)  # fmt: skip
        if known:
            job._require_stackable()
        return job

    def _require_stackable(self) -> None:
        """See that slices can be stacked here, if mergekit has no plan for them."""
        if self.models is None or not (self.recipe.get("slices") or self.recipe.get("modules")):
            return
        if not is_planned(self.recipe, Basis(self.models), self.flags, self.options.trust_remote_code):
            self.loop(self.models.first)

    @staticmethod
    def require_bound(recipe: Mapping[str, Any], names: Mapping[str, str]) -> None:
        """See that the recipe fits the models, before anything is written."""
        require_bound(parse(recipe), names)

    @property
    def method(self) -> str:
        """What the card says that the result is made by."""
        return str(self.recipe["merge_method"])

    @property
    def reads(self) -> list[Path]:
        return [*super().reads, self.path]

    def match(self, claim: Claim) -> _Making:
        return _Making(None if self.models is None else self.models.match(claim, self.fit, self.asked.say))

    def moved(self, match: _Making) -> list[Moved]:
        return [] if match.inputs is None else match.inputs.moved()

    def write(self, claim: Claim, match: _Making) -> None:
        match.how = (self._by_loaders if is_known() else self._by_folders)(claim, match)

    def report(self, output: Path, match: _Making) -> Report:
        first = match.inputs.models.sources[0].name if match.inputs is not None else ""
        moved = []
        if self.align and match.inputs is not None:
            moved = [f"all models are in the basis of {first}" if match.inputs.matches else _KIN]
        report = Report(str(output), "", notes=[match.how, *moved])
        if self.models is not None:
            report.untied = self.models.first.untied
        if match.inputs is not None and len(match.inputs.matches) == 1:
            (found,) = match.inputs.matches
            report.distance_before, report.distance_after = found.before, found.after
        return report

    def document(self, claim: Claim, match: _Making, report: Report) -> None:
        """Card, provenance and the recipe, without local paths, and where its models came from."""
        folder, inputs = claim.documents, match.inputs
        asked = self.align.model_dump(mode="json", exclude_none=True) if self.align else {}
        public = {name: source.name for name, source in zip(models_of(self.recipe), self.sources, strict=True)}
        matched = {"match": self.options.match, "reference": public[self.names[0]]} if self.align else {}
        asked = with_words(renamed(asked, public), _without_path)
        shown = with_words(renamed(self.recipe, public), _without_path) | ({"align": asked} if self.align else {})
        (folder / "mergekit_config.yml").write_text(yaml.safe_dump(shown, sort_keys=False), encoding="utf-8")
        if inputs is not None and inputs.matches:
            save_matches(folder, inputs)
            self._keep_architecture(folder, inputs)
        if inputs is not None:
            report.notes += self._judged(claim, inputs, report)
        config = own_json(folder, "config.json") or {}
        report.model_type = str(config.get("model_type"))
        document(folder, self.sources, self.asked.say, command="hf-align mergekit mergekit_config.yml OUT",
                 strategy={"method": self.method, **asked, **matched, "spaces": " ".join(self.options.spaces)},
                 held_out=self.held_out is not None, **report.facts)  # fmt: skip

    def _keep_architecture(self, folder: Path, inputs: Basis) -> None:
        """Leave the models' config beside the alignment where the result has another: of a mixture, or of slices."""
        own = inputs.models.first.config
        merged = read_config(folder, trust_remote_code=self.options.trust_remote_code)
        if inventory(build_without_weights(own)).shapes != inventory(build_without_weights(merged)).shapes:
            own.save_pretrained(folder / FOLDER)

    def _judged(self, claim: Claim, inputs: Basis, report: Report) -> list[str]:
        """Whether alignment helped, and what the recipe came to."""
        if self.held_out is None:
            return []
        config = read_config(claim.documents, trust_remote_code=self.options.trust_remote_code)
        written = Checkpoint.of_files(claim.written)
        return [judged(inputs, self.held_out, report), of_result(inputs, self.held_out, self.method, config, written)]

    def again(self, output: Path) -> Report:
        return replace(Report.again(output), notes=["it was complete already"])

    def _by_loaders(self, claim: Claim, making: _Making) -> str:
        """By mergekit with our loaders, or by its methods in our own loop where that gives no whole model."""
        options, say, stage = self.options, self.asked.say, claim.scratch
        made = partial(run_mergekit, self.recipe, making.inputs, stage, self.flags, options.trust_remote_code)
        fault = claim.processes.by_the_first(partial(made, options.quiet, self.sources[0].folder))
        if fault is None:
            take(stage, claim, self._read_by(making))
            return "merged by mergekit"
        say(f"mergekit does not merge these models whole ({fault}); merging with its methods here")
        making.inputs = inputs = making.inputs or Basis(_open(self.names, self.asked))
        with claim.refusing():
            loop = self.loop(inputs.models.first)
        claim.require_room(loop.draft.plan)
        loop.draft.write(claim, loop.entries(inputs), say, quiet=options.quiet)
        return "merged by the methods of mergekit, tensor by tensor"

    def loop(self, pair: Pair) -> Loop:
        """Our own, as the recipe says."""
        config, seed = parse(self.recipe), self.flags.random_seed
        require_done_here(config)
        dtype = dtype_of(config, "out_dtype", "dtype")
        named = None if dtype is None else checked("dtype", str(dtype).removeprefix("torch."), Dtype)
        options = replace(self.options, dtype=named)
        if config.slices and not is_whole(config.slices, pair.spec.parameters):
            return stack_here(config, pair, options, seed)
        return merge_here(config, pair, options, seed)

    def _by_folders(self, claim: Claim, making: _Making) -> str:
        """By the command of a mergekit whose loaders are not known, on models that were moved into folders."""
        if making.inputs is not None:
            unknown = f"mergekit {version()} is not one whose loaders are known (0.1.5)"
            self.asked.say(f"{unknown}: inputs are aligned into folders first")
        self._run("run_yaml", claim, making)
        return f"merged by mergekit {version()}"

    def _run(self, script: str, claim: Claim, making: _Making) -> None:
        """A script of mergekit on the models, in folders of their own where they were moved."""
        folders, stage, say = {}, claim.scratch, self.asked.say
        if making.inputs is not None:
            folders = write_inputs(making.inputs, stage / "inputs", self.options, say)
        with claim.refusing():
            made = partial(run_script, script, self.recipe, folders, stage, self.flags, self.options.trust_remote_code)
            out = claim.processes.by_the_first(partial(made, self.sources[0].folder))
        take(out, claim, self._read_by(making))

    def _read_by(self, making: _Making) -> Sequence[Source]:
        """Whose buffers are in the result: where models are moved, they are those of the first."""
        return self.sources if making.inputs is None else making.inputs.models.sources[:1]


@dataclass(frozen=True, kw_only=True)
class _Experts(_Recipe):
    """A recipe of mergekit-moe: all but the MLPs is of the base model, and each expert's MLPs are of a model.

    The experts read and write the residual stream of the base model. Models of another basis can only be its experts
    once they are aligned.
    """

    from_folders: ClassVar[bool] = True

    @staticmethod
    def require_bound(recipe: Mapping[str, Any], names: Mapping[str, str]) -> None:
        require_experts(recipe)

    @property
    def method(self) -> str:
        return "mixture of experts"

    def write(self, claim: Claim, match: _Making) -> None:
        self._run("moe", claim, match)
        match.how = f"merged by mergekit-moe {version()}"


def _unread(recipe: Mapping[str, Any]) -> list[str]:
    """Warnings of what the recipe says to nobody, if mergekit accepts it; before models are opened.

    Raises:
        HfAlignError: it does not.
    """
    config = parse(recipe)
    for key in ("dtype", "out_dtype"):
        dtype_of(config, key)
    if other := {str(model) for model in config.referenced_models()} - set(models_of(recipe)):
        raise HfAlignError(f"the recipe names {min(other)} as a mapping; write it as PATH@REVISION+ADAPTER")
    method = config.merge_method
    return [f"warning: {name} means nothing to merge_method {method}, and is passed over" for name in unread(recipe)]


def _reference(recipe: Mapping[str, Any], align: Align | None) -> str:
    """The model whose basis is used.

    Raises:
        HfAlignError: there is none.
    """
    names = models_of(recipe)
    if not names:
        raise HfAlignError("the recipe names no model")
    return (align and align.reference) or str(recipe.get("base_model") or names[0])


def _needs_us(align: Align | None, sources: Collection[Source]) -> bool:
    """Whether mergekit cannot read the models by itself: they move, have adapters to be merged in, or links out of
    their folders, which it would follow."""
    if align is not None and len(sources) > 1:
        return True
    return any(s.adapter is not None or companions(s.folder, with_code=True)[1] for s in sources)


def _open(names: Sequence[str], asked: Asked) -> Opened:
    """The models of a recipe."""
    for name in names[1:]:
        moves = asked.options.match != "none"
        asked.say(f"moving {name} into the basis of {names[0]}" if moves else f"opening {name}")
    return Opened.open({name: name for name in names}, asked.options, asked.say, jointly=False)


def _stored(source: Source, options: Options) -> dict[str, str]:
    """The parameters of an architecture, as `names_of`, of a model that is not opened."""
    model = build_without_weights(read_config(source.folder, trust_remote_code=options.trust_remote_code))
    found = inventory(model)
    names = match_names(model, Checkpoint.open(source.folder, source.shards), found.ties, {}).by_memory()
    return {name: names[name].sources[0] if name in names else name for name in found.shapes}


def _options(align: Align | None, common: Options) -> Options:
    if align is None:
        return replace(common, match="none", untie=False)
    given = align.model_dump(include={"residual", "heads", "spaces", "device", "untie", "specs"})
    given |= {} if align.match is None else {"match": align.match}
    schedule = common.schedule
    drawn = replace(schedule, steps=align.steps or schedule.steps, seed=align.seed or schedule.seed)
    return replace(common, schedule=drawn, **given)


def _without_path(text: str) -> str:
    """A file or folder of this disk by its name."""
    is_path = text.startswith(("/", "./", "../", "~")) or Path(text).exists()
    return Path(os.path.abspath(text)).name if is_path else text
