# SPDX-License-Identifier: Apache-2.0
"""Images per second of the rollout back ends, side by side in one process, repeats interleaved.

    python examples/research/rollout_throughput.py [--model DIR] [--size_px 64] [--num_steps 10] [--repeats 7]

Columns: bare vLLM-Omni (its own scheduler, nothing recorded), `vllm_omni` (our SDE, every step recorded), `diffusers`.
Each cell is the median over the repeats. Needs the extra vllm-omni; takes one device, or a minute on two CPU cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from one_sample import generate as generate_one
from verl.plugin.platform import get_platform
from vllm_omni.entrypoints.async_omni import AsyncOmni
from vllm_omni.inputs.data import OmniDiffusionSamplingParams

from verl_digen.algorithms.window import Window
from verl_digen.config import DigenConfig, RolloutConfig
from verl_digen.inputs.images import PromptInputs
from verl_digen.model_config import DiffusionModelConfig
from verl_digen.rollout.server import DiffusersServer
from verl_digen.rollout.vllm_omni.arguments import engine_arguments
from verl_digen.rollout.vllm_omni.requests import RecordingOrder, to_prompt, to_sampling_params
from verl_digen.types import Geometry, SampleRequest, Sampling

Generate = Callable[[SampleRequest], Awaitable[Any]]
MAX_CONCURRENT = 8


def make_request(number: int, sampling: Sampling) -> SampleRequest:
    every_step = tuple(range(sampling.num_steps - 1))
    return SampleRequest(
        "p0", number, PromptInputs("a red circle"), PromptInputs(" "), Window(every_step, every_step), sampling
    )


def back_ends(model: str, dtype: str) -> dict[str, Generate]:
    """Name -> what generates one sample with it."""
    digen = DigenConfig(rollout=RolloutConfig(max_batch_size=MAX_CONCURRENT, batch_wait_s=0.002))
    config = DiffusionModelConfig(path=str(model), digen=digen)
    rollout = SimpleNamespace(
        dtype=dtype, tensor_model_parallel_size=1, enforce_eager=True, free_cache_engine=False, engine_kwargs={}
    )
    engine = AsyncOmni(**engine_arguments(rollout, config, can_sleep=False))  # type: ignore[arg-type]
    diffusers = DiffusersServer(rollout, config, num_threads=0)

    async def run(prompt: dict[str, Any], params: OmniDiffusionSamplingParams) -> Any:
        return [output async for output in engine.generate(prompt, sampling_params_list=[params])][-1]

    async def bare(request: SampleRequest) -> Any:
        geometry = request.sampling.geometry
        params = OmniDiffusionSamplingParams(
            height=geometry.height_px,
            width=geometry.width_px,
            num_inference_steps=request.sampling.num_steps,
            true_cfg_scale=request.sampling.true_cfg_scale,
            seed=request.sample_index,
        )
        return await run(to_prompt(request), params)

    async def recorded(request: SampleRequest) -> Any:
        order = RecordingOrder(request, digen.seed, torch.float32)
        return await run(to_prompt(request), to_sampling_params(order, None))

    async def by_diffusers(request: SampleRequest) -> Any:
        return await generate_one(diffusers, request)

    return {"bare": bare, "vllm_omni": recorded, "diffusers": by_diffusers}


async def images_per_s(generate: Generate, num_concurrent: int, sampling: Sampling) -> float:
    """`MAX_CONCURRENT` images, up to that many at a time."""
    numbers = iter(range(MAX_CONCURRENT))

    async def work() -> None:
        for number in numbers:
            await generate(make_request(number, sampling))

    started_s = time.perf_counter()
    await asyncio.gather(*[work() for _ in range(num_concurrent)])
    return MAX_CONCURRENT / (time.perf_counter() - started_s)


async def measure(args: argparse.Namespace) -> dict[str, dict[str, float]]:
    generators = back_ends(str(args.model), args.dtype)
    sampling = Sampling(Geometry(args.size_px, args.size_px), args.num_steps, args.true_cfg_scale, "flow", 0.7)
    table = {}
    for num_concurrent in (1, 4, MAX_CONCURRENT):
        seen: dict[str, list[float]] = {name: [] for name in generators}
        for repeat in range(args.repeats + 1):
            for name, generate in generators.items():
                value = await images_per_s(generate, num_concurrent, sampling)
                if repeat:  # the first one warms up
                    seen[name].append(value)
        table[str(num_concurrent)] = {name: median(values) for name, values in seen.items()}
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = Path(__file__).resolve().parents[1]
    parser.add_argument("--model", type=Path, default=here / "tiny_qwen_image" / "checkpoint")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--size_px", type=int, default=64)
    parser.add_argument("--num_steps", type=int, default=10)
    parser.add_argument("--true_cfg_scale", type=float, default=1.0)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    if get_platform().device_name == "cpu":
        torch.set_num_threads(len(os.sched_getaffinity(0)))
    table = asyncio.run(measure(args))
    print(f"{'at a time':>9}  {'bare':>8}  {'vllm_omni':>9}  {'diffusers':>9}  recording costs")
    for num_concurrent, row in table.items():
        cost = 1 - row["vllm_omni"] / row["bare"]
        print(f"{num_concurrent:>9}  {row['bare']:8.1f}  {row['vllm_omni']:9.1f}  {row['diffusers']:9.1f}  {cost:+.1%}")
    print(json.dumps(table))
    os._exit(0)  # vLLM-Omni's threads do not end by themselves


if __name__ == "__main__":
    main()
