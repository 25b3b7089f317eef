# SPDX-License-Identifier: Apache-2.0
"""Runs whose samples may train before their group is complete, and runs where that would not be exact."""

from __future__ import annotations

import pytest

from verl_digen import preflight
from verl_digen.preflight.subgroups import check_subgroups

pytestmark = pytest.mark.slow

KEY = "digen.gap.subgroups"


@pytest.fixture
def separate(runnable) -> list[str]:
    """`runnable` on separate pools with the switch on."""
    recipes = "recipe=[digen_flowgrpo,disaggregated]"
    return [*(recipes if one.startswith("recipe=") else one for one in runnable), f"{KEY}=true"]


def test_a_strict_run_may_train_samples_before_their_group_is_complete(start, separate):
    preflight.check(start(*separate))
    for name in ("dance_grpo", "grpo_guard", "flow_dppo", "reinforce", "tis", "longcat"):
        check_subgroups(start(*separate, f"digen.loss.name={name}"))
    check_subgroups(start(*separate, "digen.loss.old_log_probs=recompute"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("digen.loss.name=gspo",), "digen.loss.name must be one of dance_grpo, decoupled_ppo, flow_dppo, flow_grpo, "),
        (("digen.loss.name=kimi",), f"with {KEY}=true, which are linear in the advantage, got 'kimi'"),
        (("digen.loss.name=cispo",), f"with {KEY}=true, which are linear in the advantage, got 'cispo'"),
        (("digen.loss.name=diffusion_nft",), f"with {KEY}=true, which are linear in the advantage"),
        (("digen.staleness.max_versions=1",), f"digen.staleness.max_versions must be 0 with {KEY}=true"),
        (("digen.loss.old_log_probs=rollout",), f"digen.loss.old_log_probs must be auto or recompute with {KEY}=true"),
        (("digen.gap.enable=false",), f"digen.gap.enable must be true with {KEY}=true"),
        (
            ("digen.branches.splits=[0,2]", "digen.sampling.shared_initial_noise=true"),
            f"digen.branches.splits must be [] with {KEY}=true",
        ),
        (("digen.reward.combine=gdpo",), f"digen.reward.combine must not be gdpo with {KEY}=true"),
        (("digen.advantage.best_of=2",), f"digen.advantage.best_of must be null with {KEY}=true"),
    ],
)
def test_what_would_not_be_exact_is_refused(start, separate, given, message):
    with pytest.raises(ValueError) as refused:
        check_subgroups(start(*separate, *given))
    assert message in str(refused.value)
    assert "leave" in str(refused.value)  # the remedy


def test_it_needs_separate_pools_and_one_optimizer_step(start, runnable, separate):
    for overrides, message in (
        ([*runnable, f"{KEY}=true"], f"{KEY} must be false where trainer and replicas take turns"),
        ([*separate, "actor_rollout_ref.actor.ppo_epochs=2"], "ppo_epochs 1 on separate pools"),
    ):
        with pytest.raises(ValueError) as refused:
            preflight.check(start(*overrides))
        assert message in str(refused.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("digen.environment.name=shape_edits",), f"{KEY} must be false with an environment, whose episodes"),
        (("digen.reward.recipe_functions.diversity=0.5",), f"{KEY} must be false with diversity, which"),
    ],
)
def test_rewards_of_whole_groups_and_episodes_are_refused(start, separate, given, message):
    with pytest.raises(ValueError) as refused:
        check_subgroups(start(*separate, *given))
    assert message in str(refused.value)
