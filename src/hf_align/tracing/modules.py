"""A module that no config of transformers describes, as an architecture of its own.

In the place of a config stands what the module computes: the calls that it is made with, and a digest of the program
that these run. In the place of the class that a config is built by stands a copy of the module without weights.
"""

from __future__ import annotations

import base64
import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_unflatten, treespec_loads
from transformers import AutoConfig, PretrainedConfig

from hf_align.errors import OptionError, first_line
from hf_align.tracing.example import AsGiven, Example
from hf_align.tracing.state import left_as_found

Calls = Mapping[str, Example]
"""By the names of the modes."""


class ModuleConfig(PretrainedConfig):
    """What describes a module: plain JSON, as a config is.

    Attributes:
        name: of its class, for messages.
        program: a digest of what its calls compute; modules of one digest compute the same with the same weights.
        calls: the name of each mode, and its arguments by name, in order.
        by_place: the arguments of `forward` that are given without their names, in order.
        nested: for the arguments that hold several values, how these are nested, and what each is called.
    """

    model_type = "hf_align_module"

    def __init__(
        self,
        name: str = "",
        program: str = "",
        calls: Sequence[Any] = (),
        by_place: Sequence[str] = (),
        nested: Mapping[str, Any] | None = None,
        **fields: Any,
    ) -> None:
        super().__init__(**fields)
        self.tie_word_embeddings = False
        vars(self)["model_type"] = f"{name} module"  # for messages; with a space, it is the name of no override file
        self.name = name
        self.program = program
        self.calls = list(calls)
        self.by_place = list(by_place)
        self.nested = dict(nested or {})

    @property
    def examples(self) -> dict[str, Example]:
        """The arguments of each call, by the name of its mode."""
        return {mode: _example(arguments) for mode, arguments in self.calls}


AutoConfig.register(ModuleConfig.model_type, ModuleConfig)

_COPIES: dict[str, nn.Module] = {}
"""Modules without weights, by the digest of their program."""
_GIVEN: dict[str, Calls] = {}
"""What the caller called them with, in numbers."""


class ModuleModel(nn.Module):
    """A module without weights, as tracing knows models: called by the names of arguments, with its config beside it.

    Its parts are the parts of the module itself, under the same names; attributes of the two do not meet.
    """

    def __init__(self, config: ModuleConfig, module: nn.Module) -> None:
        super().__init__()
        for kind in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"):
            vars(self)[kind] = getattr(module, kind)
        self.config = config
        self._of = (module,)  # in a tuple it is no part

    def forward(self, **arguments: Any) -> Any:
        """What the module gives; arguments that it is not known to take, as labels, are left out."""
        (module,) = self._of
        config, given = self.config, dict(arguments)
        for name, (nesting, parts) in config.nested.items():
            if parts and all(part in given for part in parts):
                given[name] = tree_unflatten([given[part] for part in parts], treespec_loads(nesting))
        known = {name for _, arguments in config.calls for name, _ in arguments}
        known |= config.nested.keys()
        known -= {part for _, parts in config.nested.values() for part in parts}
        placed = [given[name] for name in config.by_place if name in given]
        named = {name: v for name, v in given.items() if name in known and name not in config.by_place}
        with left_as_found(module), _written_out():
            return module(*placed, **named)

    @property
    def whole(self) -> nn.Module:
        """The copy itself, of which this has the parts."""
        return self._of[0]

    @property
    def calls(self) -> dict[str, Example]:
        """The arguments of each call, by the name of its mode."""
        return self.config.examples

    @property
    def given(self) -> dict[str, Example]:
        """What the caller called the module with, in numbers; nothing where an alignment was read from a file."""
        return {mode: AsGiven(e.arguments, {}) for mode, e in _GIVEN.get(self.config.program, {}).items()}

    def examples(self, rows: int) -> Iterator[Example]:
        """The calls, first one with so many rows if that is one."""
        every = list(self.calls.values())
        yield from sorted(every, key=lambda e: _rows(e) != rows)

    def tie_weights(self) -> None:
        """Shared weights are one: nothing has to be tied."""

    def can_generate(self) -> bool:
        return False


@contextmanager
def _written_out() -> Iterator[None]:
    """While attention of torch's own runs op by op, which would be one op for a whole layer in evaluation mode, and so
    does what torch.compile has made of modules and functions."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def remember(program: str, module: nn.Module, given: Calls | None = None) -> None:
    """Keep what a config describes.

    Args:
        module: a copy without weights.
        given: what the caller called it with.
    """
    _COPIES[program] = module
    if given:
        _GIVEN[program] = given


def build_module(config: ModuleConfig, *, dtype: torch.dtype = torch.float32, **_: Any) -> ModuleModel:
    """The module of a config, without weights.

    Raises:
        OptionError: no such module was seen in this process.
    """
    if config.program not in _COPIES:
        raise OptionError(f"the code of {config.name} is not known yet: give a live {config.name} first")
    return as_model(config, without_weights(_COPIES[config.program], dtype))


def as_model(config: ModuleConfig, module: nn.Module) -> ModuleModel:
    """A copy of a module, under the name of its class."""
    made: ModuleModel = type(config.name or "Module", (ModuleModel,), {})(config, module)
    return made


def without_weights(module: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """A copy in evaluation mode whose parameters take no memory, on the CPU.

    Args:
        dtype: of all that is floating point; by default each has its own.

    Raises:
        OptionError: it cannot be copied.
    """
    memo: dict[int, Any] = {}
    kept: list[Tensor] = []  # a copy is known by the id of what it is made of
    for tensor in tensors_of(module):
        if id(tensor) not in memo:
            memo[id(tensor)] = _bare(tensor, dtype)
            kept.append(tensor)
    try:
        return copy.deepcopy(module, memo).eval()
    except Exception as error:  # whatever a module holds may refuse to be copied
        raise OptionError(f"{type(module).__name__} cannot be copied: {first_line(error)}") from error


def tensors_of(module: nn.Module) -> Iterator[Tensor]:
    """All that a module and its parts hold, what they noted in lists and dicts too."""
    return (t for part in module.modules() for t in tree_leaves(vars(part)) if isinstance(t, Tensor))


def _bare(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    to = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(torch.empty(tensor.shape, dtype=to, device="meta"), requires_grad=False)
    return tensor.detach().to("cpu", to, copy=True)


def written(example: Example) -> list[Any]:
    """The arguments of a call as plain data: what is free by its shape, all else by its value."""
    return [[name, _argument(example, name, value)] for name, value in example.arguments.items()]


def _argument(example: Example, name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Tensor):
        if value is not None and not isinstance(value, (bool, int, float, str)):
            raise OptionError(f"the argument {name} is a {type(value).__name__}; tensors, numbers and words are known")
        return {"plain": value}
    said: dict[str, Any] = {"shape": list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
    if name in example.tokens:
        ids = example.tokens[name]
        said["tokens"] = len(ids) if torch.equal(ids, torch.arange(len(ids))) else ids.tolist()
    elif not example.is_free(name):
        raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        said["value"] = base64.b64encode(raw.numpy().tobytes()).decode()
    return said


def _example(arguments: Sequence[Any]) -> Example:
    found, tokens = dict[str, Any](), dict[str, Tensor]()
    for name, said in arguments:
        if "plain" in said:
            found[name] = said["plain"]
            continue
        shape, dtype = said["shape"], getattr(torch, said["dtype"])
        if "value" in said:
            raw = torch.frombuffer(bytearray(base64.b64decode(said["value"])), dtype=torch.uint8)
            found[name] = raw.view(dtype).reshape(shape)
        elif "tokens" in said:
            ids = torch.arange(said["tokens"]) if isinstance(said["tokens"], int) else torch.tensor(said["tokens"])
            tokens[name] = ids
            found[name] = ids[torch.arange(torch.Size(shape).numel()) % len(ids)].reshape(shape).to(dtype)
        else:
            found[name] = torch.zeros(shape, dtype=dtype)
    return Example(found, tokens)


def _rows(example: Example) -> int:
    return next((len(t) for t in example.arguments.values() if isinstance(t, Tensor) and t.dim()), 1)
