"""YAML that people write by hand: a few hundred lines, not deep, and no more than what is written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from hf_align.errors import HfAlignError

_LONGEST, _DEEPEST, _LARGEST = 2**20, 50, 2**16
"""Characters of a file, levels of nesting, and nodes when every alias stands for a copy."""


def read_yaml(path: Path) -> Any:
    """What a file of YAML holds that is one document.

    Raises:
        OSError, HfAlignError: as `read_documents`; there are several.
    """
    found = read_documents(path)
    if len(found) > 1:
        raise HfAlignError(f"{path} holds {len(found)} documents; one is needed")
    return found[0] if found else None


def read_documents(path: Path) -> list[Any]:
    """What a file of YAML holds, by its documents.

    Raises:
        OSError: it cannot be read.
        HfAlignError: it is not valid YAML, or stands for more than anyone writes.
    """
    if path.exists() and not path.is_file():
        raise HfAlignError(f"{path} is not a file")
    if path.stat().st_size > _LONGEST:
        raise HfAlignError(f"{path} is larger than {_LONGEST >> 20} MiB")
    try:
        text = path.read_text(encoding="utf-8")
        _require_plain(text, path)
        return list(yaml.safe_load_all(text))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise HfAlignError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
    except (ValueError, TypeError, OverflowError) as error:  # of a date, a number or a key that is none
        raise HfAlignError(f"{path} is not valid YAML: {error}") from error


def _require_plain(text: str, path: Path) -> None:
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEEPEST:
            raise HfAlignError(f"{path} is nested more than {_DEEPEST} levels deep")
    roots = [root for root in yaml.compose_all(text, Loader=yaml.SafeLoader) if root is not None]
    if sum(_size(root, {}) for root in roots) > _LARGEST:
        raise HfAlignError(f"{path}: its aliases stand for more than {_LARGEST} values")
    for key in (key for root in roots for key in _repeated(root)):
        raise HfAlignError(f"{path} gives {key.value} twice, again in line {key.start_mark.line + 1}")


def _size(node: yaml.Node, known: dict[int, float]) -> float:
    """Nodes below and with this one, every alias counted as a copy; infinite where one is inside itself."""
    if id(node) not in known:
        known[id(node)] = float("inf")
        known[id(node)] = 1 + sum(_size(c, known) for c in _children(node))
    return known[id(node)]


def _children(node: yaml.Node) -> list[yaml.Node]:
    parts = [child for pair in node.value for child in pair] if isinstance(node, yaml.MappingNode) else node.value
    return [part for part in parts if isinstance(part, yaml.Node)]


def _repeated(node: yaml.Node) -> Iterator[yaml.Node]:
    """Keys that a mapping gives again, of which YAML would take the last."""
    pairs, seen = node.value if isinstance(node, yaml.MappingNode) else (), set[tuple[str, str]]()
    for key in (key for key, _ in pairs if isinstance(key, yaml.ScalarNode)):
        if (key.tag, key.value) in seen:
            yield key
        seen.add((key.tag, key.value))
    for child in _children(node):
        yield from _repeated(child)
