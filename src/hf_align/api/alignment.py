"""An alignment: what takes one model into the basis of another, kept apart from both."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from torch import Tensor
from transformers import PretrainedConfig

from hf_align.api.given import Given, Kind, Model, take
from hf_align.checkpoints.companions import write_code
from hf_align.checkpoints.hub import plain_errors
from hf_align.errors import HfAlignError, IncompatibleModels, OptionError, OutputError, first_line, require_path
from hf_align.jobs.witnessing import WITNESS, note, said_in
from hf_align.matching.match import Match
from hf_align.opening.agreement import require_same_buffers, require_same_function
from hf_align.opening.heads import is_tied, tied_alike
from hf_align.publishing.provenance import ALIGNMENT, FOLDER, home_of_alignment
from hf_align.runtime.alone import alone
from hf_align.settings.choices import checked
from hf_align.symmetry.action import Elements
from hf_align.symmetry.alignment import AlignedWeights, compose, inverse
from hf_align.symmetry.derivation.plain_data import from_plain, to_plain
from hf_align.symmetry.elements import Element
from hf_align.symmetry.overrides.overrides import symmetries
from hf_align.symmetry.spec import SymmetrySpec
from hf_align.tracing.build import build_without_weights, inventory, read_config
from hf_align.tracing.modules import ModuleConfig
from hf_align.tracing.own_classes import named_code, only_if_trusted
from hf_align.tracing.stored import noted_buffers

_SPEC = "symmetries.json"
"""Of a plain module, beside the alignment."""
_MADE_FOR = "the aligned model"


@dataclass(frozen=True, eq=False)  # by identity: tensors in it have no one truth
class Alignment:
    """An element of the symmetry group of an architecture, for every one of its spaces.

    Both models are brought into one basis: the model that was aligned by `apply`, the reference by
    `apply_to_reference`, which only fixes its gauge. Neither changes what a model computes.

    Attributes:
        config: of the aligned models; the head may be untied in it.
        elements: that move the model.
        reference: that move the reference.
        distance: of the weights of both, in their gauges, before and after; None where it was not measured.
        witness: what was measured of both models before and after, as data; None where they were not run.
    """

    config: PretrainedConfig
    spec: SymmetrySpec
    elements: Mapping[str, Element]
    reference: Mapping[str, Element]
    distance: tuple[float, float] | None = None
    witness: dict[str, Any] | None = None

    def __repr__(self) -> str:
        moved = f"{self.spec.model_type}, {len(self.elements)} of {len(self.spec.spaces)} spaces matched"
        if self.distance is None:
            return f"Alignment({moved})"
        return f"Alignment({moved}, weight distance {self.distance[0]:.4g} -> {self.distance[1]:.4g})"

    @alone
    def apply(self, model: Kind, *, config: PretrainedConfig | None = None) -> Kind:
        """The model in the basis of the reference, its function unchanged.

        Args:
            model: of the same architecture: a live model, a state dict, a folder or a Hub id.
            config: of a state dict; by default that of the aligned models.

        Returns:
            The same kind of thing, in the dtypes and on the devices of the model; live for a folder or an id.

        Raises:
            ValueError: it has other weights.
            IncompatibleModels: it computes something else with them than the aligned models do.
        """
        return self._moved(self.taken(model, config), self.elements)

    @alone
    def apply_to_reference(self, model: Kind, *, config: PretrainedConfig | None = None) -> Kind:
        """The reference in the gauge in which the weights of both models can be compared and averaged."""
        return self._moved(self.taken(model, config), self.reference)

    def taken(self, model: Model, config: PretrainedConfig | None = None, *, called: str = "the model") -> Given:
        """A model that this is an alignment of.

        Raises:
            ValueError: it is another module, or is called otherwise.
            IncompatibleModels: it computes something else.
        """
        given = take(model, config or self._config_of(model), called=called)
        if not isinstance(self.config, ModuleConfig):
            self._require_alike(given)
            return given
        if not isinstance(given.config, ModuleConfig) or given.config.program != self.config.program:
            raise OptionError(
                f"{called} does not compute what {self.config.name} does, which the alignment was made for"
            )
        return given

    def _config_of(self, model: Model) -> PretrainedConfig:
        """Of a state dict: that of the aligned models, in which the head is as it lies there."""
        if isinstance(model, Mapping) and not is_tied(self.config) and self.spec.parameters.keys() - model.keys():
            tied = copy.deepcopy(self.config)
            tied.tie_word_embeddings = True
            if not inventory(build_without_weights(tied)).shapes.keys() - model.keys():
                return tied
        return self.config

    def _require_alike(self, given: Given) -> None:
        """
        Raises:
            IncompatibleModels: with the same weights it computes something else than the aligned models.
        """
        if not self._fits(given):
            return  # which `weights_of` says
        refs = (_MADE_FOR, given.called)
        if loose := self.spec.ties.keys() - given.holds.ties.keys():
            raise IncompatibleModels(f"{min(loose)} of {refs[1]} is a weight of its own, but is tied in {refs[0]}")
        pair = tied_alike(refs, (self.config, given.config), None)
        if noted_buffers(self.config):  # a config that was read from a folder has none
            require_same_buffers(refs, *pair)
        require_same_function(refs, *pair)

    def _fits(self, given: Given) -> bool:
        """Whether it has all weights, in their shapes."""
        return all(tuple(given.sizes.get(name, ())) == self.spec.shape(name) for name in self.spec.parameters)

    def _moved(self, given: Given, elements: Elements) -> Any:
        return given.with_weights(self.weights_of(given, elements), self.config, self.spec)

    def weights_of(self, given: Given, elements: Elements) -> Mapping[str, Tensor]:
        """Weights by name in memory, moved as they are asked for."""
        weights = given.weights
        for name in self.spec.parameters:
            if name not in weights or tuple(weights[name].shape) != self.spec.shape(name):
                wanted = f"{name} of {list(self.spec.shape(name))}"
                raise OptionError(f"{given.called} has no {wanted}: the alignment was made for another architecture")
        return AlignedWeights(weights, self.spec, elements)

    @alone
    def inverse(self) -> Self:
        """What undoes it: applied after it, it gives the model back in its own basis, in the canonical gauge."""
        return replace(self, elements=inverse(self.spec, self.elements), reference={}, distance=None, witness=None)

    def __matmul__(self, earlier: Alignment) -> Self:
        """First the other, then this one.

        Raises:
            ValueError: they are of different architectures.
        """
        if not isinstance(earlier, Alignment):
            return NotImplemented
        if earlier.spec.spaces != self.spec.spaces:
            raise OptionError("alignments of different architectures cannot be composed")
        both = compose(self.spec, self.elements, earlier.elements)
        return replace(self, elements=both, distance=None, witness=None)

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write it to a folder: its elements as safetensors, and the config of the architecture with the code that it
        names.

        Raises:
            OutputError: the folder cannot be written.
        """
        require_path("folder", folder)
        before, after = self.distance or (None, None)
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            self.config.save_pretrained(folder)
            if getattr(self.config, "auto_map", None):
                write_code(Path(folder), Path(self.config._name_or_path))
            if isinstance(self.config, ModuleConfig):  # there may be no module to derive it from where this is read
                (Path(folder) / _SPEC).write_text(json.dumps(to_plain(self.spec)), encoding="utf-8")
            Match(self.reference, self.elements, before, after).save(Path(folder) / ALIGNMENT, self.spec)
            note(Path(folder), self.witness)
        except OSError as error:
            raise OutputError(f"{folder} cannot be written: {error.strerror or error}") from error

    @classmethod
    @alone
    def from_pretrained(
        cls, source: str | os.PathLike[str], *, token: str | None = None, trust_remote_code: bool = False
    ) -> Self:
        """What `save_pretrained` or `push_to_hub` wrote, or what a merge by the command line kept.

        Args:
            source: a folder or a Hub id.
            trust_remote_code: run modelling code that comes with it.

        Raises:
            HfAlignError: there is no such folder or repository, or no alignment in it, or one of another architecture
                than the config beside it; or its modelling code was not trusted.
        """
        require_path("source", source)
        checked("trust_remote_code", trust_remote_code, (True, False))
        folder = Path(source)
        if not folder.is_dir():
            needed = ("config.json", ALIGNMENT, WITNESS, _SPEC, *(["*.py"] if trust_remote_code else []))
            wanted = [f"{place}{name}" for place in ("", f"{FOLDER}/") for name in needed]
            try:
                folder = Path(snapshot_download(os.fspath(source), allow_patterns=wanted, token=token))
            except (HFValidationError, HfHubHTTPError, OSError) as error:
                raise HfAlignError(
                    f"{source} is not a folder or an accessible repository: {first_line(error)}"
                ) from error
        file = next((f for f in (folder / ALIGNMENT, folder / FOLDER / ALIGNMENT) if f.is_file()), None)
        if file is None:
            raise HfAlignError(f"{source} holds no {ALIGNMENT}")
        config = read_config(home_of_alignment(folder), trust_remote_code=trust_remote_code)
        if named_code(config) is not None:
            raise HfAlignError(only_if_trusted(source))
        spec = _spec_in(file.with_name(_SPEC)) if isinstance(config, ModuleConfig) else symmetries(config)
        match = Match.load(file, spec)
        return cls(config, spec, match.b, match.a, match.distance, said_in(folder))

    def push_to_hub(self, repo_id: str, *, private: bool | None = None, token: str | None = None) -> str:
        """Upload it to a model repository, which is made if it is not there.

        Returns:
            The address of the commit.

        Raises:
            HfAlignError: the Hub refuses it, or is not reached.
        """
        api = HfApi(token=token)
        with plain_errors(repo_id), TemporaryDirectory() as folder:
            api.create_repo(repo_id, private=private, exist_ok=True)
            self.save_pretrained(folder)
            return str(api.upload_folder(repo_id=repo_id, folder_path=folder, commit_message="Upload alignment"))


def _spec_in(file: Path) -> SymmetrySpec:
    try:
        found = from_plain(json.loads(file.read_text(encoding="utf-8")))
    except Exception as error:  # a damaged file may be anything
        raise HfAlignError(f"{file} holds no symmetries of this version: {first_line(error)}") from error
    if not isinstance(found, SymmetrySpec):
        raise HfAlignError(f"{file} holds no symmetries")
    return found
