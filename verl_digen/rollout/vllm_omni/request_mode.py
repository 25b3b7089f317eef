# SPDX-License-Identifier: Apache-2.0
"""Recording mixin for vLLM-Omni pipelines without step execution: steps with the project's SDE and records the path.

    forward          encodes each prompt separately, passes conditions and initial noise to the pipeline's own
                     `forward`, which denoises a static batch of requests from first step to last; then the records
    scheduler        replaced by ours meanwhile: the model file's sigmas, and the project's steps (`RecordedSchedule`)

- Requests whose groups share the steps before a window (`recorder.py`) run from there, in one call per start.
- Requests of a batch share their size, number of steps and guidance; windows, laws and noise levels may differ. An
  abort of one request is answered at once and saves no work.
- Weights change between two calls of `forward`, so a trajectory has one version by construction.
- A prompt that the encoder refuses fails its own request. An error in the pipeline's `forward` fails the whole batch.
- A request without an order (a warm-up) takes the pipeline's own code path.

Invariant (tests/vllm_omni): the same request, weights and run seed give `Sampler`'s result, in any batch.
"""

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

from verl_digen.inputs.images import PromptInputs
from verl_digen.models import load_model
from verl_digen.models.base import DiffusionModel, PromptCheck
from verl_digen.models.text import only_text
from verl_digen.rollout.vllm_omni.recorder import Recording, RecordingPipeline, take_steps
from verl_digen.rollout.vllm_omni.requests import ORDER
from verl_digen.types import Condition, Sampling, move_condition


class RecordedSchedule:
    """Replacement for a pipeline's scheduler, with its `config`, while it denoises the recorded requests of a batch,
    which have all taken the same number of steps. `timesteps`: [N] the network's time input for each of the next steps,
    on the pipeline's device.

    Example, two steps:
        schedule.step(velocity, t, latents)    # returns x after the first step; recordings hold it too
        schedule.timestep                      # timesteps[1]
    """

    order = 1
    """Forwards per step."""

    def __init__(self, recordings: Sequence[Recording], timesteps: Tensor, config: Any):
        self.recordings = recordings
        self.timesteps = timesteps
        self._start = recordings[0].num_taken
        self.sigmas = recordings[0].sigmas[self._start : self._start + len(timesteps) + 1]
        self.config = config
        self._step = self._start

    @property
    def timestep(self) -> Tensor:
        """[] timestep of the next step."""
        return self.timesteps[self._step - self._start]

    def set_timesteps(
        self, num_inference_steps: Any = None, device: Any = None, sigmas: Any = None, mu: Any = None, shift: Any = None
    ) -> None:
        """No-op: the schedule is fixed."""

    def set_begin_index(self, begin_index: int = 0) -> None:
        """No-op: the schedule always starts with its own first step."""

    def step(self, velocity: Tensor, timestep: Tensor, latents: Tensor, return_dict: bool = False) -> tuple[Tensor]:
        """Take the next step -> x after it, [B, ...] in the dtype of `latents` (the pipeline's copy of x before it)."""
        rows = velocity.split(1)
        take_steps([(recording, self._step, row) for recording, row in zip(self.recordings, rows, strict=True)])
        self._step += 1
        return (torch.cat([recording.latents for recording in self.recordings]).to(latents.dtype),)


class RequestRecordingMixin(RecordingPipeline):
    """Mixin for a pipeline class whose `forward` denoises a `DiffusionRequestBatch`."""

    od_config: OmniDiffusionConfig
    _own_scheduler: Any
    _schedule: RecordedSchedule | None = None
    """Schedule of the running recorded batch; None if there is none."""
    _encoding = threading.Lock()
    """Lock on the text encoders: a batch and the trainer's `encode_condition` may run concurrently (`engine.ASIDE`)."""

    @cached_property
    def _model(self) -> DiffusionModel:
        return load_model(self.od_config.model)

    @cached_property
    def _check_prompt(self) -> PromptCheck:
        return self._model.load_prompt_check()

    @property
    def scheduler(self) -> Any:
        """The running recorded batch's schedule; the pipeline's own scheduler if there is none."""
        return self._own_scheduler if self._schedule is None else self._schedule

    @scheduler.setter
    def scheduler(self, scheduler: Any) -> None:
        self._own_scheduler = scheduler

    # -- per model ----------------------------------------------------------------------------------------
    def encode_inputs(self, inputs: PromptInputs) -> Condition:
        """Encode one prompt and its images with the pipeline's encoders. By default there are no images."""
        return self.encode_text(only_text(inputs))

    def encode_text(self, text: str) -> Condition:
        """Encode one prompt with the pipeline's encoders -> the trainer network's condition."""
        raise NotImplementedError

    def set_guidance(self, params: OmniDiffusionSamplingParams, sampling: Sampling) -> None:
        """Set the pipeline's guidance parameters. By default its `guidance_scale` is our classifier-free guidance;
        subclasses override this."""
        params.guidance_scale = sampling.true_cfg_scale
        params.guidance_scale_provided = True

    def prompt_fields(self, recording: Recording) -> dict[str, Any]:
        """Prompt fields with the encoded conditions, which vLLM-Omni uses instead of encoding the text."""
        fields: dict[str, Any] = {}
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
        if ORDER not in first.extra_args:  # `BarrierRequestScheduler` never mixes requests with and without an order
            with self._encoding:
                return super().forward(req)  # type: ignore[misc]
        if first.lora_request is not None:  # the worker has activated it for the whole batch
            self.weight_version = self.adapter_versions[first.lora_request.lora_int_id]
        begun = [self._begin(request.sampling_params) for request in req.requests]
        readable = [pair for pair in zip(req.requests, begun, strict=True) if isinstance(pair[1], Recording)]
        made = iter(self._denoise(readable) if readable else ())
        return [next(made) if isinstance(found, Recording) else found for found in begun]

    def predict_noise(self, *args: Any, **kwargs: Any) -> Tensor:
        """Predict in fp32; in a warm-up, which the pipeline's own scheduler steps, in the network's dtype."""
        velocity = super().predict_noise(*args, **kwargs)
        return velocity.to(self.od_config.dtype) if self._schedule is None else velocity

    def _denoise(self, readable: Sequence[tuple[OmniDiffusionRequest, Recording]]) -> list[DiffusionOutput]:
        """Run the pipeline's own `forward` for requests whose recordings have begun -> their outputs, in order."""
        for request, recording in readable:
            if num_steps := self.steps_to_run(recording):
                self._run([(request, recording)], num_steps)
                self.keep_prefix(recording)
        outputs: dict[int, DiffusionOutput] = {}
        starts = [recording.num_taken for _, recording in readable]
        for start in sorted(set(starts)):
            places = [place for place, of_place in enumerate(starts) if of_place == start]
            outputs |= zip(places, self._run([readable[place] for place in places]), strict=True)
        for place, (_, recording) in enumerate(readable):
            self.finish_recording(recording, outputs[place])
        return [outputs[place] for place in range(len(readable))]

    def _run(
        self, readable: Sequence[tuple[OmniDiffusionRequest, Recording]], until: int | None = None
    ) -> list[DiffusionOutput]:
        """Run the pipeline's own `forward` from where the recordings are, all at one step. `until`: step before which
        it ends, without decoding; None runs all steps."""
        recordings = [recording for _, recording in readable]
        handed_over = [self._hand_over(request, recording) for request, recording in readable]
        if until is not None:
            for request in handed_over:
                request.sampling_params.output_type = "latent"
        timesteps = self._model.timesteps(recordings[0].sigmas[:-1])[recordings[0].num_taken : until]
        self._schedule = RecordedSchedule(recordings, timesteps.to(get_local_device()), self._own_scheduler.config)
        try:
            return self.forward_recorded(handed_over)
        finally:
            self._schedule = None

    def forward_recorded(self, requests: list[OmniDiffusionRequest], **arguments: Any) -> list[DiffusionOutput]:
        """Run the pipeline's own `forward` -> the requests' outputs, in order. `arguments`: passed to `forward`."""
        outputs = super().forward(DiffusionRequestBatch(requests), **arguments)  # type: ignore[misc]
        return [outputs] if isinstance(outputs, DiffusionOutput) else outputs

    def _begin(self, params: OmniDiffusionSamplingParams) -> Recording | DiffusionOutput:
        """Begin a recording -> it, or the error output if the encoder refuses the prompt."""
        start_s, order = time.time(), params.extra_args[ORDER]
        request, sampling = order.request, order.request.sampling
        try:
            return self.begin_recording(
                order,
                shape=self._model.latent_shape(sampling.geometry),
                sigmas=self._model.sigmas(sampling.num_steps, sampling.geometry),
                device=get_local_device(),
                condition=self._encode(request.inputs),
                negative_condition=self._encode(request.negative_inputs) if sampling.is_guided else None,
                start_s=start_s,
                adapter=params.lora_request,
            )
        except ValueError as error:
            return DiffusionOutput.from_exception(error)

    def _encode(self, inputs: PromptInputs) -> Condition:
        with self._encoding:
            self._check_prompt(inputs.text)
            return {name: tensor.to(self.od_config.dtype) for name, tensor in self.encode_inputs(inputs).items()}

    def _hand_over(self, request: OmniDiffusionRequest, recording: Recording) -> OmniDiffusionRequest:
        """A copy of the request for the pipeline; vLLM-Omni's own request is not modified."""
        assert isinstance(request.prompt, dict)
        params = copy.copy(request.sampling_params)
        # pipelines cast the latents to their own dtype; some accept only fp32
        params.latents = recording.latents.float()
        self.set_guidance(params, recording.request.sampling)
        handed_over = copy.copy(request)
        handed_over.sampling_params = params
        handed_over.prompt = {**request.prompt, **self.prompt_fields(recording)}  # type: ignore[typeddict-item]
        return handed_over

    @torch.no_grad()
    def encode_condition(self, inputs: PromptInputs) -> Condition:
        return move_condition(self._encode(inputs), "cpu")
