"""What models write when they go on from the same words: what a reader of a report can judge."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from transformers import AutoTokenizer

from hf_align.errors import first_line
from hf_align.jobs.opened import Opened
from hf_align.running.generate import continued
from hf_align.running.network import Batch, Weights
from hf_align.tracing.build import quiet

logger = logging.getLogger(__name__)
_PROMPT, _TEXT = 16, 32
"""Tokens that are given, and that are written at most."""


def texts(models: Opened, weights: Mapping[str, Weights], held_out: Batch) -> dict[str, Any]:
    """What each of some weights writes after the first words of held-out data.

    Args:
        weights: by the name of the model that they are of.

    Returns:
        `prompt`, and `texts` as (name, text); empty where a model writes nothing, or has no tokenizer.
    """
    network, tokens = models.network, held_out.get("input_ids")
    if tokens is None or tokens.dim() != 2:
        return {}
    try:
        trusted = models.options.trust_remote_code
        with quiet():
            tokenizer: Any = AutoTokenizer.from_pretrained(models.first.a.folder, trust_remote_code=trusted)
        prompt = tokens[:1, :_PROMPT].to(network.device)
        found = []
        for name, each in weights.items():
            told = continued(network, network.placed(each), prompt, _TEXT)
            if told is None:
                return {}
            found.append((name, tokenizer.decode(told[0], skip_special_tokens=True)))
        return {"prompt": tokenizer.decode(prompt[0], skip_special_tokens=True), "texts": found}
    except Exception as error:  # a tokenizer's files, and what a model does to generate, may be anything
        logger.info("no text is written: %s", first_line(error))
        return {}
