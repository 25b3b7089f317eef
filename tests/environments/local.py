# SPDX-License-Identifier: Apache-2.0
"""Environment workers in this process, and a replica that makes pictures of their requests."""

import asyncio
from types import SimpleNamespace
from typing import Any

import torch

from verl_digen.algorithms.noise import INITIAL_LATENTS, sample_seed, step_noise
from verl_digen.config import DigenConfig, EnvironmentConfig
from verl_digen.environments.episodes import EpisodeHost, environment_pool
from verl_digen.processes.deadlines import DeadlinesConfig
from verl_digen.processes.workers import WorkerPool
from verl_digen.sampling.recording import initial_seed, noise_seed
from verl_digen.types import CleanRecord, Generation, PathRecord, SampleFacts, SampleRequest, Trajectory


class LocalWorker:
    """Handle of a worker in this process. `hosts` of one config are one after the other: `restart` begins the next."""

    def __init__(self, config: EnvironmentConfig):
        self.config, self.num_calls = config, 0
        self.restart()
        self.begin, self.step, self.end = (self._remote(name) for name in ("begin", "step", "end"))

    def restart(self) -> None:
        """Forget all episodes, as a process that was started again."""
        self.host = EpisodeHost(self.config, torch.device("cpu"))

    def _remote(self, name: str) -> SimpleNamespace:
        def call(*arguments: Any) -> asyncio.Task[Any]:
            self.num_calls += 1
            return asyncio.ensure_future(getattr(self.host, name)(*arguments))

        return SimpleNamespace(remote=call)


def connect(config: EnvironmentConfig, num_workers: int = 1) -> tuple[WorkerPool, list[LocalWorker]]:
    """A client of workers in this process, and they."""
    handles = [LocalWorker(config) for _ in range(num_workers)]
    return environment_pool(handles, DeadlinesConfig()), handles


class Replica:
    """Client of a replica whose pictures are functions of their requests; keeps the requests."""

    def __init__(self, digen: DigenConfig, version: int = 3):
        self.digen, self.version = digen, version
        self.requests: list[SampleRequest] = []

    async def generate_sample(self, request: SampleRequest) -> Generation:
        """Make the sample of `request`, of 2 x 3 latents."""
        self.requests.append(request)
        return generation_of(self.digen, request, self.version)


def generation_of(digen: DigenConfig, request: SampleRequest, version: int) -> Generation:
    """Sample whose numbers are noise under the request's seeds."""
    seed = initial_seed(digen.seed, request)
    levels = request.noise_levels
    if levels is not None:
        sigmas = torch.linspace(1, 0, request.sampling.num_steps + 1)
        record: Any = CleanRecord(
            step_noise(sample_seed(seed, "clean", 0), INITIAL_LATENTS, (2, 3)), levels.sigmas(sigmas)
        )
    else:
        steps = request.window.train_steps
        seeds = [noise_seed(digen.seed, request, step) for step in steps]
        numbers = torch.linspace(0.9, 0.1, len(steps))
        record = PathRecord(
            latents=torch.stack([step_noise(sample_seed(one, "path", 0), 0, (2, 3)) for one in (seed, *seeds)]),
            positions=torch.arange(len(steps)),
            sigmas=numbers,
            next_sigmas=numbers - 0.05,
            sigma_max=torch.tensor(0.9 + 0.01 * request.turn),
            log_probs=-numbers * (1 + request.turn),
        )
    facts = SampleFacts(
        *(request.uid, request.sample_index, seed, version, version, len(record.sigmas)),
        sampling=request.sampling,
        condition_key=request.condition_key,
    )
    light = step_noise(sample_seed(seed, "picture", 0), 0, (8, 8, 3)).mul(40).add(128).clamp(0, 255).to(torch.uint8)
    condition = {"embeds": torch.full((2 + request.turn, 3), float(request.turn))} if request.wants_condition else None
    return Generation(Trajectory(facts, record), light, 1.0 + request.turn, 1.5 + request.turn, condition=condition)
