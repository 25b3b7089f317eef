# SPDX-License-Identifier: Apache-2.0
"""Weight updates of a `vllm_omni` replica: between trajectories, complete, or not at all."""

import asyncio
import random
import time
from contextlib import contextmanager
from dataclasses import replace

import pytest
import ray
import torch

from tests.vllm_omni.conftest import (
    adapter_weights,
    by_sampler,
    exposed_sockets,
    exposed_sockets_of_ray,
    full_weights,
    request,
)
from tests.vllm_omni.faults import (
    EMPTY,
    UNBOUND,
    assert_found,
    bind_no_module,
    broken,
    load_weights,
    register_empty_adapters,
)
from verl_digen.rollout.vllm_omni.settings import address, sockets_of
from verl_digen.sampling.requests import ODE_ONLY

NUM_TRAJECTORIES = 200
NUM_CHECKED = 12
"""Number of trajectories that are generated again with the weights of their recorded version."""


def generate_while_updating(replica, weights_of, first_version):
    """Send `NUM_TRAJECTORIES` requests, 8 at a time, with updates at random times -> their trajectories, in order."""
    rng = random.Random(1)
    asked = [request(number) for number in range(NUM_TRAJECTORIES)]
    waiting, pending, got = list(range(NUM_TRAJECTORIES)), {}, {}
    version, update, next_update_s = first_version, None, time.monotonic()
    while waiting or pending:
        while waiting and len(pending) < 8:
            number = waiting.pop(0)
            pending[replica.submit(asked[number])] = number
        if update is not None and update.done():
            update.result()
            update, next_update_s = None, time.monotonic() + rng.uniform(0, 0.6)
        if update is None and time.monotonic() >= next_update_s:
            version += 1
            update = replica.update(weights_of(version).items(), version)
        done, _ = ray.wait(list(pending), timeout=0.02)
        for reference in done:
            got[pending.pop(reference)] = ray.get(reference).trajectory
    if update is not None:
        update.result()
    return asked, [got[number] for number in range(NUM_TRAJECTORIES)]


@pytest.mark.parametrize("is_adapter", [False, True], ids=["full", "adapter"])
def test_weights_change_between_trajectories_and_none_is_lost(full_replica, lora_replica, is_adapter):
    replica, weights_of = (lora_replica, adapter_weights) if is_adapter else (full_replica, load_weights)
    replica.update(weights_of(replica, 1)[1].items(), 1).result()
    asked, trajectories = generate_while_updating(replica, lambda version: weights_of(replica, version)[1], 1)
    facts = [one.facts for one in trajectories]
    assert [(one.uid, one.sample_index) for one in facts] == [(one.uid, one.sample_index) for one in asked]
    assert all(one.version == one.last_version for one in facts)
    assert len({one.version for one in facts}) > 1, "updates came in between"
    for number in random.Random(2).sample(range(NUM_TRAJECTORIES), NUM_CHECKED):
        found = trajectories[number]
        expected = by_sampler(
            replica.path, weights_of(replica, found.facts.version)[0], asked[number], found.facts.version
        )
        torch.testing.assert_close(found.record.latents, expected.record.latents, atol=1e-4, rtol=0)
    print("last update:", replica.health()["last_update"])
    replica.update(weights_of(replica, 0)[1].items(), 0).result()


def test_the_average_is_validated_where_it_is_sent_under_the_version_of_the_current_policy(lora_replica):
    """Send the EMA copy, then the current policy again, both with one version, like `digen.ema.validate`."""
    validation = replace(request(0), window=ODE_ONLY, wants_condition=False)
    training = request(0)
    found = []
    for numbers in (50, 51, 50):
        network, adapter = adapter_weights(lora_replica, numbers)
        lora_replica.update(adapter.items(), 50).result()
        picture, sample = lora_replica.generate([validation, training])
        assert sample.trajectory.facts.version == 50
        expected = by_sampler(lora_replica.path, network, training, 50)
        torch.testing.assert_close(sample.trajectory.record.latents, expected.record.latents, atol=1e-4, rtol=0)
        found.append((picture.pixels, sample.trajectory.record.latents))
    (current, current_latents), (average, average_latents), (again, again_latents) = found
    assert (average.int() - current.int()).abs().max() > 5 and (average_latents - current_latents).abs().max() > 1e-2
    assert (again.int() - current.int()).abs().max() <= 1, "the batch of a step decides about last bits"
    torch.testing.assert_close(again_latents, current_latents, atol=1e-4, rtol=0)


def interrupted(weights):
    """The first half of the weights, then the error that a trainer rank raises when another replica is lost."""
    yield from list(weights.items())[: len(weights) // 2]
    raise ConnectionError("another replica was lost")


@contextmanager
def refused(replica, message, version):
    """Check that the update inside raises this error, and that the weights of `version` serve as before."""
    (before,) = replica.generate([request(0)])
    with pytest.raises(Exception, match=message):
        yield
    (after,) = replica.generate([request(0)])
    assert after.trajectory.facts.version == before.trajectory.facts.version == version
    assert torch.equal(after.trajectory.record.latents, before.trajectory.record.latents)


@pytest.mark.parametrize(
    ("spoil", "message"), [(register_empty_adapters, EMPTY), (bind_no_module, UNBOUND)], ids=["empty", "unbound"]
)
def test_an_adapter_that_does_not_reach_its_layers_is_an_error_and_the_old_one_serves(lora_replica, spoil, message):
    assert_found(lora_replica, adapter_weights, spoil, message)
    with broken(lora_replica, spoil), refused(lora_replica, message, 202):
        lora_replica.update(adapter_weights(lora_replica, 3)[1].items(), 203).result()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda new: new.pop(sorted(new)[3]), "1 tensors are missing from the update"),
        (lambda new: new.update(extra=torch.ones(1)), "are unknown to the replica: extra"),
        (lambda new: new.update({sorted(new)[0]: torch.ones(9)}), "have another shape than what is loaded"),
    ],
    ids=["missing", "extra", "shape"],
)
def test_a_wrong_update_names_the_tensor_and_the_old_weights_still_serve(full_replica, lora_replica, spoil, message):
    for replica, weights_of in ((full_replica, load_weights), (lora_replica, adapter_weights)):
        replica.update(weights_of(replica, 30)[1].items(), 30).result()
        _, new = weights_of(replica, 31)
        spoil(new)
        with refused(replica, message, 30):
            replica.update(new.items(), 31).result()


def test_full_weights_for_a_replica_with_an_adapter_are_an_error_and_the_adapter_still_serves(
    lora_replica, monkeypatch
):
    """Without the error, the wrapped layers would skip them silently."""
    lora_replica.update(adapter_weights(lora_replica, 40)[1].items(), 40).result()
    monkeypatch.setattr(lora_replica.sender, "_adapter_config", None)
    with refused(lora_replica, "LoRA", 40):
        lora_replica.update(full_weights(lora_replica.path, 3).items(), 41).result()


def test_an_update_whose_sender_fails_half_way_leaves_the_replica_ready_for_the_next(full_replica):
    good = full_weights(full_replica.path, 2)
    (before,) = full_replica.generate([request(0)])
    with pytest.raises(ConnectionError):
        asyncio.run(full_replica.sender.update_weights(interrupted(good), global_steps=60))
    (after,) = full_replica.generate([request(0)])
    assert torch.equal(after.trajectory.record.latents, before.trajectory.record.latents)
    full_replica.update(good.items(), 60).result(timeout=60)
    (new,) = full_replica.generate([request(0)])
    assert new.trajectory.facts.version == 60 and not torch.equal(
        new.trajectory.record.latents, before.trajectory.record.latents
    )
    full_replica.update(full_weights(full_replica.path, 0).items(), 61).result()


def test_a_live_update_is_loaded_as_it_arrives_and_half_of_one_is_never_served(full_replica, monkeypatch):
    network, good = load_weights(full_replica, 2)
    requests = [request(number) for number in range(6)]
    with monkeypatch.context() as patch:
        patch.setattr(full_replica.sender, "_takes_turns", True)
        under_way = [full_replica.submit(asked) for asked in requests]
        ray.wait(under_way, num_returns=1, timeout=120)  # all are admitted by then; later ones wait for the update
        with pytest.raises(ConnectionError):
            asyncio.run(full_replica.sender.update_weights(interrupted(good), global_steps=70))
        assert all(
            one.trajectory.facts.version == one.trajectory.facts.last_version for one in ray.get(under_way, timeout=120)
        )
        ray.get(full_replica.server.open_submission_gate.remote())
        with pytest.raises(Exception, match="serves nothing until a whole update has come"):
            full_replica.generate(requests[:1])
        with pytest.raises(Exception, match=r"are missing from the update: .* serves nothing"):
            asyncio.run(full_replica.sender.update_weights(iter(list(good.items())[1:]), global_steps=70))
        asyncio.run(full_replica.sender.update_weights(iter(good.items()), global_steps=70))
    (found,) = full_replica.generate(requests[:1])
    expected = by_sampler(full_replica.path, network, requests[0], 70)
    assert found.trajectory.facts.version == 70
    torch.testing.assert_close(found.trajectory.record.latents, expected.record.latents, atol=1e-4, rtol=0)
    full_replica.update(full_weights(full_replica.path, 0).items(), 71).result()


def test_two_runs_on_one_machine_never_meet_at_one_socket(full_replica, monkeypatch):
    own = address(sockets_of(0), 0)
    assert full_replica.sender.zmq_handle == own
    assert len({own, address(sockets_of(0), 1), address(sockets_of(1), 0)}) == 3
    # both runs' first job has the number 1
    monkeypatch.setattr(ray.runtime_context.RuntimeContext, "get_session_name", lambda self: "another run")
    assert address(sockets_of(0), 0) != own


def test_a_replica_listens_on_nothing_but_loopback(full_replica, lora_replica):
    for replica in (full_replica, lora_replica):
        assert exposed_sockets(replica.server) == exposed_sockets_of_ray()


def test_a_request_in_flight_is_finished_before_a_sleep_and_a_later_one_waits_for_the_wake_up(full_replica):
    (expected,) = full_replica.generate([request(1)])
    first = full_replica.submit(request(0))
    while not full_replica.health()["num_running"]:
        assert not ray.wait([first], timeout=0)[0], "it ended before it could be put to sleep"
    ray.get(full_replica.server.sleep.remote(), timeout=60)
    health = full_replica.health()
    assert health["is_asleep"] and ray.get(first, timeout=0).trajectory.facts.uid == "p0"
    assert health["prompt_cache"]["size"] == 0, "embeddings lie on the device"
    later = full_replica.submit(request(1))
    assert not ray.wait([later], timeout=1)[0]
    ray.get(full_replica.server.wake_up.remote(tags=["weights"]), timeout=60)
    found = ray.get(later, timeout=60)
    assert found.trajectory.facts.sample_index == 1
    assert torch.equal(found.trajectory.record.latents, expected.trajectory.record.latents)
