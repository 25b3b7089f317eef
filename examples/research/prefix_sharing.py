# SPDX-License-Identifier: Apache-2.0
"""Measure what steps before the window cost a group, with and without shared initial noise, and print a table.

    python examples/research/prefix_sharing.py [--rollout diffusers] [--samples 8] [--chunk 4] [--starts 2,4,6]

The back end of a replica (`--rollout vllm_omni` needs that extra) generates a group in chunks, one after the other,
with a window of two steps. With shared noise the steps before it run once for the group
(digen.sampling.shared_initial_noise). The two kinds of groups take turns, and the fastest of each is shown, with
decoding. The last column is what fewer rows of the network leave at best:
(start + (steps - start) samples) / (steps samples).
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch
from one_sample import generate as generate_one
from verl.plugin.platform import get_platform

from verl_digen.algorithms.window import Window
from verl_digen.config import DigenConfig, RolloutConfig
from verl_digen.inputs.images import PromptInputs
from verl_digen.model_config import DiffusionModelConfig
from verl_digen.models.tiny import build_tiny
from verl_digen.rollout.server import DiffusersServer
from verl_digen.types import Geometry, SampleRequest, Sampling

Generate = Callable[[SampleRequest], Awaitable[Any]]


def back_end(name: str, checkpoint: str, dtype: str, max_batch_size: int) -> Generate:
    """Generates one sample with the back end `name`."""
    digen = DigenConfig(rollout=RolloutConfig(max_batch_size=max_batch_size, batch_wait_s=0.002))
    config = DiffusionModelConfig(path=str(checkpoint), digen=digen)
    rollout = SimpleNamespace(
        dtype=dtype, tensor_model_parallel_size=1, enforce_eager=True, free_cache_engine=False, engine_kwargs={}
    )
    if name == "diffusers":
        server = DiffusersServer(rollout, config, num_threads=0)
        return lambda request: generate_one(server, request)

    from vllm_omni.entrypoints.async_omni import AsyncOmni  # an extra

    from verl_digen.rollout.vllm_omni.arguments import engine_arguments
    from verl_digen.rollout.vllm_omni.requests import RecordingOrder, to_prompt, to_sampling_params

    engine = AsyncOmni(**engine_arguments(rollout, config, can_sleep=False))  # type: ignore[arg-type]

    async def generate(request: SampleRequest) -> Any:
        params = to_sampling_params(RecordingOrder(request, digen.seed, torch.float32), None)
        outputs = engine.generate(to_prompt(request), sampling_params_list=[params])
        return [output async for output in outputs][-1]

    return generate


async def measure(args: argparse.Namespace, generate: Generate) -> None:
    """Print the table."""
    shared = Sampling(Geometry(args.size_px, args.size_px), args.steps, 1.0, "flow", 0.7, shared_initial_noise=True)
    apart = replace(shared, shared_initial_noise=False)
    groups = count()

    async def seconds(sampling: Sampling, start: int) -> float:
        window, uid = Window((start, start + 1), (start, start + 1)), f"g{next(groups)}"
        clock = time.process_time if args.cpu_time else time.perf_counter
        began_s = clock()
        for first in range(0, args.samples, args.chunk):
            chunk = [
                SampleRequest(uid, index, PromptInputs("a red circle"), PromptInputs(" "), window, sampling)
                for index in range(first, min(first + args.chunk, args.samples))
            ]
            await asyncio.gather(*map(generate, chunk))
        return clock() - began_s

    await seconds(apart, 0)
    print("window start | every row, s | shared prefix, s | share | rows of the network, share", flush=True)
    for start in map(int, args.starts.split(",")):
        pairs = [(await seconds(apart, start), await seconds(shared, start)) for _ in range(args.rounds)]
        all_s, shared_s = min(pair[0] for pair in pairs), min(pair[1] for pair in pairs)
        rows = (start + (args.steps - start) * args.samples) / (args.steps * args.samples)
        print(f"{start:12} | {all_s:12.3f} | {shared_s:16.3f} | {shared_s / all_s:5.2f} | {rows:.2f}", flush=True)


def main() -> None:
    """Start the back end and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollout", choices=("diffusers", "vllm_omni"), default="diffusers")
    parser.add_argument("--checkpoint", help="folder of a checkpoint; default: a tiny one")
    parser.add_argument("--model", default="qwen_image", help="the tiny checkpoint's name")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--chunk", type=int, default=4, help="samples that reach the replica together")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--starts", default="2,4,6")
    parser.add_argument("--size_px", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads, on a machine without an accelerator")
    parser.add_argument("--cpu_time", action="store_true", help="count CPU seconds, beside other work on the machine")
    args = parser.parse_args()
    if get_platform().device_name == "cpu":
        torch.set_num_threads(args.threads)
    with TemporaryDirectory() as folder:
        checkpoint = args.checkpoint or str(build_tiny(args.model, Path(folder) / "checkpoint"))
        asyncio.run(measure(args, back_end(args.rollout, checkpoint, args.dtype, args.chunk)))
    if args.rollout == "vllm_omni":
        os._exit(0)  # its threads do not end by themselves


if __name__ == "__main__":
    main()
