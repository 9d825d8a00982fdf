"""What an argument that is no tensor asks of a model is kept as well."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import run
from transformers import PreTrainedModel, StaticCache

from traps import asked as code
from traps import shares, shown, tables
from traps.trap import Calls, Trap, both, cases, check, custom, forward, ids_of, lengths, save


def beside(**arguments: Any) -> Calls:
    """What is returned beside the scores."""

    def returned(model: PreTrainedModel) -> torch.Tensor:
        (name,) = {"gates", "units"} & (found := model(ids_of(model, 7), **arguments)).keys()
        return torch.cat([t.flatten().to(model.dtype) for t in found[name]])

    return both(lengths(7), lambda _: {f"with {', '.join(arguments)}": returned})


def once(**arguments: Any) -> Calls:
    def calls(model: PreTrainedModel) -> dict[str, Any]:
        ids = ids_of(model, 7)
        more = {k: v(model, ids) if callable(v) else v for k, v in arguments.items()}
        return {f"with {', '.join(more)}": partial(forward, **{"input_ids": ids, **more})}

    return both(lengths(7), calls)


def _of_four_axes(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    length = ids.shape[1]
    return torch.ones(len(ids), 1, length, length, dtype=torch.bool).tril()


def _left_padded(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    return (torch.arange(ids.shape[1]) >= torch.arange(len(ids))[:, None]).long()


def _in_static_cache(model: PreTrainedModel) -> torch.Tensor:
    cache = StaticCache(config=model.config, max_cache_len=9)
    return forward(model, input_ids=ids_of(model, 7), past_key_values=cache, use_cache=True)


def _embedded(model: PreTrainedModel) -> torch.Tensor:
    return forward(model, inputs_embeds=model.get_input_embeddings()(ids_of(model, 7)))


def going_on(count: int = 1, **beside: Any) -> Calls:
    """The last tokens, behind what was read of the first ones."""

    def read(model: PreTrainedModel) -> torch.Tensor:
        ids = ids_of(model, 9)
        found = model(input_ids=ids[:, :-count], use_cache=True)
        more = {k: v(model, ids) if callable(v) else v for k, v in beside.items()}
        more = {k: v[:, -count:] if k in ("position_ids", "labels") else v for k, v in more.items()}
        kept = found.past_key_values
        return forward(model, input_ids=ids[:, -count:], past_key_values=kept, use_cache=True, **more)

    return lambda _: {f"{count} with a cache": read}


def _ones(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(ids)


def _places(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    return torch.arange(ids.shape[1]).expand_as(ids)


def _in_static_cache_with_mask(model: PreTrainedModel) -> torch.Tensor:
    cache = StaticCache(config=model.config, max_cache_len=9)
    mask = torch.ones(2, 9, dtype=torch.long)
    return forward(model, input_ids=ids_of(model, 7), past_key_values=cache, use_cache=True, attention_mask=mask)


def _same(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    return ids


ASKED = {
    "ADict": once(extras={"scale": torch.ones(1)}),
    "AList": once(extras=[torch.ones(1), torch.ones(1)]),
    "AFlagOrNone": once(bend=True),
    "AWord": once(task="bent"),
    "AWordOrNone": once(task="bent"),
    "AWordInAnyLetters": once(task="Bent "),
    "AKind": once(layers=(0, 1)),
    "ANumber": once(level=3),
    "Above": once(level=9),
    "Below": once(scale=-0.5),
    "Begins": once(task="bent"),
    "Inside": once(share=0.4),
    "DetachedTower": lengths(7),
    "NoCache": once(use_cache=False),
    "Attentions": once(output_attentions=True),
    "Labelled": once(labels=lambda model, ids: ids),
    "LeftOut": once(labels=lambda model, ids: torch.where(ids < 7, -100, ids)),
    "FourAxes": once(attention_mask=_of_four_axes),
    "KeptByNumber": once(logits_to_keep=lambda model, ids: torch.tensor([1, 6])),
    "KeptFrom": once(logits_to_keep=3),
    "NamedSoThat": once(bent_so=True),
    "Nameless": once(kind="bent"),
    "HandedOn": once(bend=True),
    "AllSeen": once(attention_mask=lambda model, ids: torch.ones_like(ids)),
    "MaskOfTruths": once(attention_mask=lambda model, ids: _left_padded(model, ids).bool()),
    "LeftPadded": once(attention_mask=_left_padded),
    "MaskOfFloats": once(attention_mask=lambda model, ids: _left_padded(model, ids).float()),
    "AShare": once(share=1.0),
    "ANumberOrNone": once(level=4),
    "Truncated": both(once(size=3), once(size=7)),
    "TruncatedByDefault": both(once(size=3), once(size=7)),
    "KeptUnits": both(once(units=3), once(units=7)),
}
BESIDE = {
    "Listed": once(skipped=[1]),
    "BendAndGoesOnTower": going_on(bend=True),
    "LabelsAndMaskedTower": once(labels=_same, attention_mask=_left_padded),
    "UncachedAndMaskedTower": once(use_cache=False, attention_mask=_left_padded),
    "FixedAndMaskedTower": lambda model: {"with a static cache": _in_static_cache_with_mask},
    "MaskedAndGoesOnTower": going_on(attention_mask=_ones),
    "PlacedAndGoesOnTower": going_on(position_ids=_places),
    "SeveralAndGoesOnTower": going_on(3),
    "FarOut": once(position_ids=lambda model, ids: _places(model, ids) + 600),
    "NamedAndMaskedTower": once(named=True, attention_mask=_left_padded),
    "HeadsAndStatesTower": once(output_attentions=True, output_hidden_states=True),
    "LabelsAndGoesOnTower": going_on(labels=_same),
}
TABLES = {
    "InATable": once(task="bent"),
    "InAConfig": once(task="bent"),
    "InASet": once(task="bent"),
    "AmongModules": once(task="bent"),
    "ByNumber": once(level=5),
    "InAPackage": once(function="relu"),
    "Counted": once(times=1),
    "Heads": once(head_mask=torch.tensor([[1.0, 0.2, 0.0, 0.7], [0.0, 1.0, 0.5, 1.0]])),
}
SHARES = {
    **{name: both(once(share=0.25), once(share=0.7)) for name in ("Share", "ShareUnsaid", "ShareOrNone", "ShareNamed",
                                                                  "UnitsByNumber")},
    "Dropped": both(once(dropped=0.25), once(dropped=0.6)),
    **{name: both(once(count=3), once(count=7)) for name in ("UnitsNamed", "UnitsByDefault")},
    "Nested": both(once(dim=3), once(dim=8)),
    "Groups": both(once(groups=5), once(groups=10)),
}  # fmt: skip
SHOWN = {"Gates": dict(output_gates=True), "Largest": dict(return_units=3), "LargestUnsaid": dict(return_units=3)}
_SIZES: dict[str, Any] = {"InAConfig": {"bends": {"plain": False, "bent": True}}, "Heads": {"num_attention_heads": 4}}
TRAPS = [
    *(Trap(name, custom(getattr(tables, name), **_SIZES.get(name, {})), calls) for name, calls in TABLES.items()),
    *(Trap(name, custom(getattr(shares, name)), calls) for name, calls in SHARES.items()),
    *(Trap(name, custom(getattr(shown, name)), beside(**asked)) for name, asked in SHOWN.items()),
    *(Trap(name, custom(getattr(code, name)), calls, may_refuse=True) for name, calls in BESIDE.items()),
    *(Trap(name, custom(getattr(code, name)), calls) for name, calls in ASKED.items()),
    *(Trap(name, custom(getattr(code, name)), lengths(3, 9)) for name in code.BY_HAND),
    Trap("Cut", custom(shares.Cut), once(cut=slice(2, 5)), may_refuse=True),
    Trap("FixedCache", custom(code.FixedCache), lambda model: {"with a static cache": _in_static_cache}),
    Trap("Embedded", custom(code.Embedded), lambda model: {"with tokens looked up": _embedded}),
]


@pytest.mark.parametrize("trap", cases("asked", TRAPS))
def test_asked(trap: Trap, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check(trap, tmp_path, capsys)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["PlainTower", "BentInHalf"])
def test_what_the_dtype_asks_for(
    kind: str, stored: torch.dtype, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed, name in enumerate("ab"):
        save(Trap(kind, custom(getattr(code, kind)), then=lambda model, rng: model.to(stored)), seed, tmp_path / name)
    status = run("align", tmp_path / "a", tmp_path / "b", "-o", tmp_path / "out", "--quiet", "--trust-remote-code")
    assert status == (2 if kind == "BentInHalf" else 0)
    assert "loaded as bfloat16" in capsys.readouterr().err or kind == "PlainTower"
