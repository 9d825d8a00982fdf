"""A model in the tokens of another: the rows of its tables, by what each token spells.

Two tokenizers cut the same text into other pieces, but every piece spells bytes. A token of the one that the other has
too keeps its row. Any other is spelled by the fewest tokens of the other, and its row is their mean (Gee et al., 2022,
"Fast Vocabulary Transfer", section 3). What the model computes is then another function, on other inputs: how much of
the text it still knows has to be measured.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor
from transformers import PretrainedConfig

from hf_align.checkpoints.checkpoint import TensorInfo
from hf_align.checkpoints.naming import NamedWeights
from hf_align.checkpoints.ondemand import OnDemand
from hf_align.checkpoints.own_files import is_own
from hf_align.errors import CheckpointError, IncompatibleModels
from hf_align.tracing.build import build_without_weights, inventory
from hf_align.tracing.fields import parts

_FILE = "tokenizer.json"
_SIZE, _TOKEN = "vocab_size", "_token_id"
"""What configs call the rows of the table that tokens are looked up in, and the end of names of single tokens."""
_PROBED = 8
"""By how many rows the tables of a config are made longer to see which axes are those of the vocabulary."""
Pieces = tuple[int, ...]


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a fast tokenizer.

    Attributes:
        names: token -> its id.
        special: those that stand for no text.
        spell: the bytes that a token stands for.
    """

    names: Mapping[str, int]
    special: frozenset[str]
    spell: Callable[[str], bytes]

    @classmethod
    def read(cls, folder: Path) -> Vocabulary:
        """That of a model.

        Raises:
            IncompatibleModels: it has no fast tokenizer.
            CheckpointError: its tokenizer is damaged.
        """
        file = folder / _FILE
        if not is_own(folder, file):
            raise IncompatibleModels(f"{folder} has no {_FILE}, by which its tokens could be told")
        try:
            tokenizer = Tokenizer.from_file(str(file))
            decoder = json.loads(file.read_text(encoding="utf-8")).get("decoder")
        except Exception as error:  # a tokenizer raises nothing more special
            raise CheckpointError(f"{file} cannot be read: {error}") from error
        added = tokenizer.get_added_tokens_decoder().values()
        spell, literal = _speller(decoder), {token.content for token in added}
        return cls(
            names=tokenizer.get_vocab(with_added_tokens=True),
            special=frozenset(token.content for token in added if token.special),
            spell=lambda token: token.encode() if token in literal else spell(token),
        )

    def within(self, size: int) -> Vocabulary:
        """Without tokens that a table of some rows has none for."""
        return replace(self, names={token: row for token, row in self.names.items() if row < size})

    @cached_property
    def by_bytes(self) -> dict[bytes, int]:
        """What each token that stands for text spells; where several spell the same, the first of the longest name
        loses: bytes that a tokenizer falls back to are spelled `<0x41>`."""
        text = sorted(self.names.keys() - self.special, key=lambda token: (-len(token), -self.names[token]))
        return {self.spell(token): self.names[token] for token in text}

    @cached_property
    def longest(self) -> int:
        """Bytes of the longest token."""
        return max(map(len, self.by_bytes), default=0)

    def pieces(self, text: bytes) -> Pieces:
        """The fewest tokens that spell a text, longer ones first; none where no tokens do."""
        best: list[Pieces | None] = [None] * len(text) + [()]
        for start in reversed(range(len(text))):
            for end in range(min(len(text), start + self.longest), start, -1):
                token, rest, known = self.by_bytes.get(text[start:end]), best[end], best[start]
                if token is not None and rest is not None and (known is None or len(rest) + 1 < len(known)):
                    best[start] = (token, *rest)
        return best[0] or ()


def _speller(decoder: Mapping[str, Any] | None) -> Callable[[str], bytes]:
    """What a token spells, by the way in which a tokenizer puts text together again."""
    kinds = dict(_kinds(decoder))
    if "ByteLevel" in kinds:
        return lambda token: bytes(_BYTES.get(character, 63) for character in token)
    if "WordPiece" in kinds:
        inside = kinds["WordPiece"].get("prefix", "##")
        return lambda token: (token.removeprefix(inside) if token.startswith(inside) else f" {token}").encode()
    space = kinds.get("Metaspace", {}).get("replacement", "▁")

    def spell(token: str) -> bytes:
        if "ByteFallback" in kinds and len(token) == 6 and token.startswith("<0x"):
            return bytes([int(token[3:5], 16)])
        return token.replace(space, " ").encode()

    return spell


def _kinds(decoder: Mapping[str, Any] | None) -> Iterable[tuple[str, Mapping[str, Any]]]:
    if decoder is not None:
        yield decoder["type"], decoder
        for inner in decoder.get("decoders", ()):
            yield from _kinds(inner)


def _byte_characters() -> dict[str, int]:
    """The character that stands for each byte in byte-level tokens (Radford et al., 2019, the code of GPT-2)."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in shown]
    found = {chr(byte): byte for byte in shown} | {chr(256 + i): byte for i, byte in enumerate(hidden)}
    assert found.keys() == set(ByteLevel.alphabet())
    return found


_BYTES = _byte_characters()


@dataclass(frozen=True)
class Respelling:
    """The tokens of one vocabulary in those of another.

    Attributes:
        pieces: for each row of the new tables, the rows that it is made of; none where nothing stands for it.
        before: the config of the model in its own vocabulary.
        config: of the model in the new vocabulary.
        axes: where the rows of the vocabulary are, by weight.
    """

    pieces: Sequence[Pieces]
    before: PretrainedConfig
    config: PretrainedConfig
    axes: Mapping[str, int]

    @classmethod
    def of(cls, own: Vocabulary, config: PretrainedConfig, into: Vocabulary, like: PretrainedConfig) -> Respelling:
        """What brings a model with a vocabulary of its own into another one.

        Args:
            config: of the model, with its own vocabulary.
            like: of the model whose vocabulary it gets.

        Raises:
            IncompatibleModels: their configs do not say how many tokens there are, or few tokens are alike.
        """
        size, own = _size(like), own.within(_size(config))
        pieces: list[Pieces] = [()] * size
        for token, row in into.names.items():
            if row < size:
                pieces[row] = _pieces(token, into, own)
        for row, theirs in _of_one_role(like, config).items():
            pieces[row] = pieces[row] or (theirs,)
        return cls(pieces, config, _in_vocabulary_of(config, like), vocabulary_axes(config))

    @property
    def described(self) -> str:
        """What was done, in words that follow the name of a model."""
        kept, made = (sum(map(of, self.pieces)) for of in (lambda p: len(p) == 1, lambda p: len(p) > 1))
        nothing = len(self.pieces) - kept - made
        none = f", {nothing} stand for nothing that it knows" if nothing else ""
        return f"gets the tokenizer of the first: {kept} tokens are its own, {made} are made of several{none}"

    def carry(self, name: str, tensor: Tensor) -> Tensor:
        """A weight with the rows of the new vocabulary in place of those of the old one."""
        if name not in self.axes:
            return tensor
        rows = tensor.movedim(self.axes[name], 0)
        whole = rows.mean(0)
        new = torch.stack([rows[list(p)].mean(0) if p else whole for p in self.pieces])
        return new.movedim(0, self.axes[name])


def respelling_of(folders: Sequence[Path], configs: Sequence[PretrainedConfig]) -> Respelling | None:
    """What brings the second of two models into the vocabulary of the first; None where it has the same.

    Raises:
        IncompatibleModels, CheckpointError: as `Vocabulary.read` and `Respelling.of`.
    """
    if not all(is_own(folder, folder / _FILE) for folder in folders) and _size(configs[0]) == _size(configs[1]):
        return None
    into, own = (Vocabulary.read(folder) for folder in folders)
    if into.names == own.names and _size(configs[0]) == _size(configs[1]):
        return None
    return Respelling.of(own, configs[1], into, configs[0])


def require_same_number_of_tokens(
    refs: tuple[str, str], configs: Sequence[PretrainedConfig], folders: Sequence[Path]
) -> None:
    """Refuse models whose tables have other numbers of rows, where their tokenizers could bring them together.

    Raises:
        IncompatibleModels: they are such.
    """
    first, second = (getattr(config.get_text_config(), _SIZE, None) for config in configs)
    if first != second and all(is_own(folder, folder / _FILE) for folder in folders):
        raise IncompatibleModels(
            f"{refs[0]} has {first} tokens and {refs[1]} has {second}; with --retokenize, merge, align and evaluate "
            f"bring {refs[1]} into those of {refs[0]}"
        )


class RespelledWeights(OnDemand):
    """The weights of a model in another vocabulary, made when they are asked for.

    Attributes:
        own: in its own vocabulary.
    """

    def __init__(self, own: NamedWeights, respelling: Respelling) -> None:
        super().__init__(own)
        self.own = own
        self.respelling = respelling

    def __getitem__(self, name: str) -> Tensor:
        return self.respelling.carry(name, self.own[name])

    def stored(self, name: str) -> TensorInfo:
        """As `NamedWeights.stored`, in the shape that it has here."""
        found = self.own.stored(name)
        shape = list(found.shape)
        if name in self.respelling.axes:
            shape[self.respelling.axes[name]] = len(self.respelling.pieces)
        return replace(found, shape=tuple(shape))


def vocabulary_axes(config: PretrainedConfig) -> dict[str, int]:
    """Name of a weight -> its axis whose entries are the tokens: the one that grows with the vocabulary.

    A tied weight is there under each of its names, for it may be untied.

    Raises:
        IncompatibleModels: no weight has one, or one has other entries beside them.
    """
    size = _size(config)
    now, larger = (inventory(build_without_weights(c)) for c in (config, _with_size(config, size + _PROBED)))
    axes = {}
    for name, shape in now.shapes.items():
        for axis, (before, after) in enumerate(zip(shape, larger.shapes[name], strict=True)):
            if before != after:
                if (before, after) != (size, size + _PROBED) or name in axes:
                    raise IncompatibleModels(f"{name} has more entries than there are tokens: it cannot be respelled")
                axes[name] = axis
    if not axes:
        raise IncompatibleModels(f"no weight of {config.model_type} grows with {_SIZE}: no table can be respelled")
    return axes | {alias: axes[name] for alias, name in now.ties.items() if name in axes}


def _pieces(token: str, into: Vocabulary, own: Vocabulary) -> Pieces:
    """The tokens of `own` that spell a token of `into`: the one of the same name that spells the same, if there is."""
    same = own.names.get(token)
    if token in into.special or token in own.special:
        return (same,) if same is not None and token in into.special and token in own.special else ()
    text = into.spell(token)
    if same is not None and own.spell(token) == text:
        return (same,)
    return own.pieces(text)


def _of_one_role(like: PretrainedConfig, config: PretrainedConfig) -> dict[int, int]:
    """The tokens that two configs name alike (`bos_token_id`): the row of the first -> that of the second."""
    first, second = vars(like.get_text_config()), vars(config.get_text_config())
    roles = [key for key in first if key.endswith(_TOKEN)]
    both = ((i, j) for key in roles for i, j in zip(_ids(first[key]), _ids(second.get(key)), strict=False))
    return {i: j for i, j in both if 0 <= i < _size(like) and 0 <= j < _size(config)}


def _ids(said: Any) -> list[int]:
    """The tokens of a field of a config, which may name one, several or none."""
    return [each for each in (said if isinstance(said, (list, tuple)) else [said]) if isinstance(each, int)]


def _size(config: PretrainedConfig) -> int:
    size = getattr(config.get_text_config(), _SIZE, None)
    if not isinstance(size, int) or size < 1:
        raise IncompatibleModels(f"the config of {config.model_type} does not say how many tokens there are ({_SIZE})")
    return size


def _with_size(config: PretrainedConfig, size: int) -> PretrainedConfig:
    """Another number of tokens, wherever the config notes it."""
    made, before = copy.deepcopy(config), _size(config)
    for part in parts(made):
        if getattr(part, _SIZE, None) == before:
            setattr(part, _SIZE, size)
    return made


def _in_vocabulary_of(config: PretrainedConfig, like: PretrainedConfig) -> PretrainedConfig:
    """A config with the tokens of another: how many there are, and which are special."""
    made = _with_size(config, _size(like))
    for part, other in zip(parts(made), parts(like), strict=False):
        for key in [k for k in vars(part) if k.endswith(_TOKEN)]:
            setattr(part, key, getattr(other, key, None))
    return made
