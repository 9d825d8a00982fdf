"""`hf-align push`."""

from __future__ import annotations

from dataclasses import asdict

from hf_align.cli import console
from hf_align.cli import options as opt


def push(
    folder: opt.Folder,
    repository: opt.Repository,
    private: opt.Private = False,
    create_pr: opt.CreatePr = False,
    commit_message: opt.CommitMessage = None,
    revision: opt.Branch = None,
    token: opt.Token = None,
    as_json: opt.Json = False,
    quiet: opt.Quiet = False,
    verbose: opt.Verbose = False,
) -> None:
    """Upload a merged model, or resume an interrupted upload.

    Files that are already there are not sent again.

    $ hf-align push merged org/merged --private
    """
    from hf_align.publishing import push as upload

    upload.user()
    message = commit_message or upload.Destination.message
    pushed = upload.push(folder, upload.Destination(repository, private, create_pr, message, revision))
    console.emit(asdict(pushed), as_json, [f"{pushed.url} ({pushed.commit})"])
