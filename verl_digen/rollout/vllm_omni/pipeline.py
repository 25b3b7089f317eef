# SPDX-License-Identifier: Apache-2.0
"""Any vLLM-Omni pipeline with step execution, stepping with the project's SDE and recording its path.

    prepare_encode   the pipeline's own, then: initial noise of the sample's seed, schedule, conditions kept aside
    denoise_step     the pipeline's own velocity of all requests in the batch, then ONE `sde_step` for all of them
    step_scheduler   takes the latents that were made there
    post_decode      the pipeline's own pixels, with the trajectory beside them

- Requests at different steps, with different windows, laws and schedules share a batch.
- Latents are kept in the order's dtype; the network sees them in its own, as in `verl_digen.rollout.sampler`.
- A request without an order (a warm-up, the HTTP API) runs as if this file did not exist.

`Recording<Name>` of this module is the pipeline class `<Name>` of vLLM-Omni's registry with `RecordingMixin` over it:
a worker in another process finds it by name.

Invariant (tests/vllm_omni): the same request, weights and run seed give what `Sampler` gives, whoever shares the batch.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest
from vllm_omni.diffusion.data import DiffusionOutput
from vllm_omni.diffusion.registry import DiffusionModelRegistry
from vllm_omni.diffusion.worker.input_batch import InputBatch
from vllm_omni.diffusion.worker.utils import StepRequestState

from verl_digen.algorithms.noise import INITIAL_LATENTS, sample_seed, step_noise
from verl_digen.algorithms.sde import sde_step
from verl_digen.rollout.recording import initial_seed, record_trajectory, trained_latents
from verl_digen.rollout.vllm_omni.requests import ORDER, RecordingOrder
from verl_digen.types import Condition, SampleRequest, move_condition

PREFIX = "Recording"
"""What this module puts before the name of a pipeline class."""
RECORDED = "digen_recorded"
"""Where a finished request's record is found among vLLM-Omni's trajectory outputs."""

STEP_METHODS = ("prepare_encode", "denoise_step", "step_scheduler", "post_decode")
"""vLLM-Omni's `SupportsStepExecution`, which cannot be asked of a class."""


@dataclass
class Recording:
    """One request under way."""

    order: RecordingOrder
    seed: int
    """Of the noise of its steps."""
    sigmas: Tensor
    """[T+1] fp32 CPU."""
    latents: Tensor
    """[1, ...] x at the next step, in the order's dtype."""
    condition: Condition
    negative_condition: Condition | None
    version: int
    """Weight version of the first step."""
    start_s: float
    """Unix time."""
    kept_steps: frozenset[int]
    path: dict[int, Tensor] = field(default_factory=dict)
    log_probs: list[Tensor] = field(default_factory=list)

    @property
    def request(self) -> SampleRequest:
        return self.order.request


class RecordingMixin:
    """Over a pipeline class that implements vLLM-Omni's `SupportsStepExecution`."""

    weight_version = 0
    """Version of the weights that the next step runs with; set by the worker."""
    incoming_adapter: tuple[LoRAModel, PEFTHelper] | None = None
    """The adapter that the worker is just registering."""

    def prepare_encode(self, state: StepRequestState, **kwargs: Any) -> StepRequestState:
        start_s = time.time()
        state = super().prepare_encode(state, **kwargs)  # type: ignore[misc]
        if ORDER not in state.sampling.extra_args:
            return state
        order: RecordingOrder = state.sampling.extra_args[ORDER]
        request = order.request
        assert state.latents is not None and state.scheduler is not None
        noise = step_noise(initial_seed(order.run_seed, request), INITIAL_LATENTS, state.latents.shape[1:])
        latents = noise.unsqueeze(0).to(state.latents.device, order.latents_dtype)
        state.latents = latents.to(state.latents.dtype)
        state.extra[RECORDED] = Recording(
            order=order,
            seed=sample_seed(order.run_seed, request.uid, request.sample_index),
            sigmas=state.scheduler.sigmas.float().cpu(),
            latents=latents,
            # copies: vLLM-Omni pads the originals in place when it batches them
            condition=self.read_condition(state.prompt_embeds, state.txt_seq_lens),
            negative_condition=(
                self.read_condition(state.negative_prompt_embeds, state.negative_txt_seq_lens)
                if state.do_true_cfg
                else None
            ),
            version=self.weight_version,
            start_s=start_s,
            kept_steps=frozenset(trained_latents(request.window)),
        )
        return state

    def read_condition(self, embeds: Tensor | None, num_tokens: list[int] | None) -> Condition:
        """What the trainer's network reads of one prompt, out of vLLM-Omni's state of one request.

        Args:
            embeds: [1, L, D]. num_tokens: L without padding, one entry.
        """
        assert embeds is not None and num_tokens is not None
        return {"embeds": embeds[0, : num_tokens[0]].clone()}

    @torch.no_grad()
    def encode_condition(self, text: str) -> Condition:
        """What the trainer's network reads of one prompt, on the CPU, for samples that the trainer generates."""
        embeds, _ = self.encode_prompt(prompt=text, max_sequence_length=self.tokenizer_max_length)  # type: ignore
        return move_condition(self.read_condition(embeds, [embeds.shape[1]]), "cpu")

    def predict_noise(self, *args: Any, **kwargs: Any) -> Tensor:
        """In fp32, so that guidance combines its branches as the trainer does."""
        return super().predict_noise(*args, **kwargs).float()  # type: ignore[misc]

    def denoise_step(
        self, input_batch: InputBatch, *, states: Sequence[StepRequestState] | None = None, **kwargs: Any
    ) -> Tensor | None:
        velocity = super().denoise_step(input_batch, states=states, **kwargs)  # type: ignore[misc]
        if velocity is not None and states is not None:
            self._take_steps(states, velocity)
        return velocity

    def _take_steps(self, states: Sequence[StepRequestState], velocity: Tensor) -> None:
        """One `sde_step` per law for the recorded requests of a batch; rows of `velocity` lie state after state."""
        by_law: dict[str, list[tuple[Recording, int, Tensor]]] = {}
        row = 0
        for state in states:
            assert state.latents is not None
            if RECORDED in state.extra:
                recording: Recording = state.extra[RECORDED]
                law = recording.request.sampling.law
                by_law.setdefault(law, []).append((recording, state.step_index, velocity[row : row + 1]))
            row += state.latents.shape[0]
        for law, entries in by_law.items():
            _take_steps_of_law(law, entries)

    def step_scheduler(self, state: StepRequestState, noise_pred: Tensor | None, **kwargs: Any) -> None:
        if RECORDED not in state.extra:
            super().step_scheduler(state, noise_pred, **kwargs)  # type: ignore[misc]
            return
        assert state.latents is not None
        state.latents = state.extra[RECORDED].latents.to(state.latents.dtype)
        state.step_index += 1

    def post_decode(self, state: StepRequestState, **kwargs: Any) -> DiffusionOutput | None:
        output = super().post_decode(state, **kwargs)  # type: ignore[misc]
        if output is not None and RECORDED in state.extra:
            record = self._finish(state.extra[RECORDED], output.output)
            output.output = {"payload": {"trajectory": {RECORDED: record}}, "metadata": {}}
        return output

    def _finish(self, recording: Recording, pixels: Tensor) -> dict[str, Any]:
        """pixels: [1, 3, H, W] or [1, 3, F, H, W] in [-1, 1]."""
        request = recording.request
        trajectory = record_trajectory(
            request,
            seed=initial_seed(recording.order.run_seed, request),
            versions=(recording.version, self.weight_version),
            path=recording.path,
            sigmas=recording.sigmas,
            log_probs_T=torch.stack(recording.log_probs),
            empty=recording.latents[:0],
        )
        return {
            "trajectory": trajectory,
            "pixels": _to_uint8(pixels[0]),
            "start_s": recording.start_s,
            "end_s": time.time(),
            "condition": _to_cpu(recording.condition) if request.wants_condition else None,
            "negative_condition": _to_cpu(recording.negative_condition) if request.wants_condition else None,
        }

    # -- vLLM-Omni's hooks for adapters -------------------------------------------------------------------
    def _load_diffusion_lora_adapter(
        self, *, lora_request: LoRARequest, lora_path: str, dtype: torch.dtype
    ) -> tuple[LoRAModel, PEFTHelper]:
        """The adapter that is being registered; one of another time is gone, and what asks for it must not go on."""
        if self.incoming_adapter is None:
            raise RuntimeError(f"the adapter of {lora_request.lora_name} is not there any more")
        return self.incoming_adapter

    def _validate_diffusion_lora_binding(self, *, lora_model: LoRAModel, bound_lora_names: frozenset[str]) -> None:
        unbound = sorted(lora_model.loras.keys() - bound_lora_names)
        if unbound:
            raise RuntimeError(
                f"{len(unbound)} modules of the adapter have no layer in {type(self).__name__}, e.g. {unbound[0]}; "
                "choose other actor_rollout_ref.model.target_modules, or send merged weights "
                "(actor_rollout_ref.model.lora.merge=true)"
            )


def _take_steps_of_law(law: str, entries: Sequence[tuple[Recording, int, Tensor]]) -> None:
    """entries: the recording, its step, its velocity [1, ...]."""
    noise, noise_levels = [], []
    for recording, step, _ in entries:
        if step in recording.kept_steps:
            recording.path[step] = recording.latents[0]
        is_sde = step in recording.request.window.sde_steps
        noise_levels.append(recording.request.sampling.noise_level if is_sde else 0.0)
        shape = recording.latents.shape[1:]
        noise.append(step_noise(recording.seed, step, shape) if is_sde else torch.zeros(shape))
    latents = torch.cat([recording.latents for recording, _, _ in entries])
    taken = sde_step(
        torch.cat([velocity for _, _, velocity in entries]),
        latents,
        torch.stack([recording.sigmas[step] for recording, step, _ in entries]),
        torch.stack([recording.sigmas[step + 1] for recording, step, _ in entries]),
        law=law,
        noise_level=torch.tensor(noise_levels, dtype=torch.float64),
        sigma_max=torch.stack([recording.sigmas[1] for recording, _, _ in entries]),
        noise=torch.stack(noise).to(latents.device),
        storage_dtype=latents.dtype,
    )
    for index, (recording, _, _) in enumerate(entries):
        recording.latents = taken.next_sample[index : index + 1]
        recording.log_probs.append(taken.log_prob[index])


def _to_uint8(pixels: Tensor) -> Tensor:
    """[3, (F,) H, W] in [-1, 1] -> uint8 [(F,) H, W, 3] on the CPU, rounded as diffusers' image processor does."""
    channels_last = pixels.movedim(0, -1)
    return ((channels_last * 0.5 + 0.5).clamp(0, 1).float() * 255).round().to(torch.uint8).cpu()


def _to_cpu(condition: Condition | None) -> Condition | None:
    return None if condition is None else move_condition(condition, "cpu")


def recording_class(name: str) -> type[Any]:
    """vLLM-Omni's pipeline class `name` with `RecordingMixin` over it.

    Raises:
        ValueError: vLLM-Omni has no such pipeline, or it cannot run step by step.
    """
    pipeline = DiffusionModelRegistry._try_load_model_cls(name)
    if pipeline is None:
        raise ValueError(f"actor_rollout_ref.rollout.name=vllm_omni: vLLM-Omni has no pipeline {name}; use diffusers")
    if not all(hasattr(pipeline, method) for method in STEP_METHODS):
        raise ValueError(
            f"actor_rollout_ref.rollout.name=vllm_omni: vLLM-Omni runs {name} in one go, not step by step, so that "
            "nothing can be recorded; use actor_rollout_ref.rollout.name=diffusers"
        )
    return type(f"{PREFIX}{name}", (RecordingMixin, pipeline), {"__module__": __name__})


def __getattr__(name: str) -> type[Any]:
    if not name.startswith(PREFIX):
        raise AttributeError(f"module {__name__} has no attribute {name}")
    cls = recording_class(name.removeprefix(PREFIX))
    globals()[name] = cls  # one class object per process
    return cls
