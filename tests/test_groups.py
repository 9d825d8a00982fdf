"""Elements against their matrices, and the nearest element against every other."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from inspect import isabstract

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_align.symmetry import groups as g
from hf_align.symmetry.elements import DUAL, PRIMAL, Element, Monomial, Power
from hf_align.symmetry.groups.fit import assign
from hf_align.symmetry.interpreter.bounds import (
    FIXED,
    FREE,
    METRIC,
    ONES,
    ONES_UP_TO_SIGN,
    PERMUTATION,
    Bound,
    Scalars,
    monomial,
)
from hf_align.symmetry.interpreter.rotations import Rotations

ROTARY = Rotations(6, (((0, 3),), ((1, 4),)), (2, 5))
TWICE = Rotations(6, (((0, 1), (2, 3)),), (4, 5))
GROUPS = [
    g.GeneralLinear(5), g.Orthogonal(5), g.OrthogonalFixingOnes(5), g.OrthogonalFixingOnesUpToSign(5),
    g.RotaryCommutant(6, ROTARY), g.RotaryCommutant(6, TWICE), g.ScaledPermutation(5), g.PositiveScaledPermutation(5),
    g.SignedPermutation(5), g.PermutationUpToSign(5), g.Permutation(5),
    g.TorusPermutation(5, (Scalars.NONZERO, Scalars.SIGN)), g.TorusPermutation(5, (Scalars.SIGN, Scalars.COMMON_SIGN)),
    g.RotaryUnitary(6, ROTARY), g.RotaryUnitary(6, TWICE),
]  # fmt: skip
SCALING = g.Scaling(6, (0, 1, 2, 0, 1, 2), (Scalars.NONZERO, Scalars.SIGN))
TURNS = [g.QuarterTurns(5, classes, (Scalars.NONZERO, Scalars.SIGN), Rotations(5, (((0, 2),), ((1, 3),)), (4,)))
         for classes in ((0, 1, 0, 1, 4), (0, 1, 2, 3, 4))]  # fmt: skip


def kinds_of(kind: type[g.Group]) -> set[type[g.Group]]:
    return {kind}.union(*map(kinds_of, kind.__subclasses__()))


def test_no_group_is_left_out() -> None:
    assert {type(x) for x in (*GROUPS, SCALING, *TURNS)} == {k for k in kinds_of(g.Group) if not isabstract(k)}


@given(gain=st.integers(1, 4).flatmap(lambda n: st.lists(st.integers(-3, 3), min_size=n * n, max_size=n * n)))
def test_no_order_is_better_than_that_which_is_assigned(gain: list[int]) -> None:
    """With ties, and where the largest of each row are in columns of their own."""
    n = math.isqrt(len(gain))
    matrix = torch.tensor(gain, dtype=torch.float64).reshape(n, n)
    totals = {order: float(matrix[range(n), order].sum()) for order in itertools.permutations(range(n))}
    assert totals[tuple(assign(matrix).tolist())] == max(totals.values())


def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("group", [*GROUPS, *TURNS], ids=repr)
@given(seed=st.integers(0, 10**6))
@settings(max_examples=10, deadline=None)
def test_an_element_is_its_matrix(group: g.Group, seed: int) -> None:
    x, y = group.random((2, 3), rng(seed)), group.random((2, 3), rng(seed + 1))
    tensor = torch.randn(2, 3, 4, group.size, generator=rng(seed), dtype=torch.float64)
    for power in (PRIMAL, DUAL):
        expected = torch.einsum("hgab,hgrb->hgra", x.as_matrix(power), tensor)
        torch.testing.assert_close(x.act(tensor, power), expected)
    torch.testing.assert_close((x @ y).as_matrix(), x.as_matrix() @ y.as_matrix())
    torch.testing.assert_close(x.inverse().as_matrix(), torch.linalg.inv(x.as_matrix()))
    torch.testing.assert_close(x.as_matrix(DUAL), torch.linalg.inv(x.as_matrix()).mT)


def test_what_stretches_is_applied_exactly_and_rounded_once() -> None:
    writer = torch.randn(64, 80, generator=rng(0), dtype=torch.float64) * torch.logspace(0, -4, 80)
    reader = torch.randn(64, 80, generator=rng(1), dtype=torch.float64)
    gauge = g.GeneralLinear(64).balance({PRIMAL: writer @ writer.mT, DUAL: reader @ reader.mT})
    assert torch.linalg.cond(gauge.as_matrix()) > 20
    rows = writer.mT.float()
    turn = g.Orthogonal(64).random((), rng(2))
    for element, exact in ((gauge, True), (turn, False)):  # a turn needs no such product, which takes twice as long
        moved, exactly = element.act(rows, PRIMAL), element.act(rows.double(), PRIMAL).float()
        assert torch.equal(moved, exactly) is exact
        torch.testing.assert_close(moved, exactly)


@pytest.mark.parametrize("group", GROUPS, ids=repr)
def test_the_lie_algebra_has_the_stated_dimension_and_stays_in_the_group(group: g.Group) -> None:
    basis = group.tangents()
    assert len(basis) == group.dimension
    if not len(basis):
        return
    assert torch.linalg.matrix_rank(basis.reshape(len(basis), -1)) == group.dimension
    random = group.random((), rng(0)).as_matrix()
    monomial_ = isinstance(group, g.ScaledPermutation)
    for tangent in basis:
        small = (0.1 * tangent).exp().prod(0).diag() if monomial_ else torch.matrix_exp(0.1 * tangent)
        if isinstance(group, g.RotaryCommutant):
            turn = _rotation(group.rotations)
            torch.testing.assert_close(small @ turn, turn @ small)
        if not group.has_gauge:
            torch.testing.assert_close(small @ small.T, torch.eye(group.size, dtype=torch.float64))
        if isinstance(group, g.OrthogonalFixingOnes):
            torch.testing.assert_close(small.sum(1), torch.ones(group.size, dtype=torch.float64))
    assert random.shape == (group.size, group.size)


def _rotation(rotations: Rotations) -> torch.Tensor:
    turn = torch.eye(rotations.size, dtype=torch.float64)
    for angle, planes in enumerate(rotations.planes, start=1):
        for i, j in planes:
            turn[i, i] = turn[j, j] = math.cos(angle)
            turn[j, i], turn[i, j] = math.sin(angle), -math.sin(angle)
    return turn


@pytest.mark.parametrize("group", [x for x in GROUPS if isinstance(x, g.RotaryCommutant)], ids=repr)
def test_random_rotary_elements_commute_with_the_rotations(group: g.RotaryCommutant) -> None:
    turn = _rotation(group.rotations)
    element = group.random((), rng(1)).as_matrix()
    torch.testing.assert_close(element @ turn, turn @ element)


@pytest.mark.parametrize("group", GROUPS, ids=repr)
@given(seed=st.integers(0, 10**6))
@settings(max_examples=10, deadline=None)
def test_nearest_beats_every_other_element_of_unit_length(group: g.Group, seed: int) -> None:
    cross = {PRIMAL: torch.randn(group.size, group.size, generator=rng(seed), dtype=torch.float64)}
    best = group.nearest(cross)
    value = float((best.as_matrix() * cross[PRIMAL]).sum())
    assert value == pytest.approx(float(group.score(cross)))
    for other_seed in range(20):
        other = group.random((), rng(other_seed))
        if group.has_gauge:
            other = group.nearest({PRIMAL: other.as_matrix()})
        assert float((other.as_matrix() * cross[PRIMAL]).sum()) <= value + 1e-9


@pytest.mark.parametrize("group", GROUPS, ids=repr)
def test_nearest_recovers_an_element(group: g.Group) -> None:
    planted = group.random((), rng(3))
    planted = group.nearest({PRIMAL: planted.as_matrix()}) if group.has_gauge else planted
    points = torch.randn(40, group.size, generator=rng(4), dtype=torch.float64)
    moved = planted.act(points, PRIMAL)
    found = group.nearest({PRIMAL: moved.T @ points})
    torch.testing.assert_close(found.as_matrix(), planted.as_matrix())


@pytest.mark.parametrize("group", [x for x in GROUPS if x.has_gauge], ids=repr)
def test_balancing_makes_the_grams_equal(group: g.Group) -> None:
    rows = torch.randn(2, group.size, 30, generator=rng(5), dtype=torch.float64)
    grams = {PRIMAL: rows[0] @ rows[0].T, DUAL: 4 * rows[1] @ rows[1].T}
    element = group.balance(grams)
    primal = element.as_matrix() @ grams[PRIMAL] @ element.as_matrix().T
    dual = element.as_matrix(DUAL) @ grams[DUAL] @ element.as_matrix(DUAL).T
    if isinstance(group, g.GeneralLinear):
        torch.testing.assert_close(primal, dual)
    torch.testing.assert_close(primal.trace(), dual.trace())


@pytest.mark.parametrize(("written", "read"), [(3, 6), (6, 2), (3, 2), (1, 1), (0, 6), (6, 0), (0, 0)])
@pytest.mark.parametrize("size", [1.0, 1e-20])
def test_what_only_one_side_has_is_not_scaled_down_for_ever(written: int, read: int, size: float) -> None:
    """Nothing is the smallest there: every turn would make it smaller, until its inverse is all that is left."""
    columns = torch.randn(6, 12, generator=rng(6), dtype=torch.float64)
    primal = size * columns[:, :written] @ columns[:, :written].T
    dual = columns[:, 6 : 6 + read] @ columns[:, 6 : 6 + read].T
    whole = torch.eye(6, dtype=torch.float64)
    for _ in range(3):
        step = g.GeneralLinear(6).balance({PRIMAL: primal, DUAL: dual}).as_matrix()
        whole, inverse = step @ whole, torch.linalg.inv(step)
        primal, dual = step @ primal @ step.T, inverse @ dual @ inverse.T
    torch.testing.assert_close(step, torch.eye(6, dtype=torch.float64))
    assert torch.linalg.cond(whole) < 1e2


def test_the_lattice() -> None:
    assert isinstance(g.group_of(FREE, 4), g.GeneralLinear)
    assert isinstance(g.group_of(METRIC, 4), g.Orthogonal)
    assert g.group_of(METRIC.meet(ONES), 4) == g.OrthogonalFixingOnes(4)
    assert g.group_of(METRIC.meet(ONES_UP_TO_SIGN), 4) == g.OrthogonalFixingOnesUpToSign(4)
    assert g.group_of(monomial(Scalars.NONZERO).meet(ONES_UP_TO_SIGN), 4) == g.PermutationUpToSign(4)
    assert g.group_of(monomial(Scalars.POSITIVE).meet(ONES_UP_TO_SIGN), 4) == g.Permutation(4)
    assert isinstance(g.group_of(monomial(Scalars.NONZERO).meet(METRIC), 4), g.SignedPermutation)
    assert isinstance(g.group_of(monomial(Scalars.POSITIVE).meet(METRIC), 4), g.Permutation)
    assert isinstance(g.group_of(monomial(Scalars.NONZERO).meet(ONES), 4), g.Permutation)
    assert g.group_of(monomial(Scalars.SIGN), 1) is None  # a gate tanh(α) of a whole branch has no sign of its own
    assert isinstance(g.group_of(Bound(rotations=ROTARY), 6), g.RotaryCommutant)
    assert g.group_of(FIXED.meet(METRIC), 4) is None
    assert g.group_of(Bound(rotations=ROTARY).meet(PERMUTATION), 6) is None


BOUNDS = [FREE, FIXED, METRIC, ONES, ONES_UP_TO_SIGN, Bound(rotations=ROTARY), *(monomial(s) for s in Scalars)]


@given(st.sampled_from(BOUNDS), st.sampled_from(BOUNDS), st.sampled_from(BOUNDS))
def test_meet_is_a_semilattice(a: Bound, b: Bound, c: Bound) -> None:
    assert a.meet(b) == b.meet(a)
    assert a.meet(b).meet(c) == a.meet(b.meet(c))
    assert a.meet(a) == a
    assert a.meet(FREE) == a


def test_several_scales_are_balanced_and_matched_together() -> None:
    group = g.TorusPermutation(7, (Scalars.NONZERO, Scalars.POSITIVE))
    powers = ((1, 0), (0, 1), (-1, -1), (1, 1))
    weights = {p: torch.randn(7, 30, generator=rng(i), dtype=torch.float64) for i, p in enumerate(powers)}
    planted = group.random((), rng(9))

    def balanced(rows: dict[Power, torch.Tensor]) -> dict[Power, torch.Tensor]:
        gauge = group.balance({p: r @ r.T for p, r in rows.items()})
        return {p: gauge.act(r.T, p).T for p, r in rows.items()}

    ours, theirs = balanced({p: planted.act(r.T, p).T for p, r in weights.items()}), balanced(weights)
    found = group.nearest({p: ours[p] @ theirs[p].T for p in powers})
    for p in powers:
        torch.testing.assert_close(found.act(theirs[p].T, p).T, ours[p])


@pytest.mark.parametrize(
    "group",
    [g.TorusPermutation(6, (Scalars.NONZERO,) * 70), g.Scaling(6, (0, 1, 2, 3, 4, 5), (Scalars.NONZERO,) * 70)],
    ids=["torus", "scaling"],
)
def test_more_signs_than_can_be_tried_are_found_too(group: g.ScaledPermutation) -> None:
    """A chain of depthwise convolutions has a scale for each of them, and each weight divides by one before it."""
    powers = [tuple({k - 1: -1, k: 1}.get(j, 0) for j in range(70)) for k in range(70)]
    powers.append(tuple({3: 1, 50: 1, 51: 2}.get(j, 0) for j in range(70)))
    weights = {p: torch.randn(6, 30, generator=rng(i), dtype=torch.float64) for i, p in enumerate(powers)}
    planted = group.random((), rng(9))
    planted = Monomial(planted.order, planted.scale.sign())
    found = group.nearest({p: planted.act(r.T, p).T @ r.T for p, r in weights.items()})
    for p, rows in weights.items():
        torch.testing.assert_close(found.act(rows.T, p), planted.act(rows.T, p))


@pytest.mark.parametrize("group", [*GROUPS, SCALING, *TURNS], ids=repr)
def test_the_lie_algebra_is_projected_on_orthogonally(group: g.Group) -> None:
    basis = group.tangents()
    shape = (len(group.scales), group.size) if isinstance(group, g.ScaledPermutation) else (group.size, group.size)
    x = torch.randn(shape, generator=rng(0), dtype=torch.float64)
    flat = basis.reshape(len(basis), x.numel())
    expected = (torch.linalg.pinv(flat) @ flat @ x.flatten()).view(shape)
    torch.testing.assert_close(group.algebra(x), expected.to(x))


GAINS, TURNED = (1, 0), (0, 1)


@pytest.mark.parametrize("group", TURNS, ids=repr)
@given(seed=st.integers(0, 10**6))
@settings(max_examples=20, deadline=None)
def test_quarter_turns_commute_with_rotations_and_exchange_what_multiplies(group: g.QuarterTurns, seed: int) -> None:
    element = group.random((), rng(seed))
    turn, rotation = element.as_matrix(TURNED), _rotation(group.rotations)
    torch.testing.assert_close(turn @ rotation, rotation @ turn)
    torch.testing.assert_close(turn @ turn.T, torch.eye(5, dtype=torch.float64))
    x, gain = torch.randn(2, 1, 5, generator=rng(seed), dtype=torch.float64)
    moved = element.act(x, TURNED) * element.act(gain, GAINS)
    torch.testing.assert_close(moved, element.act(x * gain, TURNED) * element.factors(GAINS))


@pytest.mark.parametrize("group", TURNS, ids=repr)
@given(seed=st.integers(0, 10**6))
@settings(max_examples=10, deadline=None)
def test_the_nearest_turns_are_the_best_of_all(group: g.QuarterTurns, seed: int) -> None:
    """Also where heads have signs beside them: those of each head are the best for the turns that are chosen."""
    cross = {p: torch.randn(5, 5, generator=rng(seed + i), dtype=torch.float64) for i, p in enumerate((GAINS, TURNED))}
    heads = torch.randn(3, 5, 5, generator=rng(seed + 2), dtype=torch.float64)

    def own(element: Element) -> float:
        return sum(float((element.as_matrix(p) * m).sum()) for p, m in cross.items())

    def beside(element: Element) -> float:
        by_entry = (element.as_matrix(TURNED) * heads).sum(-1)
        return float(by_entry[:, 4].abs().sum() + by_entry[:, :4].view(3, 2, 2).sum(1).abs().sum())

    every = list(_every_turn(group))
    assert float(group.score(cross)) == pytest.approx(max(own(e) for e in every))
    found = group.nearest_beside(cross, heads)
    assert own(found) + beside(found) == pytest.approx(max(own(e) + beside(e) for e in every))


def _every_turn(group: g.QuarterTurns) -> Iterator[Monomial]:
    """Written out: a sign for each class of the gains, one for each plane of what rotates, and turns of planes."""

    def by_label(labels: tuple[int, ...]) -> list[torch.Tensor]:
        kinds = sorted(set(labels))
        signs = itertools.product((1.0, -1.0), repeat=len(kinds))
        return [torch.tensor([s[kinds.index(k)] for k in labels], dtype=torch.float64) for s in signs]

    for gains, planes in itertools.product(by_label(group.classes), by_label(group.rotations.classes)):
        for turned in itertools.product((False, True), repeat=2):
            order, turn = torch.arange(5), torch.ones(5, dtype=torch.float64)
            for ((i, j),), yes in zip(group.rotations.planes, turned, strict=True):
                if yes:
                    order[i], order[j], turn[i] = j, i, -1.0
            yield Monomial(order, torch.stack([gains, planes * turn]))


@pytest.mark.parametrize("spectrum", ["even", "wide", "singular", "zero"])
def test_large_polar_factors(spectrum: str) -> None:
    """Newton's iteration finds what the decomposition finds, for any spectrum, and leaves to it what is singular."""
    n, rng = 520, torch.Generator().manual_seed(0)
    u, v = (torch.linalg.qr(torch.randn(n, n, generator=rng, dtype=torch.float64))[0] for _ in range(2))
    values = {"even": torch.linspace(1, 2, n), "wide": torch.logspace(0, -9, n), "singular": torch.linspace(0, 1, n),
              "zero": torch.zeros(n)}[spectrum].double()  # fmt: skip
    m = (u * values) @ v.T
    found = g.polar(m)
    assert float((found.T @ found - torch.eye(n)).abs().max()) < 1e-13
    assert abs(float((found * m).sum() - values.sum())) < 1e-9 * float(values.sum()) + 1e-12
    if spectrum in ("even", "wide"):
        assert float((found - u @ v.T).abs().max()) < (1e-12 if spectrum == "even" else 1e-5)


def test_newton_takes_the_large_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.linalg, "svd", None)
    m = torch.randn(512, 512, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    symmetric = g.polar(m).T @ m
    assert torch.allclose(symmetric, symmetric.T)
