# SPDX-License-Identifier: Apache-2.0
"""Generation of a DataProto: a sample per row, returned to the caller instead of published in TransferQueue; and counts
of samples that are still generated, for both ways."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from verl import DataProto

from verl_digen.agent_loop.server_manager import DiffusionServerClient
from verl_digen.data.rows import dataproto_rows, is_validation, loop_columns, sample_indices
from verl_digen.errors import describe
from verl_digen.reward.sample_rewards import SampleRewards
from verl_digen.sampling.outputs import FinishedSample, to_dataproto
from verl_digen.types import Generation, PromptRow, SampleRequest, Score

STEP = "global_steps"
"""verl's name, in `meta_info` and in an agent loop's columns, of the optimizer step that samples are for."""


class WithConditions:
    """Client whose samples all carry their prompts' conditions; in a run one sample of each group does."""

    def __init__(self, client: DiffusionServerClient):
        self.digen = client.digen
        self._client = client

    async def generate_sample(self, request: SampleRequest) -> Generation:
        """Generate one sample by the client."""
        return await self._client.generate_sample(replace(request, wants_condition=True))


async def generate_batch(
    batch: DataProto, loop: Any, rewards: SampleRewards | None, score: Callable[..., Awaitable[tuple[Score, Any]]]
) -> DataProto:
    """Samples of the rows, in order, as `to_dataproto` has them; one that fails fails all, once all have ended.

    Args:
        batch: a sample per row, with columns as in `data.rows.loop_row` and optionally `sample_index`. `meta_info` may
            have `validate` (False without it), and `global_steps` (0 without it), which moves a MixGRPO window.
        loop: agent loop over a client `WithConditions`.
        rewards: None gives samples without rewards.

    Raises:
        ValueError: a column is missing, or the run has an environment.
    """
    if loop.digen.environment.is_on:
        raise ValueError("digen.environment.name must be left out for a DataProto: an episode has several prompts")
    rows, validate = dataproto_rows(batch), is_validation(batch)
    indices, sizes = sample_indices(rows, batch), Counter(row.uid for row in rows)
    step = batch.meta_info.get(STEP, 0)

    async def finish(row: PromptRow, index: int) -> FinishedSample:
        columns = {**loop_columns(row), STEP: step, "session_id": index}
        try:
            generation = await loop.run({"validate": validate}, **columns)
        except Exception as error:
            if rewards is not None:
                rewards.fail(row.uid, index, describe(error))
            raise
        if rewards is None:
            return FinishedSample.of(generation, row, None)
        scored, _ = await score(generation, row, sizes[row.uid], validate=validate)
        return FinishedSample.of(generation, row, scored.total)

    tasks = [asyncio.create_task(finish(row, index)) for row, index in zip(rows, indices, strict=True)]
    samples, failures = await all_ended(tasks)
    if rewards is not None:
        for uid in sizes:
            rewards.settled(uid, indices)
    if failures:
        raise failures[0]
    return to_dataproto(samples)


class GroupsBeingGenerated:
    """Count of the samples of each group that wait for a replica, so that the driver can tell when replicas may sleep.
    Groups that were not begun are ignored."""

    def __init__(self) -> None:
        self._left: dict[str, set[int]] = {}
        self._ended: dict[str, asyncio.Event] = {}

    def begin(self, uid: str, num_samples: int) -> None:
        """Expect samples 0 to `num_samples` - 1 of a group, before the first of them can end."""
        self._left[uid], self._ended[uid] = set(range(num_samples)), asyncio.Event()

    def ended(self, uid: str, index: int) -> None:
        """Note that a sample needs no replica any more: it is generated, or has failed. Idempotent."""
        if uid in self._left:
            self._left[uid].discard(index)
            if not self._left[uid]:
                self._ended[uid].set()

    async def until_generated(self, uid: str) -> None:
        """Return once all samples of the group have ended, and forget it."""
        try:
            await self._ended[uid].wait()
        finally:
            del self._left[uid], self._ended[uid]


Result = TypeVar("Result")


async def all_ended(tasks: Sequence[asyncio.Task[Result]]) -> tuple[list[Result], list[BaseException]]:
    """Wait until all tasks have ended -> results of those that succeeded, in order, and errors of those that failed."""
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    results = [one for one in ended if not isinstance(one, BaseException)]
    errors = [one for one in ended if isinstance(one, BaseException) and not isinstance(one, asyncio.CancelledError)]
    return results, errors
