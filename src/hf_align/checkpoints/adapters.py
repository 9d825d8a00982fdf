"""LoRA adapters as PEFT saves them, merged into their base tensor by tensor while it is read: no model is built.

W becomes W + scale · B A (Hu et al., arXiv 2106.09685), in float32 and rounded once to the dtype of W, which is what
PEFT's `merge_and_unload` saves.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from hf_align.checkpoints.checkpoint import Checkpoint
from hf_align.checkpoints.hub import ADAPTER, Source
from hf_align.checkpoints.own_files import own_json
from hf_align.errors import CheckpointError
from hf_align.runtime.devices import drawing

WEIGHTS = "adapter_model.safetensors"
_ALPHA = 8
"""PEFT's, where a config does not say."""
_LOST, _ROUNDING = 1e-4, 1e-6
"""What two factors may lack of a change: against its norm, and against that of what it is the difference of."""
_FACTOR = re.compile(r"(?P<module>.+)\.lora_(?P<kind>embedding_)?(?P<side>[AB])(\.default)?(\.weight)?")
_WRAPPERS = re.compile(r"^base_model\.model\.|(?<=\.)(base_layer|modules_to_save(\.default)?)\.")
_BEYOND = ("use_dora", "use_qalora", "target_parameters", "trainable_token_indices", "layer_replication",
           "alora_invocation_tokens", "arrow_config", "lora_bias", "use_bdlora", "kasa_config",
           "monteclora_config")  # fmt: skip
_MOVES_BASE = re.compile(r"pissa|olora|corda|loftq|lora_ga")
"""Initialisations that change the base as well, so that the adapter belongs to weights that nobody saved."""


@dataclass(frozen=True)
class LowRank:
    """A change B A of a weight.

    Attributes:
        down, up: names of A, [rank, inputs, …], and B, [outputs, rank, …], in the adapter.
        transposed: the weight is stored as [inputs, outputs].
    """

    down: str
    up: str
    scale: float
    transposed: bool

    def rows(self, adapter: Mapping[str, Tensor], first: int, last: int) -> Tensor:
        """Rows [first, last) of the change, float32 [last - first, what one row has]."""
        down, up = (adapter[name].float().flatten(1) for name in (self.down, self.up))
        change = down[:, first:last].T @ up.T if self.transposed else up[first:last] @ down
        return self.scale * change

    def factors(self, change: Tensor, adapter: Checkpoint, rounded: float = 0.0) -> dict[str, Tensor]:
        """The factors of another change, laid out as the weight is stored, by name in the adapter.

        Args:
            rounded: the norm of what the change is the difference of.

        Raises:
            CheckpointError: the change is of a higher rank, by more than the rounding of single precision.
        """
        down, up = (adapter.info(name) for name in (self.down, self.up))
        matrix = change.double().flatten(1)
        matrix = matrix.T if self.transposed else matrix
        rank = min(down.shape[0], *matrix.shape)
        with drawing(matrix.device, 0):  # it multiplies by random matrices, and has no other way to be told
            u, s, v = torch.svd_lowrank(matrix, q=rank, niter=4)
        if float((matrix - (u * s) @ v.T).norm()) > _LOST * float(matrix.norm()) + _ROUNDING * rounded:
            raise CheckpointError(f"the change that {self.up} is a factor of has a higher rank than {rank}")
        roots = torch.nn.functional.pad((s / abs(self.scale)).sqrt(), (0, down.shape[0] - rank))
        u, v = (torch.nn.functional.pad(side, (0, down.shape[0] - rank)) for side in (u, v))
        sides = ((self.down, down, (v * roots).T), (self.up, up, u * roots * math.copysign(1, self.scale)))
        return {name: side.to(info.dtype).reshape(info.shape).contiguous() for name, info, side in sides}


class AdaptedCheckpoint(Checkpoint):
    """A checkpoint with an adapter merged in, as its tensors are read.

    Args:
        low_rank: name on disk -> its change.
        replaced: name on disk -> the adapter's tensor that stands in its place, before it is changed.
    """

    def __init__(
        self, base: Checkpoint, adapter: Checkpoint, low_rank: Mapping[str, LowRank], replaced: Mapping[str, str]
    ) -> None:
        super().__init__(base.folder, base._tensors, base._remote)
        self._adapter = adapter
        self.low_rank = low_rank
        self._replaced = replaced

    @cached_property
    def copies(self) -> Mapping[str, str]:
        """The tensors of the adapter that are those of the base (PEFT saves layers of embeddings), by name on disk."""
        return {name: own for name, own in self._replaced.items() if self._is_of_base(name, own)}

    def _is_of_base(self, name: str, own: str) -> bool:
        size = math.prod(self.info(name).shape)
        found = super().entries(name, 0, size)
        return found.equal(self._adapter.entries(own, 0, size).to(found.dtype))

    @property
    def parts(self) -> Mapping[str, LowRank | str]:
        """What the adapter changes, by name on disk: by two factors, or by a tensor of its own, which is named."""
        return {**self.low_rank, **{n: own for n, own in self._replaced.items() if n not in self.copies}}

    @property
    def adapter(self) -> Checkpoint:
        """The adapter alone."""
        return self._adapter

    def entries(self, name: str, start: int, stop: int, into: Tensor | None = None) -> Tensor:
        found = super().entries(name, start, stop, into)
        if name in self._replaced:
            found = self._adapter.entries(self._replaced[name], start, stop).to(found.dtype)
        if name not in self.low_rank:
            return found
        columns = math.prod(self.info(name).shape[1:])
        first, last = start // columns, -(-stop // columns)
        change = self.low_rank[name].rows(self._adapter, first, last).flatten()
        change = change[start - first * columns : stop - first * columns]
        return (found.to(torch.promote_types(found.dtype, torch.float32)) + change).to(found.dtype)

    def record(self, reference: str, config: str = "config.json") -> dict[str, str]:
        return super().record(reference, config) | self._adapter.record(f"{reference} (adapter)", ADAPTER)


def adapted(
    base: Checkpoint,
    source: Source,
    in_memory: Mapping[str, str] | None = None,
    by_inputs: Collection[str] | None = None,
) -> Checkpoint:
    """A checkpoint with the adapter of its source, if it has one, merged in.

    Args:
        in_memory: name in memory -> name on disk, for adapters whose base is stored under other names.
        by_inputs: names in memory of weights that are stored as [inputs, outputs], as the model's modules tell;
            without them a square weight is refused.

    Raises:
        CheckpointError: an adapter of another kind, for another base, or that cannot be merged exactly.
    """
    if source.adapter is None:
        return base
    adapter = Checkpoint.of_file(source.adapter.folder, WEIGHTS, source.adapter.shards)
    config, (factors, whole) = _config(source.adapter), _parts(adapter, source)
    names = in_memory or {}
    replaced = {_place(bare, base, names, source): name for bare, name in whole.items()}
    flipped = None if by_inputs is None else {names.get(name, name) for name in by_inputs}
    low_rank: dict[str, LowRank] = {}
    for module, parts in factors.items():
        on_disk = _place(f"{module}.weight", base, names, source)
        if on_disk in low_rank:
            raise CheckpointError(f"{source.reference}: the adapter changes {on_disk} twice; merge it with PEFT first")
        is_flipped = None if flipped is None else on_disk in flipped
        low_rank[on_disk] = _low_rank(module, parts, config, adapter, base.info(on_disk).shape, source, is_flipped)
    for on_disk, name in replaced.items():
        old, new = base.info(on_disk).shape, adapter.info(name).shape
        if old != new:
            raise CheckpointError(
                f"{source.reference}: the adapter resizes {on_disk} from {list(old)} to {list(new)}; "
                "merge it with PEFT first"
            )
    return AdaptedCheckpoint(base, adapter, low_rank, replaced)


def _parts(adapter: Checkpoint, source: Source) -> tuple[dict[str, dict[str, str]], dict[str, str]]:
    """Module -> names of its factors, by side; and the name of a whole tensor without wrappers -> its own."""
    factors: dict[str, dict[str, str]] = {}
    whole = {}
    for name in adapter:
        bare = _WRAPPERS.sub("", name)
        if found := _FACTOR.fullmatch(bare):
            factors.setdefault(found["module"], {})[f"{found['kind'] or ''}{found['side']}"] = name
        elif "lora_" in bare:
            raise CheckpointError(f"{source.reference}: {name} is not a plain LoRA; merge it with PEFT first")
        else:
            whole[bare] = name
    return factors, whole


def _low_rank(
    module: str, parts: Mapping[str, str], config: Mapping[str, Any], adapter: Checkpoint, shape: tuple[int, ...],
    source: Source, is_flipped: bool | None,
) -> LowRank:  # fmt: skip
    of_embedding = "embedding_A" in parts
    down_name, up_name = (parts.get(f"embedding_{side}" if of_embedding else side) for side in "AB")
    if down_name is None or up_name is None:
        raise CheckpointError(
            f"{source.reference}: the adapter has only half of the change of {module}; fetch it again"
        )
    down, up = adapter.info(down_name).shape, adapter.info(up_name).shape
    rank, sizes = down[0], (up[0], math.prod(down[1:]))
    weight = (shape[0], math.prod(shape[1:]))
    fits = [flip for flip in (False, True) if sizes == (weight[::-1] if flip else weight)]
    if up[1] != rank or not fits:
        raise CheckpointError(
            f"{source.reference}: the adapter's {module} is {list(up)} by {list(down)}, which does not fit the base's "
            f"{list(shape)}; was it made for another base?"
        )
    is_square = len(fits) == 2
    if is_square and not of_embedding and is_flipped is None:  # fan_in_fan_out is that of the last module alone
        raise CheckpointError(f"{source.reference}: only the model's code tells how the square {module} is laid out")
    alpha = _by_pattern(config.get("alpha_pattern") or {}, module, config.get("lora_alpha", _ALPHA))
    return LowRank(
        down_name, up_name, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank),
        transposed=of_embedding or bool(is_flipped) if is_square else fits[0],
    )  # fmt: skip


def _by_pattern(patterns: Mapping[str, float], module: str, default: float) -> float:
    """The value of the first pattern that a module's name ends with, as PEFT reads them."""
    return next((value for key, value in patterns.items() if re.fullmatch(rf"(.*\.)?({key})", module)), default)


def _place(name: str, base: Checkpoint, in_memory: Mapping[str, str], source: Source) -> str:
    """The base's tensor on disk that an adapter calls by its name in memory, with or without a prefix."""
    if name in base:
        return name
    alike = [d for d in base if d.endswith(f".{name}") or name.endswith(f".{d}")]
    found = alike[0] if len(alike) == 1 else in_memory.get(name)
    if found is None:
        raise CheckpointError(
            f"{source.reference}: the adapter changes {name}, which its base does not store (is it tied, fused, or of "
            "another base?); merge it with PEFT first"
        )
    return found


def _config(source: Source) -> dict[str, Any]:
    """The adapter's config.

    Raises:
        CheckpointError: it is not the config of an adapter that adds a product of two matrices.
    """
    config = own_json(source.folder, ADAPTER) or {}
    kind = config.get("peft_type")
    if kind != "LORA":
        raise CheckpointError(
            f"{source.reference} is an adapter of the kind {kind}, not LoRA; merge it with PEFT first"
        )
    beyond = [key for key in _BEYOND if config.get(key)]
    start = str(config.get("init_lora_weights"))
    if _MOVES_BASE.match(start.lower()):
        beyond.append(f"init_lora_weights {start}")
    if beyond:
        raise CheckpointError(f"{source.reference} is not a plain LoRA ({beyond[0]}); merge it with PEFT first")
    return config
