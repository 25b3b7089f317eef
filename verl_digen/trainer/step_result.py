# SPDX-License-Identifier: Apache-2.0
"""Facts about a committed step, and the metrics that are made of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from verl_digen.errors import RunStopped
from verl_digen.models.flops import utilisation_metrics
from verl_digen.observe.metrics import (
    call_metrics,
    episode_metrics,
    perf_metrics,
    reward_metrics,
    spared_metrics,
    staleness_metrics,
    training_metrics,
    tree_metrics,
)
from verl_digen.types import SampleTag

GAP = "rollout/log_prob_gap_max"


@dataclass(frozen=True)
class StepResult:
    """A committed step, as the trainer's siblings return it."""

    samples: Mapping[str, SampleTag]
    """Key -> tag of each trained sample, group after group."""
    training: Mapping[str, float]
    """Metrics of the optimizer steps, by the engine's names."""
    train_s: float
    """Seconds in the engine's training calls."""
    num_refilled_groups: int
    num_assisted: int = 0
    """Samples that the trainer's ranks generated."""
    facts: Mapping[str, float] = field(default_factory=dict)
    """Further metrics, under their final names."""

    @property
    def tags(self) -> list[SampleTag]:
        return list(self.samples.values())


def result_metrics(result: StepResult, *, trained_version: int, **times: Any) -> dict[str, float]:
    """Metrics of a step from its result, without utilisation. `trained_version`: weight version before the step;
    `times`: further arguments of `perf_metrics`."""
    return {
        **training_metrics(result.training),
        **result.facts,
        **reward_metrics(result.tags),
        **call_metrics(result.tags),
        **spared_metrics(result.tags),
        **tree_metrics(result.tags),
        **episode_metrics(result.tags),
        **staleness_metrics(result.tags, trained_version=trained_version),
        **perf_metrics(result.tags, train_s=result.train_s, **times),
        "rollout/refilled_groups": float(result.num_refilled_groups),
    }


def utilisation(
    result: StepResult, metrics: Mapping[str, float], *, num_steps: int, devices: Mapping[str, tuple[int, str | None]]
) -> dict[str, float]:
    """`perf/tflops_per_device/POOL` and, where the device's peak is known, `perf/mfu/POOL` of one step.

    | pool | useful work, calculated from the FLOPs of the layers | time, measured |
    | --- | --- | --- |
    | trainer | forward and backward of every trained row | `perf/train_s`, in the engine's calls |
    | generator | all denoise steps of the trained samples | `perf/generate_s`, in which any sample was generated |

    Useful work excludes recomputation, old log-probs and the KL reference (`verl_digen.engine.build`), text encoding,
    decoding, and discarded samples. A prompt's tokens count for every row, also where rows share them
    (`FlopsLayout.shares_prompts`). The time excludes nothing. Samples that the trainer generated are work of neither
    pool; `perf/generate_s` includes their time, so with assistance the generator's share is a lower bound. Of the
    denoising steps of a sample, `num_steps`, a guided one counts once. `metrics` are `result_metrics` of the step;
    `devices`: pool -> their number, and the platform's name of the first, None for a CPU.
    """
    spared = sum(tag.facts.num_shared_steps + tag.facts.num_skipped_steps for tag in result.tags)
    num_pictures = sum(len(tag.generations) for tag in result.tags)
    num_forwards = max(0, (num_pictures - result.num_assisted) * num_steps - spared)
    work = {
        "trainer": (metrics["actor/num_rows"] * metrics["actor/row_training_flops"], metrics["perf/train_s"]),
        "generator": (num_forwards * metrics["actor/row_forward_flops"], metrics["perf/generate_s"]),
    }
    return {
        name: value
        for pool, (flops, seconds) in work.items()
        for name, value in utilisation_metrics(pool, flops, seconds, *devices[pool]).items()
    }


def check_log_prob_gap(metrics: Mapping[str, float], max_gap: float | None, *, step: int) -> None:
    """Raise RunStopped if the trainer computes other log-probs for the recorded steps than its replicas did: the step's
    gap is larger than `max_gap`, in nats, or not a number. None: no limit; without recorded log-probs there is no
    gap."""
    if max_gap is None or GAP not in metrics:
        return
    gap = metrics[GAP]
    if not gap <= max_gap:  # also true for nan
        raise RunStopped(
            f"step {step}: {GAP} must be <= digen.rollout.max_log_prob_gap={max_gap:g} nats, got {gap:g}: replicas and "
            "trainer do not agree numerically. If rollout/version_age_max_versions is 0, compare "
            "actor_rollout_ref.rollout.dtype with actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype, and "
            "look at quantisation, caching or compilation of the replicas, and digen.rollout.latents_dtype. If the gap "
            "was always of this size and training is sound, raise the bound"
        )
