# SPDX-License-Identifier: Apache-2.0
"""Make the tiny Qwen-Image-Edit that edits pictures of shapes, and its prompts, from examples/tiny_qwen_image.

    python examples/tiny_edit/pretrain.py --output examples/tiny_edit --snapshots outputs/tiny_edit_pretraining

writes `checkpoint/` (what `QwenImageEditPlusPipeline` is made of) and `prompts/{train,val}.parquet`, with the pictures
in them. Network and autoencoder start as those of examples/tiny_qwen_image; killed, the same command goes on from the
newest snapshot. README.md says what comes out and how long it takes.
"""

import argparse
import logging
import math
import sys
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).resolve().parents[1] / name) for name in ("drawn_world", "tiny_qwen_image")]

import numpy as np
import torch
from autoencoder import OneFrame
from denoiser import SCHEDULER_CONFIG, Batch, build_scheduler, encode_packed, fit
from diffusers import AutoencoderKLQwenImage, QwenImagePipeline, QwenImageTransformer2DModel
from diffusers.pipelines.qwenimage.pipeline_qwenimage import calculate_shift
from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus import QwenImageEditPlusPipeline
from drawn_edits import all_edits, instruction
from drawn_scenes import caption
from edit_lessons import Album, Task, draw_tasks, encode_tasks, joined, lesson, picture
from edit_prompts import split_tasks, write_prompts
from shape_edit_reward import compute_score
from shapes import PICTURE_PX
from snapshot import Snapshot
from text import IMAGE_TOKENS, build_text_encoder, build_tokenizer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from verl_digen.models.qwen_image_edit import PictureProcessor
from verl_digen.models.tiny.parts import WithProcessor
from verl_digen.models.tiny.qwen_image_edit import edit_checkpoint

logger = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parents[2]
START = ROOT / "examples" / "tiny_qwen_image" / "checkpoint"
"""Checkpoint whose denoiser and autoencoder are the first ones."""

SEEN_PX = {"shortest_edge": 56 * 56, "longest_edge": 64 * 64}
"""Bounds on the pixels that the language model reads of a picture: 2 x 2 tokens of 28 px, where the real one has
14 x 14. The upper one is above 56 x 56, or rounding would leave one token."""

EDITS_PER_PICTURE = 3
BATCH = 32
LESSONS = ((500, 2e-3, 0.0), (60, 7e-4, 0.5))
"""(steps, peak learning rate, disobedience) of the lessons: first to do what the instruction says, then to take it less
seriously."""

SAMPLE_STEPS = 8


def untrained(seed: int) -> WithProcessor:
    """The checkpoint before its first lesson, with a text encoder that stays as it is."""
    sentences = [instruction(edit) for edit in all_edits()]
    marks = tuple(IMAGE_TOKENS.values())
    tokenizer = build_tokenizer([*sentences, "Picture 1: "], QwenImageEditPlusPipeline, marks)
    images = Qwen2VLImageProcessorPil(size=SEEN_PX)
    vae = AutoencoderKLQwenImage.from_pretrained(START / "vae")
    transformer = QwenImageTransformer2DModel.from_pretrained(START / "transformer")
    for part in (vae, transformer):  # their configs name where they were read: no folder of this machine
        part.register_to_config(_name_or_path=str(Path(part.config["_name_or_path"]).relative_to(ROOT)))
    processor: Any = tokenizer  # whose files are among the processor's
    pipeline = QwenImageEditPlusPipeline(
        scheduler=build_scheduler(),
        vae=vae,
        text_encoder=build_text_encoder(tokenizer, seed, IMAGE_TOKENS).requires_grad_(False).eval(),
        tokenizer=tokenizer,
        processor=processor,
        transformer=transformer,
    )
    return edit_checkpoint(pipeline, images)


@torch.no_grad()
def edited(pipeline: Any, batch: Batch, seed: int) -> np.ndarray:
    """Edited pictures, uint8 [B, 64, 64, 3], sampled without guidance; the picture of `batch` is not looked at."""
    scheduler = build_scheduler()
    names = ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift")
    num_tokens = batch.x0.shape[1]
    mu = calculate_shift(num_tokens, *(SCHEDULER_CONFIG[name] for name in names))
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / SAMPLE_STEPS, SAMPLE_STEPS), mu=mu)
    latents = torch.randn(batch.x0.shape, generator=torch.Generator().manual_seed(seed))
    side = PICTURE_PX // 16
    for time in scheduler.timesteps:
        velocity = pipeline.transformer(
            hidden_states=torch.cat([latents, batch.source], dim=1),
            timestep=(time / 1000).expand(len(latents)),
            encoder_hidden_states=batch.embeds,
            encoder_hidden_states_mask=batch.mask,
            img_shapes=[[(1, side, side)] * 2] * len(latents),
            return_dict=False,
        )[0][:, :num_tokens]
        latents = scheduler.step(velocity, time, latents, return_dict=False)[0]
    spread = QwenImagePipeline._unpack_latents(latents, PICTURE_PX, PICTURE_PX, pipeline.vae_scale_factor)
    mean = torch.tensor(pipeline.vae.config.latents_mean).view(1, -1, 1, 1, 1)
    with OneFrame(pipeline.vae):
        pixels = pipeline.vae.decode(spread + mean, return_dict=False)[0][:, :, 0]
    return ((pixels.clamp(-1, 1) + 1) * 127.5).round().byte().permute(0, 2, 3, 1).numpy()


def examine(pipeline: Any, tasks: list[Task], seed: int) -> dict[str, float]:
    """Mean reward of one picture per task, and its parts."""
    drawn = np.stack([picture(task.scene, task.drawing) for task in tasks])
    with OneFrame(pipeline.vae):
        source = encode_packed(pipeline.vae, drawn)
    batch = joined(encode_tasks(pipeline, tasks), torch.zeros_like(source), source)
    truths = [{"target": caption(task.target()), "changed": task.edit.attribute} for task in tasks]
    scores = [
        compute_score("tiny_edit", shown, truth)
        for shown, truth in zip(edited(pipeline, batch, seed), truths, strict=True)
    ]
    return {name: float(np.mean([score[name] for score in scores])) for name in ("score", "followed", "kept")}


def pretrain(options: argparse.Namespace) -> None:
    """Run all stages and write the folders."""
    write_prompts(options.output / "prompts", split_tasks(options.seed))
    checkpoint = untrained(options.seed)
    pipeline = checkpoint.pipeline
    tasks = draw_tasks(np.random.default_rng(options.seed), EDITS_PER_PICTURE)
    tasks = tasks[: math.ceil(options.share * len(tasks))]
    pipeline.processor = PictureProcessor(checkpoint.processors["processor"][1], pipeline.tokenizer)
    with OneFrame(pipeline.vae):
        album = Album(pipeline.vae)
    logger.info("encoding %d prompts", len(tasks))
    embeds = encode_tasks(pipeline, tasks)
    logger.info("they are encoded")
    for number, (num_steps, peak_lr, disobedience) in enumerate(LESSONS):
        steps = {"num_steps": math.ceil(options.share * num_steps), "batch_size": BATCH, "peak_lr": peak_lr}
        path = None if options.snapshots is None else options.snapshots / f"lesson_{number + 1}.pt"
        fit(
            [pipeline.transformer],
            lesson(album, tasks, embeds, disobedience),
            picture_px=(PICTURE_PX, PICTURE_PX),
            **steps,
            seed=options.seed + number,
            snapshot=Snapshot(path, {**steps, "disobedience": disobedience, "seed": options.seed}),
        )
        found = examine(pipeline, split_tasks(options.seed)["val"], options.seed)
        logger.info("after lesson %d the validation prompts score %s", number + 1, found)
    pipeline.processor = pipeline.tokenizer
    pipeline.transformer.to(torch.bfloat16)  # half the bytes of a file that lies in the repository
    checkpoint.save_pretrained(options.output / "checkpoint")


def main(arguments: list[str] | None = None) -> None:
    """Read the command line and pretrain."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="folder to write into")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--snapshots", type=Path, help="folder of snapshots: the same command goes on from them")
    parser.add_argument("--share", type=float, default=1.0, help="share of the work to do, to try it out")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    pretrain(options)


if __name__ == "__main__":
    main()
