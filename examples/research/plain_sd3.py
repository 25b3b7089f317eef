# SPDX-License-Identifier: Apache-2.0
"""Flow-GRPO with LoRA on Stable Diffusion 3.5 in plain PyTorch, diffusers and peft, on one device: what a user would
write instead of `recipe=digen_sd3`, to be measured beside it. After flow_grpo's `train_sd3.py`.

    python examples/research/plain_sd3.py CHECKPOINT --mode cfg --steps 3 --json plain.jsonl

- `--mode cfg`, the work of `recipe=digen_sd3`: guidance in sampling and training, both branches in one forward; every
  step but the last is stochastic and trained; KL to the base, which costs a forward without the adapter.
- `--mode fast`, the work of `recipe=digen_sd3+flowgrpo_fast`: no guidance, no KL; all groups share a window of 3.
- Prompts are encoded once, and the text encoders then wait in host memory. The VAE decodes on the device, in fp32.
  Latents and log-probs stay there. One optimizer step per batch, with ratios to recorded log-probs. No EMA, no files.
- The frozen base is in `--dtype`, without autocast. The optimizer's adapter is fp32; forwards read a copy in `--dtype`,
  whose gradients are summed in fp32. fp16 has a loss scale: a step whose `grad_norm` is not finite is skipped.
- Memory at 512 px (calculated): 2.2 GB of activations per trained row and branch, unless `--checkpointing`, and 6 GB of
  weights. 80 GB hold 16 rows with guidance or 32 without; the defaults are half of that.
"""

from __future__ import annotations

import argparse
import io
import json
import math
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import StableDiffusion3Pipeline
from peft import LoraConfig, get_peft_model
from PIL import Image
from torch import Tensor

from verl_digen.models.checkpoint import load_network  # diffusers' loader, or random weights of a published size

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
TARGETS = r".*\.attn\.(to_q|to_k|to_v|to_out\.0|add_q_proj|add_k_proj|add_v_proj|to_add_out)"


class Mode(NamedTuple):
    guidance: float
    eta: float  # noise level
    window: int | None  # trained steps; None: all but the last
    clip: float
    kl_coef: float
    micro_batch: int


MODES = {"cfg": Mode(4.5, 0.7, None, 1e-4, 0.04, 8), "fast": Mode(1.0, 0.8, 3, 1e-5, 0.0, 16)}


class Step(NamedTuple):
    """x' = m + std noise with m = a x + b v; log-prob = offset - scale mean((x' - m)²); KL = kl mean((m - m_base)²)."""

    a: float
    b: float
    std: float
    offset: float = 0.0
    scale: float = 1.0
    kl: float = 0.0

    def log_prob(self, following: Tensor, mean: Tensor) -> Tensor:
        return self.offset - self.scale * (following - mean).square().flatten(1).mean(1)

    def divergence(self, mean: Tensor, base: Tensor) -> Tensor:
        return self.kl * (mean - base).square().flatten(1).mean(1)


def flow_step(sigma: float, sigma_next: float, sigma_max: float, eta: float) -> Step:
    """Flow-GRPO's SDE; `sigma_max`, the schedule's second sigma, replaces a sigma of 1, the pole of the noise."""
    dt = sigma_next - sigma
    s = eta * math.sqrt(sigma / (1 - (sigma if sigma < 1 - 1e-6 else sigma_max)))
    drift, std = s * s / (2 * sigma) * dt, s * math.sqrt(-dt)
    offset = -math.log(std) - 0.5 * math.log(2 * math.pi)
    return Step(1 + drift, dt + drift * (1 - sigma), std, offset, 1 / (2 * std * std), 1 / (2 * s * s))


def cps_step(sigma: float, sigma_next: float, eta: float) -> Step:
    """Coefficients-preserving sampling of Flow-GRPO-Fast, whose log-prob leaves variance and constants out."""
    clean, kept = 1 - sigma_next, sigma_next * math.cos(eta * math.pi / 2)
    return Step(clean + kept, kept * (1 - sigma) - clean * sigma, sigma_next * math.sin(eta * math.pi / 2))


class Run:
    """Models, optimizer and schedule; `step` is the loop's body."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.mode, self.dtype = args, MODES[args.mode], DTYPES[args.dtype]
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.rows = torch.arange(args.prompts * args.group, device=self.device)
        self.texts: tuple[Tensor, ...] = ()
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.manual_seed(0)
        base: Any = load_network(Path(args.checkpoint) / "transformer", "SD3Transformer2DModel", self.dtype)
        parts = {"transformer": base, "dtype": {"default": self.dtype, "vae": torch.float32}}
        self.pipeline: Any = StableDiffusion3Pipeline.from_pretrained(args.checkpoint, **parts).to(self.device)
        self.vae = self.pipeline.vae
        lora = LoraConfig(r=args.lora_rank, lora_alpha=2 * args.lora_rank, target_modules=TARGETS)
        self.network: Any = get_peft_model(base, lora, autocast_adapter_dtype=False)
        self.adapter: list[Any] = [each for each in self.network.parameters() if each.requires_grad]
        for each in self.adapter:
            each.grad_dtype = torch.float32
        self.exact = [each.detach().float().clone() for each in self.adapter]
        self.optimizer = torch.optim.AdamW(self.exact, lr=3e-4, weight_decay=1e-4, fused=True)
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.dtype == torch.float16)
        if args.checkpointing:
            base.enable_gradient_checkpointing()
        if args.compile:
            torch._dynamo.config.recompile_limit = 64  # 3 kinds of blocks, with and without gradient or adapter
            for block in base.transformer_blocks:
                block.compile(dynamic=False)
        self.pipeline.scheduler.set_timesteps(args.denoise_steps)
        self.sigmas = sigmas = self.pipeline.scheduler.sigmas.tolist()
        is_flow, eta, pairs = self.mode.window is None, self.mode.eta, pairwise(sigmas[:-1])  # the last step ends at 0
        self.sde = [flow_step(*pair, sigmas[1], eta) if is_flow else cps_step(*pair, eta) for pair in pairs]

    def clock(self) -> float:
        """Seconds; the device is idle."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    @torch.no_grad()
    def encode(self) -> tuple[Tensor, Tensor]:
        """Texts [P + 1, L, D] and pooled texts [P + 1, E] of the prompts and the empty one, which comes last."""
        prompts = [f"{number + 1} red cubes on a wooden table" for number in range(self.args.prompts)]
        texts, _, pooled, _ = self.pipeline.encode_prompt([*prompts, ""], None, None, self.device, 1, False)
        for name in ("text_encoder", "text_encoder_2", "text_encoder_3"):
            getattr(self.pipeline, name).to("cpu")
        return texts.to(self.dtype), pooled.to(self.dtype)

    def velocity(self, latents: Tensor, number: int, rows: Tensor) -> Tensor:
        """Guided velocity [N, ...] fp32 of the batch's `rows` before step `number`; both branches share a forward."""
        texts = [each[rows // self.args.group] for each in self.texts]
        x = latents.to(self.dtype)
        if self.mode.guidance != 1.0:
            x = torch.cat([x, x])
            texts = [torch.cat([own, each[-1:].expand_as(own)]) for own, each in zip(texts, self.texts, strict=True)]
        timesteps = torch.full((len(x),), self.sigmas[number] * 1000, device=self.device)
        velocity = self.network(x, *texts, timesteps, return_dict=False)[0].float()
        return torch.lerp(velocity[-len(latents) :], velocity[: len(latents)], self.mode.guidance)

    def mean(self, latents: Tensor, number: int, rows: Tensor) -> Tensor:
        """Mean of x' [N, ...] in stochastic step `number`."""
        return self.sde[number].a * latents + self.sde[number].b * self.velocity(latents, number, rows)

    @torch.no_grad()
    def generate(self, window: range, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Sample `rows` -> latents [K + 1, N, ...] and log-probs [K, N] of the window, pixels uint8 [N, H, W, 3]."""
        side, vae = self.args.size // self.pipeline.vae_scale_factor, self.vae
        latents = torch.randn(len(rows), vae.config.latent_channels, side, side, device=self.device)
        path, log_probs = [latents], []
        for number, (sigma, sigma_next) in enumerate(pairwise(self.sigmas)):
            if number in window:
                mean = self.mean(latents, number, rows)
                latents = mean + self.sde[number].std * torch.randn_like(mean)
                log_probs.append(self.sde[number].log_prob(latents, mean))
            else:
                latents = latents + (sigma_next - sigma) * self.velocity(latents, number, rows)
            path.append(latents)
        latents = latents / vae.config.scaling_factor + vae.config.shift_factor
        pictures = torch.cat([vae.decode(some, return_dict=False)[0] for some in latents.split(8)])
        pixels = ((pictures / 2 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8).movedim(1, -1)
        return torch.stack(path[window.start : window.stop + 1]), torch.stack(log_probs), pixels

    def train(self, window: range, path: Tensor, log_probs: Tensor, advantages: Tensor) -> dict[str, float]:
        """One optimizer step on all rows of the batch -> its numbers. Waits for the device at the end alone."""
        mode, (gap, kl) = self.mode, torch.zeros(2, device=self.device)
        for rows in self.rows.split(self.args.micro_batch or mode.micro_batch):
            for place, number in enumerate(window):
                latents, advantage, base = path[place][rows], advantages[rows], None
                if mode.kl_coef > 0:  # first, while no activations are kept
                    with torch.no_grad(), self.network.disable_adapter():
                        base = self.mean(latents, number, rows)
                mean = self.mean(latents, number, rows)
                log_ratio = self.sde[number].log_prob(path[place + 1][rows], mean) - log_probs[place][rows]
                clipped = log_ratio.exp().clamp(1 - mode.clip, 1 + mode.clip)
                loss = torch.maximum(-advantage * log_ratio.exp(), -advantage * clipped).sum() / log_probs.numel()
                if base is not None:
                    divergence = self.sde[number].divergence(mean, base).sum() / log_probs.numel()
                    loss, kl = loss + mode.kl_coef * divergence, kl + divergence.detach()
                self.scaler.scale(loss).backward()
                gap = torch.maximum(gap, log_ratio.detach().abs().max())
        for exact, each in zip(self.exact, self.adapter, strict=True):
            exact.grad, each.grad = each.grad, None
        self.scaler.unscale_(self.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(self.exact, 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        for exact, each in zip(self.exact, self.adapter, strict=True):
            each.data.copy_(exact)
        return {"log_prob_gap_max": gap.item(), "kl": kl.item(), "grad_norm": norm.item()}

    def step(self) -> dict[str, float]:
        """Generate, score and train one batch -> its numbers."""
        times = [self.clock()]
        self.texts = self.texts or self.encode()
        times.append(self.clock())
        size = self.mode.window or len(self.sde)
        start = int(torch.randint(max(1, (len(self.sde) + 1) // 2 - size + 1), ()))  # a window is in the first half
        window = range(start, start + size)
        parts = [self.generate(window, rows) for rows in self.rows.split(self.args.sample_batch)]
        paths, log_probs, pixels = zip(*parts, strict=True)
        pictures = torch.cat(pixels).cpu().numpy()
        times.append(self.clock())
        with ThreadPoolExecutor() as pool:
            rewards = torch.tensor(list(pool.map(jpeg_compressibility, pictures)))
        times.append(self.clock())
        groups = rewards.to(self.device).view(-1, self.args.group)
        advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(correction=0) + 1e-4)).clamp(-5, 5)
        numbers = self.train(window, torch.cat(paths, 1), torch.cat(log_probs, 1), advantages.flatten())
        times.append(self.clock())
        names = ("encode_s", "generate_s", "reward_s", "train_s")
        numbers |= {name: end - start for name, (start, end) in zip(names, pairwise(times), strict=True)}
        numbers |= {"images_per_s": len(rewards) / (times[-1] - times[1]), "reward": rewards.mean().item()}
        return numbers | {"memory_max_gb": torch.cuda.max_memory_allocated() / 1e9}


def jpeg_compressibility(pixels: Any) -> float:
    """Minus the kilobytes of a picture [H, W, 3] as JPEG at quality 95, over 500."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="JPEG", quality=95)
    return -buffer.tell() / 1000 / 500


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", help="folder of a Stable Diffusion 3 checkpoint in diffusers' format")
    parser.add_argument("--mode", choices=MODES, required=True)
    parser.add_argument("--dtype", choices=DTYPES, default="fp16")
    sizes = {"steps": 2, "prompts": 2, "group": 16, "size": 512, "denoise-steps": 10, "lora-rank": 32}
    for name, default in {**sizes, "sample-batch": 32, "micro-batch": None}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--checkpointing", action="store_true")
    parser.add_argument("--json", help="file to which a line per step is appended")
    return parser.parse_args(argv)


if __name__ == "__main__":
    run = Run(args := parse())
    for number in range(args.steps):
        try:
            numbers = {"step": number, **run.step()}
        except torch.OutOfMemoryError:
            print("out of memory: lower --sample-batch if in `generate`, --micro-batch if in `train`", flush=True)
            raise
        print(" | ".join(f"{name} {value:.4g}" for name, value in numbers.items()), flush=True)
        if args.json:
            with open(args.json, "a") as file:
                file.write(json.dumps(numbers) + "\n")
