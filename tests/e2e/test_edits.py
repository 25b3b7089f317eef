# SPDX-License-Identifier: Apache-2.0
"""An edit model through verl's main: images in a parquet file, two shapes of them, and two rewards."""

from __future__ import annotations

import io
import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from PIL import Image

from tests.e2e.conftest import assert_succeeded, run_main, steps_of
from tests.tiny_models import build_tiny
from verl_digen.reward.scorers.shapes.scene import caption, draw, parse_caption

pytestmark = [pytest.mark.e2e, pytest.mark.long]

WANTED = ("a red circle on the left on a gray background", "two blue squares on a white background")
SIZES = ((64, 64), (128, 64))
REWARDS = "digen.reward.functions={shapes: 0.8, image_similarity: {weight: 0.2, pixel_weight: 1.0}}"
"""The instruction is followed, and the rest is kept."""


def write_prompts(path: Path, num_prompts: int) -> Path:
    """Prompts with an image of a green triangle each, in the hub's form."""
    scene = parse_caption("a green triangle in the center on a black background")
    images = []
    for number in range(num_prompts):
        buffer = io.BytesIO()
        picture = Image.fromarray(draw(scene, 64, np.random.default_rng(number)))
        picture.resize(SIZES[number % 2]).save(buffer, format="PNG")
        images.append([{"bytes": buffer.getvalue(), "path": None}])
    assert all(caption(parse_caption(text)) == text for text in WANTED)
    kind = pa.list_(pa.struct({"bytes": pa.binary(), "path": pa.string()}))
    texts = [WANTED[number % 2] for number in range(num_prompts)]
    pyarrow.parquet.write_table(pa.table({"prompt": texts, "images": pa.array(images, kind)}), path)
    return path


def test_an_edit_model_trains_on_images_of_two_shapes_and_shows_them(tmp_path: Path) -> None:
    checkpoint = build_tiny("qwen_image_edit_plus", tmp_path / "checkpoint")
    prompts = write_prompts(tmp_path / "prompts.parquet", 8)
    run = run_main(
        tmp_path / "run",
        f"actor_rollout_ref.model.path={checkpoint}",
        f"data.train_files={prompts}",
        f"data.val_files={prompts}",
        REWARDS,
        "digen.sampling.size_from_image=true",
        "digen.sampling.image_px=64",
        "digen.num_logged_groups=1",
        "digen.logged_groups_every=1",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "trainer.total_training_steps=2",
        "trainer.val_before_train=true",
    )
    assert_succeeded(run)
    for row in steps_of(run):
        assert row["rollout/log_prob_gap_max"] <= 1e-4
        assert row["actor/grad_norm"] > 0 and math.isfinite(row["actor/grad_norm"])
        assert 0 < row["reward/image_similarity"] < 1 and 0 <= row["reward/shapes"] <= 1
        assert row["actor/num_rows"] == 4 * 4 * 5, "prompts x samples x trained steps"
    shown = {}
    for number in range(2):
        with Image.open(run.run_dir / "images" / "step_000000" / f"val-{number:05d}.png") as picture:
            shown[number] = picture.size
    assert shown == {0: (64 + 64, 64), 1: (64 + 96, 32)}, "each picture has its image's shape, and stands beside it"
    trained = list((run.run_dir / "images").glob("train_*/*.png"))
    assert trained and all(Image.open(path).width in (128, 160) for path in trained)
