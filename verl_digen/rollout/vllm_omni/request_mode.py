# SPDX-License-Identifier: Apache-2.0
"""A vLLM-Omni pipeline without step execution, stepping with the project's SDE and recording its path.

    forward          encodes each prompt by itself, hands conditions and initial noise to the pipeline's own `forward`,
                     which denoises a static batch of requests from first step to last; then the records
    scheduler        is ours meanwhile: the sigmas are the model file's, and ONE `sde_step` per step takes all requests
                     (`RecordedSchedule`)

- Requests of a batch share their size, number of steps and guidance; windows, laws and noise levels may differ.
  vLLM-Omni puts them together and starts no other until all are done: nothing joins a running batch. An abort of one
  request is answered at once and saves no work.
- Weights change between two calls of `forward`, so a trajectory has one version by construction.
- A prompt that the encoder refuses fails its own request. An error in the pipeline's `forward` fails the whole batch.
- A request without an order (a warm-up) runs as if this file did not exist.

What an architecture adds is in `request_pipelines.py`.

Invariant (tests/vllm_omni/test_request_mode.py): as `step_mode.py`'s.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from vllm_omni.diffusion.data import DiffusionOutput, OmniDiffusionConfig
from vllm_omni.diffusion.distributed.utils import get_local_device
from vllm_omni.diffusion.request import OmniDiffusionRequest
from vllm_omni.diffusion.worker.request_batch import DiffusionRequestBatch
from vllm_omni.inputs.data import OmniDiffusionSamplingParams

from verl_digen.models import load_model
from verl_digen.models.base import DiffusionModel, PromptCheck
from verl_digen.rollout.vllm_omni.recorder import Recording, RecordingPipeline, take_steps
from verl_digen.rollout.vllm_omni.requests import ORDER, RecordingOrder
from verl_digen.types import Condition, Sampling, move_condition


class RecordedSchedule:
    """What a pipeline takes for its scheduler while it denoises recorded requests.

    Args:
        recordings: the batch, before its first step.
        timesteps: [T] what the network is told of the steps, on the pipeline's device.
        config: of the pipeline's own scheduler.

    Example, T = 2:
        schedule.step(velocity, t, latents)    # recordings hold x after the first step, which is returned
        schedule.timestep                      # timesteps[1]
    """

    order = 1
    """Forwards per step."""

    def __init__(self, recordings: Sequence[Recording], timesteps: Tensor, config: Any):
        self.recordings = recordings
        self.timesteps = timesteps
        self.sigmas = recordings[0].sigmas
        self.config = config
        self._step = 0

    @property
    def timestep(self) -> Tensor:
        """[] of the next step."""
        return self.timesteps[self._step]

    def set_timesteps(
        self,
        num_inference_steps: int | None = None,
        device: torch.device | str | None = None,
        sigmas: Any = None,
        mu: float | None = None,
    ) -> None:
        """The schedule stands, whatever the pipeline would have it be."""

    def set_begin_index(self, begin_index: int = 0) -> None:
        """It begins at its beginning."""

    def step(self, velocity: Tensor, timestep: Tensor, latents: Tensor, return_dict: bool = False) -> tuple[Tensor]:
        """x after the next step, [B, ...] in the dtype of `latents`, the pipeline's copy of x before it."""
        rows = velocity.split(1)
        take_steps([(recording, self._step, row) for recording, row in zip(self.recordings, rows, strict=True)])
        self._step += 1
        return (torch.cat([recording.latents for recording in self.recordings]).to(latents.dtype),)


class RequestRecordingMixin(RecordingPipeline):
    """Over a pipeline class whose `forward` denoises a `DiffusionRequestBatch`."""

    od_config: OmniDiffusionConfig
    _own_scheduler: Any
    _schedule: RecordedSchedule | None = None
    """Of the recorded batch under way."""
    _encoding = threading.Lock()
    """Held by who uses the text encoders: a batch, or the trainer's `encode_condition` beside one (`engine.ASIDE`)."""

    @cached_property
    def _model(self) -> DiffusionModel:
        return load_model(self.od_config.model)

    @cached_property
    def _check_prompt(self) -> PromptCheck:
        return self._model.load_prompt_check()

    @property
    def scheduler(self) -> Any:
        """The recorded batch's schedule while there is one, else the pipeline's own scheduler."""
        return self._own_scheduler if self._schedule is None else self._schedule

    @scheduler.setter
    def scheduler(self, scheduler: Any) -> None:
        self._own_scheduler = scheduler

    # -- what an architecture says ------------------------------------------------------------------------
    def encode_text(self, text: str) -> Condition:
        """One prompt by the pipeline's encoders -> what the trainer's network reads of it."""
        raise NotImplementedError

    def set_guidance(self, params: OmniDiffusionSamplingParams, sampling: Sampling) -> None:
        """Guidance in the pipeline's words; its `guidance_scale` is classifier-free guidance as ours unless a subclass
        says otherwise."""
        params.guidance_scale = sampling.true_cfg_scale
        params.guidance_scale_provided = True

    def prompt_fields(self, recording: Recording) -> dict[str, Tensor]:
        """What vLLM-Omni takes with a prompt in place of encoding it."""
        fields = {}
        for prefix, condition in (("", recording.condition), ("negative_", recording.negative_condition)):
            if condition is not None:
                collated = self._model.collate([condition])
                fields[f"{prefix}prompt_embeds"] = collated["embeds"][0]
                if "pooled" in collated:
                    fields[f"{prefix}pooled_prompt_embeds"] = collated["pooled"][0]
        return fields

    # -- vLLM-Omni's ---------------------------------------------------------------------------------------
    def forward(self, req: DiffusionRequestBatch) -> list[DiffusionOutput] | DiffusionOutput:
        first = req.requests[0].sampling_params
        if ORDER not in first.extra_args:  # `BarrierRequestScheduler` keeps those with and those without apart
            with self._encoding:
                return super().forward(req)  # type: ignore[misc]
        if first.lora_request is not None:  # the worker has activated it for the whole batch
            self.weight_version = self.adapter_versions[first.lora_request.lora_int_id]
        begun = [self._begin_or_refuse(request.sampling_params.extra_args[ORDER]) for request in req.requests]
        readable = [pair for pair in zip(req.requests, begun, strict=True) if isinstance(pair[1], Recording)]
        made = iter(self._denoise(readable) if readable else ())
        return [next(made) if isinstance(found, Recording) else found for found in begun]

    def _denoise(self, readable: Sequence[tuple[OmniDiffusionRequest, Recording]]) -> list[DiffusionOutput]:
        """Run the pipeline's own `forward` for requests whose recordings have begun; their outputs, in order."""
        recordings = [recording for _, recording in readable]
        handed_over = [self._hand_over(request, recording) for request, recording in readable]
        timesteps = self._model.timesteps(recordings[0].sigmas[:-1]).to(get_local_device())
        self._schedule = RecordedSchedule(recordings, timesteps, self._own_scheduler.config)
        try:
            outputs = super().forward(DiffusionRequestBatch(handed_over))  # type: ignore[misc]
        finally:
            self._schedule = None
        outputs = [outputs] if isinstance(outputs, DiffusionOutput) else outputs
        for recording, output in zip(recordings, outputs, strict=True):
            self.finish_recording(recording, output)
        return outputs

    def _begin_or_refuse(self, order: RecordingOrder) -> Recording | DiffusionOutput:
        """A recording, or the error output of a request whose prompt the encoder refuses."""
        try:
            return self._begin(order)
        except ValueError as error:
            return DiffusionOutput.from_exception(error)

    def _begin(self, order: RecordingOrder) -> Recording:
        start_s = time.time()
        request = order.request
        sampling = request.sampling
        return self.begin_recording(
            order,
            shape=self._model.latent_shape(sampling.geometry),
            sigmas=self._model.sigmas(sampling.num_steps, sampling.geometry),
            device=get_local_device(),
            condition=self._encode_for(order, request.prompt),
            negative_condition=self._encode_for(order, request.negative_prompt) if sampling.is_guided else None,
            start_s=start_s,
        )

    def _encode_for(self, order: RecordingOrder, text: str) -> Condition:
        with self._encoding, self.prompt_cache_for(order):
            return self._encode(text)

    def _encode(self, text: str) -> Condition:
        """Call it with `_encoding` held."""
        self._check_prompt(text)
        return {name: tensor.to(self.od_config.dtype) for name, tensor in self.encode_text(text).items()}

    def _hand_over(self, request: OmniDiffusionRequest, recording: Recording) -> OmniDiffusionRequest:
        """The request as the pipeline gets it; vLLM-Omni's own stays as it is."""
        assert isinstance(request.prompt, dict)
        params = copy.copy(request.sampling_params)
        # a pipeline takes them to the dtype it wants, some only if that is fp32 already
        params.latents = recording.latents.float()
        self.set_guidance(params, recording.request.sampling)
        handed_over = copy.copy(request)
        handed_over.sampling_params = params
        handed_over.prompt = {**request.prompt, **self.prompt_fields(recording)}  # type: ignore[typeddict-item]
        return handed_over

    @torch.no_grad()
    def encode_condition(self, text: str) -> Condition:
        with self._encoding:
            return move_condition(self._encode(text), "cpu")
