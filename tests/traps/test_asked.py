"""What an argument that is no tensor asks of a model is kept as well."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from traps import asked as code
from traps.trap import Calls, Trap, both, cases, check, custom, forward, ids_of, lengths


def once(**arguments: Any) -> Calls:
    def calls(model: PreTrainedModel) -> dict[str, Any]:
        ids = ids_of(model, 7)
        more = {k: v(model, ids) if callable(v) else v for k, v in arguments.items()}
        return {f"with {', '.join(more)}": partial(forward, **{"input_ids": ids, **more})}

    return both(lengths(7), calls)


ASKED = {
    "ADict": once(extras={"scale": torch.ones(1)}),
    "AList": once(extras=[torch.ones(1), torch.ones(1)]),
    "AFlagOrNone": once(bend=True),
    "AWord": once(task="bent"),
    "AWordOrNone": once(task="bent"),
    "ANumber": once(level=3),
    "Above": once(level=9),
    "DetachedTower": lengths(7),
}
TRAPS = [
    *(Trap(name, custom(getattr(code, name)), calls) for name, calls in ASKED.items()),
    *(Trap(name, custom(getattr(code, name)), lengths(3, 9)) for name in code.BY_HAND),
]


@pytest.mark.parametrize("trap", cases("asked", TRAPS))
def test_asked(trap: Trap, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check(trap, tmp_path, capsys)
