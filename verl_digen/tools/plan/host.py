# SPDX-License-Identifier: Apache-2.0
"""Bytes outside the devices: on the wire, on disk, and host memory of the fullest node: one of the trainer with its
replicas, or of either pool.

PyTorch's allocator of page-locked memory rounds every allocation up to a power of two (`CachingHostAllocator`), and
verl offloads with `non_blocking=True`, which allocates there. Left out: the processes themselves, about 2 GB each, and
TransferQueue's copies.
"""

from collections.abc import Iterable
from dataclasses import replace

from verl_digen.tools.plan.networks import Tensors
from verl_digen.tools.plan.run import Job

Items = dict[str, int]
"""Name -> bytes."""
PROMPT_CACHE = "prompt cache"


def host_memory(run: Job, resident: Items, networks: Items, *, in_turns: bool, input_bytes: int) -> Items:
    """Items of the fullest node. `resident`: state of a trainer rank (`memory.trainer_state`); `networks`: of a
    replica (`memory.replica`); `in_turns`: encoders and transformer wait for one another on the host; `input_bytes`:
    inputs of blocks that wait for recomputation, of one trainer rank."""
    settings = run.settings
    # ranks that generate leave the device while encoders are on it
    moved = replace(settings, param_offload=True, optimizer_offload=True) if in_turns and settings.draws else settings
    counts = run.measured.counts
    read = counts.param_bytes + counts.num_int8 * settings.dtypes.model.itemsize
    trainer = {"checkpoint of rank 0 while it loads": read}
    trainer |= _offloaded(replace(run, settings=moved), resident)
    if input_bytes:
        trainer["inputs of recomputed blocks"] = settings.trainer_devices_per_node * input_bytes
    replicas = max(1, settings.generator_devices_per_node // settings.tensor_parallel)
    # replicas that share devices with the trainer load updates as they arrive
    generator = {"staged weight updates": replicas * update_bytes(run)} if settings.is_split else {}
    if settings.frees_replica or in_turns:
        generator["replicas that wait"] = _waiting(run, networks, in_turns=in_turns)
    if settings.is_ours:
        generator[PROMPT_CACHE] = replicas * cached_prompts(run)
    queue = {"trajectories and conditions": sum(_queue(run).values())}
    if settings.is_split:
        return queue | max(trainer, generator, key=lambda items: sum(items.values()))
    return queue | trainer | generator


def cached_prompts(run: Job) -> int:
    """Bytes of a replica's prompt cache, full."""
    return run.settings.digen.rollout.embed_cache_size * run.measured.embedding_bytes


def _waiting(run: Job, networks: Items, *, in_turns: bool) -> int:
    """Host copies of the replicas of a node that sleep, or whose encoders take turns with the transformer: of
    `vllm_omni` all networks; of `diffusers` what no update has, once per node on GPUs, else per replica, and what
    trains where encoders take turns."""
    settings, names = run.settings, {*networks} - {PROMPT_CACHE}
    if not settings.is_ours:
        return settings.generator_devices_per_node * sum(networks[name] for name in names)
    # after a sleep the next update brings what it sends
    trained = "adapter" if settings.is_lora and not settings.merges_lora else "transformer"
    names -= {trained}
    server = sum(networks[name] for name in names)
    own = settings.generator_devices_per_node * networks.get(trained, 0) if in_turns else 0
    if settings.shares_host_copies:
        is_trainers = _keeps_base(run) and settings.dtypes.model == settings.dtypes.rollout
        return own + server - (networks["transformer"] if is_trainers and "transformer" in names else 0)
    return own + settings.generator_devices_per_node * server


def _offloaded(run: Job, resident: Items) -> Items:
    """State of a node's trainer ranks between two trainings. A frozen base that ranks hold whole has one copy per node,
    and copies of the weights (EMA, `old`, reference, teacher) are not page-locked."""
    settings, tensors = run.settings, run.measured.tensors
    ranks, items = settings.trainer_devices_per_node, {}
    trained = [tensor for tensor in tensors if tensor.is_trained]
    if settings.param_offload:
        buffers = run.measured.counts.buffer_bytes
        own = trained if _keeps_base(run) else tensors
        items["offloaded parameters"] = ranks * (_shards(run, own) + buffers)
        if _keeps_base(run):
            frozen = (tensor.num * tensor.num_bytes for tensor in tensors if not tensor.is_trained)
            items["frozen base, offloaded"] = sum(frozen)
        copies = settings.num_saved_copies + len(settings.frozen_copies)
        if copies:
            items["copies of the weights"] = ranks * copies * resident["gradients"]
    if settings.optimizer_offload:
        items["offloaded optimizer"] = ranks * 2 * _shards(run, trained)
    return items


def _keeps_base(run: Job) -> bool:
    """True if an offload leaves the frozen base in a host copy of the node, see `verl_digen.engine.offload`."""
    settings = run.settings
    is_whole = settings.is_lora and settings.num_shards == 1
    return is_whole and settings.param_offload and settings.is_accelerated and settings.shares_host_copies


def _shards(run: Job, tensors: Iterable[Tensors]) -> int:
    """Bytes that one rank's shards of these tensors take in host memory."""
    total = 0
    for tensor in tensors:
        shard = -(-tensor.num_bytes // run.settings.num_shards)
        total += tensor.num * (page_locked_bytes(shard) if run.settings.is_accelerated else shard)
    return total


def page_locked_bytes(num_bytes: int) -> int:
    """Bytes that PyTorch page-locks for an allocation: 8 for 5, and for 8."""
    return 1 << (num_bytes - 1).bit_length() if num_bytes else 0


# -- wire and disk ---------------------------------------------------------------------------------------------
def update_bytes(run: Job) -> int:
    """Bytes of one weight update to one replica."""
    settings, counts = run.settings, run.measured.counts
    if settings.draws:
        return 0
    if settings.is_lora and not settings.merges_lora:
        return counts.num_trained * settings.dtypes.rollout.itemsize
    whole = counts.num_params - (counts.num_trained if settings.is_lora else 0) + counts.exported_buffers
    return whole * settings.dtypes.rollout.itemsize


def _queue(run: Job) -> Items:
    settings, measured = run.settings, run.measured
    return {
        "trajectories": settings.num_begun * settings.num_turns * measured.trajectory_bytes,
        "conditions": settings.num_conditions * measured.condition_bytes,
    }


def step_traffic(run: Job) -> Items:
    """Bytes that move in a step."""
    return _queue(run) | {"weights to all replicas": update_bytes(run) * run.settings.num_replicas}


def checkpoint_bytes(run: Job) -> int:
    """Bytes of a checkpoint: trained weights, optimizer, copies that follow, and the export if configured."""
    counts, settings = run.measured.counts, run.settings
    exported = (counts.trained_bytes if settings.is_lora else counts.param_bytes) if settings.exports else 0
    # weights and two moments; a frozen base is not saved
    return (3 + settings.num_saved_copies) * counts.trained_bytes + exported
