# SPDX-License-Identifier: Apache-2.0
"""The engine's gradient over the platform's collectives: reduced after the last tile, it equals the sum over tiles.

Samples are generated from the checkpoint, and two groups train as two fragments of one optimizer step.
"""

import math
import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from verl.plugin.platform import get_platform
from verl.trainer.config import CheckpointConfig
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig

from verl_digen.algorithms.rows import numbers
from verl_digen.algorithms.window import Window
from verl_digen.engine.engine import DiffusersFSDPEngine
from verl_digen.engine.fragment import FragmentSample, FragmentSpec
from verl_digen.engine.rows import Fetch, Samples
from verl_digen.inputs.images import PromptInputs
from verl_digen.model_config import DiffusionModelConfig
from verl_digen.models import load_model
from verl_digen.models.tiny import build_tiny
from verl_digen.sampling.recording import with_experts
from verl_digen.sampling.sampler import Sampler
from verl_digen.tools.checkup.checks import CheckFailed, Setting
from verl_digen.types import Geometry, PathRecord, SampleRequest, Sampling

TIMEOUT_S = 60.0
"""Timeout of a collective."""
RTOL = 1e-4
"""Largest difference, relative to the norm; sums are rounded in another order."""
SIZE_PX = 64
NUM_STEPS, TRAINED = 4, (0, 1, 2)
GROUPS, GROUP_SIZE = ("g0", "g1"), 2
REWARDS = (1.0, 0.0, 0.25, 0.5)
SEED = 7
FP32 = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}


def check_gradient(setting: Setting) -> str:
    """Run all ranks, each in a process of its own. Raises CheckFailed: the gradients differ, or are zero."""
    checkpoint = build_tiny(setting.architecture, setting.folder / "checkpoint")
    context = multiprocessing.get_context("spawn")  # a fork cannot use a device that its parent has
    num_ranks = min(setting.num_devices, 2)
    with ProcessPoolExecutor(num_ranks, mp_context=context) as pool:
        ranks = [
            pool.submit(run_rank, rank, num_ranks, checkpoint, setting.folder / "store") for rank in range(num_ranks)
        ]
        gaps = [rank.result() for rank in ranks]
    return conclude(gaps)


def conclude(gaps: Sequence[float]) -> str:
    """Ranks' relative differences -> figure. Raises CheckFailed: one is too large, or not a number."""
    worst = max(gaps, key=lambda gap: gap if gap == gap else math.inf)
    if not worst <= RTOL:
        raise CheckFailed(
            f"on {len(gaps)} rank(s) the gradient reduced after the last tile differs from that reduced at every tile "
            f"by {worst:.1e} of its norm, more than {RTOL:.0e}"
        )
    backend = get_platform().communication_backend_name()
    return f"{len(gaps)} rank(s) on {backend}: deferred and immediate gradient differ by {worst:.0e}"


def run_rank(rank: int, num_ranks: int, checkpoint: Path, store: Path) -> float:
    """One rank's process: join the others, compare -> `gradient_gap`."""
    platform = get_platform()
    backend = platform.communication_backend_name()
    if platform.device_name != "cpu":
        platform.set_device(rank)
    dist.init_process_group(
        backend if platform.device_name == "cpu" else f"cpu:gloo,{platform.device_name}:{backend}",
        init_method=f"file://{store}",
        rank=rank,
        world_size=num_ranks,
        timeout=timedelta(seconds=TIMEOUT_S),
    )
    try:
        return gradient_gap(checkpoint)
    finally:
        dist.destroy_process_group()


def gradient_gap(checkpoint: Path) -> float:
    """Difference between deferred and immediate gradient, of the norm or of the fixed ±1 projection, relative to the
    norm; nan where that is zero. In the current process group. Collective."""
    described, fetch = _samples(checkpoint)
    (norm, projection), deferred = (
        _gradient(_engine(checkpoint, reduce), described, fetch) for reduce in ("tile", "batch")
    )
    return max(abs(deferred[0] - norm), abs(deferred[1] - projection)) / norm if norm > 0 else math.nan


def _engine(checkpoint: Path, reduce: str) -> DiffusersFSDPEngine:
    frames = load_model(checkpoint).spec.selftest.get("num_frames", 1)
    digen = {
        "sampling": {"height_px": SIZE_PX, "width_px": SIZE_PX, "num_frames": frames, "num_steps": NUM_STEPS},
        "tsp": {"samples_per_tile": 1, "steps_per_tile": 2, "reduce": reduce},
        "seed": SEED,
    }
    engine = DiffusersFSDPEngine(
        DiffusionModelConfig(path=str(checkpoint), digen=digen, enable_gradient_checkpointing=False),  # type: ignore[arg-type]
        FSDPEngineConfig(strategy="fsdp2", use_torch_compile=False, model_dtype="fp32", mixed_precision=FP32),
        FSDPOptimizerConfig(lr=1e-5, total_training_steps=1, clip_grad=1e9),
        CheckpointConfig(),
    )
    engine.initialize()
    return engine


def _samples(checkpoint: Path) -> tuple[list[FragmentSample], Fetch]:
    """Samples that the checkpoint generates on the host, and their tensors; the same on every rank."""
    model = load_model(checkpoint)
    geometry = Geometry(SIZE_PX, SIZE_PX, model.spec.selftest.get("num_frames", 1))
    sampling = Sampling(geometry, NUM_STEPS, true_cfg_scale=1.0, law="flow", noise_level=0.7)
    cpu = torch.device("cpu")
    network = model.load_transformer(torch.float32)
    sampler = Sampler(model, network, run_seed=SEED, device=cpu, latents_dtype=torch.float32)
    window = Window((*TRAINED,), (*TRAINED,))
    requests = [
        SampleRequest(uid, index, PromptInputs(f"a red circle {uid}"), PromptInputs(""), window, sampling)
        for uid in GROUPS
        for index in range(GROUP_SIZE)
    ]
    encode = model.load_encoder(torch.float32, cpu)
    found = dict(zip(GROUPS, encode([PromptInputs(f"a red circle {uid}") for uid in GROUPS]), strict=True))
    conditions = [found[request.uid] for request in requests]
    trajectories, _ = sampler.sample(requests, conditions, None, version=0)
    columns = [one.record.columns() for one in trajectories if isinstance(one.record, PathRecord)]
    described = [
        FragmentSample(key=str(number), facts=with_experts(model, one).facts, reward=REWARDS[number])
        for number, one in enumerate(trajectories)
    ]

    def fetch(samples: Sequence[FragmentSample]) -> Samples:
        chosen = [columns[int(sample.key)] for sample in samples]
        return Samples(
            described=samples,
            columns={name: [sample[name] for sample in chosen] for name in PathRecord.COLUMNS},
            conditions={request.condition_key: (found[request.uid], None) for request in requests},
            advantages=torch.zeros(len(chosen)),
        )

    return described, fetch


def _gradient(engine: DiffusersFSDPEngine, described: Sequence[FragmentSample], fetch: Fetch) -> tuple[float, float]:
    """(norm, projection) of the gradient of one optimizer step, see `engine.gradients.projection`."""
    engine.begin(len(described), len(described) * len(TRAINED), fetch)
    for uid in GROUPS:
        engine.accumulate(FragmentSpec(uid, tuple(sample for sample in described if sample.facts.uid == uid)))
    found = numbers(engine.commit()["metrics"])
    return found["grad_norm"], found["grad_projection"]
