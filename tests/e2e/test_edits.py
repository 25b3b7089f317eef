# SPDX-License-Identifier: Apache-2.0
"""Models that read images through verl's main: images in a parquet file, and two shapes of them; one run in CI."""

import io
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from drawn_scenes import caption, draw, parse_caption
from PIL import Image

from tests.e2e.conftest import SHAPES, assert_succeeded, run_main, steps_of
from tests.grid import in_grid
from tests.tiny_models import build_tiny

pytestmark = [pytest.mark.e2e, pytest.mark.long]

WANTED = ("a red circle on the left on a gray background", "two blue squares on a white background")
SIZES = ((64, 64), (128, 64))
REWARDS = (
    f"digen.reward.functions={{shapes: {{weight: 0.8, reward: {SHAPES}}}, "
    "image_similarity: {weight: 0.2, pixel_weight: 1.0}}"
)
"""The instruction is followed, and the rest is kept."""
LORA = ("actor_rollout_ref.model.lora_rank=4",)
TWICE = ("actor_rollout_ref.actor.ppo_mini_batch_size=2", "digen.kl.coef=0.01")
"""Two updates per batch, with a reference."""


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


@dataclass(frozen=True)
class Case:
    """An edit model."""

    name: str
    """Name in `verl_digen.models.tiny.BUILDERS`."""
    rule: str
    """Its `digen.sampling.image_sizes`."""
    recipe: str
    second: tuple[int, int]
    """(width, height) px of a picture about an image of the second shape."""
    options: tuple[str, ...] = ()


CASES = (
    Case("flux2_klein", "flux2", "digen_flowgrpo", (80, 32), (*LORA, *TWICE, "digen.sampling.true_cfg_scale=2.0")),
    *in_grid(
        [
            Case("qwen_image_edit_plus", "qwen_image_edit", "digen_flowgrpo", (96, 32)),
            Case("flux_kontext", "flux_kontext", "[digen_flowgrpo,disaggregated]", (80, 32), LORA),
        ]
    ),
)

UNSERVED = in_grid([Case("qwen_image21", "qwen_image_edit", "digen_flowgrpo", (96, 32), LORA)])
"""Models that vLLM-Omni does not generate with."""


@pytest.mark.parametrize("case", [*CASES, *UNSERVED], ids=lambda case: case.name)
def test_an_edit_model_trains_on_images_of_two_shapes_and_shows_them(case: Case, tmp_path: Path) -> None:
    train_edits(case, tmp_path, case.recipe)


def train_edits(case: Case, tmp_path: Path, recipe: str) -> None:
    """Train an edit model on images of two shapes, and look at what is shown."""
    checkpoint = build_tiny(case.name, tmp_path / "checkpoint")
    prompts = write_prompts(tmp_path / "prompts.parquet", 8)
    run = run_main(
        tmp_path / "run",
        f"actor_rollout_ref.model.path={checkpoint}",
        f"data.train_files={prompts}",
        f"data.val_files={prompts}",
        REWARDS,
        "digen.sampling.size_from_image=true",
        "digen.sampling.image_px=64",
        f"digen.sampling.image_sizes={case.rule}",
        "digen.num_logged_groups=1",
        "digen.logged_groups_every=1",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "trainer.total_training_steps=2",
        "trainer.val_before_train=true",
        *case.options,
        recipe=recipe,
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
    width, height = case.second
    expected = {0: (64 + 64, 64), 1: (2 * height + width, height)}
    assert shown == expected, "each picture has its image's shape, and stands beside it"
    trained = list((run.run_dir / "images").glob("train_*/*.png"))
    assert trained and all(Image.open(path).width in (128, 2 * height + width) for path in trained)


@pytest.mark.grid
@pytest.mark.parametrize(
    ("name", "rule"),
    [("wan2.1_i2v", "wan"), ("wan2.2_ti2v_5b", "wan_ti2v"), ("hunyuan_video15_i2v", "hunyuan_video15")],
)
def test_videos_continue_images_of_two_shapes(tmp_path: Path, name: str, rule: str) -> None:
    train_continued(tmp_path, name, rule, "digen_flowgrpo")


def train_continued(tmp_path: Path, name: str, rule: str, recipe: str, *overrides: str) -> None:
    """Train with guidance, whose negative branch has the images too."""
    checkpoint = build_tiny(name, tmp_path / "checkpoint")
    prompts = write_prompts(tmp_path / "prompts.parquet", 8)
    run = run_main(
        tmp_path / "run",
        f"actor_rollout_ref.model.path={checkpoint}",
        "actor_rollout_ref.model.lora_rank=4",
        f"data.train_files={prompts}",
        f"data.val_files={prompts}",
        "digen.reward.functions={jpeg_compressibility: 1.0}",
        "digen.sampling.size_from_image=true",
        f"digen.sampling.image_sizes={rule}",
        "digen.sampling.num_frames=5",
        "digen.sampling.true_cfg_scale=2.0",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "trainer.total_training_steps=2",
        "trainer.val_before_train=true",
        *overrides,
        recipe=recipe,
    )
    assert_succeeded(run)
    for row in steps_of(run):
        assert row["rollout/log_prob_gap_max"] <= 1e-4
        assert row["actor/grad_norm"] > 0 and math.isfinite(row["actor/grad_norm"])
        assert row["actor/num_rows"] == 4 * 4 * 5, "prompts x samples x trained steps"
    shapes = set()
    for number in range(2):
        with Image.open(run.run_dir / "images" / "step_000000" / f"val-{number:05d}.gif") as video:
            shapes.add(video.size)
    assert (64, 64) in shapes and any(width > height for width, height in shapes), "each video has its image's shape"
