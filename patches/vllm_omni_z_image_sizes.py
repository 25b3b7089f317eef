# SPDX-License-Identifier: Apache-2.0
"""Let vLLM-Omni's Z-Image pipeline build its network with the checkpoint's sizes.

Limitation:  ZImagePipeline.__init__ builds its network with default sizes, those of the published checkpoints.
Effect:      without this, a checkpoint of another size cannot be loaded; its first tensor has another shape.
Affects:     vllm-omni >=0.28,<0.31
Remove when: ZImagePipeline reads the sizes; tests/vllm_omni/test_patches.py::test_z_image_ignores_a_checkpoints_sizes
             fails then.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from packaging.specifiers import SpecifierSet

from verl_digen.patches import is_for

if TYPE_CHECKING:
    from vllm_omni.diffusion.data import OmniDiffusionConfig

VERSIONS = SpecifierSet(">=0.28,<0.31")


@contextmanager
def network_of_checkpoint(od_config: OmniDiffusionConfig) -> Iterator[None]:
    """Make a ZImagePipeline, created in the context, use the sizes that vLLM-Omni has read into `od_config`."""
    if not is_for(__name__, "vllm-omni", VERSIONS):
        yield
        return
    from vllm_omni.diffusion.models.z_image import pipeline_z_image
    from vllm_omni.diffusion.utils.tf_utils import get_transformer_config_kwargs

    module: Any = pipeline_z_image
    network_class = module.ZImageTransformer2DModel
    sizes = get_transformer_config_kwargs(od_config.tf_model_config, network_class)
    module.ZImageTransformer2DModel = partial(network_class, **sizes)
    try:
        yield
    finally:
        module.ZImageTransformer2DModel = network_class
