# SPDX-License-Identifier: Apache-2.0
"""Agent loop workers: run a group's samples concurrently, have each scored, publish all of the group or none of it. One
failed sample fails its group, whose status (`store.samples`) has the reason."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from tensordict import TensorDict
from verl import DataProto
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ, AgentLoopWorkerTQ

from verl_digen.agent_loop.chunks import ChunkOrder, ChunkWorker
from verl_digen.agent_loop.episode import EnvironmentAgentLoop, Episode
from verl_digen.agent_loop.server_manager import WithConditions
from verl_digen.agent_loop.single_turn import make_agent_loop
from verl_digen.config import digen_config
from verl_digen.data.rows import ROW, dataproto_rows, is_validation, loop_columns, sample_indices
from verl_digen.environments.built_in import environment_class
from verl_digen.environments.episodes import environment_pool, start_environments
from verl_digen.errors import describe, exits_as_errors
from verl_digen.observe.group_pictures import GroupPictures, is_group_logged, is_step_logged
from verl_digen.observe.images import save_pixels
from verl_digen.observe.run_files import image_path
from verl_digen.processes.actors import MAX_CALLS
from verl_digen.reward.sample_rewards import SampleRewards
from verl_digen.sampling.outputs import FinishedSample, to_dataproto
from verl_digen.sampling.requests import SINGLE_TURN, sample_request
from verl_digen.store.conditions import ConditionPair, put_condition
from verl_digen.store.keys import TRAIN, VAL, SampleName, group_number, own_condition_key
from verl_digen.store.samples import PromptStatus, publish_status, put_samples, put_tags
from verl_digen.types import (
    CHOSEN,
    Burst,
    Generation,
    PromptRow,
    RewardInput,
    SampleFacts,
    SampleRequest,
    SampleTag,
    Score,
    Trajectory,
)

logger = logging.getLogger(__name__)

STEP = "global_steps"
"""verl's name, in `meta_info` and in an agent loop's columns, of the optimizer step that samples are for."""

Result = TypeVar("Result")


@dataclass(frozen=True)
class ScoredSample:
    """One sample, generated and scored, before its group is published."""

    trajectory: Trajectory
    conditions: Mapping[str, ConditionPair]
    """Key -> conditions, positive and negative, that the sample carries: its prompt's, or its turns'."""
    tag: SampleTag


# verl decorates its worker as a Ray actor; this is the undecorated class
PlainAgentLoopWorker: Any = AgentLoopWorkerTQ.__ray_actor_class__  # pyright: ignore[reportAttributeAccessIssue]


class DiffusionAgentLoopWorker(ChunkWorker, PlainAgentLoopWorker):
    """verl's worker, with groups published atomically and pixels kept out of TransferQueue. Needs Ray and a
    TransferQueue that was started. Without `reward_loop_worker_handles` only `generate_sequences(DataProto)` works, and
    gives no rewards."""

    def __init__(self, *args: Any, **kwargs: Any):
        """Take verl's arguments; without any, wait for `connect`: replicas that it will ask may start meanwhile."""
        if args or kwargs:
            self.connect(*args, **kwargs)

    def connect(self, *args: Any, **kwargs: Any) -> None:
        """Take verl's arguments."""
        super().__init__(*args, **kwargs)
        self.digen = self.llm_client.digen
        if self.reward_loop_worker_handles is not None:
            self._rewards = SampleRewards.of_run(self.config, self.reward_loop_worker_handles, self.digen)
        is_played = self.digen.environment.is_on
        self._environments = environment_pool(self.llm_client.environments, self.digen.deadlines) if is_played else None
        self._run_dir = Path(self.config.trainer.default_local_dir)
        self._group_pictures = GroupPictures(self._run_dir)
        self._generating, self._scoring = {}, {}

    async def generate_sequences(self, batch: TensorDict | DataProto) -> DataProto | None:
        """Generate samples in one of verl's two forms.

        A TensorDict of prompts: their groups are begun, None is returned at once, and they go to TransferQueue when
        they are finished.

        A DataProto of samples, one per row, in order: the columns of `to_dataproto` once all are finished, with
        `rm_scores` if the worker has handles of reward workers; one that fails fails all, once all have ended. It has
        columns as in `data.rows.loop_row` and optionally `sample_index`. Its `meta_info` may have `validate` (False
        without it), and `global_steps` (0 without it), which moves a MixGRPO window. ValueError: a column is missing,
        or the run has an environment.
        """
        if not isinstance(batch, DataProto):
            return await super().generate_sequences(batch)
        if self.digen.environment.is_on:
            raise ValueError("digen.environment.name must be left out for a DataProto: an episode has several prompts")
        rows, validate, step = dataproto_rows(batch), is_validation(batch), batch.meta_info.get(STEP, 0)
        indices, sizes = sample_indices(rows, batch), Counter(row.uid for row in rows)
        rewards = None if self.reward_loop_worker_handles is None else self._rewards
        client = WithConditions(self.llm_client)

        async def finish(row: PromptRow, index: int) -> FinishedSample:
            try:
                generation: Any = await self._generate(client, row, index, step, validate=validate)
            except (Exception, asyncio.CancelledError) as error:  # an agent loop of the user's may raise that one, too
                if rewards is not None:
                    rewards.fail(row.uid, index, describe(error))
                raise
            if rewards is None:
                return FinishedSample.of(generation, row, None)
            scored, _ = await self._score(generation, row, sizes[row.uid], validate=validate)
            return FinishedSample.of(generation, row, scored.total)

        tasks = [asyncio.create_task(finish(row, index)) for row, index in zip(rows, indices, strict=True)]
        samples, failures = await all_ended(tasks)
        if rewards is not None:
            for uid in sizes:
                rewards.settled(uid, indices)
        if failures:
            raise failures[0]
        return to_dataproto(samples)

    async def _run_prompt(
        self, prompt: dict[str, Any], sampling_params: dict[str, Any], trajectory: dict[str, Any], trace: bool = False
    ) -> None:
        """Generate, score and publish a whole group; on any failure publish the reason instead."""
        row: PromptRow = prompt[ROW]
        uid, validate, step = row.uid, trajectory["validate"], prompt[STEP]
        partition = VAL if validate else TRAIN
        num_samples = self.rollout_config.val_kwargs.n if validate else self.rollout_config.n
        generating = [
            asyncio.create_task(self._generate(self.llm_client, row, index, step, validate=validate))
            for index in range(num_samples)
        ]
        telling = asyncio.create_task(self._tell_generated(partition, uid, generating))
        tasks = [
            asyncio.create_task(self._finish_generated(generated, row, index, step, validate=validate))
            for index, generated in enumerate(generating)
        ]
        samples, failures = await all_ended(tasks)
        self._rewards.settled(uid, range(num_samples))
        try:
            await telling
            if not failures:
                await self._publish(uid, partition, samples, step)
        except Exception as error:  # the prompt must reach a final status, or the trainer waits forever
            failures = [error]
        if failures:
            logger.debug(
                "group %s failed: %d of %d samples, first with", uid, len(failures), num_samples, exc_info=failures[0]
            )
        await publish_status(partition, uid, PromptStatus.failed(failures) if failures else PromptStatus("finished"))

    async def _tell_generated(self, partition: str, uid: str, generating: Sequence[asyncio.Task[Any]]) -> None:
        """Publish, where the driver asks for it, that no sample of the group waits for a replica any more; to be
        awaited before the group's last status."""
        if self.digen.reward.timeshared:
            await asyncio.wait(generating)
            await publish_status(partition, uid, PromptStatus("running", is_generated=True))

    async def _generate(
        self, client: Any, row: PromptRow, index: int, step: int, *, validate: bool
    ) -> Generation | Episode:
        """One sample by the run's agent loop, which requests it from `client`."""
        columns = {**loop_columns(row), STEP: step, "session_id": index}
        with exits_as_errors():
            return await self._make_loop(client).run({"validate": validate}, **columns)

    async def _finish_generated(
        self, generated: asyncio.Task[Generation | Episode], row: PromptRow, index: int, step: int, *, validate: bool
    ) -> ScoredSample:
        """Score one sample once it is generated. If it fails, so do the samples of its group that wait for it."""
        try:
            return await self._finish(await generated, row, step, validate=validate)
        except (Exception, asyncio.CancelledError) as error:  # as in `generate_sequences`
            self._rewards.fail(row.uid, index, describe(error))
            raise

    async def _finish(self, output: Generation | Episode, row: PromptRow, step: int, *, validate: bool) -> ScoredSample:
        """Score one generation, or one episode by its last picture too, and save its picture where that is wanted."""
        episode = output if isinstance(output, Episode) else None
        generation = output.generation if isinstance(output, Episode) else output
        facts = generation.trajectory.facts
        group_size = self.rollout_config.val_kwargs.n if validate else self.rollout_config.n
        score, scored = await self._score(generation, row, group_size, validate=validate)
        score = score if episode is None else episode.scored(score)
        tag = SampleTag(
            facts=replace(facts, condition_key=self._condition_key(facts)),
            reward=score.total,
            parts=score.parts,
            prompt=row.text,
            data_source=row.data_source,
            generated=(generation.started_s, generation.ended_s),
            scored=scored,
            calls=score.calls,
            episode=None if episode is None else episode.facts,
        )
        if validate and facts.sample_index == 0 and row.index < self.digen.num_logged_images:
            path = image_path(self._run_dir, step, row.uid)
            await asyncio.to_thread(save_pixels, generation.pixels, path, row.images, generation.audio)
        if not validate and self._shows_group(step, row.uid):
            shown = step, row.uid, facts.sample_index, score.total, generation.pixels, row.images, generation.audio
            await asyncio.to_thread(self._group_pictures.offer, *shown)
        conditions: Mapping[str, ConditionPair] = {} if episode is None else episode.conditions
        if generation.condition is not None:
            conditions = {tag.facts.condition_key: (generation.condition, generation.negative_condition)}
        return ScoredSample(generation.trajectory, conditions, tag)

    def _shows_group(self, step: int, uid: str) -> bool:
        """True if the best and the worst sample of the training group `uid` are saved."""
        if not is_step_logged(self.digen, step):
            return False
        num_prompts = self.config.data.train_batch_size
        return is_group_logged(self.digen, step=step, number=group_number(uid), num_prompts=num_prompts)

    def _condition_key(self, facts: SampleFacts) -> str:
        """Key of its prompt's conditions; the driver knows its own prompts' keys, and so when each is unused. A
        custom agent loop may rewrite a prompt: its groups share no conditions."""
        is_own = self.rollout_config.agent.default_agent_loop != SINGLE_TURN
        return own_condition_key(facts.uid, facts.condition_key) if is_own else facts.condition_key

    async def _score(
        self, generation: Generation, row: PromptRow, group_size: int, *, validate: bool
    ) -> tuple[Score, tuple[float, float]]:
        """Have the rewards score the sample -> (score, (start, end) in unix time). Pixels are sent only to them."""
        facts = generation.trajectory.facts
        if self.digen.trains_pairs and not validate:
            now_s, is_chosen = time.time(), facts.sample_index == CHOSEN
            return Score(float(is_chosen), {}, ()), (now_s, now_s)
        row, index = replace(row, uid=facts.uid), facts.sample_index
        pixels, latents = generation.pixels.numpy(), generation.latents
        sample = RewardInput(pixels, row, index, is_validation=validate, latents=latents, audio=generation.audio)
        return await self._rewards.score(sample, version=facts.version, group_size=group_size)

    async def _publish(self, uid: str, partition: str, samples: list[ScoredSample], step: int) -> None:
        """Put the group's rows, and its prompt's conditions once, into TransferQueue."""
        if partition == VAL:  # not trained: tags are enough
            await put_tags(VAL, {_key(sample): sample.tag for sample in samples}, step)
            return
        versions = {
            version for sample in samples for version in (sample.tag.facts.version, sample.tag.facts.last_version)
        }
        if len(versions) != 1:
            raise RuntimeError(f"group {uid} was generated under weight versions {sorted(versions)}; it must be one")
        await self._publish_rows(samples, step)

    async def _publish_rows(self, samples: Sequence[ScoredSample], step: int) -> None:
        """Put trajectories, and the prompt's conditions if one of the samples carries them, into TransferQueue."""
        rows = {_key(sample): (sample.trajectory, sample.tag) for sample in samples}
        conditions = [put_condition(key, *pair) for sample in samples for key, pair in sample.conditions.items()]
        await asyncio.gather(put_samples(rows, step), *conditions)

    async def prepare_assist(self, order: ChunkOrder, server: Any | None) -> tuple[SampleRequest, ...]:
        """Requests for the trainer's ranks to generate; the prompt's conditions are in TransferQueue on return.
        `server`: the replica that encodes the prompt, None if it was encoded for an earlier chunk. ValueError: the
        encoder refuses the prompt."""
        requests = tuple(
            sample_request(self.digen, order.row, index, step=order.step, validate=False) for index in order.samples
        )
        if server is not None:
            await put_condition(requests[0].condition_key, *await server.encode.remote(requests[0]))
        return requests

    def _make_loop(self, client: Any) -> Any:
        """Make the run's agent loop, which requests samples from `client`."""
        if self._environments is None:
            return make_agent_loop(self.rollout_config.agent.default_agent_loop, self, client)
        edits = environment_class(self.digen.environment).edits
        return EnvironmentAgentLoop(client, self._environments, edits=edits)

    def _burst_of(self, order: ChunkOrder) -> Burst | None:
        """All samples of a chunk reach the replica together; None with an environment or a custom agent loop."""
        is_single = self.rollout_config.agent.default_agent_loop == SINGLE_TURN and self._environments is None
        return Burst(str(order.chunk_id), len(order.samples)) if is_single else None


DiffusionAgentLoopWorkerBase = DiffusionAgentLoopWorker
"""The RFC's name of the class before `ray.remote`, which the manager applies."""


async def all_ended(tasks: Sequence[asyncio.Task[Result]]) -> tuple[list[Result], list[BaseException]]:
    """Wait until all tasks have ended -> results of those that succeeded, in order, and errors of those that failed."""
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    results = [one for one in ended if not isinstance(one, BaseException)]
    errors = [one for one in ended if isinstance(one, BaseException)]
    return results, errors


def _key(sample: ScoredSample) -> str:
    return SampleName.of(sample.tag.facts).key


class DiffusionAgentLoopManager(AgentLoopManagerTQ):
    """verl's manager with `DiffusionAgentLoopWorker`s (`rollout.agent.agent_loop_manager_class`)."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.agent_loop_workers_class = ray.remote(DiffusionAgentLoopWorker)
        digen = digen_config(self.config)
        if digen.environment.is_on:
            self.llm_client.environments = tuple(start_environments(self.config, digen))  # type: ignore[attr-defined]

    async def _init_agent_loop_workers(self) -> None:
        """Connect the workers that have started already; start them if there are none."""
        client: Any = self.llm_client
        self.agent_loop_workers, client.loop_workers = [*client.loop_workers], ()
        if not self.agent_loop_workers:
            return await super()._init_agent_loop_workers()
        parts = self.config, client, self.teacher_client, self.reward_loop_worker_handles
        await asyncio.gather(*(worker.connect.remote(*parts) for worker in self.agent_loop_workers))


def start_workers(count: int) -> list[Any]:
    """Start workers on all nodes in turn, as verl does, that wait for `connect`."""
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) > 0]
    return [
        ray.remote(DiffusionAgentLoopWorker)
        .options(
            name=f"agent_loop_worker_{number}_{uuid4().hex[:8]}",
            max_concurrency=MAX_CALLS,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=nodes[number % len(nodes)], soft=True),
        )
        .remote()
        for number in range(count)
    ]
