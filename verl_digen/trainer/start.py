# SPDX-License-Identifier: Apache-2.0
"""Start of a run's processes: agent loop workers start while the ranks do. Importing verl takes each many seconds and
needs no replica."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from verl_digen.store.client import controller


class EarlyWorkersTrainer(PPOTrainerSync):
    """verl's trainer, whose agent loop workers start while the ranks do. verl's main makes their manager with the
    client that `get_llm_client` returns, which holds them."""

    def _init_resource_pool_mgr(self) -> None:
        # not above: an agent loop worker, which imports verl's trainers and so ours, would import its own module again
        from verl_digen.agent_loop.manager import start_workers

        self._loop_workers = start_workers(self.config.actor_rollout_ref.rollout.agent.num_workers)
        super()._init_resource_pool_mgr()

    def get_llm_client(self) -> Any:
        """verl's `get_llm_client`."""
        client: Any = super().get_llm_client()
        client.loop_workers, self._loop_workers = self._loop_workers, []
        return client


def required_processes(agent_loop_workers: Sequence[Any]) -> dict[str, Any]:
    """Processes without which the run ends and that no deadline covers, by name."""
    named = {f"agent loop worker {number}": worker for number, worker in enumerate(agent_loop_workers)}
    return {"TransferQueue's controller": controller(), **named}
