"""A model in the tokens of another: its tables fitted to text that it writes itself, and what it still knows of that.

Rows that are made of pieces are a start. In its new tokens the model meets text that is cut otherwise than it has
learned, so the tables alone are trained on what it writes, read in the new tokens; all other weights stay as they are.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from hf_align.checkpoints.ondemand import Computed
from hf_align.errors import CannotRun
from hf_align.matching.find import Search, searching
from hf_align.matching.objectives import OnLabels
from hf_align.merging.distil import Limits, distilled
from hf_align.opening.models import Model
from hf_align.opening.vocabularies import Pieces, RespelledWeights
from hf_align.running.data import with_labels
from hf_align.running.generate import own_inputs, writes
from hf_align.running.network import Network, Weights, batches
from hf_align.running.offload import network_for
from hf_align.runtime.devices import Devices
from hf_align.settings.options import Options
from hf_align.settings.schedule import Schedule
from hf_align.tracing.build import build_without_weights, inventory

_WRITTEN, _LENGTH = 4096, 64
"""Texts that the model writes, and tokens of each."""
_ASKED = 64
"""Texts that tell whether the model reads as before."""
_HELD_OUT = 4
"""One of so many texts is not trained on."""
_STEPS = 300


@dataclass(frozen=True)
class Reader:
    """A model with a tokenizer.

    Attributes:
        weights: placed for the network.
        ties: other names of tied weights -> the name that is kept.
    """

    network: Network
    weights: Weights
    tokenizer: PreTrainedTokenizerBase
    ties: Mapping[str, str]

    @classmethod
    def of(cls, model: Model, network: Network, weights: Weights, *, trust_remote_code: bool) -> Reader:
        """Weights that read in the tokens of a model.

        Args:
            weights: by name in memory.
            trust_remote_code: run the code of a tokenizer that comes with the model.
        """
        known = inventory(build_without_weights(network.config))
        tokenizer = AutoTokenizer.from_pretrained(model.folder, trust_remote_code=trust_remote_code)
        return cls(network, network.placed(Computed(known.shapes, weights.__getitem__)), tokenizer, known.ties)

    def written(self, count: int, seed: int) -> Tensor:
        """What the model writes, [count, tokens]."""
        return own_inputs(self.network, self.weights, count, _LENGTH, seed)["input_ids"]

    @torch.no_grad()
    def nats_per_byte(self, rows: Tensor) -> float:
        """The mean cross-entropy of the bytes of texts [texts, tokens], the first token of each left out."""
        nats, size = 0.0, 0
        for batch in batches(with_labels({"input_ids": rows.to(self.network.device)})):
            nats += float(self.network.loss(self.weights, batch)) * batch["labels"][:, 1:].numel()
        for row in rows:
            size += len(self.text(row).encode()) - len(self.text(row[:1]).encode())
        return nats / max(size, 1)

    def text(self, row: Tensor) -> str:
        """What tokens [tokens] stand for."""
        return str(self.tokenizer.decode(row, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def reads_alike(self, texts: list[str], other: Reader, pieces: Sequence[Pieces]) -> bool:
        """Whether every token of some texts is one token here and there, with the same row of the tables.

        Args:
            pieces: for each token of the other, what it is made of here.
        """
        ours = [[(token,) for token in text] for text in self.tokens(texts)]
        return ours == [[pieces[token] for token in text] for text in other.tokens(texts)]

    def tokens(self, texts: list[str]) -> list[list[int]]:
        """The tokens of each text."""
        found: list[list[int]] = self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        return found

    def rows(self, texts: list[str], length: int) -> Tensor:
        """Texts one after another, cut into rows [rows, length]."""
        ids = torch.tensor([token for text in self.tokens(texts) for token in text], dtype=torch.long)
        return ids[: len(ids) // length * length].view(-1, length)


def refitted(model: Model, first: Model, *, options: Options) -> Model:
    """A respelled model with tables that are fitted to what it writes; as it is where it cannot write, or be trained.

    Args:
        first: whose vocabulary it has.
    """
    weights = model.weights
    assert isinstance(weights, RespelledWeights)
    if not writes(build_without_weights(model.config)):
        return replace(model, respelled=f"{model.respelled}; it does not write, so nothing tells what that changes")
    device = Devices.choose(options.device).running
    own, new = (network_for(config, device, options.offload) for config in (weights.respelling.before, model.config))
    try:
        new.must_hold("its tables are fitted in memory")
    except CannotRun as error:
        return replace(model, respelled=f"{model.respelled}, as they are: {error}")
    reader = partial(Reader.of, trust_remote_code=options.trust_remote_code)
    return _fitted(model, reader(model, own, weights.own), reader(first, new, weights), options)


def _fitted(model: Model, own: Reader, new: Reader, options: Options) -> Model:
    weights = model.weights
    assert isinstance(weights, RespelledWeights)
    if own.reads_alike([own.text(row) for row in own.written(_ASKED, seed=1)], new, weights.respelling.pieces):
        return replace(model, respelled=f"{model.respelled}; it reads what it writes as before")
    written = own.written(_WRITTEN, seed=0)
    texts = [own.text(row) for row in written]
    learned = new.rows([text for number, text in enumerate(texts) if number % _HELD_OUT], written.shape[1])
    kept = new.rows(texts[::_HELD_OUT], written.shape[1])
    if not len(learned) or not len(kept):
        return replace(model, respelled=f"{model.respelled}; it writes no text, so nothing tells what that changes")
    tables = _descended(new, learned, weights.respelling.axes, options)
    reading = replace(new, weights={**new.weights, **new.network.placed(tables)})
    before = own.nats_per_byte(written[::_HELD_OUT])
    after = reading.nats_per_byte(kept)
    said = f"of what it writes itself, a byte takes it {after:.2f} nats in these tokens, {before:.2f} in its own"
    fitted = {**tables, **{alias: tables[name] for alias, name in new.ties.items() if name in tables}}
    found = Computed(weights, lambda name: fitted[name] if name in fitted else weights[name])
    return replace(model, weights=found, respelled=f"{model.respelled}; {said}")


def _descended(new: Reader, rows: Tensor, tables: Collection[str], options: Options) -> dict[str, Tensor]:
    schedule = Schedule(steps=_STEPS)
    objective = OnLabels(with_labels({"input_ids": rows}))
    with searching(Search(schedule=schedule, quiet=options.quiet), "fitting tables") as progress:
        limits = Limits(dict.fromkeys(tables), new.weights)
        return distilled(new.weights, new.network, objective, schedule, limits=limits, progress=progress)
