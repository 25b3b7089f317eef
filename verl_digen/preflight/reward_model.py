# SPDX-License-Identifier: Apache-2.0
"""Rules for verl's reward model, `reward.reward_model`: that a reward asks it, and that its servers can start."""

from __future__ import annotations

from importlib.util import find_spec

from omegaconf import DictConfig, OmegaConf

from verl_digen.config.pool_sizes import has_reward_model, num_reward_model_devices
from verl_digen.preflight.rewards import CUSTOM_KEY
from verl_digen.preflight.start_config import StartConfig
from verl_digen.require import require
from verl_digen.reward.judges.chat import REWARD_MODEL
from verl_digen.reward.named import has_custom
from verl_digen.reward.reward_model import ROUTER, asks_reward_model, takes_router

KEY = "reward.reward_model"
PACKAGES = {"vllm": "vllm", "sglang": "sglang", "trtllm": "tensorrt_llm"}
"""Value of `rollout.name` -> package of the server. Others are classes that a plugin has registered with verl."""
PICTURE_MAKERS = ("diffusers", "vllm_omni")
"""Replicas of this project, which serve no language model."""


def check_reward_model(run: StartConfig) -> None:
    """Require that a served model is asked and that its servers can start; that no reward asks one that is not
    served."""
    asking = [entry.key for entry in run.digen.reward.entries if asks_reward_model(entry)]
    if not has_reward_model(run.config):
        require(
            not asking,
            f"{asking[0] if asking else ''}.url must name a server where {KEY}.enable is false",
            REWARD_MODEL,
            f"start one (vllm serve MODEL) and set url=http://HOST:8000, or have verl start one with {KEY}.enable=true",
        )
        return
    if has_custom(run.config) and _custom_takes_router(run.config):
        asking.append(f"{CUSTOM_KEY}.path")
    require(
        bool(asking),
        f"{KEY}.enable must be false where no reward asks its servers",
        True,
        f"name a judge without url, e.g. digen.reward.functions={{yes_no: 1.0}}, or take {ROUTER} in a reward function",
    )
    _check_servers(run)


def _check_servers(run: StartConfig) -> None:
    model = run.config.reward.reward_model
    require(
        model.enable_resource_pool is True,
        f"{KEY}.enable_resource_pool must be true: its servers need devices that no trainer or replica uses",
        model.enable_resource_pool,
        f"set it with {KEY}.nnodes and {KEY}.n_gpus_per_node, or start a server yourself (vllm serve MODEL) and name "
        "it in a judge's url",
    )
    require(
        isinstance(model.model_path, str) and bool(model.model_path),
        f"{KEY}.model_path must name the model to serve",
        model.model_path,
        "e.g. Qwen/Qwen2.5-VL-7B-Instruct",
    )
    name = None if OmegaConf.is_missing(model.rollout, "name") else model.rollout.name
    require(
        isinstance(name, str) and name not in PICTURE_MAKERS,
        f"{KEY}.rollout.name must be a server of language models",
        name,
        "vllm or sglang",
    )
    package = PACKAGES.get(str(name))
    require(
        package is None or find_spec(package) is not None,
        f"{KEY}.rollout.name={name} needs the package {package}",
        "not installed",
        "install it, or start a server elsewhere (vllm serve MODEL) and name it in a judge's url",
    )
    sizes = [model.rollout[f"{kind}_parallel_size"] for kind in ("tensor_model", "data", "pipeline_model")]
    size, num_devices = sizes[0] * sizes[1] * sizes[2], num_reward_model_devices(run.config)
    require(
        size >= 1 and num_devices % size == 0,
        f"{KEY}.rollout.tensor_model_parallel_size (times data and pipeline sizes) must divide the {num_devices} "
        f"devices of {KEY}.nnodes x n_gpus_per_node",
        size,
        "verl's default is 2; lower it, or change the devices",
    )
    remedy = "leave it out, or start a server yourself and name it in a judge's url"
    row = "digen.placement.reward_accelerator", None, ": verl places these servers on any devices", remedy
    run.require_values(f"with {KEY}.enable", row)


def _custom_takes_router(config: DictConfig) -> bool:
    from verl.utils.import_utils import load_extern_object

    section = config.reward.custom_reward_function
    try:
        return takes_router(load_extern_object(section.path, section.name))
    except (Exception, SystemExit):  # any exception of the user's module; `check_rewards` says what is wrong
        return True
