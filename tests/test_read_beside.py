"""What reads more of a model than its answers stays right, or aligned B is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from conftest import built, run, tiny_bert, tiny_llama
from torch import Generator

import hf_align
from hf_align.errors import IncompatibleModels
from hf_align.jobs.read_beside import require_answers_alone
from hf_align.opening.pairs import open_pair
from hf_align.symmetry.certificate.random_copy import random_elements, random_weights, transform
from hf_align.symmetry.derivation.depth import derive_by_depth
from hf_align.symmetry.gauges.canonical import CanonicalWeights

_WHISPER = dict(vocab_size=64, num_mel_bins=8, d_model=24, encoder_layers=2, decoder_layers=2, encoder_ffn_dim=20,
                encoder_attention_heads=3, decoder_attention_heads=4, decoder_ffn_dim=20, max_source_positions=50,
                max_target_positions=60, pad_token_id=0, bos_token_id=1, eos_token_id=2,
                decoder_start_token_id=3)  # fmt: skip


def saved(kind: type[transformers.PreTrainedModel], config: transformers.PretrainedConfig, folder: Path) -> list[Path]:
    """Two models."""
    for seed, name in enumerate("ab"):
        torch.manual_seed(seed)
        kind(config).save_pretrained(folder / name)
    return [folder / "a", folder / "b"]


@pytest.mark.slow
def test_heads_that_timestamps_are_read_from_stay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = saved(transformers.WhisperForConditionalGeneration, transformers.WhisperConfig(**_WHISPER), tmp_path)
    said = json.loads((b / "generation_config.json").read_text())
    for named, is_refused in (({"alignment_heads": [[1, 0], [1, 2]]}, True), ({"forced_ids": [[1, 40]]}, False)):
        (b / "generation_config.json").write_text(json.dumps({**said, **named}))
        pair = open_pair(str(a), str(b))
        if not is_refused:
            require_answers_alone(pair.b, pair.spec)
            continue
        assert run("align", a, b, "-o", tmp_path / "out", "--quiet") == 2
        assert "alignment_heads" in (told := capsys.readouterr().err) and "--heads monotonic" in told


def test_heads_of_a_live_model_that_generation_names_stay(tmp_path: Path) -> None:
    a, b = (built(tiny_llama(), seed) for seed in range(2))
    b.generation_config.watched = [[0, 1]]
    with pytest.raises(IncompatibleModels, match="watched"):
        hf_align.align(b, to=a)
    hf_align.align(b, to=a, heads="monotonic")


def test_query_heads_that_share_a_key_are_counted_one_by_one(tmp_path: Path) -> None:
    config = tiny_llama(hidden_size=16, num_attention_heads=4, num_key_value_heads=2, head_dim=4)
    a, b = saved(transformers.LlamaForCausalLM, config, tmp_path)
    said = json.loads((b / "generation_config.json").read_text())
    (b / "generation_config.json").write_text(json.dumps({**said, "watched": [[0, 3], [1, 2]]}))
    pair = open_pair(str(a), str(b))
    with pytest.raises(IncompatibleModels, match="heads by their numbers"):
        require_answers_alone(pair.b, pair.spec)


@pytest.mark.parametrize("kind", [transformers.BertForMaskedLM, transformers.BertModel])
def test_states_before_a_head_that_sentence_transformers_read(
    kind: type[transformers.PreTrainedModel], tmp_path: Path
) -> None:
    a, b = saved(kind, tiny_bert(), tmp_path)
    (b / "modules.json").write_text("[]")
    if kind is transformers.BertModel:
        pair = open_pair(str(a), str(b))
        require_answers_alone(pair.b, pair.spec)
    else:
        assert run("align", a, b, "-o", tmp_path / "out", "--quiet") == 2


@pytest.mark.parametrize("layers", [2, 5])
def test_a_weight_for_each_head_of_each_layer_that_no_call_reads(layers: int) -> None:
    """As long as all heads of all layers: a method reads it, with the attention of each of them. Heads may be as many
    as a head has entries."""
    config = transformers.EsmConfig(
        vocab_size=33, hidden_size=16, num_hidden_layers=layers, num_attention_heads=4, intermediate_size=10,
        pad_token_id=0, mask_token_id=4, max_position_embeddings=40, position_embedding_type="rotary",
        attn_implementation="eager", architectures=["EsmForMaskedLM"],
    )  # fmt: skip
    spec, rng = derive_by_depth(config), Generator().manual_seed(0)
    weights = random_weights(spec, rng)
    moved = transform(spec, CanonicalWeights(weights, spec.gauges), random_elements(spec, rng))
    found, ids = [], torch.arange(5, 16)[None]
    for values in (weights, moved):
        model = transformers.EsmForMaskedLM(config).double().eval()
        model.load_state_dict(values, strict=False)
        found.append(model.esm.predict_contacts(ids, torch.ones_like(ids)))
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-6)  # its rotary table is float32
