# SPDX-License-Identifier: Apache-2.0
"""Probe request: proves that a replica generates with the weights it was sent; see `verl_digen.weights.probe`.

It is an ordinary request through the whole engine: one 64 x 64 px picture (one frame of a video) from noise of a fixed
seed, with a fixed prompt, by a few ODE steps without guidance, with the adapter or the weights that were just
activated. The network's velocities follow from the recorded latents:

    v = (x' - x) / (sigma' - sigma)

- The engine runs it alone (`engine.BarrierScheduler`), so that the same weights give the same numbers.
- The last step is not recorded. The others run every network of the checkpoint.

Invariants (tests/vllm_omni/test_probing.py, on the engine probes.py): the same weights give bitwise the same
fingerprint, whatever samples are in flight; any change of any network's weights that changes its output changes it.
"""

from __future__ import annotations

import torch

from verl_digen.algorithms.window import Window
from verl_digen.inputs import PromptInputs
from verl_digen.models.base import DiffusionModel
from verl_digen.rollout.fingerprint import GEOMETRY, PROMPT, SEED, summary
from verl_digen.rollout.vllm_omni.requests import RecordingOrder
from verl_digen.types import PathRecord, SampleRequest, Sampling, Trajectory

UID = "probe"
"""uid of a probe's request."""
LEAST_STEPS, MOST_STEPS = 3, 100
"""Bounds on a probe's denoise steps, including the unrecorded last one; steps are added until every network runs."""


def probe_order(model: DiffusionModel) -> RecordingOrder:
    """The probe's request and recording order.

    Raises:
        RuntimeError: a network of the checkpoint runs in no recorded step of any schedule.
    """
    num_steps = _num_steps(model)
    recorded = tuple(range(num_steps - 1))
    # noise level 0: the recorded steps are ODE steps
    sampling = Sampling(GEOMETRY, num_steps, true_cfg_scale=1.0, law="flow", noise_level=0.0)
    request = SampleRequest(UID, 0, PromptInputs(PROMPT), PromptInputs(""), Window(recorded, recorded), sampling)
    return RecordingOrder(request, SEED, torch.float32, is_probe=True)


def fingerprint_of(model: DiffusionModel, trajectory: Trajectory) -> tuple[float, ...]:
    """Root mean square and ±1 projection of the velocities, for each network of the checkpoint in order.

    Args:
        trajectory: generated from `probe_order`.
    """
    record = trajectory.record
    assert isinstance(record, PathRecord), "a probe's request has no noise levels"
    latents = record.latents.double()
    moved = latents[record.positions + 1] - latents[record.positions]
    passed = (record.next_sigmas - record.sigmas).double()
    velocities = moved / passed.view(-1, *[1] * (moved.dim() - 1))
    experts = model.expert_of(record.sigmas)
    return tuple(number for expert in range(len(model.experts)) for number in summary(velocities[experts == expert]))


def _num_steps(model: DiffusionModel) -> int:
    """Smallest number of steps for which the recorded steps run every network."""
    for num_steps in range(LEAST_STEPS, MOST_STEPS + 1):
        recorded = model.sigmas(num_steps, GEOMETRY)[: num_steps - 1]
        if model.expert_of(recorded).unique().numel() == len(model.experts):
            return num_steps
    raise RuntimeError(
        f"a probe must run each of the networks {', '.join(model.experts)}, but a schedule of up to {MOST_STEPS} steps "
        "leaves one out; digen.rollout.probe_every=0 turns probes off"
    )
