"""Losses on held-out data: the mean over labels, whatever parts the data is run in."""

from __future__ import annotations

import pytest
import torch
import transformers as hf
from conftest import built, tiny_bert, tiny_gpt2, tiny_llama, tiny_t5, tiny_vit
from test_chosen import Largest
from test_witness import tiny_bart
from torch import Tensor
from transformers import MixtralConfig, PretrainedConfig

from hf_align.errors import HfAlignError
from hf_align.matching.activations import correlations
from hf_align.merging.samples import Samples
from hf_align.running.data import with_labels
from hf_align.running.decoder_inputs import unlabelled
from hf_align.running.evaluate import Evaluator
from hf_align.running.network import Network, batches
from hf_align.running.trial import require_runs
from hf_align.tracing.build import build_without_weights


@pytest.mark.parametrize("make", [tiny_llama, tiny_bert], ids=["next tokens", "tokens in place"])
def test_every_label_counts_alike(make: object) -> None:
    """Rows have none to eight labels, and the first part none at all; a whole run of the model is the reference."""
    config = make()  # type: ignore[operator]
    network, rng = Network(config), torch.Generator().manual_seed(0)
    weights = {n: p.detach() for n, p in built(config, 0).named_parameters()}
    tokens = torch.randint(11, (53, 8), generator=rng)
    kept = torch.rand(53, 1, generator=rng) > torch.rand(53, 8, generator=rng)
    data = {"input_ids": tokens, "labels": tokens.where(kept & (torch.arange(53) >= 16)[:, None], -100)}
    with torch.no_grad():
        expected = float(network.loss(weights, data))
    evaluator = Evaluator(network, data)
    assert evaluator.loss(weights) == pytest.approx(expected, rel=1e-5)
    assert evaluator.ensemble([weights, weights], (0.4, 0.6)) == pytest.approx(expected, rel=1e-5)


def test_a_part_in_which_it_makes_no_difference_where_labels_are_counts_as_much() -> None:
    """Where all tokens are one, those in place are predicted as well as the next ones."""
    config, rng = tiny_llama(), torch.Generator().manual_seed(0)
    network = Network(config)
    weights = {n: p.detach() for n, p in built(config, 0).named_parameters()}
    tokens = torch.cat([torch.full((16, 8), 3), torch.randint(11, (16, 8), generator=rng)])
    with torch.no_grad():
        expected = float(network.loss(weights, {"input_ids": tokens, "labels": tokens}))
    evaluator = Evaluator(network, {"input_ids": tokens})
    assert evaluator.loss(weights) == pytest.approx(expected, rel=1e-5)
    assert evaluator.loss(weights) == pytest.approx(expected, rel=1e-5)
    assert Evaluator(network, {"input_ids": tokens}).ensemble([weights], (1.0,)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_not_predicted(side: str) -> None:
    config, tokens = tiny_llama(), torch.randint(11, (3, 12), generator=torch.Generator().manual_seed(0))
    real = torch.arange(12) < torch.tensor([[5], [12], [9]])
    mask = (real if side == "right" else real.flip(1)).long()
    given = {"input_ids": tokens, "attention_mask": mask}
    labelled = {**given, "labels": tokens.masked_fill(mask == 0, -100)}
    network, weights = Network(config), {n: p.detach() for n, p in built(config, 0).named_parameters()}
    expected = Evaluator(network, labelled).loss(weights)
    assert Evaluator(network, given).loss(weights) == expected
    assert Evaluator(network, {"input_ids": tokens}).loss(weights) != pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("side", ["left", "right"])
def test_models_are_not_run_on_padding(side: str) -> None:
    """Whatever stands there: the texts follow each other, cut into rows as long as the longest."""
    config, rng = tiny_llama(), torch.Generator().manual_seed(0)
    real = torch.arange(12) < torch.tensor([[5], [9], [8], [3]])
    mask = real if side == "right" else real.flip(1)
    tokens, kinds = torch.randint(3, 11, (4, 12), generator=rng), torch.randint(2, (4, 12), generator=rng)
    tokens[~mask] = 0
    data = {"input_ids": tokens, "attention_mask": mask.long(), "labels": tokens}
    inputs = unlabelled(data, config)
    assert torch.equal(inputs["input_ids"], tokens[mask][:18].reshape(2, 9))
    assert inputs.keys() == {"input_ids", "attention_mask"} and bool(inputs["attention_mask"].all())
    assert torch.equal(unlabelled({**data, "token_type_ids": kinds}, config)["token_type_ids"].flatten(),
                       kinds[mask][:18])  # fmt: skip
    assert len(unlabelled(data, config, most=1)["input_ids"]) == 1
    beside = {**data, "pixel_values": torch.zeros(4, 3, 8, 8)}
    assert torch.equal(unlabelled(beside, config)["input_ids"], tokens)

    network, weights = Network(config), {n: p.detach() for n, p in built(config, 0).named_parameters()}
    other = {**data, "input_ids": torch.where(mask, tokens, 7)}
    found = [Samples.of([weights], network, d, lambda _: None).all["input_ids"] for d in (data, other)]
    assert torch.equal(*found)


def test_tokens_that_stand_alone_leave_nothing_to_predict() -> None:
    network, alone = Network(tiny_llama()), torch.ones(3, 1, dtype=torch.long)
    weights = {n: p.detach() for n, p in built(tiny_llama(), 0).named_parameters()}
    with pytest.raises(HfAlignError, match="no token behind another"):
        Evaluator(network, {"input_ids": alone})
    with pytest.raises(HfAlignError, match="left to predict"):
        Evaluator(network, {"input_ids": alone, "labels": alone}).loss(weights)


def test_data_without_any_label_is_refused() -> None:
    none = {"input_ids": torch.zeros(2, 8, dtype=torch.long), "labels": torch.full((2, 8), -100)}
    with pytest.raises(HfAlignError, match="stands for none"):
        Evaluator(Network(tiny_llama()), none)


@pytest.mark.parametrize(("shape", "rows"), [((100, 64), 16), ((100, 512), 4), ((5, 4096), 1), ((40,), 16)])
def test_long_rows_run_in_small_parts(shape: tuple[int, ...], rows: int) -> None:
    data: dict[str, Tensor] = {"input_ids": torch.zeros(shape, dtype=torch.long)}
    found = [len(part["input_ids"]) for part in batches(data)]
    assert found[0] == rows and sum(found) == shape[0]


def test_experts_are_run_without_a_copy_of_them_for_each_token() -> None:
    config = MixtralConfig(
        vocab_size=11, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, num_local_experts=4, architectures=["MixtralForCausalLM"],
    )  # fmt: skip
    weights = {n: p.detach() for n, p in built(config, 0).named_parameters()}
    tokens = torch.randint(11, (4, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), Largest() as largest:
        Network(config)(weights, {"input_ids": tokens})
    assert 0 < largest.entries <= tokens.numel() * 2 * 32, "two experts for each token, each of twice 16 units"


SEQ2SEQ = dict(
    vocab_size=13, d_model=8, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, encoder_ffn_dim=6,
    decoder_attention_heads=2, decoder_ffn_dim=6, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    decoder_start_token_id=1,
)  # fmt: skip
OF_TEXT = {
    "t5": tiny_t5,
    "bart": tiny_bart,
    "m2m100": lambda: hf.M2M100Config(**SEQ2SEQ, architectures=["M2M100ForConditionalGeneration"]),
    "blenderbot": lambda: hf.BlenderbotConfig(**SEQ2SEQ, architectures=["BlenderbotForConditionalGeneration"]),
    "a mask of what starts a text": lambda: hf.EncoderDecoderConfig(
        encoder=tiny_bert().to_dict(),
        decoder=tiny_bert(add_cross_attention=True, is_decoder=True).to_dict(),
        decoder_start_token_id=0,
        pad_token_id=0,
        architectures=["EncoderDecoderModel"],
    ),
}
OF_OTHERS = {
    "whisper": lambda: hf.WhisperConfig(
        **SEQ2SEQ, num_mel_bins=3, max_source_positions=6, max_target_positions=16, suppress_tokens=[],
        begin_suppress_tokens=[], architectures=["WhisperForConditionalGeneration"],
    ),
    "images and text": lambda: hf.VisionEncoderDecoderConfig(
        encoder=tiny_vit().to_dict(), decoder={**tiny_gpt2(add_cross_attention=True, is_decoder=True).to_dict()},
        decoder_start_token_id=1, pad_token_id=0, architectures=["VisionEncoderDecoderModel"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("has_labels", [True, False], ids=["labels", "text alone"])
@pytest.mark.parametrize("name", OF_TEXT)
def test_what_is_merged_on_has_for_the_decoder_what_is_evaluated_on(name: str, has_labels: bool) -> None:
    """Decoders read the labels: without any, T5 did not run, and BART read its source twice."""
    data = {"input_ids": torch.randint(3, 11, (4, 8), generator=torch.Generator().manual_seed(0))}
    agrees(OF_TEXT[name](), data, has_labels)


@pytest.mark.parametrize("name", OF_OTHERS)
def test_a_decoder_reads_the_labels_beside_sounds_and_images(name: str) -> None:
    config = OF_OTHERS[name]()
    first = build_without_weights(config).main_input_name
    shape = {"input_features": (4, 3, 12), "pixel_values": (4, 1, 4, 4)}[first]
    agrees(config, {first: torch.randn(shape, generator=torch.Generator().manual_seed(0))}, has_labels=True)


def agrees(config: PretrainedConfig, data: dict[str, Tensor], has_labels: bool) -> None:
    network, rng = Network(config), torch.Generator().manual_seed(0)
    weights = {n: p.detach() for n, p in built(config, 0).named_parameters()}
    if has_labels:
        data["labels"] = torch.randint(3, 11, (4, 5), generator=rng).index_fill(1, torch.tensor([4]), -100)
    require_runs(network, weights, [data], "the data")
    expected = network(weights, with_labels(data)).logits
    inputs = Samples.of([weights], network, data, lambda _: None).all
    assert "labels" not in inputs and torch.equal(network(weights, inputs).logits, expected)
    assert correlations(network, weights, weights, data)


def test_a_classifier_with_a_decoder_reads_what_it_reads_by_itself() -> None:
    """Its labels are classes."""
    config = tiny_bart()
    config.architectures = ["BartForSequenceClassification"]
    data = {"input_ids": torch.full((4, 8), 5).index_fill(1, torch.tensor([7]), 2)}
    network = Network(config)
    weights = {n: p.detach() for n, p in built(config, 0).named_parameters()}
    inputs = unlabelled({**data, "labels": torch.tensor([0, 1, 0, 1])}, config)
    assert torch.equal(network(weights, inputs).logits, network(weights, data).logits)
