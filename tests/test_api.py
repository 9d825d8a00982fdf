"""The library on live models, state dicts, folders: one verb each, the same kind of thing back, its function kept."""

from __future__ import annotations

import copy
import inspect
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import numpy as np
import pytest
import torch
from conftest import DATA, MODELS, built, run, tiny_bert, tiny_gpt2, tiny_llama, tiny_vit
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel, Trainer

import hf_align
from hf_align.api.examples import examples
from hf_align.api.given import take
from hf_align.errors import OptionError
from hf_align.merging.methods import CURVE, DISTIL, FROM_SAMPLES, FROM_WEIGHTS
from hf_align.running.data import with_labels
from hf_align.settings import choices as choice
from hf_align.settings.options import Options
from hf_align.settings.schedule import LAMBDA, Schedule

Model = PreTrainedModel


@torch.no_grad()
def answers(model: Model) -> Tensor:
    if model.main_input_name == "pixel_values":
        pixels = torch.randn(2, 1, 4, 4, generator=torch.Generator().manual_seed(0))
        return model(pixel_values=pixels.to(model.dtype)).logits.float()
    return model(input_ids=torch.arange(14).reshape(2, 7) % 11).logits.float()


CONFIGS = {"llama": tiny_llama, "tied llama": lambda: tiny_llama(tie_word_embeddings=True), "gpt2": tiny_gpt2,
           "tied gpt2": lambda: tiny_gpt2(tie_word_embeddings=True), "vit": tiny_vit}  # fmt: skip


@pytest.mark.parametrize("family", CONFIGS)
def test_live_models_keep_their_function_and_meet(family: str) -> None:
    """A model in another basis is found again: aligned, it has the weights of the reference in its gauge."""
    a = built(CONFIGS[family](), 0)
    b = hf_align.randomize(a, seed=1)
    torch.testing.assert_close(answers(b), answers(a), rtol=1e-3, atol=1e-4)
    alignment = hf_align.align(b, to=a)
    moved, reference = alignment.apply(b), alignment.apply_to_reference(a)
    assert type(moved) is type(a) and alignment.witness is not None and alignment.distance is not None
    torch.testing.assert_close(answers(moved), answers(a), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(answers(reference), answers(a), rtol=1e-3, atol=1e-4)
    assert alignment.distance[1] < 0.01 * alignment.distance[0]
    for (name, x), y in zip(moved.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-2, atol=1e-3, msg=name)


def test_what_goes_in_is_left_as_it_is() -> None:
    a, b = built(tiny_gpt2(tie_word_embeddings=True), 0), built(tiny_gpt2(tie_word_embeddings=True), 1)
    before = {n: t.clone() for n, t in b.state_dict().items()}
    moved = hf_align.align(b, to=a, untie=True).apply(b)
    assert all(torch.equal(t, before[n]) for n, t in b.state_dict().items())
    assert b.config.tie_word_embeddings and b.lm_head.weight is b.transformer.wte.weight
    assert not moved.config.tie_word_embeddings and moved.lm_head.weight is not moved.transformer.wte.weight
    still_tied = hf_align.align(b, to=a, untie=False).apply(b)
    assert still_tied.lm_head.weight is still_tied.transformer.wte.weight


@pytest.mark.filterwarnings("error")
def test_a_result_loads_again(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """And nothing is warned of, not even what torch says once in a process."""
    request.addfinalizer(lambda: torch.set_warn_always(False))
    torch.set_warn_always(True)
    a, b = built(tiny_gpt2(tie_word_embeddings=True), 0), built(tiny_gpt2(tie_word_embeddings=True), 1)
    merged = hf_align.merge([a, b])
    merged.save_pretrained(tmp_path)
    torch.testing.assert_close(answers(AutoModelForCausalLM.from_pretrained(tmp_path)), answers(merged))


def test_dtype_and_training_stay(tmp_path: Path) -> None:
    a, b = built(tiny_llama(), 0).bfloat16(), built(tiny_llama(), 1).bfloat16().train()
    moved = hf_align.align(b, to=a).apply(b)
    assert moved.dtype == torch.bfloat16 and moved.training and all(p.requires_grad for p in moved.parameters())


def test_a_live_merge_is_the_commands(tmp_path: Path) -> None:
    folders = [str(MODELS / "llama" / seed) for seed in "01"]
    assert run("merge", *folders, "-o", tmp_path / "out", "--quiet") == 0
    written = load_file(tmp_path / "out" / "model.safetensors")
    live = [AutoModelForCausalLM.from_pretrained(folder) for folder in folders]
    alignment = hf_align.Alignment.from_pretrained(tmp_path / "out")
    for merged in (hf_align.merge(live, align=alignment), hf_align.merge(folders, witness=False)):
        for name, tensor in merged.state_dict().items():
            torch.testing.assert_close(tensor, written[name], rtol=1e-4, atol=1e-5)


def test_state_dicts_come_back_as_such() -> None:
    config = tiny_llama()
    a, b = built(config, 0), built(config, 1)
    states = [{n: t.clone() for n, t in m.state_dict().items()} for m in (a, b)]
    merged = hf_align.merge(states, config=config)
    assert isinstance(merged, dict) and list(merged) == list(states[0])
    for name, tensor in hf_align.merge([a, b]).state_dict().items():
        torch.testing.assert_close(tensor, merged[name])
    with pytest.raises(OptionError, match="config="):
        hf_align.merge(states)
    alignment = hf_align.align(states[1], to=states[0], config=config, witness=False)
    for name, tensor in alignment.apply(b).state_dict().items():
        torch.testing.assert_close(alignment.apply(states[1])[name], tensor)
    del states[1]["lm_head.weight"]
    with pytest.raises(OptionError, match=r"lacks lm_head\.weight"):
        hf_align.merge(states, config=config)


@pytest.mark.parametrize("untie", [None, True])
def test_a_state_dict_may_lack_the_other_name_of_a_tied_weight(untie: bool | None) -> None:
    """As a file of a tied model does, which stays tied unless it is asked for."""
    a, b = (built(tiny_gpt2(tie_word_embeddings=True), seed) for seed in (0, 1))
    stored = {n: t for n, t in b.state_dict().items() if n != "lm_head.weight"}
    alignment = hf_align.align(stored, to=a, config=b.config, untie=untie)
    moved, live = alignment.apply(stored), alignment.apply(b).state_dict()
    assert moved.keys() == (live.keys() if untie else stored.keys())
    assert all(torch.equal(t, live[n]) for n, t in moved.items())


def test_state_dicts_that_hold_something_else_are_refused() -> None:
    a = built(tiny_gpt2(tie_word_embeddings=True), 0)
    held = a.state_dict()
    with pytest.raises(OptionError, match="differ in B, but are one by its config"):
        hf_align.align(held | {"lm_head.weight": held["lm_head.weight"] + 1}, to=a, config=a.config)
    with pytest.raises(TypeError, match="is a ndarray in B; a tensor is needed"):
        hf_align.align({n: t.numpy() for n, t in held.items()}, to=a, config=a.config)


@pytest.mark.parametrize("entry", [float("nan"), float("-inf")])
def test_weights_that_are_no_numbers_are_named(entry: float) -> None:
    a, b = (built(tiny_gpt2(), seed) for seed in (0, 1))
    alignment = hf_align.align(b, to=a, witness=False)
    b.lm_head.weight.data[3, 2] = entry
    with pytest.raises(OptionError, match=r"lm_head\.weight has NaN or infinite entries in B"):
        hf_align.align(b, to=a)
    with pytest.raises(OptionError, match=r"lm_head\.weight has NaN or infinite entries"):
        alignment.apply(b.state_dict())


def test_alignments_are_compared_by_identity() -> None:
    a = built(tiny_gpt2(), 0)
    alignment = hf_align.align(a, to=a)
    assert alignment == alignment and alignment != copy.deepcopy(alignment) and alignment in {alignment}


def test_alignments_compose_and_come_undone() -> None:
    a, b, c = (built(tiny_llama(), seed) for seed in range(3))
    first, second = hf_align.align(b, to=a, witness=False), hf_align.align(c, to=a, witness=False)
    torch.testing.assert_close(answers((first @ second).apply(b)), answers(b), rtol=1e-3, atol=1e-4)
    back = (first.inverse() @ first).apply(b).state_dict()
    for name, tensor in first.inverse().apply(first.apply(b)).state_dict().items():
        torch.testing.assert_close(tensor, back[name], rtol=1e-3, atol=1e-4)
    with pytest.raises(OptionError, match="different architectures"):
        first @ hf_align.align(built(tiny_gpt2(), 1), to=built(tiny_gpt2(), 0), witness=False)
    with pytest.raises(TypeError, match="unsupported operand"):
        first @ b  # type: ignore[operator]
    with pytest.raises(OptionError, match="another architecture"):
        first.apply(built(tiny_gpt2(), 0))


def test_an_alignment_is_saved_and_found(tmp_path: Path) -> None:
    a, b = built(tiny_llama(), 0), built(tiny_llama(), 1)
    alignment = hf_align.align(b, to=a, witness=False)
    alignment.save_pretrained(tmp_path)
    again = hf_align.Alignment.from_pretrained(tmp_path)
    assert again.distance == alignment.distance
    assert "spaces matched, weight distance" in repr(again) and len(repr(again)) < 100
    for x, y in zip(again.apply(b).parameters(), alignment.apply(b).parameters(), strict=True):
        assert torch.equal(x, y)
    with pytest.raises(hf_align.HfAlignError, match="holds no alignment"):
        hf_align.Alignment.from_pretrained(MODELS / "llama" / "0")
    with pytest.raises(hf_align.HfAlignError, match="is not a folder"):
        hf_align.Alignment.from_pretrained(tmp_path / "nowhere")


def test_an_alignment_goes_to_the_hub_and_back(hub: Any, tmp_path: Path) -> None:
    a, b = built(tiny_llama(), 0), built(tiny_llama(), 1)
    alignment = hf_align.align(b, to=a, witness=False)
    assert "alice/b-to-a" in alignment.push_to_hub("alice/b-to-a", token="hf_alice")
    again = hf_align.Alignment.from_pretrained("alice/b-to-a", token="hf_alice")
    assert torch.equal(answers(again.apply(b)), answers(alignment.apply(b))) and again.witness is None
    seen = replace(alignment, witness={"change": 1e-7})
    seen.push_to_hub("alice/b-to-a", token="hf_alice")
    assert hf_align.Alignment.from_pretrained("alice/b-to-a", token="hf_alice").witness == seen.witness


def test_a_loader_of_images_with_a_label_each() -> None:
    a, b = built(tiny_vit(), 0), built(tiny_vit(), 1)
    images = torch.randn(6, a.config.num_channels, a.config.image_size, a.config.image_size)
    rows = [{"pixel_values": image, "labels": i % a.config.num_labels} for i, image in enumerate(images)]
    whole = {"pixel_values": images, "labels": torch.arange(6) % a.config.num_labels}
    alignment = hf_align.align(b, to=a, witness=False)
    each = [hf_align.evaluate(a, b, data, align=alignment, points=3).aligned.losses
            for data in (whole, rows, DataLoader(rows, batch_size=4))]  # type: ignore[arg-type]  # fmt: skip
    assert each[0] == each[1] == each[2]


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8])
def test_data_of_whole_numbers_of_any_size(dtype: torch.dtype) -> None:
    a, b = built(tiny_bert(), 0), built(tiny_bert(), 1)
    ids = torch.arange(3, 11).expand(4, 8).clone()
    batches = ({"input_ids": t, "labels": t} for t in (ids, ids.to(dtype)))
    given, same = (hf_align.evaluate(a, b, batch, points=3) for batch in batches)
    assert given == same
    rows = [{"input_ids": row, "labels": row} for row in ids.to(dtype).numpy()]
    assert hf_align.evaluate(a, b, rows, points=3) == given


def test_data_of_a_model_whose_head_is_tied(tmp_path: Path) -> None:
    a, b = built(tiny_bert(), 0), built(tiny_bert(), 1)
    ids = torch.arange(3, 11).expand(4, 8).clone()
    assert hf_align.evaluate(a, b, {"input_ids": ids, "labels": ids}, points=3).aligned.barrier < 100


def test_a_fine_tune_with_more_tokens_is_refused() -> None:
    base, onto = built(tiny_bert(), 0), built(tiny_bert(), 1)
    tuned = built(tiny_bert(vocab_size=base.config.vocab_size + 3), 0)
    with pytest.raises(hf_align.HfAlignError, match="word_embeddings"):
        hf_align.transport(tuned, base=base, onto=onto)


def test_an_alignment_that_the_hub_refuses(hub: Any) -> None:
    alignment = hf_align.align(built(tiny_llama(), 1), to=built(tiny_llama(), 0), witness=False)
    for repository, said in (("bob/b-to-a", "the Hub refused bob/b-to-a"), ("a b", "is neither a folder nor a Hub id")):
        with pytest.raises(hf_align.HfAlignError, match=said):
            alignment.push_to_hub(repository, token="hf_alice")


def test_several_models() -> None:
    models = [built(tiny_llama(), 0)] + [hf_align.randomize(built(tiny_llama(), 0), seed=s) for s in (1, 2)]
    alignments = hf_align.align(models[1:], to=models[0])
    assert len(alignments) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # they are of these weights
        merged = hf_align.merge(models, align=alignments)
    torch.testing.assert_close(answers(merged), answers(models[0]), rtol=1e-2, atol=1e-3)
    weighted = hf_align.merge(models, align="none", weights=[0.5, 0.25, 0.25])
    name = "model.layers.0.mlp.up_proj.weight"
    expected = sum(w * m.get_parameter(name) for w, m in zip((0.5, 0.25, 0.25), models, strict=True))
    torch.testing.assert_close(weighted.get_parameter(name), expected)


def test_an_alignment_of_other_weights_is_told_from_one_of_these() -> None:
    """Of the same two in the other order, say."""
    a, b = built(tiny_llama(), 0), built(tiny_llama(), 1)
    alignment = hf_align.align(b, to=a)
    with pytest.warns(UserWarning, match="the alignment of B was found for other weights") as warned:
        hf_align.merge([b, a], align=alignment)
        hf_align.interpolate(b, a, 0.3, align=alignment)
    assert [w.filename for w in warned if w.category is UserWarning] == [__file__] * 2
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        hf_align.merge([a, b], align=alignment)
        copy = hf_align.randomize(a, seed=3)
        alignment = hf_align.align(copy, to=a)
        hf_align.merge([a.bfloat16(), copy.bfloat16()], align=alignment)


def test_a_loss_and_a_loader_of_the_callers_own() -> None:
    a, b = built(tiny_llama(), 0), built(tiny_llama(), 1)
    rows = torch.randint(11, (12, 8), generator=torch.Generator().manual_seed(0))
    asked: list[float] = []

    def objective(output: Any, batch: dict[str, Tensor]) -> Tensor:
        assert batch["input_ids"].shape[1] == 8
        loss: Tensor = output.logits.square().mean()
        asked.append(float(loss))
        return loss

    loader = DataLoader([{"input_ids": row} for row in rows], batch_size=4)  # type: ignore[arg-type]
    alignment = hf_align.align(b, to=a, match="learned", data=loader, objective=objective, steps=3)
    assert len(asked) == 3
    torch.testing.assert_close(answers(alignment.apply(b)), answers(b), rtol=1e-3, atol=1e-4)


def test_losses_on_the_line() -> None:
    a, b = built(tiny_llama(), 0), built(tiny_llama(), 1)
    data = {"input_ids": torch.randint(11, (6, 8), generator=torch.Generator().manual_seed(0))}
    found = hf_align.evaluate(a, b, data, points=5)
    with torch.no_grad():
        expected = float(a(**with_labels(data)).loss)
    assert found.naive.losses[0] == pytest.approx(expected, rel=1e-4) == found.aligned.losses[0]
    assert len(found.naive.lambdas) == 5 and "loss_a" in found.as_json()
    pytest.importorskip("matplotlib").use("agg")
    assert "barrier" in str(found.plot().get_legend_handles_labels()[1])


def test_symmetries_and_their_proof() -> None:
    found = hf_align.symmetries(built(tiny_llama(), 0))
    assert re.fullmatch(r"Symmetries\(llama: \d+ spaces, \d+ parameters\)", repr(found))
    assert found.spec == hf_align.symmetries(tiny_llama()).spec
    assert "spaces" in found.explain("model.layers.0.mlp.up_proj.weight")
    proof = hf_align.certify(found)
    assert proof.sound and proof.complete and proof.modes
    with pytest.raises(OptionError, match="no parameter nowhere"):
        found.explain("nowhere")


def test_texts_come_in_a_list_or_as_rows() -> None:
    given = take(MODELS / "llama" / "0")
    texts = ["In the beginning God created the heaven and the earth."] * 20
    listed, rows = examples(texts, given), examples([{"text": text, "id": i} for i, text in enumerate(texts)], given)
    assert torch.equal(listed["input_ids"], rows["input_ids"])
    with pytest.raises(OptionError, match="data has 4 tokens"):
        examples(["short"], given)


def test_folders_are_merged_to_disk(tmp_path: Path) -> None:
    folders = [MODELS / "vit" / seed for seed in "01"]
    data = DATA / "eval_digits.safetensors"
    report = hf_align.merge(folders, output_dir=tmp_path / "out", data=data, witness=False)
    assert report.comparison["helps"] and (tmp_path / "out" / "README.md").is_file()
    assert hf_align.merge(folders, align="none").num_parameters() > 0


ROWS = {"input_ids": torch.arange(48).reshape(8, 6) % 11}


def wrong(**options: Any) -> Callable[[Model, Model], Any]:
    return lambda a, b: hf_align.align(b, to=a, **options)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (wrong(match="wieght"), "'weight', 'activation', 'learned'"),
        (wrong(heads="two_stage"), "'two-stage', 'circuits', 'monotonic'"),
        (wrong(residual="separate"), "'orthogonal', 'permutation', 'identity'"),
        (wrong(steps=5), "steps needs"),
        (wrong(match="learned", steps=0), "steps is 0; a whole number is needed, at least 1"),
        (wrong(match="learned", steps=1.5), "steps is 1.5; a whole number"),
        (wrong(seed="one"), "seed is 'one'; a whole number"),
        (wrong(untie="no"), "None, True, False"),
        (wrong(witness=None), "True, False"),
        (wrong(data=["a text"]), 'not used by match="weight"'),
        (wrong(match="learned", data=["a text"], objective="ce"), "a function of outputs and a batch"),
        (lambda a, b: hf_align.merge([a, b], data=["a text"]), 'neither by method="linear"'),
        (lambda a, b: hf_align.merge([a, b], overwrite=None), "True, False"),
        (lambda a, b: hf_align.transport(a, base=a, onto=b, method="curve"), "'task_arithmetic', 'distil'"),
        (lambda a, b: hf_align.transport(a, base=a, onto=b, method="task_arithmetic", data=["a text"]), "not used"),
        (lambda a, b: hf_align.evaluate(a, b, None), "need data"),
        (lambda a, b: hf_align.evaluate(a, b, 5), "data is 5"),
        (lambda a, b: hf_align.randomize(a, seed=0.5), "seed is 0.5"),
        (lambda a, b: hf_align.certify(a, layers="2"), "layers is '2'"),
        (wrong(objective=lambda output, batch: output.loss), "an objective needs"),
        (wrong(match="learned", data=ROWS, objective=lambda output, batch: None), "gives a NoneType; a tensor of one"),
        (
            wrong(match="learned", data=ROWS, objective=lambda output, batch: output.logits),
            "a tensor of one number is needed",
        ),
        (wrong(match="learned", data=ROWS, objective=lambda output, batch: 1.0), "the loss has no gradient"),
        (lambda a, b: hf_align.score({"A": a}, "nope"), "a list of names"),
        (lambda a, b: hf_align.score([a, b], ["nope"]), "a dict of models"),
        (lambda a, b: hf_align.merge([a, b], method="mean"), "'linear', 'slerp'"),
        (lambda a, b: hf_align.merge([a, b], align="wieght"), "'weight', 'activation', 'learned', 'none'"),
        (lambda a, b: hf_align.merge([a]), "two models or more"),
        (lambda a, b: hf_align.merge([a, b], weights=[0.5, 0.6]), "add up to one"),
        (lambda a, b: hf_align.merge([a, b], weights=[1.0]), "add up to one"),
        (lambda a, b: hf_align.merge([a, b, a], method="slerp"), "merges two models"),
        (lambda a, b: hf_align.merge([a, b], align=hf_align.align(b, to=a, witness=False), device="tpu9"), "no device"),
        (lambda a, b: hf_align.merge([a, b], push_to_hub="x/y"), "need output_dir"),
        (lambda a, b: hf_align.merge([a, b], output_dir="out"), "save_pretrained"),
        (lambda a, b: hf_align.merge([a, b], output_dir=""), "output_dir is empty"),
        (lambda a, b: hf_align.merge([a, b], output_dir=b"out"), "a str or a Path is needed"),
        (lambda a, b: hf_align.merge([a, b], weights=np.array([0.5, 0.6])), "add up to one"),
        (lambda a, b: hf_align.Alignment.from_pretrained(""), "source is empty"),
        (lambda a, b: hf_align.merge([a, b], align=[]), "0 alignments for 2 models"),
        (lambda a, b: hf_align.evaluate(a, b, [], points=5), "no examples"),
        (lambda a, b: hf_align.evaluate(a, b, ["a text"]), "tokenizer="),
        (lambda a, b: hf_align.evaluate(a, b, {}, points=2), "points is 2"),
        (lambda a, b: hf_align.align([], to=a), "no model to align"),
        (lambda a, b: hf_align.merge("org/a"), "a list of two or more"),
        (lambda a, b: hf_align.merge(a), "a list of two or more"),
        (lambda a, b: hf_align.merge(5), "a list of two or more"),
        (lambda a, b: hf_align.certify(a, layers=0), "layers is 0"),
        (wrong(spaces=5), "spaces is 5; a pattern"),
        (wrong(seed=2**70), "seed is 1180591620717411303424; it must lie between"),
        (lambda a, b: hf_align.randomize(a, seed=2**70), "it must lie between"),
        (wrong(spaces=["nowhere"]), "no space is called nowhere; there are "),
        (wrong(config="llama"), "config is 'llama'"),
        (lambda a, b: hf_align.interpolate(a, b, "0.3"), "weight is '0.3'; a finite number"),
        (lambda a, b: hf_align.merge([a, b], weights=0.5), "weights is 0.5; a list of 2 numbers"),
        (lambda a, b: hf_align.merge([a, b], weights=["a", 0.5]), "weights is 'a'; a finite number"),
        (lambda a, b: hf_align.merge([a, b], align=3), "align is 3; it must be one of 'weight'"),
        (lambda a, b: hf_align.transport(a, base=a, onto=b, strength=None), "strength is None; a finite number"),
        (lambda a, b: hf_align.symmetries(a, trust_remote_code="yes"), "True, False"),
        (wrong(device="gpu"), "gpu is no device"),
        (wrong(device=[0]), "is no device"),
        (lambda a, b: hf_align.evaluate(a, b, [{"input_ids": "In the beginning"}]), "is text"),
        (lambda a, b: hf_align.evaluate(a, b, torch.ones(2, 8).long()), "data is a tensor; say which argument it is"),
    ],
)
def test_what_cannot_be_is_said(call: Callable[[Model, Model], Any], said: str) -> None:
    a, b = built(tiny_llama(), 0), built(tiny_llama(), 1)
    with pytest.raises(OptionError, match=said):
        call(a, b)


def test_a_text_is_no_path() -> None:
    a, b = built(tiny_llama(), 0), built(tiny_llama(), 1)
    with pytest.raises(hf_align.HfAlignError, match=r"In the beginning .* is no path"):
        hf_align.evaluate(a, b, "In the beginning " * 100)


def literals(hint: Any) -> list[str]:
    """The strings that a type lists, wherever in it."""
    found = get_args(hint) if get_origin(hint) is Literal else [c for part in get_args(hint) for c in literals(part)]
    return [choice for choice in found if isinstance(choice, str)]


def hints(made: Any) -> dict[str, Any]:
    return get_type_hints(made.__init__ if isinstance(made, type) else made, localns={"Trainer": Trainer})


CALLED = {name: getattr(hf_align, name) for name in hf_align.__all__} | {"Options": Options, "Schedule": Schedule}
CHOICES = sorted(
    (name, option)
    for name, made in CALLED.items()
    if not (isinstance(made, type) and issubclass(made, Exception))
    for option, hint in hints(made).items()
    if option != "return" and literals(hint)
)


def test_there_are_choices_to_check() -> None:
    assert {("align", "heads"), ("merge", "method"), ("transport", "match"), ("Options", "dtype")} <= set(CHOICES)


@pytest.mark.parametrize(("name", "option"), CHOICES)
def test_a_wrong_choice_is_refused_first_and_the_choices_are_listed(name: str, option: str) -> None:
    """Before any model is looked for: those that are given here are nowhere."""
    made = CALLED[name]
    needed = [
        p for p in inspect.signature(made).parameters.values() if p.default is p.empty and p.kind != p.VAR_KEYWORD
    ]
    given = {p.name: ["no/a", "no/b"] if p.name == "models" else 0.5 if p.name == "weight" else "no/a" for p in needed}
    with pytest.raises(OptionError, match=f"{option} is 'no_such'") as refused:
        made(**{**given, option: "no_such"})
    assert all(repr(choice) in str(refused.value) for choice in literals(hints(made)[option]))


@pytest.mark.parametrize("option", [{"weight": 2}, {"points": 2}])
def test_numbers_of_the_pipeline_are_checked(option: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=f"{next(iter(option))} is"):
        Options(**option)


def test_the_choices_are_those_that_there_are() -> None:
    assert {*FROM_WEIGHTS, *FROM_SAMPLES, CURVE, DISTIL} == set(get_args(choice.OwnMethod))
    assert set(LAMBDA) == set(get_args(choice.LambdaSampling))


def test_models_that_do_not_belong_together() -> None:
    a = built(tiny_llama(), 0)
    with pytest.raises(hf_align.IncompatibleModels, match="they do not merge"):
        hf_align.align(built(tiny_gpt2(), 0), to=a)
    with pytest.raises(OptionError, match=r"mlp\.\w+\.weight is \[8, 8\]"):
        hf_align.align(built(tiny_llama(intermediate_size=8), 0), to=a)
    with pytest.raises(hf_align.IncompatibleModels, match="hidden_act"):
        hf_align.align(built(tiny_llama(hidden_act="relu"), 0), to=a)
    with pytest.raises(OptionError, match=r"B is a Linear.*give inputs="):
        hf_align.align(nn.Linear(2, 2), to=a)
    of_ones_own = type("OfOnesOwn", (LlamaForCausalLM,), {})
    with pytest.raises(hf_align.IncompatibleModels, match=r"OfOnesOwn is not known to transformers: register it"):
        hf_align.align(of_ones_own(tiny_llama()), to=a)


def test_a_state_dict_stays_tied() -> None:
    """No config goes with it that would say otherwise; one that an alignment of live models unties is said to be."""
    config = tiny_gpt2(tie_word_embeddings=True, initializer_range=0.5)
    a, b = built(config, 0), built(config, 1)
    states = [{n: t.clone() for n, t in m.state_dict().items()} for m in (a, b)]
    x = torch.arange(8)[None]

    def answer(state: Mapping[str, Tensor]) -> Tensor:
        model = built(config, 2)
        model.load_state_dict(state)
        logits: Tensor = model(input_ids=x).logits
        return logits

    moved = hf_align.align(states[1], to=states[0], config=config).apply(states[1])
    torch.testing.assert_close(answer(moved), b(input_ids=x).logits, rtol=1e-4, atol=1e-4)
    apart = hf_align.align(b, to=a, untie=True)
    with pytest.warns(UserWarning, match=r"lm_head.weight and transformer.wte.weight are one .* and two in"):
        apart.apply(b.state_dict())


def test_why_a_live_model_does_not_run_is_said() -> None:
    """Parts of it are in another dtype, which runs with autocast alone."""
    a, b = built(tiny_llama(), 0), built(tiny_llama(), 1)
    a.lm_head.to(torch.bfloat16)
    with pytest.raises(hf_align.IncompatibleModels, match=r"cannot be run beside .*: expected .* same dtype"):
        hf_align.align(b, to=a)


def test_an_alignment_is_for_models_that_compute_the_same(tmp_path: Path) -> None:
    a, b = built(tiny_gpt2(), 0), built(tiny_gpt2(), 1)
    hf_align.align(b, to=a).save_pretrained(tmp_path)
    for alignment in (hf_align.align(b, to=a), hf_align.Alignment.from_pretrained(tmp_path)):
        assert alignment.apply(built(tiny_gpt2(attn_pdrop=0.3), 2))
        for field in ({"n_head": 1}, {"activation_function": "relu"}):
            other = built(tiny_gpt2(**field), 2)
            with pytest.raises(hf_align.IncompatibleModels, match=f"{min(field)} is .* in the aligned model"):
                alignment.apply(other)
            with pytest.raises(hf_align.IncompatibleModels, match=f"{min(field)} is .* in the aligned model"):
                hf_align.merge([other, other], align=alignment)


def test_an_alignment_of_tied_models_is_for_no_other() -> None:
    a, b = (built(tiny_gpt2(tie_word_embeddings=True), seed) for seed in (0, 1))
    alignment = hf_align.align(b, to=a, untie=False)
    with pytest.raises(hf_align.IncompatibleModels, match="weight of the model is a weight of its own"):
        alignment.apply(built(tiny_gpt2(tie_word_embeddings=False), 2))


@pytest.mark.parametrize("how", ["replaced", "hooked"])
def test_a_live_model_that_is_not_what_its_config_says(how: str) -> None:
    model = built(tiny_llama(), 0)
    if how == "replaced":
        model.model.layers[0].mlp.act_fn = nn.ReLU()
    else:
        model.model.layers[0].register_forward_hook(lambda module, args, output: output + 1)
    with pytest.raises(hf_align.IncompatibleModels, match="does not compute what its config describes"):
        take(model)


def test_what_is_public() -> None:
    assert {getattr(hf_align, name) for name in hf_align.__all__} and set(hf_align.__all__) <= set(dir(hf_align))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        hf_align.nothing  # noqa: B018
    loaded = "import hf_align, sys; print({'torch', 'transformers', 'numpy'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True).stdout == "set()\n"
    assert (Path(hf_align.__file__).parent / "py.typed").is_file()
