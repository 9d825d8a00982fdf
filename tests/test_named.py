"""What no code of a model names can be read by no call. Anything that may name it counts."""

from __future__ import annotations

import pytest
from loaded_for_all import LoadedForAll
from loaded_late import LoadedLate
from named_parts import (
    AllOfThem,
    Asked,
    AskedForItsKind,
    Below,
    Borrower,
    ByAnotherName,
    ByItsClass,
    ByItsShape,
    BySelf,
    ByTheHandOfAnother,
    ByWord,
    InAFunction,
    InAList,
    KeptForLater,
    Numbered,
    OfAnother,
    Plain,
    ReadByAnotherName,
    Spare,
    SpareConfig,
    Spared,
    Weight,
)
from tabled import Tabled
from torch import Tensor, nn

from hf_align.symmetry.derivation.depth import derive_by_depth
from hf_align.tracing.named import never_named


@pytest.mark.parametrize("kind", [Plain, Asked, AskedForItsKind, OfAnother])
def test_a_part_that_only_stands_there_is_named_by_nothing(kind: type[nn.Module]) -> None:
    weights = ["left_over.weight", "left_over.bias", "read.weight"]
    assert never_named(kind(), weights) == ("left_over.weight", "left_over.bias")


@pytest.mark.parametrize(
    "kind",
    [BySelf, Below, ByAnotherName, ReadByAnotherName, ByWord, Numbered, AllOfThem, InAFunction, InAList, KeptForLater,
     ByItsClass, ByItsShape, ByTheHandOfAnother, Borrower, LoadedForAll, LoadedLate, Tabled, Weight],
)  # fmt: skip
def test_whatever_may_name_a_part_counts(kind: type[nn.Module]) -> None:
    model = kind()
    weights = [n for n, _ in model.named_parameters() if not n.startswith(("read", "left_over"))]
    assert weights and not never_named(model, weights)


def reads_it(module: nn.Module, x: Tensor) -> Tensor:
    return module.left_over(x)  # type: ignore[operator]


def test_code_that_stands_elsewhere_may_name_anything() -> None:
    """A class that was made by hand, a method of another file, and one that is the model's alone."""
    by_hand = type("Made", (Plain,), {"__module__": Plain.__module__})()
    nowhere = type("Made", (Plain,), {"__module__": "nowhere"})()
    patched = type("Patched", (Plain,), {"other": reads_it})
    patched.__module__, patched.__qualname__ = Plain.__module__, Plain.__qualname__
    alone = Plain()
    alone.other = reads_it  # type: ignore[assignment]
    for model in (by_hand, nowhere, patched(), alone):
        assert not never_named(model, ["left_over.weight"])
    assert never_named(Plain(), ["left_over.weight"])


@pytest.mark.parametrize(("kind", "moves"), [(Spare, True), (Spared, False)])
def test_hidden_units_move_beside_what_nothing_names(
    kind: type[Spare], moves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = SpareConfig(architectures=[kind.__name__])
    monkeypatch.setattr("hf_align.tracing.build.model_class", lambda config: kind._from_config)
    spec = derive_by_depth(config)
    assert set(spec.unread) == {"unsaid.weight", "unsaid.bias"}
    (factor,) = spec.parameters["up.weight"][0][0]
    assert (factor.space is not None) == moves
