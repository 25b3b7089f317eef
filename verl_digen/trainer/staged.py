# SPDX-License-Identifier: Apache-2.0
"""verl's checkpoint engine manager for replicas that keep generating while new weights arrive, and for many processes.

An update is verl's protocol of checkpoint engines: every rank and every worker of a replica prepares, joins the group,
sends or receives, and finalizes. verl's manager calls each of them itself, which is four calls of each; here they are
called through relays (`verl_digen.processes.relays`).
"""

import asyncio
from typing import Any

import ray
from verl.checkpoint_engine import CheckpointEngineManager

from verl_digen.processes.relays import Route, Together, Work


class StagedCheckpointManager(CheckpointEngineManager):
    """verl's manager; `route` leads to the workers of the replicas, which switch to received weights within
    `load_s`."""

    def __init__(self, *args: Any, ranks: Together, route: Route, load_s: float, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._ranks, self._route, self._load_s = ranks, route, load_s

    def stage_weights(self, version: int) -> None:
        """Send the trainer's weights, as `version`, to every replica, which stages them; none pauses. RayError if a
        process died, or its call failed."""
        receivers = self._route.to([worker for replica in self.replicas for worker in replica.workers])
        asyncio.run(self._stage(version, receivers))

    async def _stage(self, version: int, receivers: Together) -> None:
        ranks = self._ranks
        everyone = Together([ranks, receivers])
        metadata = await everyone.call(Work("execute_checkpoint_engine", ("prepare",)), "all")
        topology = self.backend_cls.build_topology(ranks.num_processes, receivers.num_processes, metadata)
        joining = [
            dict(zip(arguments, values, strict=True))
            for callee, arguments in zip((ranks, receivers), topology, strict=True)
            for _, *values in zip(range(callee.num_processes), *arguments.values(), strict=True)
        ]
        join = Work("execute_checkpoint_engine", ("init_process_group",), kwargs_of=joining)
        await everyone.call(join, "first")
        await asyncio.gather(
            ranks.call(Work("update_weights", kwargs={"global_steps": version, "mode": self.backend}), "first"),
            receivers.call(Work("update_weights", kwargs={"global_steps": version}), "first"),
        )
        await everyone.call(Work("execute_checkpoint_engine", ("finalize",)), "first")

    def update_weights(self, global_steps: int | None = None) -> dict[str, Any]:  # type: ignore[override]
        """Send the trainer's weights, as version `global_steps`, and have every replica load them. RayError if a
        process died, GetTimeoutError if a replica did not load them in time."""
        assert global_steps is not None, "a weight update has a version"
        self.stage_weights(global_steps)
        ray.get([replica.server_handle.activate_weights.remote() for replica in self.replicas], timeout=self._load_s)
        return {}
