# SPDX-License-Identifier: Apache-2.0
"""Scorers of Stable Diffusion 3.5's latents (DiNa-LRM, "diffusion reward model") in the form of verl-omni's client
(github.com/verl-project/verl-omni, `drm_latent_scorer`, protocol version 1).

POST to the URL as it is given, with the header `x-drm-protocol-version: 1`; the body is a safetensors file:

| tensor | shape, dtype | |
| --- | --- | --- |
| `latents` | [B, C, H/8, W/8] | final latents, in the dtype they were sampled in |
| `prompt_embeds`, `pooled_prompt_embeds` | [B, L, D], [B, E] | the condition that they were generated with |
| `u` | [B] fp32 | noise level at which the scorer looks at them |
| `seeds` | [B] int64 | seed of that noise; left out where `noise_seed` is null |

Answer: JSON `{"protocol_version": "1", "raw_scores": [number per sample]}`. The score is raw x `score_scale` +
`score_bias`; detail `raw`. verl-omni's client sends one sample per request, so that is the default here.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from safetensors.torch import save

from verl_digen.require import In, require
from verl_digen.reward.base import Result
from verl_digen.reward.servers.answers import Answer, Declined, Request, entry_of, json_of, scores_of, shown
from verl_digen.reward.servers.protocol import Protocol, ProtocolSettings
from verl_digen.types import RewardInput, SampleLatents

VERSION = "1"
HEADER = "x-drm-protocol-version"
PARTS = ("embeds", "pooled")
"""Tensors of a condition of Stable Diffusion 3."""


@dataclass(frozen=True)
class DrmSettings(ProtocolSettings):
    """Settings of `protocol: drm_latents`."""

    samples_per_request: int = 1
    """Maximum samples of one request."""
    noise_level: Annotated[float, In("[0, 1]")] = 0.4
    """Noise level of the scorer, in [0, 1]."""
    noise_seed: int | None = 0
    """Seed of its noise; null leaves it to the server, and equal samples may score differently."""
    score_scale: Annotated[float, In("(-inf, inf)")] = 1.0
    """Factor of the raw score."""
    score_bias: Annotated[float, In("(-inf, inf)")] = 0.0
    """Summand, after the factor."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.score_scale != 0, "score_scale must not be 0", self.score_scale, "leave it out")


class DrmLatents(Protocol):
    """See the module."""

    settings = DrmSettings
    reads_latents = True

    def kind(self, sample: RewardInput) -> Hashable:
        """Latents of one request have one shape and dtype, and so have conditions."""
        latents = latents_of(sample)
        tensors = (latents.final, *(latents.condition[name] for name in PARTS))
        return tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors)

    def request(self, batch: Sequence[RewardInput]) -> Request:
        """Encode samples of one shape."""
        all_latents = [latents_of(sample) for sample in batch]
        embeds, pooled = (torch.stack([one.condition[name] for one in all_latents]) for name in PARTS)
        tensors = {
            "latents": torch.stack([one.final for one in all_latents]),
            "prompt_embeds": embeds,
            "pooled_prompt_embeds": pooled,
            "u": torch.full((len(batch),), self.config.noise_level),
        }
        if self.config.noise_seed is not None:
            tensors["seeds"] = torch.full((len(batch),), self.config.noise_seed, dtype=torch.int64)
        return Request("", save(tensors), headers={HEADER: VERSION})

    def read(self, answer: Answer, batch: Sequence[RewardInput]) -> list[Result]:
        """Read the raw scores."""
        found = json_of(answer)
        version = entry_of(found, "protocol_version")
        if version != VERSION:
            raise Declined(f"protocol_version must be {VERSION!r}, got {shown(version)}")
        raw = scores_of(found, "raw_scores", len(batch))
        return [{"score": one * self.config.score_scale + self.config.score_bias, "raw": one} for one in raw]


def latents_of(sample: RewardInput) -> SampleLatents:
    """The sample's latents.

    Raises:
        ValueError: it has none, or no condition of Stable Diffusion 3.
    """
    latents = sample.latents
    if latents is None:
        raise ValueError("protocol drm_latents needs latents, which a picture from a file has not; score in a run")
    if latents.final.ndim != 3 or not set(PARTS) <= set(latents.condition):
        raise ValueError(
            "protocol drm_latents needs latents [C, H, W] and a condition with embeds and pooled, those of Stable "
            f"Diffusion 3, got {tuple(latents.final.shape)} and {sorted(latents.condition)}; use a scorer of pixels"
        )
    return latents


PROTOCOL = DrmLatents
