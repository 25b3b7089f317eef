# SPDX-License-Identifier: Apache-2.0
"""Agent loop workers whose processes start while the trainer's ranks do, in place of after them: importing verl takes
each process many seconds, and nothing of it needs a replica.

    _init_resource_pool_mgr     processes start, and import
    get_llm_client              verl's main makes the manager of agent loops with this client, which holds them
"""

from __future__ import annotations

from typing import Any

from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync


class EarlyWorkersTrainer(PPOTrainerSync):
    """See the module."""

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
