"""How a module is called: with what a caller gives, and with more or less of it where the module takes that, too.

What a symmetry must leave alone is the answer to every call. A caller gives one or a few; of each, the module is tried
with other sizes of every axis that its weights leave open: batches, lengths, heights. A size is a mode of its own if
the module does something else with it.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_flatten, treespec_dumps

from hf_align.errors import IncompatibleModels, OptionError
from hf_align.tracing.alike import is_part_of
from hf_align.tracing.answers import value_shown
from hf_align.tracing.build import build_without_weights, inventory
from hf_align.tracing.example import Example
from hf_align.tracing.fingerprint import Call, CannotRecord, digest_of
from hf_align.tracing.modes import TRACED
from hf_align.tracing.modules import ModuleConfig, ModuleModel, remember, without_weights, written
from hf_align.tracing.ops import Trait, does
from hf_align.tracing.program import Program
from hf_align.tracing.resized import LONGEST, axes_by_size, numbers_in_code, numbers_noted, resized
from hf_align.tracing.trace import trace_module

Inputs = Any
"""A tensor, a tuple of positional arguments, a mapping of named ones; or a list of such calls."""
_NUMBERS = 8
"""Of the numbers in the code of a module, those that lengths are compared with at most."""
_ANY = 2**20
"""Token ids before it is seen which table they are looked up in."""
_UNKNOWN = "not known yet"
_SEEN: dict[Hashable, ModuleConfig] = {}
"""Modules that were described, by what they look like from outside."""
_LOOKS: dict[str, set[Hashable]] = {}
"""By the digests of their programs, what modules look like at which other sizes were tried."""
_HELD = ("_parameters", "_modules", "training")
"""What every module has of its own: no choice of a caller's."""
_TAKEN = ("config", "calls", "given", "examples", "whole", "tie_weights", "can_generate")
"""Names that a part of a module cannot have beside those of `ModuleModel`."""


def described(module: nn.Module, inputs: Inputs) -> ModuleConfig:
    """What stands for a config of a module.

    Args:
        inputs: of one call, or of several in a list.

    Raises:
        OptionError: it cannot be called so, or not be traced.
    """
    calls = inputs if isinstance(inputs, list) else [inputs]
    if not calls:
        raise OptionError("inputs has no call in it")
    config = ModuleConfig(type(module).__name__)
    leaves = [_leaves(config, _bound(module, call)) for call in calls]
    if not any(isinstance(v, Tensor) for call in leaves for v in call.values()):
        raise OptionError(f"inputs holds no tensor that {config.name} could be called with")
    return _config(module, config, [_on_cpu(call) for call in leaves])


def as_described(module: nn.Module, like: ModuleConfig) -> ModuleConfig:
    """What describes a module that is called as another one is.

    Raises:
        OptionError: it cannot be called so, or not be traced.
    """
    config = ModuleConfig(type(module).__name__, by_place=like.by_place, nested=like.nested)
    identified = _identified(module, config, like.examples, {})
    if identified.program == like.program:
        _require_no_other_sizes(module, identified)
    return identified


def _require_no_other_sizes(module: nn.Module, config: ModuleConfig) -> None:
    """Try sizes on a module that is like another one at those which were worth listing there.

    Raises:
        OptionError: it does something else at another size.
    """
    known = _LOOKS.setdefault(config.program, set())
    if (look := _look(module)) in known:
        return
    model = build_without_weights(config)
    assert isinstance(model, ModuleModel)
    found = [trace_module(model, example) for example in config.examples.values()]
    for example in config.examples.values():
        for other, program in _of_other_sizes(model, example):
            if not any(is_part_of(program, one) for one in found):
                raise OptionError(
                    f"{config.name} does something else with {_name(other)}, which the module that the alignment was"
                    " made for does not"
                )
    known.add(look)


def bound(config: ModuleConfig, module: nn.Module, call: Any) -> dict[str, Any]:
    """Arguments by the names under which a module is known to take them.

    Args:
        call: a tensor, a tuple of positional arguments, or a mapping.
    """
    return _leaves(ModuleConfig(config.name), _bound(module, call))


def _bound(module: nn.Module, call: Any) -> list[tuple[str, Any, bool]]:
    """The arguments of `forward` by name, and whether each is given by its place."""
    args: tuple[Any, ...] = () if isinstance(call, Mapping) else call if isinstance(call, tuple) else (call,)
    kwargs = dict(call) if isinstance(call, Mapping) else {}
    try:
        given = inspect.signature(module.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise OptionError(f"{type(module).__name__} cannot be called with these inputs: {error}") from error
    found: list[tuple[str, Any, bool]] = []
    for name, value in given.arguments.items():
        kind = given.signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            found += [(f"{name}_{i}", v, True) for i, v in enumerate(value)]
        elif kind is inspect.Parameter.VAR_KEYWORD:
            found += [(n, v, False) for n, v in value.items()]
        else:
            found.append((name, value, kind is not inspect.Parameter.KEYWORD_ONLY and name not in kwargs))
    return found


def _leaves(config: ModuleConfig, arguments: Sequence[tuple[str, Any, bool]]) -> dict[str, Any]:
    """Tensors and numbers by name, those of nested arguments each under one of its own; the config learns of both."""
    found: dict[str, Any] = {}
    for name, value, by_place in arguments:
        if by_place and name not in config.by_place:
            config.by_place.append(name)
        if not isinstance(value, (tuple, list, dict)):
            found[name] = value
            continue
        parts, nesting = tree_flatten(value)
        names = [f"{name}_{i}" for i in range(len(parts))]
        noted = [treespec_dumps(nesting), names]
        if config.nested.setdefault(name, noted) != noted:
            raise OptionError(f"the argument {name} is nested in more than one way")
        found.update(zip(names, parts, strict=True))
    return found


def _on_cpu(call: Mapping[str, Any]) -> dict[str, Any]:
    """What was given, of which floating point numbers are single precision: the model's own dtype comes later."""
    tensors = {n: v.detach() for n, v in call.items() if isinstance(v, Tensor)}
    if bare := next((n for n, v in tensors.items() if v.is_meta or not v.numel()), None):
        raise OptionError(f"{bare} of inputs {list(tensors[bare].shape)} holds no numbers")
    tensors = {n: v.cpu() for n, v in tensors.items()}
    return {n: v for n, v in call.items() if not isinstance(v, Tensor)} | {
        n: t.float() if t.is_floating_point() else t for n, t in tensors.items()
    }


def _config(module: nn.Module, config: ModuleConfig, calls: Sequence[Mapping[str, Any]]) -> ModuleConfig:
    numbered = {f"{_name(e)}, as given ({i})": e for i, e in enumerate((Example(dict(c), {}) for c in calls), start=1)}
    outside = _from_outside(module, calls)
    if (seen := _SEEN.get(outside)) is not None:
        with suppress(OptionError):
            again = ModuleConfig(config.name, by_place=config.by_place, nested=config.nested)
            if _identified(module, again, seen.examples, numbered).program == seen.program:
                return again
    names = dict.fromkeys(name for call in calls for name in call)
    config.calls = [["", [[name, {"plain": None}] for name in names]]]  # which arguments it takes
    model = _model(module, config)
    found: dict[str, tuple[Example, Program]] = {}
    for call in calls:
        example, program = _first(model, call)
        found.setdefault(_name(example), (example, program))
    for example, _ in list(found.values()):
        for other, program in _of_other_sizes(model, example):
            if not any(is_part_of(program, known) for _, known in found.values()):
                found[_name(other)] = other, program
    identified = _identified(module, config, {mode: example for mode, (example, _) in found.items()}, numbered)
    TRACED[identified.program] = {mode: replace(program, config=identified) for mode, (_, program) in found.items()}
    _SEEN[outside] = identified
    _LOOKS.setdefault(identified.program, set()).add(_look(module))
    return identified


def _from_outside(module: nn.Module, calls: Sequence[Mapping[str, Any]]) -> Hashable:
    """What two modules have in common if the same sizes are worth trying on both: code, what they note, and inputs."""
    given = [
        (n, tuple(v.shape), v.dtype, None if v.is_floating_point() else tuple(v.flatten().tolist()))
        if isinstance(v, Tensor) else (n, repr(v)) for call in calls for n, v in call.items()
    ]  # fmt: skip
    return _look(module), tuple(given), len(calls)


def _look(module: nn.Module) -> Hashable:
    """Code, and what modules note of themselves: a flag may matter at one size alone. Of weights the shapes do."""
    noted = [(name, type(part), key, *_plain(value)) for name, part in module.named_modules()
             for key, value in vars(part).items() if key not in _HELD]  # fmt: skip
    return tuple(noted), frozenset(numbers_in_code(module))


def _plain(value: Any) -> tuple[Hashable, ...]:
    parts, nesting = tree_flatten(value)
    return str(nesting), *(_of_tensor(v) if isinstance(v, Tensor) else v if isinstance(v, Hashable) else repr(v)
                           for v in parts if not isinstance(v, nn.Module))  # fmt: skip


def _of_tensor(value: Tensor) -> Hashable:
    """A floating point buffer may have been trained; a flag is none of these."""
    if isinstance(value, nn.Parameter) or value.is_meta or (value.is_floating_point() and value.dim()):
        return tuple(value.shape), str(value.dtype)
    return digest_of(value.detach().cpu())


def _model(module: nn.Module, config: ModuleConfig) -> ModuleModel:
    """A module as it is traced, before it is known which one it is."""
    if taken := next((n for n in _TAKEN if n in {*module._modules, *module._parameters, *module._buffers}), None):
        raise OptionError(f"{config.name} has a part called {taken}; under this name it cannot be traced")
    config.program = _UNKNOWN
    remember(_UNKNOWN, without_weights(module))  # a copy, which keeps no model alive
    model = build_without_weights(config)
    assert isinstance(model, ModuleModel)
    return model


def _identified(
    module: nn.Module, config: ModuleConfig, calls: Mapping[str, Example], given: Mapping[str, Example]
) -> ModuleConfig:
    """The config with a digest of what the calls compute, and of what the module saves."""
    config.calls = [[mode, written(example)] for mode, example in calls.items()]
    model = _model(module, config)
    try:
        programs = [Call(example).fingerprint(model).digest for example in calls.values()]
    except CannotRecord as error:
        raise OptionError(f"{config.name} cannot be traced: {error}") from error
    saved = inventory(model)  # type: ignore[arg-type]
    content = [programs, config.calls, config.by_place, config.nested, saved.shapes, saved.ties, saved.buffers]
    config.program = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:32]
    remember(config.program, without_weights(module), given)
    return config


def _first(model: ModuleModel, call: Mapping[str, Any]) -> tuple[Example, Program]:
    """A call with its whole numbers free where the module takes them so, else at their values.

    Raises:
        OptionError: it cannot be traced.
    """
    whole = [n for n, v in call.items() if isinstance(v, Tensor) and v.dtype in (torch.int64, torch.int32)]
    failed: IncompatibleModels | None = None
    for free in dict.fromkeys([tuple(whole), *((n,) for n in whole), ()]):
        try:
            program = trace_module(model, Example(dict(call), dict.fromkeys(free, torch.arange(_ANY))))
        except IncompatibleModels as error:
            failed = error
            continue
        example = Example(dict(call), {n: _ids(program, n, call[n]) for n in free})
        return example, replace(program, example=example)
    raise OptionError(str(failed)) from failed


def _ids(program: Program, name: str, given: Tensor) -> Tensor:
    """Those that may occur: the rows of the tables in which they are looked up, else those that were given."""
    tables = [rows for node in program.graph.nodes if does(node, Trait.LOOKS_UP_ROWS)
              if _is_input(program, node.args[1], name) for rows in (node.args[0].meta["val"].shape[0],)]  # fmt: skip
    return torch.arange(min(tables)) if tables else given.unique().long()


def _is_input(program: Program, node: Any, name: str) -> bool:
    return isinstance(node, fx.Node) and program.inputs.get(value_shown(node)) == name


def _of_other_sizes(model: ModuleModel, example: Example) -> Iterator[tuple[Example, Program]]:
    """The call with more and with less along each axis: along all that are as long together, else along each alone."""
    numbers = sorted(numbers_in_code(model.whole) | numbers_noted(model.whole))[:_NUMBERS]
    for size, axes in axes_by_size(example).items():
        for group in dict.fromkeys([tuple(axes), *((a,) for a in axes)]):
            others = (_traced(model, resized(example, group, s)) for s in (size + 1, size - 1, 2 * size))
            one = next(filter(None, others), None)
            if one is not None:
                yield one
                sizes = dict.fromkeys([1, *(n + more for n in numbers for more in (2, 1, 0, -1))])
                more = (_traced(model, resized(example, group, s)) for s in sizes if s != size and s <= LONGEST)
                yield from filter(None, more)
                break


def _traced(model: ModuleModel, example: Example | None) -> tuple[Example, Program] | None:
    """None where the module refuses a size, for which there are as many ways as there are modules."""
    with suppress(IncompatibleModels):
        return None if example is None else (example, trace_module(model, example))
    return None


def _name(example: Example) -> str:
    sized = (f"{n} {list(v.shape)}" if isinstance(v, Tensor) else f"{n} {v}" for n, v in example.arguments.items())
    return ", ".join(sized)
