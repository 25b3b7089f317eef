# SPDX-License-Identifier: Apache-2.0
"""`digen_virtual`: a checkpoint engine that transfers nothing; the virtual trainer spends the publication time."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Any

from torch import Tensor
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

NAME = "digen_virtual"
"""`actor_rollout_ref.rollout.checkpoint_engine.backend`."""


class VirtualEngine(CheckpointEngine):
    """Engine without transfer; constructor and methods are verl's."""

    def __init__(self, bucket_size: int = 0, is_master: bool = False):
        pass

    def prepare(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """No-op: there is no group to join."""

    @classmethod
    def build_topology(  # pyright: ignore[reportIncompatibleMethodOverride]
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """No arguments for any rank."""
        return {}, {}

    def init_process_group(self, **kwargs: Any) -> None:
        """No-op: no group is needed."""

    def finalize(self) -> None:
        """No-op: no connection was opened."""

    async def send_weights(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, weights: Iterable[tuple[str, Tensor]], global_steps: int | None = None
    ) -> dict[str, Any]:
        """No-op: there are no weights."""
        return {}

    async def receive_weights(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, global_steps: int | None = None
    ) -> AsyncIterator[tuple[str, Tensor]]:
        """No tensors."""
        for nothing in ():
            yield nothing


CheckpointEngineRegistry.register(NAME)(VirtualEngine)  # pyright: ignore - verl's register is a static method
