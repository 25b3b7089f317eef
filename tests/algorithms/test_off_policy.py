# SPDX-License-Identifier: Apache-2.0
"""Off-policy losses against slow references in plain Python, value and gradient; which policy a ratio is against."""

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

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


class Batch:
    """Trajectories with float64 numbers that fp32 holds exactly; a ratio is some 30% off."""

    def __init__(self, seed: int):
        rng = random.Random(seed)
        self.trajectory = [number for number, count in enumerate(STEPS) for _ in range(count)]
        of_samples = [(fp32(rng.gauss(0, 1.5)), fp32(rng.gauss(0.3, 1))) for _ in STEPS]
        self.advantage = [of_samples[number][0] for number in self.trajectory]
        self.reward = [of_samples[number][1] for number in self.trajectory]
        self.behaviour = [fp32(rng.gauss(-1, 0.5)) for _ in self.trajectory]
        self.old = [fp32(value + rng.gauss(0, 0.2)) for value in self.behaviour]
        self.log_prob = [fp32(value + rng.gauss(0, 0.3)) for value in self.behaviour]

    def inputs(self) -> dict[str, torch.Tensor]:
        log_prob, behaviour = torch.tensor(self.log_prob), torch.tensor(self.behaviour)
        return {
            "log_prob": log_prob.requires_grad_(),
            "behaviour_log_prob": behaviour,
            "old_log_prob": torch.tensor(self.old),
            "advantage": torch.tensor(self.advantage),
            "reward": torch.tensor(self.reward),
            "trajectory_log_ratio": trajectory_log_ratios(log_prob.detach() - behaviour, torch.tensor(self.trajectory)),
        }


def fp32(value: float) -> float:
    return torch.tensor(value, dtype=torch.float32).item()


# -- slow references: one trained row at a time ---------------------------------------------------------------
# `log_probs` is what the loss is differentiated by; `frozen` are the same numbers where the loss stops the gradient.
Reference = Callable[[Batch, list[float], list[float], Any, int], float]


def clamped(value: float, low: float, high: float) -> float:
    return low if value < low else high if value > high else value


def advantage(batch: Batch, config: Any, row: int) -> float:
    return clamped(batch.advantage[row], -config.advantage_clip, config.advantage_clip)


def tis(batch: Batch, log_probs: list[float], frozen: list[float], config: Any, row: int) -> float:
    ratio = math.exp(frozen[row] - batch.behaviour[row])
    return -clamped(ratio, config.low, config.high) * advantage(batch, config, row) * log_probs[row]


def cispo(batch: Batch, log_probs: list[float], frozen: list[float], config: Any, row: int) -> float:
    ratio, own = math.exp(frozen[row] - batch.behaviour[row]), advantage(batch, config, row)
    low, high = 1 - config.low, 1 + config.high
    if config.mask and ((own > 0 and ratio > high) or (own < 0 and ratio < low)):
        return 0.0
    return -clamped(ratio, low, high) * own * log_probs[row]


def topr(batch: Batch, log_probs: list[float], frozen: list[float], config: Any, row: int) -> float:
    weight = 1.0
    if batch.reward[row] <= config.threshold:
        weight = min(math.exp(frozen[row] - batch.behaviour[row]), 1.0)
    return -weight * advantage(batch, config, row) * log_probs[row]


def weighted_topr(batch: Batch, log_probs: list[float], frozen: list[float], config: Any, row: int) -> float:
    is_positive = batch.reward[row] > config.threshold
    weight = config.positive_weight if is_positive else config.negative_weight
    return weight * topr(batch, log_probs, frozen, config, row)


def clip(ratio: float, own: float, config: ClipConfig) -> float:
    low, high = config.ratio_range
    return max(-own * ratio, -own * clamped(ratio, low, high))


def decoupled_ppo(batch: Batch, log_probs: list[float], frozen: list[float], config: Any, row: int) -> float:
    weight = min(math.exp(batch.old[row] - batch.behaviour[row]), config.cap)
    return weight * clip(math.exp(log_probs[row] - batch.old[row]), advantage(batch, config, row), config)


def gspo(batch: Batch, log_probs: list[float], frozen: list[float], config: Any, row: int) -> float:
    own = [other for other, number in enumerate(batch.trajectory) if number == batch.trajectory[row]]
    mean = sum(log_probs[other] - batch.behaviour[other] for other in own) / len(own)
    return clip(math.exp(mean), advantage(batch, config, row), config)


def kimi(batch: Batch, log_probs: list[float], frozen: list[float], config: Any, row: int) -> float:
    squared = (log_probs[row] - batch.behaviour[row]) ** 2
    return -advantage(batch, config, row) * log_probs[row] + config.tau / 2 * squared


def reinforce(batch: Batch, log_probs: list[float], frozen: list[float], config: Any, row: int) -> float:
    return -advantage(batch, config, row) * log_probs[row]


REFERENCES: dict[str, Reference] = {
    function.__name__: function for function in (tis, cispo, topr, weighted_topr, decoupled_ppo, gspo, kimi, reinforce)
}


def reference_loss(name: str, batch: Batch, config: LossConfig, log_probs: list[float], keep: list[bool]) -> float:
    rows = [row for row, kept in enumerate(keep) if kept]
    return sum(REFERENCES[name](batch, log_probs, batch.log_prob, config, row) for row in rows) / len(rows)


def reference_gradient(name: str, batch: Batch, config: LossConfig, keep: list[bool]) -> list[float]:
    """By central differences in float64."""
    found = []
    for row in range(len(keep)):
        up, down = list(batch.log_prob), list(batch.log_prob)
        up[row] += 1e-6
        down[row] -= 1e-6
        difference = reference_loss(name, batch, config, up, keep) - reference_loss(name, batch, config, down, keep)
        found.append(difference / 2e-6)
    return found


@pytest.mark.parametrize("mask", [False, True], ids=["all", "masked"])
@pytest.mark.parametrize(("name", "config"), MORE_CONFIGS, ids=str)
def test_loss_and_gradient_are_those_of_the_slow_reference(name: str, config: LossConfig, mask: bool):
    for seed in range(5):
        batch = Batch(seed)
        keep = [not (mask and number in (1, 3)) for number in batch.trajectory]  # whole trajectories are padding
        inputs = batch.inputs()
        output = policy_loss(name, inputs | {"mask": torch.tensor(keep)}, config)
        assert output.loss.item() == pytest.approx(
            reference_loss(name, batch, config, batch.log_prob, keep), rel=1e-5, abs=1e-6
        )
        (found,) = torch.autograd.grad(output.loss, inputs["log_prob"])
        assert found.tolist() == pytest.approx(reference_gradient(name, batch, config, keep), rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("name", REFERENCES)
def test_no_gradient_reaches_what_was_recorded(name: str):
    """decoupled_ppo apart, whose clip has the policy before the update in it: that the engine hands over detached."""
    inputs = {key: value.detach().requires_grad_() for key, value in Batch(0).inputs().items()}
    constants = [
        key for key in find_objective(name).loss.inputs_for(CONFIGS[name]) if key in ("reward", "trajectory_log_ratio")
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
    assert {name for name in objective_names() if find_objective(name).loss.off_policy} >= {*REFERENCES}
    assert not find_objective("flow_grpo").loss.off_policy and not find_objective("dance_grpo").loss.off_policy


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
            for name in sorted({*REFERENCES} - {"decoupled_ppo"})
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
        if find_objective(name).loss.off_policy:
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
