"""The model card: what went in, how it was merged, what was measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from hf_align.checkpoints.hub import ADAPTER, Source
from hf_align.publishing.markdown import code
from hf_align.publishing.provenance import ALIGNMENT, FOLDER, Input, Provenance
from hf_align.publishing.templated import template

_PLOT = "barrier.png"


def document(folder: Path, sources: Sequence[Source], say: Callable[[str], None], **facts: Any) -> None:
    """Write provenance and model card beside the weights; facts are fields of `Provenance`."""
    made = Provenance(inputs=Input.all_of(sources), models=[s.name for s in sources], **facts)
    if len({i.licence for i in made.inputs if i.licence}) > 1:
        say(f"warning: {licence_warning(made.inputs)}")
    made.save(folder)
    write_card(folder, made)


def licence_warning(inputs: Sequence[Input]) -> str | None:
    """What the user must settle before the merge is given to others; None where all inputs have the same licence."""
    found = {i.licence for i in inputs}
    if len(found) == 1 and None not in found:
        return None
    each = ", ".join(f"{i.name}: {i.licence or 'unknown'}" for i in inputs)
    what = "differ" if len(found - {None}) > 1 else "are not all known"
    return f"The licences of the inputs {what} ({each}); a merge is bound by each of them."


def write_card(folder: Path, made: Provenance) -> None:
    """Write README.md into a merged model's folder, and beside it, if matplotlib is there, the plot of its barriers."""
    plot = _plot(folder, made.comparison, made.is_aligned) if made.comparison else None
    repositories = [i.repository for i in made.inputs if i.repository]
    warning = licence_warning(made.inputs)
    is_adapter = (folder / ADAPTER).is_file()  # of the first
    merged = [_linked(name, made.inputs) for name in made.models]
    carried = merged[len(merged) - made.carried :]
    reference = made.strategy.get("reference")  # a recipe's choice
    data = ModelCardData(
        base_model=(made.inputs[0].repository if is_adapter else repositories) or None,
        base_model_relation="adapter" if is_adapter else "merge",
        tags=["merge", "hf-align"],
        library_name="peft" if is_adapter else "transformers",
        license=None if warning else made.inputs[0].licence,
    )
    content = template("card.md.j2").render(
        card_data=data.to_yaml(),
        title=made.title,
        merged=merged,
        carried=carried,
        what=_what(merged, carried),
        reference=_linked(reference, made.inputs) if reference else "the first",
        inputs=[{**i.model_dump(), "link": _link(i)} for i in made.inputs],
        licence_warning=warning,
        has_alignment=(folder / FOLDER / ALIGNMENT).is_file(),
        made=made,
        plot=plot,
    )
    ModelCard(content).save(folder / "README.md")


def _what(merged: Sequence[str], carried: Sequence[str]) -> str:
    """What the model is: a merge, or the first of them with what the last ones learned on those between."""
    if not carried:
        return f"A merge of {' and '.join(merged)}"
    onto, *bases = merged[: -len(carried)]
    return f"{onto} with what {' and '.join(carried)} learned on {' and '.join(bases)}"


def _linked(model: str, inputs: Sequence[Input]) -> str:
    """What was merged, with links to where it is: one for a model, and one for its adapter."""
    links = {i.name: _link(i) for i in inputs}
    return links.get(model) or " with ".join(links[name] for name in model.split("+"))


def _link(model: Input) -> str:
    if model.repository is None:
        return code(model.name)
    at = f"/tree/{model.commit}" if model.commit else ""
    return f"[{model.repository}](https://huggingface.co/{model.repository}{at})"


def _plot(folder: Path, comparison: dict[str, Any], is_aligned: bool) -> str | None:
    """Where the plot is, from the card; None without matplotlib, which is an extra."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.subplots()
    losses = {name: comparison[name]["losses"] for name in ("naive", "aligned")}
    axes.plot(comparison["lambdas"], losses["naive"], color="#9aa0a6", label="averaged as they are")
    if is_aligned:
        axes.plot(comparison["lambdas"], losses["aligned"], color="#1a73e8", label="aligned", linewidth=2.5)
    axes.plot([0, 1], [losses["naive"][0], losses["naive"][-1]], color="#9aa0a6", linestyle=":", linewidth=1)
    axes.set(xlabel="λ, the share of the second model", ylabel="loss (nats per label)", xlim=(0, 1),
             title="Loss on the way from the first model to the second")  # fmt: skip
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    (folder / FOLDER).mkdir(exist_ok=True)
    figure.savefig(folder / FOLDER / _PLOT, dpi=150, metadata={"Software": None})
    return f"{FOLDER}/{_PLOT}"
