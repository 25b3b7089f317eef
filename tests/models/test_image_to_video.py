# SPDX-License-Identifier: Apache-2.0
"""Image to video: sizes from images, what conditions depend on, checkpoints for other uses."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.cases import CASES, Loaded, draw_image
from tests.tiny_models import build_tiny
from verl_digen.algorithms.noise import INITIAL_LATENTS, noise
from verl_digen.algorithms.solvers import SCHEDULERS
from verl_digen.config import DigenConfig
from verl_digen.config.sampling import SamplingConfig
from verl_digen.inputs import PromptInputs, SourceImage
from verl_digen.models import load_model
from verl_digen.sampling.requests import sample_request
from verl_digen.sampling.sampler import Sampler
from verl_digen.types import Condition, PromptRow, SampleRequest

NAMES = ("wan2.1_i2v", "wan2.2_i2v_a14b", "hunyuan_video15_i2v")
TEXT, SEED, NUM_STEPS = "it moves to the right", 7, 3


@pytest.fixture(scope="module", params=NAMES)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return load(request.param, tmp_path_factory)


def load(name: str, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    (case,) = (case for case in CASES if case.name == name)
    return Loaded(case, build_tiny(name, tmp_path_factory.mktemp(name) / "m"))


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> tuple[SourceImage, ...]:
    """A tall one, and another of its size."""
    folder = tmp_path_factory.mktemp("images")
    return tuple(draw_image(folder / f"{number}.png", (50, 70), number) for number in range(2))


def request_of(loaded: Loaded, image: SourceImage, **sampling: Any) -> SampleRequest:
    config = SamplingConfig(
        height_px=64,
        width_px=64,
        num_frames=5,
        size_from_image=True,
        image_sizes=loaded.model.spec.image_sizes,
        val_num_steps=NUM_STEPS,
        val_solver=SCHEDULERS[loaded.model.scheduler],
        **sampling,
    )
    row = PromptRow(TEXT, "", None, uid="p", images=(image.reference,))
    return sample_request(DigenConfig(sampling=config), row, 0, step=0, validate=True)


def test_a_video_of_the_images_shape_is_the_pipelines(loaded: Loaded, images: tuple[SourceImage, ...]) -> None:
    model, request = loaded.model, request_of(loaded, images[0])
    geometry = request.sampling.geometry
    assert geometry.height_px > geometry.width_px and geometry.sources == ((geometry.height_px, geometry.width_px),)
    sampler = Sampler(model, loaded.transformer, run_seed=SEED, device="cpu", latents_dtype=torch.float32)
    _, latents = sampler.sample([request], loaded.encoder([request.inputs]), None, version=0)
    given: dict[str, Any] = {"height": geometry.height_px, "width": geometry.width_px, "guidance_scale": 1.0}
    if loaded.case.name == "hunyuan_video15_i2v":  # its size is its own
        loaded.pipeline.target_size, given = 64, {}
        loaded.pipeline.guider = loaded.pipeline.guider.new(guidance_scale=1.0)
    start = noise(SEED, "p", 0, INITIAL_LATENTS, model.latent_shape(geometry))[None]
    steps = {"num_inference_steps": NUM_STEPS, "output_type": "latent", "num_frames": 5, "latents": start}
    made = loaded.pipeline(images[0].read(), TEXT, **steps, **given)[0]
    torch.testing.assert_close(latents, made, atol=1e-5, rtol=0)


def test_rows_of_one_text_and_two_images_have_conditions_and_keys_of_their_own(
    loaded: Loaded, images: tuple[SourceImage, ...]
) -> None:
    """The network reads each part of a condition; another size is another condition."""
    model = loaded.model
    first, second = (request_of(loaded, image) for image in images)
    assert first.sampling == second.sampling, "one bucket: they may share a forward"
    assert first.condition_key != second.condition_key
    longer = replace(first.inputs, size=(9, *(first.inputs.size or ())[1:]))
    one, other = loaded.encoder([first.inputs, second.inputs])
    geometry = first.sampling.geometry
    x = torch.randn(2, *model.latent_shape(geometry), generator=torch.Generator().manual_seed(0))

    def velocity(*conditions: Condition) -> Tensor:
        rows = len(conditions)
        return model.velocity(loaded.transformer, x[:rows], torch.full((rows,), 0.5), conditions, None, 1.0, geometry)

    base = velocity(one)
    for name in model.image_conditions(geometry):
        assert not one[name].equal(other[name])
        assert (velocity({**one, name: other[name]}) - base).abs().mean() > 1e-3, name
    assert one["embeds"].equal(other["embeds"])
    together = velocity(one, other)
    torch.testing.assert_close(together[:1], base, atol=1e-5, rtol=0)
    assert (together[1:] - velocity(one, one)[1:]).abs().mean() > 1e-3
    assert request_of(loaded, images[0]).condition_key == first.condition_key
    (of_more_frames,) = loaded.encoder([longer])
    if model.pipeline == "WanImageToVideoPipeline":  # the VAE's gray frames, too
        assert of_more_frames["source"].shape[1] == one["source"].shape[1] + 1


def test_the_size_of_the_video_is_part_of_what_a_condition_is_stored_under(
    loaded: Loaded, images: tuple[SourceImage, ...]
) -> None:
    first = request_of(loaded, images[0])
    for size in ((9, 64, 48), (5, 80, 48)):
        larger = replace(first, inputs=replace(first.inputs, size=size))
        assert larger.condition_key != first.condition_key


def test_an_image_at_another_size_than_the_requests_is_an_error(
    loaded: Loaded, images: tuple[SourceImage, ...]
) -> None:
    model, geometry = loaded.model, loaded.case.sizes[0]
    (condition,) = loaded.encoder([request_of(loaded, images[0]).inputs])
    x = torch.randn(1, *model.latent_shape(geometry))
    with pytest.raises(
        RuntimeError, match=r"a condition must have the latents of an image, .*; encode it with the `size"
    ):
        model.velocity(loaded.transformer, x, torch.tensor([0.5]), [condition], None, 1.0, geometry)
    (text,) = loaded.encoder([PromptInputs(TEXT)])
    with pytest.raises(RuntimeError, match="got None; encode it"):
        model.velocity(loaded.transformer, x, torch.tensor([0.5]), [text], None, 1.0, geometry)
    with pytest.raises(RuntimeError, match="must name the size of the video"):
        loaded.encoder([PromptInputs(TEXT, images[:1])])


@pytest.mark.parametrize(
    ("file", "change"),
    [("transformer/config.json", {"pos_embed_seq_len": 514}), ("transformer/config.json", {"in_channels": 4})],
)
def test_a_wan_for_text_or_that_reads_a_last_frame_is_refused(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, file: str, change: dict[str, Any]
) -> None:
    path = build_tiny("wan2.1_i2v", tmp_path / "m")
    (path / file).write_text(json.dumps(json.loads((path / file).read_text()) | change))
    with pytest.raises(ValueError, match=r"must hold a Wan that continues one image .*; choose another, such as"):
        load_model(path)
