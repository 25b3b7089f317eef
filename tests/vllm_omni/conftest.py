# SPDX-License-Identifier: Apache-2.0
"""Replicas of vLLM-Omni in Ray, as verl starts them, without a trainer: their servers and weight senders are real.

These tests are not collected unless the extra `vllm-omni` is installed; `make test-vllm-omni` installs it.
"""

import asyncio
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.util import find_spec
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_module
from torch import Tensor, nn

from tests.local_ray import ray_starts
from verl_digen.algorithms.window import Window
from verl_digen.inputs.images import PromptInputs
from verl_digen.types import Generation, Geometry, SampleRequest, Sampling, Trajectory

if find_spec("vllm_omni") is None:
    collect_ignore_glob = ["test_*.py"]

os.environ["HUMMING_DISABLE_PARALLEL_BUILD"] = "1"
"""A package that vLLM imports starts two compilations for CUDA in each process that imports it, 5 s of a core."""

RUN_SEED = 11
SAMPLING = Sampling(Geometry(64, 64), num_steps=6, true_cfg_scale=1.0, law="flow", noise_level=0.7)
GUIDED = Sampling(Geometry(64, 64), num_steps=6, true_cfg_scale=3.0, law="flow", noise_level=0.7)


def request(number: int, sampling: Sampling = SAMPLING) -> SampleRequest:
    """Request `number`; different numbers give different prompts, windows and laws."""
    windows = (Window((0, 1, 2, 3, 4), (0, 1, 2, 3, 4)), Window((1, 2), (1, 2)), Window((0, 2, 3), (2,)))
    group = number // 3
    return SampleRequest(
        uid=f"p{group}",
        sample_index=number % 3,
        inputs=PromptInputs("a red circle" + " and a blue square" * (group % 3)),
        negative_inputs=PromptInputs("blurry"),
        window=windows[group % 3],
        sampling=sampling,
        wants_condition=number % 3 == 0,
        wants_latents=number % 3 == 1,
    )


def begin_recording(pipeline: Any, asked: SampleRequest, shape: Sequence[int]) -> Any:
    """The recording of a request by a pipeline that no engine runs, with latents of that shape."""
    from verl_digen.rollout.vllm_omni.requests import RecordingOrder

    return pipeline.begin_recording(
        RecordingOrder(asked, RUN_SEED, torch.float32),
        shape=shape,
        sigmas=torch.linspace(1, 0, asked.sampling.num_steps + 1),
        device=torch.device("cpu"),
        condition={"embeds": torch.zeros(1, 2)},
        negative_condition=None,
        start_s=0.0,
        adapter=None,
    )


@dataclass
class Replica:
    """One server and the trainer rank that sends it weights."""

    server: Any
    sender: Any
    path: Path
    _threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(2))

    def generate(self, requests: Sequence[SampleRequest]) -> list[Generation]:
        """Generate all samples concurrently; answers in the order of the requests."""
        import ray

        return ray.get([self.submit(asked) for asked in requests])

    def submit(self, asked: SampleRequest) -> Any:
        return self.server.generate.remote(f"{asked.uid}_{asked.sample_index}", [], {"request": asked})

    def update(self, weights: Iterable[tuple[str, Tensor]], version: int) -> Future[None]:
        """Start a weight update in a thread, because verl's sender blocks."""
        return self._threads.submit(lambda: asyncio.run(self._update(list(weights), version)))

    async def _update(self, weights: list[tuple[str, Tensor]], version: int) -> None:
        """Update like separate pools: sealed while the replica generates, then loaded between two trajectories."""
        await self.sender.update_weights(iter(weights), global_steps=version)
        await self.server.activate_weights.remote()

    def health(self) -> dict[str, Any]:
        import ray

        return ray.get(self.server.check_health.remote())


def compose_config(path: Path, *overrides: str) -> Any:
    """verl's whole config."""
    import verl  # noqa: F401 - it loads its plugins, of which one knows recipes

    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose(
            "ppo_trainer",
            overrides=[
                "recipe=digen_flowgrpo+vllm_omni",
                f"actor_rollout_ref.model.path={path}",
                f"digen.seed={RUN_SEED}",
                *overrides,
            ],
        )


def compose_actor_rollout(path: Path, *overrides: str) -> Any:
    """The config's `actor_rollout_ref`."""
    return compose_config(path, *overrides).actor_rollout_ref


def start_server(composed: Any, rank: int, *, num_devices: int = 1, **env: str) -> Any:
    """Start the server of a hybrid replica, as the colocated trainer does; `env` is added to its environment."""
    import ray
    from verl.workers.rollout.replica import RolloutMode

    from verl_digen.rollout.vllm_omni.server import vLLMOmniHttpServer

    server = (
        ray.remote(vLLMOmniHttpServer)
        .options(name=f"vllm_omni_server_{rank}_0", max_concurrency=1000, runtime_env={"env_vars": env})
        .remote(
            config=composed.rollout,
            model_config=composed.model,
            rollout_mode=RolloutMode.HYBRID,
            workers=[],
            replica_rank=rank,
            node_rank=0,
            gpus_per_node=num_devices,
            nnodes=1,
            cuda_visible_devices=",".join(map(str, range(num_devices))),
        )
    )
    ray.get(server.launch_server.remote())
    return server


def start_replica(path: Path, rank: int, *overrides: str, **env: str) -> Replica:
    """Start a server on one device, with its weight sender."""
    from verl_digen.rollout.vllm_omni.adapter import vLLMOmniServerAdapter

    composed = compose_actor_rollout(path, *overrides)
    server = start_server(composed, rank, **env)
    sender = vLLMOmniServerAdapter(composed.rollout, composed.model, None, replica_rank=rank)
    return Replica(server, sender, path)


def listening_sockets(actor: Any) -> set[tuple[str, int]]:
    """(host, port) of every TCP socket that an actor's process and its children listen on."""
    import ray

    def look(self: Any) -> set[tuple[str, int]]:
        import psutil

        here = psutil.Process()
        return {
            (connection.laddr.ip, connection.laddr.port)
            for process in (here, *here.children(recursive=True))
            for connection in process.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
        }

    return ray.get(actor.__ray_call__.remote(look))


def exposed_sockets(actor: Any) -> list[str]:
    """Addresses beyond loopback of `listening_sockets`, sorted; ports differ from process to process."""
    return sorted(host for host, _ in listening_sockets(actor) if not ip_address(host).is_loopback)


def exposed_sockets_of_ray() -> list[str]:
    """Addresses beyond loopback that Ray itself opens in each of its processes, sorted."""
    import ray

    @ray.remote(num_cpus=0)
    class Bare:
        pass

    actor = Bare.remote()
    addresses = exposed_sockets(actor)
    ray.kill(actor)
    return addresses


@pytest.fixture(scope="module")
def one_worker() -> Iterator[None]:
    """vLLM's parallel state for one process, which its layers need, over the store of `loopback_store`."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm_omni.diffusion.distributed import parallel_state

    from verl_digen.rollout.vllm_omni.worker import loopback_store

    torch.distributed.init_process_group("gloo", store=loopback_store(0, rank=0, num_workers=1), rank=0, world_size=1)
    group = torch.distributed.group.WORLD
    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(world_size=1, rank=0, local_rank=0)
        assert torch.distributed.group.WORLD is group, "a process group that is there is taken (init_device)"
        parallel_state.initialize_model_parallel()
        yield
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()


@pytest.fixture(scope="session")
def ray_here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    import ray

    os.environ.update(RANK="0", WORLD_SIZE="1", RAY_LOCAL_WORLD_SIZE="1")
    with ray_starts():
        ray.init(
            num_cpus=8,
            num_gpus=4,
            include_dashboard=False,
            log_to_driver=False,
            runtime_env={"env_vars": {"VERL_PLATFORM": "cpu", "OMP_WAIT_POLICY": "PASSIVE"}},
        )
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def full_replica(ray_here: None, tiny_qwen_image: Path) -> Replica:
    """Replica whose updates carry full weights, in buckets of 1 MB."""
    return start_replica(
        tiny_qwen_image,
        0,
        "digen.rollout.embed_cache_size=8",
        "actor_rollout_ref.rollout.checkpoint_engine.update_weights_bucket_megabytes=1",
    )


@pytest.fixture(scope="session")
def lora_replica(ray_here: None, tiny_qwen_image: Path) -> Replica:
    """Replica whose updates carry a LoRA adapter."""
    return start_replica(tiny_qwen_image, 1, "actor_rollout_ref.model.lora_rank=4")


def full_weights(path: Path, version: int) -> dict[str, Tensor]:
    """The checkpoint's weights, scaled a little more in every version."""
    from verl_digen.models import load_model

    state = load_model(path).load_transformer(torch.float32).state_dict()
    return {name: tensor * (1 + 0.05 * version) for name, tensor in state.items()}


def adapter_weights(replica: Replica, version: int) -> tuple[nn.Module, dict[str, Tensor]]:
    """A peft adapter with numbers that differ from version to version -> (wrapped network, its tensors)."""
    from peft import get_peft_model, get_peft_model_state_dict

    from verl_digen.models import load_model

    network: Any = load_model(replica.path).load_transformer(torch.float32)
    wrapped = get_peft_model(network, replica.sender._adapter_config)
    generator = torch.Generator().manual_seed(version)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return wrapped, get_peft_model_state_dict(wrapped, save_embedding_layers=False)


def by_sampler(
    path: Path, network: nn.Module, asked: SampleRequest, version: int, *, run_seed: int = RUN_SEED
) -> Trajectory:
    """The trajectory from our own sampler, with the weights of `network`."""
    from verl_digen.models import load_model
    from verl_digen.sampling.sampler import Sampler

    model = load_model(path)
    encode = model.load_encoder(torch.float32, torch.device("cpu"))
    sampler = Sampler(model, network, run_seed=run_seed, device=torch.device("cpu"), latents_dtype=torch.float32)
    is_guided = asked.sampling.true_cfg_scale > 1.0
    negative = encode([asked.negative_inputs]) if is_guided else None
    (trajectory,), _ = sampler.sample([asked], encode([asked.inputs]), negative, version=version)
    return trajectory
