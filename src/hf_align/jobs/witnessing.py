"""Where the witness is called: after matching, before anything is written."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from hf_align.checkpoints.claim import Claim
from hf_align.checkpoints.ondemand import Recalled
from hf_align.opening.heads import untied
from hf_align.opening.models import Model
from hf_align.opening.pairs import Pair
from hf_align.publishing.provenance import FOLDER
from hf_align.runtime.devices import Devices
from hf_align.runtime.progress import waiting
from hf_align.settings.options import Options
from hf_align.symmetry.action import Elements
from hf_align.symmetry.spec import SymmetrySpec
from hf_align.witness.witness import Moved, hold_all

WITNESS = "witness.json"


def moved_model(
    called: str,
    model: Model,
    pair: Pair,
    spec: SymmetrySpec,
    elements: Elements,
    like: Model,
    options: Options,
    aligned: Recalled | None = None,
) -> Moved:
    """A model as it is loaded, and as it will be.

    Args:
        called: what messages call it.
        like: the model whose config and dtypes are written, unless the options have another dtype.
        aligned: what it is moved to, where that is needed again.
    """
    own, config = (pair.config if of.widened or of.enlarged else of.config for of in (model, like))
    config = untied(config) if pair.untied else copy.deepcopy(config)
    wide, written = torch.float64 in model.dtypes().values(), like.dtypes(options.torch_dtype)
    said = options.torch_dtype or config.dtype
    loaded = {name: _narrower(written[name], said) for name in spec.parameters}
    return Moved(called, own, model.weights, config, spec, elements,
                 torch.float64 if wide else torch.float32, loaded, aligned)  # fmt: skip


def _narrower(stored: torch.dtype, said: object) -> torch.dtype:
    """What a weight has been rounded to once it is loaded: transformers follows the config, whatever is stored."""
    narrower = isinstance(said, torch.dtype) and stored.is_floating_point and said.itemsize < stored.itemsize
    return said if isinstance(said, torch.dtype) and narrower else stored


def witnessed_once(claim: Claim, moved: Sequence[Moved], options: Options) -> dict[str, Any] | None:
    """What the witness says of models, as data; None where it is left out, or B's function is not to be kept.

    It is asked by the first process, and a run that goes on has what the one that was killed has found.

    Raises:
        HfAlignError: a model is no longer what it was, or cannot be run; the output folder is left as it was found.
    """

    def find() -> dict[str, Any] | None:
        if (kept := claim.kept(WITNESS)) is not None:
            return dict(json.loads(kept.read_text(encoding="utf-8")))
        if not options.witness or not moved or options.changes_function:
            return None
        with claim.refusing(), waiting("checking that outputs stay the same", quiet=options.quiet):
            found = hold_all(moved, Devices.choose(options.device).running, options.offload).as_json()
        claim.keep(WITNESS, lambda path: path.write_text(json.dumps(found), encoding="utf-8"))
        return found

    return claim.processes.by_the_first(find)


def note(folder: Path, found: dict[str, Any] | None) -> None:
    """Leave what the witness said with what it was said of, where no card has it."""
    (folder / FOLDER).mkdir(exist_ok=True)
    (folder / FOLDER / WITNESS).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def said_in(folder: Path) -> dict[str, Any] | None:
    """What `note` left."""
    file = folder / FOLDER / WITNESS
    found: dict[str, Any] | None = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
    return found
