# SPDX-License-Identifier: Apache-2.0
"""The denoising loop: against diffusers' pipeline without noise, and against its own replay with it."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.sampling.runs import RUN_SEED, close, run
from tests.texts import TextEncoder, of_texts
from tests.training_rows import rows_of
from verl_digen.algorithms.forward import NoiseLevels
from verl_digen.algorithms.noise import INITIAL_LATENTS, sample_seed, step_noise
from verl_digen.algorithms.solvers import SolverNoise, denoise_step
from verl_digen.algorithms.window import Window
from verl_digen.inputs.images import PromptInputs
from verl_digen.models.base import DiffusionModel
from verl_digen.sampling.sampler import Sampler, SamplingStopped, row_velocity, score_rows
from verl_digen.types import CleanRecord, Geometry, Noised, SampleRequest, Sampling, Trajectory

CPU = torch.device("cpu")
SQUARE = Geometry(height_px=64, width_px=64)
PROMPTS = ("a red circle", "two small blue squares left of a red circle on a green background")
NEGATIVE = " "
NUM_STEPS = 6
ODE = Window(sde_steps=(), train_steps=())
ALL = Window(sde_steps=(0, 1, 2, 3, 4), train_steps=(0, 1, 2, 3, 4))
WINDOWS = (ALL, Window((1, 2), (1, 2)), Window((0, 1, 2, 3, 4), (0, 3, 4)), Window((4,), (4,)))


@pytest.fixture(scope="module")
def encode(model: DiffusionModel) -> TextEncoder:
    return of_texts(model.load_encoder(torch.float32, CPU))


def sampling(true_cfg_scale: float, geometry: Geometry = SQUARE, law: str = "flow", **changes: bool) -> Sampling:
    return Sampling(geometry, NUM_STEPS, true_cfg_scale, law, 0.7, **changes)


def request(
    how: Sampling, *, uid: str, index: int = 0, prompt: str = PROMPTS[0], window: Window = ODE
) -> SampleRequest:
    return SampleRequest(uid, index, PromptInputs(prompt), PromptInputs(NEGATIVE), window, how)


def mixed_requests(how: Sampling) -> list[SampleRequest]:
    """Eight samples of four groups, one window each, prompts of two lengths."""
    return [
        request(how, uid=f"g{group}", index=index, prompt=PROMPTS[group % 2], window=window)
        for group, window in enumerate(WINDOWS)
        for index in range(2)
    ]


@pytest.fixture(scope="module")
def sample(model, network, encode):
    """Trajectories and final latents of requests."""

    def sample(requests: Sequence[SampleRequest], **how: Any) -> tuple[list[Trajectory], Tensor]:
        is_guided = requests[0].sampling.is_guided
        negatives = encode([asked.negative_inputs.text for asked in requests]) if is_guided else None
        conditions = encode([asked.inputs.text for asked in requests])
        found = run(model, network, requests, conditions, negatives, version=3, **how)
        return found.trajectories, found.latents

    return sample


def all_rows(encode: TextEncoder, trajectories: Sequence[Trajectory], requests: Sequence[SampleRequest]) -> Any:
    """Rows of all trained steps of all trajectories, in an order that mixes them."""
    pairs = [(n, k) for n, path in enumerate(trajectories) for k in range(len(path.record.positions))]
    random.Random(0).shuffle(pairs)
    negatives = encode([NEGATIVE] * len(requests)) if requests[0].sampling.is_guided else None
    return rows_of(trajectories, pairs, encode([asked.inputs.text for asked in requests]), negatives)


# -- with noise: the replay -------------------------------------------------------------------------------


@pytest.mark.parametrize("law", ["flow", "flow_clipped", "dance", "cps"])
@pytest.mark.parametrize("true_cfg_scale", [1.0, 4.0])
def test_replay_gives_the_recorded_log_probs(model, network, encode, sample, true_cfg_scale, law):
    how = sampling(true_cfg_scale, law=law)
    requests = mixed_requests(how)
    trajectories, _ = sample(requests)
    rows = all_rows(encode, trajectories, requests)
    assert len(rows) == 2 * sum(len(window.train_steps) for window in WINDOWS)
    step, velocity = score_rows(model, network, rows)
    close(step.log_prob, rows.point.log_probs)
    close(velocity, row_velocity(model, network, rows), 0)
    assert velocity.shape == rows.latents.shape
    assert (rows.point.log_probs != 0).all()
    other_prompts = replace(rows, conditions=encode([NEGATIVE] * len(rows)))
    wrong, _ = score_rows(model, network, other_prompts)
    assert (wrong.log_prob - rows.point.log_probs).abs().max() > 1e-3  # and a wrong replay does not


def test_rounding_to_storage_dtype_comes_before_the_log_prob(model, network, encode, sample):
    how = sampling(4.0)
    requests = mixed_requests(how)
    trajectories, latents = sample(requests, latents_dtype=torch.bfloat16)
    assert latents.dtype == torch.bfloat16
    assert {path.record.latents.dtype for path in trajectories} == {torch.bfloat16}
    rows = all_rows(encode, trajectories, requests)
    close(score_rows(model, network, rows)[0].log_prob, rows.point.log_probs)


# -- what a sample depends on -----------------------------------------------------------------------------


def test_guidance_leads_each_sample_away_from_its_own_negative_prompt(sample):
    one = request(sampling(4.0), uid="g")
    asked = [replace(one, negative_inputs=PromptInputs(text)) for text in (NEGATIVE, PROMPTS[1])]
    _, latents = sample(asked)
    for row, alone in enumerate(asked):
        close(latents[row], sample([alone])[1][0])
    assert (latents[0] - latents[1]).abs().max() > 1e-3


def test_a_solver_with_noise_draws_it_for_each_sample_and_step(model, network, encode, sample):
    """Equal in any batch, and to the solver's steps one by one with that noise."""
    how = replace(sampling(1.0), solver="sa", solver_noise=SolverNoise(0.8, 0.0, 1.0))
    levels = NoiseLevels((0, 2, 5))
    asked = [replace(request(how, uid="g", index=index), noise_levels=levels) for index in range(3)]
    together, latents = sample(asked)
    for row, one in enumerate(asked):
        (alone,), expected = sample([one])
        close(latents[row], expected[0])
        assert isinstance(alone.record, CleanRecord) and isinstance(together[row].record, CleanRecord)
    sigmas, condition = model.sigmas(NUM_STEPS, SQUARE), encode(PROMPTS[:1])
    x, previous = step_noise(sample_seed(RUN_SEED, "g", 0), INITIAL_LATENTS, (16, 16)).unsqueeze(0), None
    for step in range(NUM_STEPS):
        start, end = sigmas[step : step + 1], sigmas[step + 1 : step + 2]
        with torch.no_grad():
            velocity = model.velocity(network, x, start, condition, None, 1.0, SQUARE)
        taken, previous = denoise_step(
            velocity,
            x,
            start,
            end,
            solver="sa",
            is_sde=[False],
            previous=previous,
            law="flow",
            noise_level=0.7,
            sigma_max=sigmas[1],
            noise=step_noise(sample_seed(RUN_SEED, "g", 0), step, (16, 16)).unsqueeze(0),
            storage_dtype=torch.float32,
            solver_noise=how.solver_noise,
        )
        x = taken.next_sample
    close(latents[:1], x)


def test_samples_of_a_group_differ_and_shared_noise_starts_them_alike(sample):
    for shared in (False, True):
        how = sampling(1.0, shared_initial_noise=shared)
        pair = [request(how, uid="g", index=index, window=ALL) for index in (0, 1)]
        (first, second), latents = sample(pair)
        assert (latents[0] - latents[1]).abs().mean() > 0.1
        assert torch.equal(first.record.latents[0], second.record.latents[0]) == shared
        assert first.facts.seed == sample_seed(RUN_SEED, "g", 0)
        assert second.facts.seed == sample_seed(RUN_SEED, "g", 0 if shared else 1)


# -- the record -------------------------------------------------------------------------------------------


def test_a_trajectory_holds_its_windows_latents_and_no_more(model, sample):
    how = sampling(1.0)
    full, gaps = Window((0, 1, 2, 3, 4), (0, 1, 2, 3, 4)), Window((0, 1, 2, 3, 4), (0, 3, 4))
    (first,), _ = sample([request(how, uid="g", window=full)])
    (second,), _ = sample([request(how, uid="g", window=gaps)])
    whole, part = first.record, second.record
    sigmas = model.sigmas(NUM_STEPS, SQUARE)
    assert whole.latents.shape == (6, 16, 16)
    assert whole.positions.tolist() == [0, 1, 2, 3, 4]
    close(whole.latents[0], step_noise(sample_seed(RUN_SEED, "g", 0), INITIAL_LATENTS, (16, 16)), 0)
    close(part.latents, whole.latents[[0, 1, 3, 4, 5]], 0)  # x at steps 0, 1, 3, 4, 5
    assert part.positions.tolist() == [0, 2, 3]
    assert part.positions.dtype == torch.int64
    close(part.sigmas, sigmas[[0, 3, 4]], 0)
    close(part.next_sigmas, sigmas[[1, 4, 5]], 0)
    close(part.log_probs, whole.log_probs[[0, 3, 4]], 0)
    assert part.sigma_max == sigmas[1]
    assert (second.facts.version, second.facts.last_version) == (3, 3)
    assert not part.log_probs.requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_clean_record_is_the_odes_final_latents_and_the_schedules_sigmas(model, sample, dtype):
    """One batch with a sample whose path is recorded, which stays as it is."""
    how = sampling(4.0)
    levels = NoiseLevels((0, 2, 5))
    asked = [request(how, uid=uid, window=window) for uid, window in (("h", WINDOWS[1]), ("g", ODE))]
    _, expected = sample(asked, latents_dtype=dtype)
    (path, clean), latents = sample([asked[0], replace(asked[1], noise_levels=levels)], latents_dtype=dtype)
    assert isinstance(clean.record, CleanRecord) and clean.record.clean.dtype == dtype
    close(clean.record.clean, expected[1], 0)
    close(latents, expected, 0)
    close(clean.record.sigmas, model.sigmas(NUM_STEPS, SQUARE)[[0, 2, 5]], 0)
    assert clean.record.sigmas[0] == 1.0 and clean.record.sigmas.dtype == torch.float32
    assert clean.record.columns().keys() == set(CleanRecord.COLUMNS)
    assert len(path.record.positions) == 2


def test_records_own_their_memory(sample):
    """A view would be sent to other processes with the whole batch."""
    paths = mixed_requests(sampling(1.0))
    forward = [replace(asked, window=ODE, noise_levels=NoiseLevels((1,))) for asked in paths]
    for requests in (paths, forward):
        for trajectory in sample(requests)[0]:
            for name, column in trajectory.record.columns().items():
                assert column.untyped_storage().nbytes() == column.nbytes, name


def test_velocities_are_of_rows_of_either_kind_and_log_probs_of_recorded_steps_only(model, network, encode, sample):
    requests = mixed_requests(sampling(4.0))
    trajectories, _ = sample(requests)
    rows = all_rows(encode, trajectories, requests)
    noised = replace(rows, point=Noised(clean=rows.latents, noise=rows.latents))
    close(row_velocity(model, network, noised), score_rows(model, network, rows)[1], 0)
    with pytest.raises(RuntimeError, match="log-probs are of recorded steps, got rows of Noised points"):
        score_rows(model, network, noised)


# -- stopping and misuse ----------------------------------------------------------------------------------


def test_it_can_be_stopped_between_steps(model, network, encode):
    stop = iter([False, False, True]).__next__
    sampler = Sampler(model, network, run_seed=RUN_SEED, device=CPU, latents_dtype=torch.float32)
    with pytest.raises(SamplingStopped, match="before denoise step 2 of 6"):
        sampler.sample([request(sampling(1.0), uid="g")], encode(PROMPTS[:1]), None, version=0, should_stop=stop)


def test_requests_that_do_not_belong_together_are_refused(model, network, encode):
    sampler = Sampler(model, network, run_seed=RUN_SEED, device=CPU, latents_dtype=torch.float32)
    one = request(sampling(1.0), uid="g")
    with pytest.raises(RuntimeError, match="must share their sampling"):
        sampler.sample([one, replace(one, sampling=sampling(4.0))], encode(PROMPTS), None, version=0)
    with pytest.raises(RuntimeError, match="must end before the last of 6 denoise steps, got step 5"):
        sampler.sample([replace(one, window=Window((5,), (5,)))], encode(PROMPTS[:1]), None, version=0)
    with pytest.raises(RuntimeError, match="2 requests need as many conditions, got 1"):
        sampler.sample([one, one], encode(PROMPTS[:1]), None, version=0)
