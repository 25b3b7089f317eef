# SPDX-License-Identifier: Apache-2.0
"""One architecture's life on the pretend device, phase by phase, in a replica's server and on a trainer's module.

| phase | what runs | counted per |
| --- | --- | --- |
| encode | two prompts | call |
| step | the denoise step with most stalls; two prompts, guided where the pipeline is, SDE and ODE steps | step |
| sample | all `NUM_STEPS` steps, and the trajectories' way to the host | call |
| decode | two samples to pixels | call |
| evaluate | rows to the device and their log-probs, without gradient; the second tile | tile |
| backward | the same with gradient and checkpointing, and the backward; the second tile | tile |
| sleep, wake | the server's | call |
| update | receiving, sealing and loading all weights | update |
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tests.pretend.record import Record, current, recording
from tests.rollout.test_server import update
from tests.training_rows import rows_of
from verl_digen.algorithms.window import Window
from verl_digen.config import DigenConfig, RolloutConfig
from verl_digen.engine.policies import PolicyForward
from verl_digen.engine.recompute import Recomputation
from verl_digen.inputs.images import PromptInputs
from verl_digen.rollout.server import DiffusersServer
from verl_digen.types import Condition, Geometry, SampleRequest, Sampling, TrainingRows, Trajectory

ARCHITECTURES = (
    *("flux_dev", "hunyuan_video", "hunyuan_video15", "qwen_image", "qwen_image21"),
    *("sd3", "wan2.1", "wan2.2_a14b", "z_image"),
)
NUM_STEPS = 4
PROMPTS = ("a red circle", 'two small blue squares left of a red circle with "text"')
GUIDED = 3.0


@dataclass(frozen=True)
class Measured:
    """Counts of one architecture."""

    records: dict[str, Record]
    """Phase -> what was noted."""
    stalls_per_step: int
    """Stalls of the denoise step with most stalls; the last step, which nothing delimits, is left out."""
    log_prob_gap: float
    """Largest difference between log-probs at generation and their replay."""
    has_gradients: bool
    """True if backward reached parameters, with finite numbers."""
    memory_asleep: int
    """Bytes of its networks that a sleeping server keeps on the device."""


def measure(name: str, path: Path) -> Measured:
    """Run all phases on the checkpoint at `path`."""
    records: dict[str, Record] = {}

    def counted(phase: str, call: Callable[[], Any]) -> Any:
        with recording() as records[phase]:
            return call()

    server = make_server(path)
    model = server._network.model
    sampling = _sampling(name)
    found = counted("encode", lambda: server._encoders.encode([PromptInputs(prompt) for prompt in PROMPTS]))
    negative = server._encoders.encode([PromptInputs(" ")])[0]
    negatives = [negative] * len(PROMPTS) if sampling.is_guided else None
    # the last two steps are ODE steps of both, the second of the first
    windows = (Window((0,), (0,)), Window((0, 1), (0, 1)))
    asked = [
        SampleRequest(f"p{number}", 0, PromptInputs(prompt), PromptInputs(" "), window, sampling)
        for number, (prompt, window) in enumerate(zip(PROMPTS, windows, strict=True))
    ]
    server._samples.sampler.sample(asked, found, negatives, version=0)  # what the first call alone does
    starts: list[int] = []

    def note_start() -> bool:
        starts.append(current().num_stalls)
        return False

    trajectories, latents = counted(
        "sample", lambda: server._samples.sampler.sample(asked, found, negatives, version=0, should_stop=note_start)
    )
    server._samples.decoder(latents, sampling.geometry)
    pixels = counted("decode", lambda: server._samples.decoder(latents, sampling.geometry)).pixels
    assert pixels.device.type == "cpu" and len(pixels) == len(PROMPTS)
    training = _train(server, _tile(trajectories, found, negatives), counted)
    host = {tensor: value.cpu() for tensor, value in model.load_transformer(torch.bfloat16).state_dict().items()}
    asleep = _sleep(server, records)
    counted("update", lambda: asyncio.run(_update(server, host)))
    again, _ = server._samples.sampler.sample(asked, found, negatives, version=1)
    assert torch.equal(again[0].record.latents, trajectories[0].record.latents)  # the weights are the same
    worst_step = max(after - before for before, after in pairwise(starts))
    return Measured(records, worst_step, training[0], training[1], asleep)


def make_server(path: Path, max_batch_size: int | str = 4, **rollout: Any) -> DiffusersServer:
    """A replica's server in this process, in bf16."""
    digen = DigenConfig(seed=7, rollout=RolloutConfig(max_batch_size=max_batch_size, batch_wait_s=0.01, **rollout))
    model = SimpleNamespace(local_path=path, digen=digen, adapter_config=lambda: None, lora_rank=0, int8_base=False)
    return DiffusersServer(SimpleNamespace(dtype="bfloat16"), model, num_threads=1)


def _sampling(name: str) -> Sampling:
    is_video = name.startswith(("wan", "hunyuan"))
    geometry = Geometry(64, 64, 5) if is_video else Geometry(64, 64)
    scale = 1.0 if name == "flux_dev" else GUIDED
    return Sampling(geometry, NUM_STEPS, true_cfg_scale=scale, law="flow", noise_level=0.7)


def _tile(
    trajectories: list[Trajectory], positive: list[Condition], negative: list[Condition] | None
) -> Callable[[], TrainingRows]:
    """Maker of the tile of both samples' first trained step, on the host as a rank fetches it."""

    def host(conditions: list[Condition]) -> list[Condition]:
        return [{name: tensor.cpu() for name, tensor in condition.items()} for condition in conditions]

    rows = rows_of(trajectories, [(0, 0), (1, 0)], host(positive), None if negative is None else host(negative))
    return lambda: rows


def _train(
    server: DiffusersServer, tile: Callable[[], TrainingRows], counted: Callable[..., Any]
) -> tuple[float, bool]:
    """(gap of log-probs, whether there are gradients)."""
    device, network = server._network.device, server._network.weights.module
    forward = PolicyForward(server._network.model, network, device, {}, has_bare_reference=False)

    @torch.no_grad()
    def evaluate() -> torch.Tensor:
        return forward(tile().to(device)).log_prob

    def backward() -> None:
        rows = tile().to(device)
        (forward(rows).log_prob * rows.advantages).sum().backward()

    evaluate()
    gap = float((counted("evaluate", evaluate).cpu() - tile().point.log_probs).abs().max())
    Recomputation(network, "all", offloads=False)
    backward()
    network.zero_grad()
    counted("backward", backward)
    gradients = [parameter.grad for parameter in network.parameters() if parameter.grad is not None]
    has_gradients = len(gradients) > 0 and all(bool(gradient.isfinite().all()) for gradient in gradients)
    network.zero_grad()
    return gap, has_gradients


def _sleep(server: DiffusersServer, records: dict[str, Record]) -> int:
    """Bytes of transformer, encoders and VAE that stay on the device."""

    def allocated() -> int:
        return torch.get_device_module(server._network.device).memory_allocated()

    modules = (server._network.weights.module, *server._encoders.encode.modules, *server._samples.decoder.modules)
    tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    own = sum({tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}.values())
    awake = allocated()

    async def run() -> int:
        with recording() as first:
            await server.sleep()
        asleep = allocated()
        with recording() as second:
            await server.wake_up()
        records["sleep"], records["wake"] = first, second
        return asleep

    return asyncio.run(run()) - (awake - own)


async def _update(server: DiffusersServer, host: dict[str, torch.Tensor]) -> None:
    await update(server, host, 1, max_bucket_mb=16)
