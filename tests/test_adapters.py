"""LoRA adapters as inputs: merged into their base as it is read, as PEFT itself would merge them."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
import yaml
from conftest import run, tiny_bert, tiny_gpt2, tiny_llama
from hub_server import Hub
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from torch import Tensor

from hf_align.checkpoints.adapters import adapted
from hf_align.checkpoints.checkpoint import Checkpoint
from hf_align.checkpoints.hub import resolve
from hf_align.jobs.in_memory import InMemory
from hf_align.opening.pairs import open_pair
from hf_align.publishing.provenance import Provenance

peft = pytest.importorskip("peft", reason="pip install hf-align[mergekit]")

Kind = type[transformers.PreTrainedModel]
LLAMA = transformers.LlamaForCausalLM


def weights(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., tuple[Path, Path, Path]]:
    """A base, an adapter of it with random factors, and what PEFT merges them to."""

    def build(
        name: str = "x", kind: Kind = LLAMA, config: transformers.PretrainedConfig | None = None, seed: int = 0,
        dtype: torch.dtype = torch.float32, **asked: object,
    ) -> tuple[Path, Path, Path]:  # fmt: skip
        torch.manual_seed(seed)
        base, lora, merged = (tmp_path / name / part for part in ("base", "lora", "merged"))
        model = kind(config or tiny_llama(num_hidden_layers=2)).to(dtype)
        model.save_pretrained(base)
        model = kind.from_pretrained(base)
        wanted = {"r": 3, "lora_alpha": 7, "target_modules": ["q_proj", "down_proj"], **asked}
        tuned = peft.get_peft_model(model, peft.LoraConfig(**wanted))
        for parameter in tuned.parameters():
            if parameter.requires_grad:
                torch.nn.init.normal_(parameter, std=0.5)
        tuned.save_pretrained(lora)
        tuned.merge_and_unload().save_pretrained(merged)
        return base, lora, merged

    return build


def read(reference: str) -> dict[str, Tensor]:
    return dict(InMemory.open(reference, trust_remote_code=False).checkpoint)


def assert_merged(reference: str, expected: Path, **tolerance: float) -> None:
    found, wanted = read(reference), weights(expected)
    assert found.keys() == wanted.keys()
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name], **(tolerance or {"rtol": 1e-6, "atol": 1e-6}))


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"use_rslora": True},
        {"rank_pattern": {"down_proj": 2}, "alpha_pattern": {"layers.1.self_attn.q_proj": 3}},
        {"target_modules": ["q_proj", "embed_tokens"]},
        {"modules_to_save": ["lm_head"]},
        {"target_modules": "all-linear", "exclude_modules": ["lm_head"]},
    ],
    ids=str,
)
def test_an_adapter_is_merged_as_peft_does(asked: dict[str, object], make: Callable[..., tuple[Path, ...]]) -> None:
    base, lora, merged = make(**asked)
    assert_merged(f"{base}+{lora}", merged)
    assert any(not torch.equal(t, weights(base)[n]) for n, t in read(str(lora)).items())  # its config names its base


@pytest.mark.parametrize("options", [["--match", "none", "--method", "linear"], ["--effort", "quick", "--no-witness"]])
def test_a_base_that_an_adapter_does_not_name_is_named(
    options: list[str], make: Callable[..., tuple[Path, ...]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever fits is merged, which is what was asked for, but perhaps not what was meant."""
    base, lora, _ = make()
    other = shutil.copytree(make("y", seed=1)[0], tmp_path / "other")
    for number, (named, said) in enumerate(((base, False), (other, True))):
        out = tmp_path / f"out{number}"
        assert run("merge", other, f"{named}+{lora}", "-o", out, "--quiet", *options) == 0
        found = " ".join(capsys.readouterr().out.split())
        assert ("the adapter lora names base as its base, and is merged into other" in found) == said


def test_weights_that_are_stored_transposed(make: Callable[..., tuple[Path, ...]]) -> None:
    """GPT-2's projections are [inputs, outputs]; c_proj is square, so only the code tells."""
    asked = {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}
    _, lora, merged = make("g", transformers.GPT2LMHeadModel, tiny_gpt2(), **asked)
    assert_merged(str(lora), merged)


def test_weights_of_which_some_are_stored_transposed(make: Callable[..., tuple[Path, ...]]) -> None:
    """What PEFT writes is the layout of the module that it came to last, here the head's."""
    config = tiny_gpt2()
    config.tie_word_embeddings = False
    asked = {"target_modules": ["c_attn", "c_proj", "lm_head"], "fan_in_fan_out": True}
    _, lora, merged = make("h", transformers.GPT2LMHeadModel, config, **asked)
    assert not json.loads((lora / "adapter_config.json").read_text())["fan_in_fan_out"]
    assert_merged(str(lora), merged)


def test_a_layout_that_the_code_contradicts(make: Callable[..., tuple[Path, ...]]) -> None:
    """PEFT goes by the modules, too."""
    _, lora, merged = make("q", target_modules=["q_proj", "o_proj"])
    said = json.loads((lora / "adapter_config.json").read_text())
    (lora / "adapter_config.json").write_text(json.dumps({**said, "fan_in_fan_out": True}))
    assert_merged(str(lora), merged)


def test_biases_of_an_adapter(make: Callable[..., tuple[Path, ...]]) -> None:
    _, lora, merged = make("b", transformers.BertForMaskedLM, tiny_bert(), target_modules=["query"], bias="lora_only")
    assert_merged(str(lora), merged)


def test_convolutions(make: Callable[..., tuple[Path, ...]]) -> None:
    config = transformers.ViTConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=6,
                                    image_size=4, patch_size=2, num_channels=1)  # fmt: skip
    asked = {"target_modules": ["projection"]}
    _, lora, merged = make("v", transformers.ViTForImageClassification, config, **asked)
    assert_merged(str(lora), merged)


def test_low_precision_is_rounded_once(make: Callable[..., tuple[Path, ...]]) -> None:
    _, lora, merged = make(dtype=torch.bfloat16)
    assert_merged(str(lora), merged, rtol=0, atol=0)


def test_parts_of_a_tensor_are_those_of_the_whole(make: Callable[..., tuple[Path, ...]]) -> None:
    base, lora, _ = make()
    source = resolve(f"{base}+{lora}")
    checkpoint = adapted(Checkpoint.open(source.folder), source, by_inputs=())
    name = "model.layers.1.mlp.down_proj.weight"  # [8, 6]
    whole = checkpoint[name].flatten()
    memory = torch.empty(48 * 8, dtype=torch.uint8)
    for start, stop in ((0, 48), (0, 5), (5, 7), (6, 12), (11, 48), (47, 48)):
        torch.testing.assert_close(checkpoint.entries(name, start, stop, memory), whole[start:stop])


def test_names_in_memory_that_are_not_those_on_disk(make: Callable[..., tuple[Path, ...]]) -> None:
    """A base that was saved without its head: every name lacks the prefix that the adapter has."""
    base, lora, merged = make("n", transformers.GPT2LMHeadModel, tiny_gpt2(), target_modules=["c_fc"],
                              fan_in_fan_out=True)  # fmt: skip
    stored = load_file(base / "model.safetensors")
    save_file({n.removeprefix("transformer."): t for n, t in stored.items()}, base / "model.safetensors",
              {"format": "pt"})  # fmt: skip
    found, wanted = read(str(lora)), weights(merged)
    assert all(torch.allclose(t, found[n.removeprefix("transformer.")], atol=1e-6) for n, t in wanted.items())


# In the commands ------------------------------------------------------------------------------------------------------


def test_merge_and_align_with_adapters(make: Callable[..., tuple[Path, ...]], tmp_path: Path) -> None:
    (base, lora, whole), (other, second, _) = make("x"), make("y", seed=1)
    for command in (("merge",), ("merge", "--match", "none"), ("align",)):
        one, two = tmp_path / "one", tmp_path / "two"
        assert run(command[0], f"{base}+{lora}", second, "-o", one, "--overwrite", "--quiet", *command[1:]) == 0
        assert run(command[0], whole, tmp_path / "y" / "merged", "-o", two, "--overwrite", "--quiet", *command[1:]) == 0
        a, b = weights(one), weights(two)
        assert a.keys() == b.keys()
        for name in a:
            torch.testing.assert_close(a[name], b[name], rtol=1e-4, atol=1e-5)
    assert other.is_dir()


def test_no_model_is_built_to_merge_an_adapter_as_it_is(
    make: Callable[..., tuple[Path, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, lora, whole = make("x", target_modules=["up_proj", "down_proj"])  # not square

    def never(*_: object, **__: object) -> None:
        raise AssertionError("modelling code was used")

    for module in [module for name, module in sys.modules.items() if name.startswith("hf_align.")]:
        if hasattr(module, "build_without_weights"):
            monkeypatch.setattr(module, "build_without_weights", never)
    assert run("merge", whole, lora, "-o", tmp_path / "out", "--match", "none", "--quiet") == 0
    merged, expected = weights(tmp_path / "out"), weights(whole)
    assert all(torch.allclose(merged[n], expected[n], atol=1e-6) for n in expected)


def test_another_adapter_is_another_merge(make: Callable[..., tuple[Path, ...]], tmp_path: Path) -> None:
    """What a run goes on with depends on the adapter's bytes too."""
    base, lora, _ = make()
    source = resolve(f"{base}+{lora}")

    def record() -> dict[str, str]:
        return adapted(Checkpoint.open(source.folder), source, by_inputs=()).record("a")

    before = record()
    config = json.loads((lora / "adapter_config.json").read_text())
    (lora / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": 8}))
    assert record() != before and len(before) == 6


def test_a_recipe_with_adapters(make: Callable[..., tuple[Path, ...]], tmp_path: Path) -> None:
    pytest.importorskip("mergekit")
    (base, lora, whole), (_, second, other) = make("x"), make("y", seed=1)
    for align in (False, True):
        for name, models in {"ours": (f"{base}+{lora}", str(second)), "whole": (str(whole), str(other))}.items():
            recipe = {"merge_method": "linear", "align": align,
                      "models": [{"model": m, "parameters": {"weight": 1.0}} for m in models]}  # fmt: skip
            (tmp_path / "r.yml").write_text(yaml.safe_dump(recipe))
            out = tmp_path / f"{name}{align}"
            assert run("mergekit", tmp_path / "r.yml", out, "--quiet") == 0
        a, b = weights(tmp_path / f"ours{align}"), weights(tmp_path / f"whole{align}")
        assert a.keys() == b.keys()
        for key in a:
            torch.testing.assert_close(a[key], b[key], rtol=1e-4, atol=1e-5)
    shown = yaml.safe_load((tmp_path / "oursTrue" / "mergekit_config.yml").read_text())
    assert [m["model"] for m in shown["models"]] == ["base+lora", "base+lora"]


def test_adapters_from_the_hub(hub: Hub, make: Callable[..., tuple[Path, ...]], tmp_path: Path) -> None:
    base, lora, whole = make("x")
    commit = hub.add("org/base", base)
    config = json.loads((lora / "adapter_config.json").read_text())
    (lora / "adapter_config.json").write_text(
        json.dumps({**config, "base_model_name_or_path": "org/base", "revision": commit})
    )
    (lora / "README.md").write_text("---\nlicense: mit\n---\n")
    hub.add("lab/lora", lora)
    assert_merged("lab/lora", whole)
    assert_merged("org/base@main+lab/lora@main", whole)
    assert run("merge", "org/base", "lab/lora", "-o", tmp_path / "out", "--match", "none", "--push", "--quiet") == 0
    made = Provenance.load(tmp_path / "out")
    assert [(i.name, i.adapter_of) for i in made.inputs] == [("org/base", None), ("lab/lora", "org/base")]
    card = ModelCard(hub.files("alice/base-lora-merge")["README.md"].decode())
    assert card.data.to_dict()["base_model"] == ["org/base", "lab/lora"]
    assert "an adapter of org/base" in card.content and "are not all known" in card.content


def test_what_is_said_of_adapters_has_no_path(make: Callable[..., tuple[Path, ...]], tmp_path: Path) -> None:
    base, lora, _ = make("x")
    assert run("merge", base, f"{base}+{lora}", "-o", tmp_path / "out", "--match", "weight") == 0
    assert Provenance.load(tmp_path / "out").command == "hf-align merge base base+lora -o out --match weight"
    for file in (tmp_path / "out").rglob("*"):
        assert file.is_dir() or ".hf-align" in file.parts or str(tmp_path).encode() not in file.read_bytes(), file


# Bad input -----------------------------------------------------------------------------------------------------------


def change(folder: Path, **values: object) -> None:
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, **values}))


def refused(capsys: pytest.CaptureFixture[str], out: Path, *models: object) -> str:
    capsys.readouterr()  # what PEFT said
    assert run("merge", *models, "-o", out, "--quiet") == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and not out.exists()
    return lines[0]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"base_model_name_or_path": None}, "does not name its base; write BASE+"),
        ({"base_model_name_or_path": "./gone"}, "is an adapter of ./gone (./gone is neither a folder nor a Hub id"),
        ({"peft_type": "IA3"}, "an adapter of the kind IA3, not LoRA"),
        ({"use_dora": True}, "is not a plain LoRA (use_dora)"),
        ({"use_bdlora": {"nblocks": 2}}, "is not a plain LoRA (use_bdlora)"),
        ({"init_lora_weights": "pissa_niter_4"}, "is not a plain LoRA (init_lora_weights pissa_niter_4)"),
    ],
)
def test_adapters_that_cannot_be_merged(
    values: dict[str, object], message: str, make: Callable[..., tuple[Path, ...]], tmp_path: Path,
    capsys: pytest.CaptureFixture[str], hub: Hub,
) -> None:  # fmt: skip
    base, lora, _ = make()
    change(lora, **values)
    assert message in refused(capsys, tmp_path / "out", base, lora)


def test_adapters_that_do_not_fit(
    make: Callable[..., tuple[Path, ...]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (base, _, _), (alike, wide, _) = make("x"), make("y", config=tiny_llama(hidden_size=16, head_dim=8))
    (_, elsewhere, _) = make("z", transformers.GPT2LMHeadModel, tiny_gpt2(), target_modules=["c_fc"])
    assert "does not fit the base's" in refused(capsys, tmp_path / "out", base, f"{base}+{wide}")
    assert "which its base does not store" in refused(capsys, tmp_path / "out", base, f"{base}+{elsewhere}")
    assert "is not of the form BASE+ADAPTER" in refused(capsys, tmp_path / "out", base, f"{base}+{base}")
    stored = load_file(wide / "adapter_model.safetensors")
    save_file({n: t for n, t in stored.items() if "lora_A" in n}, wide / "adapter_model.safetensors")
    assert "has only half of the change" in refused(capsys, tmp_path / "out", alike, wide)
    (wide / "adapter_model.safetensors").unlink()
    assert "has no adapter_model.safetensors" in refused(capsys, tmp_path / "out", alike, wide)


def test_an_adapter_with_more_than_two_factors(
    make: Callable[..., tuple[Path, ...]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, lora, _ = make()
    stored = load_file(lora / "adapter_model.safetensors")
    stored["base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector.weight"] = torch.zeros(8)
    save_file(stored, lora / "adapter_model.safetensors")
    assert "is not a plain LoRA; merge it with PEFT first" in refused(capsys, tmp_path / "out", base, lora)


def test_an_adapter_beside_the_weights_is_refused(
    make: Callable[..., tuple[Path, ...]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`from_pretrained` loads both."""
    base, lora, _ = make()
    shutil.copytree(base, tmp_path / "both")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        shutil.copy(lora / name, tmp_path / "both")
    loaded = LLAMA.from_pretrained(tmp_path / "both")
    assert any("lora" in name for name, _ in loaded.named_parameters())
    for pair in ((base, tmp_path / "both"), (tmp_path / "both", base), (base, f"{tmp_path / 'both'}+{lora}")):
        assert "adapter_config.json beside its weights" in refused(capsys, tmp_path / "out", *pair)


def test_tied_heads_are_named(
    make: Callable[..., tuple[Path, ...]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In a model whose head is tied, a change of the head would be one of the embedding as well."""
    config = tiny_llama(tie_word_embeddings=True)
    base, lora, _ = make("t", config=config, target_modules=["lm_head"])
    assert "changes lm_head.weight, which its base does not store" in refused(capsys, tmp_path / "out", base, lora)
    assert open_pair(str(base), str(base)).untied


@pytest.mark.parametrize("options", [["--match", "none", "--method", "linear"], ["--effort", "quick", "--no-witness"]])
@pytest.mark.parametrize("asked", [{"target_modules": ["wte"]}, {"modules_to_save": ["wte"]}], ids=str)
def test_a_change_of_one_use_of_a_tied_weight_is_refused(
    asked: dict[str, object], options: list[str], make: Callable[..., tuple[Path, ...]], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """PEFT runs the changed embedding with the head as it was: no weight that both share computes that."""
    tied = tiny_gpt2(tie_word_embeddings=True)
    base, lora, _ = make("t", transformers.GPT2LMHeadModel, tied, **{"target_modules": ["c_attn"], **asked})
    capsys.readouterr()  # what making them said
    assert run("merge", base, lora, "-o", tmp_path / "out", "--quiet", *options) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "changes transformer.wte.weight alone, but lm_head.weight of its base is tied to it" in line
    assert not (tmp_path / "out").exists()
    _, harmless, _ = make("h", transformers.GPT2LMHeadModel, tied, target_modules=["c_attn"])
    assert run("merge", base, f"{base}+{harmless}", "-o", tmp_path / "out", "--quiet", *options) == 0
