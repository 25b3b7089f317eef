# SPDX-License-Identifier: Apache-2.0
"""Let vLLM-Omni's Wan pipelines be imported without torchvision.

Limitation:  vllm_omni.diffusion.models.wan2_2 imports its image- and speech-to-video pipelines, which import
             torchvision at module level. Image to video calls one function of it, for the image of a warm-up.
Effect:      without this, Wan cannot be served with a CPU build of PyTorch, where the torchvision that vLLM installs
             cannot be imported and must be uninstalled.
Affects:     vllm-omni >=0.28,<0.31
Remove when: that package can be imported without torchvision; tests/vllm_omni/test_patches.py::
             test_importing_wan_imports_torchvision fails then.
"""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

import numpy as np
import torch
from packaging.specifiers import SpecifierSet
from PIL import Image
from torch import Tensor

from verl_digen.patches import is_for

VERSIONS = SpecifierSet(">=0.28,<0.31")
PIPELINES = frozenset({"WanImageToVideoPipeline", "WanPipeline"})
"""Names in vLLM-Omni's registry."""
PACKAGE = "vllm_omni.diffusion.models.wan2_2"
FUNCTIONAL = "torchvision.transforms.functional"
STUBS = ("torchvision", "torchvision.transforms", FUNCTIONAL)


def apply() -> None:
    """Import the package; if torchvision is not installed, with a stub of it during the import, whose only function is
    `to_tensor`."""
    if PACKAGE in sys.modules or find_spec("torchvision") is not None or not is_for(__name__, "vllm-omni", VERSIONS):
        return
    from transformers.utils.import_utils import is_torchvision_available

    is_torchvision_available()  # caches its first answer, which must not be about the stub
    for name in STUBS:
        stub = ModuleType(name)
        stub.__spec__ = ModuleSpec(name, None)
        sys.modules[name] = stub
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, stub)
    sys.modules[FUNCTIONAL].to_tensor = _to_tensor  # type: ignore[attr-defined]
    try:
        importlib.import_module(PACKAGE)
    finally:
        for name in STUBS:
            del sys.modules[name]


def _to_tensor(image: Image.Image) -> Tensor:
    """[3, H, W] in [0, 1] of an RGB image, as torchvision's function of this name."""
    return torch.from_numpy(np.array(image)).movedim(-1, 0) / 255
