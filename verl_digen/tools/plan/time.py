# SPDX-License-Identifier: Apache-2.0
"""Seconds of a step, calculated at an assumed share of the devices' peak, not measured.

- Generation: T forwards per sample, redundant ones included, or per turn of an episode; none for a picture of the data
  set. Steps that the solver passes over (`digen.sampling.outside`) are left out, mean over the places of the window;
  those that its cache skips are not known beforehand, and count.
- Training: forward and backward per row, plus one forward if old log-probs are recomputed, one for each other policy
  that the loss reads, and one for a joint column.
- Not counted: text encoding, decoding, rewards, the time of environments, weight updates, communication and waiting. So
  a real step takes longer; `digen simulate` estimates by how much, and for which split.

Invariant (tests/plan/test_time.py): twice as many devices take half the time; two pools take no longer than the slower.
"""

from __future__ import annotations

from dataclasses import dataclass

from verl_digen.algorithms.objectives import find_objective, objective_names
from verl_digen.algorithms.outside import mean_steps_taken
from verl_digen.config import DigenConfig
from verl_digen.hardware.devices import PEAK_TFLOPS
from verl_digen.tools.plan.run import Run, Settings

SHOWN_STEPS = 100


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

    def run_words(self, settings: Settings) -> str:
        """Hours of the run, or of SHOWN_STEPS where its steps are as many as its epochs have; `step_s` is known."""
        assert self.step_s is not None
        num_steps = settings.num_steps or SHOWN_STEPS
        hours = self.step_s * num_steps / 3600
        shown = f"{hours:.3g} h" if hours >= 1 else f"{hours * 60:.3g} min"
        return f"{num_steps} steps in {shown} or more, {hours * settings.num_devices:.3g} GPU-hours"


def plan_time(
    run: Run, device: str | None, mfu: float, recomputed: float, generator_device: str | None = None
) -> StepTime:
    """Time a step on devices of type `device` that reach the share `mfu` of their peak.

    Args:
        recomputed: share of the blocks that backward recomputes.
        generator_device: type of the generator's devices; None: `device`.
    """
    settings, measured = run.settings, run.measured
    num_pictures = settings.num_begun * settings.num_turns
    generating = num_pictures * _generation_steps(settings.digen) * measured.flops.forward
    row = measured.flops.training(is_frozen=settings.is_lora, recomputed=recomputed)
    row += _further_forwards(settings) * measured.flops.forward
    training = run.num_trained_rows * row
    if device is None:
        return StepTime(generating, training, None, None, None)
    trains, generates = (PEAK_TFLOPS[kind] * 1e12 * mfu for kind in (device, generator_device or device))
    generating_s = generating / generates / settings.num_generator_devices
    training_s = training / trains / settings.num_trainer_devices
    overlaps = settings.is_split and settings.digen.gap.enable
    step_s = max(generating_s, training_s) if overlaps else generating_s + training_s
    return StepTime(generating, training, generating_s, training_s, step_s)


def _generation_steps(digen: DigenConfig) -> float:
    """Denoising steps of a training sample that evaluate the network."""
    num_steps = digen.num_generation_steps if digen.loss_name in objective_names() else digen.sampling.num_steps
    outside = digen.sampling.outside
    return mean_steps_taken(outside, digen.window, num_steps) if outside.passes_over else num_steps


def _further_forwards(settings: Settings) -> int:
    """Forwards of a row besides the one that trains."""
    digen = settings.digen
    has_joint = digen.loss_name in objective_names() and find_objective(digen.loss_name).joint is not None
    return int(digen.old_log_probs == "recompute") + int(has_joint) + len(settings.policies_read)
