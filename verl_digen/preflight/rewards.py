# SPDX-License-Identifier: Apache-2.0
"""Rules for rewards: the functions that are named, verl's keys around them, their devices, rewards that watch, the stop
on hacking, and verl's reward model: that a reward asks it, and that its servers can start."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from verl.utils.import_utils import load_extern_object

from verl_digen.config import RewardEntry
from verl_digen.config.pool_sizes import has_reward_model, num_reward_model_devices
from verl_digen.config.reward import ALWAYS, VALIDATION
from verl_digen.preflight.inputs import validates
from verl_digen.preflight.pools import COLOCATED
from verl_digen.preflight.start_config import StartConfig
from verl_digen.processes.cluster import joins_cluster
from verl_digen.report.summary import leaves
from verl_digen.require import refusing, require
from verl_digen.reward.combine import find_combination, formula
from verl_digen.reward.encoders import WEIGHTS
from verl_digen.reward.functions import CUSTOM, require_reward_function
from verl_digen.reward.judges.chat import REWARD_MODEL
from verl_digen.reward.named import (
    BUILT_IN,
    OWN_MANAGER,
    check,
    find,
    has_custom,
    has_pool,
    num_function_workers,
    reads_latents,
)
from verl_digen.reward.reward_model import ROUTER, UNKNOWN, asks_reward_model, connected, router_argument, takes_router

CUSTOM_KEY = "reward.custom_reward_function"
MODULE_PREFIX = "pkg://"
FILE_PREFIX = "file://"
OLDER_KEYS = {
    "custom_reward_function": CUSTOM_KEY,
    "reward_model": "reward.reward_model, reward.reward_manager or reward",
}
"""Sections of verl's older configs, which its main entry does not read, and where their keys are now."""


def check_reward_keys(run: StartConfig) -> None:
    """Refuse keys of verl's older configs."""
    for section, place in OLDER_KEYS.items():
        node = OmegaConf.select(run.config, section)
        plain = OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
        given = {key: value for key, value in leaves(section, plain) if value not in (None, {})}
        require(
            not given,
            f"{' and '.join(given)} must be left out: verl's main does not read its older section {section!r}",
            list(given.values()),
            f"the keys are under {place} now",
        )


def check_rewards(run: StartConfig) -> None:
    """Require a reward, and that every named function can be loaded and called. An environment is one."""
    weights = reward_weights(run)
    is_trained = not run.digen.trains_pairs and not run.digen.environment.is_on
    require(
        bool(weights) or not (is_trained or (run.digen.trains_pairs and validates(run.config))),
        "digen.reward.functions must name a reward function and its weight",
        weights,
        f"set e.g. digen.reward.functions={{jpeg_compressibility: 1.0}}, or {CUSTOM_KEY}.path",
    )
    require(
        any(weights.values()) or not is_trained,
        "digen.reward.functions and digen.reward.custom_weight must have a weight that is not 0",
        weights,
        "nothing would be learnt; give the function to train on a weight of 1",
    )
    served = UNKNOWN if has_reward_model(run.config) else None
    for entry in run.digen.reward.entries:
        check(connected(entry, served))
        _check_weights(run.config, entry)
    if has_custom(run.config):
        return _check_custom(run.config)
    section = run.config.reward.custom_reward_function
    custom = section.get("name") or "compute_score", section.get("reward_kwargs") or {}
    require(
        custom == ("compute_score", {}),
        f"{CUSTOM_KEY} must have a path where its name or reward_kwargs are given",
        custom,
        f"set {CUSTOM_KEY}.path=FILE, or leave them out",
    )


OURS = ("importlib", "DiffusionRewardManager", "pkg://verl_digen.reward.manager")
"""`source`, `name` and `module.path` of the project's own reward manager."""


def check_reward_manager(run: StartConfig) -> None:
    """Require the reward manager to be ours or the user's, not verl's for text."""
    section = run.config.reward.reward_manager
    if (section.source, section.name, section.module.path) == OURS:
        return
    from verl.trainer.ppo.reward import resolve_reward_manager_cls

    with refusing(
        "reward.reward_manager must name a class that can be imported",
        f"{section.name} of {section.module.path}",
        "leave reward.reward_manager alone, a reward of your own is a function",
    ):
        resolve_reward_manager_cls(run.config)


def check_reward_devices(run: StartConfig) -> None:
    """Require devices for a pool of reward devices, and processes that use them."""
    model = run.config.reward.reward_model
    require(
        model.enable or not model.enable_resource_pool or num_function_workers(run.config, run.digen.reward) > 0,
        "reward.reward_model.enable_resource_pool must be false where every reward has processes of its own",
        model.enable_resource_pool,
        "give devices with digen.reward.functions.NAME.num_gpus, or serve a model with reward.reward_model.enable=true",
    )


def check_timeshared(run: StartConfig) -> None:
    """Require, for rewards that take turns with the replicas, replicas that sleep and rewards with weights."""
    own, rollout = "give it devices of its own with num_gpus in place of timeshare", "actor_rollout_ref.rollout"
    for entry in run.digen.reward.timeshared:
        key = f"{entry.key}.timeshare"
        run.require_values(
            f"with {key}=true",
            ("trainer.v1.trainer_mode", COLOCATED, ", for replicas that sleep while samples are scored", own),
            (f"{rollout}.name", "diffusers", ", as it has not been tried with another", own),
            (f"{rollout}.free_cache_engine", True, ", so that replicas leave their memory", own),
        )
        require(
            find(entry).has_pool,
            f"{key} must be false for the function {entry.target!r}, which has no weights that could leave a device",
            True,
            "leave it out, or write a class of verl_digen.reward.base.Reward",
        )


def check_combination(run: StartConfig) -> None:
    """Require `digen.reward.combine` to be known, and what it reads to be there."""
    reward = run.digen.reward
    find_combination(reward)
    manager = run.config.reward.reward_manager.name
    if manager != OWN_MANAGER:
        remedy = "leave reward.reward_manager alone, or digen.reward.combine out"
        row = "digen.reward.combine", "sum", ", which returns one number", remedy
        run.require_values(f"with reward.reward_manager.name={manager}", row)
    names = [entry.name for entry in reward.entries]
    require(
        CUSTOM not in names or not has_custom(run.config),
        f"digen.reward.functions must not name a reward {CUSTOM!r} beside {CUSTOM_KEY}.path, which has that name",
        names,
        "give it another name",
    )


def check_group_rewards(run: StartConfig) -> None:
    """Require groups of at least two samples for rewards that compare them, in training and where the run validates."""
    compare = [entry for entry in run.digen.reward.entries if find(entry).scope == "group"]
    rollout = run.config.actor_rollout_ref.rollout
    counts = [("n", rollout.n, [entry.name for entry in compare if entry.when == ALWAYS], "raise it")]
    if validates(run.config):
        remedy = "raise it, or turn validation off (trainer.test_freq=-1 trainer.val_before_train=false)"
        counts.append(("val_kwargs.n", rollout.val_kwargs.n, [entry.name for entry in compare], remedy))
    for key, count, named, remedy in counts:
        require(
            not named or count >= 2,
            f"actor_rollout_ref.rollout.{key} must be >= 2 with {', '.join(named)}, which compares samples of a prompt",
            count,
            remedy,
        )


def reward_weights(run: StartConfig) -> dict[str, float]:
    """Name -> weight of every function of the run."""
    return run.digen.reward.weights(has_custom=has_custom(run.config))


def reward_formula(run: StartConfig) -> str:
    """The reward that the run trains on, for people."""
    digen, weights = run.digen, reward_weights(run)
    reward, environment = digen.reward, digen.environment
    if environment.is_on and not weights:
        return f"reward = sum of the turns' rewards of {environment.target}"
    found = formula(weights, reward.combine, reward.entries)
    if environment.is_on:
        return f"{found}, of the last picture + sum of the turns' rewards of {environment.target}"
    if not digen.trains_pairs:
        return found
    scored = f"; validation: {found}" if validates(run.config) else ""
    return f"reward = 1 for the chosen picture of a pair, 0 for the rejected one{scored}"


def _check_weights(config: DictConfig, entry: RewardEntry) -> None:
    """Require the folders and files of a built-in reward's weights; in a cluster they may lie on another machine."""
    if entry.target not in BUILT_IN or joins_cluster(config.ray_kwargs.ray_init.get("address")):
        return
    for name in WEIGHTS:
        value = str(entry.arguments.get(name, ""))
        require(
            not value.startswith(("/", "./", "../", "~")) or Path(value).expanduser().exists(),
            f"{entry.key}.{name} must be a folder or file that exists, or a repository of the hub",
            value,
            f"check the path (it is relative to the working directory {Path.cwd()})",
        )


def _check_custom(config: DictConfig) -> None:
    """Require the user's file, and load its function as reward workers will."""
    section = config.reward.custom_reward_function
    path, name = section.path, section.name
    is_module = isinstance(path, str) and path.startswith(MODULE_PREFIX)
    require(
        is_module or (isinstance(path, str) and Path(path.removeprefix(FILE_PREFIX)).is_file()),
        f"{CUSTOM_KEY}.path must be an existing file, or pkg://MODULE",
        path,
        f"check the path (it is relative to the working directory {Path.cwd()})",
    )
    rule = f"{CUSTOM_KEY}.path={path} must be a module that can be imported and has a function {CUSTOM_KEY}.name"
    with refusing(rule, name, "repair the file, install what it imports, or name another function"):
        function = load_extern_object(path, name)
    router = UNKNOWN.router if has_reward_model(config) else None
    given = {**_extra(section), **router_argument(function, router)}
    require_reward_function(f"{CUSTOM_KEY} ({name} of {path})", function, given)


def _extra(section: DictConfig) -> Mapping[str, Any]:
    """Keyword arguments that the user gives the function."""
    values: Any = OmegaConf.to_container(section, resolve=True)
    extra = values.get("reward_kwargs")  # verl reads it, and it is absent by default
    require(
        extra is None or isinstance(extra, dict),
        f"{CUSTOM_KEY}.reward_kwargs must be a mapping of arguments",
        extra,
        f"set e.g. +{CUSTOM_KEY}.reward_kwargs.scale=2",
    )
    return extra or {}


def check_latents(run: StartConfig) -> None:
    """Require replicas that have latents to make all samples, if a reward reads them."""
    why = ", which reads latents: the trainer's samples carry none"
    row = "digen.tag.policy", "off", why, "set digen.tag.policy=off, or use a reward of pixels"
    for entry in filter(reads_latents, run.digen.reward.entries):
        run.require_values(f"with {entry.key}", row)


STOP = "digen.reward.stop_on_hacking"


def check_watching(run: StartConfig) -> None:
    """Require what rewards of some samples, gold rewards and the stop on hacking need."""
    reward = run.digen.reward
    _check_manager(run.config, reward.entries)
    late = [entry for entry in reward.entries if entry.when == VALIDATION]
    for entry in late:
        require(
            bool(validates(run.config)),
            f"trainer.test_freq must be > 0, or trainer.val_before_train true, with {entry.key}.when={VALIDATION}",
            run.config.trainer.test_freq,
            f"set trainer.test_freq, or {entry.key}.when={ALWAYS}",
        )
    if reward.stop_on_hacking:
        _check_stop(run, reward.golds)


def _check_stop(run: StartConfig, golds: Sequence[str]) -> None:
    """Require gold rewards, validations, and a checkpoint of each validated step."""
    trainer = run.config.trainer
    require(
        bool(golds),
        f"digen.reward.functions must have an entry with gold=true with {STOP}=true",
        [entry.name for entry in run.digen.reward.entries],
        f"add e.g. NAME: {{weight: 0, gold: true}}, or {STOP}=false",
    )
    require(
        trainer.test_freq > 0,
        f"trainer.test_freq must be > 0 with {STOP}=true, which compares validations",
        trainer.test_freq,
        f"set e.g. trainer.test_freq=10, or {STOP}=false",
    )
    require(
        trainer.save_freq > 0 and trainer.test_freq % trainer.save_freq == 0,
        f"trainer.save_freq must be > 0 and divide trainer.test_freq={trainer.test_freq} with {STOP}=true, which keeps "
        "the checkpoint of the best validation",
        trainer.save_freq,
        f"set trainer.save_freq={trainer.test_freq}; trainer.max_actor_ckpt_to_keep limits the others",
    )
    contents = list(run.config.actor_rollout_ref.actor.checkpoint.save_contents)
    require(
        "model" in contents,
        f"actor_rollout_ref.actor.checkpoint.save_contents must have model with {STOP}=true",
        contents,
        "add it",
    )


def _check_manager(config: DictConfig, entries: Sequence[RewardEntry]) -> None:
    """Refuse functions of some samples with the user's own reward manager, which is called on all."""
    manager = config.reward.reward_manager.name
    partial = [
        entry.key
        for entry in entries
        if (entry.when != ALWAYS or entry.data_sources is not None) and manager != OWN_MANAGER and not has_pool(entry)
    ]
    require(
        not partial,
        f"{', '.join(partial)} must score all samples with reward.reward_manager.name={manager}, which scores each",
        manager,
        "leave reward.reward_manager alone, or when and data_sources out",
    )


MODEL_KEY = "reward.reward_model"
"""verl's reward model."""
SERVER_PACKAGES = {"vllm": "vllm", "sglang": "sglang", "trtllm": "tensorrt_llm"}
"""Value of `rollout.name` -> package of the server. Others are classes that a plugin has registered with verl."""
PICTURE_MAKERS = ("diffusers", "vllm_omni")
"""Replicas of this project, which serve no language model."""


def check_reward_model(run: StartConfig) -> None:
    """Require that a served model is asked and that its servers can start, and that no reward asks an unserved one."""
    asking = [entry.key for entry in run.digen.reward.entries if asks_reward_model(entry)]
    if not has_reward_model(run.config):
        require(
            not asking,
            f"{asking[0] if asking else ''}.url must name a server where {MODEL_KEY}.enable is false",
            REWARD_MODEL,
            "start one (vllm serve MODEL) and set url=http://HOST:8000, or have verl start one with "
            f"{MODEL_KEY}.enable=true",
        )
        return
    if has_custom(run.config) and _custom_takes_router(run.config):
        asking.append(f"{CUSTOM_KEY}.path")
    require(
        bool(asking),
        f"{MODEL_KEY}.enable must be false where no reward asks its servers",
        True,
        f"name a judge without url, e.g. digen.reward.functions={{yes_no: 1.0}}, or take {ROUTER} in a reward function",
    )
    _check_servers(run)


def _check_servers(run: StartConfig) -> None:
    model = run.config.reward.reward_model
    own = "start a server yourself (vllm serve MODEL) and name it in a judge's url"
    set_it = f"set it with {MODEL_KEY}.nnodes and {MODEL_KEY}.n_gpus_per_node, or {own}"
    why, anywhere = ": its servers need devices that no trainer or replica uses", ": verl places them on any devices"
    run.require_values(
        f"with {MODEL_KEY}.enable",
        (f"{MODEL_KEY}.enable_resource_pool", True, why, set_it),
        ("digen.placement.reward_accelerator", None, anywhere, f"leave it out, or {own}"),
    )
    require(
        isinstance(model.model_path, str) and bool(model.model_path),
        f"{MODEL_KEY}.model_path must name the model to serve",
        model.model_path,
        "e.g. Qwen/Qwen2.5-VL-7B-Instruct",
    )
    name = None if OmegaConf.is_missing(model.rollout, "name") else model.rollout.name
    require(
        isinstance(name, str) and name not in PICTURE_MAKERS,
        f"{MODEL_KEY}.rollout.name must be a server of language models",
        name,
        "vllm or sglang",
    )
    package = SERVER_PACKAGES.get(str(name))
    require(
        package is None or find_spec(package) is not None,
        f"{MODEL_KEY}.rollout.name={name} needs the package {package}",
        "not installed",
        "install it, or start a server elsewhere (vllm serve MODEL) and name it in a judge's url",
    )
    sizes = [model.rollout[f"{kind}_parallel_size"] for kind in ("tensor_model", "data", "pipeline_model")]
    size, num_devices = sizes[0] * sizes[1] * sizes[2], num_reward_model_devices(run.config)
    require(
        size >= 1 and num_devices % size == 0,
        f"{MODEL_KEY}.rollout.tensor_model_parallel_size (times data and pipeline sizes) must divide the {num_devices} "
        f"devices of {MODEL_KEY}.nnodes x n_gpus_per_node",
        size,
        "verl's default is 2; lower it, or change the devices",
    )


def _custom_takes_router(config: DictConfig) -> bool:
    section = config.reward.custom_reward_function
    try:
        return takes_router(load_extern_object(section.path, section.name))
    except (Exception, SystemExit):  # any exception of the user's module; `check_rewards` says what is wrong
        return True
