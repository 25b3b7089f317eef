# SPDX-License-Identifier: Apache-2.0
"""verl's checkpoint engine manager for replicas that keep generating while new weights arrive.

stage_weights(v)       send to every replica, which stages them; no replica pauses
activate_weights()     of a replica's server: load between two trajectories, at the conductor's request
update_weights(v)      both, on all replicas: before the first step, and around a validation with averaged weights
"""

from __future__ import annotations

from typing import Any

import ray
from verl.checkpoint_engine import CheckpointEngineManager


class StagedCheckpointManager(CheckpointEngineManager):
    """verl's manager; `load_s` is the timeout for the replicas' switch to weights that they have received."""

    def __init__(self, *args: Any, load_s: float, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._load_s = load_s

    def stage_weights(self, version: int) -> None:
        """Send the trainer's weights, as `version`, to every replica."""
        _: Any = super().update_weights(version)  # verl awaits it by itself

    def update_weights(self, global_steps: int | None = None) -> dict[str, Any]:  # type: ignore[override]
        """Send the trainer's weights, as version `global_steps`, and have every replica load them.

        Raises:
            RayError: a process died; GetTimeoutError: a replica did not load them in time.
        """
        assert global_steps is not None, "a weight update has a version"
        self.stage_weights(global_steps)
        ray.get([replica.server_handle.activate_weights.remote() for replica in self.replicas], timeout=self._load_s)
        return {}

    async def abort_replicas(self, reject_request: bool = False) -> None:  # type: ignore[override]
        """No-op: generation continues."""

    async def resume_generation_replicas(self) -> None:  # type: ignore[override]
        """No-op: generation was not paused."""
