# SPDX-License-Identifier: Apache-2.0
"""Checks of a `vllm_omni` replica's probes on its engine, and faults that the probes must detect."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import ray
import torch
from torch import Tensor, nn

from tests.vllm_omni.conftest import Replica, by_sampler, full_weights
from verl_digen.models import load_model
from verl_digen.rollout.vllm_omni.probing import SEED, fingerprint_of, probe_order
from verl_digen.types import SampleRequest
from verl_digen.weights.probe import Probe, check_probes

TOLERANCE = 1e-3
"""Relative tolerance between the fingerprints of the replica and of our own sampler: fp32, a step of a sixth of x."""
WeightsOf = Callable[[Replica, int], tuple[nn.Module, dict[str, Tensor]]]
"""(replica, number of the weights) -> a network with these weights, the update's tensors."""


def load_weights(replica: Replica, number: int) -> tuple[nn.Module, dict[str, Tensor]]:
    """`WeightsOf` for a replica whose updates carry full weights."""
    weights = full_weights(replica.path, number)
    network = load_model(replica.path).load_transformer(torch.float32)
    network.load_state_dict(weights)
    return network, weights


def assert_probes_tell_what_is_used(
    replica: Replica, weights_of: WeightsOf, spoil: Callable[[Any], None], requests: Sequence[SampleRequest]
) -> None:
    """Check that a probe matches the trainer's network, that equal weights give bitwise equal probes while `requests`
    are served, that the prompt cache does not count probes, and that probes detect a replica that keeps its old weights
    because of `spoil`."""

    def probe(number: int, version: int) -> tuple[Probe, Probe]:
        replica.update(weights_of(replica, number)[1].items(), version).result()
        older, newer = replica.health()["probes"]
        return older, newer

    probe(0, 200)
    counted = prompts_counted(replica)
    _, first = probe(1, 201)
    assert prompts_counted(replica) == counted, "a probe's prompt is no user's"
    model = load_model(replica.path)
    network, tensors = weights_of(replica, 1)
    expected = by_sampler(replica.path, network, probe_order(model).request, 201, run_seed=SEED)
    assert first.fingerprint == pytest.approx(fingerprint_of(model, expected), rel=TOLERANCE)
    assert (first.version, first.num_tensors) == (201, len(tensors))

    under_way = [replica.submit(asked) for asked in requests]
    _, again = probe(1, 202)
    assert (again.checksums, again.fingerprint) == (first.checksums, first.fingerprint)
    pair = probe(2, 203)
    assert pair[0] == again and check_probes({"r0": pair})["rollout/probe_change"] > 0
    assert [one.trajectory.sample_index for one in ray.get(under_way)] == [asked.sample_index for asked in requests]

    with broken(replica, spoil):
        probe(3, 204)
        pair = probe(4, 205)
        assert pair[0].checksums != pair[1].checksums
        with pytest.raises(RuntimeError, match=r"replica r0 took version 205 .* computes bitwise what it did before"):
            check_probes({"r0": pair})
    assert check_probes({"r0": probe(5, 206)})["rollout/probe_change"] > 0


def prompts_counted(replica: Replica) -> list[int]:
    cache = replica.health()["prompt_cache"]
    return [cache[name] for name in ("hits", "misses", "size")]


@contextmanager
def broken(replica: Replica, spoil: Callable[[Any], None]) -> Iterator[None]:
    """Apply `spoil` to the worker's class in the server's process, inside the context."""

    def begin(server: Any) -> None:
        from verl_digen.rollout.vllm_omni.worker import WeightReceiverExtension

        server.sound = dict(vars(WeightReceiverExtension))
        spoil(WeightReceiverExtension)

    def end(server: Any) -> None:
        from verl_digen.rollout.vllm_omni.worker import WeightReceiverExtension

        for name in ("commit_weights", "_to_vllm"):
            setattr(WeightReceiverExtension, name, server.sound[name])

    ray.get(replica.server.__ray_call__.remote(begin))
    yield
    ray.get(replica.server.__ray_call__.remote(end))


def keep_old_weights(worker: Any) -> None:
    """Make the worker load full weights, pass every check of the load, and compute with the old ones."""
    load = worker.commit_weights

    def commit_weights(self: Any) -> Any:
        kept = [(tensor, tensor.clone()) for one in self._networks.values() for tensor in one.state_dict().values()]
        taken = load(self)
        for tensor, old in kept:
            tensor.copy_(old)
        return taken

    worker.commit_weights = commit_weights


def register_empty_adapters(worker: Any) -> None:
    """Make the worker bind every module of an adapter, with zeros as weights."""
    to_vllm = worker._to_vllm

    def empty(self: Any, staged: dict[str, Tensor], *args: Any) -> Any:
        return to_vllm(self, {name: torch.zeros_like(tensor) for name, tensor in staged.items()}, *args)

    worker._to_vllm = empty
