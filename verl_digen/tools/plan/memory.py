# SPDX-License-Identifier: Apache-2.0
"""Bytes on every device, item by item, while it trains and while it generates; on the host and on the wire see `host`.

FSDP2 shards parameters in their own dtypes: frozen ones in fsdp_config.model_dtype, adapters in fp32; what it gathers
is in the compute dtype, and gradients that wait are in the reduce dtype. Activations are a tile's rows x bytes per row,
see `activations`; decoding is the peak of one picture or video, see `peak`, x those decoded together.

Left out: text encoding, kernel workspaces, and what a timeshared reward holds while it is awake; its process's context
is counted. `engine.memory.MARGIN` of the memory is left free for them.

Invariants
- tests/plan/test_reality.py: parameters, gradients and optimizer within 5 % of a real engine's tensors.
- tests/plan/test_tracker.py: a training tile within 5 % of what PyTorch's memory tracker counts of the engine.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cache, partial

from verl_digen.engine.memory import MARGIN, gradients_may_wait
from verl_digen.schedulers.tiles import choose_tile, prefers_whole_base
from verl_digen.tools.plan.host import PROMPT_CACHE, Items, cached_prompts, host_memory
from verl_digen.tools.plan.run import Job

WAITING = "trainer that waits"
GATHERED = "gathered parameters"
REPLACED = "weights that a policy replaces"
RUNTIME = "contexts and NCCL (estimated)"

CONTEXT_BYTES = 500_000_000
"""A process's CUDA context with the code of its libraries. Estimate: nvidia-smi shows 0.4 to 0.6 GB for an idle process
of PyTorch on A100 and H100; not measured here."""
NCCL_BYTES = 1_000_000_000
"""Buffers of a trainer rank's communicators. Estimate: 2 communicators (all ranks, and FSDP2's mesh) of 16 to 32
channels with about 10 MB for each; not measured here."""


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
    num_recomputed: int
    """Blocks that backward recomputes, the first ones."""
    num_blocks: int
    """Blocks that it could recompute."""
    generating: Phase
    decoding: Phase
    """Follows on generating, on the same device."""
    encoding: Phase | None
    """Comes before it, if encoders wait on the host; else they are part of both."""
    limit_bytes: int | None
    """Memory of a device, less the margin; None if unknown."""
    host: Items
    """Host memory of the fullest node: one of the trainer with its replicas, or of either pool."""
    is_base_whole: bool
    """True if the frozen base stays whole on every training device."""

    @property
    def recomputed_share(self) -> float:
        """Share of the blocks that backward recomputes."""
        return self.num_recomputed / self.num_blocks

    @property
    def fits(self) -> bool | None:
        """True if all phases fit; None if the memory is unknown."""
        return None if self.limit_bytes is None else self.peak_bytes <= self.limit_bytes

    @property
    def phases(self) -> tuple[Phase, ...]:
        return self.training, *self.of_replica

    @property
    def of_replica(self) -> tuple[Phase, ...]:
        """Phases of a device that generates."""
        return self.generating, self.decoding, *([] if self.encoding is None else [self.encoding])

    @property
    def peak_bytes(self) -> int:
        """Bytes of the phase that needs most."""
        return max(phase.total for phase in self.phases)

    @property
    def host_bytes(self) -> int:
        """Host memory that the fullest node needs."""
        return sum(self.host.values())


def plan_memory(run: Job, device_bytes: int | None) -> Memory:
    """Plan a run's memory on devices of `device_bytes` bytes each; None if unknown."""
    limit = None if device_bytes is None else int(device_bytes * (1 - MARGIN))
    resident = trainer_state(run)
    in_turns = encoders_take_turns(run, device_bytes)
    networks, encoders = replica(run), _parts(run, decode=False)
    beside_training, beside_generating = _shared_devices(run, resident, 0 if in_turns else sum(encoders.values()))
    beside_generating |= _runtime(run, trains=not run.settings.is_split, generates=not run.settings.draws)
    resting = {*encoders} if in_turns else set()
    # ranks that generate leave the device to the encoders
    beside_encoding = _without(beside_generating, {WAITING} if run.settings.draws else ())
    of_replica = _without(networks, resting) | beside_generating
    runtime = _runtime(run, trains=True, generates=not (run.settings.is_split or run.settings.draws))
    beside_training |= _assistant(run) | runtime
    training, num_recomputed, is_whole = _choose_tile(run, resident, beside_training, device_bytes)
    input_bytes = _offloaded_inputs(run, training.num_rows, num_recomputed)
    return Memory(
        training=training,
        num_recomputed=num_recomputed,
        num_blocks=len(run.measured.training.blocks),
        generating=_generating(run, of_replica | _gathered_to_generate(run, is_whole=is_whole), limit),
        decoding=_decoding(run, of_replica, limit),
        encoding=Phase(encoders | beside_encoding, 0, 1, "prompt at a time") if in_turns else None,
        limit_bytes=limit,
        host=host_memory(run, resident, networks, in_turns=in_turns, input_bytes=input_bytes),
        is_base_whole=is_whole,
    )


def _generating(run: Job, items: Items, limit: int | None) -> Phase:
    """A batch of samples; with `max_batch_size=auto` of as many as fit."""
    settings, sample = run.settings, run.measured.sampling.largest_block
    most = settings.digen.rollout.batch_size
    # ranks that generate in step do not decide by their memory
    is_alone = not settings.draws or settings.num_trainer_devices == 1
    if settings.digen.rollout.fits_batches and settings.is_ours and is_alone and limit is not None:
        most = min(most, max(1, (limit - sum(items.values())) // sample))
    return Phase(items, sample, most, "samples of a batch")


def _gathered_to_generate(run: Job, *, is_whole: bool) -> Items:
    """Parameters that a rank gathers for a forward; all of them only where there is room."""
    if not run.settings.draws:
        return {}
    found = [gathered(run, block, is_whole=is_whole) for block in range(len(run.measured.training.blocks))]
    return max(found, key=lambda items: sum(items.values()))


def _decoding(run: Job, items: Items, limit: int | None) -> Phase:
    """Samples that are decoded together; one in tiles where a whole one does not fit."""
    whole, tiled, rollout = run.measured.decoding_bytes, run.measured.tiled_bytes, run.settings.digen.rollout
    takes_tiles = run.settings.is_ours and tiled < whole
    if takes_tiles and limit is not None and sum(items.values()) + whole > limit:
        return Phase(items, tiled, 1, "sample decoded in tiles")
    together = min(rollout.decode_batch_size, rollout.batch_size) if run.measured.decodes_together else 1
    return Phase(items, whole, together, "samples decoded together")


def _runtime(run: Job, *, trains: bool, generates: bool) -> Items:
    """Memory of a device that no tensor of ours takes, by the processes on it."""
    if not run.settings.is_accelerated:
        return {}
    num_rewards = len(run.settings.digen.reward.timeshared)
    num_of_replica = generates * (1 + run.settings.is_split)  # its server, and the worker that receives weights
    return {RUNTIME: (trains + num_of_replica + num_rewards) * CONTEXT_BYTES + trains * NCCL_BYTES}


def _assistant(run: Job) -> Items:
    """The VAE of a trainer rank that also generates (`verl_digen.engine.assistant`), and what decodes sound."""
    if run.settings.digen.tag.policy == "off":
        return {}
    decoders = (run.measured.parts[name] for name in run.measured.decoders)
    return {"VAE of assistance": sum(part.num_bytes for part in decoders)}


# -- a trainer's device ---------------------------------------------------------------------------------------
def trainer_state(run: Job) -> Items:
    """Parameters, gradients, optimizer and copies of one rank while it trains, all on the device. The reference of a
    new adapter is the bare model, which is no copy."""
    settings, counts, following = run.settings, run.measured.counts, run.settings.policies_that_follow
    shard = -(-counts.trained_bytes // settings.num_shards)
    items = {
        "parameters": -(-counts.param_bytes // settings.num_shards) + counts.buffer_bytes,
        "gradients": shard,
        "optimizer": 2 * shard,
    }
    if not settings.param_offload:
        average = ["EMA"] if settings.digen.ema.enable else []
        copies = [*average, *(f"policy {policy}" for policy in following), *settings.frozen_copies]
        items |= dict.fromkeys(copies, shard)
    if settings.policies_read & {*settings.frozen_copies, *following}:
        items[REPLACED] = shard
    return items


def _choose_tile(run: Job, resident: Items, beside: Items, device_bytes: int | None) -> tuple[Phase, int, bool]:
    """(training, number of recomputed blocks, True if the base is whole) with the engine's choice of a tile, from
    planned bytes in place of measured ones. `beside`: what else the device holds."""
    settings, activations = run.settings, run.measured.training
    fixed, num_blocks = _recomputed_blocks(run, device_bytes)
    when = _when_to_reduce(run, resident, device_bytes)

    @cache
    def beside_rows(block: int, gradients: int, is_whole: bool) -> tuple[Items, int]:
        weights = gathered(run, block, is_whole=is_whole) | _unreduced(run, resident, when, block, gradients)
        return (items := resident | weights | beside), sum(items.values())

    def moments(num_recomputed: int, *, is_whole: bool = False) -> Iterator[tuple[Items, int, int]]:
        for moment in activations.moments(fixed + num_recomputed, offloads=settings.offloads_activations):
            items, size = beside_rows(moment.block, moment.gradient_bytes, is_whole)
            yield items, size, -(-moment.row_bytes // settings.sequence_parallel)

    is_in_place = reads_in_place(run)

    def rows_that_fit(num_recomputed: int, taken: int = 0) -> int:
        if device_bytes is None:
            return 1
        room, found = int(device_bytes * (1 - MARGIN)) - taken, moments(num_recomputed, is_whole=is_in_place)
        return min((room - size) // max(row_bytes, 1) for _, size, row_bytes in found)

    num_rows = run.rows_per_rank
    samples, steps = settings.digen.tsp.extents
    wanted = {"num_blocks": num_blocks, "num_rows": num_rows}
    choose = partial(choose_tile, samples=samples, steps=steps, **wanted)
    choice, is_whole = choose(rows_that_fit, is_whole=is_in_place), is_in_place
    if not is_in_place and may_be_whole(run):
        whole_bytes = run.measured.counts.num_params * settings.dtypes.compute.itemsize  # beside the shards
        rows_beside = partial(rows_that_fit, taken=whole_bytes)
        beside_whole = choose(rows_beside, is_whole=True)
        fits = rows_beside(beside_whole.num_recomputed) >= min(beside_whole.shape.size, num_rows)
        is_cheaper = device_bytes is not None and fits and prefers_whole_base(choice, beside_whole, **wanted)
        if settings.whole_base is True or is_cheaper:
            choice, is_whole = beside_whole, True
    num_rows = min(choice.shape.size, num_rows)
    found = moments(choice.num_recomputed, is_whole=is_whole)
    items, _, row_bytes = max(found, key=lambda moment: moment[1] + num_rows * moment[2])
    return Phase(items, row_bytes, num_rows, "rows of a tile"), fixed + choice.num_recomputed, is_whole


def may_be_whole(run: Job) -> bool:
    """True if the base may be kept whole: `whole_base` is not false, and there is a base that is sharded. auto follows
    the engine's rule (`verl_digen.engine.whole_base`), from planned bytes."""
    settings = run.settings
    if not settings.is_lora or settings.whole_base is False:
        return False
    return settings.whole_base is True or settings.num_shards > 1


def reads_in_place(run: Job) -> bool:
    """True if forwards read a frozen base on one shard in place, as the engine decides."""
    settings, dtypes = run.settings, run.settings.dtypes
    may_be = settings.is_lora and settings.whole_base is not False
    return may_be and settings.num_shards == 1 and dtypes.model == dtypes.compute


def gathered(run: Job, block: int, *, is_whole: bool) -> Items:
    """Unsharded parameters while a block runs backward: its own, the previous one's, which are prefetched, and
    those outside all blocks. Before the first block come those that are sharded as blocks and never recomputed. All of
    them with a whole base; of a base that is read in place trained ones alone."""
    counts, traced, is_in_place = run.measured.counts, run.measured.training.blocks, reads_in_place(run)
    number = counts.num_trained if is_in_place else counts.num_params
    if run.settings.reshard and (is_in_place or not is_whole):
        blocks = [one.num_trained if is_in_place else one.num_params for one in traced]
        others = number // run.measured.num_experts - sum(blocks)
        outside = max(0, others) if is_in_place else counts.outside_blocks
        blocks = [max(0, others - outside), *blocks, 0]
        number = blocks[block] + blocks[block + 1] + outside
    return {GATHERED: number * run.settings.dtypes.compute.itemsize}


def _offloaded_inputs(run: Job, num_rows: int, num_recomputed: int) -> int:
    """Host memory of one rank for the inputs of recomputed blocks."""
    if not run.settings.offloads_activations:
        return 0
    inputs = sum(block.inputs for block in run.measured.training.blocks[:num_recomputed])
    return num_rows * -(-inputs // run.settings.sequence_parallel)


def _recomputed_blocks(run: Job, device_bytes: int | None) -> tuple[int, int]:
    """(blocks that are recomputed in any case, number of further ones that memory decides)."""
    wanted, all_blocks = run.settings.recompute, len(run.measured.training.blocks)
    if isinstance(wanted, int):
        return min(wanted, all_blocks), 0
    if wanted == "auto" and run.settings.is_accelerated and device_bytes is not None:
        return 0, all_blocks
    recomputes = wanted == "all" or (wanted == "auto" and run.settings.is_accelerated)
    return all_blocks if recomputes else 0, 0


def _when_to_reduce(run: Job, resident: Items, device_bytes: int | None) -> str:
    """Value of `digen.tsp.reduce`; "auto" follows the engine's own rule."""
    settings = run.settings
    if settings.digen.tsp.reduce != "auto":
        return settings.digen.tsp.reduce
    free = None if device_bytes is None else device_bytes - sum(resident.values())
    unreduced = run.measured.counts.num_trained * settings.dtypes.reduce.itemsize
    return "batch" if settings.is_lora or (free is not None and gradients_may_wait(unreduced, free)) else "tile"


def _unreduced(run: Job, resident: Items, when: str, block: int, gradients: int) -> Items:
    """Unreduced gradients while a block runs backward: those that it has made, and those that wait."""
    counts, itemsize = run.measured.counts, run.settings.dtypes.reduce.itemsize
    if when == "tile":  # of the block that ran before, in a buffer of the reduction
        waiting = [*(block.num_trained for block in run.measured.training.blocks), 0, 0][block + 1] * itemsize
    else:
        waiting = counts.num_trained * itemsize
        if when == "batch":  # block by block they become the reduced gradient, which is counted
            waiting = max(0, waiting - resident["gradients"])
    return {f"unreduced gradients ({when})": waiting + gradients}


def _without(items: Items, names: Collection[str]) -> Items:
    return {name: size for name, size in items.items() if name not in names}


# -- a replica's device ---------------------------------------------------------------------------------------
def replica(run: Job) -> Items:
    """Networks of one device of a replica; the transformer alone is sharded. A rank that generates adds the others."""
    settings, measured = run.settings, run.measured
    if settings.draws:
        return _parts(run, decode=False) | _parts(run, decode=True)
    items = {"transformer": -(-measured.transformer_bytes // settings.tensor_parallel)}
    if settings.is_lora and not settings.merges_lora:
        items["adapter"] = measured.counts.trained_bytes
    if measured.fp8_bytes:
        items["layers in fp8"] = measured.fp8_bytes
    items |= _parts(run, decode=False) | _parts(run, decode=True)
    if not settings.is_ours:
        items[PROMPT_CACHE] = cached_prompts(run)
    return items


def _parts(run: Job, *, decode: bool) -> Items:
    """Networks of a replica that decode, or those that encode; no encoders if prompts were encoded before the run."""
    if not decode and run.settings.is_ours and run.settings.digen.rollout.encoders == "before":
        return {}
    of_kind = {name: part for name, part in run.measured.parts.items() if (name in run.measured.decoders) is decode}
    return {name.replace("_", " "): part.num_bytes for name, part in of_kind.items()}


def encoders_take_turns(run: Job, device_bytes: int | None) -> bool:
    """True if a replica's encoders are on its device for an encoding alone, in place of its other networks."""
    settings, size = run.settings, run.measured.transformer_bytes + sum(_parts(run, decode=False).values())
    moves = settings.is_accelerated and settings.is_ours
    return moves and settings.digen.rollout.hosts_encoders(size, device_bytes)


def _shared_devices(run: Job, resident: Items, encoder_bytes: int) -> tuple[Items, Items]:
    """(items a replica leaves on its device during training, items the trainer leaves during generation).
    `encoder_bytes`: of encoders that stay with the replica."""
    settings = run.settings
    if settings.is_split:
        return {}, {}
    networks = _without(replica(run), _parts(run, decode=False))
    if settings.draws:
        networks, encoder_bytes = {}, 0  # decoders and encoders leave the device
    left = 0 if settings.frees_replica else sum(networks.values()) + encoder_bytes
    offloaded = {"parameters": settings.param_offload, "optimizer": settings.optimizer_offload}
    parked = _without(resident, {"gradients", "old", REPLACED, *(name for name, away in offloaded.items() if away)})
    return ({} if settings.draws else {"replica that waits": left}), {WAITING: sum(parked.values())}
