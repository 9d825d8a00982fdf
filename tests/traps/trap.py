"""A trap: two small models, and every call in which aligned B must answer as B does.

A trap holds if `hf-align align A B` refuses it in one line, or if what it writes is B.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import run
from torch import Generator, Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from traps.standing import BROKEN, QUICK

TOLERANCE = 3e-5
"""Of the largest logit: alignment multiplies in float32, which moves these models by 5e-6 at most; what breaks one, by
1e-3 and more."""
LENGTHS = (2, 7, 12, 33)
WRITTEN = 32
"""Tokens that are read with a cache."""
_ROWS = 2

Call = Callable[[PreTrainedModel], Tensor]
Calls = Callable[[PreTrainedModel], Mapping[str, Call]]


def forward(model: PreTrainedModel, **arguments: Any) -> Tensor:
    """Logits, or where there are none the last hidden states."""
    found = model(**arguments)
    for name in ("logits", "prediction_logits", "last_hidden_state", "reconstruction", "projected_quantized_states"):
        if found.get(name) is not None:
            return found[name]
    return next(v for v in found.to_tuple() if isinstance(v, Tensor))


def ids_of(model: PreTrainedModel, length: int, rows: int = _ROWS, start: int = 3) -> Tensor:
    """Random token ids but for the first few, which models keep for other things."""
    size = model.config.get_text_config().vocab_size
    return torch.randint(start, size, (rows, length), generator=Generator().manual_seed(length))


def lengths(*chosen: int, **arguments: Any) -> Calls:
    """Text at some lengths, with other arguments beside it, each made from the ids."""

    def calls(model: PreTrainedModel) -> dict[str, Call]:
        found = {}
        for length in chosen or LENGTHS:
            ids = ids_of(model, length)
            more = {k: v(ids) if callable(v) else v for k, v in arguments.items()}
            found[f"length {length}" + "".join(f", {k}" for k in more)] = partial(forward, input_ids=ids, **more)
        return found

    return calls


def cached(written: int = WRITTEN, prefill: int = 5, name: str = "past_key_values") -> Calls:
    """Text that is read up to somewhere at once and then token by token."""

    def read(model: PreTrainedModel) -> Tensor:
        ids = ids_of(model, written)
        found = model(input_ids=ids[:, :prefill], use_cache=True)
        logits = [found.logits]
        for i in range(prefill, written):
            found = model(input_ids=ids[:, i : i + 1], use_cache=True, **{name: found[name]})
            logits.append(found.logits)
        return torch.cat(logits, 1)

    return lambda _: {"with a cache": read}


def both(*parts: Calls) -> Calls:
    return lambda model: {label: call for part in parts for label, call in part(model).items()}


text = both(lengths(), cached())
"""What every decoder is asked."""


@dataclass(frozen=True)
class Trap:
    """Two models, and what they are asked.

    Attributes:
        build: the model of a seed, 0 for A and 1 for B; its parameters are then drawn at random.
        then: what is done to a model after that, as to set buffers.
        may_refuse: whether exit status 2 is an answer; not for models that are nothing special.
        dtype: of what is compared; float32 for modelling code that cannot do without.
    """

    name: str
    build: Callable[[int], PreTrainedModel]
    calls: Calls = text
    may_refuse: bool = False
    then: Callable[[PreTrainedModel, Generator], None] = lambda model, rng: None
    dtype: torch.dtype = torch.float64


def native(name: str, config: PretrainedConfig, other: PretrainedConfig | None = None) -> Callable[[int], Any]:
    """A class of transformers, of one config or of two."""
    return lambda seed: getattr(transformers, name)(config if seed == 0 or other is None else other)


def custom(kind: Any, other: Mapping[str, Any] | None = None, **config: Any) -> Callable[[int], Any]:
    """A class that brings its code along; B may have other settings."""
    return lambda seed: kind(kind.config_class(**{**config, **(other or {} if seed else {})}))


def of_code(kind: Any, calls: Calls, **config: Any) -> Trap:
    """A trap by the name of a class that brings its code along."""
    return Trap(kind.__name__, custom(kind, **config), calls)


def cases(kind: str, traps: Sequence[Trap]) -> Iterator[Any]:
    """What pytest makes of them: all but the quick ones run with the slow tests."""
    for trap in traps:
        label = f"{kind}: {trap.name}"
        marks = [] if label in QUICK else [pytest.mark.slow]
        marks += [pytest.mark.xfail(strict=True, reason=BROKEN[label])] if label in BROKEN else []
        yield pytest.param(trap, id=trap.name, marks=marks)


def check(trap: Trap, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Aligns the two, and compares B with aligned B."""
    for seed, name in enumerate("ab"):
        save(trap, seed, folder / name)
    brings_code = (folder / "a" / "modeling.py").exists()
    trust = ["--trust-remote-code"] if brings_code else []
    capsys.readouterr()
    status = run("align", folder / "a", folder / "b", "-o", folder / "out", "--quiet", *trust)
    said = capsys.readouterr().err.strip().splitlines()
    if status == 2:
        assert len(said) == 1, said
        assert not (folder / "out").exists()
        assert trap.may_refuse, said[0]
        assert "fault of hf-align" not in said[0], said[0]  # an exception in a sentence is no answer
        return
    assert status == 0, said
    changes = compare(trap, folder / "b", folder / "out")
    assert max(changes.values()) < TOLERANCE, {k: f"{v:.1e}" for k, v in changes.items() if not v < TOLERANCE}


def save(trap: Trap, seed: int, folder: Path) -> None:
    torch.manual_seed(seed)
    model = trap.build(seed).eval()
    rng = Generator().manual_seed(seed)
    fill(model, rng)
    with torch.no_grad():
        trap.then(model, rng)
    model.save_pretrained(folder)
    module = sys.modules[type(model).__module__]
    if module.__name__.startswith("transformers."):
        return
    shutil.copyfile(str(module.__file__), folder / "modeling.py")
    _copy_imported(Path(str(module.__file__)), folder)
    config = json.loads((folder / "config.json").read_text())
    kind = type(model.config)
    home = "modeling" if kind.__module__ == module.__name__ else kind.__module__.rpartition(".")[2]
    config["auto_map"] = {"AutoConfig": f"{home}.{kind.__name__}",
                          "AutoModelForCausalLM": f"modeling.{type(model).__name__}"}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


def _copy_imported(file: Path, folder: Path) -> None:
    """Copies what modelling code imports from beside it."""
    for name in re.findall(r"^from \.(\w+) import", file.read_text(), re.MULTILINE):
        shutil.copyfile(file.with_name(f"{name}.py"), folder / f"{name}.py")
        _copy_imported(file.with_name(f"{name}.py"), folder)


def fill(model: PreTrainedModel, rng: Generator) -> None:
    """Weights that all matter: rows of about unit length, gains around one, biases that are not small."""
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=rng)
            if id(weight) in tables:
                weight.copy_(noise)
            elif weight.squeeze().ndim < 2:
                weight.copy_(float(weight.mean() == 1) + 0.3 * noise)
            else:
                weight.copy_(noise * weight[0].numel() ** -0.5)


def load(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    config = json.loads((folder / "config.json").read_text())
    if "auto_map" in config:  # not by an Auto class: that goes by the config's class, which some traps share
        kind = get_class_from_dynamic_module(config["auto_map"]["AutoModelForCausalLM"], folder)
    else:
        kind = getattr(transformers, config["architectures"][0])
    return kind.from_pretrained(folder, experts_implementation="eager").to(dtype).eval()


def compare(trap: Trap, before: Path, after: Path) -> dict[str, float]:
    """For each call, the largest change of a logit over the largest logit."""
    models = [load(folder, trap.dtype) for folder in (before, after)]
    changes = {}
    with torch.no_grad():
        for label, call in trap.calls(models[0]).items():
            torch.manual_seed(0)
            expected = call(models[0])
            torch.manual_seed(0)
            found = call(models[1])
            assert expected.isfinite().all(), label
            assert len(expected), label
            changes[label] = float((expected - found).abs().max() / expected.abs().max())
    return changes
