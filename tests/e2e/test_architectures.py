# SPDX-License-Identifier: Apache-2.0
"""Every architecture through verl's main, from its tiny checkpoint: two steps of FlowGRPO, or of an objective of
finished pictures.

A run per architecture, two for the one with two experts; one of them in CI, all with `make test-grids`. Full weights
and LoRA, colocated and on separate pools, each meet pictures and videos. DiffusionNFT and AWM each meet a video model;
Wan2.1's network meets FlowGRPO as Wan2.2, and Stable Diffusion 3 in fp16 below.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from PIL import Image

from tests.e2e.conftest import Run, assert_succeeded, run_main, steps_of, trained_weights
from tests.grid import in_grid
from tests.tiny_models import build_tiny
from verl_digen.models import load_model

pytestmark = [pytest.mark.e2e, pytest.mark.long]

NUM_FRAMES, NUM_STEPS = 5, 2
RECIPES = {"colocated": ("digen_flowgrpo",), "disaggregated": ("digen_flowgrpo", "disaggregated")}
ODE_ONLY = ("awm", "nft")
"""Recipes whose samples come from the ODE, without log-probs."""


@dataclass(frozen=True)
class Case:
    """One run."""

    name: str
    """Name in `verl_digen.models.tiny.BUILDERS`."""
    placement: str
    is_lora: bool = False
    is_video: bool = False
    true_cfg_scale: float = 1.0
    num_frames: int = NUM_FRAMES
    has_sound: bool = False
    objective: str = ""
    """Recipe on top, one of `ODE_ONLY`; "" is FlowGRPO."""

    def __str__(self) -> str:
        objective = f", {self.objective}" if self.objective else ""
        return f"{self.name}, {'LoRA' if self.is_lora else 'full weights'}, {self.placement}{objective}"

    @property
    def recipe(self) -> str:
        names = (*RECIPES[self.placement], *((self.objective,) if self.objective else ()))
        return f"[{','.join(names)}]"


CASES = (Case("ltx2", "disaggregated", is_lora=True, is_video=True, true_cfg_scale=2.0, num_frames=9, has_sound=True),)
"""The run of CI: a video with sound."""
FURTHER = (
    Case("flux_dev", "disaggregated", is_lora=True),
    Case("hunyuan_video", "colocated", is_lora=True, is_video=True),
    Case("hunyuan_video15", "disaggregated", is_lora=True, is_video=True, true_cfg_scale=2.0),
    Case("qwen_image21", "colocated", is_lora=True, true_cfg_scale=2.0),
    Case("sd3", "colocated", true_cfg_scale=2.0, objective="awm"),
    Case("wan2.1", "disaggregated", is_lora=True, is_video=True, true_cfg_scale=2.0, objective="nft"),
    Case("wan2.2_a14b", "colocated", is_lora=True, is_video=True),
    Case("wan2.2_a14b", "disaggregated", is_video=True, true_cfg_scale=2.0),
    Case("wan2.2_ti2v_5b", "colocated", is_lora=True, is_video=True, objective="awm"),
    Case("z_image", "disaggregated"),
)


def overrides(case: Case, checkpoint: Path) -> list[str]:
    given = [
        f"actor_rollout_ref.model.path={checkpoint}",
        "digen.reward.functions={jpeg_compressibility: 1.0}",
        f"digen.sampling.true_cfg_scale={case.true_cfg_scale}",
        # a step is seen in the log-probs of the next one
        "actor_rollout_ref.actor.optim.lr=1e-3",
        f"trainer.total_training_steps={NUM_STEPS}",
        f"trainer.save_freq={NUM_STEPS}",
    ]
    if rule := load_model(checkpoint).spec.image_sizes:  # it may read images, which these prompts have none of
        given.append(f"digen.sampling.image_sizes={rule}")
    if case.is_lora:
        given.append("actor_rollout_ref.model.lora_rank=4")
    if case.objective == "awm":
        given.append("digen.forward.num_points=4")  # the six steps of these runs have four that it draws from
    if case.is_video:
        given += [
            f"digen.sampling.num_frames={case.num_frames}",
            f"trainer.test_freq={NUM_STEPS}",
            "trainer.val_before_train=true",
            "trainer.logger=[tensorboard]",
        ]
    return given


@pytest.mark.parametrize("case", [*CASES, *in_grid(FURTHER)], ids=str)
def test_an_architecture_trains_and_generation_agrees_with_training(case: Case, tmp_path: Path) -> None:
    checkpoint = build_tiny(case.name, tmp_path / "checkpoint")
    run = run_main(tmp_path / "run", *overrides(case, checkpoint), recipe=case.recipe)
    assert_succeeded(run)
    assert_trained_on_what_was_generated(case, run)
    assert_moved(case, checkpoint, trained_weights(run.run_dir, NUM_STEPS))
    if case.is_video:
        assert_shows_videos(case, run)


def assert_trained_on_what_was_generated(case: Case, run: Run) -> None:
    steps = steps_of(run)
    assert [row["step"] for row in steps] == [1, 2]
    for row in steps:
        assert all(math.isfinite(value) for name, value in row.items() if name.startswith(("reward/", "actor/")))
        assert row["reward/zero_spread_fraction"] < 1 and row["actor/grad_norm"] > 0
        assert ("rollout/log_prob_gap_max" in row) == (case.objective not in ODE_ONLY)
        assert row.get("rollout/log_prob_gap_max", 0.0) <= 1e-4
        if case.objective != "nft":  # which has no ratio
            assert row["actor/ratio_deviation_max"] == 0 and row["actor/ratio_deviation_min"] == 0
        num_points = 4 if case.objective == "awm" else 5
        assert row["actor/num_rows"] == 4 * 4 * num_points, "prompts x samples x trained steps, or noise levels"
        for pool in ("trainer", "generator"):
            assert row[f"perf/tflops_per_device/{pool}"] > 0
            assert f"perf/mfu/{pool}" not in row, "the peak of a CPU is not known"


def assert_moved(case: Case, checkpoint: Path, trained: dict[str, torch.Tensor]) -> None:
    """Assert that training changed every network of the checkpoint."""
    model = load_model(checkpoint)
    if case.is_lora:
        moved = {name for name, tensor in trained.items() if "lora_B" in name and tensor.count_nonzero()}
    else:
        start = model.load_transformer(torch.float32).state_dict()
        assert start.keys() == trained.keys()
        moved = {name for name, tensor in start.items() if (trained[name] - tensor).abs().max() > 1e-4}
    assert moved
    if len(model.experts) > 1:
        for expert in model.experts:
            assert any(f"{expert}." in name for name in moved), expert


def assert_shows_videos(case: Case, run: Run) -> None:
    for step in (0, NUM_STEPS):
        folder = run.run_dir / "images" / f"step_{step:06d}"
        assert folder.with_suffix(".png").is_file()
        with Image.open(folder / "val-00000.gif") as video:
            assert video.n_frames == case.num_frames and video.size == (64, 64)
        with Image.open(folder / "val-00000.png") as strip:
            assert strip.size == (4 * 64, 64)
        assert (folder / "val-00000.wav").is_file() == case.has_sound
    assert (run.run_dir / "images" / "before_after.png").is_file()
    assert list((run.run_dir / "tensorboard" / "pictures").iterdir())


FP16 = (
    "actor_rollout_ref.actor.fsdp_config.model_dtype=fp16",
    "actor_rollout_ref.actor.fsdp_config.mixed_precision={param_dtype: fp16, reduce_dtype: fp32, buffer_dtype: fp32}",
    "actor_rollout_ref.rollout.dtype=float16",
)


@pytest.mark.grid
def test_stable_diffusion_3_trains_in_fp16(tmp_path: Path) -> None:
    case = Case("sd3", "colocated", is_lora=True, true_cfg_scale=2.0)
    checkpoint = build_tiny(case.name, tmp_path / "checkpoint")
    run = run_main(tmp_path / "run", *overrides(case, checkpoint), *FP16, recipe=case.recipe)
    assert_succeeded(run)
    for row in steps_of(run):
        assert row["actor/loss_scale"] == 2.0**16 and row["actor/num_skipped_updates"] == 0
        assert row["actor/ratio_deviation_max"] == 0 and row["rollout/log_prob_gap_mean"] <= 1e-3
        assert row["rollout/log_prob_gap_to_bound"] < 1
        assert 0 < row["advantage/effective_samples"] <= row["advantage/num_nonzero"] <= 4 * 4
        assert row["actor/grad_rms_to_eps"] > 10
    assert "may overflow fp16" not in run.output
    assert_moved(case, checkpoint, trained_weights(run.run_dir, NUM_STEPS))
