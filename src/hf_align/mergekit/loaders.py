"""mergekit as it is, reading through our loaders.

It keeps a loader for each model. Ours give the tensors of a model as they are in the basis of the reference, one at a
time, so that slices, filters, gradients and tokenizers work as they do, and no model is written twice.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from hf_align.checkpoints.checkpoint import Checkpoint
from hf_align.checkpoints.companions import write_code
from hf_align.checkpoints.naming import DiskWeights, match_names
from hf_align.checkpoints.own_files import is_own
from hf_align.errors import HfAlignError, first_line
from hf_align.jobs.opened import Basis
from hf_align.mergekit.config import renamed
from hf_align.mergekit.extra import dtype_of, parse
from hf_align.mergekit.flags import Flags
from hf_align.tracing.build import build_without_weights, inventory, read_config

_WEIGHTS = re.compile(r".*\.(safetensors|bin|pt|pth|gguf|msgpack|h5|onnx|index\.json)$")


class Loader:
    """What mergekit asks of a model: which tensors there are, and each of them."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self.index = SimpleNamespace(tensor_paths=dict.fromkeys(tensors, ""), shards=[], base_path="")

    def get_tensor(
        self, key: str, device: str = "cpu", aliases: Sequence[str] | None = None, raise_on_missing: bool = True
    ) -> Tensor | None:
        found = next((name for name in (key, *(aliases or ())) if name in self._tensors), None)
        if found is None:
            if raise_on_missing:
                raise KeyError(key)
            return None
        return self._tensors[found].to(device)

    def flush(self) -> None:
        """Nothing is kept."""


def run_mergekit(
    recipe: Mapping[str, Any],
    inputs: Basis | None,
    stage: Path,
    flags: Flags,
    trust_remote_code: bool,
    quiet: bool,
    like: Path,
) -> str | None:
    """Let mergekit write into a folder; why that did not give a whole model, or None.

    Args:
        like: the folder of a model whose code the result has.
    """
    from mergekit.merge import run_merge
    from mergekit.options import MergeOptions

    options = MergeOptions(quiet=quiet, trust_remote_code=trust_remote_code, write_model_card=False,
                           **flags.for_library)  # fmt: skip
    with _lent(recipe, inputs) as lent, _unlogged(quiet):
        try:
            run_merge(parse(lent), str(stage), options)
        except (HfAlignError, OSError):
            raise
        except Exception as error:  # mergekit meets what it does not know in many ways
            return first_line(error)
    write_code(stage, like)
    try:
        return fault_of(stage, trust_remote_code)
    except HfAlignError as error:
        return str(error)


def is_planned(recipe: Mapping[str, Any], inputs: Basis, flags: Flags, trust_remote_code: bool) -> bool:
    """Whether mergekit knows what to write, from the descriptions of its architectures or from what it guesses."""
    from mergekit.architecture import get_architecture_info
    from mergekit.options import MergeOptions
    from mergekit.plan import MergePlanner

    options = MergeOptions(quiet=True, trust_remote_code=trust_remote_code, **flags.for_library)
    with _lent(recipe, inputs) as lent, _unlogged(quiet=True):
        config = parse(lent)
        try:
            layout = get_architecture_info(config, options)
            MergePlanner(config, layout, options, inputs.models.first.config).plan_to_disk("merged")
        except (HfAlignError, OSError):
            raise
        except Exception:  # as above
            return False
    return True


@contextmanager
def _unlogged(quiet: bool) -> Iterator[None]:
    """What goes wrong is said in one line of our own. Some progress mergekit shows whatever it is told."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with ExitStack() as silenced:
            if quiet:
                silenced.enter_context(redirect_stderr(silenced.enter_context(open(os.devnull, "w"))))
            yield
    finally:
        logging.disable(disabled)


@contextmanager
def _lent(recipe: Mapping[str, Any], inputs: Basis | None) -> Iterator[Mapping[str, Any]]:
    """The recipe with our loaders behind its models, which are folders of everything but weights."""
    if inputs is None:
        yield recipe
        return
    from mergekit.common import ModelReference
    from mergekit.io.tasks import LoaderCache

    cache = LoaderCache()
    dtype = dtype_of(parse(recipe), "dtype")
    with tempfile.TemporaryDirectory() as root:
        a, parameters = inputs.models.first.a, inputs.models.spec.parameters
        folders = {name: Path(root) / str(i) for i, name in enumerate(inputs.models.names)}
        references = {name: ModelReference.model_validate(str(folder)) for name, folder in folders.items()}
        try:
            for model, (name, weights) in zip(inputs.models.models, inputs.by_name.items(), strict=False):
                _shell(folders[name], model.folder, inputs.models.first.untied)
                on_disk = DiskWeights(a.checkpoint, a.names, weights.__getitem__, parameters, dtype)
                cache.loaders[references[name]] = Loader(on_disk)
            yield renamed(recipe, {name: str(folder) for name, folder in folders.items()})
        finally:
            for reference in references.values():
                cache.loaders.pop(reference, None)


def _shell(folder: Path, model: Path, untied: bool) -> None:
    """A model's folder without its weights; with an untied head, if that is what its weights have now."""
    folder.mkdir()
    for file in model.iterdir():
        if is_own(model, file) and not _WEIGHTS.match(file.name):
            shutil.copyfile(file, folder / file.name)
    if untied:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}), encoding="utf-8")


def fault_of(folder: Path, trust_remote_code: bool) -> str | None:
    """What a checkpoint lacks of its architecture; None if it is whole."""
    if not (folder / "config.json").is_file():
        return "nothing was written"
    model = build_without_weights(read_config(folder, trust_remote_code=trust_remote_code))
    missing = match_names(model, Checkpoint.open(folder), inventory(model).ties, {}).missing
    return f"{len(missing)} tensors would be missing, {missing[0]} among them" if missing else None
