"""What a model is given seldom, and its code tells apart, is kept as well."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from traps import rarer as code
from traps.test_asked import once
from traps.trap import Trap, both, cases, check, of_code

_PLACES = torch.arange(7).repeat(2, 1)


text = partial(of_code, vocab_size=3000)
TRAPS = [
    text(code.LateTower, once(attention_mask=(_PLACES > 2).long())),
    text(code.GapTower, once(attention_mask=((_PLACES < 2) | (_PLACES > 3)).long())),
    text(code.PackedTower, once(position_ids=_PLACES % 4)),
    of_code(code.OnAxesTower, once(position_ids=torch.stack([_PLACES, _PLACES // 3, _PLACES % 3])), head_dim=6),
    of_code(code.ShareTower, both(once(share=0.5), once(share=0.25))),
    of_code(code.LimitTower, once(limit=3.0)),
    of_code(code.MemberTower, once(precision=code.Precision.HALF)),
    of_code(code.OftenTower, both(once(times=1), once(times=4), once(times=9))),
]  # fmt: skip


@pytest.mark.parametrize("trap", cases("rarer", TRAPS))
def test_aligned_b_is_b_where_it_is_given_what_few_are(
    trap: Trap, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check(trap, tmp_path, capsys)
