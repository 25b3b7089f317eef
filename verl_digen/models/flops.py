# SPDX-License-Identifier: Apache-2.0
"""Floating-point operations of a forward and of training, from the shapes of a network's own layers.

A linear layer or patch embedding of W weights costs 2 W per token it sees, attention of width d between Lq queries and
Lk keys 4 Lq Lk d. Networks differ in the tokens that a layer sees: `ModelSpec.flops`. Norms, activations, rotary
embeddings and padding to the longest row are left out: well below 2 %.

Backward costs a linear layer 2 W per token for its input's gradient, and 2 W for its own unless it is frozen. Attention
costs twice its forward. Recomputation costs one forward more.

Invariants (tests/plan/test_flops.py): forwards of every model are within 1 % of the count of
`torch.utils.flop_counter.FlopCounterMode`, with and without guidance; training within 2 %.
"""

import math
import re
from dataclasses import dataclass

from torch import nn

from verl_digen.hardware.devices import PEAK_TFLOPS
from verl_digen.models.base import DiffusionModel
from verl_digen.models.checkpoint import networks_of
from verl_digen.types import Geometry


@dataclass(frozen=True)
class Flops:
    """FLOPs of one forward, by kind of layer."""

    linear: float
    attention: float
    prompt: float = 0.0
    """Share of a row alone that rows of one prompt have in common."""

    def among(self, num_rows: int) -> "Flops":
        """FLOPs of one of so many rows of a prompt in a forward."""
        own = 1 - self.prompt * (1 - 1 / num_rows)
        return Flops(self.linear * own, self.attention * own)

    @property
    def forward(self) -> float:
        """FLOPs of all layers."""
        return self.linear + self.attention

    def training(self, *, is_frozen: bool, recomputed: float) -> float:
        """FLOPs of forward, backward and recomputation: 3 forwards of a full fine-tune, 4 with recomputation; 2 to 3,
        or 3 to 4, of an adapter on weights that are frozen. `recomputed`: share of the blocks that backward recomputes;
        0.0 for a utilisation that counts only useful work."""
        backward = self.linear * (1 if is_frozen else 2) + self.attention * 2
        return self.forward * (1 + recomputed) + backward


def forward_flops(
    model: DiffusionModel,
    transformer: nn.Module,
    geometry: Geometry,
    num_prompt_tokens: int,
    *,
    num_rows: int = 1,
    is_guided: bool = False,
) -> Flops:
    """FLOPs of one forward of `num_rows`, which guidance doubles, with longest conditions of `num_prompt_tokens`, each
    row its own (`Flops.among`). `transformer` is on any device, in any wrapper (FSDP2, peft); an adapter's layers count
    too. With several experts only the first counts: a forward runs one, and all have the same size."""
    layout = model.spec.flops
    layers = {
        name.removesuffix(".base_layer"): tuple(module.weight.shape)
        for name, module in networks_of(transformer)[0].named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d | nn.Conv3d)
    }
    patch = layers[layout.patch]
    latents = model.latent_shape(geometry)
    if len(patch) > 2:  # a convolution, which may read more channels than the latents have
        num_image = math.prod(latents[1:]) // math.prod(patch[2:])
    else:
        num_image = math.prod(latents) // math.prod(patch[1:])
    num_audio = model.num_audio_tokens(geometry)
    num_picture, num_source = num_image - num_audio, model.num_source_tokens(geometry)
    num_image = _padded(num_picture + num_source, layout.multiple)
    num_text = _padded(layout.text_tokens or num_prompt_tokens, layout.multiple)
    num_vision = model.num_vision_tokens(geometry)
    tokens = {"image": num_image, "text": num_text, "vision": num_vision, "context": num_text + num_vision}
    tokens |= {"audio": num_audio, "joint": num_image + num_text + num_vision, "none": 0}
    tokens |= {"picture": num_picture, "source": num_source, "prompt": num_source + num_text + num_vision}
    tokens["row"] = model.num_timesteps(geometry)
    of_prompts = {"joint": tokens["prompt"], "image": num_source}
    of_prompts |= {name: tokens[name] for name in ("context", "source", "prompt")}
    linear = attention = shared = 0
    for name, shape in layers.items():
        stream = next((stream for pattern, stream in layout.streams if re.search(pattern, name)), "image")
        linear += 2 * math.prod(shape) * tokens[stream]
        shared += 2 * math.prod(shape) * of_prompts.get(stream, 0)
        is_fused = layout.fused is not None and name.endswith(layout.fused)
        if name.endswith("to_q") or is_fused:
            first = next(pattern for pattern, *_ in layout.attention if re.search(pattern, name))
            pairs, width = [pair for own, *pair in layout.attention if own == first], shape[1 if is_fused else 0]
            attention += 4 * width * sum(tokens[asking] * tokens[asked] for asking, asked in pairs)
            shared += 4 * width * sum(of_prompts.get(asking, 0) * tokens[asked] for asking, asked in pairs)
    branches = num_rows * (2 if is_guided else 1)
    prompt = shared / (linear + attention) if layout.shares_prompts else 0.0
    return Flops(float(linear * branches), float(attention * branches), prompt)


def _padded(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


# -- utilisation ------------------------------------------------------------------------------------------------
BOARDS_APART = re.compile(r"\b(PCIe|NVL|Laptop|Ti|D)\b", re.IGNORECASE)
"""Boards whose peak differs from their type's: the SXM module, the desktop card."""


def peak_flops(device_name: str) -> float | None:
    """Peak FLOP/s of one device, dense bf16, or None if it is not known. `device_name`: the platform's, e.g. "NVIDIA
    H100 80GB HBM3"."""
    kind = device_type(device_name)
    return None if kind is None else PEAK_TFLOPS[kind] * 1e12


def device_type(device_name: str) -> str | None:
    """Type of a device in `verl_digen.hardware.devices`, or None."""
    words = set(re.split(r"[\s_-]+", device_name.replace("RTX ", "RTX")) + device_name.split())
    found = [kind for kind in PEAK_TFLOPS if kind in words]
    is_apart = BOARDS_APART.search(device_name) is not None and "A100" not in found
    return found[0] if found and not is_apart else None


def utilisation_metrics(
    pool: str, flops: float, seconds: float, num_devices: int, device_name: str | None
) -> dict[str, float]:
    """Metrics `perf/tflops_per_device/POOL`, achieved, and if the device's peak is known `perf/mfu/POOL`: model FLOPs
    utilisation, the share of the peak that was useful work.

    `flops`: useful work, without recomputation. `seconds`: time that the pool worked; 0 gives no metrics.
    `device_name`: the platform's; None: there is no accelerator.
    """
    if seconds <= 0:
        return {}
    achieved = flops / seconds / num_devices
    metrics = {f"perf/tflops_per_device/{pool}": achieved / 1e12}
    peak = None if device_name is None else peak_flops(device_name)
    if peak is not None:
        metrics[f"perf/mfu/{pool}"] = achieved / peak
    return metrics
