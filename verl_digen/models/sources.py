# SPDX-License-Identifier: Apache-2.0
"""Networks that read a prompt's images as tokens behind the picture's; and the latents of a video's first frame.

A condition has "source": packed latents of the VAE's most likely encoding, [tokens of all images, channels], images in
the order of `Geometry.sources`; none without images. They are encoded with the prompt, once per content. All rows of a
forward have one geometry, so that they have images of the same sizes.
"""

import torch
from torch import Tensor, nn

from verl_digen.models.base import Collated, DiffusionModel
from verl_digen.types import Geometry


class ReadsImages(DiffusionModel):
    """A base in front of the network's own base: the images' tokens go through that base's `predict`."""

    def num_source_tokens(self, geometry: Geometry) -> int:
        return sum(self.num_tokens(Geometry(height, width)) for height, width in geometry.sources)

    def image_conditions(self, geometry: Geometry) -> dict[str, tuple[int, ...]]:
        return {"source": (self.num_source_tokens(geometry), self._num_channels)}

    def predict(
        self, transformer: nn.Module, latents: Tensor, sigmas: Tensor, condition: Collated, geometry: Geometry
    ) -> Tensor:
        source = self.source_of(condition, geometry)
        joined = latents if source is None else torch.cat([latents, source.to(latents.dtype)], dim=1)
        return super().predict(transformer, joined, sigmas, condition, geometry)[:, : latents.shape[1]]

    def source_of(self, condition: Collated, geometry: Geometry) -> Tensor | None:
        """[N, tokens of all images, channels], None without; RuntimeError if the images are not of `geometry`."""
        source = condition.get("source")
        num_given = 0 if source is None else source.shape[1]
        if num_given != self.num_source_tokens(geometry):
            raise RuntimeError(
                f"a condition must have {self.num_source_tokens(geometry)} tokens of images for {geometry}, got "
                f"{num_given}; encode its images with the `image_px` of its request"
            )
        return source


def frame_of(condition: Collated, shape: tuple[int, ...] | None, geometry: Geometry) -> Tensor | None:
    """Latents [N, *shape] of the image that videos of `geometry` continue, None where `shape` is; RuntimeError if it
    has another size."""
    source = condition.get("source")
    found = None if source is None else tuple(source.shape[1:])
    if found != shape:
        raise RuntimeError(
            f"a condition must have the latents of an image, {shape}, for {geometry}, got {found}; encode it with "
            "the `size` of its request"
        )
    return source
