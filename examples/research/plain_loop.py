# SPDX-License-Identifier: Apache-2.0
"""The quick start's work in plain PyTorch and diffusers, without Ray, verl or this package: what a step costs at least
for somebody who writes the loop by hand. To be measured beside `make quickstart`, whose steps have the same sizes.

    python examples/research/plain_loop.py --steps 12 --json plain.jsonl

Flow-GRPO on 8 prompts x 12 pictures of 64 px, 10 steps of which 9 are stochastic and trained, all weights, fp32. Each
process has one thread and an equal share of the prompts; gradients are summed once per step over gloo. Samples of a
step are one batch, and a reward is computed in the process that drew the picture. No validation, checkpoint or log.

It prints a line per step: seconds, CPU seconds of all processes, mean reward. The first step has imports behind it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers.pipelines.qwenimage.pipeline_qwenimage import QwenImagePipeline, calculate_shift
from plain_sd3 import flow_step
from torch import Tensor, distributed
from torch.multiprocessing.spawn import spawn

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "examples/tiny_qwen_image"
SIDE_PX, NUM_STEPS, ETA, CLIP, MAX_ADVANTAGE = 64, 10, 0.7, 1e-4, 5.0


class Loop:
    """Models, optimizer and schedule of one process; `step` is the loop's body.

    Args:
        prompts: of a step, in this process.
        group: pictures of a prompt.
        micro_batch: rows of a forward and backward.
    """

    def __init__(self, prompts: list[list[str]], group: int, micro_batch: int):
        sys.path.insert(0, str(ROOT / "examples/drawn_world"))
        from shapes_reward import compute_score

        self.prompts, self.group, self.micro_batch, self.score = prompts, group, micro_batch, compute_score
        self.pipeline: Any = QwenImagePipeline.from_pretrained(MODEL / "checkpoint")
        self.network, self.vae = self.pipeline.transformer, self.pipeline.vae
        self.optimizer = torch.optim.AdamW(self.network.parameters(), lr=3e-4, weight_decay=0.01)
        self.side = SIDE_PX // (2 * self.pipeline.vae_scale_factor)
        schedule = self.pipeline.scheduler
        lengths = (
            schedule.config[name] for name in ("base_image_seq_len", "max_image_seq_len", "base_shift", "max_shift")
        )
        mu = calculate_shift(self.side**2, *lengths)
        schedule.set_timesteps(sigmas=np.linspace(1.0, 1 / NUM_STEPS, NUM_STEPS), mu=mu)
        self.sigmas = schedule.sigmas.tolist()
        self.sde = [flow_step(*pair, self.sigmas[1], ETA) for pair in pairwise(self.sigmas[:-1])]  # the last ends at 0

    @torch.no_grad()
    def encode(self, prompts: list[str]) -> tuple[Tensor, Tensor | None]:
        """Embeddings [N, L, D] of each picture's prompt, and their mask [N, L]."""
        embeds, mask = self.pipeline.encode_prompt(prompts)
        return embeds.repeat_interleave(self.group, 0), None if mask is None else mask.repeat_interleave(self.group, 0)

    def velocity(
        self, x: Tensor, number: int, texts: tuple[Tensor, Tensor | None], rows: slice = slice(None)
    ) -> Tensor:
        embeds, mask = texts
        return self.network(
            hidden_states=x,
            timestep=torch.full((len(x),), self.sigmas[number]),
            encoder_hidden_states=embeds[rows],
            encoder_hidden_states_mask=None if mask is None else mask[rows],
            img_shapes=[[(1, self.side, self.side)]] * len(x),
            return_dict=False,
        )[0]

    @torch.no_grad()
    def generate(self, texts: tuple[Tensor, Tensor | None]) -> tuple[list[Tensor], list[Tensor], np.ndarray]:
        """Latents [N, tokens, channels] of every step, log-probs [N] of the stochastic ones, pixels [N, H, W, 3]."""
        channels, vae = self.pipeline.transformer.config.in_channels, self.vae
        path, log_probs = [torch.randn(len(texts[0]), self.side**2, channels)], []
        for number, sde in enumerate(self.sde):
            mean = sde.a * path[-1] + sde.b * self.velocity(path[-1], number, texts)
            path.append(mean + sde.std * torch.randn_like(mean))
            log_probs.append(sde.log_prob(path[-1], mean))
        clean = path[-1] - self.sigmas[-2] * self.velocity(path[-1], len(self.sde), texts)
        unpacked = self.pipeline._unpack_latents(clean, SIDE_PX, SIDE_PX, self.pipeline.vae_scale_factor)
        mean, std = (torch.tensor(vae.config[name]).view(1, -1, 1, 1, 1) for name in ("latents_mean", "latents_std"))
        pictures = vae.decode(unpacked * std + mean, return_dict=False)[0][:, :, 0]
        pixels = ((pictures / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8).movedim(1, -1)
        return path, log_probs, pixels.numpy()

    def step(self, number: int) -> tuple[float, float]:
        """Generate, score and train one batch -> mean reward, and the largest distance of a ratio from 1."""
        prompts = self.prompts[number % len(self.prompts)]
        texts = self.encode(prompts)
        path, log_probs, pixels = self.generate(texts)
        words = [prompt for prompt in prompts for _ in range(self.group)]
        scores = [self.score("", image, word)["score"] for image, word in zip(pixels, words, strict=True)]
        groups = torch.tensor(scores, dtype=torch.float32).view(-1, self.group)
        moments = torch.stack([groups.sum(), groups.square().sum(), torch.tensor(float(groups.numel()))]).double()
        distributed.all_reduce(moments)
        mean = moments[0] / moments[2]
        spread = (moments[1] / moments[2] - mean.square()).clamp(min=0).sqrt().float()
        advantages = (groups - groups.mean(1, keepdim=True)) / (spread + 1e-4)
        advantages = advantages.clamp(-MAX_ADVANTAGE, MAX_ADVANTAGE).flatten()
        return mean.item(), self.train(path, log_probs, advantages, texts)

    def train(
        self, path: list[Tensor], old: list[Tensor], advantages: Tensor, texts: tuple[Tensor, Tensor | None]
    ) -> float:
        """One optimizer step on all rows of the batch -> the largest distance of a ratio from 1."""
        gap = torch.zeros(())
        for number, sde in enumerate(self.sde):
            for start in range(0, len(advantages), self.micro_batch):
                rows = slice(start, start + self.micro_batch)
                x = path[number][rows]
                mean = sde.a * x + sde.b * self.velocity(x, number, texts, rows)
                ratio = (sde.log_prob(path[number + 1][rows], mean) - old[number][rows]).exp()
                gap = torch.maximum(gap, (ratio.detach() - 1).abs().max())
                clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
                loss = torch.maximum(-advantages[rows] * ratio, -advantages[rows] * clipped).sum()
                (loss / (len(self.sde) * len(advantages) * distributed.get_world_size())).backward()
        trained = (each.grad for each in self.network.parameters())
        gradients = [each for each in trained if each is not None]  # the last layers of the text's stream have none
        flat = torch.cat([each.flatten() for each in gradients])
        distributed.all_reduce(flat)
        for each, summed in zip(gradients, flat.split([each.numel() for each in gradients]), strict=True):
            each.copy_(summed.view_as(each))
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return gap.item()


def work(rank: int, address: str, args: argparse.Namespace) -> None:
    """Train in one of the processes."""
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    distributed.init_process_group("gloo", f"file://{address}", rank=rank, world_size=args.processes)
    lines = (MODEL / "prompts/train.jsonl").read_text().splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines][rank :: args.processes]
    share = args.prompts // args.processes
    batches = [prompts[start : start + share] for start in range(0, len(prompts) - share + 1, share)]
    loop = Loop(batches, args.group, args.micro_batch)
    for number in range(args.steps):
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        reward, gap = loop.step(number)
        cpu_s = torch.tensor(time.process_time() - began_cpu_s)
        distributed.all_reduce(cpu_s)
        if rank == 0:
            numbers = {
                "step": number + 1,
                "step_s": time.perf_counter() - began_s,
                "cpu_s": cpu_s.item(),
                "reward": reward,
                "ratio_gap_max": gap,
            }
            print(" | ".join(f"{name} {value:.4g}" for name, value in numbers.items()), flush=True)
            if args.json:
                with open(args.json, "a") as file:
                    file.write(json.dumps(numbers) + "\n")
    distributed.destroy_process_group()


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"steps": 12, "processes": 2, "prompts": 8, "group": 12, "micro-batch": 48}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", help="file to which a line per step is appended")
    return parser.parse_args(argv)


if __name__ == "__main__":
    args = parse()
    if args.prompts % args.processes:
        raise SystemExit(f"plain_loop.py: --prompts must be a multiple of --processes, got {args.prompts}")
    address = f"/tmp/plain_loop_{os.getpid()}"
    spawn(work, (address, args), nprocs=args.processes)
