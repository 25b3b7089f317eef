# SPDX-License-Identifier: Apache-2.0
"""Checks of the whole composed config before Ray starts; recipes install them as a Hydra callback.

- Rules about one field under `digen:` are in `verl_digen.config`; here are those that span keys, files and registries.
- A rule is a function of the composed config in `RULES`. It raises ValueError with the key as typed, the rule, the
  value and the remedy; all rules are run, so that one start shows everything there is to repair.
- Nothing is checked under `--cfg`, which shows a config whether it could run or not.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_digen import plugin
from verl_digen.config import digen_config
from verl_digen.errors import RunStopped, plain
from verl_digen.schedulers.require import require, require_one_of

if TYPE_CHECKING:
    from verl_digen.data.prompts import Prompt

UNUSED_KEYS: dict[str, tuple[Any, str]] = {
    "actor_rollout_ref.actor.use_kl_loss": (False, "digen.kl.coef is the weight of the KL term"),
    "algorithm.use_kl_in_reward": (False, "digen.kl.coef is the weight of the KL term"),
    "actor_rollout_ref.actor.use_dynamic_bsz": (
        False,
        "digen.tsp.samples_per_tile and digen.tsp.steps_per_tile are the size of a forward",
    ),
    "actor_rollout_ref.actor.fsdp_config.use_no_sync_for_gradient_accumulation": (
        False,
        "digen.tsp.reduce says when gradients are reduced",
    ),
    "trainer.use_v1": (True, "the legacy trainer has no hook for diffusion"),
}
"""Keys of verl's that do nothing for diffusion unless they have this value, and what to use in their place."""

SEPARATE_POOLS = ("digen_disaggregated", "digen_virtual")
"""Values of `trainer.v1.trainer_mode` with which trainer and replicas have devices of their own."""


SURELY_SHORT_BYTES = 200
"""A prompt this long fits every model: a token is a byte or more, and none reads fewer than 256."""


class Preflight(Callback):
    """Hydra callback: one paragraph on stderr and exit code 2 for a config that cannot run."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Before the run's output folder is made."""
        _check_or_exit(config)

    def on_job_start(self, config: DictConfig, *, task_function: Any = None, **kwargs: Any) -> None:
        """Before each job of a multirun."""
        if config.hydra.mode == RunMode.MULTIRUN:
            _check_or_exit(config)

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **kwargs: Any) -> None:
        """After the run: a `RunStopped` of whatever process is one paragraph, not a traceback of Ray's."""
        if job_return.status == JobStatus.FAILED and isinstance(job_return._return_value, RunStopped):
            reason = plain(job_return._return_value)
            ray.shutdown()  # ends the workers, and their last log lines come before the reason, not after
            print(f"verl-digen: the run stopped: {reason}", file=sys.stderr, flush=True)
            raise SystemExit(1)


def _check_or_exit(config: DictConfig) -> None:
    # Hydra turns an Exception of a callback into a warning and goes on; SystemExit passes.
    try:
        check(config)
    except ValueError as error:
        print(f"verl-digen: this config cannot run.\n{error}", file=sys.stderr)
        raise SystemExit(2) from None
    except Exception:
        traceback.print_exc()
        raise SystemExit(1) from None


def check(config: DictConfig) -> None:
    """Run all rules.

    Raises:
        ValueError: the messages of all rules that are broken, one line each.
    """
    problems = []
    for rule in RULES:
        try:
            rule(config)
        except OmegaConfBaseException as error:  # a value that is missing, or an interpolation that leads nowhere
            problems.append(f"{error.full_key or rule.__name__}: {str(error).splitlines()[0]}")
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise ValueError("\n".join(dict.fromkeys(problems)))


def check_plugin(config: DictConfig) -> None:
    """Everything we add to verl is registered in this process."""
    if plugin.FAILURES:
        raise ValueError(
            f"verl-digen is not installed as it should be: {'; '.join(plugin.FAILURES)}; "
            "run `digen doctor`, which says what is missing and how to get it"
        )


def check_digen(config: DictConfig) -> None:
    """The `digen:` section by itself."""
    digen_config(config)


def check_device(config: DictConfig) -> None:
    """`trainer.device` is the platform verl chose, and a CPU machine has as many logical GPUs as verl will ask for."""
    from verl.plugin.platform import get_platform

    from verl_digen.platforms.placement import num_reward_devices

    platform = get_platform().device_name
    require(
        config.trainer.device != "cpu" or platform == "cpu",
        f"trainer.device must be {platform}, the platform verl found",
        config.trainer.device,
        "to train on the CPU, set VERL_PLATFORM=cpu in the environment",
    )
    if platform == "cpu":
        num_gpus = OmegaConf.select(config, "ray_kwargs.ray_init.num_gpus")
        rollout = config.actor_rollout_ref.rollout
        needed = _num_ranks(config) + rollout.nnodes * rollout.n_gpus_per_node + num_reward_devices(config)
        require(
            num_gpus is not None and num_gpus >= needed,
            f"ray_kwargs.ray_init.num_gpus must be >= {needed}, the devices of the run, where there is no accelerator",
            num_gpus,
            "raise it (these GPUs are logical), or lower trainer.n_gpus_per_node",
        )


def check_unused(config: DictConfig) -> None:
    """Keys that would do nothing are left alone."""
    for key, (value, remedy) in UNUSED_KEYS.items():
        given = OmegaConf.select(config, key)
        require(given == value, f"{key} must be {str(value).lower()} for diffusion models", given, remedy)


def check_strategy(config: DictConfig) -> None:
    strategy = config.actor_rollout_ref.actor.strategy
    require(
        strategy == "fsdp2",
        "actor_rollout_ref.actor.strategy must be fsdp2 for diffusion models",
        strategy,
        "set it to fsdp2",
    )


def check_batches(config: DictConfig) -> None:
    """Prompts, groups and samples divide as verl divides them."""
    num_prompts, group_size = config.data.train_batch_size, config.actor_rollout_ref.rollout.n
    mini_batch, num_ranks = config.actor_rollout_ref.actor.ppo_mini_batch_size, _num_ranks(config)
    require(
        group_size >= 2,
        "actor_rollout_ref.rollout.n must be >= 2, because an advantage compares the samples of one prompt",
        group_size,
        "flow_grpo uses 24",
    )
    require(
        num_prompts * group_size % num_ranks == 0,
        "data.train_batch_size x actor_rollout_ref.rollout.n must be a multiple of the trainer's ranks "
        f"(trainer.nnodes x trainer.n_gpus_per_node = {num_ranks})",
        num_prompts * group_size,
        "change one of these four",
    )
    require(
        0 < mini_batch <= num_prompts and num_prompts % mini_batch == 0,
        f"actor_rollout_ref.actor.ppo_mini_batch_size must divide data.train_batch_size={num_prompts}",
        mini_batch,
        "leave it alone for one optimizer step per batch",
    )


def check_rollout(config: DictConfig) -> None:
    """The replica exists, and replicas fit the devices."""
    rollout = config.actor_rollout_ref.rollout
    require_one_of("actor_rollout_ref.rollout.name", rollout.name, tuple(plugin.REPLICAS))
    require(
        rollout.name != "vllm_omni" or find_spec("vllm_omni") is not None,
        "actor_rollout_ref.rollout.name=vllm_omni needs the package vllm-omni",
        "not installed",
        "pip install 'verl-digen[vllm-omni]', or set actor_rollout_ref.rollout.name=diffusers",
    )
    size = rollout.tensor_model_parallel_size * rollout.data_parallel_size * rollout.pipeline_model_parallel_size
    require(
        rollout.name != "diffusers" or size == 1,
        "actor_rollout_ref.rollout.tensor_model_parallel_size (times data and pipeline sizes) must be 1 for "
        "actor_rollout_ref.rollout.name=diffusers",
        size,
        "set it to 1; more devices make more replicas",
    )
    pools = {"trainer": _num_ranks(config), "actor_rollout_ref.rollout": rollout.nnodes * rollout.n_gpus_per_node}
    for pool, num_devices in pools.items():
        require(
            num_devices % size == 0,
            f"{pool}.nnodes x {pool}.n_gpus_per_node must be a multiple of a replica's devices ({size})",
            num_devices,
            "change it, or actor_rollout_ref.rollout.tensor_model_parallel_size",
        )


def check_placement(config: DictConfig) -> None:
    """A type is asked for where there is a pool to be of it, and reward workers can divide their devices. Whether the
    cluster has such devices is seen as soon as Ray has started (`verl_digen.platforms.placement`)."""
    from verl_digen.platforms.placement import num_reward_devices

    placement, mode = digen_config(config).placement, config.trainer.v1.trainer_mode
    require(
        placement.generator_accelerator is None or mode != "digen_flowgrpo",
        "digen.placement.generator_accelerator needs replicas on devices of their own",
        placement.generator_accelerator,
        "use recipe=[...,disaggregated], or set digen.placement.trainer_accelerator",
    )
    types = [placement.trainer_accelerator, placement.generator_accelerator, placement.reward_accelerator]
    require(
        mode != "digen_virtual" or not any(types),
        "digen.placement.* must be null with virtual devices, which take no real ones",
        types,
        "leave them out",
    )
    num_devices, num_workers = num_reward_devices(config), config.reward.num_workers
    require(
        num_devices == 0 or num_devices % num_workers == 0 or num_workers % num_devices == 0,
        f"reward.num_workers must divide the {num_devices} devices of reward.reward_model.nnodes x n_gpus_per_node, "
        "or be a multiple of them",
        num_workers,
        "as many workers as devices is usual",
    )


def check_model(config: DictConfig) -> None:
    """The checkpoint is there with all its parts, and its architecture is known and makes what is asked for."""
    section = config.actor_rollout_ref.model
    if OmegaConf.is_missing(section, "path"):
        raise ValueError(
            "actor_rollout_ref.model.path must be a checkpoint in the diffusers format, a folder or a repository of "
            "the hub, got nothing; set actor_rollout_ref.model.path=..."
        )
    if "://" in section.path:  # on a remote file system: verl fetches it once the run has started
        return
    from verl_digen.models import ARCHITECTURES, load_model, read_architecture
    from verl_digen.models.locate import locate_configs
    from verl_digen.types import Geometry

    folder = locate_configs(section.path)
    architecture = read_architecture(folder)
    require_one_of("the architecture of actor_rollout_ref.model.path", architecture, tuple(sorted(ARCHITECTURES)))
    sampling = digen_config(config).sampling
    model = load_model(folder)
    model.latent_shape(Geometry(sampling.height_px, sampling.width_px, sampling.num_frames))
    model.embedded_guidance(sampling.embedded_guidance_scale)


def check_prompts(config: DictConfig) -> None:
    """Prompt files can be read, and there are enough prompts for one step."""
    for name in ("train_files", "val_files"):
        if config.data[name] is None:
            raise ValueError(f"data.{name} must name a file of prompts, got nothing; set data.{name}=FILE")
        num_prompts = len(_read_prompts(config, name))
        if name == "train_files":
            if config.data.train_max_samples > 0:
                num_prompts = min(num_prompts, config.data.train_max_samples)
            require(
                num_prompts >= config.data.train_batch_size,
                f"data.train_files must hold data.train_batch_size={config.data.train_batch_size} prompts or more",
                num_prompts,
                "add prompts, or lower data.train_batch_size",
            )


def check_prompt_lengths(config: DictConfig) -> None:
    """No prompt is longer than the model reads. For checkpoints on this machine; others tell when they encode."""
    from verl_digen.models import load_model

    section = config.actor_rollout_ref.model
    is_here = not OmegaConf.is_missing(section, "path") and Path(section.path).expanduser().is_dir()
    if not is_here or config.trainer.v1.trainer_mode == "digen_virtual":
        return
    texts = [digen_config(config).sampling.negative_prompt]
    for name in ("train_files", "val_files"):
        if config.data[name] is not None:
            for prompt in _read_prompts(config, name):
                texts += [prompt.text] if prompt.negative is None else [prompt.text, prompt.negative]
    long = [text for text in dict.fromkeys(texts) if len(text.encode()) > SURELY_SHORT_BYTES]
    if long:
        check = load_model(Path(section.path).expanduser()).load_prompt_check()
        for text in long:
            check(text)


def check_pools(config: DictConfig) -> None:
    """Techniques that need separate pools have them, and one optimizer step per batch."""
    digen, mode = digen_config(config), config.trainer.v1.trainer_mode
    is_separate = mode in SEPARATE_POOLS
    for key, value, off in (
        ("digen.tag.policy", digen.tag.policy, "off"),
        ("digen.staleness.max_versions", digen.staleness.max_versions, 0),
    ):
        require(
            is_separate or value == off,
            f"{key} must be {off} where trainer and replicas take turns on the same devices",
            value,
            "use recipe=[...,disaggregated]",
        )
    actor, num_prompts = config.actor_rollout_ref.actor, config.data.train_batch_size
    require(
        not is_separate or (actor.ppo_mini_batch_size == num_prompts and actor.ppo_epochs == 1),
        f"actor_rollout_ref.actor.ppo_mini_batch_size must be data.train_batch_size={num_prompts} and "
        "actor_rollout_ref.actor.ppo_epochs 1 on separate pools, where a batch is one optimizer step",
        (actor.ppo_mini_batch_size, actor.ppo_epochs),
        "leave both alone, or leave out recipe disaggregated",
    )


def check_virtual(config: DictConfig) -> None:
    """Virtual devices are virtual on both sides, and their profile is there."""
    is_virtual = config.trainer.v1.trainer_mode == "digen_virtual"
    rollout = config.actor_rollout_ref.rollout.name
    require(
        (rollout == "virtual") == is_virtual,
        "actor_rollout_ref.rollout.name=virtual and trainer.v1.trainer_mode=digen_virtual go together",
        f"{rollout} and {config.trainer.v1.trainer_mode}",
        "use recipe=[...,disaggregated,virtual]",
    )
    if is_virtual:
        from verl_digen.rollout.virtual.durations import virtual_durations

        virtual_durations(digen_config(config))


def check_loss(config: DictConfig) -> None:
    """The policy loss is registered, by us or by a module the user names, and has the log-probs it needs."""
    from verl.utils.import_utils import import_external_libs

    from verl_digen.algorithms.losses import loss_names

    import_external_libs(config.actor_rollout_ref.model.external_lib)  # a user's loss is filed by being imported
    digen = digen_config(config)
    require_one_of("digen.loss_name", digen.loss_name, loss_names())
    _ = digen.denominator  # raises


def check_rewards(config: DictConfig) -> None:
    """There is a reward, and every function named can be found."""
    from verl_digen.reward.functions import resolve

    functions = digen_config(config).reward.functions
    custom = config.reward.custom_reward_function.path
    require(
        bool(functions) or custom is not None,
        "digen.reward.functions must name a reward function and its weight",
        dict(functions),
        "set e.g. digen.reward.functions.jpeg_compressibility=1.0, or reward.custom_reward_function.path",
    )
    for name in functions:
        resolve(name)
    require(
        custom is None or "://" in custom or Path(custom).is_file(),
        "reward.custom_reward_function.path must be an existing file",
        custom,
        "check the path",
    )


RULES: tuple[Callable[[DictConfig], None], ...] = (
    check_plugin,
    check_digen,
    check_device,
    check_unused,
    check_strategy,
    check_batches,
    check_rollout,
    check_pools,
    check_virtual,
    check_placement,
    check_model,
    check_prompts,
    check_prompt_lengths,
    check_loss,
    check_rewards,
)
"""In the order in which their messages are shown."""


def _read_prompts(config: DictConfig, name: str) -> list[Prompt]:
    """Of `data.NAME`, a file or several."""
    from verl_digen.data.prompts import read_prompts

    given = config.data[name]
    files: Any = OmegaConf.to_container(given) if OmegaConf.is_list(given) else given
    return read_prompts(files, key=f"data.{name}")


def _num_ranks(config: DictConfig) -> int:
    """Trainer ranks: one per device of the trainer's pool."""
    return config.trainer.nnodes * config.trainer.n_gpus_per_node
