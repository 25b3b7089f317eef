# SPDX-License-Identifier: Apache-2.0
"""The gate `digen.rollout.max_log_prob_gap`: replicas and trainer must compute alike."""

from __future__ import annotations

from collections.abc import Mapping

from verl_digen.errors import RunStopped

GAP = "rollout/log_prob_gap_max"


def check_log_prob_gap(metrics: Mapping[str, float], max_gap: float | None, *, step: int) -> None:
    """Stop a run whose trainer computes other log-probs for the recorded steps than its replicas did.

    Args:
        metrics: metrics of the step; without recorded log-probs there is no gap.
        max_gap: in nats; None: no limit.

    Raises:
        RunStopped: the gap is larger, or not a number.
    """
    if max_gap is None or GAP not in metrics:
        return
    gap = metrics[GAP]
    if not gap <= max_gap:  # also true for nan
        raise RunStopped(
            f"step {step}: {GAP} must be <= digen.rollout.max_log_prob_gap={max_gap:g} nats, got {gap:g}: replicas and "
            "trainer do not compute alike. If rollout/version_age_max_versions is 0, compare "
            "actor_rollout_ref.rollout.dtype with actor_rollout_ref.actor.fsdp_config.mixed_precision.param_dtype, and "
            "look at quantisation, caching or compilation of the replicas, and digen.rollout.latents_dtype. If the gap "
            "was always of this size and training is sound, raise the bound"
        )
