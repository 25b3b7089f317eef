# SPDX-License-Identifier: Apache-2.0
"""Make the tiny Qwen-Image that writes words, and its prompts, from nothing but a seed.

    python examples/tiny_ocr/pretrain.py --output examples/tiny_ocr --snapshots outputs/tiny_ocr

writes `checkpoint/` (what `diffusers.QwenImagePipeline.from_pretrained` reads), `prompts/{train,val}.jsonl` and
`sheet.png` (what the checkpoint writes for the validation prompts). The stages are those of examples/tiny_qwen_image;
killed, the same command goes on from the newest snapshot. README.md says what comes out and how long it takes.
"""

import argparse
import json
import logging
import math
import sys
from pathlib import Path

sys.path += [str(Path(__file__).resolve().parents[1] / name) for name in ("drawn_world", "tiny_qwen_image")]

import numpy as np
import torch
from autoencoder import OneFrame, train_autoencoder
from denoiser import build_scheduler, build_transformer, train_denoiser
from diffusers import AutoencoderKLQwenImage, QwenImagePipeline
from lessons import draw_batch, draw_world, encode_world, lesson
from PIL import Image
from snapshot import Snapshot
from text import build_text_encoder, build_tokenizer
from words import ALPHABET, HEIGHT_PX, WIDTH_PX, WORDS, caption

from verl_digen.reward.scorers.ocr import Ocr, OcrConfig, text_reward

logger = logging.getLogger(__name__)

NUM_VAL_WORDS = 31

AUTOENCODER = Path(__file__).resolve().parents[1] / "tiny_qwen_image" / "checkpoint" / "vae"
"""Autoencoder of shapes, which goes on to learn words: its drawings of them are legible from the start."""
AUTOENCODER_STEPS, AUTOENCODER_BATCH = 400, 24
DENOISER_BATCH = 32
LESSONS = ((400, 2e-3, 0.0), (100, 7e-4, 0.5))
"""(steps, peak learning rate, misspelling) of the denoiser's lessons: first to write what a caption says, then to take
its spelling less seriously."""

SAMPLE_STEPS = 10

READING = {"detect": False, "line_width_px": 144}
"""Settings of the reward, as in recipes/digen_tiny_ocr.yaml."""


def split_words(seed: int) -> dict[str, list[str]]:
    """Two disjoint lists of words, "train" and "val"."""
    order = np.random.default_rng(seed).permutation(len(WORDS))
    return {"train": [WORDS[i] for i in order[NUM_VAL_WORDS:]], "val": [WORDS[i] for i in order[:NUM_VAL_WORDS]]}


def write_prompts(folder: Path, words: dict[str, list[str]]) -> None:
    """One JSON object a line: the prompt, its source, and the word that is to be read."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, of_split in words.items():
        rows = [{"prompt": caption(word), "data_source": "tiny_ocr"} for word in of_split]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def look(pipeline: QwenImagePipeline, words: list[str], seed: int) -> tuple[float, Image.Image]:
    """Mean OCR reward of a picture per word, drawn without guidance, and all of them on one sheet."""
    pictures = pipeline(
        [caption(word) for word in words],
        height=HEIGHT_PX,
        width=WIDTH_PX,
        num_inference_steps=SAMPLE_STEPS,
        true_cfg_scale=1.0,
        generator=torch.Generator().manual_seed(seed),
    ).images
    reader = Ocr(OcrConfig(**READING), torch.device("cpu"))
    rewards = [text_reward(reader.read(picture), word) for picture, word in zip(pictures, words, strict=True)]
    columns = 8
    sheet = Image.new("RGB", (columns * WIDTH_PX, math.ceil(len(pictures) / columns) * HEIGHT_PX))
    for i, picture in enumerate(pictures):
        sheet.paste(picture, (i % columns * WIDTH_PX, i // columns * HEIGHT_PX))
    return float(np.mean(rewards)), sheet


def snapshot_of(stage: str, options: argparse.Namespace, **settings: float) -> Snapshot:
    """The snapshots of one stage."""
    path = None if options.snapshots is None else options.snapshots / f"{stage}.pt"
    return Snapshot(path, {**settings, "seed": options.seed})


def untrained(vae: AutoencoderKLQwenImage, seed: int) -> QwenImagePipeline:
    """The pipeline before its first lesson."""
    tokenizer = build_tokenizer(caption(letter) for letter in ALPHABET)
    pipeline = QwenImagePipeline(
        scheduler=build_scheduler(),
        vae=vae,
        text_encoder=build_text_encoder(tokenizer, seed).requires_grad_(False),
        tokenizer=tokenizer,
        transformer=build_transformer(seed),
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def pretrain(options: argparse.Namespace) -> None:
    """Run all stages and write the folders."""
    words = split_words(options.seed)
    write_prompts(options.output / "prompts", words)
    steps = {"num_steps": math.ceil(options.share * AUTOENCODER_STEPS), "batch_size": AUTOENCODER_BATCH}
    vae = train_autoencoder(
        draw_batch,
        draw_world,
        **steps,
        seed=options.seed,
        snapshot=snapshot_of("autoencoder", options, **steps),
        start=AutoencoderKLQwenImage.from_pretrained(AUTOENCODER),
    )
    with OneFrame(vae):
        latents = encode_world(vae)
    pipeline = untrained(vae, options.seed)
    for number, (num_steps, peak_lr, misspelling) in enumerate(LESSONS):
        steps = {"num_steps": math.ceil(options.share * num_steps), "batch_size": DENOISER_BATCH, "peak_lr": peak_lr}
        train_denoiser(
            pipeline.transformer,
            pipeline.text_encoder,
            pipeline.tokenizer,
            lesson(latents, misspelling, words["val"]),
            picture_px=(HEIGHT_PX, WIDTH_PX),
            **steps,
            seed=options.seed + number,
            is_text_frozen=True,
            snapshot=snapshot_of(f"lesson_{number + 1}", options, **steps, misspelling=misspelling),
        )
        reward, sheet = look(pipeline, words["val"], options.seed)
        logger.info("after lesson %d the validation words have OCR reward %.3f on average", number + 1, reward)
    pipeline.save_pretrained(options.output / "checkpoint")
    sheet.save(options.output / "sheet.png")


def main(arguments: list[str] | None = None) -> None:
    """Read the command line and pretrain."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="folder to write into")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--snapshots", type=Path, help="folder of snapshots: the same command goes on from them")
    parser.add_argument("--num-threads", type=int, help="threads of torch; default: torch's own number")
    parser.add_argument("--share", type=float, default=1.0, help="share of the steps to take, to try it out")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    if options.num_threads is not None:
        torch.set_num_threads(options.num_threads)
    pretrain(options)


if __name__ == "__main__":
    main()
