"""Architectures that nobody has thought of: aligned B is B, or the pair is refused; and the certificate knows."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
import torch
import transformers
from conftest import run
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from random_architectures import Plan, distance, fresh, load, logits, plans, rounded, save

from hf_align.errors import HfAlignError
from hf_align.symmetry.certificate.rounding import EXACT
from hf_align.symmetry.certificate.soundness import measured_soundness
from hf_align.symmetry.derivation.derive import derive
from hf_align.tracing.build import build_without_weights, read_config
from hf_align.tracing.modes import trace_modes
from hf_align.tracing.small.reduce import reduced
from hf_align.tracing.small.shrink import shrink

_SETTINGS = settings(deadline=None, database=None, derandomize=True, phases=(Phase.generate, Phase.shrink),
                     suppress_health_check=list(HealthCheck))  # fmt: skip
_ROUNDING = 300
"""How often what float32 rounding of all weights changes: alignment computes with them a few dozen times, and through
matrices that may be badly conditioned."""
_FLOOR = 1e-5


def outcome(plan: Plan, certify: bool = False, *options: str) -> str:
    """What became of two models of a plan: "kept", "refused", "not finite", or what is wrong, in capitals."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        a, b, out = (folder / name for name in ("a", "b", "out"))
        save(plan, 0, a)
        save(plan, 1, b)
        before = logits(load(b))
        if not all(t.isfinite().all() and t.abs().max() < 1e6 for t in before):
            return "not finite"
        bound = _FLOOR + _ROUNDING * distance(before, logits(rounded(b)))
        said = StringIO()
        try:
            with redirect_stdout(StringIO()), redirect_stderr(said):
                models = folder / "a", folder / "b", "-o", folder / "out"
                status = run("align", *models, "--trust-remote-code", "--quiet", *options)
        except Exception as error:
            return f"FAILED: {type(error).__name__}: {error}"
        if status == 2:
            lines = said.getvalue().strip().splitlines()
            expected = len(lines) == 1 and "fault of hf-align" not in lines[0]
            return f"refused: {lines[0]}" if expected else f"FAILED: {lines}"
        if status != 0:
            return f"FAILED: exit status {status}"
        change = distance(before, logits(load(out)))
        if certify and (found := certified(b)) is not None and found != (change < bound):
            return f"DISAGREES: certified {found}, change {change:.1e}, bound {bound:.1e}"
        return "kept" if change < bound else f"CHANGED: {change:.1e}, bound {bound:.1e}"


def certified(folder: Path) -> bool | None:
    """Whether the spec is sound, as the certificate measures it; None if the model is refused, or undecided itself. How
    many null directions there are is not counted: of some that takes minutes."""
    with redirect_stderr(StringIO()):
        try:
            config = read_config(folder, trust_remote_code=True)
            program = trace_modes(build_without_weights(reduced(config, 2) or shrink(config, 2)))
        except HfAlignError:
            return None
    error, doubt = measured_soundness(program, derive(program), torch.Generator().manual_seed(0))
    return None if doubt else error < EXACT


@pytest.fixture(scope="module", autouse=True)
def _modules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Where transformers copies modelling code to."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))
        patch.setattr(sys, "path", list(sys.path))
        yield


def hold(count: int, certified_one_in: int, draw: int = 0) -> None:
    """Draws so many architectures, and certifies some of them too."""

    @seed(draw)
    @settings(_SETTINGS, max_examples=count)
    @given(plans(), st.integers(0, certified_one_in - 1))
    def holds(plan: Plan, turn: int) -> None:
        found = outcome(plan, turn == certified_one_in - 1)
        assert found.startswith(("kept", "refused", "not finite")), found

    with fresh():
        holds()


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("count", "draw"), [(5, 0), (5, 1), pytest.param(2, 2, marks=pytest.mark.quick)])
def test_some_architectures(count: int, draw: int) -> None:
    hold(count, count, draw)


@pytest.mark.slow
@pytest.mark.timeout(4000)
@pytest.mark.parametrize("draw", range(3, 13))
def test_a_hundred_architectures(draw: int) -> None:
    hold(100, 20, draw)


SEGMENTS_AND_PARITY: Plan = json.loads("""
{"width": 8, "layers": [[{"part": {"is": "mlp", "hidden": 6, "bias": false, "activation": "softmax", "gated":
"neighbours", "reordered": "interleave", "norm": null, "inner": false, "out bias": false, "back": false}, "before":
{"kind": "layer", "gain": false, "bias": false, "offset": 0.0}, "after": null, "last": null, "join": "add", "above":
0, "parity": false, "at": "all"}], [{"part": {"is": "mlp", "hidden": 6, "bias": false, "activation": "leaky", "gated":
"none", "reordered": "none", "norm": null, "inner": false, "out bias": false, "back": false}, "before": {"kind":
"max", "gain": false, "bias": false, "offset": 0.0}, "after": null, "last": {"kind": "layer", "gain": true, "bias":
true, "offset": 0.0}, "join": "subtract", "above": 0, "parity": true, "at": "all"}]], "order": [0, 1], "apart": false,
"skips": {}, "positions": false, "segments": true, "scale": 1.0, "mixture": false, "norm": {"kind": "layer", "gain":
true, "bias": true, "offset": 0.0}, "head bias": true, "softcap": false, "tied": true}
""")
"""Its second layer runs where the length is even; what it reads depends on the segments."""


def test_an_argument_and_a_length_of_which_each_alone_does_no_harm() -> None:
    assert outcome(SEGMENTS_AND_PARITY) == "kept"


ONE_SPACE_IN_TWO_BLOCKS: Plan = json.loads("""
{"width": 8, "layers": [[{"part": {"is": "shifted", "bias": false}, "before": {"kind": "rms", "gain": true, "bias":
false, "offset": 0.0}, "after": null, "last": null, "join": "product", "above": 0, "parity": false, "at": "all"},
{"part": {"is": "mlp", "hidden": 6, "bias": false, "activation": "gelu", "gated": "none", "reordered": "none", "norm":
null, "inner": false, "out bias": false, "back": false}, "before": null, "after": null, "last": {"kind": "groups",
"gain": false, "bias": false, "offset": 0.0}, "join": "add", "above": 0, "parity": false, "at": "all"}]], "order":
[0, 0], "apart": false, "skips": {}, "positions": false, "segments": false, "scale": 1.0, "mixture": false, "norm":
{"kind": "rms", "gain": false, "bias": false, "offset": 0.0}, "head bias": false, "softcap": false, "tied": false}
""")
"""A stream is multiplied by a map of its halves, each of which the other half takes the place of."""


def test_a_product_of_another_structure_than_its_factors_stands_still() -> None:
    assert outcome(ONE_SPACE_IN_TWO_BLOCKS) == "kept"
