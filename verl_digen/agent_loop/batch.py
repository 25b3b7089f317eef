# SPDX-License-Identifier: Apache-2.0
"""Generation of a DataProto: a sample per row, returned to the caller instead of published in TransferQueue."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from verl import DataProto

from verl_digen.agent_loop.server_manager import DiffusionServerClient
from verl_digen.config import DigenConfig
from verl_digen.data.rows import dataproto_rows, is_validation, sample_indices
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
    batch: DataProto,
    digen: DigenConfig,
    generate: Callable[..., Awaitable[Any]],
    rewards: SampleRewards | None,
    score: Callable[..., Awaitable[tuple[Score, Any]]],
) -> DataProto:
    """Samples of the rows, in order, as `to_dataproto` has them; one that fails fails all, once all have ended.

    Args:
        batch: a sample per row, with columns as in `data.rows.loop_row` and optionally `sample_index`. `meta_info` may
            have `validate` (False without it), and `global_steps` (0 without it), which moves a MixGRPO window.
        generate: (row, index, step, validate) -> the sample, of a client `WithConditions`.
        rewards: None gives samples without rewards.

    Raises:
        ValueError: a column is missing, or the run has an environment.
    """
    if digen.environment.is_on:
        raise ValueError("digen.environment.name must be left out for a DataProto: an episode has several prompts")
    rows, validate = dataproto_rows(batch), is_validation(batch)
    indices, sizes = sample_indices(rows, batch), Counter(row.uid for row in rows)
    step = batch.meta_info.get(STEP, 0)

    async def finish(row: PromptRow, index: int) -> FinishedSample:
        try:
            generation = await generate(row, index, step, validate=validate)
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


Result = TypeVar("Result")


async def all_ended(tasks: Sequence[asyncio.Task[Result]]) -> tuple[list[Result], list[BaseException]]:
    """Wait until all tasks have ended -> results of those that succeeded, in order, and errors of those that failed."""
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    results = [one for one in ended if not isinstance(one, BaseException)]
    errors = [one for one in ended if isinstance(one, BaseException) and not isinstance(one, asyncio.CancelledError)]
    return results, errors
