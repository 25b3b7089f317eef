# SPDX-License-Identifier: Apache-2.0
"""FLUX.1 Kontext [dev]: text and at most one image to image, as diffusers' `FluxKontextPipeline` runs it.

Network, text encoders, schedule and decoding are FLUX.1's (`flux.py`). The network reads the tokens of the picture,
then of the image (`sources.py`), which have the places of a picture and 1 in front of them, where the picture has 0.
The text encoders do not read the image. Without one it is text to image.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from verl_digen.inputs.images import PromptInputs
from verl_digen.inputs.sizes import preferred_size
from verl_digen.models.flux import Flux
from verl_digen.models.sources import ReadsImages
from verl_digen.models.spec import ModelSpec, VllmOmniServing
from verl_digen.types import Condition, Geometry


class FluxKontext(ReadsImages, Flux):
    spec: ModelSpec = replace(
        Flux.spec,
        title="FLUX.1 Kontext",
        example="black-forest-labs/FLUX.1-Kontext-dev",
        num_images=(0, 1),
        image_sizes="flux_kontext",
        encodes_images=("encoder.", "quant_conv."),
        selftest={"_auto_resize": False},  # the self-test's image has the size at which it is read
        sequence=None,
        vllm_omni=VllmOmniServing(pipeline="FluxKontextPipeline", mixin=".edit_pipelines:FluxKontextRecording"),
    )

    def encode_images(self, pipeline: Any, inputs: PromptInputs, device: torch.device) -> Condition:
        """Encode into {"source": [tokens of the image, channels]}."""
        # "3. Preprocess image" and `prepare_latents` of FluxKontextPipeline.
        image, processor = inputs.images[0].read(), pipeline.image_processor
        size = preferred_size(*image.size, inputs.image_px**2)
        pixels = processor.preprocess(processor.resize(image, *size), *size)
        latents = pipeline._encode_vae_image(pixels.to(device, pipeline.vae.dtype), None)
        return {"source": pipeline._pack_latents(latents, *latents.shape)[0]}

    def pipeline_size(self, geometry: Geometry) -> dict[str, Any]:
        return {**super().pipeline_size(geometry), "max_area": geometry.height_px * geometry.width_px}

    def _image_ids(self, geometry: Geometry, dtype: torch.dtype) -> Tensor:
        return torch.cat([super()._image_ids(geometry, dtype), self.source_ids(geometry, dtype)])

    def source_ids(self, geometry: Geometry, dtype: torch.dtype) -> Tensor:
        """[tokens of all images, 3] places, on the host."""
        # `prepare_latents` of FluxKontextPipeline.
        places = super()._image_ids
        found = [torch.empty(0, 3, dtype=dtype), *(places(Geometry(*size), dtype) for size in geometry.sources)]
        ids = torch.cat(found)
        ids[:, 0] = 1
        return ids
