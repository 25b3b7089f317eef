# SPDX-License-Identifier: Apache-2.0
"""Sender and receiver of a weight update over a real socket and shared memory, in one process."""

import asyncio
import importlib.util
import re
import subprocess
import sys
import threading
import time
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import zmq
from torch import nn

from verl_digen.weights.checksum import Manifest, checksum
from verl_digen.weights.host_copies import HostPool
from verl_digen.weights.receiver import Update, WeightReceiver
from verl_digen.weights.receiving import BoundedReceiver, Receiving
from verl_digen.weights.sending import DIRECT_MB, BoundedSender, ReceiverDied, Wire, bytes_beside_server, send_update

CPU = torch.device("cpu")
WEIGHTS = {f"layer{number}": torch.full((200_000,), float(number)) for number in range(4)}
"""0.8 MB each, so that every bucket of 1 MB holds one."""

SENT = Manifest(1, len(WEIGHTS), checksum(WEIGHTS.values()))

KILLED_RECEIVER = """
import os, signal, sys
import torch
from verl_digen.weights.receiving import BoundedReceiver

receiver = BoundedReceiver(sys.argv[1], torch.device("cpu"), True, check=lambda: None, timeout_s=60)
receiver.receive_weights(lambda *bucket: os.kill(os.getpid(), signal.SIGKILL))
"""


def shared_memory():
    """Segments of weight updates that this process maps; other tests have their own."""
    return {Path(found) for found in re.findall(r"/dev/shm/verl_weights_\w+", Path("/proc/self/maps").read_text())}


@pytest.fixture
def handle(tmp_path):
    return f"ipc://{tmp_path}/weights.sock"


def receive(handle, take=None, *, timeout_s=60.0):
    """(receiving, update), which is staged unless `take` is given."""
    update = Update({}.get, HostPool(CPU))
    take = take or update.take
    return Receiving(handle, CPU, take, use_shm=True, timeout_s=timeout_s), update


def wire_of(handle, *, timeout_s=60.0, dtype=torch.float32, use_shm=True, is_live=False, max_bucket_mb=1):
    return Wire(handle, use_shm, is_live, dtype, max_bucket_mb=max_bucket_mb, timeout_s=timeout_s)


def send(handle, weights, *, has_died=lambda: False, **wire):
    return asyncio.run(send_update(weights, wire_of(handle, **wire), receiver="replica 0", has_died=has_died))


def interrupted():
    """Two tensors, then the error that a trainer rank raises when another replica is lost."""
    yield from list(WEIGHTS.items())[:2]
    raise ConnectionError("another replica was lost")


def assert_complete(receiving, update):
    receiving.finish(SENT)
    assert update.staged.keys() == WEIGHTS.keys()
    assert all(torch.equal(update.staged[name], tensor) for name, tensor in WEIGHTS.items())


def test_verls_package_of_the_transfer_cannot_be_imported_without_vllm():
    """Remove `weights/bucketed.py` when it can."""
    if importlib.util.find_spec("vllm") is None:
        with pytest.raises(ValueError, match="vllm"):
            importlib.import_module("verl.workers.rollout.vllm_rollout")


def test_an_update_arrives_with_its_checksum(handle):
    Path(handle.removeprefix("ipc://")).touch()  # of a sender that was killed
    receiving, update = receive(handle)
    total = send(handle, WEIGHTS.items())
    assert_complete(receiving, update)
    assert (total.num_tensors, total.value) == (SENT.num_tensors, SENT.checksum)
    for manifest in (Manifest(1, 5, total.value), Manifest(1, 4, total.value + 1)):
        with pytest.raises(RuntimeError, match="were sent, but 4 with checksum"):
            receiving.finish(manifest)


def test_a_receiver_tells_its_first_error_and_drops_what_comes_after_it(handle):
    calls = []

    def refuse(bucket):
        calls.append(len(bucket))
        raise ValueError("no room")

    receiving, _ = receive(handle, refuse)
    send(handle, WEIGHTS.items())
    with pytest.raises(RuntimeError, match="no room"):
        receiving.arrived()
    assert calls == [1]
    receiving, _ = receive(handle, refuse, timeout_s=0.5)
    with pytest.raises(ConnectionError):
        send(handle, interrupted())
    with pytest.raises(RuntimeError, match="no room"):
        receiving.arrived()


def test_a_sender_that_binds_after_its_receiver_began_is_found(handle):
    receiving, update = receive(handle)
    time.sleep(0.02)  # its first try to connect fails meanwhile
    send(handle, WEIGHTS.items())
    assert_complete(receiving, update)


def test_a_receiver_tries_to_connect_again_at_once(handle):
    receiver = BoundedReceiver(handle, CPU, True, check=lambda: None, timeout_s=1.0)
    receiver._init_socket()
    assert receiver.socket.getsockopt(zmq.RECONNECT_IVL) in range(1, 11), "ms; ZeroMQ's own is 100"
    assert receiver.socket.getsockopt(zmq.LINGER) == 1000, "its last answer arrives, though it closes"
    receiver.socket.close(0)


def test_numbers_travel_in_the_dtype_of_the_wire_and_counters_in_their_own(handle):
    receiving, update = receive(handle)
    count = torch.tensor([1, 257])  # bf16 has no 257
    total = send(handle, [("a", torch.tensor([1.0, 2.0])), ("count", count)], dtype=torch.bfloat16)
    receiving.finish(Manifest(1, 2, total.value))
    assert update.staged["a"].dtype == torch.bfloat16 and update.staged["count"].tolist() == [1, 257]


def test_an_interrupted_update_is_abandoned_and_the_next_one_arrives(handle):
    first, _ = receive(handle)
    with pytest.raises(ConnectionError):
        send(handle, interrupted())
    first.abandon()
    with pytest.raises(RuntimeError, match="abandoned for a newer one"):
        first.finish(SENT)
    second = receive(handle)
    send(handle, WEIGHTS.items())
    assert_complete(*second)


def test_a_receiver_does_not_wait_for_a_lost_sender_beyond_its_limit(handle):
    receiving, _ = receive(handle, timeout_s=2.0)
    with pytest.raises(ConnectionError):
        send(handle, interrupted())
    with pytest.raises(RuntimeError, match=r"no part of it came for 2 s; .*digen\.rollout\.update_timeout_s"):
        receiving.finish(SENT)


def test_a_sender_without_a_receiver_does_not_wait_beyond_its_limit(handle):
    with pytest.raises(RuntimeError, match=r"replica 0 took no part .* digen\.rollout\.update_timeout_s=0\.2 s"):
        send(handle, WEIGHTS.items(), timeout_s=0.2)


def test_a_sender_does_not_wait_for_a_receiver_that_died(handle):
    first, _ = receive(handle)
    died = threading.Event()

    def tensors():
        yield from list(WEIGHTS.items())[:2]
        first.abandon()
        died.set()
        yield from list(WEIGHTS.items())[2:]

    with pytest.raises(ReceiverDied, match="replica 0 died"):
        send(handle, tensors(), has_died=died.is_set)


def test_a_sender_outlives_a_receiver_that_is_killed_and_leaves_no_shared_memory(handle):
    process, before, segments = (
        subprocess.Popen([sys.executable, "-c", KILLED_RECEIVER, handle]),
        shared_memory(),
        set(),
    )

    def has_died():
        segments.update(shared_memory() - before)
        return process.poll() is not None

    with pytest.raises(ReceiverDied, match="replica 0 died"):
        send(handle, WEIGHTS.items(), has_died=has_died)
    assert len(segments) == 1 and not any(path.exists() for path in segments)


def test_a_sender_closes_what_it_has_also_where_its_shared_memory_is_gone(handle):
    sender, shm = BoundedSender(wire_of(handle), lambda: None), SharedMemory(create=True, size=8)
    sender._init_socket()
    assert sender.socket.getsockopt(zmq.LINGER) == 0, "its process does not wait at its end for a dead receiver"
    sender.shm = shm
    Path(f"/dev/shm/{shm.name}").unlink()
    sender._cleanup()
    assert sender.socket is None and sender.shm is None and not Path(handle.removeprefix("ipc://")).exists()


def test_a_tensor_that_the_receiver_refuses_ends_the_update_and_the_sender_is_not_held_up(handle):
    network = nn.ParameterDict({name: nn.Parameter(tensor.clone()) for name, tensor in WEIGHTS.items()})
    weights = WeightReceiver(network, None)
    receiving, _ = receive(handle, weights.begin_live())
    send(handle, {**WEIGHTS, "layer1": torch.zeros(3)}.items())
    with pytest.raises(RuntimeError, match=r"layer1 \(3,\) != \(200000,\); the replica holds neither"):
        receiving.finish(SENT)
    assert not weights.is_whole


def test_a_tensor_larger_than_a_bucket_in_shared_memory_is_an_error_that_names_the_key(handle):
    receiving, _ = receive(handle)
    total = send(handle, [("fits", torch.zeros(1 << 18))])
    receiving.finish(Manifest(1, 1, total.value))
    receiving, _ = receive(handle)
    with pytest.raises(ValueError, match=r"update_weights_bucket_megabytes must be at least 2 for big .*, got 1"):
        send(handle, [("big", torch.zeros(1 << 18, 2, dtype=torch.float16).float())])
    receiving.abandon()


def test_large_tensors_that_are_loaded_as_they_arrive_need_no_bucket_where_there_is_ipc():
    for use_shm, is_live, most, size in ((0, 1, 2048, DIRECT_MB), (0, 1, 8, 8), (1, 1, 2048, 2048), (0, 0, 2048, 2048)):
        wire = wire_of("", use_shm=bool(use_shm), is_live=bool(is_live), max_bucket_mb=most)
        assert (wire.bucket_mb, BoundedSender(wire, lambda: None).bucket_size) == (size, size << 20)


@pytest.mark.parametrize(("backend", "expected"), [("digen_gloo", 1 << 20), ("nccl", 3 << 20)])
def test_an_update_takes_as_many_buckets_beside_a_server_as_its_engine_has_there(backend, expected):
    engine = SimpleNamespace(backend=backend, update_weights_bucket_megabytes=1)
    assert bytes_beside_server(engine) == expected


def test_no_thread_is_left_of_an_update_that_ended(handle):
    before = threading.active_count()
    receiving, _ = receive(handle)
    send(handle, WEIGHTS.items())
    receiving.finish(SENT)
    receive(handle)[0].abandon()
    assert threading.active_count() == before
