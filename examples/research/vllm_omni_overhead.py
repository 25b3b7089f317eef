# SPDX-License-Identifier: Apache-2.0
"""Overhead of a `vllm_omni` replica over the bare engine: CPU time and wall time per image, side by side.

    python examples/research/vllm_omni_overhead.py [--model DIR] [--requests 1 8 32 96] [--adapter] [--repeats 5]

One process, one engine. In turns, round by round, and each first in half of the rounds, come

- bare: vLLM-Omni's `AsyncOmni.generate` without an order; its own scheduler, its own pictures, nothing recorded;
- vllm_omni: `vLLMOmniHttpServer.generate`, as an agent loop worker calls it, without Ray; our SDE, every step recorded.

Requests come in chunks of a batch, as on separate pools, or with `--colocated` each by itself.
`--adapter` gives both ways a LoRA adapter. The table has medians, and the median of the repeats' ratios with its 95 %
interval (below 6 repeats their range): the two ways of a repeat take turns, so a machine that gets slower slows both.
CPU time is that of all threads of the process: on a machine with other work it says more than wall time, on an
accelerator less. Needs the extra vllm-omni; takes one device, or some minutes on a CPU core.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from math import comb
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from torch import Tensor
from verl.plugin.platform import get_platform
from verl.utils.device import is_support_ipc
from verl.workers.rollout.replica import RolloutMode
from vllm_omni.inputs.data import OmniDiffusionSamplingParams

from verl_digen.algorithms.window import Window
from verl_digen.config import DigenConfig, RolloutConfig
from verl_digen.inputs.images import PromptInputs
from verl_digen.models import load_model
from verl_digen.rollout.vllm_omni.requests import adapter_request, to_prompt
from verl_digen.rollout.vllm_omni.server import vLLMOmniHttpServer
from verl_digen.rollout.vllm_omni.settings import address
from verl_digen.types import Burst, Geometry, SampleRequest, Sampling
from verl_digen.weights.checksum import Manifest
from verl_digen.weights.sending import Wire, send_update

Generate = Callable[[SampleRequest], Awaitable[Any]]


class Cost(NamedTuple):
    """CPU time and wall time, in seconds."""

    cpu_s: float
    wall_s: float


MIN_IMAGES = 16
"""Images of one measurement at least, in rounds."""


def make_request(number: int, count: int, args: argparse.Namespace, prefix: str) -> SampleRequest:
    """One of `count` samples; every step but the last is stochastic and recorded."""
    sampling = Sampling(Geometry(args.size_px, args.size_px), args.num_steps, args.true_cfg_scale, "flow", 0.7)
    every_step = tuple(range(sampling.num_steps - 1))
    group, index = divmod(number, args.batch_size)
    size = min(args.batch_size, count - group * args.batch_size)
    return SampleRequest(
        f"{prefix}{group}",
        index,
        PromptInputs(f"a red circle beside {group} blue squares"),
        PromptInputs(" "),
        Window(every_step, every_step),
        sampling,
        wants_condition=index == 0,
        burst=None if args.colocated else Burst(f"{prefix}{group}", size),
    )


async def start_server(args: argparse.Namespace) -> Any:
    """The replica's server in this process, without verl's constructor, which needs Ray."""
    server: Any = object.__new__(vLLMOmniHttpServer)
    config = LoraConfig(r=args.rank, lora_alpha=args.rank, target_modules=["to_q", "to_k", "to_v"])
    digen = DigenConfig(rollout=RolloutConfig(max_batch_size=args.batch_size))
    server.model_config = SimpleNamespace(
        path=str(args.model),
        local_path=str(args.model),
        digen=digen,
        lora_rank=args.rank if args.adapter else 0,
        adapter_config=lambda: config if args.adapter else None,
    )
    server.config = SimpleNamespace(
        dtype=args.dtype,
        tensor_model_parallel_size=1,
        enforce_eager=True,
        free_cache_engine=False,
        engine_kwargs={},
        n_gpus_per_node=1,
    )
    server.rollout_mode, server.replica_rank, server.node_rank = RolloutMode.STANDALONE, 0, 0
    await server.launch_server()
    torch.set_num_threads(args.num_threads)
    if args.adapter:
        await send_adapter(server, config)
    return server


async def send_adapter(server: Any, config: LoraConfig) -> None:
    """Update the server with an adapter of random numbers, as a trainer rank does."""
    network: Any = load_model(server.model_config.local_path).load_transformer(torch.float32)
    wrapped = get_peft_model(network, config)
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(std=0.01)
    tensors: Mapping[str, Tensor] = get_peft_model_state_dict(wrapped, save_embedding_layers=False)
    sockets = f"overhead-{os.getpid()}"
    wire = Wire(address(sockets, 0), not is_support_ipc(), False, torch.float32, max_bucket_mb=64, timeout_s=60.0)
    await server.begin_update(sockets, wire.use_shm, wire.is_live)

    def send() -> Any:
        return asyncio.run(send_update(tensors.items(), wire, receiver="the replica", has_died=lambda: False))

    total = await asyncio.to_thread(send)
    await server.seal_update(Manifest(1, total.num_tensors, total.value), config)
    await server.activate_weights()


def generators(server: Any) -> dict[str, Generate]:
    """Name -> what generates one sample with it."""
    served = server._served

    async def bare(request: SampleRequest) -> Any:
        sampling = request.sampling
        params = OmniDiffusionSamplingParams(
            height=sampling.geometry.height_px,
            width=sampling.geometry.width_px,
            num_inference_steps=sampling.num_steps,
            true_cfg_scale=sampling.true_cfg_scale,
            seed=request.sample_index,
            lora_request=adapter_request(served) if server._sends_adapter else None,
        )
        name = f"{request.uid}_{request.sample_index}"
        outputs = server.engine.generate(to_prompt(request), request_id=name, sampling_params_list=[params])
        return [output async for output in outputs][-1].images[0]

    async def recorded(request: SampleRequest) -> Any:
        name = f"{request.uid}_{request.sample_index}"
        return (await server.generate(name, [], {"request": request})).trajectory.record.log_probs

    return {"bare": bare, "vllm_omni": recorded}


async def cost_of(generate: Generate, requests: list[SampleRequest]) -> Cost:
    """Cost of requests that are made at once."""
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    await asyncio.gather(*map(generate, requests))
    return Cost(time.process_time() - cpu_s, time.perf_counter() - wall_s)


async def repeat_once(args: argparse.Namespace, ways: Mapping[str, Generate], count: int, repeat: int) -> list[Cost]:
    """Cost of an image by each of `ways`, which take turns."""
    spent: dict[str, list[Cost]] = {name: [] for name in ways}
    for each in range(-(-MIN_IMAGES // count)):
        for name in list(ways) if (repeat + each) % 2 else reversed(list(ways)):
            prefix = f"{name}-{count}-{repeat}-{each}-"
            spent[name].append(await cost_of(ways[name], [make_request(n, count, args, prefix) for n in range(count)]))
    return [Cost(*(sum(part) / (len(costs) * count) for part in zip(*costs, strict=True))) for costs in spent.values()]


async def measure(args: argparse.Namespace) -> None:
    """Print a row for each number of requests at a time."""
    ways = generators(await start_server(args))
    for count in args.requests:
        repeats = [await repeat_once(args, ways, count, repeat) for repeat in range(args.repeats + 1)]
        bare, ours = zip(*repeats[1:], strict=True)  # the first one warms up
        show(count, bare, ours)


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the median by order statistics; the whole range where there are fewer than 6 values."""
    num, tail, rank = len(values), 0.0, 0
    while rank < num // 2 and (tail := tail + comb(num, rank) / 2**num) <= 0.025:
        rank += 1
    lowest = max(rank - 1, 0)
    ordered = sorted(values)
    return ordered[lowest], ordered[num - 1 - lowest]


def show(count: int, bare: Sequence[Cost], ours: Sequence[Cost]) -> None:
    """Print a row: medians of both ways, and the median of the repeats' ratios with its interval."""
    line, ratios = f"{count:>8}", ""
    for its, mine in zip(zip(*bare, strict=True), zip(*ours, strict=True), strict=True):
        line += f" {1000 * median(its):9.1f} {1000 * median(mine):9.1f}"
        over = [of_ours / of_bare - 1 for of_ours, of_bare in zip(mine, its, strict=True)]
        low, high = median_interval(over)
        ratios += f"  {median(over):+6.1%} ({low:+.1%} to {high:+.1%})"
    print(line + ratios, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    here = Path(__file__).resolve().parents[1]
    parser.add_argument("--model", type=Path, default=here / "tiny_qwen_image" / "checkpoint")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--size_px", type=int, default=64)
    parser.add_argument("--num_steps", type=int, default=10)
    parser.add_argument("--true_cfg_scale", type=float, default=1.0)
    parser.add_argument("--batch_size", type=int, default=8, help="digen.rollout.max_batch_size")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32, 96], help="at a time")
    parser.add_argument("--colocated", action="store_true", help="requests are not announced as chunks")
    parser.add_argument("--adapter", action="store_true", help="serve a LoRA adapter")
    parser.add_argument("--rank", type=int, default=4, help="of the adapter")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--num_threads", type=int, default=1, help="of PyTorch, on a CPU")
    args = parser.parse_args()
    if get_platform().device_name == "cpu":
        torch.set_num_threads(args.num_threads)
    print(
        "requests  CPU ms: bare, vllm_omni  wall ms: bare, vllm_omni  vllm_omni over bare: CPU, wall (95 %)", flush=True
    )
    asyncio.run(measure(args))
    os._exit(0)  # vLLM-Omni's threads do not end by themselves


if __name__ == "__main__":
    main()
