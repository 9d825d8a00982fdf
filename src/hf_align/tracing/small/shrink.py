"""A small copy of an architecture: the same config class with tiny sizes, for the certificate.

Configs name their sizes in a few dozen ways. What a field means is read off its name and its kind of value here, and
nowhere else: nothing that is derived depends on it, a field that is not known just keeps its size.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields as dataclass_fields
from dataclasses import is_dataclass
from typing import Any

from transformers import PretrainedConfig

from hf_align.tracing.build import quiet
from hf_align.tracing.small.field_roles import (
    AT_MOST,
    DERIVED,
    KINDS_OF_LAYERS,
    KV_HEADS,
    LAYERS,
    NEEDED_BY,
    PER_STAGE,
    ROLE,
    TINY,
    Sizes,
)

_NUMBER_OF_A_LAYER = re.compile(r"layer_(id|idx|index)$")


def shrink(config: PretrainedConfig, layers: int = 2, sizes: Sizes = TINY) -> PretrainedConfig:
    """The config with tiny sizes; two layers suffice, for layers repeat.

    Ratios that matter are kept: grouped queries stay grouped, partial rotary stays partial, one layer of each kind
    stays.
    """
    return with_fields(config, small_fields(config, layers, sizes))


def depth_of(config: PretrainedConfig) -> int:
    """The most layers that a part of the config has."""
    groups = nested(config.to_dict())
    return max([2, *(v for g in groups for k, v in g.items() if k in LAYERS and type(v) is int)])


def shallow(config: PretrainedConfig) -> PretrainedConfig:
    """The config with its own sizes and two layers."""
    return with_fields(config, shallow_fields(config, 2))


def small_fields(config: PretrainedConfig, layers: int, sizes: Sizes) -> dict[str, Any]:
    """What `shrink` sets, whether or not the config class accepts it."""
    before = config.to_dict()
    fields = _small(before, config, layers, sizes)
    _fit_grids(fields, before)
    keep_tokens_inside(fields, sizes.vocabulary)
    return fields


def with_all_stages(config: PretrainedConfig, fields: dict[str, Any]) -> dict[str, Any]:
    """With as many stages of a backbone as the config has, and all that it hands on: what reads them may count on it.

    They are made of one block and two heads each.
    """
    kept = dict(fields)
    for key, value in vars(config).items():
        if isinstance(value, PretrainedConfig) and isinstance(fields.get(key), dict):
            kept[key] = with_all_stages(value, fields[key])
    handed_on, depths = getattr(config, "out_features", None), vars(config).get("depths")
    if handed_on and isinstance(depths, (list, tuple)):
        lists = {k: v for k, v in vars(config).items() if isinstance(v, (list, tuple)) and len(v) == len(depths)}
        short = {k: list(v) for k, v in lists.items() if k in kept and len(_listed(kept[k])) != len(depths)}
        kept |= short | {k: [2] * len(depths) for k in lists if "heads" in k}
        kept |= {"depths": [1] * len(depths), "out_features": list(handed_on)}
    return kept


def declared_fields(config: PretrainedConfig, fields: dict[str, Any]) -> dict[str, Any]:
    """Without what a config class computes from its other fields: what it does not declare."""
    if not is_dataclass(config):
        return fields
    names = {f.name for f in dataclass_fields(config)} | {*(config.attribute_map or ()), "architectures", "model_type"}
    kept = {key: value for key, value in fields.items() if key in names}
    for key, value in kept.items():
        part = vars(config).get(key)
        if isinstance(value, dict) and isinstance(part, PretrainedConfig):
            kept[key] = declared_fields(part, value)
    return kept


def shallow_fields(config: PretrainedConfig, layers: int) -> dict[str, Any]:
    """What `shallow` sets."""
    fields = copy.deepcopy(config.to_dict())
    _few_layers(fields, layers)
    _fill_what_is_needed(fields)
    return fields


def handing_on_all_stages(fields: dict[str, Any]) -> dict[str, Any]:
    """With all stages of a backbone handed on: a config that does not say which takes the last alone, and what reads
    them may count on more."""
    fields = copy.deepcopy(fields)
    for group in nested(fields):
        if isinstance(stages := group.get("stage_names"), (list, tuple)):
            group["out_features"] = list(stages)[1:]
            group.pop("out_indices", None)
    return fields


def with_arguments_of_parts(fields: dict[str, Any], sizes: Sizes) -> Iterator[dict[str, Any]]:
    """With small sizes for what another library builds, where the config hands on arguments to it: by the names that
    sizes have in each family of such parts."""
    families: list[dict[str, Any]] = [
        {"embed_dim": sizes.width, "depth": 2, "num_heads": sizes.heads, "img_size": sizes.image,
         "patch_size": sizes.patch},
        *({"embed_dims": [sizes.width * 2**i for i in range(stages)], "layers": [2] * stages} for stages in (4, 5)),
        {"channel_multiplier": 0.05},
    ]  # fmt: skip
    for small in families:
        changed = copy.deepcopy(fields)
        for group in nested(changed):
            if "model_args" in group:
                group["model_args"] = {**(group["model_args"] or {}), **small}
        if changed != fields:
            yield changed


def shallow_parts_fields(config: PretrainedConfig, layers: int) -> dict[str, Any]:
    """As `shallow_fields`, in every part of the config too."""
    fields = copy.deepcopy(config.to_dict())
    for group in nested(fields):
        _few_layers(group, layers)
        _fill_what_is_needed(group)
    return fields


def with_fields(config: PretrainedConfig, fields: dict[str, Any]) -> PretrainedConfig:
    """A config of the same class and architecture."""
    with quiet():
        made = type(config).from_dict(copy.deepcopy(fields))
    made.architectures = config.architectures
    return made


def _small(fields: dict[str, Any], config: PretrainedConfig, layers: int, sizes: Sizes) -> dict[str, Any]:
    fields = copy.deepcopy(fields)
    aliases = {v: k for k, v in (getattr(config, "attribute_map", None) or {}).items()}
    heads = fields.get("num_attention_heads")
    latent_attention = isinstance(fields.get("kv_lora_rank"), int)
    before = dict(fields)
    for key, value in before.items():
        if key in DERIVED:
            if value and isinstance(value, list) and isinstance(value[0], int) and key == "out_features":
                fields[key] = [sizes.width] * len(value)
            else:
                del fields[key]
            continue
        name = key if any(key in known for known in (ROLE, LAYERS, AT_MOST, KV_HEADS)) else aliases.get(key, key)
        sub = vars(config).get(key)
        if isinstance(value, dict) and isinstance(sub, PretrainedConfig):
            fields[key] = _small(value, sub, layers, sizes)
        elif isinstance(value, bool):
            continue
        elif name in KV_HEADS and isinstance(value, (int, list)):
            fewer = max(1, sizes.heads // 2)
            few = [sizes.heads if v == heads or latent_attention else fewer for v in _listed(value)]
            fields[key] = few if isinstance(value, list) else few[0]
        elif name in ROLE:
            fields[key] = _sized(value, getattr(sizes, ROLE[name]), name)
        elif name == "relative_attention_num_buckets" and "relative_attention_max_distance" not in before:
            continue
        elif name in AT_MOST and isinstance(value, int) and (sizes.kinds_come_soon or name not in KINDS_OF_LAYERS):
            fields[key] = min(value, AT_MOST[name])
        elif name in PER_STAGE and isinstance(value, (list, tuple)):
            fields[key] = [sizes.blocks if name == "depths" else sizes.width * (i + 1) for i in range(len(value))]
        elif name in ("partial_rotary_factor", "rotary_pct") and isinstance(value, float):
            fields[key] = 1.0 if value == 1.0 else 0.5
        elif name == "rotary_dim" and isinstance(value, int):
            fields[key] = sizes.head_dim // 2
    if before.get("attention_hidden_size") and before["attention_hidden_size"] == 2 * before.get("hidden_size", 0):
        fields["attention_hidden_size"] = 2 * sizes.width
    _few_layers(fields, layers, before)
    _fit_rope(fields, sizes)
    _fit_layers(fields, layers, sizes)
    _fit_states(fields, sizes)
    _fill(fields, sizes)
    if fields.get("id2label") is not None:
        fields.pop("id2label")
        fields.pop("label2id", None)
        fields["num_labels"] = sizes.labels
    return fields


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _sized(value: Any, size: int, name: str) -> Any:
    if value == 0 and name == "qk_rope_head_dim":
        return 0
    if isinstance(value, int) or (value is None and name == "n_inner"):
        return size
    if isinstance(value, (list, tuple)) and value and all(isinstance(v, int) for v in value):
        return [size] * len(value)
    return value


def _few_layers(fields: dict[str, Any], layers: int, before: Mapping[str, Any] | None = None) -> None:
    """Cut the depths, and with them every list that has an entry for each layer. A layer after which something comes
    in between stays one that others follow."""
    before = before or dict(fields)
    depths = {v for k, v in before.items() if k in LAYERS and isinstance(v, int) and not isinstance(v, bool)}
    for key, value in before.items():
        if key in LAYERS and isinstance(value, int) and not isinstance(value, bool):
            fields[key] = min(value, layers)
        elif _NUMBER_OF_A_LAYER.search(str(key)) and type(value) is int and value >= layers:
            fields[key] = max(0, layers - 2)
    for depth in depths:
        lists = {k: list(v) for k, v in fields.items() if isinstance(v, (list, tuple)) and len(v) == depth > layers}
        fields |= dict(zip(lists, _one_of_each(list(lists.values()), layers), strict=True))


def _fit_rope(fields: dict[str, Any], sizes: Sizes) -> None:
    """Rotary parameters may be nested by layer type; the sections of a head must add up to it."""
    rope = fields.get("rope_parameters", fields.get("rope_scaling"))
    if "rope_parameters" in fields and rope is None:
        fields["rope_parameters"] = rope = {"rope_type": "default", "rope_theta": 10000.0}
    if rope == {} and fields.get("layer_types"):
        rope.update({kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in fields["layer_types"]})
    for part in [rope, *rope.values()] if isinstance(rope, dict) else []:
        if isinstance(part, dict):
            if isinstance(part.get("partial_rotary_factor"), float):
                part["partial_rotary_factor"] = 1.0 if part["partial_rotary_factor"] == 1.0 else 0.5
            half = int(sizes.head_dim * part.get("partial_rotary_factor", 1.0)) // 2
            if "rope_theta" in part:  # sections have defaults of the full size in some models' code
                count = len(part.get("mrope_section", (0, 0, 0)))
                part["mrope_section"] = [half - half // 2, half // 2, *[0] * (count - 2)]
            for key in ("long_factor", "short_factor"):
                if isinstance(part.get(key), list):
                    part[key] = part[key][:half]


def _fit_layers(fields: dict[str, Any], layers: int, sizes: Sizes) -> None:
    """Layers with settings of their own: the first of them becomes the last layer."""
    for key in ("vision_feature_layer", "vision_feature_layers"):
        if isinstance(fields.get(key), list):
            fields[key] = [1, 0]
    for key in ("deepstack_visual_indexes", "intermediate_hidden_state_indices", "intermediate_layers_indices"):
        if isinstance(read_at := fields.get(key), list):
            fields[key] = list(range(layers))[-len(read_at) :]
    if isinstance(fields.get("merge_index"), int):
        fields["merge_index"] = min(fields["merge_index"], layers - 2)
    for key in ("global_attn_indexes", "fullatt_block_indexes"):  # all others see a window
        if isinstance(whole := fields.get(key), list) and any(number >= layers for number in whole):
            fields[key] = [layers - 1]
    for key in ("intermediate_hook_ids", "spatial_target_layers"):
        if isinstance(fields.get(key), list):
            fields[key] = [min(number, layers - 1) for number in fields[key]]
    if isinstance(merged := fields.get("spatial_merge_size"), int) and isinstance(fields.get("window_size"), int):
        fields["window_size"] = 2 * merged * fields.get("patch_size", 1)
    if isinstance(fields.get("downsample_rate"), int) and isinstance(fields.get("window_size"), int):
        fields |= {"downsample_rate": 2, "window_size": 4}  # some vectors of each window
    if "delay_pattern" in fields:
        fields["delay_pattern"] = fields["delay_pattern"][: AT_MOST["num_channels"]]
    if "axial_pos_embds_dim" in fields:
        fields |= {"axial_pos_shape": [4, 4], "axial_pos_embds_dim": [3, sizes.width - 3]}
    if "hybrid" in (kinds := fields.get("layers_block_type") or ()):  # its attention is shared: one is none
        fields["layers_block_type"] = [*(k for k in kinds if k != "hybrid"), "hybrid", "hybrid"]
        fields["num_hidden_layers"] = len(fields["layers_block_type"])
    special = fields.get("per_layer_config")
    if isinstance(special, dict) and special:
        first = special[min(special, key=int)]
        sized = {k: _sized(v, getattr(sizes, ROLE[k]), k) if k in ROLE else v for k, v in first.items()}
        for key in KV_HEADS & sized.keys():
            equal = first[key] == first.get("num_attention_heads")
            sized[key] = sizes.heads if equal else max(1, sizes.heads // 2)
        if "qk_nope_head_dim" in sized:
            fields["head_dim"] = sizes.plain_head_dim + sizes.head_dim
        fields["per_layer_config"] = {type(min(special, key=int))(layers - 1): sized}


def _fit_states(fields: dict[str, Any], sizes: Sizes) -> None:
    """State-space blocks: heads times their size is the expanded width."""
    expand = next((fields[k] for k in ("mamba_expand", "expand") if isinstance(fields.get(k), (int, float))), None)
    inner = fields.get("mamba_d_ssm") or (None if expand is None else int(expand * sizes.width))
    if inner is None:
        return
    if isinstance(fields.get("mamba_d_ssm"), int):
        inner = fields["mamba_d_ssm"] = 2 * sizes.width
    heads = next((k for k in ("mamba_n_heads", "mamba_num_heads", "n_mamba_heads", "num_heads") if k in fields), None)
    if heads is not None and isinstance(fields[heads], int):
        for key in ("mamba_d_head", "mamba_head_dim", "mamba_headdim", "head_dim"):
            if isinstance(fields.get(key), int) and (key != "head_dim" or heads == "num_heads"):
                fields[key] = inner // fields[heads]


def _fill(fields: dict[str, Any], sizes: Sizes) -> None:
    """Fields that have no default although the model needs them."""
    needed = {"vocab_size": sizes.vocabulary, "num_key_value_heads": max(1, sizes.heads // 2), "prediction_length": 4,
              "default_language": "en_XX", "head_dim": sizes.head_dim, "moe_intermediate_size": sizes.expert_hidden,
              "num_attention_heads": sizes.heads, "n_routed_experts": sizes.experts, "num_experts_per_tok": 2,
              "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "context_length": 8, "image_token_index": 4,
              "video_token_index": 4, "audio_token_id": 4, "image_token_id": 4, "video_token_id": 5}  # fmt: skip
    for key, value in needed.items():
        if key in fields and fields[key] is None and not (key == "head_dim" and "kv_lora_rank" in fields):
            fields[key] = value
    if "top_k_experts" in fields and "enable_moe_block" not in fields and fields.get("num_experts") is None:
        fields |= {"num_experts": sizes.experts, "top_k_experts": 2}
    _fill_what_is_needed(fields)


def _fill_what_is_needed(fields: dict[str, Any]) -> None:
    for mark, more in NEEDED_BY.items():
        if mark in fields:
            fields.update({k: v for k, v in more.items() if not fields.get(k)})


def _fit_grids(fields: dict[str, Any], before: Mapping[str, Any]) -> None:
    """The sizes that a picture may be cut from are multiples of the tower's, and stay so."""
    side, small = (next((g["image_size"] for g in nested(f) if isinstance(g.get("image_size"), int)), None)
                   for f in (before, fields))  # fmt: skip
    for key, grid in before.items() if side and small else ():
        if key.endswith("pinpoints") and isinstance(grid, list):
            fields[key] = [[n * small // side for n in size] for size in grid]
        if key.endswith("patch_to_query_dict") and isinstance(grid, dict):  # how many vectors, by how many patches
            tower = next(g for g in nested(fields) if g.keys() >= {"image_size", "patch_size"})
            fields[key] = {(tower["image_size"] // tower["patch_size"]) ** 2: 2}


def keep_tokens_inside(fields: dict[str, Any], vocabulary: int) -> None:
    """Special tokens that the vocabulary no longer has become its last ones."""
    last = vocabulary - 1
    for group in nested(fields):
        for key, value in group.items():
            if not str(key).endswith(("token_id", "token_index", "token_idx", "patch_id")):
                continue
            if isinstance(value, int) and value >= vocabulary:
                group[key] = last
                last = max(3, last - 1)
            elif isinstance(value, list) and any(isinstance(v, int) and v >= vocabulary for v in value):
                group[key] = [1]


def nested(fields: Mapping[str, Any]) -> Iterator[Any]:
    """The fields of a config, and of each config in it."""
    yield fields
    for value in fields.values():
        if isinstance(value, dict):
            yield from nested(value)


def _one_of_each(lists: list[list[Any]], layers: int) -> list[list[Any]]:
    """What some lists say of the first layer of each kind, in order, filled up from the front. Where there are more
    kinds than layers, each list has the first layers of its own kinds."""
    rows = list(zip(*lists, strict=True))
    firsts = [i for i, row in enumerate(rows) if row not in rows[:i]]
    if len(firsts) > layers and len(lists) > 1:
        return [kept for each in lists for kept in _one_of_each([each], layers)]
    chosen = firsts[:layers]
    chosen += [i for i in range(len(rows)) if i not in chosen][: layers - len(chosen)]
    return [[each[i] for i in sorted(chosen)] for each in lists]
