"""The model card of a merge, and a merge that goes to the Hub in one command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import MODELS, run, tiny_gpt2, tiny_llama
from hub_server import Fault, Hub
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from transformers import GPT2LMHeadModel, LlamaForCausalLM

from hf_align.errors import HfAlignError
from hf_align.publishing.card import write_card
from hf_align.publishing.provenance import Input, Provenance

LLAMA = MODELS / "llama"


@pytest.fixture
def two_models(hub: Hub, tmp_path: Path) -> list[str]:
    """Two small models on the Hub, the second under another licence; their commits."""
    commits = []
    for seed, (name, licence) in enumerate({"a": "apache-2.0", "b": "mit"}.items()):
        torch.manual_seed(seed)
        folder = tmp_path / "inputs" / name
        LlamaForCausalLM(tiny_llama()).save_pretrained(folder)
        (folder / "README.md").write_text(f"---\nlicense: {licence}\n---\n# {name}\n")
        commits.append(hub.add(f"org/{name}", folder))
    ids = torch.randint(11, (4, 8), generator=torch.Generator().manual_seed(0))
    save_file({"input_ids": ids}, tmp_path / "inputs" / "held_out.safetensors")
    return commits


def test_one_command_from_the_hub_to_the_hub(
    hub: Hub, two_models: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    data = tmp_path / "inputs" / "held_out.safetensors"
    assert run("merge", "org/a", "hf://org/b@main", "--push", "--data", data, "--json") == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert report["pushed"]["repository"] == "alice/a-b-merge"
    assert "licences of the inputs differ (org/a: apache-2.0, org/b: mit)" in captured.err
    files = hub.files("alice/a-b-merge")
    assert hub.repositories["alice/a-b-merge"].at("main").message == "Merge of org/a and org/b made with hf-align"
    assert set(files) >= {"model.safetensors", "config.json", "README.md", "hf-align/alignment.safetensors",
                          "hf-align/provenance.json", "hf-align/barrier.png"}  # fmt: skip
    for path, content in files.items():
        assert b"hf_alice" not in content, path
        assert str(tmp_path).encode() not in content and b"/tmp" not in content, path
    assert files["README.md"].endswith(b"\n")
    card = ModelCard(files["README.md"].decode())
    data_of_card = card.data.to_dict()
    assert data_of_card["base_model"] == ["org/a", "org/b"]
    assert data_of_card["base_model_relation"] == "merge"
    assert data_of_card["tags"] == ["merge", "hf-align"]
    assert data_of_card["library_name"] == "transformers"
    assert "license" not in data_of_card and "The licences of the inputs differ" in card.text
    assert "hf-align merge org/a hf://org/b@main --push --data held_out.safetensors --json" in card.text
    assert all(commit in card.text for commit in two_models)
    assert "of the 78 continuous dimensions" in card.text
    assert "54 are matched, 24 are fixed to a canonical choice, and 0 change no merge; 0 are open" in card.text
    comparison = report["comparison"]
    assert f"| **aligned** | {comparison['aligned']['barrier']:.4f} |" in card.text
    assert "![Loss between the two models, as they are and aligned](hf-align/barrier.png)" in card.text
    assert files["hf-align/barrier.png"].startswith(b"\x89PNG")


def test_a_token_and_a_revision_may_be_typed(
    hub: Hub, two_models: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The token is used and told to nobody; a revision is that of the models that name none."""
    typed = ("merge", "org/a", f"org/b@{two_models[1]}", "-o", tmp_path / "out", "--match", "none", "--push")
    monkeypatch.setenv("HF_TOKEN", "")
    assert run(*typed) == 2 and "no token to upload with" in capsys.readouterr().err
    assert run(*typed, "--token", "hf_alice", "--revision", "nowhere") == 2
    assert "org/a has no revision nowhere" in capsys.readouterr().err
    assert run(*typed, "--token", "hf_alice", "--revision", "main") == 0
    files = hub.files("alice/a-b-merge")
    assert all(b"hf_alice" not in content for content in files.values())
    command = f"hf-align merge org/a org/b@{two_models[1]} -o out --match none --push --revision main\n"
    assert command in files["README.md"].decode()


def test_in_a_process_of_its_own(hub: Hub, two_models: list[str], tmp_path: Path) -> None:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    env = {**kept, "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-m", "hf_align", "merge", "org/a", "org/b", "--push=lab/mine", "--private",
               "--commit-message", "two words", "--no-certify", "--drop-cache", "--quiet"]  # fmt: skip
    refused = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert refused.returncode == 2 and not (tmp_path / "merged").exists()
    assert refused.stderr == "hf-align: no token to upload with; log in (hf auth login) or set HF_TOKEN\n"
    subprocess.run(command, cwd=tmp_path, env={**env, "HF_TOKEN": "hf_alice"}, check=True)
    assert hub.repositories["lab/mine"].private
    assert hub.repositories["lab/mine"].at("main").message == "two words"
    assert hub.files("lab/mine")["model.safetensors"] == (tmp_path / "merged" / "model.safetensors").read_bytes()
    assert not list((tmp_path / "home").rglob("*.safetensors"))


@pytest.mark.parametrize("match", ["weight", "none"])
def test_no_shard_stays_in_the_cache(match: str, hub: Hub, two_models: list[str], tmp_path: Path) -> None:
    """Nor that of B, whose weights the witness may have left in memory, so that nobody reads them again."""
    options = ["-o", tmp_path / "out", "--match", match, "--drop-cache", "--no-certify"]
    assert run("merge", "org/a", "org/b", *options) == 0
    assert (tmp_path / "cache").is_dir() and not list((tmp_path / "cache").rglob("*.safetensors"))


def test_a_push_that_fails_keeps_the_merge(
    hub: Hub, two_models: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.faults.append(Fault("PUT /lfs/", 403, 99))
    assert run("merge", "org/a", "org/b", "-o", tmp_path / "out", "--push", "--no-certify") == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("hf-align: ")
    assert f"the model is in {tmp_path / 'out'}, upload it with: hf-align push {tmp_path / 'out'} alice/a-b" in error
    assert (tmp_path / "out" / "model.safetensors").is_file() and (tmp_path / "out" / "README.md").is_file()


def test_options_of_the_upload_need_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("merge", LLAMA / "0", LLAMA / "1", "-o", tmp_path / "out", "--private") == 2
    assert "need --push" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_same_licence_is_that_of_the_merge(hub: Hub, two_models: list[str], tmp_path: Path) -> None:
    assert run("merge", "org/a", "org/a", "-o", tmp_path / "out") == 0
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert card.data.license == "apache-2.0" and "WARNING" not in card.text


@pytest.mark.parametrize("front", ["license: other\nlicense_name: llama3\n", "license: [\n", "- no mapping\n"])
def test_odd_cards_of_inputs(two_models: list[str], tmp_path: Path, front: str) -> None:
    a = tmp_path / "inputs" / "a"
    (a / "README.md").write_text(f"---\n{front}---\n")
    assert run("merge", a, a, "-o", tmp_path / "out") == 0
    known = "llama3" if "llama3" in front else None
    assert [i.licence for i in Provenance.load(tmp_path / "out").inputs] == [known, known]


def test_folders_without_data(tmp_path: Path) -> None:
    assert run("merge", LLAMA / "0", LLAMA / "1", "-o", tmp_path / "out", "--match", "none") == 0
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert "base_model" not in card.data.to_dict()
    assert "no held-out data was given" in card.text and "without alignment" in card.text
    assert "hf-align merge 0 1 -o out --match none" in card.text
    made = Provenance.load(tmp_path / "out")
    assert made.strategy["match"] == "none" and made.comparison is None


@pytest.mark.parametrize("data", [True, False])
def test_models_that_are_not_aligned_are_not_untied_or_called_aligned(data: bool, tmp_path: Path) -> None:
    for seed in (0, 1):
        torch.manual_seed(seed)
        GPT2LMHeadModel(tiny_gpt2(tie_word_embeddings=True)).save_pretrained(tmp_path / str(seed))
    save_file({"input_ids": torch.randint(11, (4, 8))}, tmp_path / "texts.safetensors")
    given = ["--data", tmp_path / "texts.safetensors", "--points", "3"] * data
    merged = tmp_path / "out"
    assert run("merge", tmp_path / "0", tmp_path / "1", "-o", merged, "--match", "none", *given) == 0
    assert json.loads((merged / "config.json").read_text()).get("tie_word_embeddings", True)
    assert "lm_head.weight" not in load_file(merged / "model.safetensors")
    card = (merged / "README.md").read_text()
    assert ("| averaged as they are" in card) == data and "**aligned**" not in card
    assert run("report", merged, "-o", tmp_path / "report.html") == 0
    page = (tmp_path / "report.html").read_text()
    assert ("barrier, averaged as they are" in page) == data and "barrier, aligned" not in page
    assert "aligned</span>" not in page


@pytest.mark.parametrize("untied", [True, False])
def test_what_proves_the_symmetries_is_given_the_config_that_has_them(untied: bool, tmp_path: Path) -> None:
    of_one = {"inputs": [Input(name="a", repository=None, commit=None, licence=None)], "models": ["a"], "command": ""}
    strategy = {"match": "weight", "method": "linear"}
    made = {"model_type": "gpt2", "strategy": strategy, "untied": untied}
    write_card(tmp_path, Provenance.model_validate(of_one | made))
    assert f"`hf-align certify {'THIS_MODEL' if untied else 'gpt2'}` does it" in (tmp_path / "README.md").read_text()


def test_a_plot_needs_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, two_models: list[str]) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    a, b = (tmp_path / "inputs" / name for name in "ab")
    assert run("merge", a, b, "-o", tmp_path / "out", "--data", tmp_path / "inputs" / "held_out.safetensors") == 0
    assert "barrier.png" not in (tmp_path / "out" / "README.md").read_text()


def test_agreement_rises(tmp_path: Path, two_models: list[str]) -> None:
    a, b = (tmp_path / "inputs" / name for name in "ab")
    assert run("merge", a, b, "-o", tmp_path / "out", "--data", tmp_path / "inputs" / "held_out.safetensors") == 0
    made = Provenance.load(tmp_path / "out")
    naive, aligned = zip(*made.agreement.values(), strict=True)
    assert len(naive) == 12 and sum(aligned) > sum(naive) and max(map(abs, naive + aligned)) <= 1 + 1e-9


def test_provenance_of_something_else(tmp_path: Path) -> None:
    with pytest.raises(HfAlignError, match="was not written by hf-align merge"):
        Provenance.load(tmp_path)
    (tmp_path / "hf-align").mkdir()
    (tmp_path / "hf-align" / "provenance.json").write_text('{"model_type": 3}')
    with pytest.raises(HfAlignError, match=r"provenance.json: model_type: Input should be a valid string"):
        Provenance.load(tmp_path)


@pytest.mark.parametrize("models", [2, 3])
@pytest.mark.parametrize("method", ["linear", "curve", "distil", "regression"])
def test_what_is_no_mean_is_not_called_one(method: str, models: int, tmp_path: Path) -> None:
    made = Provenance(
        model_type="vit",
        inputs=[Input(name=name, repository=None, commit=None, licence=None) for name in "abc"[:models]],
        models=list("abc"[:models]),
        command="hf-align merge",
        strategy={"match": "weight", "method": method},
    )
    write_card(tmp_path, made)
    card = (tmp_path / "README.md").read_text()
    assert ("not the mean" in card) == (method != "linear")
    assert f"what {'both' if models == 2 else 'all'} models" in card or method == "linear"
