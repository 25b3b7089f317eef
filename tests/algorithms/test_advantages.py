# SPDX-License-Identifier: Apache-2.0
import itertools
import json
import random
from pathlib import Path

import pytest
import torch

from verl_digen.algorithms.advantages import (
    SCALES,
    advantage_scale,
    combined_advantages,
    effective_samples,
    group_advantages,
)

ORACLES = Path(__file__).parents[1] / "fixtures" / "oracles"
EVERY_RULE = list(itertools.product(SCALES, (0, 1), (0.0, 1e-8, 1e-4)))


def reference_std(values, ddof):
    mean = sum(values) / len(values)
    if len(values) == 1:
        return 0.0
    return (sum((value - mean) ** 2 for value in values) / (len(values) - ddof)) ** 0.5


def reference_advantages(rewards, groups, scale, ddof, eps):
    members = {group: [r for r, g in zip(rewards, groups, strict=True) if g == group] for group in groups}
    group_stds = {group: reference_std(values, ddof) for group, values in members.items()}
    advantages = []
    for reward, group in zip(rewards, groups, strict=True):
        centred = reward - sum(members[group]) / len(members[group])
        divisor = {
            "batch": reference_std(rewards, ddof) + eps,
            "group": group_stds[group] + eps,
            "max_group": max(group_stds.values()) + eps,
            "none": 1.0,
        }[scale]
        advantages.append(centred / divisor if len(set(members[group])) > 1 else 0.0)
    return advantages


def assert_invariants(rewards, groups, scale, ddof, eps):
    advantages = group_advantages(rewards, groups, scale=scale, ddof=ddof, eps=eps)
    assert advantages.shape == rewards.shape
    assert advantages.dtype == torch.float32
    assert advantages.isfinite().all()
    for group in set(groups):
        of_group = [i for i, g in enumerate(groups) if g == group]
        assert advantages[of_group].double().sum().abs() < 1e-5
        if len(set(rewards[of_group].tolist())) == 1:
            assert torch.equal(advantages[of_group], torch.zeros(len(of_group)))


@pytest.mark.parametrize("scale", ["batch", "group"])
def test_advantages_agree_with_flow_grpo(scale):
    oracle = json.loads((ORACLES / "advantages.json").read_text())
    rewards = torch.tensor(oracle["rewards"], dtype=torch.float64)
    got = group_advantages(rewards, oracle["prompts"], scale=scale, ddof=oracle["ddof"], eps=oracle["eps"])
    torch.testing.assert_close(got, torch.tensor(oracle[scale]), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(("scale", "ddof", "eps"), EVERY_RULE)
def test_advantages_agree_with_the_reference_and_keep_the_invariants_in_a_sweep(scale, ddof, eps):
    rng = random.Random(0)
    for _ in range(10):
        groups = [f"g{rng.randrange(4)}" for _ in range(rng.randrange(1, 14))]
        rewards = [rng.choice([0.0, 0.7, 1.0, rng.random()]) for _ in groups]
        expected = reference_advantages(rewards, groups, scale, ddof, eps)
        rewards = torch.tensor(rewards, dtype=torch.float64)
        got = group_advantages(rewards, groups, scale=scale, ddof=ddof, eps=eps)
        torch.testing.assert_close(got, torch.tensor(expected), atol=1e-5, rtol=1e-5)
        assert_invariants(rewards, groups, scale, ddof, eps)


def test_the_defaults_are_batch_scale_with_population_std_and_eps_1e_4():
    rewards, groups = torch.tensor([1.0, 0.0, 3.0, 0.0]), ["a", "a", "b", "b"]
    torch.testing.assert_close(
        group_advantages(rewards, groups), torch.tensor([0.5, -0.5, 1.5, -1.5]) / (1.5**0.5 + 1e-4)
    )


def test_equal_fp32_rewards_get_exactly_0_at_the_smallest_eps():
    rewards = torch.full((7,), 0.7)
    assert torch.equal(group_advantages(rewards, ["a"] * 7, scale="group", eps=1e-8), torch.zeros(7))


@pytest.mark.parametrize("scale", ["batch", "max_group", "none"])
def test_a_common_scale_can_be_applied_afterwards(scale):
    rewards, groups = torch.tensor([0.1, 0.5, 0.4, 0.8, 0.2, 0.2]), list("aabbcc")
    divisor = advantage_scale(rewards, groups, scale=scale)
    assert divisor.unique().numel() == 1
    later = group_advantages(rewards, groups, scale="none") / divisor[0]
    torch.testing.assert_close(later.float(), group_advantages(rewards, groups, scale=scale))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_reward_that_is_not_finite_is_an_error_that_names_its_index(bad):
    rewards = torch.tensor([0.0, 1.0, bad, 0.5])
    with pytest.raises(ValueError, match=r"reward must be finite, got .* at index 2"):
        group_advantages(rewards, list("aabb"))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (dict(scale="std"), "unknown advantage scale 'std'; known scales: batch, group, max_group, none"),
        (dict(ddof=2), "ddof must be 0 .* or 1"),
        (dict(eps=-1.0), "eps must be >= 0"),
        (dict(groups=["a"]), "got 2 rewards and 1 ids"),
        (dict(rewards=torch.zeros(2, 1)), r"shape \[B\]"),
        (dict(rewards=torch.zeros(0), groups=[]), "B >= 1"),
    ],
)
def test_wrong_arguments_are_errors_that_say_what_is_wrong(overrides, message):
    with pytest.raises(ValueError, match=message):
        group_advantages(**dict(rewards=torch.tensor([0.0, 1.0]), groups=["a", "a"]) | overrides)


@pytest.mark.parametrize("ddof", [0, 1])
def test_gdpo_normalises_each_reward_in_its_group_before_they_are_weighted_and_scaled_by_the_batch(ddof):
    rng, eps = random.Random(0), 1e-4
    weights = {"ocr": 0.7, "pick": -2.0, "gold": 0.0}
    groups = {f"g{number}": {name: [rng.gauss(5, 3) for _ in range(4)] for name in weights} for number in range(3)}
    groups["g1"]["ocr"] = [0.25] * 4
    combined = {
        uid: combined_advantages(parts, weights, ddof=ddof, eps=eps) for uid, parts in groups.items()
    }  # as the driver has them, group after group
    expected = []
    for parts in groups.values():
        for index in range(4):
            total = 0.0
            for name, weight in weights.items():
                values = parts[name]
                centred = values[index] - sum(values) / 4
                total += weight * centred / (reference_std(values, ddof) + eps) if len(set(values)) > 1 else 0.0
            expected.append(total)
    found = [value for values in combined.values() for value in values]
    assert found == pytest.approx(expected, rel=1e-12)
    uids = [uid for uid in groups for _ in range(4)]
    scaled = group_advantages(torch.tensor(found, dtype=torch.float64), uids, scale="batch", ddof=ddof, eps=eps)
    batch_std = reference_std(expected, ddof)
    assert scaled.tolist() == pytest.approx([value / (batch_std + eps) for value in expected], rel=1e-5)


def test_gdpo_trains_a_group_whose_weighted_sums_are_equal():
    assert combined_advantages({"a": [1.0, 0.0], "b": [0.0, 2.0]}, {"a": 2.0, "b": 1.0}, eps=0.0) == [1.0, -1.0]
    assert combined_advantages({"a": [1.0, 1.0]}, {"a": 2.0}) == [0.0, 0.0]
    with pytest.raises(ValueError, match="a weight must differ from 0"):
        combined_advantages({"a": [1.0, 1.0]}, {"a": 0.0})


def test_effective_samples_are_as_many_of_equal_weight():
    given = ([1.0, -1.0, 0.0, 0.0], [3.0, -1.0], [2.0] * 5, [0.0, 0.0], [])
    assert [effective_samples(torch.tensor(values)) for values in given] == [2.0, 1.6, 5.0, 0.0, 0.0]
