# SPDX-License-Identifier: Apache-2.0
"""The gloo engine between real Ray actors: two trainer ranks, two replicas, updates of several buckets."""

import asyncio
import pickle

import psutil
import pytest
import ray
import torch
from ray.exceptions import RayError
from verl.checkpoint_engine.base import CheckpointEngineRegistry

from verl_digen.weights.gloo import Bucket, GlooEngine, MeetingPoint, from_buckets, to_buckets

pytestmark = pytest.mark.slow

BACKEND = "digen_gloo"
BUCKET_BYTES = 1 << 16


def weights(version: int) -> dict[str, torch.Tensor]:
    """Tensors of several dtypes and odd sizes; one larger than a bucket, one empty."""
    generator = torch.Generator().manual_seed(version)
    return {
        "odd": torch.randint(0, 100, (7,), generator=generator, dtype=torch.uint8),
        "small": torch.randn(33, 5, generator=generator),
        "large": torch.randn(300, 200, generator=generator),
        "half": torch.randn(129, generator=generator).bfloat16(),
        "many": torch.randn(100, 100, generator=generator),
        "scalar": torch.randn((), generator=generator),
    }


def assert_equal(found, expected):
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


async def test_buckets_hold_what_they_may_and_give_back_every_tensor():
    buckets = [bucket async for bucket in to_buckets(weights(1).items(), BUCKET_BYTES)]

    async def again():
        for bucket in buckets:
            yield bucket

    found = {name: tensor async for name, tensor in from_buckets(again(), BUCKET_BYTES)}
    assert len(buckets) > 3 and all(len(bucket.data) <= BUCKET_BYTES for bucket in buckets)
    assert [bucket.is_last for bucket in buckets] == [False] * (len(buckets) - 1) + [True]
    assert_equal(found, weights(1))


class Worker:
    """Actor that uses an engine like verl's workers."""

    def start(self, bucket_bytes: int, is_master: bool):
        """Create an engine, in place of that of an earlier test."""
        kwargs = {"is_master": True} if is_master else {}
        self.made = []
        self.num_received, self.stops_at = 0, None
        self.engine = CheckpointEngineRegistry.new(BACKEND, bucket_size=bucket_bytes, **kwargs)
        self.own_listeners = self._listeners()

    def _listeners(self):
        return {tuple(c.laddr) for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN}

    def hosts_of_new_listeners(self):
        """Addresses that this process has started to listen on since its engine was created."""
        return {host for host, _ in self._listeners() - self.own_listeners}

    def prepare(self):
        return self.engine.prepare()

    def join(self, kwargs):
        self.engine.init_process_group(**kwargs)

    async def send(self, version: int, num_mb: int = 0):
        seen = []
        self.made.append(seen)

        def stream():
            tensors = {f"{i}": torch.zeros(1 << 18) for i in range(num_mb)} if num_mb else weights(version)
            for name, tensor in tensors.items():
                seen.append(name)
                yield name, tensor

        await self.engine.send_weights(stream(), global_steps=version)
        return seen

    async def receive(self):
        return {name: tensor async for name, tensor in self.engine.receive_weights()}

    async def receive_and_drop(self):
        num_bytes = self.num_received = 0
        async for _, tensor in self.engine.receive_weights():
            num_bytes += tensor.nbytes
            self.num_received += 1
            if self.num_received == self.stops_at:
                await asyncio.Event().wait()
        return num_bytes

    async def receive_and_refuse(self):
        async for name, _ in self.engine.receive_weights():
            raise ValueError(f"{name} is larger than a bucket")

    def stop_at(self, count):
        """Have the next `receive_and_drop` wait forever at `count` tensors, so that its update cannot end."""
        self.num_received, self.stops_at = 0, count

    async def has_stopped(self):
        while self.num_received != self.stops_at:
            await asyncio.sleep(0.001)

    def num_made(self):
        return [len(seen) for seen in self.made]


def begin(senders, receivers, send, receive="receive"):
    metadata = ray.get([worker.prepare.remote() for worker in (*senders, *receivers)])
    topology = CheckpointEngineRegistry.get(BACKEND).build_topology(len(senders), len(receivers), metadata)
    joins = []
    for workers, kwargs in zip((senders, receivers), topology, strict=True):
        for index, worker in enumerate(workers):
            joins.append(worker.join.remote({name: values[index] for name, values in kwargs.items()}))
    ray.get(joins)
    sent = [worker.send.remote(*send) for worker in senders]
    got = [getattr(worker, receive).remote() for worker in receivers]
    return sent, got


def exchange(*args):
    sent, got = begin(*args)
    return ray.get(sent), ray.get(got)


class Workers:
    """Processes that serve one test after the other, because starting one takes 8 s of a core."""

    def __init__(self):
        self.living = []

    def start(self, count, has_master=False):
        """Return workers with engines of their own, the first of which may be the master."""
        new = [ray.remote(Worker).options(num_cpus=0).remote() for _ in range(count - len(self.living))]
        started, self.living = [*self.living, *new][:count], self.living[count:]
        masters = [has_master and rank == 0 for rank in range(count)]
        ray.get([one.start.remote(BUCKET_BYTES, is_it) for one, is_it in zip(started, masters, strict=True)])
        return started


@pytest.fixture(scope="module")
def workers(ray_cluster):
    return Workers()


def test_every_replica_gets_every_tensor_and_every_trainer_rank_takes_part(workers):
    started = workers.start(4, has_master=True)
    senders, receivers = started[:2], started[2:]
    for version in (1, 2):
        sent, got = exchange(senders, receivers, (version,))
        assert all(seen == list(weights(version)) for seen in sent), "making a tensor is a collective of all ranks"
        for found in got:
            assert_equal(found, weights(version))
    hosts = set().union(*ray.get([worker.hosts_of_new_listeners.remote() for worker in (*senders, *receivers)]))
    assert hosts == {"127.0.0.1"}, "one node: nothing is open to others"
    ray.kill(receivers[1])  # a replica restarts as a new process
    (receivers[1],) = workers.start(1)
    for found in exchange(senders, receivers, (3,))[1]:
        assert_equal(found, weights(3))
    for found in exchange(senders, receivers[:1], (4,))[1]:
        assert_equal(found, weights(4))
    workers.living += [*senders, *receivers]


def test_after_a_replica_died_in_an_update_the_next_one_reaches_the_others(workers):
    started = workers.start(5, has_master=True)
    senders, receivers = started[:2], started[2:]
    exchange(senders, receivers, (1,))
    for victim in (0, 1):
        ray.get(receivers[victim].stop_at.remote(4))
        sent, got = begin(senders, receivers, (2, 256), "receive_and_drop")
        ray.get(receivers[victim].has_stopped.remote())
        ray.kill(receivers.pop(victim))
        with pytest.raises(RayError):
            ray.get([*sent, *got])
        for found in exchange(senders, receivers, (3,))[1]:
            assert_equal(found, weights(3))
        ended, _ = ray.wait([*sent, *got], num_returns=len(sent) + len(got), timeout=120)
        assert len(ended) == len(sent) + len(got), "nobody waits for the dead"
    made, expected = ray.get([sender.num_made.remote() for sender in senders])
    assert made == expected, "making a tensor is a collective of all ranks, also in an update that fails"
    workers.living += [*senders, *receivers]


def test_a_replica_that_takes_no_more_of_an_update_leaves_its_group_and_takes_part_in_the_next_one(workers):
    started = workers.start(3, has_master=True)
    senders, receivers = started[:1], started[1:]
    exchange(senders, receivers, (1,))
    sent, got = begin(senders, receivers, (2, 256), "receive_and_refuse")
    ended, _ = ray.wait([*sent, *got], num_returns=3, timeout=60)
    assert len(ended) == 3, "the sender does not wait for those that left"
    for call in ended:
        with pytest.raises(RayError):
            ray.get(call)
    for found in exchange(senders, receivers, (3,))[1]:
        assert_equal(found, weights(3))
    workers.living += [*senders, *receivers]


def test_a_gloo_group_is_kept_while_all_of_its_members_are():
    sender = MeetingPoint(3, ("host", 1))
    assert MeetingPoint.of([sender, MeetingPoint(3, None)]).generation == 3
    assert MeetingPoint.of([sender, MeetingPoint(3, None), MeetingPoint(0, None)]).generation == 4
    assert MeetingPoint.of([sender, MeetingPoint(2, None)]).generation == 4, "one is in an earlier group"
    assert MeetingPoint.of([MeetingPoint(0, ("host", 1)), MeetingPoint(0, None)]).generation == 1
    assert MeetingPoint.of([MeetingPoint(-3, ("host", 1)), MeetingPoint(-3, None)]).generation == 4


@pytest.mark.parametrize("method", ["send_weights", "receive_weights"])
async def test_a_rank_leaves_a_group_in_which_a_call_failed_and_no_later_one(method):
    class Closed:
        later: object = None

        def broadcast(self, *args: object) -> None:
            engine._group = self.later or self  # type: ignore[assignment]
            raise RuntimeError("connection closed by peer")

    for later, left in ((None, (None, -3)), ("later", ("later", 3))):
        engine, closed = GlooEngine(BUCKET_BYTES), Closed()
        closed.later = later
        engine.rank, engine._group, engine._generation = 0, closed, 3  # type: ignore[assignment]
        with pytest.raises(RuntimeError, match="closed by peer"):
            if method == "send_weights":
                await engine.send_weights(iter(weights(1).items()))
            else:
                _ = [named async for named in engine.receive_weights()]
        assert (engine._group, engine._generation) == left


def test_a_header_says_what_lies_in_a_bucket_and_nothing_else_is_read(tmp_path):
    async def first():
        async for bucket in to_buckets(weights(1).items(), BUCKET_BYTES):
            return bucket

    bucket = asyncio.run(first())
    assert Bucket.of(bucket.header(), bucket.data) == bucket
    touched = tmp_path / "touched"
    with pytest.raises(ValueError):
        Bucket.of(pickle.dumps(_Touch(str(touched))), bucket.data)
    assert not touched.exists()


class _Touch:
    """Writes a file when it is unpickled."""

    def __init__(self, path: str):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")
