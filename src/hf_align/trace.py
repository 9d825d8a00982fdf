"""From a config to a Program: the FX graph of one forward pass, with parameter names, and no weights.

Weights are allocated on no device (`torch.empty` makes fake tensors, the buffers that a model computes for itself stay
real), attention is forced to `eager`, and `torch.export` keeps layer_norm, softmax and linear whole. What does not
depend on the inputs or the weights (masks, position ids, rotary tables) is evaluated: a rule may look at its values.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from transformers import PretrainedConfig, PreTrainedModel

from hf_align.errors import HfAlignError, IncompatibleModels

_BATCH = 2
_LENGTH = 7
_HELPERS = (
    f"{Path(torch.__file__).parent}/",
    *(f"{Path(transformers.__file__).parent}/{part}/" for part in ("integrations", "utils")),
)
"""Where a frame says less about a model than the frame that called it."""


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
        parameters: placeholder -> parameter name in memory.
        inputs: placeholder -> argument name of `forward`.
        shapes: parameter name -> shape. Tied weights appear once.
        ties: other names of a tied weight -> the name in `shapes`.
        buffers: names of persistent buffers that are saved with the weights, with their values' shapes.
        constants: nodes that depend on neither inputs nor weights, with their values.
    """

    config: PretrainedConfig
    graph: fx.Graph
    parameters: dict[fx.Node, str]
    inputs: dict[fx.Node, str]
    shapes: dict[str, tuple[int, ...]]
    ties: dict[str, str]
    buffers: dict[str, tuple[int, ...]]
    constants: dict[fx.Node, Any]

    @property
    def output(self) -> fx.Node:
        """The tensor that the model is judged by: the first floating point output."""
        (outputs,) = next(n for n in self.graph.nodes if n.op == "output").args
        flat = [o for o in (outputs if isinstance(outputs, (tuple, list)) else [outputs]) if isinstance(o, fx.Node)]
        return next(o for o in flat if o.meta["val"].is_floating_point())


class _WeightsOnMeta(TorchFunctionMode):
    """Weights come from `torch.empty`, which costs nothing here; computed buffers stay real."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


@contextmanager
def quiet() -> Iterator[None]:
    """Model constructors warn about sizes that are unusual only because they are small."""
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            transformers.logging.set_verbosity(level)


def read_config(model: str | Path, *, trust_remote_code: bool = False) -> PretrainedConfig:
    """The config of a folder, a Hub id, or a registered model type (its default config).

    Raises:
        HfAlignError: there is no such config, or it needs code that was not trusted.
    """
    if str(model) in transformers.CONFIG_MAPPING and not Path(model).exists():
        return transformers.AutoConfig.for_model(str(model))
    try:
        with quiet():
            return transformers.AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, KeyError) as error:
        raise HfAlignError(f"{model}: no usable config.json ({str(error).splitlines()[0]})") from error


def model_class(config: PretrainedConfig) -> Callable[..., PreTrainedModel]:
    """How the config says its model is built: the class it was saved from, else the base model.

    Raises:
        IncompatibleModels: the class is not known to this version of transformers.
    """
    for name in config.architectures or ():
        found = getattr(transformers, name, None) or _registered_class(config, name)
        if found is None:
            raise IncompatibleModels(f"architecture {name} is unknown to transformers {transformers.__version__}")
        return found._from_config
    for auto in (transformers.AutoModelForCausalLM, transformers.AutoModelForMaskedLM,
                 transformers.AutoModelForImageClassification, transformers.AutoModel):  # fmt: skip
        if type(config) in auto._model_mapping:
            return auto.from_config
    raise IncompatibleModels(f"no model class for configs of type {config.model_type}")


def _registered_class(config: PretrainedConfig, name: str) -> Any:
    """A class that the user registered with an Auto class."""
    for auto in (transformers.AutoModelForCausalLM, transformers.AutoModel):
        found = auto._model_mapping.get(type(config), None)
        if found is not None and getattr(found, "__name__", "") == name:
            return found
    return None


def build_without_weights(config: PretrainedConfig) -> PreTrainedModel:
    """The model in evaluation mode with weights that take no memory (fake CPU tensors) and real buffers."""
    build = model_class(config)
    config = copy.deepcopy(config)
    config._experts_implementation = "batched_mm"  # a loop over experts depends on the data
    with quiet(), _WeightsOnMeta(), transformers.initialization.no_init_weights():
        model = build(config, attn_implementation="eager", dtype=torch.float32).eval()
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    replaced: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, weight in list(module._parameters.items()):
            if weight is not None:
                if id(weight) not in replaced:
                    with fake:
                        empty = torch.empty(weight.shape, dtype=torch.float32)
                    replaced[id(weight)] = torch.nn.Parameter(empty, requires_grad=False)
                module._parameters[name] = replaced[id(weight)]
    model.tie_weights()
    return model


def example_inputs(model: PreTrainedModel, batch: int = _BATCH, length: int = _LENGTH) -> dict[str, Any]:
    """Arguments of `forward` of the shapes that the config asks for; token ids and pixels are zeros."""
    config = model.config
    if model.main_input_name == "pixel_values":
        side = config.image_size
        height, width = side if isinstance(side, (list, tuple)) else (side, side)
        return {"pixel_values": torch.zeros(batch, config.num_channels, height, width)}
    if model.main_input_name != "input_ids":
        raise IncompatibleModels(f"models that read {model.main_input_name} are not supported yet")
    length = min(length, getattr(config, "max_position_embeddings", None) or length)
    return {"input_ids": torch.zeros(batch, length, dtype=torch.long)}


def trace(config: PretrainedConfig, *, batch: int = _BATCH, length: int = _LENGTH) -> Program:
    """Trace the forward pass of the config's architecture.

    Args:
        config: any config that `transformers` can build; not modified.
        batch, length: shape of the example input, [batch, length] for token ids.

    Raises:
        IncompatibleModels: torch.export cannot trace the architecture; the message names the op or the line.
    """
    return trace_model(build_without_weights(config), batch=batch, length=length)


def trace_model(model: PreTrainedModel, *, batch: int = _BATCH, length: int = _LENGTH) -> Program:
    """As `trace`, for a model of `build_without_weights`."""
    model.config.use_cache = False
    inputs = example_inputs(model, batch, length)
    try:
        with torch.no_grad(), quiet():
            exported = torch.export.export(model, (), inputs, strict=False)
    except Exception as error:  # export fails in as many ways as there are models
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise IncompatibleModels(f"{type(model).__name__} cannot be traced: {reason}") from error
    return _program(model, exported, inputs)


def _program(model: PreTrainedModel, exported: torch.export.ExportedProgram, inputs: dict[str, Any]) -> Program:
    graph = exported.graph_module.graph
    for node in list(graph.nodes):
        if node.op == "call_function" and "_assert" in str(node.target):
            graph.erase_node(node)
    graph.eliminate_dead_code()
    names, _ = _canonical_names(model)
    saved = inventory(model)
    signature = exported.graph_signature
    parameters, arguments, constants = {}, {}, {}
    for node in graph.nodes:
        if node.op != "placeholder":
            continue
        if node.name in signature.inputs_to_parameters:
            parameters[node] = names[signature.inputs_to_parameters[node.name]]
        elif node.name in signature.inputs_to_buffers:
            constants[node] = _buffer(exported, signature.inputs_to_buffers[node.name])
        elif node.name in signature.inputs_to_lifted_tensor_constants:
            constants[node] = exported.constants[signature.inputs_to_lifted_tensor_constants[node.name]]
        elif isinstance(node.meta.get("val"), Tensor):
            arguments[node] = node.name
        else:
            constants[node] = node.meta.get("val")
    _evaluate_constants(graph, constants)
    return Program(model.config, graph, parameters, arguments, saved.shapes, saved.ties, saved.buffers, constants)


def inventory(model: PreTrainedModel) -> Inventory:
    """What a model saves."""
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    saved = model.state_dict(keep_vars=True)
    buffers = {name: tuple(b.shape) for name, b in model.named_buffers() if name in saved}
    return Inventory(shapes, _canonical_names(model)[1], buffers)


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
    """Extend `constants` by every call whose operands are constants."""
    with torch.no_grad():
        for node in graph.nodes:
            if node.op == "call_function" and all(a in constants for a in node.all_input_nodes):
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: constants[n])
                constants[node] = node.target(*args, **kwargs)


def operand(node: fx.Node, position: int) -> fx.Node | None:
    """An argument that is another node's value, else None."""
    argument = node.args[position] if len(node.args) > position else None
    return argument if isinstance(argument, fx.Node) else None


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
    own = [line for line in files if not any(library in line for library in _HELPERS)]
    return Evidence(role, op_name(node), module, _short((own or files)[-1]) if files else "")


def _short(frame: str) -> str:
    """`File "/…/modeling_llama.py", line 70, in forward` -> `modeling_llama.py:70`."""
    path, _, rest = frame.removeprefix('File "').partition('"')
    number = rest.partition("line ")[2].partition(",")[0]
    return f"{Path(path).name}:{number}"
