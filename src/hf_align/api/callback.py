"""A model in training beside a reference: whether the two still lie in one basin."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase, TrainerCallback

from hf_align.api.align import align
from hf_align.api.evaluate import evaluate
from hf_align.api.examples import Data, called_with
from hf_align.api.given import Model, take
from hf_align.api.module_data import reusable
from hf_align.settings.choices import Match, checked, whole
from hf_align.tracing.module_calls import Inputs

if TYPE_CHECKING:
    from transformers import Trainer


class BarrierCallback(TrainerCallback):
    """Log the loss barrier between a model in training and a reference, whenever the trainer evaluates.

    The log gains `barrier` (nats per label; as the models are, Frankle et al., arXiv 1912.05671) and `barrier_aligned`
    (with the model in the basis of the reference, Entezari et al., arXiv 2110.06296). The first time, the witness sees
    that the model answers as before when it is moved.

        trainer.add_callback(hf_align.BarrierCallback(trainer, "org/base", texts, tokenizer=tokenizer))

    Args:
        trainer: whose log is written to.
        reference: a live model, a folder or a Hub id.
        data: held-out examples; without labels the tokens themselves are predicted.
        match: how the model is aligned.
        points: of the line between both, ends included.
        inputs: what plain modules are called with; by default it is taken from the first batch of `data`.
        tokenizer: for data that is text.

    Raises:
        ValueError: an option has no such choice.
        HfAlignError: from the trainer's first evaluation, models that do not merge.
    """

    def __init__(
        self,
        trainer: Trainer,
        reference: Model,
        data: Data,
        *,
        match: Match = "weight",
        points: int = 5,
        inputs: Inputs | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        self.match: Match = checked("match", match, Match)
        self.trainer = trainer
        self.data = reusable(data)
        self.inputs = called_with(inputs, self.data, reference)
        self.reference = take(reference, inputs=self.inputs, called="the reference").model
        self.points = whole("points", points, 3)
        self.tokenizer = tokenizer
        self._witnessed = False

    def on_evaluate(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        model = self.trainer.accelerator.unwrap_model(given["model"])
        found = align(model, to=self.reference, match=self.match, inputs=self.inputs, witness=not self._witnessed)
        self._witnessed = True
        lines = evaluate(self.reference, model, self.data, points=self.points, align=found, tokenizer=self.tokenizer)
        self.trainer.log({"barrier": lines.naive.barrier, "barrier_aligned": lines.aligned.barrier})
