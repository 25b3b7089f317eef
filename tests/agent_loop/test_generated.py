# SPDX-License-Identifier: Apache-2.0
"""When a group counts as generated."""

import asyncio

from verl_digen.agent_loop.batch import GroupsBeingGenerated


def test_a_group_is_generated_once_each_of_its_samples_has_ended():
    async def run() -> None:
        groups = GroupsBeingGenerated()
        groups.ended("g", 0)  # of no group that was begun
        for uid in ("g", "h"):
            groups.begin(uid, 2)
        waiting = asyncio.create_task(groups.until_generated("g"))
        for uid, index in (("g", 1), ("g", 1), ("h", 0), ("h", 1)):  # generated, then failed when it was scored
            groups.ended(uid, index)
        await asyncio.sleep(0)
        assert not waiting.done()
        groups.ended("g", 0)
        await waiting
        await groups.until_generated("h")  # it ended before anyone waited
        groups.begin("g", 1)  # the same prompt again, in the next validation
        assert not asyncio.create_task(groups.until_generated("g")).done()

    asyncio.run(run())
