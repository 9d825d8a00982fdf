"""What comes back is like what went in: its tensors are laid out, classed and referred to in the same way."""

from __future__ import annotations

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from conftest import built, tiny_gpt2
from plain_modules import mlp, seeded
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

import hf_align

X = torch.randn(3, 6, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


class Decayed(nn.Parameter):
    """A class of the caller's own."""


class Noting(nn.Module):
    """Knows its parameters in groups, too, as those of an optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 3)
        self.up.weight = Decayed(self.up.weight.detach())
        self.groups: list[Any] = [self.up.weight, self.down.weight]

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


def test_parameters_stay_what_others_refer_to() -> None:
    a, b = seeded(Noting, 0), seeded(Noting, 1)
    for moved in (hf_align.align(b, to=a, inputs=X).apply(b), hf_align.merge([b, a], inputs=X)):
        assert moved.groups[0] is moved.up.weight and moved.groups[1] is moved.down.weight
        assert type(moved.up.weight) is Decayed and moved.up.weight is not b.up.weight


def test_tensors_keep_their_layout(tmp_path: Path) -> None:
    a, b = seeded(mlp, 0), seeded(mlp, 1)
    alignment = hf_align.align(b, to=a, inputs=X)
    as_dict = alignment.apply(b.state_dict())
    save_file(alignment.apply(b).state_dict(), tmp_path / "live.safetensors")
    save_file(as_dict, tmp_path / "dict.safetensors")  # which refuses what is not in order
    torch.testing.assert_close(functional.linear(X, as_dict["0.weight"]), X @ alignment.apply(b)[0].weight.T)


def test_a_layout_of_the_callers_own_is_kept() -> None:
    def make() -> nn.Module:
        net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1))
        return net.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]

    a, b = seeded(make, 0), seeded(make, 1)
    moved = hf_align.align(b, to=a, inputs=torch.randn(1, 3, 5, 5, dtype=torch.float64)).apply(b)
    assert [p.stride() for p in moved.parameters()] == [p.stride() for p in b.parameters()]


def test_threads_wait_for_each_other() -> None:
    """Tracing patches torch for the whole process: `nn.Module._apply` stayed patched."""

    def pair(width: int) -> list[Any]:
        return [seeded(lambda: nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 3)), s) for s in (0, 1)]

    def moved(pair: list[Any]) -> Any:
        return hf_align.align(pair[1], to=pair[0], inputs=X).apply(pair[1])

    before, pairs = nn.Module._apply, [pair(width) for width in range(5, 11)]
    with ThreadPoolExecutor(4) as threads:
        assert len(list(threads.map(moved, pairs))) == 6
    assert nn.Module._apply is before


def test_no_model_is_kept_alive() -> None:
    def used() -> list[Any]:
        a, b = seeded(mlp, 0), seeded(mlp, 1)
        return [weakref.ref(m) for m in (a, b, hf_align.align(b, to=a, inputs=X).apply(b))]

    held = used()
    gc.collect()
    assert [ref() for ref in held] == [None, None, None]


def test_compiled_modules_are_read_as_they_were_written() -> None:
    def with_kernels(graph: Any, _: Any) -> Any:
        """As compilers do it: what runs then wants numbers in memory."""

        def kernel(*args: Tensor) -> Any:
            assert all(t.detach().numpy() is not None for t in args)
            return graph.forward(*args)

        return kernel

    def compiled(seed: int) -> Any:
        module: Any = torch.compile(seeded(mlp, seed), backend=with_kernels)
        module(X)
        return module

    a, b = compiled(0), compiled(1)
    merged = hf_align.merge([a, b], inputs=X)
    assert type(merged) is type(a)
    torch.testing.assert_close(merged(X), merged._orig_mod(X))
    assert not torch.allclose(merged(X), a(X))


def test_what_surrounds_a_call_makes_no_difference() -> None:
    """Neither autocast nor a default dtype or device of the caller's; and random numbers stay where they were."""
    a, b = built(tiny_gpt2(), 0), built(tiny_gpt2(), 1)
    plain = hf_align.align(b, to=a).apply(b).state_dict()
    with torch.autocast("cpu", torch.bfloat16):
        surrounded = hf_align.align(b, to=a).apply(b).state_dict()
        assert torch.is_autocast_enabled("cpu")
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            elsewhere = hf_align.align(b, to=a).apply(b).state_dict()
    finally:
        torch.set_default_dtype(torch.float32)
    for found in (surrounded, elsewhere):
        assert all(torch.equal(t, found[n]) for n, t in plain.items())
    before, data = torch.get_rng_state(), DataLoader([{"input_ids": torch.arange(5)}] * 4, batch_size=2, shuffle=True)
    hf_align.evaluate(a, b, data, points=3)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_module_in_two_places_becomes_two() -> None:
    """Two layers of a live model may be one module; once moved, each is in a basis of its own."""
    a, b = (built(tiny_gpt2(n_layer=2), seed).double() for seed in (0, 1))
    b.transformer.h[1].mlp = b.transformer.h[0].mlp
    ids = torch.arange(7)[None]
    for moved in ((alignment := hf_align.align(b, to=a)).apply(b), alignment.inverse().apply(alignment.apply(b))):
        assert moved.transformer.h[1].mlp is not moved.transformer.h[0].mlp
        torch.testing.assert_close(moved(ids).logits, b(ids).logits)
    assert b.transformer.h[1].mlp is b.transformer.h[0].mlp
