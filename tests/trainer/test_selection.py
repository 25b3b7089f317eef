# SPDX-License-Identifier: Apache-2.0
"""Both trainers give their ranks rows of the samples that the objective, or `digen.advantage.best_of`, selects."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from omegaconf import OmegaConf

from tests.tags import make_tag
from verl_digen.config import AdvantageConfig, DigenConfig
from verl_digen.engine.fragment import FragmentSpec
from verl_digen.schedulers.types import Fragment
from verl_digen.trainer.colocated import ColocatedTrainer
from verl_digen.trainer.disaggregated import DisaggregatedTrainer

REWARDS = [0.5, 2.0, -1.0, 1.0]
GROUPS = {"a": {index: make_tag(reward, num_steps=2) for index, reward in enumerate(REWARDS)}}
SELECTING = pytest.mark.parametrize(
    "digen",
    [DigenConfig(advantage=AdvantageConfig(best_of=2)), DigenConfig(loss={"name": "online_dpo"})],
    ids=["best_of", "online_dpo"],
)
CONFIG = OmegaConf.create(
    {
        "digen": {},
        "data": {"train_batch_size": 1},
        "trainer": {"nnodes": 1, "n_gpus_per_node": 1},
        "actor_rollout_ref": {
            "actor": {"ppo_mini_batch_size": 1, "ppo_epochs": 1, "fsdp_config": {"ulysses_sequence_parallel_size": 1}},
            "rollout": {"n": 4, "nnodes": 1, "n_gpus_per_node": 1},
        },
        "reward": {
            "num_workers": 1,
            "custom_reward_function": {"path": None},
            "reward_model": {"enable": False, "enable_resource_pool": False},
        },
    }
)


class Trained(Exception):
    """Raised at the end of the training call; its fragment is the argument."""


class Ranks:
    """Ranks that train nothing."""

    compute_s = 0.0

    async def begin(self, *numbers: Any) -> None:
        pass

    async def accumulate(self, fragment: FragmentSpec) -> None:
        raise Trained(fragment)


def rows_of(fragment: FragmentSpec) -> list[int]:
    return [sample.num_rows for sample in fragment.samples]


@SELECTING
def test_a_colocated_step_trains_the_selected_samples(digen: DigenConfig):
    trainer: Any = SimpleNamespace(
        digen=digen,
        config=CONFIG,
        _generate=lambda: GROUPS,
        _ranks=Ranks(),
        _timeline=MagicMock(),
        _supervision=SimpleNamespace(watch=lambda *what: nullcontext(), run=asyncio.run),
    )
    with pytest.raises(Trained) as seen:
        ColocatedTrainer._run_step(trainer, {})
    assert rows_of(seen.value.args[0]) == [0, 2, 2, 0]


@SELECTING
def test_a_fragment_of_separate_pools_trains_the_selected_samples(digen: DigenConfig, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("verl_digen.trainer.disaggregated.hosts_of", lambda who, actors, answer_s: "host")
    trainer: Any = SimpleNamespace(
        digen=digen,
        config=CONFIG,
        global_steps=1,
        total_training_steps=1,
        checkpoint_manager=SimpleNamespace(replicas=[]),
        agent_loop_manager=SimpleNamespace(agent_loop_workers=[]),
        actor_rollout_wg=SimpleNamespace(workers=None),
        _driver=SimpleNamespace(host="host"),
        _num_devices=defaultdict(int),
        _end_replica=None,
        _draw_prompts=None,
        _rules=lambda: DisaggregatedTrainer._rules(trainer),
        _recorder=SimpleNamespace(),
        _ranks=Ranks(),
        _supervision=SimpleNamespace(deadlines=SimpleNamespace(config=digen.deadlines)),
    )
    conductor = DisaggregatedTrainer._make_conductor(trainer)
    with pytest.raises(Trained) as seen:
        asyncio.run(conductor.trainer.accumulate(Fragment(0, 0, ("a",)), GROUPS))
    assert rows_of(seen.value.args[0]) == [0, 2, 2, 0]
