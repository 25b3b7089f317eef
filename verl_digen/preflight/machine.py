# SPDX-License-Identifier: Apache-2.0
"""Rules for this machine: versions of packages, and its accelerators and CPUs, where it is the whole cluster.

The accelerators of a running Ray cluster are compared once the run has joined it (`verl_digen.config.placement`).
"""

import logging
import os
import socket
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryFile
from urllib.parse import urlsplit

import ray
from omegaconf import DictConfig, OmegaConf
from verl.plugin import platform

from verl_digen.config.pool_sizes import (
    ENVIRONMENT_KEY,
    ROLLOUT,
    asked_devices,
    asked_text,
    num_function_devices,
    num_generator_devices,
    num_reward_model_devices,
    num_trainer_devices,
)
from verl_digen.config.reward import FUNCTIONS
from verl_digen.hardware.versions import SUPPORTED, outside
from verl_digen.preflight.pools import COLOCATED
from verl_digen.preflight.start_config import StartConfig
from verl_digen.processes.cluster import joins_cluster, num_machine_cpus
from verl_digen.require import refusing, require
from verl_digen.reward.named import check_packages, num_function_workers, pool_entries

logger = logging.getLogger(__name__)
installed_version = cache(version)

PACKAGES_OF_TRACKERS = {"vemlp_wandb": "volcengine_ml_platform", "console": None, "file": None}
"""Value of trainer.logger -> the package that verl imports for it, where it is not the one of that name."""

OF_NEW_CLUSTER = ("num_cpus", "num_gpus", "resources", "labels", "object_store_memory", "_system_config", "_node_name")
"""Arguments of `ray.init` that it refuses where it joins a cluster."""
CONNECT_S = 5.0
SOCKET, SOCKET_BYTES = "/ray/session_2026-01-01_00-00-00_000000_/sockets/plasma_store", 107
"""Longest path, without the driver's process number, of a socket in Ray's folder; and Linux's limit of one."""
CPUS_KEY = "ray_kwargs.ray_init.num_cpus"
UNITS_KEY = "transfer_queue.backend.SimpleStorage.num_data_storage_units"
CPUS_PER_RANK = 3
"""CPUs that verl's placement group reserves beside each device of the trainer (`ResourcePoolManager`)."""
CPUS_PER_REPLICA_DEVICE = 2
"""CPUs that it reserves beside each device of replicas and reward models on devices of their own (`RolloutReplica`)."""


def check_machine(run: StartConfig) -> None:
    """Require the rewards' packages, and as many devices as the pools ask for, unless the run joins a Ray cluster."""
    if joins_cluster(OmegaConf.select(run.config, "ray_kwargs.ray_init.address")):
        return
    check_packages(run.digen.reward)
    if run.device == "cpu":
        return
    declared = OmegaConf.select(run.config, "ray_kwargs.ray_init.num_gpus")
    require_devices(run, platform.get_platform().device_count() if declared is None else declared)


def require_devices(run: StartConfig, found: int) -> None:
    """Raise ValueError if the pools ask for more than the `found` devices of this machine."""
    asked = asked_devices(run.config, run.digen, has_own_replicas=run.config.trainer.v1.trainer_mode != COLOCATED)
    total = sum(asked.values())
    require(
        total <= found,
        f"{asked_text(asked)} must be <= {found}, the devices of this machine",
        total,
        f"set trainer.n_gpus_per_node to that number{', shared by the pools' if len(asked) > 1 else ''}, or run on a "
        "Ray cluster (`ray start` on each machine, then RAY_ADDRESS=HEAD:6379 in the environment)",
    )


def check_cpus(run: StartConfig) -> None:
    """Require as many CPUs as the run's processes reserve, unless it joins a Ray cluster. Ray would wait forever."""
    declared = OmegaConf.select(run.config, CPUS_KEY, throw_on_missing=True)
    if declared is None and joins_cluster(OmegaConf.select(run.config, "ray_kwargs.ray_init.address")):
        return
    reserved = reserved_cpus(run)
    least, found = sum(reserved.values()), num_machine_cpus() if declared is None else declared
    remedy = f"set {CPUS_KEY}={least}, because Ray only counts these CPUs"
    is_number = isinstance(found, int)
    if is_number and UNITS_KEY in reserved and least - reserved[UNITS_KEY] + 1 <= found < least:
        remedy += f", or {UNITS_KEY}=1"
    require(
        is_number and found >= least,
        f"{CPUS_KEY} must be >= {least}, what Ray reserves for "
        + ", ".join(f"{key} ({number})" for key, number in reserved.items())
        + ("" if declared is not None else f", and null counts the {found} of this machine"),
        declared,
        remedy,
    )


def reserved_cpus(run: StartConfig) -> dict[str, int]:
    """CPUs that Ray reserves as long as the run lasts: the key as typed -> number. Agent loop workers, reward functions
    without devices and the servers of replicas reserve none."""
    digen = run.digen
    mode, pools = run.config.trainer.v1.trainer_mode, pool_entries(digen.reward)
    storage = run.config.transfer_queue.backend
    has_units = storage.storage_backend == "SimpleStorage"
    has_device_functions = num_function_devices(run.config) > 0 or digen.placement.reward_accelerator is not None
    reserved = {
        "trainer.nnodes x trainer.n_gpus_per_node": CPUS_PER_RANK * num_trainer_devices(run.config),
        f"{ROLLOUT}.nnodes x {ROLLOUT}.n_gpus_per_node": 0
        if mode == COLOCATED
        else CPUS_PER_REPLICA_DEVICE * num_generator_devices(run.config),
        "reward.reward_model.nnodes x reward.reward_model.n_gpus_per_node": CPUS_PER_REPLICA_DEVICE
        * num_reward_model_devices(run.config),
        "TransferQueue's controller": 1,
        UNITS_KEY: storage.SimpleStorage.num_data_storage_units if has_units else 0,
        "reward.num_workers": num_function_workers(run.config, digen.reward) if has_device_functions else 0,
        f"{FUNCTIONS}.NAME.num_workers": sum(one.pool_settings.num_workers for one in pools if not one.is_timeshared),
        f"{ENVIRONMENT_KEY}.num_workers": digen.environment.num_workers if digen.environment.is_on else 0,
    }
    return {key: number for key, number in reserved.items() if number}


def _trackers(config: DictConfig) -> list[str]:
    given = config.trainer.logger
    return [given] if isinstance(given, str) else list(given)


def check_trackers(run: StartConfig) -> None:
    """Import the packages of the trackers: verl does so when all models are loaded."""
    for name in _trackers(run.config):
        if package := PACKAGES_OF_TRACKERS.get(name, name):
            remedy = f"pip install --upgrade {package} on this machine, or take {name} out"
            with refusing("trainer.logger must name trackers whose packages can be imported", name, remedy):
                import_module(package)


def tracker_notes(config: DictConfig) -> list[str]:
    """A sentence where W&B would ask for a key once all models are loaded, where nobody can type."""
    if "wandb" not in _trackers(config) or os.getenv("WANDB_API_KEY") or os.getenv("WANDB_MODE", "online") != "online":
        return []
    logins = Path(os.getenv("NETRC", "~/.netrc")).expanduser()
    host = urlsplit(os.getenv("WANDB_BASE_URL", "https://api.wandb.ai")).hostname
    if logins.is_file() and (str(host) in (text := logins.read_text()) or "wandb" in text):
        return []
    return [
        f"trainer.logger={_trackers(config)}: no key of W&B is found on this machine, and without one the run ends "
        "once all models are loaded: `wandb login`, WANDB_API_KEY=..., or WANDB_MODE=offline"
    ]


def check_address(run: StartConfig) -> None:
    """Require a cluster that can be reached where verl's main joins one, and no settings for a new one; a new one needs
    a Python that Ray can start."""
    settings = run.config.ray_kwargs.ray_init
    if ray.is_initialized():  # a program's own
        return
    address = os.environ.get("RAY_ADDRESS") or settings.get("address")
    joins = joins_cluster(address)
    if address == "auto" or joins:
        _require_reachable(str(address or "auto"))
    rule = "the path of Python must have no blanks, because Ray starts its processes by a shell"
    require(joins or len(sys.executable.split()) == 1, rule, sys.executable, "make the environment in another folder")
    if not joins:
        _require_token()
        _require_temporary(settings.get("_temp_dir"))
    given = [f"ray_kwargs.ray_init.{key}" for key in OF_NEW_CLUSTER if settings.get(key)]
    require(
        not given or not joins,
        f"{' and '.join(given)} must be null where a run joins a Ray cluster, here by RAY_ADDRESS, an address or a "
        "cluster that runs on this machine",
        [settings[key.rpartition(".")[2]] for key in given],
        f"set {' '.join(f'{key}=null' for key in given)}, or RAY_ADDRESS=local for a run alone",
    )


def _require_token() -> None:
    home, is_given = Path.home(), bool(os.getenv("RAY_AUTH_TOKEN") or os.getenv("RAY_AUTH_TOKEN_PATH"))
    if is_given or os.getenv("RAY_AUTH_MODE", "token") != "token" or os.path.isfile(home / ".ray" / "auth_token"):
        return
    remedy = "set HOME, or RAY_AUTH_MODE=token and RAY_AUTH_TOKEN=SECRET"
    with refusing("HOME must be a folder that can be written, where Ray keeps its cluster's token", str(home), remedy):
        (home / ".ray").mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=home / ".ray").close()


def _require_temporary(given: str | None) -> None:
    folder = given or os.getenv("RAY_TMPDIR", os.getenv("TMPDIR", "/tmp"))
    rule = f"{'ray_kwargs.ray_init._temp_dir' if given else 'RAY_TMPDIR or TMPDIR'} must be a folder"
    remedy, below = "take /tmp, or another one", SOCKET.removeprefix("/ray" if given else "")
    with refusing(f"{rule} that can be written, where Ray keeps sockets and logs", folder, remedy):
        os.makedirs(folder, exist_ok=True)
        TemporaryFile(dir=folder).close()
    most = SOCKET_BYTES - len(below) - len(str(os.getpid()))
    short = f"{rule} of at most {most} bytes, because a socket's path has at most {SOCKET_BYTES}, and Ray's lie deep"
    require(len(os.fsencode(folder)) <= most, short, folder, remedy)


def _require_reachable(address: str) -> None:
    place, reason = urlsplit(address if "://" in address else f"//{address}"), ""
    try:
        if address != "auto":
            socket.create_connection((str(place.hostname), place.port or 0), CONNECT_S).close()
        elif not joins_cluster(None):
            reason = "none runs on this machine"
    except (OSError, ValueError) as error:
        reason = str(error)
    require(
        not reason,
        f"RAY_ADDRESS or ray_kwargs.ray_init.address must be HOST:PORT of a Ray cluster that answers ({reason})",
        address,
        "start it (`ray start --head`), or unset the address: the run starts Ray itself",
    )


def check_versions(run: StartConfig, found: Callable[[str], str] = installed_version) -> None:
    """Require installed packages that can work; warn where they are not those that were tested."""
    installed = {name: found(name) for name in SUPPORTED}
    refused = list(outside(installed, tested=False))
    if refused:
        raise ValueError(
            "\n".join(
                f"{name} must be {wanted}, got {number}; verl-digen was tested with {SUPPORTED[name].tested[0]}: "
                f"pip install '{name}{SUPPORTED[name].tested[0]}'"
                for name, number, wanted in refused
            )
        )
    for name, number, wanted in outside(installed, tested=True):
        logger.warning(
            "%s %s was not tested with this version of verl-digen, %s was; private names of it are used, so numbers "
            "may differ without an error: run the contract tests (tests/contracts)",
            name,
            number,
            wanted,
        )
