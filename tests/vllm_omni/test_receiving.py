# SPDX-License-Identifier: Apache-2.0
"""The receiver of a weight update, against verl's sender over a real socket; no engine."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch
import zmq

from verl_digen.rollout.vllm_omni.adapter import BoundedSender
from verl_digen.rollout.vllm_omni.receiving import Receiving
from verl_digen.weights.checksum import checksum

CPU = torch.device("cpu")
WEIGHTS = {f"layer{number}": torch.full((200_000,), float(number)) for number in range(4)}
"""0.8 MB each, so that every bucket of 1 MB holds one."""


@pytest.fixture
def handle(tmp_path):
    return f"ipc://{tmp_path}/weights.sock"


def receive(handle, *, timeout_s=30.0):
    return Receiving(handle, CPU, networks=["transformer"], use_shm=True, timeout_s=timeout_s)


def send(handle, weights, *, timeout_s=30.0):
    sender = BoundedSender(zmq_handle=handle, bucket_size_mb=1, use_shm=True, timeout_s=timeout_s)
    asyncio.run(sender.async_send_weights(weights))


def interrupted():
    """Two tensors, then the error that a trainer rank raises when another replica is lost."""
    yield from list(WEIGHTS.items())[:2]
    raise ConnectionError("another replica was lost")


def assert_complete(staged):
    assert staged.checksum == checksum(WEIGHTS.values())
    assert staged.tensors.keys() == WEIGHTS.keys()
    assert all(torch.equal(staged.tensors[name], tensor) for name, tensor in WEIGHTS.items())


def test_an_update_arrives_with_its_checksum(handle):
    receiving = receive(handle)
    send(handle, WEIGHTS.items())
    assert_complete(receiving.result())


def test_of_an_adapter_what_moves_the_output_has_a_checksum_of_its_own(handle):
    adapter = {f"to_q.lora_{side}.weight": torch.full((4,), value) for side, value in (("A", -2.0), ("B", 3.0))}
    receiving = receive(handle)
    send(handle, adapter.items())
    staged = receiving.result()
    assert staged.checksum == checksum(adapter.values())
    assert staged.deciding_checksums == (checksum([adapter["to_q.lora_B.weight"]]),)


def test_an_interrupted_update_is_abandoned_and_the_next_one_arrives(handle):
    first = receive(handle)
    with pytest.raises(ConnectionError):
        send(handle, interrupted())
    first.abandon()
    with pytest.raises(RuntimeError, match="abandoned for a newer one"):
        first.result()
    second = receive(handle)
    send(handle, WEIGHTS.items())
    assert_complete(second.result())


def test_a_receiver_does_not_wait_for_a_lost_sender_beyond_its_limit(handle):
    receiving = receive(handle, timeout_s=0.2)
    with pytest.raises(ConnectionError):
        send(handle, interrupted())
    with pytest.raises(RuntimeError, match=r"no part of it came for 0\.2 s; .*digen\.rollout\.update_timeout_s"):
        receiving.result()


def test_a_sender_without_a_receiver_does_not_wait_beyond_its_limit(handle):
    with pytest.raises(zmq.Again):
        send(handle, WEIGHTS.items(), timeout_s=0.2)


def test_no_thread_is_left_of_an_update_that_ended(handle):
    before = threading.active_count()
    receiving = receive(handle)
    send(handle, WEIGHTS.items())
    receiving.result()
    receive(handle).abandon()
    assert threading.active_count() == before
