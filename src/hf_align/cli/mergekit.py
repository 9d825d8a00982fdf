"""`hf-align mergekit`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hf_align.cli import console
from hf_align.cli import options as opt


def mergekit(
    config: Annotated[
        Path, typer.Argument(metavar="RECIPE", help="A mergekit recipe (YAML), with or without the key align.")
    ],
    output: Annotated[Path, typer.Argument(metavar="DIR", help="Folder for the merged model.")],
    random_seed: Annotated[int, opt.merging(metavar="N", help="Seed of methods that draw random numbers.")] = 0,
    device: opt.Device = None,
    cuda: Annotated[bool, opt.running("--cuda", help="The same as --device cuda.")] = False,
    out_shard_size: Annotated[
        str | None, opt.output(metavar="SIZE", show_default="5B", help="Parameters in mergekit's largest file.")
    ] = None,
    copy_tokenizer: Annotated[
        bool | None,
        opt.output(
            "--copy-tokenizer/--no-copy-tokenizer",
            show_default="--copy-tokenizer",
            help="Whether the tokenizer goes with what mergekit writes.",
        ),
    ] = None,
    allow_crimes: Annotated[
        bool | None, opt.merging("--allow-crimes", help="Let mergekit mix architectures, unaligned.")
    ] = None,
    lazy_unpickle: Annotated[bool, opt.running("--lazy-unpickle", help="Accepted; nothing is unpickled here.")] = False,
    overwrite: opt.Overwrite = False,
    token: opt.Token = None,
    trust_remote_code: opt.Remote = False,
    witness: opt.Witness = True,
    as_json: opt.Json = False,
    quiet: opt.Quiet = False,
    verbose: opt.Verbose = False,
) -> None:
    """Merge as a mergekit recipe says, with all models moved into one basis first.

    The recipe is an ordinary one with one more key, `align: true`, or a mapping with any of `reference` (the model
    whose basis is used), `match`, `data`, `residual`, `heads`, `spaces`, `steps`, `seed`, `device`, `untie` and
    `specs`, which are options of hf-align merge. A recipe of several documents, as mergekit-multi takes them, is
    followed in the order in which they need each other; all but the last result go to a folder beside DIR.

    $ hf-align mergekit recipe.yml merged
    """
    from hf_align.mergekit.flags import Flags
    from hf_align.mergekit.recipe import run_recipe

    flags = Flags(random_seed, "cuda" if cuda else device, out_shard_size, allow_crimes, copy_tokenizer)
    found = run_recipe(config, output, say=console.speaker(quiet), flags=flags, quiet=quiet, witness=witness,
                       trust_remote_code=trust_remote_code, overwrite=overwrite)  # fmt: skip
    said = console.wrapped(found["witness"]["sentence"]) if found["witness"] else []
    console.emit({"output": str(output), **found}, as_json, [*found["notes"], *said, f"{output} is written"])
