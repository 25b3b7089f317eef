# SPDX-License-Identifier: Apache-2.0
"""Interface of a model file: one subclass of `DiffusionModel` per diffusers pipeline, nothing about algorithms.

Everything heavy is loaded by an explicit call, so that a trainer rank loads only the transformer and a replica loads
everything. Constructing the object reads only JSON configs.

Some networks take a guidance scale as an input ("embedded" guidance, distilled into them). It is a number of the
request like the size, not of the prompt: `velocity` adds it to the collated condition as "guidance". Some checkpoints
hold several networks, each for a part of the schedule (`experts`). Their parameters train as one module.

Invariants (tests/models): rows at different sigmas in one forward give the same results as one at a time; padding of
text changes nothing; our sampler with eta = 0 equals the model's own diffusers pipeline.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from verl_digen.inputs.images import PromptInputs
from verl_digen.models import checkpoint, pipelines_of
from verl_digen.models.checkpoint import Experts
from verl_digen.models.pixels import SILENT, AudioDecoder, Decoder, load_image_decoder
from verl_digen.models.spec import ModelSpec
from verl_digen.models.text import PromptEncoder, one_by_one, only_text, padded, stacked
from verl_digen.require import as_typed, require
from verl_digen.types import Condition, Geometry

PATCH = 2
"""Latent positions per token and side of a picture, of all networks that do not name their own."""
TIMESTEPS_PER_SIGMA = 1000
"""Ratio of timestep to sigma, in the schedules of all pipelines."""

PromptCheck = Callable[[str], None]
"""Raises ValueError for a text that is longer than the pipeline reads."""
EncodePrompt = Callable[..., Any]
"""A pipeline's `encode_prompt` on its device, or a method around it."""
Collated = dict[str, Any]
"""Name -> input of `predict` from N conditions: tensors [N, ...], or lists of N if the network takes lists."""


class DiffusionModel(ABC):
    """One pipeline of the diffusers library, read from the folder of a checkpoint in its format; `load_model` chooses
    the class. ValueError for an incomplete checkpoint, or one with another network."""

    spec: ModelSpec
    """Set by the class; a constructor replaces it where checkpoints of one pipeline differ."""
    encoding_pipeline: str | None = None
    """Class of the pipeline that encodes prompts; None: the checkpoint's, or that of the file this one extends."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.compute_dtype: torch.dtype | None = None
        """Compute dtype of the network, if it differs from its parameters': set once by the owner of a wrapper that
        casts (FSDP2 keeps fp32 shards and computes in its `param_dtype`). None: the parameters' dtype."""
        self.sequence_size = 1
        """Devices that share a row's tokens, see `verl_digen.models.sequence`; set by `split_networks`."""
        self.takes_masks = True
        """False if the network's attention kernel takes no mask (`verl_digen.models.kernels` sets it)."""
        self.experts: tuple[str, ...] = ("transformer",)
        """Folders of the networks, in the order of `expert_of`."""
        self.takes_guidance = True
        """False if the pipeline runs the checkpoint without classifier-free guidance, whatever scale is asked for."""
        self.default_embedded_guidance: float | None = None
        """The pipeline's default for the embedded guidance scale; None: the network has no such input."""
        self.index = checkpoint.read_config(self.path, "model_index.json")
        self.pipeline: str = self.index["_class_name"]
        """The diffusers pipeline of the checkpoint, e.g. "QwenImagePipeline"."""
        checkpoint.check_components(self.path, self.index, self.spec.components)
        network = self.index["transformer"][1]
        if network != self.spec.transformer:
            raise ValueError(
                f"actor_rollout_ref.model.path must hold a {self.spec.transformer} for {self.spec.title}, got "
                f"{network} in {str(self.path)!r}; choose a checkpoint such as {self.spec.example}"
            )
        self._schedule = self.read_config("scheduler/scheduler_config.json")
        """Arguments of the checkpoint's scheduler; `sigmas` builds one from them."""
        self.scheduler: str = self.index["scheduler"][1]
        """Class of the checkpoint's scheduler. A run takes its sigmas; the solver is `digen.sampling.solver`."""

    def read_config(self, name: str) -> dict[str, Any]:
        """A JSON file of the checkpoint, e.g. "scheduler/scheduler_config.json"."""
        return checkpoint.read_config(self.path, name)

    def read_network_config(self, folder: str) -> dict[str, Any]:
        """Constructor arguments of the diffusers network in `folder`, e.g. "vae"."""
        return checkpoint.read_network_config(self.path, folder)

    @cached_property
    def _network(self) -> dict[str, Any]:
        """Constructor arguments of the network."""
        return self.read_network_config(self.experts[0])

    @cached_property
    def _num_channels(self) -> int:
        """Channels of the latents; a constructor replaces it where the network reads others, too."""
        return self._network["in_channels"]

    @cached_property
    def _vae_scale(self) -> int:
        """Pixels per latent position and side: every block of a VAE but the last halves a side, or those that its
        config lists. A constructor replaces it for VAEs of videos."""
        vae = self.read_network_config("vae")
        halved = vae["temperal_downsample"] if "temperal_downsample" in vae else vae["block_out_channels"][1:]  # sic
        return 2 ** len(halved)

    def _require_config(self, folder: str, choice: str, **wanted: Any) -> None:
        """Require these values in the config of the network in `folder`; `choice`: another checkpoint, in words."""
        for key, value in wanted.items():
            found = self.read_network_config(folder)[key]
            if found != value:
                raise ValueError(
                    f"actor_rollout_ref.model.path must hold a {folder} with {key}={as_typed(value)} for "
                    f"{self.spec.title}, got {as_typed(found)} in {str(self.path)!r}; choose {choice}"
                )

    # -- loading ------------------------------------------------------------------------------------------
    def load_transformer(self, dtype: torch.dtype, *, meta: bool = False) -> nn.Module:
        """Load the transformer in eval mode on the CPU. Several experts are returned as one `Experts` module. With
        `meta=True` parameters are on the meta device, to be filled from a state dict; buffers and tables that are not
        parameters are real, on the CPU, because no checkpoint holds them."""
        load = checkpoint.make_meta_network if meta else checkpoint.load_network
        networks = {name: load(self.path / name, self.spec.transformer, dtype) for name in self.experts}
        return Experts(networks).eval() if len(networks) > 1 else networks[self.experts[0]]

    def load_structure(self, dtype: torch.dtype) -> nn.Module:
        """The transformer without values: parameters, buffers and tables on the meta device, none calculated."""
        with torch.device("meta"):
            return self.load_transformer(dtype, meta=True)

    def load_tokenizer(self, folder: str) -> Any:
        """Load the tokenizer in `folder`, of the class that the checkpoint's index names."""
        return getattr(transformers, self.index[folder][1]).from_pretrained(self.path / folder)

    def load_pipeline(self, dtype: torch.dtype, *without: str) -> Any:
        """Load the diffusers pipeline `encoding_pipeline` without networks, scheduler and the folders `without`; each
        part in its `part_dtype`, and without what `ModelSpec.freed` and `encodes_images` leave out."""
        dtypes = {folder: self.part_dtype(folder, dtype) for folder in ("vae", *self.spec.encodes_in_fp32)}
        absent = dict.fromkeys((*self.experts, "scheduler", *without))
        names = (self.encoding_pipeline or self.pipeline, *pipelines_of(type(self)))
        pipeline = checkpoint.diffusers_class(*names).from_pretrained(
            self.path, **absent, **self.pipeline_parts(), dtype={"default": dtype, **dtypes}
        )
        for folder, prefixes in self.spec.freed.items():
            for prefix in prefixes if folder not in absent else ():
                getattr(pipeline, folder).set_submodule(prefix.removesuffix("."), nn.Identity())
        for name, part in pipeline.vae.named_children() if "vae" not in absent else ():
            if any(True for _ in part.parameters()) and not f"{name}.".startswith(self.spec.encodes_images):
                setattr(pipeline.vae, name, nn.Identity())  # the decoder's own copy has it
        return pipeline

    def pipeline_parts(self) -> dict[str, Any]:
        """Parts for `from_pretrained` of the diffusers pipeline that it cannot load without a further package."""
        return {}

    def pipeline_size(self, geometry: Geometry) -> dict[str, Any]:
        """Arguments with which the diffusers pipeline makes pictures of this size."""
        return {"height": geometry.height_px, "width": geometry.width_px}

    def pipeline_of(self, geometry: Geometry) -> str:
        """Class of the diffusers pipeline that makes pictures of this geometry."""
        return self.pipeline

    def pipeline_start(self, latents: Tensor, geometry: Geometry) -> Tensor:
        """Initial latents [N, ...] as the diffusers pipeline takes them."""
        return latents

    def pipeline_call(self, pipeline: Any, geometry: Geometry) -> Callable[..., Any]:
        """The diffusers pipeline of this checkpoint as a function of its arguments, `latents` from `pipeline_start`;
        with `output_type="latent"` the first output has the final latents of the same kind."""
        return pipeline

    def pipeline_end(self, latents: Tensor, geometry: Geometry) -> Tensor:
        """Latents of a sample [N, ...] in those that the diffusers pipeline has after a step."""
        return latents

    @abstractmethod
    def load_prompt_check(self) -> PromptCheck:
        """Load a check of a prompt's length; loads no weights."""

    def load_encoder(self, dtype: torch.dtype, device: torch.device) -> PromptEncoder:
        """Load tokenizers and encoders. The encoder raises the same errors as the check of `load_prompt_check`;
        conditions are as `encode_with` makes them, in `dtype`."""
        no_vae = () if self.spec.encodes_images else ("vae",)
        pipeline = self.load_pipeline(dtype, *no_vae, *self.spec.audio_parts)

        def encode(inputs: PromptInputs) -> Condition:
            condition = self.encode_with(pipeline, partial(pipeline.encode_prompt, device=device), inputs)
            return {name: tensor.to(dtype) for name, tensor in condition.items()}

        networks = [part for part in pipeline.components.values() if isinstance(part, nn.Module)]
        return one_by_one(encode, self.load_prompt_check(), device, *networks)

    def encode_with(self, pipeline: Any, encode_prompt: EncodePrompt, inputs: PromptInputs) -> Condition:
        """Encode with the parts of a pipeline, diffusers' or vLLM-Omni's, in their dtypes: the text, and what
        `encode_images` adds. ValueError for too many images, or one that cannot be read or that the pipeline does not
        take; for any where the model reads text alone."""
        self.check_images(inputs)
        added = self.encode_images(pipeline, inputs, pipeline.vae.device) if inputs.images else {}
        return self.encode_text(pipeline, encode_prompt, inputs.text) | added

    def check_images(self, inputs: PromptInputs) -> None:
        """ValueError for more images than the pipeline reads."""
        if (most := self.spec.num_images[1]) == 0:
            only_text(inputs)
        rule = f"a prompt must have at most {most} image{'s' * (most > 1)} for {self.spec.title}"
        require(len(inputs.images) <= most, rule, len(inputs.images), "leave some out")

    def encode_text(self, pipeline: Any, encode_prompt: EncodePrompt, text: str) -> Condition:
        """Encode a prompt's text, as `encode_with`."""
        raise NotImplementedError

    def encode_images(self, pipeline: Any, inputs: PromptInputs, device: torch.device) -> Condition:
        """Encode a prompt's images, one or more -> what they add to the text's condition, as `encode_with`."""
        raise NotImplementedError

    def load_decoder(self, dtype: torch.dtype, device: torch.device) -> Decoder:
        """Load the VAE, decoder and encoder, in `decoder_dtype(dtype)`; an `AutoencoderKL` unless the class says so."""
        rule = f"{type(self).__name__} must define load_decoder, or its VAE be an AutoencoderKL"
        require(self.index["vae"][1] == "AutoencoderKL", rule, self.index["vae"][1], "see docs/own_models.md")
        return load_image_decoder(self.path / "vae", self.decoder_dtype(dtype), device)

    def load_audio_decoder(self, dtype: torch.dtype, device: torch.device) -> AudioDecoder:
        """Load what decodes sound, `ModelSpec.audio_parts`."""
        return SILENT

    def part_dtype(self, folder: str, dtype: torch.dtype) -> torch.dtype:
        """dtype in which a replica loads the VAE or encoder in `folder`, where the network computes in `dtype`."""
        if folder == "vae":
            return self.decoder_dtype(dtype)
        return torch.float32 if folder in self.spec.encodes_in_fp32 else dtype

    def decoder_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """dtype in which the VAE decodes where the network computes in `dtype`: fp32 where the VAE's config asks for it
        (`force_upcast`, on by default in diffusers' `AutoencoderKL`) or the pipeline's documentation does
        (`ModelSpec.decodes_in_fp32`)."""
        config = self.read_network_config("vae")
        in_fp32 = self.spec.decodes_in_fp32 or ("force_upcast" in config and config["force_upcast"])
        return torch.float32 if in_fp32 else dtype

    # -- the shape of the problem -------------------------------------------------------------------------
    @abstractmethod
    def latent_shape(self, geometry: Geometry) -> tuple[int, ...]:
        """Shape of one sample's packed latents, without what its condition gives (`completed`). ValueError for a size
        the model cannot produce; names the key, the value and the nearest valid one."""

    def num_tokens(self, geometry: Geometry) -> int:
        """Tokens of one sample in the network, without its prompt: the rows of packed latents [tokens, C]. Raises as
        `latent_shape`."""
        return self.latent_shape(geometry)[0]

    def num_audio_tokens(self, geometry: Geometry) -> int:
        """Tokens of sound among `num_tokens`."""
        return 0

    def num_source_tokens(self, geometry: Geometry) -> int:
        """Tokens of the prompt's images that the network reads beside the picture's (`Geometry.sources`)."""
        return 0

    def num_image_text_tokens(self, geometry: Geometry) -> int:
        """Tokens that the prompt's images add to its text's, where the text encoder reads them."""
        return 0

    def num_vision_tokens(self, geometry: Geometry) -> int:
        """Tokens of a vision encoder that the network reads beside the text's, of the prompt's images."""
        return 0

    def num_timesteps(self, geometry: Geometry) -> int:
        """Timesteps that the network embeds for a row: one, or one per token."""
        return 1

    def image_conditions(self, geometry: Geometry) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors that the prompt's images (`Geometry.sources`, one or more) add to its condition."""
        return {}

    @abstractmethod
    def sigmas(self, num_steps: int, geometry: Geometry) -> Tensor:
        """[T+1] fp32 CPU, decreasing from the first sigma to exactly 0: the checkpoint's own schedule."""

    def timesteps(self, sigmas: Tensor) -> Tensor:
        """[N] timesteps of the pipeline's scheduler for these sigmas."""
        return sigmas * TIMESTEPS_PER_SIGMA

    def embedded_guidance(self, asked: float | None) -> float | None:
        """Guidance scale given to the network: `asked`, or the pipeline's default if that is None; None if the network
        has no such input. ValueError for a number where it has none."""
        if asked is not None and self.default_embedded_guidance is None:
            raise ValueError(
                f"digen.sampling.guidance_scale must be null for this {self.spec.title} checkpoint, whose network "
                f"takes no guidance scale, got {asked}; digen.sampling.true_cfg_scale is classifier-free guidance"
            )
        return self.default_embedded_guidance if asked is None else asked

    def expert_of(self, sigmas: Tensor) -> Tensor:
        """[N] sigmas -> [N] int64 on their device: number of the expert of each row. Only rows of one expert may share
        a forward; under FSDP all ranks must run the same one at a time."""
        return torch.zeros_like(sigmas, dtype=torch.int64)

    # -- the network --------------------------------------------------------------------------------------
    def collate(self, conditions: Sequence[Condition]) -> Collated:
        """Batch N conditions: [N, ...] each; where `pads_texts`, texts [N, L, D] as by `padded`."""
        texts = self._texts(conditions[0])
        collated = stacked(conditions, *(name for name in conditions[0] if name not in texts))
        for name in texts:
            collated |= padded(conditions, name)
        return collated

    @abstractmethod
    def predict(
        self, transformer: nn.Module, latents: Tensor, sigmas: Tensor, condition: Collated, geometry: Geometry
    ) -> Tensor:
        """One forward of latents [N, ...] and `sigmas` [N] fp32, each row its own, on any device -> velocity [N, ...].
        `condition` is collated, with "guidance" [N] fp32 if the network takes a guidance scale. RuntimeError for rows
        of different experts."""

    def completed(self, latents: Tensor, conditions: Sequence[Condition]) -> Tensor:
        """Final latents [B, ...] as the decoder reads them: joined with what their conditions, of prompts alike in
        their images, give of a sample, such as its first frame, which is no part of `latent_shape`."""
        return latents

    def guide(self, positive: Tensor, negative: Tensor, scale: float) -> Tensor:
        """Combine the two guidance branches [N, ...] as the model's own pipeline does."""
        return negative + scale * (positive - negative)

    def input_dtype(self, transformer: nn.Module) -> torch.dtype:
        """Dtype of the network's inputs: its compute dtype, under any wrapper."""
        if self.compute_dtype is not None:
            return self.compute_dtype
        return next(
            parameter.dtype
            for name, parameter in transformer.named_parameters()
            if parameter.is_floating_point() and not checkpoint.kept_in_fp32(name, self.spec.transformer)
        )

    @property
    def pads_texts(self) -> bool:
        """True if conditions have their prompt's own length, so that a forward pads them to the longest, under a mask.
        False if all are of one length for the network."""
        return self.spec.condition.num_tokens is None and self.spec.flops.text_tokens is None

    @property
    def keeps_lengths_apart(self) -> bool:
        """True if texts of one forward must be of one length: the network would mask padding, and cannot (if it never
        can, its class sets True). Guidance then runs in two forwards."""
        return self.pads_texts and not self.takes_masks

    def text_lengths(self, condition: Condition) -> tuple[int, ...]:
        """Numbers of tokens of the condition's texts; () where all conditions are of one length for the network."""
        return tuple(len(condition[name]) for name in self._texts(condition))

    def _texts(self, condition: Condition) -> list[str]:
        """Entries of the condition that have their prompt's own length."""
        if not self.pads_texts:
            return []
        of_images = ("source", "image")
        return sorted(name for name, part in condition.items() if part.ndim > 1 and name not in of_images)

    def velocity(
        self,
        transformer: nn.Module,
        latents: Tensor,
        sigmas: Tensor,
        conditions: Sequence[Condition],
        negative_conditions: Sequence[Condition] | None,
        true_cfg_scale: float,
        geometry: Geometry,
        guidance_scale: float | None = None,
        *,
        splits: bool = False,
    ) -> Tensor:
        """Guided velocity dx/dsigma [N, ...] fp32 of N rows.

        Both guidance branches run in one forward, or with `splits` in two, which take half the memory; only the
        positive one if `true_cfg_scale` is 1. `sigmas`: [N] fp32. `guidance_scale`: `asked` of `embedded_guidance`.
        RuntimeError for guidance without negative conditions, rows of different experts, or texts of different lengths
        where `keeps_lengths_apart`.
        """

        def branch(latents: Tensor, sigmas: Tensor, conditions: Sequence[Condition]) -> Tensor:
            if self.keeps_lengths_apart and len(found := {self.text_lengths(each) for each in conditions}) > 1:
                raise RuntimeError(
                    f"texts of one forward must be of one length for an attention kernel without masks, got {found}; "
                    "put them into different batches"
                )
            collated = self.collate(conditions)
            embedded = self.embedded_guidance(guidance_scale)
            if embedded is not None:
                collated["guidance"] = torch.full((len(latents),), embedded, dtype=torch.float32, device=latents.device)
            return self.predict(transformer, latents, sigmas, collated, geometry).float()

        if true_cfg_scale == 1.0:
            return branch(latents, sigmas, conditions)
        if negative_conditions is None:
            raise RuntimeError(f"true_cfg_scale={true_cfg_scale} needs negative conditions, got None")
        if splits or self.keeps_lengths_apart:
            positive, negative = (branch(latents, sigmas, each) for each in (conditions, negative_conditions))
        else:
            both = [*conditions, *negative_conditions]
            positive, negative = branch(torch.cat([latents, latents]), torch.cat([sigmas, sigmas]), both).chunk(2)
        return self.guide(positive, negative, true_cfg_scale)


class PackedModel(DiffusionModel):
    """Base of models whose latents are [tokens, channels], a token being a patch of 2x2 latent positions."""

    def _token_grid(self, geometry: Geometry) -> tuple[int, int]:
        """(rows, columns) of tokens."""
        px_per_token = self._vae_scale * PATCH
        return geometry.height_px // px_per_token, geometry.width_px // px_per_token

    def latent_shape(self, geometry: Geometry) -> tuple[int, ...]:
        self.spec.check_size(geometry, px_multiple=self._vae_scale * PATCH)
        return math.prod(self._token_grid(geometry)), self._num_channels

    def sigmas(self, num_steps: int, geometry: Geometry) -> Tensor:
        # "5. Prepare timesteps" of `__call__` of FluxPipeline and QwenImagePipeline.
        from verl_digen.models.schedule import shifted_sigmas  # imports diffusers

        return shifted_sigmas(self._schedule, num_steps, self.latent_shape(geometry)[0])


class VideoModel(DiffusionModel):
    """Base of models of videos, whose latents are [C, F, H, W]. One frame is a picture."""

    _frame_stride: int
    _patch: Sequence[int]
    """[frames, height, width] of latent positions that the network reads as a token. Constructors set both, and
    `_num_channels` and `_vae_scale`."""

    def latent_shape(self, geometry: Geometry) -> tuple[int, ...]:
        """[C, F, H, W] with F = 1 + (frames - 1) / stride."""
        scale, stride = self._vae_scale, self._frame_stride
        self.spec.check_size(geometry, px_multiple=scale * self._patch[1], frame_stride=stride)
        num_frames = 1 + (geometry.num_frames - 1) // stride
        return self._num_channels, num_frames, geometry.height_px // scale, geometry.width_px // scale

    def tokens_of(self, latent_shape: Sequence[int]) -> int:
        """Tokens of latents [C, F, H, W]."""
        return math.prod(size // side for size, side in zip(latent_shape[1:], self._patch, strict=True))

    def num_tokens(self, geometry: Geometry) -> int:
        return self.tokens_of(self.latent_shape(geometry))
