# SPDX-License-Identifier: Apache-2.0
"""A rank's work from descriptions alone: whole samples, buckets, and rows per tile measured for each sampling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.engine.harness import SAMPLING, described
from verl_digen.config import TspConfig
from verl_digen.engine import memory, planning
from verl_digen.engine.fragment import FragmentSample
from verl_digen.engine.planning import Planner
from verl_digen.engine.points import ForwardPoints
from verl_digen.engine.rows import Samples
from verl_digen.types import Geometry, TrainingRows

LARGE = replace(SAMPLING, geometry=Geometry(64, 64))


def fetch(samples: Sequence[FragmentSample]) -> Samples:
    """Clean latents of the size of a sample's geometry."""
    sizes = [sample.sampling.geometry.height_px for sample in samples]
    return Samples(
        described=samples,
        columns={
            "clean": [torch.zeros(size, 2) for size in sizes],
            "sigmas": [torch.linspace(0.9, 0.1, sample.num_steps) for sample in samples],
        },
        conditions=[({"embeds": torch.zeros(len(sample.key), 3)}, None) for sample in samples],
        advantages=torch.zeros(len(samples)),
    )


def planner(
    patch: pytest.MonkeyPatch, tsp: TspConfig, *, rank: int = 0, num_ranks: int = 1, rehearse: Any = None
) -> Planner:
    patch.setattr(dist, "get_rank", lambda group: rank)
    patch.setattr(dist, "get_world_size", lambda group: num_ranks)
    return Planner(tsp, None, ForwardPoints(0), rehearse=rehearse)  # type: ignore[arg-type]


@pytest.mark.parametrize("is_parallel", [True, False])
def test_a_sample_stays_on_one_rank_without_time_step_parallelism(monkeypatch: pytest.MonkeyPatch, is_parallel: bool):
    samples = [described(str(number), "g", 0.0, 3) for number in range(3)]
    ranks_of: dict[int, set[int]] = {}
    for rank in range(2):
        work = planner(monkeypatch, TspConfig(enable=is_parallel), rank=rank, num_ranks=2).deal(
            samples, torch.zeros(3), fetch
        )
        for tile in work.tiles:
            for row in () if tile.is_filler else tile.rows:
                ranks_of.setdefault(row.sample, set()).add(rank)
        assert work.num_rows == 9
    assert (max(map(len, ranks_of.values())) == 1) == (not is_parallel)


def test_advantages_and_samples_are_those_of_the_rows(monkeypatch: pytest.MonkeyPatch):
    samples = [described(str(number), "g", 0.0, 1) for number in range(4)]
    work = planner(monkeypatch, TspConfig(), rank=1, num_ranks=2).deal(samples, torch.arange(4.0), fetch)
    assert [sample.key for sample in work.samples.described] == ["2", "3"]
    assert work.samples.advantages.tolist() == [2.0, 3.0]
    assert work.places == {2: 0, 3: 1}


def test_rows_per_tile_are_measured_for_each_sampling_with_its_longest_prompt(monkeypatch: pytest.MonkeyPatch):
    """A device of 100 bytes on which a row takes its height in bytes: 90 / 32 and 90 / 64 fit."""
    rehearsed: list[TrainingRows] = []
    monkeypatch.setattr(planning, "get_device_name", lambda: "pretend")
    monkeypatch.setattr(memory, "limit_bytes", lambda: 100)
    monkeypatch.setattr(memory, "agreed_least", lambda value, group: value)

    def peak_of(run: Any) -> int:
        run()
        return len(rehearsed[-1]) * rehearsed[-1].latents.shape[1]

    monkeypatch.setattr(memory, "peak_of", peak_of)
    plan = planner(monkeypatch, TspConfig(), rehearse=rehearsed.append)
    samples = [
        described("1", "g", 0.0, 3),
        described("22", "g", 0.0, 3),
        described("333", "h", 0.0, 3, sampling=LARGE),
    ]
    work = plan.deal(samples, torch.zeros(3), fetch)
    assert [len(tile.rows) for tile in work.tiles] == [2, 2, 2, 1, 1, 1]
    longest = {rows.sampling: len(rows.conditions[0]["embeds"]) for rows in rehearsed}
    assert longest == {SAMPLING: 2, LARGE: 3}
    assert all(not rows.mask.any() for rows in rehearsed)
    count = len(rehearsed)
    plan.deal(samples, torch.zeros(3), fetch)
    assert len(rehearsed) == count, "measured once"
