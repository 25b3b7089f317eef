# SPDX-License-Identifier: Apache-2.0
"""The server of a `diffusers` replica, in this process, with a tiny random Qwen-Image."""

import asyncio
import random
import threading
from dataclasses import replace
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.sampling.runs import assert_bitwise as assert_same_record
from tests.sampling.runs import close
from verl_digen.algorithms.outside import Outside
from verl_digen.algorithms.window import Window
from verl_digen.config import DigenConfig, RolloutConfig
from verl_digen.inputs.audio import Audio
from verl_digen.inputs.images import PromptInputs
from verl_digen.models import load_model
from verl_digen.rollout.server import DiffusersServer
from verl_digen.types import Generation, Geometry, SampleRequest, Sampling
from verl_digen.weights.checksum import Manifest
from verl_digen.weights.sending import Wire, send_update

SAMPLING = Sampling(Geometry(64, 64), num_steps=4, true_cfg_scale=1.0, law="flow", noise_level=0.7)
WINDOW = Window((0, 1, 2), (0, 1, 2))
GUIDED = Sampling(Geometry(64, 64), num_steps=4, true_cfg_scale=3.0, law="flow", noise_level=0.7)


def make_server(
    path,
    max_batch_size=4,
    embed_cache_size=16,
    dtype="float32",
    adapter=None,
    compiles=False,
    seed=7,
    reserved_bytes=0,
    **rollout,
):
    rollout = {"batch_wait_s": 0.01} | rollout
    rollout |= {"max_batch_size": max_batch_size, "embed_cache_size": embed_cache_size}
    digen = DigenConfig(seed=seed, compile=compiles, rollout=RolloutConfig(**rollout))
    rank = adapter.r if adapter else 0
    model = SimpleNamespace(
        local_path=path, digen=digen, adapter_config=lambda: adapter, lora_rank=rank, int8_base=False
    )
    return DiffusersServer(SimpleNamespace(dtype=dtype), model, num_threads=1, reserved_bytes=reserved_bytes)


def make_requests(sampling=SAMPLING):
    return [
        SampleRequest(uid, index, PromptInputs(f"prompt of {uid}"), PromptInputs(" "), WINDOW, sampling, index == 0)
        for uid in ("p1", "p2", "p3")
        for index in range(3)
    ]


async def begin_and_send(server, weights, version, *, is_live, max_bucket_mb=1, timeout_s=30.0):
    """Send an update like a trainer rank -> its manifest. The sender blocks, so it has a thread."""
    with TemporaryDirectory() as folder:
        wire = Wire(f"ipc://{folder}/s", True, is_live, torch.float32, max_bucket_mb=max_bucket_mb, timeout_s=timeout_s)
        for _ in range(2):  # a call may be made again
            await server.begin_update(wire.handle, wire.use_shm, wire.is_live, folder)

        def send():
            return asyncio.run(send_update(weights.items(), wire, receiver="replica", has_died=lambda: False))

        total = await asyncio.to_thread(send)
    return Manifest(version, total.num_tensors, total.value)


async def update(server, weights, version, **wire):
    """Update a replica that takes turns with the trainer."""
    manifest = await begin_and_send(server, weights, version, is_live=True, **wire)
    for _ in range(2):  # a call may be made again
        await server.commit_update(manifest)


def weights_of(server, factor=1.0):
    return {name: factor * tensor for name, tensor in server._weights.module.state_dict().items()}


async def ask(server, requests, **how):
    return await asyncio.gather(*[server._batcher.submit(asked) for asked in requests], **how)


def generate(server, requests, **how):
    return asyncio.run(ask(server, requests, **how))


@pytest.mark.parametrize(("dtype", "allows_tf32"), [("float32", False), ("bfloat16", True)])
def test_a_replica_in_fp32_computes_without_tf32(tiny_qwen_image, monkeypatch, dtype, allows_tf32):
    threads: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    make_server(tiny_qwen_image, dtype=dtype)
    assert torch.backends.cudnn.allow_tf32 == allows_tf32 and threads == [1], "what it was given"


@pytest.mark.parametrize("sampling", [SAMPLING, GUIDED], ids=["plain", "guided"])
def test_batching_number_of_replicas_and_order_change_nothing(tiny_qwen_image, sampling):
    requests = make_requests(sampling)
    alone = generate(make_server(tiny_qwen_image, max_batch_size=1), requests)
    shuffled = requests.copy()
    random.Random(0).shuffle(shuffled)
    halves = shuffled[:4], shuffled[4:]
    together = [got for half in halves for got in generate(make_server(tiny_qwen_image, max_batch_size=8), half)]
    by_key = {(got.trajectory.facts.uid, got.trajectory.facts.sample_index): got for got in together}
    for got in alone:
        other = by_key[got.trajectory.facts.uid, got.trajectory.facts.sample_index]
        close(other.trajectory.record.latents, got.trajectory.record.latents)
        close(other.trajectory.record.log_probs, got.trajectory.record.log_probs)
        assert (other.pixels.int() - got.pixels.int()).abs().max() <= 1
        assert other.trajectory.facts.seed == got.trajectory.facts.seed


def test_videos_have_their_own_sound_in_any_batch(tiny_ltx2):
    sampling = replace(GUIDED, geometry=Geometry(64, 64, 9))
    requests = [replace(one, wants_latents=True) for one in make_requests(sampling)[:3]]
    server = make_server(tiny_ltx2)
    together = generate(server, requests)
    decode = load_model(tiny_ltx2).load_audio_decoder(torch.float32, torch.device("cpu"))
    for got in together:
        assert got.pixels.shape == (9, 64, 64, 3) and got.latents is not None
        (expected,) = decode(got.latents.final[None], sampling.geometry)
        assert expected is not None and got.audio.rate_hz == expected.rate_hz
        np.testing.assert_allclose(got.audio.waveform, expected.waveform, atol=1e-5, rtol=0)
    (alone,) = generate(make_server(tiny_ltx2, max_batch_size=1), requests[1:2])
    np.testing.assert_allclose(alone.audio.waveform, together[1].audio.waveform, atol=1e-4, rtol=0)
    assert np.abs(together[0].audio.waveform - together[1].audio.waveform).max() > 1e-2
    held = {id(parameter) for module in server._memory._modules for parameter in module.parameters()}
    assert {id(one) for module in server._samples.audio_decoder.modules for one in module.parameters()} <= held


def test_a_sample_for_a_reward_of_latents_carries_what_its_picture_was_decoded_from(tiny_qwen_image):
    server, (first, second, _) = make_server(tiny_qwen_image), make_requests(GUIDED)[:3]
    with_latents, without = generate(server, [replace(second, wants_latents=True), first])
    assert without.latents is None and with_latents.condition is None
    latents = with_latents.latents
    pixels = server._samples.decoder(latents.final[None], second.sampling.geometry).pixels
    assert (pixels[0].int() - with_latents.pixels.int()).abs().max() <= 1
    assert latents.condition.keys() == without.condition.keys()
    for name, tensor in without.condition.items():
        assert torch.equal(latents.condition[name], tensor), "the prompt's own, not the negative one's"


def test_texts_of_one_length_share_a_forward_where_padding_cannot_be_masked(tiny_qwen_image):
    requests = make_requests(GUIDED)[:6]
    requests[3:] = [replace(asked, inputs=PromptInputs("a much longer prompt of p2")) for asked in requests[3:]]
    expected = generate(make_server(tiny_qwen_image, max_batch_size=6), requests)
    server, forwards = make_server(tiny_qwen_image, max_batch_size=6, attention_backend="_native_flash"), []

    def count(module, args, inputs):
        assert inputs["encoder_hidden_states_mask"] is None
        forwards.append(len(inputs["hidden_states"]))

    server._weights.module.register_forward_pre_hook(count, with_kwargs=True)
    answers = generate(server, requests)
    assert forwards == [3] * (2 * 2 * GUIDED.num_steps)
    for got, own in zip(answers, expected, strict=True):
        assert got.trajectory.facts.uid == own.trajectory.facts.uid
        close(got.trajectory.record.latents, own.trajectory.record.latents)


def test_latents_that_are_not_finite_fail_their_own_samples_alone(tiny_qwen_image):
    requests = make_requests()
    server = make_server(tiny_qwen_image, max_batch_size=9)
    (condition,) = server._prompts.lookup([requests[3].inputs]).values()
    condition["embeds"].fill_(torch.nan)  # as of an encoder that overflows on one prompt
    answers = generate(server, requests, return_exceptions=True)
    expected = generate(make_server(tiny_qwen_image, max_batch_size=9), requests)
    for request, got, own in zip(requests, answers, expected, strict=True):
        if request.uid == "p2":
            said = f"sample {request.sample_index} of group p2 must have finite latents after its last step, got NaN"
            assert isinstance(got, ValueError) and str(got).startswith(said) and "external_lib" in str(got)
        else:
            close(got.trajectory.record.latents, own.trajectory.record.latents)


@pytest.mark.parametrize("part", ["pixels", "sound"])
def test_pixels_and_sound_that_are_not_finite_fail_their_own_samples_alone(tiny_qwen_image, part):
    server, asked = make_server(tiny_qwen_image, max_batch_size=9), make_requests()[:4]
    decode = server._samples.decoder.decode

    def decode_one_badly(latents, geometry):
        found = decode(latents, geometry)
        return found._replace(is_finite=torch.tensor([True, part != "pixels", True, True]))

    def sounds(latents, geometry):
        loud = Audio(np.array([[0.0, np.inf if part == "sound" else 1.0]], np.float32), 8000)
        return [None, loud, None, None]

    server._samples.decoder = replace(server._samples.decoder, decode=decode_one_badly)
    server._samples.audio_decoder = replace(server._samples.audio_decoder, decode=sounds)
    answers = generate(server, asked, return_exceptions=True)
    assert [isinstance(answer, Generation) for answer in answers] == [True, False, True, True]
    assert f"sample {asked[1].sample_index} of group {asked[1].uid} must have finite {part}, got NaN" in str(answers[1])


@pytest.mark.parametrize("is_live", [True, False], ids=["live", "staged"])
async def test_a_weight_update_lands_between_trajectories_and_marks_them(tiny_qwen_image, is_live, monkeypatch):
    server = make_server(tiny_qwen_image)

    requests = make_requests()[:4]
    first = asyncio.ensure_future(ask(server, requests))
    await asyncio.sleep(0.03)
    manifest = await begin_and_send(server, weights_of(server, 1.01), 5, is_live=is_live)
    meanwhile = asyncio.ensure_future(ask(server, requests))
    if is_live:
        await first
        assert not meanwhile.done(), "no batch runs on half an update"
        await server.commit_update(manifest)
    else:
        await meanwhile
        await server.seal_update(manifest)
        await server.seal_update(manifest)
        clock = SimpleNamespace(perf_counter=iter((1.0, 6.0, 8.0)).__next__)
        monkeypatch.setattr("verl_digen.rollout.server.time", clock)
        await server.activate_weights()
        assert server._last_update == {"load_s": 2.0, "drain_s": 5.0}
    before, meanwhile, after = await first, await meanwhile, await ask(server, requests)
    for got in (*before, *meanwhile, *after):
        assert got.trajectory.facts.version == got.trajectory.facts.last_version
    assert {got.trajectory.facts.version for got in before} <= {0, 5}
    assert {got.trajectory.facts.version for got in meanwhile} == {5 if is_live else 0}
    assert {got.trajectory.facts.version for got in after} == {5}
    assert not torch.equal(before[0].trajectory.record.latents, after[0].trajectory.record.latents)


async def test_a_live_update_begins_once_the_running_batch_has_ended(tiny_qwen_image, tmp_path):
    server, has_begun, may_end = make_server(tiny_qwen_image), threading.Event(), threading.Event()
    generate = server._generate

    def held(*arguments):
        has_begun.set()
        may_end.wait()
        return generate(*arguments)

    server._generate = held
    running = asyncio.ensure_future(ask(server, make_requests()[:2]))
    await asyncio.to_thread(has_begun.wait)
    begun = asyncio.ensure_future(server.begin_update(f"ipc://{tmp_path}/s", True, True, "update"))
    await asyncio.wait([begun], timeout=0.1)
    is_early = begun.done()
    may_end.set()
    await running
    await begun
    await asyncio.to_thread(server._receiving.abandon)
    assert not is_early


async def test_after_a_refused_update_the_old_weights_serve_if_it_was_staged(tiny_qwen_image):
    (before,) = await ask(make_server(tiny_qwen_image), make_requests()[:1])
    server = make_server(tiny_qwen_image)
    wrong = weights_of(server, 1.01)
    name = next(iter(wrong))
    wrong[name] = torch.zeros(3, 3, 3)

    async def refused(*, is_live):
        manifest = await begin_and_send(server, wrong, 1, is_live=is_live)
        with pytest.raises(RuntimeError, match=name):
            await server.seal_update(manifest)
        server._batcher.resume()
        return (await server._batcher.submit(make_requests()[0])).trajectory

    after = await refused(is_live=False)
    assert torch.equal(before.trajectory.record.latents, after.record.latents) and after.facts.version == 0
    with pytest.raises(RuntimeError, match="serves nothing until a whole update has come"):
        await refused(is_live=True)


async def test_a_sleeping_server_has_no_memory_and_an_update_wakes_it(tiny_qwen_image):
    expected = await ask(make_server(tiny_qwen_image), make_requests()[:2])
    server = make_server(tiny_qwen_image)
    server._frees_memory = True
    weights = {name: tensor.clone() for name, tensor in weights_of(server).items()}
    modules = [server._weights.module, *server._encoders.encode.modules, *server._samples.decoder.modules]
    tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    num_bytes = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
    copied_out = []
    for version in (1, 2):
        await server.sleep()
        assert not any(tensor.untyped_storage().nbytes() for tensor in tensors if tensor.numel() > 0)
        memories = server._memory, server._encoders._memory
        copied_out.append(sum(memory.num_bytes_copied_out for memory in memories))
        with pytest.raises(RuntimeError, match="a sleeping replica cannot encode"):
            await server.encode(make_requests()[0])
        waiting = asyncio.ensure_future(ask(server, make_requests()[:2]))
        await server.wake_up()
        await update(server, weights, version)
        got = await waiting
    for one, other in zip(got, expected, strict=True):
        assert one.trajectory.facts.version == 2
        close(one.trajectory.record.latents, other.trajectory.record.latents)
        assert (one.pixels.int() - other.pixels.int()).abs().max() <= 1
    trained = sum(tensor.nbytes for tensor in weights.values())
    assert copied_out[0] == copied_out[1] == num_bytes - trained > 0, "once, and nothing that updates replace"


def late_windows():
    """A group of which every sample is a batch of its own, with a window from step 2."""
    shared = replace(SAMPLING, shared_initial_noise=True)
    return [replace(asked, window=Window((2,), (2,))) for asked in make_requests(shared)[:3]]


def assert_bitwise(found, expected):
    for got, wanted in zip(found, expected, strict=True):
        assert torch.equal(got.pixels, wanted.pixels)
        assert_same_record(got.trajectory, wanted.trajectory)


def test_later_batches_of_a_group_begin_at_its_window_under_the_weights_that_serve(tiny_qwen_image):
    """Two updates may have one version: the current weights, and their average for validation."""
    server = make_server(tiny_qwen_image, max_batch_size=1)
    other = weights_of(server, 1.1)

    async def run():
        before = [await server._batcher.submit(asked) for asked in late_windows()]
        await update(server, other, 0)
        return before, [await server._batcher.submit(asked) for asked in late_windows()]

    before, after = asyncio.run(run())
    for batches in (before, after):
        assert [got.trajectory.facts.num_shared_steps for got in batches] == [0, 2, 2]
    alone = [generate(make_server(tiny_qwen_image), [asked])[0] for asked in late_windows()]
    assert_bitwise(before, alone)
    fresh = make_server(tiny_qwen_image, max_batch_size=1)
    asyncio.run(update(fresh, other, 0))
    assert_bitwise(after[:1], [asyncio.run(fresh._batcher.submit(late_windows()[0]))])
    assert not torch.equal(after[0].trajectory.record.latents, before[0].trajectory.record.latents)


def test_copies_in_fp8_are_those_of_the_weights_that_serve_also_after_a_sleep(tiny_qwen_image):
    sampling = replace(SAMPLING, outside=Outside(fp8=True))
    asked = [replace(one, sampling=sampling, window=Window((1,), (1,))) for one in make_requests()[:2]]
    server, fresh = make_server(tiny_qwen_image), make_server(tiny_qwen_image)
    server._frees_memory = True
    other = weights_of(server, 1.1)

    async def run():
        before = await ask(server, asked)
        await update(server, other, 1)
        awake = await ask(server, asked)
        await server.sleep()
        assert not server._network.fp8._copies
        await server.wake_up()
        await update(server, other, 2)
        return before, awake, await ask(server, asked)

    async def run_fresh():
        await update(fresh, other, 1)
        return await ask(fresh, asked)

    before, awake, woken = asyncio.run(run())
    expected = asyncio.run(run_fresh())
    assert server._network.fp8._copies
    assert_bitwise(awake, expected)
    assert_bitwise(woken, expected)
    assert not torch.equal(before[0].trajectory.record.latents, expected[0].trajectory.record.latents)
