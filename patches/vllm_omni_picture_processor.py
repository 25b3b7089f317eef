# SPDX-License-Identifier: Apache-2.0
"""Let vLLM-Omni's Qwen-Image-Edit pipelines be made with a given processor of images.

Limitation:  they load transformers' Qwen2VLProcessor, whose parts for videos and, by default, for images need
             torchvision.
Effect:      without this, they cannot be made with a CPU build of PyTorch, where the torchvision that vLLM installs
             cannot be imported; elsewhere torchvision resizes images, and conditions differ from those of a `diffusers`
             replica, which prepares them with PIL.
Affects:     vllm-omni >=0.28,<0.31
Remove when: the processor is an argument of the pipelines; tests/vllm_omni/test_patches.py::
             test_an_edit_pipeline_loads_its_own_processor fails then.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

from packaging.specifiers import SpecifierSet

from verl_digen.patches import is_for

VERSIONS = SpecifierSet(">=0.28,<0.31")
NAME = "Qwen2VLProcessor"


@contextmanager
def made_of_pictures(pipeline_class: type[Any], processor: Any) -> Iterator[None]:
    """Make a pipeline of vLLM-Omni, created in the context, use `processor`.

    Args:
        pipeline_class: a Qwen-Image-Edit pipeline of vLLM-Omni, or a subclass of one.
    """
    if not is_for(__name__, "vllm-omni", VERSIONS):
        yield
        return
    module = module_of(pipeline_class)
    own = getattr(module, NAME)
    setattr(module, NAME, SimpleNamespace(from_pretrained=lambda *args, **kwargs: processor))
    try:
        yield
    finally:
        setattr(module, NAME, own)


def module_of(pipeline_class: type[Any]) -> ModuleType:
    """Return the module of vLLM-Omni in which the pipeline is defined."""
    modules = [sys.modules[base.__module__] for base in pipeline_class.__mro__]
    return next(module for module in modules if module.__name__.startswith("vllm_omni.") and hasattr(module, NAME))
