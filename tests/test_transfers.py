# SPDX-License-Identifier: Apache-2.0
"""Tensors on their way between processes."""

import pickle

import pytest
import ray
import torch
from ray import cloudpickle
from torch import Tensor

from verl_digen.hardware.transfers import send_as_bytes


@pytest.fixture
def sends_as_bytes():
    send_as_bytes()
    yield
    ray.util.deregister_serializer(Tensor)


def test_a_tensor_arrives_as_it_was_in_memory_of_its_own_and_a_view_alone(sends_as_bytes):
    whole = torch.randn(1000, 4)
    tensors = [
        *(whole, whole[3], whole.t(), torch.tensor(2.5), torch.zeros(0, 3), torch.tensor([True, False])),
        *(whole.bfloat16(), torch.arange(6), torch.randn(3) + 1j, torch.randn(2, requires_grad=True)),
    ]
    for tensor in tensors:
        buffers: list[pickle.PickleBuffer] = []
        data = cloudpickle.dumps(tensor, protocol=5, buffer_callback=buffers.append)
        read_only = [memoryview(buffer.raw().tobytes()) for buffer in buffers]
        found = pickle.loads(data, buffers=read_only)
        assert torch.equal(found, tensor) and found.dtype == tensor.dtype
        assert found.requires_grad == tensor.requires_grad
        if not tensor.requires_grad:
            found.zero_()
            assert sum(view.nbytes for view in read_only) == tensor.nbytes and len(data) < 1000
