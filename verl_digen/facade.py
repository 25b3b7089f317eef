# SPDX-License-Identifier: Apache-2.0
"""`RayFlowGRPOTrainer`: for pipelines that construct verl's `RayPPOTrainer` themselves and swap in a subclass."""

from __future__ import annotations

import logging
from typing import Any

from verl.trainer.ppo.ray_trainer import RayPPOTrainer

from verl_digen.agent_loop.manager import DiffusionAgentLoopManager
from verl_digen.preflight import check
from verl_digen.preflight.notes import notes
from verl_digen.store.controller import close, start
from verl_digen.trainer.colocated import ColocatedTrainer

logger = logging.getLogger(__name__)


class RayFlowGRPOTrainer(RayPPOTrainer):
    """Keeps `RayPPOTrainer(config, ...)`, `init_workers()` and `fit()`, and delegates to the v1 trainer.

    The config decides on workers, pools, datasets and tokenizers as it does under `verl.trainer.main_ppo`; the other
    constructor arguments of `RayPPOTrainer` are accepted and not used. The config is checked as recipes check it.

    Raises:
        ValueError: the rules that the config breaks, one line each.
    """

    def __init__(self, config: Any, *unused_args: Any, **unused_kwargs: Any):
        check(config)
        for note in notes(config):
            logger.warning("%s", note)
        # no super().__init__(): the legacy trainer's own setup is what this class replaces
        self.config = config
        config.transfer_queue.enable = True
        start(config.transfer_queue)
        self._trainer = ColocatedTrainer(config=config)

    def init_workers(self) -> None:
        """Start trainer ranks, replicas and reward workers."""
        self._trainer.init()

    def fit(self) -> None:
        """Train to the end, then close TransferQueue."""
        try:
            manager: Any = DiffusionAgentLoopManager.create(  # awaited by verl's auto_await
                config=self.config,
                llm_client=self._trainer.get_llm_client(),
                teacher_client=None,
                reward_loop_worker_handles=self._trainer.get_reward_handles(),
            )
            self._trainer.fit(manager)
        finally:
            close()
