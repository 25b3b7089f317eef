# SPDX-License-Identifier: Apache-2.0
"""Figures in examples/*.sh, docs/models.md and docs/memory.md against the plan of the command beside them."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.grid import in_grid
from tests.plan.tracker import CASES, DEVICE_BYTES, GB, tile_bytes
from verl_digen.plan.command import Plan, make_plan
from verl_digen.plan.memory import Memory, plan_memory
from verl_digen.plan.run import Run

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
NAMES = [case.recipe.removeprefix("digen_") for case in CASES]
IN_CI = ("qwen_image", "wan2_2")
"""Recipes that CI compares: pictures that fit, and videos with two networks that do not."""
WITHIN = 5.0
"""Per cent by which the plan may be off the tracker."""


def header(name: str) -> str:
    """The comment at the top of an example, in one line."""
    text, _, _ = (ROOT / "examples" / f"{name}.sh").read_text().partition("\nset -euo")
    return " ".join(line.lstrip("# ") for line in text.splitlines())


def peak(memory: Memory) -> str:
    assert memory.fits
    return f"{memory.peak_bytes / GB:.1f}"


def samples(plan: Plan) -> str:
    """The samples of a step as the examples name them."""
    size = plan.run.settings.digen.sampling
    kind = f"videos of {size.num_frames} frames, {size.height_px} x {size.width_px}"
    return f"{plan.run.settings.num_samples} {kind if size.num_frames > 1 else 'pictures'}"


@pytest.mark.parametrize("name", [*IN_CI, *in_grid(name for name in NAMES if name not in IN_CI)])
def test_memory_and_seconds_are_those_of_the_plan(name):
    said = header(name)
    gpus, each, claimed = re.findall(r"GPUs +(\d+) of (\d+) GB: the plan says ([\d.]+) GB", said)[0]
    words = re.findall(r"Ask again: digen plan ((?:\S+=\S+ )+)", said)[0].split()
    assert words == [f"recipe=digen_{name}", f"gpus={gpus}", f"gpu_mem={each}"]
    plan = make_plan([*words, "device=H100"])
    assert claimed == peak(plan.memory)
    host = re.findall(r"up to (\d+) GB of host memory", said)
    assert host in ([], [f"{plan.memory.host_bytes / GB:.0f}"])
    (duration,) = re.findall(r"a step takes at least (.*?)[;,] (?:\d+ s with |at \d+ %)", said)
    assert duration == f"{plan.time.step_s:.0f} s for {samples(plan)}"
    (row,) = re.findall(rf"^\| `digen_{name}` .*$", (ROOT / "docs" / "models.md").read_text(), re.MULTILINE)
    assert row.rpartition(" | ")[2] == f"{claimed} GB" + (" |" if each == "80" else f", of {each} |")
    assert_rows_of_the_table(name, plan.run)


def assert_rows_of_the_table(name: str, run: Run) -> None:
    """Compare the rows of docs/memory.md, whose runs have 64 prompts."""
    text = (ROOT / "docs" / "memory.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if re.match(rf"\| digen_{name} \| \d", line)]
    assert [row[1] for row in rows] == ["8", "64"]
    for _, ranks, num_rows, recomputed, tracked, planned, difference, whole in rows:
        number = int(ranks)
        many = {"num_trainer_devices": number, "num_generator_devices": number, "num_shards": number}
        settings = replace(run.settings, num_prompts=64, whole_base=False, **many)
        memory = plan_memory(Run(settings, run.measured), DEVICE_BYTES)
        assert num_rows == str(memory.training.num_rows)
        assert recomputed == f"{memory.num_recomputed} of {memory.num_blocks}"
        assert planned == f"{tile_bytes(memory) / GB:.2f} GB"
        assert whole.startswith(f"{memory.peak_bytes / GB:.1f} GB, {'fits' if memory.fits else 'does not fit'}")
        off = 100 * (float(planned.split()[0]) / float(tracked.split()[0]) - 1)
        assert float(difference.removesuffix(" %")) == pytest.approx(off, abs=0.06)
        assert abs(off) <= WITHIN


def test_stable_diffusion_fits_a_small_device_as_its_example_says():
    ((each, words, claimed),) = re.findall(r"On (\d+) GB with ((?:\S+=\S+ )+)\(([\d.]+) GB\)", header("sd3"))
    plan = make_plan(["recipe=digen_sd3", *words.split(), "gpus=8", f"gpu_mem={each}"])
    assert claimed == peak(plan.memory)
