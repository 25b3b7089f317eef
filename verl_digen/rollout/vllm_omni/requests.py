# SPDX-License-Identifier: Apache-2.0
"""Conversion of a sample's request to vLLM-Omni's prompt and sampling parameters, and the records of weight updates."""

from dataclasses import dataclass
from typing import Any

import torch
from vllm.lora.request import LoRARequest
from vllm_omni.inputs.data import OmniDiffusionSamplingParams

from verl_digen.types import SampleRequest

ORDER = "digen_order"
"""Key of the `RecordingOrder` in vLLM-Omni's `extra_args`."""


@dataclass(frozen=True)
class RecordingOrder:
    """Facts that a pipeline needs to sample with our SDE and to record; travels with the request."""

    request: SampleRequest
    run_seed: int
    """`digen.seed`."""
    latents_dtype: torch.dtype
    """Dtype of the latents between steps and in the record."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "RecordingOrder":
        """Itself: nothing changes an order, and vLLM-Omni copies a request's parameters when it begins."""
        return self


def to_prompt(request: SampleRequest) -> dict[str, Any]:
    """The prompt; the negative prompt only with guidance, because its presence turns guidance on."""
    prompt: dict[str, Any] = {"prompt": request.inputs.text}
    if request.sampling.is_guided:
        prompt["negative_prompt"] = request.negative_inputs.text
    return prompt


def to_sampling_params(order: RecordingOrder, adapter: LoRARequest | None) -> OmniDiffusionSamplingParams:
    """Sampling parameters. Requests that must not share a forward differ in a field that vLLM-Omni compares. `adapter`:
    identifies the weights, if updates carry only a LoRA adapter."""
    sampling = order.request.sampling
    return OmniDiffusionSamplingParams(
        height=sampling.geometry.height_px,
        width=sampling.geometry.width_px,
        num_frames=sampling.geometry.num_frames,
        num_inference_steps=sampling.num_steps,
        true_cfg_scale=sampling.true_cfg_scale,
        guidance_scale=sampling.guidance_scale,
        seed=0,  # the pipeline's own noise is replaced by the order's
        lora_request=adapter,
        extra_args={ORDER: order},
    )


@dataclass(frozen=True)
class Published:
    """Identity of one weight update sent to a replica."""

    serial: int
    """Number of the update, from 1. Two updates may have the same version: the current policy and its EMA copy."""
    version: int


START = Published(serial=1, version=0)
"""The weights of the checkpoint, before the first update."""


@dataclass(frozen=True)
class Taken:
    """A worker's report on an update that it has loaded or registered."""

    published: Published
    sent: int
    """Checksum of the update in the network's dtype."""
    held: int
    """Checksum read back from the worker's layers; with tensor parallelism, of its shards."""
    load_s: float
    """Seconds to load, without the wait for trajectories."""


def adapter_request(published: Published) -> LoRARequest:
    """vLLM's request for the LoRA adapter of an update, identified by its serial. vLLM wants an absolute path."""
    return LoRARequest(f"update {published.serial}", published.serial, f"/in-memory/update-{published.serial}")
