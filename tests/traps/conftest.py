"""Modelling code of the traps is copied to a folder of its own."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import transformers


@pytest.fixture(scope="session", autouse=True)
def _modules(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))
        patch.setattr(sys, "path", list(sys.path))
        yield
