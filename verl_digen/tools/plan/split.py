# SPDX-License-Identifier: Apache-2.0
"""Seconds of a step, calculated at an assumed share of the devices' peak, not measured, and the split of the run's
devices into trainer and generator that is the fastest, simulated on them.

A step (`plan_time`) does not count text encoding, decoding, rewards, the time of environments, weight updates,
communication and waiting, nor the steps that the solver's cache skips, which are not known beforehand.

A split (`plan_split`) counts if the config allows its sizes, the nodes have room for it, and it fits the memory; each
is planned by itself, as fewer ranks hold larger shards and make smaller tiles. An assist is taken to gather the weights
at every step, whatever memory it has. Left out: encoding, decoding, environments, variance, and rewards without
`reward_s`. Episodes and pictures of a data set get no proposal.

Invariants (tests/plan/test_split.py): twice as many devices take half the time; two pools take no longer than the
slower; a proposed split fits and passes the checks of a start; its seconds are from `digen simulate` for the same
profile.
"""

import math
from dataclasses import dataclass, replace
from statistics import fmean

from verl_digen.algorithms.objectives import find_objective
from verl_digen.algorithms.outside import window_starts
from verl_digen.algorithms.window import Window
from verl_digen.hardware.devices import PEAK_TFLOPS, Pool
from verl_digen.sampling.prefix import SharedPrefix
from verl_digen.sampling.requests import plain_request
from verl_digen.tools.plan.compose import Mfu
from verl_digen.tools.plan.host import update_bytes
from verl_digen.tools.plan.memory import Memory, plan_memory
from verl_digen.tools.plan.run import Job, Settings
from verl_digen.tools.simulate.cluster import COLOCATED_TSP, Split, baselines, run_split
from verl_digen.tools.simulate.profile import NEVER, Numbers, Profile
from verl_digen.tools.simulate.splits import (
    SEARCH_STEPS,
    WORTH_CHANGING,
    Limits,
    Placed,
    best_of,
    placed_splits,
    pool_overrides,
    pooled_nodes,
    type_overrides,
)
from verl_digen.types import PromptRow, SampleRequest


@dataclass(frozen=True)
class StepTime:
    """FLOPs and seconds of one step."""

    generating_flops: float
    training_flops: float
    """Recomputation included."""
    generating_s: float | None
    """None if the device's peak is not known."""
    training_s: float | None
    step_s: float | None
    """max(generating_s, training_s) on separate pools with `digen.gap.enable`; else their sum."""


def plan_time(
    run: Job, device: str | None, mfu: Mfu, recomputed: float, generator_device: str | None = None, tile_rows: int = 1
) -> StepTime:
    """Time a step on devices of type `device`; `recomputed`: share of the blocks that backward recomputes;
    `generator_device`: type of the generator's devices, if another; `tile_rows`: rows of a tile."""
    settings, measured = run.settings, run.measured
    num_pictures = settings.num_begun * settings.num_turns
    alone = measured.flops.among(_generated_together(settings)).forward
    generating = num_pictures * generation_steps(settings) * alone
    flops = measured.flops.among(min(tile_rows, measured.rows_per_group))
    row = flops.training(is_frozen=settings.is_lora, recomputed=recomputed)
    is_joint = find_objective(settings.digen.loss_name).joint is not None
    further = is_joint + len(settings.policies_read) + _evaluations(settings) / settings.num_epochs
    row += further * flops.forward
    training = run.num_trained_rows * row * settings.num_epochs
    if device is None:
        return StepTime(generating, training, None, None, None)
    peak, peak_of_generator = (PEAK_TFLOPS[one] * 1e12 for one in (device, generator_device or device))
    generating_s = generating / (peak_of_generator * mfu.generating) / settings.num_generator_devices
    training_s = training / (peak * mfu.training) / settings.num_trainer_devices
    overlaps = settings.is_split and settings.digen.gap.enable
    step_s = max(generating_s, training_s) if overlaps else generating_s + training_s
    return StepTime(generating, training, generating_s, training_s, step_s)


def generation_steps(settings: Settings) -> float:
    """Denoising steps of a training sample that evaluate the network, mean over the places of the window."""
    digen = settings.digen
    if digen.num_generation_steps == 0:
        return 0.0
    first = plain_request(digen, PromptRow("", "", None, uid="p00000000"), 0, step=0, validate=False)
    windows = [first.window]
    if digen.window.kind == "consecutive" and first.window.sde_steps:
        starts = window_starts(digen.window, first.sampling.num_steps)
        spans = [tuple(range(start, start + digen.window.size)) for start in starts]
        windows = [Window(span, span) for span in spans]
    return fmean(_forwards(settings, replace(first, window=window)) for window in windows)


def _forwards(settings: Settings, first: SampleRequest) -> float:
    """Forwards of a sample, whose group shares what its samples in one process can (`verl_digen.sampling.prefix`)."""
    size, together = _in_one_process(settings), _generated_together(settings)
    tree = settings.digen.branches.tree(first.window)
    requests = [replace(first, sample_index=index, tree=tree) for index in range(together)]
    prefix = SharedPrefix(requests, [0] * together)
    alone = sum(len(prefix.lanes(step).rows) for step in range(first.sampling.num_steps)) / together
    begin = prefix.waiting[0].num_steps if prefix.waiting else 0
    return alone + (begin - prefix.ends[0][:begin].count(None)) / size


def _in_one_process(settings: Settings) -> int:
    """Samples of a group that one process generates."""
    size, rules = settings.group_size, settings.rules
    if settings.is_split:
        return min(size, rules.slot_chunk_size(settings.num_replicas * settings.digen.slots_per_replica))
    return min(size, -(-settings.num_samples // rules.num_trainer_ranks)) if settings.draws else size


def _generated_together(settings: Settings) -> int:
    """Samples of a group in a forward."""
    return min(_in_one_process(settings), settings.digen.rollout.batch_size) if settings.is_ours else 1


def _evaluations(settings: Settings) -> int:
    """Forwards of a row before the first optimizer step."""
    recomputed = ("first_pass", "recompute") if settings.has_several_updates else ("recompute",)
    return int(settings.digen.denominator in recomputed and "old" not in settings.policies_read)


GATHER_BYTES_PER_S = 160e9
"""Speed of an all-gather of weights, as in the shipped profiles: 0.8 of NVLink of an H800 in one direction."""
NETWORK_BYTES_PER_S = 50e9
"""Speed of weights to the replicas, as in the shipped profiles: one 400 Gbit/s port per device."""
HOST_BYTES_PER_S = 50e9
"""Speed of weights to the host and back, as in the shipped profiles: 0.8 of PCIe 5.0 x16."""


@dataclass(frozen=True)
class SplitPlan:
    """Simulated seconds of a step on the run's devices, split in several ways."""

    given: Split | None
    """None: one pool."""
    given_s: float | None
    together_s: float | None
    """All devices in turns, at the slowest type's speed, or one type alone; None if it does not fit."""
    together: str
    """Its devices, in words."""
    best: Placed | None
    """None if no split is allowed and fits."""
    best_s: float | None

    @property
    def gain(self) -> float | None:
        """Times as fast with the best split as it is configured; None if the one or the other is not known."""
        now_s = self.together_s if self.given is None else self.given_s
        return None if self.best_s is None or now_s is None else now_s / self.best_s

    @property
    def is_proposed(self) -> bool:
        """True if the best split is faster by enough, or one pool, as it is configured, does not fit."""
        return self.best is not None and (self.gain is None or self.gain >= WORTH_CHANGING)

    @property
    def overrides(self) -> list[str]:
        """Overrides for the best split, beside recipe disaggregated; empty without one."""
        if self.best is None:
            return []
        types = type_overrides(self.best.split.trainer, self.best.split.generator)
        return [*pool_overrides(self.best.trainer, self.best.generator), *types]


def plan_split(
    run: Job, types: tuple[str, str], device_bytes: int | None, mfu: Mfu, reward_s: float = 0.0
) -> SplitPlan | None:
    """Search the best split; None for runs whose generation the plan cannot time. `types`: of the trainer's and the
    generator's devices; `device_bytes`: the smaller memory of both, None: any split fits; `reward_s`: from a chunk's
    pixels to its rewards."""
    settings = run.settings
    if settings.digen.environment.is_on or plan_time(run, types[0], mfu, 0.0).generating_flops == 0:
        return None
    pools = [Pool(settings.num_trainer_devices, types[0])]
    if settings.is_split:
        pools.append(Pool(settings.num_generator_devices, types[1]))
    nodes = pooled_nodes(pools, (settings.trainer_devices_per_node, settings.generator_devices_per_node))
    limits = Limits(settings.fsdp_size, settings.sequence_parallel, settings.tensor_parallel)

    def profile_of(run: Job) -> tuple[Profile, bool]:
        """(profile, True unless the run does not fit)."""
        memory = plan_memory(run, device_bytes)
        return run_profile(run, memory, types[0], mfu, reward_s), memory.fits is not False

    def step_s(placed: Placed) -> float:
        resized = with_split(run, placed)
        profile, fits = profile_of(resized)
        return _split_s(resized, profile, placed.split) if fits else math.inf

    given = Split(*pools) if settings.is_split else None
    profile, fits = profile_of(_in_turns(run, sum(pool.num_devices for pool in pools)))
    together = min(
        (found for found in baselines(profile, pools) if found.name == COLOCATED_TSP), key=lambda found: found.step_s
    )
    allowed = () if settings.has_several_updates else placed_splits(nodes, limits)
    best, best_s = best_of(allowed, step_s) or (None, None)
    return SplitPlan(
        given=given,
        given_s=None if given is None else _split_s(run, profile_of(run)[0], given),
        together_s=together.step_s if fits else None,
        together=together.devices,
        best=best,
        best_s=best_s,
    )


def with_split(run: Job, placed: Placed) -> Job:
    """The run on separate pools of other sizes."""
    settings = replace(
        run.settings,
        num_trainer_devices=placed.split.trainer.num_devices,
        num_generator_devices=placed.split.generator.num_devices,
        is_split=True,
        rollout_name="diffusers" if run.settings.draws else run.settings.rollout_name,
        frees_replica=False,
        trainer_devices_per_node=placed.trainer.per_node,
        generator_devices_per_node=placed.generator.per_node,
    )
    return replace(run, settings=settings)


def _in_turns(run: Job, number: int) -> Job:
    """The run in one pool."""
    pool = {"num_trainer_devices": number, "num_generator_devices": number, "is_split": False}
    frees_replica = run.settings.frees_replica or run.settings.is_split
    return replace(run, settings=replace(run.settings, frees_replica=frees_replica, **pool))


def _split_s(run: Job, profile: Profile, split: Split) -> float:
    rules = run.settings.rules
    return run_split(profile, split, rules.techniques, num_steps=SEARCH_STEPS, rules=rules).step_s


def run_profile(run: Job, memory: Memory, device: str, mfu: Mfu, reward_s: float = 0.0) -> Profile:
    """The run as a profile for devices of type `device`: its rows and steps together take what the plan says."""
    settings, counts = run.settings, run.measured.counts
    time = plan_time(run, device, mfu, memory.recomputed_share, tile_rows=memory.training.num_rows)
    peak = PEAK_TFLOPS[device] * 1e12
    num_steps = settings.digen.num_generation_steps
    num_rows = max(1, round(run.num_trained_rows / settings.num_samples))
    gathers = settings.num_shards > 1 and settings.reshard
    shard_bytes = counts.num_params / run.measured.num_experts * settings.dtypes.compute.itemsize
    numbers = Numbers(
        num_prompts=settings.num_prompts,
        group_size=settings.group_size,
        num_steps=num_steps,
        num_trained_steps=num_rows,
        max_chunk_size=settings.digen.rollout.batch_size,
        rows_per_tile=max(1, memory.training.num_rows),
        min_trainer_devices=1,
        min_gathering_devices=NEVER,
        step_s=time.generating_flops / settings.num_begun / num_steps / (peak * mfu.generating),
        decode_s=0.0,
        row_s=time.training_flops / (settings.num_samples * num_rows) / (peak * mfu.training),
        gather_s=shard_bytes / GATHER_BYTES_PER_S if gathers else 0.0,
        score_s=reward_s,
        commit_s=update_bytes(run) / NETWORK_BYTES_PER_S,
        switch_s=0.0 if settings.draws else 2 * run.measured.transformer_bytes / HOST_BYTES_PER_S,
    )
    return Profile("plan", run.measured.title, "calculated by digen plan", device, numbers)


def split_lines(plan: SplitPlan, words: str) -> list[str]:
    """The proposal for people. `words`: to type for the best split, if it is proposed."""
    ways = [] if plan.given is None else [f"{plan.given} takes {plan.given_s:.1f} s a step"]
    if plan.together_s is not None:
        ways.append(f"{plan.together}, in turns, {plan.together_s:.1f} s")
    elif plan.given is None:
        ways.append("one pool does not fit")
    lines = [f"simulated on these seconds, not measured: {'; '.join(ways)}"]
    known = [seconds for seconds in (plan.given_s, plan.best_s) if seconds is not None]
    if plan.given is not None and plan.together_s is not None and plan.together_s * WORTH_CHANGING <= min(known):
        lines.append(
            f"  in turns they are {min(known) / plan.together_s:.2f} times as fast as with the best split: leave out "
            "recipe disaggregated"
        )
    if plan.best is None:
        return [*lines, "  no split into trainer and generator is allowed and fits"]
    if not plan.is_proposed:
        best = f"{plan.best.split}, {plan.best_s:.1f} s"
        return [*lines, f"  no split is faster by more than {WORTH_CHANGING - 1:.0%}; the best that fits: {best}"]
    faster = f", {plan.gain:.2f} times as fast" if plan.gain is not None else ""
    return [
        *lines,
        f"  best split: {plan.best.split.trainer} train, {plan.best.split.generator} generate, "
        f"{plan.best_s:.1f} s a step{faster}:",
        f"    {words}",
    ]
