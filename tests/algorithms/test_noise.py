# SPDX-License-Identifier: Apache-2.0
import itertools

import pytest
import torch

from verl_digen.algorithms.noise import INITIAL_LATENTS, sample_seed, step_noise

SHAPE = (4, 8, 8)


def test_noise_is_a_pure_function_of_its_arguments():
    before = step_noise(sample_seed(1, "g0", 2), 3, SHAPE)
    torch.manual_seed(0)
    state = torch.get_rng_state()
    for other in range(5):
        step_noise(sample_seed(1, "g0", other), 0, SHAPE)
    assert torch.equal(step_noise(sample_seed(1, "g0", 2), 3, SHAPE), before)
    assert torch.equal(torch.get_rng_state(), state)
    assert (before.dtype, before.device.type, before.shape) == (torch.float32, "cpu", SHAPE)


def test_the_recorded_seed_is_all_that_a_worker_needs():
    seed = sample_seed(1, "g0", 2)
    for step in (INITIAL_LATENTS, 0, 7):
        assert torch.equal(step_noise(seed, step, SHAPE), step_noise(sample_seed(1, "g0", 2), step, SHAPE))


def test_noise_of_different_keys_is_independent_standard_normal():
    keys = list(itertools.product((0, 1), ("g0", "g1", "10"), (0, 1, 2), (INITIAL_LATENTS, 0, 1)))
    draws = torch.stack([step_noise(sample_seed(*key[:3]), key[3], (64, 64)).flatten() for key in keys]).double()
    correlations = draws @ draws.T / draws.shape[1]
    off_diagonal = correlations - torch.diag(correlations.diagonal())
    assert off_diagonal.abs().max() < 5.5 / 64
    assert (correlations.diagonal() - 1).abs().max() < 5 * 2**0.5 / 64
    assert draws.mean().abs() < 5 / draws.numel() ** 0.5
    for threshold, share in ((0.0, 0.5), (1.0, 0.158655), (2.0, 0.022750), (3.0, 0.001350)):
        assert (draws > threshold).double().mean().item() == pytest.approx(share, abs=0.003)
        assert (draws < -threshold).double().mean().item() == pytest.approx(share, abs=0.003)


def test_seeds_of_different_samples_differ_and_fit_63_bits():
    keys = list(itertools.product(range(3), ("", "1", "1,1", "g'", "g\n"), range(40)))
    seeds = [sample_seed(*key) for key in keys]
    turns = [sample_seed(0, "1", index, turn) for index in range(40) for turn in (1, 2)]
    assert len({*seeds, *turns}) == len(keys) + len(turns)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert max(seeds) > 2**60


def test_seeds_and_noise_are_the_same_on_every_machine():
    assert sample_seed(42, "g7", 3) == 4927079939980329777
    torch.testing.assert_close(
        step_noise(sample_seed(42, "g7", 3), 0, (3,)),
        torch.tensor([1.2047985, -0.1107066, -0.0255964]),
        atol=1e-6,
        rtol=0,
    )
