# SPDX-License-Identifier: Apache-2.0
"""`ModelSpec`: the facts about a model that other rooms need, declared once, in the model's own file.

Invariants (tests/models/test_spec.py): names of layers, config keys, folders and arguments in a spec match the model's
own pipeline and network.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from verl_digen.require import require
from verl_digen.types import Geometry

Tokens = Literal["image", "audio", "text", "vision", "context", "joint", "row", "none", "picture", "source", "prompt"]
"""Tokens that a layer sees: the picture's and the prompt's images' ("picture", "source", both "image"), the sound's,
the text's, a vision encoder's (`DiffusionModel.num_vision_tokens`), the last two ("context"), these and the prompt's
images' ("prompt"), all but the sound's ("joint"), one per timestep (its embedding, modulation; of a row
`DiffusionModel.num_timesteps`, mostly one), or none that count (text quoted in a prompt; the first frame of a text to
video checkpoint)."""

MODULATION = r"norm\w*\.linear|time_text_embed"
"""Pattern of the names that most networks of diffusers give their modulation and timestep layers."""


JOINT_ATTENTION = (
    *("attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0"),
    *("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out"),
)
"""Projections of an attention over a picture's and a text's tokens, as most networks of diffusers name them."""


@dataclass(frozen=True)
class FlopsLayout:
    """Tokens that each layer of a network sees."""

    patch: str
    """Name of the layer that turns latents into picture tokens."""
    streams: tuple[tuple[str, Tokens], ...]
    """(pattern of a layer's name, tokens); the first pattern found in the name counts, "image" if none is found."""
    attention: tuple[tuple[str, Tokens, Tokens], ...]
    """(pattern of an attention's name, query tokens, key tokens); the first pattern found counts, in all its rows."""
    fused: str | None = None
    """End of the names of layers that make queries, keys and values at once, each as wide as the layer's input; None:
    every attention has a layer "to_q"."""
    text_tokens: int | None = None
    """Length to which prompts are padded before the network; None: the longest prompt of the forward."""
    shares_prompts: bool = False
    """True: rows of one prompt in a forward have its tokens once."""
    multiple: int = 1
    """The network itself pads picture and prompt tokens to a multiple of this."""


@dataclass(frozen=True)
class ConditionLayout:
    """Shapes of a prompt's condition. Widths are keys of the transformer's config."""

    width: str
    """Key of a token's width."""
    pooled: str | None = None
    """Key of the pooled vector's width; None: there is no pooled vector."""
    glyphs: str | None = None
    """Key of the width of a token of quoted text; None: not a separate input."""
    audio: str | None = None
    """Key of the width of a token of the prompt as the sound's layers read it; None: not a separate input."""
    num_tokens: int | None = None
    """Length to which the encoder pads every prompt; None: a condition has its prompt's own length."""


@dataclass(frozen=True)
class SequenceLayout:
    """Split of a network's tokens over devices, in the terms of diffusers' context parallelism."""

    splits_prompts: bool
    """True if prompt tokens are split like the picture's; False: every device has all of them."""
    plan: Mapping[str, Any] | None = None
    """Module -> how its inputs or outputs are split or gathered; None: the network class's own plan."""
    unsplit: tuple[str, ...] = ()
    """Entries of the class's plan that apply to inputs that this project never gives."""
    takes_images: bool = True
    """False: only rows of prompts without images are split, of a model that reads some."""


@dataclass(frozen=True)
class VllmOmniServing:
    """How vLLM-Omni generates with a model and records its trajectories. Names only: nothing of vLLM is imported."""

    pipeline: str
    """Pipeline class in vLLM-Omni's registry."""
    mixin: str
    """"module:class" of the recording mixin over it; a module that begins with a dot is in `rollout/vllm_omni`."""
    is_stepwise: bool = False
    """vLLM-Omni runs the pipeline step by step, so that requests join and leave a batch; False: in one call."""
    unadapted: str | None = None
    """Part of the names of layers that LoRA wraps by default but to which vLLM-Omni binds no adapter, because it uses
    diffusers' own implementation of them; None: it binds an adapter to every layer."""


@dataclass(frozen=True)
class ModelSpec:
    """Facts about one model that its methods do not say."""

    transformer: str
    """diffusers class of the network, e.g. "QwenImageTransformer2DModel". Other pipelines may have the same one."""
    title: str
    """The model's name in messages, e.g. "Qwen-Image"."""
    example: str
    """A repository that holds such a checkpoint, e.g. "Qwen/Qwen-Image"."""
    lora_targets: tuple[str, ...]
    """Default LoRA targets: module-name suffixes, used if the user names none."""
    flops: FlopsLayout
    condition: ConditionLayout
    components: tuple[str, ...] = ("scheduler", "text_encoder", "tokenizer", "transformer", "vae")
    """Folders a checkpoint must hold."""
    decodes_in_fp32: bool = False
    """True: the pipeline's documentation loads its VAE in fp32."""
    runs_in_fp16: bool = False
    """True if its activations fit into fp16 and training in it is published; False: it was made in bf16."""
    num_images: tuple[int, int] = (0, 0)
    """(least, most) images of a prompt. (0, 0): the pipeline reads text alone."""
    image_sizes: str = ""
    """Name of the rule of `verl_digen.inputs.sizes` that its pipeline has; "" where it reads no images."""
    encodes_in_fp32: tuple[str, ...] = ()
    """Folders of the encoders that the pipeline's documentation loads in fp32."""
    freed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Folder of a text encoder -> name prefixes of the parameters that `load_encoder` drops."""
    encodes_images: tuple[str, ...] = ()
    """Name prefixes of the VAE's parameters of which `load_encoder` keeps a copy; () where it loads no VAE."""
    encoder_parts: tuple[str, ...] = ()
    """Folders of networks that `load_encoder` loads besides the text encoders."""
    audio_parts: tuple[str, ...] = ()
    """Folders that `load_audio_decoder` loads; () where the model makes no sound."""
    selftest: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the pipeline in the self-test besides the size: guidance off, and the frames of a video."""
    sequence: SequenceLayout | None = None
    """None: the network runs whole on each device."""
    dispatches_attention: bool = True
    """False: the network calls PyTorch's attention itself, so that no other kernel can be chosen."""
    vllm_omni: VllmOmniServing | None = None
    """None: vLLM-Omni cannot generate for this trainer with the model."""

    def check_size(
        self, geometry: Geometry, *, px_multiple: int, max_px: int | None = None, frame_stride: int | None = None
    ) -> None:
        """ValueError, which names the key, the value and the nearest valid one, unless a checkpoint can make
        `geometry`: both sides are multiples of `px_multiple` of at most `max_px`, and a video has 1 + k *
        `frame_stride` frames (None for a model of pictures)."""
        frames, this = geometry.num_frames, f"this {self.title} checkpoint"
        if frame_stride is None:
            rule = f"digen.sampling.num_frames must be 1 for {self.title}, which makes pictures"
            require(frames == 1, rule, frames, "set it to 1")
        else:
            nearest = max(0, round((frames - 1) / frame_stride)) * frame_stride + 1
            rule = f"digen.sampling.num_frames must be 1 plus a multiple of {frame_stride} for {this}"
            require(frames == nearest, rule, frames, f"the nearest is {nearest}")
        for key, value in (("height_px", geometry.height_px), ("width_px", geometry.width_px)):
            nearest = max(1, round(value / px_multiple)) * px_multiple
            rule = f"digen.sampling.{key} must be a multiple of {px_multiple} for {this}"
            require(value == nearest, rule, value, f"the nearest is {nearest}")
            if max_px is not None:
                rule = f"digen.sampling.{key} must be at most {max_px} for {this}"
                require(value <= max_px, rule, value, f"the nearest is {max_px}")
