# SPDX-License-Identifier: Apache-2.0
"""Recording mixin for vLLM-Omni pipelines with step execution: steps with the project's SDE and records the path.

    prepare_encode   the pipeline's own, then: initial noise from the sample's seed, schedule, copies of the conditions
    denoise_step     the pipeline's own velocity for all requests in the batch, then one step per kind of sampling
    step_scheduler   uses the latents of that step
    post_decode      the pipeline's own pixels, of several requests that end at once together, plus the trajectory

Before its first step in a batch a request is brought to its window, if its group shares the steps there
(`recorder.py`): by one that ran them, or by running them in a batch of its own. Requests at different steps, with
different windows, laws and schedules, can share a batch. One without an order (a warm-up) takes the pipeline's own code
path.

Invariant (tests/vllm_omni): the same request, weights and run seed give `Sampler`'s result, in any batch.
"""

import copy
import logging
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from vllm_omni.diffusion.data import DiffusionOutput, OmniDiffusionConfig
from vllm_omni.diffusion.worker.input_batch import InputBatch
from vllm_omni.diffusion.worker.utils import StepRequestState

from verl_digen.inputs.images import PromptInputs
from verl_digen.models.qwen_image import take_one_frame
from verl_digen.models.text import only_text
from verl_digen.rollout.vllm_omni.recorder import RECORDED, Recording, RecordingPipeline, take_steps
from verl_digen.rollout.vllm_omni.requests import ORDER, RecordingOrder
from verl_digen.types import Condition, move_condition

logger = logging.getLogger(__name__)

ALONE = "digen_alone"
"""Key of a state's copy for a batch of its own, until its first step: vLLM-Omni pads the prompts of a batch."""
TOGETHER = "digen_together"
"""Key of the states, this one among them, that are decoded together."""
DECODED = "digen_decoded"
"""Key of a state's pixels [1, 3, H, W] in [-1, 1], until they are in its record."""


class StepRecordingMixin(RecordingPipeline):
    """Mixin for a pipeline class that implements vLLM-Omni's `SupportsStepExecution`."""

    def __init__(self, *, od_config: OmniDiffusionConfig, prefix: str = ""):
        super().__init__(od_config=od_config, prefix=prefix)
        self._decode_batch_size: int = od_config.custom_pipeline_args["decode_batch_size"]
        take_one_frame(self.vae)  # type: ignore[attr-defined]

    def prepare_encode(self, state: StepRequestState, **kwargs: Any) -> StepRequestState:
        start_s = time.time()
        if ORDER not in state.sampling.extra_args:
            return super().prepare_encode(state, **kwargs)  # type: ignore[misc]
        order: RecordingOrder = state.sampling.extra_args[ORDER]
        state = super().prepare_encode(state, **kwargs)  # type: ignore[misc]
        assert state.latents is not None and state.scheduler is not None
        recording = self.begin_recording(
            order,
            shape=state.latents.shape[1:],
            sigmas=state.scheduler.sigmas,
            device=state.latents.device,
            # copies: vLLM-Omni pads the originals in place when it batches them
            condition=self.read_condition(state.prompt_embeds, state.txt_seq_lens),
            negative_condition=(
                self.read_condition(state.negative_prompt_embeds, state.negative_txt_seq_lens)
                if state.do_true_cfg
                else None
            ),
            start_s=start_s,
            adapter=state.sampling.lora_request,
        )
        state.latents = recording.latents.to(state.latents.dtype)
        state.extra[RECORDED] = recording
        state.extra[ALONE] = copy.copy(state)
        return state

    def read_condition(self, embeds: Tensor | None, num_tokens: list[int] | None) -> Condition:
        """The trainer network's condition for one prompt, from vLLM-Omni's state of one request. `embeds`: [1, L, D].
        `num_tokens`: L without padding, one entry."""
        assert embeds is not None and num_tokens is not None
        return {"embeds": embeds[0, : num_tokens[0]].clone()}

    @torch.no_grad()
    def encode_condition(self, inputs: PromptInputs) -> Condition:
        text = only_text(inputs)
        embeds, _ = self.encode_prompt(prompt=text, max_sequence_length=self.tokenizer_max_length)  # type: ignore
        return move_condition(self.read_condition(embeds, [embeds.shape[1]]), "cpu")

    def denoise_step(
        self, input_batch: InputBatch, *, states: Sequence[StepRequestState] | None = None, **kwargs: Any
    ) -> Tensor | None:
        begun = [state for state in states or () if ALONE in state.extra]
        for state in begun:
            self._to_window(state, state.extra.pop(ALONE))
        if any(state.step_index > 0 for state in begun):
            input_batch = InputBatch.make_batch(states)  # type: ignore[arg-type] - it has `begun`
        velocity = super().denoise_step(input_batch, states=states, **kwargs)  # type: ignore[misc]
        if velocity is not None and states is not None:
            take_steps(_recorded_rows(states, velocity))
            self._choose_together(states)
        return velocity

    def _choose_together(self, states: Sequence[StepRequestState]) -> None:
        """Choose which of the states that have taken their last step are decoded together: all of one size."""
        ending: dict[torch.Size, list[StepRequestState]] = {}
        for state in states:
            recording: Recording | None = state.extra.get(RECORDED)
            if recording is not None and recording.num_taken == recording.request.sampling.num_steps:
                ending.setdefault(recording.latents.shape, []).append(state)
        for alike in ending.values():
            for start in range(0, len(alike), self._decode_batch_size):
                together = alike[start : start + self._decode_batch_size]
                for state in together:
                    state.extra[TOGETHER] = together

    def _to_window(self, state: StepRequestState, alone: StepRequestState) -> None:
        """Bring a request to its window, if samples of its group share the steps before it."""
        recording: Recording = state.extra[RECORDED]
        assert alone.latents is not None
        if num_steps := self.steps_to_run(recording):
            for step in range(num_steps):
                velocity = super().denoise_step(InputBatch.make_batch([alone]), states=[alone])  # type: ignore[misc]
                take_steps([(recording, step, velocity)])
                alone.latents = recording.latents.to(alone.latents.dtype)
                alone.step_index += 1
            self.keep_prefix(recording)
        state.latents = recording.latents.to(alone.latents.dtype)
        state.step_index = recording.num_taken

    def step_scheduler(self, state: StepRequestState, noise_pred: Tensor | None, **kwargs: Any) -> None:
        if RECORDED not in state.extra:
            super().step_scheduler(state, noise_pred, **kwargs)  # type: ignore[misc]
            return
        assert state.latents is not None
        state.latents = state.extra[RECORDED].latents.to(state.latents.dtype)
        state.step_index += 1

    def post_decode(self, state: StepRequestState, **kwargs: Any) -> DiffusionOutput:
        if RECORDED not in state.extra:
            return super().post_decode(state, **kwargs)  # type: ignore[misc]
        if DECODED not in state.extra:
            self._decode(state, state.extra[TOGETHER])
        output = DiffusionOutput(output=state.extra.pop(DECODED))
        self.finish_recording(state.extra[RECORDED], output)
        return output

    def _decode(self, first: StepRequestState, states: Sequence[StepRequestState]) -> None:
        """Decode the states in one batch. If memory runs out, decode `first` alone, and later requests one by one."""
        assert first.latents is not None
        batch = copy.copy(first)
        batch.latents = torch.cat([state.extra[RECORDED].latents for state in states]).to(first.latents.dtype)
        try:
            decoded = super().post_decode(batch).output  # type: ignore[misc]
        except torch.OutOfMemoryError:
            if len(states) == 1:
                raise
            decoded = None
        if decoded is None:  # here, where the error holds no tensors any more
            logger.warning("%d pictures ran out of memory while they were decoded: from now on one by one", len(states))
            self._decode_batch_size = 1
            self._choose_together(states)
            self._decode(first, [first])
            return
        for state, pixels in zip(states, decoded.split(1), strict=True):
            del state.extra[TOGETHER]  # states that hold each other would keep their tensors
            state.extra[DECODED] = pixels


def _recorded_rows(states: Sequence[StepRequestState], velocity: Tensor) -> list[tuple[Recording, int, Tensor]]:
    """(recording, step, velocity) of each recorded request in a batch; `velocity` has its rows in `states` order."""
    entries, row = [], 0
    for state in states:
        assert state.latents is not None
        if RECORDED in state.extra:
            entries.append((state.extra[RECORDED], state.step_index, velocity[row : row + 1]))
        row += state.latents.shape[0]
    return entries
