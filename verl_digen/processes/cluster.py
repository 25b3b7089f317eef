# SPDX-License-Identifier: Apache-2.0
"""Ray's cluster, before the run has joined it: one that runs already, or one that the run makes of this machine; and
when a run has a fork server (`verl_digen.processes.forks`), which needs as long as the driver does to reach Ray. So
verl's main starts it from the middle of its own imports, when the config is not known yet, with the variables of recipe
`digen_cpu`; a run that has others starts a new one."""

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import ray
import yaml
from ray._private.runtime_env.constants import RAY_JOB_CONFIG_JSON_ENV_VAR
from ray._private.services import find_bootstrap_address
from ray._private.utils import get_num_cpus

from verl_digen import recipes
from verl_digen.processes.forks import ForkServer, is_fork, start

_servers: list[ForkServer] = []
"""The server of this process, if there is one."""


def joins_cluster(address: str | None) -> bool:
    """True if Ray joins a cluster that runs already; else it makes one of this machine. RAY_ADDRESS in the environment
    comes before `address`, `ray_kwargs.ray_init.address`."""
    if ray.is_initialized():
        return True
    address = os.environ.get("RAY_ADDRESS") or address
    if address in (None, "auto"):
        return find_bootstrap_address(None) is not None
    return address != "local"


def other_folder(ray_init: Mapping[str, Any]) -> str | None:
    """Folder in which the cluster that a run joins was started on this machine, where its processes read relative
    paths; None if it is this process's, not known, or the run sends a `working_dir`."""
    address = os.environ.get("RAY_ADDRESS") or ray_init.get("address")
    is_sent = "working_dir" in f"{ray_init.get('runtime_env')}{os.getenv(RAY_JOB_CONFIG_JSON_ENV_VAR)}"
    if is_sent or ray.is_initialized() or not joins_cluster(address):
        return None
    port = str(find_bootstrap_address(None) if address in (None, "auto") else address).rpartition(":")[2]
    raylets = (one.info for one in psutil.process_iter(["name", "cmdline", "cwd"]) if one.info["name"] == "raylet")
    own = re.compile(rf"--gcs-address=\S+:{re.escape(port)}\b")
    folders = {one["cwd"] for one in raylets if own.search(" ".join(one["cmdline"] or ()))}
    return None if os.getcwd() in folders else next(iter(folders), None)


def num_machine_cpus() -> int:
    """CPUs of this machine, or of its container, as Ray counts them."""
    return int(get_num_cpus(override_docker_cpu_warning=True))


def start_early() -> None:
    """Start the server if this process is verl's main with a recipe."""
    main, *words = sys.orig_argv[sys.orig_argv.index("-m") + 1 :] if "-m" in sys.orig_argv else [""]
    is_run = main == "verl.trainer.main_ppo" and not any(word.startswith("-") for word in words)
    if is_run and any(word.startswith("recipe=") for word in words) and not is_fork() and _is_alone(None):
        recipe = yaml.safe_load((Path(recipes.__path__[0]) / "digen_cpu.yaml").read_text())
        _servers.append(start(recipe["ray_kwargs"]["ray_init"]["runtime_env"]["env_vars"]))


def fork_workers(ray_init: Mapping[str, Any]) -> None:
    """Have Ray, which has not started yet, start the workers of this run as forks, where that is possible: not with an
    interpreter of the user's in `ray_init`, the arguments that it will be started with."""
    if is_fork() or ray.is_initialized():  # of a server that forks its workers too; for an earlier job
        return
    runtime_env = ray_init.get("runtime_env") or {}
    variables = runtime_env.get("env_vars") or {}
    has_own = _is_alone(ray_init.get("address")) and not runtime_env.get("py_executable")
    if _servers and not (has_own and _servers[0].variables == variables):
        _servers.pop().end()
    if has_own:
        if not _servers:
            _servers.append(start(variables))
        sys.executable = str(_servers[0].python)  # Ray starts workers with it


def _is_alone(address: str | None) -> bool:
    """True if this machine is the whole cluster and has no accelerator."""
    # Not above: `import verl` calls `start_early`, and this module must be whole by then
    from verl.plugin.platform import get_platform

    return get_platform().device_name == "cpu" and not joins_cluster(address)
