# SPDX-License-Identifier: Apache-2.0
"""The teacher of a run (`digen.loss.teacher`): policy `teacher`, a copy of the trained adapter that holds another one.

That adapter must have the layers and the rank of the one that trains; its alpha may differ. peft adds scale * B @ A to
a layer's weight, so B is multiplied by the ratio of both scales. Checkpoints do not have the copy: each start reads it.

Invariant (tests/engine/test_teacher.py): the policy is the base with the teacher's adapter merged into it.
"""

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from peft import LoraConfig, PeftConfig
from peft.tuners.lora import LoraLayer
from peft.utils import CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from verl.utils.device import get_device_id

from verl_digen.algorithms.objectives.objective import TEACHER
from verl_digen.engine.copies import PolicyCopies
from verl_digen.engine.export import ADAPTER
from verl_digen.models.locate import read_object
from verl_digen.models.lora_file import peft_scale
from verl_digen.require import refusing, require

KEY = "digen.loss.teacher"

Shapes = Mapping[str, tuple[int, ...]]
"""Tensor of an adapter by its name in peft's files -> its shape."""


def adapter_shapes(module: nn.Module) -> Shapes:
    """Shapes of the adapter that trains."""
    return {_saved_name(name): tuple(value.shape) for name, value in module.named_parameters() if value.requires_grad}


def check_teacher_files(path: str, own: Shapes) -> LoraConfig:
    """Require an adapter with the tensors of the one that trains, `own`, and return peft's settings of it; reads
    headers alone. ValueError for a broken rule."""
    config, file = _read_config(Path(path).expanduser()), Path(path).expanduser() / SAFETENSORS_WEIGHTS_NAME
    refuses = refusing(f"{KEY} must hold whole safetensors", str(file), "copy or download it again")
    with refuses, safe_open(file, framework="pt") as opened:
        names = list(opened.keys())
        found = {name: tuple(opened.get_slice(name).get_shape()) for name in names}
    unlike = sorted(name for name in own.keys() | found.keys() if own.get(name) != found.get(name))
    if unlike:
        of_file, of_run = (list(shapes.get(unlike[0], ())) or "nothing" for shapes in (found, own))
        layers = config.target_modules
        targets = layers if isinstance(layers, str) else sorted(layers or ())
        raise ValueError(
            f"{KEY} must hold an adapter of the checkpoint, the layers and the rank that train, {len(own)} tensors, "
            f"got {len(found)} in {path!r}, of which {len(unlike)} differ, e.g. {unlike[0]}: {of_file} in place of "
            f"{of_run}; train an adapter like it (actor_rollout_ref.model.lora_rank={config.r} "
            f"actor_rollout_ref.model.target_modules={targets}), or choose another teacher"
        )
    return config


@torch.no_grad()
def load_teacher(copies: PolicyCopies, module: nn.Module, path: str) -> None:
    """Add policy `teacher`, the adapter in a folder, to the copies of the adapter of `module`. Each rank reads the file
    by itself, one tensor at a time. ValueError as for `check_teacher_files`."""
    config, live = check_teacher_files(path, adapter_shapes(module)), dict(module.named_parameters())
    copies.keep(TEACHER)
    with safe_open(Path(path).expanduser() / SAFETENSORS_WEIGHTS_NAME, framework="pt") as file:
        for name, shard in copies[TEACHER].shards.items():
            value = file.get_tensor(_saved_name(name)).float()
            layer, *is_up = re.split(r"\.lora_(?:embedding_)?B\.", name)
            if is_up:
                own = module.get_submodule(layer)
                assert isinstance(own, LoraLayer)
                value *= peft_scale(config, layer, own.r[ADAPTER]) / own.scaling[ADAPTER]
            shard.copy_(_own_shard(value, live[name]))


def _read_config(folder: Path) -> LoraConfig:
    for name in (CONFIG_NAME, SAFETENSORS_WEIGHTS_NAME):
        require(
            (folder / name).is_file(),
            f"{KEY} must be a folder with peft's {CONFIG_NAME} and {SAFETENSORS_WEIGHTS_NAME} on this machine",
            str(folder),
            "give the folder that `digen export RUN --format peft` writes",
        )
    read_object(folder / CONFIG_NAME, KEY)
    config = PeftConfig.from_pretrained(str(folder))
    require(isinstance(config, LoraConfig), f"{KEY} must hold a LoRA adapter", config.peft_type, "choose another one")
    assert isinstance(config, LoraConfig)
    return config


def _saved_name(name: str) -> str:
    """Name of a parameter of the adapter in peft's files, which leave out `.weight` of DoRA's magnitudes."""
    return name.replace(f".{ADAPTER}", "").replace("lora_magnitude_vector.weight", "lora_magnitude_vector")


def _own_shard(value: Tensor, live: Tensor) -> Tensor:
    """This rank's shard of a tensor that is distributed as `live`."""
    if not isinstance(live, DTensor):
        return value
    whole = value.to(get_device_id())
    return distribute_tensor(whole, live.device_mesh, live.placements, src_data_rank=None).to_local()
