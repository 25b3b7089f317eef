# SPDX-License-Identifier: Apache-2.0
"""Rates of one accelerator: training and sampling with the project's own engine and sampler, in one process, no Ray.

    python examples/research/gpu_rates.py                                # what fits into 100 s, the most valuable first
    python examples/research/gpu_rates.py --parts sd3_train,vae --budget 60 --out rates.jsonl
    VERL_PLATFORM=cpu python examples/research/gpu_rates.py --dry        # tiny networks, to try the tool

- Networks have published sizes and random weights, drawn on the device; conditions are random, too. Nothing is
  downloaded, and no text encoder runs.
- Each result is a line of the output and of --out, written at once. A part that fails is a result line, too, and the
  next one begins: this is a measuring tool. A part that does not fit into --budget is left out.
- `tflops` counts useful work (`verl_digen.models.flops`); `tflops_run` adds the KL reference and recomputation.
"""

from __future__ import annotations

import argparse
import gc
import gzip
import json
import logging
import mmap
import os
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import psutil
import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from torch.profiler import profile, record_function
from verl.plugin.platform import get_platform
from verl.trainer.config import CheckpointConfig
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig

from verl_digen.algorithms.outside import EXACT, Outside
from verl_digen.algorithms.window import Window
from verl_digen.config import DigenConfig, digen_config
from verl_digen.engine.engine import DiffusersFSDPEngine
from verl_digen.engine.fragment import FragmentSample, FragmentSpec
from verl_digen.engine.rows import Samples
from verl_digen.model_config import DiffusionModelConfig
from verl_digen.models import checkpoint, load_model
from verl_digen.models.base import DiffusionModel
from verl_digen.models.checkpoint import fill_randomly
from verl_digen.models.flops import forward_flops, peak_flops
from verl_digen.models.kernels import set_kernels
from verl_digen.models.pixels import load_image_decoder
from verl_digen.models.published import write_configs
from verl_digen.platforms.device_memory import accelerator_name
from verl_digen.sampling.fp8 import Fp8Layers
from verl_digen.sampling.requests import plain_request
from verl_digen.sampling.sampler import Sampler
from verl_digen.types import Condition, Geometry, PathRecord, PromptRow, SampleRequest, Trajectory, move_condition
from verl_digen.weights.sending import own_device

PLATFORM = get_platform()
DEVICE = own_device()
RECIPES = Path(__file__).parents[2] / "recipes"
SD3, FLUX = "stabilityai/stable-diffusion-3.5-medium", "black-forest-labs/FLUX.1-dev"
QWEN = "Qwen/Qwen-Image"
NETWORKS = {"sd3": (SD3, "digen_sd3"), "flux": (FLUX, "digen_flux"), "qwen": (QWEN, "digen_qwen_image")}
"""Name -> repository whose configs it has, recipe."""
FULL = SimpleNamespace(group=8, batches=(1, 8, 16, 32), batch=16, steps=10, flux_steps=28, px=512, flux_px=1024)
DRY = SimpleNamespace(group=2, batches=(1, 2), batch=2, steps=3, flux_steps=3, px=64, flux_px=64)
SHRUNK = {"num_attention_heads": 2, "caption_projection_dim": 128, "dual_attention_layers": [0], "num_layers": 2}
SHRUNK |= {"num_single_layers": 2, "block_out_channels": [32, 32, 32, 32], "layers_per_block": 1}
"""Values of the networks' configs in a dry run."""
STD = 0.02
"""Standard deviation of random weights."""
MOST_ON_DEVICE = 14e9
"""Parameters of a network that is drawn on the device."""
NUM_TOKENS = 64
"""Length of a prompt, where a model does not pad it."""
HOST_BYTES = 4 << 30
TRACE_BYTES = 7 << 20
"""Largest trace that is kept, compressed."""
NUM_KERNELS, NUM_GAPS = 15, 5
"""Lines of a profile."""


# -- networks ---------------------------------------------------------------------------------------------------------
def draw_network(folder: Path, architecture: str, dtype: torch.dtype) -> Any:
    """A network of the folder's config with random weights, on the device if an engine's copy fits beside it; takes the
    place of `load_network`."""
    network = checkpoint.make_meta_network(folder, architecture, dtype)
    if sum(one.numel() for one in network.parameters()) > MOST_ON_DEVICE:
        return fill_randomly(network).eval()
    weights = {}
    for name, tensor in network.state_dict().items():
        weights[name] = torch.empty_like(tensor, device=DEVICE) if tensor.is_meta else tensor.to(DEVICE)
        if tensor.is_meta and tensor.dim() > 1:
            weights[name].normal_(std=STD)
        elif tensor.is_meta:
            weights[name].fill_(name.endswith("weight"))
    network.load_state_dict(weights, assign=True)
    return network.to(DEVICE).eval()


def random_condition(model: DiffusionModel, dtype: torch.dtype) -> Condition:
    """A prompt's condition, on the host."""
    layout, config = model.spec.condition, model.read_network_config("transformer")
    condition = {"embeds": torch.randn(layout.num_tokens or NUM_TOKENS, config[layout.width]).to(dtype)}
    if layout.pooled is not None:
        condition["pooled"] = torch.randn(config[layout.pooled]).to(dtype)
    return condition


@dataclass(frozen=True)
class Generator:
    """A network on the device, and what it generates from."""

    model: DiffusionModel
    transformer: Any
    digen: DigenConfig
    condition: Condition
    negative: Condition

    def requests(self, number: int, num_steps: int, uid: str = "g0", **sampling: Any) -> list[SampleRequest]:
        """Requests of one group; each step but the last is stochastic and recorded, or in fp8 none."""
        first = plain_request(self.digen, PromptRow("", "", None, uid=uid), 0, step=0, validate=False)
        settings = replace(first.sampling, **{"num_steps": num_steps, "outside": EXACT} | sampling)
        steps = () if settings.outside.fp8 else tuple(range(num_steps - 1))
        made = replace(first, window=Window(steps, steps), sampling=settings)
        return [replace(made, sample_index=index) for index in range(number)]

    def sample(self, requests: Sequence[SampleRequest], fp8: Fp8Layers | None = None) -> list[Trajectory]:
        """Generate one batch, as a replica does."""
        dtype = getattr(torch, self.digen.rollout.latents_dtype)
        sampler = Sampler(self.model, self.transformer, run_seed=7, device=DEVICE, latents_dtype=dtype, fp8=fp8)
        conditions = [move_condition(self.condition, DEVICE)] * len(requests)
        negative = [move_condition(self.negative, DEVICE)] * len(requests) if requests[0].sampling.is_guided else None
        return sampler.sample(requests, conditions, negative, version=0)[0]


class Trainer:
    """An engine of one rank with a recipe's settings, and two groups that it generated."""

    def __init__(self, path: Path, recipe: dict[str, Any], group: int, num_steps: int):
        if not dist.is_initialized():
            backend = PLATFORM.communication_backend_name()
            backend = backend if DEVICE.type == "cpu" else f"cpu:gloo,{DEVICE.type}:{backend}"
            dist.init_process_group(backend, init_method=f"file://{path}.store", rank=0, world_size=1)
        model, actor = recipe["actor_rollout_ref"]["model"], recipe["actor_rollout_ref"]["actor"]
        self.engine = DiffusersFSDPEngine(
            DiffusionModelConfig(**model | {"path": str(path), "digen": recipe["digen"]}),
            FSDPEngineConfig(strategy="fsdp2", use_torch_compile=False, **actor["fsdp_config"]),
            FSDPOptimizerConfig(total_training_steps=1000, clip_grad=1.0, **actor["optim"]),
            CheckpointConfig(),
        )
        self.engine.initialize()
        self.groups: dict[str, list[Trajectory]] = {}
        dtype = getattr(torch, recipe["actor_rollout_ref"]["rollout"]["dtype"])
        self.conditions = {uid: random_condition(self.engine.model, dtype) for uid in ("g0", "g1")}
        self.generate_s = 0.0  # of the second group
        for uid, condition in self.conditions.items():
            with self.engine.assisting() as module:
                generator = Generator(self.engine.model, module, self.engine.digen, condition, self.conditions["g0"])
                self.groups[uid], figures = timed(lambda: generator.sample(generator.requests(group, num_steps, uid)))  # noqa: B023
                self.generate_s = figures["s"]

    def described(self, uid: str, number: int) -> tuple[FragmentSample, ...]:
        """The first samples of a group, with rewards that differ."""
        return tuple(
            FragmentSample(f"{uid}/{index}", replace(one.facts, condition_key=uid), index * 5 % 7 / 7)
            for index, one in enumerate(self.groups[uid][:number])
        )

    def fetch(self, samples: Sequence[FragmentSample]) -> Samples:
        """Records of these samples, as from the store."""
        records = [self.groups[one.facts.uid][one.facts.sample_index].record.columns() for one in samples]
        columns = {name: [record[name] for record in records] for name in PathRecord.COLUMNS}
        conditions = {uid: (own, self.conditions["g0"]) for uid, own in self.conditions.items()}
        return Samples(samples, columns, conditions, torch.zeros(len(samples)))

    def update(self, per_group: int) -> dict[str, float]:
        """One optimizer step on both groups -> its metrics."""
        samples = self.described("g0", per_group) + self.described("g1", per_group)
        self.engine.begin(len(samples), sum(one.num_rows for one in samples), self.fetch)
        try:
            self.engine.accumulate(FragmentSpec("all", samples))
        except BaseException:
            self.engine.abort()
            raise
        return {name: metric.value.item() for name, metric in self.engine.commit()["metrics"].items()}


class Bench:
    """Results, the seconds left, and the network in use: one at a time, so that it has the memory for itself."""

    def __init__(self, folder: Path, given: argparse.Namespace):
        self.folder, self.out, self.shrunk = folder, given.out, SHRUNK if given.dry else {}
        self.size = DRY if given.dry else FULL
        self._ends_s = psutil.Process().create_time() + given.budget
        self._used: tuple[str, Any] = ("", None)

    def left_s(self) -> float:
        return self._ends_s - time.time()

    def note(self, part: str, **figures: Any) -> None:
        """Print a result and add it to the file."""
        figures = {name: float(f"{one:.5g}") if isinstance(one, float) else one for name, one in figures.items()}
        print(part, *(f"{name}={value}" for name, value in figures.items()), flush=True)
        with open(self.out, "a", encoding="utf-8") as lines:
            lines.write(json.dumps({"part": part, "left_s": round(self.left_s(), 1), **figures}) + "\n")

    def checkpoint(self, repository: str) -> Path:
        """Folder with the repository's configs, and no weights."""
        folder = self.folder / repository.replace("/", "_")
        if not folder.exists():
            folder.mkdir()
            write_configs(repository, folder)
            for file in (folder / "transformer" / "config.json", folder / "vae" / "config.json"):
                config = json.loads(file.read_text())
                file.write_text(
                    json.dumps(config | {key: self.shrunk[key] for key in self.shrunk.keys() & config.keys()})
                )
        return folder

    def use(self, name: str) -> Any:
        """A generator, `KEY`, or `KEY trainer` or `compiled KEY trainer`, of NETWORKS; frees the one before."""
        if self._used[0] != name:
            self._used = ("", None)
            free()
            self._used = (name, self._make(name))
        return self._used[1]

    def _make(self, name: str) -> Any:
        size, network = self.size, name.removesuffix(" trainer").removeprefix("compiled ")
        repository, recipe_name = NETWORKS[network]
        px, steps = (size.flux_px, size.flux_steps) if network == "flux" else (size.px, size.steps)
        recipe: Any = OmegaConf.to_container(OmegaConf.load(RECIPES / f"{recipe_name}.yaml"), resolve=True)
        recipe["digen"]["sampling"] |= {"height_px": px, "width_px": px, "num_steps": steps}
        path = self.checkpoint(repository)
        if name.endswith("trainer"):
            recipe["digen"]["compile"] = name.startswith("compiled")
            recipe["actor_rollout_ref"]["actor"]["fsdp_config"]["param_offload"] = False
            return Trainer(path, recipe, size.group, steps)
        model, dtype = load_model(path), getattr(torch, recipe["actor_rollout_ref"]["rollout"]["dtype"])
        digen = digen_config(OmegaConf.create({"digen": recipe["digen"]}))
        condition = random_condition(model, dtype)
        return Generator(model, model.load_transformer(dtype), digen, condition, condition)

    def measure(self, part: str, what: str, drawn: Generator, requests: list[SampleRequest], fp8: Any = None) -> None:
        """Note the rates of one batch, sampled after a warm-up of two steps."""
        sampling, number = requests[0].sampling, len(requests)
        outside = {"true_cfg_scale": sampling.true_cfg_scale, "outside": sampling.outside}
        drawn.sample(drawn.requests(number, 2, **outside), fp8)
        _, figures = timed(lambda: drawn.sample(requests, fp8))
        num_tokens, is_guided = len(drawn.condition["embeds"]), sampling.is_guided
        step = forward_flops(
            *(drawn.model, drawn.transformer, sampling.geometry, num_tokens), num_rows=number, is_guided=is_guided
        )
        figures |= {"step_ms": figures["s"] / sampling.num_steps * 1e3, "images_per_s": number / figures["s"]}
        figures |= rate("tflops", step.forward * sampling.num_steps, figures["s"])
        self.note(part, what=what, batch=number, guided=is_guided, steps=sampling.num_steps, **figures)


# -- parts ------------------------------------------------------------------------------------------------------------
def sd3_train(bench: Bench) -> None:
    """Optimizer steps of Stable Diffusion 3.5 medium: LoRA, fp16, KL, guidance, two groups; by size of the tile."""
    trainer, figures = timed(lambda: bench.use("sd3 trainer"))
    bench.note("sd3_train", what="engine, and its samples", **figures)
    planner, num_samples, tile = trainer.engine.planner, 2 * bench.size.group, 0
    for what, factor, per_group, repeats in (("auto", 1.0, 1, 2), ("half", 0.5, 2, 1), ("double", 2.0, 2, 1)):
        if tile:
            rows = max(1, int(tile * factor))
            extents = {"samples_per_tile": min(rows, num_samples), "steps_per_tile": -(-rows // num_samples)}
            planner.tsp = replace(trainer.engine.digen.tsp, **extents)
        trainer.update(max(1, bench.size.group // 4))  # measures memory at first, and warms up
        for _ in range(repeats):
            found = measure_update(bench, "sd3_train", f"{what} tiles", trainer, bench.size.group // per_group)
            tile = tile or -int(-found["num_rows"] // found["num_tiles"])


def sd3_train_compiled(bench: Bench) -> None:
    """An optimizer step of the same with plain and with compiled blocks."""
    for name, what in (("compiled sd3 trainer", "compiled"), ("sd3 trainer", "eager")):
        trainer, figures = timed(lambda: bench.use(name))  # noqa: B023 - called here
        figures |= {"images_per_s": bench.size.group / trainer.generate_s}
        bench.note("sd3_train_compiled", what=f"{what}: engine, and its samples", **figures)
        # tiles of one size: another one would compile again
        trainer.engine.planner.tsp = replace(
            trainer.engine.digen.tsp, samples_per_tile=bench.size.group, steps_per_tile=1
        )
        for time_of in ("first", "second"):
            measure_update(bench, "sd3_train_compiled", f"{what}, {time_of}", trainer, bench.size.group // 2)


def qwen_train(bench: Bench) -> None:
    """Qwen-Image (20 B) with LoRA on one device: what one rank generates and trains, by itself."""
    trainer, figures = timed(lambda: bench.use("qwen trainer"))
    figures |= {"images_per_s": bench.size.group / trainer.generate_s}
    bench.note("qwen_train", what="engine, and its samples", **figures)
    for time_of in ("first", "second"):
        measure_update(bench, "qwen_train", time_of, trainer, max(1, bench.size.group // 8))


def measure_update(bench: Bench, part: str, what: str, trainer: Trainer, per_group: int) -> dict[str, float]:
    """Note the rates of one optimizer step -> its metrics."""
    found, figures = timed(lambda: trainer.update(per_group))
    rows, forward, recomputed = found["num_rows"], found["row_forward_flops"], found["recomputed_share"]
    flops = rows * found["row_training_flops"]
    figures |= {"rows_per_s": rows / figures["s"], **rate("tflops", flops, figures["s"])}
    figures |= rate("tflops_run", flops + rows * (1 + recomputed) * forward, figures["s"])
    shown = ("num_rows", "num_tiles", "recomputed_share", "grad_norm", "num_skipped_updates")
    bench.note(part, what=what, **figures, **{name: found[name] for name in (*shown, "rollout_log_prob_gap_max")})
    return found


def sd3_profile(bench: Bench) -> None:
    """Kernels and idle gaps of a steady training fragment and of four steady denoise steps."""
    trace_of(lambda: torch.ones(1, device=DEVICE).sum())  # starts the profiler
    trainer = bench.use("sd3 trainer")
    trainer.engine.planner.tsp = trainer.engine.digen.tsp
    first, second = trainer.described("g0", 2), trainer.described("g1", 2)
    # with a known scale the first group trains at once, as a whole batch does
    trainer.engine.begin(4, sum(one.num_rows for one in first + second), trainer.fetch, scale=1.0)
    try:
        trainer.engine.accumulate(FragmentSpec("warm-up", first))
        report(bench, "training", lambda: trainer.engine.accumulate(FragmentSpec("profiled", second)))
    finally:
        trainer.engine.abort()
    sd3 = bench.use("sd3")
    batch = sd3.requests(bench.size.batch, 4)
    sd3.sample(batch)
    report(bench, "sampling", lambda: sd3.sample(batch))


def sd3_sample(bench: Bench) -> None:
    """Sampling of Stable Diffusion 3.5 medium, recorded for training, with both branches of guidance and with one."""
    sd3, size = bench.use("sd3"), bench.size
    for scale in (sd3.digen.sampling.true_cfg_scale, 1.0):
        for number in size.batches:
            bench.measure("sd3_sample", "eager", sd3, sd3.requests(number, size.steps, true_cfg_scale=scale))
    requests = sd3.requests(size.batch, size.steps, outside=Outside(fp8=True))
    bench.measure("sd3_sample", "fp8", sd3, requests, Fp8Layers(sd3.transformer))


def flux_sample(bench: Bench) -> None:
    """One image of FLUX.1 [dev], then six steps with each attention kernel that needs no further package."""
    flux = bench.use("flux")
    bench.measure("flux_sample", "eager", flux, flux.requests(1, bench.size.flux_steps))
    for kernel in ("_native_cudnn", "_native_flash", "_native_efficient"):
        try:
            set_kernels(flux.model, flux.transformer, side="replica", attention=kernel, compiles=False)
            bench.measure("flux_sample", kernel, flux, flux.requests(1, 6))
        except RuntimeError as error:  # a kernel that this device lacks
            bench.note("flux_sample", what=kernel, failed=str(error)[:200])
    flux.model.takes_masks = True
    flux.transformer.reset_attention_backend()


def vae(bench: Bench) -> None:
    """Decoding of pictures to pixels on the host, in the decoder's own dtype and in bf16."""
    model, geometry = load_model(bench.checkpoint(SD3)), Geometry(bench.size.px, bench.size.px)
    draw_network(model.path / "vae", "AutoencoderKL", torch.float16).save_pretrained(model.path / "vae")
    latents = torch.randn(bench.size.batch, *model.latent_shape(geometry), device=DEVICE)
    for dtype in (model.decoder_dtype(torch.float16), torch.bfloat16):
        decode = load_image_decoder(
            model.path / "vae", dtype, DEVICE, unpack=lambda latents, _: latents, pack=lambda latents: latents
        )
        for number in (1, len(latents)):
            decode(latents[:number], geometry)
            _, figures = timed(lambda: [decode(part, geometry) for part in latents.split(number)])  # noqa: B023
            bench.note("vae", dtype=str(dtype), batch=number, images_per_s=len(latents) / figures["s"], **figures)


def host(bench: Bench) -> None:
    """Page-locking of 4 GB, by PyTorch, and of a memory file as `verl_digen.weights.host_copies` does it; twice."""
    if DEVICE.type != "cuda":
        return bench.note("host", left_out="page-locking is a matter of CUDA devices")
    runtime: Any = torch.cuda.cudart()
    file = os.memfd_create("gpu_rates")
    os.truncate(file, HOST_BYTES)
    memory = torch.frombuffer(mmap.mmap(file, HOST_BYTES), dtype=torch.uint8)
    kept = []
    for what, lock in (
        ("pin_memory", lambda: kept.append(torch.empty(HOST_BYTES, dtype=torch.uint8, pin_memory=True))),
        ("cudaHostRegister", lambda: runtime.cudaHostRegister(memory.data_ptr(), HOST_BYTES, 0)),
    ):
        for time_of in ("first", "second"):  # the file's pages exist the second time
            code, figures = timed(lock)
            bench.note("host", what=what, time=time_of, error=int(code or 0), gb_s=HOST_BYTES / figures["s"] / 1e9)
            if what == "cudaHostRegister" and int(code) == 0:
                runtime.cudaHostUnregister(memory.data_ptr())


def compiled(bench: Bench, name: str) -> None:
    """Sampling with compiled blocks; the first call compiles."""
    drawn, size = bench.use(name), bench.size
    number, num_steps = (1, size.flux_steps) if name == "flux" else (size.batch, size.steps)
    set_kernels(drawn.model, drawn.transformer, side="replica", attention="native", compiles=True)
    _, figures = timed(lambda: drawn.sample(drawn.requests(number, 2)))
    bench.note(f"{name}_compiled", what="first call, 2 steps", **figures)
    bench.measure(f"{name}_compiled", "compiled", drawn, drawn.requests(number, num_steps))


# -- profiles ---------------------------------------------------------------------------------------------------------
def trace_of(work: Callable[[], Any]) -> bytes:
    """Run `work` under the profiler -> its trace in Chrome's format, with `work` in the range "profiled"."""
    with profile() as found, record_function("profiled"):
        work()
        PLATFORM.synchronize()
    with TemporaryDirectory() as folder:
        found.export_chrome_trace(f"{folder}/trace.json")
        return Path(folder, "trace.json").read_bytes()


def report(bench: Bench, what: str, work: Callable[[], Any]) -> None:
    """Profile `work`; note its kernels and gaps, and keep the trace. On a CPU operations count as kernels."""
    trace = trace_of(work)
    events = [event for event in json.loads(trace, strict=False)["traceEvents"] if event.get("ph") == "X"]
    events.sort(key=lambda event: event["ts"])
    on_host = [one for one in events if one.get("cat") in ("cpu_op", "cuda_runtime", "cuda_driver", "user_annotation")]
    busy = [one for one in events if one.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")] or on_host
    whole = next(one for one in on_host if one["name"] == "profiled")
    start, wall, by_name = whole["ts"], whole["dur"], defaultdict(list)
    idle = gaps([one for one in busy if one is not whole], start, start + wall)
    busy_share = 1 - sum(until - since for since, until, _ in idle) / wall
    bench.note("sd3_profile", what=what, wall_ms=wall / 1e3, busy_share=busy_share, kernels=len(busy), gaps=len(idle))
    for one in busy:
        by_name[one["name"][:120]].append(one["dur"])
    for name, took in sorted(by_name.items(), key=lambda item: -sum(item[1]))[:NUM_KERNELS]:
        figures = {"ms": sum(took) / 1e3, "calls": len(took), "share": sum(took) / wall}
        bench.note("sd3_profile", what=what, kernel=name, **figures)
    for since, until, following in sorted(idle, key=lambda gap: gap[0] - gap[1])[:NUM_GAPS]:
        begun = [one for one in on_host if one["ts"] <= (since + until) / 2 and one is not whole]
        running = [one for one in begun if one["ts"] + one["dur"] >= (since + until) / 2]
        figures = {"gap_us": until - since, "at_ms": (since - start) / 1e3, "before": following[:80]}
        figures["running" if running else "after"] = " > ".join(one["name"][:60] for one in (running or begun)[-3:])
        bench.note("sd3_profile", what=what, **figures)
    packed = gzip.compress(trace, 5)
    if is_kept := len(packed) <= TRACE_BYTES:
        bench.out.with_name(f"{bench.out.stem}_{what}.json.gz").write_bytes(packed)
    bench.note("sd3_profile", what=what, trace_mb=len(packed) / 1e6, is_kept=is_kept)


def gaps(busy: Sequence[dict[str, Any]], start: float, end: float) -> list[tuple[float, float, str]]:
    """Idle intervals between `start` and `end`, and what runs next; `busy` is sorted by start, of any stream.

    Example: kernels a from 2 to 5 and b from 4 to 6
        gaps([a, b], 0, 9)    # [(0, 2, "a"), (6, 9, "")]
    """
    found = []
    for one in [*busy, {"ts": end, "dur": 0, "name": ""}]:
        if start < min(one["ts"], end):
            found.append((start, min(one["ts"], end), one["name"]))
        start = max(start, one["ts"] + one["dur"])
    return found


# -- the tool ---------------------------------------------------------------------------------------------------------
def timed(work: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """(result, seconds until the device has done it and peak memory)"""
    PLATFORM.device_module.reset_peak_memory_stats()
    PLATFORM.synchronize()
    began_s = time.perf_counter()
    result = work()
    PLATFORM.synchronize()
    seconds = time.perf_counter() - began_s
    return result, {"s": seconds, "peak_gb": PLATFORM.device_module.max_memory_allocated() / 1e9}


def rate(name: str, flops: float, seconds: float) -> dict[str, float]:
    """TFLOP/s, and their share of the device's peak where that is known."""
    peak = peak_flops(accelerator_name() or "")
    return {name: flops / seconds / 1e12, **({} if peak is None else {f"{name}_share": flops / seconds / peak})}


def free() -> None:
    """Give the device's memory back that nothing uses."""
    gc.collect()
    PLATFORM.device_module.empty_cache()


PARTS: dict[str, tuple[Callable[[Bench], None], float]] = {
    "sd3_train": (sd3_train, 30),
    "sd3_profile": (sd3_profile, 12),
    "sd3_sample": (sd3_sample, 20),
    "flux_sample": (flux_sample, 18),
    "vae": (vae, 5),
    "host": (host, 8),
    "sd3_compiled": (lambda bench: compiled(bench, "sd3"), 40),
    "sd3_train_compiled": (sd3_train_compiled, 60),
    "qwen_train": (qwen_train, 60),
    "flux_compiled": (lambda bench: compiled(bench, "flux"), 60),
}
"""Name -> (part, seconds that must be left for it to start), the most valuable first."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Rates of one accelerator.")
    parser.add_argument("--parts", default=",".join(PARTS), help="names, in the order in which they run")
    parser.add_argument("--budget", type=float, default=100, help="seconds from the start of the process")
    parser.add_argument("--dry", action="store_true", help="tiny networks and pictures, to try the tool")
    parser.add_argument("--out", type=Path, default=Path("gpu_rates.jsonl"))
    given = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("verl_digen").setLevel(logging.INFO)
    if DEVICE.type != "cpu":
        PLATFORM.set_device(0)
    checkpoint.load_network = draw_network  # in this process: no folder here has weights
    given.out.parent.mkdir(parents=True, exist_ok=True)
    num_failed = 0
    with TemporaryDirectory(prefix="gpu_rates_") as folder:
        bench = Bench(Path(folder), given)
        bench.note("machine", device=accelerator_name() or "cpu", torch=torch.__version__)
        for name in given.parts.split(","):
            part, least_s = PARTS[name]
            if bench.left_s() < least_s:
                bench.note(name, left_out=f"needs {least_s} s")
                continue
            began_s = time.monotonic()
            try:
                part(bench)
            except Exception as error:  # a result, too: the next part may still be measured
                num_failed += 1
                bench.note(name, failed=f"{type(error).__name__}: {str(error)[:300]}")
                traceback.print_exc(limit=-8)
            bench.note(name, all_s=time.monotonic() - began_s)
            free()
        if dist.is_initialized():
            dist.destroy_process_group()
    return 1 if num_failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
