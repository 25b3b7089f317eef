# SPDX-License-Identifier: Apache-2.0
"""Numerics of one model on this machine, in seconds and without a download, on its tiny random checkpoint.

A short version of the tests in `tests/models`, for installations with untested versions.
"""

import inspect
import math
import multiprocessing
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import diffusers
import numpy as np
import torch
import transformers
from PIL import Image
from torch import Tensor, nn

from verl_digen.algorithms.noise import INITIAL_LATENTS, sample_seed, step_noise
from verl_digen.algorithms.solvers import SCHEDULERS
from verl_digen.algorithms.window import Window
from verl_digen.config import SamplingConfig
from verl_digen.hardware.attention import NATIVE
from verl_digen.inputs.images import DEFAULT_IMAGE_PX, PromptInputs, SourceImage, generated_image
from verl_digen.models import load_model
from verl_digen.models.base import DiffusionModel
from verl_digen.models.kernels import compute_exactly, set_kernels
from verl_digen.models.tiny import BUILDERS, build_tiny
from verl_digen.sampling.requests import geometry_of, inputs_of
from verl_digen.sampling.sampler import Sampler, score_rows
from verl_digen.tools.checkup.checks import CheckFailed, Setting, cause_of
from verl_digen.types import Condition, Geometry, PathRecord, SampleRequest, Sampling, TrainingRows, Transitions
from verl_digen.weights.sending import own_device

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16)
"""Dtypes of `digen doctor --gpu`."""
NUM_PROCESSES = 4
"""Architectures that are tested at the same time: most of their time goes into building networks."""
PROMPTS = (
    "a red circle",
    "two small blue squares left of a red circle on a green background and a video of a yellow triangle",
)
RUN_SEED = 7
NUM_STEPS = 6
SIZE_PX = 64
IMAGE_SIZE_PX = (SIZE_PX, SIZE_PX)
"""Width and height of the images of a model that reads some: every rule reads them at their own size."""
LAW, NOISE_LEVEL = "flow", 0.7
ODE = Window(sde_steps=(), train_steps=())
TRAINED = Window(sde_steps=(0, 1, 2, 3, 4), train_steps=(0, 1, 2, 3, 4))
"""Steps on both sides of the switch between Wan2.2's experts."""

LOG_PROBS = "log-probs in training against sampling"
BROKEN_SHOWN = 6
"""Parameters without a finite gradient that are named."""
FALL = 1e-3
"""Amount by which the gradient step should lower the loss."""


@dataclass(frozen=True)
class Bounds:
    """Largest differences that pass."""

    latents: float
    """A latent; on the CPU the bound is the same as in tests/models."""
    log_prob: float
    """A log-prob, in nats."""
    gradient: float
    """fp32: relative error of the loss's fall, from its curvature and rounding. bf16: 1 - cosine of the gradients."""


ON_CPU = Bounds(1e-5, 1e-5, 0.1)
ON_ACCELERATOR = Bounds(1e-4, 1e-4, 0.1)
"""Its kernels depend on the batch's shape."""
IN_BF16 = Bounds(0.5, 1e-2, 0.5)
"""Pipelines round latents to bf16 at each step, and our sampler does not. Wide random weights amplify the rounding of a
gradient: on the CPU 1 - cosine is up to 0.3, and 1 without relation."""


@dataclass(frozen=True)
class Check:
    """One number and its bound."""

    what: str
    value: float
    bound: float
    cause: str = ""
    """Reason that was found for a number that does not hold."""

    @property
    def holds(self) -> bool:
        return self.value <= self.bound  # False for nan

    def __str__(self) -> str:
        line = f"{'ok  ' if self.holds else 'FAIL'}  {self.what:<72} {self.value:.1e}  (at most {self.bound:.0e})"
        return line if self.holds or not self.cause else f"{line}; {self.cause}"


def check_numerics(setting: Setting) -> str:
    """Run the self-test of the setting's architecture in both dtypes. CheckFailed if a number is beyond its bound."""
    return _test(setting.architecture)


def check_architectures(setting: Setting) -> str:
    """Run the self-test of every architecture; on a CPU only of the setting's. CheckFailed if a number of one is beyond
    its bound, or one raised an error."""
    names = [setting.architecture] if setting.is_cpu else sorted(BUILDERS)
    failed = {}
    context = multiprocessing.get_context("spawn")  # a fork cannot use a device that its parent has
    with ProcessPoolExecutor(NUM_PROCESSES, mp_context=context) as pool:
        running = {pool.submit(_test, name): name for name in names}
        for test in as_completed(running):
            name, error = running[test], test.exception()
            if error is None:
                setting.note(name, holds=test.result())
            elif isinstance(error, ImportError):  # its classes are of a newer diffusers or transformers
                names.remove(name)
                setting.note(name, skipped=cause_of(error))
            else:
                failed[name] = cause_of(error)
                setting.note(name, fails=failed[name])
    if failed:
        raise CheckFailed("; ".join(f"{name}: {cause}" for name, cause in failed.items()))
    return f"{len(names)} architectures hold in fp32 and bf16"


def _test(architecture: str) -> str:
    device, checks = own_device(), []
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        checks += [(name, check) for check in run_selftest(architecture, device, dtype)]
    failed = [
        f"{check.what} in {dtype}: {check.value:.1e}, at most {check.bound:.0e}"
        + f" ({check.cause})" * bool(check.cause)
        for dtype, check in checks
        if not check.holds
    ]
    if failed:
        raise CheckFailed(f"{architecture}: {'; '.join(failed)}")
    gaps = [f"{check.value:.0e} in {dtype}" for dtype, check in checks if check.what == LOG_PROBS]
    return f"{architecture}: {len(checks)} numbers hold; log-probs differ by {', '.join(gaps)}"


def run_selftest(name: str, device: torch.device = CPU, dtype: torch.dtype = torch.float32) -> Iterator[Check]:
    """Run the checks of tiny checkpoint `name`, a key of `verl_digen.models.tiny.BUILDERS`; yields each when done."""
    for library in (diffusers, transformers):  # no progress bars for tiny files
        library.logging.set_verbosity_error()
        library.logging.disable_progress_bar()
    with TemporaryDirectory(prefix="digen_selftest_") as folder:
        yield from check_model(load_model(build_tiny(name, Path(folder) / "checkpoint")), device, dtype)


def check_model(
    model: DiffusionModel, device: torch.device = CPU, dtype: torch.dtype = torch.float32
) -> Iterator[Check]:
    """Run the checks of a small checkpoint; yields each when done. A model that reads images gets as many as it
    needs with each prompt, and makes sizes of them."""
    least, most = model.spec.num_images
    images = tuple(_draw_image(number) for number in range(max(least, min(1, most))))
    bounds = IN_BF16 if dtype != torch.float32 else ON_CPU if device.type == "cpu" else ON_ACCELERATOR
    compute_exactly(torch.float32)  # in bf16 the reference's gradient
    model.compute_dtype = dtype
    transformer = model.load_transformer(dtype).to(device)
    set_kernels(model, transformer, side="trainer", attention=NATIVE, compiles=False)
    geometry = _geometry(model, images)
    prompts = PROMPTS[1:] if model.keeps_lengths_apart else PROMPTS  # one forward has all
    inputs = [inputs_of(prompt, images, geometry, SIZE_PX) for prompt in prompts]
    conditions = model.load_encoder(dtype, device)(inputs)
    sampler = Sampler(model, transformer, run_seed=RUN_SEED, device=device, latents_dtype=torch.float32)

    solver = SCHEDULERS[model.scheduler]
    sampling = Sampling(geometry, NUM_STEPS, true_cfg_scale=1.0, law=LAW, noise_level=NOISE_LEVEL, solver=solver)

    _, latents = sampler.sample(_requests(sampling, ODE, inputs), conditions, None, version=0)
    gap = (latents.cpu() - _run_pipeline(model, inputs, geometry, device, dtype).cpu()).abs().max().item()
    yield Check(f"sampler with eta = 0 against {model.pipeline_of(geometry)}", gap, bounds.latents)

    trajectories, _ = sampler.sample(_requests(sampling, TRAINED, inputs), conditions, None, version=0)
    paths = [path.record for path in trajectories if isinstance(path.record, PathRecord)]
    tiles = [_rows(model, paths, conditions, sampling, expert) for expert in range(len(model.experts))]
    tiles = [(rows.to(device), recorded) for rows, recorded in tiles]
    with torch.no_grad():
        gaps = [(_log_probs(model, transformer, rows).cpu() - recorded).abs().max().item() for rows, recorded in tiles]
    yield Check(LOG_PROBS, max(gaps), bounds.log_prob)

    for expert, (rows, _) in zip(model.experts, tiles, strict=True):
        network = "" if len(tiles) == 1 else f" of {expert}"
        if dtype == torch.float32:
            error = _gradient_step_error(model, transformer, rows)
            yield Check(f"gradient step{network}: the loss falls by what it says", error, bounds.gradient)
        else:
            error, cause = _gradient_turn(model, transformer, rows)
            yield Check(f"gradient{network}: 1 - cosine to the one in fp32", error, bounds.gradient, cause)


def _draw_image(seed: int) -> SourceImage:
    colours = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    picture = Image.fromarray(colours).resize(IMAGE_SIZE_PX, Image.Resampling.BICUBIC)
    return generated_image(f"image {seed}", np.asarray(picture))


def _geometry(model: DiffusionModel, images: Sequence[SourceImage]) -> Geometry:
    num_frames = model.spec.selftest.get("num_frames", 1)
    sizes = {"height_px": SIZE_PX, "width_px": SIZE_PX, "image_px": SIZE_PX, "num_frames": num_frames}
    if model.spec.image_sizes:
        sizes |= {"size_from_image": True, "image_sizes": model.spec.image_sizes}
    return geometry_of(SamplingConfig(**sizes), [(image.width_px, image.height_px) for image in images])


def _requests(sampling: Sampling, window: Window, inputs: Sequence[PromptInputs]) -> list[SampleRequest]:
    return [
        SampleRequest(f"p{number}", 0, one, PromptInputs(""), window, sampling) for number, one in enumerate(inputs)
    ]


@contextmanager
def images_read_at(pipeline: Any, side_px: int, sources: Sequence[tuple[int, int]] = ()) -> Iterator[None]:
    """Have a pipeline read images at other sizes than the published ones: at the area of a square of `side_px`
    (Qwen-Image-Edit; videos of HunyuanVideo 1.5), or for FLUX.1 Kontext at `sources`, each image's (height, width)."""
    module = sys.modules[type(pipeline).__module__]
    replaced: dict[str, Any] = {}
    if hasattr(module, "PREFERRED_KONTEXT_RESOLUTIONS"):
        replaced["PREFERRED_KONTEXT_RESOLUTIONS"] = [size[::-1] for size in sources]
    if own := vars(module).get("calculate_dimensions"):
        replaced["calculate_dimensions"] = lambda area, ratio: own(
            side_px**2 if area == DEFAULT_IMAGE_PX**2 else area, ratio
        )
    changes = [patch.multiple(module, **replaced)] if replaced else []
    if hasattr(pipeline, "target_size"):
        changes.append(patch.object(pipeline, "target_size", side_px))
    with ExitStack() as stack:
        for change in changes:
            stack.enter_context(change)
        yield


def _run_pipeline(
    model: DiffusionModel, inputs: Sequence[PromptInputs], geometry: Geometry, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Latents of the model's own pipeline for `inputs` and the sampler's initial noise."""
    pipeline = load_pipeline(model, geometry, dtype).to(device)
    if hasattr(pipeline, "guider"):  # guidance is a component here, not an argument
        pipeline.guider = pipeline.guider.new(guidance_scale=1.0)
    shape = model.latent_shape(geometry)
    seeds = [sample_seed(RUN_SEED, f"p{number}", 0) for number in range(len(inputs))]
    start = torch.stack([step_noise(seed, INITIAL_LATENTS, shape) for seed in seeds])
    given = {
        **size_of(pipeline, model, geometry),
        "num_inference_steps": NUM_STEPS,
        "output_type": "latent",
        **model.spec.selftest,
    }
    start = model.pipeline_start(start.to(device, dtype), geometry)
    if images := inputs[0].images:
        given["image"] = pictures_of(model, [image.read() for image in images])
    run = model.pipeline_call(pipeline, geometry)
    with images_read_at(pipeline, SIZE_PX, geometry.sources):  # one by one: some pipelines pad texts without a mask
        made = [
            final_latents(run, prompt=each.text, latents=one[None], **given)
            for each, one in zip(inputs, start, strict=True)
        ]
    return model.pipeline_end(torch.cat(made), geometry)


def load_pipeline(model: DiffusionModel, geometry: Geometry, dtype: torch.dtype) -> Any:
    """Load diffusers' pipeline for prompts with as many images, with the checkpoint's own scheduler."""
    pipeline: Any = getattr(diffusers, model.pipeline_of(geometry))
    loaded = pipeline.from_pretrained(model.path, dtype=dtype, **model.pipeline_parts())
    loaded.set_progress_bar_config(disable=True)
    return loaded


def final_latents(run: Callable[..., Any], **arguments: Any) -> Tensor:
    """Latents after the last step of a pipeline (`run`: its call, or `DiffusionModel.pipeline_call`), as its network
    reads them: output_type="latent" gives these, except that FLUX.2's pipeline has unpacked them."""
    last: dict[str, Tensor] = {}

    def keep(_: Any, step: int, timestep: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        last.update(tensors)
        return {}

    if "callback_on_step_end" not in inspect.signature(run).parameters:
        return torch.as_tensor(run(**arguments)[0])
    run(**arguments, callback_on_step_end=keep)
    return last["latents"]


def size_of(pipeline: Any, model: DiffusionModel, geometry: Geometry) -> dict[str, Any]:
    """Arguments of the model's pipeline for a size; none where it makes the size of its image alone."""
    known = inspect.signature(pipeline.__call__).parameters
    return {name: value for name, value in model.pipeline_size(geometry).items() if name in known}


def pictures_of(model: DiffusionModel, pictures: Sequence[Image.Image]) -> Any:
    """Argument `image` of the model's pipeline: a list, or the only one."""
    return pictures[0] if model.spec.num_images[1] == 1 else list(pictures)


def _rows(
    model: DiffusionModel, paths: Sequence[PathRecord], conditions: Sequence[Condition], sampling: Sampling, expert: int
) -> tuple[TrainingRows, Tensor]:
    """All trained steps of one expert, sample after sample, and their recorded log-probs; advantage 1 for the first
    sample, -1 for the second."""
    picks = [
        (number, step)
        for number, path in enumerate(paths)
        for step, own in enumerate(model.expert_of(path.sigmas).tolist())
        if own == expert
    ]
    log_probs = torch.stack([paths[n].log_probs[k] for n, k in picks])
    rows = TrainingRows(
        latents=torch.stack([paths[n].latents[paths[n].positions[k]] for n, k in picks]),
        sigmas=torch.stack([paths[n].sigmas[k] for n, k in picks]),
        point=Transitions(
            next_latents=torch.stack([paths[n].latents[paths[n].positions[k] + 1] for n, k in picks]),
            next_sigmas=torch.stack([paths[n].next_sigmas[k] for n, k in picks]),
            sigma_max=torch.stack([paths[n].sigma_max for n, _ in picks]),
            log_probs=log_probs,
        ),
        conditions=[conditions[n] for n, _ in picks],
        negative_conditions=None,
        advantages=torch.tensor([1.0 if n == 0 else -1.0 for n, _ in picks]),
        mask=torch.ones(len(picks)),
        sampling=sampling,
    )
    return rows, log_probs


def _log_probs(model: DiffusionModel, transformer: nn.Module, rows: TrainingRows) -> Tensor:
    return score_rows(model, transformer, rows)[0].log_prob


def _loss(model: DiffusionModel, transformer: nn.Module, rows: TrainingRows) -> Tensor:
    return -(rows.advantages * _log_probs(model, transformer, rows)).mean()


def _gradient(model: DiffusionModel, transformer: nn.Module, rows: TrainingRows) -> dict[str, Tensor]:
    """The gradient by parameter; the module is left without."""
    _loss(model, transformer, rows).backward()
    found = {name: one.grad for name, one in transformer.named_parameters() if one.grad is not None}
    transformer.zero_grad(set_to_none=True)
    return found


def _gradient_turn(model: DiffusionModel, transformer: nn.Module, rows: TrainingRows) -> tuple[float, str]:
    """(1 - cosine between the network's gradient and its fp32 weights', what is wrong with it); nan if there is
    no gradient, or one that is not finite."""
    found = _gradient(model, transformer, rows)
    dtype, model.compute_dtype = model.compute_dtype, torch.float32
    exact = _gradient(model, model.load_transformer(torch.float32).to(rows.latents.device), rows)
    model.compute_dtype = dtype
    if found.keys() != exact.keys() or not found:
        return math.nan, "another set of parameters has a gradient"
    broken = [name for name, gradient in found.items() if not gradient.isfinite().all()]
    if broken:
        shown = ", ".join(broken[:BROKEN_SHOWN])
        return math.nan, f"not finite in {len(broken)} of {len(found)} parameters: {shown}"
    ours, theirs = (
        torch.cat([gradient[name].double().cpu().flatten() for name in exact]) for gradient in (found, exact)
    )
    return 1 - nn.functional.cosine_similarity(ours, theirs, dim=0).item(), ""


def _gradient_step_error(model: DiffusionModel, transformer: nn.Module, rows: TrainingRows) -> float:
    """|fall / predicted fall - 1| of the loss, for a gradient step that should lower it by FALL; nan if there is no
    gradient. Restores the weights."""
    gradients = _gradient(model, transformer, rows)
    square_norm = sum(gradient.cpu().double().square().sum().item() for gradient in gradients.values())
    if square_norm == 0:
        return math.nan
    weights = {name: one for name, one in transformer.named_parameters() if name in gradients}
    start = {name: one.detach().clone() for name, one in weights.items()}
    with torch.no_grad():
        before = _loss(model, transformer, rows)
        for name, parameter in weights.items():
            parameter -= gradients[name] * (FALL / square_norm)
        fall = (before - _loss(model, transformer, rows)).item()
        for name, parameter in weights.items():
            parameter.copy_(start[name])
    return abs(fall / FALL - 1)
