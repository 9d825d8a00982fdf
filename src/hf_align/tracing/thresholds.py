"""Lengths of texts beyond which a model may do something else: numbers that its code may compare a length with, or cut
a text at."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import cycle
from typing import Any

from torch import fx
from transformers import PreTrainedModel

from hf_align.errors import IncompatibleModels
from hf_align.tracing.arguments import Arguments
from hf_align.tracing.branches.taken import brought
from hf_align.tracing.example import Example
from hf_align.tracing.fields import parts
from hf_align.tracing.fingerprint import Call, CannotRecord
from hf_align.tracing.mode import at_length, extent
from hf_align.tracing.nested import leaves
from hf_align.tracing.ops import Trait, does
from hf_align.tracing.own_code import code_of, files_of
from hf_align.tracing.program import WORKED_OUT, Program, evidence
from hf_align.tracing.recurrence import in_few_steps
from hf_align.tracing.resized import LEAST, LONGEST, numbers_in_code, numbers_noted, spread
from hf_align.tracing.ways import positions

_FARTHEST = 4098
"""Positions up to which code is traced that a model brings along: two beyond 4096. Where something else is done there,
what turns by position is looked at in every place, which takes gigabytes."""
_BYTES = 3 * 2**27
"""That masks, and what they are computed of, may take: where that is much, texts are shorter."""
_OPS = 10_000
"""Of a call, where each token takes some: such code takes seconds."""
_FEWEST = 40
"""Tokens of such a text, whatever they take; more than some ops are written out for step by step."""
_LENGTHS = 5
"""Longer texts that are traced at most."""
_FAR = 2
"""Texts beyond `LONGEST` that are traced at most."""
_ROWS = (1, 3, 2)
"""Texts at once, in turn."""


def extents_beyond(model: PreTrainedModel, program: Program) -> list[tuple[int, int]]:
    """Texts, and tokens of each, beyond each number that may count for a length; by two tokens, so that one less is
    beyond it, too. Code that a model brings along may compute such numbers, so that it is also given the longest text.

    Args:
        program: of the first call, whose texts are shorter.

    Raises:
        IncompatibleModels: code that the model brings along cuts texts where none are so long that are traced.
    """
    is_own = bool(brought(model))
    most = _affordable(model, program) if is_own else LONGEST
    room = positions(model.config) or most
    numbers = numbers_in_code(model, most) | _windows(model, program, most)
    if is_own:
        _require_within(most, room, program)
        numbers |= _at_hand(model, program)
    lengths = [extent(program.example)[1]]
    for threshold in sorted(n for n in numbers if n >= LEAST):
        beyond = min(threshold + 2, room, most)
        if lengths[-1] <= threshold + 1 and beyond > threshold:
            lengths.append(beyond)
    if is_own and lengths[-1] < min(room, most):
        lengths.append(min(room, most))
    near = spread([length for length in lengths[1:] if length <= LONGEST], _LENGTHS)
    far = spread([length for length in lengths[1:] if length > LONGEST], _FAR)
    return [*zip(cycle(_ROWS), near, strict=False), *((1, length) for length in far)]


def _affordable(model: PreTrainedModel, program: Program) -> int:
    """Tokens of the longest text that is traced."""
    by_memory, each = _by_memory(program), _ops_of_a_token(model, program.example)
    return min(by_memory, max(_FEWEST, _OPS // each)) if each else by_memory


def _by_memory(program: Program) -> int:
    """As many as memory allows: what is computed of pairs of positions grows with their square, and is held as long as
    a call is recorded."""
    length = extent(program.example)[1]
    made = program.graph.output_node().meta.get(WORKED_OUT, ())
    of_pairs = sum(size for shape, size in made if shape.count(length) > 1)
    return max(LONGEST, min(_FARTHEST, int(length * math.sqrt(_BYTES / max(1, of_pairs)))))


def _ops_of_a_token(model: PreTrainedModel, example: Example) -> int:
    """Ops that one token more takes: some where code goes through a text token by token, else none."""
    rows, _ = extent(example)
    longer = (at_length(example, length, rows) for length in (_FEWEST, _FEWEST + 1))
    with in_few_steps(), suppress(CannotRecord):
        ops = [Call(text).fingerprint(model).ops for text in longer if text is not None]
        return max(0, ops[-1] - ops[0]) if ops else 0
    return 0


def numbers_of_own_code(model: PreTrainedModel) -> set[int]:
    """Whole numbers in the code that a model brings along."""
    return {n for code in code_of(model) for n in leaves(code.co_consts) if type(n) is int}


def _at_hand(model: PreTrainedModel, program: Program) -> set[int]:
    """Numbers in the code that a model brings along, in its modules, and where the first call cuts a text that is not
    as long."""
    beside = {n for name in files_of(model) for n in vars(sys.modules[name]).values() if type(n) is int}
    cuts = {place for place, _ in _cuts(program)}
    return numbers_of_own_code(model) | beside | numbers_noted(model, _FARTHEST) | cuts


def _require_within(most: int, room: int, program: Program) -> None:
    """See that texts are cut where some reach that are traced, if any reach it."""
    for place, node in _cuts(program):
        if most < place + 2 <= room:
            raise IncompatibleModels(f"{evidence(node, '').line} cuts texts at {place} tokens; those that are traced "
                                     f"have {most} at most: merge with --match none")  # fmt: skip


def _cuts(program: Program) -> Iterator[tuple[int, fx.Node]]:
    """Where an axis is cut that ends before, and by which node."""
    for node in program.graph.nodes:
        if does(node, Trait.CUTS):
            arguments = Arguments(node)
            place = arguments.ask("start", arguments.ask("split_size", None))
            size = node.args[0].meta["val"].shape[arguments.ask("dim", 0)]
            if isinstance(place, int) and place > size:
                yield place, node


def _windows(model: PreTrainedModel, program: Program, most: int) -> set[int]:
    """Small numbers in a config that may limit how far a position sees: any, where no matrix that is read has it."""
    sizes = {size for name in program.opened for size in program.shapes[name]}
    found = {n for part in parts(model.config) for value in vars(part).values() for n in _whole_numbers(value)}
    return {n for n in found - sizes if n <= most}


def _whole_numbers(value: Any) -> Iterator[int]:
    """In a field of a config, also in lists and mappings."""
    if isinstance(value, int) and not isinstance(value, bool):
        yield value
    elif isinstance(value, (list, tuple, Mapping)):
        for entry in value.values() if isinstance(value, Mapping) else value:
            yield from _whole_numbers(entry)
