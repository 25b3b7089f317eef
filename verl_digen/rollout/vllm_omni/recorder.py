# SPDX-License-Identifier: Apache-2.0
"""Base of the recording pipelines of vLLM-Omni: an order becomes a `Recording`, the project's SDE takes its steps, and
it ends as a trajectory with pixels. The pipeline's velocities come from `step_mode.py` or `request_mode.py`.

Latents are kept in the order's dtype and velocities in fp32; the network sees latents in its own dtype, as in
`verl_digen.sampling.sampler`.

Steps before the window run once for the samples of a group (`verl_digen.sampling.prefix`):

| pipeline | the first sample of a group | the others, of the same batch or a later one |
| --- | --- | --- |
| step by step | runs these steps by itself before its first step in the batch | join the batch at their window |
| in one call per batch | runs them in a call of its own, without decoding | a call with the rest of the schedule |

The other requests of the batch wait meanwhile; an abort takes effect after these steps. Weights are identified by the
adapter of the request. Those that are loaded have no other name: loading them clears the cache (`worker.py`). Every
worker of a replica gets the same requests and skips the same steps.

Invariant (tests/vllm_omni/test_prefix.py, test_request_mode.py): a sample that is generated alone is bitwise the one
that runs every step.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest
from vllm_omni.diffusion.data import DiffusionOutput

from verl_digen.algorithms.noise import INITIAL_LATENTS, step_noise
from verl_digen.algorithms.solvers import NOISY, Prediction, denoise_step
from verl_digen.hardware.transfers import to_device
from verl_digen.inputs.audio import Audio
from verl_digen.inputs.images import PromptInputs
from verl_digen.models.pixels import to_pixels
from verl_digen.rollout.encoders import carried
from verl_digen.rollout.vllm_omni.requests import RecordingOrder
from verl_digen.sampling.prefix import Prefix, PrefixCache, prefix_of
from verl_digen.sampling.recording import initial_seed, noise_seed, not_finite, record_trajectory, trained_latents
from verl_digen.types import Condition, Generation, SampleLatents, SampleRequest, Sampling, move_condition

RECORDED = "digen_recorded"
"""Key of a finished request's record in vLLM-Omni's trajectory outputs."""

OTHER_MODULES = (
    "choose other actor_rollout_ref.model.target_modules, or send merged weights "
    "(actor_rollout_ref.model.lora.merge=true)"
)
"""Remedy for modules of an adapter that the network has no layer for."""


@dataclass
class Recording:
    """State of one request in flight."""

    order: RecordingOrder
    sigmas: Tensor
    """[T+1] fp32 CPU."""
    latents: Tensor
    """[1, ...] x before the next step, in the order's dtype; x_0 after the last one."""
    condition: Condition
    negative_condition: Condition | None
    version: int
    """Weight version of the first step."""
    start_s: float
    """Unix time."""
    kept_steps: frozenset[int]
    adapter_id: int | None
    """Serial of the adapter that it is generated with; None without adapters."""
    num_shared_steps: int = 0
    """Steps that another sample of its group ran, see the module."""
    path: dict[int, Tensor] = field(default_factory=dict)
    log_probs: list[Tensor] = field(default_factory=list)
    predicted: Prediction | None = None
    """Predictions of the last steps, for a solver that reads them."""

    @property
    def request(self) -> SampleRequest:
        return self.order.request

    @cached_property
    def schedule(self) -> tuple[float, ...]:
        """`sigmas` as numbers."""
        return tuple(self.sigmas.tolist())

    @property
    def num_taken(self) -> int:
        """Steps behind `latents`; number of the next step."""
        return len(self.log_probs)


class RecordingPipeline:
    """Base of the mixins for vLLM-Omni's pipeline classes."""

    tiles_vae: bool = False
    """Default of vLLM-Omni's `vae_use_tiling`: its VAE needs it, and a `diffusers` replica tiles too."""
    weight_version = 0
    """Version of the weights used by the next step."""
    adapter_versions: Mapping[int, int] = MappingProxyType({})
    """Serial of each registered adapter -> its weight version."""
    incoming_adapter: tuple[LoRAModel, PEFTHelper] | None = None
    """Adapter that the worker is registering."""
    bound_modules: frozenset[str] = frozenset()
    """Modules of the last activated adapter that vLLM-Omni bound to layers."""

    def encode_condition(self, inputs: PromptInputs) -> Condition:
        """Encode one prompt, with its images, into the trainer network's condition, on the CPU, for samples that the
        trainer generates. ValueError if the prompt is longer than the encoder's limit, or its images cannot be read."""
        raise NotImplementedError

    def predict_noise(self, *args: Any, **kwargs: Any) -> Tensor:
        """Predict in fp32, so that guidance combines its branches as the trainer does."""
        return super().predict_noise(*args, **kwargs).float()  # type: ignore[misc]

    def begin_recording(
        self,
        order: RecordingOrder,
        *,
        shape: Sequence[int],
        sigmas: Tensor,
        device: torch.device,
        condition: Condition,
        negative_condition: Condition | None,
        start_s: float,
        adapter: LoRARequest | None,
    ) -> Recording:
        """A recording before its first step, with the initial noise of its sample. `shape`: of one sample's latents."""
        request = order.request
        noise = step_noise(initial_seed(order.run_seed, request), INITIAL_LATENTS, tuple(shape))
        return Recording(
            order=order,
            sigmas=sigmas.float().cpu(),
            latents=to_device(noise.unsqueeze(0), device, order.latents_dtype),
            condition=condition,
            negative_condition=negative_condition,
            version=self.weight_version,
            start_s=start_s,
            kept_steps=frozenset(trained_latents(request.window)),
            adapter_id=None if adapter is None else adapter.lora_int_id,
        )

    def finish_recording(self, recording: Recording, output: DiffusionOutput, audio: Audio | None = None) -> None:
        """Replace the pixels of `output` ([1, 3, H, W] or [1, 3, F, H, W] in [-1, 1]) with the record."""
        request, decoded = recording.request, to_pixels(_take_pixels(output))
        trajectory = record_trajectory(
            request,
            seed=initial_seed(recording.order.run_seed, request),
            versions=(recording.version, self.weight_version),
            path=recording.path,
            final=recording.latents[0],
            sigmas=recording.sigmas,
            log_probs_T=torch.stack(recording.log_probs),
            num_shared_steps=recording.num_shared_steps,
        )
        of_branches = (recording.condition, recording.negative_condition)
        wants_any = request.wants_condition or request.wants_latents
        conditions = [move_condition(one, "cpu") for one in of_branches if one is not None] if wants_any else []
        latents = None
        if request.wants_latents:
            latents = SampleLatents(self.decoded_latents(recording)[0].to("cpu", copy=True), conditions[0])
        generation = Generation(
            trajectory,
            decoded.pixels[0].cpu(),
            started_s=recording.start_s,
            ended_s=time.time(),
            latents=latents,
            audio=audio,
            **carried(request, conditions),
        )
        error = not_finite(request, recording.latents[0], trajectory.facts.version, decoded.is_finite[0], audio)
        record = {"error": error, "generation": generation}
        output.output = {"payload": {"trajectory": {RECORDED: record}}, "metadata": {}}

    def decoded_latents(self, recording: Recording) -> Tensor:
        """[1, ...] latents of a recording after its last step, as the decoder gets them."""
        return recording.latents

    # -- steps before the window --------------------------------------------------------------------------
    @cached_property
    def prefixes(self) -> PrefixCache:
        """Latents at the start of windows."""
        return PrefixCache()

    def steps_to_run(self, recording: Recording) -> int:
        """Begin a recording at its window if the latents there are known -> else its steps before it; 0: none."""
        prefix = _waiting_prefix(recording)
        if prefix is None:
            return 0
        known = self.prefixes.lookup(prefix, recording.adapter_id)
        if known is None:
            return prefix.num_steps
        device = recording.latents.device
        recording.latents = known.unsqueeze(0).to(device, copy=True)  # vLLM-Omni writes into latents
        recording.log_probs = [torch.zeros((), device=device)] * prefix.num_steps
        recording.num_shared_steps = prefix.num_steps
        return 0

    def keep_prefix(self, recording: Recording) -> None:
        """Keep the latents of a recording that has just run the steps before its window."""
        prefix = _waiting_prefix(recording)
        assert prefix is not None and recording.num_taken == prefix.num_steps
        recording.predicted = None  # its next step is stochastic
        self.prefixes.keep(prefix, recording.adapter_id, recording.latents[0])

    # -- vLLM-Omni's hooks for adapters -------------------------------------------------------------------
    def _load_diffusion_lora_adapter(
        self, *, lora_request: LoRARequest, lora_path: str, dtype: torch.dtype
    ) -> tuple[LoRAModel, PEFTHelper]:
        """The adapter that is being registered. RuntimeError if a request uses an adapter that was dropped."""
        if self.incoming_adapter is None:
            raise RuntimeError(f"the adapter of {lora_request.lora_name} is not there any more")
        return self.incoming_adapter

    def _validate_diffusion_lora_binding(self, *, lora_model: LoRAModel, bound_lora_names: frozenset[str]) -> None:
        self.bound_modules = bound_lora_names
        unbound = sorted(lora_model.loras.keys() - bound_lora_names)
        if unbound:
            raise RuntimeError(
                f"{len(unbound)} modules of the adapter have no layer in {type(self).__name__}, e.g. {unbound[0]}; "
                f"{OTHER_MODULES}"
            )


def _waiting_prefix(recording: Recording) -> Prefix | None:
    """Steps before the recording's window; None if it need not wait for it."""
    request = recording.request
    if not request.window.sde_steps:
        return None
    return prefix_of(request, initial_seed(recording.order.run_seed, request))


def take_steps(entries: Sequence[tuple[Recording, int, Tensor]]) -> None:
    """Take one `denoise_step` per kind of sampling in `entries`: (recording, step, velocity dx/dsigma [1, ...])."""
    alike: dict[tuple[Sampling, bool], list[tuple[Recording, int, Tensor]]] = {}
    for entry in entries:
        alike.setdefault((entry[0].request.sampling, entry[0].predicted is None), []).append(entry)
    for (sampling, _), of_kind in alike.items():
        _take_steps_of_kind(sampling, of_kind)


def _take_steps_of_kind(sampling: Sampling, entries: Sequence[tuple[Recording, int, Tensor]]) -> None:
    noise, is_sde = [], []
    for recording, step, _ in entries:
        if step in recording.kept_steps:
            recording.path[step] = recording.latents[0]
        is_sde.append(step in recording.request.window.sde_steps)
        shape = recording.latents.shape
        seed = noise_seed(recording.order.run_seed, recording.request, step)
        noise.append(step_noise(seed, step, shape) if is_sde[-1] or sampling.solver in NOISY else torch.zeros(shape))
    latents = torch.cat([recording.latents for recording, _, _ in entries])
    known = [recording.predicted for recording, _, _ in entries if recording.predicted is not None]
    taken, predicted = denoise_step(
        torch.cat([velocity for _, _, velocity in entries]),
        latents,
        tuple(recording.schedule[step] for recording, step, _ in entries),
        tuple(recording.schedule[step + 1] for recording, step, _ in entries),
        solver=sampling.solver,
        is_sde=is_sde,
        previous=Prediction.join(known),
        law=sampling.law,
        noise_level=sampling.noise_level,
        sigma_max=entries[0][0].schedule[1],
        noise=to_device(torch.cat(noise), latents.device),
        storage_dtype=latents.dtype,
        solver_noise=sampling.solver_noise,
    )
    for index, (recording, _, _) in enumerate(entries):
        recording.latents = taken.next_sample[index : index + 1]
        recording.log_probs.append(taken.log_prob[index])
        recording.predicted = None if predicted is None else predicted.rows([index])


def _take_pixels(output: Any) -> Tensor:
    """Pixels of an output; vLLM-Omni 0.30 has Wan's in `media`, which is empty afterwards."""
    pixels = output.output
    if "media" in vars(output) and output.media is not None:
        pixels, output.media = output.media.video.tensor, None
    assert isinstance(pixels, Tensor)
    return pixels
