# SPDX-License-Identifier: Apache-2.0
"""Ranks in this process, in place of actors."""

import asyncio
from dataclasses import dataclass
from typing import Any

from verl_digen.processes.relays import Keep, Work


@dataclass(frozen=True)
class Direct:
    """A group whose methods return an awaitable for each rank, as those of verl's worker groups do."""

    group: Any

    @property
    def num_processes(self) -> int:
        raise AssertionError("only relays count processes")

    async def call(self, work: Work, keep: Keep) -> list[Any]:
        awaited = getattr(self.group, work.method)(*work.args)
        answers = await asyncio.gather(*awaited, return_exceptions=keep == "outcomes")
        return answers[:1] if keep == "first" else answers


def as_it_is(value: Any) -> Any:
    """`ray.put` for ranks in this process."""
    return value
