# SPDX-License-Identifier: Apache-2.0
"""Make the tiny Qwen-Image checkpoint of the quick start, and its prompts, from nothing but a seed.

    python examples/tiny_qwen_image/pretrain.py --output examples/tiny_qwen_image

writes `checkpoint/` (what `diffusers.QwenImagePipeline.from_pretrained` reads), `prompts/{train,val}.jsonl`
and `sheet.png` (what the checkpoint draws for the validation prompts). Stages: tokenizer, autoencoder,
latents of the drawn world, denoiser and text encoder together. README.md says what comes out and how long it
takes.
"""

import argparse
import json
import logging
import math
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "drawn_world"))

import numpy as np
import torch
from autoencoder import OneFrame, train_autoencoder
from denoiser import build_scheduler, build_transformer, train_denoiser
from diffusers import QwenImagePipeline
from drawn_scenes import all_scenes, caption
from PIL import Image
from shapes import PICTURE_PX, draw_batch, draw_world, encode_world, lesson
from shapes_reward import compute_score
from snapshot import Snapshot
from text import build_text_encoder, build_tokenizer

logger = logging.getLogger(__name__)

NUM_TRAIN_PROMPTS = 400
NUM_VAL_PROMPTS = 48

AUTOENCODER_STEPS, AUTOENCODER_BATCH = 2400, 32
DENOISER_BATCH = 64
LESSONS = (
    {"num_steps": 1800, "peak_lr": 2e-3, "disobedience": 0.0},
    {"num_steps": 400, "peak_lr": 7e-4, "disobedience": 0.5},
)
"""Lessons of the denoiser: first to draw what a caption says, then to take the caption less seriously."""

SAMPLE_STEPS = 10


def split_prompts(seed: int) -> dict[str, list[str]]:
    """Two disjoint lists of captions, "train" and "val", drawn from all captions of the world."""
    captions = [caption(scene) for scene in all_scenes()]
    order = np.random.default_rng(seed).permutation(len(captions))
    val, train = order[:NUM_VAL_PROMPTS], order[NUM_VAL_PROMPTS : NUM_VAL_PROMPTS + NUM_TRAIN_PROMPTS]
    return {"train": [captions[i] for i in train], "val": [captions[i] for i in val]}


def write_prompts(folder: Path, prompts: dict[str, list[str]]) -> None:
    """One JSON object a line: the prompt, and what the scorer needs."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, captions in prompts.items():
        rows = [
            {"prompt": text, "data_source": "digen_shapes", "reward_model": {"style": "rule", "ground_truth": text}}
            for text in captions
        ]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def look(pipeline: QwenImagePipeline, prompts: list[str], seed: int) -> tuple[float, Image.Image]:
    """The mean score of one picture per prompt, drawn without guidance, and all of them on one sheet."""
    pictures = pipeline(
        prompts,
        height=PICTURE_PX,
        width=PICTURE_PX,
        num_inference_steps=SAMPLE_STEPS,
        true_cfg_scale=1.0,
        generator=torch.Generator().manual_seed(seed),
    ).images
    scores = [
        compute_score("digen_shapes", np.asarray(picture), text)["score"]
        for picture, text in zip(pictures, prompts, strict=True)
    ]
    columns = 12
    sheet = Image.new("RGB", (columns * PICTURE_PX, math.ceil(len(pictures) / columns) * PICTURE_PX))
    for i, picture in enumerate(pictures):
        sheet.paste(picture, (i % columns * PICTURE_PX, i // columns * PICTURE_PX))
    return float(np.mean(scores)), sheet


def snapshot_of(stage: str, options: argparse.Namespace, **settings: float) -> Snapshot:
    """The snapshots of one stage."""
    path = None if options.snapshots is None else options.snapshots / f"{stage}.pt"
    return Snapshot(path, {**settings, "seed": options.seed})


def main() -> None:
    """Run all stages and write the folders."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="folder to write into")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--snapshots", type=Path, help="folder of snapshots: the same command goes on from them")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")

    prompts = split_prompts(options.seed)
    write_prompts(options.output / "prompts", prompts)
    tokenizer = build_tokenizer(caption(scene) for scene in all_scenes())
    vae = train_autoencoder(
        draw_batch,
        draw_world,
        num_steps=AUTOENCODER_STEPS,
        batch_size=AUTOENCODER_BATCH,
        seed=options.seed,
        snapshot=snapshot_of("autoencoder", options, num_steps=AUTOENCODER_STEPS, batch_size=AUTOENCODER_BATCH),
    )
    with OneFrame(vae):
        latents = encode_world(vae, options.seed)
    pipeline = QwenImagePipeline(
        scheduler=build_scheduler(),
        vae=vae,
        text_encoder=build_text_encoder(tokenizer, options.seed),
        tokenizer=tokenizer,
        transformer=build_transformer(options.seed),
    )
    pipeline.set_progress_bar_config(disable=True)
    for number, settings in enumerate(LESSONS):
        train_denoiser(
            pipeline.transformer,
            pipeline.text_encoder,
            tokenizer,
            lesson(latents, settings["disobedience"]),
            picture_px=(PICTURE_PX, PICTURE_PX),
            num_steps=settings["num_steps"],
            batch_size=DENOISER_BATCH,
            peak_lr=settings["peak_lr"],
            seed=options.seed + number,
            snapshot=snapshot_of(f"lesson_{number + 1}", options, batch_size=DENOISER_BATCH, **settings),
        )
        score, sheet = look(pipeline, prompts["val"], options.seed)
        logger.info("after lesson %d the validation prompts score %.3f on average", number + 1, score)
    pipeline.save_pretrained(options.output / "checkpoint")
    sheet.save(options.output / "sheet.png")


if __name__ == "__main__":
    main()
