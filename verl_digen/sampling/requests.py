# SPDX-License-Identifier: Apache-2.0
"""Sample requests, made from the config and a prompt, and the planner's rules, from the config."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from verl_digen.algorithms.forward import draw_noise_levels
from verl_digen.algorithms.outside import EXACT
from verl_digen.algorithms.solvers import SolverNoise
from verl_digen.algorithms.window import Window, draw_window
from verl_digen.config import DigenConfig, SamplingConfig
from verl_digen.inputs.images import PromptInputs, SourceImage, source_image
from verl_digen.inputs.sizes import IMAGE_SIZES
from verl_digen.schedulers.rules import BatchRules
from verl_digen.types import Condition, Geometry, PromptRow, SampleRequest, Sampling

SINGLE_TURN = "diffusion_single_turn"
"""`actor_rollout_ref.rollout.agent.default_agent_loop` of a run without a custom agent loop."""
ODE_ONLY = Window(sde_steps=(), train_steps=())
"""No stochastic step and no recorded one: validation, and samples that train at forward points."""


def geometry_of(config: SamplingConfig, images: Sequence[tuple[int, int]]) -> Geometry:
    """Size of the picture, and of the images of its prompt as the network reads them, from (width, height) in px of
    each as it lies in its file."""
    sizes = IMAGE_SIZES[config.image_sizes]
    height, width = config.height_px, config.width_px
    if config.size_from_image and images:
        height, width = sizes.picture(*images[sizes.shaped_by], height * width)
    read, area_px = sizes.read, config.image_px**2
    sources = [(height, width) if read is None else read(*image, area_px) for image in images]
    return Geometry(height, width, config.num_frames, tuple(sources))


def inputs_of(text: str, images: tuple[SourceImage, ...], geometry: Geometry, image_px: int) -> PromptInputs:
    """Inputs of one branch of guidance, for a picture or video of this size."""
    size = (geometry.num_frames, geometry.height_px, geometry.width_px) if images else None
    return PromptInputs(text, images, image_px, size)


def planned_geometry(config: SamplingConfig, num_images: int) -> Geometry:
    """Geometry of a prompt with images of the shape that pictures have without images: `digen.sampling.planned_images`
    of them, or the least number of the model's prompts, `num_images`."""
    number = num_images if config.planned_images is None else config.planned_images
    return geometry_of(config, [(config.width_px, config.height_px)] * number)


def request_id(uid: str, sample_index: int) -> str:
    """Id of a request on a replica's server."""
    return f"{uid}_{sample_index}"


def condition_key(digen: DigenConfig, row: PromptRow) -> str:
    """Key of the prompt's conditions, unless a custom agent loop rewrites the prompt."""
    return plain_request(digen, row, 0, step=0, validate=False).condition_key


def rows_per_group(digen: DigenConfig, group_size: int) -> int:
    """Rows of the samples of a group, equal for all groups: each one's trained steps or forward points, or the trained
    edges of its tree."""
    request = plain_request(digen, PromptRow("", "", None), 0, step=0, validate=False)
    if request.tree is not None:
        return request.tree.num_edges(request.window.train_steps)
    points = request.window.train_steps if request.noise_levels is None else request.noise_levels.steps
    return group_size * len(points)


def sample_request(
    digen: DigenConfig, row: PromptRow, sample_index: int, *, step: int, validate: bool
) -> SampleRequest:
    """One sample's request; a deterministic one to `validate`. The window and the noise levels are functions of the
    prompt's uid and the run seed, so a group shares them; a MixGRPO window moves with `step`, the optimizer step that
    the sample is for.

    ValueError if an image of the prompt, or a picture of its pair, cannot be read, or the model's pipeline does not
    take it.
    """
    request = plain_request(digen, row, sample_index, step=step, validate=validate)
    _check_images(digen.sampling, request)
    is_picture = digen.trains_pairs and not validate
    return replace(request, picture=source_image(row.pair[sample_index])) if is_picture else request


def turn_request(
    digen: DigenConfig,
    row: PromptRow,
    sample_index: int,
    turn: int,
    images: Sequence[SourceImage],
    *,
    step: int,
    validate: bool,
) -> SampleRequest:
    """Request of one turn of an episode; each carries its own conditions. The row has the turn's instruction as text,
    and `images` take the place of its own. ValueError if the model's pipeline does not take one of them."""
    request = plain_request(digen, row, sample_index, step=step, validate=validate, images=images)
    _check_images(digen.sampling, request)
    return replace(request, turn=turn, wants_condition=not validate)


def text_request(
    digen: DigenConfig,
    uid: str,
    prompt: str,
    *,
    sample_index: int = 0,
    step: int = 0,
    validate: bool = False,
    negative_prompt: str | None = None,
    images: Sequence[str] = (),
    **sampling: Any,
) -> SampleRequest:
    """Request of one sample of a prompt without a data set; its answer carries the prompt's conditions. The sample is a
    function of the run seed, `uid` and `sample_index`.

    `negative_prompt` is None for `digen.sampling.negative_prompt`, `images` are as in `PromptRow`, and `sampling` has
    keys of `digen.sampling` to replace, such as `num_steps=20`. ValueError as `sample_request`, or for a value that
    `digen.sampling` does not take; TypeError for an unknown key.
    """
    digen = replace(digen, sampling=replace(digen.sampling, **sampling)) if sampling else digen
    row = PromptRow(prompt, "", None, negative=negative_prompt, images=tuple(images), uid=uid)
    request = sample_request(digen, row, sample_index, step=step, validate=validate)
    return replace(request, wants_condition=True)


def _check_images(config: SamplingConfig, request: SampleRequest) -> None:
    if (check := IMAGE_SIZES[config.image_sizes].check) is not None:
        for image in request.inputs.images:
            check(image.width_px, image.height_px, image.reference)


def plain_request(
    digen: DigenConfig,
    row: PromptRow,
    sample_index: int,
    *,
    step: int,
    validate: bool,
    images: Sequence[SourceImage] | None = None,
) -> SampleRequest:
    """`sample_request` without the picture of the data set, for a prompt that may have no pair. It reads `images`;
    None: the row's."""
    config = digen.sampling
    num_steps = config.val_num_steps if validate else config.num_steps
    window, noise_levels = ODE_ONLY, None
    if not validate and digen.trains_forward_points:
        noise_levels = draw_noise_levels(digen.forward, run_seed=digen.seed, uid=row.uid, num_steps=num_steps)
    elif not validate:
        window = draw_window(digen.window, run_seed=digen.seed, uid=row.uid, num_steps=num_steps, step=step)
    images = tuple(map(source_image, row.images)) if images is None else tuple(images)
    geometry = geometry_of(config, [(image.width_px, image.height_px) for image in images])
    negative = config.negative_prompt if row.negative is None else row.negative
    return SampleRequest(
        uid=row.uid,
        sample_index=sample_index,
        inputs=inputs_of(row.text, images, geometry, config.image_px),
        negative_inputs=inputs_of(negative, images, geometry, config.image_px),
        window=window,
        sampling=Sampling(
            geometry=geometry,
            num_steps=num_steps,
            true_cfg_scale=config.val_true_cfg_scale if validate else config.true_cfg_scale,
            law=digen.sde.law,
            noise_level=digen.sde.noise_level,
            # without a stochastic step, samples with one noise would be one picture
            shared_initial_noise=config.shared_initial_noise and not validate,
            guidance_scale=config.guidance_scale,
            solver=config.val_solver if validate else config.solver,
            solver_noise=SolverNoise(config.sa_noise, config.sa_low, config.sa_high),
            outside=config.outside if window.sde_steps else EXACT,
        ),
        tree=digen.branches.tree(window) if window.sde_steps else None,
        noise_levels=noise_levels,
        wants_condition=sample_index == 0 and not validate,
    )


def check_batch(
    requests: Sequence[SampleRequest], conditions: Sequence[Condition], negative_conditions: Sequence[Condition] | None
) -> Sampling:
    """The `Sampling` that the requests share; RuntimeError if they do not belong in one batch."""
    sampling = requests[0].sampling
    for request in requests:
        if request.sampling != sampling:
            raise RuntimeError(
                f"requests of one batch must share their sampling, got {sampling} and {request.sampling}; "
                "batch them apart"
            )
        if request.picture is not None:
            raise RuntimeError(
                f"sample {request.sample_index} of group {request.uid} is a picture of the data set, which is encoded "
                "and not generated; send it to a replica"
            )
        last = max((*request.window.sde_steps, *request.window.train_steps), default=-1)
        if last >= sampling.num_steps - 1:
            raise RuntimeError(
                f"the window of group {request.uid} must end before the last of {sampling.num_steps} denoise "
                f"steps, got step {last}; draw it for this schedule"
            )
    for given in (conditions, negative_conditions):
        if given is not None and len(given) != len(requests):
            raise RuntimeError(f"{len(requests)} requests need as many conditions, got {len(given)}")
    return sampling


def groups_are_alike(digen: DigenConfig) -> bool:
    """True if the samples of all groups take the same forwards, so that ranks may generate different groups in step.
    Not where samples of a group share the steps before their window, or pass over steps outside of it: that depends on
    the group's window, and on how many of the group a rank has. Other windows than consecutive ones begin at step 0."""
    has_steps_before = digen.window.kind == "consecutive" and not digen.trains_forward_points
    return not has_steps_before or not (digen.sampling.shared_initial_noise or digen.sampling.outside.passes_over)


def batch_rules(digen: DigenConfig, *, num_prompts: int, group_size: int, num_trainer_ranks: int) -> BatchRules:
    """The planner's rules of a run: for the run itself, its plan, and what it simulates of itself."""
    return BatchRules(
        num_prompts,
        group_size,
        gap=digen.gap,
        queue=digen.queue,
        tag=digen.tag,
        staleness=digen.staleness,
        rows_per_group=rows_per_group(digen, group_size),
        max_chunk_size=digen.rollout.batch_size,
        slots_per_replica=digen.slots_per_replica,
        num_trainer_ranks=num_trainer_ranks,
        assist_spans_groups=groups_are_alike(digen),
        max_group_refills=digen.most_group_refills(num_prompts),
    )
