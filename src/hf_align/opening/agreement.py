"""Whether two configs describe one function of the weights; if not, the field that makes the difference.

No class and no field is known by its name. Both configs are built, and the same calls of both are recorded: a short
input, then a step that goes on from it with a cache; texts with pictures or sounds in them; and the short input again
with every number that does not shape a weight made so small that it reaches beyond it (windows, lengths from which
positions are scaled). A field that no code reads makes no difference, and neither does one that changes none of these
calls. Code that is not the same, but for remarks, is compared in all modes of both, and so is code that models bring
along, where it names a field that differs: it may read it in few of them.
"""

from __future__ import annotations

import ast
import copy
import inspect
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path as File
from typing import Any

from torch import nn
from transformers import PretrainedConfig

from hf_align.errors import IncompatibleModels
from hf_align.opening.dropout import differ_in_dropout_alone
from hf_align.opening.heads import tied_alike
from hf_align.opening.programs import require_same_program
from hf_align.opening.variant import Variant
from hf_align.tracing.branches.taken import brought
from hf_align.tracing.build import model_class
from hf_align.tracing.fields import UNSET, Path, Readers, differences, fields, parts
from hf_align.tracing.fingerprint import Call, CannotRecord
from hf_align.tracing.modules import ModuleConfig
from hf_align.tracing.own_code import words_of
from hf_align.tracing.stored import noted_buffers

_SHORT, _LONG = 7, 2050
"""Tokens of a call: few, and as many as are tried where a number cannot be made smaller."""
_REACHED = 8
"""Numbers up to this stay as they are: short inputs reach them."""
_TIMES = 16
"""Longer than a text that reaches beyond every number are those that reach beyond some of them, multiplied."""
_SHOWN = 40
"""Characters of a value in a message."""


def require_alike(
    refs: tuple[str, str], a: PretrainedConfig, b: PretrainedConfig, untie: bool | None
) -> tuple[PretrainedConfig, PretrainedConfig]:
    """The configs of two models that compute the same with the same weights, untied where only one of them is.

    Args:
        refs: what the user calls them.
        a, b: as read from disk, with the buffers of their checkpoints noted in them.
        untie: whether heads may be untied (False: they may not).

    Raises:
        IncompatibleModels: they compute differently, or nothing tells.
    """
    if isinstance(a, ModuleConfig) or isinstance(b, ModuleConfig):
        require_same_program(refs, a, b)
        return a, b
    try:
        alike = tied_alike(refs, (a, b), untie)
        require_same_buffers(refs, *alike)
        require_same_function(refs, *alike)
    except IncompatibleModels as error:
        kinds = [" ".join(c.architectures or ()) or type(c).__name__ for c in (a, b)]
        if kinds[0] == kinds[1]:
            raise
        raise IncompatibleModels(
            f"{refs[0]} is a {kinds[0]} but {refs[1]} is a {kinds[1]}, and they compute differently; they do not merge"
        ) from error
    return alike


def require_same_function(refs: tuple[str, str], a: PretrainedConfig, b: PretrainedConfig) -> None:
    """Refuse two models that compute differently with the same weights.

    Where they also differ in the sizes of weights, the other fields are compared in the sizes of the first; whole
    numbers that change a short call are then left to widening, which measures what it does.

    Args:
        refs: what the user calls them.
        a, b: as read from disk.

    Raises:
        IncompatibleModels: they compute differently, or nothing tells; the message names the field.
    """
    _require_same_meaning(refs, a, b)
    first, second = Variant(_returning_alike(a)), Variant(_returning_alike(b))
    differing, same_code = differences(first.config, second.config), _is_same_code(_code(a), _code(b))
    if same_code and not differing:
        return
    if first.shapes is None or second.shapes is None or first.shapes.keys() != second.shapes.keys():
        _Comparison(refs, differing, same_code).require_same_weights(first, second)
        return
    sized = second if first.shapes == second.shapes else _in_sizes_of(first, second, differing)
    paths = differences(first.config, sized.config).keys()
    _Comparison(refs, {p: differing[p] for p in differing if p in paths}, same_code).require(first, sized)


def _require_same_meaning(refs: tuple[str, str], a: PretrainedConfig, b: PretrainedConfig) -> None:
    """No answer depends on what classes are called, or on whether one or several of them are right. But whoever names a
    class means the same by it, and a score among others is no probability of its own."""
    problems = [getattr(c, "problem_type", None) for c in (a, b)]
    if all(problems) and problems[0] != problems[1]:
        said = [f"{problem} in {ref}" for problem, ref in zip(problems, refs, strict=True)]
        raise IncompatibleModels(f"{refs[0]} and {refs[1]} answer other questions: problem_type is {', '.join(said)}")
    labels, others = ({name: int(n) for n, name in (getattr(c, "id2label", None) or {}).items()} for c in (a, b))
    moved = [name for name in labels if others.get(name, labels[name]) != labels[name]]
    if moved:
        raise IncompatibleModels(
            f"{refs[0]} and {refs[1]} answer in another order: id2label gives {_shown(moved[0])} the number "
            f"{labels[moved[0]]} in {refs[0]}, {others[moved[0]]} in {refs[1]}"
        )


def require_same_buffers(refs: tuple[str, str], a: PretrainedConfig, b: PretrainedConfig) -> None:
    """Refuse two models that hold different masks or tables; counters that no call reads may differ.

    Args:
        a, b: as for `require_same_function`, with the buffers of their checkpoints noted in them.

    Raises:
        IncompatibleModels: a buffer that is no weight differs, and is read; the message names it.
    """
    first, second = noted_buffers(a), noted_buffers(b)
    differing = {name for name in {**first, **second} if first.get(name) != second.get(name)}
    if not differing:
        return
    variant = Variant(a)
    calls = variant.calls(_SHORT)
    unread = {name.rpartition(".")[0] for name in variant.unread(calls)}
    read = {name for name in differing if not calls or name.rpartition(".")[0] in unread}
    for call in calls:
        try:
            read |= differing & call.fingerprint(variant.model, without_values=differing).weights
        except CannotRecord:  # what the model does depends on the value
            read = differing
    if read:
        why = f"they hold different values in {min(read)}, which is no weight"
        raise IncompatibleModels(f"{refs[0]} and {refs[1]} compute differently: {why}")


@dataclass
class _Comparison:
    """Two variants whose weights have the same shapes.

    Attributes:
        differing: the fields that may make a difference, with the values that are shown.
    """

    refs: tuple[str, str]
    differing: dict[Path, tuple[Any, Any]]
    same_code: bool
    readers: Readers = field(default_factory=Readers)

    def require_same_weights(self, a: Variant, b: Variant) -> None:
        """Raise if a field that is no number decides which weights there are, or a list of numbers that leaves as many
        layers; other depths are left to widening."""
        names = (a.shapes or {}).keys()
        for path, values in self.differing.items():
            others = (a.having({path: values[1]}).shapes or {}).keys()
            is_depth = any(map(_numbers, values)) and not (
                isinstance(values[1], list) and _layers(others) == _layers(names)
            )
            if others != names and not is_depth:
                raise self._refusal([path], "compute")

    def require(self, a: Variant, b: Variant) -> None:
        """Raise if a call shows a difference, or none can be made that would."""
        heard = Variant(a.config)
        with self.readers.listening():
            calls = [*heard.calls(_SHORT), *heard.calls_with_media()]
            calls += heard.calls_with_labels(calls)
            own = self._in_own_code(heard, b)
        if self.same_code:
            self.differing = {p: v for p, v in self.differing.items() if self.readers.of(heard.config, p)}
            if not self.differing:
                return
        if not calls:
            raise self._refusal(list(self.differing)[:1], "may compute", "no call of them can be recorded")
        self._require_equal(heard, b, calls)
        stuck = self._require_equal_beyond(heard, b)
        for path in self.differing:
            values = self.differing[path]
            if path in stuck and any(n >= _LONG for v in values for n in _numbers(v)):
                raise self._refusal([path], "may compute", "nothing so long is tried")
        if stuck & self.differing.keys():
            self._require_equal(heard, b, heard.calls(_LONG))
        self._require_run(heard, b, calls)
        self._require_equal(*own)
        if not self.same_code:
            self._require_equal(heard, b, [*heard.calls_in_all_modes(), *b.calls_in_all_modes()])

    def _in_own_code(self, a: Variant, b: Variant) -> tuple[Variant, Variant, list[Call]]:
        """Both configs in the code of the first, and the calls of all modes of both: none if it is not the model's own,
        names no field that differs, or cannot be traced, so that no basis is changed."""
        values = fields(b.config)
        both = Variant(a.config), a.having({path: values.get(path, UNSET) for path in self.differing})
        said = {path[-1] for path in self.differing}
        said |= {alias for alias, name in a.config.attribute_map.items() if name in said}
        if not self.same_code or not brought(a.model) or said.isdisjoint(words_of(a.model)):
            return *both, []
        try:
            return *both, [call for variant in both for call in variant.calls_in_all_modes()]
        except IncompatibleModels:
            return *both, []

    def _require_equal(self, a: Variant, b: Variant, calls: Iterable[Call]) -> None:
        for call in calls:
            shared = _shared(call, a, b)
            if a.fingerprint(shared) != b.fingerprint(shared):
                raise self._refusal(self._blamed(a, b, shared), "compute")

    def _blamed(self, a: Variant, b: Variant, call: Call) -> list[Path]:
        """The field that makes a difference alone, or all of them."""
        values = fields(b.config)
        for path in self.differing:
            if a.having({path: values.get(path, UNSET)}).fingerprint(call) != a.fingerprint(call):
                return [path]
        return list(self.differing) if self.same_code else []

    def _require_equal_beyond(self, a: Variant, b: Variant) -> set[Path]:
        """Compare calls that reach beyond every number; those that no call reaches beyond are returned."""
        numbers = {n for side in (a, b) for v in fields(side.config).values() for n in _numbers(v) if n > _REACHED}
        smaller = {n: _REACHED + 2 * i for i, n in enumerate(sorted(numbers), 1)}  # even, as windows often have to be
        free, stuck = dict[Path, tuple[Any, Any]](), set[Path]()
        first, second = fields(a.config), fields(b.config)
        for path in first.keys() & second.keys():
            values = first[path], second[path]
            if values[0] == values[1]:
                values = values[0], values[0]  # 10000 and 10000.0 are one number, but one of them is whole
            if not any(n > _REACHED for v in values for n in _numbers(v)) or not self.readers.of(a.config, path):
                continue
            changed = _with_numbers(values[0], smaller), _with_numbers(values[1], smaller)
            if all(s.having({path: v}).shapes == s.shapes for s, v in zip((a, b), changed, strict=True)):
                free[path] = changed
            else:
                stuck.add(path)
        near = [s.having({p: v[i] for p, v in free.items()}) for i, s in enumerate((a, b))]
        reach = _REACHED + 2 * len(smaller) + 3
        calls = near[0].calls(reach, a.model)
        if not calls or any(near[1].fingerprint(call) is None for call in calls):
            return stuck | free.keys()
        self._require_equal(near[0], near[1], calls)
        if self._ops(near[0], calls) == self._ops(near[0], near[0].calls(reach - 1, a.model)):
            self._require_equal(near[0], near[1], near[0].calls(_TIMES * reach, a.model))
        return stuck

    def _ops(self, a: Variant, calls: Iterable[Call]) -> int:
        return sum(found.ops for call in calls if (found := a.fingerprint(call)) is not None)

    def _require_run(self, a: Variant, b: Variant, calls: Sequence[Call]) -> None:
        """A field that only code without a call reads is not known to make no difference, unless it is for dropout."""
        if not self._partly_run(a, calls):
            return
        more = a.calls_that_read(a.unread(calls), calls)
        self._require_equal(a, b, more)
        names = {id(module): path for path, module in a.model.named_modules()}
        for path, module in self._partly_run(a, [*calls, *more]).items():
            where = names.get(id(module)) or type(module).__name__
            raise self._refusal([path], "may compute", f"no call is known that runs all of {where}")

    def _partly_run(self, a: Variant, calls: Iterable[Call]) -> dict[Path, nn.Module]:
        """Fields, each with a module that reads it and has weights that no call reads."""
        weights = dict(a.model.named_parameters())
        unread = {id(weights[name]) for name in a.unread(calls) if name in weights}
        found = {
            path: [
                module
                for module in self.readers.of(a.config, path)
                if module is not None and any(id(p) in unread for p in module.parameters())
            ]
            for path in self.differing
        }
        return {path: modules[0] for path, modules in found.items() if modules and not self._is_for_dropout(a, path)}

    def _is_for_dropout(self, a: Variant, path: Path) -> bool:
        other = a.having({path: self.differing[path][1]})
        return self.readers.builds_alone(a.config, path) and differ_in_dropout_alone(a.model, other.model)

    def _refusal(self, paths: list[Path], how: str, why: str = "") -> IncompatibleModels:
        said = " and ".join(self._said(p) for p in paths[:3]) or "their modelling code is not the same"
        return IncompatibleModels(f"{self.refs[0]} and {self.refs[1]} {how} differently: {said}" + (why and f"; {why}"))

    def _said(self, path: Path) -> str:
        name, (first, second) = ".".join(path), self.differing[path]
        if isinstance(first, list) and isinstance(second, list) and len(first) == len(second):
            at = next(i for i, both in enumerate(zip(first, second, strict=True)) if both[0] != both[1])
            name, first, second = f"{name}[{at}]", first[at], second[at]
        return f"{name} is {_shown(first)} in {self.refs[0]}, {_shown(second)} in {self.refs[1]}"


def _shared(call: Call, a: Variant, b: Variant) -> Call:
    """The call with what the second returns of it, where the first returns that and more, as scores of experts; what
    the second alone returns, no symmetry of the first would leave alone."""
    first, second = a.fingerprint(call), b.fingerprint(call)
    if first is None or second is None or not second.results or not second.results < first.results:
        return call
    return replace(call, results=second.results)


def _in_sizes_of(a: Variant, b: Variant, differing: dict[Path, tuple[Any, Any]]) -> Variant:
    """The second config with the sizes of the first.

    Sizes are the numbers that change the shape of a weight, and those that change a short call beside them.
    """
    theirs = {path: values[0] for path, values in differing.items()}
    whole = {p for p, values in differing.items() if any(type(v) is int for v in values)}
    numbers = {p for p, values in differing.items() if any(map(_numbers, values))}
    sizes = {p for p in numbers if b.having({p: theirs[p]}).shapes != b.shapes}
    if b.having({p: theirs[p] for p in sizes}).shapes != a.shapes:
        sizes |= whole
    for call in a.calls(_SHORT):
        sizes |= {p for p in whole - sizes if a.having({p: differing[p][1]}).fingerprint(call) != a.fingerprint(call)}
    return b.having({p: theirs[p] for p in sizes})


def _returning_alike(config: PretrainedConfig) -> PretrainedConfig:
    """Without what callers may be given besides."""
    config = copy.deepcopy(config)
    for part in parts(config):
        part.output_hidden_states, part.return_dict = False, True
    return config


def _code(config: PretrainedConfig) -> dict[str, bytes]:
    """The modelling code: files by name."""
    build = model_class(config)
    folder = File(inspect.getfile(getattr(build, "__self__", type(config)))).parent
    return {file.name: file.read_bytes() for file in folder.glob("*.py")}


def _is_same_code(a: dict[str, bytes], b: dict[str, bytes]) -> bool:
    """Whether two sets of files are alike, but for remarks; only what is not alike to the byte is parsed."""
    return a.keys() == b.keys() and all(
        code == b[name] or _without_remarks(code) == _without_remarks(b[name]) for name, code in a.items()
    )


def _without_remarks(code: bytes) -> str | bytes:
    try:
        return ast.dump(ast.parse(code))
    except (SyntaxError, ValueError):  # a file that no model loads may be of another Python
        return code


def _layers(names: Iterable[str]) -> set[str]:
    """What weights are called up to the first number in their names."""
    return {found[0] for name in names if (found := re.match(r".*?\.\d+(?=\.)", name))}


def _numbers(value: Any) -> list[int]:
    """The whole numbers in a value."""
    if isinstance(value, list):
        return [n for v in value for n in _numbers(v)]
    return [value] if type(value) is int else []


def _with_numbers(value: Any, instead: dict[int, int]) -> Any:
    if isinstance(value, list):
        return [_with_numbers(v, instead) for v in value]
    return instead.get(value, value) if type(value) is int else value


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
