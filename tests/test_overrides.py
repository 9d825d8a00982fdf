"""Reviewed overrides lower freely, raise only what the certificate allows, and follow their schema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
import transformers
import yaml
from conftest import ROOT, matched, tiny_bert, tiny_gpt2, tiny_llama
from golden.regenerate import GENERATED
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel, Qwen3Config
from typer.testing import CliRunner

from hf_align.cli.app import app
from hf_align.errors import HfAlignError
from hf_align.symmetry.alignment import AlignedWeights
from hf_align.symmetry.certificate.certify import certify
from hf_align.symmetry.certificate.random_copy import (
    random_elements,
    random_inputs,
    random_weights,
    transform,
    with_eps,
)
from hf_align.symmetry.derivation.depth import derive_by_depth
from hf_align.symmetry.gauges.canonical import CanonicalWeights
from hf_align.symmetry.groups import GeneralLinear, Orthogonal, Permutation, QuarterTurns, Scaling, SignedPermutation
from hf_align.symmetry.overrides.override_file import OverrideFile, read_overrides, shipped
from hf_align.symmetry.overrides.overrides import reviewer, symmetries
from hf_align.symmetry.spec import SymmetrySpec
from hf_align.tracing.execute import execute
from hf_align.tracing.trace import trace
from hf_align.witness.calls import modes

REASON = "only for this test"
UP = {"parameter": "model.layers.*.mlp.up_proj.weight", "axis": 0}
RESIDUAL = {"parameter": "model.embed_tokens.weight", "axis": 1}
GAIN = {"parameter": "model.layers.*.self_attn.q_norm.weight", "axis": 0}
TINY = dict(vocab_size=23, hidden_size=8, intermediate_size=6, num_hidden_layers=2, num_attention_heads=4, head_dim=4,
            num_key_value_heads=2, max_position_embeddings=16, tie_word_embeddings=False)  # fmt: skip


def query(factor: int, layer: str = "*") -> dict[str, object]:
    return {"parameter": f"model.layers.{layer}.self_attn.q_proj.weight", "axis": 0, "factor": factor}


def write(folder: Path, model_type: str, *overrides: Mapping[str, object]) -> Path:
    entries = [{"reason": REASON, **o} for o in overrides]
    (folder / f"{model_type}.yaml").write_text(yaml.safe_dump({"overrides": entries}), encoding="utf-8")
    return folder


def llama(**changes: object) -> PretrainedConfig:
    return tiny_llama(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, **changes)


def change_of_outputs(config: PretrainedConfig, spec: SymmetrySpec) -> float:
    program, rng = trace(config), torch.Generator().manual_seed(0)
    weights, inputs = random_weights(spec, rng), random_inputs(program, rng)
    moved = transform(spec, CanonicalWeights(weights, spec.gauges), random_elements(spec, rng))
    before, after = execute(program, weights, inputs), execute(program, moved, inputs)
    return float((before - after).abs().max() / before.abs().max())


def matched_weights(spec: SymmetrySpec) -> Mapping[str, Tensor]:
    a, b = (random_weights(spec, torch.Generator().manual_seed(seed)) for seed in (0, 1))
    return dict(AlignedWeights(b, spec, matched(spec, a, b).b))


QUICK = ("vit.yaml", "bert.yaml")


@pytest.mark.parametrize(
    "path",
    [pytest.param(p, id=p.name, marks=[pytest.mark.slow] if p.suffix == ".yaml" and p.name not in QUICK else [])
     for p in GENERATED],
)  # fmt: skip
def test_generated_files_are_up_to_date(path: Path) -> None:
    """JSON is YAML, too."""
    assert yaml.safe_load(path.read_text(encoding="utf-8")) == yaml.safe_load(GENERATED[path]()), "make golden"


def test_nothing_is_changed_where_nothing_is_reviewed(tmp_path: Path) -> None:
    assert symmetries(llama(), tmp_path) == derive_by_depth(llama())


def test_pin(tmp_path: Path) -> None:
    spec = symmetries(llama(), write(tmp_path, "llama", {"action": "pin", "space": UP}))
    assert [n for n in spec.spaces if "mlp" in n] == []
    assert spec.as_json()["parameters"]["model.layers.1.mlp.down_proj.weight"] == ["8:residual^1", "6"]  # type: ignore[index]
    assert spec.pinned["model.layers.1.mlp.hidden"].reasons[0].role == f"override ({REASON})"
    assert change_of_outputs(llama(), spec) < 1e-9
    assert matched_weights(spec).keys() == spec.parameters.keys()


def test_pinned_heads_still_number_what_differs_along_them(tmp_path: Path) -> None:
    spec = symmetries(llama(), write(tmp_path, "llama", {"action": "pin", "space": query(0, "0")}))
    assert spec.spaces["model.layers.0.self_attn.heads"].group is None
    assert spec.spaces["model.layers.1.self_attn.heads"].group == Permutation(2)
    assert spec.spaces["model.layers.0.self_attn.qk"].index == ("model.layers.0.self_attn.heads",)
    assert change_of_outputs(llama(), spec) < 1e-9
    assert matched_weights(spec).keys() == spec.parameters.keys()


@pytest.mark.parametrize(("space", "signs"), [(query(2), 0), (GAIN, 2)], ids=["signs", "turns"])
def test_pinning_one_of_two_that_move_an_axis(space: Mapping[str, object], signs: int, tmp_path: Path) -> None:
    """Turns move gains as well, and would move them alone where the heads stand still; signs are of the heads."""
    config = Qwen3Config(**TINY, architectures=["Qwen3ForCausalLM"])
    free, spec = symmetries(config), symmetries(config, write(tmp_path, "qwen3", {"action": "pin", "space": space}))
    moving = [[s.group for s in found.spaces.values() if isinstance(s.group, Scaling)] for found in (free, spec)]
    assert len(moving[0]) == 4 and len(moving[1]) == signs
    assert not any(isinstance(group, QuarterTurns) for group in moving[1])
    assert change_of_outputs(config, spec) < 1e-9
    assert matched_weights(spec).keys() == spec.parameters.keys()


@pytest.mark.parametrize("group", [Permutation, SignedPermutation])
def test_lower(group: type[Permutation | SignedPermutation], tmp_path: Path) -> None:
    entry = {"action": "bound", "space": RESIDUAL, "group": group.__name__}
    spec = symmetries(llama(), write(tmp_path, "llama", entry))
    assert spec.spaces["residual"].group == group(8)
    assert change_of_outputs(llama(), spec) < 1e-9
    assert matched_weights(spec).keys() == spec.parameters.keys()


def test_tie(tmp_path: Path) -> None:
    heads_only = {"action": "tie", "spaces": [query(0, "0"), query(0, "1")]}
    with pytest.raises(HfAlignError, match=r"what is permuted inside must be tied: .*0.*subheads, .*1.*subheads"):
        symmetries(llama(), write(tmp_path, "llama", heads_only))
    both = (heads_only, {"action": "tie", "spaces": [query(1, "0"), query(1, "1")]})
    spec = symmetries(llama(), write(tmp_path, "llama", *both))
    heads = "model.layers.0.self_attn.heads"
    assert "model.layers.1.self_attn.heads" not in spec.spaces
    assert spec.spaces["model.layers.1.self_attn.value"].index == (heads,)
    assert {f"model.layers.{i}.self_attn.k_proj.weight" for i in (0, 1)} <= set(spec.uses(heads))
    assert change_of_outputs(llama(), spec) < 1e-9
    assert matched_weights(spec).keys() == spec.parameters.keys()


def test_lowering_inside_of_heads_leaves_matching_whole(tmp_path: Path) -> None:
    value = {"parameter": "model.layers.*.self_attn.v_proj.weight", "axis": 0, "factor": 1}
    spec = symmetries(llama(), write(tmp_path, "llama", {"action": "bound", "space": value, "group": "Permutation"}))
    assert matched_weights(spec).keys() == spec.parameters.keys()


def test_tied_elements_differ_only_over_what_both_differ_over(tmp_path: Path) -> None:
    values = [{"parameter": f"model.layers.{i}.self_attn.v_proj.weight", "axis": 0, "factor": 1} for i in (0, 1)]
    spec = symmetries(llama(), write(tmp_path, "llama", {"action": "tie", "spaces": values}))
    assert spec.spaces["model.layers.0.self_attn.value"].index == ()
    assert change_of_outputs(llama(), spec) < 1e-9


def test_wildcards_tie_layer_by_layer(tmp_path: Path) -> None:
    entry = {"action": "tie", "spaces": [UP, {"parameter": "model.layers.*.self_attn.v_proj.weight", "axis": 0,
                                              "factor": 1}]}  # fmt: skip
    config = llama(intermediate_size=4)
    spec = symmetries(config, write(tmp_path, "llama", entry))
    assert [n for n in spec.spaces if "value" in n] == []
    assert {spec.spaces[f"model.layers.{i}.mlp.hidden"].index for i in (0, 1)} == {()}
    assert change_of_outputs(config, spec) < 1e-9


def _bert(part: str, axis: int) -> dict[str, object]:
    return {"parameter": f"bert.encoder.layer.*.{part}.weight", "axis": axis}


@pytest.mark.parametrize(
    ("space", "group"),
    [(_bert("intermediate.dense", 0), "Orthogonal"), (_bert("intermediate.dense", 0), "SignedPermutation"),
     (_bert("output.dense", 0), "SignedPermutation"),
     ({"parameter": "bert.embeddings.position_embeddings.weight", "axis": 0}, "Permutation")],
)  # fmt: skip
def test_raising_beyond_the_certificate_is_refused(space: dict[str, object], group: str, tmp_path: Path) -> None:
    folder = write(tmp_path, "bert", {"action": "bound", "space": space, "group": group})
    with pytest.raises(HfAlignError, match=r"bert.yaml raises .*, which changes the function: outputs move by \d"):
        symmetries(tiny_bert(), folder)


def test_raising_within_the_certificate_is_accepted(tmp_path: Path) -> None:
    """Back to what was derived, after a lower bound: the certificate does not care how a group came about."""
    down = {"action": "bound", "space": RESIDUAL, "group": "Permutation"}
    up = {"action": "bound", "space": RESIDUAL, "group": "Orthogonal"}
    assert symmetries(llama(), write(tmp_path, "llama", down, up)).spaces["residual"].group == Orthogonal(8)
    value = {"parameter": "**.value.weight", "axis": 0, "factor": 1}
    entries = [{"action": "pin", "space": value}, {"action": "bound", "space": value, "group": "Orthogonal"}]
    spec = symmetries(tiny_bert(), write(tmp_path, "bert", *entries))
    raised = next(s for n, s in spec.spaces.items() if n.endswith("attention.value"))
    assert (raised.group, raised.index) == (Orthogonal(4), ())
    assert isinstance(derive_by_depth(tiny_bert()).spaces[raised.name].group, GeneralLinear)


def test_what_a_small_copy_cannot_show_is_refused(tmp_path: Path) -> None:
    """Grouped queries shrink to one key head, and one head permutes whatever the model does."""
    heads = query(0)
    entries = [{"action": "pin", "space": heads}, {"action": "bound", "space": heads, "group": "Permutation"}]
    with pytest.raises(HfAlignError, match=r"small copy"):
        symmetries(llama(), write(tmp_path, "llama", *entries))


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"action": "pin", "space": {**UP, "axis": 2}}, "up_proj.weight has 2 axes, none is number 2"),
        ({"action": "pin", "space": {"parameter": "model.layer.*", "axis": 0}}, "no parameter matches model.layer.*"),
        ({"action": "pin", "space": {**query(0), "factor": None}}, "carries 3 spaces; give `factor`"),
        ({"action": "pin", "space": query(3)}, "carries 3 spaces, none is number 3"),
        ({"action": "bound", "space": query(0), "group": "Orthogonal"}, "can only be permuted or pinned"),
        ({"action": "bound", "space": UP, "group": "Orthogonal"}, "other powers than 1 and -1"),
        ({"action": "bound", "space": {**RESIDUAL, "axis": 0}, "group": "GeneralLinear"}, "can only be raised to"),
        ({"action": "tie", "spaces": [UP, RESIDUAL]}, "the wildcards of the two spaces do not stand for the same"),
        ({"action": "tie", "spaces": [query(0, "0"), query(2, "0")]}, "has 2 dimensions but"),
        ({"action": "bound", "space": UP, "group": "Unitary"}, "overrides.0.bound.group: Input should be"),
        ({"action": "pin", "space": UP, "reason": ""}, "overrides.0.pin.reason: "),
        ({"action": "free", "space": UP}, "overrides.0: Input tag 'free'"),
        ({"action": "pin", "space": UP, "why": "not a field"}, "overrides.0.pin.why: Extra inputs"),
    ],
)  # fmt: skip
def test_mistakes_are_named(entry: dict[str, object], message: str, tmp_path: Path) -> None:
    with pytest.raises(HfAlignError) as raised:
        symmetries(llama(), write(tmp_path, "llama", entry))
    assert message in str(raised.value) and "llama.yaml" in str(raised.value)


def test_files_that_are_no_overrides(tmp_path: Path) -> None:
    (tmp_path / "llama.yaml").write_text("overrides: [", encoding="utf-8")
    with pytest.raises(HfAlignError, match=r"llama.yaml is not valid YAML"):
        read_overrides("llama", tmp_path)
    with pytest.raises(HfAlignError, match=r"is not a folder of specs"):
        read_overrides("llama", tmp_path / "absent")
    (tmp_path.parent / "outside.yaml").write_text("overrides: [", encoding="utf-8")
    assert read_overrides("../outside", tmp_path) is None


def test_what_ships_follows_the_schema_and_applies() -> None:
    assert (shipped() / "schema.json").is_file()
    assert shipped() == ROOT / "specs"
    for path in shipped().glob("*.yaml"):
        assert isinstance(OverrideFile.model_validate(yaml.safe_load(path.read_text(encoding="utf-8"))), OverrideFile)


def test_commands_read_overrides_and_say_why(tmp_path: Path) -> None:
    model, specs = tmp_path / "model", tmp_path / "specs"
    specs.mkdir()
    tiny_gpt2().save_pretrained(model)
    name = "transformer.h.0.mlp.c_fc.weight"
    write(specs, "gpt2", {"action": "pin", "space": {"parameter": name, "axis": 1}})
    found = CliRunner().invoke(app, ["explain", str(model), name, "--specs", str(specs), "--json"])
    assert json.loads(found.stdout)["pinned"]["axis 1"][0] == f"override ({REASON}): pin at gpt2.yaml in the model"
    listed = CliRunner().invoke(app, ["spec", str(model), "--specs", str(specs), "--json"])
    assert json.loads(listed.stdout)["parameters"][name][1] == "6"


@pytest.mark.slow
def test_the_command_certifies_the_reviewed_spec(tmp_path: Path) -> None:
    model, specs = tmp_path / "model", tmp_path / "specs"
    specs.mkdir()
    tiny_gpt2().save_pretrained(model)
    write(specs, "gpt2", {"action": "pin", "space": {"parameter": "transformer.h.*.attn.c_attn.weight", "axis": 0}})
    derived, reviewed = (
        CliRunner().invoke(app, ["certify", str(model), "--layers", "1", "--json", *options])
        for options in ([], ["--specs", str(specs)])
    )
    before, after = (json.loads(r.stdout)["complete"] for r in (derived, reviewed))
    assert (derived.exit_code, reviewed.exit_code) == (0, 1)
    assert before["found"] == before["nullity"]
    assert after["found"] < after["nullity"]


def test_the_certificate_is_of_the_reviewed_spec(tmp_path: Path) -> None:
    """Of the first call alone; the command takes all."""
    write(tmp_path, "gpt2", {"action": "pin", "space": {"parameter": "transformer.h.*.attn.c_attn.weight", "axis": 0}})
    program = trace(with_eps(tiny_gpt2(), 1e-2), length=10)
    derived = certify(tiny_gpt2(), traced=program)
    reviewed = certify(tiny_gpt2(), traced=program, review=reviewer("gpt2", tmp_path))
    assert derived.sound and derived.complete
    assert reviewed.sound and reviewed.found < reviewed.nullity


class AskingConfig(PretrainedConfig):
    model_type = "asking"

    def __init__(self, hint_size: int = 5, **rest: object) -> None:
        super().__init__(**rest)
        self.hint_size = hint_size


class Asking(PreTrainedModel):
    """Looks at the order of its hidden units where it is given a hint of three dimensions, which nobody guesses."""

    config_class = AskingConfig

    def __init__(self, config: AskingConfig) -> None:
        super().__init__(config)
        self.embed, self.up, self.head = nn.Embedding(11, 8), nn.Linear(8, 6), nn.Linear(6, 11)
        self.side, self.spare = nn.Linear(config.hint_size, 6), nn.Linear(6, 6)
        self.post_init()

    def forward(self, input_ids: Tensor, hint: Tensor | None = None, level: int = 0) -> dict[str, Tensor]:
        x = torch.relu(self.up(self.embed(input_ids)))
        if hint is not None:
            rows, _, size = hint.shape
            assert (rows, size) == (len(input_ids), self.config.hint_size) and level == 3
            x = (x + self.side(hint).sum(1, keepdim=True)).flip(-1)
        return {"logits": self.head(x)}


transformers.AutoConfig.register("asking", AskingConfig)
transformers.AutoModel.register(AskingConfig, Asking)
CALL = {"action": "call", "name": "a text with a hint",
        "arguments": {"hint": {"shape": ["batch", 3, "hint_size"]}, "level": 3}}  # fmt: skip
SPARE = {"action": "unused", "parameter": "spare.*"}


def moves_the_hidden_units(spec: SymmetrySpec) -> bool:
    return any(factor.space is not None for segment in spec.parameters["up.weight"][0] for factor in segment)


def test_a_call_that_no_trying_finds(tmp_path: Path) -> None:
    config = AskingConfig(architectures=["Asking"])
    assert set(symmetries(config).unread) == {"side.weight", "side.bias", "spare.weight", "spare.bias"}
    assert not moves_the_hidden_units(symmetries(config))  # what reads no call may meet them
    unseen = symmetries(config, write(tmp_path, "asking", {"action": "unused", "parameter": "s*.*"}))
    assert moves_the_hidden_units(unseen) and not unseen.unread
    seen = symmetries(config, write(tmp_path, "asking", CALL, SPARE))
    assert seen.modes[-1] == "a text with a hint" and not seen.unread
    assert not moves_the_hidden_units(seen)  # their order matters there
    result = certify(config, review=reviewer("asking", tmp_path))
    assert result.sound and "a text with a hint" in result.modes and not result.unread


def test_what_is_raised_is_checked_in_all_modes(tmp_path: Path) -> None:
    """Without the hint, the hidden units could be in any order."""
    up = {"action": "bound", "space": {"parameter": "up.weight", "axis": 0}, "group": "Permutation"}
    with pytest.raises(HfAlignError, match=r"raises .*, which changes the function: outputs move by \d"):
        symmetries(AskingConfig(architectures=["Asking"]), write(tmp_path, "asking", CALL, SPARE, up))


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({**CALL, "arguments": {"hint": {"shape": ["batch", 3, 4]}, "level": 3}}, "cannot be called with a text with"),
        ({**CALL, "arguments": {"hint": {"shape": ["hints"]}}}, "hints is no size"),
        ({**CALL, "arguments": {"hint": {"shape": [2], "values": [1, 2, 3]}}}, "do not fill"),
        ({**CALL, "arguments": {}}, "at least 1 item"),
        ({**SPARE, "parameter": "spear.*"}, "no parameter matches spear"),
    ],
)
def test_a_call_that_fails_is_refused(entry: dict[str, object], said: str, tmp_path: Path) -> None:
    with pytest.raises(HfAlignError, match=said):
        symmetries(AskingConfig(architectures=["Asking"]), write(tmp_path, "asking", entry))


def test_a_call_that_was_added_is_witnessed(tmp_path: Path) -> None:
    config = AskingConfig(architectures=["Asking"])
    spec = symmetries(config, write(tmp_path, "asking", CALL, SPARE))
    model = Asking(config).eval()
    cpu = torch.device("cpu")
    found, failed = modes(model, spec.modes, lambda case: case.answers(model, cpu, torch.float32), spec.given)
    assert "a text with a hint" in [mode.name for mode in found] and not failed
