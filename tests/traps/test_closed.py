"""Texts that a token of their own must end: where it stands may decide."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import transformers as t
from torch import Tensor
from transformers import PreTrainedModel

from traps import closed as code
from traps.trap import Call, Calls, Trap, cases, check, custom, forward, ids_of, native

_END = 2
_SIZES = dict(vocab_size=23, d_model=8, max_position_embeddings=48, encoder_layers=1, decoder_layers=1,
              encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=10, decoder_ffn_dim=10,
              num_labels=3)  # fmt: skip


def t5(end: int) -> t.T5Config:
    return t.T5Config(vocab_size=23, d_model=8, d_kv=4, d_ff=10, num_layers=1, num_heads=2, num_labels=3,
                      decoder_start_token_id=0, eos_token_id=end)  # fmt: skip


def ended(*places: int) -> Calls:
    """Texts of some lengths that end at some places."""

    def ids(model: PreTrainedModel, length: int) -> Tensor:
        made = ids_of(model, length)
        made[:, list(places)] = _END
        return made

    def calls(model: PreTrainedModel) -> dict[str, Call]:
        return {f"{n} tokens": partial(forward, input_ids=ids(model, n)) for n in (2, 7, 12, 33)}

    return calls


TRAPS = [
    Trap("Closed", custom(code.ClosedTower, eos_token_id=_END), ended(-1)),
    Trap("Closed twice", custom(code.ClosedTower, eos_token_id=_END), ended(0, -1)),
    Trap("Often", custom(code.OftenTower, eos_token_id=_END), ended(0, -1), may_refuse=True),
    Trap("Early", custom(code.EarlyTower, eos_token_id=_END), ended(0), may_refuse=True),
    Trap("Nowhere", custom(code.NowhereTower, eos_token_id=_END), ended(), may_refuse=True),
    Trap("bart", native("BartForSequenceClassification", t.BartConfig(**_SIZES)), ended(1)),
    Trap("t5", native("T5ForSequenceClassification", t5(_END)), ended(-1)),
    Trap("t5 of two ends", native("T5ForSequenceClassification", t5(_END), t5(_END + 1)), ended(-1), may_refuse=True),
]


@pytest.mark.parametrize("trap", cases("closed", TRAPS))
def test_closed(trap: Trap, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check(trap, tmp_path, capsys)
