# SPDX-License-Identifier: Apache-2.0
"""Qwen2-VL with a head that reads scores off special tokens of the question, as in HPSv3 and VideoReward.

    picture or video, question with a special token per score -> Qwen2-VL -> hidden state of each token -> head

Checkpoints have the names of transformers 4.45, merged or with LoRA factors; `lm_head` is not used. Text positions are
counted through, also over the picture: both were trained so, and not with Qwen2-VL's own positions of three dimensions.
Pixels are scaled and cut into patches here: transformers does so for videos only where torchvision is installed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from verl_digen.models.checkpoint import in_one_dtype
from verl_digen.require import OneOf
from verl_digen.reward.base import checkpoint_folder
from verl_digen.reward.encoders import DESCRIPTIONS, DTYPES, clip_pixels, load_state, renamed

RENAMED = ((r"^model\.(?!visual|language_model)", "language_model."), (r"^model\.", ""))
"""Names of transformers 4.45 -> `Qwen2VLModel`'s, for `renamed`."""
QUESTION = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\n<|vision_start|>{pad}<|vision_end|>"
    "{question}<|im_end|>\n<|im_start|>assistant\n"
)
"""Qwen2-VL's chat template for one picture or video and one text."""
IMAGE_PAD, VIDEO_PAD = "<|image_pad|>", "<|video_pad|>"
PATCH, MERGE, TEMPORAL = 14, 2, 2
"""Side of a patch in px; patches per token along each side; frames per patch."""
FACTOR = PATCH * MERGE
"""Both sides of a frame are multiples of this, in px."""


@dataclass(frozen=True)
class Patches:
    """A picture or video for the vision tower."""

    values: Tensor
    """[N, 3 * TEMPORAL * PATCH * PATCH] fp32."""
    grid: tuple[int, int, int]
    """(frames / TEMPORAL, height / PATCH, width / PATCH); its product is N."""

    @property
    def num_tokens(self) -> int:
        """Tokens that it takes in the text."""
        return self.grid[0] * self.grid[1] * self.grid[2] // MERGE**2


def size_of(height: int, width: int, *, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """(height, width) in px to which a frame is scaled. ValueError if one side is over 200 times the other."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    return smart_resize(height, width, factor=FACTOR, min_pixels=min_pixels, max_pixels=max_pixels)


def scaled_picture(frame: NDArray[np.uint8], num_pixels: int) -> NDArray[np.uint8]:
    """A frame [H, W, 3] scaled to about `num_pixels` by Pillow's bicubic filter, as `qwen_vl_utils` scales pictures."""
    height, width = size_of(*frame.shape[:2], min_pixels=num_pixels, max_pixels=num_pixels)
    return np.asarray(Image.fromarray(frame).resize((width, height), Image.Resampling.BICUBIC))


def scaled_video(frames: NDArray[np.uint8], *, min_pixels: int, max_pixels: int) -> NDArray[np.uint8]:
    """Frames [F, H, W, 3] scaled by PyTorch's antialiased bicubic filter, as `qwen_vl_utils` scales videos."""
    size = size_of(*frames.shape[1:3], min_pixels=min_pixels, max_pixels=max_pixels)
    moved = torch.from_numpy(np.ascontiguousarray(frames)).permute(0, 3, 1, 2).float()
    scaled = torch.nn.functional.interpolate(moved, size, mode="bicubic", antialias=True)
    return scaled.round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).numpy()


def patches_of(frames: NDArray[np.uint8]) -> Patches:
    """Patches of frames [F, H, W, 3] whose sides are multiples of `FACTOR`; an odd last frame is repeated."""
    if len(frames) % TEMPORAL:
        frames = np.concatenate([frames, frames[-1:]])
    num_frames, height, width, channels = frames.shape
    grid = (num_frames // TEMPORAL, height // PATCH, width // PATCH)
    split = clip_pixels(np.ascontiguousarray(frames)).reshape(
        *(grid[0], TEMPORAL, channels), *(grid[1] // MERGE, MERGE, PATCH), *(grid[2] // MERGE, MERGE, PATCH)
    )
    ordered = split.permute(0, 3, 6, 4, 7, 2, 1, 5, 8)  # patches of one token side by side
    return Patches(ordered.reshape(-1, channels * TEMPORAL * PATCH * PATCH), grid)


@dataclass(frozen=True)
class QwenConfig:
    """Settings of every reward of this kind."""

    path: str
    """Weights: a folder, or "owner/repository" of the hub."""
    base: str
    """Folder or repository with config and tokenizer of the base model; its weights are not needed."""
    dtype: Annotated[str, OneOf(DTYPES)] = "bf16"
    """Dtype of the network: fp32, bf16 or fp16; the head is fp32."""


class QwenRegressor:
    """The network and its head, whose weights are `rm_head.*` in the state dict `weights`. `make_head`: width of the
    hidden state -> network from it to scores. `tokens`: special tokens to read scores at. `name`: the reward's.
    ValueError if names or shapes of the weights are not the model's."""

    def __init__(
        self,
        config: QwenConfig,
        name: str,
        weights: Mapping[str, Tensor],
        make_head: Callable[[int], nn.Module],
        tokens: Sequence[str],
        device: torch.device,
    ):
        from transformers import AutoTokenizer

        base = checkpoint_folder(config.base, f"{name}: base", DESCRIPTIONS)
        self._tokenizer: Any = AutoTokenizer.from_pretrained(base, padding_side="right")
        self._tokenizer.add_special_tokens({"additional_special_tokens": list(tokens)})
        self._token_ids = torch.tensor(self._tokenizer.convert_tokens_to_ids(list(tokens)), device=device)
        network, own_head = _split(weights)
        model = _load_model(base, network, f"{name}: path")
        self._head = make_head(model.config.text_config.hidden_size)
        load_state(self._head, own_head, f"{name}: path", "rm_head", "its head")
        self._head = self._head.to(device=device, dtype=torch.float32).eval()
        self._device, self._dtype = device, DTYPES[config.dtype]
        self._model = in_one_dtype(model, self._dtype).to(device).eval()

    @torch.no_grad()
    def scores(self, asked: Sequence[tuple[str, Patches]], *, is_video: bool) -> Tensor:
        """Scores of (question with every special token once, in order; its picture or video); [B, tokens, outputs] fp32
        on the CPU."""
        pad = VIDEO_PAD if is_video else IMAGE_PAD
        texts = [QUESTION.format(pad=pad * patches.num_tokens, question=question) for question, patches in asked]
        batch = self._tokenizer(texts, padding=True, return_tensors="pt").to(self._device)
        ids: Tensor = batch["input_ids"]
        is_score = (ids.unsqueeze(-1) == self._token_ids).any(-1)
        counts = is_score.sum(1)
        if not bool((counts == len(self._token_ids)).all()):
            raise ValueError(
                f"a prompt must not contain the special tokens of the question, got {counts.max().item()} of "
                f"{len(self._token_ids)}; take them out"
            )
        pixels = torch.cat([patches.values for _, patches in asked]).to(self._device, self._dtype)
        grid = torch.tensor([patches.grid for _, patches in asked], device=self._device)
        vision = (
            {"pixel_values_videos": pixels, "video_grid_thw": grid}
            if is_video
            else {"pixel_values": pixels, "image_grid_thw": grid}
        )
        positions = torch.arange(ids.shape[1], device=self._device).expand(3, *ids.shape)
        hidden = self._model(
            input_ids=ids, attention_mask=batch["attention_mask"], position_ids=positions, use_cache=False, **vision
        ).last_hidden_state
        return self._head(hidden[is_score].float()).view(len(asked), len(self._token_ids), -1).cpu()


def _split(weights: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(weights of the network under its own names, weights of the head)."""
    network: dict[str, Tensor] = {}
    head: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if name.startswith("rm_head."):
            head[name.removeprefix("rm_head.")] = weight
        elif not name.startswith("lm_head."):
            network[renamed(name, RENAMED)] = weight
    return network, head


def _load_model(base: Path, weights: Mapping[str, Tensor], key: str) -> Any:
    """The network with its weights; takes the memory of these alone."""
    from accelerate import init_empty_weights
    from transformers import AutoConfig, Qwen2VLModel

    config: Any = AutoConfig.from_pretrained(base)
    table = weights.get("language_model.embed_tokens.weight")
    if table is not None:
        config.text_config.vocab_size = table.shape[0]  # the special tokens were added
    with init_empty_weights():
        model = Qwen2VLModel(config)
    load_state(model, weights, key, str(base), "Qwen2-VL")
    return model
