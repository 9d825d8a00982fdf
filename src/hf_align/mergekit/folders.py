"""mergekit of any version, as its own command, on folders of models that are in one basis already.

For versions whose loaders are not those that are known: what is read tensor by tensor there is written out here first.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from hf_align.checkpoints.claim import claimed
from hf_align.checkpoints.companions import write_code
from hf_align.errors import HfAlignError
from hf_align.jobs.job import Say, silent
from hf_align.jobs.opened import Basis
from hf_align.jobs.writing import draft_of, entries_of
from hf_align.mergekit.config import renamed
from hf_align.mergekit.extra import version
from hf_align.mergekit.flags import Flags
from hf_align.mergekit.loaders import fault_of
from hf_align.settings.options import Options

_REFUSED = {
    "run_yaml": "mergekit {version} does not merge these models whole ({fault}); with "
    "pip install 'hf-align[mergekit]' it is merged here",
    "moe": "mergekit-moe {version} does not make one model of these ({fault})",
}
"""What is said of a script that does not give a whole model."""


def write_inputs(inputs: Basis, folder: Path, options: Options, say: Say) -> dict[str, str]:
    """Every model of a recipe in the basis of the reference, as a folder; what the recipe calls it -> where it is."""
    found = {}
    pair = inputs.models.first
    draft = draft_of(pair, pair.a, options)
    for number, (name, weights) in enumerate(inputs.by_name.items()):
        say(f"writing {name}{' in the common basis' if options.match != 'none' else ''}")
        out = folder / str(number)
        with claimed(out, {}) as claim:
            claim.require_room(draft.plan)
            entries = entries_of(pair, pair.a, options, weights.__getitem__)
            draft.write(claim, entries, silent, quiet=options.quiet)
        found[name] = str(out)
    return found


def run_script(
    script: str, recipe: Mapping[str, Any], folders: Mapping[str, str], work: Path, flags: Flags,
    trust_remote_code: bool, like: Path | None = None,
) -> Path:  # fmt: skip
    """Let a command of mergekit merge folders; where the result is.

    Args:
        like: the folder of a model whose code the result has.
        script: `run_yaml`, or `moe` for a mixture of experts.
        folders: what the recipe calls a model -> where it is instead.
        work: a folder for what is not finished.

    Raises:
        HfAlignError: mergekit failed, or wrote only a part of the model.
    """
    work.mkdir(parents=True, exist_ok=True)
    file, out = work / "recipe.yml", work / "merged"
    file.write_text(yaml.safe_dump(renamed(recipe, folders), sort_keys=False), encoding="utf-8")
    options = [*flags.for_command, *(["--trust-remote-code"] if trust_remote_code else [])]
    command = [sys.executable, "-m", f"mergekit.scripts.{script}", str(file), str(out), *options]
    # It holds the lock of the output too: if this run is killed, the next one waits for what it still writes.
    done = subprocess.run(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, close_fds=False)
    if like is not None and not done.returncode:
        write_code(out, like)
    fault = _told(done.stderr) if done.returncode else fault_of(out, trust_remote_code)
    for file in [*out.glob("*.md"), *out.glob("*.yml")]:  # they have the paths of the folders
        file.unlink()
    if fault is not None:
        raise HfAlignError(_REFUSED[script].format(version=version(), fault=fault))
    return out


def _told(errors: str) -> str:
    """What went wrong: the first error that a script logs, else the last line, which is an exception."""
    logged = re.search(r"^ERROR:[^:]*:(.+)", errors, re.MULTILINE)
    lines = [line for line in errors.splitlines() if line.strip()]
    return logged[1].strip().rstrip(".") if logged else lines[-1] if lines else "it failed"
