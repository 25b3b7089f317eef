# SPDX-License-Identifier: Apache-2.0
"""`image_similarity` on tiny CLIP and DINOv2 checkpoints."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.reward.contract import check_contract, make_picture, make_samples, scores_of
from tests.reward.tiny_scorers import write_clip, write_dino
from verl_digen.config.reward import reward_entry
from verl_digen.reward.named import make
from verl_digen.types import PromptRow, RewardInput

CPU = torch.device("cpu")
KINDS = {"clip": write_clip, "dino": write_dino}


@pytest.fixture(scope="module", params=KINDS)
def checkpoint(request, tmp_path_factory) -> Path:
    return KINDS[request.param](tmp_path_factory.mktemp(request.param))


@pytest.fixture
def sources(tmp_path) -> tuple[str, ...]:
    paths = [tmp_path / f"{number}.png" for number in range(2)]
    for number, path in enumerate(paths):
        Image.fromarray(make_picture(40, 60, seed=100 + number)).save(path)
    return tuple(map(str, paths))


def similarity(path: Path, **settings):
    entry = reward_entry("image_similarity", {"weight": 1.0, "path": str(path), **settings})
    return make(entry, torch.device("cpu"))


def sample(pixels: np.ndarray, images: tuple[str, ...]) -> RewardInput:
    return RewardInput(pixels, PromptRow("make it red", "test", None, images=images), 0)


def features(path: Path, picture: np.ndarray) -> torch.Tensor:
    """One picture's unit feature, as flow_grpo's image_similarity and DINOv2's documentation compute it."""
    from transformers import AutoModel, BitImageProcessorPil, CLIPImageProcessorPil

    model = AutoModel.from_pretrained(path).eval()
    is_clip = model.config.model_type == "clip"
    processor = (CLIPImageProcessorPil if is_clip else BitImageProcessorPil).from_pretrained(path)
    inputs = processor(images=Image.fromarray(picture), return_tensors="pt")
    with torch.no_grad():
        found = model.get_image_features(**inputs).pooler_output if is_clip else model(**inputs).last_hidden_state[:, 0]
    return found[0] / found[0].norm()


def test_the_score_is_the_mean_cosine_with_the_prompts_images(checkpoint, sources):
    picture = make_picture(64, 48, seed=7)
    known = [features(checkpoint, np.asarray(Image.open(path))) for path in sources]
    own = features(checkpoint, picture)
    expected = [(own @ known[0]).item(), (own @ known[1]).item(), (own @ torch.stack(known).mean(0)).item()]
    batch = [sample(picture, images) for images in (sources[:1], sources[1:], sources)]
    found = [value for value, _ in scores_of(similarity(checkpoint), batch)]
    assert found == pytest.approx(expected, abs=1e-5) and abs(found[0] - found[1]) > 1e-3


def test_the_contract_holds(checkpoint, sources):
    samples = [
        replace(one, row=replace(one.row, images=sources[: 1 + number % 2]))
        for number, one in enumerate(make_samples())
    ]
    check_contract(similarity(checkpoint, pixel_weight=0.5), samples)


def test_pixels_are_mixed_in_with_their_weight(checkpoint, tmp_path):
    Image.new("RGB", (32, 32), (0, 0, 0)).save(tmp_path / "black.png")
    batch = [sample(np.full((50, 20, 3), value, np.uint8), (str(tmp_path / "black.png"),)) for value in (0, 51, 255)]
    found = scores_of(similarity(checkpoint, pixel_weight=0.25), batch)
    assert [details["pixels"] for _, details in found] == pytest.approx([1, 0.8, 0], abs=1e-6)
    for value, details in found:
        assert value == pytest.approx(0.75 * details["features"] + 0.25 * details["pixels"], abs=1e-6)


def test_a_video_is_the_mean_of_its_frames(checkpoint, sources):
    pixels = make_picture(32, 32, frames=3)
    reward = similarity(checkpoint, pixel_weight=0.5, num_frames=3)
    alone = scores_of(reward, [sample(frame, sources) for frame in pixels])
    ((together, _),) = scores_of(reward, [sample(pixels, sources)])
    assert together == pytest.approx(np.mean([value for value, _ in alone]), abs=1e-6)


def test_a_prompt_without_images_or_with_a_lost_one_is_an_error(checkpoint, sources):
    reward, picture = similarity(checkpoint), make_picture()
    with pytest.raises(ValueError, match="image_similarity needs prompts with images, got 'make it red'"):
        scores_of(reward, [sample(picture, sources), sample(picture, ())])
    with pytest.raises(ValueError, match="an image of a prompt must be a file that every node can read"):
        scores_of(reward, [sample(picture, ("/nowhere/x.png",))])


def test_a_checkpoint_of_another_kind_is_refused(tmp_path):
    from transformers import BertConfig

    BertConfig().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="image_similarity: path must be a checkpoint of type clip, dinov2"):
        similarity(tmp_path)


def test_pixels_alone_need_no_checkpoint(sources):
    reward = make(reward_entry("image_similarity", {"weight": 1.0, "path": "/nowhere", "pixel_weight": 1.0}), CPU)
    same, other = np.asarray(Image.open(sources[0])), np.asarray(Image.open(sources[1]))
    (unchanged, replaced) = reward.score([sample(same, sources[:1]), sample(other, sources[:1])])
    assert unchanged == {"score": 1.0, "pixels": 1.0}
    assert replaced["score"] < 0.9
