"""Decoders that read a picture before the text, or a text alone; no token stands for the picture."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from .tower import MLP, Attention, Block, RMSNorm, Tower, TowerConfig


class PicturedTower(Tower):
    """Behind a picture, all that is read is normalised first, which loses means."""

    patch = 4

    def more(self, config: TowerConfig) -> None:
        self.patches = nn.Linear(3 * self.patch**2, config.hidden_size)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, pixel_values: Tensor | None = None, **kwargs: Any
    ) -> CausalLMOutputWithPast:
        x = self.embed(input_ids)
        if pixel_values is not None:
            x = self.behind(x, self.patches(functional.unfold(pixel_values, self.patch, stride=self.patch).mT))
        else:
            x = self.alone(x)
        positions = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
        return CausalLMOutputWithPast(logits=self.head(self.norm(self.run(x, positions, None, None))))

    def behind(self, x: Tensor, picture: Tensor) -> Tensor:
        both = torch.cat([picture, x], 1)
        return functional.layer_norm(both, both.shape[-1:])

    def alone(self, x: Tensor) -> Tensor:
        return x


class PicturedAloneTower(PicturedTower):
    """A text alone goes through an activation."""

    def behind(self, x: Tensor, picture: Tensor) -> Tensor:
        return torch.cat([picture, x], 1)

    def alone(self, x: Tensor) -> Tensor:
        return x + torch.tanh(x)


class PicturedReader(PicturedTower):
    """It does not write, so that no text is gone on with."""

    @classmethod
    def can_generate(cls) -> bool:
        return False


class PicturedReaderTower(PicturedReader):
    """Behind a picture, all that is read is normalised first."""


class PicturedReaderAloneTower(PicturedReader, PicturedAloneTower):
    """A text alone goes through an activation."""


class Seeing(PreTrainedModel):
    """A tower that reads pictures of any size; large ones go through an activation."""

    config_class = TowerConfig
    many = 40
    main_input_name = "pixel_values"

    def __init__(self, config: TowerConfig) -> None:
        super().__init__(config)
        self.patches = nn.Conv2d(3, config.hidden_size, 4, 4)
        self.layers = nn.ModuleList(Block(config, i, Attention, MLP) for i in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size)
        self.head = nn.Linear(config.hidden_size, 5)
        self.post_init()

    def forward(self, pixel_values: Tensor, **kwargs: Any) -> CausalLMOutputWithPast:
        x = self.patches(pixel_values).flatten(2).mT
        positions = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
        x = self.large(x) if x.shape[1] > self.many else x
        for layer in self.layers:
            x = layer(x, positions, None, None)
        return CausalLMOutputWithPast(logits=self.head(self.norm(x).mean(1)))

    def large(self, x: Tensor) -> Tensor:
        return x + torch.tanh(x)


class _SeeingGrids(Seeing):
    many = 10**6

    def forward(self, pixel_values: Tensor, **more: Any) -> CausalLMOutputWithPast:
        height, width = pixel_values.shape[-2:]
        self.many = -1 if self.tells(height, width) else 10**6
        padded = functional.pad(pixel_values, (0, -width % 4, 0, -height % 4))
        return super().forward(padded)

    def tells(self, height: int, width: int) -> bool:
        raise NotImplementedError


class SeeingTall(_SeeingGrids):
    def tells(self, height: int, width: int) -> bool:
        return height > width


class SeeingWindows(_SeeingGrids):
    def tells(self, height: int, width: int) -> bool:
        return height // 4 % 3 == 0 and width // 4 % 3 == 0


class SeeingUneven(_SeeingGrids):
    def tells(self, height: int, width: int) -> bool:
        return height % 4 > 0


class SeeingMasked(Seeing):
    """Pictures that end early are bent."""

    many = 10**6

    def forward(self, pixel_values: Tensor, pixel_mask: Tensor | None = None, **more: Any) -> CausalLMOutputWithPast:
        self.many = -1 if pixel_mask is not None and not bool(pixel_mask.all()) else 10**6
        return super().forward(pixel_values)


class ToldTower(Tower):
    """It is told something beside the text; if that is long, it goes through an activation."""

    many = 50

    def more(self, config: TowerConfig) -> None:
        self.told = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, encoder_hidden_states: Tensor | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:  # fmt: skip
        x = self.embed(input_ids)
        if encoder_hidden_states is not None:
            told = self.told(encoder_hidden_states).mean(1, keepdim=True)
            x = x + (torch.tanh(told) if encoder_hidden_states.shape[1] > self.many else told)
        positions = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
        return CausalLMOutputWithPast(logits=self.head(self.norm(self.run(x, positions, None, None))))


class PlacedTower(PicturedTower):
    """One token stands for a picture, however large it is; a large one goes through an activation."""

    many = 40

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, pixel_values: Tensor | None = None, **kwargs: Any
    ) -> CausalLMOutputWithPast:
        x = self.embed(input_ids)
        if pixel_values is not None:
            seen = self.patches(functional.unfold(pixel_values, self.patch, stride=self.patch).mT)
            whole = seen.mean(1, keepdim=True)
            whole = torch.tanh(whole) if seen.shape[1] > self.many else whole
            x = torch.where(input_ids[..., None] == self.config.image_token_id, whole, x)
        positions = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
        return CausalLMOutputWithPast(logits=self.head(self.norm(self.run(x, positions, None, None))))


class PlacedUnmaskedTower(PlacedTower):
    """Beside a picture, however large, words without a mask go through an activation."""

    many = 10**6

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, pixel_values: Tensor | None = None, **kwargs: Any
    ) -> CausalLMOutputWithPast:
        self.unmasked = pixel_values is not None and attention_mask is None
        return super().forward(input_ids, attention_mask, pixel_values)

    def run(self, x: Tensor, positions: Tensor, seen: Tensor | None, cache: Any) -> Tensor:
        return super().run(x + torch.tanh(x) if self.unmasked else x, positions, seen, cache)


class PlacedSharpTower(PlacedTower):
    """A flag sends pictures, and nothing else, through an activation."""

    many = 10**6

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, pixel_values: Tensor | None = None,
        sharp: bool = False, **kwargs: Any,
    ) -> CausalLMOutputWithPast:  # fmt: skip
        self.many = 0 if sharp else 10**6
        return super().forward(input_ids, attention_mask, pixel_values)


class PlacedSharpWordTower(PlacedTower):
    """A word does; none, or an empty one, stands for another."""

    many = 10**6

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, pixel_values: Tensor | None = None,
        strategy: str | None = None, **kwargs: Any,
    ) -> CausalLMOutputWithPast:  # fmt: skip
        if pixel_values is not None:
            self.many = 0 if (strategy or "plain") == "sharp" else 10**6
        return super().forward(input_ids, attention_mask, pixel_values)


def handing_on(forward: Any) -> Any:
    """What a library wraps a method in."""

    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        return forward(self, *args, **kwargs)

    wrapped.__signature__ = inspect.signature(forward)  # type: ignore[attr-defined]
    wrapped.__doc__ = forward.__doc__
    return wrapped


class PlacedLookedUpTower(PicturedTower):
    """Which patches make up a picture says a table; what was looked up goes through an activation, and so must the
    vectors of words."""

    @handing_on
    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, pixel_values: Tensor | None = None,
        picture_places: Tensor | None = None, **kwargs: Any,
    ) -> CausalLMOutputWithPast:  # fmt: skip
        """
        picture_places (`torch.LongTensor` of shape `(num_pictures, num_places)`):
            The patches that make up a picture.
        """
        x = self.embed(input_ids)
        if pixel_values is not None:
            patches = self.patches(functional.unfold(pixel_values, self.patch, stride=self.patch).mT)
            whole = torch.tanh(self.looked_up(patches, picture_places))
            x = torch.where(input_ids[..., None] == self.config.image_token_id, whole, x)
        positions = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
        return CausalLMOutputWithPast(logits=self.head(self.norm(self.run(x, positions, None, None))))

    @handing_on
    def looked_up(self, patches: Tensor, table: Tensor, **kwargs: Any) -> Tensor:
        wanted = table >= 0
        return (patches[:, table.clamp(min=0)] * wanted[..., None]).mean((1, 2))[:, None]
