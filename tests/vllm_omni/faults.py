# SPDX-License-Identifier: Apache-2.0
"""Faults of a `vllm_omni` worker that lose the numbers of an update, and the check that each is found."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import ray
import torch
from torch import Tensor, nn

from tests.vllm_omni.conftest import Replica, full_weights
from verl_digen.models import load_model

WeightsOf = Callable[[Replica, int], tuple[nn.Module, dict[str, Tensor]]]
"""(replica, number of the weights) -> a network with these weights, the update's tensors."""


def load_weights(replica: Replica, number: int) -> tuple[nn.Module, dict[str, Tensor]]:
    """`WeightsOf` for a replica whose updates carry full weights."""
    weights = full_weights(replica.path, number)
    network = load_model(replica.path).load_transformer(torch.float32)
    network.load_state_dict(weights)
    return network, weights


def assert_found(replica: Replica, weights_of: WeightsOf, spoil: Callable[[Any], None], message: str) -> None:
    """Check that an update whose numbers are lost by `spoil` is an error, and that the next one is not."""
    replica.update(weights_of(replica, 0)[1].items(), 200).result()
    with broken(replica, spoil), pytest.raises(Exception, match=message):
        replica.update(weights_of(replica, 1)[1].items(), 201).result()
    replica.update(weights_of(replica, 2)[1].items(), 202).result()


@contextmanager
def broken(replica: Replica, spoil: Callable[[Any], None]) -> Iterator[None]:
    """Apply `spoil` to the worker's class in the server's process, inside the context."""

    def begin(server: Any) -> None:
        from verl_digen.rollout.vllm_omni.worker import vLLMOmniColocateWorkerExtension

        server.sound = dict(vars(vLLMOmniColocateWorkerExtension))
        spoil(vLLMOmniColocateWorkerExtension)

    def end(server: Any) -> None:
        from verl_digen.rollout.vllm_omni.worker import vLLMOmniColocateWorkerExtension

        for name in ("_load", "_to_vllm"):
            setattr(vLLMOmniColocateWorkerExtension, name, server.sound[name])

    ray.get(replica.server.__ray_call__.remote(begin))
    try:
        yield
    finally:
        ray.get(replica.server.__ray_call__.remote(end))


def load_nothing(worker: Any) -> None:
    """Make the worker name every tensor of full weights as loaded, and keep the old numbers."""
    load = worker._load

    def _load(self: Any, bucket: Any) -> Any:
        kept = [(tensor, tensor.clone()) for one in self._networks.values() for tensor in one.state_dict().values()]
        loaded = load(self, bucket)
        for tensor, old in kept:
            tensor.copy_(old)
        return loaded

    worker._load = _load


def register_empty_adapters(worker: Any) -> None:
    """Make the worker bind every module of an adapter, with zeros as weights."""
    to_vllm = worker._to_vllm

    def empty(self: Any, staged: dict[str, Tensor], *args: Any) -> Any:
        return to_vllm(self, {name: torch.zeros_like(tensor) for name, tensor in staged.items()}, *args)

    worker._to_vllm = empty


def bind_no_module(worker: Any) -> None:
    """Make the worker name the modules of an adapter so that no layer has their names."""
    to_vllm = worker._to_vllm

    def renamed(self: Any, *args: Any) -> Any:
        adapter, helper = to_vllm(self, *args)
        adapter.loras = {f"elsewhere.{name}": weights for name, weights in adapter.loras.items()}
        return adapter, helper

    worker._to_vllm = renamed


LOST = "the network's checksum differs from what was sent"
EMPTY = "did not reach the layers"
UNBOUND = "modules of the adapter have no layer"
"""Messages of `load_nothing`, `register_empty_adapters` and `bind_no_module`."""
