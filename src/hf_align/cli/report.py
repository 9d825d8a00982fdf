"""`hf-align report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from hf_align.cli import console
from hf_align.cli import options as opt


def report(
    folder: opt.Folder,
    output: Annotated[
        Path | None,
        opt.output("-o", "--output", metavar="FILE", show_default="report.html in DIR", help="HTML file to write."),
    ] = None,
    specs: opt.Specs = None,
    trust_remote_code: opt.Remote = False,
    as_json: opt.Json = False,
    quiet: opt.Quiet = False,
    verbose: opt.Verbose = False,
) -> None:
    """Draw a merge on one page (HTML): losses on the way, what moved and how far, what could not move and why.

    $ hf-align report merged
    """
    from hf_align.publishing.report import write_report
    from hf_align.runtime.progress import waiting

    page = output or folder / "report.html"
    with waiting("drawing the report", quiet=quiet):
        write_report(folder, page, specs=specs, trust_remote_code=trust_remote_code)
    console.emit({"output": str(page)}, as_json, [f"{page} is written"])
