# SPDX-License-Identifier: Apache-2.0
"""A colocated step as verl-omni's published recipe runs it, from a profile's numbers and a few of verl-omni's. Pure.

    generate   ceil(P*G / N) samples per device, one at a time:     samples * (T step_s + decode_s) * generation_factor
    score      in turns, on the same devices:                       P*G * reward_s / N + score_s
               elsewhere, on devices of its own:                    score_s, the rest overlaps with generation
    switch     weights out and in again:                            switch_s * switch_factor
    replay     log-probs of every row in a forward of their own,    q = ceil(samples / N) samples per rank, in
               then the batch in `num_updates` optimizer steps:     micro-batches of at most m samples; for each and
                                                                    each of K timesteps
                                                                    max(samples * seconds * replay_factor, gathers)

`seconds` is step_s with one gather for a log-prob (a forward), row_s with two for training; gathers as in
`verl_digen.tools.simulate.cluster`. K is the profile's: `windowed` gives the published window. Reward and gathers
aside, all of it is a multiple of the profile's own seconds, so that other models and devices are run the same way.

*Calibration.* `VERL_OMNI` says of every number whether it was published, derived from published ones, or fitted. Two
are fitted, to two published steps (`PUBLISHED`), and no run but this one reads them.

Invariants (tests/examples/research/test_baselines.py): the published steps come out within 5 %; without factors,
passes, extra updates and in micro-batches of one, a step is that of `run_colocated` without TSP; none of these makes a
step shorter.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from verl_digen.hardware.devices import Pool
from verl_digen.tools.simulate.cluster import SteadyRun, sample_s, turns_outcome
from verl_digen.tools.simulate.profile import Numbers, Profile, windowed

NAME = "as-verl-omni"
"""Name of such a run in tables."""

Reward = Literal["in turns", "elsewhere"]
"""Place of the reward model: the same devices, in turns with generation and training, or devices of its own."""


@dataclass(frozen=True)
class Way:
    """Numbers of a way to run a colocated step."""

    num_updates: int
    """Optimizer steps on a batch."""
    samples_per_micro_batch: int
    """Samples, of one timestep, in a forward and backward."""
    log_prob_samples: int
    """Samples, of one timestep, in a forward of the log-prob pass; 0: no such pass."""
    generation_factor: float
    """Seconds to generate a sample over the profile's."""
    replay_factor: float
    """Seconds of forwards and backwards of the trainer over the profile's."""
    switch_factor: float
    """Seconds of a switch between generation and training over the profile's."""
    reward_s: float
    """Device-seconds to score a sample where the reward takes turns, with what it takes to make room for it."""


WINDOW = 2
"""Trained steps of the published recipe: `sde_window_size=2` in run_qwen_image_ocr_lora.sh."""

VERL_OMNI = Way(
    # published: train_batch_size=32 and ppo_mini_batch_size=16 prompts (run_qwen_image_ocr_lora.sh)
    num_updates=2,
    # published: ppo_micro_batch_size_per_gpu=16, one timestep after the other (docs/algo/flowgrpo.md, Batch size)
    samples_per_micro_batch=16,
    # published: rollout.log_prob_micro_batch_size_per_gpu=32 (run_qwen_image_ocr_lora.sh)
    log_prob_samples=32,
    # published: requests one at a time over requests in batches, Qwen-Image LoRA, 32 x 16 samples of 512 px
    # (docs/start/rollout_batching.md)
    generation_factor=226.4 / 107.9,
    # fitted to the step of 360 s: parameters are offloaded, gradients are reduced for each micro-batch and timestep,
    # each branch of the guidance is a forward
    replay_factor=1.40,
    # derived: timing_s/update_weights (published: pull request #52) over switch_s of the profile qwen-image-20b
    switch_factor=10.2 / 1.632,
    # fitted to the difference of 420 and 360 s: 60 s of 4 devices for 512 samples with Qwen3-VL-8B
    reward_s=0.47,
)
"""verl-omni when its two steps were published, with the source of each number in github.com/verl-project/verl-omni."""


@dataclass(frozen=True)
class PublishedStep:
    """A step time that verl-omni published."""

    name: str
    step_s: float
    num_devices: int
    """Devices that generate and train; H800, or of its peak compute."""
    num_reward_devices: int
    """Devices of the reward's own; 0: it takes turns."""
    is_fitted: bool
    """True if `VERL_OMNI` was fitted to it."""
    has_guidance: bool = True
    trains_all: bool = False
    """True if all weights are trained, not a LoRA."""
    source: str = "docs/algo/performance.md"

    @property
    def reward(self) -> Reward:
        """Place of the reward model."""
        return "elsewhere" if self.num_reward_devices else "in turns"


PUBLISHED = (
    PublishedStep("LoRA, reward in turns", 420.0, 4, 0, is_fitted=True),
    PublishedStep("LoRA, reward on a 5th device", 360.0, 4, 1, is_fitted=True),
    PublishedStep("LoRA, reward in turns, one logged step", 408.8, 4, 0, is_fitted=False, source="pull request #52"),
    PublishedStep("full weights, no guidance, H200", 250.0, 4, 0, is_fitted=False, has_guidance=False, trains_all=True),
    PublishedStep(
        "full weights, no guidance, 64 H100", 105.0, 64, 0, is_fitted=False, has_guidance=False, trains_all=True
    ),
)
"""Steps of Qwen-Image, 32 prompts x 16 samples of 512 px, 10 denoise steps, a window of 2."""


def step_parts(profile: Profile, pool: Pool, way: Way = VERL_OMNI, reward: Reward = "in turns") -> dict[str, float]:
    """Seconds of the parts of a step; the formulas are in the module's docstring."""
    numbers, slowdown = profile.numbers, pool.slowdown(profile.device)
    num_samples = numbers.num_prompts * numbers.group_size
    log_probs_s, factor = 0.0, way.replay_factor * slowdown
    if way.log_prob_samples:
        log_probs_s = replay_s(numbers, num_samples, pool, way.log_prob_samples, numbers.step_s * factor, 1)
    in_turns_s = num_samples * way.reward_s * slowdown / pool.num_devices if reward == "in turns" else 0.0
    updates_s = 0.0
    for prompts in even_parts(numbers.num_prompts, way.num_updates):
        in_update = prompts * numbers.group_size
        updates_s += numbers.commit_s
        updates_s += replay_s(numbers, in_update, pool, way.samples_per_micro_batch, numbers.row_s * factor, 2)
    return {
        "generate": -(-num_samples // pool.num_devices) * sample_s(numbers, slowdown) * way.generation_factor,
        "score": numbers.score_s + in_turns_s,
        "log-probs": log_probs_s,
        "updates": updates_s,
        "switch": numbers.switch_s * way.switch_factor,
    }


def replay_s(
    numbers: Numbers, num_samples: int, pool: Pool, samples_per_batch: int, one_s: float, num_gathers: int
) -> float:
    """Seconds of the rank with most samples to take all timesteps of its samples, one timestep at a time.

    Args:
        one_s: seconds of one sample at one timestep.
    """
    gathers_s = num_gathers * numbers.gather_s * (pool.num_devices - 1) / pool.num_devices
    num_full, rest = divmod(-(-num_samples // pool.num_devices), samples_per_batch)
    batches_s = num_full * max(samples_per_batch * one_s, gathers_s)
    return numbers.num_trained_steps * (batches_s + (max(rest * one_s, gathers_s) if rest else 0.0))


def even_parts(number: int, num_parts: int) -> list[int]:
    """Split a number into parts as even as they can be, without empty ones."""
    smaller, num_larger = divmod(number, num_parts)
    return [part for part in [smaller + 1] * num_larger + [smaller] * (num_parts - num_larger) if part]


def run_verl_omni(profile: Profile, pool: Pool, way: Way = VERL_OMNI, reward: Reward = "in turns") -> SteadyRun:
    """Simulate a step as verl-omni runs it; the window is the profile's."""
    seconds = step_parts(profile, pool, way, reward)
    num_samples = profile.numbers.num_prompts * profile.numbers.group_size
    training_s = seconds["log-probs"] + seconds["updates"]
    generate_s = way.generation_factor * sample_s(profile.numbers, pool.slowdown(profile.device))
    busy_s = num_samples / pool.num_devices * generate_s
    busy_s += seconds["score"] - profile.numbers.score_s + training_s
    return turns_outcome(profile, pool, NAME, step_s=sum(seconds.values()), busy_s=busy_s)


def simulated_step_s(profile: Profile, published: PublishedStep, way: Way = VERL_OMNI) -> float:
    """Simulated seconds of a published step, on the devices of the profile.

    Without guidance a forward is half of the profile's; where all weights are trained, a backward is two forwards.
    """
    numbers = windowed(profile, WINDOW).numbers
    forward_s = numbers.step_s / (1 if published.has_guidance else 2)
    row_s = numbers.row_s / (1 if published.has_guidance else 2) + (forward_s if published.trains_all else 0.0)
    changed = replace(numbers, step_s=forward_s, row_s=row_s)
    pool = Pool(published.num_devices, profile.device)
    return sum(step_parts(replace(profile, numbers=changed), pool, way, published.reward).values())
