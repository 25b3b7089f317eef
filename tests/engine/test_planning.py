# SPDX-License-Identifier: Apache-2.0
"""A rank's work from descriptions alone: whole samples, buckets, and rows per tile measured for each sampling."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.engine.harness import SAMPLING, described
from verl_digen.config import TspConfig
from verl_digen.engine import memory, planning
from verl_digen.engine.fragment import FragmentSample
from verl_digen.engine.planning import Planner
from verl_digen.engine.rows import ForwardPoints, Samples, padded_tokens, text_order
from verl_digen.engine.whole_base import WholeBase
from verl_digen.models.qwen_image import QwenImage
from verl_digen.models.wan import Wan
from verl_digen.platforms import device_memory
from verl_digen.types import Condition, Geometry, Noised, TrainingRows

ALL = SimpleNamespace(fixed=3)
"""Switch of a network whose first 3 blocks are recomputed whatever memory there is."""
LARGE = replace(SAMPLING, geometry=Geometry(64, 64))


def fetch(samples: Sequence[FragmentSample]) -> Samples:
    """Clean latents of the size of a sample's geometry."""
    sizes = [sample.facts.sampling.geometry.height_px for sample in samples]
    return Samples(
        described=samples,
        columns={
            "clean": [torch.zeros(size, 2) for size in sizes],
            "sigmas": [torch.linspace(0.9, 0.1, sample.facts.num_steps) for sample in samples],
        },
        conditions={
            key: ({"embeds": torch.zeros(40 * len(key), 3)}, {"embeds": torch.zeros(5, 3)})
            for key in {sample.facts.condition_key for sample in samples}
        },
        advantages=torch.zeros(len(samples)),
    )


def planner(
    patch: pytest.MonkeyPatch,
    tsp: TspConfig,
    *,
    rank: int = 0,
    num_ranks: int = 1,
    rehearse: Any = None,
    takes_masks: bool = True,
) -> Planner:
    patch.setattr(dist, "get_world_size", lambda group: num_ranks)
    patch.setattr(Planner, "rehearse", lambda self, rows: rehearse(rows))
    model = object.__new__(QwenImage)
    model.takes_masks = takes_masks
    engine = SimpleNamespace(
        digen=SimpleNamespace(tsp=tsp),
        points=ForwardPoints(0),
        model=model,
        optimizer=None,
        recomputation=ALL,
        base=WholeBase(nn.Module(), "auto"),
        get_data_parallel_rank=lambda: rank,
        get_data_parallel_size=lambda: num_ranks,
    )
    return Planner(engine)  # type: ignore[arg-type]


@pytest.mark.parametrize("takes_masks", [True, False])
def test_texts_of_like_length_share_tiles_and_of_equal_length_where_padding_cannot_be_masked(
    monkeypatch: pytest.MonkeyPatch, takes_masks: bool
):
    monkeypatch.setattr(memory, "agreed_most", lambda values: [max(*values, 5)])  # another rank has five tiles
    samples = [described(key, "g", 0.0, 1, condition_key=key) for key in ("a", "bbb", "c", "ddd")]
    work = planner(monkeypatch, TspConfig(samples_per_tile=2, steps_per_tile=1), takes_masks=takes_masks).deal(
        samples, torch.zeros(4), fetch
    )
    keys = [[samples[row.sample].key for row in tile.rows] for tile in work.tiles if not tile.is_filler]
    assert keys == [["a", "c"], ["bbb", "ddd"]]
    assert len(work.tiles) == (2 if takes_masks else 5)


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
        assert len(work.rows) == 9
    assert (max(map(len, ranks_of.values())) == 1) == (not is_parallel)


def test_advantages_and_samples_are_those_of_the_rows(monkeypatch: pytest.MonkeyPatch):
    samples = [described(str(number), "g", 0.0, 1) for number in range(4)]
    work = planner(monkeypatch, TspConfig(), rank=1, num_ranks=2).deal(samples, torch.arange(4.0), fetch)
    assert [sample.key for sample in work.samples.described] == ["2", "3"]
    assert work.samples.advantages.tolist() == [2.0, 3.0]
    assert work.places == {2: 0, 3: 1}


@pytest.fixture
def hundred_bytes(monkeypatch: pytest.MonkeyPatch) -> list[TrainingRows]:
    """A device of 100 bytes on which a row takes its height in bytes; what was rehearsed on it."""
    rehearsed: list[TrainingRows] = []
    monkeypatch.setattr(planning, "get_device_name", lambda: "pretend")
    monkeypatch.setattr(device_memory, "limit_bytes", lambda: 100)
    monkeypatch.setattr(device_memory, "allocated_bytes", int)
    monkeypatch.setattr(memory, "agreed_most", lambda values: list(values))

    def peak_of(run: Any) -> int:
        run()
        return len(rehearsed[-1]) * rehearsed[-1].latents.shape[1]

    monkeypatch.setattr(device_memory, "peak_of", peak_of)
    return rehearsed


def test_rows_per_tile_are_measured_for_each_sampling_with_its_longest_prompt(
    monkeypatch: pytest.MonkeyPatch, hundred_bytes: list[TrainingRows]
):
    """90 / 32 and 90 / 64 rows fit."""
    plan = planner(monkeypatch, TspConfig(), rehearse=hundred_bytes.append)
    samples = [
        described("1", "g", 0.0, 3, condition_key="a"),
        described("2", "g", 0.0, 3, condition_key="bb"),
        described("3", "h", 0.0, 3, condition_key="ccc", sampling=LARGE),
    ]
    work = plan.deal(samples, torch.zeros(3), fetch)
    assert [len(tile.rows) for tile in work.tiles] == [2, 2, 2, 1, 1, 1]
    assert work.recomputed == {0: 3, 1: 3}
    longest = {rows.sampling: len(rows.conditions[0]["embeds"]) for rows in hundred_bytes}
    assert longest == {SAMPLING: 128, LARGE: 128}  # 80 and 120 tokens, rounded up
    assert all(not rows.mask.any() for rows in hundred_bytes)
    branches = [branch for rows in hundred_bytes for branch in (rows.conditions, rows.negative_conditions)]
    assert max(len(branch or ()) for branch in branches) > 1
    assert all(branch and len({id(one) for one in branch}) == len(branch) for branch in branches), (
        "rows of one may share"
    )
    count = len(hundred_bytes)
    plan.deal(samples, torch.zeros(3), fetch)
    assert len(hundred_bytes) == count, "measured once"


def test_a_prompt_is_as_long_as_the_longest_of_all_ranks(
    monkeypatch: pytest.MonkeyPatch, hundred_bytes: list[TrainingRows]
):
    """The other rank has one of 300 tokens."""
    monkeypatch.setattr(memory, "agreed_most", lambda values: [300] if len(values) == 1 else list(values))
    samples = [described(str(number), "g", 0.0, 1) for number in range(2)]
    planner(monkeypatch, TspConfig(), num_ranks=2, rehearse=hundred_bytes.append).deal(samples, torch.zeros(2), fetch)
    assert {len(rows.conditions[0]["embeds"]) for rows in hundred_bytes} == {320}


def test_a_rank_of_several_that_runs_out_of_memory_raises(
    monkeypatch: pytest.MonkeyPatch, hundred_bytes: list[TrainingRows]
):
    """The others wait for it inside a forward, so it cannot go on with fewer rows."""

    def rehearse(rows: TrainingRows) -> None:
        hundred_bytes.append(rows)
        if len(rows) == 2:
            raise torch.OutOfMemoryError("tried to allocate 2 GiB")

    samples = [described(str(number), "g", 0.0, 1) for number in range(4)]
    plan = planner(monkeypatch, TspConfig(), num_ranks=2, rehearse=rehearse)
    with pytest.raises(RuntimeError, match=r"a rehearsed tile of 2 row.*2 GiB.*set digen.tsp.samples_per_tile=1"):
        plan.deal(samples, torch.zeros(4), fetch)


# -- order of samples by their texts, and how much of what the network reads is padding ----------------------
def condition(length: int) -> Condition:
    return {"embeds": torch.zeros(length, 2)}


@pytest.mark.parametrize(
    ("scale", "takes_masks", "expected"),
    [(1.0, True, (80, 10)), (3.0, True, (160, 80)), (3.0, False, (90, 10))],
    ids=["alone", "guided", "guided in two forwards"],
)
def test_padding_is_counted_over_the_texts_of_each_forward(scale: float, takes_masks: bool, expected: tuple[int, int]):
    """Prompts of 40 and 30 tokens; negative prompts of 5, which are read with guidance alone."""
    model = object.__new__(QwenImage)
    model.takes_masks = takes_masks
    nothing = torch.zeros(2)
    rows = TrainingRows(
        latents=nothing,
        sigmas=nothing,
        point=object.__new__(Noised),
        conditions=[condition(40), condition(30)],
        negative_conditions=[condition(5), condition(5)],
        advantages=nothing,
        mask=nothing,
        sampling=replace(SAMPLING, true_cfg_scale=scale),
    )
    assert padded_tokens(model, rows) == expected


def test_the_longest_text_of_a_sample_comes_first():
    model = object.__new__(QwenImage)
    assert text_order(model, (condition(5), condition(40))) == (40, 5, 40)
    assert text_order(object.__new__(Wan), (condition(5), condition(40))) == (), "the network reads 512 tokens of each"
