# SPDX-License-Identifier: Apache-2.0
"""Episodes of different lengths in the engine: the gradient is that of the serial loop over all of their turns."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from tests.engine.harness import SAMPLING, make_batch, make_engine, own_advantages, stepped_gradients
from tests.engine.objective_runs import reshape
from tests.engine.serial import plain_transformer, serial_loss_and_gradient
from verl_digen.agent_loop.episode import joined
from verl_digen.engine.fragment import FragmentSample, FragmentSpec
from verl_digen.engine.rows import Samples
from verl_digen.settings import Turn
from verl_digen.types import PathRecord, Trajectory

pytestmark = pytest.mark.usefixtures("one_rank")

EPISODES = {0: (0, 2, 4), 1: (3,), 2: (1, 5)}
"""Sample index -> numbers of its turns in the batch, whose three groups have texts of different lengths."""
REWARDS = (3.0, -1.0, 0.5)


def record_of(batch: TensorDict, number: int) -> PathRecord:
    columns = {name: batch[name][number] for name in PathRecord.COLUMNS}
    return PathRecord(**{**columns, "sigma_max": columns["sigma_max"].reshape(())})


def turns_of(batch: TensorDict, index: int) -> list[Trajectory]:
    uids = tu.get(batch, "uid")
    return [
        Trajectory("e", index, record_of(batch, number), 0, 0, 0, SAMPLING, uids[number]) for number in EPISODES[index]
    ]


def described(batch: TensorDict) -> list[FragmentSample]:
    samples = []
    for index in EPISODES:
        turns = [
            Turn(len(one.record.sigmas), SAMPLING, one.condition_key, (0.0, 1.0), 0.0, 0.0)
            for one in turns_of(batch, index)
        ]
        num_steps = sum(turn.num_steps for turn in turns)
        facts = {"condition_key": turns[0].condition_key, "turns": tuple(turns)}
        samples.append(FragmentSample(str(index), "e", index, REWARDS[index], num_steps, SAMPLING, **facts))
    return samples


def fetch_from(batch: TensorDict):
    conditions = tu.get(batch, "conditions")

    def fetch(asked: Sequence[FragmentSample]) -> Samples:
        columns = [joined(turns_of(batch, sample.sample_index)).record.columns() for sample in asked]
        return Samples(
            described=asked,
            columns={name: [one[name] for one in columns] for name in PathRecord.COLUMNS},
            conditions=[conditions[sample.condition_key] for sample in asked],
            advantages=torch.zeros(len(asked)),
            turn_conditions=conditions,
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
