# SPDX-License-Identifier: Apache-2.0
"""Teachers: frozen policies loaded from files, for distillation.

A teacher is a second set of values for the network's own weights: those in which it differs from the run's checkpoint,
as each rank's shards, exchanged with the live ones for its forwards (`verl_digen.engine.shadow`).

| student | teacher | exchanged |
| --- | --- | --- |
| all weights | network | all weights |
| all weights | LoRA adapter | all weights: those of the run's checkpoint, with the adapter merged |
| LoRA | network | the frozen weights that differ; the student's adapter is switched off |
| LoRA | LoRA adapter, any rank and layers | the frozen weights of its layers, merged; the adapter is switched off |

- Merging is in fp32, and rounded once to the dtype of the weights: under a bf16 base a LoRA teacher is as exact as
  the merged adapter of a replica.
- Each rank reads the files by itself, one parameter at a time. There is no collective.
- Teachers are not saved in checkpoints; their checksums are (`verl_digen.engine.checkpoint`).

Invariant (tests/engine/test_teachers.py): after a teacher's forwards the weights are bitwise what they were.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from verl.utils.device import get_device_id
from verl.utils.fs import copy_to_local

from verl_digen.algorithms.objectives.teacher import KEY, Teacher
from verl_digen.engine.adapter import without_adapter
from verl_digen.engine.export import is_adapter, plain_name
from verl_digen.engine.shadow import ShadowWeights, local_shard
from verl_digen.models.base import DiffusionModel
from verl_digen.models.teacher_files import TeacherFiles, read_teacher
from verl_digen.types import TrainingRows
from verl_digen.weights.checksum import Checksum, checksum


@dataclass(frozen=True)
class LoadedTeacher:
    """One teacher on this rank."""

    weights: ShadowWeights
    true_cfg_scale: float | None
    """Its guidance; None: that of the samples."""
    total: int
    """Checksum of this rank's shards of all weights that its files may change, of unchanged ones, too: the sum over
    ranks, modulo 2**64, does not depend on how they are sharded."""

    @contextmanager
    def taught(self, module: nn.Module) -> Iterator[None]:
        """Context in which forwards of `module` are the teacher's."""
        with self.weights.swapped_in(module), without_adapter(module):
            yield

    def rows(self, rows: TrainingRows) -> TrainingRows:
        """The rows with the teacher's guidance."""
        scale = self.true_cfg_scale
        return rows if scale is None else replace(rows, sampling=replace(rows.sampling, true_cfg_scale=scale))


Teachers = Mapping[str, LoadedTeacher]
"""Teachers by name."""
Checksums = dict[str, int]
"""Teacher -> checksum of weights."""


def checksums(teachers: Teachers) -> Checksums:
    """Checksum of this rank's shards of each teacher, for a checkpoint."""
    return {name: checksum(teacher.weights.shards.values()) for name, teacher in teachers.items()}


def totals(teachers: Teachers) -> Checksums:
    """Each teacher's `total`, for a checkpoint that other ranks read."""
    return {name: teacher.total for name, teacher in teachers.items()}


def check_saved(found: Checksums, saved: Checksums, folder: str) -> None:
    """Require the teachers of the run that wrote the checkpoint `folder`, if it had any.

    Args:
        found: checksums of the run's teachers.
        saved: those of the checkpoint's.

    Raises:
        ValueError: one is missing, added, or has other weights.
    """
    unlike = sorted({name for name, _ in saved.items() ^ found.items()}) if saved else []
    if unlike:
        raise ValueError(
            f"{folder} was written by a run with the teachers {', '.join(sorted(saved))}, and this run has none or "
            f"other weights for {unlike[0]}; set {KEY}.{unlike[0]}.path to what that run had, or leave a new one out"
        )


def load_teachers(
    module: nn.Module,
    model: DiffusionModel,
    teachers: Mapping[str, Teacher],
    *,
    device: str | None,
) -> dict[str, LoadedTeacher]:
    """Load teachers from their files. `module` still has the weights of the run's checkpoint.

    Args:
        device: device of the copies; None: that of the weights.

    Raises:
        ValueError: a path holds no teacher, or one of another architecture.
    """
    return {name: _load(module, model, teacher, f"{KEY}.{name}.path", device) for name, teacher in teachers.items()}


@torch.no_grad()
def _load(module: nn.Module, model: DiffusionModel, teacher: Teacher, key: str, device: str | None) -> LoadedTeacher:
    live = {plain_name(name): (name, value) for name, value in module.named_parameters() if not is_adapter(name)}
    tables = {
        plain_name(name): tuple(value.shape) for name, value in module.state_dict().items() if not is_adapter(name)
    }
    files = read_teacher(copy_to_local(os.path.expanduser(teacher.path)), key, model.experts)
    files.check(tables, key)
    trains_all = any(value.requires_grad for _, value in live.values())
    wanted = list(live) if trains_all else files.changed(live)
    weights, total = ShadowWeights(module, device, [live[name][0] for name in wanted]), Checksum()
    for name in wanted:
        own, value = live[name]
        shard = weights.shards[own]
        shard.copy_(_shard_of(files, name, value))
        total.add(shard)
        if not trains_all and torch.equal(shard, local_shard(value).to(shard.device)):
            del weights.shards[own]  # a frozen weight that both have
    return LoadedTeacher(weights, teacher.true_cfg_scale, total.value)


def _shard_of(files: TeacherFiles, name: str, value: Tensor) -> Tensor:
    """This rank's shard of the teacher's parameter, in the dtype of `value`, the live one."""
    own, given = local_shard(value), files.load(name)
    if given is None:
        return own
    if isinstance(value, DTensor):
        whole = given.to(get_device_id())
        given = distribute_tensor(whole, value.device_mesh, value.placements, src_data_rank=None).to_local()
    return (own.to(given.device).float() + given if files.adds else given).to(value.dtype)
