"""The sizes in a config: where they are, how small each may become, and the fields with others in their place."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from typing import Any

from hf_align.tracing.mending import widths_told
from hf_align.tracing.small.field_roles import ROLE
from hf_align.tracing.small.shrink import keep_tokens_inside, nested

GONE = object()
Fields = dict[str, Any]
Path = tuple[str | int, ...]
_LEAST: tuple[tuple[str, int, int], ...] = (
    (
        r"token|_ids?$|idx|index$|seed|version|offset|every|interval|period|step$|rate$|beam|sample_size|stages|levels",
        0,
        0,
    ),
    (r"section$", 1, 1),
    (r"^vocab", 24, 24),
    (r"vocab|codebook_size|codes|buckets|bins$", 16, 16),
    (r"position|seq_len|ctx|length|chunk|window|context", 16, 12),
    (r"kv_heads|key_value_heads|kv_groups", 1, 1),
    (r"head_dim|d_kv|head_size|d_head|headdim", 4, 4),
    (r"heads|n_head|num_head", 2, 2),
    (r"depth|layers|block|repeat", 2, 2),
    (r"top_?k|per_tok|moe_k", 2, 2),
    (r"experts", 4, 3),
    (r"kernel|stride|patch|pool|tubelet", 3, 2),
    (r"image", 8, 8),
    (r"rank|latent|state", 5, 3),
    (r"intermediate|ffn|ff_|d_ff|inner|mlp|expert", 6, 4),
    (r"label", 9, 5),
    (r"group", 2, 2),
    (r"channels", 8, 4),
    (r"", 8, 6),
)
"""How small a field may become, by a word in its name, and if need be. Nought: it is no size."""
_CHANNELS = r"hidden_size|channels|dim$|width|filters"
_FEW_GROUPS = 2
"""As many channels by chance, perhaps."""
STAGES = re.compile(r"stage|level|block|layer|conv|pool")


def differences(fields: Fields, target: Fields, above: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Where two configs differ, and what stands there in the second."""
    for key in fields:
        value, wanted = fields[key], target.get(key, GONE)
        if isinstance(value, dict) and isinstance(wanted, dict):
            yield from differences(value, wanted, (*above, key))
        elif value != wanted:
            yield (*above, key), wanted


def with_changes(fields: Fields, changes: Mapping[Path, Any]) -> Fields:
    """A copy with other values in some places; tokens stay inside of vocabularies."""
    fields = copy.deepcopy(fields)
    for path, value in changes.items():
        holder: Any = fields
        for key in path[:-1]:
            holder = holder[key]
        if value is GONE:
            del holder[path[-1]]
        else:
            holder[path[-1]] = copy.deepcopy(value)
    vocabularies = [v for p, v in changes.items() if "vocab_size" in name_of(p) and isinstance(v, int) and v > 4]
    if vocabularies:
        keep_tokens_inside(fields, min(vocabularies))
    return fields


def with_as_many_patches(fields: Fields, path: Path, size: int) -> dict[Path, int]:
    """A smaller size; of patches, with an image as much smaller, for more of them save nothing and take long."""
    sizes = dict(numbers_in(fields))
    image = (*path[:-1], "image_size")
    if ROLE.get(name_of(path)) != "patch" or not isinstance(sizes.get(image), int):
        return {path: size}
    return {path: size, image: sizes[image] * size // sizes[path]}


def with_the_width_given(fields: Fields, said: str) -> Iterator[Fields]:
    """Copies in which one field is as wide as what it is given, where an error tells both widths."""
    fields = _with_lists(fields)
    given, read = widths_told(said) or (0, 0)
    for path, value in numbers_in(fields) if given else ():
        if value == read:
            yield with_changes(fields, {path: given})


def _with_lists(value: Any) -> Any:
    """With lists in place of tuples, in which nothing can be changed."""
    if isinstance(value, dict):
        return {key: _with_lists(part) for key, part in value.items()}
    return [_with_lists(part) for part in value] if isinstance(value, (list, tuple)) else value


def smaller_sizes(value: int, least: int) -> list[int]:
    """Smaller sizes, the smallest first."""
    steps = {least, *(least * n for n in (2, 3, 4, 8, 16, 32)), value // 2, value // 4}
    return sorted(n for n in steps if least <= n < value)


def sizes_in(fields: Fields) -> list[tuple[Path, int]]:
    """Every field that says how large something is, not how many entries the lists have."""
    lengths = {len(value) for _, value in lists_in(fields)} - {1, 2}
    return [
        (path, value)
        for path, value in numbers_in(fields)
        if isinstance(value, int) and value > 1 and least_size(path, tight=False)
        if not (value in lengths and STAGES.search(str(path[-1])))
    ]


def numbers_in(fields: Any, above: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every number, with the keys that lead to it."""
    items: Any = fields.items() if isinstance(fields, dict) else enumerate(fields)
    for key, value in items:
        if isinstance(value, (dict, list)) and key not in ("id2label", "label2id"):
            yield from numbers_in(value, (*above, key))
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            yield (*above, key), value


def lists_in(fields: Fields, above: Path = ()) -> Iterator[tuple[Path, list[Any]]]:
    """Every list, with the keys that lead to it."""
    for key, value in fields.items():
        if isinstance(value, dict):
            yield from lists_in(value, (*above, key))
        elif isinstance(value, list):
            yield (*above, key), value


def name_of(path: Path) -> str:
    """The field that a path leads to, or into."""
    return next(str(key) for key in reversed(path) if not isinstance(key, int))


def least_size(path: Path, tight: bool) -> int:
    """How small a field may become, comfortably or at the least."""
    comfortable, least = next((c, t) for words, c, t in _LEAST if re.search(words, name_of(path)))
    return least if tight else comfortable


def is_same_kind(before: Fields, after: Fields, own: Fields) -> bool:
    """Whether what was fewer than something else still is: key heads than query heads, chosen experts than experts; and
    whether groups that are as many as channels, one for each, still are.

    Args:
        own: those of the model; in a small copy groups may be as many by chance.
    """
    for fewer, more in ((r"kv_heads|key_value_heads", r"(?<!key_value_)(?<!kv_)heads$"),
                        (r"experts_per_tok|top_?k(_experts)?$|moe_k$", r"experts$")):  # fmt: skip
        for old, new in zip(nested(before), nested(after), strict=False):
            was, now = (_smallest(g, fewer) < _smallest(g, more) for g in (old, new))
            if was and not now:
                return False
    alone = {name for group in nested(own) for name in _groups_of_one(group)}
    return all(_has_groups_of_one(new, name, channels) for old, new in zip(nested(before), nested(after), strict=False)
               for name, channels in _groups_of_one(old).items() if name in alone)  # fmt: skip


def _groups_of_one(group: Fields) -> dict[str, list[str]]:
    """The numbers of groups, and of channels that are as many."""
    return {
        name: channels
        for name, count in group.items()
        if re.search(r"groups$", str(name)) and isinstance(count, int) and count > _FEW_GROUPS
        if (channels := [k for k, v in group.items() if v == count and re.search(_CHANNELS, str(k))])
    }


def _has_groups_of_one(group: Fields, name: str, channels: list[str]) -> bool:
    return name not in group or any(group.get(k) == group[name] for k in channels)


def _smallest(group: Fields, words: str) -> float:
    return min((v for k, v in group.items() if isinstance(v, int) and re.search(words, str(k)) and v), default=0.0)
