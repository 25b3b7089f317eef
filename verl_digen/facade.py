# SPDX-License-Identifier: Apache-2.0
"""`RayFlowGRPOTrainer`: for pipelines that construct verl's `RayPPOTrainer` themselves and swap in a subclass."""

from __future__ import annotations

import logging
from typing import Any

from verl.single_controller.ray import RayWorkerGroup
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.v1 import get_trainer_cls

from verl_digen.agent_loop.manager import DiffusionAgentLoopManager
from verl_digen.preflight import check
from verl_digen.preflight.notes import notes
from verl_digen.require import require
from verl_digen.store.controller import close, start

logger = logging.getLogger(__name__)

DECIDED_BY = {
    "tokenizer": "the checkpoint at actor_rollout_ref.model.path brings its own",
    "processor": "the checkpoint at actor_rollout_ref.model.path brings its own",
    "role_worker_mapping": "the ranks are DiffusionWorkers",
    "resource_pool_manager": "trainer.nnodes and trainer.n_gpus_per_node, and with separate pools those of "
    "actor_rollout_ref.rollout, say which devices are taken",
    "ray_worker_group_cls": "the ranks are in verl's RayWorkerGroup",
    "train_dataset": "data.train_files names the prompts, and data.custom_cls.path and .name a class of your own",
    "val_dataset": "data.val_files names the prompts, and data.custom_cls.path and .name a class of your own",
    "collate_fn": "prompts are collated by verl's",
    "train_sampler": "data.shuffle and data.seed decide on the order",
}
"""Argument of `RayPPOTrainer` -> what decides in its place."""


class RayFlowGRPOTrainer(RayPPOTrainer):
    """`RayPPOTrainer(config)`, `init_workers()` and `fit()` over the trainer that `trainer.v1.trainer_mode` names.

    The config alone decides, as it does under `verl.trainer.main_ppo`, and is checked as there.

    Args:
        config: a composed config of verl with a recipe.
        device_name: as in verl, in place of `trainer.device`.

    Raises:
        ValueError: the rules that the config breaks, one line each; or another argument of `RayPPOTrainer` was given,
            with what decides in its place.
    """

    def __init__(
        self,
        config: Any,
        tokenizer: Any = None,
        role_worker_mapping: Any = None,
        resource_pool_manager: Any = None,
        ray_worker_group_cls: Any = RayWorkerGroup,
        processor: Any = None,
        train_dataset: Any = None,
        val_dataset: Any = None,
        collate_fn: Any = None,
        train_sampler: Any = None,
        device_name: str | None = None,
    ):
        _require_config_alone(
            tokenizer=tokenizer,
            role_worker_mapping=role_worker_mapping,
            resource_pool_manager=resource_pool_manager,
            ray_worker_group_cls=None if ray_worker_group_cls is RayWorkerGroup else ray_worker_group_cls,
            processor=processor,
            train_dataset=train_dataset,
            val_dataset=val_dataset,
            collate_fn=collate_fn,
            train_sampler=train_sampler,
        )
        if device_name is not None:
            config.trainer.device = device_name
        check(config)
        for note in notes(config):
            logger.warning("%s", note)
        # no super().__init__(): the legacy trainer's own setup is what this class replaces
        self.config = config
        config.transfer_queue.enable = True
        start(config.transfer_queue)
        self._trainer: Any = get_trainer_cls(config.trainer.v1.trainer_mode)(config=config)

    def init_workers(self) -> None:
        """Start trainer ranks, replicas and reward workers."""
        self._trainer.init()

    def fit(self) -> None:
        """Train to the end, then close TransferQueue."""
        try:
            self._trainer.fit(self._make_agent_loops())
        finally:
            close()

    def _make_agent_loops(self) -> Any:
        return DiffusionAgentLoopManager.create(  # awaited by verl's auto_await
            config=self.config,
            llm_client=self._trainer.get_llm_client(),
            teacher_client=None,
            reward_loop_worker_handles=self._trainer.get_reward_handles(),
        )


def _require_config_alone(**arguments: Any) -> None:
    given = [name for name, value in arguments.items() if value is not None]
    require(
        not given,
        "RayFlowGRPOTrainer must be given the config alone",
        ", ".join(given),
        "leave out " + "; and ".join(f"{name}: {DECIDED_BY[name]}" for name in given),
    )
