# SPDX-License-Identifier: Apache-2.0
"""Seconds of a step; the proposed split: the same seconds as `digen simulate`, only splits that fit, and words that a
run accepts."""

import json
import math
from dataclasses import replace

import pytest

from tests.plan.runs import make_run
from tests.plan.test_command import digen_plan, small
from tests.schedulers.flat import make_rules
from verl_digen.algorithms.forward import ForwardConfig
from verl_digen.algorithms.outside import Outside
from verl_digen.algorithms.tree import BranchesConfig
from verl_digen.algorithms.window import WindowConfig
from verl_digen.config import AdvantageConfig, KlConfig, SamplingConfig
from verl_digen.hardware.devices import PEAK_TFLOPS, Pool
from verl_digen.schedulers.rules import GapConfig, StalenessConfig
from verl_digen.tools.plan.compose import MFU, Words, split_words
from verl_digen.tools.plan.memory import plan_memory
from verl_digen.tools.plan.output import split_words_of
from verl_digen.tools.plan.split import GATHER_BYTES_PER_S, plan_split, plan_time, run_profile, split_lines, with_split
from verl_digen.tools.simulate.cluster import run_colocated, run_split, sample_s, simulated_rules, train_s
from verl_digen.tools.simulate.splits import SEARCH_STEPS, Limits, placed_splits

FORWARD = 100e12
SAMPLES, STEPS, ROWS = 32, 10, 9
ALL = {"advantage": AdvantageConfig()}


def test_a_step_by_hand():
    time = plan_time(make_run(), "H100", MFU, 1.0)
    assert time.generating_flops == SAMPLES * STEPS * FORWARD
    assert time.training_flops == SAMPLES * ROWS * 4 * FORWARD
    assert time.generating_s == pytest.approx(time.generating_flops / (8 * 0.4 * 989e12))
    assert time.step_s == pytest.approx(time.generating_s + time.training_s)


def test_rows_of_one_prompt_share_its_work_where_the_network_lets_them():
    """Half of a row's, among the 8 samples of a group in a batch, and 4 rows of a tile."""
    run = make_run()
    shares = replace(run.measured, flops=replace(run.measured.flops, prompt=0.5))
    time = plan_time(replace(run, measured=shares), None, MFU, 1.0, tile_rows=4)
    assert time.generating_flops == SAMPLES * STEPS * FORWARD * (1 / 2 + 1 / 2 / 8)
    assert time.training_flops == SAMPLES * ROWS * 4 * FORWARD * (1 / 2 + 1 / 2 / 4)


def test_pools_overlap_only_with_the_pipeline():
    split = plan_time(make_run(is_split=True), "H100", MFU, 1.0)
    assert split.step_s == max(split.generating_s, split.training_s)
    barrier = plan_time(make_run(is_split=True, digen={"gap": GapConfig(enable=False)}), "H100", MFU, 1.0)
    assert barrier.step_s == pytest.approx(split.generating_s + split.training_s)


def test_steps_that_the_solver_passes_over_cost_nothing_and_those_of_the_cache_count():
    window = WindowConfig(kind="consecutive", size=2, range=(2, 4))

    def flops(outside: Outside) -> float:
        digen = {"window": window, "sampling": SamplingConfig(num_steps=STEPS, outside=outside)}
        return plan_time(make_run(digen=digen), None, MFU, 1.0).generating_flops / (SAMPLES * FORWARD)

    assert flops(Outside()) == flops(Outside(cache=0.1)) == STEPS
    assert flops(Outside(solver_before=0.5, solver_after=0.5)) == 1 + 2 + 3


@pytest.mark.parametrize(
    ("settings", "shift_every", "steps"),
    [
        ({}, None, 8 + 2 / 8),
        ({}, 25, 10 - 4.5 * 7 / 8),
        ({"rollout_name": "vllm_omni"}, None, 8 + 2 / 8),
        ({"rollout_name": "trainer"}, None, 8 + 2 / 4),
        ({"is_split": True}, None, 10),
        ({"is_split": True, "num_generator_devices": 2}, None, 8 + 2 / 4),
    ],
)
def test_steps_before_a_window_cost_once_where_samples_of_a_group_are_drawn_by_one_process(
    settings, shift_every, steps
):
    """Groups of eight: on a replica, four on each rank, or spread over all replicas."""
    window = WindowConfig(kind="consecutive", size=2, range=(2, 4), shift_every=shift_every)
    digen = {"window": window, "sampling": SamplingConfig(num_steps=STEPS, shared_initial_noise=True)}
    time = plan_time(make_run(digen=digen, **settings), None, MFU, 1.0)
    assert time.generating_flops == pytest.approx(SAMPLES * steps * FORWARD)


def test_leaves_of_a_tree_share_the_steps_up_to_their_split():
    tree = BranchesConfig(splits=(0, 3, 6, 9), factor=2)
    sampling = SamplingConfig(num_steps=20, shared_initial_noise=True)
    run = make_run(digen={"branches": tree, "sampling": sampling}, group_size=16)
    forwards = 2 * (1 + 3 * 1 + 3 * 2 + 3 * 4 + 10 * 8)  # two batches of eight leaves
    assert plan_time(run, None, MFU, 1.0).generating_flops == pytest.approx(4 * forwards * FORWARD)


@pytest.mark.parametrize(
    ("digen", "forwards"),
    [
        ({"kl": KlConfig(coef=0.1), "loss": {"old_log_probs": "recompute"}}, 2),
        ({"loss": {"name": "gspo"}}, 1),
        ({"loss": {"name": "opd"}}, 1),
    ],
)
def test_what_a_loss_compares_with_costs_forwards(digen, forwards):
    """A reference and recomputed log-probs, whole trajectories, a teacher."""
    assert plan_time(make_run(digen=digen), None, MFU, 1.0).training_flops == SAMPLES * ROWS * (4 + forwards) * FORWARD


@pytest.mark.parametrize(
    ("loss", "mini_batches", "epochs", "forwards"),
    [
        ({}, 2, 1, 4 + 1),
        ({}, 1, 3, 3 * 4 + 1),
        ({"old_log_probs": "rollout"}, 2, 3, 3 * 4),
        ({"name": "grpo_guard"}, 1, 1, 4),
        ({"name": "grpo_guard"}, 2, 3, 3 * (4 + 1)),
        ({"name": "reinforce"}, 2, 1, 4),
    ],
)
def test_several_optimizer_steps_cost_a_forward_of_the_policy_before_them(loss, mini_batches, epochs, forwards):
    run = make_run(digen={"loss": loss}, num_mini_batches=mini_batches, num_epochs=epochs)
    assert plan_time(run, None, MFU, 1.0).training_flops == pytest.approx(SAMPLES * ROWS * forwards * FORWARD)


@pytest.mark.parametrize(
    ("digen", "num_trained"),
    [
        ({"advantage": AdvantageConfig(best_of=2)}, 8),
        ({"advantage": AdvantageConfig(best_of=100)}, SAMPLES),
        ({"loss": {"name": "online_dpo"}}, 8),
    ],
)
def test_only_selected_samples_train_and_all_are_generated(digen, num_trained):
    """Four groups of eight."""
    run = make_run(digen=digen)
    assert (run.settings.num_samples, run.settings.num_trained_samples) == (SAMPLES, num_trained)
    found, of_all = plan_time(run, None, MFU, 1.0), plan_time(make_run(digen=digen | ALL), None, MFU, 1.0)
    assert found.generating_flops == SAMPLES * STEPS * FORWARD
    if "loss" not in digen:
        assert found.training_flops * SAMPLES == of_all.training_flops * num_trained


def test_frozen_weights_need_no_gradient_of_their_own():
    assert plan_time(make_run(lora=True), None, MFU, 1.0).training_flops == SAMPLES * ROWS * (2 + 0.6 + 0.8) * FORWARD


def test_an_unknown_device_has_no_seconds():
    time = plan_time(make_run(), None, MFU, 1.0)
    assert time.generating_s is None and time.training_s is None and time.step_s is None


def test_half_of_the_blocks_recomputed_cost_half_a_forward():
    assert plan_time(make_run(), None, MFU, 0.5).training_flops == SAMPLES * ROWS * 3.5 * FORWARD


def test_pictures_of_a_data_set_are_not_denoised():
    digen = {"loss": {"name": "offline_dpo"}, "forward": ForwardConfig(kind="logit_normal", num_points=1)}
    time = plan_time(make_run(digen=digen), "H100", MFU, 1.0)
    assert time.generating_flops == time.generating_s == 0 and time.training_flops > 0


H800 = "H800", "H800"


def two_pools(num_trainer: int, num_generator: int, **settings):
    sizes = {"num_trainer_devices": num_trainer, "num_generator_devices": num_generator}
    per_node = {"trainer_devices_per_node": min(8, num_trainer), "generator_devices_per_node": min(8, num_generator)}
    return make_run(is_split=True, frees_replica=False, **sizes, **per_node, **settings)


def test_the_profile_takes_the_seconds_of_the_plan():
    run = two_pools(4, 12)
    memory = plan_memory(run, None)
    time, profile = plan_time(run, "H800", MFU, memory.recomputed_share), run_profile(run, memory, "H800", MFU)
    assert profile.numbers.gather_s == pytest.approx(run.measured.counts.num_params * 2 / GATHER_BYTES_PER_S)
    numbers = replace(profile.numbers, gather_s=0.0)
    assert sample_s(numbers, 1.0) * 32 / 12 == pytest.approx(time.generating_s)
    assert train_s(numbers, numbers.num_prompts, 4, slowdown=1.0, has_tsp=True) == pytest.approx(time.training_s)


def test_every_split_is_simulated_as_by_digen_simulate_and_the_best_is_proposed():
    run = two_pools(2, 14)
    found = plan_split(run, H800, None, MFU)
    (family,) = placed_splits({"H800": [8, 8]}, Limits())
    seconds = {}
    for placed in family:
        resized = with_split(run, placed)
        profile = run_profile(resized, plan_memory(resized, None), "H800", MFU)
        rules = simulated_rules(profile, placed.split, ("gap", "tsp"))
        outcome = run_split(profile, placed.split, ("gap", "tsp"), num_steps=SEARCH_STEPS, rules=rules)
        seconds[str(placed.split)] = outcome.step_s
    assert len(seconds) == 15 and found.best_s == min(seconds.values()) == seconds[str(found.best.split)]
    assert found.given_s == seconds["2xH800 + 14xH800"] and found.is_proposed
    assert found.gain == pytest.approx(found.given_s / found.best_s)


def test_in_turns_is_the_colocated_run_of_the_simulator():
    run = make_run()
    found = plan_split(run, H800, None, MFU)
    memory = plan_memory(run, None)
    one = run_colocated(run_profile(run, memory, "H800", MFU), Pool(8, "H800"), has_tsp=True)
    assert found.given is None and found.together_s == one.step_s


def test_slow_rewards_make_separate_pools_worth_it():
    """A colocated run waits for the last reward of a batch; separate pools generate the next one, if they may."""
    run = make_run(digen={"staleness": StalenessConfig(max_versions=1)})
    quick, slow = (plan_split(run, H800, None, MFU, reward_s=seconds) for seconds in (0.0, 100.0))
    assert slow.together_s == pytest.approx(quick.together_s + 100.0)
    assert not quick.is_proposed and slow.is_proposed


def test_a_split_that_does_not_fit_is_not_proposed():
    run = two_pools(2, 14)
    every = {placed.split.trainer.num_devices: placed for placed in placed_splits({"H800": [8, 8]}, Limits())[0]}
    needed = {number: plan_memory(with_split(run, placed), 10**15).peak_bytes for number, placed in every.items()}
    assert needed[12] < needed[8] < needed[4]
    device_bytes = int((needed[12] + needed[8]) / 2 / 0.9)
    assert plan_split(run, H800, device_bytes, MFU).best.split.trainer.num_devices > 8
    assert plan_split(run, H800, 10**9, MFU).best is None


def test_of_two_types_the_faster_one_trains():
    run = two_pools(8, 8)
    found = plan_split(run, ("A100", "H800"), None, MFU)
    assert str(found.best.split) == "8xH800 + 8xA100" and found.gain > 1.5
    assert found.overrides[-2:] == [
        "digen.placement.trainer_accelerator=H800",
        "digen.placement.generator_accelerator=A100",
    ]
    assert plan_split(two_pools(8, 8), ("H800", "A100"), None, MFU).is_proposed is False


def test_seconds_of_two_types_are_each_of_its_own():
    one, two = (plan_time(two_pools(8, 8), "H800", MFU, 0.0, other) for other in (None, "A100"))
    assert two.training_s == one.training_s
    assert two.generating_s == pytest.approx(one.generating_s * PEAK_TFLOPS["H800"] / PEAK_TFLOPS["A100"])


def test_a_split_is_proposed_where_one_pool_does_not_fit():
    found = replace(plan_split(make_run(), H800, None, MFU), together_s=None, together="")
    said = split_lines(found, "WORDS")
    assert found.is_proposed and said[0].endswith("not measured: one pool does not fit")
    assert said[1].startswith(f"  best split: {found.best.split.trainer} train") and said[2] == "    WORDS"


@pytest.mark.parametrize("changes", [{"num_mini_batches": 2}, {"num_epochs": 2}])
def test_no_split_is_proposed_where_a_batch_is_several_optimizer_steps(changes):
    """Separate pools refuse it, so that a split's seconds would be another run's."""
    plan = plan_split(make_run(num_trainer_devices=8, num_generator_devices=8, **changes), H800, None, MFU)
    assert plan is not None and plan.together_s is not None and plan.best is None
    assert split_lines(plan, "")[-1].strip().startswith("no split into trainer and generator is allowed")


def test_it_says_so_where_in_turns_is_faster():
    (first, *rest) = split_lines(plan_split(two_pools(1, 15), H800, None, MFU), "WORDS")
    assert "1xH800 + 15xH800 takes" in first and "16xH800 together, in turns" in first
    assert "leave out recipe disaggregated" in rest[0] and rest[-1] == "    WORDS"


def test_techniques_are_those_of_the_config():
    assert make_rules(2, 2, is_pipelined=False).techniques == ("tsp",)
    assert make_rules(2, 2, assist="bts", max_versions=1).techniques == ("gap", "tsp", "tag", "tcss")


def test_gpus_names_two_types():
    words, _ = split_words(["gpus=20xH800+24xA100"])
    assert words.types == ("H800", "A100") and words.names_accelerator and words.gpus is None
    for wrong, message in (
        ("gpus=20+24", r"gpus must be a number, with a type or a memory, or devices that train \+ .*, got '20\+24'"),
        ("gpus=8xX1", "device must be one of RTX3090"),
        ("gpus=8xH800+8xX1", "the device type of gpus must be one of"),
    ):
        with pytest.raises(ValueError, match=message):
            split_words([wrong])
    with pytest.raises(ValueError, match="device must be left out where gpus names types, got 'H100'"):
        Words(pools=words.pools, device="H100")


@pytest.mark.slow
def test_a_run_accepts_the_words_that_are_proposed(tiny_qwen_image, capsys):
    separate = ["recipe=digen_flowgrpo+disaggregated", *small(tiny_qwen_image)[1:], "data.train_batch_size=8"]
    bad = ["trainer.n_gpus_per_node=1", "actor_rollout_ref.rollout.n_gpus_per_node=7", "device=H800"]
    assert digen_plan(*separate, *bad, "--json") == 0
    proposed = json.loads(capsys.readouterr().out)["split"]
    assert proposed["given"] == "1xH800 + 7xH800" and proposed["gain"] > 1.5
    assert digen_plan(*separate, *proposed["words"].split(), "device=H800", "--json") == 0
    again = json.loads(capsys.readouterr().out)["split"]
    assert again["given"] == proposed["best"] and again["words"] == ""
    assert again["given_s"] == pytest.approx(proposed["best_s"]) and math.isclose(again["gain"], 1.0)


def test_words_for_one_pool_name_the_recipe_and_what_a_run_would_refuse(tiny_qwen_image):
    """Words for a colocated run: its recipe and the pools; and the reason, if a run would refuse them."""
    own = Words(device="H800")
    run = make_run(num_prompts=1, num_trainer_devices=8, num_generator_devices=8)
    split = plan_split(run, H800, None, MFU)
    overrides = [*small(tiny_qwen_image), "data.train_batch_size=8", "trainer.n_gpus_per_node=8"]
    words = split_words_of(split, overrides, own)
    recipe, *rest = words.split()
    assert recipe == "recipe=digen_flowgrpo+disaggregated" and rest == split.overrides
    refused = split_words_of(split, [*overrides, "actor_rollout_ref.actor.ppo_epochs=2"], own)
    assert refused.startswith("which a run would refuse as it is: actor_rollout_ref.actor.ppo_mini_batch_size")
