# SPDX-License-Identifier: Apache-2.0
"""Names of replicas, and where their classes are. It imports none of them: they are heavy, and one may be missing."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class ReplicaEntry:
    """A replica as verl's registries know it."""

    replica: str
    """Name of its class."""
    sender: str
    """Name of the class that sends it weights, in a trainer rank."""

    def load(self) -> type[Any]:
        """The replica's class.

        Raises:
            ImportError: what it needs is not installed.
        """
        from verl_digen.observe.log_levels import kept_log_levels

        module, _, name = self.replica.rpartition(".")
        with kept_log_levels():  # vLLM-Omni sets them while it is imported
            return getattr(import_module(module), name)


REPLICAS = {
    "diffusers": ReplicaEntry(
        "verl_digen.rollout.replica.DiffusersReplica", "verl_digen.rollout.adapter.DiffusersServerAdapter"
    ),
    "virtual": ReplicaEntry(
        "verl_digen.virtual.replica.VirtualReplica", "verl_digen.rollout.adapter.DiffusersServerAdapter"
    ),
    "vllm_omni": ReplicaEntry(
        "verl_digen.rollout.vllm_omni.replica.vLLMOmniReplica",
        "verl_digen.rollout.vllm_omni.adapter.vLLMOmniServerAdapter",
    ),
}
"""`actor_rollout_ref.rollout.name` -> its classes."""
