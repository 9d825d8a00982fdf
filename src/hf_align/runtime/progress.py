"""That something goes on, for steps that cannot say how far they are: a clock on stderr, where a person looks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub.utils import tqdm

from hf_align.runtime.processes import current

_TICK = 1.0
"""Seconds."""


@contextmanager
def waiting(what: str, *, quiet: bool = False) -> Iterator[None]:
    """Show what is going on and for how long, until the end of the block; on a terminal only."""
    if quiet or not current().leads:
        yield
        return
    bar = tqdm(desc=what, bar_format="{desc} {elapsed}", leave=False, disable=None)
    done = threading.Event()

    def tick() -> None:
        while not done.wait(_TICK):
            bar.refresh()

    clock = threading.Thread(target=tick, daemon=True)
    if not bar.disable:
        clock.start()
    try:
        yield
    finally:
        done.set()
        if clock.ident is not None:
            clock.join()
        bar.close()
