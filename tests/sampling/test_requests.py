# SPDX-License-Identifier: Apache-2.0
from dataclasses import replace

import pytest
import verl.trainer.ppo.v1  # noqa: F401 - the order in which verl imports us
from omegaconf import OmegaConf

from verl_digen.algorithms.forward import ForwardConfig
from verl_digen.algorithms.solvers import SolverNoise
from verl_digen.algorithms.tree import BranchesConfig, Tree
from verl_digen.algorithms.window import WindowConfig
from verl_digen.config import DigenConfig, SamplingConfig, digen_config
from verl_digen.sampling.recording import initial_seed, noise_seed
from verl_digen.sampling.requests import batch_rules, rows_per_group, sample_request
from verl_digen.schedulers.durations import KnownDurations
from verl_digen.schedulers.planner import BatchPlanner
from verl_digen.schedulers.types import Fragment
from verl_digen.trainer.disaggregated import DisaggregatedTrainer
from verl_digen.types import PromptRow

SAMPLING = SamplingConfig(num_steps=10, val_num_steps=20, true_cfg_scale=4.0, negative_prompt="ugly")
DIGEN = DigenConfig(sampling=SAMPLING)
FORWARD = DigenConfig(loss={"name": "diffusion_nft"}, sampling=SAMPLING, forward=ForwardConfig(fraction=0.5))


def ask(digen=DIGEN, uid="p1", index=0, validate=False, negative=None, step=1):
    row = PromptRow("a cat", "test", None, negative, uid=uid)
    return sample_request(digen, row, index, step=step, validate=validate)


def test_a_group_shares_one_window_and_groups_differ():
    digen = replace(DIGEN, window=replace(DIGEN.window, kind="fraction", fraction=0.5))
    windows = {uid: {ask(digen, uid, index).window for index in range(4)} for uid in ("p1", "p2", "p3", "p4")}
    assert all(len(shared) == 1 for shared in windows.values())
    assert len(set.union(*windows.values())) > 1


def test_the_window_of_a_request_moves_with_the_optimizer_step():
    digen = replace(DIGEN, window=WindowConfig(kind="consecutive", size=2, range=(0, 2), shift_every=3))
    assert [ask(digen, step=step).window.sde_steps[0] for step in (0, 2, 3, 6)] == [0, 0, 1, 2]


def test_each_turn_of_an_episode_has_noise_of_its_own():
    turns = [replace(ask(index=index), turn=turn) for index in range(2) for turn in range(3)]
    for seeds in ([initial_seed(7, one) for one in turns], [noise_seed(7, one, 1) for one in turns]):
        assert len({*seeds}) == 6


def test_a_request_for_forward_points_has_its_groups_noise_levels_and_no_stochastic_step():
    groups = {uid: [ask(FORWARD, uid, index) for index in range(4)] for uid in ("p1", "p2", "p3", "p4")}
    levels = {uid: {request.noise_levels for request in requests} for uid, requests in groups.items()}
    assert all(len(shared) == 1 for shared in levels.values())
    assert len(set.union(*levels.values())) > 1
    for request in (request for requests in groups.values() for request in requests):
        assert request.window.sde_steps == () and request.window.train_steps == ()
        assert len(request.noise_levels.steps) == 5 and set(request.noise_levels.steps) <= set(range(10))


@pytest.mark.parametrize(
    ("digen", "expected"),
    [
        (DIGEN, 9),
        (replace(DIGEN, window=WindowConfig(kind="consecutive", size=2)), 2),
        (replace(DIGEN, window=WindowConfig(kind="fraction", fraction=0.5)), 4),
        (FORWARD, 5),
        (replace(FORWARD, forward=ForwardConfig(num_points=3)), 3),
    ],
)
def test_every_group_has_as_many_points_as_planners_count(digen, expected):
    assert rows_per_group(digen, 8) == 8 * expected
    for uid in ("p1", "p2", "p3"):
        request = ask(digen, uid)
        levels = request.noise_levels
        assert len(request.window.train_steps if levels is None else levels.steps) == expected


@pytest.mark.parametrize("digen", [DIGEN, FORWARD], ids=["path", "forward"])
def test_validation_is_deterministic_and_records_nothing(digen):
    request = ask(digen, validate=True)
    assert request.window.sde_steps == () and request.window.train_steps == () and request.noise_levels is None
    assert request.sampling.num_steps == 20 and request.sampling.true_cfg_scale == 1.0
    assert not request.wants_condition


def test_samples_of_a_prompt_that_share_noise_in_training_have_their_own_in_validation():
    digen = replace(DIGEN, sampling=replace(SAMPLING, shared_initial_noise=True))
    seeds = {
        validate: [initial_seed(digen.seed, ask(digen, index=index, validate=validate)) for index in range(3)]
        for validate in (False, True)
    }
    assert len({*seeds[False]}) == 1 and len({*seeds[True]}) == 3
    alone = [initial_seed(DIGEN.seed, ask(DIGEN, index=index, validate=True)) for index in range(3)]
    assert seeds[True] == alone, "validation does not depend on how training samples"


def test_training_and_validation_have_solvers_of_their_own():
    window = WindowConfig(kind="consecutive")
    digen = replace(DIGEN, window=window, sampling=replace(SAMPLING, solver="dpm2"))
    assert [ask(digen, validate=validate).sampling.solver for validate in (False, True)] == ["dpm2", "euler"]
    digen = replace(DIGEN, sampling=replace(SAMPLING, val_solver="dpm2"))
    assert [ask(digen, validate=validate).sampling.solver for validate in (False, True)] == ["euler", "dpm2"]


@pytest.mark.parametrize("kind", ["all", "fraction"])
def test_a_solver_without_deterministic_steps_is_refused(kind):
    with pytest.raises(
        ValueError, match=f"digen.sampling.solver must be euler with digen.window.kind={kind}, .*'dpm2'"
    ):
        replace(DIGEN, window=WindowConfig(kind=kind), sampling=replace(SAMPLING, solver="dpm2"))
    replace(FORWARD, sampling=replace(SAMPLING, solver="dpm2"))
    replace(DIGEN, window=WindowConfig(kind=kind), sampling=replace(SAMPLING, solver="ddim"))


def test_a_solver_with_noise_is_for_finished_pictures_in_training_alone():
    noisy = replace(SAMPLING, solver="sa", sa_noise=0.7)
    with pytest.raises(ValueError, match=r"must be one of euler, ddim, dpm2, unipc with digen.loss.name=.*, got 'sa'"):
        replace(DIGEN, window=WindowConfig(kind="consecutive"), sampling=noisy)
    with pytest.raises(ValueError, match=r"digen.sampling.val_solver must be one of euler, .*, got 'sa'"):
        replace(SAMPLING, val_solver="sa")
    for bad in ({"sa_noise": -0.1}, {"sa_low": 0.95}, {"sa_high": 1.1}):
        with pytest.raises(ValueError, match=r"digen.sampling.sa_"):
            replace(SAMPLING, **bad)
    sampling = ask(replace(FORWARD, sampling=noisy)).sampling
    assert (sampling.solver, sampling.solver_noise) == ("sa", SolverNoise(0.7, 0.3, 0.9))


def test_deterministic_samples_of_a_group_cannot_start_from_one_noise():
    message = "digen.sampling.shared_initial_noise must be false with digen.loss.name=diffusion_nft, .*got True"
    with pytest.raises(ValueError, match=message):
        replace(FORWARD, sampling=replace(SAMPLING, shared_initial_noise=True))


def test_only_the_first_sample_of_a_group_asks_for_the_conditions():
    assert [ask(index=index).wants_condition for index in range(3)] == [True, False, False]


def test_a_prompts_own_negative_prompt_wins_over_the_configs():
    assert ask().negative_inputs.text == "ugly"
    assert ask(negative="").negative_inputs.text == ""


def test_a_tree_splits_within_the_window_of_its_group_and_validation_has_none():
    """Windows of 4 steps that are drawn for each group; 2 + 2 + 4 + 8 edges."""
    digen = replace(
        DIGEN,
        window=WindowConfig(kind="consecutive", size=4, range=(1, 9)),
        branches=BranchesConfig(splits=(0, 2, 3)),
        sampling=replace(DIGEN.sampling, shared_initial_noise=True),
    )
    starts = set()
    for uid in (f"p{number}" for number in range(8)):
        request = ask(digen, uid)
        first = request.window.sde_steps[0]
        starts.add(first)
        assert request.tree == Tree((first, first + 2, first + 3), 2)
    assert len(starts) > 2 and rows_per_group(digen, 8) == 16
    row = PromptRow("a cat", "", None, uid="p1")
    assert sample_request(digen, row, 0, step=0, validate=True).tree is None


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


def test_validation_evaluates_the_network_at_every_step():
    digen = digen_config(OmegaConf.create({"digen": CHEAP}))
    assert [ask(digen, validate=validate).sampling.outside.passes_over for validate in (False, True)] == [True, False]


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
    while isinstance(decision := planner.next_for_trainer(0.0), Fragment):
        found.append(len(decision.uids))
        planner.on_trained(decision.id, 0.0)
    assert found == sizes
