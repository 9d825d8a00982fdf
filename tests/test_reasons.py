"""What cannot be traced is refused in one line: the line of the modelling code, and what to do."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.utils import parametrizations
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from hf_align.errors import HfAlignError, IncompatibleModels
from hf_align.symmetry.certificate.certify import certify
from hf_align.symmetry.derivation.derive import derive
from hf_align.tracing import trace as tracing
from hf_align.tracing.build import build_without_weights, read_config
from hf_align.tracing.example import Example
from hf_align.tracing.program import Program
from hf_align.tracing.reasons import reason
from hf_align.tracing.small.shrink import shrink
from hf_align.tracing.trace import trace, trace_model

_WIDTH = 6
_BUILT_BY = "hf_align.tracing.build.transformers"
"""The module that classes are looked up in: peft replaces that of the same name when it is imported."""


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Between(nn.Module):
    """Something between two linear maps."""

    main_input_name = "hidden_states"

    def __init__(self, middle: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.config = PretrainedConfig(hidden_size=_WIDTH)
        self.before, self.after, self.middle = nn.Linear(_WIDTH, _WIDTH), nn.Linear(_WIDTH, _WIDTH), middle

    def forward(self, hidden_states: Tensor) -> Tensor:
        result: Tensor = self.after(self.middle(self.before(hidden_states)))
        return result


def branch(x: Tensor) -> Tensor:
    if x.sum() > 0:  # here
        return x.relu()
    return x


def loop(x: Tensor) -> Tensor:
    while x.abs().max() > 1:  # here
        x = x / 2
    return x


class Number(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x.abs().max().item()  # here


class Size(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[x[..., 0] > 0]  # here


def vectorised(x: Tensor) -> Tensor:
    return torch.vmap(lambda row: row * row.max().item())(x)  # here


def array(x: Tensor) -> Tensor:
    return x * torch.from_numpy(x.detach().numpy()).sum()  # here


def test_an_op_that_runs_code_is_refused_in_words() -> None:
    words = torch.ones(1, 1, 3, 4)
    with pytest.raises(Exception, match="HigherOrderOperator") as refused, Watching():
        flex_attention(words, words, words, score_mod=lambda score, *_: 2 * score)
    assert "hands code to an op that runs it (flex_attention)" in reason(refused.value)


@pytest.mark.parametrize("middle", [branch, loop, Number(), Size(), vectorised, array])
def test_the_line_that_needs_numbers_is_named(middle: Callable[[Tensor], Tensor]) -> None:
    function = middle.forward if isinstance(middle, nn.Module) else middle
    lines, first = inspect.getsourcelines(function)
    line = next(first + i for i, text in enumerate(lines) if "# here" in text)
    with pytest.raises(IncompatibleModels) as refused:
        derive(trace_model(Between(middle).eval()))  # type: ignore[arg-type]
    assert f"test_reasons.py:{line}" in str(refused.value)
    assert "torch.where" in str(refused.value) and "--match none" in str(refused.value)


class Named(Tensor):
    """A tensor of a class of its own."""


def named(x: Tensor) -> Tensor:
    return x.as_subclass(Named).tanh()


def test_another_kind_of_tensor_is_named() -> None:
    with pytest.raises(IncompatibleModels, match=r"test_reasons.py:\d+ .* computes with a Named, a kind of tensor"):
        trace_model(Between(named).eval())  # type: ignore[arg-type]
    with pytest.raises(NotImplementedError) as refused:
        torch.eye(2).to_sparse().untyped_storage()
    assert "computes with a SparseTensorImpl, a kind of tensor" in reason(refused.value)


def one_row(x: Tensor) -> Tensor:
    return x + x.view(1, *x.shape[1:])


def rows_apart(x: Tensor) -> Tensor:
    return x if len(x) == 1 else branch(x)


def test_a_model_that_takes_one_row_at_a_time_is_traced_with_one() -> None:
    """Not so one that does something with more rows which cannot be traced."""
    program = trace_model(Between(one_row).eval())  # type: ignore[arg-type]
    assert [len(value) for value in program.example.arguments.values()] == [1]
    with pytest.raises(IncompatibleModels, match="needs numbers"):
        trace_model(Between(rows_apart).eval())  # type: ignore[arg-type]


class NormedConfig(PretrainedConfig):
    model_type = "normed-for-tests"

    def __init__(self, how: str = "", **rest: object) -> None:
        super().__init__(**rest)
        self.how, self.hidden_size = how, _WIDTH


HOW: dict[str, Callable[[nn.Module], nn.Module]] = {
    "spectral": parametrizations.spectral_norm,
    "spectral, by a hook": nn.utils.spectral_norm,
    "weight": parametrizations.weight_norm,
    "orthogonal": parametrizations.orthogonal,
}


class Normed(PreTrainedModel):
    config_class = NormedConfig
    main_input_name = "hidden_states"

    def __init__(self, config: NormedConfig) -> None:
        super().__init__(config)
        self.before, self.after = HOW[config.how](nn.Linear(_WIDTH, _WIDTH)), nn.Linear(_WIDTH, _WIDTH)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """As the layers are made."""

    def forward(self, hidden_states: Tensor) -> CausalLMOutput:
        return CausalLMOutput(logits=self.after(self.before(hidden_states).relu()))


@pytest.fixture
def normed(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], PretrainedConfig]:
    monkeypatch.setattr(f"{_BUILT_BY}.NormedForTests", Normed, raising=False)
    return lambda how: NormedConfig(how, architectures=["NormedForTests"])


@pytest.mark.parametrize("how", ["spectral", "spectral, by a hook", "weight"])
def test_norms_of_weights_are_traced(how: str, normed: Callable[[str], PretrainedConfig]) -> None:
    assert certify(normed(how)).sound


def test_what_is_computed_while_a_model_is_built_is_refused(normed: Callable[[str], PretrainedConfig]) -> None:
    with pytest.raises(IncompatibleModels, match=r"test_reasons.py:\d+ .*remove_parametrizations"):
        trace(normed("orthogonal"))


class InAList(Normed):
    """Its first layer is in no state dict: every time that it is loaded it is another one."""

    def __init__(self, config: NormedConfig) -> None:
        super().__init__(config)
        self.layers = [nn.Linear(_WIDTH, _WIDTH)]

    def forward(self, hidden_states: Tensor) -> CausalLMOutput:
        return super().forward(self.layers[0](hidden_states))  # here


def test_weights_that_are_not_saved_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{_BUILT_BY}.InAListForTests", InAList, raising=False)
    with pytest.raises(IncompatibleModels, match=r"test_reasons.py:\d+ .*reads weights .*ModuleList"):
        trace(NormedConfig("weight", architectures=["InAListForTests"]))


def test_any_other_failure_is_named_with_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(x: Tensor) -> Tensor:
        raise NotImplementedError("not yet")

    monkeypatch.setattr(tracing, "examples", lambda *sizes: list(_examples(*sizes))[:1])
    with pytest.raises(IncompatibleModels, match=r"NotImplementedError: not yet, in test_reasons.py:\d+ \(raise"):
        trace_model(Between(fails).eval())  # type: ignore[arg-type]


_examples = tracing.examples


def test_a_question_that_an_export_leaves_open_is_not_exported_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes far longer than a record, and a model may have a dozen examples."""
    exported: list[Example] = []

    def export(model: PreTrainedModel, example: Example) -> Program:
        exported.append(example)
        raise RuntimeError("Cannot call .item() here")

    monkeypatch.setattr(tracing, "_EXPORTED", (export,))
    monkeypatch.setattr(tracing, "examples", lambda *_: [Example({"hidden_states": torch.zeros(2, n, _WIDTH)}, {})
                                                         for n in (3, 4, 5)])  # fmt: skip
    with pytest.raises(IncompatibleModels, match=r"x\.sum"):
        trace_model(cast(PreTrainedModel, Between(branch)))
    assert len(exported) == 1


def test_a_config_that_no_model_can_be_built_from_is_refused_with_the_line() -> None:
    """It may be the default of its own class."""
    config = transformers.AutoConfig.for_model("pp_ocrv6_medium_det")
    with pytest.raises(IncompatibleModels, match=r"pp_ocrv6_medium_det: no model can be built .*modeling_\w+\.py:\d+"):
        build_without_weights(config)


def test_a_class_that_transformers_does_not_export_is_found_beside_its_config() -> None:
    config = shrink(transformers.AutoConfig.for_model("voxtral_realtime_text"))
    config.architectures = ["VoxtralRealtimeTextModel"]
    assert not hasattr(transformers, config.architectures[0])
    assert type(build_without_weights(config)).__name__ == config.architectures[0]
    config.architectures = ["GeneratorType"]  # what else stands in that module is no model
    with pytest.raises(IncompatibleModels, match="GeneratorType is unknown"):
        build_without_weights(config)


def test_a_default_config_that_its_own_class_refuses_is_refused() -> None:
    with pytest.raises(HfAlignError, match=r"gemma4_assistant: its default config .*must be 0"):
        read_config("gemma4_assistant")
