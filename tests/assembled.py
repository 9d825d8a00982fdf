"""A language model that is put together from a list of parts in its config: any list is a model that runs.

It is the modelling code of the checkpoints that `random_architectures.py` draws, so it imports nothing of the tests.
Everything but the vocabulary is read from `config.plan`; `random_architectures.plans` says what may be in it.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

Plan = dict[str, Any]

ACTIVATIONS: dict[str, Any] = {
    "gelu": functional.gelu,
    "relu": functional.relu,
    "silu": functional.silu,
    "tanh": torch.tanh,
    "square": torch.square,
    "relu squared": lambda h: functional.relu(h).square(),
    "leaky": lambda h: functional.leaky_relu(h, 0.2),
    "abs": torch.abs,
    "sine": torch.sin,
    "clamp": lambda h: h.clamp(-1, 1),
    "none": lambda h: h,
    "softmax": lambda h: h.softmax(-1) * h.shape[-1],
    "softplus": functional.softplus,
    "cube": lambda h: h.pow(3) / 3,
    "normalised": lambda h: functional.normalize(h, dim=-1) * h.shape[-1] ** 0.5,
}
REORDERINGS: dict[str, Any] = {
    "none": lambda h: h,
    "flip": lambda h: h.flip(-1),
    "roll": lambda h: h.roll(1, -1),
    "halves": lambda h: torch.cat(h.chunk(2, -1)[::-1], -1),
    "transpose": lambda h: h.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2),
    "interleave": lambda h: torch.stack(h.chunk(2, -1), -1).flatten(-2),
    "evens first": lambda h: torch.cat((h[..., ::2], h[..., 1::2]), -1),
    "product of neighbours": lambda h: h * h.roll(1, -1),
    "product of halves": lambda h: (h * h.unflatten(-1, (2, -1)).flip(-2).flatten(-2)),
    "mean of pairs": lambda h: h.unflatten(-1, (-1, 2)).mean(-1, keepdim=True).expand(
        *h.shape[:-1], -1, 2).flatten(-2),
    "sum of halves": lambda h: h.unflatten(-1, (2, -1)).sum(-2).repeat(1, 1, 2),
    "only half": lambda h: functional.pad(h[..., : h.shape[-1] // 2], (0, h.shape[-1] - h.shape[-1] // 2)),
    "minus mean": lambda h: h - h.mean(-1, keepdim=True),
    "cumulative": lambda h: h.cumsum(-1) / h.shape[-1],
    "largest": lambda h: h * (h >= h.topk(h.shape[-1] // 2, -1).values[..., -1:]),
    "sorted": lambda h: h.sort(-1).values,
}  # fmt: skip


class AssembledConfig(PretrainedConfig):
    model_type = "assembled"

    def __init__(
        self,
        vocab_size: int = 11,
        max_position_embeddings: int = 40,
        plan: Plan | None = None,
        tie_word_embeddings: bool = False,
        **kwargs: object,
    ) -> None:
        self.vocab_size = vocab_size
        self.max_position_embeddings = max_position_embeddings
        self.plan = plan or {}
        super().__init__(tie_word_embeddings=tie_word_embeddings, **kwargs)


class Norm(nn.Module):
    """Over the last axis: "layer" or "rms", with a gain, a bias, or neither; "l1" and "max" for other lengths, "stored"
    for statistics that are known. Each vector may be multiplied by a number behind it."""

    def __init__(self, size: int, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        self.weight = nn.Parameter(torch.ones(size)) if plan["gain"] else None
        self.bias = nn.Parameter(torch.zeros(size)) if plan["bias"] else None
        if plan["kind"] == "stored":
            self.register_buffer("mean", torch.randn(size) / 2)
            self.register_buffer("variance", torch.rand(size) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.normed(x)
        return normed * x.square().mean(-1, keepdim=True) if self.plan.get("scaled") else normed

    def normed(self, x: Tensor) -> Tensor:
        kind = self.plan["kind"]
        if kind == "stored":
            vectors = x.reshape(-1, x.shape[-1])
            return functional.batch_norm(vectors, self.mean, self.variance, self.weight, self.bias).view(x.shape)
        if kind == "layer":
            return functional.layer_norm(x, x.shape[-1:], self.weight, self.bias)
        if kind == "rms":
            x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        elif kind == "l1":
            x = x / (x.abs().mean(-1, keepdim=True) + 1e-5)
        elif kind == "max":
            x = x / (x.abs().amax(-1, keepdim=True) + 1e-5)
        elif kind == "groups":
            x = functional.layer_norm(x.unflatten(-1, (2, -1)), (x.shape[-1] // 2,)).flatten(-2)
        if self.weight is not None:
            x = x * (self.weight + self.plan["offset"])
        return x if self.bias is None else x + self.bias


class Attention(nn.Module):
    def __init__(self, width: int, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        inner, shared = (plan["head"] * n for n in (plan["heads"], plan["shared"]))
        if plan["fused"] == "none":
            self.q = nn.Linear(width, inner, bias=plan["bias"])
            if latent := plan.get("latent", 0):  # what keys and values are read from
                self.down, self.down_norm = nn.Linear(width, latent, bias=plan["bias"]), Norm(latent, plan["norm"])
            self.k = nn.Linear(latent or width, shared, bias=plan["bias"])
            if not plan["keys are values"]:
                self.v = nn.Linear(latent or width, shared, bias=plan["bias"])
        else:
            self.qkv = nn.Linear(width, 3 * inner, bias=plan["bias"])
        self.o = nn.Linear(inner, width, bias=plan["out bias"])
        if plan["qk norm"] == "head":
            self.q_norm, self.k_norm = (Norm(plan["head"], plan["norm"]) for _ in range(2))
        elif plan["qk norm"] == "all":
            self.q_norm, self.k_norm = Norm(inner, plan["norm"]), Norm(shared, plan["norm"])
        if plan["sinks"]:
            self.sinks = nn.Parameter(torch.zeros(plan["heads"]))
        if plan["talking"]:
            self.talk = nn.Parameter(torch.zeros(plan["heads"], plan["heads"]))
        if plan["gate"] != "none":
            self.gate = nn.Linear(width, inner if plan["gate"] == "channels" else plan["heads"])
        if plan.get("differential", False):
            self.less = nn.Parameter(torch.ones(plan["heads"]))
        if plan.get("values of words", False):
            self.words, self.share = nn.Linear(width, shared, bias=plan["bias"]), nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        q, k, v = self.project(x, words)
        if self.plan.get("values of words", False):
            v = v + self.share * self.words(words).unflatten(-1, (-1, self.plan["head"])).transpose(1, 2)
        q, k = rotate(q, self.plan["rotary"]), rotate(k, self.plan["rotary"])
        repeats = self.plan["heads"] // k.shape[1]
        if self.plan["copies"] == "side by side":
            k, v = (t.repeat_interleave(repeats, 1) for t in (k, v))
        else:
            k, v = (t.repeat(1, repeats, 1, 1) for t in (k, v))
        v = ACTIVATIONS[self.plan["values"]](v)
        scores = q @ k.transpose(-1, -2)
        if self.plan["talking"]:
            scores = torch.einsum("bhij,hg->bgij", scores, self.talk)
        shares = self.shares(scores)
        if self.plan.get("differential", False):
            first, second = shares.unflatten(1, (-1, 2)).unbind(2)
            shares = shares - self.less[:, None, None] * torch.stack((second, first), 2).flatten(1, 2)
        mixed = shares @ v
        if self.plan["gate"] == "heads":
            mixed = mixed * self.gate(x).sigmoid().transpose(1, 2)[..., None]
        joined = {"heads first": mixed.transpose(1, 2), "channels first": mixed.permute(0, 2, 3, 1)}
        joined = joined[self.plan["joined"]].flatten(2)
        if self.plan["gate"] == "channels":
            joined = joined * self.gate(x).sigmoid()
        return self.o(joined)

    def project(self, x: Tensor, words: Tensor) -> list[Tensor]:
        heads, size = self.plan["heads"], self.plan["head"]
        if self.plan["fused"] == "none":
            read = words if self.plan.get("keys of words", False) else x
            read = self.down_norm(self.down(read)) if self.plan.get("latent", 0) else read
            q, k = self.q(x), self.k(read)
            v = k if self.plan["keys are values"] else self.v(read)
            if self.plan["qk norm"] == "all":
                q, k = self.q_norm(q), self.k_norm(k)
            parts = [t.unflatten(-1, (-1, size)).transpose(1, 2) for t in (q, k, v)]
        else:
            whole = self.qkv(x)
            if self.plan["fused"] == "parts first":
                whole = whole.unflatten(-1, (3, heads, size)).permute(2, 0, 3, 1, 4)
            elif self.plan["fused"] == "heads first":
                whole = whole.unflatten(-1, (heads, 3, size)).permute(3, 0, 2, 1, 4)
            else:
                whole = whole.unflatten(-1, (heads, size, 3)).permute(4, 0, 2, 1, 3)
            parts = list(whole)
        if self.plan["qk norm"] == "head":
            parts[:2] = self.q_norm(parts[0]), self.k_norm(parts[1])
        return parts

    def shares(self, scores: Tensor) -> Tensor:
        """[batch, heads, queries, keys]"""
        scores = scores * self.plan["scale"]
        length = scores.shape[-1]
        distance = torch.arange(length)[:, None] - torch.arange(length)
        if self.plan["softcap"]:
            scores = torch.tanh(scores / self.plan["softcap"]) * self.plan["softcap"]
        if self.plan["alibi"]:
            slopes = 2.0 ** -torch.arange(1, self.plan["heads"] + 1)
            scores = scores - slopes[:, None, None] * distance
        hidden = torch.zeros(length, length, dtype=torch.bool)
        if self.plan["causal"]:
            hidden = distance < 0
        if self.plan["window"]:
            hidden = hidden | (distance.abs() >= self.plan["window"])
        if self.plan["shares"] == "sigmoid":
            return torch.sigmoid(scores).masked_fill(hidden, 0.0)
        if self.plan["shares"] == "relu":
            return functional.relu(scores).masked_fill(hidden, 0.0) / length
        if self.plan["shares"] == "linear":
            return scores.masked_fill(hidden, 0.0) / length
        scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
        if self.plan["sinks"]:
            sinks = self.sinks[None, :, None, None].expand(*scores.shape[:3], 1)
            return torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
        return scores.softmax(-1)


def rotate(x: Tensor, plan: Plan) -> Tensor:
    """x [batch, heads, length, head]: some of the channels turn, "halves" against each other or "neighbours"."""
    kind, size = plan["kind"], plan["size"]
    if kind == "none":
        return x
    if plan["only first"] and x.shape[1] > 1:
        return torch.cat((rotate(x[:, :1], plan), x[:, 1:]), 1)
    turned, rest = x[..., :size], x[..., size:]
    frequencies = plan["theta"] ** -(torch.arange(size // 2) / (size // 2))
    angles = torch.arange(x.shape[-2])[:, None] * frequencies
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = turned.chunk(2, -1) if kind == "halves" else (turned[..., ::2], turned[..., 1::2])
    parts = first * cos - second * sin, second * cos + first * sin
    turned = torch.cat(parts, -1) if kind == "halves" else torch.stack(parts, -1).flatten(-2)
    return torch.cat((turned, rest), -1)


class MLP(nn.Module):
    def __init__(self, width: int, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        double = plan["gated"] in ("halves", "neighbours")
        self.up = nn.Linear(width, plan["hidden"] * (1 + double), bias=plan["bias"])
        if plan["gated"] == "apart":
            self.side = nn.Linear(width, plan["hidden"], bias=plan["bias"])
        if plan["norm"] is not None:
            self.norm = Norm(plan["hidden"], plan["norm"])
        if plan["inner"]:
            self.inner = nn.Linear(plan["hidden"], plan["hidden"], bias=plan["bias"])
        if not plan["back"]:
            self.down = nn.Linear(plan["hidden"], width, bias=plan["out bias"])

    def forward(self, x: Tensor) -> Tensor:
        h, act = self.up(x), ACTIVATIONS[self.plan["activation"]]
        if self.plan["gated"] == "apart":
            h = act(h) * self.side(x)
        elif self.plan["gated"] == "halves":
            gate, h = h.chunk(2, -1)
            h = act(gate) * h
        elif self.plan["gated"] == "neighbours":
            h = act(h[..., ::2]) * h[..., 1::2]
        else:
            h = act(h)
        h = REORDERINGS[self.plan["reordered"]](h)
        h = self.norm(h) if self.plan["norm"] is not None else h
        h = act(self.inner(h)) if self.plan["inner"] else h
        return functional.linear(h, self.up.weight.T) if self.plan["back"] else self.down(h)


class Experts(nn.Module):
    def __init__(self, width: int, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        self.router = nn.Linear(width, plan["experts"], bias=plan["bias"])
        self.up = nn.Parameter(torch.zeros(plan["experts"], width, plan["hidden"]))
        self.down = nn.Parameter(torch.zeros(plan["experts"], plan["hidden"], width))

    def forward(self, x: Tensor) -> Tensor:
        """Every expert is asked, and those that are not chosen have a share of zero; or the chosen are looked up."""
        logits, act = self.router(x), ACTIVATIONS[self.plan["activation"]]
        shares = logits.softmax(-1) if self.plan["router"] == "softmax" else logits.sigmoid()
        if self.plan.get("asked", "all") == "by number":
            return self.chosen(x, shares)
        if self.plan["chosen"] < self.plan["experts"]:
            bound = shares.topk(self.plan["chosen"], -1).values[..., -1:]
            shares = shares * (shares >= bound)
        if self.plan["renormalised"]:
            shares = shares / shares.sum(-1, keepdim=True)
        if self.plan.get("asked", "all") == "in turn":
            each = [act(x @ self.up[e]) @ self.down[e] * shares[..., e, None] for e in range(self.plan["experts"])]
            return torch.stack(each).sum(0)
        h = act(torch.einsum("btw,ewh->bteh", x, self.up))
        return torch.einsum("bteh,ehw,bte->btw", h, self.down, shares)

    def chosen(self, x: Tensor, shares: Tensor) -> Tensor:
        if self.plan["chosen"] == 1:
            shares, chosen = shares.max(-1, keepdim=True)
        else:
            shares, chosen = shares.topk(self.plan["chosen"], -1)
        if self.plan["renormalised"]:
            shares = shares / shares.sum(-1, keepdim=True)
        h = ACTIVATIONS[self.plan["activation"]](torch.einsum("btw,btcwh->btch", x, self.up[chosen]))
        return torch.einsum("btch,btchw,btc->btw", h, self.down[chosen], shares)


class Convolution(nn.Module):
    """Along time, over what was before."""

    def __init__(self, width: int, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        groups = {"full": 1, "two groups": 2, "each": width}[plan["groups"]]
        self.conv = nn.Conv1d(width, width, plan["size"], groups=groups, dilation=plan["dilation"], bias=plan["bias"])

    def forward(self, x: Tensor) -> Tensor:
        before = functional.pad(x.transpose(1, 2), ((self.plan["size"] - 1) * self.plan["dilation"], 0))
        return ACTIVATIONS[self.plan["activation"]](self.conv(before)).transpose(1, 2)


class Recurrence(nn.Module):
    """A state for each channel that fades; or a mean of all so far."""

    def __init__(self, width: int, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        self.read = nn.Linear(width, plan["size"])
        self.write = nn.Linear(plan["size"], width, bias=False)
        if plan["kind"] != "mean":
            self.fade = nn.Parameter(torch.zeros(plan["size"]))

    def forward(self, x: Tensor) -> Tensor:
        h = self.read(x)
        if self.plan["kind"] == "mean":
            return self.write(h.cumsum(1) / torch.arange(1, h.shape[1] + 1, dtype=h.dtype)[:, None])
        times = torch.arange(h.shape[1])
        ages = (times[:, None] - times).clamp(min=0).to(h.dtype)
        fading = torch.sigmoid(self.fade)[:, None, None] ** ages * (times[:, None] >= times)
        h = torch.einsum("cst,btc->bsc", fading, h)
        return self.write(ACTIVATIONS[self.plan["activation"]](h))


class Lookup(nn.Module):
    """A second table, read by the position, by the word, or by two words."""

    def __init__(self, width: int, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        self.table = nn.Embedding(plan["rows"], width)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        if self.plan["by"] == "position":
            rows = torch.arange(x.shape[1])[None] // self.plan["each"]
        elif self.plan["by"] == "word":
            rows = ids
        else:
            rows = 3 * ids + functional.pad(ids, (1, 0))[:, :-1]
        found = self.table(rows % self.plan["rows"])
        return {"added": found.expand_as(x), "product": x * found, "gate": x * found.sigmoid()}[self.plan["how"]]


class Reshaped(nn.Module):
    """No weights: channels change places, with or without an activation."""

    def __init__(self, width: int, plan: Plan) -> None:
        super().__init__()
        self.plan = plan

    def forward(self, x: Tensor) -> Tensor:
        return ACTIVATIONS[self.plan["activation"]](REORDERINGS[self.plan["reordered"]](x))


class Shifted(nn.Module):
    """Half of the channels are those of the token before."""

    def __init__(self, width: int, plan: Plan) -> None:
        super().__init__()
        self.map = nn.Linear(width, width, bias=plan["bias"])

    def forward(self, x: Tensor) -> Tensor:
        now, before = x.chunk(2, -1)
        return self.map(torch.cat((now, functional.pad(before, (0, 0, 1, -1))), -1))


class Folded(nn.Module):
    """Tokens two by two, as one of twice the width; or halves of a token, as two of half the width."""

    def __init__(self, width: int, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        size = width * 2 if plan["two by two"] else width // 2
        self.map = nn.Linear(size, size, bias=plan["bias"])

    def forward(self, x: Tensor) -> Tensor:
        h = functional.pad(x, (0, 0, 0, x.shape[1] % 2))
        h = h.reshape(x.shape[0], -1, self.map.in_features)
        h = ACTIVATIONS[self.plan["activation"]](self.map(h))
        return h.reshape(x.shape[0], -1, x.shape[-1])[:, : x.shape[1]]


class Gain(nn.Module):
    """A factor for each channel, or one for all; by a gate of the stream itself."""

    def __init__(self, width: int, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        self.factor = nn.Parameter(torch.ones(width if plan["each"] else 1))
        if plan["gated"]:
            self.gate = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor * (self.gate(x).sigmoid() if self.plan["gated"] else 1.0)


class Map(nn.Module):
    """One linear map, perhaps through fewer channels, perhaps with dead weights."""

    def __init__(self, width: int, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        self.first = nn.Linear(width, plan["rank"], bias=plan["bias"])
        self.second = nn.Linear(plan["rank"], width, bias=plan["bias"])
        self.dead = nn.Linear(width, width) if plan["dead"] != "none" else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.second(self.first(x))
        return y + 0.0 * self.dead(x) if self.plan["dead"] == "times zero" else y


PARTS: dict[str, Any] = {
    "attention": Attention,
    "mlp": MLP,
    "experts": Experts,
    "convolution": Convolution,
    "recurrence": Recurrence,
    "lookup": Lookup,
    "reshaped": Reshaped,
    "shifted": Shifted,
    "folded": Folded,
    "gain": Gain,
    "map": Map,
}


class Step(nn.Module):
    """Norm, part, norm, and how the result joins the stream.

    Args:
        norm: that of a step before, which this one may read once more.
    """

    def __init__(self, width: int, plan: Plan, norm: Norm | None) -> None:
        super().__init__()
        self.plan = plan
        shares = plan.get("norms", "apart")
        self.norms: dict[str, Norm] = {}
        for place in ("before", "after", "last"):
            if plan[place] is not None:
                if norm is None or shares == "apart" or (shares == "of the step" and not self.norms):
                    norm = Norm(width, plan[place])
                    setattr(self, place, norm)
                self.norms[place] = norm
        self.part = PARTS[plan["part"]["is"]](width, plan["part"])
        self.beside = PARTS[plan["beside"]["is"]](width, plan["beside"]) if plan.get("beside") else None
        if plan["join"] == "gate":
            self.gate = nn.Linear(width, width)
        if plan["join"] == "gain":
            self.gain = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor, ids: Tensor, words: Tensor, number: int, count: int) -> Tensor:
        """In the layer of this number among so many.

        Args:
            words: the embedded text.
        """
        limit, parity = self.plan["above"], self.plan["parity"]
        runs = {"all": True, "not first": number > 0, "not last": number < count - 1, "odd": number % 2 == 1}
        if x.shape[1] <= limit or (parity and x.shape[1] % 2) or not runs[self.plan["at"]]:
            return x
        y = x
        for _ in range(self.plan.get("times", 1)):
            y = self.norms["before"](y) if "before" in self.norms else y
            parts = [p for p in (self.part, self.beside) if p is not None]
            y = sum(_run(part, y, ids, words) for part in parts)
        y = self.norms["after"](y) if "after" in self.norms else y
        y = self.joined(x, y)
        return self.norms["last"](y) if "last" in self.norms else y

    def joined(self, x: Tensor, y: Tensor) -> Tensor:
        how = self.plan["join"]
        if how == "gate":
            share = self.gate(x).sigmoid()
            return share * x + (1 - share) * y
        if how == "gain":
            return x + self.gain * y
        return {"add": lambda: x + y, "alone": lambda: y, "half": lambda: torch.add(x, y, alpha=0.5),
                "subtract": lambda: x - y, "product": lambda: x * y}[how]()  # fmt: skip


def _run(part: nn.Module, y: Tensor, ids: Tensor, words: Tensor) -> Tensor:
    more = {Lookup: (ids,), Attention: (words,)}.get(type(part), ())
    return part(y, *more)


def _layer(width: int, plans: list[Plan]) -> nn.ModuleList:
    steps = nn.ModuleList()
    for plan in plans:
        first = next((norm for step in steps for norm in step.norms.values()), None)
        steps.append(Step(width, plan, first))
    return steps


class AssembledForCausalLM(PreTrainedModel):
    config_class = AssembledConfig
    base_model_prefix = "model"
    _tied_weights_keys: ClassVar[dict[str, str]] = {"head.weight": "embed.weight"}

    def __init__(self, config: AssembledConfig) -> None:
        super().__init__(config)
        plan, width = config.plan, config.plan["width"]
        self.embed = nn.Embedding(config.vocab_size, width)
        if plan["positions"]:
            self.positions = nn.Embedding(config.max_position_embeddings, width)
        if plan["segments"]:
            self.segments = nn.Embedding(2, width)
        self.first = Norm(width, plan["first"]) if plan.get("first") else None
        layers = [plan["layers"][i] for i in plan["order"]] if plan["apart"] else plan["layers"]
        self.layers = nn.ModuleList(_layer(width, steps) for steps in layers)
        if plan["mixture"]:
            self.shares = nn.Parameter(torch.zeros(len(plan["order"]) + 1))
        self.norm = None if plan["norm"] is None else Norm(width, plan["norm"])
        self.head = nn.Linear(width, config.vocab_size, bias=plan["head bias"])
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: Tensor, token_type_ids: Tensor | None = None, **kwargs: object) -> CausalLMOutput:
        plan = self.config.plan
        x = self.embed(input_ids) * plan["scale"]
        if plan["positions"]:
            x = x + self.positions(torch.arange(input_ids.shape[1]))
        if plan["segments"] and token_type_ids is not None:
            x = x + self.segments(token_type_ids)
        words = x = x if self.first is None else self.first(x)
        stages = [x]
        for number, chosen in enumerate(plan["order"]):
            for step in self.layers[number if plan["apart"] else chosen]:
                x = step(x, input_ids, words, number, len(plan["order"]))
            back = plan["skips"].get(str(number))
            if back is not None:
                x = x + ACTIVATIONS[back["through"]](stages[back["from"]])
            stages.append(x)
        if plan["mixture"]:
            x = torch.einsum("sbtw,s->btw", torch.stack(stages), self.shares.softmax(0))
        x = x if self.norm is None else self.norm(x)
        logits = self.head(x)
        return CausalLMOutput(logits=torch.tanh(logits / 3) * 3 if plan["softcap"] else logits)
