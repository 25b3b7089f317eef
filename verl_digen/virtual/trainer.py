# SPDX-License-Identifier: Apache-2.0
"""`trainer.v1.trainer_mode=digen_virtual`: the trainer of separate pools, with devices that only wait."""

from __future__ import annotations

import ray
from verl.trainer.ppo.v1.trainer_base import register_trainer

from verl_digen.trainer.disaggregated import DisaggregatedTrainer
from verl_digen.virtual.worker import VirtualWorker

NAME = "digen_virtual"
"""`trainer.v1.trainer_mode`."""


class VirtualTrainer(DisaggregatedTrainer):
    """Disaggregated trainer with one worker in place of all trainer devices."""

    _computes = False

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        for role in self.role_worker_mapping:
            self.role_worker_mapping[role] = ray.remote(VirtualWorker)

    def _device_counts(self) -> dict[str, int]:
        return {**super()._device_counts(), "trainer": self.digen.virtual.trainer_ranks}

    @property
    def _num_ranks(self) -> int:
        return self.digen.virtual.trainer_ranks


register_trainer(NAME)(VirtualTrainer)  # not as a decorator: verl's erases the class's type
