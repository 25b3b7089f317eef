# SPDX-License-Identifier: Apache-2.0
"""Decoding in batches of requests that run step by step. `test_parity.py` compares the pictures."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm_omni.diffusion.data import DiffusionOutput
from vllm_omni.diffusion.worker.utils import StepRequestState

from tests.vllm_omni.conftest import begin_recording, request
from verl_digen.algorithms.window import Window
from verl_digen.rollout.vllm_omni.recorder import RECORDED, Recording
from verl_digen.rollout.vllm_omni.step_mode import TOGETHER, StepRecordingMixin


class Pipeline:
    """A pipeline whose pictures are its latents."""

    most = 100
    """Pictures that memory has room for."""

    def __init__(self, *, od_config: Any, prefix: str):
        self.vae = nn.Module()
        self.sizes: list[int] = []

    def post_decode(self, state: StepRequestState) -> DiffusionOutput:
        assert state.latents is not None
        self.sizes.append(len(state.latents))
        if len(state.latents) > self.most:
            raise torch.OutOfMemoryError
        return DiffusionOutput(output=state.latents)


class Recorder(StepRecordingMixin, Pipeline):
    pass


def make_pipeline(decode_batch_size: int) -> Recorder:
    return Recorder(od_config=SimpleNamespace(custom_pipeline_args={"decode_batch_size": decode_batch_size}))


def make_state(pipeline: Recorder, number: int, *, size: int = 4, steps_left: int = 0) -> StepRequestState:
    """The state of a request, `steps_left` before its end, whose latents are 1 / `number`."""
    asked = replace(request(number), window=Window((), ()))
    shape = (3, size, size)
    recording = begin_recording(pipeline, asked, shape)
    recording.latents = torch.full((1, *shape), 1 / number)
    recording.log_probs = [torch.zeros(())] * (asked.sampling.num_steps - steps_left)
    state = StepRequestState(f"r{number}", SimpleNamespace(), latents=recording.latents)  # type: ignore[arg-type]
    state.extra[RECORDED] = recording
    return state


def decode(pipeline: Recorder, states: list[StepRequestState]) -> None:
    """Decode the states in order, as vLLM-Omni does after a step, and check that each gets its own picture."""
    pipeline._choose_together(states)
    for state in states:
        recording: Recording = state.extra[RECORDED]
        if recording.num_taken < recording.request.sampling.num_steps:
            continue
        output: Any = pipeline.post_decode(state).output
        pixels = output["payload"]["trajectory"][RECORDED]["generation"].pixels
        assert TOGETHER not in state.extra, "states that hold each other keep their tensors until a garbage collection"
        assert pixels.shape == (*recording.latents.shape[2:], 3)
        assert (pixels == round((recording.latents.max().item() + 1) / 2 * 255)).all()


def test_requests_that_end_together_are_decoded_in_batches_of_one_size():
    pipeline = make_pipeline(3)
    alike = [make_state(pipeline, number) for number in (1, 2, 3, 4)]
    larger, runs = make_state(pipeline, 5, size=8), make_state(pipeline, 6, steps_left=1)
    decode(pipeline, [alike[0], larger, *alike[1:], runs])
    assert pipeline.sizes == [3, 1, 1]


def test_what_runs_out_of_memory_is_decoded_one_by_one_from_then_on():
    pipeline = make_pipeline(3)
    pipeline.most = 2
    decode(pipeline, [make_state(pipeline, number) for number in (1, 2, 3)])
    decode(pipeline, [make_state(pipeline, number) for number in (4, 5)])
    assert pipeline.sizes == [3, 1, 1, 1, 1, 1]


def test_one_that_does_not_fit_alone_fails():
    pipeline = make_pipeline(3)
    pipeline.most = 0
    with pytest.raises(torch.OutOfMemoryError):
        decode(pipeline, [make_state(pipeline, 1)])
