# SPDX-License-Identifier: Apache-2.0
"""Figures in docs/models.md, docs/memory.md and docs/placement.md against the plans that they name."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.grid import in_grid
from tests.plan.tracker import CASES, DEVICE_BYTES, GB, tile_bytes
from verl_digen.tools.plan.memory import Memory, plan_memory
from verl_digen.tools.plan.output import Plan, make_plan
from verl_digen.tools.plan.run import Job
from verl_digen.tools.plan.split import split_lines

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
TRACKED = [case.recipe.removeprefix("digen_") for case in CASES]
IN_CI = ("wan2_2",)
"""The recipe that CI compares, of videos and two networks."""
WITHIN = 5.0
"""Per cent by which the plan may be off the tracker."""


MODELS = (ROOT / "docs" / "models.md").read_text()
ROWS = {name: row for name, *row in re.findall(r"^\| `digen_(\w+)` \|.* \| (.*) \| (.*) \|$", MODELS, re.MULTILINE)}


def peak(memory: Memory) -> str:
    assert memory.fits
    return f"{memory.peak_bytes / GB:.1f}"


def samples(plan: Plan) -> str:
    """The samples of a step as the examples name them."""
    size = plan.run.settings.digen.sampling
    kind = f"videos of {size.num_frames} frames, {size.height_px} x {size.width_px}"
    return f"{plan.run.settings.num_samples} {kind if size.num_frames > 1 else 'pictures'}"


@pytest.mark.parametrize("name", [*IN_CI, *in_grid(name for name in ROWS if name not in IN_CI)])
def test_memory_and_seconds_are_those_of_the_plan(name):
    row = ROWS[name]
    claimed, each = re.fullmatch(r"([\d.]+) GB(?:, of (\d+))?", row[0]).groups()  # type: ignore[union-attr]
    device = "H200" if each == "141" else "H100"
    plan = make_plan([f"recipe=digen_{name}", "gpus=8", f"gpu_mem={each or 80}", f"device={device}"])
    assert claimed == peak(plan.memory)
    assert row[1].replace("with the area of ", "") == f"{plan.time.step_s:.0f} s for {samples(plan)}"
    if name in TRACKED:
        assert_rows_of_the_table(name, plan.run)


CARD = r"^\| (\d+) GB \((\w+)\) \| .* \| (.*) GB \| (.*) GB \| (.*) s for (\d+) \| (.*) h \| `(.*)` \|$"
ONE_CARD = {row[-1]: row for row in re.findall(CARD, MODELS, re.MULTILINE)}


@pytest.mark.parametrize("recipe", [next(iter(ONE_CARD)), *in_grid([*ONE_CARD][1:])])
def test_a_card_trains_what_the_table_says(recipe):
    size, device, *claimed, _ = ONE_CARD[recipe]
    plan = make_plan([*f"recipe={recipe}".split(), f"device={device}", f"gpu_mem={size}"])
    step_s, samples = plan.time.step_s, plan.run.settings.num_samples
    assert step_s is not None and plan.run.settings.num_devices == 1
    host = f"{plan.memory.host_bytes / GB:.0f}"
    assert claimed == [peak(plan.memory), host, f"{step_s:.0f}", str(samples), f"{step_s / 36:.1f}"]


def test_the_split_of_two_types_is_the_plans():
    text = (ROOT / "docs" / "placement.md").read_text()
    blocks = re.search(r"^digen plan (.* gpus=\w+\+.*)\n```\n\n```text\n([^`]*)```", text, re.MULTILINE)
    assert blocks is not None
    plan = make_plan(blocks[1].split())
    assert plan.split is not None
    assert blocks[2].split() == " ".join(split_lines(plan.split, plan.split_words)).split()


def assert_rows_of_the_table(name: str, run: Job) -> None:
    """Compare the rows of docs/memory.md, whose runs have 64 prompts."""
    text = (ROOT / "docs" / "memory.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if re.match(rf"\| digen_{name} \| \d", line)]
    assert [row[1] for row in rows] == ["8"]
    for _, ranks, num_rows, recomputed, tracked, planned, difference, whole in rows:
        number = int(ranks)
        many = {"num_trainer_devices": number, "num_generator_devices": number}
        settings = replace(run.settings, num_prompts=64, whole_base=False, **many)
        memory = plan_memory(Job(settings, run.measured), DEVICE_BYTES)
        assert num_rows == str(memory.training.num_rows)
        assert recomputed == f"{memory.num_recomputed} of {memory.num_blocks}"
        assert planned == f"{tile_bytes(memory) / GB:.2f} GB"
        assert whole.startswith(f"{memory.peak_bytes / GB:.1f} GB, {'fits' if memory.fits else 'does not fit'}")
        off = 100 * (float(planned.split()[0]) / float(tracked.split()[0]) - 1)
        assert float(difference.removesuffix(" %")) == pytest.approx(off, abs=0.06)
        assert abs(off) <= WITHIN
