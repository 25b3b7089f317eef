# SPDX-License-Identifier: Apache-2.0
"""`pickscore`, `clip_score` and `aesthetic` on tiny checkpoints, against the code that their publishers show."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from tests.reward.contract import check_contract, make_picture, make_samples, scores_of
from tests.reward.tiny_scorers import head_shapes, state_like, write_aesthetic_head, write_clip
from verl_digen.config.reward import reward_entry
from verl_digen.reward.named import make
from verl_digen.types import PromptRow, RewardInput

SIDE = 28


@pytest.fixture(scope="module")
def clip(tmp_path_factory) -> Path:
    return write_clip(tmp_path_factory.mktemp("clip"))


@pytest.fixture(scope="module")
def head(tmp_path_factory) -> Path:
    return write_aesthetic_head(tmp_path_factory.mktemp("head"))


def scorer(name: str, path: Path, **settings):
    return make(reward_entry(name, {"weight": 1.0, "path": str(path), **settings}), torch.device("cpu"))


def values(reward, samples) -> list[float]:
    return [value for value, _ in scores_of(reward, samples)]


def prepared(image: Image.Image) -> torch.Tensor:
    """CLIP's transform: the shorter side resized, the middle cut out, colours normalised."""
    width, height = image.size
    short, long = min(width, height), max(width, height)
    other = int(SIDE * long / short)
    width, height = (SIDE, other) if width <= height else (other, SIDE)
    image = image.resize((width, height), Image.Resampling.BICUBIC)
    left, top = (width - SIDE) // 2, (height - SIDE) // 2
    pixels = np.asarray(image.crop((left, top, left + SIDE, top + SIDE))).astype(np.float64) / 255
    normed = (pixels - [0.48145466, 0.4578275, 0.40821073]) / [0.26862954, 0.26130258, 0.27577711]
    return torch.from_numpy(normed.transpose(2, 0, 1)).float()[None]


def published(clip: Path, sample: RewardInput) -> tuple[float, float, torch.Tensor]:
    """(cosine, logit scale, image feature) of one sample, as model cards compute them."""
    from transformers import CLIPModel, CLIPTokenizer

    model, tokenizer = CLIPModel.from_pretrained(clip).eval(), CLIPTokenizer.from_pretrained(clip)
    words = tokenizer(sample.row.text, padding=True, truncation=True, max_length=20, return_tensors="pt")
    with torch.no_grad():
        picture = model.get_image_features(prepared(Image.fromarray(sample.pixels))).pooler_output
        text = model.get_text_features(**words).pooler_output
        picture, text = picture / picture.norm(dim=-1, keepdim=True), text / text.norm(dim=-1, keepdim=True)
        return (text @ picture.T).item(), model.logit_scale.exp().item(), picture


def test_pickscore_is_the_model_cards_score_over_26(clip):
    cards = [published(clip, sample) for sample in make_samples()]
    found = values(scorer("pickscore", clip), make_samples())
    assert found == pytest.approx([scale * cosine / 26 for cosine, scale, _ in cards], abs=1e-5)
    assert len({round(one, 4) for one in found}) == 4
    assert values(scorer("pickscore", clip, divisor=1.0), make_samples()) == pytest.approx(
        [26 * one for one in found], abs=1e-4
    )


def test_clip_score_is_the_cosine_or_flow_grpos_multiple_of_it(clip):
    cards = [published(clip, sample) for sample in make_samples()]
    raw = values(scorer("clip_score", clip), make_samples())
    assert raw == pytest.approx([cosine for cosine, _, _ in cards], abs=1e-5)
    scaled = values(scorer("clip_score", clip, scale="flow_grpo"), make_samples())
    assert scaled == pytest.approx([scale * cosine / 30 for cosine, scale, _ in cards], abs=1e-5)


def test_aesthetic_is_the_published_head_on_the_unit_feature(clip, head):
    state = torch.load(head)
    expected = []
    for sample in make_samples():
        number = published(clip, sample)[2]
        for layer in (0, 2, 4, 6, 7):
            number = number @ state[f"layers.{layer}.weight"].T + state[f"layers.{layer}.bias"]
        expected.append(number.item())
    settings = {"head": str(head)}
    assert values(scorer("aesthetic", clip, **settings, divisor=1.0), make_samples()) == pytest.approx(
        expected, abs=1e-5
    )
    assert values(scorer("aesthetic", clip, **settings), make_samples()) == pytest.approx(
        [one / 10 for one in expected], abs=1e-5
    )


@pytest.mark.parametrize("name", ["pickscore", "clip_score", "aesthetic"])
def test_the_contract_holds(name, clip, head):
    check_contract(scorer(name, clip, **({"head": str(head)} if name == "aesthetic" else {})))


def test_a_video_is_the_mean_of_its_evenly_spaced_frames(clip):
    pixels, row = make_picture(40, 30, frames=9), PromptRow("a red square", "test", None)
    frames = [RewardInput(frame, row, 0) for frame in pixels]
    alone = values(scorer("clip_score", clip), frames)
    for number, chosen in ((1, [4]), (2, [0, 8]), (3, [0, 4, 8]), (9, range(9)), (20, range(9))):
        (found,) = values(scorer("clip_score", clip, num_frames=number), [RewardInput(pixels, row, 0)])
        assert found == pytest.approx(np.mean([alone[frame] for frame in chosen]), abs=1e-6)


def test_a_prompt_is_cut_at_the_positions_of_the_text_encoder(clip):
    picture, reward = make_picture(), scorer("clip_score", clip)
    texts = ["red " * 18, "red " * 400, "red " * 17 + "dogs", "red " * 18 + "dogs"]
    cut, longer, other, beyond = values(
        reward, [RewardInput(picture, PromptRow(text, "test", None), 0) for text in texts]
    )
    assert cut == longer == pytest.approx(beyond, abs=1e-6) and abs(other - cut) > 1e-4


def test_half_precision_encoders_give_scores_in_fp32(clip, head):
    for name, settings in (("clip_score", {}), ("pickscore", {}), ("aesthetic", {"head": str(head)})):
        exact = values(scorer(name, clip, **settings), make_samples())
        reward = scorer(name, clip, dtype="bf16", **settings)
        found = values(reward, make_samples())
        assert found == pytest.approx(exact, abs=0.1 * max(map(abs, exact))) and found != exact
        scores = reward.frame_scores([Image.fromarray(make_picture())], [0], ["red"])
        assert scores.dtype == torch.float32


def test_no_gradient_is_recorded_and_the_model_is_in_eval_mode(clip, monkeypatch):
    reward, recorded = scorer("pickscore", clip), []
    model, features = reward.encoder._model, reward.encoder._model.get_image_features
    monkeypatch.setattr(
        model, "get_image_features", lambda **inputs: recorded.append(torch.is_grad_enabled()) or features(**inputs)
    )
    values(reward, make_samples())
    assert recorded == [False]
    assert not any(module.training for module in model.modules())
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_tokenizer_and_processor_may_come_from_another_folder(clip, tmp_path):
    weights, inputs = tmp_path / "weights", tmp_path / "inputs"
    weights.mkdir()
    inputs.mkdir()
    for path in clip.iterdir():
        to = weights if path.name in ("config.json", "model.safetensors") else inputs
        shutil.copy(path, to / path.name)
    expected = values(scorer("pickscore", clip), make_samples())
    assert values(scorer("pickscore", weights, processor=str(inputs)), make_samples()) == expected
    with pytest.raises(ValueError, match=r"pickscore: path must hold preprocessor_config.json|must hold a tokenizer"):
        scorer("pickscore", weights)


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("pickscore", {"visual_projection.weight": None}, "missing: visual_projection.weight"),
        ("clip_score", {"reward_head.weight": torch.zeros(2, 2)}, "unexpected: reward_head.weight"),
        ("aesthetic", {"text_projection.weight": torch.zeros(3, 3)}, "of another shape: text_projection.weight"),
        ("image_similarity", {f"extra.{number}": torch.zeros(1) for number in range(9)}, "extra.5 and 3 more"),
    ],
)
def test_other_weights_are_refused_by_the_names_of_their_tensors(clip, tmp_path, name, change, said):
    place = shutil.copytree(clip, tmp_path / "changed")
    state = load_file(place / "model.safetensors") | change
    kept = {name: tensor for name, tensor in state.items() if tensor is not None}
    save_file(kept, place / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=f"{name}: path must hold the tensors of CLIPModel") as caught:
        scorer(name, place)
    assert said in str(caught.value)


def test_position_ids_of_old_checkpoints_are_no_fault(clip, tmp_path):
    place = shutil.copytree(clip, tmp_path / "old")
    state = load_file(place / "model.safetensors")
    save_file(
        {**state, "text_model.embeddings.position_ids": torch.arange(20)[None]},
        place / "model.safetensors",
        {"format": "pt"},
    )
    assert values(scorer("clip_score", place), make_samples()) == values(scorer("clip_score", clip), make_samples())


def test_a_head_of_another_width_is_refused(clip, tmp_path):
    torch.save(state_like(head_shapes(7, "")), tmp_path / "aesthetic-model.pth")
    with pytest.raises(ValueError, match=r"aesthetic: head must hold .*of another shape: layers.0.weight"):
        scorer("aesthetic", clip, head=str(tmp_path))


def test_a_folder_without_weights_is_refused(clip, tmp_path):
    shutil.copy(clip / "config.json", tmp_path)
    with pytest.raises(ValueError, match="clip_score: path must hold the weights of a CLIPModel"):
        scorer("clip_score", tmp_path)


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("pickscore", {"divisor": 0.0}, r"functions.pickscore.divisor must be > 0, got 0.0; 26.0 is the default"),
        ("pickscore", {"dtype": "fp8"}, r"functions.pickscore.dtype must be one of fp32, bf16, fp16, got 'fp8'"),
        ("hpsv2", {"base": ""}, "hpsv2: base must name a folder or a repository"),
        ("image_reward", {"tokenizer": ""}, "image_reward: tokenizer must name a folder or a repository"),
        ("hpsv3", {"path": "/nowhere/x"}, "hpsv3: path must name a folder or a repository of the hub"),
    ],
)
def test_settings_are_checked_before_anything_is_loaded(name, settings, said):
    with pytest.raises(ValueError, match=said):
        make(reward_entry(name, {"weight": 1.0, **settings}), torch.device("cpu"))
