# SPDX-License-Identifier: Apache-2.0
"""Let vLLM-Omni's Wan image-to-video pipeline read an index that names no second expert.

Limitation:  Wan22I2VPipeline.__init__ loads a second expert if the index has the key `transformer_2`, with
             [null, null], too, which diffusers writes for a checkpoint of one network.
Effect:      without this, Wan2.1 image to video as diffusers 0.35 and later save it cannot be loaded ("Cannot find any
             model weights"). The published checkpoints are older and lack the key.
Affects:     vllm-omni >=0.28,<0.31
Remove when: it reads the value; tests/vllm_omni/test_patches.py::test_wan_takes_a_key_without_a_part_for_a_part fails
             then.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from packaging.specifiers import SpecifierSet

from verl_digen.patches import is_for

VERSIONS = SpecifierSet(">=0.28,<0.31")
NO_PART = [None, None]
"""An index's entry for a part that the checkpoint does not have."""


@contextmanager
def without_missing_parts() -> Iterator[None]:
    """Make a Wan22I2VPipeline, created in the context, see only the parts that the checkpoint has."""
    if not is_for(__name__, "vllm-omni", VERSIONS):
        yield
        return
    from vllm_omni.diffusion.models.wan2_2 import pipeline_wan2_2_i2v

    module: Any = pipeline_wan2_2_i2v
    read = module._load_json

    def read_parts(*arguments: Any, **more: Any) -> dict[str, Any]:
        return {name: entry for name, entry in read(*arguments, **more).items() if entry != NO_PART}

    module._load_json = read_parts
    try:
        yield
    finally:
        module._load_json = read
