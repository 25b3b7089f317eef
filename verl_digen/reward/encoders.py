# SPDX-License-Identifier: Apache-2.0
"""Parts that scorers with an encoder share: their settings, strict loading of weights, CLIP, frames of a video.

Each picture is prepared alone, on the CPU, by the processor that the checkpoint comes with, in its Pillow form: the
numbers are the same whether torchvision is installed or not, and pictures of a batch may differ in size. Encoders
compute in the setting `dtype`; features, cosines and heads in fp32.

Invariants (tests/reward/test_clip_scorers.py): a batch scores as its samples do one by one; no gradient is recorded;
dropout is off.
"""

import itertools
import re
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from verl_digen.require import In, OneOf, first_of, refusing, require
from verl_digen.reward.base import Result, Reward, checkpoint_folder, images_of
from verl_digen.types import RewardInput

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
DESCRIPTIONS = ("*.json", "*.txt")
"""Files of a checkpoint without its weights."""
FILES = (*DESCRIPTIONS, "model*.safetensors")
WEIGHTS = ("path", "base", "head", "processor", "tokenizer")
"""Settings of built-in rewards that name weights, or what belongs to them."""
RIGHT = "check that it is the right one"
"""Remedy for files that cannot be read."""
HEAD_SIZES = (1024, 128, 64, 16, 1)
"""Layers of the heads of `aesthetic` and `image_reward`, which have no activation between them."""

Prepare = Callable[[Image.Image], Tensor]
"""A picture -> [3, H, W] fp32, ready for the encoder."""


@dataclass(frozen=True)
class EncoderConfig:
    """Settings of every scorer with an encoder."""

    path: str = ""
    """Weights: a folder, or "owner/repository" of the Hugging Face hub, "owner/repository@revision"."""
    dtype: Annotated[str, OneOf(DTYPES)] = "fp32"
    """Dtype of the encoder: fp32, bf16 or fp16."""
    num_frames: Annotated[int, In("[1, inf]")] = 8
    """Maximum frames of a video that are scored, evenly spaced with the first and the last; 1 is the middle one."""

    def __post_init__(self) -> None:
        for name in WEIGHTS:
            require(vars(self).get(name) != "", f"{name} must name a folder or a repository", "", "take it out")


class FrameReward(Reward):
    """Base of rewards that score pictures; the score of a video is the mean of its frames."""

    @torch.no_grad()
    def score(self, batch: Sequence[RewardInput]) -> Sequence[Result]:
        """Mean score of each sample's frames; [B]."""
        frames = [images_of(sample, self.config.num_frames) for sample in batch]
        owners = [number for number, own in enumerate(frames) for _ in own]
        texts = [sample.row.text for sample in batch]
        values = self.frame_scores([image for own in frames for image in own], owners, texts)
        return [own.mean().item() for own in values.float().cpu().split([len(own) for own in frames])]

    @abstractmethod
    def frame_scores(self, images: Sequence[Image.Image], owners: Sequence[int], texts: Sequence[str]) -> Tensor:
        """Score frames; [N]. `owners`: number of the sample that each frame belongs to; `texts`: samples' prompts."""


class PictureEncoder:
    """A model of transformers whose `pooler_output` is a picture's feature. `prepare`: makes its inputs."""

    def __init__(self, model: Any, prepare: Prepare, device: torch.device, dtype: str):
        self._model = model.to(device, DTYPES[dtype]).eval().requires_grad_(False)
        self._prepare, self._device, self._dtype = prepare, device, DTYPES[dtype]

    def images(self, images: Sequence[Image.Image]) -> Tensor:
        """Features of pictures, of length 1; [N, D] fp32."""
        pixels = torch.stack([self._prepare(image) for image in images]).to(self._device, self._dtype)
        return unit(self._outputs(pixels).pooler_output)

    def _outputs(self, pixels: Tensor) -> Any:
        return self._model(pixel_values=pixels)


class ClipEncoder(PictureEncoder):
    """A CLIP model with what prepares its inputs. `tokenizer`: None for pictures alone; the text encoder is then
    dropped. `clean`: what becomes of a prompt before it is split into tokens."""

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        prepare: Prepare,
        device: torch.device,
        dtype: str,
        clean: Callable[[str], str] = str,
    ):
        self.logit_scale: float = model.logit_scale.exp().item()
        self.width: int = model.config.projection_dim
        self._max_tokens = model.config.text_config.max_position_embeddings
        self._tokenizer: Any = tokenizer
        if tokenizer is None:
            del model.text_model, model.text_projection
        self._clean = clean
        super().__init__(model, prepare, device, dtype)

    @classmethod
    def load(
        cls,
        path: str,
        key: str,
        device: torch.device,
        dtype: str,
        *,
        processor: str | None = None,
        has_text: bool = True,
    ) -> "ClipEncoder":
        """Load a checkpoint in transformers' format, which the setting `key` named; without `has_text` the text encoder
        is dropped. Tokenizer and picture processor come from the folder or repository `processor`, None for `path`.
        ValueError if it cannot be fetched, or is no whole CLIP checkpoint."""
        from transformers import CLIPModel  # heavy, and the driver imports this file

        place = checkpoint_folder(path, key, FILES)
        model = load_model(CLIPModel, place, key)
        processor_key = f"{key.partition(':')[0]}: processor"
        inputs = place if processor is None else checkpoint_folder(processor, processor_key, DESCRIPTIONS)
        return cls(model, load_tokenizer(inputs, key) if has_text else None, load_processor(inputs, key), device, dtype)

    def _outputs(self, pixels: Tensor) -> Any:
        return self._model.get_image_features(pixel_values=pixels)

    def texts(self, texts: Sequence[str]) -> Tensor:
        """Features of prompts, cut at the model's number of tokens, of length 1; [N, D] fp32."""
        tokens = self._tokenizer(
            list(texts), padding=True, truncation=True, max_length=self._max_tokens, return_tensors="pt"
        ).to(self._device)
        found = self._model.get_text_features(input_ids=tokens.input_ids, attention_mask=tokens.attention_mask)
        return unit(found.pooler_output)

    def cosines(self, images: Sequence[Image.Image], owners: Sequence[int], texts: Sequence[str]) -> Tensor:
        """Cosine of each frame with the prompt of its sample; [N] fp32."""
        features = self.texts([self._clean(text) for text in texts])
        return (self.images(images) * features.index_select(0, torch.tensor(owners, device=features.device))).sum(-1)


class CosineReward(FrameReward):
    """Base of rewards that are the cosine of frame and prompt, times `factor`, over `divisor`."""

    encoder: ClipEncoder
    factor = divisor = 1.0

    def frame_scores(self, images: Sequence[Image.Image], owners: Sequence[int], texts: Sequence[str]) -> Tensor:
        return self.factor * self.encoder.cosines(images, owners, texts) / self.divisor


def load_head(state: Mapping[str, Tensor], width: int, key: str, path: str) -> nn.Module:
    """A head in fp32 from its tensors, `layers.0.weight` and so on: features [N, D] -> numbers [N]. The dropouts of the
    published heads, off when scoring, keep their places 1, 3 and 5. Errors as `load_state`."""
    linears = [nn.Linear(one, other) for one, other in itertools.pairwise((width, *HEAD_SIZES))]
    places = [part for linear in linears[:3] for part in (linear, nn.Identity())]
    layers = nn.Sequential(*places, *linears[3:])
    head = nn.Sequential(OrderedDict(layers=layers, numbers=nn.Flatten(0))).eval().requires_grad_(False)
    load_state(head, {name: tensor.float() for name, tensor in state.items()}, key, path, "a head")
    return head


def load_state(module: nn.Module, state: Mapping[str, Tensor], key: str, path: str, kind: str) -> None:
    """Give a network these tensors, without a copy. ValueError if a tensor is missing, too many or of another shape."""
    own = module.state_dict()
    shapes = sorted(name for name in own if name in state and own[name].shape != state[name].shape)
    refuse(key, path, kind, sorted(set(own) - set(state)), sorted(set(state) - set(own)), shapes)
    module.load_state_dict(dict(state), assign=True)


def renamed(name: str, rules: Sequence[tuple[str, str]]) -> str:
    """A tensor's name after every rule, a regular expression and what takes the place of its match, in order."""
    for pattern, new in rules:
        name = re.sub(pattern, new, name)
    return name


def clip_pixels(pixels: NDArray[np.uint8] | Tensor) -> Tensor:
    """Colours [..., H, W, 3] of 0..255 -> [..., 3, H, W] fp32, standardised as CLIP's pixels are."""
    from transformers.utils.constants import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD

    unit_pixels = torch.as_tensor(pixels).movedim(-1, -3).float() / 255
    mean, std = (torch.tensor(values)[:, None, None] for values in (OPENAI_CLIP_MEAN, OPENAI_CLIP_STD))
    return (unit_pixels - mean) / std


def unit(features: Tensor) -> Tensor:
    """Features of length 1, in fp32."""
    features = features.float()
    return features / features.norm(dim=-1, keepdim=True)


def load_model(model_class: Any, source: Path | None, key: str, **options: Any) -> Any:
    """A transformers model in fp32 on the CPU, every tensor of which comes from the weights in the folder `source`, or
    in `options`, which then hold `config` and `state_dict`. ValueError if a tensor is missing, too many or of another
    shape, or there are no weights."""
    with refusing(f"{key} must hold the weights of a {model_class.__name__}", str(source), RIGHT):
        model, info = model_class.from_pretrained(
            source, **options, dtype=torch.float32, output_loading_info=True, ignore_mismatched_sizes=True
        )
    shapes = sorted(name for name, *_ in info["mismatched_keys"])
    place = "the weights" if source is None else str(source)
    refuse(key, place, model_class.__name__, sorted(info["missing_keys"]), sorted(info["unexpected_keys"]), shapes)
    return model


def refuse(
    key: str, path: str, kind: str, missing: Sequence[str], unexpected: Sequence[str], shapes: Sequence[str]
) -> None:
    """Raise ValueError if tensors of weights are missing, too many, or of another shape, with their names."""
    found = {"missing": missing, "unexpected": unexpected, "of another shape": shapes}
    faults = [f"{fault}: {first_of(names, 6)}" for fault, names in found.items() if names]
    require(
        not faults,
        f"{key} must hold the tensors of {kind} and no others",
        path,
        f"{'; '.join(faults)}; check that it is the checkpoint you mean",
    )


def load_weights(path: Path, key: str) -> Mapping[str, Any]:
    """Content of a PyTorch file of tensors, on the CPU; no code in it is run. ValueError if it holds something else."""
    with refusing(f"{key} must be a PyTorch file of tensors", str(path), "fetch it again"):
        found = torch.load(path, map_location="cpu", weights_only=True)
    require(isinstance(found, Mapping), f"{key} must hold tensors by name", str(path), RIGHT)
    return found


def load_tokenizer(place: Path, key: str) -> Any:
    from transformers import AutoTokenizer

    with refusing(f"{key} must hold a tokenizer", str(place), RIGHT):
        return AutoTokenizer.from_pretrained(place)


def load_processor(place: Path, key: str, class_name: str = "CLIPImageProcessorPil") -> Prepare:
    """The picture processor of a folder, in its Pillow form. `class_name`: its class in transformers.
    AutoImageProcessor would take another one where torchvision is installed."""
    import transformers

    with refusing(f"{key} must hold preprocessor_config.json", str(place), RIGHT):
        processor = getattr(transformers, class_name).from_pretrained(place)
    return lambda image: processor(images=image, return_tensors="pt")["pixel_values"][0]
