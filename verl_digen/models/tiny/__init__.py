# SPDX-License-Identifier: Apache-2.0
"""Tiny checkpoints with random weights in the diffusers format: every part of the real one, built in a second, for
checks of numerics without a download.

Weights are drawn wide enough that a velocity measurably depends on the prompt, on sigma and on every position;
otherwise a comparison could not fail.
"""

import importlib
from pathlib import Path

BUILDERS: dict[str, str] = {
    "flux2_klein": "verl_digen.models.tiny.flux2_klein:make",
    "flux_dev": "verl_digen.models.tiny.flux:make_dev",
    "flux_kontext": "verl_digen.models.tiny.flux:make_kontext",
    "flux_schnell": "verl_digen.models.tiny.flux:make_schnell",
    "hunyuan_video": "verl_digen.models.tiny.hunyuan_video:make",
    "hunyuan_video15": "verl_digen.models.tiny.hunyuan_video15:make",
    "hunyuan_video15_i2v": "verl_digen.models.tiny.hunyuan_video15:make_i2v",
    "ltx2": "verl_digen.models.tiny.ltx2:make",
    "qwen_image": "verl_digen.models.tiny.qwen_image:make",
    "qwen_image21": "verl_digen.models.tiny.qwen_image21:make",
    "qwen_image_edit": "verl_digen.models.tiny.qwen_image_edit:make_single",
    "qwen_image_edit_plus": "verl_digen.models.tiny.qwen_image_edit:make",
    "sd3": "verl_digen.models.tiny.sd3:make",
    "wan2.1": "verl_digen.models.tiny.wan:make_2_1",
    "wan2.1_i2v": "verl_digen.models.tiny.wan_image:make_2_1",
    "wan2.2_a14b": "verl_digen.models.tiny.wan:make_2_2_a14b",
    "wan2.2_i2v_a14b": "verl_digen.models.tiny.wan_image:make_2_2_a14b",
    "wan2.2_ti2v_5b": "verl_digen.models.tiny.wan:make_2_2_ti2v_5b",
    "wan2.2_ti2v_5b_i2v": "verl_digen.models.tiny.wan_image:make_2_2_ti2v_5b",
    "z_image": "verl_digen.models.tiny.z_image:make",
}
"""Name -> "module:function" that builds the diffusers pipeline. `digen doctor --selftest` lists the names without
importing torch."""


def build_tiny(name: str, path: str | Path, seed: int = 0) -> Path:
    """Write the tiny checkpoint `name` to the folder `path`; the same weights for the same seed. ValueError for an
    unknown name; lists the known ones."""
    if name not in BUILDERS:
        raise ValueError(f"unknown tiny checkpoint {name!r}; known ones: {', '.join(sorted(BUILDERS))}")
    import torch  # takes a second, and the names above are used without it

    module, _, function = BUILDERS[name].partition(":")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        getattr(importlib.import_module(module), function)().save_pretrained(path)
    return Path(path)
