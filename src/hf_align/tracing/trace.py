"""From a config to a Program: the FX graph of one forward pass, with parameter names, and no weights.

The pass is recorded as it runs, or exported where that fails; layer_norm, softmax and linear stay whole. What does not
depend on the inputs or the weights (masks, position ids, rotary tables) is evaluated: a rule may look at its values.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Collection
from contextlib import redirect_stderr
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils._pytree import tree_unflatten
from transformers import PretrainedConfig, PreTrainedModel
from transformers.exporters import exporter_dynamo
from transformers.exporters.utils import apply_patches, prepare_for_export

from hf_align.errors import IncompatibleModels
from hf_align.tracing.answers import ANSWER, answers_by_name, return_answers
from hf_align.tracing.branches.taken import noted
from hf_align.tracing.build import build_without_weights, canonical_names, inventory, quiet, trained_buffers
from hf_align.tracing.constants import evaluate_constants, hides_all
from hf_align.tracing.example import Example
from hf_align.tracing.first_calls import error_of, mended_calls
from hf_align.tracing.held import hold_ends, hold_lists
from hf_align.tracing.inputs import examples
from hf_align.tracing.listed import LISTED_AT
from hf_align.tracing.lookups import within_tables
from hf_align.tracing.measured import LARGEST, Measured, agrees_with_runs, parameters_of
from hf_align.tracing.memory import beside_constants, with_reshapes
from hf_align.tracing.modules import ModuleModel
from hf_align.tracing.ops import Trait, does, written_out_as
from hf_align.tracing.program import Program, evidence
from hf_align.tracing.reasons import NOT_ITS_OWN, DoesNotRunError, is_about_numbers, reason
from hf_align.tracing.record import SwallowedQuestionError, record
from hf_align.tracing.recurrence import in_few_steps
from hf_align.tracing.shown import shown_by

logger = logging.getLogger(__name__)
_MASKED_BY_TRUTH = "sdpa"
"""A kind of attention that is given masks of truth values."""
_BATCH = 2
_LENGTH = 7
_LENGTH_OF_COPIES = 24


def trace(config: PretrainedConfig, *, batch: int = _BATCH, length: int = _LENGTH) -> Program:
    """Trace the forward pass of the config's architecture.

    Args:
        config: any config that `transformers` can build; not modified.
        batch, length: shape of the example input, [batch, length] for token ids.

    Raises:
        IncompatibleModels: torch.export cannot trace the architecture; the message names the op or the line.
    """
    return trace_first_call(build_without_weights(config), batch=batch, length=length)


def trace_first_call(model: PreTrainedModel, *, batch: int = _BATCH, length: int = _LENGTH) -> Program:
    """As `trace_model`; where that gives no numbers, with another kind of attention, which the model keeps: masks of
    zeros and infinities may have been taken for such of ones and zeros."""
    program = trace_model(model, batch=batch, length=length)
    kind = model.config._attn_implementation
    if kind == _MASKED_BY_TRUTH or isinstance(model, ModuleModel) or not hides_all(program):
        return program
    try:
        model.set_attn_implementation(_MASKED_BY_TRUTH)
        other = trace_model(model, batch=batch, length=length)
    except (IncompatibleModels, ValueError):
        other = program
    if hides_all(other):
        model.set_attn_implementation(kind)
        return program
    return other


def trace_model(model: PreTrainedModel, *, batch: int = _BATCH, length: int = _LENGTH) -> Program:
    """As `trace`, for a model of `build_without_weights`; with one row where it takes no more at a time."""
    reasons: list[Exception] = []
    for rows in dict.fromkeys((batch, 1)):
        candidates = list(enumerate(examples(model, rows, length)))
        program = _first_traced(model, candidates, reasons)
        if program is not None:
            return program
        ended = [(example, error_of(model, example)) for _, example in candidates]
        program = _first_traced(model, list(enumerate(mended_calls(model, ended), start=len(candidates))), [])
        if program is not None:
            return program
        if not all(error is not None and not is_about_numbers(error) for _, error in ended):
            break  # it may take more rows, in another way than one alone
    known = (r for r in reasons if isinstance(r, IncompatibleModels))
    telling = next(known, next(filter(is_about_numbers, reasons), reasons[0] if reasons else None))
    why = reason(telling) if telling else f"nothing is known about its arguments ({model.main_input_name})"
    raise IncompatibleModels(f"{type(model).__name__} cannot be traced: {why}")


def _first_traced(
    model: PreTrainedModel, candidates: list[tuple[int, Example]], reasons: list[Exception]
) -> Program | None:
    unfit: list[tuple[int, Example]] = []
    unanswered = set[str]()
    for ways, tried in ((_RECORDED, candidates), (_EXPORTED, unfit)):
        for number, example in tried:
            program = _traced(model, example, ways, reasons)
            if program is None and ways is _RECORDED and reasons and is_about_numbers(reasons[-1]):
                question = reason(reasons[-1])
                if question not in unanswered:
                    program = _traced(model, example, _EXPORTED, reasons)
                    unanswered |= {question} if program is None and is_about_numbers(reasons[-1]) else set()
            elif program is None and ways is _RECORDED and not _is_its_own(model, example, reasons[-1]):
                unfit.append((number, example))  # most do not go together with the model, however they are traced
            if program is not None:
                return replace(program, candidate=number)
    return None


def _traced(
    model: PreTrainedModel, example: Example, ways: tuple[_Way, ...], reasons: list[Exception]
) -> Program | None:
    """One call, by the first way that leaves no size open, else by the first that gives what runs give; None where none
    works."""
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
    return next((program for program in vague if _gives_what_runs_give(model, program)), None)


def _gives_what_runs_give(model: PreTrainedModel, program: Program) -> bool:
    """Whether a program with sizes that only a run decides holds in runs: export may have taken one for good."""
    listed = any(does(n, Trait.LISTS) and n not in program.constants for n in program.graph.nodes)
    known = not listed and parameters_of(model) <= LARGEST
    return known and agrees_with_runs(model, program, (), Measured())


def _is_its_own(model: PreTrainedModel, example: Example, failed: Exception) -> bool:
    """Whether an error is the model's own, so that no export mends it: a call that nobody writes down ends in the same,
    or would if its weights had values."""
    if isinstance(failed, DoesNotRunError):
        return True
    error = error_of(model, example)
    return type(error) is type(failed) and str(error) == str(failed)


def trace_call(model: PreTrainedModel, example: Example) -> Program:
    """One call with just these arguments, as it runs with generic ones.

    Raises:
        Exception: whatever the call raises, also where it asks for the value of something that has none.
    """
    with torch.no_grad(), quiet(), redirect_stderr(io.StringIO()):
        return _by_record(model, example, generic=True)


def export_call(model: PreTrainedModel, example: Example) -> Program:
    """As `trace_call`, by export: it takes what a call asserts of values for granted.

    Raises:
        IncompatibleModels: no export of the call is known to give what runs give.
    """
    reasons: list[Exception] = []
    program = _traced(model, example, _EXPORTED, reasons)
    if program is None:
        raise IncompatibleModels(reason(reasons[0]) if reasons else "its sizes depend on values")
    return program


def trace_module(model: ModuleModel, example: Example) -> Program:
    """One call of a plain module with just these arguments.

    Raises:
        IncompatibleModels: it cannot be traced; the message says why, and in which line.
    """
    try:
        with torch.no_grad(), quiet(), redirect_stderr(io.StringIO()), in_few_steps():
            program = _by_record(cast(PreTrainedModel, model), example)
    except Exception as error:  # tracing fails in as many ways as there are modules
        asked = error.question if isinstance(error, SwallowedQuestionError) else error
        raise IncompatibleModels(f"{type(model).__name__} cannot be traced: {reason(asked)}") from error
    if not program.interface:
        raise IncompatibleModels(
            f"{type(model).__name__} returns no floating point tensor, alone, in a tuple or a dict"
        )
    return program


def _by_record(model: PreTrainedModel, example: Example, *, generic: bool = False) -> Program:
    """As the forward pass runs, with all that is neither a weight nor free at its value."""
    free = {name: value for name, value in example.arguments.items() if example.is_free(name)}
    weights = set(dict(model.named_parameters())) | set(trained_buffers(model))
    with noted(model):
        recorded = record(model, example.arguments, weights, list(free), generic=generic, ends=example.ends)
        if any(does(n, Trait.COMPOSITE) or _writes_in_place(n) for n in recorded.graph.nodes):
            by_name = [i for i, node in enumerate(_results(recorded.graph)) if ANSWER in node.meta]
            prepared = with_reshapes(beside_constants(recorded, weights))
            program = _of_export(model, torch.export.export(prepared, (), free, strict=False), example, by_name)
        else:
            program = _of_record(model, recorded, weights, example)
        if example.ends:
            hold_ends(model, program, _traced_copy)
        return hold_lists(model, program, recorded.meta[LISTED_AT], _traced_copy)


def _traced_copy(copy: PreTrainedModel) -> Program:
    """It reads more tokens than other calls, so that experts get as many."""
    return trace_model(copy, length=_LENGTH_OF_COPIES)


def _of_record(model: PreTrainedModel, recorded: fx.GraphModule, weights: Collection[str], example: Example) -> Program:
    parameters, arguments, constants = {}, {}, {}
    names, _ = canonical_names(model)
    for node in recorded.graph.nodes:
        if node.op == "placeholder":
            arguments[node] = str(node.target)
        elif node.op == "get_attr" and node.target in weights:
            parameters[node] = names.get(node.target, node.target)
        elif node.op == "get_attr":
            constants[node] = node.meta["val"]
    return _program(model, recorded.graph, parameters, arguments, constants, example)


def _by_export(model: PreTrainedModel, example: Example) -> Program:
    exported = torch.export.export(model, (), dict(example.arguments), strict=False)
    return _of_export(model, exported, example, _by_name(model, exported))


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
        exported = torch.export.export(model, (), dict(prepared), strict=False)
        return _of_export(model, exported, example, _by_name(model, exported))


_Way = Callable[[PreTrainedModel, Example], Program]
_RECORDED: tuple[_Way, ...] = (_by_record,)
_EXPORTED: tuple[_Way, ...] = (_by_export, _by_prepared_export)


def _has_plain_shapes(program: Program) -> bool:
    """Whether no size was left open: export gives a name to an integer that it cannot read."""
    return not any(free_unbacked_symbols(node.meta.get("val")) for node in program.graph.nodes)


def _by_name(model: PreTrainedModel, exported: torch.export.ExportedProgram) -> list[int]:
    """Which of the results are answers by name."""
    nodes = _results(exported.graph, len(exported.graph_signature.user_outputs))
    answers = answers_by_name(model, tree_unflatten(nodes, exported.call_spec.out_spec)).values()
    return [i for i, node in enumerate(nodes) if any(node is answer for answer in answers)]


def _results(graph: fx.Graph, count: int = 0) -> list[Any]:
    """What a graph returns; its last results, if only so many are the model's."""
    (results,) = graph.output_node().args
    assert isinstance(results, (tuple, list))
    return list(results)[-count:]


def _of_export(
    model: PreTrainedModel, exported: torch.export.ExportedProgram, example: Example, by_name: Collection[int]
) -> Program:
    calls = [n for n in exported.graph.nodes if n.op == "call_function"]
    apart = {n.target: written_out_as(n) for n in calls if does(n, Trait.COMPOSITE)}
    if apart or any(_writes_in_place(n) for n in calls):
        exported = exported.run_decompositions(apart)
    results = _results(exported.graph, len(exported.graph_signature.user_outputs))
    for i in by_name:
        results[i].meta[ANSWER] = True
    names, _ = canonical_names(model)
    statistics = trained_buffers(model)
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
    return_answers(model, graph)
    shown = shown_by(graph)
    opened = frozenset(parameters[n] for n in parameters if n.users and n in shown)
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
    evaluate_constants(graph, constants)
    example = within_tables(example, graph, arguments)
    return Program(model.config, graph, {n: parameters[n] for n in read}, arguments, saved.shapes, saved.ties,
                   saved.buffers, constants, example, opened=opened)  # fmt: skip


def _writes_in_place(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and schema.is_mutable and not does(node, Trait.SAME)


def _buffer(exported: torch.export.ExportedProgram, name: str) -> Tensor:
    value = exported.state_dict[name] if name in exported.state_dict else exported.constants[name]
    assert isinstance(value, Tensor)
    return value
