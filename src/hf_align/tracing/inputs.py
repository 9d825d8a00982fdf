"""Example arguments of `forward`: what an architecture reads, by the names of its arguments and its config's sizes.

Which arguments a model wants together, and in which shape, is written nowhere. So there are candidates, likely ones
first, and the first that the model can be traced with is taken.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from hf_align.tracing.example import Example
from hf_align.tracing.fields import parts
from hf_align.tracing.modules import ModuleModel
from hf_align.tracing.series import series
from hf_align.tracing.tokens import end_of_text, sound_tokens, text_tokens

_CHOICES = 3
"""Texts of one question, for a head that chooses among them."""


@dataclass(frozen=True)
class Reader:
    """What candidates are built from.

    Attributes:
        first: what the first linear layer reads; zero where there is none.
        sides: of images, as modules note them.
    """

    config: PretrainedConfig
    parameters: frozenset[str]
    batch: int
    length: int
    first: int = 0
    sides: tuple[int, ...] = ()

    def field(self, *names: str, default: Any = None) -> Any:
        """The first of some config fields that is set, in the config or its parts."""
        for config in parts(self.config):
            for name in names:
                if getattr(config, name, None) is not None:
                    return getattr(config, name)
        return default

    def number(self, *names: str, default: int) -> int:
        value = self.field(*names, default=default)
        return value if isinstance(value, int) else default

    def floats(self, *shape: int) -> Tensor:
        return torch.zeros(self.batch, *shape)

    def ids(self, length: int) -> Tensor:
        """Distinct neighbours, and the largest id last, where some models look for the end of the text."""
        allowed = text_tokens(self.config)
        row = allowed[torch.arange(length) % len(allowed)]
        return row.expand(self.batch, length).contiguous()


def examples(model: PreTrainedModel, batch: int, length: int) -> Iterator[Example]:
    """Candidate arguments, likely ones first; in the end, texts that a token ends which stands nowhere else in them.

    Where none of them has all that `forward` asks for, they lack one argument: the error of a call tells which.

    Args:
        batch, length: token ids are [batch, length] (or shorter, where the config has fewer positions).
    """
    if isinstance(model, ModuleModel):
        yield from model.examples(batch)
        return
    end, texts = end_of_text(model.config), list[Example]()
    for example in _examples(model, batch, length):
        yield example
        if example.tokens and not any(map(Tensor.is_floating_point, example.arguments.values())):
            texts.append(example)
    if end is not None:
        yield from (text.ended_by(end, text.tokens.keys()) for text in texts)


def _examples(model: PreTrainedModel, batch: int, length: int) -> Iterator[Example]:
    signature = inspect.signature(model.forward).parameters
    needed = {n for n, p in signature.items() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD}
    positions = [getattr(c, n, None) for c in parts(model.config) for n in ("max_position_embeddings", "n_positions")]
    length = min([length, *(p for p in positions if isinstance(p, int) and p > 2)])
    read = reader(model, batch, length)
    allowed = text_tokens(model.config)
    main = getattr(model, "main_input_name", "input_ids")
    likely = _candidates(read, main if isinstance(main, str) else main[0])
    by_lack: dict[int, list[dict[str, Tensor]]] = {0: [], 1: []}
    for arguments in likely:
        if arguments and arguments.keys() <= read.parameters:
            by_lack.setdefault(len(needed - arguments.keys()), []).append(arguments)
    for arguments in by_lack[0] or by_lack[1]:
        names = [n for n, t in arguments.items() if n.endswith(("input_ids", "inputs")) and not t.is_floating_point()]
        of_one = max([1, *(len(arguments[name]) // batch for name in names)])
        sounds = {name: sound_tokens(model.config) for name in names if arguments[name].dim() > 2}
        tokens = {name: sounds.get(name, allowed) for name in names}
        ids = {name: kind[arguments[name] % len(kind)] for name, kind in sounds.items()}
        yield Example({**arguments, **ids}, tokens, of_one, _choices(arguments))


def _choices(arguments: dict[str, Tensor]) -> int:
    """How many texts a head is to choose among, of which candidates give the same one each time."""
    ids = arguments.get("input_ids")
    return ids.shape[1] if ids is not None and ids.dim() > 2 and bool((ids == ids[:, :1]).all()) else 1


def reader(model: PreTrainedModel, batch: int, length: int) -> Reader:
    """What arguments of `forward` are built from."""
    modules = [*model.modules()]
    first = next((m.in_features for m in modules if isinstance(m, torch.nn.Linear)), 0)
    noted = [getattr(m, name, None) for m in modules for name in ("img_size", "image_size")]
    sides = dict.fromkeys(side for size in noted if isinstance(side := _one(size), int))
    return Reader(model.config, frozenset(inspect.signature(model.forward).parameters), batch, length, first,
                  tuple(sides))  # fmt: skip


def _one(size: Any) -> Any:
    return size[0] if isinstance(size, (list, tuple)) and size else size


def media(model: PreTrainedModel, length: int = 7) -> Iterator[tuple[str, int, dict[str, Tensor]]]:
    """What a model of text takes besides: the kind, the token that stands for it in a text, and candidate arguments."""
    read = reader(model, 1, length)
    for kind, (names, families) in _MEDIA.items():
        token = read.field(*names)
        if isinstance(token, int):
            named = {name.removeprefix(f"{kind}_"): name for name in read.parameters} | {n: n for n in read.parameters}
            for family in families:
                for arguments in family(replace(read, parameters=frozenset(named))):
                    plain = {n: t for n, t in arguments.items() if not n.startswith("decoder_")}
                    yield kind, token, {named.get(n, n): t for n, t in plain.items()}


def _candidates(read: Reader, main: str) -> Iterator[dict[str, Tensor]]:
    by_modality = {"input_ids": _text, "pixel_values": _images, "pixel_values_videos": _images, "input_values": _waves,
                   "input_features": _spectra}  # fmt: skip
    first = by_modality.get(main, _others)
    yield from first(read)
    for family in (_rare, _text, _images, _waves, _spectra, _others):
        if family is not first:
            yield from family(read)


def _text(read: Reader) -> Iterator[dict[str, Tensor]]:
    if "input_ids" not in read.parameters:
        return
    plain: dict[str, Tensor] = {"input_ids": read.ids(read.length)}
    if "bbox" in read.parameters:
        plain["bbox"] = torch.arange(4).clamp(max=1).expand(read.batch, read.length, 4).contiguous()
    decoder = _decoder(read, max(2, read.length - 3))
    if "image_token_id" not in vars(read.config) and "image_token_index" not in vars(read.config):
        yield from ({**plain, **image} for image in _images(read))
    yield {**plain, **decoder}
    masks = {"attention_mask": torch.ones(read.batch, read.length, dtype=torch.long)}
    yield {**plain, **decoder, **masks}
    if decoder:
        (goes_on,) = decoder.values()
        shown = torch.ones(goes_on.shape[:2], dtype=torch.long)
        yield {**plain, **decoder, **masks, "decoder_attention_mask": shown}
    yield plain
    yield from ({**plain, **image} for image in _images(read))
    types = torch.zeros(read.batch, read.length, dtype=torch.long)
    yield {**plain, "mm_token_type_ids": types}
    yield {**plain, "token_type_ids": types}
    yield from ({**plain, **sound} for sound in (*_spectra(read), *_waves(read)))
    if "pixel_values_videos" in read.parameters:
        yield from ({**plain, **video} for video in _images(read))
    yield from ({**plain, "input_ids": read.ids(longer)} for longer in (32, 64, 128))


def _rare(read: Reader) -> Iterator[dict[str, Tensor]]:
    """What few models ask for, all of it at once."""
    channels = read.number("num_channels", "in_channels", default=3)
    width = read.number("hidden_size", default=8)
    image = {"pixel_values": read.floats(channels, *_sides(read))}
    plain = {"input_ids": read.ids(read.length)}
    books = replace(read, batch=read.batch * read.number("num_codebooks", default=1))
    if books.batch > read.batch:
        yield {"input_ids": books.ids(read.length)}
        count = books.batch // read.batch
        for streams in (count, count + 1):  # of sounds, and of text beside them
            yield {"input_ids": read.ids(read.length)[..., None].expand(-1, -1, streams).contiguous()}
    seen = read.number("visual_feat_dim", default=width), read.number("visual_pos_dim", default=4)
    yield {**plain, "visual_feats": read.floats(5, seen[0]), "visual_pos": read.floats(5, seen[1])}
    yield {
        **plain,
        "pixel_values": read.floats(2, channels, *_sides(read)),
        "image_attention_mask": torch.ones(read.batch, read.length, 2, dtype=torch.long),
    }
    queries = read.number("latent_query_num", default=4)
    long = read.ids(queries + read.length)
    mask = (torch.arange(long.shape[1]) < queries).long().expand_as(long).contiguous()
    yield {**image, "input_ids": long, "image_embeds_position_mask": mask}
    asked = {**plain, "qformer_input_ids": read.ids(read.length)}
    yield {**image, **asked}
    yield {"pixel_values": read.floats(2, channels, *_sides(read)), **asked}
    yield {**image, "task_inputs": read.ids(read.number("task_seq_len", default=read.length))}
    yield {**image, "inputs_embeds": read.floats(read.length, width), "action_embeds": read.floats(4, width)}
    yield {
        "states": read.floats(4, read.number("state_dim", default=width)),
        "actions": read.floats(4, read.number("act_dim", default=width)),
        "returns_to_go": read.floats(4, 1),
        "timesteps": torch.arange(4).expand(read.batch, 4).contiguous(),
    }
    bins = read.number("input_feat_size", default=128)
    yield {"audio_mel": read.floats(64, bins), "audio_mel_mask": torch.zeros(read.batch, 64, dtype=torch.bool)}
    layers = len(read.field("target_layer_ids", default=[0]))
    yield {"noise_embeds": read.floats(4, width), "context_hidden_states": read.floats(read.length, layers * width)}
    features = read.number("feature_projection_input_dim", default=160)
    for frames in (32, 30):
        yield {"input_values": read.floats(1, 9600), "input_features": read.floats(frames, features)}
    yield {"hidden_states": read.floats(1, 9600)}


def _decoder(read: Reader, length: int) -> dict[str, Tensor]:
    """What a decoder goes on from, if there is one: words, or frames of a sound."""
    if "decoder_input_ids" in read.parameters:
        return {"decoder_input_ids": read.ids(length)}
    frames = read.floats(6, read.number("num_mel_bins", default=80))
    return {"decoder_input_values": frames} if "decoder_input_values" in read.parameters else {}


def _images(read: Reader) -> Iterator[dict[str, Tensor]]:
    if not read.parameters & {"pixel_values", "pixel_values_videos", "grid_thw"}:
        return
    channels = read.number("num_channels", "in_channels", "in_chans", "input_channels", default=3)
    height, width = _sides(read)
    frames = read.number("num_frames", "frames_per_clip", default=2)
    image = {"pixel_values": read.floats(channels, height, width)}
    video = read.floats(frames, channels, height, width)
    decoder = _decoder(read, 4)
    if "pixel_values_videos" in read.parameters:
        side = 4 * read.number("patch_size", default=16)
        yield {"pixel_values_videos": read.floats(4, channels, side, side)}
        yield {"pixel_values_videos": video}
        for side in read.sides:
            yield {"pixel_values_videos": read.floats(2, channels, side, side)}
    if "pixel_values" not in read.parameters:
        yield from _patches(read, channels)
        return
    if "num_frames" in vars(read.config):
        yield {"pixel_values": video}
    yield {**image, **decoder}
    yield image
    mask = torch.ones(read.batch, height, width, dtype=torch.long)
    yield {**image, "pixel_mask": mask}
    halves = ("pixel_values", "prompt_pixel_values", "prompt_masks")
    yield {name: read.floats(channels, height // 2, width) for name in halves}
    yield {"pixel_values": video}
    crops = {"pixel_values": read.floats(2, channels, height, width)}
    yield crops
    if "image_attention_mask" in read.parameters:
        places = [side // read.number("patch_size", default=14) for side in (height, width)]
        sizes = torch.tensor([height, width]).expand(read.batch, 2).contiguous()
        yield {**crops, "image_sizes": sizes, "image_attention_mask": torch.ones(read.batch, 2, *places).long()}
    yield from _patches(read, channels)
    for side in dict.fromkeys((*read.sides, 32, 64, 224)):
        if side > height or side in read.sides:
            yield {"pixel_values": read.floats(channels, side, side)}


def _sides(read: Reader) -> tuple[int, int]:
    side = read.field("image_size", "img_size", "input_image_size", "max_img_size", "input_size", default=64)
    if isinstance(side, dict):
        side = (side.get("height", 64), side.get("width", 64))
    if isinstance(side, (list, tuple)):
        return int(side[0]), int(side[-1])
    return int(side), int(side)


def _patches(read: Reader, channels: int) -> Iterator[dict[str, Tensor]]:
    """Images already cut into patches, as towers of any resolution want them."""
    patch = read.number("patch_size", default=14)
    frames = read.number("temporal_patch_size", "patch_temporal", default=1)
    grid = torch.tensor([[1, 4, 4]])
    for name in ("grid_thw", "image_grid_thw", "image_grid_hws"):
        for size in (channels * frames * patch * patch, channels * patch * patch):
            for main in ("pixel_values", "hidden_states"):
                yield {main: torch.zeros(16, size), name: grid}
        yield {"pixel_values": torch.zeros(16, channels, patch, patch), name: grid}
        flat = torch.zeros(16, channels * patch * patch)
        yield {"pixel_values": flat, name: grid, "merge_sizes": torch.tensor([2])}
        merged = patch * read.number("spatial_merge_size", default=2)
        yield {"pixel_values": torch.zeros(16, merged, merged, channels), name: grid}
    yield {"pixel_values": torch.zeros(1, channels, patch, 16 * patch), "target_sizes": grid[:, 1:]}
    side = 2 * read.number("pooling_kernel_size", default=2)
    places = torch.cartesian_prod(torch.arange(side), torch.arange(side)).expand(read.batch, side * side, 2)
    yield {
        "pixel_values": read.floats(side * side, channels * patch * patch),
        "pixel_position_ids": places.contiguous(),
    }
    count = read.number("num_patches", default=16)
    rows = torch.tensor([[4, count // 4]]).expand(read.batch, 2).contiguous()
    flat = read.floats(count, channels * patch * patch)
    mask = torch.ones(read.batch, count, dtype=torch.long)
    for name in ("pixel_attention_mask", "attention_mask"):
        yield {"pixel_values": flat, name: mask, "spatial_shapes": rows}


def _videos(read: Reader) -> Iterator[dict[str, Tensor]]:
    for arguments in _with_layouts_first(_images(read)):
        yield {n if "videos" in n else n.replace("pixel_values", "pixel_values_videos").replace("image_grid",
               "video_grid"): t for n, t in arguments.items()}  # fmt: skip


def _pictures(read: Reader) -> Iterator[dict[str, Tensor]]:
    return (arguments for arguments in _with_layouts_first(_images(read)) if "pixel_values_videos" not in arguments)


def _with_layouts_first(candidates: Iterable[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """A model that takes the grid of an image's patches answers nothing else, nor one that takes what else says where
    they lie."""
    return sorted(candidates, key=lambda arguments: (not any("grid" in name for name in arguments), -len(arguments)))


def _waves(read: Reader) -> Iterator[dict[str, Tensor]]:
    if "input_values" not in read.parameters:
        return
    bins = read.number("num_mel_bins", default=80)
    channels = read.number("audio_channels", "n_channels", default=1)
    frames = read.number("max_length", default=64)
    decoder = _decoder(read, 4)
    token = read.number("samples_per_token", default=96)
    for shape in (
        (2000,),
        (channels, 400),
        (channels, 2000),
        (frames, bins),
        (4000,),
        (1, 9600),
        (channels, 4000),
        (20 * token,),
    ):
        yield {"input_values": read.floats(*shape), **decoder}
    if "input_ids" in read.parameters:
        yield {"input_ids": read.ids(read.length), "input_values": read.floats(2000)}
    if "pixel_values_videos" in read.parameters:
        for video in _images(read):
            yield {"input_values": read.floats(channels, 2000), **video}


def _spectra(read: Reader) -> Iterator[dict[str, Tensor]]:
    if "input_features" not in read.parameters:
        return
    bins = read.number("num_mel_bins", "input_feat_per_channel", "feature_projection_input_dim", "input_dim",
                       "mel_bins", "n_mels", default=80)  # fmt: skip
    features = read.number("feature_projection_input_dim", "conformer_input_dim", "input_size", "feature_size",
                           default=160)  # fmt: skip
    frames = read.number("max_source_positions", default=32)
    decoder = _decoder(read, 4)
    window = 2 * read.number("n_window", default=50)
    shapes = ((bins, 2 * frames), (64, bins), (bins, 64), (64, features), (1, 1001, 64), (4, 1001, 64), (64, 128),
              (bins, 8 * read.length), (bins, window), (64, read.first))  # fmt: skip
    for shape in shapes:
        example = {"input_features": read.floats(*shape), **decoder}
        yield example
        for name in ("input_features_mask", "attention_mask", "feature_attention_mask"):
            if len(shape) == 2:
                for side in shape:
                    yield {**example, name: torch.ones(read.batch, side, dtype=torch.long)}


def _others(read: Reader) -> Iterator[dict[str, Tensor]]:
    if "past_values" in read.parameters:
        yield from series(read)
    codebooks = read.number("num_codebooks", default=4)
    width = read.number("hidden_size", "d_model", "embed_dim", default=8)
    other = read.number("encoder_hidden_size", default=width)
    yield {"audio_codes": torch.zeros(read.batch, codebooks, read.length, dtype=torch.long)}
    yield {"query_embeds": read.floats(4, width), "encoder_hidden_states": read.floats(read.length, other)}
    yield {"inputs": read.ids(read.length)}
    yield {"inputs": read.floats(read.length, width)}
    names = ("inputs_embeds", "hidden_states", "input_embeds", "latent_states", "spectrogram", "image_features", "x",
             "vision_embeds", "audio_features", "encoder_hidden_states", "latents")  # fmt: skip
    for name in names:
        for size in dict.fromkeys((width, read.number("model_in_dim", "num_mel_bins", default=width), read.first)):
            yield {name: read.floats(read.length, size)}
            yield {name: read.floats(size, read.length)}
    yield {"input_ids": read.ids(read.length)[:, None].expand(-1, _CHOICES, -1).contiguous()}


_MEDIA: dict[str, tuple[tuple[str, ...], tuple[Callable[[Reader], Iterator[dict[str, Tensor]]], ...]]] = {
    "image": (("image_token_id", "image_token_index", "img_token_id"), (_pictures,)),
    "video": (("video_token_id", "video_token_index"), (_videos,)),
    "audio": (("audio_token_id", "audio_token_index"), (_spectra, _waves)),
}
"""For what may stand in a text: the config fields that name its token, and who makes arguments of it."""
