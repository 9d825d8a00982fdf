"""What was derived before is found again, and only that."""

from __future__ import annotations

import gzip
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from conftest import MODELS, tiny_gpt2, tiny_llama
from transformers import PretrainedConfig

from hf_align.runtime.kept import VARIABLE
from hf_align.symmetry.derivation import spec_cache
from hf_align.symmetry.derivation.depth import derive_by_depth
from hf_align.symmetry.derivation.plain_data import from_plain, to_plain
from hf_align.symmetry.derivation.spec_cache import derived_spec
from hf_align.symmetry.gauges.moves import Stored
from hf_align.symmetry.spec import SymmetrySpec
from hf_align.tracing.build import read_config


@pytest.fixture
def derived(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[PretrainedConfig]:
    """An empty cache, and what is derived for want of an entry."""
    asked: list[PretrainedConfig] = []

    def derive(config: PretrainedConfig, *more: Any) -> SymmetrySpec:
        asked.append(config)
        return derive_by_depth(config, *more)

    monkeypatch.setenv(VARIABLE, str(tmp_path / "specs"))
    monkeypatch.setattr(spec_cache, "derive_by_depth", derive)
    return asked


@pytest.mark.parametrize("model", ["llama", "bert", "vit"])
def test_a_spec_comes_back_as_it_was(model: str, derived: list[PretrainedConfig]) -> None:
    config = read_config(str(MODELS / model / "0"))
    first = derived_spec(config)
    assert derived_spec(config) == first and len(derived) == 1
    assert json.loads(json.dumps(to_plain(first))) == to_plain(first)


def test_another_config_or_other_code_is_derived(
    derived: list[PretrainedConfig], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    derived_spec(tiny_gpt2())
    assert derived_spec(tiny_gpt2(activation_function="relu")) != derived_spec(tiny_gpt2()) and len(derived) == 2
    derived_spec(tiny_gpt2(name_or_path="elsewhere"))
    assert len(derived) == 2
    monkeypatch.setattr(spec_cache, "_OWN", {tmp_path})
    derived_spec(tiny_gpt2())
    assert len(derived) == 3


def test_a_rule_of_the_users_counts(derived: list[PretrainedConfig], monkeypatch: pytest.MonkeyPatch) -> None:
    derived_spec(tiny_gpt2())
    monkeypatch.setitem(spec_cache.RULES, "an_op_of_the_users", _no_rule)
    derived_spec(tiny_gpt2())
    assert len(derived) == 2


def _no_rule() -> None:
    raise AssertionError


BROKEN = {"empty": b"", "not packed": b"{}", "numbers": gzip.compress(b"[1, 2]"),
          "no class of ours": gzip.compress(b'{"class": "os:system"}')}  # fmt: skip


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
def test_what_cannot_be_read_is_derived_again(content: bytes, derived: list[PretrainedConfig], tmp_path: Path) -> None:
    first = derived_spec(tiny_gpt2())
    (entry,) = (tmp_path / "specs").iterdir()
    entry.write_bytes(content)
    assert derived_spec(tiny_gpt2()) == first and len(derived) == 2
    assert derived_spec(tiny_gpt2()) == first and len(derived) == 2


def test_nothing_but_dataclasses_of_the_package_is_made() -> None:
    for name in ("os:system", "subprocess:Popen", "hf_align.cli.app:main", "hf_align_of_others:Spec"):
        with pytest.raises(ValueError):
            from_plain({"class": name, "fields": {}})


def test_several_at_once(derived: list[PretrainedConfig], tmp_path: Path) -> None:
    config = tiny_llama()
    spec = derived_spec(config)
    (entry,) = (tmp_path / "specs").iterdir()
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda _: spec_cache._write(entry, spec), range(40)))
        assert all(found == spec for found in threads.map(lambda _: spec_cache._read(entry), range(40)))
    assert [p.name for p in (tmp_path / "specs").iterdir()] == [entry.name]


def test_it_can_be_off_or_out_of_reach(
    derived: list[PretrainedConfig], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(VARIABLE, "off")
    derived_spec(tiny_gpt2()), derived_spec(tiny_gpt2())
    assert len(derived) == 2 and not (tmp_path / "specs").exists()
    (tmp_path / "a file").write_text("")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "a file" / "specs"))
    derived_spec(tiny_gpt2()), derived_spec(tiny_gpt2())
    assert len(derived) == 4


def test_only_the_last_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("hf_align.runtime.kept._ENTRIES", 3)
    spec = derive_by_depth(tiny_gpt2())
    for i in range(6):
        spec_cache._write(tmp_path / f"{i}.json.gz", spec)
    assert {p.name for p in tmp_path.iterdir()} == {"3.json.gz", "4.json.gz", "5.json.gz"}


def test_members_of_enums_are_kept() -> None:
    assert from_plain(json.loads(json.dumps(to_plain((Stored.TABLE, 1))))) == (Stored.TABLE, 1)
    with pytest.raises(ValueError, match="is no Enum"):
        from_plain({"enum": "hf_align.symmetry.gauges.moves:Constant", "member": "TABLE"})
