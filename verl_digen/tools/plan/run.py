# SPDX-License-Identifier: Apache-2.0
"""Input of the plan: the config values that decide memory, traffic and time, and measurements of the networks.

Invariant (tests/plan/test_command.py, test_parts.py, test_episodes.py): rows, recorded latents, conditions and their
bytes equal the real run's.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from omegaconf import DictConfig
from torch import nn
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.torch_dtypes import PrecisionType

from verl_digen.algorithms.objectives import find_objective
from verl_digen.algorithms.objectives.objective import TEACHER
from verl_digen.config import DigenConfig, digen_config
from verl_digen.config.pool_sizes import num_generator_devices, num_replica_devices, num_shards, num_trainer_devices
from verl_digen.engine.build import add_adapter
from verl_digen.environments.built_in import environment_class
from verl_digen.model_config import DiffusionModelConfig
from verl_digen.models import load_model
from verl_digen.models.base import DiffusionModel
from verl_digen.models.flops import Flops, forward_flops
from verl_digen.models.fused_layers import fuse_norms
from verl_digen.models.kernels import store_int8
from verl_digen.models.published import checkpoint_folder
from verl_digen.platforms.module_memory import SHARING
from verl_digen.preflight.kernels import DTYPE_DEFAULTS
from verl_digen.require import require
from verl_digen.rollout.registry import TRAINER
from verl_digen.sampling.fp8 import Fp8Layers
from verl_digen.sampling.recording import record_trajectory, trained_latents
from verl_digen.sampling.requests import batch_rules, plain_request, planned_geometry, rows_per_group
from verl_digen.schedulers.rules import BatchRules
from verl_digen.tools.plan.activations import Activations, trace_activations
from verl_digen.tools.plan.networks import (
    Counts,
    Part,
    Tensors,
    count_network,
    count_parts,
    list_tensors,
    transformer_bytes,
)
from verl_digen.tools.plan.peak import TILED, decoding_bytes
from verl_digen.types import Condition, Geometry, PromptRow, SampleRequest

ADAMS = ("AdamW", "Adam")
"""Optimizers that keep two numbers per weight."""


@dataclass(frozen=True)
class Dtypes:
    """Dtypes of storage and computation."""

    model: torch.dtype
    """Dtype of the trainer's shards."""
    compute: torch.dtype
    """Dtype in which shards are gathered."""
    reduce: torch.dtype
    rollout: torch.dtype
    """Dtype of a replica and of a weight update."""
    latents: torch.dtype


@dataclass(frozen=True)
class Settings:
    """Config values that the plan reads."""

    digen: DigenConfig
    num_trainer_devices: int
    num_generator_devices: int
    trainer_devices_per_node: int
    generator_devices_per_node: int
    is_split: bool
    fsdp_size: int
    num_prompts: int
    group_size: int
    is_lora: bool
    bare_reference: bool
    merges_lora: bool
    recompute: str | int
    """auto, all, none, or the number of the first blocks that backward recomputes."""
    whole_base: bool | str
    """auto, or True to keep a frozen base whole on every training device."""
    offloads_activations: bool
    """True if the inputs of recomputed blocks wait in host memory."""
    sequence_parallel: int
    """Ranks that share a row's activations."""
    param_offload: bool
    optimizer_offload: bool
    reshard: bool
    rollout_name: str
    tensor_parallel: int
    frees_replica: bool
    """True if a replica frees device memory while the trainer uses the same device."""
    exports: bool
    """True if checkpoints also hold an export for other tools."""
    is_accelerated: bool
    """False on a CPU, where nothing is page-locked and no process needs memory of a device for itself."""
    shares_host_copies: bool
    """True if the `diffusers` processes of a node that sleep share one host copy of equal weights."""
    dtypes: Dtypes
    num_steps: int | None = None
    """Steps of the run; None: as many as its epochs have."""
    num_mini_batches: int = 1
    num_epochs: int = 1
    """Times that a batch trains."""

    @property
    def has_several_updates(self) -> bool:
        """True if a batch is several optimizer steps."""
        return self.num_mini_batches * self.num_epochs > 1

    @property
    def draws(self) -> bool:
        """True if the trainer's ranks generate, without replicas."""
        return self.rollout_name == TRAINER

    @property
    def is_ours(self) -> bool:
        """True if our sampler generates, not vLLM-Omni."""
        return self.rollout_name != "vllm_omni"

    @property
    def num_shards(self) -> int:
        """Ranks that share one copy of the weights."""
        return num_shards(self.fsdp_size, self.num_trainer_devices)

    @property
    def num_devices(self) -> int:
        return self.num_trainer_devices + self.num_generator_devices * self.is_split

    @property
    def num_samples(self) -> int:
        """Samples of a step."""
        return self.num_prompts * self.group_size

    @property
    def num_begun(self) -> int:
        """Samples that a step begins, redundant groups included; they may all reach TransferQueue."""
        return (self.num_prompts + self.digen.queue.extra_prompts * self.is_split) * self.group_size

    @property
    def num_turns(self) -> int:
        """Turns of a sample: the most that an episode may have, though one may end early; 1 without environment."""
        return self.digen.environment.max_turns if self.digen.environment.is_on else 1

    @property
    def num_conditions(self) -> int:
        """Conditions of a step in TransferQueue. Episodes of a group begin with the same instruction, hence share the
        first turn's; a later turn's, with the picture that it edits, are its own."""
        return self.num_begun // self.group_size + self.num_begun * (self.num_turns - 1)

    @property
    def num_trained_samples(self) -> int:
        """Samples of a step that train: all, or those that the objective or `digen.advantage.best_of` selects."""
        return self.num_prompts * len(self.digen.select(range(self.group_size)))

    @property
    def rules(self) -> BatchRules:
        """The planner's rules of the run."""
        return batch_rules(
            self.digen,
            num_prompts=self.num_prompts,
            group_size=self.group_size,
            num_trainer_ranks=self.num_trainer_devices // self.sequence_parallel,
        )

    @property
    def policies_read(self) -> set[str]:
        """Policies that cost a forward of every row."""
        objective = find_objective(self.digen.loss_name)
        named = objective.policies_for(self.digen.loss_settings) | ({"reference"} if self.digen.kl.coef > 0 else set())
        is_current = objective.behaviour != "old" and not self.has_several_updates
        return named - {"old"} if is_current else named

    @property
    def policies_that_follow(self) -> tuple[str, ...]:
        """Policies with a copy of the trained weights, besides the average of `digen.ema`."""
        return tuple(self.digen.loss_settings.copies)

    @property
    def num_saved_copies(self) -> int:
        """Copies of the trained weights that follow them, the average included."""
        return int(self.digen.ema.enable) + len(self.policies_that_follow)

    @property
    def frozen_copies(self) -> tuple[str, ...]:
        """Policies with a copy of the trained weights that stays as it is: the teacher, `old` during a training, and
        the reference, which of a new adapter is the bare model, and follows if the objective renews it."""
        read = self.policies_read - {*self.policies_that_follow} - ({"reference"} if self.bare_reference else set())
        return tuple(policy for policy in ("reference", "old", TEACHER) if policy in read)

    @property
    def is_guided(self) -> bool:
        return self.digen.sampling.true_cfg_scale != 1.0

    @property
    def num_replicas(self) -> int:
        return self.num_generator_devices // self.tensor_parallel


@dataclass(frozen=True)
class Measured:
    """Measurements of the networks and of the training window."""

    title: str
    counts: Counts
    """Parameter counts of the trainer's network, adapter included."""
    parts: dict[str, Part]
    """Folder -> parameters, for a replica's text encoders and VAE."""
    decoders: tuple[str, ...]
    """Folders of those that decode."""
    transformer_bytes: int
    """Bytes of a replica's transformer without an adapter, exported tables included."""
    fp8_bytes: int
    """Bytes of a replica's copies of layers in fp8 (`digen.sampling.outside.fp8`)."""
    tensors: tuple[Tensors, ...]
    """Parameters of the trainer's network by size."""
    decoding_bytes: int
    """Peak of decoding one sample, without the VAE's weights."""
    tiled_bytes: int
    """Peak of decoding one sample in tiles, as replicas do where a whole one does not fit."""
    decodes_together: bool
    """False if the samples of a batch are decoded one by one."""
    num_experts: int
    training: Activations
    """Activations of one training row."""
    sampling: Activations
    """Activations of one row without adapter, an upper bound of a forward without gradient; no moments of backward."""
    flops: Flops
    """FLOPs of one row's forward, guidance included."""
    condition_bytes: int
    """Bytes of a prompt's condition, or of one turn's; the negative one included if guided."""
    embedding_bytes: int
    """Bytes of one text's condition."""
    rows_per_group: int
    """Rows of a group: points of its samples, or edges of its tree; with episodes of one turn."""
    trajectory_bytes: int
    """Bytes of the record of a sample, or of one turn; the maximum over the groups of the first step."""


@dataclass(frozen=True)
class Job:
    settings: Settings
    measured: Measured

    @property
    def rows_per_sample(self) -> float:
        """Rows of a sample, all turns of an episode together."""
        settings = self.settings
        return settings.num_turns * self.measured.rows_per_group / settings.group_size

    @property
    def num_trained_rows(self) -> float:
        """Rows of a step that train."""
        return self.settings.num_trained_samples * self.rows_per_sample

    @property
    def rows_per_rank(self) -> int:
        """Most rows of a rank that can share a tile: of a mini-batch, or in a pipelined run of the largest fragment."""
        settings, rules = self.settings, self.settings.rules
        num_groups = settings.num_prompts // settings.num_mini_batches
        if settings.is_split and rules.gap.enable:
            num_groups = min(num_groups, rules.largest_fragment)
        return math.ceil(self.num_trained_rows / settings.num_prompts * num_groups / rules.num_trainer_ranks)


def read_run(config: DictConfig, prompt_tokens: int) -> Job:
    """Read the settings of a composed config that `preflight` has checked, and measure its networks. ValueError names
    the key that cannot be planned."""
    digen = digen_config(config)
    with checkpoint_folder(config.actor_rollout_ref.model.path) as folder:
        model_config = DiffusionModelConfig.of(config, path=str(folder), digen=digen)
        settings = _settings(config, digen, model_config)
        return Job(settings, _measure(folder, settings, model_config, prompt_tokens))


def _settings(config: DictConfig, digen: DigenConfig, model: DiffusionModelConfig) -> Settings:
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    rule = f"actor_rollout_ref.actor.optim.optimizer must be one of {', '.join(ADAMS)} to be planned"
    require(actor.optim.optimizer in ADAMS, rule, actor.optim.optimizer, "choose one of these")
    num_trainer = num_trainer_devices(config)
    split = not config.actor_rollout_ref.hybrid_engine
    generator = rollout if split else config.trainer
    fsdp = omega_conf_to_dataclass(actor.fsdp_config)
    precision = DTYPE_DEFAULTS | dict(fsdp.mixed_precision or {})
    of_trainer = fsdp.model_dtype, precision["param_dtype"], precision["reduce_dtype"]
    dtypes = (*of_trainer, rollout.dtype, digen.rollout.latents_dtype)
    return Settings(
        digen=digen,
        num_trainer_devices=num_trainer,
        num_generator_devices=num_generator_devices(config) if split else num_trainer,
        trainer_devices_per_node=config.trainer.n_gpus_per_node,
        generator_devices_per_node=generator.n_gpus_per_node,
        is_split=split,
        fsdp_size=fsdp.fsdp_size,
        num_prompts=config.data.train_batch_size,
        group_size=rollout.n,
        num_steps=config.trainer.total_training_steps,
        num_mini_batches=config.data.train_batch_size // actor.ppo_mini_batch_size,
        num_epochs=actor.ppo_epochs,
        is_lora=model.lora_rank > 0,
        bare_reference=model.has_bare_reference,
        merges_lora=model.merges_lora,
        recompute=model.recomputed,
        whole_base=model.whole_base,
        offloads_activations=model.enable_activation_offload,
        sequence_parallel=fsdp.ulysses_sequence_parallel_size,
        param_offload=fsdp.param_offload,
        optimizer_offload=fsdp.optimizer_offload,
        reshard=fsdp.reshard_after_forward,
        rollout_name=rollout.name,
        tensor_parallel=num_replica_devices(config),
        frees_replica=not split and rollout.free_cache_engine,
        exports="hf_model" in actor.checkpoint.save_contents,
        is_accelerated=config.trainer.device != "cpu",
        shares_host_copies=config.trainer.device in SHARING,
        dtypes=Dtypes(*map(PrecisionType.to_dtype, dtypes)),
    )


def _measure(folder: Any, settings: Settings, model_config: DiffusionModelConfig, prompt_tokens: int) -> Measured:
    digen, dtypes, sampling = settings.digen, settings.dtypes, settings.digen.sampling
    model = load_model(folder)
    geometry = turn_geometry(digen, model)
    shape = model.latent_shape(geometry)
    model.embedded_guidance(sampling.guidance_scale)
    base = model.load_structure(dtypes.model)
    is_ours, serving = settings.is_ours, model.spec.vllm_omni
    # where all weights train, a replica gets them in one dtype
    in_one_dtype = not is_ours or not settings.is_lora
    of_replica = transformer_bytes(model, base, dtypes.rollout, in_one_dtype=in_one_dtype)
    fp8_bytes = Fp8Layers(base).num_bytes if sampling.outside.fp8 else 0

    def build(network: nn.Module, *, with_adapter: bool = settings.is_lora) -> nn.Module:
        fuse_norms(network)
        if model_config.int8_base:
            store_int8(network)
        if not with_adapter:
            return network
        with torch.device("meta"):  # an adapter without weights, as the network has none
            return add_adapter(network, model_config, rank=1)

    # making a network takes as long as tracing it: `base` is traced, too, where it is one network
    network = build(model.load_structure(dtypes.model) if settings.is_lora else base)
    counts, tensors, num_experts = count_network(network), list_tensors(network), len(model.experts)
    condition = empty_condition(model, prompt_tokens, geometry)
    flops = forward_flops(model, network, geometry, len(condition["embeds"]), is_guided=settings.is_guided)
    model.experts = model.experts[:1]
    trace = partial(trace_activations, model, geometry=geometry, condition=condition, is_guided=settings.is_guided)
    training = trace(network if num_experts == 1 else build(model.load_structure(dtypes.model)), dtype=dtypes.compute)
    of_sampling = training
    if settings.is_lora or dtypes.compute != dtypes.rollout:
        is_fresh = settings.is_lora and num_experts == 1
        bare = build(base if is_fresh else model.load_structure(dtypes.model), with_adapter=False)
        of_sampling = trace(bare, dtype=dtypes.rollout, has_backward=False)
    first_step = [PromptRow("", "", None, uid=f"p{index:08d}") for index in range(settings.num_prompts)]
    return Measured(
        title=f"{model.spec.title}, {model.spec.transformer}",
        counts=counts,
        parts=count_parts(model, dtypes.rollout, as_loaded_by_us=is_ours),
        decoders=("vae", *model.spec.audio_parts),
        transformer_bytes=of_replica,
        fp8_bytes=fp8_bytes,
        tensors=tensors,
        decoding_bytes=decoding_bytes(model, geometry, dtypes.rollout),
        tiled_bytes=decoding_bytes(model, geometry, dtypes.rollout, TILED),
        decodes_together=geometry.num_frames == 1 and (is_ours or (serving is not None and serving.is_stepwise)),
        num_experts=num_experts,
        training=training,
        sampling=of_sampling,
        flops=flops,
        condition_bytes=_bytes(condition, dtypes.rollout) * (2 if settings.is_guided else 1),
        embedding_bytes=_bytes(condition, dtypes.rollout),
        rows_per_group=rows_per_group(digen, settings.group_size),
        trajectory_bytes=max(
            record_bytes(
                plain_request(digen, row, 0, step=0, validate=False), math.prod(shape) * dtypes.latents.itemsize
            )
            for row in first_step
        ),
    )


def turn_geometry(digen: DigenConfig, model: DiffusionModel) -> Geometry:
    """Geometry of a prompt, or of a turn, with one image at least where turns edit pictures."""
    sampling, environment, least = digen.sampling, digen.environment, model.spec.num_images[0]
    if environment.is_on and environment_class(environment).edits:
        planned = least if sampling.planned_images is None else sampling.planned_images
        sampling = replace(sampling, planned_images=max(1, planned))
    return planned_geometry(sampling, least)


def _bytes(condition: Condition, dtype: torch.dtype) -> int:
    return sum(tensor.numel() for tensor in condition.values()) * dtype.itemsize


def record_bytes(request: SampleRequest, latent_bytes: int) -> int:
    """Bytes of the record that a sample of `request` leaves. `latent_bytes`: bytes of one latent."""
    num_steps, nothing = request.sampling.num_steps, torch.empty(0)
    kept = trained_latents(request.window)
    record = record_trajectory(
        request,
        seed=0,
        versions=(0, 0),
        path=dict.fromkeys(kept, nothing),
        final=nothing,
        sigmas=torch.zeros(num_steps + 1),
        log_probs_T=torch.zeros(num_steps),
    ).record
    num_latents = len(kept) if request.noise_levels is None else 1
    return num_latents * latent_bytes + sum(column.nbytes for column in record.columns().values())


def empty_condition(model: DiffusionModel, prompt_tokens: int, geometry: Geometry) -> Condition:
    """Zeros in the shapes of a prompt that quotes no text. `prompt_tokens`: of the text; its images'
    (`geometry.sources`) are added. Not read if every prompt is padded to one length (FLUX.1, Stable Diffusion 3)."""
    layout, config = model.spec.condition, model.read_network_config(model.experts[0])
    with_images = prompt_tokens + model.num_image_text_tokens(geometry)
    num_tokens = with_images if layout.num_tokens is None else layout.num_tokens
    condition = {"embeds": torch.zeros(num_tokens, config[layout.width])}
    if layout.pooled is not None:
        condition["pooled"] = torch.zeros(config[layout.pooled])
    if layout.glyphs is not None:
        condition["glyphs"] = torch.zeros(0, config[layout.glyphs])
    if layout.audio is not None:
        condition["audio"] = torch.zeros(num_tokens, config[layout.audio])
    if geometry.sources:
        condition |= {name: torch.zeros(shape) for name, shape in model.image_conditions(geometry).items()}
    return condition
