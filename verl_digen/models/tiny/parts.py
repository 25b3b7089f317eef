# SPDX-License-Identifier: Apache-2.0
"""Parts of tiny checkpoints: tokenizers, with or without training on a few sentences, encoders, a VAE, weights.
Different words have different tokens, in the corpus or not. Random weights make a network sensitive to all its inputs:
none keeps a constructor's zeros, which would hide the effect of earlier layers. Processors need PIL alone.

`Any` stands where diffusers annotates another class than its pipelines accept.
"""

import json
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from torch import nn
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    CLIPVisionConfig,
    CLIPVisionModel,
    Qwen2Tokenizer,
    SiglipVisionConfig,
    SiglipVisionModel,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
    UMT5Config,
    UMT5EncoderModel,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

Module = TypeVar("Module", bound=nn.Module)
FlowScheduler = FlowMatchEulerDiscreteScheduler

LATENT_CHANNELS = 4
TEXT_WIDTH = 32
"""Hidden size of the token encoders."""
VOCABULARY_SIZE = 512
"""Vocabulary size of the encoders; tokenizers stay below."""
CORPUS = [
    "a red circle left of two small blue squares on a green background",
    "a video of a yellow triangle that moves to the right",
]
"""Training text of the tokenizers."""
CLIP_TOKENS = 77
"""Tokens that a real CLIP reads."""
UMT5_SCALE = 8
"""Scale of UMT5's hidden states relative to T5's."""
LANGUAGE_MODEL: dict[str, Any] = {
    **{"vocab_size": VOCABULARY_SIZE, "hidden_size": TEXT_WIDTH, "intermediate_size": 64},
    **{"num_attention_heads": 2, "num_key_value_heads": 1},
}
"""Sizes of a decoder."""
QWEN_VL_TEXT: dict[str, Any] = {
    **{"bos_token_id": 0, "eos_token_id": 0, **LANGUAGE_MODEL},
    "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e6},
}
"""Sizes of the decoder of a Qwen2.5-VL."""
TWO_HEADS: dict[str, Any] = {"num_attention_heads": 2, "attention_head_dim": 16}
"""Width of a network of diffusers."""
SMALL_VAE: dict[str, Any] = {"latent_channels": LATENT_CHANNELS, "layers_per_block": 1, "norm_num_groups": 4}
CAUSAL_VAE: dict[str, Any] = {
    **{"base_dim": 8, "z_dim": LATENT_CHANNELS, "num_res_blocks": 1},
    **{"latents_mean": [-0.75, 0.1, 0.95, -0.15], "latents_std": [2.8, 1.4, 1.2, 2.0]},
}
"""Sizes and statistics of a VAE of Qwen-Image or Wan."""
CHAT_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Chat template of Qwen2.5 and, for one user message, of Qwen3."""
CLIP_SPECIALS = ["<|startoftext|>", "<|endoftext|>"]


def draw_weights(module: nn.Module, gain: float = 1.0) -> None:
    """Draw matrices with std gain/sqrt(fan_in), biases with std 0.3, norm weights around 1."""
    for name, parameter in module.named_parameters():
        if parameter.dim() > 1 and "gamma" not in name:
            nn.init.normal_(parameter, std=gain / parameter[0].numel() ** 0.5)
        elif name.endswith("bias"):
            nn.init.normal_(parameter, std=0.3)
        else:
            nn.init.normal_(parameter, mean=1.0, std=0.1)


def drawn(kind: type[Module], *config: Any, **sizes: Any) -> Module:
    """Make a network of these sizes, or of a config, and draw its weights."""
    module = kind(*config, **sizes)
    draw_weights(module)
    return module


def image_vae(scaling_factor: float, shift_factor: float | None) -> AutoencoderKL:
    """Make a tiny `AutoencoderKL`, 8x8 px per latent position, as in SD3, FLUX.1 and Z-Image."""
    return drawn(
        AutoencoderKL,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(8, 8, 16, 16),
        **SMALL_VAE,
        scaling_factor=scaling_factor,
        shift_factor=shift_factor,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


def clip_tokenizer() -> CLIPTokenizer:
    blank = CLIPTokenizer(
        vocab={token: i for i, token in enumerate(CLIP_SPECIALS)}, merges=[], model_max_length=CLIP_TOKENS
    )
    return blank.train_new_from_iterator(CORPUS * 2, vocab_size=500, new_special_tokens=CLIP_SPECIALS)


def clip_encoder(width: int, *, projects: bool) -> Any:
    """A `CLIPTextModelWithProjection` if it `projects`, as in SD3; else a `CLIPTextModel`."""
    config = CLIPTextConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=CLIP_TOKENS,
        projection_dim=width,
        bos_token_id=CLIP_SPECIALS.index("<|startoftext|>"),
        eos_token_id=CLIP_SPECIALS.index("<|endoftext|>"),
    )
    return drawn(CLIPTextModelWithProjection if projects else CLIPTextModel, config)


def t5_tokenizer() -> Any:
    """A `T5Tokenizer`: whole words of the corpus, and single characters for all others."""
    words = dict.fromkeys(word for sentence in CORPUS for word in sentence.split())
    characters = string.ascii_letters + string.digits + string.punctuation
    vocabulary = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -4.0)]
    vocabulary += [(f"▁{word}", -2.0) for word in words] + [(character, -5.0) for character in characters]
    return T5Tokenizer(vocab=vocabulary, extra_ids=0)


def t5_encoder() -> T5EncoderModel:
    return drawn(T5EncoderModel, T5Config(**_t5_sizes()))


def umt5_encoder() -> UMT5EncoderModel:
    """A `UMT5EncoderModel` with large hidden states, to stand out from the hundreds of zeros that Wan pads with."""
    encoder = drawn(UMT5EncoderModel, UMT5Config(**_t5_sizes()))
    with torch.no_grad():
        encoder.encoder.final_layer_norm.weight.mul_(UMT5_SCALE)
    return encoder


def _t5_sizes() -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY_SIZE,
        "d_model": TEXT_WIDTH,
        "d_kv": 16,
        "d_ff": 64,
        "num_layers": 2,
        "num_heads": 2,
        "feed_forward_proj": "gated-gelu",
    }


def byte_tokenizer(corpus: Sequence[str], specials: Sequence[str]) -> Any:
    """A `Qwen2Tokenizer`: byte-level BPE, as in Qwen and LLaMA 3; the first of `specials` is the padding token."""
    blank = Qwen2Tokenizer(
        vocab={token: i for i, token in enumerate(specials)},
        merges=[],
        unk_token=specials[0],
        eos_token=specials[0],
        pad_token=specials[0],
    )
    return blank.train_new_from_iterator(list(corpus) * 2, vocab_size=500, new_special_tokens=list(specials))


def chat_tokenizer(*corpus: str) -> Any:
    """Qwen's tokenizer with its chat template, trained on these texts, the roles and `CORPUS`."""
    tokenizer = byte_tokenizer([*corpus, "user\n", "assistant\n", *CORPUS], CHAT_TOKENS)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


CLIP_WIDTH, SIGLIP_WIDTH = 20, 16
SIDE_PX, PATCH_PX = 28, 14
"""Side of the picture that an encoder sees, and of one token of it."""


@dataclass(frozen=True)
class WithProcessor:
    """A pipeline without its image processor, which diffusers makes with torchvision alone, and that processor."""

    pipeline: Any
    processors: Mapping[str, tuple[str, Any]]
    """Folder -> (its class with torchvision, processor that needs none)."""

    def save_pretrained(self, path: str | Path) -> None:
        """Write the checkpoint as the pipeline of a machine with torchvision does."""
        self.pipeline.save_pretrained(path)
        index = Path(path) / "model_index.json"
        parts = json.loads(index.read_text())
        for folder, (name, processor) in self.processors.items():
            processor.save_pretrained(Path(path) / folder)
            parts[folder] = ["transformers", name]
        index.write_text(json.dumps(parts, indent=2))


def _vision_sizes(width: int) -> dict[str, Any]:
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_attention_heads": 2}
    return {**sizes, "image_size": SIDE_PX, "patch_size": PATCH_PX}


def clip_vision() -> CLIPVisionModel:
    return drawn(CLIPVisionModel, CLIPVisionConfig(**_vision_sizes(CLIP_WIDTH), num_hidden_layers=3))


def clip_vision_processor() -> CLIPImageProcessorPil:
    return CLIPImageProcessorPil(
        size={"shortest_edge": SIDE_PX},
        crop_size={"height": SIDE_PX, "width": SIDE_PX},  # type: ignore[arg-type]
    )


def siglip_vision() -> SiglipVisionModel:
    return drawn(SiglipVisionModel, SiglipVisionConfig(**_vision_sizes(SIGLIP_WIDTH), num_hidden_layers=2))


def siglip_processor() -> SiglipImageProcessorPil:
    return SiglipImageProcessorPil(size={"height": SIDE_PX, "width": SIDE_PX})  # type: ignore[arg-type]
