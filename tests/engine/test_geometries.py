# SPDX-License-Identifier: Apache-2.0
"""Geometries in the engine: a batch of several sizes of pictures or videos, and of images or sound, trains as one."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from tests.engine.harness import (
    SAMPLING,
    make_batch,
    make_engine,
    own_advantages,
    read_samples,
    stepped_gradients,
    with_own_advantages,
)
from tests.engine.objective_runs import reshape
from tests.engine.serial import plain_transformer, serial_loss_and_gradient
from tests.grid import IN_GRID
from tests.tags import changed
from tests.tiny_models import build_tiny
from verl_digen.agent_loop.episode import joined
from verl_digen.engine.fragment import FragmentSample, FragmentSpec
from verl_digen.engine.rows import Samples
from verl_digen.models import load_model
from verl_digen.types import Geometry, PathRecord, SampleFacts, Trajectory
from verl_digen.types.settings import Turn

pytestmark = pytest.mark.usefixtures("one_rank")

EDITS = (Geometry(32, 32, sources=((32, 64),)), Geometry(32, 64, sources=((32, 64),)))
"""A picture's size, and a wider picture."""
VIDEOS = (Geometry(32, 32, 5, ((32, 32),)), Geometry(32, 48, 5, ((32, 48),)))
WITH_SOUND = (Geometry(64, 64, 9), Geometry(32, 64, 17))
"""8 and 6 tokens of video, 9 and 18 of sound."""
FIRST_FRAMES = (Geometry(32, 32, 5, ((32, 32),)), Geometry(32, 64, 9, ((32, 64),)), Geometry(32, 32, 5))
"""Two with a given first frame, and a text."""


@dataclass(frozen=True)
class Case:
    """A model whose prompts have images, or whose videos have sound."""

    name: str
    geometries: tuple[Geometry, ...]
    texts: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Shapes of a text's condition, where they are not the harness's."""


def edits(*sources: tuple[int, int]) -> tuple[Geometry, ...]:
    """The two sizes, and the first one with these images."""
    return (*EDITS, Geometry(32, 32, sources=sources))


IN_CI = ("qwen_image_edit_plus", "wan2.1_i2v")
CASES = (
    Case("qwen_image_edit_plus", edits((32, 32), (64, 32))),
    Case("qwen_image21", edits((32, 32), (64, 32))),
    Case("flux_kontext", edits(), {"embeds": (6, 32), "pooled": (16,)}),
    Case("flux2_klein", edits((32, 32), (64, 32), (32, 32)), {"embeds": (6, 48)}),
    Case("wan2.1_i2v", VIDEOS),
    Case("wan2.2_ti2v_5b", FIRST_FRAMES),
    Case("hunyuan_video15_i2v", VIDEOS, {"glyphs": (2, 32)}),
    Case("ltx2", WITH_SOUND, {"embeds": (6, 32), "audio": (6, 32)}),
)


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.name, marks=() if case.name in IN_CI else IN_GRID) for case in CASES]
)
def test_the_gradient_of_several_geometries_is_that_of_the_serial_loop(case: Case, tmp_path: Path):
    path = build_tiny(case.name, tmp_path / "checkpoint")
    model = load_model(path)
    batches = [
        make_batch(
            path,
            sampling=replace(SAMPLING, geometry=geometry),
            extras=case.texts | (model.image_conditions(geometry) if geometry.sources else {}),
            seed=number,
        )
        for number, geometry in enumerate(case.geometries)
    ]

    def fetch(asked: Sequence[FragmentSample]) -> Samples:
        parts = [
            read_samples(batches[int(batch)], [replace(sample, key=key)])
            for sample in asked
            for batch, _, key in [sample.key.partition("/")]
        ]
        return Samples(
            described=asked,
            columns={name: [part.columns[name][0] for part in parts] for name in parts[0].columns},
            conditions={
                f"{number}/{uid}": pair
                for number, batch in enumerate(batches)
                for uid, pair in tu.get(batch, "conditions").items()
            },
            advantages=torch.zeros(len(asked)),
        )

    described = [
        changed(replace(sample, key=f"{number}/{sample.key}"), uid=uid, condition_key=uid)
        for number, batch in enumerate(batches)
        for sample in with_own_advantages(batch).samples
        for uid in [f"{number}/{sample.facts.uid}"]
    ]
    engine = make_engine(path)
    with own_advantages(engine), stepped_gradients(engine) as found:
        engine.begin(len(described), sum(sample.facts.num_steps for sample in described), fetch)
        engine.accumulate(FragmentSpec("all", tuple(described)))
        engine.commit()
    module = plain_transformer(path)
    expected = [serial_loss_and_gradient(module, path, batch, range(len(batch)))[1] for batch in batches]
    for name, gradient in expected[0].items():
        mean = sum(one[name] for one in expected) / len(expected)  # as many rows of each geometry
        torch.testing.assert_close(found[name], mean, atol=1e-5, rtol=1e-4)
        assert gradient.shape == found[name].shape
    assert any((expected[0][name] - expected[-1][name]).abs().max() > 1e-3 for name in expected[0])


# -- episodes of different lengths in the engine: the gradient is that of the serial loop over all of their turns --
EPISODES = {0: (0, 2, 4), 1: (3,), 2: (1, 5)}
"""Sample index -> numbers of its turns in the batch, whose three groups have texts of different lengths."""
REWARDS = (3.0, -1.0, 0.5)


def record_of(batch: TensorDict, number: int) -> PathRecord:
    columns = {name: batch[name][number] for name in PathRecord.COLUMNS}
    return PathRecord(**{**columns, "sigma_max": columns["sigma_max"].reshape(())})


def turns_of(batch: TensorDict, index: int) -> list[Trajectory]:
    uids = tu.get(batch, "uid")
    return [
        Trajectory(
            SampleFacts("e", index, 0, 0, 0, len(batch["sigmas"][number]), SAMPLING, uids[number]),
            record_of(batch, number),
        )
        for number in EPISODES[index]
    ]


def described(batch: TensorDict) -> list[FragmentSample]:
    samples = []
    for index in EPISODES:
        turns = [
            Turn(len(one.record.sigmas), SAMPLING, one.facts.condition_key, (0.0, 1.0), 0.0, 0.0)
            for one in turns_of(batch, index)
        ]
        facts = SampleFacts(
            "e", index, 0, 0, 0, sum(turn.num_steps for turn in turns), SAMPLING, turns[0].condition_key
        )
        samples.append(FragmentSample(str(index), facts, REWARDS[index], turns=tuple(turns)))
    return samples


def fetch_from(batch: TensorDict):
    conditions = tu.get(batch, "conditions")

    def fetch(asked: Sequence[FragmentSample]) -> Samples:
        columns = [joined(turns_of(batch, sample.facts.sample_index)).record.columns() for sample in asked]
        return Samples(
            described=asked,
            columns={name: [one[name] for one in columns] for name in PathRecord.COLUMNS},
            conditions=conditions,
            advantages=torch.zeros(len(asked)),
        )

    return fetch


@pytest.mark.parametrize(("num_samples", "num_steps", "reduce"), [(1, 1, "tile"), (2, 2, "fragment"), (9, 9, "batch")])
def test_the_gradient_of_episodes_is_that_of_the_serial_loop(
    tiny_qwen_image: Path, num_samples: int, num_steps: int, reduce: str
):
    batch = make_batch(tiny_qwen_image, group_size=2, windows=((0, 1, 2), (1, 2), (0, 1)))
    mean = sum(REWARDS) / len(REWARDS)
    owner = {number: index for index, numbers in EPISODES.items() for number in numbers}
    batch["advantages"] = torch.tensor([REWARDS[owner[number]] - mean for number in range(len(owner))])
    engine = make_engine(tiny_qwen_image)
    reshape(engine, num_samples, num_steps, reduce)
    samples = described(batch)
    with own_advantages(engine), stepped_gradients(engine) as found:
        engine.begin(len(samples), 7, fetch_from(batch))  # planned rows are an estimate, since turns vary
        engine.accumulate(FragmentSpec("all", tuple(samples)))
        engine.commit()
    _, expected = serial_loss_and_gradient(
        plain_transformer(tiny_qwen_image), tiny_qwen_image, batch, range(len(owner))
    )
    assert expected.keys() == found.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-5, rtol=1e-4)
    assert max(gradient.abs().max() for gradient in expected.values()) > 1e-3
