"""The witness: what is aligned answers as before, in every mode and at every length; what does not is not written."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import MODELS, run, tiny_bert, tiny_gpt2, tiny_llama, tiny_mixtral, tiny_t5, tiny_vit
from torch import Tensor, nn
from transformers import CLIPConfig, EsmConfig, PretrainedConfig

import hf_align
from hf_align.checkpoints.ondemand import Recalled
from hf_align.errors import HfAlignError
from hf_align.jobs import job, witnessing
from hf_align.jobs.witnessing import moved_model
from hf_align.opening.pairs import Pair, open_pair
from hf_align.settings.options import Options
from hf_align.symmetry import alignment
from hf_align.symmetry.action import Elements
from hf_align.symmetry.certificate.random_copy import random_elements
from hf_align.symmetry.derivation import depth
from hf_align.symmetry.spec import SymmetrySpec
from hf_align.tracing import modes as tracing_modes
from hf_align.tracing.build import build_as_loaded, model_class
from hf_align.tracing.example import Example
from hf_align.tracing.mode import Mode
from hf_align.witness.calls import WRITTEN, Case, _answers, modes
from hf_align.witness.effort import lengths
from hf_align.witness.findings import Held
from hf_align.witness.noise import Jittered, changes
from hf_align.witness.witness import _Trial, hold, hold_all

CPU = torch.device("cpu")


def save(folder: Path, config: PretrainedConfig, seed: int) -> Path:
    """A model of generic weights: nothing is zero, so that nothing can hide."""
    torch.manual_seed(seed)
    model = model_class(config)(config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(torch.randn_like(weight) * (0.3 if weight.dim() > 1 else 0.1) + (weight == 1))
    model.save_pretrained(folder)
    return folder


MIXTRAL = dict(vocab_size=13, num_hidden_layers=2, num_local_experts=4, max_position_embeddings=64)


def tiny_bart() -> PretrainedConfig:
    return transformers.BartConfig(
        vocab_size=13, d_model=8, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, encoder_ffn_dim=6,
        decoder_attention_heads=2, decoder_ffn_dim=6, max_position_embeddings=32, pad_token_id=0, bos_token_id=1,
        eos_token_id=2, decoder_start_token_id=1, architectures=["BartForConditionalGeneration"],
    )  # fmt: skip


def tiny_xlm_roberta() -> PretrainedConfig:
    """Its head is registered before the embedding that it is tied to."""
    return transformers.XLMRobertaConfig(
        vocab_size=13, hidden_size=8, intermediate_size=6, num_hidden_layers=1, num_attention_heads=2, is_decoder=True,
        max_position_embeddings=32, architectures=["XLMRobertaForCausalLM"],
    )  # fmt: skip


def tiny_clip(architecture: str = "CLIPModel") -> PretrainedConfig:
    """Its text is pooled at the first token, which may be padding: no other is the end that it looks for."""
    part = {"hidden_size": 8, "intermediate_size": 6, "num_hidden_layers": 1, "num_attention_heads": 2}
    return transformers.CLIPConfig(
        text_config={**part, "vocab_size": 13, "max_position_embeddings": 32, "eos_token_id": 99},
        vision_config={**part, "image_size": 8, "patch_size": 4}, projection_dim=6, architectures=[architecture],
    )  # fmt: skip


def tiny_llava(layers: int = 2) -> PretrainedConfig:
    vision = dict(model_type="clip_vision_model", hidden_size=8, intermediate_size=6, num_hidden_layers=layers,
                  num_attention_heads=2, image_size=8, patch_size=4)  # fmt: skip
    return transformers.LlavaConfig(
        vision_config=vision, text_config=tiny_llama(max_position_embeddings=64).to_dict(), image_token_index=10,
        architectures=["LlavaForConditionalGeneration"],
    )  # fmt: skip


def held(pair: Pair, elements: Elements | None = None, **how: Any) -> Held:
    """B, moved by random elements."""
    moving = random_elements(pair.spec, torch.Generator().manual_seed(3)) if elements is None else elements
    return hold(moved_model("B", pair.b, pair, pair.spec, moving, pair.a, Options()), CPU, **how)


@pytest.mark.parametrize(
    "config",
    [
        tiny_gpt2(),
        tiny_gpt2(tie_word_embeddings=True),
        tiny_llama(),
        tiny_bert(),
        tiny_vit(),
        tiny_t5(vocab_size=13, num_layers=1),
        tiny_mixtral(**MIXTRAL),
        tiny_bart(),
        tiny_xlm_roberta(),
        tiny_clip(),
        tiny_clip("CLIPForImageClassification"),
    ],
    ids=["gpt2", "tied", "llama", "bert", "vit", "t5", "mixtral", "bart", "xlm-roberta", "clip", "images of clip"],
)
def test_what_is_a_symmetry_passes(config: PretrainedConfig, tmp_path: Path) -> None:
    pair = open_pair(*(str(save(tmp_path / n, config, seed)) for seed, n in enumerate("ab")))
    found = held(pair)
    assert found.change <= found.bound < 1e-3 and found.rounding < 2e-5 and not found.not_run
    assert len(found.cases) > 1 or "pixel_values" in found.cases
    assert (found.written > 0) == pair.config.architectures[0].endswith(("CausalLM", "LMHeadModel", "Generation"))


@pytest.mark.parametrize("config", [tiny_gpt2(), tiny_bart(), tiny_clip()], ids=["gpt2", "bart", "clip"])
def test_what_padding_sees_is_no_answer(
    config: PretrainedConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A constant that every token adds to what it hears is lost on one that hears none."""
    pair = open_pair(*(str(save(tmp_path / n, config, seed)) for seed, n in enumerate("ab")))
    found = held(pair, {})
    masked = [name for name in found.cases if "attention_mask" in name]
    assert masked and found.change <= found.bound
    monkeypatch.setattr(_Trial, "_decided", lambda self, case, answers, plain, most: torch.ones(
        len(changes(answers, answers)), dtype=torch.bool))  # fmt: skip
    with pytest.raises(HfAlignError, match=r"attention_mask.*before any basis is changed"):
        held(pair, {})


def test_a_token_that_is_shown_is_answered_whatever_attention_makes_of_padding() -> None:
    """Without a mask, or with two, no token is known to be shown."""
    mask, ids = torch.tensor([[0, 1, 1], [1, 1, 1]]), torch.zeros(2, 3, dtype=torch.long)
    answers = {"logits": torch.zeros(2, 3, 5), "pooled": torch.zeros(2, 4), "loss": torch.zeros(())}
    mode = Mode("text", Example({"input_ids": ids}, {}))
    masked = Case(mode, None, {"input_ids": ids, "attention_mask": mask})
    assert masked.shown(answers).tolist() == [False, *[True] * 5, *[False] * 3]
    assert len(masked.shown(answers)) == len(changes(answers, answers))
    for arguments in ({"input_ids": ids}, {**masked.arguments, "encoder_attention_mask": mask}):
        assert not Case(mode, None, arguments).shown(answers).any()


def test_a_model_with_fewer_positions_than_its_config_says_is_run(tmp_path: Path) -> None:
    """Two of RoBERTa's sixteen are for padding."""
    config = transformers.RobertaConfig(
        vocab_size=13, hidden_size=8, intermediate_size=6, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=16, architectures=["RobertaForMaskedLM"],
    )  # fmt: skip
    pair = open_pair(*(str(save(tmp_path / n, config, seed)) for seed, n in enumerate("ab")))
    assert list(held(pair, {}).cases["input_ids"])[:3] == ["1", "2", "7"]


def test_a_model_that_takes_inputs_of_one_shape_alone_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a task that is described in as many tokens as a linear layer has columns."""
    pair = open_pair(*(str(save(tmp_path / n, tiny_gpt2(n_positions=64), seed)) for seed, n in enumerate("ab")))
    forward = transformers.GPT2LMHeadModel.forward

    def strict(self: transformers.GPT2LMHeadModel, input_ids: torch.Tensor, **others: Any) -> object:
        if tuple(input_ids.shape) != (2, 17):
            raise ValueError("no such shape")
        return forward(self, input_ids, **others)

    monkeypatch.setattr(transformers.GPT2LMHeadModel, "forward", strict)
    found = held(pair)
    assert found.change <= found.bound and [*found.cases["input_ids"]] == ["17"]


@pytest.mark.parametrize("scores", [0.0, 1.0])
def test_where_scores_of_experts_are_equal_their_order_is_part_of_the_model(tmp_path: Path, scores: float) -> None:
    """Each token goes to the first two: no permutation of experts leaves that alone, and no rounding is behind it."""

    def build(number: int, equal: slice) -> str:
        folder = save(tmp_path / str(number), tiny_mixtral(**MIXTRAL), number)
        model = transformers.MixtralForCausalLM.from_pretrained(folder)
        with torch.no_grad():
            for layer in model.model.layers:
                layer.mlp.gate.weight.copy_(scores * layer.mlp.gate.weight[:1].clone())
                for weight in layer.mlp.experts.parameters():
                    weight[equal] = weight[equal][:1].clone()
        model.save_pretrained(folder)
        return str(folder)

    a, apart, alike = build(0, slice(0)), build(1, slice(0)), build(2, slice(None))
    with pytest.raises(HfAlignError, match=r"undecided.*experts score alike"):
        held(open_pair(a, apart))
    assert held(open_pair(a, alike)).change < 1e-4


def test_images_in_a_text_are_witnessed(tmp_path: Path) -> None:
    pair = open_pair(*(str(save(tmp_path / n, tiny_llava(), seed)) for seed, n in enumerate("ab")))
    assert "input_ids with image" in pair.spec.modes
    found = held(pair)
    assert "input_ids with image" in found.cases and found.change <= found.bound < 1e-3


def test_an_image_that_is_not_traced_is_not_let_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the tower were free to move: what is seen of an image is another thing then."""
    monkeypatch.setattr(tracing_modes, "try_ways", lambda *_: None)
    monkeypatch.setattr(depth, "without_unseen", lambda spec, *_: spec)
    pair = open_pair(*(str(save(tmp_path / n, tiny_llava(layers=1), seed)) for seed, n in enumerate("ab")))
    with pytest.raises(HfAlignError, match="with input_ids with image"):
        held(pair)


def test_modes_and_lengths() -> None:
    config = tiny_llama(max_position_embeddings=4096, sliding_window=100)
    model = build_as_loaded(config)
    answers = iter(range(99))
    found, failed = modes(model, (), lambda case: {"logits": torch.tensor(next(answers))})
    assert [mode.name for mode in found] == [
        "input_ids", "a step with a cache", "input_ids with attention_mask", "input_ids with position_ids 1 apart",
        "input_ids with position_ids 100 apart", "input_ids with position_ids 255 apart",
        "input_ids with attention_mask that hides what comes first",
        "input_ids with attention_mask that hides what comes last",
        "input_ids with attention_mask that hides all but one", "input_ids with attention_mask that hides all",
        "input_ids with attention_mask that hides a whole text",
    ]  # fmt: skip
    assert not failed
    assert WRITTEN == 32


@pytest.mark.parametrize(("traced", "first"), [(("input_ids, 2 × 12",), "input_ids"), ((), "inputs_embeds")])
def test_a_text_is_cut_before_embeddings_are_given_in_its_place(traced: tuple[str, ...], first: str) -> None:
    """As of a model with few positions, which counts those of its own tokens alone."""

    def answers(case: Case) -> dict[str, Tensor]:
        if case.length is not None and case.length > 7:
            raise IndexError("no such position")
        return {"logits": torch.zeros(1)}

    config = EsmConfig(vocab_size=12, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8,
                       pad_token_id=1, mask_token_id=2, max_position_embeddings=20)  # fmt: skip
    found, _ = modes(build_as_loaded(config), traced, answers)
    assert found[0].name == first


def test_long_inputs_are_as_long_as_is_affordable() -> None:
    pair = open_pair(str(MODELS / "llama" / "0"), str(MODELS / "llama" / "1"))
    config = tiny_llama(max_position_embeddings=4096, sliding_window=100)
    assert lengths(config, pair.spec) == (1, 2, 7, 16, 17, 65, 101, 102, 256, 1023, 2047, 2048)
    assert lengths(tiny_llama(max_position_embeddings=10), pair.spec) == (1, 2, 7, 9, 10)
    wide = replace(
        pair.spec, parameters={f"{i}.{n}": axes for i in range(3000) for n, axes in pair.spec.parameters.items()}
    )
    assert 16 < lengths(config, wide)[-1] < 2048


def test_the_noise_is_half_a_unit_in_the_last_place() -> None:
    weight = torch.randn(20_000, generator=torch.Generator().manual_seed(0))
    steps = Jittered({"w": weight})["w"].view(torch.int32) - weight.view(torch.int32)
    assert set(steps.tolist()) == {-1, 0, 1} and 0.3 < float(steps.abs().float().mean()) < 0.6
    assert torch.equal(Jittered({"w": weight})["w"], Jittered({"w": weight})["w"])
    rows = Jittered({"w": weight.expand(2, -1)})["w"]
    assert torch.equal(*rows) and not torch.equal(*Jittered({"w": weight.expand(2, -1)}, alike=True)["w"])


def test_several_tensors_of_one_name_are_answers() -> None:
    """Heads of a model that reads text in three ways, and maps of features; not the stages on the way to them."""
    real, whole = torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.long)
    several, stages = (real, real), {"hidden_states": (real, real), "router_logits": (real,), "chosen": whole}
    assert _answers(nn.Module(), {"loss": real, "logits": several, **stages}).keys() == {
        "logits 0", "logits 1", "chosen"}  # fmt: skip
    parts = {"seen": {"last_hidden_state": real}, "said": {"last_hidden_state": whole, "logits": real}}
    assert _answers(nn.Module(), parts).keys() == {"last_hidden_state", "logits"}
    assert _answers(nn.Module(), {"aux_loss": real, "logits": real, **stages}).keys() == {
        "aux_loss", "logits", "chosen"}  # fmt: skip


def test_a_limit_that_nothing_reaches_has_no_noise() -> None:
    limits = torch.tensor([-torch.inf, 0.1, torch.inf])
    moved = Jittered({"w": limits}, 8.0)["w"]
    assert torch.equal(moved[[0, 2]], limits[[0, 2]]) and moved.isfinite().sum() == 1


def test_what_is_no_number_in_both_is_left_out() -> None:
    nan, inf = torch.nan, torch.inf
    before = {"logits": torch.tensor([[1.0, nan], [2.0, -inf]])}
    assert changes(before, {"logits": torch.tensor([[1.5, nan], [2.0, -inf]])}).tolist() == [0.25, 0.0]
    assert changes(before, {"logits": torch.tensor([[1.0, nan], [nan, -inf]])}).tolist() == [0.0, inf]
    assert changes(before, {}).tolist() == [inf, inf]


@pytest.fixture
def sabotaged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every alignment turns by another element what the first MLP writes to its hidden units, and what reads them."""
    act = alignment.act

    def wrong(tensor: Tensor, name: str, spec: SymmetrySpec, elements: Elements) -> Tensor:
        moved = act(tensor, name, spec, elements)
        return moved.roll(1, 0) if elements and name == "model.layers.1.mlp.up_proj.weight" else moved

    monkeypatch.setattr(alignment, "act", wrong)


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line with which a command refuses."""
    capsys.readouterr()
    assert run(*arguments, "--quiet") == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    return lines[0]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


PAIR = (MODELS / "llama" / "0", MODELS / "llama" / "1")
SAID = r"hf-align: aligned ([AB]) is not \1: with input_ids, length 1 its outputs change by \S+ of the largest " \
       r"\(rounding explains \S+\), from model.layers.1.mlp.up_proj on; nothing is written"  # fmt: skip


def test_what_is_no_symmetry_is_not_written(
    sabotaged: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command, first in (("align", "B"), ("merge", "A")):  # what stays in memory for the merge comes last
        found = re.fullmatch(SAID, refused(capsys, command, *PAIR, "-o", tmp_path / "out"))
        assert found is not None and found[1] == first
        assert not (tmp_path / "out").exists()
    assert run("align", *PAIR, "-o", tmp_path / "out", "--quiet", "--no-witness") == 0
    before = contents(tmp_path / "out")
    refused(capsys, "align", *PAIR, "-o", tmp_path / "out", "--overwrite")
    assert contents(tmp_path / "out") == before


def test_nor_is_one_of_several(sabotaged: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(PAIR[1], tmp_path / "third")
    assert "aligned 0 is not 0" in refused(capsys, "merge", *PAIR, tmp_path / "third", "-o", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_nor_is_one_of_a_recipe(sabotaged: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("mergekit")
    recipe = tmp_path / "recipe.yml"
    models = "".join(f"  - model: {m}\n    parameters: {{weight: 0.5}}\n" for m in PAIR)
    recipe.write_text(f"models:\n{models}merge_method: linear\nalign: true\n")
    assert "aligned 0 is not 0" in refused(capsys, "mergekit", recipe, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert run("mergekit", recipe, tmp_path / "out", "--quiet", "--no-witness", "--json") == 0
    assert json.loads(capsys.readouterr().out)["witness"] is None


def test_what_it_says(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("merge", *PAIR, "-o", tmp_path / "out", "--quiet", "--dtype", "bfloat16", "--json") == 0
    found = json.loads(capsys.readouterr().out)["witness"]
    assert re.fullmatch(r"witness: aligned B and A answer as they did, largest change \S+ of the largest output "
                        r"\(rounding alone: \S+; as bfloat16: \S+\), 15 modes, lengths 1 to 64, 32 tokens with a cache",
                        found["sentence"])  # fmt: skip
    b, a = found["models"]
    assert (b["model"], a["model"]) == ("B", "A") and b["written"] == 32 and not b["not_run"]
    assert b["change"] <= b["bound"] < 1e-4 < b["rounded"] < 0.1
    assert list(b["cases"]["input_ids"]) == ["1", "2", "7", "16", "17", "63", "64"]
    card = (tmp_path / "out" / "README.md").read_text()
    assert found["sentence"].removeprefix("witness: aligned") in card and "input_ids (1, 2, 7, 16, 17, 63, 64)" in card
    assert run("merge", *PAIR, "-o", tmp_path / "out", "--quiet", "--dtype", "bfloat16", "--json") == 0
    assert json.loads(capsys.readouterr().out)["witness"] == found  # there is nothing left to do, and it is said again
    assert run("report", tmp_path / "out") == 0
    assert "answer as they did" in (tmp_path / "out" / "report.html").read_text()


def test_embeddings_that_turn_are_named() -> None:
    tower = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2)
    text = dict(**tower, vocab_size=50, max_position_embeddings=8, bos_token_id=1, eos_token_id=2)
    config = CLIPConfig(text_config=text, vision_config=dict(**tower, image_size=16, patch_size=8), projection_dim=8)
    torch.manual_seed(0)
    found = hf_align.align(transformers.CLIPModel(config), to=transformers.CLIPModel(config)).witness
    assert found is not None and "text_embeds and image_embeds returned in another basis" in found["sentence"]
    b, a = (model["rebased"] for model in found["models"])
    assert set(b) == {"text_embeds", "image_embeds"} and not a


@pytest.mark.quick
def test_what_is_said_of_align(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):  # the second run has nothing left to do
        assert run("align", *PAIR, "-o", tmp_path / "out", "--quiet") == 0
        said = " ".join(capsys.readouterr().out.split())
        assert "witness: aligned B answers as B does, largest change" in said and "rounding alone" in said


@pytest.mark.parametrize(("said", "loaded"), [("float32", torch.float32), ("bfloat16", torch.bfloat16)])
def test_the_rounding_of_a_config_is_measured(said: str, loaded: torch.dtype, tmp_path: Path) -> None:
    """transformers rounds weights to the dtype of the config, whatever they are stored in."""
    a, b = (save(tmp_path / name, tiny_gpt2(), seed) for seed, name in enumerate("ab"))
    config = json.loads((b / "config.json").read_text())
    (b / "config.json").write_text(json.dumps({**config, "dtype": said}))
    pair = open_pair(str(a), str(b))
    moved = moved_model("B", pair.b, pair, pair.spec, {}, pair.b, Options())
    assert {*moved.loaded.values()} == {loaded}


def test_without_a_witness_the_card_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("merge", *PAIR, "-o", tmp_path / "out", "--quiet", "--no-witness", "--json") == 0
    assert json.loads(capsys.readouterr().out)["witness"] is None
    assert "left out (`--no-witness`)" in (tmp_path / "out" / "README.md").read_text()
    assert run("merge", *PAIR, "-o", tmp_path / "plain", "--quiet", "--match", "none") == 0
    assert "Nothing was aligned" in (tmp_path / "plain" / "README.md").read_text()


def test_a_run_that_goes_on_still_has_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object, **__: object) -> None:
        raise RuntimeError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(job, "write_with_bar", killed)
        assert run("merge", *PAIR, "-o", tmp_path / "out", "--quiet") != 0
    monkeypatch.setattr(witnessing, "hold_all", killed)
    assert run("merge", *PAIR, "-o", tmp_path / "out", "--quiet", "--json") == 0
    assert len(json.loads(capsys.readouterr().out)["witness"]["models"]) == 2


def test_what_was_moved_once_is_not_moved_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of B, which takes longest; of A only while it is run. Layer by layer nothing stays."""
    pair = open_pair(*map(str, PAIR))
    moving = random_elements(pair.spec, torch.Generator().manual_seed(3))
    made: list[str] = []
    act = alignment.act
    monkeypatch.setattr(alignment, "act", lambda weight, name, *rest: (made.append(name), act(weight, name, *rest))[1])
    for offload in (False, True):
        aligned = [Recalled(alignment.AlignedWeights(model.weights, pair.spec, moving)) for model in (pair.b, pair.a)]
        models = [moved_model(called, model, pair, pair.spec, moving, pair.a, Options(), mapping)
                  for called, model, mapping in zip("BA", (pair.b, pair.a), aligned, strict=True)]  # fmt: skip
        found = hold_all(models, CPU, offload)
        assert [held.model for held in found.models] == ["B", "A"]
        for mapping, model, kept in zip(aligned, (pair.b, pair.a), (not offload, False), strict=True):
            made.clear()
            values = dict(mapping)
            assert len(made) == (0 if kept else len(pair.spec.parameters))
            expected = alignment.AlignedWeights(model.weights, pair.spec, moving)
            assert all(torch.equal(value, expected[name]) for name, value in values.items())
            next(iter(values.values())).zero_()
            assert all(torch.equal(mapping[name], expected[name]) for name in values)


def test_layer_by_layer_it_says_the_same() -> None:
    pair = open_pair(*map(str, PAIR))
    here, there = (held(pair, offload=offload) for offload in (False, True))
    assert here.written == there.written == 32
    for mode, found in there.cases.items():
        assert found == pytest.approx(here.cases[mode], abs=1e-6)
    assert all("all in float64" in mode for mode in here.cases.keys() - there.cases.keys()), "which takes whole models"
