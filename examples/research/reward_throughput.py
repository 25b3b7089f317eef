# SPDX-License-Identifier: Apache-2.0
"""Images per second of a scorer whose call takes 50 ms whatever its size: one call per image beside batches.

    python examples/research/reward_throughput.py [--call_ms 50] [--num_images 128] [--sizes 1 8 32] [--repeats 3]

The scorer stands for a model on one device: it sleeps with the device locked, so calls never overlap. Both ways are
those of a run, without Ray: a reward function goes through the functions' scorer, one call per image; a reward class
through its pool's queue, which makes batches of at most `max_batch_size`. All images wait from the start, as the
samples of several groups do. Each cell is the median over the repeats, which are interleaved.
"""

from __future__ import annotations

import argparse
import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch

from verl_digen.reward.base import NoSettings, Result, Reward
from verl_digen.reward.functions import reward_of
from verl_digen.reward.scoring import BatchScorer
from verl_digen.types import PromptRow, RewardInput

CPU = torch.device("cpu")
NO_RETRIES: dict[str, Any] = {"max_retries": 0, "timeout_s": 600.0}


class Device:
    """A device that one call at a time occupies for `call_s`."""

    def __init__(self, call_s: float):
        self._call_s, self._lock = call_s, threading.Lock()
        self.num_calls = 0

    def run(self, images: Sequence[np.ndarray]) -> list[float]:
        """Brightness of each image."""
        with self._lock:
            time.sleep(self._call_s)
            self.num_calls += 1
        return [float(image.mean()) / 255 for image in images]


class Brightness(Reward):
    """The scorer as a class: one call per batch."""

    def __init__(self, device: Device):
        super().__init__(NoSettings(), CPU)
        self._on = device

    def score(self, batch: Sequence[RewardInput]) -> Sequence[Result]:
        return self._on.run([sample.pixels for sample in batch])


async def one_by_one(device: Device, samples: Sequence[RewardInput]) -> list[float]:
    """Score with a reward function."""

    def brightness(data_source, solution_image, ground_truth, extra_info=None):
        return device.run([solution_image])[0]

    scorer = BatchScorer("brightness", lambda: reward_of(brightness)({}, CPU), **NO_RETRIES)
    found = await asyncio.gather(*(scorer.score((one,)) for one in samples))
    return [score.value for (score,) in found]


async def batched(device: Device, samples: Sequence[RewardInput], size: int) -> list[float]:
    """Score with a reward class in batches of at most `size`."""
    scorer = BatchScorer(
        "brightness", lambda: Brightness(device), max_batch_size=size, batch_wait_s=0.005, **NO_RETRIES
    )
    found = await asyncio.gather(*(scorer.score((one,)) for one in samples))
    return [score.value for (score,) in found]


def measure(
    ways: dict[str, Callable[[Device, Sequence[RewardInput]], Awaitable[list[float]]]],
    samples: Sequence[RewardInput],
    call_s: float,
    repeats: int,
) -> dict[str, tuple[float, int]]:
    """Way -> (images per second, calls).

    Raises:
        RuntimeError: a way gives an image another score than its own.
    """
    expected = [float(sample.pixels.mean()) / 255 for sample in samples]
    rates: dict[str, list[float]] = {name: [] for name in ways}
    calls = {}
    for _ in range(repeats):
        for name, way in ways.items():
            device = Device(call_s)
            start_s = time.perf_counter()
            found = asyncio.run(way(device, samples))  # type: ignore[arg-type] - a coroutine
            rates[name].append(len(samples) / (time.perf_counter() - start_s))
            calls[name] = device.num_calls
            if not np.allclose(found, expected):
                raise RuntimeError(f"{name}: scores are not those of the images")
    return {name: (median(rates[name]), calls[name]) for name in ways}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--call_ms", type=float, default=50.0)
    parser.add_argument("--num_images", type=int, default=128)
    parser.add_argument("--size_px", type=int, default=512)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    shape = (options.size_px, options.size_px, 3)
    samples = [
        RewardInput(rng.integers(0, 256, shape, np.uint8), PromptRow("a cat", "test", None, uid=f"g{number}"), 0)
        for number in range(options.num_images)
    ]
    ways = {"function, one call per image": one_by_one}
    ways |= {f"class, max_batch_size={size}": partial(batched, size=size) for size in options.sizes}
    found = measure(ways, samples, options.call_ms / 1000, options.repeats)
    (base, _), *_ = found.values()
    print("| path | calls | images/s | times |\n| --- | --- | --- | --- |")
    for name, (rate, num_calls) in found.items():
        print(f"| {name} | {num_calls} | {rate:.1f} | {rate / base:.1f} |")


if __name__ == "__main__":
    main()
