# SPDX-License-Identifier: Apache-2.0
"""The two parts of LTX-2 in packed latents [N, S_v + S_a, C], the video's tokens, then the sound's; and their texts."""

from dataclasses import dataclass
from typing import Any

import torch
from diffusers.pipelines.ltx2.pipeline_ltx2 import LTX2Pipeline
from torch import Tensor

from verl_digen.types import Condition


@dataclass(frozen=True)
class Parts:
    """Sizes of the parts of one sample."""

    video: tuple[int, int, int]
    """(F, H, W): latent frames, and positions of 32x32 px with the published VAE."""
    num_audio: int
    """S_a."""
    mel_bins: int
    """Frequencies of a token of sound; its other factor are channels."""

    @property
    def num_video(self) -> int:
        """S_v."""
        frames, height, width = self.video
        return frames * height * width

    def tokens(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Views [N, S_v, C] and [N, S_a, C]."""
        video, audio = latents.split([self.num_video, self.num_audio], dim=1)
        return video, audio

    def for_vae(self, latents: Tensor, vae: Any) -> Tensor:
        """The video as its VAE decodes it, [N, C, F, H, W]."""
        video = LTX2Pipeline._unpack_latents(self.tokens(latents)[0], *self.video)
        return LTX2Pipeline._denormalize_latents(video, vae.latents_mean, vae.latents_std, vae.config.scaling_factor)

    def for_audio_vae(self, latents: Tensor, audio_vae: Any) -> Tensor:
        """The sound as its VAE decodes it, [N, channels, S_a, frequencies]."""
        audio = self.tokens(latents)[1]
        raw = LTX2Pipeline._denormalize_audio_latents(audio, audio_vae.latents_mean, audio_vae.latents_std)
        return LTX2Pipeline._unpack_audio_latents(raw, self.num_audio, num_mel_bins=self.mel_bins)

    def run_pipeline(self, pipeline: Any, *, latents: Tensor, **given: Any) -> Any:
        """Run diffusers' pipeline from these latents -> (video, sound), or (packed latents,) if those are asked for."""
        vae, audio_vae = pipeline.vae, pipeline.audio_vae
        start = {"latents": self.for_vae(latents, vae), "audio_latents": self.for_audio_vae(latents, audio_vae)}
        made = pipeline(**start, **given, return_dict=False)
        if given["output_type"] != "latent":
            return made
        video, audio = made
        video = LTX2Pipeline._normalize_latents(video, vae.latents_mean, vae.latents_std, vae.config.scaling_factor)
        audio = LTX2Pipeline._pack_audio_latents(audio)
        audio = LTX2Pipeline._normalize_audio_latents(audio, audio_vae.latents_mean, audio_vae.latents_std)
        return (torch.cat([LTX2Pipeline._pack_latents(video), audio], dim=1),)


def connected(pipeline: Any, embeds: Tensor, mask: Tensor) -> Condition:
    """Run the connectors of a pipeline on hidden states of one prompt -> {"embeds": [L, D], "audio": [L, D]}.
    `pipeline`: diffusers', or one with its `connectors` and `tokenizer`; `embeds` and `mask` come from its
    `encode_prompt`. RuntimeError if the connectors leave padding where the network expects none."""
    video, audio, mask = pipeline.connectors(embeds, mask, padding_side=pipeline.tokenizer.padding_side)
    if not bool(mask.all()):
        raise RuntimeError(
            "the connectors must put registers in the place of padding, got a mask with zeros: "
            "video_connector_num_learnable_registers is null in actor_rollout_ref.model.path; choose another "
            "checkpoint, such as Lightricks/LTX-2"
        )
    return {"embeds": video[0], "audio": audio[0]}
