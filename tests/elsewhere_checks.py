"""Where things are computed: on the accelerator if there is one, in float64 only where it has that, and back. Run by
test_devices.py, in a process that has such a device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import MODELS, built, run, save, tiny_llama
from elsewhere import NAME, Elsewhere, Held
from safetensors.torch import load_file

from hf_align.errors import HfAlignError
from hf_align.jobs.opened import Basis, Opened
from hf_align.matching.match import Match
from hf_align.merging.regression import regression_of
from hf_align.merging.samples import Samples
from hf_align.opening.pairs import Pair, open_pair
from hf_align.running.network import Network
from hf_align.running.trial import require_runs
from hf_align.runtime.devices import CPU, Devices, drawing
from hf_align.settings.options import Options

PRODUCTS = ("aten.mm", "aten.bmm")


@pytest.fixture(scope="module", params=["tiny", *(pytest.param(n, marks=pytest.mark.slow) for n in ("llama", "gpt2"))])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = MODELS / request.param
    if request.param == "tiny":
        folder = tmp_path_factory.mktemp("tiny")
        for seed in (0, 1):
            save(folder / str(seed), tiny_llama(), seed)
    return open_pair(str(folder / "0"), str(folder / "1"))


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)  # the device is known in one


def on(pair: Pair, device: str) -> Opened:
    return Opened((pair,), Options(device=device))


def products(there: Elsewhere) -> set[torch.dtype]:
    return set().union(*(there.ran.get(name, set()) for name in PRODUCTS))


def same(one: Match, other: Match) -> None:
    for ours, theirs in ((one.a, other.a), (one.b, other.b)):
        for space, element in ours.items():
            for key, tensor in element.tensors().items():
                there = theirs[space].tensors()[key]
                assert not isinstance(there, Held) and there.device == CPU and there.dtype == tensor.dtype
                assert torch.allclose(tensor, there, atol=1e-9), (space, key)


def test_products_and_polar_factors_go_to_the_device(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    # Newton's iteration for the residual stream, small as it is here.
    monkeypatch.setattr("hf_align.symmetry.groups.linear_algebra._LARGE", 8)
    expected = on(pair, "cpu").find()[0]
    with Elsewhere() as there:
        found = on(pair, NAME).find()[0]
    same(expected, found)
    assert products(there) == {torch.float32, torch.float64}  # cross matrices, and what is solved
    assert there.ran["aten.linalg_inv_ex"] == {torch.float64}


def test_without_float64_what_is_solved_stays_on_the_cpu(pair: Pair) -> None:
    with Elsewhere(has_double=False) as there:
        devices = Devices.choose(NAME)
        found = on(pair, NAME).find()[0]
        assert (devices.running.type, devices.solving) == (NAME, CPU) and not there.ran
        moved = Basis(on(pair, NAME), [found]).weights[1]
        tensors = {name: moved[name] for name in pair.spec.parameters}
    assert products(there) == {torch.float32}
    at_home = Basis(on(pair, "cpu"), [found]).weights[1]
    for name, tensor in tensors.items():
        assert not isinstance(tensor, Held) and torch.equal(tensor, at_home[name]), name


@pytest.mark.slow
def test_a_whole_merge_with_a_device_has_the_same_bytes(tmp_path: Path) -> None:
    """Transforms in float32 there, the distances of balanced weights, too, and the file is written from the CPU."""
    models, out = (MODELS / "gpt2" / "0", MODELS / "gpt2" / "1"), tmp_path / "there"
    assert run("merge", *models, "-o", tmp_path / "here", "--device", "cpu", "--quiet") == 0
    alignment = tmp_path / "here" / "hf-align" / "alignment.safetensors"
    with Elsewhere() as there:
        there_alone = ("--device", NAME, "--alignment", alignment, "--no-witness")
        assert run("merge", *models, "-o", out, *there_alone, "--quiet") == 0
    assert products(there) == {torch.float32, torch.float64}  # moves, and what balances
    assert (out / "model.safetensors").read_bytes() == (tmp_path / "here" / "model.safetensors").read_bytes()


@pytest.mark.parametrize(("size", "has_double"), [(8, True), (200, True), (8, False), (200, False)])
def test_regression_is_solved_there(pair: Pair, size: int, has_double: bool) -> None:
    """Of units by what they give, row by row where there are few, and by products where there are many; without float64
    it is solved on the CPU."""
    models, tokens = [m.weights for m in (pair.a, pair.b)], torch.arange(8 * size).reshape(size, 8) % 11
    found = []
    with Elsewhere(has_double=has_double) as there:
        for device in ("cpu", NAME):
            samples = Samples(Network(pair.config, device), [{"input_ids": tokens}] * 2)
            found.append(regression_of(models, (0.5, 0.5), samples, pair.spec).solved)
    solved = {torch.float32, torch.float64} if has_double else set()
    assert there.ran.get("aten.linalg_cholesky_ex", set()) == solved and found[0].keys() == found[1].keys()
    for name, tensor in found[0].items():
        assert not isinstance(found[1][name], Held)
        torch.testing.assert_close(found[1][name], tensor, atol=1e-4, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("how", [
    ("--effort", "quick"),
    *((*option, "--no-witness") for option in (
        ("--effort", "good"), ("--match", "activation", "--method", "linear"),
        ("--method", "fisher"), ("--method", "regmean"), ("--method", "curve", "--steps", "2"),
        ("--method", "distil", "--steps", "2"), ("--method", "circuits"),
        ("--method", "ot-fusion-activations", "--allow-inexact"),
    )),
], ids=" ".join)  # fmt: skip
def test_models_run_there(how: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is found with weights and values there is what is found with them here."""
    for module in ("jobs.merge.MORE", "merging.samples.MOST"):
        monkeypatch.setattr(f"hf_align.{module}", 32)
    models = [save(tmp_path / str(seed), tiny_llama(), seed) for seed in (0, 1)]
    assert run("merge", *models, "-o", tmp_path / "here", "--device", "cpu", "--quiet", *how) == 0
    with Elsewhere() as there:
        assert run("merge", *models, "-o", tmp_path / "there", "--device", NAME, "--quiet", *how) == 0
    assert torch.float32 in products(there)
    here, found = (load_file(tmp_path / name / "model.safetensors") for name in ("here", "there"))
    rounding = 5e-3 if "activation" in how else 1e-4  # momentum carries rounding along where features are flat
    for name, tensor in here.items():
        torch.testing.assert_close(found[name], tensor, atol=rounding, rtol=1e-3)


def test_what_is_tried_does_not_end_the_device() -> None:
    """A number that is no token is said as the CPU says it: on a GPU it would be an assertion, after which the process
    cannot use the GPU any more."""
    config = tiny_llama()
    weights = {n: t.detach() for n, t in built(config, 0).named_parameters()}
    tokens = torch.tensor([[1, 2, 3], [4, 5, 6]])
    network = Network(config, NAME)
    with Elsewhere(ends=True) as there:
        require_runs(network, weights, [{"input_ids": tokens, "labels": tokens}], "data")
        for wrong in ({"input_ids": tokens + 7, "labels": tokens}, {"input_ids": tokens, "labels": tokens + 7}):
            with pytest.raises(HfAlignError, match=r"data: LlamaForCausalLM does not run on it .*(index|Target)"):
                require_runs(network, weights, [wrong], "data")
        assert not there.has_ended
        with pytest.raises(RuntimeError, match="assert"):
            network(network.placed(weights), {"input_ids": (tokens + 7).to(NAME)})
        assert there.has_ended


def test_random_numbers_there_start_from_a_seed() -> None:
    before = torch.get_rng_state()
    with Elsewhere() as there:
        with drawing(torch.device(NAME), 3):
            first = torch.rand(2)
        assert there.seeds == [3]
    with drawing(CPU, 3):
        assert torch.equal(torch.rand(2), first)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_device_is_the_one_that_is_asked_for_or_the_accelerator() -> None:
    assert Devices.choose("cpu") == Devices(CPU, CPU)
    for asked, said in {"nowhere": "nowhere is no device", "cuda:7": "device cuda:7 is not available"}.items():
        with pytest.raises(HfAlignError, match=said):
            Devices.choose(asked)
    with Elsewhere():
        found = Devices.choose()
        assert (found.running.type, found.solving.type) == (NAME, NAME)
