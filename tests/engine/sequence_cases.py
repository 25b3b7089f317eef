# SPDX-License-Identifier: Apache-2.0
"""Engines whose ranks share rows, on the tiny checkpoints of every architecture that can be split."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import diffusers
import torch
from tensordict import TensorDict

from tests.engine.harness import SAMPLING, gradients, log_probs, make_batch, make_engine, perturb
from tests.models.cases import draw_image
from tests.tiny_models import build_tiny
from verl_digen.engine.engine import DiffusersFSDPEngine
from verl_digen.models.tiny.parts import draw_weights
from verl_digen.types import Geometry

VIDEO = Geometry(64, 64, 5)
PICTURE = Geometry(64, 64)
GLYPHS = (3, 32)
IMAGE = "source.png"
"""File name of a prompt's image in the checkpoint's folder."""
LONG_PROMPT = {"embeds": (400, 32)}
"""Prompt in place of one of 3 or 5 tokens: among 512, nearly all padding, the gradient of Wan's queries cancels to
1e-3 of the others', and keeps as little of fp32's precision."""
JOINT_LORA = ("attn.to_q", "attn.to_out.0", "attn.add_v_proj", "proj_out")


@dataclass(frozen=True)
class Case:
    """One tiny checkpoint and its rows; prompts of a tile differ in length, and no size divides them."""

    name: str
    geometry: Geometry = VIDEO
    extras: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Name -> shape of what a condition holds besides the prompt."""
    four_heads: dict[str, Any] = field(default_factory=dict)
    """Changes of the network's config that give it four heads."""
    lora: tuple[str, ...] = ("attn1.to_q", "attn1.to_out.0", "attn2.to_q", "proj_out")


CASES = {
    "wan2.1": Case("wan2.1", extras=LONG_PROMPT, four_heads={"num_attention_heads": 4, "attention_head_dim": 6}),
    "hunyuan_video": Case(
        "hunyuan_video",
        extras={"pooled": (16,)},
        four_heads={"num_attention_heads": 4, "attention_head_dim": 8, "rope_axes_dim": (4, 2, 2)},
        lora=JOINT_LORA,
    ),
    "hunyuan_video15": Case("hunyuan_video15", extras={"glyphs": GLYPHS}, lora=JOINT_LORA),
    "qwen_image": Case("qwen_image", PICTURE, lora=JOINT_LORA),
    "qwen_image_edit_plus": Case(
        "qwen_image_edit_plus", replace(PICTURE, sources=((32, 96),)), extras={"source": (12, 16)}, lora=JOINT_LORA
    ),
    "flux_dev": Case("flux_dev", PICTURE, extras={"pooled": (16,), "embeds": (6, 32)}, lora=JOINT_LORA),
    "wan2.2_a14b": Case("wan2.2_a14b", extras=LONG_PROMPT),
    "wan2.2_ti2v_5b": Case("wan2.2_ti2v_5b", extras=LONG_PROMPT),
}


def build(case: Case, path: Path, *, num_heads: int = 2) -> Path:
    """Write the case's checkpoint to `path`, with the image of its prompts if they have one."""
    build_tiny(case.name, path)
    if case.geometry.sources:
        draw_image(path / IMAGE, (60, 20))
    if num_heads == 4:
        config = path / "transformer" / "config.json"
        changed = json.loads(config.read_text()) | case.four_heads
        network = getattr(diffusers, changed["_class_name"]).from_config(changed)
        torch.manual_seed(0)
        draw_weights(network)
        network.save_pretrained(path / "transformer")
    return path


def split_engine(case: Case, path: Path, size: int, *, is_lora: bool, is_offloaded: bool) -> DiffusersFSDPEngine:
    """An engine of which `size` ranks share each row, with recomputation of the blocks."""
    geometry = case.geometry
    size_keys = {"height_px": geometry.height_px, "width_px": geometry.width_px, "num_frames": geometry.num_frames}
    tiles = {"samples_per_tile": 4, "steps_per_tile": 1}
    model: dict[str, Any] = {"enable_gradient_checkpointing": True, "enable_activation_offload": is_offloaded}
    if is_lora:
        model |= {"lora_rank": 4, "lora_alpha": 8, "target_modules": list(case.lora)}
    engine = make_engine(
        path, digen={"sampling": size_keys, "tsp": tiles}, model=model, fsdp={"ulysses_sequence_parallel_size": size}
    )
    perturb(engine)
    return engine


def batch_of(case: Case, path: Path) -> TensorDict:
    """Two groups of 3 samples, with two trained steps and with one: 9 rows."""
    sampling = replace(SAMPLING, geometry=case.geometry)
    return make_batch(path, windows=((0, 1), (2,)), sampling=sampling, extras=case.extras)


def gradient_and_log_probs(
    case: Case, path: Path, size: int, *, is_lora: bool, is_offloaded: bool = False
) -> dict[str, Any]:
    """Gradient, metrics and log-probs of the case's batch on the ranks of this process group."""
    engine, batch = split_engine(case, path, size, is_lora=is_lora, is_offloaded=is_offloaded), batch_of(case, path)
    found = log_probs(engine, batch)
    gradient, output = gradients(engine, batch)
    return {"log_probs": found, "gradient": gradient, "metrics": output["metrics"], "loss": sum(output["loss"])}
