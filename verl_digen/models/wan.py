# SPDX-License-Identifier: Apache-2.0
"""Wan2.1 and Wan2.2: text to video, as diffusers' `WanPipeline` runs them.

- Text is UMT5's, padded with zeros to 512 tokens which the network reads without a mask; conditions carry only the
  prompt's own tokens.
- Checkpoints come with a UniPC scheduler. A run takes its sigmas and its whole-numbered timesteps.
- Wan2.2 A14B holds two experts: `transformer` down to the pipeline's `boundary_ratio`, then `transformer_2`. Both have
  the same guidance scale. TI2V-5B (`wan_first_frame.py`) accepts a timestep per token; for text to video all are the
  same, so a row passes one.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan
from diffusers.pipelines.wan.pipeline_wan import prompt_clean
from torch import Tensor, nn

from verl_digen.hardware.transfers import to_device
from verl_digen.models.base import TIMESTEPS_PER_SIGMA, Collated, Decoder, EncodePrompt, PromptCheck, VideoModel
from verl_digen.models.checkpoint import check_components
from verl_digen.models.pixels import channel_statistics, video_decoder
from verl_digen.models.spec import ConditionLayout, FlopsLayout, ModelSpec, SequenceLayout, VllmOmniServing
from verl_digen.models.text import length_check, stacked
from verl_digen.types import Condition, Geometry

MAX_TEXT_TOKENS = 512
"""Tokens to which every prompt is padded for the network; the pipeline's default."""
# "" is the timestep per token of TI2V-5B, which gets one per row
SEQUENCE = SequenceLayout(splits_prompts=False, unsplit=("",))


class Wan(VideoModel):
    spec = ModelSpec(
        transformer="WanTransformer3DModel",
        title="Wan",
        example="Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
        # Self- and cross-attention, as flow_grpo trains Wan2.1.
        lora_targets=("to_q", "to_k", "to_v", "to_out.0"),
        flops=FlopsLayout(
            patch="patch_embedding",
            streams=((r"time_embedder|time_proj", "row"), (r"text_embedder|attn2\.to_[kv]", "text")),
            attention=((r"attn2", "image", "text"), (r"", "image", "image")),
            text_tokens=MAX_TEXT_TOKENS,
        ),
        condition=ConditionLayout(width="text_dim"),
        decodes_in_fp32=True,
        selftest={"guidance_scale": 1.0, "num_frames": 5},
        sequence=SEQUENCE,
        vllm_omni=VllmOmniServing(pipeline="WanPipeline", mixin=".frame_pipelines:WanFrameRecording"),
    )

    def __init__(self, path: str | Path):
        super().__init__(path)
        self.boundary_ratio: float | None = self.index.get("boundary_ratio")
        """Sigma below which the second expert takes over; None with one network."""
        if self.boundary_ratio is not None:
            self.experts = ("transformer", "transformer_2")
            check_components(self.path, self.index, self.experts)
        vae = self.read_network_config("vae")
        self._patch = self._network["patch_size"]
        self._num_channels = vae["z_dim"]
        self._frame_stride = vae["scale_factor_temporal"]
        self._vae_scale = vae["scale_factor_spatial"]
        self._has_whole_timesteps = self.scheduler == "UniPCMultistepScheduler"

    # -- loading ------------------------------------------------------------------------------------------
    def load_prompt_check(self) -> PromptCheck:
        tokenizer = self.load_tokenizer("tokenizer")
        return length_check(tokenizer, title=self.spec.title, max_tokens=MAX_TEXT_TOKENS, wrap=prompt_clean)

    def encode_text(self, pipeline: Any, encode_prompt: EncodePrompt, text: str) -> Condition:
        """Encode into {"embeds": [L, D]}, L the prompt's own number of tokens."""
        embeds, _ = encode_prompt(text, do_classifier_free_guidance=False, max_sequence_length=MAX_TEXT_TOKENS)
        return {"embeds": embeds[0, : len(pipeline.tokenizer(prompt_clean(text)).input_ids)]}

    def load_decoder(self, dtype: torch.dtype, device: torch.device) -> Decoder:
        """The VAE itself decodes one latent frame at a time, with the caches of its causal convolutions."""
        dtype = self.decoder_dtype(dtype)
        vae: Any = AutoencoderKLWan.from_pretrained(self.path / "vae", dtype=dtype)
        # The end of WanPipeline.__call__, and `prepare_latents` of WanImageToVideoPipeline.
        return video_decoder(vae, dtype, device, *channel_statistics(vae, dtype, device))

    # -- the shape of the problem -------------------------------------------------------------------------
    def sigmas(self, num_steps: int, geometry: Geometry) -> Tensor:
        # "4. Prepare timesteps" of WanPipeline.__call__.
        scheduler = getattr(diffusers, self.scheduler).from_config(self._schedule)
        scheduler.set_timesteps(num_steps)
        return torch.as_tensor(scheduler.sigmas)

    def expert_of(self, sigmas: Tensor) -> Tensor:
        if self.boundary_ratio is None:
            return super().expert_of(sigmas)
        return (self.timesteps(sigmas) < self.boundary_ratio * TIMESTEPS_PER_SIGMA).long()

    def timesteps(self, sigmas: Tensor) -> Tensor:
        """[N] the scheduler's timesteps of these sigmas: int64 if it truncates them to whole numbers, else fp32.

        It truncates in fp64. From a sigma in fp32 the result is the same, except for the rare timestep that is already
        whole: one step of the 20,100 in all schedules of up to 200 steps at shift 3, whose timestep is then one more or
        less.
        """
        timesteps = super().timesteps(sigmas)
        return timesteps.long() if self._has_whole_timesteps else timesteps

    # -- the network --------------------------------------------------------------------------------------
    def collate(self, conditions: Sequence[Condition]) -> Collated:
        """{"embeds": [N, 512, D]}, padded with zeros; with images also "source", and "image" where CLIP reads them."""
        first = conditions[0]["embeds"]
        embeds = first.new_zeros(len(conditions), MAX_TEXT_TOKENS, first.shape[1])
        for row, condition in zip(embeds, conditions, strict=True):
            row[: len(condition["embeds"])] = condition["embeds"]
        return {"embeds": embeds} | stacked(conditions, "source", "image")

    def predict(
        self, transformer: nn.Module, latents: Tensor, sigmas: Tensor, condition: Collated, geometry: Geometry
    ) -> Tensor:
        # "6. Denoising loop" of WanPipeline.__call__.
        timesteps = to_device(self.timesteps(sigmas), latents.device)
        return self._run(transformer, latents, timesteps, sigmas, condition)

    def _run(
        self,
        transformer: nn.Module,
        hidden_states: Tensor,
        timesteps: Tensor,
        sigmas: Tensor,
        condition: Collated,
        **more: Tensor,
    ) -> Tensor:
        """One forward of the expert of these rows -> [N, C, F, H, W]. `hidden_states`: [N, C', F, H, W]. `timesteps`:
        [N], or [N, tokens]. `more`: further inputs of the network."""
        dtype = self.input_dtype(transformer)
        chosen = {}
        if len(self.experts) > 1:
            experts = self.expert_of(sigmas).unique().tolist()
            if len(experts) > 1:
                raise RuntimeError(
                    f"rows of one forward must belong to one expert, got sigmas {sigmas.tolist()} on both sides of "
                    f"{self.boundary_ratio}; tile them by expert_of"
                )
            chosen = {"expert": experts[0]}
        return transformer(
            hidden_states=hidden_states.to(dtype),
            timestep=timesteps,
            encoder_hidden_states=condition["embeds"].to(dtype),
            return_dict=False,
            **chosen,
            **{name: tensor.to(dtype) for name, tensor in more.items()},
        )[0]
