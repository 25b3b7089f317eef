# SPDX-License-Identifier: Apache-2.0
"""The limitations that shims work around are still there."""

from __future__ import annotations

import inspect
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

from verl_digen.patches import vllm_cpu_activations, vllm_omni_wan_import, vllm_omni_z_image_sizes


@pytest.mark.parametrize(
    ("shim", "package"),
    [(vllm_cpu_activations, "vllm"), (vllm_omni_wan_import, "vllm-omni"), (vllm_omni_z_image_sizes, "vllm-omni")],
)
def test_the_installed_version_is_one_that_a_shim_was_made_for(shim, package):
    assert shim.VERSIONS.contains(version(package))


def test_an_activation_looks_up_an_operator_that_a_cpu_does_not_call():
    """When this fails, patches/vllm_cpu_activations.py can go."""
    from vllm.model_executor.layers import activation

    for name, found in {"gelu_new": activation.NewGELU, "silu_and_mul": activation.SiluAndMul}.items():
        made = inspect.getsource(found.__init__)
        assert "or current_platform.is_cpu()" in made and f"self.op = torch.ops._C.{name}" in made
        assert "return self.forward_native(x)" in inspect.getsource(found.forward_cpu)


def test_importing_wan_imports_torchvision():
    """When this fails, patches/vllm_omni_wan_import.py can go."""
    spec = find_spec("vllm_omni.diffusion.models")
    assert spec is not None and spec.submodule_search_locations is not None
    package = Path(spec.submodule_search_locations[0]) / "wan2_2"
    assert "from .pipeline_wan2_2_i2v import" in (package / "__init__.py").read_text()
    assert "\nimport torchvision" in (package / "pipeline_wan2_2_i2v.py").read_text()


def test_z_image_ignores_a_checkpoints_sizes():
    """When this fails, patches/vllm_omni_z_image_sizes.py can go."""
    from vllm_omni.diffusion.models.z_image.pipeline_z_image import ZImagePipeline

    made = "self.transformer = ZImageTransformer2DModel(quant_config=od_config.quantization_config)"
    assert made in inspect.getsource(ZImagePipeline.__init__)
