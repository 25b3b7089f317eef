# SPDX-License-Identifier: Apache-2.0
"""HunyuanVideo: text to video, as diffusers' `HunyuanVideoPipeline` runs it.

Two text encoders: a LLaMA's hidden states of the prompt in a template, which is cropped, with a mask; and CLIP's pooled
vector. CLIP reads a long prompt's first 77 tokens, as in the pipeline. The network takes a guidance scale as an input;
true classifier-free guidance works in addition.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from types import MethodType
from typing import Any

import numpy as np
import torch
from diffusers.models._modeling_parallel import ContextParallelInput, ContextParallelOutput
from diffusers.models.autoencoders.autoencoder_kl_hunyuan_video import AutoencoderKLHunyuanVideo
from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video import DEFAULT_PROMPT_TEMPLATE
from torch import Tensor, nn

from verl_digen.hardware.transfers import to_device
from verl_digen.models.base import Collated, Decoder, EncodePrompt, PromptCheck, VideoModel
from verl_digen.models.pixels import video_decoder
from verl_digen.models.schedule import flow_sigmas
from verl_digen.models.sequence import own_share
from verl_digen.models.spec import JOINT_ATTENTION, MODULATION, ConditionLayout, FlopsLayout, ModelSpec, SequenceLayout
from verl_digen.models.text import length_check
from verl_digen.types import Condition, Geometry

POSITIONS = ContextParallelInput(split_dim=0, expected_dims=2, split_output=True)
SEQUENCE_PLAN = {
    "x_embedder": {0: ContextParallelInput(split_dim=1, expected_dims=3, split_output=True)},
    "rope": {0: POSITIONS, 1: POSITIONS},
    "proj_out": ContextParallelOutput(gather_dim=1, expected_dims=3),
}
"""Plan of diffusers' context parallelism, which diffusers has none of for this network. The forward itself takes the
share of the prompt (`own_share`), behind the text refiner, which reads it whole."""


def _forward(
    network: Any,
    hidden_states: Tensor,
    timestep: Tensor,
    encoder_hidden_states: Tensor,
    pooled_projections: Tensor,
    encoder_attention_mask: Tensor | None = None,
    guidance: Tensor | None = None,
) -> tuple[Tensor]:
    """Replacement of the class's forward, with the same arguments, without an attention mask where no prompt is padded
    -> (velocity [N, C', F, H, W],).

    diffusers' forward masks padded text tokens in every block, and makes the mask also where there is no padding. A
    mask keeps fused attention kernels out, although a tile of one prompt's rows has no padding.

    `hidden_states`: [N, C, F, H, W]. `encoder_hidden_states`: [N, L, D]. `pooled_projections`: [N, E].
    `encoder_attention_mask`: [N, L], 1 for tokens; None: no padding. `guidance`: [N], of a distilled network.

    Invariant (tests/models/test_hunyuan_video.py): velocities and gradients equal diffusers' own forward, to 1e-5.
    """
    time, _ = network.time_text_embed(timestep, pooled_projections, guidance)
    text = network.context_embedder(encoder_hidden_states, timestep, encoder_attention_mask)
    blocks = (*network.transformer_blocks, *network.single_transformer_blocks)
    return run_blocks(network, blocks, hidden_states, time, text, encoder_attention_mask)


def run_blocks(
    network: Any, blocks: Iterable[Any], hidden_states: Tensor, time: Tensor, text: Tensor, text_mask: Tensor | None
) -> tuple[Tensor]:
    """The forward of both HunyuanVideos' networks behind the embedding of time [N, D] and text [N, L, D].
    `hidden_states`: [N, C, F, H, W]. `text_mask`: [N, L], 1 for tokens; None: no padding."""
    patch = (network.config.patch_size_t, network.config.patch_size, network.config.patch_size)
    grid = [size // side for size, side in zip(hidden_states.shape[2:], patch, strict=True)]
    positions, video = network.rope(hidden_states), network.x_embedder(hidden_states)
    text, text_mask = own_share(network, text, text_mask)
    takes_part = None
    if text_mask is not None:
        takes_part = torch.cat([torch.ones_like(video[..., 0]), text_mask], dim=1).bool()[:, None, None]

    recomputes = network.gradient_checkpointing and torch.is_grad_enabled()
    for block in blocks:
        given = (video, text, time, takes_part, positions)
        video, text = network._gradient_checkpointing_func(block, *given) if recomputes else block(*given)

    patches = network.proj_out(network.norm_out(video, time)).unflatten(1, grid).unflatten(-1, (-1, *patch))
    return (patches.permute(0, 4, 1, 5, 2, 6, 3, 7).flatten(6, 7).flatten(4, 5).flatten(2, 3),)


MAX_TEXT_TOKENS = 256
"""LLaMA tokens of a prompt, without the template's beginning; the pipeline's default."""
DEFAULT_GUIDANCE = 6.0
"""The pipeline's default `guidance_scale`."""
GUIDANCE_UNIT = 1000
"""Factor of the guidance scale in the network's input."""


class Hunyuan(VideoModel):
    """Sizes, schedule and VAE, which both HunyuanVideos have alike."""

    vae_class: type[Any]
    forward: Callable[..., tuple[Tensor]]
    """Replacement of the forward of the network's class; weights are unchanged."""

    def __init__(self, path: str | Path):
        super().__init__(path)
        network, vae = self._network, self.read_network_config("vae")
        self._patch = (network["patch_size_t"], network["patch_size"], network["patch_size"])
        self._num_channels = vae["latent_channels"]
        self._frame_stride = vae["temporal_compression_ratio"]
        self._vae_scale = vae["spatial_compression_ratio"]

    def load_transformer(self, dtype: torch.dtype, *, meta: bool = False) -> nn.Module:
        network: Any = super().load_transformer(dtype, meta=meta)
        network.forward = MethodType(self.forward, network)
        network.sequence_mesh = None
        return network

    def load_vae(self, dtype: torch.dtype) -> Any:
        """The VAE on the CPU. It reads and makes sides of more than 256 px in overlapping tiles, as in the pipelines'
        examples: its attention makes a mask of positions x positions. HunyuanVideo's first one also splits longer
        videos into overlapping temporal tiles by itself, as in the pipeline."""
        vae = self.vae_class.from_pretrained(self.path / "vae", dtype=dtype)
        vae.enable_tiling()
        return vae

    def load_decoder(self, dtype: torch.dtype, device: torch.device) -> Decoder:
        # The ends of the pipelines' `__call__`; `prepare_latents` and `_get_image_latents` of those that read an image.
        vae = self.load_vae(dtype)
        return video_decoder(vae, dtype, device, vae.config.scaling_factor)

    def sigmas(self, num_steps: int, geometry: Geometry) -> Tensor:
        # "4. Prepare timesteps" of both pipelines' `__call__`.
        return flow_sigmas(self._schedule, sigmas=np.linspace(1.0, 0.0, num_steps + 1)[:-1])


class HunyuanVideo(Hunyuan):
    vae_class = AutoencoderKLHunyuanVideo
    forward = staticmethod(_forward)
    spec = ModelSpec(
        transformer="HunyuanVideoTransformer3DModel",
        title="HunyuanVideo",
        example="hunyuanvideo-community/HunyuanVideo",
        components=(*ModelSpec.components, "text_encoder_2", "tokenizer_2"),
        # Attention of both streams, of the single blocks and of the text refiner.
        lora_targets=JOINT_ATTENTION,
        flops=FlopsLayout(
            patch="x_embedder.proj",
            streams=(
                (rf"{MODULATION}|norm_out", "row"),
                (r"single_transformer_blocks", "joint"),
                (r"context_embedder|ff_context|attn\.add_|to_add_out", "text"),
            ),
            attention=((r"context_embedder", "text", "text"), (r"", "joint", "joint")),
        ),
        condition=ConditionLayout(width="text_embed_dim", pooled="pooled_projection_dim"),
        selftest={"num_frames": 5},
        sequence=SequenceLayout(splits_prompts=True, plan=SEQUENCE_PLAN),
    )

    def __init__(self, path: str | Path):
        super().__init__(path)
        self.default_embedded_guidance = DEFAULT_GUIDANCE if self._network["guidance_embeds"] else None

    # -- loading ------------------------------------------------------------------------------------------
    def load_prompt_check(self) -> PromptCheck:
        template = DEFAULT_PROMPT_TEMPLATE
        limit = template["crop_start"] + MAX_TEXT_TOKENS
        tokenizer = self.load_tokenizer("tokenizer")
        return length_check(tokenizer, title=self.spec.title, max_tokens=limit, wrap=template["template"].format)

    def encode_text(self, pipeline: Any, encode_prompt: EncodePrompt, text: str) -> Condition:
        """Encode into {"embeds": [L, D], "pooled": [E]}, L the prompt's own number of tokens."""
        embeds, pooled, mask = encode_prompt(text, max_sequence_length=MAX_TEXT_TOKENS)
        return {"embeds": embeds[0, : int(mask.sum())], "pooled": pooled[0]}

    # -- the network --------------------------------------------------------------------------------------
    def predict(
        self, transformer: nn.Module, latents: Tensor, sigmas: Tensor, condition: Collated, geometry: Geometry
    ) -> Tensor:
        # "7. Denoising loop" of HunyuanVideoPipeline.__call__; there too the timestep is rounded to the network's
        # dtype, which the latents have after the first step.
        dtype = self.input_dtype(transformer)
        guidance, mask = condition.get("guidance"), condition.get("embeds_mask")
        return transformer(
            hidden_states=latents.to(dtype),
            timestep=to_device(self.timesteps(sigmas), latents.device, dtype),
            encoder_hidden_states=condition["embeds"].to(dtype),
            encoder_attention_mask=None if mask is None else mask.to(dtype),
            pooled_projections=condition["pooled"].to(dtype),
            guidance=None if guidance is None else guidance.to(dtype) * GUIDANCE_UNIT,
        )[0]
