# SPDX-License-Identifier: Apache-2.0
"""Checks that the limitations that shims work around still exist."""

import importlib
import inspect
import json
import sys
from importlib.metadata import version

import pytest
import torch

from tests.tiny_models import build_tiny
from verl_digen.patches import (
    vllm_cpu_activations,
    vllm_cpu_linear,
    vllm_omni_picture_processor,
    vllm_omni_wan_import,
    vllm_omni_wan_index,
    vllm_omni_z_image_sizes,
)


@pytest.mark.parametrize(
    ("shim", "package"),
    [
        (vllm_cpu_activations, "vllm"),
        (vllm_cpu_linear, "vllm"),
        (vllm_omni_picture_processor, "vllm-omni"),
        (vllm_omni_wan_import, "vllm-omni"),
        (vllm_omni_wan_index, "vllm-omni"),
        (vllm_omni_z_image_sizes, "vllm-omni"),
    ],
)
def test_the_installed_version_is_one_that_a_shim_was_made_for(shim, package):
    assert shim.VERSIONS.contains(version(package))


def test_an_activation_looks_up_an_operator_that_a_cpu_does_not_call():
    """When this fails, remove patches/vllm_cpu_activations.py."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers import activation

    activations = {"gelu_new": activation.NewGELU, "silu_and_mul": activation.SiluAndMul}
    assert set(activations) == set(vllm_cpu_activations.OPERATORS)
    with set_current_vllm_config(VllmConfig()):
        for name, found in activations.items():
            assert not hasattr(torch.ops._C, name), "this vLLM was built for a CPU, or the shim was applied before"
            with pytest.raises(AttributeError, match=name):
                found()
        vllm_cpu_activations.apply()
        for found in activations.values():
            assert found().forward_cpu(torch.ones(1, 4)).isfinite().all()


def test_a_linear_layer_packs_weights_with_an_operator_that_may_be_missing(monkeypatch):
    """When this fails, remove patches/vllm_cpu_linear.py."""
    from vllm.model_executor.layers import utils

    layer = torch.nn.Linear(64, 64, dtype=torch.bfloat16).requires_grad_(False)
    tokens = torch.randn(3, 64, dtype=torch.bfloat16)
    assert not hasattr(torch.ops._C, vllm_cpu_linear.OPERATOR), "this vLLM was built for a CPU"
    monkeypatch.setattr(utils, "check_cpu_sgl_kernel", utils.check_cpu_sgl_kernel)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: True)
    with pytest.raises(AttributeError, match=vllm_cpu_linear.OPERATOR):
        utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
    vllm_cpu_linear.apply()
    utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
    found = layer.cpu_linear(tokens, layer.weight, layer.bias)
    torch.testing.assert_close(found, layer(tokens), atol=2e-2, rtol=2e-2)


def test_importing_wan_imports_torchvision(monkeypatch):
    """When this fails, remove patches/vllm_omni_wan_import.py."""
    package = vllm_omni_wan_import.PACKAGE
    for name in [name for name in sys.modules if name == package or name.startswith(f"{package}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(ImportError, match="torchvision"):
        importlib.import_module(package)


def test_wan_takes_a_key_without_a_part_for_a_part(one_worker, tmp_path, monkeypatch):
    """When this fails, remove patches/vllm_omni_wan_index.py."""
    from vllm_omni.diffusion.data import OmniDiffusionConfig

    vllm_omni_wan_import.apply()
    from vllm_omni.diffusion.models.wan2_2 import pipeline_wan2_2_i2v as theirs

    read = theirs._load_json
    path = build_tiny("wan2.1_i2v", tmp_path)
    assert json.loads((path / "model_index.json").read_text())["transformer_2"] == vllm_omni_wan_index.NO_PART
    config = OmniDiffusionConfig.from_kwargs(model=str(path), dtype="float32")
    config.enrich_config()

    def sources() -> list[str]:
        return [source.subfolder for source in theirs.Wan22I2VPipeline(od_config=config).weights_sources]

    assert sources() == ["transformer", "transformer_2"]
    with vllm_omni_wan_index.without_missing_parts():
        assert sources() == ["transformer"]
    assert theirs._load_json is read


class Made(Exception):
    """Raised in place of building a network, with its sizes."""


def test_z_image_ignores_a_checkpoints_sizes(one_worker, tmp_path, monkeypatch):
    """When this fails, remove patches/vllm_omni_z_image_sizes.py."""
    from vllm_omni.diffusion.data import OmniDiffusionConfig
    from vllm_omni.diffusion.models.z_image import pipeline_z_image

    class Network:
        def __init__(self, dim: int = 0, n_layers: int = 0, **more: object):
            raise Made(dim, n_layers)

    monkeypatch.setattr(pipeline_z_image, "ZImageTransformer2DModel", Network)
    path = build_tiny("z_image", tmp_path)
    config = OmniDiffusionConfig.from_kwargs(model=str(path), dtype="float32")
    config.enrich_config()
    with pytest.raises(Made, match=r"\(0, 0\)"):
        pipeline_z_image.ZImagePipeline(od_config=config)
    sizes = json.loads((path / "transformer" / "config.json").read_text())
    with (
        vllm_omni_z_image_sizes.network_of_checkpoint(config),
        pytest.raises(Made, match=rf"\({sizes['dim']}, {sizes['n_layers']}\)"),
    ):
        pipeline_z_image.ZImagePipeline(od_config=config)


@pytest.mark.parametrize("name", ["QwenImageEditPipeline", "QwenImageEditPlusPipeline"])
def test_an_edit_pipeline_loads_its_own_processor(name):
    """When this fails, remove patches/vllm_omni_picture_processor.py."""
    from vllm_omni.diffusion.registry import DiffusionModelRegistry

    cls = DiffusionModelRegistry.models[name].load_model_cls()
    assert "Qwen2VLProcessor.from_pretrained" in inspect.getsource(cls.__init__)
    module = vllm_omni_picture_processor.module_of(cls)
    own = module.Qwen2VLProcessor
    with vllm_omni_picture_processor.made_of_pictures(cls, processor := object()):
        assert module.Qwen2VLProcessor.from_pretrained("a", subfolder="processor") is processor
    assert module.Qwen2VLProcessor is own
