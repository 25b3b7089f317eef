# SPDX-License-Identifier: Apache-2.0
"""Bytes on every device, on the host and on the wire, item by item.

Per device, while it trains and while it generates. FSDP2 shards parameters in their own dtypes:

| item | bytes on one device |
| --- | --- |
| parameters | each in its dtype / shards; frozen ones in fsdp_config.model_dtype, adapters in fp32 |
| gathered | 2 x the largest block (one runs, the next is prefetched), and all outside blocks; compute dtype |
| gradients | trained parameters / shards, in their dtype |
| unreduced gradients | trained parameters in the reduce dtype if `digen.tsp.reduce` defers, else two blocks' |
| optimizer | 2 numbers per trained parameter / shards |
| EMA, other policies | trained parameters / shards each; the reference of an adapter is the bare model |
| activations | rows of a tile x bytes per row, see `activations` |
| replica | transformer, text encoders and VAE in rollout.dtype; the part that stays while its device trains |

Left out: VAE decoding, text encoding, kernel workspaces and the runtime. `engine.memory.MARGIN` of the memory is left
free for them; for decoding a video it may be too little.

Invariant (tests/plan/test_reality.py): parameters, gradients and optimizer within 5 % of a real engine's tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

from verl_digen.engine.memory import MARGIN, gradients_may_wait, rows_that_fit
from verl_digen.plan.policies import policies_read, policies_that_follow
from verl_digen.plan.run import Run

Items = dict[str, int]
"""Name -> bytes."""


@dataclass(frozen=True)
class Phase:
    """Memory of one device while it trains or generates."""

    items: Items
    """Fixed part, independent of the number of rows."""
    row_bytes: int
    """Bytes per row of a tile, or per sample of a generated batch."""
    num_rows: int
    """Rows or samples that run at once."""
    rows_name: str

    @property
    def total(self) -> int:
        """All bytes of the phase."""
        return sum(self.items.values()) + self.row_bytes * self.num_rows


@dataclass(frozen=True)
class Memory:
    """Memory plan of a run."""

    training: Phase
    generating: Phase
    limit_bytes: int | None
    """Memory of a device, less the margin; None if unknown."""
    host: Items
    """Host memory of the fullest node: one of the trainer with its replicas, or of either pool."""
    step: Items
    """Traffic of a step."""
    checkpoint_bytes: int

    @property
    def fits(self) -> bool | None:
        """True if both phases fit; None if the memory is unknown."""
        if self.limit_bytes is None:
            return None
        return max(self.training.total, self.generating.total) <= self.limit_bytes


def plan_memory(run: Run, device_bytes: int | None) -> Memory:
    """Plan a run's memory on devices of `device_bytes` bytes each; None if unknown."""
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
    """Parameters, gradients, optimizer and copies of one rank while it trains, all on the device."""
    settings, counts = run.settings, run.measured.counts
    shard = -(-counts.trained_bytes // settings.num_shards)
    items = {
        "parameters": -(-counts.param_bytes // settings.num_shards) + counts.buffer_bytes,
        "gradients": shard,
        "optimizer": 2 * shard,
    }
    if _has_average_here(run):
        items["EMA"] = shard
    for policy in _following_here(run):
        items[f"policy {policy}"] = shard
    if _has_reference(run) and not settings.param_offload:
        items["reference"] = shard
    if _has_reference(run) or policies_read(settings.digen) & {*policies_that_follow(settings.digen)}:
        items["weights that a policy replaces"] = shard
    return items


def _has_average_here(run: Run) -> bool:
    """True if the EMA copy stays on the device, also while it generates."""
    return run.settings.digen.ema.enable and not run.settings.param_offload


def _has_reference(run: Run) -> bool:
    return "reference" in policies_read(run.settings.digen) and not run.settings.is_lora


def _following_here(run: Run) -> tuple[str, ...]:
    """Policies whose copies stay on the device."""
    return () if run.settings.param_offload else policies_that_follow(run.settings.digen)


def gathered(run: Run) -> Items:
    """Unsharded parameters of the blocks gathered on a rank at one time."""
    counts, itemsize = run.measured.counts, run.settings.dtypes.compute.itemsize
    whole = counts.num_params
    if run.settings.reshard:
        whole = min(whole, 2 * counts.largest_block + counts.outside_blocks)
    return {"gathered parameters": whole * itemsize}


def _waiting_gradients(run: Run, resident: Items, device_bytes: int | None) -> Items:
    """Unreduced gradients under deferred reduction; "auto" follows the engine's own rule."""
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
    """The training phase with the tiles that the engine would choose."""
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
    """Networks of one device of a replica; text encoders and VAE are unsharded on each."""
    settings, measured = run.settings, run.measured
    itemsize = settings.dtypes.rollout.itemsize
    items = {"transformer": -(-_transformer_params(run) * itemsize // settings.tensor_parallel)}
    if settings.is_lora and not settings.merges_lora:
        items["adapter"] = measured.counts.trained_bytes
    return items | {name.replace("_", " "): count * itemsize for name, count in measured.parts.items()}


def _transformer_params(run: Run) -> int:
    """Parameters of the transformer without an adapter, exported tables included."""
    counts = run.measured.counts
    return counts.num_params - (counts.num_trained if run.settings.is_lora else 0) + counts.exported_buffers


def _shared_devices(run: Run, resident: Items) -> tuple[Items, Items]:
    """(items a replica leaves on its device during training, items the trainer leaves during generation)."""
    settings = run.settings
    if settings.is_split:
        return {}, {}
    networks = replica(run)
    if not settings.frees_replica:
        left = sum(networks.values())
    elif settings.rollout_name == "diffusers":  # moves the transformer out, keeps text encoders and VAE
        left = sum(size for name, size in networks.items() if name not in ("transformer", "adapter"))
    else:
        left = 0
    parked = 0 if settings.param_offload else resident["parameters"]
    parked += 0 if settings.optimizer_offload else resident["optimizer"]
    parked += resident["EMA"] if _has_average_here(run) else 0
    parked += resident.get("reference", 0)
    parked += sum(resident[f"policy {policy}"] for policy in _following_here(run))
    return {"replica that waits": left}, {"trainer that waits": parked}


# -- outside the devices --------------------------------------------------------------------------------------
def update_bytes(run: Run) -> int:
    """Bytes of one weight update to one replica."""
    settings = run.settings
    if settings.is_lora and not settings.merges_lora:
        return run.measured.counts.num_trained * settings.dtypes.rollout.itemsize
    return _transformer_params(run) * settings.dtypes.rollout.itemsize


def _host(run: Run, resident: Items) -> Items:
    settings, counts = run.settings, run.measured.counts
    trainer = {"checkpoint of rank 0 while it loads": counts.param_bytes}
    ranks = settings.trainer_devices_per_node
    if settings.param_offload:
        copies = int(settings.digen.ema.enable) + int(_has_reference(run)) + len(policies_that_follow(settings.digen))
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
    """Bytes of a checkpoint: sharded weights and optimizer, copies that follow, and the export if configured."""
    counts, settings = run.measured.counts, run.settings
    total = counts.param_bytes + 2 * counts.trained_bytes
    num_copies = int(settings.digen.ema.enable) + len(policies_that_follow(settings.digen))
    total += num_copies * counts.trained_bytes
    if settings.exports:
        total += counts.trained_bytes if settings.is_lora else counts.param_bytes
    return total
