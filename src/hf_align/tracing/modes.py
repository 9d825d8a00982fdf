"""The ways in which a model is called: with which arguments, at which lengths, with and without a cache.

What a symmetry must leave alone is the answer to every call. So an architecture is traced in all of its modes, and what
is derived is the meet of what they allow. Modes are found by trying: an optional argument of `forward` belongs to a
mode if the model runs with it and does something else than before.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import PretrainedConfig, PreTrainedModel

from hf_align.errors import HfAlignError, IncompatibleModels, first_line
from hf_align.tracing.alike import goes_on_alike, is_part_of, run_alike, takes_as_much, turn_alike
from hf_align.tracing.amounts import note_cuts_by_arguments
from hf_align.tracing.asked import whatever_number, with_losses
from hf_align.tracing.branches.compiled import require_one_way
from hf_align.tracing.branches.explore import Conditions, Failed, explore
from hf_align.tracing.branches.rewritten import Taken
from hf_align.tracing.branches.taken import branching, brought, refuses
from hf_align.tracing.build import inventory
from hf_align.tracing.example import Example
from hf_align.tracing.given import GivenCall
from hf_align.tracing.held import require_lists_held
from hf_align.tracing.join import join
from hf_align.tracing.lookups import looks_outside
from hf_align.tracing.mode import Mode, NothingNew, at_its_length, at_length, extent, with_fewer_tokens
from hf_align.tracing.modules import ModuleModel
from hf_align.tracing.ops import Trait, does
from hf_align.tracing.program import Program
from hf_align.tracing.reasons import is_about_numbers, reason
from hf_align.tracing.recurrence import in_few_steps
from hf_align.tracing.resized import LEAST, LONGEST, spread
from hf_align.tracing.small.asked_copy import SmallCopy, small_copy
from hf_align.tracing.small.loaded_copy import require_as_stored
from hf_align.tracing.small.turned_copy import answers_turned, is_changed
from hf_align.tracing.steps import stepped
from hf_align.tracing.thresholds import extents_beyond, numbers_of_own_code
from hf_align.tracing.trace import export_call, trace_call, trace_first_call, trace_module
from hf_align.tracing.ways import owners_of, positions, together, try_parts, try_together, try_ways

logger = logging.getLogger(__name__)
_LENGTH = 12
"""Of the first call. Every call is tried with one token less, too: code may look at whether there is an even number."""
_FEW = 4
"""Tokens of a short call."""
_EXACT = 8
"""Texts that are as long as a number in a model's own code says, at most."""
_MANY = (12, 24)
"""Texts, and tokens of each, of a large call."""
Found = tuple[Mode, Program]
TRACED: dict[str, dict[str, Program]] = {}
"""By the digests of plain modules, and the names of their calls."""


def trace_mode(model: PreTrainedModel, mode: Mode) -> Program:
    """The program of one call alone.

    Raises:
        Exception: whatever the model raises.
    """
    with branching(model, mode.turned_at) as taken, mode.prepared(model), stepped(model, mode), in_few_steps():
        try:
            program = trace_call(model, mode.example)
        except Exception as error:  # whatever the model raises
            if not mode.asks or not is_about_numbers(error):
                raise
            program = export_call(model, mode.example)
    return replace(program, taken=taken)


def trace_modes(model: PreTrainedModel, calls: Sequence[GivenCall] = (), *, length: int = _LENGTH) -> Program:
    """All modes of a model of `build_without_weights` as one program.

    Args:
        calls: modes besides those that are found.
        length: of the first call, in tokens.

    Raises:
        IncompatibleModels: as `trace_model`; not even the first mode can be traced.
    """
    return join({mode.name: program for mode, program in find_modes(model, calls, length)})


def find_modes(
    model: PreTrainedModel,
    calls: Sequence[GivenCall] = (),
    length: int = _LENGTH,
    config: PretrainedConfig | None = None,
) -> list[tuple[Mode, Program]]:
    """The modes of a model, each with its program; first the call that `trace_first_call` makes.

    Args:
        calls, length: as for `trace_modes`.
        config: of a model that was shortened, with all of its layers.

    Raises:
        IncompatibleModels: as `trace_modes`.
        HfAlignError: one of `calls` fails.
    """
    require_one_way(model)
    if isinstance(model, ModuleModel):
        return [(Mode(name, example), _of_module(model, name, example)) for name, example in model.calls.items()]
    with _called(model) as called:
        base = trace_first_call(model, length=length)
    plain = at_its_length(Mode(base.example.said, base.example))
    found = [(plain, base)]
    extents, idle = base.extents, list[Found]()
    copy = small_copy(model, config or model.config, base.candidate, plain.extent[0], length)
    if copy is not None:
        require_as_stored(copy)
    untraced = dict[str, Exception]()

    def attempt(mode: Mode) -> Exception | None:
        if copy is not None and (
            whatever_number(mode.asks) not in copy.changing if mode.asks else copy.gives_no_number(mode)
        ):
            return NothingNew()
        program = _answer(model, mode, base)
        if mode.asks and isinstance(program, Exception):
            untraced[mode.asks] = program
        if isinstance(program, Exception):
            return program
        if base.example.tokens and mode.extent[1] > LONGEST and goes_on_alike(base, program):
            return NothingNew()
        says_more = mode.example.words != base.example.words  # it may choose entries of any axis
        alike = takes_as_much if says_more else turn_alike
        if mode.asks and any(alike(program, known) for _, known in found[1:]):
            return NothingNew()  # the same ops with another mask, or other positions
        if takes_as_much(program, base) if says_more else is_part_of(program, base):
            idle.append((mode, program))
            return NothingNew()
        found.append((mode, program))
        return None

    longer = list(_longer(model, base))
    for mode in longer:
        attempt(mode)
    try_ways(model, base.example, extents, attempt)
    for said, why in untraced.items() if copy is not None else ():
        if not isinstance(why, NothingNew):
            raise IncompatibleModels(
                f"{type(model).__name__} answers otherwise with {said}, and that call cannot be traced: {reason(why)}"
            )
    for call in calls:
        mode = call.mode(model, base.example)
        error = attempt(mode)
        if error is not None and not isinstance(error, NothingNew):
            raise HfAlignError(f"{type(model).__name__} cannot be called with {call.name}: {reason(error)}") from error
    most = _with_most_arguments(model, found, idle)
    if most is not None:
        found += _with_the_same_arguments(model, most, found, longer)
    read = frozenset[str]().union(*(program.opened for _, program in found))
    owners = owners_of(name for name in base.shapes if name not in read)
    try_parts(model, base.example, extents, [path for path in owners if path in called], attempt)
    still = dict([*found, *((mode, program) for mode, program in idle if not mode.adds)])
    found += _with_fewer_tokens(model, still | (dict([most]) if most is not None else {}))
    found += _with_losses(model, found)
    require_lists_held(model)
    others, untried = _with_other_branches(model, found, idle, copy, longer)
    note_cuts_by_arguments([*found, *idle, *others])
    return [(plain, replace(base, untried=untried)), *found[1:], *others]


def _of_module(model: ModuleModel, name: str, example: Example) -> Program:
    """A call of a plain module, which was traced before to see which module it is; with fewer layers it is another."""
    known = TRACED.get(model.config.program, {}).get(name)
    same = known is not None and known.shapes == inventory(cast(PreTrainedModel, model)).shapes
    return known if known is not None and same else trace_module(model, example)


def _answer(model: PreTrainedModel, mode: Mode, base: Program) -> Program | Exception:
    """The program of a call that is one of a model's modes, else what is wrong with it."""
    try:
        program = trace_mode(model, mode)
    except Exception as error:  # models refuse what they have no use for in as many ways as there are models
        logger.info("%s: no call with %s (%s)", model.config.model_type, mode.name, first_line(error))
        return error
    return program if _belongs(program, base, mode) and not looks_outside(program) else NothingNew()


def _with_most_arguments(model: PreTrainedModel, found: Sequence[Found], idle: Sequence[Found]) -> Found | None:
    """A call with all arguments at once that a model takes each alone; None where there are none.

    Args:
        idle: calls with an argument that does nothing alone.
    """
    (plain, base), *_ = found
    alone = {mode.adds[0][0]: (mode, program) for mode, program in [*reversed(idle), *found] if len(mode.adds) == 1}
    run = list(alone.values())[:1]

    def attempt(mode: Mode) -> Exception | None:
        program = _answer(model, mode, base)
        if isinstance(program, Exception):
            return program
        run.append((mode, program))
        return None

    try_together(model, plain, base.extents, [mode for mode, _ in alone.values()], attempt)
    return max(run, key=lambda entry: len(entry[0].adds), default=None)


def _with_the_same_arguments(
    model: PreTrainedModel, most: Found, found: Sequence[Found], longer: Sequence[Mode]
) -> Iterator[Found]:
    """What each argument leaves as it is, two together, or one and a certain length, may change: a call with the most
    arguments, the same with more tokens, and with each kind of media, where it does something else than those found."""
    base, extents, known = found[0][1], found[0][1].extents, [program for _, program in found]
    if not any(is_part_of(most[1], program) for program in known):
        yield most
    length = extent(base.example)[1]
    for mode in [*longer, *(mode for mode, _ in found if mode.announced is not None)]:
        whole = mode.extent[1]
        call = together(model, mode, [whole if n == length else n for n in extents], most[0].adds)
        answer = NothingNew() if call is None else _answer(model, call, base)
        if call is None or isinstance(answer, Exception):
            continue
        if not any(run_alike(answer, program) for program in [most[1], *known]):
            yield at_its_length(call), answer


def _with_losses(model: PreTrainedModel, found: Sequence[Found]) -> Iterator[Found]:
    """The calls whose loss reads weights that all calls compute something with, and no answer needs."""
    needed = {name for _, program in found for name in program.parameters.values()}
    idle = any(program.opened - needed for _, program in found)
    for mode in with_losses(model, found[0][1].example) if idle else ():
        program = _answer(model, mode, found[0][1])
        if isinstance(program, Program) and not needed.issuperset(program.parameters.values()):
            needed.update(program.parameters.values())
            yield mode, program


def _with_fewer_tokens(model: PreTrainedModel, found: Mapping[Mode, Program]) -> Iterator[Found]:
    """The calls that do something else with one token less, or with few."""
    plain, base = next(iter(found.items()))
    for mode, program in found.items():
        whole = mode.extent[1]
        for length in (whole - 1, _FEW):
            least = _FEW if whole == plain.extent[1] else whole - 1
            shorter = with_fewer_tokens(mode, length) if length >= least else None
            answer = NothingNew() if shorter is None else _answer(model, shorter, base)
            if shorter is not None and isinstance(answer, Program) and not is_part_of(answer, program):
                yield shorter, answer


def _with_other_branches(
    model: PreTrainedModel,
    found: Sequence[Found],
    idle: Sequence[Found],
    copy: SmallCopy | None,
    longer: Sequence[Mode],
) -> tuple[list[Found], tuple[str, ...]]:
    """The calls that do something else where the model's own code takes a branch that no other call takes, and the
    lines that only other arguments may send another way (`Program.untried`).

    Raises:
        IncompatibleModels: the model answers otherwise there, and that cannot be traced.
    """
    (plain, base), *others = found
    if not brought(model):
        return [], ()

    def run(mode: Mode) -> Program | Failed:
        alike = copy if copy is not None and mode.extent == extent(copy.example) else None
        runs, taken = False, Taken()
        if alike is not None and isinstance(answers_turned(alike, replace(mode, turned_at=()))[0], list):
            answers, taken = answers_turned(alike, mode)
            if isinstance(answers, Exception):
                return Failed(taken, refuses(model, answers, taken))
            runs = bool(answers)
        program = _answer(model, mode, base)
        if isinstance(program, Program):
            return program
        if alike is not None and runs and is_about_numbers(program) and is_changed(alike, mode):
            said = f"{type(model).__name__} answers otherwise in a call ({mode.name}) that cannot be traced"
            raise IncompatibleModels(f"{said}: {reason(program)}")
        return Failed(taken, runs or isinstance(program, NothingNew) or refuses(model, program, taken))

    answers = ((mode, _answer(model, mode, base)) for mode in (plain, *_unusual(model, base.example, longer)))
    first, *large = [(mode, program) for mode, program in answers if isinstance(program, Program)] or [found[0]]
    more, conditions = list[Found](), Conditions()
    for mode, program in (*large, *explore(conditions, [first, *others, *idle, *large], run)):
        known = [known for _, known in (*found, *more)]
        if not any(is_part_of(program, other) or is_part_of(other, program) for other in known):
            same = sum(other.name.partition(" (")[0] == mode.name for other, _ in more)
            more.append((replace(mode, name=f"{mode.name} ({same + 1})") if same else mode, program))
    conditions.require_both_ways()
    return more, conditions.left_to_arguments()


def _unusual(model: PreTrainedModel, base: Example, longer: Sequence[Mode]) -> Iterator[Mode]:
    """Many texts of many tokens, for some code runs with no fewer; one token, which stands alone; and a text as long as
    each number in the code says, for some runs with no other."""
    room = min(positions(model.config) or LONGEST, LONGEST, max((mode.extent[1] for mode in longer), default=LONGEST))
    numbers = {n for n in numbers_of_own_code(model) if LEAST <= n <= room}
    lengths = (1, *spread(sorted(numbers - {extent(base)[1]}), _EXACT))
    extents = [(_MANY[0], min(_MANY[1], room)), *((1, length) for length in lengths)]
    for rows, length in extents if base.tokens else ():
        example = at_length(base, length, rows)
        if example is not None:
            yield at_its_length(Mode(example.said, example))


@contextmanager
def _called(model: PreTrainedModel) -> Iterator[set[str]]:
    """The modules that are called in the block, by their names: another argument of any other one changes nothing."""
    names = {module: name for name, module in model.named_modules()}
    found = set[str]()

    def note(module: nn.Module, args: Any) -> None:
        found.add(names.get(module, ""))

    hook = register_module_forward_pre_hook(note)
    try:
        yield found
    finally:
        hook.remove()


def _belongs(program: Program, base: Program, mode: Mode) -> bool:
    """Whether a call is part of the function that a symmetry must keep.

    What is given in place of what the model computes by itself (embeddings of its tokens, states of its own encoder)
    is in a basis of the model's own. Such a call does not read all the weights that the first one reads, or no longer
    looks up its tokens. A flag stands in place of nothing, and more of what the first call is given is no state.
    """
    first = base.example.arguments
    more = (n for n, value in mode.example.arguments.items() if n not in first and isinstance(value, Tensor))
    given = [n for n in more if not any(n.endswith(f"_{known}") for known in first)]
    instead = bool(given or mode.part) and not _reads(base) <= _reads(program)
    return bool(program.interface) and not instead


def _reads(program: Program) -> set[tuple[str, bool]]:
    """The weights that are read, each alone and, where it is a table, as one."""
    uses = {(name, does(user, Trait.LOOKS_UP_ROWS)) for node, name in program.parameters.items() for user in node.users}
    return uses | {(name, False) for name in program.parameters.values()}


def _longer(model: PreTrainedModel, program: Program) -> Iterator[Mode]:
    """A call's arguments with more tokens."""
    base = program.example
    for rows, length in extents_beyond(model, program) if base.tokens else ():
        example = at_length(base, length, rows)
        if example is not None:
            yield at_its_length(Mode(example.said, example))
