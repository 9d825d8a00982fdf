"""What torch says of sizes that do not go together is read the same, with values and without; and what a model asks for
is found."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import conv2d, layer_norm, linear
from transformers import PretrainedConfig, PreTrainedModel, VideoMAEConfig

from hf_align.tracing.example import Example
from hf_align.tracing.first_calls import error_of
from hf_align.tracing.mending import _lengths_told, mended, widths_told
from hf_align.tracing.mode import Mode
from hf_align.tracing.trace import trace

IN_MODES = pytest.mark.parametrize("fake", [False, True], ids=["with values", "without"])
READERS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "a matrix": lambda x, read: linear(x[0], torch.zeros(3, read)),
    "a matrix with a bias": lambda x, read: linear(x[0], torch.zeros(3, read), torch.zeros(3)),
    "a matrix of rows of rows": lambda x, read: linear(x, torch.zeros(3, read), torch.zeros(3)),
    "products": lambda x, read: torch.bmm(x, torch.zeros(2, read, 3)),
    "a convolution": lambda x, read: conv2d(x.transpose(1, 2)[..., None], torch.zeros(3, read, 1, 1)),
    "a norm": lambda x, read: layer_norm(x, (read,)),
    "something beside it": lambda x, read: torch.cat([torch.zeros(2, 5, x.shape[2]), torch.zeros(2, 4, read)], 1),
}


def _said(call: Callable[[], Tensor], fake: bool) -> str:
    mode = FakeTensorMode()
    with pytest.raises(Exception) as error:
        if fake:
            with mode:
                call()
        else:
            call()
    return str(error.value)


@IN_MODES
@pytest.mark.parametrize("reader", READERS)
def test_both_widths_are_read_off_an_error(reader: str, fake: bool) -> None:
    said = _said(lambda: READERS[reader](torch.zeros(2, 4, 24), 6), fake)
    assert widths_told(said) == (24, 6), said


@IN_MODES
def test_both_lengths_are_read_off_an_error(fake: bool) -> None:
    said = _said(lambda: torch.zeros(2, 9, 3) + torch.zeros(1, 7, 3), fake)
    told = _lengths_told(said)
    assert told is not None and {*told} == {7, 9}, said
    assert widths_told(said) is None


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_how_many_places_a_mask_has_is_read_off_an_error(device: str) -> None:
    said = _said(lambda: torch.zeros(2, 9, 3, device=device)[torch.ones(2, 7, dtype=torch.bool)], fake=False)
    assert _lengths_told(said) == (7, 9), said


class Hiding(PreTrainedModel):
    """Reads what is not hidden, and asks to be told in words that do not name the argument."""

    config_class = PretrainedConfig
    main_input_name = "pixel_values"

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        self.read = nn.Linear(3, 4)
        self.post_init()

    def forward(self, pixel_values: Tensor, hidden: Tensor | None = None, seen: Tensor | None = None) -> Tensor:
        """Args:
        hidden (`torch.BoolTensor` of shape `(batch_size, 5)`): what is not read.
        seen (`torch.BoolTensor` of shape `(batch_size, 5)`): nothing asks for it.
        """
        if hidden is None:
            raise ValueError("nothing is hidden")
        return self.read(pixel_values[~hidden].view(len(hidden), -1, 3))  # type: ignore[no-any-return]


def test_what_a_condition_asks_for_before_it_raises_is_given() -> None:
    model, call = Hiding(PretrainedConfig()), Mode("", Example({"pixel_values": torch.zeros(2, 9, 3)}, {}))
    error = error_of(model, call.example)
    assert error is not None
    once = [*mended(model, call, error)]
    assert all(mode.example.arguments.keys() == {"pixel_values", "hidden"} for mode in once) and once
    error = error_of(model, once[0].example)
    assert error is not None
    (again,) = mended(model, once[0], error)
    hidden = again.example.arguments["hidden"]
    assert hidden.shape == (2, 9) and 0 < hidden.sum() < 18
    assert error_of(model, again.example) is None


def test_the_patches_that_a_model_has_to_fill_in_are_marked() -> None:
    config = VideoMAEConfig(image_size=8, patch_size=4, num_frames=4, hidden_size=8, num_hidden_layers=1,
                            num_attention_heads=2, intermediate_size=12, decoder_hidden_size=8,
                            decoder_num_hidden_layers=1, decoder_num_attention_heads=2, decoder_intermediate_size=12,
                            architectures=["VideoMAEForPreTraining"])  # fmt: skip
    marked = trace(config).example.arguments["bool_masked_pos"]
    assert marked.shape[1] == 8 and marked.any() and not marked.all()
