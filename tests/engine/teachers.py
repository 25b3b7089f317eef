# SPDX-License-Identifier: Apache-2.0
"""Teachers of the tiny checkpoint: folders to load them from, and the plain modules they are."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from tests.engine.serial import plain_transformer

ADAPTER = LoraConfig(r=3, lora_alpha=5, target_modules=["attn.to_v", "img_mlp.net.2", "img_in", "proj_out"])
"""Another rank than the student's, and partly other layers."""


@torch.no_grad()
def _moved(module: nn.Module, scale: float, seed: int) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)
    return module


@cache
def plain_teacher(path: Path, name: str) -> nn.Module:
    """The teacher `network`, all weights of which differ from the checkpoint's, or `adapter`, a LoRA on it."""
    if name == "network":
        return _moved(plain_transformer(path), 0.03, seed=11)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(12)
        return _moved(get_peft_model(plain_transformer(path), ADAPTER), 0.1, seed=12)  # type: ignore[arg-type]


@cache
def teacher_folder(path: Path, name: str) -> str:
    """Its folder beside the checkpoint's, written once by each process."""
    folder = path.parent / f"{path.name}_teachers_{os.getpid()}" / name
    module: Any = plain_teacher(path, name)
    module.save_pretrained(str(folder))
    return str(folder)
