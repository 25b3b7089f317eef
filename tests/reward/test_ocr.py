# SPDX-License-Identifier: Apache-2.0
"""The OCR reward on drawn pictures, against rapidocr itself and against the rule for frames."""

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw
from rapidocr import RapidOCR

from tests.reward.contract import check_contract, scores_of
from verl_digen.reward.scorers.ocr import Ocr, OcrConfig, combined, engine_parameters, target_of
from verl_digen.types import PromptRow, RewardInput

TEXTS = (
    *("CAT", "Open Now", "hello", "2024", "EXIT", "Left\nRight", "no. 7", "A&B", "Fresh Bread", "Mind the gap"),
    *("STOP", "50% off", "Cafe", "Hotel", "x = 3", "PLEASE WAIT", "yes!", "Quiet", "Room 12", "Taxi"),
    *("Bank", "To Let", "MUSEUM", "Tea", "10:45", "PUSH", "Pull", "Danger", "Platform 9", "Library"),
    *("one two", "SALE", "Free", "Closed", "www", "Garden", "Milk", "Rain", "VOTE", "Post"),
    *("Go", "QUICK", "Jump", "fox", "lazy dog", "Happy Birthday", "Keep Left", "Wet Paint", "IN", "Out"),
)
SIZES = ((64, 64), (96, 160), (128, 256), (256, 256), (200, 384), (512, 512))
"""(height, width) in px."""
FAST = {"detection_side_px": 64, "line_width_px": 144}


def drawn(text: str, height: int, width: int) -> np.ndarray:
    """Black text across most of a white picture, uint8 [H, W, 3]."""
    image = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(image)
    left, top, right, bottom = draw.textbbox((0, 0), text, font_size=100)
    font_px = min(0.85 * width / (right - left), 0.7 * height / (bottom - top)) * 100
    draw.text((width / 2, height / 2), text, fill="black", font_size=font_px, anchor="mm")
    return np.asarray(image)


def sample(pixels: np.ndarray, text: str, ground_truth: object = None) -> RewardInput:
    return RewardInput(pixels, PromptRow(text, "ocr", ground_truth, uid="g"), 0)


@pytest.fixture(scope="module")
def fast() -> Ocr:
    return Ocr(OcrConfig(**FAST), torch.device("cpu"))


def rapidocr_reads(engine: RapidOCR, pixels: np.ndarray) -> str:
    """The joined lines of rapidocr's answer for a picture as OpenCV has it, blue first."""
    return "".join(engine(np.ascontiguousarray(pixels[..., ::-1])).txts or ())


def compare(reward: Ocr, reference: RapidOCR, texts: tuple[str, ...]) -> float:
    """Assert that both read every text alike -> mean reward."""
    total = 0.0
    for number, text in enumerate(texts):
        pixels = drawn(text, *SIZES[number % len(SIZES)])
        read = reward.read(Image.fromarray(pixels))
        assert read == rapidocr_reads(reference, pixels), text
        ((value, details),) = scores_of(reward, [sample(pixels, f'a sign with "{text}"')])
        assert details["read_length"] == len(read.replace(" ", ""))
        total += value
    return total / len(texts)


def test_reads_what_rapidocr_reads(fast):
    parameters = {
        "Global.log_level": "error",
        "Global.use_cls": False,
        "Det.limit_side_len": 64,
        "Rec.rec_img_shape": [3, 48, 144],
        "EngineConfig.onnxruntime.intra_op_num_threads": 1,
    }
    assert compare(fast, RapidOCR(params=parameters), TEXTS[::5]) > 0.9


@pytest.mark.long
@pytest.mark.grid
def test_reads_what_rapidocr_reads_by_its_own_settings():
    reference = RapidOCR(params={"Global.log_level": "error", "Global.use_cls": False})
    assert compare(Ocr(OcrConfig(), torch.device("cpu")), reference, TEXTS) > 0.9


def test_settings_reach_rapidocr_under_its_names():
    config = OcrConfig(detect=False, detection_side_px=96, line_width_px=200)
    found = RapidOCR(params=engine_parameters(config)).cfg
    assert (found.Global.use_det, found.Global.use_cls) == (False, False)
    assert (found.Det.limit_side_len, list(found.Rec.rec_img_shape)) == (96, [3, 48, 200])
    assert found.EngineConfig.onnxruntime.intra_op_num_threads == 1
    by_itself, ours = RapidOCR(params={}).cfg, RapidOCR(params=engine_parameters(OcrConfig())).cfg
    assert (ours.Det, ours.Rec) == (by_itself.Det, by_itself.Rec)


def test_reward_counts_wrong_letters(fast):
    pixels = drawn("CAT", 64, 128)
    rewards = [value for value, _ in scores_of(fast, [sample(pixels, f'"{text}"') for text in ("cat", "C AR", "DOG!")])]
    assert rewards == pytest.approx([1.0, 2 / 3, 0.0])


def test_contract(fast):
    pictures = (drawn("CAT", 64, 64), drawn("Open Now", 96, 160), np.full((17, 17, 3), 255, np.uint8))
    check_contract(fast, [sample(pixels, 'a sign: "cat"') for pixels in pictures])


def test_a_page_without_text_has_reward_zero(fast):
    pages = [np.full((size, size, 3), shade, np.uint8) for size, shade in ((17, 255), (64, 0), (96, 128))]
    assert scores_of(fast, [sample(page, '"cat"') for page in pages]) == [(0.0, {"read_length": 0.0})] * 3


def test_without_detection_the_picture_is_one_line():
    reward = Ocr(OcrConfig(detect=False, line_width_px=96), torch.device("cpu"))
    values = scores_of(
        reward, [sample(drawn("CAT", 32, 80), '"CAT"'), sample(np.zeros((32, 80, 3), np.uint8), '"CAT"')]
    )
    assert [value for value, _ in values] == [1.0, 0.0]


@pytest.mark.parametrize(("how", "value"), [("mean_read", 5 / 6), ("mean", 5 / 9), ("best", 1.0)])
def test_reward_of_a_video_is_that_of_its_frames(fast, monkeypatch, how, value):
    frames = np.stack([drawn(text, 64, 128) for text in ("CAT", "CAR", "DOG!")])
    monkeypatch.setattr(fast, "config", OcrConfig(**FAST, frames=how))
    ((found, details),) = scores_of(fast, [sample(frames, '"CAT"')])
    assert found == pytest.approx(value) and combined([0.0, 0.0], how) == 0
    assert details["read_length"] == pytest.approx(10 / 3)


def test_no_more_frames_are_read_than_asked_for(fast, monkeypatch):
    monkeypatch.setattr(fast, "config", OcrConfig(**FAST, num_frames=3))
    read = []
    monkeypatch.setattr(fast, "read", lambda image: read.append(np.asarray(image)[0, 0, 0]) or "cat")
    video = np.arange(9, dtype=np.uint8)[:, None, None, None].repeat(8, 1).repeat(8, 2).repeat(3, 3)
    scores_of(fast, [sample(video, '"CAT"')])
    assert read == [0, 4, 8]


def test_target_is_the_ground_truth_or_the_quoted_part():
    prompt = 'a sign with "Open"'
    assert target_of(PromptRow(prompt, "ocr", "Shut")) == "Shut"
    assert target_of(PromptRow(prompt, "any", prompt)) == "Open"
    assert target_of(PromptRow(prompt, "any", None)) == "Open"
    for wrong in (" ", 7):
        with pytest.raises(ValueError, match=f"must be the text to show, got {wrong!r}"):
            target_of(PromptRow(prompt, "any", wrong))
