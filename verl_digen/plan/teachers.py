# SPDX-License-Identifier: Apache-2.0
"""Weights that teachers exchange with the student's."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from verl_digen.algorithms.objectives.teacher import KEY
from verl_digen.config import DigenConfig
from verl_digen.models.base import DiffusionModel
from verl_digen.models.teacher_files import read_teacher
from verl_digen.plan.policies import teachers


def teacher_bytes(digen: DigenConfig, model: DiffusionModel, network: nn.Module, *, is_lora: bool) -> dict[str, int]:
    """Teacher -> bytes of the weights that it exchanges, in their dtypes: all, or of a LoRA adapter for a student that
    trains one the weights of its layers. A folder that is not here counts as all.

    Args:
        network: the student's, without adapter and without weights.
    """
    sizes = {name: value.nbytes for name, value in network.named_parameters()}
    found = {}
    for name, teacher in teachers(digen).items():
        exchanged = list(sizes)
        if is_lora and Path(teacher.path).expanduser().is_dir():
            files = read_teacher(teacher.path, f"{KEY}.{name}.path", model.experts)
            exchanged = list(files.changed(sizes))
        found[name] = sum(sizes[one] for one in exchanged)
    return found
