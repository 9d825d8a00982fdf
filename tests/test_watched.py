"""Values of words and numbers are seen by what modelling code compares them with."""

import inspect
import typing
from typing import Any

from hf_align.tracing.example import Example
from hf_align.tracing.watched import SHARES, lists, scalars


def forward(
    task: str = "plain",
    mode: typing.Optional[str] = None,  # noqa: UP045
    level: int | None = None,
    count: int = 0,
    cache: dict[str, int] | None = None,
    deep: bool = False,
    share: float = 1.0,
    kind=None,
    tasks=(),
    layers: list[int] | None = None,
) -> None:
    _ = task == "bent", task in ("wide", "plain"), mode != "far"
    _ = kind == "bent", "wide" in tasks, layers is not None and (3 in layers or layers[0] == 5)
    if (level is not None and level > 7) or count:
        raise ValueError("no such level")


def found(name: str, **given: Any) -> list[str | int]:
    return list(scalars(inspect.signature(forward).parameters[name], forward, Example(given, {})))


def test_what_is_compared_is_tried() -> None:
    assert found("task") == ["bent", "wide"]
    assert found("mode") == ["far"]
    assert found("level") == [7, 8, 0, 1, 6]  # that there is one may be all that matters
    assert found("count") == [1, -1]
    assert found("share")[:2] == [0.5, 0.3]  # two, for one alone would cut an axis in one place


def test_arguments_of_which_nothing_is_said_may_be_of_any_kind() -> None:
    assert found("kind") == ["bent", *SHARES]
    assert list(lists(inspect.signature(forward).parameters["tasks"], forward, Example({}, {}))) == [["wide"]]
    assert found("layers") == []


def test_lists_hold_what_code_looks_for() -> None:
    assert [
        value
        for value in lists(inspect.signature(forward).parameters["layers"], forward, Example({}, {}))
        if value[0] > 1
    ] == [[3], [5]]


def test_what_is_no_word_and_no_number_is_not_watched() -> None:
    assert found("cache") == [] and found("deep") == []


def test_what_does_not_run_is_no_fault() -> None:
    assert found("task", unknown=1) == []
