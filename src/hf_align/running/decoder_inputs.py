"""What models are run on where nothing is predicted: data without labels, and what a decoder reads in their place.

Many a model makes of its labels what its decoder reads, and does so in code of its own. So it is called with the
labels, on weights without values, until its decoder is called.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from hf_align.running.network import Batch
from hf_align.tracing.build import build_without_weights, quiet

_TAKEN, _MASK, _ENCODED = "decoder_input_ids", "decoder_attention_mask", "encoder_outputs"
_OF_DECODER = (_TAKEN, "decoder_inputs_embeds")


class _ReadError(Exception):
    """Stops a call as soon as it is known what the decoder reads."""


def unlabelled(data: Batch, config: PretrainedConfig, most: int | None = None) -> Batch:
    """Data without what is to be predicted, and texts without padding; all examples, or some.

    Where a model makes of its labels what its decoder reads, that stands in their place: without it T5 does not run,
    and BART would read its source twice.
    """
    if not getattr(config, "is_encoder_decoder", False):
        return _some(_packed({name: tensor for name, tensor in data.items() if name != "labels"}), most)
    some = _some(data, most)
    labels = some.pop("labels", some.get("input_ids"))
    if labels is None or any(name in some for name in _OF_DECODER):
        return some
    model = build_without_weights(config)
    asked = inspect.signature(model.forward).parameters
    if not {"labels", _TAKEN} <= asked.keys():
        return some
    call = {**some, "labels": labels}
    encoded = {_ENCODED: BaseModelOutput(last_hidden_state=torch.zeros(len(labels), 1, 1))}
    # An encoder may not run without values, so the first call has what one returns already.
    for more in (encoded, {}):
        read = _read_by_decoder(model, {**call, **more})
        if read:
            return {**{name: value for name, value in read.items() if name in asked}, **some}
    return some


def _some(data: Batch, most: int | None) -> Batch:
    return {name: tensor[:most] for name, tensor in data.items()}


def _packed(texts: Batch) -> Batch:
    """Texts one behind the other, cut into rows as long as the longest of them: no model has learned to read padding.
    What is more than tokens, as pictures beside them are, stays as it is."""
    tokens, mask = texts.get("input_ids"), texts.get("attention_mask")
    if tokens is None or mask is None or any(t.shape != tokens.shape for t in texts.values()):
        return texts
    read = mask != 0
    length = int(read.sum(1).max())
    if not length or bool(read.all()):
        return texts
    rows = int(read.sum()) // length
    return {name: tensor[read][: rows * length].reshape(rows, length) for name, tensor in texts.items()}


@torch.no_grad()
def _read_by_decoder(model: PreTrainedModel, call: Mapping[str, Any]) -> Batch:
    """The tokens that the decoder is called with, [examples, tokens], and their mask if there is one; nothing if they
    depend on weights."""
    found = dict[str, Tensor]()
    decoder = _decoder(model)

    def note(module: nn.Module, args: tuple[Any, ...], given: Mapping[str, Any]) -> None:
        read: dict[str, Any] = {_TAKEN: given.get(_TAKEN), _MASK: given.get(_MASK)}
        if module is decoder and read[_TAKEN] is None:
            read = {_TAKEN: given.get("input_ids", args[0] if args else None), _MASK: given.get("attention_mask")}
        known = {name: value for name, value in read.items() if _is_known(value)}
        if _TAKEN in known:
            found.update(known)
            raise _ReadError

    hooks = [module.register_forward_pre_hook(note, with_kwargs=True) for module in model.modules()
             if module is not model]  # fmt: skip
    with quiet(), suppress(Exception):  # models refuse what they cannot read in as many ways as there are models
        model(**call)
    for hook in hooks:
        hook.remove()
    return found


def _is_known(value: Any) -> bool:
    """Whether it is whole numbers, or a mask, that no weight had a part in."""
    return isinstance(value, Tensor) and not isinstance(value, FakeTensor) and not value.is_floating_point()


def _decoder(model: PreTrainedModel) -> nn.Module | None:
    with suppress(Exception):  # some have none, and say so in an error
        return model.get_decoder()
    return None
