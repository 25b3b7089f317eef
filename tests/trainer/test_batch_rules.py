# SPDX-License-Identifier: Apache-2.0
"""Rules of a run from its config: groups of an assist, and of a fragment."""

import pytest
from omegaconf import OmegaConf

import verl_digen.trainer.register  # noqa: F401 - the order in which verl imports us
from verl_digen.config import digen_config
from verl_digen.sampling.requests import batch_rules
from verl_digen.schedulers.durations import KnownDurations
from verl_digen.schedulers.planner import BatchPlanner
from verl_digen.schedulers.types import Train
from verl_digen.trainer.disaggregated import DisaggregatedTrainer

CHEAP = {"window": {"kind": "consecutive"}, "sampling": {"outside": {"solver_after": 0.5}, "num_steps": 10}}


@pytest.mark.parametrize(
    ("settings", "spans"),
    [
        ({}, True),
        ({"sampling": {"shared_initial_noise": True}}, True),  # windows begin at step 0
        ({"window": {"kind": "consecutive"}}, True),
        ({"window": {"kind": "consecutive"}, "sampling": {"shared_initial_noise": True}}, False),
        (CHEAP, False),
    ],
)
def test_an_assist_spans_groups_unless_their_samples_share_or_pass_over_steps(settings, spans):
    digen = digen_config(OmegaConf.create({"digen": {**settings, "tag": {"policy": "bts"}}}))
    rules = batch_rules(digen, num_prompts=4, group_size=12, num_trainer_ranks=32)
    assert rules.assist_spans_groups is spans
    assert rules.assist_sizes(8) == ((32,) if spans else (12,))


def trainer_rules(digen: dict):
    """Rules of the real trainer with 64 ranks and groups of two samples."""
    config = OmegaConf.create(
        {
            "digen": digen,
            "data": {"train_batch_size": 80},
            "trainer": {"nnodes": 8, "n_gpus_per_node": 8, "v1": {"trainer_mode": "digen_disaggregated"}},
            "actor_rollout_ref": {"rollout": {"n": 2}, "actor": {"fsdp_config": {"ulysses_sequence_parallel_size": 1}}},
        }
    )
    trainer = object.__new__(DisaggregatedTrainer)
    trainer.config, trainer.digen = config, digen_config(config)
    return trainer._rules()


@pytest.mark.parametrize(
    ("gap", "num_steps", "sizes"),
    [
        ({}, 10, [20, 20, 20, 20]),  # a quarter of the batch
        ({}, 40, [8] * 10),  # eight groups have 9 rows per rank
        ({"max_groups_per_fragment": 32}, 10, [32, 32, 16]),
    ],
)
def test_the_trainer_cuts_a_batch_into_fragments_by_its_ranks(gap, num_steps, sizes):
    rules = trainer_rules({"gap": gap, "window": {"kind": "all"}, "sampling": {"num_steps": num_steps}})
    planner = BatchPlanner(rules, KnownDurations({"a": 1.0}, [1.0], 0.0, [1.0]), first_batch=0, num_batches=1)
    planner.on_slot_joined("a", replica="a", version=0)
    planner.on_prompts(0, [f"p{number:02d}" for number in range(80)])
    while decisions := planner.assign(0.0):
        for decision in decisions:
            planner.on_generated(decision.chunk.id, 0.0)
            planner.on_scored(decision.chunk.id, dict.fromkeys(decision.chunk.samples, 0.5), 0, 0.0)
    found = []
    while isinstance(decision := planner.next_for_trainer(0.0), Train):
        found.append(len(decision.fragment.uids))
        planner.on_trained(decision.fragment.id, 0.0)
    assert found == sizes
