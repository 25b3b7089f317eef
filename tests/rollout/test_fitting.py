# SPDX-License-Identifier: Apache-2.0
"""Batches that fit into memory: on a device that takes a known number of bytes, and a replica on the pretend device."""

import asyncio
import gc
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.pretend.memory import memory
from tests.pretend.phases import make_server
from tests.pretend.process import on_pretend
from tests.pretend_cuda import FakeCuda
from tests.rollout.test_samples import requests_of
from tests.rollout.test_server import ask
from tests.rollout.test_server import make_server as make_cpu_server
from verl_digen.config import RolloutConfig
from verl_digen.models.pixels import Decoded
from verl_digen.rollout import fitting as fitting_module
from verl_digen.rollout.fitting import Fitting
from verl_digen.types import Generation, Geometry


class Device(FakeCuda):
    """The network takes 40 of 100 bytes, a batch 4, and each sample `sample`."""

    def __init__(self, sample: float):
        self.sample = sample
        self.batches: list[tuple[int, ...]] = []
        """Batches that were made."""
        self.num_shortages = 0
        self.workspace = 0
        """Bytes that the first batch allocates and that stay."""

    def make(self, places: Sequence[int]) -> tuple[int, ...]:
        self.network, self.workspace = self.network + self.workspace, 0
        needs = self.network + 4 + int(self.sample * len(places))
        if needs > 100:
            self.num_shortages += 1
            raise torch.OutOfMemoryError(f"tried to allocate {needs} of 100 bytes\nand more lines")
        self.peak = max(self.peak, needs)
        self.batches.append(tuple(places))
        return tuple(places)

    @property
    def sizes(self) -> list[int]:
        return [len(batch) for batch in self.batches]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Device:
    found = Device(request.param)
    found.put_in(monkeypatch)
    return found


def takes(sample: float) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("device", [sample], indirect=True)


def fitting() -> Fitting:
    return Fitting(True, torch.device("meta"))


@takes(6)
def test_a_batch_has_as_many_samples_as_fit_by_the_peaks_of_one_and_of_two(device: Device):
    """90 of 100 bytes may be used: 40 + 4 + 7 * 6 = 86 do, and 8 samples do not."""
    fits, places = fitting(), range(20)
    assert fits.size is None
    made = fits.make("a", places, device.make)
    assert device.sizes == [1, 2, 7, 7, 3] and fits.size == 7
    assert [place for part in made for place in part] == list(places), "each once, in order"
    fits.make("a", places, device.make)
    assert device.sizes[5:] == [7, 7, 6], "measured once"
    fits.make("b", places[:3], device.make)
    assert device.sizes[8:] == [1, 2], "another kind is measured for itself"


@takes(6)
def test_memory_that_others_take_meanwhile_leaves_fewer_samples(device: Device):
    fits = fitting()
    fits.make("a", range(3), device.make)
    device.network = 70
    fits.make("a", range(5), device.make)
    assert device.sizes == [1, 2, 2, 2, 1] and device.num_shortages == 0


@takes(6)
def test_buckets_of_an_update_that_may_come_meanwhile_leave_fewer_samples(device: Device):
    fits = fitting()
    fits.reserved_bytes = 20
    fits.make("a", range(9), device.make)
    assert device.sizes == [1, 2, 4, 2], "40 + 4 + 4 * 6 = 68 of 90 - 20 bytes, and 5 samples do not fit"


def test_a_server_leaves_what_its_replica_reserves(tiny_qwen_image: Path):
    assert make_cpu_server(tiny_qwen_image, reserved_bytes=7)._samples.fitting.reserved_bytes == 7


@takes(10)
def test_memory_that_the_first_sample_allocates_and_that_stays_makes_later_ones_no_smaller(device: Device):
    """The first sample takes 14 bytes and leaves 5 more, so that two take 24: 45 of 90 bytes hold 4 + 4 * 10."""
    device.workspace = 5
    fitting().make("a", range(9), device.make)
    assert device.sizes == [1, 2, 3, 3], "3 by the measurements, which count the 5 bytes twice"
    assert device.num_shortages == 0


@takes(30)
def test_two_samples_do_not_run_where_twice_the_first_does_not_fit(device: Device):
    fitting().make("a", range(3), device.make)
    assert device.sizes == [1, 1, 1] and device.num_shortages == 0


@takes(0.1)
def test_small_samples_have_a_most(device: Device, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fitting_module, "_Kind", partial(fitting_module._Kind, most=5))
    fitting().make("a", range(12), device.make)
    assert device.sizes == [1, 2, 5, 4]


@takes(6)
def test_a_batch_that_runs_out_of_memory_runs_again_in_halves_and_no_later_one_is_larger(device: Device):
    fits = fitting()
    fits.make("a", range(3), device.make)
    device.sample = 12  # 40 + 4 + 7 * 12 do not fit, and 3 * 12 do
    made = fits.make("a", range(8), device.make)
    assert made == [(0, 1, 2), (3, 4, 5), (6, 7)] and device.num_shortages == 1
    device.sample = 1
    fits.make("a", range(8), device.make)
    assert device.sizes[-3:] == [3, 3, 2] and fits.size == 3


@takes(70)
def test_one_sample_that_does_not_fit_is_an_error(device: Device):
    with pytest.raises(torch.OutOfMemoryError):
        fitting().make("a", range(3), device.make)
    assert device.num_shortages == 1


@takes(6)
def test_nothing_is_measured_where_memory_does_not_limit(device: Device):
    fits = Fitting(False, torch.device("meta"))
    assert fits.make("a", range(9), device.make) == [tuple(range(9))] and fits.size is None


def test_memory_is_measured_on_one_accelerator_with_auto_alone():
    auto, accelerator = RolloutConfig(max_batch_size="auto"), torch.device("meta")
    ways = {
        "auto": (auto, accelerator),
        "a number": (RolloutConfig(max_batch_size=8), accelerator),
        "a CPU": (auto, torch.device("cpu")),
    }
    measures = {way: Fitting(config.fits_batches, device)._measures for way, (config, device) in ways.items()}
    assert [way for way, does in measures.items() if does] == ["auto"]


def test_a_batch_size_is_a_number_or_auto():
    assert RolloutConfig(max_batch_size="auto").batch_size == RolloutConfig().batch_size == 8
    assert RolloutConfig(max_batch_size=24).batch_size == 24
    with pytest.raises(ValueError, match=r"digen.rollout.max_batch_size must be auto or lie in .*, got 'many'"):
        RolloutConfig(max_batch_size="many")


async def draw(server) -> list[Generation]:
    """Eight samples of a prompt."""
    first = replace(requests_of("qwen_image")[0], wants_latents=False, wants_condition=False, burst=None)
    return await ask(server, [replace(first, sample_index=index) for index in range(8)])


def sizes_of(server) -> list[int]:
    """Sizes of the batches that a server denoises from now on, those that fail too."""
    found: list[int] = []
    denoise = server._samples.sampler.denoise

    def noted(requests, *arguments, **options):
        found.append(len(requests))
        return denoise(requests, *arguments, **options)

    server._samples.sampler.denoise = noted
    return found


def blank(latents: torch.Tensor, geometry: Geometry) -> Decoded:
    """Black pictures, which take next to no memory."""
    size = (len(latents), geometry.height_px, geometry.width_px, 3)
    pixels = torch.zeros(size, dtype=torch.uint8, device=latents.device)
    return Decoded(pixels, torch.ones(len(latents), dtype=torch.bool, device=latents.device))


async def in_little_memory(path: Path) -> dict[str, list[int]]:
    """Sizes of batches: with plenty of memory, with room for few samples, and where the measurement is wrong."""
    alone = await draw(make_server(path, 1))
    gc.collect()  # that server, in cycles, which would give its memory back at any time
    server = make_server(path, "auto")
    sizes, found = sizes_of(server), {}

    async def draw_the_same(name: str) -> None:
        sizes.clear()
        for got, expected in zip(await draw(server), alone, strict=True):
            path, before = (one.trajectory.record.columns()["latents"] for one in (got, expected))
            assert torch.equal(path[0], before[0]), "the noise is the same"
            assert (path - before).abs().max() < 0.05, "a batch of another size rounds differently"
        found[name] = sizes.copy()

    await draw_the_same("plenty")
    (kind,) = server._samples.fitting._kinds.values()
    with memory.limited(int((memory.recount() + kind.one + 2.5 * kind.sample) / 0.9)):
        await draw_the_same("little")
    # of denoising: what does not fit while it is decoded, is decoded one by one
    server._samples.decoder = replace(server._samples.decoder, decode=blank)
    server._samples.fitting._kinds.clear()
    await draw(server)
    (kind,) = server._samples.fitting._kinds.values()
    needs = kind.one + int(2.5 * kind.sample)
    kind.sample, fitting_module.MARGIN, server._batcher.max_batch_size = 1, -9.0, 8
    gc.collect()
    with memory.limited(memory.recount() + needs):
        await draw_the_same("wrong")
    return found


def run_in_little_memory(path: Path) -> dict[str, list[int]]:
    return asyncio.run(in_little_memory(path))


@pytest.mark.slow
def test_a_replica_in_little_memory_answers_every_request_with_the_same_samples(tiny_qwen_image: Path):
    sizes = on_pretend(run_in_little_memory, tiny_qwen_image)
    assert sizes["plenty"] == [1, 2, 5], "one and two are measured"
    assert sizes["little"] and max(sizes["little"]) <= 3 and sum(sizes["little"]) == 8
    assert sizes["wrong"][0] > sizes["wrong"][-1] and sum(sizes["wrong"]) > 8, "a batch ran out of memory"
