# SPDX-License-Identifier: Apache-2.0
"""Episodes per second in lock-step, with asynchrony, and with asynchrony and redundant groups, side by side.

    python examples/research/environment_throughput.py [--model DIR] [--latencies 2,5,10] [--repeats 3]

A real replica and real environment workers (Ray actors). Episodes have `--turns` turns; the environment takes a
lognormal time whose mean is that many times the measured time of a generation of one batch. The modes take turns, and
each cell is the median over the repeats of the time until all groups of the batch are complete:

| mode | what it does |
| --- | --- |
| lock-step | all episodes of the batch finish a turn, environment included, before the next one begins |
| asynchronous | each episode goes on when its environment has answered; the replica batches whoever is ready |
| with redundancy | the same with `--extra` further groups; the first complete ones are taken, the others stopped |

`make quickstart` before, for the environment. Takes minutes on two CPU cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from statistics import median
from types import SimpleNamespace
from typing import Any

import ray
from omegaconf import OmegaConf
from one_sample import generate as generate_one

from verl_digen.agent_loop.episode import EnvironmentAgentLoop
from verl_digen.config import DigenConfig, EnvironmentConfig, RolloutConfig, SamplingConfig
from verl_digen.data.rows import loop_columns
from verl_digen.environments.base import Environment, Instruction, Picture, TurnResult
from verl_digen.environments.episodes import environment_pool, start_environments
from verl_digen.model_config import DiffusionModelConfig
from verl_digen.processes.deadlines import DeadlinesConfig
from verl_digen.processes.workers import WorkerPool
from verl_digen.rollout.server import DiffusersServer
from verl_digen.sampling.requests import request_id, turn_request
from verl_digen.types import Generation, PromptRow, SampleRequest

MODEL = Path(__file__).parents[1] / "tiny_qwen_image" / "checkpoint"
SIGMA = 1.0
"""Standard deviation of the logarithm of the environment's time: 5 % of the calls take more than 3 times the mean."""


@dataclass(frozen=True)
class WaitingConfig:
    """Settings of `Waiting`."""

    mean_s: float = 1.0
    turns: int = 4


class Waiting(Environment):
    """Environment whose only work is to take time, drawn from the prompt's uid and the pictures."""

    config_class = WaitingConfig
    edits = False

    def reset(self, row: PromptRow, seed: int) -> Instruction:
        self.uid, self.num_turns = row.uid, 0
        return Instruction(row.text)

    async def step(self, picture: Picture) -> TurnResult:
        self.num_turns += 1
        draw = Random(f"{self.uid} {int(picture.sum())} {self.num_turns}").gauss(0, SIGMA)
        await asyncio.sleep(self.config.mean_s * 2.718281828 ** (draw - SIGMA**2 / 2))
        return TurnResult(0.0, self.num_turns == self.config.turns, Instruction(f"turn {self.num_turns}"))


class Client:
    """Client of the replica in this process. In lock-step, a turn's requests and answers wait for each other.

    Args:
        num_episodes: episodes in lock-step; None: they do not wait.
    """

    def __init__(self, server: DiffusersServer, digen: DigenConfig, num_episodes: int | None = None):
        self.server, self.digen, self.num_episodes = server, digen, num_episodes
        self._gates: dict[int, tuple[list[int], asyncio.Event]] = {}

    async def generate_sample(self, request: SampleRequest) -> Generation:
        """Generate one turn, in lock-step once every episode asks for that turn."""
        if self.num_episodes is not None:
            arrived, gate = self._gates.setdefault(request.turn, ([], asyncio.Event()))
            arrived.append(request.sample_index)
            if len(arrived) == self.num_episodes:
                gate.set()
            await gate.wait()
        try:
            return await generate_one(self.server, request)
        except asyncio.CancelledError:  # of a redundant group
            await self.server.abort_request(request_id(request.uid, request.sample_index))
            raise


@dataclass(frozen=True)
class Sizes:
    """Sizes of a batch."""

    groups: int
    group_size: int
    extra: int
    turns: int
    max_batch_size: int


async def play(client: Client, environments: WorkerPool, sizes: Sizes, num_groups: int, tag: str) -> float:
    """Play groups of episodes until `sizes.groups` of them are complete -> seconds."""
    loop = EnvironmentAgentLoop(client, environments, edits=False)  # type: ignore[arg-type]

    async def group(number: int) -> None:
        row = PromptRow(f"a red circle {number}", "test", None, uid=f"{tag}g{number}")
        columns = {**loop_columns(row), "global_steps": 1}
        await asyncio.gather(
            *(loop.run({"validate": False}, session_id=index, **columns) for index in range(sizes.group_size))
        )

    began_s = time.perf_counter()
    tasks = [asyncio.create_task(group(number)) for number in range(num_groups)]
    for number, ended in enumerate(asyncio.as_completed(tasks), 1):
        await ended
        if number == sizes.groups:
            break
    for task in tasks:
        task.cancel()  # no effect on one that has ended
    await asyncio.gather(*tasks, return_exceptions=True)
    return time.perf_counter() - began_s


async def generation_s(server: DiffusersServer, digen: DigenConfig) -> float:
    """Seconds of one full batch of pictures on the replica, the median of five after a first one."""

    async def batch(number: int) -> float:
        row = PromptRow("a red circle", "test", None, uid=f"warm{number}")
        size = digen.rollout.batch_size
        requests = [turn_request(digen, row, index, 0, (), step=1, validate=False) for index in range(size)]
        began_s = time.perf_counter()
        await asyncio.gather(*(generate_one(server, request) for request in requests))
        return time.perf_counter() - began_s

    return median([await batch(number) for number in range(6)][1:])


async def of_latency(server: DiffusersServer, digen: DigenConfig, sizes: Sizes, repeats: int) -> dict[str, float]:
    """Mode -> median seconds of a batch, with the environment of `digen`."""
    config = OmegaConf.create({"digen": {"environment": asdict(digen.environment)}})
    handles = start_environments(config, digen)
    workers = environment_pool(handles, DeadlinesConfig())
    num_locked, num_redundant = sizes.groups * sizes.group_size, sizes.groups + sizes.extra
    modes: dict[str, Callable[[str], Awaitable[float]]] = {
        "lock-step": lambda tag: play(Client(server, digen, num_locked), workers, sizes, sizes.groups, tag),
        "asynchronous": lambda tag: play(Client(server, digen), workers, sizes, sizes.groups, tag),
        "with redundancy": lambda tag: play(Client(server, digen), workers, sizes, num_redundant, tag),
    }
    await modes["asynchronous"]("warm")  # the workers start
    times: dict[str, list[float]] = {mode: [] for mode in modes}
    for repeat in range(repeats):
        for mode, run in modes.items():  # the same prompts, hence the same times of the environment
            times[mode].append(await run(f"r{repeat}"))
    for handle in handles:
        ray.kill(handle)
    return {mode: median(taken) for mode, taken in times.items()}


async def measured(
    model: Path, latencies: Sequence[float], repeats: int, sizes: Sizes
) -> tuple[float, dict[float, dict[str, float]]]:
    """(seconds of a generation of a full batch, latency -> mode -> median seconds of a batch)."""
    rollout = RolloutConfig(max_batch_size=sizes.max_batch_size, batch_wait_s=0.005)
    digen = DigenConfig(sampling=SamplingConfig(height_px=64, width_px=64, num_steps=10), rollout=rollout)
    config = DiffusionModelConfig(path=str(model), digen=digen)
    server = DiffusersServer(SimpleNamespace(dtype="float32"), config, num_threads=1)  # type: ignore[arg-type]
    unit_s = await generation_s(server, digen)
    found = {}
    for latency in latencies:
        environment = EnvironmentConfig(
            path=f"{Path(__file__).resolve()}:Waiting",
            options={"mean_s": latency * unit_s, "turns": sizes.turns},
            max_turns=sizes.turns,
            step_timeout_s=600.0,
        )
        found[latency] = await of_latency(server, replace(digen, environment=environment), sizes, repeats)
    return unit_s, found


def print_table(found: Mapping[float, Mapping[str, float]]) -> None:
    """Print the times of each mode, and how many times as fast as lock-step it is."""
    print("| environment / generation | lock-step | asynchronous | with redundancy |")
    print("| --- | --- | --- | --- |")
    for latency, times in found.items():
        cells = [f"{taken:.2f} ({times['lock-step'] / taken:.2f}x)" for taken in times.values()]
        print(f"| {latency:g} | {' | '.join(cells)} |")


def main(arguments: Any) -> None:
    sizes = Sizes(arguments.groups, arguments.group_size, arguments.extra, arguments.turns, arguments.max_batch_size)
    latencies = [float(number) for number in arguments.latencies.split(",")]
    ray.init(include_dashboard=False, log_to_driver=False)
    unit_s, found = asyncio.run(measured(arguments.model, latencies, arguments.repeats, sizes))
    print(f"{sizes}; measured in s; a generation of a full batch takes {unit_s:.3f} s")
    print_table(found)
    print(json.dumps({"generation_s": unit_s, "seconds": found}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--latencies", default="2,5,10")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--groups", type=int, default=4)
    parser.add_argument("--group_size", type=int, default=4)
    parser.add_argument("--extra", type=int, default=2)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--max_batch_size", type=int, default=4)
    main(parser.parse_args())
