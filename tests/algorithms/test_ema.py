# SPDX-License-Identifier: Apache-2.0
import pytest
import torch

from verl_digen.algorithms.ema import Decay, ema_decay, ema_update_
from verl_digen.config import EmaConfig


def test_the_decay_grows_from_a_tenth_to_its_maximum():
    decays = [ema_decay(k, 0.9) for k in range(200)]
    assert decays[:2] == [0.1, 2 / 11]
    assert decays == sorted(decays)
    assert (decays[79], decays[80], decays[-1]) == (80 / 89, 0.9, 0.9)


def test_the_update_is_the_weighted_mean_in_place():
    ema, weight = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 0.0], requires_grad=True)
    ema_update_([ema], [weight], 0.75)
    torch.testing.assert_close(ema, torch.tensor([1.5, 1.5]))
    assert not ema.requires_grad


def test_fp32_averages_of_low_precision_weights_stay_fp32():
    ema, weight = torch.zeros(3), torch.full((3,), 1.0, dtype=torch.bfloat16)
    ema_update_([ema], [weight], 0.999)
    torch.testing.assert_close(ema, torch.full((3,), 0.001))


def test_a_policy_may_be_a_copy_until_a_step_and_average_afterwards():
    decay = Decay(0.001, 0.3, copied_until=200)
    assert [decay.at(k) for k in (1, 200, 201, 1000)] == [0.0, 0.0, pytest.approx(0.201), 0.3]
    assert [Decay(0.3, 0.3).at(k) for k in (1, 50)] == [0.3, 0.3]


def test_an_update_with_a_period_falls_due_once_in_it_however_many_steps_a_batch_has():
    decay = Decay(0.0, 0.0, every=3)
    assert [k for k in range(1, 10) if decay.is_due(k - 1, k)] == [3, 6, 9]
    assert [decay.is_due(before, before + 2) for before in (0, 2, 4, 6)] == [False, True, True, False]
    assert decay.is_due(2, 11) and not decay.is_due(3, 3)


def test_wrong_arguments_are_errors():
    with pytest.raises(ValueError, match=r"digen.ema.max_decay must lie in \(0, 1\), got 1.5"):
        EmaConfig(max_decay=1.5)
    with pytest.raises(ValueError, match="zip"):
        ema_update_([torch.zeros(1)], [], 0.9)
