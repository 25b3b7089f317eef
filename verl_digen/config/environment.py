# SPDX-License-Identifier: Apache-2.0
"""Multi-turn environments: `digen.environment`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from verl_digen.config.reward import MAX_RETRIES, MAX_WORKERS
from verl_digen.require import In, check_fields, require, require_value

MAX_TURNS = 1000
"""More turns than an episode of pictures has. Catches typos."""
MAX_CONCURRENT = 1_000_000
"""More calls than a process has at the same time. Catches typos."""


@dataclass(frozen=True)
class EnvironmentConfig:
    """The environment of multi-turn samples (episodes), see `verl_digen.environments`."""

    name: str | None = None
    """Built-in environment. If `name` and `path` are null, samples are single pictures."""
    path: str | None = None
    """Your own environment: FILE.py:NAME, or package.module.NAME, on every node."""
    options: dict[str, Any] = field(default_factory=dict)
    """Settings of the environment's class, by name."""
    max_turns: Annotated[int, In(f"[1, {MAX_TURNS}]")] = 4
    """Maximum pictures of an episode. An episode that reaches it ends, trains, and counts in `episodes/exceeded`."""
    num_workers: Annotated[int, In(f"[1, {MAX_WORKERS}]")] = 1
    """Processes of environments."""
    num_gpus: float = 0.0
    """Devices per process: 0 is the CPU, 0.5 half a device."""
    concurrent: Annotated[int, In(f"[1, {MAX_CONCURRENT}]")] = 256
    """Maximum concurrent calls per process."""
    step_timeout_s: Annotated[float, In("(0, inf]")] = 60.0
    """Timeout of a call of `reset` or `step`."""
    max_retries: Annotated[int, In(f"[0, {MAX_RETRIES}]")] = 2
    """Restarts of an episode's environment after an exception, a timeout or a dead process; then the episode fails."""

    def __post_init__(self) -> None:
        key = "digen.environment"
        check_fields(self, f"{key}.")
        if self.path is not None:
            why = f"with {key}.path, which names an environment too"
            require_value(f"{key}.name", self.name, None, why, "leave one of them out")
        require(
            self.num_gpus >= 0 and (self.num_gpus <= 1 or self.num_gpus == int(self.num_gpus)),
            f"{key}.num_gpus must be 0, a share of one device, or a whole number of devices",
            self.num_gpus,
            "0 computes on the CPU",
        )

    @property
    def is_on(self) -> bool:
        """True if samples are episodes."""
        return self.target is not None

    @property
    def target(self) -> str | None:
        """The environment as named, or None."""
        return self.name if self.path is None else self.path

    @property
    def key(self) -> str:
        """The key that names it, as typed."""
        return "digen.environment.name" if self.path is None else "digen.environment.path"

    @property
    def longest_s(self) -> float:
        """Time that the environment may take in one episode without a retry."""
        return (1 + self.max_turns) * self.step_timeout_s
