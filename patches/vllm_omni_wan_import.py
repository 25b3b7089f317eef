# SPDX-License-Identifier: Apache-2.0
"""Let vLLM-Omni's text-to-video pipeline of Wan be imported where there is no torchvision.

Limitation:  vllm_omni.diffusion.models.wan2_2 imports its image- and speech-to-video pipelines, too, which import
             torchvision at their top.
Effect:      without this, Wan cannot be served with a CPU build of PyTorch, where the torchvision that vLLM brings
             cannot be imported and has to go.
Affects:     vllm-omni ==0.28.*
Remove when: that package can be imported without torchvision; tests/vllm_omni/test_patches.py::
             test_importing_wan_imports_torchvision fails then.
"""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

from packaging.specifiers import SpecifierSet

from verl_digen.patches import is_for

VERSIONS = SpecifierSet("==0.28.*")
PIPELINE = "WanPipeline"
"""In vLLM-Omni's registry."""
PACKAGE = "vllm_omni.diffusion.models.wan2_2"
STUBS = ("torchvision", "torchvision.transforms", "torchvision.transforms.functional")


def apply() -> None:
    """Import the package, with an empty torchvision while that lasts if there is none."""
    if PACKAGE in sys.modules or find_spec("torchvision") is not None or not is_for(__name__, "vllm-omni", VERSIONS):
        return
    from transformers.utils.import_utils import is_torchvision_available

    is_torchvision_available()  # remembers its first answer, which must not be about the stub
    for name in STUBS:
        stub = ModuleType(name)
        stub.__spec__ = ModuleSpec(name, None)
        sys.modules[name] = stub
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, stub)
    try:
        importlib.import_module(PACKAGE)
    finally:
        for name in STUBS:
            del sys.modules[name]
