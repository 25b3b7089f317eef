# SPDX-License-Identifier: Apache-2.0
"""The server of a `diffusers` replica, in this process, with a tiny random Qwen-Image."""

import asyncio
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from verl_digen.algorithms.window import Window
from verl_digen.config import DigenConfig, RolloutConfig
from verl_digen.rollout.server import DiffusersServer
from verl_digen.types import Geometry, SampleRequest, Sampling
from verl_digen.weights.probe import check_probes

SAMPLING = Sampling(Geometry(64, 64), num_steps=4, true_cfg_scale=1.0, law="flow", noise_level=0.7)
GUIDED = Sampling(Geometry(64, 64), num_steps=4, true_cfg_scale=3.0, law="flow", noise_level=0.7)


@pytest.fixture(autouse=True)
def keep_the_devices_of_this_process(monkeypatch):
    """Undo the server's changes to its process, which is this one."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")


def make_server(path, max_batch_size=4, embed_cache_size=16):
    digen = DigenConfig(
        seed=7,
        rollout=RolloutConfig(
            max_batch_size=max_batch_size, batch_wait_s=0.01, embed_cache_size=embed_cache_size, probe_every=5
        ),
    )
    return DiffusersServer(
        SimpleNamespace(dtype="float32"),
        SimpleNamespace(local_path=path, digen=digen, adapter_config=lambda: None),
        visible_devices="0",
        num_threads=1,
    )


def make_requests(sampling=SAMPLING):
    return [
        SampleRequest(uid, index, f"prompt of {uid}", " ", Window((0, 1, 2), (0, 1, 2)), sampling, index == 0)
        for uid in ("p1", "p2", "p3")
        for index in range(3)
    ]


def generate(server, requests):
    async def run():
        return await asyncio.gather(*[server.generate("id", [], {"request": asked}, None, None) for asked in requests])

    return asyncio.run(run())


@pytest.mark.parametrize("sampling", [SAMPLING, GUIDED], ids=["plain", "guided"])
def test_batching_number_of_replicas_and_order_change_nothing(tiny_qwen_image, sampling):
    requests = make_requests(sampling)
    alone = generate(make_server(tiny_qwen_image, max_batch_size=1), requests)
    shuffled = requests.copy()
    random.Random(0).shuffle(shuffled)
    halves = shuffled[:4], shuffled[4:]
    together = [got for half in halves for got in generate(make_server(tiny_qwen_image, max_batch_size=8), half)]
    by_key = {(got.trajectory.uid, got.trajectory.sample_index): got for got in together}
    for got in alone:
        other = by_key[got.trajectory.uid, got.trajectory.sample_index]
        torch.testing.assert_close(other.trajectory.record.latents, got.trajectory.record.latents, atol=1e-5, rtol=0)
        torch.testing.assert_close(
            other.trajectory.record.log_probs, got.trajectory.record.log_probs, atol=1e-5, rtol=0
        )
        assert (other.pixels.int() - got.pixels.int()).abs().max() <= 1
        assert other.trajectory.seed == got.trajectory.seed


def test_only_the_sample_that_asks_carries_the_prompts_conditions(tiny_qwen_image):
    answers = generate(make_server(tiny_qwen_image), make_requests(GUIDED)[:3])
    assert [got.condition is not None for got in answers] == [True, False, False]
    assert [got.negative_condition is not None for got in answers] == [True, False, False]


def test_a_prompt_the_encoder_refuses_fails_its_own_samples_alone(tiny_qwen_image):
    requests = make_requests(GUIDED)
    requests[4] = replace(requests[4], prompt="a cat " * 2000)
    server = make_server(tiny_qwen_image, max_batch_size=9)

    async def run():
        return await asyncio.gather(
            *[server.generate("id", [], {"request": asked}) for asked in requests], return_exceptions=True
        )

    answers = asyncio.run(run())
    expected = generate(make_server(tiny_qwen_image, max_batch_size=9), make_requests(GUIDED))
    for index, (got, alone) in enumerate(zip(answers, expected, strict=True)):
        if index == 4:
            assert isinstance(got, ValueError) and "shorten it in data.train_files" in str(got)
        else:
            torch.testing.assert_close(
                got.trajectory.record.latents, alone.trajectory.record.latents, atol=1e-5, rtol=0
            )


def test_a_weight_update_lands_between_trajectories_and_marks_them(tiny_qwen_image):
    server = make_server(tiny_qwen_image)
    weights = {name: tensor.clone() * 1.01 for name, tensor in server._weights.module.state_dict().items()}

    async def run():
        first = asyncio.gather(*[server.generate("id", [], {"request": asked}) for asked in make_requests()[:4]])
        await asyncio.sleep(0.03)
        await server.receive_weights(weights)
        await server.commit_weights(version=5, num_tensors=len(weights))
        second = await asyncio.gather(*[server.generate("id", [], {"request": asked}) for asked in make_requests()[:4]])
        return await first, second

    before, after = asyncio.run(run())
    for got in (*before, *after):
        assert got.trajectory.version == got.trajectory.last_version
    assert {got.trajectory.version for got in before} <= {0, 5}
    assert {got.trajectory.version for got in after} == {5}
    assert not torch.equal(before[0].trajectory.record.latents, after[0].trajectory.record.latents)


def test_after_a_refused_update_the_old_weights_serve(tiny_qwen_image):
    server = make_server(tiny_qwen_image)
    before = generate(server, make_requests()[:1])[0]
    weights = dict(server._weights.module.state_dict())
    name = next(iter(weights))
    weights[name] = torch.zeros(3, 3, 3)

    async def update():
        await server.receive_weights(weights)
        await server.commit_weights(version=1, num_tensors=len(weights))

    with pytest.raises(RuntimeError, match=name):
        asyncio.run(update())
    server = make_server(tiny_qwen_image)
    after = generate(server, make_requests()[:1])[0]
    assert (
        torch.equal(before.trajectory.record.latents, after.trajectory.record.latents) and after.trajectory.version == 0
    )


def publish(server, weights, version):
    async def update():
        await server.receive_weights(weights)
        await server.commit_weights(version=version, num_tensors=len(weights))
        return (await server.check_health())["probes"]

    return asyncio.run(update())


def test_a_probe_follows_the_weights_and_two_replicas_agree_on_it(tiny_qwen_image):
    servers = [make_server(tiny_qwen_image) for _ in range(2)]
    start = {name: tensor.clone() for name, tensor in servers[0]._weights.module.state_dict().items()}
    for version, factor in enumerate((1.0, 1.0001)):
        weights = {name: factor * tensor for name, tensor in start.items()}
        probes = {f"r{number}": publish(server, weights, version) for number, server in enumerate(servers)}
    assert [probe.version for probe in probes["r0"]] == [0, 1]
    metrics = check_probes(probes)
    assert metrics["rollout/probe_spread"] == 0.0 and 0 < metrics["rollout/probe_change"] < 0.1
    assert asyncio.run(servers[0].probe()) == probes["r0"][-1]


def test_a_network_that_does_not_use_what_it_is_sent_is_found_out(tiny_qwen_image):
    server = make_server(tiny_qwen_image)
    start = {name: tensor.clone() for name, tensor in server._weights.module.state_dict().items()}
    # forward uses weights that no update reaches
    server._weights.module.forward = make_server(tiny_qwen_image)._weights.module.forward
    publish(server, start, 0)
    probes = publish(server, {name: 1.1 * tensor for name, tensor in start.items()}, 1)
    with pytest.raises(RuntimeError, match=r"replica r0 took version 1 .* computes bitwise what it did before"):
        check_probes({"r0": probes})


def test_probes_are_taken_at_the_first_updates_and_then_now_and_then(tiny_qwen_image):
    server = make_server(tiny_qwen_image)
    start = {name: tensor.clone() for name, tensor in server._weights.module.state_dict().items()}
    assert [publish(server, start, version)[-1].version for version in range(7)] == [0, 1, 2, 2, 2, 5, 5]
