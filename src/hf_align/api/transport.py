"""A fine-tune carried to another base, with live models."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from hf_align.api.align import align, moved_of
from hf_align.api.examples import Data, called_with, examples
from hf_align.api.given import Kind, Model
from hf_align.api.module_data import reusable
from hf_align.checkpoints.ondemand import Computed
from hf_align.jobs.job import silent
from hf_align.merging.transport import Fine, samples_of
from hf_align.running.offload import network_for
from hf_align.runtime.devices import Devices
from hf_align.settings.choices import KEEP, Match, TransportMethod, checked, finite
from hf_align.tracing.module_calls import Inputs
from hf_align.witness.witness import hold_all


def transport(
    finetuned: Model,
    *,
    base: Model,
    onto: Kind,
    data: Data | None = None,
    strength: float = 1.0,
    keep: float = KEEP,
    method: TransportMethod = "regression",
    match: Match = "weight",
    inputs: Inputs | None = None,
    device: str | None = None,
    config: PretrainedConfig | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    witness: bool = True,
) -> Kind:
    """Carry what a fine-tune learned on its base to another base.

    Args:
        finetuned: the fine-tune: a live model, a state dict, a folder or a Hub id.
        base: what it was tuned from.
        onto: what it is carried to; of the same architecture and vocabulary.
        data: text like what the fine-tune was trained on; without it the fine-tune writes its own.
        strength: how much of the change is carried over.
        keep: examples that `onto` writes, and answers on as before, for each of the others. It has an effect on models
            that generate, and with "regression" alone.
        method: "regression" fits every weight so that B does on top of its own what the fine-tune does on top of its
            base; "task_arithmetic" only adds the change of the weights, in B's basis.
        match: how the bases are matched.
        inputs: what plain modules are called with; by default it is taken from the first batch of `data`.
        device: where models run; an accelerator if there is one.
        config: of state dicts.
        tokenizer: for data that is text.
        witness: run every model before and after it is aligned, and refuse what changed.

    Returns:
        The same kind of thing as `onto`, live for a folder or an id.

    Raises:
        ValueError: an option has no such choice; models or data do not fit.
        IncompatibleModels: the models compute differently with the same weights.
        FunctionChanged: a model no longer answers as before.
    """
    checked("method", method, TransportMethod)
    checked("witness", witness, (True, False))
    if data is not None and method != "regression":
        raise ValueError(f'data is not used by method="{method}"')
    finite("strength", strength)
    if not 0 <= finite("keep", keep) <= 1:
        raise ValueError(f"keep is {keep}; it must lie between 0 and 1")
    data = reusable(data)
    found = align(base, to=onto, match=match, inputs=called_with(inputs, data, onto), device=device, config=config,
                  tokenizer=tokenizer, witness=witness)  # fmt: skip
    first, last, tuned = (found.taken(model, config, called=name) for model, name in (
        (onto, "onto"), (base, "base"), (finetuned, "finetuned")))  # fmt: skip
    running = Devices.choose(device).running
    if witness:
        hold_all([moved_of(tuned, found.config, found.spec, found.elements)], running)
    moves = ((first, found.reference), (last, found.elements), (tuned, found.elements))
    known = found.spec.parameters
    onto_b, base_b, tuned_b = (
        Computed(known, found.weights_of(given, elements).__getitem__) for given, elements in moves
    )
    fine = Fine(onto_b, base_b, tuned_b, strength)
    solved: dict[str, Tensor] = {}
    if method == "regression":
        network = network_for(found.config, running)
        fine.solve(samples_of(fine, network, examples(data, tuned, tokenizer), keep, silent), solved)
    start = fine.by_vector
    made = Computed(found.spec.parameters, lambda n: solved[n] if n in solved else start[n])
    carried: Any = first.with_weights(made, found.config, found.spec)
    return carried
