# SPDX-License-Identifier: Apache-2.0
"""Replica names and import paths of their classes. Imports none of them: they are heavy and may not be installed."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

from omegaconf import OmegaConf


@dataclass(frozen=True)
class ReplicaEntry:
    """Class names of one kind of replica, for verl's registries."""

    replica: str
    """Import path of its class."""
    sender: str
    """Import path of the trainer rank's weight sender."""

    def load(self) -> type[Any]:
        """The replica's class. ImportError if a package that it needs is not installed."""
        module, _, name = self.replica.rpartition(".")
        with kept_log_levels():  # importing vLLM-Omni changes them
            return getattr(import_module(module), name)


TRAINER = "trainer"
"""The trainer's own ranks generate, with the weights that they train."""

REPLICAS = {
    TRAINER: ReplicaEntry("verl_digen.trainer.generating.TrainerReplica", "verl_digen.rollout.replica.NoWeightsSent"),
    "diffusers": ReplicaEntry(
        "verl_digen.rollout.replica.DiffusersReplica", "verl_digen.rollout.replica.DiffusersServerAdapter"
    ),
    "vllm_omni": ReplicaEntry(
        "verl_digen.rollout.vllm_omni.server.vLLMOmniReplica",
        "verl_digen.rollout.vllm_omni.adapter.vLLMOmniServerAdapter",
    ),
}
"""`actor_rollout_ref.rollout.name` -> the replica's classes."""

GENERATOR = "digen_generator"
"""Name of the resolver that our recipes choose `rollout.name` by."""


def default_generator(*, _root_: Any) -> str:
    """Key of `REPLICAS`: the trainer's one device generates itself, unless its memory is needed in between."""
    read = partial(OmegaConf.select, _root_)  # None for what is missing, which `preflight` reports
    sections = read("digen.reward.functions"), read("digen.reward.recipe_functions")
    rewards = [reward for section in sections if isinstance(section, Mapping) for reward in section.values()]
    is_alone = (
        (read("trainer.nnodes"), read("trainer.n_gpus_per_node")) == (1, 1)
        and read("trainer.v1.trainer_mode") == "digen_colocated"
        and not read("actor_rollout_ref.actor.fsdp_config.param_offload")
        and not (read("digen.sampling.outside.fp8") or read("digen.sampling.outside.cache"))
        and not any(isinstance(reward, Mapping) and reward.get("timeshare") for reward in rewards)
    )
    return TRAINER if is_alone else "diffusers"


@contextmanager
def kept_log_levels() -> Iterator[None]:
    """Restore the levels of the root logger and its handlers after the block. One of vLLM's requirements sets them all
    to ERROR when it is imported, which would silence a run."""
    root = logging.getLogger()
    level, handlers = root.level, [(handler, handler.level) for handler in root.handlers]
    try:
        yield
    finally:
        root.setLevel(level)
        for handler, handler_level in handlers:
            handler.setLevel(handler_level)
