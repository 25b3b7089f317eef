# SPDX-License-Identifier: Apache-2.0
"""A teacher of the tiny checkpoint for students with `harness.LORA`: its folder, and the plain module that it is."""

import os
from functools import cache
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from safetensors.torch import load_file
from torch import nn

from tests.engine.harness import LORA
from tests.engine.serial import plain_transformer

ADAPTER = LoraConfig(r=LORA["lora_rank"], lora_alpha=5, target_modules=LORA["target_modules"])
"""Another scale than the student's."""


@torch.no_grad()
def save_adapter(path: Path, folder: Path, config: LoraConfig = ADAPTER, std: float = 0.1) -> str:
    """Save an adapter of the checkpoint with random weights as peft does; returns the folder."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(12)
        module: Any = get_peft_model(plain_transformer(path), config)  # type: ignore[arg-type]
        for name, parameter in module.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=std)
    module.save_pretrained(str(folder))
    return str(folder)


@cache
def teacher_folder(path: Path) -> str:
    """Its folder beside the checkpoint's, written once by each process."""
    return save_adapter(path, path.parent / f"{path.name}_teacher_{os.getpid()}")


@cache
def plain_teacher(path: Path) -> nn.Module:
    """The checkpoint's transformer with W + alpha / r B A in place of W."""
    module, tensors = plain_transformer(path), load_file(Path(teacher_folder(path)) / SAFETENSORS_WEIGHTS_NAME)
    for name, down in tensors.items():
        if name.endswith("lora_A.weight"):
            layer = module.get_submodule(name.removeprefix("base_model.model.").removesuffix(".lora_A.weight"))
            up = tensors[name.replace("lora_A", "lora_B")]
            with torch.no_grad():
                layer.get_parameter("weight").add_(ADAPTER.lora_alpha / ADAPTER.r * (up @ down))
    return module
