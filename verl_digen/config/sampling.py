# SPDX-License-Identifier: Apache-2.0
"""Generation and learning: `digen.sampling`, `sde`, `advantage`, `kl`, `ema`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from verl_digen.algorithms.advantages import SCALES
from verl_digen.algorithms.kl import KINDS as KL_KINDS
from verl_digen.algorithms.outside import Outside
from verl_digen.algorithms.sde import LAWS
from verl_digen.algorithms.solvers import DETERMINISTIC, SOLVERS
from verl_digen.image_sizes import IMAGE_SIZES, SIDE_MULTIPLE
from verl_digen.inputs import DEFAULT_IMAGE_PX
from verl_digen.require import require, require_one_of

MAX_SIDE_PX = 16_384
"""Larger than any picture of a diffusion model; catches typos."""
MAX_FRAMES = 10_000
"""Ten minutes at 16 frames/s."""
MAX_STEPS = 1000
"""Timesteps that a model was trained on: more denoising steps would repeat some."""


@dataclass(frozen=True)
class SamplingConfig:
    """Sampling in training, and in validation where no `val_` field differs."""

    height_px: int = 512
    """Picture height; a multiple of what the architecture needs (16 for Qwen-Image)."""
    width_px: int = 512
    """Picture width."""
    num_frames: int = 1
    """Frames of a video; 1 is an image."""
    size_from_image: bool = False
    """true: a picture or video has the shape of an image of its prompt and about the area of height_px x width_px, by
    the rule of `image_sizes`; false: every one is height_px x width_px."""
    image_sizes: str = "qwen_image_edit"
    """Rule for the sizes of images, that of the model's pipeline (`verl_digen/image_sizes.py`).
    qwen_image_edit: sides in multiples of 32 px; the last image shapes the picture. flux_kontext: an image is read at
    one of FLUX.1 Kontext's 17 sizes, scaled; the picture's sides are multiples of 16 px. flux2: an image is only ever
    made smaller; sides are multiples of 16 px, and the first image shapes the picture. wan, wan_ti2v: sides of a video
    are multiples of 16 or 32 px, at most the area. hunyuan_video15: a list of sizes in steps of 16 px. With the last
    three the network reads an image at the size of the video, with the others at `image_px`."""
    image_px: int = DEFAULT_IMAGE_PX
    """Side of the square whose area an edit model reads each image of a prompt at, with the image's shape. 1024 is that
    of the pipelines; less costs less: an image has as many tokens as a picture of its size."""
    planned_images: int | None = None
    """Images of a prompt that `digen plan` and the FLOPs of a step count; null is the least that the model reads."""
    num_steps: int = 10
    """T in training. flow_grpo trains with 10."""
    true_cfg_scale: float = 1.0
    """True classifier-free guidance in training; 1.0 is off (one branch, half the cost)."""
    negative_prompt: str = " "
    """Negative prompt of every sample whose data row names none; used with guidance only."""
    shared_initial_noise: bool = False
    """All samples of a group start from the same noise in training (DanceGRPO's choice); in validation, which takes no
    noise afterwards, each has its own. With a window that begins later
    (`digen.window.kind=consecutive`), a `diffusers` replica runs the steps before it once for all samples of a group
    that it denoises together."""
    solver: str = "euler"
    """Solver of the steps that no window makes stochastic, in training. euler; ddim, another name of it: for flow
    matching DDIM without noise is Euler's step. dpm2 (second-order multistep DPM-Solver++; MixGRPO-Flash, DiffusionNFT)
    and unipc (UniPC of order 2, which Wan's checkpoints name) are closer to the ODE's solution for as many forwards. sa
    (SA-Solver; AWM) takes noise of its own, and is for objectives that train finished pictures."""
    sa_noise: float = 0.4
    """Noise of solver sa: 0.4 for GenEval and OCR, 0 for PickScore in AWM's recipes."""
    sa_low: float = 0.3
    """Solver sa takes noise in steps that end at a sigma between this and `sa_high`; 0.3 and 0.9 are AWM's."""
    sa_high: float = 0.9
    """See `sa_low`."""
    guidance_scale: float | None = None
    """Guidance scale given to networks that take one as an input (FLUX.1 dev, HunyuanVideo), in training and in
    validation; null is the pipeline's default (3.5, 6.0)."""
    val_num_steps: int = 40
    """T in validation, which is deterministic (ODE). flow_grpo evaluates with 40."""
    val_true_cfg_scale: float = 1.0
    """True classifier-free guidance in validation."""
    val_solver: str = "euler"
    """`solver` of validation, whose steps are all deterministic: any but sa."""
    outside: Outside = field(default_factory=Outside)
    """Cheaper steps before and after the window, in training alone: validation evaluates the network at every step."""

    def __post_init__(self) -> None:
        require_one_of("digen.sampling.solver", self.solver, SOLVERS)
        require_one_of("digen.sampling.val_solver", self.val_solver, DETERMINISTIC)
        require(0 <= self.sa_noise < math.inf, "digen.sampling.sa_noise must be >= 0", self.sa_noise, "0.4 is AWM's")
        require(
            0 <= self.sa_low <= self.sa_high <= 1,
            "digen.sampling.sa_low and sa_high must be sigmas, 0 <= sa_low <= sa_high <= 1",
            (self.sa_low, self.sa_high),
            "0.3 and 0.9 are AWM's",
        )
        require_one_of("digen.sampling.image_sizes", self.image_sizes, tuple(IMAGE_SIZES))
        for name, most in (("height_px", MAX_SIDE_PX), ("width_px", MAX_SIDE_PX), ("num_frames", MAX_FRAMES)):
            value = getattr(self, name)
            require(value >= 1, f"digen.sampling.{name} must be >= 1", value, "give the size in pixels or frames")
            require(value <= most, f"digen.sampling.{name} must be <= {most}", value, "give pixels or frames")
        require(
            SIDE_MULTIPLE <= self.image_px <= MAX_SIDE_PX,
            f"digen.sampling.image_px must lie in [{SIDE_MULTIPLE}, {MAX_SIDE_PX}]",
            self.image_px,
            f"{DEFAULT_IMAGE_PX} is the pipelines'",
        )
        require_one_of("digen.sampling.image_sizes", self.image_sizes, tuple(IMAGE_SIZES))
        require(
            self.planned_images is None or self.planned_images >= 0,
            "digen.sampling.planned_images must be null or >= 0",
            self.planned_images,
            "null is the least number of images that the model reads",
        )
        for name in ("num_steps", "val_num_steps"):
            value = getattr(self, name)
            usual = "10 is usual in training, 40 in validation"
            require(value >= 2, f"digen.sampling.{name} must be >= 2", value, usual)
            require(
                value <= MAX_STEPS,
                f"digen.sampling.{name} must be <= {MAX_STEPS}, the timesteps that a model was trained on",
                value,
                usual,
            )
        for name in ("true_cfg_scale", "val_true_cfg_scale"):
            value = getattr(self, name)
            require(1 <= value <= 1000, f"digen.sampling.{name} must lie in [1, 1000]", value, "1.0 turns guidance off")
        require(
            self.guidance_scale is None or self.guidance_scale >= 0,
            "digen.sampling.guidance_scale must be null or >= 0",
            self.guidance_scale,
            "null is the model's own",
        )


@dataclass(frozen=True)
class SdeConfig:
    """The stochastic sampler (see formulas in `verl_digen.algorithms.sde`)."""

    law: str = "flow"
    """flow | flow_clipped | dance | cps."""
    noise_level: float = 0.7
    """eta. flow: 0.7 (SD3.5), 0.9 (FLUX.1), 1.2 (Qwen-Image); dance: 0.3; cps: 0.8."""

    def __post_init__(self) -> None:
        require_one_of("digen.sde.law", self.law, tuple(LAWS))
        require(
            self.noise_level > 0,
            "digen.sde.noise_level must be > 0, because a step without noise has no density to train on",
            self.noise_level,
            "use 0.7 with law=flow; validation is deterministic by itself",
        )
        require(
            self.law != "cps" or self.noise_level <= 1,
            "digen.sde.noise_level must be <= 1 with digen.sde.law=cps, where 1 replaces all noise",
            self.noise_level,
            "use 0.8",
        )


@dataclass(frozen=True)
class AdvantageConfig:
    """Rewards of a group -> advantages."""

    scale: str = "batch"
    """Divisor of the centred reward: std of the batch (flow_grpo), the group, the largest group, or none."""
    ddof: int = 0
    """Degrees of freedom of that std: 0 (flow_grpo), 1 (DanceGRPO)."""
    eps: float = 1e-4
    """Added to the std. 1e-4 (flow_grpo), 1e-8 (DanceGRPO)."""
    best_of: int | None = None
    """Samples of each group that train: the better half of them those of highest reward, the other half those of
    lowest. The others count for the group's mean and std. 8 of 24 in DanceGRPO (HunyuanVideo). null: all."""

    def __post_init__(self) -> None:
        require_one_of("digen.advantage.scale", self.scale, SCALES)
        require(self.ddof in (0, 1), "digen.advantage.ddof must be 0 or 1", self.ddof, "flow_grpo uses 0")
        require(self.eps > 0, "digen.advantage.eps must be > 0", self.eps, "flow_grpo uses 1e-4")
        require(
            self.best_of is None or (self.best_of >= 2 and self.best_of % 2 == 0),
            "digen.advantage.best_of must be null or an even number >= 2",
            self.best_of,
            "half of them are the best samples of a group and half the worst; null trains all",
        )


@dataclass(frozen=True)
class KlConfig:
    """KL to the reference policy (LoRA switched off, or a frozen copy of the start weights)."""

    coef: float = 0.0
    """beta; 0 runs no reference forward at all."""
    kind: str = "flow_grpo"
    """flow_grpo | exact | velocity | longcat, see `verl_digen.algorithms.kl`."""

    def __post_init__(self) -> None:
        require_one_of("digen.kl.kind", self.kind, tuple(KL_KINDS))
        require(self.coef >= 0, "digen.kl.coef must be >= 0", self.coef, "0 turns the KL term off")


@dataclass(frozen=True)
class EmaConfig:
    """Exponential moving average of the trained weights, kept by the engine and saved with its checkpoints."""

    enable: bool = False
    """Keep the average."""
    max_decay: float = 0.9
    """Decay is min((1+k)/(10+k), max_decay) after k updates (flow_grpo)."""
    every_steps: int = 8
    """Optimizer steps between two updates."""
    validate: bool = False
    """Validate with the averaged weights in place of the current ones."""

    def __post_init__(self) -> None:
        require(0 < self.max_decay < 1, "digen.ema.max_decay must be between 0 and 1", self.max_decay, "flow_grpo: 0.9")
        require(self.every_steps >= 1, "digen.ema.every_steps must be >= 1", self.every_steps, "flow_grpo uses 8")
        require(
            self.enable or not self.validate,
            "digen.ema.validate=true needs digen.ema.enable=true",
            self.validate,
            "set digen.ema.enable=true, or digen.ema.validate=false",
        )
