# SPDX-License-Identifier: Apache-2.0
"""Bytes on every device, on the host and on the wire, item by item.

Per device, while it trains and while it generates. FSDP2 shards by the dtype of each parameter; what stands beside:

| item | bytes on one device |
| --- | --- |
| parameters | each in its dtype / shards; frozen ones in fsdp_config.model_dtype, adapters in fp32 |
| gathered | 2 x the largest block (one runs, the next is fetched), and what is in no block; compute dtype |
| gradients | trained parameters / shards, in their dtype |
| unreduced gradients | trained parameters in the reduce dtype if `digen.tsp.reduce` lets them wait, else two blocks' |
| optimizer | 2 numbers per trained parameter / shards |
| EMA, KL reference | trained parameters / shards each; the reference of an adapter is the bare model |
| activations | rows of a tile x those of one row, see `activations` |
| replica | transformer, text encoders and VAE in rollout.dtype; what stays of it while its device trains |

Left out: the VAE's decoding, text encoding, kernels' workspaces and the runtime's own. `engine.memory.MARGIN` of the
memory is left free for them; of a video's decoding it is not sure to be enough.

Invariant (tests/plan/test_reality.py): parameters, gradients and optimizer within 5 % of a real engine's tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

from verl_digen.engine.memory import MARGIN, gradients_may_wait, rows_that_fit
from verl_digen.plan.run import Run

Items = dict[str, int]
"""Name -> bytes."""


@dataclass(frozen=True)
class Phase:
    """One device while it does one thing."""

    items: Items
    """What is there whatever the number of rows."""
    row_bytes: int
    """Of each row of a tile, or sample of a batch."""
    num_rows: int
    """How many of them run at once."""
    rows_name: str

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self.items.values()) + self.row_bytes * self.num_rows


@dataclass(frozen=True)
class Memory:
    """Of a run."""

    training: Phase
    generating: Phase
    limit_bytes: int | None
    """What a device has, less the margin; None where it is not known."""
    host: Items
    """Of the node that holds most: a node of the trainer with its replicas, or of either pool."""
    step: Items
    """What travels in a step."""
    checkpoint_bytes: int

    @property
    def fits(self) -> bool | None:
        """Whether both phases fit, or None where the memory is not known."""
        if self.limit_bytes is None:
            return None
        return max(self.training.total, self.generating.total) <= self.limit_bytes


def plan_memory(run: Run, device_bytes: int | None) -> Memory:
    """Lay out a run on devices of so many bytes."""
    limit = None if device_bytes is None else int(device_bytes * (1 - MARGIN))
    resident = trainer_state(run)
    beside_training, beside_generating = _shared_devices(run, resident)
    fixed = resident | gathered(run) | _waiting_gradients(run, resident, device_bytes) | beside_training
    training = _training(run, fixed, device_bytes)
    return Memory(
        training=training,
        generating=Phase(
            replica(run) | beside_generating,
            run.measured.sampling.largest_block,
            run.settings.digen.rollout.max_batch_size,
            "samples of a batch",
        ),
        limit_bytes=limit,
        host=_host(run, resident),
        step=_step(run),
        checkpoint_bytes=_checkpoint(run),
    )


# -- a trainer's device ---------------------------------------------------------------------------------------
def trainer_state(run: Run) -> Items:
    """Parameters, gradients, optimizer and copies of one rank, all on the device, as while it trains."""
    settings, counts = run.settings, run.measured.counts
    shard = -(-counts.trained_bytes // settings.num_shards)
    items = {
        "parameters": -(-counts.param_bytes // settings.num_shards) + counts.buffer_bytes,
        "gradients": shard,
        "optimizer": 2 * shard,
    }
    if _has_average_here(run):
        items["EMA"] = shard
    if _has_reference(run):
        # the copy, unless it waits on the host, and the weights it takes the place of
        items["KL reference"] = shard if settings.param_offload else 2 * shard
    return items


def _has_average_here(run: Run) -> bool:
    """On the device, where it also stays while others compute."""
    return run.settings.digen.ema.enable and not run.settings.param_offload


def _has_reference(run: Run) -> bool:
    return run.settings.digen.kl.coef > 0 and not run.settings.is_lora


def gathered(run: Run) -> Items:
    """Parameters of the blocks that are whole on a rank at one time."""
    counts, itemsize = run.measured.counts, run.settings.dtypes.compute.itemsize
    whole = counts.num_params
    if run.settings.reshard:
        whole = min(whole, 2 * counts.largest_block + counts.outside_blocks)
    return {"gathered parameters": whole * itemsize}


def _waiting_gradients(run: Run, resident: Items, device_bytes: int | None) -> Items:
    """What deferred reduction keeps, by the engine's own rule where it is automatic."""
    settings, counts = run.settings, run.measured.counts
    unreduced = counts.num_trained * settings.dtypes.reduce.itemsize
    when = settings.digen.tsp.reduce
    if when == "auto":
        free = None if device_bytes is None else device_bytes - sum(resident.values())
        waits = settings.is_lora or (free is not None and gradients_may_wait(unreduced, free))
        when = "batch" if waits else "tile"
    if when == "tile":
        trained_of_block = min(counts.largest_block, counts.num_trained)
        unreduced = min(unreduced, 2 * trained_of_block * settings.dtypes.reduce.itemsize)
    return {f"unreduced gradients ({when})": unreduced}


def _training(run: Run, fixed: Items, device_bytes: int | None) -> Phase:
    """With the tiles the engine would choose."""
    row_bytes = run.measured.training.kept(recomputes=run.settings.recomputes)
    rows_of_rank = -(-run.settings.num_samples * run.measured.rows_per_sample // run.settings.num_trainer_devices)
    samples, steps = run.settings.digen.tsp.extents
    if samples and steps:
        most = samples * steps
    elif device_bytes is None:
        most = 1
    else:
        most = rows_that_fit(lambda rows: sum(fixed.values()) + rows * row_bytes, device_bytes)
        most = max(most, samples or steps or 1)
    return Phase(fixed, row_bytes, max(1, min(most, rows_of_rank)), "rows of a tile")


# -- a replica's device ---------------------------------------------------------------------------------------
def replica(run: Run) -> Items:
    """Networks of one device of a replica; the text encoders and the VAE are whole on each."""
    settings, measured = run.settings, run.measured
    itemsize = settings.dtypes.rollout.itemsize
    items = {"transformer": -(-_transformer_params(run) * itemsize // settings.tensor_parallel)}
    if settings.is_lora and not settings.merges_lora:
        items["adapter"] = measured.counts.trained_bytes
    return items | {name.replace("_", " "): count * itemsize for name, count in measured.parts.items()}


def _transformer_params(run: Run) -> int:
    """Of the transformer without an adapter, with its tables."""
    counts = run.measured.counts
    return counts.num_params - (counts.num_trained if run.settings.is_lora else 0) + counts.exported_buffers


def _shared_devices(run: Run, resident: Items) -> tuple[Items, Items]:
    """(what a replica leaves while its device trains, what the trainer leaves while it generates)."""
    settings = run.settings
    if settings.is_split:
        return {}, {}
    networks = replica(run)
    if not settings.frees_replica:
        left = sum(networks.values())
    elif settings.rollout_name == "diffusers":  # it moves the transformer out, and keeps what encodes and decodes
        left = sum(size for name, size in networks.items() if name not in ("transformer", "adapter"))
    else:
        left = 0
    parked = 0 if settings.param_offload else resident["parameters"]
    parked += 0 if settings.optimizer_offload else resident["optimizer"]
    parked += resident["EMA"] if _has_average_here(run) else 0
    parked += resident["gradients"] if _has_reference(run) and not settings.param_offload else 0
    return {"replica that waits": left}, {"trainer that waits": parked}


# -- beside the devices ---------------------------------------------------------------------------------------
def update_bytes(run: Run) -> int:
    """Of one weight update to one replica."""
    settings = run.settings
    if settings.is_lora and not settings.merges_lora:
        return run.measured.counts.num_trained * settings.dtypes.rollout.itemsize
    return _transformer_params(run) * settings.dtypes.rollout.itemsize


def _host(run: Run, resident: Items) -> Items:
    settings, counts = run.settings, run.measured.counts
    trainer = {"checkpoint of rank 0 while it loads": counts.param_bytes}
    ranks = settings.trainer_devices_per_node
    if settings.param_offload:
        copies = int(settings.digen.ema.enable) + int(_has_reference(run))
        trainer["offloaded parameters"] = ranks * (resident["parameters"] + copies * resident["gradients"])
    if settings.optimizer_offload:
        trainer["offloaded optimizer"] = ranks * resident["optimizer"]
    replicas = max(1, settings.generator_devices_per_node // settings.tensor_parallel)
    generator = {"staged weight updates": replicas * update_bytes(run)}
    if settings.frees_replica:
        names = ("transformer", "adapter") if settings.rollout_name == "diffusers" else tuple(replica(run))
        waiting = sum(size for name, size in replica(run).items() if name in names)
        generator["replicas that wait"] = settings.generator_devices_per_node * waiting
    queue = {"trajectories and conditions": sum(_queue(run).values())}
    if settings.is_split:
        return queue | max(trainer, generator, key=lambda items: sum(items.values()))
    return queue | trainer | generator


def _queue(run: Run) -> Items:
    settings, measured = run.settings, run.measured
    return {
        "trajectories": settings.num_samples * measured.trajectory_bytes,
        "conditions": settings.num_prompts * measured.condition_bytes,
    }


def _step(run: Run) -> Items:
    return _queue(run) | {"weights to all replicas": update_bytes(run) * run.settings.num_replicas}


def _checkpoint(run: Run) -> int:
    """Sharded weights and optimizer, EMA, and the export if it is asked for."""
    counts, settings = run.measured.counts, run.settings
    total = counts.param_bytes + 2 * counts.trained_bytes
    if settings.digen.ema.enable:
        total += counts.trained_bytes
    if settings.exports:
        total += counts.trained_bytes if settings.is_lora else counts.param_bytes
    return total
