"""Texts of tokens whose embeddings are shorter or longer than all others, as those of tokens that no text contains.

Code may do something else with what is very small or very large, as where a length has a floor, and words drawn from
a large vocabulary hardly ever are of that kind.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice

from torch import Tensor, nn

from hf_align.tracing.mode import Mode

_OF_EACH = 3
"""Tokens of each kind: so few that a short text has all of them."""
_TABLES = 2
"""Tables that are looked at: that of the words is the first, or stands next to that of the positions."""
_TOKENS = "input_ids"


def of_extreme_tokens(mode: Mode, model: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[Mode]:
    """A way to call a model with other words, for each table that may be theirs.

    Args:
        weights: the model's, by name.
    """
    if _TOKENS not in mode.example.tokens:
        return
    known = mode.example.tokens[_TOKENS]
    tables = (path for path, module in model.named_modules() if isinstance(module, nn.Embedding))
    held = (path for path in tables if f"{path}.weight" in weights)
    for path in islice(held, _TABLES):
        table = weights[f"{path}.weight"]
        if len(table) <= int(known.max()):
            continue
        sizes = table[known].float().norm(dim=-1).cpu()
        ordered = known[sizes.argsort()][max(0, int((sizes == 0).sum()) - 1) :]  # of rows of zeros one
        chosen = ordered[[*range(_OF_EACH), *range(-_OF_EACH, 0)]] if len(ordered) > 2 * _OF_EACH else ordered
        if len(chosen):
            example = replace(mode.example, tokens={**mode.example.tokens, _TOKENS: chosen})
            yield replace(mode, name=f"{mode.name} (shortest and longest rows of {path})", example=example)
