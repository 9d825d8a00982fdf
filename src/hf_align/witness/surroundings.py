"""What a call finds around it, besides its arguments: whether gradients are computed, what the model was asked before,
in which dtypes it is, what is switched on, and flags that are turned over after a model was loaded. Most of it is tried
where the code has a word for it."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_align.tracing.asked import OF_ANY, Ask
from hf_align.tracing.example import Example
from hf_align.tracing.fields import parts
from hf_align.tracing.own_code import files_of, words_beside, words_of
from hf_align.witness import around
from hf_align.witness.noted import Noted
from hf_align.witness.training import in_training

_OF_MODULES = ("gradient_checkpointing",)
_AROUND: Mapping[str, tuple[str, Callable[[nn.Module], Any]]] = {
    "training": ("training mode", in_training),
    **dict.fromkeys(("requires_grad", "is_grad_enabled", "grad_fn"), ("weights that are trained", around.trained)),
    "autocast": ("autocast", lambda _: around.autocast()),
    "cuda": ("tensors that say they are on a GPU", lambda _: around.OnCuda()),
    "_hooks": ("hooks", around.hooked),
    "get_default_dtype": ("float64 by default", lambda _: around.by_default(torch.float64)),
    "get_num_threads": ("another number of threads", lambda _: around.other_threads()),
}
"""Part of a word of the code -> what it may ask for, and what makes it so."""
_PATH = "name_or_path"
"""Part of the names under which a model and its config keep the folder that they were loaded from."""
_IF_NAMED = (torch.int8, torch.int16, torch.float16, torch.bfloat16, torch.float64)
"""Dtypes of whole numbers that are tried where the code has a word for them; of masks, others are tried anyway."""
_NAMESPACES = ("torch", "torch.compiler", "torch.jit", "torch.cuda", "torch.onnx", "torch.distributed",
               "torch.overrides", "torch.backends.mps", "torch.backends.cuda")  # fmt: skip
"""Where torch answers questions."""
_QUESTIONS = ("is_", "are_", "in_", "has_")
_ASKED_IN_TRUTH = ("is_grad_enabled", "is_inference_mode_enabled", "is_autocast_enabled", "is_autocast_cpu_enabled")


def surroundings(model: PreTrainedModel, base: Example, noted: Noted) -> Iterator[Ask]:
    """What may surround a call of a model and should leave the answer as it is."""
    yield Ask("gradients that are computed", ({},), within=lambda _: torch.enable_grad())
    yield Ask("inference mode", ({},), within=lambda _: torch.inference_mode())
    yield Ask("the same call before", ({},), turned=_called_before)
    for name in (*OF_ANY, *_OF_MODULES):
        if any(True for _ in _holders(model, name)):
            yield Ask(f"{name} turned over after it was loaded", ({},), within=partial(_turned_over, name=name))
    files = files_of(model)
    words = words_of(model)
    yield _around("all in float64", around.in_float64, around.doubled)
    yield from _dtypes(base, words)
    for part, (said, within) in _AROUND.items():
        if any(part in word for word in words):
            yield _around(said, within)
    for name, holders in _questions(files, words).items():
        yield _around(f"another answer to {name}", partial(around.answered, name=name, holders=holders, files=files))
    for word in sorted(words_beside(model, _PATH)):
        yield _around(f"weights from a folder {word!r}", partial(around.in_folder, name=word))
    for state in noted.states:
        yield Ask(state, ({},), within=partial(around.with_number, state=state))
    for setting in noted.variables:
        yield _around(setting, partial(around.with_variable, setting=setting))


def _around(said: str, within: Callable[..., Any], turned: Any = None) -> Ask:
    return Ask(said, ({},), turned, within, surrounds=True)


def _called_before(model: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments as they are, to a model that may remember them."""
    model(**arguments)
    return arguments


def _holders(model: nn.Module, name: str) -> Iterator[Any]:
    """The parts of a model's config, or its modules, that have a flag of a name."""
    everything = model.modules() if name in _OF_MODULES else parts(model.config)  # type: ignore[arg-type]
    return (part for part in everything if isinstance(getattr(part, name, None), bool))


@contextmanager
def _turned_over(model: nn.Module, name: str) -> Iterator[None]:
    with ExitStack() as stack:
        for part in [*_holders(model, name)]:
            before = getattr(part, name)
            stack.callback(setattr, part, name, before)
            setattr(part, name, not before)
        yield


def _dtypes(base: Example, words: frozenset[str]) -> Iterator[Ask]:
    """Tokens, and what else a call holds in whole numbers, in other dtypes."""
    named = [kind for kind in _IF_NAMED if _name(kind) in words]
    for kind in (torch.int32, *named) if base.tokens else ():
        if not kind.is_floating_point:
            cast = partial(_cast, base.tokens.keys(), kind)
            yield Ask(f"tokens as {_name(kind)}", ({},), cast, surrounds=kind not in named)
    for kind in (torch.uint8, *named):
        cast = partial(_cast_others, base.tokens.keys(), kind)
        yield Ask(f"what is no token as {_name(kind)}", ({},), cast, surrounds=kind not in named)


def _name(kind: torch.dtype) -> str:
    return str(kind).removeprefix("torch.")


def _cast(names: Collection[str], kind: torch.dtype, model: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Some arguments that are whole numbers in another dtype."""
    whole = {name: arguments[name] for name in names if _is_whole(arguments.get(name))}
    return {**arguments, **{n: t.to(kind) for n, t in whole.items() if t.to(kind).to(t.dtype).equal(t)}}


def _cast_others(kept: Collection[str], kind: torch.dtype, model: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    return _cast([name for name in arguments if name not in kept], kind, model, arguments)


def _is_whole(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_floating_point() and not value.is_complex()


def _questions(files: Collection[str], words: frozenset[str]) -> dict[str, list[ModuleType]]:
    """What code may ask of torch that is answered by yes or no, by name; and where it finds it."""
    found = defaultdict[str, list[ModuleType]](list)
    for place in (*_NAMESPACES, *files):
        module = sys.modules.get(place)
        for name in sorted(words.intersection(() if module is None else vars(module))):
            if name.startswith(_QUESTIONS) and name not in _ASKED_IN_TRUTH and _is_question(getattr(module, name)):
                found[name].append(module)  # type: ignore[arg-type]
    return found


def _is_question(value: Any) -> bool:
    """Whether it is a function of a library that says yes or no to whoever asks."""
    if not callable(value) or not f"{getattr(value, '__module__', None) or 'torch'}.".startswith("torch."):
        return False
    try:
        return isinstance(value(), bool)
    except Exception:  # it asks something of an argument
        return False
