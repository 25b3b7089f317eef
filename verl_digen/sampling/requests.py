# SPDX-License-Identifier: Apache-2.0
"""Sample requests, made from the config and a prompt. Pure functions, but for the hashes of a prompt's images."""

from __future__ import annotations

from verl_digen.algorithms.forward import draw_noise_levels
from verl_digen.algorithms.window import Window, draw_window
from verl_digen.config import DigenConfig
from verl_digen.inputs import PromptInputs, image_file
from verl_digen.types import Geometry, PromptRow, SampleRequest, Sampling

SINGLE_TURN = "diffusion_single_turn"
"""`actor_rollout_ref.rollout.agent.default_agent_loop` of a run without a custom agent loop."""
ODE_ONLY = Window(sde_steps=(), train_steps=())
"""No stochastic step and no recorded one: validation, and samples that train at forward points."""


def request_id(uid: str, sample_index: int) -> str:
    """Id of a request on a replica's server."""
    return f"{uid}_{sample_index}"


def condition_key(digen: DigenConfig, row: PromptRow) -> str:
    """Key of the prompt's conditions, unless a custom agent loop rewrites the prompt."""
    return sample_request(digen, row, 0, step=0, validate=False).condition_key


def num_points(digen: DigenConfig) -> int:
    """Rows of one training sample, equal for all groups: its trained steps, or its forward points."""
    request = sample_request(digen, PromptRow("", "", None), 0, step=0, validate=False)
    if request.noise_levels is not None:
        return len(request.noise_levels.steps)
    return len(request.window.train_steps)


def sample_request(
    digen: DigenConfig, row: PromptRow, sample_index: int, *, step: int, validate: bool
) -> SampleRequest:
    """One sample's request.

    Args:
        row: the prompt. The window and the noise levels are functions of its uid and the run seed, so a group shares
            them.
        step: the optimizer step that the sample is for; moves a MixGRPO window.
        validate: True for a deterministic validation sample.

    Raises:
        ValueError: an image of the prompt cannot be read.
    """
    config = digen.sampling
    num_steps = config.val_num_steps if validate else config.num_steps
    window, noise_levels = ODE_ONLY, None
    if not validate and digen.trains_forward_points:
        noise_levels = draw_noise_levels(digen.forward, run_seed=digen.seed, uid=row.uid, num_steps=num_steps)
    elif not validate:
        window = draw_window(digen.window, run_seed=digen.seed, uid=row.uid, num_steps=num_steps, step=step)
    images = tuple(image_file(path) for path in row.images)
    negative = config.negative_prompt if row.negative is None else row.negative
    return SampleRequest(
        uid=row.uid,
        sample_index=sample_index,
        inputs=PromptInputs(row.text, images),
        negative_inputs=PromptInputs(negative, images),
        window=window,
        sampling=Sampling(
            geometry=Geometry(config.height_px, config.width_px, config.num_frames),
            num_steps=num_steps,
            true_cfg_scale=config.val_true_cfg_scale if validate else config.true_cfg_scale,
            law=digen.sde.law,
            noise_level=digen.sde.noise_level,
            shared_initial_noise=config.shared_initial_noise,
            guidance_scale=config.guidance_scale,
            solver=config.val_solver if validate else config.solver,
            sa_noise=config.sa_noise,
            sa_low=config.sa_low,
            sa_high=config.sa_high,
        ),
        noise_levels=noise_levels,
        wants_condition=sample_index == 0 and not validate,
    )
