"""`hf-align certify`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from hf_align.cli import console
from hf_align.cli import options as opt

if TYPE_CHECKING:
    from hf_align.symmetry.certificate.certify import Certificate


def certify(
    model: opt.Model,
    layers: Annotated[
        int, opt.general(min=1, metavar="N", help="Layers of the small copy, at least one of each kind.")
    ] = 2,
    specs: opt.Specs = None,
    revision: opt.Revision = None,
    token: opt.Token = None,
    trust_remote_code: opt.Remote = False,
    as_json: opt.Json = False,
    quiet: opt.Quiet = False,
    verbose: opt.Verbose = False,
) -> None:
    """Prove the derived symmetries on a small copy: none changes the function, none is missing. Reads no weights.

    Exit status 1 if a symmetry is unsound or missing.

    $ hf-align certify llama
    """
    model = opt.at_revision(model, revision)
    from hf_align.api.symmetries import certify as prove
    from hf_align.runtime.progress import waiting

    with waiting("certifying on a small copy", quiet=quiet):
        result = prove(model, layers=layers, specs=specs, trust_remote_code=trust_remote_code)
    console.emit(result.as_json(), as_json, _lines(result))
    if not (result.sound and result.complete):
        raise typer.Exit(1)


def _verdict(result: Certificate) -> str:
    if result.undecided:
        return f"NOT SHOWN TO BE SOUND, for {result.undecided}"
    return "sound" if result.sound else "NOT SOUND"


def _lines(result: Certificate) -> list[str]:
    whole = "complete" if result.complete else "NOT COMPLETE"
    return [
        f"{result.model_type}: {_verdict(result)}, largest change {result.max_error:.1e}",
        f"{whole}: {result.found} of {result.nullity} continuous dimensions are matched, fixed or without effect",
        f"  moved  {result.moved:5}  matched by alignment",
        f"  fixed  {result.fixed:5}  given one canonical choice in every model",
        f"  flat   {result.flat:5}  without effect on any merge",
        f"  open   {result.open:5}  none of these: models may differ here for no reason",
        *(f"    {amount:g} in {name}" for name, amount in result.missing.items()),
        *(f"  {space} could differ along {other}, and does not" for space, other in result.alike),
        *(f"  no rule for {op}" for op in result.unknown_ops),
        *(f"  no call reads {name}, so it stands still" for name in result.unread),
        *(f"  no call could send {line} the other way" for line in result.untried),
        *(
            f"  the copy has {some} of the {all_} kinds of layers in {path}; nothing is shown of the others"
            for path, (some, all_) in result.lacking.items()
        ),
        f"in {len(result.modes)} ways to call it:",
        *(f"  {mode}" for mode in result.modes),
    ]
