# SPDX-License-Identifier: Apache-2.0
"""Recording mixin of LTX-2: video with sound, from text.

The pipeline carries video and sound as two tensors and steps each by Euler; here both are parts of one tensor of
latents, as in the model file, and take one step of the project's SDE.

| vLLM-Omni differs from diffusers | here |
| --- | --- |
| it shifts the schedule by the longest sequence; diffusers by the video's tokens | the model file's sigmas |
| it guides clean predictions and rounds them to the network's dtype | velocities are guided in fp32, as in training |
| it normalises packed latents of the sound that a request brings, and not of the video | neither |
| its connectors round positions to bf16, in bf16; diffusers' stay in fp32 | its own: equal in fp32 alone |
| its guidance has other defaults, such as 7 for the sound | one scale for both, the other guidance is off |
"""

from typing import Any

import torch
from torch import Tensor
from vllm_omni.diffusion.data import DiffusionOutput, OmniDiffusionConfig
from vllm_omni.diffusion.models.ltx2.ltx2_conditioning import LTXPromptContext
from vllm_omni.diffusion.models.ltx2.ltx2_guidance import LTXGuidanceExecutor
from vllm_omni.diffusion.models.ltx2.ltx2_latents import LTXAVState
from vllm_omni.diffusion.request import OmniDiffusionRequest
from vllm_omni.inputs.data import OmniDiffusionSamplingParams

from verl_digen.inputs.audio import Audio
from verl_digen.models.base import Collated
from verl_digen.models.ltx2 import FRAMES_PER_S, LTX2, MAX_TEXT_TOKENS
from verl_digen.models.ltx2_parts import Parts, connected
from verl_digen.rollout.vllm_omni.recorder import Recording
from verl_digen.rollout.vllm_omni.request_mode import RequestRecordingMixin
from verl_digen.types import Condition, Sampling

PLAIN_GUIDANCE = {
    f"{part}_{name}": value
    for part in ("video", "audio")
    for name, value in (("stg_scale", 0.0), ("modality_scale", 1.0), ("rescale_scale", 0.0))
}
"""Request's `extra_args` that turn the pipeline's further guidance off."""


class VelocityGuidance(LTXGuidanceExecutor):
    """vLLM-Omni's passes of the network; while recorded requests run, their velocities are combined in fp32.
    `pipeline`: the recording pipeline."""

    def __init__(self, pipeline: "LTX2Recording"):
        self._pipeline = pipeline

    def _guide_modality(self, sample: Tensor, splits: Any, sigma: Tensor, guidance: Any, **more: Any) -> Tensor:  # type: ignore[override]
        if self._pipeline._schedule is None:
            return super()._guide_modality(sample, splits, sigma, guidance, **more)
        positive = splits["cond"].float()
        if "uncond" not in splits:
            return positive
        return self._pipeline._model.guide(positive, splits["uncond"].float(), guidance.cfg_scale)


class LTX2Recording(RequestRecordingMixin):
    """LTX-2, one stage."""

    _model: LTX2

    def __init__(self, *, od_config: OmniDiffusionConfig, prefix: str = ""):
        super().__init__(od_config=od_config, prefix=prefix)  # type: ignore[call-arg]
        self.guidance_executor = VelocityGuidance(self)

    @RequestRecordingMixin.scheduler.getter
    def scheduler(self) -> Any:
        """The pipeline's own scheduler, also while recorded requests run: it copies and overwrites it, and
        `_denoise_step` does not read it."""
        return self._own_scheduler

    # -- per model ----------------------------------------------------------------------------------------
    def encode_text(self, text: str) -> Condition:
        return dict(
            self.encode_prompt(
                prompt=text, do_classifier_free_guidance=False, max_sequence_length=MAX_TEXT_TOKENS, is_connected=True
            )
        )

    def encode_prompt(self, *arguments: Any, is_connected: bool = False, **more: Any) -> Any:
        """Encode as the pipeline does; with `is_connected` run the connectors, too, so that vLLM-Omni's cache keeps
        items of a condition, not the hidden states of all layers, 49 in the published checkpoint."""
        encoded = super().encode_prompt(*arguments, **more)  # type: ignore[misc]
        if not is_connected:
            return encoded
        embeds, mask, *_ = encoded
        return tuple(connected(self, embeds, mask).items())

    def set_guidance(self, params: OmniDiffusionSamplingParams, sampling: Sampling) -> None:
        super().set_guidance(params, sampling)
        params.extra_args = params.extra_args | PLAIN_GUIDANCE
        params.frame_rate = FRAMES_PER_S

    def prompt_fields(self, recording: Recording) -> dict[str, Any]:
        return {}

    def finish_recording(self, recording: Recording, output: DiffusionOutput, audio: Audio | None = None) -> None:
        """Replace video and sound of `output` with the record."""
        assert isinstance(output.output, tuple)
        output.output, waveform = output.output
        rate_hz = self.vocoder.config.output_sampling_rate  # type: ignore[attr-defined]
        super().finish_recording(recording, output, Audio(waveform[0].float().cpu().numpy(), rate_hz))

    # -- vLLM-Omni's --------------------------------------------------------------------------------------
    def _hand_over(self, request: OmniDiffusionRequest, recording: Recording) -> OmniDiffusionRequest:
        handed_over = super()._hand_over(request, recording)
        params = handed_over.sampling_params
        assert params.latents is not None
        params.latents, params.audio_latents = self._parts(recording).tokens(params.latents)
        return handed_over

    def _prepare_prompt_context(self, **arguments: Any) -> LTXPromptContext:
        """Text for the network: while recorded requests run, their conditions."""
        if self._schedule is None:
            return super()._prepare_prompt_context(**arguments)  # type: ignore[misc]
        recordings = self._schedule.recordings
        positive = self._model.collate([recording.condition for recording in recordings])
        guided = [recording.negative_condition for recording in recordings if recording.negative_condition is not None]
        negative: Collated | dict[str, None] = dict.fromkeys(positive)
        if guided:
            negative = self._model.collate(guided)
        return LTXPromptContext(
            batch_size=len(recordings),
            connector_prompt_embeds=positive["embeds"],
            connector_audio_prompt_embeds=positive["audio"],
            connector_attention_mask=None,
            positive_connector_prompt_embeds=positive["embeds"],
            positive_connector_audio_prompt_embeds=positive["audio"],
            positive_connector_attention_mask=None,
            negative_connector_prompt_embeds=negative["embeds"],
            negative_connector_audio_prompt_embeds=negative["audio"],
            negative_connector_attention_mask=None,
        )

    def prepare_audio_latents(self, *arguments: Any, latents_normalized: bool = False, **more: Any) -> Any:
        """Latents of the sound before the first step; a recorded request's are normalised."""
        is_normalized = latents_normalized or self._schedule is not None
        return super().prepare_audio_latents(*arguments, latents_normalized=is_normalized, **more)  # type: ignore[misc]

    def _denoise_step(
        self, index: int, timestep: Tensor, state: LTXAVState, forward_ctx: Any, denoise_ctx: Any
    ) -> LTXAVState:
        """Take a step: while recorded requests run, their next one, or none after the last of this call."""
        schedule = self._schedule
        if schedule is None:
            return super()._denoise_step(index, timestep, state, forward_ctx, denoise_ctx)  # type: ignore[misc]
        if index >= len(schedule.timesteps):
            return state
        denoise_ctx.latents, denoise_ctx.audio_latents = state.video, state.audio
        velocities = self._predict_noise_for_step(index, schedule.timestep, state, forward_ctx, denoise_ctx)  # type: ignore[attr-defined]
        latents = torch.cat([state.video, state.audio], dim=1)
        (taken,) = schedule.step(torch.cat(velocities, dim=1), timestep, latents)
        return LTXAVState(*self._parts(schedule.recordings[0]).tokens(taken))

    def _decode_output(self, *, latents: Tensor, audio_latents: Tensor, output_type: str, **more: Any) -> Any:
        """Decode video and sound; recorded requests one after the other, without PIL pictures."""
        if self._schedule is None:
            given: dict[str, Any] = {"latents": latents, "audio_latents": audio_latents, "output_type": output_type}
            return super()._decode_output(**given, **more)  # type: ignore[misc]
        if output_type == "latent":
            return self._make_output((latents, audio_latents))  # type: ignore[attr-defined]
        vae, audio_vae, vocoder = (getattr(self, name) for name in ("vae", "audio_vae", "vocoder"))
        videos = [vae.decode(one.to(vae.dtype), None, return_dict=False)[0] for one in latents.split(1)]
        sounds = audio_latents.to(audio_vae.dtype).split(1)
        waveforms = [vocoder(audio_vae.decode(one, return_dict=False)[0]) for one in sounds]
        return self._make_output((torch.cat(videos), torch.cat(waveforms)))  # type: ignore[attr-defined]

    def _parts(self, recording: Recording) -> Parts:
        return self._model.parts(recording.request.sampling.geometry)
