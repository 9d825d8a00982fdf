"""What random architectures have brought to light, each cut down to what it takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from assembled import AssembledForCausalLM

from traps.trap import Trap, cases, check, custom, lengths

Plan = dict[str, Any]

_NORM: Plan = {"kind": "layer", "gain": False, "bias": False, "offset": 0.0}
_PARTS: dict[str, Plan] = {
    "mlp": {"hidden": 6, "bias": False, "activation": "gelu", "gated": "none", "reordered": "none", "norm": None,
            "inner": False, "out bias": False, "back": False},
    "experts": {"experts": 4, "chosen": 2, "hidden": 4, "activation": "gelu", "bias": False, "router": "softmax",
                "renormalised": False},
    "convolution": {"size": 2, "bias": False, "activation": "none", "groups": "full", "dilation": 1},
    "attention": {"heads": 4, "shared": 4, "head": 6, "fused": "none", "bias": False, "out bias": False,
                  "rotary": {"kind": "halves", "size": 6, "theta": 100.0, "only first": False}, "qk norm": "none",
                  "norm": _NORM, "sinks": False, "talking": False, "keys are values": False, "gate": "none",
                  "copies": "in turn", "values": "none", "joined": "heads first", "scale": 0.5, "softcap": 0.0,
                  "alibi": False, "causal": True, "window": 0, "shares": "softmax"},
    "folded": {"bias": False, "two by two": True, "activation": "none"},
    "reshaped": {"reordered": "none", "activation": "none"},
    "map": {"rank": 4, "bias": False, "dead": "none"},
}  # fmt: skip


def norm(kind: str = "layer", **changes: Any) -> Plan:
    return {**_NORM, "kind": kind, **changes}


def step(part: str, *, before: Plan | None = None, after: Plan | None = None, join: str = "add",
         above: int = 0, parity: bool = False, **changes: Any) -> Plan:  # fmt: skip
    """A part in a stream, the plainest but for these changes."""
    return {"part": {"is": part, **_PARTS[part], **changes}, "before": before, "after": after, "last": None,
            "join": join, "above": above, "parity": parity, "at": "all"}  # fmt: skip


def found(name: str, *layers: Plan, order: tuple[int, ...] = (0,), width: int = 8, **changes: Any) -> Trap:
    """Layers of one step each."""
    plan = {"width": width, "layers": [[layer] for layer in layers], "order": order, "apart": False, "skips": {},
            "positions": False, "segments": False, "scale": 1.0, "mixture": False, "norm": None, "head bias": False,
            "softcap": False, "tied": False}  # fmt: skip
    build = custom(AssembledForCausalLM, plan={**plan, **changes}, tie_word_embeddings=False)
    return Trap(name, build, lengths())


TRAPS = [
    found("bias of a convolution", step("convolution", bias=True, size=3), width=6, positions=True),
    found(
        "two spaces inside one",
        step("reshaped", reordered="mean of pairs", before=norm()),
        step("experts", activation="normalised", before=norm("groups"), after=norm("groups")),
        order=(0, 1),
    ),
    found(
        "a gain and a layer that runs twice",
        step("mlp", before=norm("rms", gain=True)),
        step("mlp", before=norm("rms", gain=True)),
        order=(0, 1, 0),
        norm=norm("rms", gain=True),
    ),
    found("a map of each half of a token", step("folded", join="product", **{"two by two": False})),
    found(
        "one head that turns",
        step(
            "attention", fused="parts first", rotary={"kind": "halves", "size": 6, "theta": 100.0, "only first": True}
        ),
    ),
    found(
        "odd and beyond eight",
        step("map", join="gate", parity=True),
        step("experts", above=8),
        order=(0, 1, 0),
        positions=True,
    ),
    found(
        "beyond a number deep in the config",
        step("mlp"),
        step("folded", above=16, **{"two by two": False}),
        order=(0, 1),
    ),
    found(
        "a gate of halves that are interleaved", step("reshaped", reordered="interleave", join="gate"), positions=True
    ),
    found(
        "a gain of halves that are interleaved",
        step("mlp", hidden=10, gated="halves", reordered="largest", join="product"),
        step("reshaped", reordered="interleave", before=norm("rms", gain=True, bias=True)),
        order=(0, 1),
        width=6,
        norm=norm("layer", gain=True),
    ),
    found("halves of ten units", step("mlp", hidden=10, gated="halves", reordered="product of halves")),
]


@pytest.mark.parametrize("trap", cases("random", TRAPS))
def test_random(trap: Trap, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    check(trap, tmp_path, capsys)
