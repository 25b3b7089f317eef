# SPDX-License-Identifier: Apache-2.0
"""A LoRA in one file, as diffusers, kohya's scripts and ai-toolkit save it -> peft's settings and tensors.

The pipeline's own `lora_state_dict` converts the file. Names that it leaves as they are belong to the network's layers,
with dots or underscores. diffusers' converters drop some tensors with a warning; `check_lora_file` raises for them. The
network computes what a diffusers pipeline does that has loaded the file.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from verl_digen.models.checkpoint import diffusers_class
from verl_digen.require import first_of, refusing, require

if TYPE_CHECKING:
    from peft import LoraConfig

    from verl_digen.models.base import DiffusionModel

KEY = "actor_rollout_ref.model.lora_adapter_path"
PREFIXES = ("transformer.", "diffusion_model.", "base_model.model.", "lora_unet_", "lora_transformer_")
DOWN, UP, ALPHA = "down", "up", "alpha"
ENDINGS = {
    **{".lora_A.weight": DOWN, ".lora_down.weight": DOWN, ".lora.down.weight": DOWN},
    **{".lora_B.weight": UP, ".lora_up.weight": UP, ".lora.up.weight": UP, ".alpha": ALPHA},
}
OF_ENCODERS = ("text_encoder", "lora_te")
"""Prefixes of tensors that belong to text encoders."""


class Pair(NamedTuple):
    """The matrices of one layer, whose weight gets `scale` * up @ down."""

    down: Tensor
    up: Tensor
    scale: float


@dataclass(frozen=True)
class LoraFile:
    """A file as peft trains it on."""

    config: LoraConfig
    tensors: dict[str, Tensor]
    """By the names that peft saves them under."""


def read_lora_file(file: Path, model: DiffusionModel) -> LoraFile:
    """Convert a file for the network of `model`. ValueError if what it holds is no LoRA of this network."""
    from peft import LoraConfig

    pairs = _pairs(file, _load(file), model)
    scales = {pair.scale for pair in pairs.values()}
    if len(scales) > 1:  # into the matrices: back ends take one scale for all layers
        pairs = {layer: Pair(pair.down, pair.up * pair.scale, 1.0) for layer, pair in pairs.items()}
    scale = next(iter(scales)) if len(scales) == 1 else 1.0
    ranks = {f"^{layer}": len(pair.down) for layer, pair in pairs.items()}
    rank = Counter(ranks.values()).most_common(1)[0][0]
    others = {layer: each for layer, each in ranks.items() if each != rank}
    config = LoraConfig(
        r=rank,
        lora_alpha=_number(rank * scale),  # type: ignore[arg-type] - a float in some files
        rank_pattern=others,
        alpha_pattern={layer: _number(each * scale) for layer, each in others.items()},
        target_modules="|".join(layer.replace(".", r"\.") for layer in pairs),  # a list would match endings, too
        bias="none",
    )
    tensors = {}
    for layer, pair in pairs.items():
        tensors[f"base_model.model.{layer}.lora_A.weight"] = pair.down
        tensors[f"base_model.model.{layer}.lora_B.weight"] = pair.up
    return LoraFile(config, tensors)


def check_lora_file(file: Path, model: DiffusionModel, network: nn.Module) -> None:
    """ValueError, which names some that are not, unless every tensor of a file is used in a layer of `network`."""
    tensors = _load(file)
    pairs = _pairs(file, tensors, model)
    layers = dict(network.named_modules())
    wrong = []
    for layer, pair in pairs.items():
        weight = getattr(layers.get(layer), "weight", None)
        takes = None if weight is None else tuple(weight.shape)
        if takes != (given := (len(pair.up), *pair.down.shape[1:])):
            wrong.append(f"{layer} {list(given)} ({'none there' if takes is None else f'it has {list(takes)}'})")
    require(
        not wrong,
        f"{KEY} must hold a LoRA of this {model.spec.title}, but {len(wrong)} of {len(pairs)} layers in {str(file)!r} "
        "are not layers of the network",
        first_of(wrong),
        "take a LoRA of this checkpoint",
    )
    unused = _unused(file, tensors, model)
    require(
        not unused,
        f"{KEY} must hold tensors that are all used, but diffusers' conversion leaves out {len(unused)} of "
        f"{len(tensors)} in {str(file)!r}",
        first_of(unused),
        "remove them from the file if the run may start without them, or save the LoRA as "
        f"{model.pipeline}.save_lora_weights of diffusers does",
    )


def _load(file: Path) -> dict[str, Tensor]:
    try:
        tensors = load_file(file)
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{KEY} must hold whole weight files, got {str(file)!r} with {file.stat().st_size} bytes, which is none "
            f"({error}); download it again"
        ) from error
    encoders = [name for name in tensors if name.startswith(OF_ENCODERS)]
    require(
        not encoders,
        f"{KEY} must hold a LoRA of the transformer alone, which is what trains, but {len(encoders)} of {len(tensors)} "
        f"tensors in {str(file)!r} belong to text encoders",
        first_of(encoders),
        "merge those into the checkpoint's encoders (load_lora_weights, fuse_lora(components=['text_encoder']) and "
        "save_pretrained of diffusers), and give a file without them",
    )
    return tensors


def _pairs(file: Path, tensors: Mapping[str, Tensor], model: DiffusionModel) -> dict[str, Pair]:
    """The matrices of each layer, by the layer's name in the network."""
    from diffusers.utils.state_dict_utils import convert_unet_state_dict_to_peft

    require(
        len(model.experts) == 1,
        f"{KEY} must be a peft folder for a checkpoint of {len(model.experts)} networks, of which a file names none",
        str(file),
        "train from the bare checkpoint, or save an adapter of both with peft",
    )
    pipeline = diffusers_class(model.pipeline)
    state = {name: value.clone() for name, value in tensors.items()}  # some converters scale in place
    rule = f"{KEY} must hold a LoRA that diffusers converts for {model.pipeline}"
    found = f"{file} with {len(tensors)} tensors ({first_of(list(tensors))})"
    with refusing(rule, found, "take a LoRA of this checkpoint"):
        if hasattr(pipeline, "lora_state_dict"):
            state, *alphas, _ = pipeline.lora_state_dict(state, return_alphas=True, return_lora_metadata=True)
            state |= (alphas[0] or {}) if alphas else {}
        state = convert_unet_state_dict_to_peft(state)
    parts: dict[str, dict[str, Tensor]] = {}
    unknown, flat = [], {}
    for name, value in state.items():
        layer, role = _split(name)
        prefix = next((prefix for prefix in PREFIXES if name.startswith(prefix)), "")
        layer = layer.removeprefix(prefix)
        if prefix != PREFIXES[0]:
            modules = flat or model.load_structure(torch.float32).named_modules()
            flat = flat or {module.replace(".", "_"): module for module, _ in modules}
            layer = flat.get(layer.replace(".", "_"), layer)
        if role is None:
            unknown.append(name)
        else:
            parts.setdefault(layer, {})[role] = value
    unknown += [layer for layer, found in parts.items() if not {DOWN, UP} <= found.keys()]
    require(
        not unknown and bool(parts),
        f"{KEY} must hold pairs of matrices (lora_A and lora_B, or lora_down and lora_up), but {len(unknown)} of "
        f"{len(state)} names in {str(file)!r} are of none",
        first_of(unknown),
        "take a LoRA of this checkpoint; LoKr, LoHa and DoRA are others",
    )
    saved = _saved_config(file)
    return {
        layer: Pair(found[DOWN], found[UP], _scale(layer, len(found[DOWN]), found.get(ALPHA), saved))
        for layer, found in parts.items()
    }


def _saved_config(file: Path) -> LoraConfig | None:
    """peft's settings in a file's header, where diffusers keeps them, or beside a file of its own."""
    from peft import LoraConfig
    from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME

    if file.name == SAFETENSORS_WEIGHTS_NAME and (file.parent / CONFIG_NAME).is_file():
        return cast("LoraConfig", LoraConfig.from_pretrained(str(file.parent)))
    with safe_open(file, framework="pt") as opened:
        header = json.loads((opened.metadata() or {}).get("lora_adapter_metadata", "{}"))
    own = {name.removeprefix(PREFIXES[0]): value for name, value in header.items() if name.startswith(PREFIXES[0])}
    return LoraConfig(**own) if own else None


def _scale(layer: str, rank: int, alpha: Tensor | None, saved: LoraConfig | None) -> float:
    """Factor of up @ down: by the file's alpha, else by its header, else 1."""
    if alpha is not None:
        return float(alpha) / rank
    return 1.0 if saved is None else peft_scale(saved, layer, rank)


def peft_scale(config: LoraConfig, layer: str, rank: int) -> float:
    """Factor by which peft multiplies up @ down of a layer."""
    from peft.utils.other import get_pattern_key

    alphas = config.alpha_pattern or {}
    alpha = alphas.get(get_pattern_key(list(alphas), layer), config.lora_alpha)
    return alpha / (math.sqrt(rank) if config.use_rslora else rank)


def _unused(file: Path, tensors: Mapping[str, Tensor], model: DiffusionModel) -> list[str]:
    """Names of tensors that make no difference to the result: a file of the same names and shapes is converted, whose
    values tell where they came from. Each matrix is filled with a number of its own, which then shows in the result.
    With alphas that are not a number, so are the layers that an alpha scales."""
    numbers = {name: float(number) for number, name in enumerate(tensors, 1)}
    stems: dict[str, dict[str, str]] = {}
    for name in tensors:
        stem, role = _split(name)
        stems.setdefault(stem, {})[role or name] = name
    ranks = {found[ALPHA]: len(tensors[found[DOWN]]) for found in stems.values() if {ALPHA, DOWN} <= found.keys()}

    def values_of(given: Mapping[str, float]) -> dict[str, set[float]]:
        """Layer -> numbers in its matrices; not a number if its scale is none."""
        filled = {name: torch.tensor(float(given[name])).expand(value.shape) for name, value in tensors.items()}
        pairs = _pairs(file, filled, model)
        return {layer: {*_values(down), *_values(up * (0 * scale + 1))} for layer, (down, up, scale) in pairs.items()}

    used = values_of(numbers | ranks)
    poisoned = values_of(numbers | dict.fromkeys(ranks, math.nan))
    scaled = set().union(*(used[layer] for layer, found in poisoned.items() if any(map(math.isnan, found))))
    shown = set().union(*used.values())
    unused = []
    for found in stems.values():
        for role, name in found.items():
            is_used = scaled & {numbers[one] for one in found.values()} if role == ALPHA else numbers[name] in shown
            if not is_used and tensors[name].count_nonzero():
                unused.append(name)
    return unused


def _values(matrix: Tensor) -> list[float]:
    """Values of the first row and of the first column: converters cut matrices and join them."""
    rows = matrix.flatten(1)
    return torch.cat([rows[0], rows[:, 0]]).unique().tolist()


def _split(name: str) -> tuple[str, str | None]:
    """Name of a tensor -> (name of its layer, its role in there); None for what is no part of a LoRA."""
    ending = next((ending for ending in ENDINGS if name.endswith(ending)), "")
    return name.removesuffix(ending), ENDINGS.get(ending)


def _number(value: float) -> int | float:
    return int(value) if value == int(value) else value
