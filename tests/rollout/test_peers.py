# SPDX-License-Identifier: Apache-2.0
"""A replica of two processes as real Ray actors, against a server of one: samples, weights, sleep, and lost peers."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray
import torch
from peft import LoraConfig
from ray.exceptions import RayActorError
from torch import Tensor

from tests.engine.sequence_cases import CASES, build
from tests.rollout.test_lockstep import ATOL, Shared, requests_of
from verl_digen.config import DigenConfig, RolloutConfig
from verl_digen.rollout.network import Seals
from verl_digen.rollout.peers import Peer, Place, require_same_weights
from verl_digen.rollout.server import DiffusersServer
from verl_digen.schedulers.deadlines import DeadlinesConfig
from verl_digen.types import Generation, PathRecord, Trajectory
from verl_digen.weights.checksum import Manifest
from verl_digen.weights.probe import Probe
from verl_digen.weights.receiver import tensors_of_update
from verl_digen.weights.sending import Wire, send_update

CALL_S = 4.0
ANSWER_S = 300.0
WAN = Shared("wan2.1")


# -- pure ---------------------------------------------------------------------------------------------------------
def test_an_update_has_come_when_every_rank_has_sealed_it() -> None:
    seals, new = Seals(2), Manifest(1, 9, 0x5EED)
    seals.note(0, new)
    assert seals.agreed() is None and seals.received_version is None
    seals.note(1, new)
    assert seals.agreed() == new and seals.received_version == 1 and seals.is_complete
    seals.take()
    assert seals.agreed() == new and not seals.is_complete
    seals.note(0, Manifest(2, 9, 0x5EED))
    seals.require_alike()
    assert seals.agreed() is None and seals.received_version == 1, "the other rank's is under way"


def test_a_version_that_is_sent_twice_with_other_weights_is_awaited_twice() -> None:
    seals = Seals(2)
    for checksum in (7, 8):
        for rank in (0, 1):
            seals.begin(rank)
            seals.note(rank, Manifest(4, 9, checksum))
            seals.require_alike()
            assert seals.is_complete == (rank == 1)
        seals.take()


def test_ranks_with_other_tensors_are_named() -> None:
    seals = Seals(3)
    for rank, checksum in enumerate((7, 7, 8)):
        seals.note(rank, Manifest(4, 9, checksum))
    with pytest.raises(
        RuntimeError, match=r"same weights, got .*tensors, checksum 7, on rank 1, .*checksum 8, on rank 2"
    ):
        seals.require_alike()
    seals.refuse(1, "proj_out is missing")
    with pytest.raises(RuntimeError, match="rank 1 of the replica refused a weight update: proj_out is missing"):
        seals.require_alike()
    for rank in (1, 2):
        seals.begin(rank)
    seals.require_alike()


def test_a_rank_that_computes_with_other_weights_is_named() -> None:
    own = Probe(3, (1, 2), 9, (1.0, 2.0, 3.0, 4.0))
    require_same_weights(own, [own])
    with pytest.raises(RuntimeError, match=r"checksums 1, 2 on rank 0, and 9 with 1, 3 on rank 2"):
        require_same_weights(own, [own, Probe(3, (1, 3), 9, own.fingerprint)])


# -- real actors --------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def node(ray_cluster: None) -> str:
    return ray.get_runtime_context().get_node_id()


@pytest.fixture(scope="module")
def wan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(CASES["wan2.1"], tmp_path_factory.mktemp("wan") / "checkpoint")


def arguments(path: Path, *, is_lora: bool) -> tuple[Any, Any, int]:
    digen = DigenConfig(
        seed=7,
        rollout=RolloutConfig(max_batch_size=8, batch_wait_s=0.2, probe_every=1, update_timeout_s=ANSWER_S),
        deadlines=DeadlinesConfig(load_s=CALL_S),
    )
    adapter = LoraConfig(r=4, lora_alpha=8, target_modules=list(CASES["wan2.1"].lora)) if is_lora else None
    model = SimpleNamespace(local_path=path, digen=digen, lora_rank=4 * is_lora, adapter_config=AdapterConfig(adapter))
    return SimpleNamespace(dtype="float32"), model, 1


class AdapterConfig:
    """`DiffusionModelConfig.adapter_config`, which can be pickled."""

    def __init__(self, config: LoraConfig | None):
        self._config = config

    def __call__(self) -> LoraConfig | None:
        return self._config


class Pair:
    """A server with one peer."""

    def __init__(self, node_id: str, path: Path, *, is_lora: bool = False):
        peers = [Place(node_id, "1")]
        options = {"num_cpus": 0, "max_concurrency": 100}
        self.server: Any = (
            ray.remote(DiffusersServer).options(**options).remote(*arguments(path, is_lora=is_lora), peers=peers)
        )
        self.devices = ray.get(self.server.join_peers.remote(), timeout=ANSWER_S)
        self.peer: Any = ray.get(self.server.__ray_call__.remote(lambda server: server._team._peers[0]))
        self.peer_process = psutil.Process(ray.get(self.peer.__ray_call__.remote(lambda _: os.getpid())))

    async def generate(self) -> list[Generation]:
        asked = [{"request": request} for request in requests_of(WAN)]
        return await asyncio.gather(*(self.server.generate.remote("id", [], each) for each in asked))

    async def send(self, rank: int, weights: dict[str, Tensor], version: int, *, is_live: bool) -> Manifest:
        """Send an update to one rank, as the trainer's rank of its device."""
        with TemporaryDirectory() as folder:
            wire = Wire(f"ipc://{folder}/s", True, is_live, torch.float32, max_bucket_mb=1, timeout_s=ANSWER_S)
            await self.server.begin_update.remote(wire.handle, wire.use_shm, wire.is_live, rank)

            def send() -> Any:
                return asyncio.run(send_update(weights.items(), wire, receiver="replica", has_died=lambda: False))

            total = await asyncio.to_thread(send)
        return Manifest(version, total.num_tensors, total.value)

    async def update(self, weights: dict[str, Tensor], version: int, *, is_live: bool) -> None:
        leader, other = [await self.send(rank, weights, version, is_live=is_live) for rank in (0, 1)]
        if is_live:
            committed = self.server.commit_update.remote(leader)
            await self.server.seal_update.remote(other, 1)
            await committed
        else:
            await self.server.seal_update.remote(leader)
            await self.server.seal_update.remote(other, 1)
            await self.server.activate_weights.remote()

    def is_lost(self) -> bool:
        """True once both processes have ended."""
        with pytest.raises(RayActorError):
            ray.get(self.server.until_update_ends.remote(), timeout=ANSWER_S)
        psutil.wait_procs([self.peer_process], timeout=ANSWER_S)
        return not self.peer_process.is_running()


def path_of(trajectory: Trajectory) -> PathRecord:
    """The record of a sample with trained steps."""
    assert isinstance(trajectory.record, PathRecord)
    return trajectory.record


def assert_same(found: list[Generation], expected: list[Generation], version: int) -> None:
    for got, own in zip(found, expected, strict=True):
        assert got.trajectory.version == got.trajectory.last_version == version
        ours, theirs = path_of(got.trajectory), path_of(own.trajectory)
        torch.testing.assert_close(ours.latents, theirs.latents, atol=ATOL, rtol=0)
        torch.testing.assert_close(ours.log_probs, theirs.log_probs, atol=ATOL, rtol=0)
        assert (got.pixels.int() - own.pixels.int()).abs().max() <= 1


def changed(server: DiffusersServer, seed: int) -> dict[str, Tensor]:
    """Other weights for an update."""
    generator = torch.Generator().manual_seed(seed)
    weights = tensors_of_update(server._weights.module)
    return {name: one + 0.05 * torch.randn(one.shape, generator=generator) for name, one in weights.items()}


def alone(path: Path, *, is_lora: bool, seed: int | None) -> tuple[list[Generation], dict[str, Tensor]]:
    """Samples of a server of one device after an update, and the update."""
    server = DiffusersServer(*arguments(path, is_lora=is_lora))
    weights = {} if seed is None else changed(server, seed)
    with torch.no_grad():
        for name, tensor in tensors_of_update(server._weights.module).items():
            if weights:
                tensor.copy_(weights[name])

    async def generate() -> list[Generation]:
        return await asyncio.gather(*(server.generate("id", [], {"request": request}) for request in requests_of(WAN)))

    return asyncio.run(generate()), weights


def is_kept_by_the_server(peer: Peer, is_lora: bool) -> bool:
    """True if the peer's host copies are the server's: of buffers, and of the base under LoRA."""
    module: Any = peer._network.weights.module
    updated = [name for name, _ in module.named_parameters() if "lora_" in name] if is_lora else module.state_dict()
    named = dict((*module.named_parameters(), *module.named_buffers()))
    kept = [each for name, each in named.items() if name not in updated]
    num_bytes = sum(each.numel() * each.element_size() for each in kept)
    return peer._memory.num_bytes_copied_out == 0 and peer._memory.num_bytes_shared == num_bytes > 0


@pytest.mark.long
@pytest.mark.parametrize("is_lora", [False, True], ids=["full", "lora"])
def test_two_processes_generate_what_one_does_after_every_kind_of_update(node: str, wan: Path, is_lora: bool) -> None:
    pair = Pair(node, wan, is_lora=is_lora)
    assert [device.name for device in pair.devices] == [pair.devices[0].name, "1"]
    before, _ = alone(wan, is_lora=is_lora, seed=None)
    updates = [(alone(wan, is_lora=is_lora, seed=version), version % 2 == 1) for version in (1, 2, 3)]

    async def run() -> None:
        assert_same(await pair.generate(), before, version=0)
        for version, ((expected, weights), is_live) in enumerate(updates, start=1):
            if is_live:
                frees = lambda actor: setattr(actor, "_frees_memory", True)  # noqa: E731 - as on an accelerator
                await asyncio.gather(pair.server.__ray_call__.remote(frees), pair.peer.__ray_call__.remote(frees))
                await pair.server.sleep.remote()
                is_released = lambda actor: actor._memory.is_released  # noqa: E731
                assert await pair.server.__ray_call__.remote(is_released)
                assert await pair.peer.__ray_call__.remote(is_released)
                assert await pair.peer.__ray_call__.remote(is_kept_by_the_server, is_lora), "it has no copy of its own"
                for _ in range(2):  # each rank of the trainer asks
                    await pair.server.wake_up.remote()
            await pair.update(weights, version, is_live=is_live)
            assert_same(await pair.generate(), expected, version)
            assert (path_of(expected[0].trajectory).latents - path_of(before[0].trajectory).latents).abs().max() > 0.01
        health = await pair.server.check_health.remote()
        assert health["received_version"] == 3 and [probe.version for probe in health["probes"]] == [2, 3]

    asyncio.run(run())
    ray.kill(pair.server)
    psutil.wait_procs([pair.peer_process], timeout=ANSWER_S)
    assert not pair.peer_process.is_running(), "a peer ends with its server"


@pytest.mark.long
def test_a_rank_without_its_update_or_with_another_one_is_an_error_and_nothing_is_generated(
    node: str, wan: Path
) -> None:
    pair = Pair(node, wan)
    _, weights = alone(wan, is_lora=False, seed=1)
    _, others = alone(wan, is_lora=False, seed=2)
    name = next(iter(weights))

    async def refused() -> None:
        leader = await pair.send(0, weights, 1, is_live=True)
        other = await pair.send(1, {name: weights[name]}, 1, is_live=True)
        committed = pair.server.commit_update.remote(leader)
        with pytest.raises(RuntimeError, match="missing from the update"):
            await pair.server.seal_update.remote(other, 1)
        with pytest.raises(RuntimeError, match="rank 1 of the replica refused a weight update"):
            await committed
        await pair.server.resume_generation.remote()
        with pytest.raises(RuntimeError, match="has not come to every rank of the replica"):
            await pair.generate()

    async def unlike() -> None:
        leader = await pair.send(0, weights, 2, is_live=True)
        other = await pair.send(1, others, 2, is_live=True)
        committed = pair.server.commit_update.remote(leader)
        await pair.server.seal_update.remote(other, 1)
        with pytest.raises(RuntimeError, match="every rank of a replica must get the same weights"):
            await committed

    for case in (refused, unlike):
        asyncio.run(case())
    ray.kill(pair.server)


async def idle(pair: Pair) -> None:
    """Do nothing."""


async def generate(pair: Pair) -> None:
    """Generate; the peer has ended in its first forward."""
    with pytest.raises(RayActorError):
        await pair.generate()


async def sleep(pair: Pair) -> None:
    """Ask a peer that does not answer."""
    with pytest.raises(RayActorError):
        await pair.server.sleep.remote()


def end(pair: Pair) -> None:
    """Kill the peer."""
    pair.peer_process.kill()


def stop(pair: Pair) -> None:
    """Stop the peer's process."""
    pair.peer_process.send_signal(signal.SIGSTOP)


def fail_in_a_forward(pair: Pair) -> None:
    """Let the peer's next forward raise."""

    def fail(*args: Any) -> None:
        raise ArithmeticError("half-way")

    def break_network(peer: Peer) -> None:
        network: Any = peer._networks[0]
        network.blocks[1].register_forward_pre_hook(fail)

    ray.get(pair.peer.__ray_call__.remote(break_network))


@pytest.mark.long
@pytest.mark.parametrize(
    ("breaks", "then"), [(end, idle), (fail_in_a_forward, generate), (stop, sleep)], ids=["dies", "fails", "hangs"]
)
def test_a_replica_is_lost_with_its_peer(
    node: str, wan: Path, breaks: Callable[[Pair], None], then: Callable[[Pair], Awaitable[None]]
) -> None:
    pair = Pair(node, wan)
    breaks(pair)

    async def run() -> None:
        await then(pair)

    asyncio.run(run())
    assert pair.is_lost()
