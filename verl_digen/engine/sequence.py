# SPDX-License-Identifier: Apache-2.0
"""Ranks that share rows: the trainer's mesh of data-parallel groups x sequence-parallel ranks.

    rank = data-parallel number x size + sequence-parallel number        weights are sharded over all ranks

- Rows are dealt to data-parallel groups. All ranks of a group fetch the same rows, run the same tiles, have the same
  velocities and the same loss, each with the gradient that comes through its own tokens.
- FSDP2 averages gradients over all ranks, where the sum over a group is a row's gradient. So a loss is multiplied by
  the number of all ranks (`GradientTransaction`).
- What describes rows (log-probs, metrics, generated samples) is returned by the first rank of each group.
- What must be equal on all ranks (rows per tile, when gradients are reduced) is agreed among all of them, because
  gathering the weights is a collective of all.
"""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from verl.utils.device import get_device_name

from verl_digen.models.sequence import MESH_DIMS


def sequence_mesh(size: int) -> DeviceMesh:
    """This rank's group of `size` consecutive ranks, as diffusers wants it. Collective: call it on all ranks."""
    num_groups = dist.get_world_size() // size
    return init_device_mesh(get_device_name(), (num_groups, 1, size), mesh_dim_names=("dp", *MESH_DIMS))[MESH_DIMS]
