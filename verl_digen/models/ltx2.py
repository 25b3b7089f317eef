# SPDX-License-Identifier: Apache-2.0
"""LTX-2: text to video with sound, as diffusers' `LTX2Pipeline` runs it, with classifier-free guidance alone.

- Latents are one tensor of tokens [S_v + S_a, C]: first the video's, S_v = F * H * W with F = 1 + (frames - 1) / 8 and
  32x32 px per position with the published VAE, then the sound's, one per 40 ms. Both have C = 128 channels. Only this
  file knows the two parts. Both of the pipeline's schedulers have the same sigmas.
- A log-prob or a squared error is the mean over all elements, so the sound's weight is S_a / (S_v + S_a), 2 % for 121
  frames of 512x768 px.
- Text is the hidden states of all layers of Gemma 3, through two connectors, one for the video and one for the sound.
  They put learned registers in the place of padding, so the network reads 1024 tokens without a mask.
- The pipeline's other guidance (spatio-temporal, of isolated parts, rescaling) is off, and video and sound have one
  guidance scale. The frame rate decides the sound's length.
"""

import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl_ltx2 import AutoencoderKLLTX2Video
from diffusers.models.autoencoders.autoencoder_kl_ltx2_audio import LATENT_DOWNSAMPLE_FACTOR, AutoencoderKLLTX2Audio
from diffusers.pipelines.ltx2 import vocoder as vocoders
from diffusers.pipelines.ltx2.pipeline_ltx2 import LTX2Pipeline
from torch import Tensor, nn

from verl_digen.hardware.transfers import to_device
from verl_digen.inputs.audio import Audio
from verl_digen.models.base import Collated, Decoder, EncodePrompt, PromptCheck, VideoModel
from verl_digen.models.ltx2_parts import Parts, connected
from verl_digen.models.pixels import AudioDecoder, Decoded, decode_each
from verl_digen.models.schedule import shifted_sigmas
from verl_digen.models.spec import ConditionLayout, FlopsLayout, ModelSpec, VllmOmniServing
from verl_digen.models.text import length_check
from verl_digen.types import Condition, Geometry

_CALL = inspect.signature(LTX2Pipeline.__call__).parameters
MAX_TEXT_TOKENS: int = _CALL["max_sequence_length"].default
"""Tokens of every prompt for the network; the pipeline's default."""
FRAMES_PER_S: float = _CALL["frame_rate"].default
"""Frame rate, an input of the network; the pipeline's default."""
PLAIN_GUIDANCE = {
    **{"guidance_scale": 1.0, "stg_scale": 0.0, "modality_scale": 1.0, "guidance_rescale": 0.0},
    **{"audio_guidance_scale": 1.0, "audio_stg_scale": 0.0, "audio_modality_scale": 1.0, "audio_guidance_rescale": 0.0},
}
"""Arguments of the pipeline that turn its guidance off."""


class LTX2(VideoModel):
    spec = ModelSpec(
        transformer="LTX2VideoTransformer3DModel",
        title="LTX-2",
        example="Lightricks/LTX-2",
        components=(*ModelSpec.components, "audio_vae", "connectors", "vocoder"),
        # All attention of both parts and between them, as DiffSynth-Studio trains LTX-2 (examples/ltx2).
        lora_targets=("to_q", "to_k", "to_v", "to_out.0"),
        flops=FlopsLayout(
            patch="proj_in",
            streams=(
                (r"time_embed|av_cross_attn", "row"),
                (r"caption_projection|attn2\.to_[kv]", "text"),
                (r"\baudio_(proj|ff|attn)|audio_to_video_attn\.to_[kv]|video_to_audio_attn\.to_(q|out)", "audio"),
            ),
            attention=(
                (r"audio_attn1", "audio", "audio"),
                (r"audio_attn2", "audio", "text"),
                (r"audio_to_video", "image", "audio"),
                (r"video_to_audio", "audio", "image"),
                (r"attn2", "image", "text"),
                (r"", "image", "image"),
            ),
        ),
        condition=ConditionLayout(width="caption_channels", audio="caption_channels", num_tokens=MAX_TEXT_TOKENS),
        freed={"text_encoder": ("model.vision_tower.", "model.multi_modal_projector.", "lm_head.")},
        encoder_parts=("connectors",),
        audio_parts=("audio_vae", "vocoder"),
        selftest=PLAIN_GUIDANCE | {"num_frames": 9},
        vllm_omni=VllmOmniServing(pipeline="LTX2Pipeline", mixin=".ltx2_pipeline:LTX2Recording"),
    )

    def __init__(self, path: str | Path):
        super().__init__(path)
        vae, audio_vae = self.read_network_config("vae"), self.read_network_config("audio_vae")
        self._frame_stride: int = vae["temporal_compression_ratio"]
        self._vae_scale: int = vae["spatial_compression_ratio"]
        self._mel_bins: int = audio_vae["mel_bins"] // LATENT_DOWNSAMPLE_FACTOR
        self._audio_tokens_per_s = audio_vae["sample_rate"] / audio_vae["mel_hop_length"] / LATENT_DOWNSAMPLE_FACTOR
        self._patch = (1, 1, 1)
        # LTX-2.3 and 2.5 have other connectors and text inputs; video and sound are tokens of one tensor
        choice, channels = f"a checkpoint such as {self.spec.example}", self._num_channels
        self._require_config("transformer", choice, use_prompt_embeddings=True, patch_size=1, patch_size_t=1)
        self._require_config("transformer", choice, audio_in_channels=channels)
        self._require_config("audio_vae", choice, base_channels=channels)
        self._require_config("vae", choice, latent_channels=channels, timestep_conditioning=False)

    # -- loading ------------------------------------------------------------------------------------------
    def load_transformer(self, dtype: torch.dtype, *, meta: bool = False) -> nn.Module:
        network: Any = super().load_transformer(dtype, meta=meta)
        network._no_split_modules = list(network._repeated_blocks)  # FSDP2's units; diffusers names none
        return network

    def load_prompt_check(self) -> PromptCheck:
        tokenizer = self.load_tokenizer("tokenizer")
        return length_check(tokenizer, title=self.spec.title, max_tokens=MAX_TEXT_TOKENS, wrap=str.strip)

    def encode_text(self, pipeline: Any, encode_prompt: EncodePrompt, text: str) -> Condition:
        """Encode into {"embeds": [1024, D], "audio": [1024, D]}, for the video and for the sound."""
        # "3. Prepare text embeddings" of LTX2Pipeline.__call__.
        embeds, mask, _, _ = encode_prompt(text, do_classifier_free_guidance=False)
        return connected(pipeline, embeds, mask)

    def load_decoder(self, dtype: torch.dtype, device: torch.device) -> Decoder:
        vae: Any = AutoencoderKLLTX2Video.from_pretrained(self.path / "vae", dtype=dtype)
        vae.eval().to(device)

        def decode(latents: Tensor, geometry: Geometry) -> Decoded:
            # The end of LTX2Pipeline.__call__.
            return decode_each(vae, self.parts(geometry).for_vae(latents.to(device, dtype), vae))

        def encode(pixels: Tensor) -> Tensor:
            raise ValueError(f"a picture must come with its sound for {self.spec.title}, and pairs have none")

        return Decoder(decode, (vae,), encode)

    def load_audio_decoder(self, dtype: torch.dtype, device: torch.device) -> AudioDecoder:
        audio_vae: Any = AutoencoderKLLTX2Audio.from_pretrained(self.path / "audio_vae", dtype=dtype)
        vocoder: Any = getattr(vocoders, self.index["vocoder"][1]).from_pretrained(self.path / "vocoder", dtype=dtype)
        for module in (audio_vae, vocoder):
            module.eval().to(device)

        def decode(latents: Tensor, geometry: Geometry) -> list[Audio]:
            # The end of LTX2Pipeline.__call__, one sample after the other.
            given = self.parts(geometry).for_audio_vae(latents.to(device, dtype), audio_vae)
            spectrograms = (audio_vae.decode(one, return_dict=False)[0] for one in given.split(1))
            waveforms = [vocoder(spectrogram)[0].float().cpu().numpy() for spectrogram in spectrograms]
            return [Audio(waveform, vocoder.config.output_sampling_rate) for waveform in waveforms]

        return AudioDecoder(decode, (audio_vae, vocoder))

    # -- the shape of the problem -------------------------------------------------------------------------
    def latent_shape(self, geometry: Geometry) -> tuple[int, ...]:
        parts = self.parts(geometry)
        return parts.num_video + parts.num_audio, self._num_channels

    def num_tokens(self, geometry: Geometry) -> int:
        return self.latent_shape(geometry)[0]

    def num_audio_tokens(self, geometry: Geometry) -> int:
        # "4. Prepare latent variables" of LTX2Pipeline.__call__.
        return round(geometry.num_frames / FRAMES_PER_S * self._audio_tokens_per_s)

    def parts(self, geometry: Geometry) -> Parts:
        """The video's and the sound's share of packed latents. Raises as `latent_shape`."""
        _, frames, height, width = super().latent_shape(geometry)
        return Parts((frames, height, width), self.num_audio_tokens(geometry), self._mel_bins)

    def pipeline_call(self, pipeline: Any, geometry: Geometry) -> Callable[..., Any]:
        return partial(self.parts(geometry).run_pipeline, pipeline)

    def sigmas(self, num_steps: int, geometry: Geometry) -> Tensor:
        # "5. Prepare timesteps" of LTX2Pipeline.__call__.
        return shifted_sigmas(self._schedule, num_steps, self.parts(geometry).num_video)

    # -- the network --------------------------------------------------------------------------------------
    def predict(
        self, transformer: nn.Module, latents: Tensor, sigmas: Tensor, condition: Collated, geometry: Geometry
    ) -> Tensor:
        # "7. Denoising loop" of LTX2Pipeline.__call__.
        dtype = self.input_dtype(transformer)
        parts = self.parts(geometry)
        video, audio = parts.tokens(latents.to(dtype))
        timestep = to_device(self.timesteps(sigmas), latents.device)
        frames, height, width = parts.video
        velocities = transformer(
            hidden_states=video,
            audio_hidden_states=audio,
            encoder_hidden_states=condition["embeds"].to(dtype),
            audio_encoder_hidden_states=condition["audio"].to(dtype),
            timestep=timestep,
            sigma=timestep,
            num_frames=frames,
            height=height,
            width=width,
            fps=FRAMES_PER_S,
            audio_num_frames=parts.num_audio,
            use_cross_timestep=True,
            return_dict=False,
        )
        return torch.cat(velocities, dim=1)
