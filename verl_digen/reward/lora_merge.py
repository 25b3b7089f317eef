# SPDX-License-Identifier: Apache-2.0
"""Merge the LoRA factors of a state dict that PEFT wrote: W + (alpha / r) B A, or alpha / sqrt(r) with rslora.

Example:
    merged({"base_model.model.q.base_layer.weight": W, "base_model.model.q.lora_A.default.weight": A,
            "base_model.model.q.lora_B.default.weight": B}, alpha=16, rank=8)  # {"q.weight": W + 2 B A}
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from torch import Tensor

PREFIX = "base_model.model."
FACTORS = (".lora_A.default.weight", ".lora_B.default.weight")


def merged(weights: Mapping[str, Tensor], *, alpha: float, rank: int, rslora: bool = False) -> dict[str, Tensor]:
    """The plain state dict; one without factors is returned as it is.

    Raises:
        ValueError: a factor without its counterpart, with another rank, or of a kind that is not a linear layer's.
    """
    scale = alpha / (math.sqrt(rank) if rslora else rank)
    plain: dict[str, Tensor] = {}
    for name, weight in weights.items():
        own = name.removeprefix(PREFIX)
        if own.endswith(FACTORS) or ".original_module." in own:
            continue
        if ".lora_" in own:
            raise ValueError(f"LoRA weights must be those of linear layers, got {name}; merge the checkpoint with PEFT")
        plain[own.replace(".base_layer.", ".").replace(".modules_to_save.default.", ".")] = weight
    for name, down in weights.items():
        if name.endswith(FACTORS[0]):
            layer = name.removesuffix(FACTORS[0])
            up, target = weights.get(layer + FACTORS[1]), f"{layer.removeprefix(PREFIX)}.weight"
            if up is None or target not in plain or down.shape[0] != rank:
                raise ValueError(
                    f"LoRA factors must come in pairs of rank {rank} with the weight they change, got {name} "
                    f"{tuple(down.shape)}; check the checkpoint's lora_r"
                )
            base = plain[target]
            plain[target] = (base.float() + scale * (up.float() @ down.float())).to(base.dtype)
    return plain
