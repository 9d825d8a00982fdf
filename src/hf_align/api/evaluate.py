"""Whether alignment helps: losses on the line between two models, as they are and aligned."""

from __future__ import annotations

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from hf_align.api.align import align as find
from hf_align.api.alignment import Alignment
from hf_align.api.examples import Data, called_with, examples_and_loss
from hf_align.api.given import Model
from hf_align.api.module_data import loss_told, reusable
from hf_align.checkpoints.ondemand import Computed
from hf_align.errors import OptionError
from hf_align.running.evaluate import Comparison, Evaluator
from hf_align.running.network import Loss
from hf_align.running.offload import network_for
from hf_align.runtime.alone import alone
from hf_align.runtime.devices import Devices
from hf_align.settings.choices import Match, checked, whole
from hf_align.tracing.module_calls import Inputs
from hf_align.tracing.modules import ModuleConfig


@alone
def evaluate(
    a: Model,
    b: Model,
    data: Data,
    *,
    points: int = 21,
    align: Alignment | Match = "weight",
    objective: Loss | None = None,
    inputs: Inputs | None = None,
    device: str | None = None,
    config: PretrainedConfig | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Comparison:
    """Losses of (1-λ)·A + λ·B, with B as it is and in the basis of A.

    Args:
        a: the reference: a live model, a state dict, a folder or a Hub id.
        b: the other model.
        data: held-out examples; without labels the tokens themselves are predicted. Of data that has no length the
            first 4096 are read.
        points: of λ, from 0 to 1.
        align: an alignment of B with A, or how to find one.
        objective: a function of outputs and a batch as the data has it, to a mean over examples. By default it is the
            model's own loss: what it returns as one, or cross-entropy where a plain module comes with labels.
        inputs: what plain modules are called with; by default it is taken from the first batch of `data`.
        device: where models run; an accelerator if there is one.
        config: of state dicts.
        tokenizer: for data that is text.

    Returns:
        With `.naive` and `.aligned` (`.losses`, `.barrier`), `.helps`, `.plot()` and `.as_json()`.

    Raises:
        ValueError: an option has no such choice; data or models do not fit.
        HfAlignError: models that do not merge.
    """
    whole("points", points, 3)
    if data is None:
        raise OptionError("losses need data")
    if objective is not None and not callable(objective):
        raise OptionError(f"objective is {objective!r}; a function of outputs and a batch is needed")
    data = reusable(data)
    if not isinstance(align, Alignment):
        match: Match = checked("align", align, Match)
        inputs = called_with(inputs, data, a, b)
        align = find(b, to=a, match=match, inputs=inputs, device=device, config=config, tokenizer=tokenizer)
    first, second = align.taken(a, config, called="A"), align.taken(b, config, called="B")
    network = network_for(align.config, Devices.choose(device).running)
    batch, loss = examples_and_loss(data, objective, first, tokenizer)
    assert batch is not None
    if loss is None and isinstance(first.config, ModuleConfig):
        loss = loss_told
    evaluator = Evaluator(network, batch, loss)
    names = align.spec.parameters
    ends = (first.weights, second.weights, align.weights_of(first, align.reference),
            align.weights_of(second, align.elements))  # fmt: skip
    raw_a, raw_b, moved_a, moved_b = (network.placed(Computed(names, w.__getitem__)) for w in ends)
    return evaluator.compare((raw_a, raw_b), (moved_a, moved_b), points)
