# SPDX-License-Identifier: Apache-2.0
"""Every knob under `digen:`, as validated dataclasses.

- Recipes hold choices, this file holds the schema: `digen:` of a composed config is checked by name and type by
  OmegaConf, then turned into `DigenConfig`, whose `__post_init__` methods check values.
- Rules that span verl's own keys and ours are in `verl_digen.preflight`.
- An error names the key as typed, the rule, the value and the remedy.
"""

from __future__ import annotations

import math
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, get_args

from verl_digen.algorithms.advantages import SCALES
from verl_digen.algorithms.kl import KINDS as KL_KINDS
from verl_digen.algorithms.losses import OLD_LOG_PROBS, Denominator, LossConfig, choose_denominator
from verl_digen.algorithms.sde import LAWS
from verl_digen.algorithms.window import WindowConfig
from verl_digen.loopback import is_loopback
from verl_digen.require import require, require_one_of, suggestion
from verl_digen.schedulers.deadlines import DeadlinesConfig
from verl_digen.schedulers.rules import MAX_GROUPS_PER_FRAGMENT, AssistPolicy

if TYPE_CHECKING:
    from omegaconf import DictConfig

MAX_SIDE_PX = 16_384
"""Larger than any picture of a diffusion model; catches typos."""
MAX_FRAMES = 10_000
"""Ten minutes at 16 frames/s."""
MAX_STEPS = 1000
"""Timesteps that a model was trained on: more denoising steps would repeat some."""
MAX_SAMPLES = 1_000_000
"""Samples, chunks or groups in one place; more than a cluster generates at once. Catches typos."""
MAX_RETRIES = 1000
MAX_SEED = 2**63
"""PyTorch's generators take seeds of 64 bits."""
MAY_BE_INFINITE = frozenset({"digen.loss.advantage_clip"})
"""Keys that may be infinite, which means: no bound."""
DTYPES = ("float32", "bfloat16", "float16")
REDUCE = ("auto", "tile", "fragment", "batch")


@dataclass(frozen=True)
class SamplingConfig:
    """Sampling in training, and in validation where no `val_` field differs."""

    height_px: int = 512
    """Picture height; a multiple of what the architecture needs (16 for Qwen-Image)."""
    width_px: int = 512
    """Picture width."""
    num_frames: int = 1
    """Frames of a video; 1 is an image."""
    num_steps: int = 10
    """T in training. flow_grpo trains with 10."""
    true_cfg_scale: float = 1.0
    """True classifier-free guidance in training; 1.0 is off (one branch, half the cost)."""
    negative_prompt: str = " "
    """Negative prompt of every sample whose data row names none; used with guidance only."""
    shared_initial_noise: bool = False
    """All samples of a group start from the same noise (DanceGRPO's choice)."""
    guidance_scale: float | None = None
    """Guidance scale given to networks that take one as an input (FLUX.1 dev, HunyuanVideo), in training and in
    validation; null is the pipeline's default (3.5, 6.0)."""
    val_num_steps: int = 40
    """T in validation, which is deterministic (ODE). flow_grpo evaluates with 40."""
    val_true_cfg_scale: float = 1.0
    """True classifier-free guidance in validation."""

    def __post_init__(self) -> None:
        for name, most in (("height_px", MAX_SIDE_PX), ("width_px", MAX_SIDE_PX), ("num_frames", MAX_FRAMES)):
            value = getattr(self, name)
            require(value >= 1, f"digen.sampling.{name} must be >= 1", value, "give the size in pixels or frames")
            require(value <= most, f"digen.sampling.{name} must be <= {most}", value, "give pixels or frames")
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

    def __post_init__(self) -> None:
        require_one_of("digen.advantage.scale", self.scale, SCALES)
        require(self.ddof in (0, 1), "digen.advantage.ddof must be 0 or 1", self.ddof, "flow_grpo uses 0")
        require(self.eps > 0, "digen.advantage.eps must be > 0", self.eps, "flow_grpo uses 1e-4")


@dataclass(frozen=True)
class KlConfig:
    """KL to the reference policy (LoRA switched off, or a frozen copy of the start weights)."""

    coef: float = 0.0
    """beta; 0 runs no reference forward at all."""
    kind: str = "flow_grpo"
    """flow_grpo | exact | velocity, see `verl_digen.algorithms.kl`."""

    def __post_init__(self) -> None:
        require_one_of("digen.kl.kind", self.kind, tuple(KL_KINDS))
        require(self.coef >= 0, "digen.kl.coef must be >= 0", self.coef, "0 turns the KL term off")


@dataclass(frozen=True)
class EmaConfig:
    """Exponential moving average of the trained weights, kept by the engine and saved with its checkpoints."""

    enable: bool = False
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


@dataclass(frozen=True)
class RewardConfig:
    """Reward functions that score a sample. verl's `reward.custom_reward_function` is added as `custom`."""

    functions: dict[str, float] = field(default_factory=dict)
    """Name -> weight; the reward is the weighted sum. A name of `verl_digen.reward.functions`, or
    package.module.function. Given as a whole on the command line, it replaces the recipe's; `functions.NAME=WEIGHT`
    adds or changes one. A weight of 0 only logs."""
    custom_weight: float = 1.0
    """Weight of `reward.custom_reward_function`, if there is one."""
    max_retries: int = 2
    """Retries before a sample fails: of a reward function that raised, and of a sample whose reward worker died."""
    timeout_s: float = 300.0
    """Timeout of a call; a longer one counts as failed."""

    def __post_init__(self) -> None:
        for name, weight in self.functions.items():  # OmegaConf lets a list into a mapping of numbers
            is_number = isinstance(weight, int | float)
            require(is_number, f"digen.reward.functions.{name} must be a number", weight, "1.0 is usual")
        require(
            0 <= self.max_retries <= MAX_RETRIES,
            f"digen.reward.max_retries must lie in [0, {MAX_RETRIES}]",
            self.max_retries,
            "2 is the default",
        )
        require(self.timeout_s > 0, "digen.reward.timeout_s must be > 0 seconds", self.timeout_s, "300 is the default")

    def weights(self, *, has_custom: bool) -> dict[str, float]:
        """Name -> weight of every function that is called; `custom` is the user's own."""
        return dict(self.functions) | ({"custom": self.custom_weight} if has_custom else {})


@dataclass(frozen=True)
class HttpConfig:
    """The HTTP API in front of each replica (`actor_rollout_ref.rollout.name=vllm_omni`): pictures, the model's name,
    health, and no other route."""

    enable: bool = False
    """Off: no HTTP port is opened. On: a free port, which the replica logs."""
    host: str = "127.0.0.1"
    """Address to listen on. Any address but a loopback one needs `api_key_env`."""
    api_key_env: str | None = None
    """Name of the environment variable with the key that clients send as bearer token. The key itself has no place in a
    config, which is printed and saved. null: no key."""
    max_size_px: int | None = None
    """Maximum width and height of a picture. null: the larger of digen.sampling.height_px and width_px."""
    max_steps: int | None = None
    """Maximum denoise steps of a picture. null: digen.sampling.val_num_steps."""
    max_images: int = 4
    """Maximum pictures per request."""
    max_requests: int = 4
    """Maximum requests in flight; a further one is answered 503. They take turns with the training samples."""
    max_body_bytes: int = 65_536
    """Maximum size of a request's body; a prompt takes a few hundred bytes."""

    def __post_init__(self) -> None:
        for name, least in (("max_images", 1), ("max_requests", 1), ("max_body_bytes", 1)):
            value = getattr(self, name)
            require(value >= least, f"digen.rollout.http.{name} must be >= {least}", value, "leave it out")
        for name, least in (("max_size_px", 1), ("max_steps", 2)):
            value = getattr(self, name)
            require(
                value is None or value >= least,
                f"digen.rollout.http.{name} must be null or >= {least}",
                value,
                "null is what the run samples with",
            )
        require(
            not self.enable or self.api_key_env is not None or is_loopback(self.host),
            "digen.rollout.http.host must be a loopback address (127.0.0.1) where no key is asked for: anyone who "
            "reaches the port could use the replica",
            self.host,
            "name the environment variable with the key in digen.rollout.http.api_key_env, or leave host out",
        )


@dataclass(frozen=True)
class RolloutConfig:
    """Settings of diffusion replicas that verl's `actor_rollout_ref.rollout` lacks."""

    max_batch_size: int = 8
    """Maximum samples that a replica denoises together (memory decides)."""
    batch_wait_s: float = 0.05
    """Time that a `diffusers` replica waits after each request for a further one before it starts a batch that is not
    full; a `vllm_omni` replica too, if its pipeline runs in one go, but at most five times as long in total. With step
    execution it adds requests to a running batch."""
    num_kept_adapters: int = 4
    """LoRA adapters, one per weight version, that a `vllm_omni` replica keeps for requests in flight; an update waits
    while requests in flight use that many versions."""
    update_timeout_s: float = 600.0
    """Longest wait in s between two parts of a weight update of a `vllm_omni` replica, on either side. The trainer
    gathers a tensor of a sharded model between two parts, which takes seconds; `digen.deadlines.publish_s` bounds the
    whole update."""
    allow_untested_versions: bool = False
    """Start a `vllm_omni` replica with other versions of vLLM and vLLM-Omni than those it was tested with."""
    http: HttpConfig = field(default_factory=HttpConfig)
    embed_cache_size: int = 1024
    """Maximum number of prompts whose embeddings a replica caches."""
    max_restarts: int = 8
    """Maximum restarts of lost replicas per run, over all replicas; 0: a lost replica stays lost. If a run needs more
    than a few, look for the cause."""
    num_neighbours: int = 0
    """Trainer ranks on a replica's node that compute at the same time. On a CPU, replicas and these ranks share the
    cores. Recipe `disaggregated` sets it."""
    latents_dtype: str = "float32"
    """Storage dtype of trajectories; latents are rounded to it before the log-prob is taken."""
    probe_every: int = 20
    """Weight updates between two probes of each replica: a forward on fixed inputs that must change when the weights
    do. The first three updates are probed too. A probe reads all weights once and denoises one small picture by one
    step; on a `vllm_omni` replica by three, once the requests in flight are done. 0: no probes."""
    max_log_prob_gap: float | None = None
    """Largest difference, in nats, between a recorded log-prob and the trainer's own before the run stops
    (`rollout/log_prob_gap_max`). null: it is only reported, because what is healthy depends on dtype and noise level:
    fp32 shows 1e-5. In bf16, set it to about ten times the value of the run's first steps."""

    def __post_init__(self) -> None:
        for name, least in (
            ("max_batch_size", 1),
            ("embed_cache_size", 1),
            ("num_kept_adapters", 2),
            ("max_restarts", 0),
        ):
            value = getattr(self, name)
            require(
                least <= value <= MAX_SAMPLES,
                f"digen.rollout.{name} must lie in [{least}, {MAX_SAMPLES}]",
                value,
                f"set it to {least} or more; memory decides",
            )
        require(
            0 <= self.batch_wait_s <= 600,
            "digen.rollout.batch_wait_s must lie in [0, 600] s",
            self.batch_wait_s,
            "0.05 is usual",
        )
        require(
            0 <= self.num_neighbours <= MAX_SAMPLES,
            "digen.rollout.num_neighbours must be >= 0 trainer ranks",
            self.num_neighbours,
            "leave it to recipe=disaggregated",
        )
        require(self.probe_every >= 0, "digen.rollout.probe_every must be >= 0", self.probe_every, "20 is the default")
        require(
            self.max_log_prob_gap is None or self.max_log_prob_gap > 0,
            "digen.rollout.max_log_prob_gap must be > 0 nats, or null",
            self.max_log_prob_gap,
            "null turns the gate off",
        )
        require(
            self.update_timeout_s > 0,
            "digen.rollout.update_timeout_s must be > 0 s",
            self.update_timeout_s,
            "600 suits most runs",
        )
        require_one_of("digen.rollout.latents_dtype", self.latents_dtype, DTYPES)


@dataclass(frozen=True)
class GapConfig:
    """Generation-axis pipeline on separate pools (`recipe=[...,disaggregated]`)."""

    enable: bool = True
    """A fragment trains as soon as it is ready. False: the batch trains in one call, when it is complete (barrier)."""
    chunk_size: int | str = "auto"
    """Samples of one group that a slot generates together. auto: a group is spread over all slots, within what
    `digen.rollout.max_batch_size` lets a replica denoise at once. 1: every sample is sent on its own."""
    slots_per_replica: int = 1
    """Chunks in flight per replica. 2 keep it busy while the samples of one are sent and the next is requested."""
    min_groups_per_fragment: int = 1
    """A smaller fragment trains only when no further group is expected."""
    max_groups_per_fragment: int = MAX_GROUPS_PER_FRAGMENT
    """Groups that completed while the trainer was busy merge into one fragment up to this. The default was chosen by
    simulation, see `verl_digen.schedulers.rules`."""

    def __post_init__(self) -> None:
        require(
            self.chunk_size == "auto" or (isinstance(self.chunk_size, int) and self.chunk_size >= 1),
            "digen.gap.chunk_size must be auto or a number of samples >= 1",
            self.chunk_size,
            "auto suits most runs",
        )
        for name in ("slots_per_replica", "min_groups_per_fragment"):
            value = getattr(self, name)
            require(value >= 1, f"digen.gap.{name} must be >= 1", value, "1 is the default")
        require(
            self.max_groups_per_fragment >= self.min_groups_per_fragment,
            f"digen.gap.max_groups_per_fragment must be >= min_groups_per_fragment={self.min_groups_per_fragment}",
            self.max_groups_per_fragment,
            "raise it",
        )


@dataclass(frozen=True)
class QueueConfig:
    """Queue of samples for generation on separate pools (ROLL Flash's queue)."""

    replicate_prompts: bool = True
    """Samples of a group are sent independently. False: a whole group per slot."""
    extra_prompts: int = 0
    """Groups begun in addition to the batch's; once enough are complete, the surplus is dropped."""
    drop_zero_spread: bool = False
    """A group whose rewards are all equal carries no gradient: it is dropped and replaced, within
    `digen.max_refills_per_step`."""
    max_sample_refills: int | None = None
    """Maximum retries of failed samples per step; beyond it their groups are dropped. 0: none. null: the group size."""

    def __post_init__(self) -> None:
        require(self.extra_prompts >= 0, "digen.queue.extra_prompts must be >= 0", self.extra_prompts, "0: none")
        require(
            self.max_sample_refills is None or self.max_sample_refills >= 0,
            "digen.queue.max_sample_refills must be null or >= 0",
            self.max_sample_refills,
            "null means as many as a group has",
        )

    def most_sample_refills(self, group_size: int) -> int:
        """`max_sample_refills`, or the group size where it is null."""
        return group_size if self.max_sample_refills is None else self.max_sample_refills


@dataclass(frozen=True)
class TagConfig:
    """Trainer-assisted generation on separate pools: a trainer without a ready fragment generates a chunk itself."""

    policy: str = "off"
    """off | bts: when a search on the measured durations says that it shortens the batch | always: at every bubble,
    which is known to lose time."""
    chunk_size: int | str = "auto"
    """Samples of one group that the trainer's ranks generate together. auto: one per rank, or an equal larger number
    per rank where a slot's chunk has more samples than the trainer has ranks; at most the group size."""

    def __post_init__(self) -> None:
        require_one_of("digen.tag.policy", self.policy, get_args(AssistPolicy))
        require(
            self.chunk_size == "auto" or (isinstance(self.chunk_size, int) and self.chunk_size >= 1),
            "digen.tag.chunk_size must be auto or a number of samples >= 1",
            self.chunk_size,
            "auto suits most runs",
        )


@dataclass(frozen=True)
class StalenessConfig:
    """Limits on how far generation may run ahead of training on separate pools. Every group records its one version."""

    max_versions: int = 0
    """Versions that a group may be behind the weights it trains. 0: strictly on-policy. 1: TCSS; a replica without a
    chunk left begins the next batch under the weights it has. More: bounded asynchrony, with an off-policy loss."""
    fraction: float = 1.0
    """Share of a batch that may be `max_versions` behind; the whole batch may be less behind. ROLL Flash's
    async_generation_ratio is max_versions - 1 + fraction."""

    def __post_init__(self) -> None:
        require(
            self.max_versions >= 0, "digen.staleness.max_versions must be >= 0", self.max_versions, "0 is on-policy"
        )
        require(
            0 < self.fraction <= 1,
            "digen.staleness.fraction must lie in (0, 1]",
            self.fraction,
            "digen.staleness.max_versions=0 turns staleness off",
        )


@dataclass(frozen=True)
class TspConfig:
    """Time-step parallelism: how rows are assigned to ranks and batched into tiles, and when gradients are reduced."""

    enable: bool = True
    """False: samples, not rows, are assigned to the ranks, and a tile holds one timestep of each of its samples."""
    samples_per_tile: int | str = "auto"
    """Samples of one forward/backward on one rank. auto: as many as fit into memory with the given steps."""
    steps_per_tile: int | str = "auto"
    """Timesteps of each sample in one forward/backward. auto: as many as fit into memory with the given samples.
    Memory grows with the product of the two; if both are auto, rows fill it in order, of any samples and timesteps."""
    reduce: str = "auto"
    """When gradients are summed over the ranks: at every tile, once per fragment, or once per logical batch. Later
    costs memory (each rank keeps the whole gradient unsharded) and saves communication. auto: batch with LoRA or
    where that memory is available, else tile."""

    def __post_init__(self) -> None:
        require_one_of("digen.tsp.reduce", self.reduce, REDUCE)
        for name in ("samples_per_tile", "steps_per_tile"):
            value = getattr(self, name)
            require(
                value == "auto" or (isinstance(value, int) and value >= 1),
                f"digen.tsp.{name} must be auto or a number >= 1",
                value,
                "memory decides; auto measures it",
            )
        require(
            self.enable or self.steps_per_tile in ("auto", 1),
            "digen.tsp.steps_per_tile must be auto or 1 with digen.tsp.enable=false, where timesteps are not batched",
            self.steps_per_tile,
            "set digen.tsp.enable=true",
        )

    @property
    def extents(self) -> tuple[int | None, int | None]:
        """(samples, steps) of a tile; None where it is automatic."""
        samples = None if isinstance(self.samples_per_tile, str) else self.samples_per_tile
        if not self.enable:
            return samples, 1
        return samples, None if isinstance(self.steps_per_tile, str) else self.steps_per_tile


@dataclass(frozen=True)
class PlacementConfig:
    """Types of the pools' devices, in a cluster that has several: Ray's names, such as H100, or custom resources
    (`ray start --resources='{"NAME": 1}'`). null: any device, also one that another pool would need; name a type for
    each pool, or for none."""

    trainer_accelerator: str | None = None
    """Type of the `trainer.nnodes` x `trainer.n_gpus_per_node` devices."""
    generator_accelerator: str | None = None
    """Type of the `actor_rollout_ref.rollout.nnodes` x `n_gpus_per_node` devices (`recipe=[...,disaggregated]`)."""
    reward_accelerator: str | None = None
    """Type of the nodes of the `reward.num_workers` reward workers, which divide the devices of
    `reward.reward_model.{nnodes,n_gpus_per_node}` where `reward.reward_model.enable_resource_pool` is true."""


@dataclass(frozen=True)
class VirtualConfig:
    """Virtual devices, which only take time (`recipe=[...,disaggregated,virtual]`): all else in a run is real."""

    profile: str | None = None
    """Source of durations: a shipped profile or a file, see `digen simulate`. null: devices are real."""
    time_scale: float = 1.0
    """Factor on every duration of the profile."""
    trainer_ranks: int = 1
    """Devices of the trainer, all in one process. The generator's are `actor_rollout_ref.rollout.n_gpus_per_node`."""
    trainer_device: str | None = None
    """Type of the trainer's devices, one of `digen simulate`'s: H800, H20, ... null: the profile's own."""
    generator_device: str | None = None
    """Type of the generator's devices, likewise."""
    latent_shape: list[int] = field(default_factory=lambda: [16, 8, 8])
    """Shape of one recorded latent, in `digen.rollout.latents_dtype`.
    Wan2.1, 480 x 832 px, 81 frames: [16, 21, 60, 104]."""
    fetch_rows: bool = True
    """The trainer fetches from TransferQueue what its ranks would train on, and discards it."""

    def __post_init__(self) -> None:
        require(self.time_scale > 0, "digen.virtual.time_scale must be > 0", self.time_scale, "1 is the profile's time")
        require(
            self.trainer_ranks >= 1, "digen.virtual.trainer_ranks must be >= 1", self.trainer_ranks, "give a number"
        )
        require(
            len(self.latent_shape) > 0 and all(size >= 1 for size in self.latent_shape),
            "digen.virtual.latent_shape must be a list of sizes >= 1",
            self.latent_shape,
            "give the shape of one latent, e.g. [16, 8, 8]",
        )


@dataclass(frozen=True)
class DigenConfig:
    """Everything under `digen:`."""

    seed: int = 42
    """Run seed: noise, windows and prompt order are functions of it."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    sde: SdeConfig = field(default_factory=SdeConfig)
    window: WindowConfig = field(default_factory=WindowConfig)
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    loss_name: str = "flow_grpo"
    """Policy loss, see `verl_digen.algorithms.losses`."""
    loss: LossConfig = field(default_factory=LossConfig)
    kl: KlConfig = field(default_factory=KlConfig)
    ema: EmaConfig = field(default_factory=EmaConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    gap: GapConfig = field(default_factory=GapConfig)
    queue: QueueConfig = field(default_factory=QueueConfig)
    tsp: TspConfig = field(default_factory=TspConfig)
    tag: TagConfig = field(default_factory=TagConfig)
    staleness: StalenessConfig = field(default_factory=StalenessConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    virtual: VirtualConfig = field(default_factory=VirtualConfig)
    deadlines: DeadlinesConfig = field(default_factory=DeadlinesConfig)
    """Timeouts of everything the run waits for, see `verl_digen.schedulers.deadlines`."""
    old_log_probs: str = "auto"
    """Denominator of the ratio, for losses that read `old_log_prob` (flow_grpo): auto = the update's own first pass
    (ratio exactly 1) where one optimizer step takes the whole batch, else recompute; recompute = a forward with the
    engine before the update; rollout = as recorded. With stale samples auto is rollout, see `denominator`."""
    max_refills_per_step: int | None = None
    """Maximum groups replaced per step because a sample failed; 0: none. null: the number of prompts of a batch."""
    num_logged_images: int = 16
    """Validation prompts shown in the picture grids."""

    def __post_init__(self) -> None:
        require(
            -MAX_SEED <= self.seed < MAX_SEED,
            "digen.seed must lie in [-2**63, 2**63)",
            self.seed,
            "any small number does",
        )
        require_one_of("digen.old_log_probs", self.old_log_probs, OLD_LOG_PROBS)
        require(
            self.max_refills_per_step is None or self.max_refills_per_step >= 0,
            "digen.max_refills_per_step must be null or >= 0",
            self.max_refills_per_step,
            "null means as many as the batch has prompts",
        )
        require(
            self.num_logged_images >= 0, "digen.num_logged_images must be >= 0", self.num_logged_images, "0 logs none"
        )
        require(
            self.staleness.max_versions == 0 or not self.ema.validate,
            "digen.ema.validate must be false with digen.staleness.max_versions > 0, where replicas generate the next "
            "batch during a validation",
            self.ema.validate,
            "set digen.ema.validate=false, or digen.staleness.max_versions=0",
        )
        scoring_s = self.reward.timeout_s * (1 + self.reward.max_retries)
        require(
            self.deadlines.score_s >= scoring_s,
            "digen.deadlines.score_s must be >= digen.reward.timeout_s x (1 + digen.reward.max_retries), which is "
            f"{scoring_s:g} s",
            self.deadlines.score_s,
            "raise it, or lower digen.reward.timeout_s",
        )
        require(
            not self.rollout.http.enable or self.sampling.num_frames == 1,
            "digen.rollout.http.enable must be false with digen.sampling.num_frames > 1: the HTTP API draws pictures",
            self.sampling.num_frames,
            "leave digen.rollout.http.enable out",
        )
        self.window.validate_for(self.sampling.num_steps)

    def most_group_refills(self, num_prompts: int) -> int:
        """`max_refills_per_step`, or `num_prompts` where it is null."""
        return num_prompts if self.max_refills_per_step is None else self.max_refills_per_step

    @property
    def denominator(self) -> Denominator:
        """Source of `old_log_prob`, from the loss, `old_log_probs` and the staleness of samples; see
        `verl_digen.algorithms.losses.denominator`. A property, because a user's own loss is known late.

        Raises:
            ValueError: the three do not go together.
        """
        return choose_denominator(self.loss_name, self.old_log_probs, self.staleness.max_versions)


@cache
def _schema() -> DictConfig:
    """Make the schema, once, because that takes 10 ms; merging into it copies it."""
    return digen_schema()


def digen_schema() -> DictConfig:
    """`DigenConfig` as a config that can be merged into: typed, and closed to unknown keys."""
    from omegaconf import DictConfig, OmegaConf

    def open_for_values(node: DictConfig) -> None:
        OmegaConf.set_readonly(node, False)  # frozen dataclasses make read-only nodes
        for key in node:
            child = node._get_node(key)
            if isinstance(child, DictConfig) and not child._is_none():
                open_for_values(child)

    schema = OmegaConf.structured(DigenConfig)
    open_for_values(schema)
    return schema


def digen_config(config: DictConfig) -> DigenConfig:
    """Validate the `digen:` section of verl's composed config.

    Raises:
        ValueError: an unknown key, a value of the wrong type, or a broken rule.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    section: Any = OmegaConf.select(config, "digen")
    require(
        section is not None,
        "a config for verl-digen needs a `digen:` section",
        None,
        "name one of its recipes, e.g. recipe=digen_flowgrpo",
    )
    try:
        # as plain data: a key added with `+` would pass in a section that is typed already
        return _validated(pickle.dumps(OmegaConf.to_container(section, resolve=True)))
    except OmegaConfBaseException as error:
        raise ValueError(_named(error)) from error


@lru_cache(maxsize=8)
def _validated(values: bytes) -> DigenConfig:
    """`digen_config` of a pickled section, cached: it takes 20 ms, and the checks of a start need it a dozen times."""
    from omegaconf import OmegaConf

    merged = OmegaConf.merge(_schema(), pickle.loads(values))
    problems = list(_not_finite("digen", OmegaConf.to_container(merged)))
    result = _built(merged, problems)
    assert isinstance(result, DigenConfig)
    return result


def _built(merged: Any, problems: list[str]) -> Any:
    """Build the dataclasses; all problems, old and new, are raised at once, one per section.

    Raises:
        ValueError: a paragraph per problem.
    """
    from omegaconf import DictConfig, OmegaConf

    if not problems:
        try:
            return OmegaConf.to_object(merged)
        except ValueError as error:
            across = str(error)
    else:
        across = None
    for name in merged:
        node = merged._get_node(name)
        is_told = any(problem.startswith(f"digen.{name}.") for problem in problems)
        if isinstance(node, DictConfig) and not node._is_none() and not is_told:
            try:
                OmegaConf.to_object(node)
            except ValueError as error:
                problems.append(str(error))
    values: Any = OmegaConf.to_container(merged)
    try:
        DigenConfig(**{name: value for name, value in values.items() if not isinstance(value, dict)})
    except ValueError as error:
        problems.append(str(error))
    raise ValueError("\n".join(problems or [str(across)]))


def _not_finite(key: str, value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for name, child in value.items():
            yield from _not_finite(f"{key}.{name}", child)
    elif isinstance(value, float) and (math.isnan(value) or (math.isinf(value) and key not in MAY_BE_INFINITE)):
        yield f"{key} must be a finite number, got {value}; leave it out for the default"


def _named(error: Any) -> str:
    """Reword OmegaConf's message about a key: the key as typed, and a known one that is close."""
    from omegaconf.errors import ConfigKeyError

    hint = ""
    if isinstance(error, ConfigKeyError) and error.parent_node is not None:
        hint = suggestion(str(error.key), [str(name) for name in error.parent_node])
    said = (error.msg or str(error)).splitlines()[0]
    return f"digen.{error.full_key or ''}: {said}; {hint}the keys and their types are in verl_digen/config.py"
