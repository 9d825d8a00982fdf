"""Streams that turn on the way they have come: the same objective in fewer sweeps, or a better one."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import MODELS
from torch import Tensor

from hf_align.matching import momentum
from hf_align.matching.balanced import Balanced
from hf_align.matching.momentum import beyond
from hf_align.matching.stream import residual, streams
from hf_align.matching.weights import match_weights
from hf_align.opening.pairs import open_pair
from hf_align.symmetry.elements import Matrix, Monomial


@pytest.fixture(scope="module", params=["llama", "vit"])
def models(request: pytest.FixtureRequest) -> Balanced:
    pair = open_pair(*(str(MODELS / request.param / seed) for seed in "01"))
    return Balanced.of(pair.spec, pair.a.weights, pair.b.weights)


def turned(size: int, angle: float) -> Tensor:
    """A rotation in the plane of two entries, whose sum it moves."""
    matrix = torch.eye(size, dtype=torch.float64)
    first, second = torch.linalg.qr(torch.cat([torch.ones(size, 1), torch.eye(size)[:, :3]], 1).double())[0].T[1:3]
    planes = torch.outer(first, first) + torch.outer(second, second)
    skew = torch.outer(first, second) - torch.outer(second, first)
    return matrix + (math.cos(angle) - 1) * planes + math.sin(angle) * skew


def test_a_rotation_goes_on_in_its_plane(models: Balanced) -> None:
    stream = residual(models.spec)
    assert stream is not None
    size = models.spec.spaces[stream].size
    before, now = ({stream: Matrix(turned(size, angle))} for angle in (0.1, 0.3))
    (found,) = beyond(models, [stream], before, now).values()
    further = math.atan2(2 * math.sin(0.3) - math.sin(0.1), 2 * math.cos(0.3) - math.cos(0.1))
    assert further > 0.49
    assert torch.allclose(found.as_matrix(), turned(size, further))


def test_what_did_not_move_or_does_not_turn_stays(models: Balanced) -> None:
    stream = residual(models.spec)
    assert stream is not None
    size = models.spec.spaces[stream].size
    still = {stream: Matrix(turned(size, 0.1))}
    assert beyond(models, [stream], still, dict(still)) == {}
    orders = ({stream: Monomial.permutation(torch.arange(size).roll(shift))} for shift in (0, 1))
    assert beyond(models, [stream], *orders) == {}
    longer = {stream: Matrix(2 * turned(size, 0.3))}
    assert beyond(models, [stream], still, longer) == {}


def objectives(models: Balanced, monkeypatch: pytest.MonkeyPatch, size: float) -> list[float]:
    found = list[float]()
    monkeypatch.setattr(momentum, "_MOMENTUM", size)
    match_weights(models, lambda _, objective: found.append(objective))
    return found


def test_it_ends_higher_and_earlier(models: Balanced, monkeypatch: pytest.MonkeyPatch) -> None:
    with_it, without = (objectives(models, monkeypatch, size) for size in (momentum._MOMENTUM, 0.0))
    assert streams(models.spec)
    assert with_it[:2] == without[:2]
    assert len(with_it) <= len(without)
    assert with_it[-1] > without[-1]


def test_too_far_is_taken_back(models: Balanced, monkeypatch: pytest.MonkeyPatch) -> None:
    found = objectives(models, monkeypatch, 20.0)
    assert found == sorted(found)
    assert len(set(found)) < len(found)  # no sweep that began there is kept
    assert found[-1] > objectives(models, monkeypatch, 0.0)[-1] * (1 - 1e-4)
