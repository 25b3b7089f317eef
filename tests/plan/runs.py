# SPDX-License-Identifier: Apache-2.0
"""Runs for the pure parts of the plan: round numbers that can be checked by hand."""

from dataclasses import replace
from typing import Any

import torch

from verl_digen.config import DigenConfig
from verl_digen.models.flops import Flops
from verl_digen.tools.plan.activations import Activations, BlockBytes
from verl_digen.tools.plan.networks import Counts, Part, Tensors
from verl_digen.tools.plan.run import Dtypes, Job, Measured, Settings

GB = 10**9

SETTINGS = Settings(
    digen=DigenConfig(),
    num_trainer_devices=8,
    num_generator_devices=8,
    trainer_devices_per_node=8,
    generator_devices_per_node=8,
    is_split=False,
    fsdp_size=-1,
    num_prompts=4,
    group_size=8,
    is_lora=False,
    bare_reference=False,
    merges_lora=False,
    recompute="all",
    whole_base=False,
    offloads_activations=False,
    sequence_parallel=1,
    param_offload=False,
    optimizer_offload=False,
    reshard=True,
    rollout_name="diffusers",
    tensor_parallel=1,
    frees_replica=True,
    exports=False,
    is_accelerated=False,
    shares_host_copies=False,
    dtypes=Dtypes(torch.float32, torch.bfloat16, torch.float32, torch.bfloat16, torch.float32),
)
"""A full fine-tune in fp32 on 8 devices, colocated."""
BLOCK = BlockBytes(
    inputs=GB // 16, saved_inputs=0, saved=3 * GB, peaks=((3 * GB, 0),), num_params=GB // 4, num_trained=GB // 4
)
ACTIVATIONS = Activations(blocks=(BLOCK,) * 32, head=GB, tail=0)
"""6 GB with all blocks recomputed, 97 with none."""
MEASURED = Measured(
    decoders=("vae",),
    title="round numbers",
    counts=Counts(
        num_params=8 * GB,
        num_trained=8 * GB,
        param_bytes=32 * GB,
        trained_bytes=32 * GB,
        buffer_bytes=0,
        exported_buffers=0,
        outside_blocks=0,
        num_int8=0,
    ),
    parts={"text_encoder": Part(5 * GB, 10 * GB), "vae": Part(GB // 2, GB)},
    fp8_bytes=0,
    transformer_bytes=16 * GB,
    tensors=(Tensors(GB // 10, True, 320),),
    decoding_bytes=GB,
    tiled_bytes=GB // 4,
    decodes_together=True,
    num_experts=1,
    training=ACTIVATIONS,
    sampling=ACTIVATIONS,
    flops=Flops(linear=60e12, attention=40e12),
    condition_bytes=10**6,
    embedding_bytes=0,
    rows_per_group=9 * 8,
    trajectory_bytes=10**7,
)
"""Measurements of a network with 8 B parameters."""
LORA = replace(
    MEASURED.counts,
    num_params=8 * GB + GB // 10,
    num_trained=GB // 10,
    param_bytes=16 * GB + 4 * GB // 10,
    trained_bytes=4 * GB // 10,
)
"""Counts of the same network, frozen in bf16 under an adapter of 0.1 B in fp32."""


def make_run(*, lora: bool = False, digen: dict[str, Any] | None = None, **settings: Any) -> Job:
    """A run with changed settings; `digen`: changed fields of that section."""
    adapter = {"is_lora": lora, "bare_reference": lora}
    changed = replace(SETTINGS, digen=replace(SETTINGS.digen, **(digen or {})), **(adapter | settings))
    return Job(changed, replace(MEASURED, counts=LORA) if lora else MEASURED)
