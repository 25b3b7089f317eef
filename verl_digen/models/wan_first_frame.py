# SPDX-License-Identifier: Apache-2.0
"""Wan2.2 TI2V-5B: video from text, as diffusers' `WanPipeline` runs it, or from text and its first frame, as
`WanImageToVideoPipeline`; all else is as in `wan.py`. The checkpoint's index has `expand_timesteps`.

The first latent frame is the image's latents at every step. It is given, not sampled: a sample's latents are the other
frames [C, F - 1, H, W], so that noise, steps, log-probs, losses and records have no element of it. The network reads it
in front of them, with timestep 0 for its tokens (`predict`), and so does the decoder (`completed`). The VAE sees the
image at the size of the video, stretched to it. With `digen.sampling.size_from_image` the video has the image's shape,
up to a step of 32 px.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from verl_digen.hardware.transfers import to_device
from verl_digen.inputs.images import PromptInputs
from verl_digen.models.base import Collated, Decoder
from verl_digen.models.pixels import Decoded
from verl_digen.models.sources import frame_of
from verl_digen.models.wan import SEQUENCE, Wan
from verl_digen.models.wan_image import frame_latents
from verl_digen.require import require
from verl_digen.types import Condition, Geometry


class WanFirstFrame(Wan):
    encoding_pipeline = "WanImageToVideoPipeline"
    spec = replace(
        Wan.spec,
        title="Wan2.2 TI2V",
        example="Wan-AI/Wan2.2-TI2V-5B-Diffusers",
        num_images=(0, 1),
        image_sizes="wan_ti2v",
        encodes_images=("encoder.", "quant_conv."),
        sequence=replace(SEQUENCE, takes_images=False),
    )

    def __init__(self, path: str | Path):
        super().__init__(path)
        if self._network["in_channels"] != self._num_channels:
            raise ValueError(
                "actor_rollout_ref.model.path must hold a Wan that reads only latents, if its index has "
                f"expand_timesteps, got one with {self._network['in_channels']} channels for {self._num_channels} of "
                f"its VAE, in {str(self.path)!r}; choose another, such as {self.spec.example}"
            )
        if self.pipeline == "WanImageToVideoPipeline":
            self.spec = replace(self.spec, num_images=(1, 1), sequence=None)

    # -- loading ------------------------------------------------------------------------------------------
    def encode_images(self, pipeline: object, inputs: PromptInputs, device: torch.device) -> Condition:
        """Latents of the image, "source" [C, 1, H, W]."""
        return {"source": frame_latents(pipeline, inputs, device)}

    def load_decoder(self, dtype: torch.dtype, device: torch.device) -> Decoder:
        """Decoder of whole videos, `completed` ones where their first frame was given."""
        decoder = super().load_decoder(dtype, device)

        def decode(latents: Tensor, geometry: Geometry) -> Decoded:
            whole = super(WanFirstFrame, self).latent_shape(geometry)
            if latents.shape[1:] != whole:
                raise RuntimeError(
                    f"latents to decode must be a whole video, {whole} for {geometry}, got {tuple(latents.shape[1:])}; "
                    "pass what `completed` returns"
                )
            return decoder.decode(latents, geometry)

        return replace(decoder, decode=decode)

    # -- the shape of the problem -------------------------------------------------------------------------
    def latent_shape(self, geometry: Geometry) -> tuple[int, ...]:
        channels, num_frames, *size = super().latent_shape(geometry)
        if not geometry.sources:
            return (channels, num_frames, *size)
        require(
            num_frames > 1,
            f"digen.sampling.num_frames must be >= {1 + self._frame_stride} for {self.spec.title} and prompts with an "
            "image, which is the first frame",
            geometry.num_frames,
            "make videos, or leave out the column 'images'",
        )
        return (channels, num_frames - 1, *size)

    def num_source_tokens(self, geometry: Geometry) -> int:
        return self.tokens_of(self._given_shape(geometry)) if geometry.sources else 0

    def num_timesteps(self, geometry: Geometry) -> int:
        return self.num_tokens(geometry) + self.num_source_tokens(geometry) if geometry.sources else 1

    def image_conditions(self, geometry: Geometry) -> dict[str, tuple[int, ...]]:
        return {"source": self._given_shape(geometry)}

    def _given_shape(self, geometry: Geometry) -> tuple[int, ...]:
        """[C, 1, H, W] of the given frame."""
        channels, _, *size = self.latent_shape(geometry)
        return (channels, 1, *size)

    # -- against the pipeline -----------------------------------------------------------------------------
    def pipeline_of(self, geometry: Geometry) -> str:
        return "WanImageToVideoPipeline" if geometry.sources else self.pipeline

    def pipeline_start(self, latents: Tensor, geometry: Geometry) -> Tensor:
        if not geometry.sources:
            return latents
        return torch.cat([torch.zeros_like(latents[:, :, :1]), latents], dim=2)  # the pipeline replaces that frame

    def pipeline_end(self, latents: Tensor, geometry: Geometry) -> Tensor:
        return latents[:, :, 1:] if geometry.sources else latents

    # -- the network --------------------------------------------------------------------------------------
    def completed(self, latents: Tensor, conditions: Sequence[Condition]) -> Tensor:
        if "source" not in conditions[0]:
            return latents
        given = torch.stack([condition["source"] for condition in conditions])
        return torch.cat([to_device(given, latents.device, latents.dtype), latents], dim=2)

    def predict(
        self, transformer: nn.Module, latents: Tensor, sigmas: Tensor, condition: Collated, geometry: Geometry
    ) -> Tensor:
        # "6. Denoising loop" of WanImageToVideoPipeline.__call__, with `expand_timesteps`.
        source = frame_of(condition, self._given_shape(geometry) if geometry.sources else None, geometry)
        if source is None:
            return super().predict(transformer, latents, sigmas, condition, geometry)
        if self.sequence_size > 1:
            raise RuntimeError(
                f"a video with a given first frame runs whole on each device, got {self.sequence_size} devices that "
                "share its tokens; check the prompts' images before the run"
            )
        own = to_device(self.timesteps(sigmas), latents.device).unsqueeze(1)
        counts = self.num_source_tokens(geometry), self.num_tokens(geometry)
        timesteps = torch.cat([own.new_zeros(len(own), counts[0]), own.expand(-1, counts[1])], dim=1)
        joined = torch.cat([source.to(latents.dtype), latents], dim=2)
        return self._run(transformer, joined, timesteps, sigmas, condition)[:, :, 1:]
