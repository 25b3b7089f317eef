# SPDX-License-Identifier: Apache-2.0
"""Generation and learning: `digen.sampling`, `sde`, `advantage`, `kl`, `ema`; and `loss`: the policy loss by name, and
the settings of its own class.

    loss: {name: tis, high: 2.0}        # an algorithm's recipe, or digen.loss.name=tis digen.loss.high=2.0

A recipe may hold settings of the loss that it names while another one is chosen on the command line: settings that are
known to some other loss are left out then, and a note says so at the start. Unknown ones are refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any

from verl_digen.algorithms.advantages import SCALES
from verl_digen.algorithms.kl import KINDS as KL_KINDS
from verl_digen.algorithms.objectives import OLD_LOG_PROBS, LossConfig, find_objective, objective_names
from verl_digen.algorithms.outside import Outside
from verl_digen.algorithms.sde import LAWS
from verl_digen.algorithms.solvers import DETERMINISTIC, SOLVERS
from verl_digen.inputs.images import DEFAULT_IMAGE_PX
from verl_digen.inputs.sizes import IMAGE_SIZES, SIDE_MULTIPLE
from verl_digen.require import In, OneOf, Section, require, require_one_of, require_value, settings_of

MAX_SIDE_PX = 16_384
"""Larger than any picture of a diffusion model; catches typos."""
MAX_FRAMES = 10_000
"""Ten minutes at 16 frames/s."""
MAX_STEPS = 1000
"""Timesteps that a model was trained on: more denoising steps would repeat some."""
USUAL_STEPS = "10 is usual in training, 40 in validation"
NEEDS_NOISE = "a step without noise has no density to train on; use 0.7 with law=flow"


@dataclass(frozen=True)
class SamplingConfig(Section, key="digen.sampling"):
    """Sampling in training, and in validation unless a `val_` key says otherwise."""

    height_px: Annotated[int, In(f"[1, {MAX_SIDE_PX}]"), "give the size in pixels"] = 512
    """Picture height; a multiple of what the architecture needs (16 for Qwen-Image)."""
    width_px: Annotated[int, In(f"[1, {MAX_SIDE_PX}]"), "give the size in pixels"] = 512
    """Picture width."""
    num_frames: Annotated[int, In(f"[1, {MAX_FRAMES}]"), "1 is an image"] = 1
    """Frames of a video; 1 is an image."""
    size_from_image: bool = False
    """true: the result has the shape of a prompt image and about the area of height_px x width_px, by the rule
    `image_sizes`; false: height_px x width_px."""
    image_sizes: Annotated[str, OneOf(IMAGE_SIZES)] = "qwen_image_edit"
    """The pipeline's rule for sizes (`verl_digen/inputs/sizes.py`), set by the recipe: qwen_image_edit, flux_kontext,
    flux2, wan, wan_ti2v or hunyuan_video15."""
    image_px: Annotated[int, In(f"[{SIDE_MULTIPLE}, {MAX_SIDE_PX}]")] = DEFAULT_IMAGE_PX
    """Edit models scale prompt images to image_px squared pixels. 1024 as in the pipelines; smaller images have fewer
    tokens."""
    planned_images: Annotated[int | None, In("[0, inf]"), "null is the least that the model reads"] = None
    """Images per prompt in `digen plan` and in a step's FLOPs; null is the model's minimum."""
    num_steps: Annotated[int, In(f"[2, {MAX_STEPS}]"), USUAL_STEPS] = 10
    """Denoise steps (T) in training; 10 in flow_grpo."""
    true_cfg_scale: Annotated[float, In("[1, 1000]"), "1.0 turns guidance off"] = 1.0
    """True classifier-free guidance in training; 1.0 is off (one branch, half the cost)."""
    negative_prompt: str = " "
    """Negative prompt of rows without one; used only with guidance."""
    shared_initial_noise: bool = False
    """All samples of a group start from the same noise in training (DanceGRPO). Steps before a later window
    (`digen.window.kind=consecutive`) then run once per group and batch."""
    solver: Annotated[str, OneOf(SOLVERS)] = "euler"
    """Solver of the deterministic steps in training. euler, or ddim, which is the same for flow matching. dpm2
    (second-order multistep DPM-Solver++; MixGRPO-Flash, DiffusionNFT) and unipc (UniPC of order 2, as in Wan's
    checkpoints) are more accurate at the same cost. sa (SA-Solver; AWM) adds noise; only for forward objectives."""
    sa_noise: Annotated[float, In("[0, inf)")] = 0.4
    """Noise of solver sa: 0.4 for GenEval and OCR, 0 for PickScore in AWM's recipes."""
    sa_low: float = 0.3
    """Solver sa adds noise in steps that end at a sigma between this and `sa_high`; AWM uses 0.3 and 0.9."""
    sa_high: float = 0.9
    """See `sa_low`."""
    guidance_scale: Annotated[float | None, In("[0, inf]"), "null is the model's own"] = None
    """Guidance scale for networks that take it as an input (FLUX.1 dev, HunyuanVideo), in training and validation; null
    is the pipeline's default (3.5, 6.0)."""
    val_num_steps: Annotated[int, In(f"[2, {MAX_STEPS}]"), USUAL_STEPS] = 40
    """Denoise steps in validation, all deterministic (ODE); 40 in flow_grpo."""
    val_true_cfg_scale: Annotated[float, In("[1, 1000]"), "1.0 turns guidance off"] = 1.0
    """True classifier-free guidance in validation."""
    val_solver: Annotated[str, OneOf(DETERMINISTIC)] = "euler"
    """Solver in validation: any but sa."""
    outside: Outside = field(default_factory=Outside)
    """Cheaper steps before and after the window, in training alone: validation evaluates the network at every step."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            0 <= self.sa_low <= self.sa_high <= 1,
            "digen.sampling.sa_low and sa_high must be sigmas, 0 <= sa_low <= sa_high <= 1",
            (self.sa_low, self.sa_high),
            "0.3 and 0.9 are AWM's",
        )


@dataclass(frozen=True)
class SdeConfig(Section, key="digen.sde"):
    """The stochastic sampler; its formulas are in `verl_digen.algorithms.sde`."""

    law: Annotated[str, OneOf(LAWS)] = "flow"
    """SDE: flow or cps (Flow-GRPO), flow_clipped (LongCat-Video) or dance (DanceGRPO)."""
    noise_level: Annotated[float, In("(0, inf]"), NEEDS_NOISE] = 0.7
    """eta. flow: 0.7 (SD3.5), 0.9 (FLUX.1), 1.2 (Qwen-Image); dance: 0.3; cps: 0.8."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.law != "cps" or self.noise_level <= 1,
            "digen.sde.noise_level must be <= 1 with digen.sde.law=cps, where 1 replaces all noise",
            self.noise_level,
            "use 0.8",
        )


@dataclass(frozen=True)
class AdvantageConfig(Section, key="digen.advantage"):
    """Rewards of a group -> advantages."""

    scale: Annotated[str, OneOf(SCALES)] = "batch"
    """Divisor of the centred reward: std of the batch (flow_grpo), the group, the largest group, or none."""
    ddof: Annotated[int, In("[0, 1]")] = 0
    """Degrees of freedom of that std: 0 (flow_grpo), 1 (DanceGRPO)."""
    eps: Annotated[float, In("(0, inf]")] = 1e-4
    """Added to the std. 1e-4 (flow_grpo), 1e-8 (DanceGRPO)."""
    best_of: int | None = None
    """Samples of each group that train: half with the highest rewards, half with the lowest. The others only count for
    the group's mean and std. 8 of 24 in DanceGRPO (HunyuanVideo). null: all."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self.best_of is None or (self.best_of >= 2 and self.best_of % 2 == 0),
            "digen.advantage.best_of must be null or an even number >= 2",
            self.best_of,
            "half of them are the best samples of a group and half the worst; null trains all",
        )


@dataclass(frozen=True)
class KlConfig(Section, key="digen.kl"):
    """KL to the reference, the policy that the run begins with."""

    coef: Annotated[float, In("[0, inf]"), "0 turns the KL term off"] = 0.0
    """Weight of the KL (beta); 0 runs no reference forward."""
    kind: Annotated[str, OneOf(KL_KINDS)] = "flow_grpo"
    """flow_grpo: mean[(mu - mu_ref)^2] / (2 s^2), s the step's noise rate; published coef: 0.04 (OCR, GenEval), 0.01
    (PickScore), 0.004 (Wan). exact: the KL of the two Gaussians. velocity: mean[(v - v_ref)^2]. longcat: exact, with
    the step weights of loss longcat; published coef: 3e-4 (Wan)."""


@dataclass(frozen=True)
class EmaConfig(Section, key="digen.ema"):
    """Exponential moving average of the trained weights, saved in checkpoints."""

    enable: bool = False
    """Keep an EMA of the trained weights."""
    max_decay: Annotated[float, In("(0, 1)")] = 0.9
    """Decay is min((1+k)/(10+k), max_decay) after k updates (flow_grpo)."""
    every_steps: Annotated[int, In("[1, inf]")] = 8
    """Optimizer steps between two updates."""
    validate: bool = False
    """Validate with the average instead of the current weights."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.validate:
            remedy = "set it, or digen.ema.validate=false"
            require_value("digen.ema.enable", self.enable, True, "with digen.ema.validate=true", remedy)


LOSS_DEFAULTS = {"name": "flow_grpo", "old_log_probs": "auto"}
"""Keys of `digen.loss` that are not settings of the loss itself. `old_log_probs`, the denominator of the ratio, for
losses that read `old_log_prob` (flow_grpo): auto = the update's own first pass (ratio exactly 1) where one optimizer
step takes the whole batch, else recompute; recompute = a forward with the engine before the update; rollout = as
recorded. With stale samples auto is rollout, see `verl_digen.algorithms.objectives.denominator`."""


def check_loss_section(section: Mapping[str, Any]) -> None:
    """Require a policy loss that is registered, by us or by a module the user names, and values that fit it."""
    require_one_of("digen.loss.name", section["name"], objective_names())
    require_one_of("digen.loss.old_log_probs", section["old_log_probs"], OLD_LOG_PROBS)
    loss_settings(section)


def loss_settings(section: Mapping[str, Any]) -> LossConfig:
    """Settings of the chosen loss. ValueError if there is no such setting, or a value breaks a rule."""
    objective = find_objective(section["name"])
    elsewhere = set().union(LOSS_DEFAULTS, *(_settings_of(find_objective(name).config) for name in objective_names()))
    left_out = elsewhere - _settings_of(objective.config)
    own = {name: value for name, value in section.items() if name not in left_out}
    return settings_of(f"digen.loss.name={objective.name}", objective.config, own, "digen.loss")


def unused_settings(section: Mapping[str, Any]) -> dict[str, Any]:
    """Settings in `digen.loss` that other losses have and the chosen one has not."""
    known = _settings_of(find_objective(section["name"]).config)
    return {name: value for name, value in section.items() if name not in known and name not in LOSS_DEFAULTS}


def _settings_of(config: type[LossConfig]) -> set[str]:
    return {field.name for field in fields(config)}
