"""Upload a merged model that is on this disk; what fails can be finished later from the same folder."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from huggingface_hub import HfApi, constants
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalTokenNotFoundError,
    RepositoryNotFoundError,
)
from huggingface_hub.utils import validate_repo_id

from hf_align.checkpoints.adapters import WEIGHTS
from hf_align.checkpoints.checkpoint import Checkpoint
from hf_align.checkpoints.claim import COMPLETE, PLAN, WORK
from hf_align.checkpoints.hub import ADAPTER, plain_errors, refusal, retrying, said
from hf_align.errors import CheckpointError, HfAlignError, OptionError, OutputError, first_line

_STALE = re.compile(r"(pytorch_)?model(\.[\w-]+)?(-\d{5}-of-\d{5})?\.(safetensors|bin)"
                    r"|(pytorch_)?model\.(safetensors|bin)\.index(\.[\w-]+)?\.json")  # fmt: skip
"""Weights of an older upload that `from_pretrained` might load instead of ours, also those of a variant."""
_LONGEST_NAME = 96
_CONFIGS = ("config.json", ADAPTER)


@dataclass(frozen=True)
class Destination:
    """Where a model goes.

    Attributes:
        repository: `org/name`; it is made if it is not there.
        create_pr: propose the files as a pull request.
        revision: the branch, or the pull request that an earlier try has opened (`refs/pr/N`).
    """

    repository: str
    private: bool = False
    create_pr: bool = False
    message: str = "Upload a merge made with hf-align"
    revision: str | None = None

    def command(self, folder: Path) -> str:
        """What finishes the upload."""
        options = [
            *(["--private"] if self.private else []),
            *(["--create-pr"] if self.create_pr else []),
            *(["--revision", self.revision] if self.revision else []),
            *(["--commit-message", self.message] if self.message != Destination.message else []),
        ]
        return shlex.join(["hf-align", "push", str(folder), self.repository, *options])


@dataclass(frozen=True)
class Pushed:
    """What is on the Hub now."""

    repository: str
    url: str
    commit: str
    pull_request: int | None = None


def user(repository: str = "", *, create_pr: bool = False) -> str:
    """The name behind the token.

    Args:
        repository: `org/name` that is going to be written to, if it is known.
        create_pr: whether files are proposed only, which anyone may.

    Raises:
        OptionError: no repository can be called so.
        HfAlignError: there is no token, it is not valid or may not write (there), or the Hub cannot be reached.
    """
    if repository:
        require_name(repository)
    if constants.HF_HUB_OFFLINE:
        raise HfAlignError("HF_HUB_OFFLINE is set, so nothing can be uploaded; unset it, or leave out --push")
    try:
        found = retrying(HfApi().whoami)
    except LocalTokenNotFoundError as error:
        raise HfAlignError("no token to upload with; log in (hf auth login) or set HF_TOKEN") from error
    except HfHubHTTPError as error:
        raise HfAlignError(refusal("to say whose token this is", error)) from error
    except HTTPError as error:
        raise HfAlignError(f"the Hub cannot be reached to upload to: {error}") from error
    if found.get("auth", {}).get("accessToken", {}).get("role") == "read":
        raise HfAlignError("this token is read-only; create one that can write, and log in with it (hf auth login)")
    owner = repository.partition("/")[0] if "/" in repository else found["name"]
    open_to = {found["name"], *(org["name"] for org in found.get("orgs", ()) if org.get("roleInOrg") != "read")}
    if owner not in open_to and not create_pr:
        raise HfAlignError(f"{found['name']} may not write to {owner}; propose the files with --create-pr")
    return str(found["name"])


def require_name(repository: str) -> None:
    """See that a repository can be called so.

    Raises:
        OptionError: it cannot.
    """
    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise OptionError(f"{repository!r} is no name of a repository, as org/name is: {first_line(error)}") from error


def default_name(owner: str, models: Sequence[str]) -> str:
    """`owner/a-b-merge`, for models given as `org/a`, or as the name of a folder."""
    parts = [re.sub(r"[^\w.-]+|--+|\.\.+", "-", model.rpartition("/")[2]).strip("-.") for model in models]
    room = _LONGEST_NAME - len(owner) - len("/-merge")
    return f"{owner}/{'-'.join(parts)[:room].strip('-.')}-merge"


def push(folder: Path, to: Destination) -> Pushed:
    """Upload a folder. Rate limits and broken connections are tried again; files that are there are not sent again.

    Raises:
        OptionError: no repository can be called so.
        HfAlignError: it failed; the message has the command that goes on.
    """
    config = next((name for name in _CONFIGS if (folder / name).is_file()), None)
    if config is None:
        raise HfAlignError(f"{folder} holds no model: it has neither {' nor '.join(_CONFIGS)}")
    require_name(to.repository)
    _require_own(folder)
    _require_whole(folder, config)
    with _how_to_finish(folder, to):
        to = replace(to, repository=_made(to))
    with _how_to_finish(folder, to, elsewhere="ORG/NAME"):
        stale = _stale(to, config)
    number = None
    if to.create_pr and to.revision is None:
        with _how_to_finish(folder, to):
            number = HfApi().create_pull_request(to.repository, to.message).num
        to = replace(to, create_pr=False, revision=f"refs/pr/{number}")
    with _how_to_finish(folder, to):
        return _upload(folder, to, stale)


def _require_own(folder: Path) -> None:
    """See that all that is uploaded is in the folder: a link may lead to anything on this disk.

    Raises:
        HfAlignError: there is such a link.
    """
    root = folder.resolve()
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() and root not in path.resolve().parents:
            raise HfAlignError(f"{path} is a link to outside of {folder}; remove it, or put a copy there")


def _require_whole(folder: Path, config: str) -> None:
    """See that no run is still to go on in a folder, and that all weights are there.

    Raises:
        OutputError: it is not whole.
    """
    if (folder / WORK / PLAN).exists() and not (folder / COMPLETE).exists():
        raise OutputError(f"{folder} is not finished; start the command that writes it once more")
    try:
        Checkpoint.of_file(folder, WEIGHTS) if config == ADAPTER else Checkpoint.open(folder)
    except CheckpointError as error:
        raise OutputError(f"{folder} is not whole, and nothing is uploaded: {error}") from error


def _made(to: Destination) -> str:
    """The name of the repository, with its owner, which may have been left out; it is there then."""
    return retrying(lambda: HfApi().create_repo(to.repository, private=to.private or None, exist_ok=True)).repo_id


def _stale(to: Destination, config: str) -> list[str]:
    """The weights of an older upload that the repository holds.

    Raises:
        HfAlignError: what it is, or holds, does not go with what is uploaded: an adapter beside a whole model is
            applied to it by whoever loads it.
    """
    if to.private and not retrying(lambda: HfApi().model_info(to.repository)).private:
        raise HfAlignError(f"{to.repository} exists and is public; choose another name, or leave out --private")
    there = retrying(lambda: HfApi().list_repo_files(to.repository, revision=to.revision))
    weights = [name for name in there if _STALE.fullmatch(name)]
    if config == ADAPTER and weights:
        raise HfAlignError(f"{to.repository} holds a whole model, which whoever loads this adapter from there may get; "
                           f"choose another name, or remove {weights[0]} there")  # fmt: skip
    if config != ADAPTER and ADAPTER in there:
        raise HfAlignError(f"{to.repository} holds an adapter, which whoever loads this model from there gets applied "
                           f"to it; choose another name, or remove {ADAPTER} there")  # fmt: skip
    return weights


def _upload(folder: Path, to: Destination, stale: list[str]) -> Pushed:
    api = HfApi()
    done = retrying(lambda: api.upload_folder(
        repo_id=to.repository, folder_path=folder, commit_message=to.message, revision=to.revision,
        delete_patterns=stale, ignore_patterns=[".hf-align/**"],
    ))  # fmt: skip
    request = re.fullmatch(r"refs/pr/(\d+)", to.revision or "")
    if request is None:
        return Pushed(to.repository, f"{api.endpoint}/{to.repository}", done.oid)
    number = int(request[1])
    if retrying(lambda: api.get_discussion_details(to.repository, number)).status == "draft":
        retrying(lambda: api.change_discussion_status(to.repository, number, "open"))
    return Pushed(to.repository, f"{api.endpoint}/{to.repository}/discussions/{number}", done.oid, number)


@contextmanager
def _how_to_finish(folder: Path, to: Destination, elsewhere: str | None = None) -> Iterator[None]:
    reference = to.repository if to.revision is None else f"{to.repository}@{to.revision}"
    try:
        with plain_errors(reference):
            yield
    except (HfAlignError, ValueError, RuntimeError, OSError) as error:
        command = replace(to, repository=elsewhere or to.repository).command(folder)
        raise HfAlignError(f"{_why(error, to)}; the model is in {folder}, upload it with: {command}") from error


def _why(error: Exception, to: Destination) -> str:
    """What failed, and what made it fail where huggingface_hub says it apart."""
    why, cause = first_line(error), error.__cause__
    if isinstance(cause, RepositoryNotFoundError):
        return f"{to.repository} is not on the Hub any more, or this token may not see it"
    if isinstance(error, HfAlignError) or not isinstance(cause, Exception):
        return why
    return f"{why.rstrip('.')}: {said(cause)}"
