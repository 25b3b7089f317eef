# SPDX-License-Identifier: Apache-2.0
"""Calls of other nodes and processes at a run's start. They import this module, so it imports no trainer."""

import gc
import logging
import os
from collections.abc import Sequence
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.plugin.platform import get_platform

from verl_digen.config.pool_sizes import num_generator_devices, num_trainer_devices
from verl_digen.errors import RunStopped
from verl_digen.models.locate import locate

logger = logging.getLogger(__name__)


def fetch_on_all_nodes(config: Any, *, is_disaggregated: bool) -> None:
    """Have every node with devices fetch the checkpoint, or find its folder, before the first process that loads it
    starts: ranks and replicas wait for one another with bounds that a download on one node would let pass on all.

    RunStopped, with a node that has it not and why, if those that have it have fewer devices than the ranks and
    replicas that load it.
    """
    path, use_shm = os.path.expanduser(config.actor_rollout_ref.model.path), config.actor_rollout_ref.model.use_shm
    num_devices = num_trainer_devices(config) + (num_generator_devices(config) if is_disaggregated else 0)
    device, here = get_platform().ray_resource_name(), ray.get_runtime_context().get_node_id()
    nodes = [node for node in ray.nodes() if node["Alive"] and device in node["Resources"]]
    logger.info("%d nodes look for %s, or download it", len(nodes), path)
    asked = {
        node["NodeID"]: ray.remote(num_cpus=0)(problem_here)
        .options(scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node["NodeID"], soft=False))
        .remote(path, use_shm)
        for node in nodes
        if node["NodeID"] != here
    }
    problems = {here: problem_here(path, use_shm=use_shm)} if len(asked) < len(nodes) else {}
    problems |= {node_id: ray.get(answer) for node_id, answer in asked.items()}
    lacking = [node for node in nodes if problems[node["NodeID"]]]
    if not lacking:
        return
    rule = (
        f"actor_rollout_ref.model.path must be there on the nodes that load it, got {path!r}, which {len(lacking)} of "
        f"{len(nodes)} nodes with devices lack, e.g. {lacking[0]['NodeManagerAddress']} "
        f"({problems[lacking[0]['NodeID']]}); put it on a shared file system, or give a repository of the hub"
    )
    if sum(node["Resources"][device] for node in nodes if node not in lacking) < num_devices:
        raise RunStopped(rule)
    logger.warning("%s, if Ray places a process of this run there", rule)


def problem_here(path: str, use_shm: bool) -> str | None:
    """Fetch the checkpoint to this node -> None, or why it cannot be had."""
    try:
        folder = locate(path, use_shm=use_shm)
    except (ValueError, OSError) as error:
        return str(error)
    return None if folder.is_dir() else "no such folder"


def keep_for_good(processes: Sequence[Any]) -> None:
    """Exempt everything that this process and these Ray actors hold now from the garbage collector. RayActorError if
    one died.

    The modules and the model of a process are half a million objects. From time to time the collector looks through all
    of them and finds nothing: 0.28 s each time (measured). With 7,700 samples a step that is every second or third
    step, and a rank that pauses holds up all others. Afterwards it takes 6 ms at most.
    """
    calls = [process.__ray_call__.remote(_keep) for process in processes]
    _keep()
    ray.get(calls)


def _keep(actor: Any = None) -> None:
    gc.collect()
    gc.freeze()
