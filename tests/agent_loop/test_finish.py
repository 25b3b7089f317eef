# SPDX-License-Identifier: Apache-2.0
"""Tags that a worker makes of generated and scored samples."""

import asyncio
import wave
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from verl import DataProto

from tests.agent_loop.worker import make_worker
from tests.tags import make_facts
from verl_digen.agent_loop.chunks import ChunkOrder
from verl_digen.agent_loop.manager import STEP
from verl_digen.agent_loop.single_turn import make_agent_loop
from verl_digen.config import DigenConfig
from verl_digen.data.rows import ROW, object_column
from verl_digen.inputs.audio import Audio
from verl_digen.observe.group_pictures import GroupPictures
from verl_digen.sampling.requests import SINGLE_TURN
from verl_digen.store.keys import CONDITIONS, TRAIN
from verl_digen.store.samples import TAG, PromptStatus
from verl_digen.types import (
    Burst,
    CleanRecord,
    Generation,
    Geometry,
    PathRecord,
    PromptRow,
    RewardCall,
    RewardInput,
    Sampling,
    Score,
    Trajectory,
)

SAMPLING = Sampling(Geometry(16, 16), num_steps=6, true_cfg_scale=1.0, law="flow", noise_level=0.7)
NUMBERS = torch.tensor([0.9, 0.5])
PATH = PathRecord(torch.zeros(3, 4), torch.tensor([0, 1]), NUMBERS, NUMBERS, torch.tensor(0.9), NUMBERS)
CALL = RewardCall("shapes", 3.0, 4.0, num_samples=1, num_queued=0)
CLEAN = CleanRecord(torch.zeros(4), torch.tensor([1.0, 0.5, 0.1]))


class Rewards:
    """Scores every sample alike."""

    async def score(self, sample: RewardInput, *, version: int, group_size: int) -> Any:
        assert (sample.row.uid, sample.sample_index, version, group_size) == ("g0", 1, 3, 4)
        return Score(0.5, {"shapes": 0.5}, (CALL,)), (3.0, 4.0)


class Asked:
    """A server that keeps the requests of each call."""

    def __init__(self) -> None:
        self.requests: list[list[Any]] = []
        self.generate_all = SimpleNamespace(remote=self._generate_all)

    async def _generate_all(self, requests: list[Any]) -> list[Any]:
        self.requests.append(requests)
        return [ValueError("no picture")] * len(requests)


@pytest.mark.parametrize("is_single", [True, False])
def test_the_samples_of_a_chunk_come_in_one_call_and_say_how_many_they_are(is_single: bool) -> None:
    worker, server = make_worker(), Asked()
    order = ChunkOrder(7, (2, 3, 5), PromptRow("a cat", "test", None, uid="g0"), step=1)
    if not is_single:
        worker._make_loop = partial(make_agent_loop, SINGLE_TURN, worker)
        worker._environments = object()

    worker._generating, worker._scoring = {}, {}
    failed = asyncio.run(worker.generate_chunk(order, server)).failures
    expected = Burst("7", 3) if is_single else None
    (requests,) = server.requests
    assert [request.burst for request in requests] == [expected] * 3
    assert failed == dict.fromkeys(order.samples, "ValueError: no picture")


def finished(
    worker: Any, record: Any = CLEAN, *, index: int = 1, validate: bool = False, experts: Any = (), **made: Any
) -> Any:
    """The tag of sample `index` of group g0."""
    facts = make_facts(
        *("g0", index), seed=7, version=3, num_steps=len(record.sigmas), condition_key="key", experts=experts
    )
    pixels = torch.zeros(16, 16, 3, dtype=torch.uint8)
    generation = Generation(Trajectory(facts, record), pixels, started_s=1.0, ended_s=2.0, **made)
    return asyncio.run(worker._finish(generation, PromptRow("a cat", "test", None, uid="g0"), 4, validate=validate)).tag


@pytest.mark.parametrize(("record", "experts"), [(PATH, (0, 1)), (CLEAN, ())], ids=["path", "clean"])
def test_a_tag_tells_the_points_of_its_sample_and_when_it_was_made(record, experts):
    tag = finished(make_worker(_rewards=Rewards()), record, experts=experts)
    assert (tag.facts.num_steps, tag.facts.experts) == (len(record.sigmas), experts)
    assert (tag.generated, tag.scored, tag.reward) == ((1.0, 2.0), (3.0, 4.0), 0.5)
    assert (tag.facts.seed, tag.facts.version, tag.facts.last_version, tag.facts.condition_key) == (7, 3, 3, "key")
    assert (tag.parts, tag.calls) == ({"shapes": 0.5}, (CALL,))


@pytest.mark.parametrize("validate", [True, False])
def test_the_sound_of_a_video_reaches_its_reward_and_a_file(tmp_path, validate):
    seen: list[Audio | None] = []

    class Listening:
        async def score(self, sample: RewardInput, *, version: int, group_size: int) -> Any:
            seen.append(sample.audio)
            return Score(0.5, {}, ()), (3.0, 4.0)

    worker = make_worker()
    worker.digen = DigenConfig(num_logged_groups=1, logged_groups_every=1)
    worker.rollout_config.val_kwargs = SimpleNamespace(n=1)
    worker.config = SimpleNamespace(data=SimpleNamespace(train_batch_size=1))
    worker._rewards, worker._run_dir, worker._group_pictures = Listening(), tmp_path, GroupPictures(tmp_path)
    uid = "val-00000" if validate else "p00000000"
    trajectory = Trajectory(make_facts(uid), CLEAN)
    sound = Audio(np.full((2, 30), 0.5, np.float32), rate_hz=400)
    pixels = torch.zeros(2, 16, 16, 3, dtype=torch.uint8)
    generation = Generation(trajectory, pixels, started_s=1.0, ended_s=2.0, audio=sound)
    asyncio.run(worker._finish(generation, PromptRow("a cat", "test", None, uid=uid, index=0), 1, validate=validate))
    assert seen == [sound]
    (path,) = tmp_path.rglob("*.wav")
    assert path.with_suffix(".gif").is_file() and path.with_suffix(".png").is_file()
    with wave.open(str(path)) as file:
        assert (file.getnchannels(), file.getnframes(), file.getframerate()) == (2, 30, 400)


@pytest.mark.parametrize(("index", "reward"), [(0, 1.0), (1, 0.0)], ids=["chosen", "rejected"])
def test_a_picture_of_the_data_set_has_its_pairs_verdict_and_no_reward_is_called(index, reward):
    tag = finished(make_worker(digen=DigenConfig(loss={"name": "offline_dpo"}), _rewards=None), index=index)
    assert (tag.reward, tag.parts, tag.calls) == (reward, {}, ()) and 0 < tag.scored[0] <= tag.scored[1]


def test_a_validation_sample_of_such_a_run_is_scored():
    digen = DigenConfig(loss={"name": "offline_dpo"}, num_logged_images=0)
    worker = make_worker(digen=digen, _rewards=Rewards())
    worker.rollout_config.val_kwargs = SimpleNamespace(n=4)
    tag = finished(worker, validate=True)
    assert (tag.reward, tag.parts) == (0.5, {"shapes": 0.5})


# -- a group of a colocated step -----------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("made", "told"),
    [
        ({}, {"status": "finished"}),
        ({2: ValueError("no picture")}, {"status": "failure", "error": "ValueError: no picture"}),
        ({1: 4}, {"status": "failure", "error": "RuntimeError: group g0 was generated under weight versions [3, 4]"}),
        ({"put": OSError("no room")}, {"status": "failure", "error": "OSError: no room"}),
    ],
    ids=["whole", "a sample fails", "two versions", "the store fails"],
)
async def test_a_group_is_stored_whole_or_not_at_all_and_always_ends(monkeypatch, caplog, made, told):
    stored, failed, settled = [], [], []

    async def put(*, keys, partition_id, fields, tags):
        if fields is not None and "put" in made:
            raise made["put"]
        stored.append((partition_id, [*keys], tags))

    async def run(params: Any, *, uid: str, session_id: int, **columns: Any) -> Generation:
        version = made.get(session_id, 3)
        if isinstance(version, Exception):
            raise version
        condition = {"embeds": torch.zeros(2)} if session_id == 0 else None
        trajectory = Trajectory(make_facts(uid, session_id, version=version), CLEAN)
        return Generation(trajectory, torch.zeros(16, 16, 3), started_s=1.0, ended_s=2.0, condition=condition)

    async def score(sample: RewardInput, **facts: Any) -> Any:
        return Score(float(sample.sample_index), {}, ()), (3.0, 4.0)

    monkeypatch.setattr("transfer_queue.async_kv_batch_put", put)
    rewards = {"score": score, "fail": lambda *args: failed.append(args), "settled": lambda *args: settled.append(args)}
    worker = make_worker(digen=DigenConfig(num_logged_images=0), _rewards=SimpleNamespace(**rewards), llm_client=None)
    worker._make_loop = lambda client: SimpleNamespace(run=run)
    await worker._run_prompt({ROW: PromptRow("a cat", "test", None, uid="g0"), STEP: 5}, {}, {"validate": False})
    partition, keys, (status,) = stored.pop()
    assert (partition, keys) == (TRAIN, ["g0"])
    assert status.keys() == told.keys() and all(status[name].startswith(told[name]) for name in told)
    assert failed == [("g0", index, told["error"]) for index, error in made.items() if index == 2]
    assert settled == [("g0", range(4))]
    if made:
        assert stored == [] and not caplog.records, "the driver says it, once for all groups of one reason"
        return
    found = {partition: dict(zip(keys, tags, strict=True)) for partition, keys, tags in stored}
    assert {key: row[TAG]["reward"] for key, row in found[TRAIN].items()} == {f"g0_{n}_3": float(n) for n in range(4)}
    assert [*found[CONDITIONS]] == ["a cat"]


# -- when a group counts as generated ------------------------------------------------------------------------
async def test_a_group_is_generated_once_each_of_its_samples_has_ended(monkeypatch):
    told: list[tuple[Any, ...]] = []

    async def publish(*status: Any) -> None:
        told.append(status)

    monkeypatch.setattr("verl_digen.agent_loop.manager.publish_status", publish)
    made, failed = (asyncio.get_running_loop().create_future() for _ in range(2))
    worker = make_worker(digen=SimpleNamespace(reward=SimpleNamespace(timeshared=True)))
    telling = asyncio.create_task(worker._tell_generated("val", "g", [made, failed]))
    made.set_result(None)
    await asyncio.sleep(0)
    assert told == []
    failed.set_exception(ValueError("no picture"))
    await telling
    assert told == [("val", "g", PromptStatus("running", is_generated=True))]


def test_a_sample_whose_agent_loop_cancels_itself_fails_those_of_its_group_that_wait_for_it():
    failed: list[Any] = []
    worker = make_worker(_rewards=SimpleNamespace(fail=lambda *told: failed.append(told)))

    async def cancelled() -> Any:
        raise asyncio.CancelledError("of the user's own")

    async def finish() -> None:
        row = PromptRow("a cat", "test", None, uid="g0")
        await worker._finish_generated(asyncio.create_task(cancelled()), row, 2, 4, validate=False)

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(finish())
    assert failed == [("g0", 2, "CancelledError: of the user's own")]


def test_a_sample_of_a_dataproto_whose_agent_loop_cancels_itself_fails_those_of_its_group_that_wait_for_it():
    failed: list[Any] = []

    async def generate(client: Any, row: PromptRow, index: int, step: int, *, validate: bool) -> Any:
        raise asyncio.CancelledError(f"of sample {index}")

    rewards = SimpleNamespace(fail=lambda *told: failed.append(told), settled=lambda uid, indices: None)
    client = SimpleNamespace(digen=DigenConfig())
    worker = make_worker(_rewards=rewards, reward_loop_worker_handles={}, llm_client=client, _generate=generate)
    rows = [PromptRow("a cat", "test", None, uid="g0")] * 2
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(worker.generate_sequences(DataProto(None, {ROW: object_column(rows)})))
    assert failed == [("g0", index, f"CancelledError: of sample {index}") for index in range(2)]
