"""What leaves the function of an architecture alone: derived, explained, proved, and applied at random."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig

from hf_align.api.given import Kind, Model, require_code, take
from hf_align.errors import OptionError
from hf_align.opening.models import config_of
from hf_align.runtime.alone import alone
from hf_align.settings.choices import checked, whole
from hf_align.settings.choices import seed as as_seed
from hf_align.symmetry.alignment import AlignedWeights
from hf_align.symmetry.certificate.certify import Certificate
from hf_align.symmetry.certificate.certify import certify as measure
from hf_align.symmetry.certificate.random_copy import random_elements
from hf_align.symmetry.certificate.small_copy import certify_small_copy
from hf_align.symmetry.explain import explain
from hf_align.symmetry.overrides.overrides import reviewer
from hf_align.symmetry.overrides.overrides import symmetries as derived
from hf_align.symmetry.spec import SymmetrySpec
from hf_align.tracing.module_calls import Inputs
from hf_align.tracing.modules import ModuleConfig

Architecture = PretrainedConfig | Model
_COUNTED = 5000
"""Parameters of a plain module of which null directions are counted: that takes a minute, and grows with the cube."""


@dataclass(frozen=True)
class Symmetries:
    """The symmetries of an architecture.

    Attributes:
        config: of the architecture.
        spec: its spaces, their groups, and how every axis of every parameter is moved by them.
    """

    config: PretrainedConfig
    spec: SymmetrySpec

    def __repr__(self) -> str:
        spec = self.spec
        return f"Symmetries({spec.model_type}: {len(spec.spaces)} spaces, {len(spec.parameters)} parameters)"

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of all parameters, as they are in memory."""
        return tuple(self.spec.parameters)

    def explain(self, parameter: str) -> dict[str, Any]:
        """The spaces of a parameter's axes, and which line of the modelling code bounds or pins each.

        Raises:
            ValueError: there is no such parameter.
        """
        name = self.spec.ties.get(parameter, parameter)
        if name not in self.spec.parameters:
            raise OptionError(f"{self.config.model_type} has no parameter {parameter}")
        return explain(self.spec, name)

    def as_json(self) -> dict[str, object]:
        """As `hf-align spec --json` prints them."""
        return self.spec.as_json()


@alone
def symmetries(
    architecture: Architecture,
    *,
    inputs: Inputs | None = None,
    specs: str | os.PathLike[str] | None = None,
    trust_remote_code: bool = False,
) -> Symmetries:
    """The symmetries of an architecture, in all the ways in which it can be called.

    Args:
        architecture: a live model, a config, a folder, a Hub id, or a model type such as "llama".
        inputs: what a plain `nn.Module` is called with: a tensor, a tuple of arguments, a dict of named ones, or a list
            of such calls. It is taken in evaluation mode, and in other sizes of these inputs too, where it runs.
        specs: a folder of reviewed overrides.
        trust_remote_code: run modelling code that comes with a folder or a repository.

    Raises:
        ValueError: a plain module comes without inputs, or cannot be traced with them.
        IncompatibleModels: an architecture cannot be traced.
    """
    checked("trust_remote_code", trust_remote_code, (True, False))
    config = _config(architecture, trust_remote_code, inputs, specs)
    return Symmetries(config, derived(config, None if specs is None else Path(specs)))


@alone
def certify(
    architecture: Architecture | Symmetries,
    *,
    inputs: Inputs | None = None,
    layers: int = 2,
    specs: str | os.PathLike[str] | None = None,
    trust_remote_code: bool = False,
) -> Certificate:
    """Prove on a small random copy in float64 that no derived symmetry changes the function, and that none is missing.

    A plain module is proved in its own size. Where that is too large to count on, `.complete` is false, and
    `.not_counted` says so.

    Args:
        architecture: as for `symmetries`, or what that gave.
        inputs: as for `symmetries`.
        layers: of the copy, which has more where the model has more kinds of them; a plain module has all of its own.
        specs: a folder of reviewed overrides, which are certified too.
        trust_remote_code: run modelling code that comes with a folder or a repository.

    Returns:
        With `.sound`, `.complete`, `.modes` and `.as_json()`.

    Raises:
        ValueError: `layers` is less than one.
        IncompatibleModels: no small copy of it runs.
    """
    whole("layers", layers, 1), checked("trust_remote_code", trust_remote_code, (True, False))
    if isinstance(architecture, Symmetries):
        architecture = architecture.config
    config = _config(architecture, trust_remote_code, inputs, specs)
    if isinstance(config, ModuleConfig):
        return measure(config, most=_COUNTED)
    return certify_small_copy(config, reviewer(config.model_type, None if specs is None else Path(specs)), layers)


@alone
def randomize(
    model: Kind, *, seed: int = 0, inputs: Inputs | None = None, config: PretrainedConfig | None = None
) -> Kind:
    """A model of the same function with other weights: a random element of every group acts on it.

    Args:
        model: a live model; a state dict, with its config beside it; a folder or a Hub id, which is loaded.
        seed: of the elements.
        inputs: as for `symmetries`.
        config: of a state dict.

    Returns:
        The same kind of thing, a live model for a folder or an id.

    Raises:
        ValueError: the seed is no whole number, or one that torch does not take.
    """
    as_seed("seed", seed)
    given = take(model, config, inputs=inputs)
    spec = derived(given.config)
    elements = random_elements(spec, torch.Generator().manual_seed(seed))
    moved: Mapping[str, Tensor] = AlignedWeights(given.weights, spec, elements)
    found: Kind = given.with_weights(moved, given.config, spec)
    return found


def _config(
    architecture: Architecture, trust_remote_code: bool, inputs: Inputs | None, specs: object
) -> PretrainedConfig:
    if isinstance(architecture, (str, os.PathLike)):
        return config_of(os.fspath(architecture), trust_remote_code=trust_remote_code)
    if isinstance(architecture, PretrainedConfig):
        require_code(architecture)
    config = architecture if isinstance(architecture, PretrainedConfig) else take(architecture, inputs=inputs).config
    if isinstance(config, ModuleConfig) and specs is not None:
        raise OptionError("specs holds overrides by model type, and a plain module has none")
    return config
