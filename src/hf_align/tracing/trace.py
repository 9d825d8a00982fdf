"""From a config to a Program: the FX graph of one forward pass, with parameter names, and no weights.

Weights are allocated on no device (`torch.empty` makes fake tensors, the buffers that a model computes for itself stay
real), attention is forced to `eager`, and `torch.export` keeps layer_norm, softmax and linear whole; where export
cannot read the integers that decide a shape or a branch, the pass is recorded as it runs. What does not depend on the
inputs or the weights (masks, position ids, rotary tables) is evaluated: a rule may look at its values.
"""

from __future__ import annotations

import copy
import io
import logging
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import transformers
from torch import Tensor, fx
from torch._decomp import decomposition_table
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv, free_unbacked_symbols
from torch.overrides import TorchFunctionMode
from transformers import PretrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.exporters import exporter_dynamo
from transformers.exporters.utils import apply_patches, prepare_for_export
from transformers.initialization import no_init_weights

from hf_align.errors import HfAlignError, IncompatibleModels, first_line
from hf_align.tracing.budget import bounded_memory
from hf_align.tracing.inputs import Example, examples, parts
from hf_align.tracing.reasons import FROM_WEIGHTS, HELPERS, NOT_ITS_OWN, is_about_numbers, place, reason
from hf_align.tracing.record import CPU, ONLY_SHAPES, SwallowedQuestionError, record, value_shown
from hf_align.tracing.state import left_as_found
from hf_align.tracing.stored import load_stored

_BATCH = 2
_LENGTH = 7
_RECURRENT = frozenset(("lstm", "gru", "rnn_tanh", "rnn_relu"))
"""Loops over time that are one op: written out step by step, they are made of ops that have rules."""


def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """softmax(s q kᵀ + m) v, [batch, heads, positions, channels], as separate products."""
    repeats = query.shape[-3] // key.shape[-3] if enable_gqa else 1
    if repeats > 1:
        key, value = (t.repeat_interleave(repeats, -3) for t in (key, value))
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(attn_mask.logical_not(), -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    return torch.softmax(scores, -1) @ value


_TRUSTED: set[str] = set()
"""Where configs were read whose modelling code may run."""


@dataclass(frozen=True)
class Evidence:
    """Where a fact comes from: the op, the module it runs in, and the line of the modelling code."""

    role: str
    op: str
    module: str
    line: str


@dataclass(frozen=True)
class Inventory:
    """What a model saves: the `shapes`, `ties` and `buffers` of its Program."""

    shapes: dict[str, tuple[int, ...]]
    ties: dict[str, str]
    buffers: dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Program:
    """One forward pass as a graph.

    Attributes:
        config: what it was traced from.
        graph: aten ops; every placeholder is in one of the next two.
        parameters: placeholder -> name in memory of a parameter that is read.
        inputs: placeholder -> argument name of `forward`.
        shapes: parameter name -> shape. Tied weights appear once.
        ties: other names of a tied weight -> the name in `shapes`.
        buffers: names of persistent buffers that are saved with the weights, with their values' shapes.
        constants: nodes that depend on neither inputs nor weights, with their values.
        example: the arguments that it was traced with.
        candidate: their number among `inputs.examples`.
        modes: the calls that it consists of, by name.
        opened: the parameters that some op reads, be it for nothing that is returned.
    """

    config: PretrainedConfig
    graph: fx.Graph
    parameters: dict[fx.Node, str]
    inputs: dict[fx.Node, str]
    shapes: dict[str, tuple[int, ...]]
    ties: dict[str, str]
    buffers: dict[str, tuple[int, ...]]
    constants: dict[fx.Node, Any]
    example: Example
    candidate: int = 0
    modes: tuple[str, ...] = ()
    opened: frozenset[str] = frozenset()

    @cached_property
    def order(self) -> dict[fx.Node, int]:
        """Where each node stands in the graph."""
        return {node: i for i, node in enumerate(self.graph.nodes)}

    @property
    def unread(self) -> tuple[str, ...]:
        """The parameters that no call reads: another call may."""
        return tuple(name for name in self.shapes if name not in self.opened)

    @property
    def interface(self) -> tuple[fx.Node, ...]:
        """Every floating point tensor that the model returns, but for constants and stages on the way to the first."""
        (results,) = next(n for n in self.graph.nodes if n.op == "output").args
        assert isinstance(results, tuple)
        return tuple(node for node in results if node not in self.constants)

    @property
    def output(self) -> fx.Node:
        """The tensor that the model is judged by: the first of the interface."""
        return self.interface[0]


class _WeightsOnMeta(TorchFunctionMode):
    """Weights come from `torch.empty`, which costs nothing here; computed buffers stay real.

    Attributes:
        filled: empty tensors that were made a copy of a real one: by id, with the version and the value from then on.
    """

    def __init__(self) -> None:
        super().__init__()
        self.filled: dict[int, tuple[Tensor, int, Tensor]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty:
            kwargs["device"] = "meta"
        result = func(*args, **kwargs)
        if func is torch.Tensor.copy_ and args[0].is_meta and not args[1].is_meta:
            self.filled[id(args[0])] = args[0], args[0]._version, args[1].detach().to(args[0].dtype).expand_as(args[0])
        return result

    def fill(self, model: PreTrainedModel) -> PreTrainedModel:
        """Give a model the values of buffers that it does not save, where they were made empty and then filled."""
        for module in model.modules():
            for name in module._non_persistent_buffers_set:
                empty = module._buffers.get(name)
                made, version, value = self.filled.get(id(empty), (None, 0, torch.empty(0)))
                if empty is not None and made is empty and empty._version == version:
                    module._buffers[name] = value.clone()
        return model


@contextmanager
def quiet() -> Iterator[None]:
    """Constructors warn about sizes that are unusual only because they are small, exports about why they fail.

    `logging.disable` would have thousands of loggers forget what they know, twice each time.
    """
    with patch.object(logging.Logger, "handle", lambda logger, record: None), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def read_config(model: str | Path, *, trust_remote_code: bool = False) -> PretrainedConfig:
    """The config of a folder, a Hub id, or a registered model type (its default config).

    Raises:
        HfAlignError: there is no such config, or it needs code that was not trusted.
    """
    if str(model) in transformers.CONFIG_MAPPING and not Path(model).exists():
        return transformers.AutoConfig.for_model(str(model))
    try:
        with quiet(), bounded_memory():
            config = transformers.AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
    except HfAlignError:
        raise
    except Exception as error:  # a config may be anything, and so may what its class says of it
        raise HfAlignError(f"{model}: no usable config.json ({first_line(error)})") from error
    named = config.architectures
    if not (named is None or (isinstance(named, list | tuple) and all(isinstance(name, str) for name in named))):
        raise HfAlignError(f"{model}: architectures in its config.json is not a list of names")
    if trust_remote_code:
        _TRUSTED.add(config._name_or_path)
    return config


def model_class(config: PretrainedConfig) -> Callable[..., PreTrainedModel]:
    """How the config says its model is built: the class it was saved from, else the base model.

    Raises:
        IncompatibleModels: the class is not known to this version of transformers.
    """
    for name in config.architectures or ():
        found = _class_of_its_own(config, name) or getattr(transformers, name, None) or _registered_class(config, name)
        if found is None:
            raise IncompatibleModels(f"architecture {name} is unknown to transformers {transformers.__version__}")
        return found._from_config
    for auto in (transformers.AutoModelForCausalLM, transformers.AutoModelForMaskedLM,
                 transformers.AutoModelForImageClassification, transformers.AutoModel):  # fmt: skip
        if type(config) in auto._model_mapping:
            return auto.from_config
    raise IncompatibleModels(f"no model class for configs of type {config.model_type}")


def _class_of_its_own(config: PretrainedConfig, name: str) -> Any:
    """A class from modelling code that came with the config, if that code was trusted when the config was read."""
    references = (getattr(config, "auto_map", None) or {}).values()
    reference = next((r for r in references if isinstance(r, str) and r.rpartition(".")[2] == name), None)
    if reference is None or config._name_or_path not in _TRUSTED:
        return None
    files = [(file.name, file.stat().st_mtime_ns) for file in sorted(Path(config._name_or_path).glob("*.py"))]
    return _loaded_class(reference, config._name_or_path, tuple(files))


@cache
def _loaded_class(reference: str, model: str, files: tuple[tuple[str, int], ...]) -> Any:
    """Reading all imports of the modelling code takes longer than a trace, and each build of a model asks for it."""
    return get_class_from_dynamic_module(reference, model)


def _registered_class(config: PretrainedConfig, name: str) -> Any:
    """A class that the user registered with an Auto class."""
    for auto in (transformers.AutoModelForCausalLM, transformers.AutoModel):
        found = auto._model_mapping.get(type(config), None)
        if found is not None and getattr(found, "__name__", "") == name:
            return found
    return None


def build_without_weights(config: PretrainedConfig, attention: str = "eager") -> PreTrainedModel:
    """The model in evaluation mode with weights that take no memory (fake CPU tensors) and real buffers: those that
    the config notes, else freshly computed ones."""
    build = model_class(config)
    try:
        with quiet(), _WeightsOnMeta() as made, no_init_weights():
            model = made.fill(_with_plain_parts(build, config, attention))
    except RuntimeError as error:
        if "meta" not in str(error):
            raise
        raise IncompatibleModels(f"{place(error)}: {FROM_WEIGHTS}") from error
    return _with_fake_weights(model, config)


def build_as_loaded(config: PretrainedConfig, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """As `build_without_weights`, but as `from_pretrained` builds it: attention and caches of its own choice. Experts
    run one after the other: grouped products do not take every size and dtype.

    Args:
        dtype: of the weights, and of buffers that follow it.
    """
    config = copy.deepcopy(config)
    for part in parts(config):
        part._experts_implementation = "eager"
    with quiet(), _WeightsOnMeta() as made, no_init_weights():
        model = made.fill(model_class(config)(config, dtype=dtype).eval())
    return _with_fake_weights(model, config)


def build_to_run(config: PretrainedConfig) -> PreTrainedModel:
    """As `build_as_loaded`, where whole texts are read at once: keys and values are not kept."""
    config = copy.deepcopy(config)
    for part in parts(config):
        part.use_cache = False
    return build_as_loaded(config)


def _with_fake_weights(model: PreTrainedModel, config: PretrainedConfig) -> PreTrainedModel:
    load_stored(model, config)
    fake = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(tracked_fakes=[]))
    replaced: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, weight in list(module._parameters.items()):
            if weight is not None:
                if id(weight) not in replaced:
                    replaced[id(weight)] = _fake_parameter(fake, weight)
                module._parameters[name] = replaced[id(weight)]
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                module._buffers[name] = _fake_statistic(fake, module, name, buffer)
    model.tie_weights()
    return model


def _fake_parameter(fake: FakeTensorMode, like: Tensor) -> torch.nn.Parameter:
    """What `Parameter(torch.empty(…))` is under the mode, without the dozen ops that this takes there."""
    empty: Any = FakeTensor(fake, torch.empty(like.shape, dtype=like.dtype, device="meta"), CPU)
    empty._is_param = True
    assert isinstance(empty, torch.nn.Parameter)
    return empty


def _fake_statistic(fake: FakeTensorMode, module: torch.nn.Module, name: str, buffer: Tensor) -> Tensor:
    """A saved buffer that was computed from weights, as spectral norms have them, is one itself."""
    if name in module._non_persistent_buffers_set or not buffer.is_floating_point():
        raise IncompatibleModels(f"the buffer {name} of {type(module).__name__}: {FROM_WEIGHTS}")
    with fake:
        return torch.empty(buffer.shape, dtype=buffer.dtype)


def _with_plain_parts(
    build: Callable[..., PreTrainedModel], config: PretrainedConfig, attention: str
) -> PreTrainedModel:
    """Attention as separate products, experts as batched ones (a loop over them depends on the data), no caches."""
    config = copy.deepcopy(config)
    for part in parts(config):
        part.use_cache = False
        part._experts_implementation = "batched_mm"
    try:
        return build(config, attn_implementation=attention, dtype=torch.float32).eval()
    except ValueError:  # some models know only one kind of attention
        return build(config, dtype=torch.float32).eval()


def trace(config: PretrainedConfig, *, batch: int = _BATCH, length: int = _LENGTH, candidate: int = 0) -> Program:
    """Trace the forward pass of the config's architecture.

    Args:
        config: any config that `transformers` can build; not modified.
        batch, length: shape of the example input, [batch, length] for token ids.
        candidate: the first of `inputs.examples` to try.

    Raises:
        IncompatibleModels: torch.export cannot trace the architecture; the message names the op or the line.
    """
    program = trace_model(build_without_weights(config), batch=batch, length=length, candidate=candidate)
    if not _hides_all(program):
        return program
    try:  # masks of zeros and infinities may have been taken for such of ones and zeros
        other = trace_model(build_without_weights(config, "sdpa"), batch=batch, length=length, candidate=candidate)
    except (IncompatibleModels, ValueError):
        return program
    return program if _hides_all(other) else other


def _hides_all(program: Program) -> bool:
    """Whether some position attends to nothing at all, so that the output is no number."""
    for node in program.graph.nodes:
        if op_name(node) == "masked_fill" and node.args[2] == -math.inf:
            hidden = program.constants.get(node.args[1])
            if isinstance(hidden, Tensor) and bool(hidden.all(-1).any()):
                return True
    return False


def trace_model(model: PreTrainedModel, *, batch: int = _BATCH, length: int = _LENGTH, candidate: int = 0) -> Program:
    """As `trace`, for a model of `build_without_weights`."""
    reasons: list[Exception] = []
    candidates = [(n, e) for n, e in enumerate(examples(model, batch, length)) if n >= candidate]
    unfit: list[tuple[int, Example]] = []
    for ways, tried in ((_RECORDED, candidates), (_EXPORTED, unfit)):
        for number, example in tried:
            program = _traced(model, example, ways, reasons)
            if program is None and ways is _RECORDED and reasons and is_about_numbers(reasons[-1]):
                program = _traced(model, example, _EXPORTED, reasons)
            elif program is None and ways is _RECORDED and not _ends_alike(model, example, reasons[-1]):
                unfit.append((number, example))  # most do not go together with the model, however they are traced
            if program is not None:
                return replace(program, candidate=number)
    known = (r for r in reasons if isinstance(r, IncompatibleModels))
    telling = next(known, next(filter(is_about_numbers, reasons), reasons[0] if reasons else None))
    why = reason(telling) if telling else f"nothing is known about its arguments ({model.main_input_name})"
    raise IncompatibleModels(f"{type(model).__name__} cannot be traced: {why}")


def _traced(
    model: PreTrainedModel, example: Example, ways: tuple[_Way, ...], reasons: list[Exception]
) -> Program | None:
    """One call, by the first way that leaves no size open, else by the first at all; None where none works."""
    vague: list[Program] = []
    for trace_by in ways:
        try:
            with torch.no_grad(), quiet(), redirect_stderr(io.StringIO()):  # a failed export prints its graph
                program = trace_by(model, example)
            if _has_plain_shapes(program):
                return program
            vague.append(program)
        except SwallowedQuestionError as swallowed:  # what no way to trace would see otherwise
            raise IncompatibleModels(f"{type(model).__name__} cannot be traced: {reason(swallowed.question)}") from None
        except Exception as error:  # tracing fails in as many ways as there are models
            reasons.append(error)
    return vague[0] if vague else None


def _ends_alike(model: PreTrainedModel, example: Example, failed: Exception) -> bool:
    """Whether a call that nobody writes down ends in the same error: it is the model's own, and no export mends it."""
    try:
        with torch.no_grad(), quiet(), left_as_found(model):
            model(**example.arguments)
    except Exception as error:  # as many ways to fail as there are models
        return type(error) is type(failed) and str(error) == str(failed)
    return False


def trace_call(model: PreTrainedModel, example: Example) -> Program:
    """One call with just these arguments, as it runs with generic ones.

    Raises:
        Exception: whatever the call raises, also where it asks for the value of something that has none.
    """
    with torch.no_grad(), quiet(), redirect_stderr(io.StringIO()):
        return _by_record(model, example, generic=True)


def _by_record(model: PreTrainedModel, example: Example, *, generic: bool = False) -> Program:
    """As the forward pass runs, with all that is neither a weight nor free at its value."""
    free = {name: value for name, value in example.arguments.items() if example.is_free(name)}
    weights = set(dict(model.named_parameters())) | set(_trained_buffers(model))
    recorded = record(model, example.arguments, weights, list(free), generic=generic)
    if any(_is_taken_apart(n) or _writes_in_place(n) for n in recorded.graph.nodes):
        return _of_export(model, torch.export.export(recorded, (), free, strict=False), example)
    parameters, arguments, constants = {}, {}, {}
    names, _ = _canonical_names(model)
    for node in recorded.graph.nodes:
        if node.op == "placeholder":
            arguments[node] = str(node.target)
        elif node.op == "get_attr" and node.target in weights:
            parameters[node] = names.get(node.target, node.target)
        elif node.op == "get_attr":
            constants[node] = node.meta["val"]
    return _program(model, recorded.graph, parameters, arguments, constants, example)


def _by_export(model: PreTrainedModel, example: Example) -> Program:
    return _of_export(model, torch.export.export(model, (), dict(example.arguments), strict=False), example)


def _by_prepared_export(model: PreTrainedModel, example: Example) -> Program:
    """As transformers' own exporter prepares a model: loops over data replaced, what they count given as arguments."""
    _, prepared, flags = prepare_for_export(model, dict(example.arguments))
    exporter_dynamo.register_cache_pytrees_for_model(model)
    with (
        apply_patches("dynamo"),
        exporter_dynamo.reset_model_state(model),
        exporter_dynamo.patch_model_config(model, flags),
        exporter_dynamo.patch_forward_signature(model, dict(prepared)),
    ):
        return _of_export(model, torch.export.export(model, (), dict(prepared), strict=False), example)


_Way = Callable[[PreTrainedModel, Example], Program]
_RECORDED: tuple[_Way, ...] = (_by_record,)
_EXPORTED: tuple[_Way, ...] = (_by_export, _by_prepared_export)


def _has_plain_shapes(program: Program) -> bool:
    """Whether no size was left open: export gives a name to an integer that it cannot read."""
    return not any(free_unbacked_symbols(node.meta.get("val")) for node in program.graph.nodes)


def _is_taken_apart(node: fx.Node) -> bool:
    """Whether an op is made of others that have rules."""
    return node.op == "call_function" and op_name(node) in _RECURRENT | {"scaled_dot_product_attention"}


def _of_export(model: PreTrainedModel, exported: torch.export.ExportedProgram, example: Example) -> Program:
    calls = [n for n in exported.graph.nodes if n.op == "call_function"]
    apart = {n.target: decomposition_table[n.target] for n in calls if op_name(n) in _RECURRENT}
    apart |= {n.target: _attention for n in calls if op_name(n) == "scaled_dot_product_attention"}
    if apart or any(_writes_in_place(n) for n in calls):
        exported = exported.run_decompositions(apart)
    names, _ = _canonical_names(model)
    statistics = _trained_buffers(model)
    signature = exported.graph_signature
    parameters, arguments, constants = {}, {}, {}
    given = exported.example_inputs[1] if exported.example_inputs else {}
    for node in exported.graph.nodes:
        if node.op != "placeholder":
            continue
        buffer = signature.inputs_to_buffers.get(node.name)
        if node.name in signature.inputs_to_parameters:
            parameters[node] = names[signature.inputs_to_parameters[node.name]]
        elif buffer in statistics:
            parameters[node] = str(buffer)
        elif buffer is not None:
            constants[node] = _buffer(exported, buffer)
        elif node.name in signature.inputs_to_lifted_tensor_constants:
            constants[node] = exported.constants[signature.inputs_to_lifted_tensor_constants[node.name]]
        elif node.name in example.arguments and example.is_free(node.name):
            arguments[node] = node.name
        else:
            constants[node] = given.get(node.name, node.meta.get("val"))
    return _program(model, exported.graph_module.graph, parameters, arguments, constants, example)


def _program(
    model: PreTrainedModel,
    graph: fx.Graph,
    parameters: dict[fx.Node, str],
    arguments: dict[fx.Node, str],
    constants: dict[fx.Node, Any],
    example: Example,
) -> Program:
    for node in list(graph.nodes):
        if node.op == "call_function" and "_assert" in str(node.target):
            graph.erase_node(node)
    _return_no_stages(graph)
    opened = frozenset(parameters[n] for n in parameters if n.users)
    graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output"))  # also of dropout, which does nothing
    alive = set(graph.nodes)
    saved = inventory(model)
    place = {name: i for i, name in enumerate(saved.shapes)}
    read = sorted((n for n in parameters if n in alive and n.users), key=lambda n: place[parameters[n]])
    constants = {n: value for n, value in constants.items() if n in alive}
    foreign = next((n for n, v in constants.items() if n.users and isinstance(v, Tensor) and v.is_meta), None)
    if foreign is not None:
        found = evidence(next(iter(foreign.users)), "")
        raise IncompatibleModels(f"{found.line or found.module} {NOT_ITS_OWN}")
    _evaluate_constants(graph, constants)
    return Program(model.config, graph, {n: parameters[n] for n in read}, arguments, saved.shapes, saved.ties,
                   saved.buffers, constants, example, opened=opened)  # fmt: skip


def _return_no_stages(graph: fx.Graph) -> None:
    """Return the first floating point result, by which a model is judged, and those that are no stage on the way to
    it, nor show one in another shape: a stage that is returned, too, is as free to change as any other."""
    end = next(n for n in graph.nodes if n.op == "output")
    flat = [n for n in end.all_input_nodes if isinstance(n.meta["val"], Tensor) and n.meta["val"].is_floating_point()]
    stages, stack = set[fx.Node](), flat[:1]
    while stack:
        before = [n for n in stack.pop().all_input_nodes if n not in stages]
        stages.update(before)
        stack.extend(before)
    end.args = ((*flat[:1], *(n for n in flat[1:] if value_shown(n) not in stages)),)


def inventory(model: PreTrainedModel) -> Inventory:
    """What a model saves."""
    statistics = _trained_buffers(model)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()} | statistics
    saved = model.state_dict(keep_vars=True)
    buffers = {n: tuple(b.shape) for n, b in model.named_buffers() if n in saved and n not in statistics}
    return Inventory(shapes, _canonical_names(model)[1], buffers)


def _writes_in_place(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable and op_name(node) not in ("detach_", "dropout_")


def _trained_buffers(model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    """Saved floating point buffers: no gradient reaches them, but training does (running means, routing biases)."""
    saved = model.state_dict(keep_vars=True)
    return {n: tuple(b.shape) for n, b in model.named_buffers() if n in saved and b.is_floating_point()}


def _canonical_names(model: PreTrainedModel) -> tuple[dict[str, str], dict[str, str]]:
    """Every parameter name -> the name that is kept, and the ties alone."""
    first: dict[int, str] = {}
    names = {name: first.setdefault(id(p), name) for name, p in model.named_parameters(remove_duplicate=False)}
    return names, {name: kept for name, kept in names.items() if name != kept}


def _buffer(exported: torch.export.ExportedProgram, name: str) -> Tensor:
    value = exported.state_dict[name] if name in exported.state_dict else exported.constants[name]
    assert isinstance(value, Tensor)
    return value


def _evaluate_constants(graph: fx.Graph, constants: dict[fx.Node, Any]) -> None:
    """Extend `constants` by every call whose operands are constants, or that reads nothing but their shapes."""
    with torch.no_grad():
        for node in graph.nodes:
            if node.op != "call_function":
                continue
            known = all(a in constants for a in node.all_input_nodes)
            if known or op_name(node) in ONLY_SHAPES or op_name(node) == "sym_size":
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: _constant_or_shape(n, constants))
                value = node.target(*args, **kwargs)
                blank = "empty" in op_name(node) and isinstance(value, Tensor)  # whatever memory held is no constant
                constants[node] = torch.zeros_like(value) if blank else value


def _constant_or_shape(node: fx.Node, constants: dict[fx.Node, Any]) -> Any:
    if node in constants:
        return constants[node]
    example = node.meta["val"]
    return torch.zeros(example.shape, dtype=example.dtype) if isinstance(example, Tensor) else example


def operand(node: fx.Node, position: int) -> fx.Node | None:
    """An argument that is another node's value, else None."""
    argument = node.args[position] if len(node.args) > position else None
    return argument if isinstance(argument, fx.Node) else None


def upstream(node: fx.Node, program: Program) -> set[fx.Node]:
    """What a value is computed from, itself included and constants left out."""
    needed, stack = set[fx.Node](), [node]
    while stack:
        last = stack.pop()
        if last not in needed and last not in program.constants:
            needed.add(last)
            stack.extend(last.all_input_nodes)
    return needed


def op_name(node: fx.Node) -> str:
    """`layer_norm` for `torch.ops.aten.layer_norm.default`; `getitem` for tuple access."""
    target = node.target
    return str(getattr(target, "_opname", getattr(target, "__name__", target)))


def evidence(node: fx.Node, role: str) -> Evidence:
    """Where a node comes from: its op, module path, and the line of the modelling code."""
    stack = node.meta.get("nn_module_stack") or {}
    module = list(stack.values())[-1][0] if stack else ""
    lines = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines()]
    files = [line for line in lines if line.startswith("File ")]
    own = [line for line in files if not any(library in line for library in HELPERS)]
    return Evidence(role, op_name(node), module, _short((own or files)[-1]) if files else "")


def _short(frame: str) -> str:
    """`File "/…/modeling_llama.py", line 70, in forward` -> `modeling_llama.py:70`."""
    path, _, rest = frame.removeprefix('File "').partition('"')
    number = rest.partition("line ")[2].partition(",")[0]
    return f"{Path(path).name}:{number}"
