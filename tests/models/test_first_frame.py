# SPDX-License-Identifier: Apache-2.0
"""Wan2.2 TI2V-5B: a given first frame, in a checkpoint that makes video from text alone, too."""

import asyncio
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.models import edit_samples
from tests.models.cases import CPU, NEGATIVE, changed
from tests.models.edit_samples import NUM_STEPS, SEED, TEXT
from tests.rollout.test_server import make_server
from tests.tiny_models import build_tiny
from tests.training_rows import rows_of
from verl_digen.algorithms.solvers import SCHEDULERS
from verl_digen.algorithms.window import Window
from verl_digen.inputs.images import PromptInputs, SourceImage
from verl_digen.models import load_model
from verl_digen.models.base import DiffusionModel
from verl_digen.models.wan_first_frame import WanFirstFrame
from verl_digen.sampling.requests import inputs_of
from verl_digen.sampling.sampler import Sampler, score_rows
from verl_digen.tools.checkup.selftest import load_pipeline
from verl_digen.types import PathRecord, SampleRequest

NAME, IMAGES = "wan2.2_ti2v_5b", ((100, 60),)


def request_of(model: DiffusionModel, images: tuple[SourceImage, ...], *, scale: float = 1.0) -> SampleRequest:
    """A video of 9 frames, of the image's shape if there is one."""
    size = {"height_px": 64, "width_px": 64, "num_frames": 9, "size_from_image": True}
    guidance = {"val_true_cfg_scale": scale, "negative_prompt": NEGATIVE}
    return edit_samples.request_of(model, images, **size, **guidance, val_solver=SCHEDULERS[model.scheduler])


def sample(model: DiffusionModel, network: nn.Module, encode: Any, request: SampleRequest) -> tuple[Any, Tensor, Any]:
    """(trajectory, latents of the sample, the prompt's condition)."""
    sampler = Sampler(model, network, run_seed=SEED, device=CPU, latents_dtype=torch.float32)
    positive, *negative = ([one] for one in encode(request.branches))
    made, latents = sampler.sample([request], positive, negative[0] if negative else None, version=0)
    return made[0], latents, positive


@pytest.mark.parametrize("scale", [1.0, 2.0])
@pytest.mark.parametrize("is_given", [True, False], ids=["image", "text"])
def test_one_checkpoint_makes_both_kinds_of_videos_as_both_pipelines_do(
    model: DiffusionModel,
    network: nn.Module,
    encode: Any,
    images: tuple[SourceImage, ...],
    is_given: bool,
    scale: float,
) -> None:
    """Latents after the last step, with the first frame, and pixels."""
    request = request_of(model, images if is_given else (), scale=scale)
    geometry = request.sampling.geometry
    assert (geometry.height_px, geometry.width_px) == ((32, 64) if is_given else (64, 64))
    _, latents, conditions = sample(model, network, encode, request)
    shape = model.latent_shape(geometry)
    assert latents.shape[1:] == shape and shape[1] == (2 if is_given else 3)
    pipeline: Any = load_pipeline(model, geometry, torch.float32)
    assert type(pipeline).__name__ == ("WanImageToVideoPipeline" if is_given else "WanPipeline")
    given: dict[str, Any] = {
        "image": images[0].read() if is_given else None,
        "height": geometry.height_px,
        "width": geometry.width_px,
        "num_frames": 9,
        "num_inference_steps": NUM_STEPS,
        "guidance_scale": scale,
        "negative_prompt": NEGATIVE,
        "latents": edit_samples.start_of(model, geometry),
    }
    given = given if is_given else {name: value for name, value in given.items() if name != "image"}
    whole = model.completed(latents, conditions)
    expected = pipeline(prompt=TEXT, output_type="latent", **given)[0]
    torch.testing.assert_close(whole, expected, atol=1e-5, rtol=0)
    frames = torch.as_tensor(pipeline(prompt=TEXT, output_type="np", **given)[0])
    pixels = model.load_decoder(torch.float32, CPU)(whole, geometry).pixels
    assert pixels.shape == frames.shape == (1, 9, geometry.height_px, geometry.width_px, 3)
    assert (pixels.float() - frames * 255).abs().max() < 0.5 + 0.02


def test_log_probs_are_of_the_frames_that_are_made(
    model: DiffusionModel, network: nn.Module, encode: Any, images: tuple[SourceImage, ...]
) -> None:
    """Compare with a slow way: the network over the whole video, a Gaussian step of all of it, and a mask."""
    plain = request_of(model, images)
    request = replace(
        plain, window=Window((0, 1), (0, 1)), sampling=replace(plain.sampling, solver="euler", noise_level=0.7)
    )
    trajectory, _, (condition,) = sample(model, network, encode, request)
    record, geometry = trajectory.record, request.sampling.geometry
    assert isinstance(record, PathRecord)
    assert record.latents.shape[1:] == (4, 2, 2, 4), "9 frames are 3 latent ones, and the first is given"
    given = condition["source"]
    for k in range(2):
        x, x_next = (torch.cat([given, record.latents[k + step]], dim=1) for step in range(2))
        sigma, end = record.sigmas[k], record.next_sigmas[k]
        mask = torch.ones(x.shape[1:])
        mask[0] = 0
        with torch.no_grad():
            velocity = network(
                hidden_states=x[None],
                timestep=(mask[:, ::2, ::2] * int(sigma * 1000)).flatten()[None],
                encoder_hidden_states=model.collate([condition])["embeds"],
                return_dict=False,
            )[0][0]
        shifted = record.sigma_max if sigma > 1 - 1e-5 else sigma
        s, dt = 0.7 * math.sqrt(sigma / (1 - shifted)), float(end - sigma)
        mean = x * (1 + s**2 / (2 * sigma) * dt) + velocity * (1 + s**2 * (1 - sigma) / (2 * sigma)) * dt
        std = s * math.sqrt(-dt)
        density = -((x_next - mean) ** 2) / (2 * std**2) - math.log(std) - 0.5 * math.log(2 * math.pi)
        expected = (density * mask).sum() / (mask.sum() * len(x))
        torch.testing.assert_close(record.log_probs[k], expected, atol=1e-5, rtol=0)
    rows = rows_of([trajectory], [(0, 0), (0, 1)], [condition], None)
    scored, velocity = score_rows(model, network, rows)
    torch.testing.assert_close(scored.log_prob, record.log_probs, atol=1e-5, rtol=0)
    assert velocity.shape[1:] == model.latent_shape(geometry)


def test_a_replica_answers_with_the_whole_video(model: DiffusionModel, images: tuple[SourceImage, ...]) -> None:
    request = replace(request_of(model, images), wants_condition=True, wants_latents=True)
    made = asyncio.run(make_server(Path(model.path))._batcher.submit(request))
    assert made.pixels.shape == (9, 32, 64, 3)
    given = made.condition["source"]
    torch.testing.assert_close(made.latents.final[:, :1], given.to(made.latents.final.dtype))
    inputs = replace(request.inputs, images=())
    assert "source" not in model.load_encoder(torch.float32, CPU)([inputs])[0], "a text alone has no frame"


def test_what_does_not_belong_together_is_an_error(
    model: DiffusionModel, network: nn.Module, encode: Any, images: tuple[SourceImage, ...]
) -> None:
    request = request_of(model, images)
    geometry = request.sampling.geometry
    latents = torch.randn(1, *model.latent_shape(geometry))
    other = encode([inputs_of(TEXT, images, replace(geometry, width_px=96), 64)])
    text = encode([PromptInputs(TEXT)])
    whole = encode([request.inputs])

    def velocity(conditions: Any, where: Any = geometry, x: Tensor = latents) -> Tensor:
        return model.velocity(network, x, torch.tensor([0.5]), conditions, None, 1.0, where)

    for conditions in (other, text):
        with pytest.raises(RuntimeError, match=r"a condition must have the latents of an image, \(4, 1, 2, 4\), for"):
            velocity(conditions)
    bare = replace(geometry, sources=())
    with pytest.raises(RuntimeError, match="the latents of an image, None, for"):
        velocity(whole, bare, torch.randn(1, *model.latent_shape(bare)))
    with pytest.raises(RuntimeError, match=r"must be a whole video, .*; pass what `completed` returns"):
        model.load_decoder(torch.float32, CPU)(latents, geometry)
    with pytest.raises(ValueError, match=r"num_frames must be >= 5 for Wan2\.2 TI2V and prompts with an image"):
        model.latent_shape(replace(geometry, num_frames=1))
    model.sequence_size = 2
    try:
        with pytest.raises(RuntimeError, match="runs whole on each device, got 2 devices"):
            velocity(whole)
    finally:
        model.sequence_size = 1


def test_the_index_says_which_model_file_reads_a_checkpoint(tmp_path: Path, model: DiffusionModel) -> None:
    """A flag of the index, in either pipeline; with `WanImageToVideoPipeline` every prompt has an image."""
    assert model.spec.num_images == (0, 1)
    saved = load_model(build_tiny("wan2.2_ti2v_5b_i2v", tmp_path / "i2v"))
    assert type(saved) is WanFirstFrame and saved.spec.num_images == (1, 1)
    plain = build_tiny("wan2.1", tmp_path / "wan2.1")
    assert type(load_model(plain)).__name__ == "Wan"
    plain = build_tiny("wan2.1_i2v", tmp_path / "wan2.1_i2v")
    other = changed(plain, tmp_path / "other", "model_index.json", {"expand_timesteps": True})
    with pytest.raises(ValueError, match=r"must hold a Wan that reads only latents, .* got one with 12 channels for 4"):
        load_model(other)
