# SPDX-License-Identifier: Apache-2.0
"""The processes of a run: the project's own agent loop worker, and models of those that hold a device.

| process | what is real | what is modelled |
| --- | --- | --- |
| agent | `DiffusionAgentLoopWorker`: chunks, scoring, publication, validation | its constructor |
| server | `RequestBatcher`, what a sample records | denoising takes time; weights are the number of a commit |
| engine | which server it tells of new weights | the transfer |
| reward | | a score, which is a function of the sample |
| rank | the fragment it is given | the gradient is the list of groups |
| queue | the calls | a dictionary |
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.chaos.checks import Checks, reward_of
from tests.chaos.processes import Cluster, Handle, Reference
from tests.chaos.samples import BlankSamples
from verl_digen.agent_loop.manager import DiffusionAgentLoopWorker
from verl_digen.agent_loop.server_manager import DiffusionServerClient
from verl_digen.algorithms.rows import Plain
from verl_digen.config import DigenConfig, RewardConfig
from verl_digen.engine.fragment import FragmentSpec
from verl_digen.processes.bundles import outcomes
from verl_digen.reward.manager import RewardProcess
from verl_digen.reward.sample_rewards import SHARED, SampleRewards
from verl_digen.rollout.batcher import RequestBatcher
from verl_digen.rollout.replica import ReplicaHandle
from verl_digen.sampling.requests import SINGLE_TURN
from verl_digen.store.keys import CONDITIONS
from verl_digen.types import Generation, PartScore, PromptRow, RewardCall, RewardInput, SampleRequest

DENOISE_S, ANSWER_S, SCORE_S, TRAIN_S, COMMIT_S, LOAD_S = 2.0, 0.1, 0.5, 1.5, 0.5, 1.0
"""Mean times of device work, in s."""


class Queue:
    """TransferQueue: partition -> key -> tag."""

    def __init__(self) -> None:
        self.partitions: dict[str, dict[str, dict[str, Any]]] = {}

    def put(self, partition: str, keys: Sequence[str], tags: Sequence[Mapping[str, Any]]) -> None:
        rows = self.partitions.setdefault(partition, {})
        for key, tag in zip(keys, tags, strict=True):
            rows[key] = {**rows.get(key, {}), **tag}

    def list(self, partition: str) -> dict[str, dict[str, Any]]:
        return {key: dict(tag) for key, tag in self.partitions.get(partition, {}).items()}

    def clear(self, partition: str, keys: Sequence[str]) -> None:
        for key in keys:
            self.partitions.get(partition, {}).pop(key, None)


class QueueClient:
    """The functions of the module `transfer_queue` that a run calls."""

    def __init__(self, cluster: Cluster, handle: Handle):
        self._cluster, self._handle = cluster, handle
        self._blocking: Reference | None = None

    def cancel_calls(self) -> None:
        """Counterpart of `verl_digen.store.client.cancel_calls`."""
        if self._blocking is not None:
            self._blocking.answer.cancel()

    def _get(self, reference: Reference) -> Any:
        self._blocking = reference
        try:
            return self._cluster.get(reference)
        except asyncio.CancelledError as error:
            raise CancelledError from error
        finally:
            self._blocking = None

    async def async_kv_put(self, key: str, partition_id: str, fields: Any = None, tag: Any = None) -> None:
        await self._handle.put.remote(partition_id, [key], [tag or {}])

    async def async_kv_batch_put(self, keys: Any, partition_id: str, fields: Any = None, tags: Any = None) -> None:
        await self._handle.put.remote(partition_id, list(keys), tags or [{} for _ in keys])

    def kv_batch_put(self, keys: Any, partition_id: str, fields: Any = None, tags: Any = None) -> None:
        self._get(self._handle.put.remote(partition_id, list(keys), tags or [{} for _ in keys]))

    def kv_clear(self, keys: Any, partition_id: str) -> None:
        self._get(self._handle.clear.remote(partition_id, list(keys)))

    async def async_kv_clear(self, keys: Any, partition_id: str) -> None:
        await self._handle.clear.remote(partition_id, list(keys))

    def kv_list(self, partition_id: str) -> dict[str, dict[str, Any]]:
        return {partition_id: self._get(self._handle.list.remote(partition_id))}


class Server:
    """A replica's server. Its weights are a number: the commit after which they were sent."""

    def __init__(
        self,
        cluster: Cluster,
        name: str,
        digen: DigenConfig,
        samples: BlankSamples,
        checks: Checks,
        *,
        version: int = 0,
    ):
        self._cluster, self._name, self._samples, self._checks = cluster, name, samples, checks
        self._batcher = RequestBatcher(
            self._denoise, max_batch_size=digen.rollout.batch_size, wait_s=digen.rollout.batch_wait_s
        )
        self._weights = self._version = version
        self._sealed_version: int | None = None
        self._staged: dict[str, int] = {}
        self._sealed: dict[str, int] = {}
        self._num_batches = 0

    async def generate_all(self, requests: Sequence[SampleRequest]) -> list[Any]:
        return await outcomes([self._batcher.submit(request) for request in requests])

    async def _denoise(
        self, requests: Sequence[SampleRequest], should_stop: Callable[[], bool]
    ) -> Awaitable[list[Generation | ValueError]]:
        began_s, version, weights = self._cluster.loop.time(), self._version, self._weights
        self._num_batches += 1
        await asyncio.sleep(self._cluster.draw_s(DENOISE_S, self._name, "denoise", self._num_batches))
        for request in requests:
            self._checks.on_trajectory(request.uid, label=version, first=weights, last=self._weights)
        made: list[Generation | ValueError] = [
            self._samples.make(request, (version, self._version), began_s) for request in requests
        ]
        return self._arrived(made)

    async def _arrived(self, made: list[Generation | ValueError]) -> list[Generation | ValueError]:
        """The answers, which come to the host while the next batch runs."""
        await asyncio.sleep(self._cluster.draw_s(ANSWER_S, self._name, "answer", self._num_batches))
        return made

    async def abort_request(self, request_id: str) -> None:
        uid, _, index = request_id.rpartition("_")
        self._batcher.withdraw(uid, int(index))

    async def encode(self, request: SampleRequest) -> Any:
        return self._samples.conditions(request)

    async def begin_update(self, tensors: dict[str, int]) -> None:
        self._staged |= tensors

    async def seal_update(self, version: int, num_tensors: int) -> None:
        if not self._staged and version == self._sealed_version:
            return
        staged, self._staged = self._staged, {}
        if len(staged) != num_tensors:
            raise RuntimeError(f"{num_tensors} tensors were sent but {len(staged)} arrived")
        self._sealed, self._sealed_version = staged, version

    async def activate_weights(self) -> int:
        async with self._batcher.exclusive():
            if not self._sealed and self._version == self._sealed_version:
                return self._version
            self._num_batches += 1
            await asyncio.sleep(self._cluster.draw_s(LOAD_S, self._name, "load", self._num_batches))
            sealed, self._sealed = self._sealed, {}
            if not sealed:
                raise RuntimeError("no weight update is waiting to be taken; seal one first")
            assert self._sealed_version is not None
            self._weights, self._version = sealed["weights"], self._sealed_version
        return self._version

    async def check_health(self) -> dict[str, Any]:
        update = {"load_s": 0.0, "drain_s": 0.0}
        cache = {"hits": 0, "misses": 1}
        return {
            "version": self._version,
            "received_version": self._sealed_version,
            "prompt_cache": cache,
            "last_update": update,
        }


class Engine:
    """A worker of the checkpoint engine, which passes weights on to its replica's server."""

    def __init__(self, server_name: str, blip_s: float):
        self._server = ReplicaHandle(server_name, blip_s)

    async def update_weights(self, version: int, weights: int) -> None:
        await self._server.call("begin_update", {"weights": weights})
        await self._server.call("seal_update", version, 1)


class Reward(RewardProcess):
    """A reward worker."""

    def __init__(self, cluster: Cluster, name: str):
        self._cluster, self._name, self._num_scored = cluster, name, 0

    async def score_one(self, names: Sequence[str], samples: Sequence[RewardInput]) -> dict[str, list[PartScore]]:
        self._num_scored += 1
        began_s = self._cluster.loop.time()
        await asyncio.sleep(self._cluster.draw_s(SCORE_S, self._name, self._num_scored))
        call = RewardCall("known", began_s, self._cluster.loop.time(), 1, 0)
        (name,) = names
        return {name: [PartScore(reward_of(int(one.pixels.flat[0])), {}, call) for one in samples]}


class Judge(RewardProcess):
    """A worker of a reward of whole groups."""

    def __init__(self, cluster: Cluster, name: str, checks: Checks):
        self._cluster, self._name, self._checks, self._num_scored = cluster, name, checks, 0

    async def score_one(self, names: Sequence[str], group: Sequence[RewardInput]) -> dict[str, list[PartScore]]:
        self._num_scored += 1
        began_s = self._cluster.loop.time()
        await asyncio.sleep(self._cluster.draw_s(SCORE_S, self._name, self._num_scored))
        uids, indices = {sample.row.uid for sample in group}, [sample.sample_index for sample in group]
        is_whole = len(uids) == 1 and indices == [*range(len(group))]
        self._checks.require(is_whole, "mixed", f"samples {indices} of {uids} are compared")
        call = RewardCall(COMPARED, began_s, self._cluster.loop.time(), len(group), 0)
        return {COMPARED: [PartScore(1.0, {}, call) for _ in group]}


COMPARED = "diversity"
"""The reward of groups, which only watches."""


class Agent(DiffusionAgentLoopWorker):
    """The project's agent loop worker, made without verl's constructor, which reads a model's tokenizer."""

    def __init__(
        self,
        client: DiffusionServerClient,
        digen: DigenConfig,
        rewards: Sequence[Handle],
        judges: Sequence[Handle],
        group_size: int,
    ):
        self.llm_client, self.digen = client, digen
        loops = SimpleNamespace(default_agent_loop=SINGLE_TURN)
        self.rollout_config = SimpleNamespace(n=group_size, val_kwargs=SimpleNamespace(n=1), agent=loops)
        handles = {SHARED: rewards, **({COMPARED: judges} if judges else {})}
        weights = {"known": 1.0, **({COMPARED: 0.0} if judges else {})}
        named = RewardConfig({COMPARED: 0.0})
        self._rewards = SampleRewards(handles, weights, replace(digen, reward=named))
        self.config, self.tools = SimpleNamespace(data=None), []
        self.tokenizer = self.processor = self.hf_model_type = self.dataset_cls = None
        self._environments = None
        self._run_dir = Path("unused")
        self._generating, self._scoring = {}, {}

    async def validate(self, uid: str, step: int) -> None:
        """Generate and score one prompt of the validation set, in the background, as verl's `generate_sequences`."""
        prompt = {"row": prompt_row(uid), "agent_name": SINGLE_TURN, "global_steps": step}
        self._task = asyncio.create_task(self._run_prompt(prompt, {}, {"validate": True}))


class Rank:
    """A trainer rank. Its gradient is the list of groups that it accumulated; its weights are its number of commits."""

    def __init__(
        self, cluster: Cluster, number: int, num_ranks: int, queue: Queue, samples: BlankSamples, checks: Checks
    ):
        self._cluster, self._number, self._num_ranks = cluster, number, num_ranks
        self._queue, self._samples, self._checks = queue, samples, checks
        self.num_commits = 0
        self.is_open = False
        self._uids: list[str] = []
        self._num_works: Counter[str] = Counter()
        self._doing = ""

    @property
    def holds_gradient(self) -> bool:
        """True if the open batch has accumulated something."""
        return self.is_open and bool(self._uids)

    async def _work(self, what: str, mean_s: float) -> None:
        """Take a time. Fails if the rank is busy: ranks meet in collectives, so their order matters."""
        self._checks.require(not self._doing, "duplicated", f"a rank is asked to {what} while it does {self._doing}")
        self._doing = what
        self._num_works[what] += 1
        try:
            await asyncio.sleep(self._cluster.draw_s(mean_s, "rank", self._number, what, self._num_works[what]))
        finally:
            self._doing = ""

    async def begin(self, num_samples: int, num_rows: int, partition: str, scale: float | None) -> None:
        if self.is_open:
            raise RuntimeError("a logical batch is open already")
        self.is_open, self._uids, self._partition = True, [], partition

    async def accumulate(self, fragment: FragmentSpec) -> dict[str, float]:
        if not self.is_open:
            raise RuntimeError("no logical batch is open")
        rows, conditions = (self._queue.partitions.get(name, {}) for name in (self._partition, CONDITIONS))
        groups: dict[str, list[tuple[int, int]]] = {}
        for sample in fragment.samples:
            self._checks.require(sample.key in rows, "lost", f"no row {sample.key} when it is trained")
            found = sample.facts.condition_key in conditions
            self._checks.require(found, "lost", f"no conditions of {sample.facts.uid} when it is trained")
            groups.setdefault(sample.facts.uid, []).append((sample.facts.sample_index, sample.facts.version))
        self._checks.on_fragment(self.num_commits, groups)
        self._uids += groups
        await self._work("accumulate", TRAIN_S)
        return {"accumulate_s": TRAIN_S}

    async def assist(self, requests: tuple[SampleRequest, ...], version: int) -> list[tuple[str, Reference]]:
        began_s, weights = self._cluster.loop.time(), self.num_commits
        conditions = self._queue.partitions.get(CONDITIONS, {})
        for request in requests:
            self._checks.require(request.condition_key in conditions, "lost", f"no conditions of {request.uid}")
        await self._work("assist", DENOISE_S)
        groups: dict[str, list[Generation]] = {}
        for number, request in enumerate(requests):
            self._checks.on_trajectory(request.uid, label=version, first=weights, last=self.num_commits)
            if number % self._num_ranks == self._number:
                made = self._samples.make(request, (version, version), began_s)
                groups.setdefault(request.uid, []).append(made)
        return [(uid, self._cluster.put(found)) for uid, found in groups.items()]

    async def commit(self, more: bool) -> Plain:
        if not self.is_open:
            raise RuntimeError("no logical batch is open")
        await self._work("commit", COMMIT_S)
        self._checks.on_commit(self._number, self.num_commits, self._uids)
        self.is_open = False
        self.num_commits += 1
        return {}

    async def abort(self) -> None:
        self.is_open = False

    async def update_weights(self, version: int) -> int:
        """Return the weights that are sent as `version`."""
        await self._work("update_weights", COMMIT_S)
        return self.num_commits


class RankGroup:
    """verl's worker group, as far as a run calls it: every method is called on all ranks."""

    def __init__(self, handles: Sequence[Handle]):
        self.workers = list(handles)

    def __getattr__(self, method: str) -> Callable[..., list[Reference]]:
        if method.startswith("_"):
            raise AttributeError(method)
        return lambda *args: [getattr(handle, method).remote(*args) for handle in self.workers]


def prompt_row(uid: str) -> PromptRow:
    """A prompt of the data set; some have equal texts."""
    return PromptRow(f"text {int(uid[-1]) % 3}", "chaos", None, uid=uid)
