# SPDX-License-Identifier: Apache-2.0
"""A replica of two devices, each with a shard of every layer: on the CPU two processes and gloo."""

import asyncio
import os
from contextlib import suppress
from pathlib import Path

import pytest
import ray
import torch
from ray.exceptions import RayActorError, RayTaskError

from tests import own_parts
from tests.vllm_omni.conftest import (
    GUIDED,
    by_sampler,
    compose_actor_rollout,
    exposed_sockets,
    exposed_sockets_of_ray,
    full_weights,
    request,
    start_server,
)
from verl_digen.models import load_model

TOLERANCE = 1e-5
REPLICA = 5
"""Replica rank that is unique in these tests."""
MAX_FAILED = 20
"""Maximum number of samples that fail before a dead worker is noticed."""
SIZE = "actor_rollout_ref.rollout.tensor_model_parallel_size=2"


class TrainerRank:
    """Sends weights to the engine worker of the same local rank, as each trainer rank of a replica does."""

    def __init__(self, rank, composed):
        from verl_digen.rollout.vllm_omni.adapter import vLLMOmniServerAdapter

        os.environ.update(RANK=str(rank), WORLD_SIZE="2", RAY_LOCAL_WORLD_SIZE="2")
        self.adapter = vLLMOmniServerAdapter(composed.rollout, composed.model, None, replica_rank=REPLICA)

    def send(self, path, version, weights):
        asyncio.run(self.adapter.update_weights(iter(full_weights(path, weights).items()), global_steps=version))


def test_two_devices_generate_what_one_does_before_and_after_an_update(ray_here, tiny_qwen_image):
    composed = compose_actor_rollout(tiny_qwen_image, SIZE)
    server = start_server(composed, REPLICA, num_devices=2, MASTER_PORT="1", RANK="7", WORLD_SIZE="9", LOCAL_RANK="5")
    assert [device.name for device in ray.get(server.visible_devices.remote())] == ["0", "1"]
    ranks = [ray.remote(num_cpus=0)(TrainerRank).remote(rank, composed) for rank in range(2)]
    model = load_model(tiny_qwen_image)
    network = model.load_transformer(torch.float32)
    requests = [request(0), request(4), request(2, GUIDED)]
    for version in (0, 2):
        if version:
            ray.get([rank.send.remote(tiny_qwen_image, version, version) for rank in ranks], timeout=120)
            ray.get(server.activate_weights.remote())
            network.load_state_dict(full_weights(tiny_qwen_image, version))
        answers = ray.get(
            [server.generate.remote(str(number), [], {"request": asked}) for number, asked in enumerate(requests)]
        )
        for asked, got in zip(requests, answers, strict=True):
            expected = by_sampler(tiny_qwen_image, network, asked, version)
            found = got.trajectory
            assert (found.facts.version, found.facts.last_version) == (version, version)
            torch.testing.assert_close(found.record.latents, expected.record.latents, atol=TOLERANCE, rtol=0)
            torch.testing.assert_close(found.record.log_probs, expected.record.log_probs, atol=TOLERANCE, rtol=0)
    taken = [ray.get(server.__ray_call__.remote(lambda server: server._taken))]
    for version, weights in ((3, 2), (4, 4)):
        ray.get([rank.send.remote(tiny_qwen_image, version, weights) for rank in ranks], timeout=120)
        assert ray.get(server.activate_weights.remote()) == version
        taken.append(ray.get(server.__ray_call__.remote(lambda server: server._taken)))
    assert taken[0] == taken[1] and all(before != after for before, after in zip(*taken[1:], strict=True))
    assert exposed_sockets(server) == exposed_sockets_of_ray(), "the workers of a replica meet on loopback"

    def kill_a_worker(self):
        import multiprocessing

        workers = multiprocessing.active_children()
        assert len(workers) == 2
        workers[0].kill()

    ray.get(server.__ray_call__.remote(kill_a_worker))
    with pytest.raises(RayActorError):  # the replica is lost, instead of failing every further sample
        for _ in range(MAX_FAILED):
            with suppress(RayTaskError):
                ray.get(server.generate.remote("after", [], {"request": requests[0]}), timeout=120)


@pytest.mark.grid
def test_workers_in_processes_of_their_own_know_a_users_own_model(ray_here, tiny_qwen_image, tmp_path):
    own_parts.write_modules(tmp_path)
    path = own_parts.write_checkpoint(tmp_path / "checkpoint", tiny_qwen_image)
    composed = compose_actor_rollout(path, SIZE, f"actor_rollout_ref.model.external_lib={own_parts.NAME}")
    python_path = f"{tmp_path}:{Path(__file__).parents[2]}"
    server = start_server(composed, REPLICA + 1, num_devices=2, PYTHONPATH=python_path)
    found = ray.get(server.generate.remote("0", [], {"request": request(0)})).trajectory
    network = load_model(tiny_qwen_image).load_transformer(torch.float32)
    expected = by_sampler(tiny_qwen_image, network, request(0), 0)
    torch.testing.assert_close(found.record.latents, expected.record.latents, atol=TOLERANCE, rtol=0)
