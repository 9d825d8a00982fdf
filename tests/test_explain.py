"""What moves or pins an axis, in terms of the modelling code."""

from __future__ import annotations

import json
from pathlib import Path

import transformers
from conftest import tiny_gpt2, tiny_llama
from typer.testing import CliRunner

from hf_align.cli.app import app
from hf_align.symmetry.derivation.depth import derive_by_depth
from hf_align.symmetry.explain import explain


def source_line(package: str, entry: str) -> str:
    """The text of the line that an entry names."""
    file, number = entry.partition(" at ")[2].split(" ")[0].split(":")
    path = Path(transformers.__file__).parent / "models" / package / file
    return path.read_text(encoding="utf-8").splitlines()[int(number) - 1]


def test_every_axis_says_why_in_terms_of_the_modelling_code() -> None:
    found = explain(derive_by_depth(tiny_llama(num_hidden_layers=6)), "model.layers.4.self_attn.k_proj.weight")
    assert found["axes"] == ["4:model.layers.4.self_attn.qk^1", "8:residual^-1"]
    (norm,) = found["spaces"]["residual"]["because"]
    assert norm.startswith("norm: mean at modeling_llama.py:")
    assert ".pow(2).mean(" in source_line("llama", norm)
    rotary = found["spaces"]["model.layers.4.self_attn.qk"]["because"][0]
    assert rotary.startswith("rotary: ") and rotary.endswith(" in model.layers.4.self_attn")
    assert "rotate_half(k)" in source_line("llama", rotary)


def test_a_pinned_axis_names_what_pins_it() -> None:
    spec = derive_by_depth(tiny_llama())
    (lookup,) = explain(spec, "model.embed_tokens.weight")["pinned"]["axis 0"]
    assert "embed_tokens(" in source_line("llama", lookup)
    assert explain(spec, "model.layers.0.mlp.up_proj.weight")["pinned"] == {}
    for parameter in spec.parameters:
        for entry in (e for why in explain(spec, parameter)["pinned"].values() for e in why):
            assert "modeling_llama.py:" in entry or entry.startswith("fixed by FoldNorm: ")


def test_ops_inside_of_torch_are_named_by_the_line_that_called_them() -> None:
    found = explain(derive_by_depth(tiny_gpt2()), "transformer.h.0.mlp.c_fc.weight")
    reasons = found["spaces"]["residual"]["because"]
    assert any(r.startswith("norm: layer_norm at modeling_gpt2.py:") for r in reasons)
    assert "ln_1(" in source_line("gpt2", reasons[0])


def test_lines_that_layers_repeat_are_named_once_near_the_parameter() -> None:
    spec = derive_by_depth(tiny_gpt2(n_layer=6, tie_word_embeddings=True))
    found = explain(spec, "transformer.h.4.attn.c_attn.weight")
    heads = next(v for k, v in found["spaces"].items() if k.endswith("heads"))
    assert all(r.endswith("in transformer.h.4.attn") for r in heads["because"])
    lines = [r.partition(" in ")[0] for s in found["spaces"].values() for r in s["because"]]
    assert len(lines) == len(set(lines))


def test_the_command_answers_for_a_tied_name(tmp_path: Path) -> None:
    tiny_gpt2(tie_word_embeddings=True).save_pretrained(tmp_path)
    result = CliRunner().invoke(app, ["explain", str(tmp_path), "lm_head.weight", "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["parameter"] == "transformer.wte.weight"
