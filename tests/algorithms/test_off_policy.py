# SPDX-License-Identifier: Apache-2.0
"""Off-policy losses against their formulas row by row in fp64, value and gradient; which policy a ratio is against."""

import pytest
import torch

from tests.path_losses import slow_loss
from verl_digen.algorithms.objectives import (
    ClampedConfig,
    ClipConfig,
    LossConfig,
    choose_denominator,
    default_config,
    find_objective,
    objective_names,
    policy_loss,
    register_objective,
)
from verl_digen.algorithms.objectives.cispo import CispoConfig
from verl_digen.algorithms.objectives.decoupled_ppo import DecoupledPpoConfig
from verl_digen.algorithms.objectives.gspo import trajectory_log_ratios
from verl_digen.algorithms.objectives.kimi import KimiConfig
from verl_digen.algorithms.objectives.tis import TisConfig
from verl_digen.algorithms.objectives.topr import ToprConfig, WeightedToprConfig

STEPS = (3, 1, 4, 2, 3)
"""Trained steps of each trajectory."""
CONFIGS: dict[str, LossConfig] = {
    "tis": TisConfig(advantage_clip=1.5, low=0.8, high=1.1),
    "cispo": CispoConfig(advantage_clip=1.5, low=0.15, high=0.1),
    "topr": ToprConfig(advantage_clip=1.5, threshold=0.3),
    "weighted_topr": WeightedToprConfig(advantage_clip=1.5, threshold=0.3, positive_weight=0.7, negative_weight=1.9),
    "decoupled_ppo": DecoupledPpoConfig(advantage_clip=1.5, clip_range=0.1, clip_range_high=0.2, cap=1.05),
    "gspo": ClipConfig(advantage_clip=1.5, clip_range=0.1, clip_range_high=0.2),
    "kimi": KimiConfig(advantage_clip=1.5, tau=0.3),
    "reinforce": ClampedConfig(advantage_clip=1.5),
}
"""Bounds that bind for some rows and not for others."""
MORE_CONFIGS = [
    *CONFIGS.items(),
    *((name, default_config(name)) for name in CONFIGS),
    ("cispo", CispoConfig(mask=True)),
    ("gspo", ClipConfig(clip_range=0.1)),
]


def some_inputs(seed: int) -> dict[str, torch.Tensor]:
    """Rows of several trajectories; a ratio is some 30% off."""
    generator = torch.Generator().manual_seed(seed)

    def draw(mean: float, std: float, count: int = sum(STEPS)) -> torch.Tensor:
        return mean + std * torch.randn(count, generator=generator)

    sample = torch.arange(len(STEPS)).repeat_interleave(torch.tensor(STEPS))
    behaviour = draw(-1.0, 0.5)
    log_prob = behaviour + draw(0.0, 0.3)
    return {
        "log_prob": log_prob.requires_grad_(),
        "behaviour_log_prob": behaviour,
        "old_log_prob": behaviour + draw(0.0, 0.2),
        "advantage": draw(0.0, 1.5, len(STEPS))[sample],
        "reward": draw(0.3, 1.0, len(STEPS))[sample],
        "trajectory_log_ratio": trajectory_log_ratios(log_prob.detach() - behaviour, sample),
        "sample": sample,
    }


@pytest.mark.parametrize("is_masked", [False, True], ids=["all", "masked"])
@pytest.mark.parametrize(("name", "config"), MORE_CONFIGS, ids=str)
def test_loss_and_gradient_are_those_of_the_formula(name: str, config: LossConfig, is_masked: bool):
    for seed in range(5):
        inputs = some_inputs(seed)
        keep = torch.tensor([not (is_masked and number in (1, 3)) for number in inputs["sample"].tolist()])
        output = policy_loss(name, inputs | {"mask": keep}, config)
        expected = slow_loss(name, inputs, config, keep.nonzero().flatten().tolist())
        assert output.loss.item() == pytest.approx(expected.item(), rel=1e-5, abs=1e-6)
        (found,), (wanted,) = (torch.autograd.grad(loss, inputs["log_prob"]) for loss in (output.loss, expected))
        assert found.tolist() == pytest.approx(wanted.tolist(), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("name", CONFIGS)
def test_no_gradient_reaches_what_was_recorded(name: str):
    """decoupled_ppo apart, whose clip has the policy before the update in it: that the engine hands over detached."""
    inputs = {
        key: value.detach().requires_grad_() for key, value in some_inputs(0).items() if value.is_floating_point()
    }
    constants = [
        key for key in find_objective(name).inputs_for(CONFIGS[name]) if key in ("reward", "trajectory_log_ratio")
    ]
    if name in ("tis", "cispo", "topr", "weighted_topr", "decoupled_ppo"):
        constants.append("behaviour_log_prob")
    loss = policy_loss(name, inputs, CONFIGS[name]).loss
    for key in constants:
        assert torch.autograd.grad(loss, inputs[key], retain_graph=True, allow_unused=True)[0] is None, key


def test_trajectories_are_known_by_their_ids_wherever_their_rows_lie():
    found = trajectory_log_ratios(torch.tensor([1.0, 10.0, 3.0, -4.0, 5.0]), torch.tensor([7, 0, 7, 0, 7]))
    assert found.tolist() == [3.0, 3.0, 3.0, 3.0, 3.0]
    assert trajectory_log_ratios(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).tolist() == []


# -- which policy the ratio is against ----------------------------------------------------------------------
def test_losses_that_are_sound_on_old_samples_say_so():
    assert {name for name in objective_names() if find_objective(name).off_policy} >= {*CONFIGS}
    assert not find_objective("flow_grpo").off_policy and not find_objective("dance_grpo").off_policy


@pytest.mark.parametrize(
    ("name", "setting", "strict", "stale"),
    [
        ("flow_grpo", "auto", "first_pass", "rollout"),
        ("flow_grpo", "recompute", "recompute", "digen.loss.old_log_probs must be auto or rollout with .*flow_grpo"),
        ("flow_grpo", "rollout", "rollout", "rollout"),
        ("decoupled_ppo", "auto", "first_pass", "first_pass"),
        ("decoupled_ppo", "recompute", "recompute", "recompute"),
        *[
            (
                "decoupled_ppo",
                "rollout",
                *["digen.loss.old_log_probs must be auto or recompute with .*decoupled_ppo"] * 2,
            )
        ],
        *[
            (name, setting, "unused", "unused")
            for name in sorted({*CONFIGS} - {"decoupled_ppo"})
            for setting in ("auto", "rollout")
        ],
        *[
            (name, "recompute", *["digen.loss.old_log_probs must be auto or rollout with"] * 2)
            for name in ("tis", "gspo", "reinforce")
        ],
    ],
)
def test_the_denominator_is_the_policy_that_generated(name: str, setting: str, strict: str, stale: str):
    for max_versions, expected in ((0, strict), (1, stale)):
        if expected.startswith("digen"):
            with pytest.raises(ValueError, match=expected):
                choose_denominator(name, default_config(name), setting, max_versions)
        else:
            assert choose_denominator(name, default_config(name), setting, max_versions) == expected


def test_more_than_one_version_needs_an_off_policy_loss():
    for name in objective_names():
        if find_objective(name).off_policy:
            assert choose_denominator(name, default_config(name), "auto", 3) != "rollout"
        else:
            with pytest.raises(ValueError, match=r"digen.loss.name must be one of awm, .* got '.*'; choose one"):
                choose_denominator(name, default_config(name), "auto", 2)


def test_a_loss_of_one_s_own_that_reads_old_log_prob_gets_the_recorded_ones():
    register_objective("mine", columns=("log_prob", "old_log_prob"), off_policy=True)(lambda rows, config: None)  # type: ignore[arg-type]
    assert choose_denominator("mine", ClampedConfig(), "auto", 3) == "rollout"
    assert choose_denominator("mine", ClampedConfig(), "auto", 0) == "first_pass"


def test_forward_points_have_no_log_probs_to_choose_from():
    for max_versions in (0, 1):
        assert choose_denominator("diffusion_nft", default_config("diffusion_nft"), "auto", max_versions) == "unused"
    for setting in ("recompute", "rollout"):
        with pytest.raises(ValueError, match=r"digen.loss.old_log_probs must be auto with .*diffusion_nft"):
            choose_denominator("diffusion_nft", default_config("diffusion_nft"), setting, 0)
