"""Models that transformers does not know go the way of all others: registered in Python, or with code of their own."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers
from conftest import run, tiny_llama
from conftest import save as save_as
from oddball import OddballConfig, OddballForCausalLM
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.auto import configuration_auto, modeling_auto

import hf_align
from hf_align.errors import HfAlignError, OptionError
from hf_align.symmetry.certificate.certify import certify
from hf_align.symmetry.derivation.derive import derive
from hf_align.tracing import modes
from hf_align.tracing.build import model_class, read_config
from hf_align.tracing.trace import trace

WITH_LOSS = """print("something")
        logits = self.head(self.norm(x))
        loss = None if labels is None else self.loss_function(logits, labels, logits.shape[-1])
        return CausalLMOutput(loss=loss, logits=logits)"""
LLAMA = {
    "mine_config.py": """from transformers import LlamaConfig


class MineConfig(LlamaConfig):
    model_type = "mine"
""",
    "mine.py": """import transformers

from .mine_config import MineConfig


class LlamaForCausalLM(transformers.LlamaForCausalLM):
    config_class = MineConfig
""",
}
_LOADED = "transformers_modules"
"""The package of the code of models."""
IDS = torch.randint(29, (4, 9), generator=torch.Generator().manual_seed(5))
"""Enough words and few enough channels that what one layer does to each word determines its weights."""


def tiny(**changes: object) -> OddballConfig:
    sizes = dict(vocab_size=29, hidden_size=6, intermediate_size=5, architectures=["OddballForCausalLM"])
    return OddballConfig(**{**sizes, **changes})


def save(folder: Path, seed: int, **changes: object) -> Path:
    torch.manual_seed(seed)
    model = OddballForCausalLM(tiny(num_hidden_layers=2, **changes))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(torch.randn_like(weight) * 0.4 + ("norm" in name))
    model.save_pretrained(folder)
    return folder


def logits(folder: Path, **how: object) -> Tensor:
    with torch.no_grad():
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, **how)(IDS).logits


@pytest.fixture
def registered() -> Iterator[None]:
    transformers.AutoConfig.register("oddball", OddballConfig)
    transformers.AutoModelForCausalLM.register(OddballConfig, OddballForCausalLM)
    yield
    configuration_auto.CONFIG_MAPPING._extra_content.pop("oddball")
    modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING._extra_content.pop(OddballConfig)


@pytest.fixture
def code_of_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A place of its own where transformers puts the code of models, and loads it from."""
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] == _LOADED}
    usual = transformers.dynamic_module_utils.HF_MODULES_CACHE
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder != usual])
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    for name in before:
        del sys.modules[name]
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == _LOADED]:
        del sys.modules[name]
    sys.modules.update(before)


@pytest.fixture
def with_code(tmp_path: Path, code_of_models: None) -> tuple[Path, Path]:
    """Two checkpoints that bring their modelling code along."""
    for name, seed in (("a", 0), ("b", 1)):
        folder = save(tmp_path / name, seed)
        config = json.loads((folder / "config.json").read_text())
        config["auto_map"] = {"AutoConfig": "oddball.OddballConfig",
                              "AutoModelForCausalLM": "oddball.OddballForCausalLM"}  # fmt: skip
        (folder / "config.json").write_text(json.dumps(config))
        shutil.copyfile(Path(__file__).with_name("oddball.py"), folder / "oddball.py")
    return tmp_path / "a", tmp_path / "b"


@pytest.mark.parametrize(("tied", "dimensions"), [(True, 93), (False, 114)])
def test_sound_and_complete(tied: bool, dimensions: int, registered: None) -> None:
    """V·O 2·36; MLP 5; norm gain 6; gains of queries against keys 2 planes and 2 more; biases of the two branches 6;
    untied also O(6) and the last gain."""
    certificate = certify(tiny(tie_word_embeddings=tied))
    assert certificate.sound and certificate.leak < 1e-9 and not certificate.unknown_ops
    assert (certificate.found, certificate.nullity, certificate.missing) == (dimensions, dimensions, {})


def test_its_groups(registered: None) -> None:
    spec = derive(trace(tiny(tie_word_embeddings=False)))
    groups = {name: space.group.name for name, space in spec.spaces.items() if space.group}
    assert sorted(groups.values()) == ["GeneralLinear", "Orthogonal", "Permutation", "PositiveScaledPermutation",
                                       "QuarterTurns", "Scaling", "TorusPermutation"]  # fmt: skip
    ((inner,),) = (axis[0] for axis in spec.parameters["blocks.0.down.weight"][1:])
    assert inner.power == (2,) and groups[str(inner.space)] == "PositiveScaledPermutation"


def test_align_keeps_the_function(registered: None, tmp_path: Path) -> None:
    a, b = save(tmp_path / "a", 0), save(tmp_path / "b", 1)
    assert run("align", a, b, "-o", tmp_path / "out", "--quiet") == 0
    before, after = logits(b), logits(tmp_path / "out")
    assert float((before - after).abs().max()) < 1e-4 * float(before.abs().max())
    stored = [load_file(p / "model.safetensors") for p in (b, tmp_path / "out")]
    assert not torch.equal(*(s["blocks.0.up.weight"] for s in stored))


def test_a_merge_of_checkpoints_with_their_own_code(
    with_code: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = with_code
    for weight, source in ((0, a), (1, b)):
        out = tmp_path / f"end{weight}"
        assert run("merge", a, b, "-o", out, "--trust-remote-code", "--weight", weight, "--quiet") == 0
        before, after = (logits(p, trust_remote_code=True) for p in (source, out))
        assert float((before - after).abs().max()) < 1e-4 * float(before.abs().max())
    assert run("merge", a, b, "-o", tmp_path / "half", "--trust-remote-code", "--quiet") == 0
    ends = [load_file(tmp_path / n / "model.safetensors") for n in ("end0", "end1", "half")]
    for name in ends[0]:
        torch.testing.assert_close((ends[0][name] + ends[1][name]) / 2, ends[2][name])
    assert logits(tmp_path / "half", trust_remote_code=True).isfinite().all()
    assert type(read_config(tmp_path / "half", trust_remote_code=True)).__module__.startswith("transformers_modules")


def test_what_code_prints_or_would_be_asked_is_no_part_of_a_result(
    with_code: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tokenizer is read without a question."""
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("nobody is asked"))
    words = {f"w{i}": i for i in range(29)}
    tokenizer = Tokenizer(WordLevel(words, "w0"))
    tokenizer.pre_tokenizer = Whitespace()
    for folder in with_code:
        transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
        code = folder / "oddball.py"
        source = code.read_text().replace("input_ids: Tensor,", "input_ids: Tensor, labels=None,")
        code.write_text(source.replace("return CausalLMOutput(logits=self.head(self.norm(x)))", WITH_LOSS))
    (tmp_path / "held_out.txt").write_text(" ".join(f"w{i * i % 29}" for i in range(600)))
    wanted = ["merge", *with_code, "-o", tmp_path / "out", "--trust-remote-code", "--json", "--quiet"]
    assert run(*wanted, "--data", tmp_path / "held_out.txt", "--effort", "good") == 0
    assert json.loads(capsys.readouterr().out)["comparison"]


def test_what_mergekit_itself_makes_of_models_with_code_has_their_code(with_code: object, tmp_path: Path) -> None:
    for name, seed in (("llama0", 0), ("llama1", 1)):
        folder = save_as(tmp_path / name, tiny_llama(), seed)
        for file, code in LLAMA.items():
            (folder / file).write_text(code)
        config = json.loads((folder / "config.json").read_text())
        config |= {
            "auto_map": {"AutoConfig": "mine_config.MineConfig", "AutoModelForCausalLM": "mine.LlamaForCausalLM"}
        }
        (folder / "config.json").write_text(json.dumps(config | {"model_type": "mine"}))
    sources = [{"sources": [{"model": str(tmp_path / name), "layer_range": [0, 1]}]} for name in ("llama0", "llama1")]
    recipe = {"slices": sources, "merge_method": "passthrough", "dtype": "float32"}
    (tmp_path / "recipe.yml").write_text(json.dumps(recipe))
    assert run("mergekit", tmp_path / "recipe.yml", tmp_path / "out", "--trust-remote-code", "--quiet") == 0
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", trust_remote_code=True)
    assert type(found).__module__.startswith("transformers_modules") and found.config.num_hidden_layers == 2


SCALED = """

class Scaled(torch.nn.SiLU):
    def forward(self, x):
        return super().forward(x) * torch.linspace(0.2, 2, x.shape[-1], dtype=x.dtype)


class LlamaForCausalLM(transformers.LlamaForCausalLM):
    config_class = MineConfig

    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp.act_fn = Scaled()
"""
"""Hidden units that stand still, under the name of a class of transformers."""


@pytest.fixture
def of_a_known_type(tmp_path: Path, code_of_models: None) -> tuple[Path, Path]:
    """Two checkpoints with code of their own, of a type that transformers has itself."""
    for seed, name in enumerate(("a", "b")):
        folder = save_as(tmp_path / name, tiny_llama(vocab_size=29), seed)
        (folder / "mine_config.py").write_text(LLAMA["mine_config.py"])
        (folder / "mine.py").write_text("import torch\n" + LLAMA["mine.py"].partition("\n\nclass")[0] + SCALED)
        config = json.loads((folder / "config.json").read_text())
        auto = {"AutoConfig": "mine_config.MineConfig", "AutoModelForCausalLM": "mine.LlamaForCausalLM"}
        (folder / "config.json").write_text(json.dumps(config | {"auto_map": auto}))
    return tmp_path / "a", tmp_path / "b"


def test_code_that_was_not_run_is_not_handed_on(
    of_a_known_type: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was aligned as a model of transformers is loaded as nothing else."""
    a, b = of_a_known_type
    assert run("align", a, b, "-o", tmp_path / "out", "--quiet") == 0
    assert capsys.readouterr().err.count("brings its own code, which is not run") == 2
    assert not list((tmp_path / "out").glob("*.py"))
    before, after = logits(b), logits(tmp_path / "out", trust_remote_code=True)
    assert float((before - after).abs().max()) < 1e-4 * float(before.abs().max())
    assert run("align", a, b, "-o", tmp_path / "own", "--trust-remote-code", "--quiet") == 0
    before, after = (logits(p, trust_remote_code=True) for p in (b, tmp_path / "own"))
    assert float((before - after).abs().max()) < 1e-4 * float(before.abs().max())
    assert not torch.equal(before, logits(b))
    assert run("merge", a, b, "-o", tmp_path / "plain", "--match", "none", "--method", "linear", "--quiet") == 0
    assert (tmp_path / "plain" / "mine.py").is_file()


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "MineModel"])
def test_code_for_the_class_that_would_load_an_architecture_is_what_is_run(
    architecture: str, of_a_known_type: tuple[Path, Path], tmp_path: Path
) -> None:
    """A config may say another name of a class than its auto_map, one that transformers knows or does not."""
    for folder in of_a_known_type:
        said = (folder / "config.json").read_text().replace("mine.LlamaForCausalLM", "mine.Mine")
        config = {**json.loads(said), "architectures": [architecture]}
        config["auto_map"] = {"AutoModel": "mine.Nothing", **config["auto_map"]}
        (folder / "config.json").write_text(json.dumps(config))
        code = (folder / "mine.py").read_text()
        (folder / "mine.py").write_text(code.replace("class LlamaForCausalLM", "class Mine"))
    a, b = of_a_known_type
    config = read_config(b, trust_remote_code=True)
    assert model_class(config).__self__.__name__ == "Mine"  # type: ignore[attr-defined]
    assert run("align", a, b, "-o", tmp_path / "out", "--trust-remote-code", "--quiet") == 0
    before, after = (logits(p, trust_remote_code=True) for p in (b, tmp_path / "out"))
    assert float((before - after).abs().max()) < 1e-4 * float(before.abs().max())


def test_code_that_has_run_is_what_live_models_and_state_dicts_are_of(of_a_known_type: tuple[Path, Path]) -> None:
    def change(before: PreTrainedModel, after: PreTrainedModel) -> float:
        with torch.no_grad():
            first, second = before(IDS).logits, after(IDS).logits
        return float((first - second).abs().max() / first.abs().max())

    auto = transformers.AutoModelForCausalLM
    named = transformers.AutoConfig.from_pretrained(of_a_known_type[0])
    with pytest.raises(OptionError, match=r"names mine\.LlamaForCausalLM under auto_map"):
        hf_align.symmetries(named)
    a, b = (auto.from_pretrained(p, trust_remote_code=True).eval() for p in of_a_known_type)
    with pytest.raises(OptionError, match="auto_map"):
        hf_align.randomize(auto.from_pretrained(of_a_known_type[0]).state_dict(), config=named)
    moved = hf_align.align(b.state_dict(), to=a.state_dict(), config=a.config).apply(b.state_dict())
    other = auto.from_pretrained(of_a_known_type[1], trust_remote_code=True).eval()
    other.load_state_dict(moved)
    assert change(b, other) < 1e-4 and change(a, hf_align.randomize(a)) < 1e-4
    known = hf_align.randomize(auto.from_pretrained(of_a_known_type[0]))
    assert getattr(known.config, "auto_map", None) is None


@pytest.mark.parametrize("kind", ["with_code", "of_a_known_type"])
def test_an_alignment_of_models_with_their_own_code_is_read_again(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folders = request.getfixturevalue(kind)
    a, b = (transformers.AutoModelForCausalLM.from_pretrained(p, trust_remote_code=True).eval() for p in folders)
    made = hf_align.align(b, to=a)
    wanted = made.apply(b.state_dict())
    made.save_pretrained(tmp_path / "kept")
    for folder in folders:  # what was written stands alone
        shutil.rmtree(folder)
    with pytest.raises(HfAlignError, match="runs only with --trust-remote-code"):
        hf_align.Alignment.from_pretrained(tmp_path / "kept")
    kept = hf_align.Alignment.from_pretrained(tmp_path / "kept", trust_remote_code=True)
    found = kept.apply(b.state_dict())
    assert all(torch.equal(found[name], weight) for name, weight in wanted.items())


def test_code_that_is_not_trusted_does_not_run(
    with_code: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (with_code[0] / "oddball.py").write_text("raise SystemExit('it ran')\n")
    assert run("merge", *with_code, "-o", tmp_path / "out", "--quiet") == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1 and "brings its own code, which runs only with --trust-remote-code" in error[0]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("match", ["none", "weight"])
def test_code_that_computes_something_else_is_refused(
    match: str, with_code: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = with_code[1] / "oddball.py"
    common = ("merge", *with_code, "--match", match, "--trust-remote-code", "--quiet")
    code.write_text(code.read_text() + "# a remark\n")
    assert run(*common, "-o", tmp_path / "remark") == 0
    code.write_text(code.read_text().replace("torch.relu(self.up(n)).square()", "torch.relu(self.up(n))"))
    capsys.readouterr()
    assert run(*common, "-o", tmp_path / "out") == 2
    assert "compute differently: their modelling code is not the same" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("other", [0, 1])
def test_code_that_computes_something_else_where_it_is_asked_for_is_refused(
    other: int, with_code: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first call is the same; so are all, where one of them has a function more that nobody calls."""
    for number, folder in enumerate(with_code):
        bends = "labels is not None" if number == other else "False"
        text = (folder / "oddball.py").read_text() + "def unused() -> int:\n    return 1\n" * (number == other)
        text = text.replace("input_ids: Tensor, **kwargs", "input_ids: Tensor, labels=None, **kwargs")
        (folder / "oddball.py").write_text(text)
        text = text.replace(
            "for block in self.blocks", f"x = x * x if {bends} else x\n        for block in self.blocks"
        )
        (folder / "bent.py").write_text(text)
    common = ("merge", *with_code, "--effort", "quick", "--trust-remote-code", "--quiet")
    assert run(*common, "-o", tmp_path / "unused") == 0
    for folder in with_code:
        (folder / "bent.py").replace(folder / "oddball.py")
    capsys.readouterr()
    assert run(*common, "-o", tmp_path / "out") == 2
    assert "compute differently: their modelling code is not the same" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("if token_type_ids is not None:\n            x = x * (1 + token_type_ids[..., None] * torch.arange(6))",
         "input_ids with token_type_ids, length 16"),
        ("if x.shape[1] > 12:\n            x = x * torch.arange(6)", "input_ids, length 15"),
    ],
    ids=["an argument", "a length"],
)  # fmt: skip
def test_what_no_trace_has_seen_is_witnessed(
    code: str,
    told: str,
    with_code: tuple[Path, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Code that looks into the residual stream, where it is not traced: nothing is written."""
    monkeypatch.setattr(modes, "try_ways", lambda *_: None)
    monkeypatch.setattr(modes, "_longer", lambda *_: ())
    monkeypatch.setattr(modes, "_with_fewer_tokens", lambda *_: ())
    monkeypatch.setattr(modes, "_with_other_branches", lambda *_: ([], ()))
    for folder in with_code:
        text = (folder / "oddball.py").read_text()
        text = text.replace("input_ids: Tensor, **kwargs", "input_ids: Tensor, token_type_ids=None, **kwargs")
        text = text.replace("for block in self.blocks", f"{code}\n        for block in self.blocks")
        (folder / "oddball.py").write_text(text)
    assert run("merge", *with_code, "-o", tmp_path / "out", "--trust-remote-code", "--quiet") == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith(f"hf-align: aligned B is not B: with {told} its outputs change by ") and "\n" not in error
    assert not (tmp_path / "out").exists()
