# SPDX-License-Identifier: Apache-2.0
"""Answers of virtual replicas."""

import asyncio
import pickle
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from verl.checkpoint_engine.base import CheckpointEngineRegistry

import verl_digen.virtual.checkpoint_engine  # noqa: F401 - it registers itself
from verl_digen.algorithms.forward import NoiseLevels
from verl_digen.algorithms.window import WindowConfig
from verl_digen.config import DigenConfig, SamplingConfig, VirtualConfig
from verl_digen.rollout.batcher import Withdrawn
from verl_digen.sampling.requests import ODE_ONLY, sample_request
from verl_digen.types import Generation, PromptRow, SampleRequest
from verl_digen.virtual.host import VirtualHost, VirtualServer
from verl_digen.virtual.reward import compute_score

DIGEN = DigenConfig(
    sampling=SamplingConfig(height_px=16, width_px=16, num_steps=10, true_cfg_scale=4.5),
    window=WindowConfig(kind="consecutive", size=2),
    virtual=VirtualConfig(profile="wan2.1-14b", time_scale=1e-4, latent_shape=[16, 3, 6, 8]),
)


def request_of(index: int, uid: str = "p0") -> SampleRequest:
    return sample_request(DIGEN, PromptRow("a cat", "test", None, uid=uid), index, step=1, validate=False)


def generate(host: VirtualHost, *calls: tuple[int, SampleRequest]) -> list[Generation]:
    async def run():
        return await asyncio.gather(*[host.generate(rank, request) for rank, request in calls])

    return asyncio.run(run())


def test_a_trajectory_has_the_shapes_of_a_real_one_and_shares_one_buffer():
    host = VirtualHost(DIGEN)
    first, second = generate(host, (0, request_of(0)), (0, request_of(1)))
    record = first.trajectory.record
    assert record.latents.shape == (3, 16, 3, 6, 8) and record.latents.dtype == torch.float32
    assert record.positions.tolist() == [0, 1]
    assert first.trajectory.sampling == request_of(0).sampling
    assert record.sigmas.shape == record.next_sigmas.shape == record.log_probs.shape == (2,)
    assert (record.sigmas > record.next_sigmas).all()
    assert second.trajectory.record.latents.data_ptr() == record.latents.data_ptr()
    assert first.pixels.shape == (16, 16, 3) and first.pixels.dtype == torch.uint8
    assert first.condition is not None and first.negative_condition is not None
    assert second.condition is None and second.negative_condition is None


def test_a_clean_record_has_the_shapes_of_a_real_one_and_shares_the_buffer():
    forward = [replace(request_of(index), window=ODE_ONLY, noise_levels=NoiseLevels((0, 3, 8))) for index in range(2)]
    first, second = (got.trajectory.record for got in generate(VirtualHost(DIGEN), *[(0, asked) for asked in forward]))
    assert first.clean.shape == (16, 3, 6, 8) and first.clean.dtype == torch.float32
    assert first.sigmas.tolist() == pytest.approx([1.0, 0.7, 0.2])
    assert second.clean.data_ptr() == first.clean.data_ptr()


def test_a_sample_comes_out_the_same_whichever_replica_is_asked():
    one, other = VirtualHost(DIGEN), VirtualHost(DIGEN)
    (here,), (there,) = generate(one, (0, request_of(3))), generate(other, (7, request_of(3)))
    assert (here.trajectory.seed, here.trajectory.uid) == (there.trajectory.seed, there.trajectory.uid)
    assert torch.equal(here.pixels, there.pixels)
    seeds = {generation.pixels[0, 0, 0].item() for generation in generate(one, *[(0, request_of(i)) for i in range(8)])}
    assert len(seeds) > 1, "rewards differ"


def test_samples_carry_the_version_that_was_published():
    host = VirtualHost(DIGEN)
    assert generate(host, (0, request_of(0)))[0].trajectory.version == 0
    asyncio.run(host.update_weights(global_steps=5))
    assert generate(host, (3, request_of(0)))[0].trajectory.version == 0, "nobody told the replica to take it"
    assert asyncio.run(host.activate_weights(3)) == 5
    trajectory = generate(host, (3, request_of(0)))[0].trajectory
    assert (trajectory.version, trajectory.last_version) == (5, 5)
    assert generate(host, (4, request_of(0)))[0].trajectory.version == 0


def test_a_replica_whose_samples_nobody_wants_any_more_is_free_at_once():
    digen = replace(DIGEN, virtual=replace(DIGEN.virtual, time_scale=1.0))
    host = VirtualHost(digen)

    async def run():
        asked = asyncio.gather(*[host.generate(0, request_of(index)) for index in range(2)], return_exceptions=True)
        await asyncio.sleep(0.01)
        await host.withdraw(0, "p0")
        return await asked

    assert [type(answer) for answer in asyncio.run(run())] == [Withdrawn, Withdrawn]


def test_a_chunk_takes_its_samples_time_and_replicas_work_side_by_side():
    digen = replace(DIGEN, virtual=replace(DIGEN.virtual, time_scale=0.01))
    host = VirtualHost(digen)
    requests = [(rank, request_of(index)) for rank in range(16) for index in range(3)]
    generations = generate(host, *requests)
    took_s = [generation.ended_s - generation.started_s for generation in generations]
    assert min(took_s) >= 3 * host._sample_s * 0.99
    # one after the other, the 16 replicas would take 16 times as long
    assert max(took_s) < 8 * 3 * host._sample_s


def test_the_handle_of_a_replica_travels_and_names_its_replica():
    calls = []
    host = SimpleNamespace(
        generate=SimpleNamespace(remote=lambda *given: calls.append(given)), __ray_ready__="a sign of life"
    )
    server = VirtualServer(host, 5)
    server.generate.remote("p0_1", [], {"request": "the request"})
    assert calls == [(5, "the request")]
    assert server.__ray_ready__ == "a sign of life"
    assert pickle.loads(pickle.dumps(VirtualServer("host", 5))).replica_rank == 5


@pytest.mark.parametrize("num_frames", [1, 4])
def test_pixels_are_those_of_an_image_or_of_a_video(num_frames):
    request = request_of(0)
    geometry = replace(request.sampling.geometry, num_frames=num_frames)
    request = replace(request, sampling=replace(request.sampling, geometry=geometry))
    pixels = generate(VirtualHost(DIGEN), (0, request))[0].pixels
    assert pixels.shape == ((16, 16, 3) if num_frames == 1 else (4, 16, 16, 3))


def test_the_reward_is_the_pixel_that_the_host_wrote_after_the_profiles_time():
    generation = generate(VirtualHost(DIGEN), (0, request_of(3)))[0]
    score = compute_score("shapes", generation.pixels.numpy(), None, profile="wan2.1-14b", time_scale=1e-4)
    assert asyncio.run(score) == pytest.approx((generation.trajectory.seed % 256) / 255)


def test_the_checkpoint_engine_is_found_by_name_and_tells_nobody_anything():
    engine = CheckpointEngineRegistry.get("digen_virtual")
    assert engine.build_topology(1, 1, [None, None]) == ({}, {})

    async def received():
        made = CheckpointEngineRegistry.new("digen_virtual", bucket_size=1, is_master=True)
        return await made.send_weights(iter(())), [named async for named in made.receive_weights()]

    assert asyncio.run(received()) == ({}, [])
