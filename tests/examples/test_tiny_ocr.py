# SPDX-License-Identifier: Apache-2.0
"""The world of words that the tiny OCR model learns, and the script that pretrains it."""

import importlib
import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from diffusers import QwenImagePipeline
from PIL import Image

from verl_digen.reward.scorers.ocr import Ocr, OcrConfig

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
FOLDERS = (EXAMPLES / "tiny_ocr", EXAMPLES / "tiny_qwen_image")


def script(name: str) -> ModuleType:
    return importlib.import_module(name)


def test_rapidocr_reads_the_drawn_words(examples: None) -> None:
    words, pretrain = script("words"), script("pretrain")
    reader = Ocr(OcrConfig(**pretrain.READING), torch.device("cpu"))
    rng = np.random.default_rng(0)
    for word in words.WORDS[::12]:
        for picture in (words.draw(word), words.draw(word, rng)):
            assert picture.shape == (words.HEIGHT_PX, words.WIDTH_PX, 3)
            assert reader.read(Image.fromarray(picture)) == word


def test_words_are_of_the_world_and_the_splits_are_disjoint(examples: None) -> None:
    words, pretrain = script("words"), script("pretrain")
    splits = pretrain.split_words(0)
    assert set(words.WORDS) <= set(words.all_strings())
    assert sorted(splits["train"] + splits["val"]) == sorted(words.WORDS)
    assert len(splits["val"]) == pretrain.NUM_VAL_WORDS
    for name, of_split in splits.items():
        rows = [json.loads(line) for line in (FOLDERS[0] / "prompts" / f"{name}.jsonl").read_text().splitlines()]
        assert [row["prompt"] for row in rows] == [f'the word "{word}"' for word in of_split]


def test_lessons_misspell_as_often_as_asked_and_hold_words_back(examples: None) -> None:
    words, lessons = script("words"), script("lessons")
    strings = words.all_strings()
    latents = torch.arange(len(strings))
    rng = np.random.default_rng(0)
    held_out = strings[10:]
    shown, captions = lessons.lesson(latents, 0.0, held_out)(rng, 200)
    assert [words.caption(strings[i]) for i in shown] == captions
    assert set(captions) == {words.caption(word) for word in strings[:10]}
    shown, captions = lessons.lesson(latents, 0.5, held_out)(rng, 2000)
    pairs = zip("".join(strings[i] for i in shown), "".join(text[10:13] for text in captions), strict=True)
    wrong = np.mean([letter != asked for letter, asked in pairs])
    assert wrong == pytest.approx(0.5 * 14 / 15, abs=0.03)


def lesson_of(
    examples: None, path: Path | None, *, stop_after: int | None = None, settings: int = 0
) -> dict[str, torch.Tensor]:
    """Weights after a lesson of four small batches, which is cut short before batch `stop_after`."""
    denoiser, text, snapshot, words = (script(name) for name in ("denoiser", "text", "snapshot", "words"))
    tokenizer = text.build_tokenizer(words.caption(letter) for letter in words.ALPHABET)
    transformer = denoiser.build_transformer(0)
    batches = []

    def draw_batch(rng: np.random.Generator, size: int) -> tuple[torch.Tensor, list[str]]:
        if len(batches) == stop_after:
            raise KeyboardInterrupt
        batches.append(size)
        return torch.from_numpy(rng.standard_normal((size, 10, 64), dtype=np.float32)), ['the word "CAT"'] * size

    denoiser.train_denoiser(
        transformer,
        text.build_text_encoder(tokenizer, 0),
        tokenizer,
        draw_batch,
        picture_px=(words.HEIGHT_PX, words.WIDTH_PX),
        num_steps=4,
        batch_size=2,
        peak_lr=1e-3,
        seed=0,
        is_text_frozen=True,
        snapshot=snapshot.Snapshot(path, {"settings": settings}, every_s=0.0),
    )
    return transformer.state_dict()


def test_a_lesson_goes_on_from_its_snapshot_as_if_it_had_not_stopped(examples: None, tmp_path: Path) -> None:
    whole = lesson_of(examples, None)
    path = tmp_path / "snapshots" / "lesson.pt"
    with pytest.raises(KeyboardInterrupt):
        lesson_of(examples, path, stop_after=2)
    resumed = lesson_of(examples, path, stop_after=2)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    with pytest.raises(ValueError, match=r"--snapshots must be of a training with the settings \{'settings': 1\}"):
        lesson_of(examples, path, settings=1)


def test_frozen_texts_are_encoded_as_the_pipeline_encodes_them(examples: None) -> None:
    denoiser, text, words = (script(name) for name in ("denoiser", "text", "words"))
    tokenizer = text.build_tokenizer(words.caption(letter) for letter in words.ALPHABET)
    encoder = text.build_text_encoder(tokenizer, 0)
    prompts = ['the word "CAT"', " ", 'the word "DOG"', " "]
    kept = denoiser.PromptEncoder(encoder, tokenizer, is_frozen=True)
    kept(prompts[1:2])
    embeds, mask = kept(prompts)
    expected, expected_mask = denoiser.PromptEncoder(encoder, tokenizer, is_frozen=False)(prompts)
    torch.testing.assert_close(mask, expected_mask, check_dtype=False)
    torch.testing.assert_close(embeds, expected * expected_mask.unsqueeze(-1), atol=1e-5, rtol=1e-5)
    assert not embeds.requires_grad and expected.requires_grad


@pytest.mark.long
def test_pretraining_makes_a_checkpoint_that_diffusers_reads(examples: None, tmp_path: Path) -> None:
    words, pretrain = script("words"), script("pretrain")
    arguments = ["--output", str(tmp_path), "--snapshots", str(tmp_path / "snapshots"), "--share", "0.005"]
    pretrain.main([*arguments, "--num-threads", "1"])
    pipeline = QwenImagePipeline.from_pretrained(tmp_path / "checkpoint")
    pipeline.set_progress_bar_config(disable=True)
    picture = pipeline(
        words.caption("CAT"), height=words.HEIGHT_PX, width=words.WIDTH_PX, num_inference_steps=2, true_cfg_scale=1.0
    ).images[0]
    assert picture.size == (words.WIDTH_PX, words.HEIGHT_PX)
    assert len((tmp_path / "prompts" / "train.jsonl").read_text().splitlines()) == 120
    assert (tmp_path / "sheet.png").is_file()
