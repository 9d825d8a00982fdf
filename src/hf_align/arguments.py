"""Arguments and options that several commands take: what they may be, and what `--help` says of them."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


class Residual(StrEnum):
    """--residual."""

    orthogonal = "orthogonal"
    permutation = "permutation"
    identity = "identity"
    first = "first"
    last = "last"
    all = "all"
    separate = "separate"


class Heads(StrEnum):
    """--heads."""

    two_stage = "two-stage"
    circuits = "circuits"
    monotonic = "monotonic"
    ignore_heads = "ignore-heads"


class Mixing(StrEnum):
    """--mixing."""

    narrow = "narrow"
    uniform = "uniform"
    middle = "middle"


class Matching(StrEnum):
    """--match."""

    weight = "weight"
    activation = "activation"
    learned = "learned"
    none = "none"


class Method(StrEnum):
    """--method."""

    linear = "linear"
    slerp = "slerp"
    fisher = "fisher"
    regmean = "regmean"
    circuits = "circuits"
    curve = "curve"
    transport = "transport"
    transport_activations = "transport-activations"
    semi_permutation = "semi-permutation"
    ties = "ties"
    dare_ties = "dare_ties"
    dare_linear = "dare_linear"
    della = "della"
    della_linear = "della_linear"
    task_arithmetic = "task_arithmetic"
    breadcrumbs = "breadcrumbs"
    breadcrumbs_ties = "breadcrumbs_ties"
    sce = "sce"
    model_stock = "model_stock"
    karcher = "karcher"
    multislerp = "multislerp"
    nuslerp = "nuslerp"
    nearswap = "nearswap"
    arcee_fusion = "arcee_fusion"
    ram = "ram"
    ramplus_tl = "ramplus_tl"


OURS = frozenset(
    (
        Method.linear,
        Method.slerp,
        Method.fisher,
        Method.regmean,
        Method.circuits,
        Method.curve,
        Method.transport,
        Method.transport_activations,
        Method.semi_permutation,
    )
)
"""The methods that are not mergekit's."""


class Dtype(StrEnum):
    """--dtype."""

    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"


Model = Annotated[
    str, typer.Argument(help="A folder, org/name or org/name@revision; a LoRA adapter likewise, or MODEL+ADAPTER.")
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")]
Residuals = Annotated[
    Residual,
    typer.Option(
        help="What moves the residual stream: the largest group that the architecture allows, permutations, or nothing "
        "(identity). With --match activation, permutations by the first, the last or all of its features, or (a "
        "baseline) by each of them apart."
    ),
]
HeadChoice = Annotated[
    Heads,
    typer.Option(
        help="Pair heads by the best fit of their weights or by what they compute (circuits), keep their order, or (a "
        "baseline) ignore where heads end."
    ),
]
Spaces = Annotated[
    list[str] | None,
    typer.Option("--only", help="Move only spaces of such names (*.layers.3.*); may be repeated."),
]
Baseline = Annotated[bool, typer.Option("--baseline", help="Allow choices that change B's function, to compare with.")]
Match = Annotated[
    Matching,
    typer.Option(
        help="How B is matched to A: by its weights (seconds), by what both models read on the same inputs, or by "
        "descent on the loss of the merged network (best, slowest; needs no data). none averages them as they are."
    ),
]
Steps = Annotated[int, typer.Option(min=1, help="Of the descent of --match learned, and of --method curve.")]
Mixings = Annotated[
    Mixing, typer.Option(help="Where between the models a descent looks: λ in (0.4, 0.6), (0, 1), or a half.")
]
Device = Annotated[
    str | None,
    typer.Option(
        help="Where models run, and weights are compared and moved, such as cpu or cuda:1. By default an accelerator "
        "if there is one."
    ),
]
Offload = Annotated[
    bool | None,
    typer.Option(
        "--offload/--no-offload",
        help="Run models module by module, with weights read from their files as they are needed, and statistics in "
        "temporary files. By default where they do not fit into memory.",
    ),
]
Untie = Annotated[
    bool | None,
    typer.Option(
        "--untie/--no-untie", help="Untie the head from the embedding. By default where that enlarges the group."
    ),
]
Remote = Annotated[bool, typer.Option("--trust-remote-code", help="Run modelling code that comes with the model.")]
Strict = Annotated[bool, typer.Option("--strict", help="Refuse architectures with ops that have no rule.")]
Witness = Annotated[
    bool,
    typer.Option(
        help="Run what is aligned before it is written, and refuse it if it does not answer as before.",
        show_default="--witness",
    ),
]
AlignmentFile = Annotated[Path | None, typer.Option("--alignment", help="Use a saved alignment; nothing is matched.")]
Specs = Annotated[
    Path | None, typer.Option(help="Folder of reviewed overrides of derived symmetries, before those that ship.")
]
Private = Annotated[bool, typer.Option("--private", help="Make the repository private.")]
CreatePr = Annotated[bool, typer.Option("--create-pr", help="Propose the files as a pull request.")]
CommitMessage = Annotated[str | None, typer.Option(help="Of the upload.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what is in the output folder.")]
