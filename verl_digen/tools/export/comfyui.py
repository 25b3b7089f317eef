# SPDX-License-Identifier: Apache-2.0
"""Adapters under the names that ComfyUI reads: LAYER.lora_down.weight, LAYER.lora_up.weight, LAYER.alpha.

| pipeline | LAYER | ComfyUI, `comfy/lora.py: model_lora_keys_unet` |
| --- | --- | --- |
| Qwen-Image | `diffusion_model.` + diffusers' name | its network has diffusers' names |
| Wan | `diffusion_model.` + Wan's own name, e.g. `blocks.0.self_attn.q` | its network has Wan's own names |
| Stable Diffusion 3, FLUX.1 | `transformer.` + diffusers' name | `mmdit_to_diffusers`, `flux_to_diffusers` |

Layers outside these maps, and pipelines outside this table, are refused: ComfyUI would skip them with a warning.

Invariant (tests/export/test_comfyui.py): diffusers' converters of Qwen-Image's and Wan's files give the adapter back.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor

from verl_digen.engine.export import ADAPTER, PEFT_PREFIX
from verl_digen.require import require
from verl_digen.tools.export.policy import PolicyWeights

DOWN, UP = ".lora_A.weight", ".lora_B.weight"
"""Ends of peft's names."""


@dataclass(frozen=True)
class Names:
    """Names of one pipeline's layers."""

    prefix: str
    layers: str
    """Regex of the layers that ComfyUI reads, by diffusers' names."""
    renamed: Sequence[tuple[str, str]] = ()
    """(regex, replacement), applied in turn."""


JOINT = r"attn\.(to_[qkv]|add_[qkv]_proj|to_out\.0|to_add_out)"
FEED_FORWARD = r"net\.(0\.proj|2)"
QWEN_IMAGE = Names(
    "diffusion_model.",
    rf"transformer_blocks\.\d+\.({JOINT}|(img|txt)_mlp\.{FEED_FORWARD}|(img|txt)_mod\.1)|img_in|txt_in|proj_out",
)
FLUX = Names(
    "transformer.",
    rf"transformer_blocks\.\d+\.({JOINT}|ff(_context)?\.{FEED_FORWARD}|norm1(_context)?\.linear)"
    r"|single_transformer_blocks\.\d+\.(attn\.to_[qkv]|proj_mlp|proj_out|norm\.linear)"
    r"|proj_out|x_embedder|context_embedder",
)
NAMES = {
    "FluxKontextPipeline": FLUX,
    "FluxPipeline": FLUX,
    "QwenImageEditPipeline": QWEN_IMAGE,
    "QwenImageEditPlusPipeline": QWEN_IMAGE,
    "QwenImagePipeline": QWEN_IMAGE,
    "StableDiffusion3Pipeline": Names(
        "transformer.", rf"transformer_blocks\.\d+\.({JOINT}|ff(_context)?\.{FEED_FORWARD}|norm1(_context)?\.linear)"
    ),
    "WanPipeline": Names(
        "diffusion_model.",
        rf"blocks\.\d+\.(attn[12]\.(to_[qkv]|to_out\.0)|ffn\.{FEED_FORWARD})",
        (
            (r"\.attn1\.", ".self_attn."),
            (r"\.attn2\.", ".cross_attn."),
            (r"\.to_([qkv])$", r".\1"),
            (r"\.to_out\.0$", ".o"),
            (r"\.ffn\.net\.0\.proj$", ".ffn.0"),
            (r"\.ffn\.net\.2$", ".ffn.2"),
        ),
    ),
}
"""Pipeline -> names."""


def comfyui_tensors(pipeline: str, tensors: Mapping[str, Tensor], scales: Mapping[str, float]) -> dict[str, Tensor]:
    """Tensors of one network's adapter (peft's names) under ComfyUI's; `scales`: alpha / rank by peft's layer name.
    ValueError: a layer that ComfyUI does not read, or another kind of adapter than LoRA."""
    found = {}
    for name, down in tensors.items():
        rule = "--format comfyui: an adapter must be plain LoRA"
        require(name.endswith((DOWN, UP)), rule, name, "use --format peft or merged")
        if name.endswith(UP):
            continue
        layer = name.removesuffix(DOWN)
        own = _layer_name(NAMES[pipeline], layer.removeprefix(PEFT_PREFIX))
        found[f"{own}.lora_down.weight"] = down.contiguous()
        found[f"{own}.lora_up.weight"] = tensors[layer + UP].contiguous()
        found[f"{own}.alpha"] = torch.tensor(scales[layer] * len(down))
    return found


def _layer_name(names: Names, layer: str) -> str:
    require(
        re.fullmatch(names.layers, layer) is not None,
        "--format comfyui: adapted layers must be ones that ComfyUI reads",
        layer,
        "use --format merged, or train with other actor_rollout_ref.model.target_modules",
    )
    for pattern, replacement in names.renamed:
        layer = re.sub(pattern, replacement, layer)
    return names.prefix + layer


def scales_of(weights: PolicyWeights) -> dict[str, float]:
    """Alpha / rank of each adapted layer, by its name in peft."""
    modules = weights.network.named_modules()
    return {name: layer.scaling[ADAPTER] for name, layer in modules if isinstance(layer, LoraLayer)}
