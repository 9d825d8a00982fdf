"""An adapter that is carried to another base comes out as an adapter of that, which PEFT loads."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import transformers
from conftest import run, tiny_gpt2, tiny_llama
from safetensors.torch import load_file, save_file
from torch import Tensor

import hf_align
from hf_align.checkpoints.adapters import WEIGHTS, LowRank
from hf_align.checkpoints.checkpoint import Checkpoint
from hf_align.errors import CheckpointError
from hf_align.jobs.as_adapter import Changes, LeftOut
from hf_align.merging.fits import of_rank, ridge

peft = pytest.importorskip("peft", reason="pip install hf-align[mergekit]")

Kind = type[transformers.PreTrainedModel]
Made = tuple[Path, Path, Path]
LLAMA, GPT2 = transformers.LlamaForCausalLM, transformers.GPT2LMHeadModel
ROWS = torch.randint(11, (16, 8), generator=torch.Generator().manual_seed(3))


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Made]:
    """An adapter with random factors, its base, and another base: the same in another basis, or of another seed."""

    def build(kind: Kind = LLAMA, seed: int | None = None, noise: float = 0.2, **asked: object) -> Made:
        config = tiny_llama(num_hidden_layers=2) if kind is LLAMA else tiny_gpt2(initializer_range=0.5)
        torch.manual_seed(0)
        base = kind(config)
        if seed is None:
            other = hf_align.randomize(base, seed=3)
        else:
            torch.manual_seed(seed)
            other = kind(config)
        for name, model in (("base", base), ("other", other)):
            model.save_pretrained(tmp_path / name)
        wanted = {"r": 2, "lora_alpha": 7, "target_modules": ["q_proj", "down_proj"], **asked}
        tuned = peft.get_peft_model(base, peft.LoraConfig(**wanted))
        for parameter in tuned.parameters():
            if parameter.requires_grad:
                with torch.no_grad():
                    parameter.add_(noise * torch.randn_like(parameter))
        tuned.save_pretrained(tmp_path / "lora")
        return tmp_path / "lora", tmp_path / "base", tmp_path / "other"

    return build


def carried(made: Made, *options: object, adapter: bool = True) -> Path:
    lora, base, other = made
    out = base.parent / "out"
    asked = [*options, "--as-adapter"] if adapter else options
    assert run("transport", f"{base}+{lora}", "--base", base, "--onto", other, "-o", out, "--quiet", *asked) == 0
    return out


@torch.no_grad()
def answers(model: transformers.PreTrainedModel, rows: Tensor = ROWS) -> Tensor:
    found: Tensor = model.eval()(input_ids=rows).logits
    return found


def loaded(base: Path, lora: Path | None = None) -> transformers.PreTrainedModel:
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    return model if lora is None else peft.PeftModel.from_pretrained(model, lora)


CASES: dict[str, tuple[Kind, dict[str, object]]] = {
    "llama": (LLAMA, {}),
    "ranks": (LLAMA, {"rank_pattern": {"down_proj": 3}, "use_rslora": True, "modules_to_save": ["lm_head"]}),
    "transposed": (GPT2, {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    "head": (LLAMA, {"target_modules": ["q_proj", "lm_head"]}),
    "biases": (GPT2, {"target_modules": ["c_fc"], "fan_in_fan_out": True, "bias": "lora_only"}),
}


@pytest.mark.parametrize("case", CASES)
def test_on_its_own_base_in_another_basis_it_does_what_it_did(case: str, make: Callable[..., Made]) -> None:
    kind, asked = CASES[case]
    made = make(kind, **asked)
    lora, base, other = made
    expected, before = answers(loaded(base, lora)), answers(loaded(other))
    found = answers(loaded(other, carried(made, "--keep", "0")))
    assert float((found - expected).abs().max()) < 0.02 * float((before - expected).abs().max())
    stored, trained = (
        load_file(base.parent / "out" / "adapter_model.safetensors"),
        load_file(lora / "adapter_model.safetensors"),
    )
    assert {n: t.shape for n, t in stored.items()} == {n: t.shape for n, t in trained.items()}


def test_a_head_is_saved_beside_its_factors(make: Callable[..., Made], capsys: pytest.CaptureFixture[str]) -> None:
    """By PEFT, as it is in the base: in the other base it is that of the other. One that is trained is refused."""
    made = make(**CASES["head"][1])
    lora, base, other = made
    (head,) = (name for name in load_file(lora / WEIGHTS) if "base_layer" in name)
    stored, trained = load_file(carried(made, "--keep", "0") / WEIGHTS), load_file(lora / WEIGHTS)
    assert stored[head].equal(load_file(other / "model.safetensors")["lm_head.weight"])
    save_file({**trained, head: 2 * trained[head]}, lora / WEIGHTS)
    capsys.readouterr()
    assert run("transport", f"{base}+{lora}", "--base", base, "--onto", other, "-o", base.parent / "no",
               "--quiet", "--as-adapter") == 2  # fmt: skip
    assert "has another lm_head.weight and changes it by factors" in capsys.readouterr().err


def test_peft_loads_what_was_fitted(make: Callable[..., Made]) -> None:
    """What PEFT computes is what hf-align computes with base and adapter, and nothing is lost in the factors."""
    made = make(seed=1)
    out = carried(made)
    whole = base_with(made[2], out)
    torch.testing.assert_close(answers(loaded(made[2], out)), answers(whole), rtol=1e-4, atol=1e-5)
    config = json.loads((out / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "other" and config["r"] == 2
    assert not (out / "config.json").exists() and not list(out.glob("model*.safetensors"))
    card = (out / "README.md").read_text()
    assert "an adapter of other, with a change of rank 2" in card and "library_name: peft" in card
    assert str(out.parent) not in card + (out / "adapter_config.json").read_text()


def test_a_change_of_a_higher_rank_is_refused_and_of_a_lower_one_is_exact() -> None:
    rng = torch.Generator().manual_seed(0)
    up, down = (torch.randn(n, 3, generator=rng) for n in (8, 5))
    for part in (LowRank("down", "up", -0.5, transposed=False), LowRank("down", "up", 2.0, transposed=True)):
        change = down @ up.T if part.transposed else up @ down.T
        for rank in (3, 4, 7):
            stored = {"down": torch.zeros(rank, 5), "up": torch.zeros(8, rank)}
            found = part.factors(change, as_checkpoint(stored))
            torch.testing.assert_close(part.rows(found, 0, len(change)), change)
            assert {n: t.shape for n, t in found.items()} == {n: t.shape for n, t in stored.items()}
        with pytest.raises(CheckpointError, match="a higher rank than 2"):
            part.factors(change, as_checkpoint({"down": torch.zeros(2, 5), "up": torch.zeros(8, 2)}))


def as_checkpoint(stored: dict[str, Tensor]) -> Checkpoint:
    return SimpleNamespace(info=stored.__getitem__)  # type: ignore[return-value]


def written(model: transformers.PreTrainedModel) -> Tensor:
    """Rows of tokens that a model samples."""
    torch.manual_seed(0)
    rows: Tensor = model.generate(torch.randint(11, (128, 1)), do_sample=True, top_k=0, min_length=8, max_length=8)
    return rows


def base_with(base: Path, lora: Path) -> transformers.PreTrainedModel:
    """Both merged by hf-align."""
    out = lora.parent / "merged"
    assert run("merge", f"{base}+{lora}", f"{base}+{lora}", "-o", out, "--match", "none", "--method", "linear",
               "--quiet", "--overwrite") == 0  # fmt: skip
    return loaded(out)


def test_more_rank_carries_more(make: Callable[..., Made]) -> None:
    """On another seed a change of the same rank is no copy; what it aims at is the fine-tune, where that speaks."""
    far = {}
    for rank in (1, 6):
        made = make(GPT2, seed=1, noise=0.5, r=rank, target_modules=["c_attn", "c_fc", "lm_head"],
                    fan_in_fan_out=True)  # fmt: skip
        tuned = loaded(made[1], made[0])
        rows = written(tuned)
        told = answers(tuned, rows).log_softmax(-1)
        for name, model in (("before", loaded(made[2])),
                            ("after", loaded(made[2], carried(made, "--keep", "0", "--overwrite")))):  # fmt: skip
            found = answers(model, rows).log_softmax(-1)
            far[rank, name] = float((told.exp() * (told - found)).sum(-1).mean())
    assert far[1, "after"] < far[1, "before"] and far[6, "after"] < 0.5 * far[6, "before"]


@pytest.mark.parametrize("case", ["ranks", "transposed", "biases"])
def test_training_goes_on_from_the_fit_and_no_rank_grows(case: str, make: Callable[..., Made]) -> None:
    """What is trained is what PEFT loads, and it is nearer to the fine-tune than the fit is."""
    kind, asked = CASES[case]
    made = make(kind, seed=1, noise=0.5, **asked)
    rows, far = written(loaded(made[1], made[0])), {}
    told = answers(loaded(made[1], made[0]), rows).log_softmax(-1)
    for method, steps in (("regression", ()), ("distil", ("--steps", 300))):
        out = carried(made, "--method", method, *steps, "--keep", "0", "--overwrite")
        found = answers(loaded(made[2], out), rows)
        torch.testing.assert_close(found, answers(base_with(made[2], out), rows), rtol=1e-3, atol=1e-4)
        far[method] = float((told.exp() * (told - found.log_softmax(-1))).sum(-1).mean())
        stored, trained = (load_file(at / "adapter_model.safetensors") for at in (out, made[0]))
        assert {n: t.shape for n, t in stored.items()} == {n: t.shape for n, t in trained.items()}
    assert far["distil"] < 0.995 * far["regression"]


def test_the_least_squares_of_a_rank() -> None:
    """Of all of that rank none is better, with a bias that is free, and of full rank it is the ridge."""
    rng = torch.Generator().manual_seed(0)
    x, y = (torch.randn(200, n, generator=rng, dtype=torch.double) for n in (5, 4))
    x = torch.cat([x @ torch.randn(5, 5, generator=rng, dtype=torch.double), torch.ones(200, 1).double()], 1)
    y = y + 3 + x[:, :4]
    gram, product = x.T @ x, x.T @ y
    torch.testing.assert_close(of_rank(gram, product, 4, 5)[0], ridge(gram, product))
    best, values = of_rank(gram, product, 2, 5)
    assert torch.linalg.matrix_rank(best[:5]) == 2 and len(values) == 4
    held = gram + 1e-3 * gram.diagonal().mean() * torch.eye(6).double()

    def loss(w: Tensor) -> float:
        return float((w * (held @ w)).sum() - 2 * (w * product).sum())

    u, s, vh = torch.linalg.svd(best[:5])
    for _ in range(200):
        a, b = u[:, :2] * s[:2], vh[:2]
        step = [1e-3 * torch.randn(t.shape, generator=rng, dtype=torch.double) for t in (a, b, best[5:])]
        assert loss(torch.cat([(a + step[0]) @ (b + step[1]), best[5:] + step[2]])) > loss(best)


@pytest.mark.parametrize(
    ("asked", "options", "message"),
    [
        ({"target_modules": ["q_proj", "embed_tokens"]}, [], "embed_tokens.weight, which no regression finds"),
        ({}, ["--method", "task_arithmetic"], "--method task_arithmetic fits none"),
        ({}, ["--dtype", "bfloat16"], "--dtype is of a whole model"),
        ({"lora_alpha": 0}, [], "its lora_alpha is 0"),
        (None, [], "is no adapter"),
    ],
    ids=["embedding", "task arithmetic", "dtype", "alpha", "whole model"],
)
def test_what_cannot_be_an_adapter(
    asked: dict[str, object] | None, options: list[str], message: str, make: Callable[..., Made],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    lora, base, other = make(seed=1, **(asked or {}))
    finetuned = other if asked is None else f"{base}+{lora}"
    capsys.readouterr()
    assert run("transport", finetuned, "--base", base, "--onto", other, "-o", base.parent / "out", "--as-adapter",
               "--quiet", *options) == 2  # fmt: skip
    said = capsys.readouterr().err.strip()
    assert message in " ".join(said.split()) and not (base.parent / "out").exists()


def test_what_a_rank_leaves_out_is_told(make: Callable[..., Made], capsys: pytest.CaptureFixture[str]) -> None:
    """In the summary, as JSON and on the card; what it costs in loss, where that is measured."""
    made = make(LLAMA, r=1, noise=1.0, target_modules=["q_proj", "down_proj"])
    text = made[1].parent / "text.safetensors"
    save_file({"input_ids": torch.randint(11, (64, 8), generator=torch.Generator().manual_seed(4))}, text)
    told = {}
    for data in ((), ("--data", text)):
        capsys.readouterr()
        carried(made, "--json", "--overwrite", "--keep", "0", *data)
        (told[bool(data)],) = (n for n in json.loads(capsys.readouterr().out)["notes"] if "99% is kept" in n)
    assert told[False].startswith("rank 1 keeps ") and "the loss is" not in told[False]
    assert "and with changes of any rank" in told[True]
    card = (made[1].parent / "out" / "README.md").read_text()
    assert "99% is kept from rank" in card


def test_what_its_dtype_cannot_hold_is_not_written(tmp_path: Path) -> None:
    """An adapter in half precision would be written with infinite entries."""
    save_file({"head": torch.ones(2, 3, dtype=torch.float16)}, tmp_path / "adapter.safetensors")
    changes = Changes(Checkpoint.of_file(tmp_path, "adapter.safetensors"), {"weight": "head"})
    written = changes.entries({"weight": torch.ones(2, 3)}, {"weight": torch.full((2, 3), 6e4)}).entries("head", 0, 6)
    assert written.eq(6e4).all()
    with pytest.raises(CheckpointError, match=r"head has entries that torch\.float16 cannot hold"):
        changes.entries({"weight": torch.ones(2, 3)}, {"weight": torch.full((2, 3), 7e4)}).entries("head", 0, 6)


def test_what_ranks_leave_out() -> None:
    first, second = torch.tensor([3.0, 1.0, 0.0]), torch.tensor([2.0, 2.0])
    cut = LeftOut.of([(first, 1), (second, 1)])
    assert cut.share == pytest.approx(5 / 18) and cut.enough == 2
    assert LeftOut.of([(first, 3), (second, 3)]).share == 0
    assert LeftOut.of([(torch.tensor([10.0, 1.0, 0.5]), 1)]).enough == 2  # one leaves out 1.2 %
    assert LeftOut.of([(torch.zeros(2), 1)]) == LeftOut(0.0, 1)


@pytest.mark.parametrize("transposed", [False, True])
def test_what_is_said_of_an_adapter_is_measured_on_its_factors_as_they_are_written(
    transposed: bool, tmp_path: Path
) -> None:
    rng = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 5, generator=rng), torch.randn(7, 2, generator=rng)
    save_file({"a": a.bfloat16(), "b": b.bfloat16(), "head": torch.ones(3).half()}, tmp_path / "adapter.safetensors")
    stored = Checkpoint.of_file(tmp_path, "adapter.safetensors")
    changes = Changes(stored, {"weight": LowRank("a", "b", 0.5, transposed), "bias": "head"})
    before = {"weight": torch.zeros((5, 7) if transposed else (7, 5)), "bias": torch.zeros(3), "rest": torch.ones(1)}
    change = 0.3 * b @ a
    after = before | {"weight": change.T if transposed else change, "bias": torch.full((3,), 0.1)}
    read, tensors = changes.read_back(before, after), changes.entries(before, after)
    down, up = tensors.entries("a", 0, 10).view(2, 5), tensors.entries("b", 0, 14).view(7, 2)
    written = 0.5 * up.float() @ down.float()
    torch.testing.assert_close(read["weight"], written.T if transposed else written)
    assert not torch.equal(read["weight"], after["weight"])
    assert read["bias"].equal(torch.full((3,), 0.1).half().float()) and read["rest"] is after["rest"]
