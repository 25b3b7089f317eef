# SPDX-License-Identifier: Apache-2.0
"""HunyuanVideo 1.5: image to video, as diffusers' `HunyuanVideo15ImageToVideoPipeline` runs it; all else is as in
`hunyuan_video15.py`.

The network reads, in further channels, the image's latents as the first frame's, and a mask of that frame; and the
image's tokens from SigLIP beside the text's. The image is scaled until it covers the video's size, and its middle is
read. The pipeline itself chooses the size, one of a list, from the image's shape and its network's `target_size`:
`digen.sampling.size_from_image`, with height_px and width_px of `target_size`.
"""

from dataclasses import replace
from typing import Any

import torch
from diffusers.pipelines.hunyuan_video1_5.image_processor import HunyuanVideo15ImageProcessor
from diffusers.pipelines.hunyuan_video1_5.pipeline_hunyuan_video1_5_image2video import (
    HunyuanVideo15ImageToVideoPipeline,
)
from torch import Tensor, nn
from transformers import SiglipVisionConfig, SiglipVisionModel
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from verl_digen.inputs.images import PromptInputs
from verl_digen.models.base import Collated
from verl_digen.models.hunyuan_video15 import HunyuanVideo15
from verl_digen.models.sources import frame_of
from verl_digen.models.spec import MODULATION, VllmOmniServing
from verl_digen.types import Condition, Geometry

# Functions of the class, as in hunyuan_video15.py.
encode_frame = HunyuanVideo15ImageToVideoPipeline._get_image_latents
encode_tokens = HunyuanVideo15ImageToVideoPipeline._get_image_embeds


class HunyuanVideo15ImageToVideo(HunyuanVideo15):
    spec = replace(
        HunyuanVideo15.spec,
        title="HunyuanVideo 1.5 image to video",
        example="hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_i2v",
        components=(*HunyuanVideo15.spec.components, "image_encoder", "feature_extractor"),
        flops=replace(
            HunyuanVideo15.spec.flops,
            streams=(
                (r"context_embedder_2", "none"),
                (r"image_embedder", "vision"),
                (rf"{MODULATION}|time_embed", "row"),
                (r"context_embedder", "text"),
                (r"ff_context|attn\.add_|to_add_out", "context"),
            ),
        ),
        num_images=(1, 1),
        image_sizes="hunyuan_video15",
        encodes_images=("encoder.",),
        sequence=None,
        vllm_omni=VllmOmniServing(
            pipeline="HunyuanVideo15ImageToVideoPipeline",
            mixin=".frame_pipelines:HunyuanVideo15ImageRecording",
            unadapted="refiner_blocks",
        ),
    )

    # -- loading ------------------------------------------------------------------------------------------
    def load_pipeline(self, dtype: torch.dtype, *without: str) -> Any:
        pipeline = super().load_pipeline(dtype, *without)
        vae = self.load_vae(self.decoder_dtype(dtype))
        vae.decoder = nn.Identity()  # the decoder's own copy has it
        vision: Any = SiglipVisionModel.from_pretrained(self.path / "image_encoder", dtype=dtype)
        networks = {"vae": vae, "image_encoder": vision}
        pipeline.components |= networks
        vars(pipeline).update(networks, **self.pipeline_parts())
        return pipeline

    def encode_images(self, pipeline: Any, inputs: PromptInputs, device: torch.device) -> Condition:
        """Encode an image into "source" [C, H, W], its latents, and "image" [tokens, I]. `pipeline`: anything with its
        `vae`, `image_encoder` and `feature_extractor`. RuntimeError if the inputs do not name the size of the video."""
        # The beginning of HunyuanVideo15ImageToVideoPipeline.__call__.
        if inputs.size is None:
            raise RuntimeError("inputs with an image must name the size of the video; make them with `inputs_of`")
        processor = HunyuanVideo15ImageProcessor(vae_scale_factor=self._vae_scale, do_resize=False, do_convert_rgb=True)
        size = {"height": inputs.size[1], "width": inputs.size[2]}
        image: Any = processor.resize(inputs.images[0].read(), **size, resize_mode="crop")
        frame = encode_frame(pipeline.vae, processor, image, **size, device=device)[0, :, 0]
        tokens = encode_tokens(pipeline.image_encoder, pipeline.feature_extractor, image, device)[0]
        return {"source": frame, "image": tokens}

    def pipeline_parts(self) -> dict[str, Any]:
        """SigLIP's processor, which prepares images with PIL whether torchvision is installed or not."""
        return {"feature_extractor": SiglipImageProcessorPil.from_pretrained(self.path / "feature_extractor")}

    # -- the shape of the problem -------------------------------------------------------------------------
    def num_vision_tokens(self, geometry: Geometry) -> int:
        vision: Any = SiglipVisionConfig.from_pretrained(self.path / "image_encoder")
        return len(geometry.sources) * (vision.image_size // vision.patch_size) ** 2

    def image_conditions(self, geometry: Geometry) -> dict[str, tuple[int, ...]]:
        channels, _, *size = self.latent_shape(geometry)
        return {
            "source": (channels, *size),
            "image": (self.num_vision_tokens(geometry), self._network["image_embed_dim"]),
        }

    # -- the network --------------------------------------------------------------------------------------
    def predict(
        self, transformer: nn.Module, latents: Tensor, sigmas: Tensor, condition: Collated, geometry: Geometry
    ) -> Tensor:
        # `prepare_cond_latents_and_mask` of HunyuanVideo15ImageToVideoPipeline.
        source, tokens = self.image_inputs(latents, condition, geometry)
        read = {name: tensor for name, tensor in condition.items() if name != "source"} | {"image": tokens}
        first = torch.cat([source, torch.ones_like(latents[:, :1, 0])], dim=1).unsqueeze(2)
        others = first.new_zeros(*first.shape[:2], latents.shape[2] - 1, *first.shape[3:])
        joined = torch.cat([latents, torch.cat([first, others], dim=2)], dim=1)
        return self._run(transformer, joined, sigmas, read)

    def image_inputs(self, latents: Tensor, condition: Collated, geometry: Geometry) -> tuple[Tensor, Tensor]:
        """Inputs of the network that come from images: latents [N, C, H, W], and SigLIP's tokens [N, tokens, I]. Raises
        as `frame_of`."""
        source = frame_of(condition, (latents.shape[1], *latents.shape[3:]), geometry)
        assert source is not None
        return source.to(latents.dtype), condition["image"]
