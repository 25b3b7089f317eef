# SPDX-License-Identifier: Apache-2.0
"""HunyuanVideo 1.5: text to video, as diffusers' `HunyuanVideo15Pipeline` runs it.

- A latent position is 16x16 px with the published VAE.
- Two text encoders: Qwen2.5-VL's hidden states of the prompt in a chat template, which is cropped; and ByT5's of the
  glyphs to draw, the prompt's quoted text. A prompt without quotation marks has no glyphs.
- The network can also continue a first frame (`hunyuan_video15_image.py`). The frame's latents, their mask and its
  embedding are zeros here.
- The checkpoint's `guider` must be plain classifier-free guidance; the scale is `digen.sampling.true_cfg_scale`, not
  the guider's own.
"""

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from diffusers.models.autoencoders.autoencoder_kl_hunyuanvideo15 import AutoencoderKLHunyuanVideo15
from diffusers.pipelines.hunyuan_video1_5 import pipeline_hunyuan_video1_5 as theirs
from torch import Tensor, nn

from verl_digen.hardware.transfers import to_device
from verl_digen.models.base import Collated, EncodePrompt, PromptCheck
from verl_digen.models.hunyuan_video import SEQUENCE_PLAN, Hunyuan
from verl_digen.models.hunyuan_video15_forward import KeyMasked, forward
from verl_digen.models.spec import (
    JOINT_ATTENTION,
    MODULATION,
    ConditionLayout,
    FlopsLayout,
    ModelSpec,
    SequenceLayout,
    VllmOmniServing,
)
from verl_digen.models.text import PROMPT_CHARACTERS_SHOWN, length_check
from verl_digen.types import Condition, Geometry

# Functions of the class, not of an instance: a pipeline cannot be built without a VAE.
encode_text = theirs.HunyuanVideo15Pipeline._get_mllm_prompt_embeds
encode_glyphs = theirs.HunyuanVideo15Pipeline._get_byt5_prompt_embeds
_TEXT = inspect.signature(encode_text).parameters
SYSTEM_MESSAGE: str = _TEXT["system_message"].default
"""System message of the chat template."""
MAX_TEXT_TOKENS: int = _TEXT["crop_start"].default + _TEXT["tokenizer_max_length"].default
"""Qwen tokens of a prompt in its template; the pipeline's limit."""
MAX_GLYPH_TOKENS: int = inspect.signature(encode_glyphs).parameters["tokenizer_max_length"].default
"""ByT5 tokens, one per byte, of a prompt's quoted text with the pipeline's text around it; the pipeline's limit."""
PLAIN_GUIDANCE = {"guidance_rescale": 0.0, "use_original_formulation": False, "start": 0.0, "stop": 1.0}
"""Guider settings that equal `DiffusionModel.guide`; the defaults of its class."""
NETWORK_INPUTS = {
    **{"embeds": "encoder_hidden_states", "embeds_mask": "encoder_attention_mask"},
    **{"glyphs": "encoder_hidden_states_2", "glyphs_mask": "encoder_attention_mask_2"},
    "image": "image_embeds",
}
"""Collated condition -> the network's argument."""


class HunyuanVideo15(Hunyuan):
    vae_class = AutoencoderKLHunyuanVideo15
    forward = staticmethod(forward)
    spec = ModelSpec(
        transformer="HunyuanVideo15Transformer3DModel",
        title="HunyuanVideo 1.5",
        example="hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v",
        components=(*ModelSpec.components, "guider", "text_encoder_2", "tokenizer_2"),
        # Attention of both streams and of the text refiner, as for HunyuanVideo.
        lora_targets=JOINT_ATTENTION,
        flops=FlopsLayout(
            patch="x_embedder.proj",
            streams=(
                (r"context_embedder_2|image_embedder", "none"),
                (rf"{MODULATION}|time_embed", "row"),
                (r"context_embedder|ff_context|attn\.add_|to_add_out", "text"),
            ),
            attention=((r"context_embedder", "text", "text"), (r"", "joint", "joint")),
        ),
        condition=ConditionLayout(width="text_embed_dim", glyphs="text_embed_2_dim"),
        selftest={"num_frames": 5},
        sequence=SequenceLayout(splits_prompts=True, plan=SEQUENCE_PLAN),
        vllm_omni=VllmOmniServing(
            pipeline="HunyuanVideo15Pipeline",
            mixin=".request_pipelines:HunyuanVideo15Recording",
            unadapted="refiner_blocks",
        ),
    )

    def __init__(self, path: str | Path):
        super().__init__(path)
        choice = f"a checkpoint that is not distilled to a few steps, such as {self.spec.example}"
        self._require_config("transformer", choice, use_meanflow=False)
        self._check_guider()

    def _check_guider(self) -> None:
        name = self.index["guider"][1]
        config = PLAIN_GUIDANCE | self.read_config("guider/guider_config.json")
        others = [f"{key}={config[key]}" for key, plain in PLAIN_GUIDANCE.items() if config[key] != plain]
        if name != "ClassifierFreeGuidance" or others:
            raise ValueError(
                "actor_rollout_ref.model.path must hold a guider of plain classifier-free guidance, got "
                f"{' '.join([name, *others])} in {str(self.path)!r}; change that in its model_index.json and guider/"
                f"guider_config.json, or choose a checkpoint such as {self.spec.example}"
            )

    # -- loading ------------------------------------------------------------------------------------------
    def load_transformer(self, dtype: torch.dtype, *, meta: bool = False) -> nn.Module:
        network: Any = super().load_transformer(dtype, meta=meta)
        for block in network.transformer_blocks:
            block.attn.set_processor(KeyMasked())
        return network

    def load_prompt_check(self) -> PromptCheck:
        tokenizer, glyph_tokenizer = self.load_tokenizer("tokenizer"), self.load_tokenizer("tokenizer_2")

        def in_template(prompt: str) -> str:
            chats = theirs.format_text_input([prompt], SYSTEM_MESSAGE)
            return tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)[0]

        check_all = length_check(tokenizer, title=self.spec.title, max_tokens=MAX_TEXT_TOKENS, wrap=in_template)

        def check(prompt: str) -> None:
            check_all(prompt)
            glyphs = theirs.extract_glyph_texts(prompt)
            num_tokens = 0 if glyphs is None else len(glyph_tokenizer(glyphs).input_ids)
            if num_tokens > MAX_GLYPH_TOKENS:
                raise ValueError(
                    f"the quoted text of a prompt must have at most {MAX_GLYPH_TOKENS} ByT5 tokens for "
                    f"{self.spec.title}, got {num_tokens} for {prompt[:PROMPT_CHARACTERS_SHOWN]!r}...; quote less of "
                    "it in data.train_files or data.val_files"
                )

        return check

    def load_pipeline(self, dtype: torch.dtype, *without: str) -> Any:
        """Load the parts that encode texts, in place of a pipeline, which cannot be built without a VAE."""

        def load(folder: str) -> Any:
            return getattr(transformers, self.index[folder][1]).from_pretrained(self.path / folder, dtype=dtype)

        encoder, glyph_encoder = load("text_encoder"), load("text_encoder_2")
        tokenizer, glyph_tokenizer = self.load_tokenizer("tokenizer"), self.load_tokenizer("tokenizer_2")

        def encode_prompt(prompt: str, device: torch.device) -> Condition:
            embeds, mask = encode_text(encoder, tokenizer, prompt, device)
            glyphs, glyph_mask = encode_glyphs(glyph_tokenizer, glyph_encoder, prompt, device)
            return {"embeds": embeds[0][mask[0].bool()], "glyphs": glyphs[0][glyph_mask[0].bool()]}

        networks = {"text_encoder": encoder, "text_encoder_2": glyph_encoder}
        return SimpleNamespace(encode_prompt=encode_prompt, components=networks)

    def encode_text(self, pipeline: Any, encode_prompt: EncodePrompt, text: str) -> Condition:
        """Encode into {"embeds": [L, D], "glyphs": [G, E]}: L and G are the prompt's own token counts, G may be 0."""
        return encode_prompt(text)

    # -- the network --------------------------------------------------------------------------------------
    def predict(
        self, transformer: nn.Module, latents: Tensor, sigmas: Tensor, condition: Collated, geometry: Geometry
    ) -> Tensor:
        num_rows, num_channels, *size = latents.shape
        no_frame = latents.new_zeros(num_rows, self._network["in_channels"] - num_channels, *size)
        return self._run(transformer, torch.cat([latents, no_frame], dim=1), sigmas, condition)

    def _run(self, transformer: nn.Module, hidden_states: Tensor, sigmas: Tensor, condition: Collated) -> Tensor:
        """One forward of latents with the frame that they continue, [N, 2 C + 1, F, H, W] -> [N, C, F, H, W]."""
        # "7. Denoising loop" of HunyuanVideo15Pipeline.__call__; there too the timestep is rounded to the network's
        # dtype, which the latents have.
        dtype = self.input_dtype(transformer)
        return transformer(
            hidden_states=hidden_states.to(dtype),
            timestep=to_device(self.timesteps(sigmas), hidden_states.device, dtype),
            **{NETWORK_INPUTS[name]: tensor.to(dtype) for name, tensor in condition.items()},
        )[0]
