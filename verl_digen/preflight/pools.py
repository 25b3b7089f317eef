# SPDX-License-Identifier: Apache-2.0
"""Rules for devices: platform, pools and their sizes, techniques that need separate ones, abilities of the replicas."""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from omegaconf import DictConfig, OmegaConf
from verl.utils.import_utils import import_external_libs

from verl_digen.config.pool_sizes import (
    REPLICA_KEY,
    asked_devices,
    num_data_parallel_ranks,
    num_function_devices,
    num_generator_devices,
    num_replica_devices,
    num_trainer_devices,
)
from verl_digen.preflight.model import model_of
from verl_digen.preflight.start_config import StartConfig, typed_keys
from verl_digen.processes.cluster import joins_cluster
from verl_digen.require import refusing, require, require_one_of
from verl_digen.rollout.registry import REPLICAS, TRAINER
from verl_digen.rollout.vllm_omni.settings import check_settings, check_versions
from verl_digen.sampling.requests import groups_are_alike

COLOCATED = "digen_colocated"
"""`trainer.v1.trainer_mode` with which trainer and replicas take turns on the same devices."""
TURNS = "where trainer and replicas take turns on the same devices"
MODES = (COLOCATED, "digen_disaggregated")
SIZES = ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size")
ONE = "set it to 1: more devices make more replicas"
NCCL_REMEDY = "nccl is verl's and needs cupy: install cupy-cuda12x (or -cuda13x), or choose digen_gloo, which is slower"
BACKEND = "actor_rollout_ref.rollout.checkpoint_engine.backend"
VERLS_ENGINES = ("kimi_ckpt_engine", "mooncake", "nccl", "nixl")
"""verl's own engines that send whole tensors between pools; each is registered only where its packages are
installed."""


def check_device(run: StartConfig) -> None:
    """Require that `trainer.device` is the platform verl chose, and a CPU machine has the logical devices verl needs:
    Ray would wait forever for devices that no node has."""
    platform, device = run.device, run.config.trainer.device
    require_one_of("trainer.device", device, sorted({platform, "cpu", "cuda", "npu"}))
    alone = not joins_cluster(OmegaConf.select(run.config, "ray_kwargs.ray_init.address"))
    if device == "cpu" or (alone and "device" in typed_keys(run.config, "trainer")):
        remedy = "leave it out, or set VERL_PLATFORM=cpu in the environment to train on the CPU"
        run.require_values("on the platform that verl found", ("trainer.device", platform, "", remedy))
    if platform == "cpu" and alone:
        num_gpus = OmegaConf.select(run.config, "ray_kwargs.ray_init.num_gpus", throw_on_missing=True)
        needed = sum(asked_devices(run.config, run.digen, has_own_replicas=True).values())
        require(
            isinstance(num_gpus, int) and num_gpus >= needed,
            f"ray_kwargs.ray_init.num_gpus must be >= {needed}, the devices of the run, where there is no accelerator",
            num_gpus,
            "raise it (these GPUs are logical), or lower trainer.n_gpus_per_node",
        )


def check_rollout(run: StartConfig) -> None:
    """Require a replica type that exists, and replicas that fit the devices."""
    rollout = run.config.actor_rollout_ref.rollout
    require_one_of("actor_rollout_ref.rollout.name", rollout.name, REPLICAS)
    size, is_colocated = num_replica_devices(run.config), run.config.trainer.v1.trainer_mode == COLOCATED
    if rollout.name != "vllm_omni":
        why = ", whose ranks generate together" if rollout.name == TRAINER else ", whose replicas have one device"
        remedy = f"{ONE}; actor_rollout_ref.rollout.name=vllm_omni has replicas of {REPLICA_KEY} devices"
        _require_one_device(run, SIZES, why, remedy)
    require(
        is_colocated or rollout.nnodes >= 1,
        "actor_rollout_ref.rollout.nnodes must be >= 1 with replicas on devices of their own",
        rollout.nnodes,
        "give the nodes that generate",
    )
    pool = "trainer" if is_colocated else "actor_rollout_ref.rollout"
    num_devices = num_trainer_devices(run.config) if is_colocated else num_generator_devices(run.config)
    require(
        num_devices % size == 0,
        f"{pool}.nnodes x {pool}.n_gpus_per_node must be a multiple of a replica's devices ({size})",
        num_devices,
        f"change it, or {REPLICA_KEY}",
    )


def _require_one_device(run: StartConfig, sizes: Sequence[str], why: str, remedy: str) -> None:
    condition = f"with actor_rollout_ref.rollout.name={run.config.actor_rollout_ref.rollout.name}"
    run.require_values(condition, *((f"actor_rollout_ref.rollout.{size}", 1, why, remedy) for size in sizes))


def check_generating_ranks(run: StartConfig) -> None:
    """Require a trainer whose ranks may generate at any time between two batches, all with as many forwards."""
    if run.config.actor_rollout_ref.rollout.name != TRAINER:
        remedy = "set actor_rollout_ref.rollout.name=trainer"
        row = "actor_rollout_ref.model.int8_base", False, ": their base is not in int8", remedy
        return run.require_values("where replicas generate", row)
    digen, name = run.digen, "actor_rollout_ref.rollout.name=trainer"
    replicas = "set actor_rollout_ref.rollout.name=diffusers"
    offload, why = "actor_rollout_ref.actor.fsdp_config.param_offload", ", which generates with the weights in place"
    alone, colocates = ", whose replicas are the trainer's ranks", f"{replicas}, or leave out recipe disaggregated"
    run.require_values(
        f"with {name}",
        ("trainer.v1.trainer_mode", COLOCATED, alone, colocates),
        (offload, False, why, f"leave it out, or {replicas}"),
    )
    require(
        groups_are_alike(digen) or num_data_parallel_ranks(run.config) == 1,
        f"digen.sampling.shared_initial_noise and digen.sampling.outside must be left out with {name} and several "
        "ranks, whose samples would take different numbers of forwards",
        digen.sampling,
        replicas,
    )


def check_rollout_package(run: StartConfig) -> None:
    """Require the package of the replica type."""
    require(
        run.config.actor_rollout_ref.rollout.name != "vllm_omni" or find_spec("vllm_omni") is not None,
        "actor_rollout_ref.rollout.name=vllm_omni needs the package vllm-omni",
        "not installed",
        "pip install 'verl-digen[vllm-omni]', or set actor_rollout_ref.rollout.name=diffusers",
    )


def check_placement(run: StartConfig) -> None:
    """Require that a device type is set only for a pool that exists, and that reward workers can divide their devices.
    Whether the cluster has such devices is checked once Ray has started (`verl_digen.config.placement`)."""
    if run.config.trainer.v1.trainer_mode == COLOCATED:
        remedy = "use recipe=...+disaggregated, or set digen.placement.trainer_accelerator"
        run.require_values(TURNS, ("digen.placement.generator_accelerator", None, "", remedy))
    num_devices, num_workers = num_function_devices(run.config), run.config.reward.num_workers
    require(
        num_devices == 0 or num_devices % num_workers == 0 or num_workers % num_devices == 0,
        f"reward.num_workers must divide the {num_devices} devices of reward.reward_model.nnodes x n_gpus_per_node, "
        "or be a multiple of them",
        num_workers,
        "as many workers as devices is usual",
    )


def check_mode(run: StartConfig) -> None:
    """Require one of our trainers, and shared devices (verl's `hybrid_engine`) exactly if it is the colocated one."""
    mode = run.config.trainer.v1.trainer_mode
    require_one_of("trainer.v1.trainer_mode", mode, MODES)
    remedy = "leave both to the recipes: recipe=...+disaggregated has separate pools"
    row = "actor_rollout_ref.hybrid_engine", mode == COLOCATED, "", remedy
    run.require_values(f"with trainer.v1.trainer_mode={mode}", row)


def check_weight_path(run: StartConfig) -> None:
    """Require a known engine to send weights from the trainer to the replicas."""
    section, mode = run.config.actor_rollout_ref.rollout.checkpoint_engine, run.config.trainer.v1.trainer_mode
    known = {"naive"} if mode == COLOCATED else _registered_engines(section) | {*VERLS_ENGINES}
    require_one_of(BACKEND, section.backend, sorted(known))


def check_weight_package(run: StartConfig) -> None:
    """Require the packages that verl's own engines for weights between pools need."""
    section, mode = run.config.actor_rollout_ref.rollout.checkpoint_engine, run.config.trainer.v1.trainer_mode
    if mode == COLOCATED or section.backend not in VERLS_ENGINES:
        return
    registered = _registered_engines(section)
    require(
        section.backend in registered,
        f"{BACKEND} must be one of {', '.join(sorted(registered))}, whose packages are installed",
        section.backend,
        NCCL_REMEDY
        if section.backend == "nccl"
        else f"install what verl/checkpoint_engine/ imports for {section.backend}, or choose digen_gloo",
    )


def _registered_engines(section: DictConfig) -> set[str]:
    """Names of the engines that send whole tensors between pools and whose packages are installed."""
    from verl.checkpoint_engine import CheckpointEngineRegistry

    key = "actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module"
    module = section.custom_backend_module
    with refusing(f"{key} must be a module that can be imported", module, "leave it to the recipes"):
        import_external_libs(module)
    whole, engines = "named_tensors", CheckpointEngineRegistry._registry.items()
    return {name for name, engine in engines if getattr(engine, "wire_format", whole) == whole} - {"naive"}


def check_pools(run: StartConfig) -> None:
    """Require separate pools for the techniques that need them, and one optimizer step per batch on separate pools."""
    is_separate = run.config.trainer.v1.trainer_mode != COLOCATED
    if not is_separate:
        run.require_values(
            TURNS,
            ("digen.tag.policy", "off", "", "use recipe=...+disaggregated"),
            ("digen.staleness.max_versions", 0, "", "use recipe=...+disaggregated"),
        )
    actor, num_prompts = run.config.actor_rollout_ref.actor, run.config.data.train_batch_size
    require(
        not is_separate or (actor.ppo_mini_batch_size == num_prompts and actor.ppo_epochs == 1),
        f"actor_rollout_ref.actor.ppo_mini_batch_size must be data.train_batch_size={num_prompts} and "
        "actor_rollout_ref.actor.ppo_epochs 1 on separate pools, where a batch is one optimizer step",
        (actor.ppo_mini_batch_size, actor.ppo_epochs),
        "set them so (recipes guard and dppo take two), or leave out recipe disaggregated",
    )


def check_vllm_omni(run: StartConfig) -> None:
    """Require the tested versions, tensor parallelism within one node, and settings that leave a step's numbers
    alone."""
    rollout = run.config.actor_rollout_ref.rollout
    if rollout.name != "vllm_omni" or find_spec("vllm_omni") is None:  # `check_rollout_package` says so
        return
    check_versions(allow_untested=run.digen.rollout.allow_untested_versions)
    _require_one_device(run, SIZES[1:], ", whose replicas are tensor parallel", ONE)
    is_colocated = run.config.trainer.v1.trainer_mode == COLOCATED
    num_devices = (run.config.trainer if is_colocated else rollout).n_gpus_per_node
    require(
        rollout.tensor_model_parallel_size <= num_devices,
        f"actor_rollout_ref.rollout.tensor_model_parallel_size must be <= {num_devices}, the devices of a node, with "
        "actor_rollout_ref.rollout.name=vllm_omni",
        rollout.tensor_model_parallel_size,
        "lower it",
    )
    model = model_of(run.config)
    serving = None if model is None else model.spec.vllm_omni
    is_stepwise = serving is not None and serving.is_stepwise
    if serving is not None and not is_stepwise and run.config.trainer.device == "cpu":
        why = f" on a CPU: vLLM-Omni runs a {serving.pipeline} in one go, and its workers do not answer there"
        _require_one_device(run, SIZES[:1], why, "set it to 1")
    settings: Any = OmegaConf.select(rollout, "engine_kwargs.vllm_omni")
    if settings is not None:
        given: Any = OmegaConf.to_container(settings, resolve=True)
        check_settings(given, is_stepwise=is_stepwise)


def check_outside(run: StartConfig) -> None:
    """Require replicas that can make steps cheaper, and forwards that no other process waits for."""
    digen = run.digen
    outside, rollout = digen.sampling.outside, run.config.actor_rollout_ref.rollout.name
    if not outside.is_on:
        return
    require(
        rollout != "vllm_omni",
        "digen.sampling.outside must be left out with actor_rollout_ref.rollout.name=vllm_omni, whose pipelines "
        "evaluate the network at every step of their own schedule",
        outside,
        "set actor_rollout_ref.rollout.name=diffusers, or lower digen.sampling.num_steps",
    )
    require(
        not (outside.cache or outside.fp8) or rollout != TRAINER,
        f"digen.sampling.outside.{'cache' if outside.cache else 'fp8'} must be left out with "
        "actor_rollout_ref.rollout.name=trainer: ranks have sharded weights, and their forwards are the same in number",
        outside,
        "set actor_rollout_ref.rollout.name=diffusers",
    )
    if digen.tag.policy != "off":
        remedy = "set digen.tag.policy=off"
        gathers = ": every forward of a trainer gathers weights from all its ranks, whose samples skip other steps"
        sharded = ": a trainer has sharded weights, without copies in fp8"
        like = f"{remedy}, or pass over steps with digen.sampling.outside.solver_after, the same on all ranks"
        run.require_values(
            f"with digen.tag.policy={digen.tag.policy}",
            ("digen.sampling.outside.cache", 0, gathers, like),
            ("digen.sampling.outside.fp8", False, sharded, f"set it to false, or {remedy}"),
        )
    if digen.rollout_compiles:
        why = ", whose blocks have the layers' code in them"
        remedy = "set it to false, or set digen.rollout.compile=false"
        run.require_values("with compiled replicas", ("digen.sampling.outside.fp8", False, why, remedy))
