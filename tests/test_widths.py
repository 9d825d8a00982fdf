"""Models of different widths: the narrower one is widened exactly, and merges; what cannot grow is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from conftest import run, save, tiny_bert, tiny_gpt2, tiny_llama, tiny_vit
from transformers import PretrainedConfig

from hf_align.errors import IncompatibleModels
from hf_align.opening.pairs import open_pair
from hf_align.symmetry.certificate.random_copy import random_inputs, random_weights
from hf_align.symmetry.overrides.overrides import symmetries
from hf_align.symmetry.widening import WidenedWeights
from hf_align.tracing.execute import execute
from hf_align.tracing.trace import trace

EXACT = {
    "RMSNorm": (tiny_llama, dict(), dict(hidden_size=14, intermediate_size=9)),
    "RMSNorm, more heads": (tiny_llama, dict(num_attention_heads=4, num_key_value_heads=2),
                            dict(hidden_size=12, num_attention_heads=6, num_key_value_heads=3)),
    "RMSNorm, more query heads": (tiny_llama, dict(), dict(num_attention_heads=4)),
    "LayerNorm": (tiny_gpt2, dict(n_embd=8), dict(n_embd=12, n_head=3, n_inner=7)),
    "LayerNorm, images": (tiny_vit, dict(), dict(hidden_size=12, num_attention_heads=3, intermediate_size=7)),
}  # fmt: skip


def tiny_gemma(**changes: int) -> PretrainedConfig:
    sizes = dict(vocab_size=11, hidden_size=8, intermediate_size=6, num_hidden_layers=1, num_attention_heads=2,
                 num_key_value_heads=1, head_dim=4, max_position_embeddings=16)  # fmt: skip
    return transformers.GemmaConfig(**{**sizes, "architectures": ["GemmaForCausalLM"], **changes})


@pytest.mark.parametrize("kind", EXACT)
def test_a_widened_model_computes_the_same(kind: str) -> None:
    """In float64, with random weights: eps and all."""
    build, small, large = EXACT[kind]
    configs = [build(**small), build(**{**small, **large})]
    programs = [trace(c) for c in configs]
    rng = torch.Generator().manual_seed(0)
    specs = [symmetries(c) for c in configs]
    weights, inputs = random_weights(specs[0], rng), random_inputs(programs[0], rng)
    widened = WidenedWeights(weights, *specs)
    before, after = (execute(p, dict(w), inputs) for p, w in zip(programs, (weights, widened), strict=True))
    assert float((after - before).abs().max()) < 1e-9 * float(before.abs().max())
    assert float(before.std()) > 1e-3


def test_without_the_stretch_the_function_changes() -> None:
    configs = [tiny_llama(), tiny_llama(hidden_size=14)]
    programs = [trace(c) for c in configs]
    rng = torch.Generator().manual_seed(0)
    specs = [symmetries(c) for c in configs]
    weights, inputs = random_weights(specs[0], rng), random_inputs(programs[0], rng)
    unstretched = WidenedWeights(weights, *specs, stretch=0)
    before, after = (execute(p, dict(w), inputs) for p, w in zip(programs, (weights, unstretched), strict=True))
    assert float((after - before).abs().max()) > 1e-2 * float(before.abs().max())


@pytest.mark.parametrize(
    ("build", "large", "message"),
    [
        (tiny_llama, dict(head_dim=8), "other rotary frequencies"),
        (tiny_llama, dict(vocab_size=12), "along an axis that nothing moves"),
        (tiny_bert, dict(num_hidden_layers=2), "norms come after it"),
        (tiny_llama, dict(hidden_size=12, intermediate_size=4), "in the wider one, which is wider elsewhere"),
        (tiny_gpt2, dict(n_embd=12), "changes its outputs"),
        (tiny_gemma, dict(intermediate_size=7, hidden_size=12), "changes its outputs"),
        (tiny_bert, dict(hidden_size=12, num_attention_heads=3), "changes its outputs"),
        (tiny_llama, dict(num_key_value_heads=2), r"laid out differently .* in num_key_value_heads \(. and .\)"),
    ],
)
def test_what_cannot_grow_is_refused_by_name(
    build: Callable[..., PretrainedConfig], large: dict[str, int], message: str, tmp_path: Path
) -> None:
    refs = [str(save(tmp_path / name, build(**c))) for name, c in (("narrow", {}), ("wide", large))]
    for pair in (refs, refs[::-1]):
        with pytest.raises(IncompatibleModels, match=message):
            open_pair(*pair)


@pytest.mark.parametrize("order", [1, -1], ids=["wide first", "narrow first"])
def test_a_narrow_model_merges_with_a_wide_one(order: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """At the ends the merge computes what each model did, in the sizes of the wide one."""
    wide = save(tmp_path / "wide", tiny_llama(hidden_size=14, intermediate_size=9))
    narrow = save(tmp_path / "narrow", tiny_llama())
    models = (wide, narrow)[::order]
    ids = torch.randint(11, (2, 8), generator=torch.Generator().manual_seed(0))
    for weight, source in enumerate(models):
        out = tmp_path / str(weight)
        assert run("merge", *models, "-o", out, "--weight", weight, "--json") == 0
        shown = capsys.readouterr()
        widened = f"{narrow} is widened (residual 8 to 14, hidden 6 to 9)"
        assert widened in shown.err  # what is published has no local path
        assert any(note.startswith("narrow is widened") for note in json.loads(shown.out)["notes"])
        loaded = [transformers.AutoModelForCausalLM.from_pretrained(p) for p in (source, out)]
        assert loaded[1].config.hidden_size == 14 and loaded[1].config.intermediate_size == 9
        with torch.no_grad():
            before, after = (m(ids).logits for m in loaded)
        assert float((before - after).abs().max()) < 1e-4 * float(before.abs().max())
