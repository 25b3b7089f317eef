# SPDX-License-Identifier: Apache-2.0
"""Advantages of a batch whose rewards come group by group."""

import random
from collections.abc import Sequence

import pytest
import torch

from tests.engine.harness import described
from verl_digen.algorithms.advantages import group_advantages
from verl_digen.config import AdvantageConfig
from verl_digen.engine.fragment import FragmentSample
from verl_digen.engine.ledger import AdvantageLedger, Ready

CLIP = 2.0


def samples_of(
    keys: Sequence[str], groups: Sequence[str], rewards: Sequence[float], nodes: Sequence[tuple[int, ...]] = ()
) -> list[FragmentSample]:
    """Samples with these keys, groups and rewards, and nodes of a tree if there is one."""
    own = nodes or [()] * len(keys)
    return [described(key, *rest, 2, nodes=leaf) for key, *rest, leaf in zip(keys, groups, rewards, own, strict=True)]


def keys_of(ready: Ready) -> tuple[str, ...]:
    return tuple(sample.key for sample in ready.samples)


def groups_of(rng: random.Random, num_groups: int) -> dict[str, list[float]]:
    """Rewards of each group: normal, binary, one outlier, or all equal."""
    kinds = [
        lambda: [rng.gauss(rng.gauss(0, 1), 0.3) for _ in range(rng.randint(2, 8))],
        lambda: [float(rng.random() < 0.3) for _ in range(8)],
        lambda: [0.0] * 7 + [rng.choice([1.0, 30.0])],
        lambda: [0.25] * 4,
    ]
    return {f"g{number}": rng.choice(kinds)() for number in range(num_groups)}


def arrivals(rng: random.Random, groups: dict[str, list[float]]):
    """The groups as fragments, in any order."""
    names = rng.sample(sorted(groups), len(groups))
    while names:
        size = rng.randint(1, 3)
        fragment, names = names[:size], names[size:]
        keys = [f"{name}_{index}" for name in fragment for index in range(len(groups[name]))]
        yield keys, [key.split("_")[0] for key in keys], [reward for name in fragment for reward in groups[name]]


@pytest.mark.parametrize("scale", ["batch", "max_group", "group", "none"])
@pytest.mark.parametrize("ddof", [0, 1])
def test_what_trains_early_is_what_the_whole_batch_would_train(scale: str, ddof: int):
    rng = random.Random(ddof)
    num_early = num_held = num_clamped = 0
    for _ in range(60):
        groups = groups_of(rng, rng.randint(1, 6))
        rewards = [reward for own in groups.values() for reward in own]
        keys = [f"{name}_{index}" for name, own in groups.items() for index in range(len(own))]
        config = AdvantageConfig(scale=scale, ddof=ddof)
        spare = rng.choice([0, 3])  # groups that were planned and dropped
        ledger = AdvantageLedger(config, len(keys) + spare, CLIP, is_homogeneous=True)
        early: dict[str, float] = {}
        final: dict[str, float] = {}
        divisor = None
        for fragment in arrivals(rng, groups):
            ledger.add(samples_of(*fragment))
            ready = ledger.take()
            for key, advantage in zip(keys_of(ready), ready.advantages.tolist(), strict=True):
                target = early if ready.divisor is None else final
                assert key not in early and key not in final
                target[key] = advantage
            divisor = divisor if ready.divisor is None else ready.divisor
        num_held += len(ledger.held)
        ready = ledger.take(is_last=True)
        final |= dict(zip(keys_of(ready), ready.advantages.tolist(), strict=True))
        divisor = divisor if ready.divisor is None else ready.divisor
        assert {*early} | {*final} == {*keys} and len(ledger.held) == 0

        named = group_advantages(
            torch.tensor(rewards, dtype=torch.float64), [key.split("_")[0] for key in keys], scale=scale, ddof=ddof
        )
        expected = dict(zip(keys, named.tolist(), strict=True))
        assert divisor is not None or not early
        for key, advantage in early.items():
            assert advantage / divisor == pytest.approx(expected[key], rel=1e-5, abs=1e-6)
            assert abs(expected[key]) <= CLIP * (1 + 1e-6)  # so that the loss would not have clamped it
        for key, advantage in final.items():
            assert advantage == pytest.approx(expected[key], rel=1e-5, abs=1e-6)
        num_early += len(early)
        num_clamped += sum(abs(value) > CLIP for value in expected.values())
    late = scale in ("batch", "max_group")
    assert (num_early > 300) == late and (num_held > 0) == late
    assert num_clamped > 0  # else the test has not covered clamping


def test_samples_held_back_are_let_go_when_the_bound_allows():
    ledger = AdvantageLedger(AdvantageConfig(), num_samples=8, clip=1.0, is_homogeneous=True)
    ledger.add(samples_of(["a0", "a1", "a2", "a3"], ["a"] * 4, [0.0, 0.0, 0.0, 1.0]))
    assert keys_of(ledger.take()) == ("a0", "a1", "a2") and len(ledger.held) == 1
    ledger.add(samples_of(["b0", "b1"], ["b"] * 2, [0.0, 5.0]))  # a far wider group
    assert keys_of(ledger.take()) == ("a3",) and len(ledger.held) == 2
    last = ledger.take(is_last=True)
    assert keys_of(last) == ("b0", "b1") and last.divisor == pytest.approx((20 / 6) ** 0.5, abs=1e-3)


def test_the_widest_group_so_far_sets_what_may_train_under_max_group():
    ledger = AdvantageLedger(AdvantageConfig(scale="max_group"), num_samples=12, clip=1.0, is_homogeneous=True)
    ledger.add(samples_of(["a0", "a1"], ["a"] * 2, [0.0, 4.0]))
    assert keys_of(ledger.take()) == ("a0", "a1")
    # its last sample is 1.7 of its own group's scale from the mean, and 0.4 of the first one's
    ledger.add(samples_of(["b0", "b1", "b2", "b3"], ["b"] * 4, [0.0, 0.0, 0.0, 1.0]))
    assert keys_of(ledger.take()) == ("b0", "b1", "b2", "b3") and ledger.held == ()


def test_a_sample_of_a_tree_is_held_while_any_of_its_nodes_might_be_clamped():
    """Inner nodes are 0.25 off the mean, leaves up to 0.75, and the batch's std is 0.43 at present."""
    ledger = AdvantageLedger(AdvantageConfig(), num_samples=4, clip=1.5, is_homogeneous=True)
    nodes = [(0, 0), (0, 1), (2, 2), (2, 3)]
    ledger.add(samples_of(["a0", "a1", "a2", "a3"], ["a"] * 4, [0.0, 0.0, 0.0, 1.0], nodes))
    assert ledger.take(is_last=False).divisor is not None  # complete
    ledger = AdvantageLedger(AdvantageConfig(), num_samples=5, clip=1.5, is_homogeneous=True)
    ledger.add(samples_of(["a0", "a1", "a2", "a3"], ["a"] * 4, [0.0, 0.0, 0.0, 1.0], nodes))
    ready = ledger.take()
    assert keys_of(ready) == ("a0", "a1", "a2") and ledger.held == ("a3",)
    assert ready.advantages.tolist() == [[-0.25, -0.25], [-0.25, -0.25], [0.25, -0.25]]
    with pytest.raises(RuntimeError, match=r"equally many nodes of a tree, or none, got \[0, 2\]"):
        ledger.add(samples_of(["b0"], ["b"], [0.0]))
    last = ledger.take(is_last=True)
    assert keys_of(last) == ("a3",) and last.advantages.tolist() == [
        pytest.approx([0.25 / last.divisor, 0.75 / last.divisor])
    ]


def test_a_loss_that_is_not_homogeneous_waits_for_the_batch():
    ledger = AdvantageLedger(AdvantageConfig(), num_samples=4, clip=5.0, is_homogeneous=False)
    ledger.add(samples_of(["a0", "a1"], ["a"] * 2, [1.0, 0.0]))
    assert keys_of(ledger.take()) == () and len(ledger.held) == 2
    ledger.add(samples_of(["b0", "b1"], ["b"] * 2, [0.0, 0.0]))
    ready = ledger.take()
    assert keys_of(ready) == ("a0", "a1", "b0", "b1") and ready.divisor == pytest.approx(0.4331, abs=1e-4)
    assert ready.advantages.tolist() == pytest.approx([1.1545, -1.1545, 0, 0], abs=1e-3)


def test_group_scale_never_waits():
    ledger = AdvantageLedger(AdvantageConfig(scale="group"), num_samples=100, clip=5.0, is_homogeneous=False)
    ledger.add(samples_of(["a0", "a1"], ["a"] * 2, [1.0, 0.0]))
    ready = ledger.take()
    assert ready.divisor == 1.0 and ready.advantages.tolist() == pytest.approx([0.9998, -0.9998], abs=1e-4)


def test_infinite_clip_holds_nothing_back():
    ledger = AdvantageLedger(AdvantageConfig(), num_samples=100, clip=float("inf"), is_homogeneous=True)
    ledger.add(samples_of(["a0", "a1"], ["a"] * 2, [1.0, 1.0]))
    assert keys_of(ledger.take()) == ("a0", "a1")


@pytest.mark.parametrize(
    ("keys", "groups", "message"),
    [
        (["a0"], ["c"], "a0 came twice"),
        (["a9"], ["a"], "a came twice"),
        (["c0", "c0"], ["c", "c"], "a sample came twice"),
        (["c0", "c1", "c2"], ["c"] * 3, "begun for 4 samples got 5"),
    ],
)
def test_what_does_not_belong_is_refused(keys: list[str], groups: list[str], message: str):
    ledger = AdvantageLedger(AdvantageConfig(), num_samples=4, clip=5.0, is_homogeneous=True)
    ledger.add(samples_of(["a0", "a1"], ["a"] * 2, [1.0, 0.0]))
    with pytest.raises(RuntimeError, match=message):
        ledger.add(samples_of(keys, groups, [0.0] * len(keys)))
    assert [sample.key for sample in ledger.samples] == ["a0", "a1"]
