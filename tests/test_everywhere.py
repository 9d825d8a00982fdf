"""Maps that mix tokens, channels or both, at every place of decoders: what is found to leave them alone does."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn import functional
from traps.biases import BiasedTower
from traps.means import MeansTower
from traps.streams import StreamsRawTower
from traps.tower import Tower, TowerConfig

from hf_align.symmetry.certificate.random_copy import raise_epsilons, random_inputs, random_weights
from hf_align.symmetry.certificate.soundness import soundness
from hf_align.symmetry.derivation.derive import derive
from hf_align.tracing.trace import trace

Map = Callable[[Tensor], Tensor]


def before(x: Tensor) -> Tensor:
    """[batch, length, channels]: what the token before has."""
    return torch.cat((torch.zeros_like(x[:, :1]), x[:, :-1]), 1)


def of_half(mixed: Map) -> Map:
    """One half of the channels is mixed, the other one stays."""
    return lambda x: torch.cat((mixed(x[..., : x.shape[-1] // 2]), x[..., x.shape[-1] // 2 :]), -1)


def even(x: Tensor) -> Tensor:
    return torch.arange(x.shape[-1]) % 2 == 0


def growing(x: Tensor) -> Tensor:
    return torch.arange(x.shape[-1]) / x.shape[-1]


def averages(x: Tensor) -> Tensor:
    seen = torch.ones(x.shape[1], x.shape[1]).tril()
    return seen / seen.sum(-1, keepdim=True)


def replaced(x: Tensor) -> Tensor:
    y, half = x.clone(), x.shape[-1] // 2
    y[:, 1:, :half] = x[:, :-1, :half]
    return y


def largest(x: Tensor) -> Tensor:
    kept = x.abs().topk(4, -1).indices
    return torch.zeros_like(x).scatter(-1, kept, x.gather(-1, kept))


def pairs(x: Tensor) -> Tensor:
    return torch.complex(x[..., ::2], x[..., 1::2])


def turned(x: Tensor) -> Tensor:
    return torch.exp(1j * torch.arange(x.shape[1]))[:, None].to(pairs(x).dtype)


MAPS: dict[str, Map] = {
    # Entries of one vector come from several tokens, or are mixed in several ways.
    "before": of_half(before),
    "before, but for the first": of_half(lambda h: torch.cat((h[:, :1], h[:, :-1]), 1)),
    "before, every other": lambda x: torch.where(even(x), before(x), x),
    "before, more and more": lambda x: x * growing(x) + before(x) * (1 - growing(x)),
    "before, by lerp": lambda x: torch.lerp(x, before(x), torch.linspace(0, 1, x.shape[-1], dtype=x.dtype)),
    "before, in place": replaced,
    "scaled": of_half(lambda h: h * h.mean(1, keepdim=True)[..., :1].sigmoid()),
    "mean": of_half(lambda h: h.mean(1, keepdim=True).expand_as(h)),
    "sums": of_half(lambda h: h.cumsum(1)),
    "backwards": of_half(lambda h: h.flip(1)),
    "rolled": of_half(lambda h: h.roll(1, 1)),
    "looked up": of_half(lambda h: h[:, torch.arange(h.shape[1] - 1, -1, -1)]),
    "averages": of_half(lambda h: averages(h) @ h),
    "largest of all": of_half(lambda h: h.amax(1, keepdim=True).expand_as(h)),
    "sorted tokens": lambda x: x.sort(1).values,
    "pooled tokens": lambda x: functional.avg_pool1d(x.transpose(1, 2), 3, 1, 1).transpose(1, 2),
    "instances": lambda x: functional.instance_norm(x.transpose(1, 2)).transpose(1, 2),
    "attention": lambda x: torch.einsum("btc,bsc->bts", x, x).softmax(-1) @ x,
    "second moments": lambda x: x @ (x.transpose(1, 2) @ x) / 10,
    "orthogonal factor": lambda x: x @ torch.linalg.qr(x.transpose(1, 2) @ x + torch.eye(x.shape[-1]))[0],
    "waves of tokens": lambda x: torch.fft.fft(x, dim=1).real,
    "backwards as a factor": lambda x: torch.addcmul(x, x, x.flip(1), value=0.5),
    "signs of places": lambda x: x * (1 - 2 * (torch.arange(x.shape[1]) % 2))[:, None],
    # Channels are not alike.
    "lengths": of_half(torch.abs),
    "unit": of_half(lambda h: functional.normalize(h, dim=-1)),
    "shares": of_half(lambda h: h.softmax(-1)),
    "mirrored": lambda x: x + x.flip(-1),
    "running sums": lambda x: x.cumsum(-1),
    "differences": lambda x: torch.cat((x[..., 1:] - x[..., :-1], x[..., -1:]), -1),
    "next channel": lambda x: x.roll(1, -1),
    "shifted channels": lambda x: functional.pad(x[..., :-1], (1, 0)),
    "pooled channels": lambda x: functional.avg_pool1d(x, 3, 1, 1),
    "waves of channels": lambda x: torch.fft.fft(x, dim=-1).real,
    "sorted channels": lambda x: x.sort(-1).values,
    "largest channels": largest,
    "two shares": lambda x: x.unflatten(-1, (2, -1)).softmax(-2).flatten(-2),
    "larger of two": lambda x: x.unflatten(-1, (-1, 2)).amax(-1).repeat_interleave(2, -1),
    "lengths of pairs": lambda x: pairs(x).abs().repeat_interleave(2, -1),
    "squares of pairs": lambda x: torch.view_as_real(pairs(x) * pairs(x)).flatten(-2),
    "turned pairs": lambda x: torch.view_as_real(pairs(x) * turned(x)).flatten(-2),
    "one left out": lambda x: x.masked_fill(torch.arange(x.shape[-1]) == 3, 0.0),
    "one by a mask": lambda x: x * (torch.arange(x.shape[-1]) != 3),
    "one filled": lambda x: x.index_fill(-1, torch.tensor([1]), 0.5),
    # All channels together decide.
    "by the largest": lambda x: x * x.amax(-1, keepdim=True),
    "by the first": lambda x: torch.where(x[..., :1] > 0, x, -x),
    "by the sign of sums": lambda x: x * x.sum(-1, keepdim=True).sign(),
    "by length": lambda x: x / (1 + x.norm(dim=-1, keepdim=True)),
    "less the median": lambda x: x - x.median(-1, keepdim=True).values,
    "and its norm": lambda x: functional.layer_norm(x, x.shape[-1:]) + x,
    "norm by mean": lambda x: functional.rms_norm(x, x.shape[-1:]) * x.mean(-1, keepdim=True),
    "and a soft maximum": lambda x: torch.logsumexp(x, -1, keepdim=True) + x,
    "leaky": lambda x: torch.where(x > 0, x, 0.1 * x),
    "clamped": lambda x: x.clamp(-1, 1),
}  # fmt: skip


class Behind(nn.Module):
    """A map of what a module makes."""

    def __init__(self, inner: nn.Module, mapped: Map) -> None:
        super().__init__()
        self.inner, self.mapped = inner, mapped

    def forward(self, x: Tensor) -> Tensor:
        return self.mapped(self.inner(x))


class InFront(Behind):
    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.mapped(x))


PLACES: dict[str, Callable[[nn.Module, Map], None]] = {}


def place(put: Callable[..., None]) -> None:
    PLACES[put.__name__] = put


@place
def norms(model: Tower, mapped: Map) -> None:
    for layer in model.layers:
        layer.attn_norm, layer.mlp_norm = (Behind(norm, mapped) for norm in (layer.attn_norm, layer.mlp_norm))


@place
def hidden(model: Tower, mapped: Map) -> None:
    model.layers[0].mlp.down = InFront(model.layers[0].mlp.down, mapped)


@place
def written(model: Tower, mapped: Map) -> None:
    model.layers[0].mlp.down = Behind(model.layers[0].mlp.down, mapped)


@place
def values(model: Tower, mapped: Map) -> None:
    model.layers[0].attn.v = Behind(model.layers[0].attn.v, mapped)


@place
def queries(model: Tower, mapped: Map) -> None:
    model.layers[0].attn.q = Behind(model.layers[0].attn.q, mapped)


@place
def last_norm(model: Tower, mapped: Map) -> None:
    model.norm = Behind(model.norm, mapped)


@place
def embedded(model: Tower, mapped: Map) -> None:
    model.embed = Behind(model.embed, mapped)


_NUMBERS = count()


def decoder(base: type[Tower], put: Callable[..., None], mapped: Map) -> TowerConfig:
    """The config of a decoder with the map at the place, which transformers knows."""

    class Changed(base):  # type: ignore[misc, valid-type]
        _tied_weights_keys: dict[str, str] = {}  # noqa: RUF012

        def more(self, config: TowerConfig) -> None:
            super().more(config)
            put(self, mapped)

        def get_input_embeddings(self) -> None: ...

        def get_output_embeddings(self) -> None: ...

    name = f"everywhere_{next(_NUMBERS)}"
    kind = type(name, (TowerConfig,), {"model_type": name, "__init__": TowerConfig.__init__})
    Changed.config_class = kind
    hf.AutoConfig.register(name, kind)
    hf.AutoModelForCausalLM.register(kind, Changed)
    return kind(architectures=["Changed"], num_hidden_layers=1)


QUICK = {(MeansTower, "last_norm")}


@pytest.mark.parametrize(
    ("base", "where"),
    [
        pytest.param(base, where, marks=[] if (base, where) in QUICK else [pytest.mark.slow])
        for base in (Tower, BiasedTower, MeansTower, StreamsRawTower)
        for where in PLACES
    ],
)
def test_what_may_move_around_a_map_leaves_all_outputs_alone(base: type[Tower], where: str) -> None:
    for said, mapped in MAPS.items():
        program = raise_epsilons(trace(decoder(base, PLACES[where], mapped), length=10), 0.01)
        spec, rng = derive(program), torch.Generator().manual_seed(0)
        assert any(space.group is not None for space in spec.spaces.values()), said
        weights, inputs = random_weights(spec, rng), random_inputs(program, rng)
        assert soundness(program, spec, weights, inputs, rng) < 1e-9, said
