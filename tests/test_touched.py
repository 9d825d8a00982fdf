"""What a run has put aside is damaged or taken away before the next one: it is found again, and never left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_align.checkpoints.claim import Claim, claimed
from hf_align.jobs.kept_weights import KeptWeights
from hf_align.matching.descent import Descent, State
from hf_align.settings.schedule import Schedule

DAMAGES: list[Callable[[Path], object]] = [
    Path.unlink,
    lambda path: path.write_bytes(b""),
    lambda path: path.write_bytes(path.read_bytes()[:-1]),
    lambda path: path.write_bytes(path.read_bytes()[:-1] + b"\x01"),
]


@pytest.fixture
def claim(tmp_path: Path) -> Iterator[Claim]:
    with claimed(tmp_path / "out", {"the command": "merge"}) as held:
        yield held


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_that_is_damaged_is_as_if_it_were_not_there(damage: Callable[[Path], object], claim: Claim) -> None:
    claim.keep("x.safetensors", partial(save_file, {"w": torch.ones(3)}))
    path = claim.kept("x.safetensors")
    assert path is not None and load_file(path)["w"].tolist() == [1, 1, 1]
    damage(path)
    assert claim.kept("x.safetensors") is None
    claim.keep("x.safetensors", partial(save_file, {"w": torch.zeros(3)}))
    path = claim.kept("x.safetensors")
    assert path is not None and load_file(path)["w"].tolist() == [0, 0, 0]


@pytest.mark.parametrize("damage", DAMAGES)
def test_weights_of_which_one_is_lost_are_not_whole(damage: Callable[[Path], object], claim: Claim) -> None:
    """The mean would stand in for it, without a word."""
    names = ("a", "b", "c")
    found = KeptWeights(claim, names)
    found["a"], found["b"] = torch.ones(2), torch.ones(2)
    assert not found.is_whole
    found.close()
    assert KeptWeights(claim, names).is_whole  # c was never to be found
    path = claim.kept("solved-1.safetensors")
    assert path is not None
    damage(path)
    again = KeptWeights(claim, names)
    assert not again.is_whole and list(again) == ["a"]
    again["b"] = torch.ones(2)
    assert again.is_whole


def test_what_is_put_aside_again_takes_the_place_of_what_was(claim: Claim) -> None:
    found = KeptWeights(claim, ("a",))
    for value in range(8):  # in no order of their names
        found["a"] = torch.full((2,), float(value))
        assert found["a"].tolist() == [value, value]
    assert len([*claim.work.glob("kept-*")]) == 1


@pytest.mark.parametrize("content", [b"", b"junk", b"PK\x03\x04cut"])
def test_a_descent_starts_anew_from_a_state_that_is_damaged(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "progress").write_bytes(content)
    x = torch.ones(2, requires_grad=True)
    steps: list[int] = []
    descent = Descent([], [torch.optim.SGD([{"params": [x], "rate": 0.1}])], Schedule(steps=3),
                      State(tmp_path / "progress", "x"))  # fmt: skip
    descent.run(lambda _: x.square().sum(), lambda step, _: steps.append(step))
    assert steps == [1, 2, 3]
