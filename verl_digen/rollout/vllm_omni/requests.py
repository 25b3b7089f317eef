# SPDX-License-Identifier: Apache-2.0
"""A sample's request in vLLM-Omni's words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.lora.request import LoRARequest
from vllm_omni.inputs.data import OmniDiffusionSamplingParams

from verl_digen.types import SampleRequest

ORDER = "digen_order"
"""Where a request to record is found in vLLM-Omni's `extra_args`."""


@dataclass(frozen=True)
class RecordingOrder:
    """What a pipeline must know to sample with our SDE and to record; travels with the request."""

    request: SampleRequest
    run_seed: int
    """`digen.seed`."""
    latents_dtype: torch.dtype
    """What latents are kept in between steps and in the record."""
    is_probe: bool = False
    """True: it runs alone, before requests that wait, and leaves the prompt cache alone (`probing.py`)."""


def to_prompt(request: SampleRequest) -> dict[str, Any]:
    """The prompt; a negative one only where it is used, because its presence turns guidance on."""
    prompt: dict[str, Any] = {"prompt": request.prompt}
    if request.sampling.is_guided:
        prompt["negative_prompt"] = request.negative_prompt
    return prompt


def to_sampling_params(order: RecordingOrder, adapter: LoRARequest | None) -> OmniDiffusionSamplingParams:
    """Sampling parameters; requests that may not share a forward differ in a field that vLLM-Omni compares.

    Args:
        adapter: the weights' version, where updates carry a LoRA adapter alone.
    """
    sampling = order.request.sampling
    return OmniDiffusionSamplingParams(
        height=sampling.geometry.height_px,
        width=sampling.geometry.width_px,
        num_frames=sampling.geometry.num_frames,
        num_inference_steps=sampling.num_steps,
        true_cfg_scale=sampling.true_cfg_scale,
        guidance_scale=sampling.guidance_scale,
        seed=0,  # noise that the pipeline draws by itself is replaced by the order's
        lora_request=adapter,
        extra_args={ORDER: order},
    )


@dataclass(frozen=True)
class Published:
    """One weight update that a replica was sent."""

    serial: int
    """Counts updates from 1. Two updates may make the same version: the current policy and its average."""
    version: int


START = Published(serial=1, version=0)
"""The weights of the checkpoint, before the first update."""


@dataclass(frozen=True)
class Taken:
    """An update as a worker has loaded or registered it."""

    published: Published
    num_tensors: int
    checksums: tuple[int, ...]
    """`verl_digen.weights.probe.Probe.checksums`."""
    load_s: float
    """Seconds it took to load, without the wait for trajectories."""


def adapter_request(published: Published) -> LoRARequest:
    """The LoRA adapter of an update as a request names it: by its serial. vLLM wants an absolute path."""
    return LoRARequest(f"update {published.serial}", published.serial, f"/in-memory/update-{published.serial}")
