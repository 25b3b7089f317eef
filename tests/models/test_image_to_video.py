# SPDX-License-Identifier: Apache-2.0
"""Image to video: sizes from images, what conditions depend on, checkpoints for other uses."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models import edit_samples
from tests.models.cases import Loaded, changed
from tests.models.edit_samples import NUM_STEPS, TEXT
from tests.tiny_models import build_tiny
from verl_digen.algorithms.solvers import SCHEDULERS
from verl_digen.inputs.images import PromptInputs, SourceImage
from verl_digen.models import load_model
from verl_digen.types import Condition, SampleRequest

IMAGES = ((50, 70),) * 2
VIDEO = {"height_px": 64, "width_px": 64, "num_frames": 5, "size_from_image": True}
NAMES = ("wan2.1_i2v", "wan2.2_i2v_a14b", "hunyuan_video15_i2v")


@pytest.fixture(scope="module", params=NAMES)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    return Loaded.tiny(request.param, tmp_path_factory.mktemp(request.param) / "m")


def request_of(loaded: Loaded, image: SourceImage) -> SampleRequest:
    return edit_samples.request_of(loaded.model, (image,), **VIDEO, val_solver=SCHEDULERS[loaded.model.scheduler])


def test_a_video_of_the_images_shape_is_the_pipelines(loaded: Loaded, images: tuple[SourceImage, ...]) -> None:
    model, request = loaded.model, request_of(loaded, images[0])
    geometry = request.sampling.geometry
    assert geometry.height_px > geometry.width_px and geometry.sources == ((geometry.height_px, geometry.width_px),)
    latents = edit_samples.sample(model, loaded.transformer, loaded.encoder, request)
    given: dict[str, Any] = {"height": geometry.height_px, "width": geometry.width_px, "guidance_scale": 1.0}
    if loaded.case.name == "hunyuan_video15_i2v":  # its size is its own
        loaded.pipeline.target_size, given = 64, {}
        loaded.pipeline.guider = loaded.pipeline.guider.new(guidance_scale=1.0)
    start = edit_samples.start_of(model, geometry)
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
    for name, shape in model.image_conditions(geometry).items():
        assert one[name].shape == shape and not one[name].equal(other[name])
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


def test_a_second_image_is_an_error(loaded: Loaded, images: tuple[SourceImage, ...]) -> None:
    with pytest.raises(ValueError, match=r"a prompt must have at most 1 image for .*, got 2; leave some out"):
        loaded.encoder([PromptInputs(TEXT, images, size=(5, 64, 64))])


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


def test_a_wan_for_text_or_that_reads_a_last_frame_is_refused(tmp_path: Path) -> None:
    path = build_tiny("wan2.1_i2v", tmp_path / "m")
    for name, value in (("pos_embed_seq_len", 514), ("in_channels", 4)):
        other = changed(path, tmp_path / name, "transformer/config.json", {name: value})
        with pytest.raises(ValueError, match=r"must hold a Wan that continues one image .*; choose another, such as"):
            load_model(other)
