# SPDX-License-Identifier: Apache-2.0
"""Cheap steps outside the window: what trains is exact, and samples do not depend on their batch."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from tests.engine.harness import LORA_TARGETS
from tests.sampling.runs import RUN_SEED, assert_bitwise, close, path_of, run
from tests.training_rows import rows_of
from verl_digen.algorithms.noise import INITIAL_LATENTS, step_noise
from verl_digen.algorithms.outside import EXACT, Outside, step_ends
from verl_digen.algorithms.solvers import Prediction, denoise_step
from verl_digen.algorithms.tree import Tree
from verl_digen.algorithms.window import Window
from verl_digen.inputs.images import PromptInputs
from verl_digen.models import load_model
from verl_digen.models.base import DiffusionModel
from verl_digen.models.tiny import build_tiny
from verl_digen.sampling.fp8 import Fp8Layers
from verl_digen.sampling.prefix import PrefixCache, prefix_of
from verl_digen.sampling.recording import initial_seed, noise_seed
from verl_digen.sampling.sampler import Sampler, score_rows
from verl_digen.types import Condition, Geometry, SampleRequest, Sampling, Trajectory

CPU = torch.device("cpu")
NUM_STEPS = 12
PLAIN = Sampling(Geometry(64, 64), NUM_STEPS, 1.0, "flow", 0.7)
SHARED = replace(PLAIN, shared_initial_noise=True)
EARLY, LATE = Window((1, 2), (1, 2)), Window((8, 9), (8, 9))
CACHE = Outside(cache=0.5, cache_max_skips=3)
"""The network has random weights, so its velocities change much."""
PASSED = Outside(solver_before=0.5, solver_after=0.4)
BOTH = Outside(cache=0.5, cache_max_skips=1, solver_before=0.7, solver_after=0.7)
KINDS = {"cache": CACHE, "passed": PASSED, "both": BOTH}
CHEAP_OR_NOT = {**KINDS, "exact": EXACT}


def request(uid: str, index: int, window: Window, how: Sampling, tree: Tree | None = None) -> SampleRequest:
    return SampleRequest(uid, index, PromptInputs("a red circle"), PromptInputs(" "), window, how, tree=tree)


def two_groups(how: Sampling) -> list[SampleRequest]:
    return [request(uid, index, window, how) for index in range(3) for uid, window in (("a", EARLY), ("b", LATE))]


# -- a slow reference ---------------------------------------------------------------------------------------------
def slow_sample(
    model: DiffusionModel, network: nn.Module, condition: Condition, asked: SampleRequest
) -> tuple[Tensor, int]:
    """Final latents [...] and evaluations of one sample, by a loop of its own over the steps that it takes."""
    how, window = asked.sampling, asked.window
    sigmas = model.sigmas(NUM_STEPS, how.geometry)
    x = step_noise(initial_seed(RUN_SEED, asked), INITIAL_LATENTS, model.latent_shape(how.geometry)).unsqueeze(0)
    evaluations: list[tuple[float, Tensor]] = []
    predicted: Prediction | None = None
    num_skips, is_disturbed, step = 0, False, 0
    ends = step_ends(how.outside, window.sde_steps, NUM_STEPS)
    while step < NUM_STEPS:
        end = ends[step]
        assert end is not None
        sigma = float(sigmas[step])
        is_sde, reused = step in window.sde_steps, False
        if len(evaluations) >= 2 and not is_sde and not is_disturbed and num_skips < how.outside.cache_max_skips:
            (early, before), (late, last) = evaluations[-2:]
            rate = float((last - before).norm() / last.norm()) / (early - late)
            reused = rate * (late - sigma) < how.outside.cache
        if reused:
            num_skips += 1
            velocity = evaluations[-1][1]
        else:
            num_skips, is_disturbed = 0, False
            velocity = model.velocity(network, x, sigmas[step : step + 1], [condition], None, 1.0, how.geometry, None)
            evaluations.append((sigma, velocity))
        taken, predicted = denoise_step(
            velocity,
            x,
            sigmas[step : step + 1],
            sigmas[end : end + 1],
            solver=how.solver,
            is_sde=[is_sde],
            previous=predicted,
            law=how.law,
            noise_level=how.noise_level,
            sigma_max=sigmas[1],
            noise=step_noise(noise_seed(RUN_SEED, asked, step), step, x.shape[1:]).unsqueeze(0),
            storage_dtype=torch.float32,
        )
        is_disturbed = is_disturbed or is_sde
        x, step = taken.next_sample, end
    return x[0], len(evaluations)


@pytest.mark.parametrize(
    ("outside", "solver"),
    [("cache", "euler"), ("passed", "euler"), ("passed", "dpm2"), ("both", "ddim"), ("passed", "unipc")],
)
def test_samples_of_a_batch_are_those_of_a_loop_over_one(model, network, condition, outside, solver):
    requests = two_groups(replace(PLAIN, outside=KINDS[outside], solver=solver))
    found = run(model, network, requests, condition)
    for row, asked in enumerate(requests):
        with torch.no_grad():
            latents, num_evaluations = slow_sample(model, network, condition, asked)
        assert found.num_skipped[row] == NUM_STEPS - num_evaluations
        close(found.latents[row], latents)
    assert sum(found.sizes) == NUM_STEPS * len(requests) - sum(found.num_skipped)
    assert all(number > 0 for number in found.num_skipped)
    if outside == "cache":
        assert len(set(found.num_skipped)) > 1, "rows decide by themselves"


def test_without_it_every_step_evaluates_the_network(model, network, condition):
    found = run(model, network, two_groups(PLAIN), condition)
    assert found.sizes == [6] * NUM_STEPS and found.num_skipped == [0] * 6


# -- the batch ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("outside", CHEAP_OR_NOT)
@pytest.mark.parametrize("how", [PLAIN, SHARED], ids=["plain", "shared"])
def test_samples_in_chunks_of_their_group_are_those_of_one_batch(model, network, condition, outside, how):
    solver = "dpm2" if outside == "exact" else "euler"
    requests = two_groups(replace(how, outside=CHEAP_OR_NOT[outside], solver=solver))
    together = run(model, network, requests, condition)
    alone = [run(model, network, [asked], condition) for asked in requests]
    for row, one in enumerate(alone):
        close(together.latents[row], one.latents[0])
        if how is SHARED:
            assert torch.equal(path_of(together.trajectories[row]).latents[0], path_of(one.trajectories[0]).latents[0])
    own = [one.num_skipped[0] for one in alone]
    if how is PLAIN:
        assert together.num_skipped == own
    else:  # the first of a group runs its steps before the window, and another one counts them as shared
        assert together.num_skipped[:2] == own[:2] and sum(together.num_skipped) <= sum(own)
        assert together.num_shared == [0, 0, 1, 8, 1, 8]


@pytest.mark.parametrize("outside", CHEAP_OR_NOT)
def test_a_later_chunk_begins_at_its_window_with_bitwise_the_same_samples(model, network, condition, outside):
    requests = two_groups(
        replace(SHARED, outside=CHEAP_OR_NOT[outside], solver="dpm2" if outside == "exact" else "euler")
    )
    cache = PrefixCache()
    run(model, network, requests[:2], condition, prefixes=cache)
    for asked in requests[2:]:
        later = run(model, network, [asked], condition, prefixes=cache)
        alone = run(model, network, [asked], condition)
        assert torch.equal(later.latents, alone.latents)
        assert_bitwise(later.trajectories[0], alone.trajectories[0])
        before = min(asked.window.sde_steps)
        assert later.trajectories[0].facts.num_shared_steps == before
        assert len(later.sizes) + later.num_skipped[0] == NUM_STEPS - before
        assert len(alone.sizes) + alone.num_skipped[0] == NUM_STEPS


@pytest.mark.parametrize("outside", KINDS)
def test_leaves_of_a_tree_are_those_generated_alone(model, network, condition, outside):
    window = Window((7, 8, 9), (7, 8, 9))
    how = replace(SHARED, outside=KINDS[outside])
    leaves = [request("t", leaf, window, how, Tree(splits=(7, 9), factor=2)) for leaf in range(4)]
    together = run(model, network, leaves, condition)
    for row, asked in enumerate(leaves):
        alone = run(model, network, [asked], condition)
        close(together.latents[row], alone.latents[0])
        assert torch.equal(path_of(together.trajectories[row]).latents[0], path_of(alone.trajectories[0]).latents[0])
    counted = sum(one.facts.num_shared_steps + one.facts.num_skipped_steps for one in together.trajectories)
    assert sum(together.sizes) == 4 * NUM_STEPS - counted


# -- what trains --------------------------------------------------------------------------------------------------
def gradient(
    model: DiffusionModel, trained: nn.Module, condition: Condition, trajectories: Sequence[Trajectory]
) -> dict[str, Tensor]:
    """Gradient of a policy loss on all recorded rows, by parameter; the log-probs replay to 1e-5."""
    pairs = [(n, k) for n, one in enumerate(trajectories) for k in range(len(one.record.sigmas))]
    rows = rows_of(trajectories, pairs, [condition] * len(trajectories), None)
    step, _ = score_rows(model, trained, rows)
    close(step.log_prob.detach(), rows.point.log_probs)
    advantages = torch.linspace(-1, 1, len(pairs))
    trained.zero_grad()
    (-advantages * (step.log_prob - rows.point.log_probs).exp()).mean().backward()
    return {name: one.grad.clone() for name, one in trained.named_parameters() if one.grad is not None}


@pytest.mark.parametrize("kind", ["full", "lora"])
@pytest.mark.parametrize("outside", [*KINDS, "fp8"])
def test_the_gradient_is_that_of_exact_sampling_from_the_windows_first_latents(
    model, network, condition, outside, kind
):
    trained = deepcopy(network).requires_grad_(True)
    layers = Fp8Layers(trained) if outside == "fp8" else None
    if kind == "lora":
        config = LoraConfig(r=16, lora_alpha=8, target_modules=LORA_TARGETS, init_lora_weights=False)
        torch.manual_seed(0)
        trained = get_peft_model(trained, config)  # type: ignore[arg-type] - a module
    requests = two_groups(replace(SHARED, outside=KINDS.get(outside, Outside(fp8=True))))
    cheap = run(model, trained, requests, condition, fp8=layers)
    begins = PrefixCache()
    exact_requests = [replace(asked, sampling=replace(asked.sampling, outside=EXACT)) for asked in requests]
    for asked, trajectory in zip(exact_requests, cheap.trajectories, strict=True):
        prefix = prefix_of(asked, initial_seed(RUN_SEED, asked))
        assert prefix is not None
        begins.keep(prefix, 0, path_of(trajectory).latents[0])
    exact = run(model, trained, exact_requests, condition, prefixes=begins)
    assert sum(exact.sizes) == 3 * (NUM_STEPS - 1) + 3 * (NUM_STEPS - 8)
    assert not torch.equal(exact.latents, cheap.latents), "the pictures differ"
    for one, other in zip(cheap.trajectories, exact.trajectories, strict=True):
        close(path_of(one).latents, path_of(other).latents)
    found = gradient(model, trained, condition, cheap.trajectories)
    expected = gradient(model, trained, condition, exact.trajectories)
    assert found.keys() == expected.keys()
    assert all(("lora_" in name) == (kind == "lora") for name in found)
    scale = max(float(one.abs().max()) for one in expected.values())
    assert scale > 1e-3
    for name, one in expected.items():
        torch.testing.assert_close(found[name], one, atol=min(1e-6, 1e-5 * scale), rtol=0)
    other = run(model, trained, exact_requests, condition)
    apart = gradient(model, trained, condition, other.trajectories)
    assert max(float((apart[name] - found[name]).abs().max()) for name in found) > 1e-4 * scale, (
        "other first latents give another gradient"
    )


def test_the_second_expert_takes_no_velocity_of_the_first(tmp_path):
    """With a threshold that no velocity exceeds, the cache holds to the boundary of experts alone."""
    model = load_model(build_tiny("wan2.2_a14b", tmp_path / "wan"))
    network = model.load_transformer(torch.float32).requires_grad_(False)
    (condition,) = model.load_encoder(torch.float32, CPU)([PromptInputs("a red circle")])
    how = Sampling(Geometry(32, 32, 5), 30, 1.0, "flow", 0.7, outside=Outside(cache=0.99, cache_max_skips=100))
    evaluated: list[float] = []
    handles = [
        network.get_submodule(name).register_forward_pre_hook(
            lambda module, args, inputs: evaluated.append(float(inputs["timestep"].flatten()[0])), with_kwargs=True
        )
        for name in model.experts
    ]
    sampler = Sampler(model, network, run_seed=RUN_SEED, device=CPU, latents_dtype=torch.float32)
    asked = request("w", 0, Window((0,), (0,)), how)
    (trajectory,), _ = sampler.sample([asked], [condition], None, version=0)
    for handle in handles:
        handle.remove()
    sigmas = model.sigmas(30, how.geometry)
    experts = model.expert_of(sigmas[:-1]).tolist()
    first = model.timesteps(sigmas[:-1]).tolist()[experts.index(1)]
    assert len(evaluated) == 30 - trajectory.facts.num_skipped_steps < 30
    assert first in evaluated, "the second expert begins with an evaluation of its own"
