# SPDX-License-Identifier: Apache-2.0
"""Remarks on a run's numerics, once, after its first steps: rounding against the clip range, gradients against Adam's
eps. Pure. `docs/numerics.md` lists the metrics with their healthy values.

The noise floor is the mean distance between the trainer's log-probs and those recorded at generation, under the same
weights. At a third of the clip range rounding alone takes more than one ratio of a hundred out of it: the mean of |x|
of a normal variable is 0.8 of its standard deviation, so that the clip lies at 2.4 of these.

Example, one optimizer step per batch, replicas and trainer in bf16:
    remarks = FirstSteps({"clip_range": 1e-4}, is_recorded=True, num_steps=1)
    remarks.observe({"rollout/log_prob_gap_mean": 4e-6, "rollout/log_prob_gap_max": 1.4e-5,
                     "rollout/version_age_max_versions": 0.0})
    # [Remark("noise floor: ... 4 % of digen.loss.clip_range=0.0001 ...", is_warning=False)]
    remarks.observe(...)  # []
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean

NUM_STEPS = 3
"""Steps that are looked at."""
LARGEST_FLOOR = 1 / 3
"""Noise floor as a share of the clip range from which on a run is warned."""
SMALLEST_RMS_TO_EPS = 10.0
"""RMS of the gradient's entries over Adam's eps below which a run is warned."""

GAP_MEAN, GAP_MAX = "rollout/log_prob_gap_mean", "rollout/log_prob_gap_max"
AGE = "rollout/version_age_max_versions"
RMS_TO_EPS, EPS_SHARE, RMS = "actor/grad_rms_to_eps", "actor/eps_bound_share", "actor/grad_rms"


@dataclass(frozen=True)
class Remark:
    """One line for the log."""

    text: str
    is_warning: bool


class FirstSteps:
    """See the module.

    Args:
        clip_widths: keys under `digen.loss` -> distance from 1 at which they clip a ratio; empty for other losses.
        is_recorded: True if the clipped ratio is against log-probs recorded at generation.
    """

    def __init__(self, clip_widths: Mapping[str, float], *, is_recorded: bool, num_steps: int = NUM_STEPS):
        self._clip_widths, self._is_recorded, self._num_steps = clip_widths, is_recorded, num_steps
        self._gaps: list[tuple[float, float]] | None = []
        """(mean, max) of each step without stale samples; None: reported already."""
        self._sizes: list[Mapping[str, float]] | None = []
        self._num_seen = 0

    def observe(self, metrics: Mapping[str, float]) -> list[Remark]:
        """Remarks that are due after a step with these metrics."""
        self._num_seen += 1
        is_late, remarks = self._num_seen >= self._num_steps, []
        is_stale = metrics.get(AGE, 0.0) > 0
        if self._gaps is not None:
            if GAP_MEAN in metrics and not is_stale:
                self._gaps.append((metrics[GAP_MEAN], metrics[GAP_MAX]))
            if self._gaps and (is_late or is_stale):
                mean, largest = fmean(gap for gap, _ in self._gaps), max(gap for _, gap in self._gaps)
                remarks.append(self._noise_remark(mean, largest))
                self._gaps = None
        if self._sizes is not None:
            if RMS_TO_EPS in metrics:
                self._sizes.append(metrics)
            if self._sizes and is_late:
                remarks += _eps_remarks(self._sizes)
                self._sizes = None
        return remarks

    def _noise_remark(self, mean: float, largest: float) -> Remark:
        text = (
            f"noise floor: log-probs of replicas and trainer differ by {mean:.1e} on average and {largest:.1e} at "
            "most, under the same weights"
        )
        if not self._clip_widths:
            return Remark(f"{text}; the loss has no clip range that this could fill", is_warning=False)
        key, width = min(self._clip_widths.items(), key=lambda item: item[1])
        text += f"; that is {100 * mean / width:.2g} % of digen.loss.{key}={width:g}"
        if not self._is_recorded:
            return Remark(
                f"{text}, and does not reach the ratio, which compares log-probs of the trainer alone", is_warning=False
            )
        if mean <= LARGEST_FLOOR * width:  # false for nan
            return Remark(f"{text}, with which the ratio compares recorded log-probs", is_warning=False)
        return Remark(
            f"{text}, and ratios against recorded log-probs are clipped for rounding alone: set it to {3 * mean:.0e} "
            "or more, or compute more precisely on both sides (actor_rollout_ref.rollout.dtype and actor_rollout_ref."
            "actor.fsdp_config.mixed_precision.param_dtype, fp16 or fp32), or compare with the trainer's own log-probs "
            "(digen.staleness.max_versions=0 and digen.loss.old_log_probs=auto, where the loss has it)",
            is_warning=True,
        )


def _eps_remarks(sizes: list[Mapping[str, float]]) -> list[Remark]:
    """A warning if gradients are small against Adam's eps; else nothing."""
    ratio = fmean(metrics[RMS_TO_EPS] for metrics in sizes)
    if ratio >= SMALLEST_RMS_TO_EPS:
        return []
    rms, share = fmean(metrics[RMS] for metrics in sizes), fmean(metrics[EPS_SHARE] for metrics in sizes)
    return [
        Remark(
            f"gradients are small against Adam's eps: their entries have an RMS of {rms:.1e}, {ratio:.2g} times eps, "
            f"and eps holds back {100 * share:.0f} % of the trained parameters; lower it with "
            "+actor_rollout_ref.actor.optim.override_optimizer_config.eps=1e-15",
            is_warning=True,
        )
    ]
