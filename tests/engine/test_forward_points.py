# SPDX-License-Identifier: Apache-2.0
"""Forward points in the engine, with DiffusionNFT: gradients against plain modules, the old policy, generation with it.

`old`, the reference and the trained weights are three different sets of weights in these tests.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu

from tests.engine.harness import (
    EMPTY,
    LORA,
    SAMPLING,
    TEXT_WIDTH,
    assert_close,
    assert_equal,
    begin,
    fragment,
    generate,
    local_weights,
    make_engine,
    peek,
    perturb,
    weights,
)
from tests.engine.off_policy import committed, gradient_of
from tests.engine.serial import plain_lora, plain_transformer
from tests.nft import slow_row
from verl_digen.algorithms.advantages import group_advantages
from verl_digen.algorithms.forward import NoiseLevels, point_noise
from verl_digen.engine.engine import DiffusersFSDPEngine
from verl_digen.models import load_model
from verl_digen.sampling.requests import ODE_ONLY
from verl_digen.sampling.sampler import Sampler
from verl_digen.types import SampleRequest

REWARDS = [1.0, 9.0, 3.0, 5.0, 4.0, 4.5]
LEVELS = ((0, 2, 3), (1, 3))
"""Denoise steps of two groups of three samples: 15 rows."""
WHOLE = (("g0", "g1"),)
"""Order of one fragment."""
LOSS = {"name": "diffusion_nft", "beta": 0.7, "kl_coef": 0.3}


def make_clean_batch(path: Path, seed: int = 0) -> TensorDict:
    """Samples of one group per entry of `LEVELS`, denoised by the checkpoint itself."""
    model, generator = load_model(path), torch.Generator().manual_seed(seed)
    transformer = model.load_transformer(torch.float32)
    sampler = Sampler(model, transformer, run_seed=seed, device="cpu", latents_dtype=torch.float32)
    records, uids, conditions = [], [], {}
    for number, steps in enumerate(LEVELS):
        uid = f"g{number}"
        condition = {"embeds": torch.randn(3 + 2 * number, TEXT_WIDTH, generator=generator)}
        conditions[uid] = (condition, None)
        requests = [
            SampleRequest(uid, index, EMPTY, EMPTY, ODE_ONLY, SAMPLING, noise_levels=NoiseLevels(steps))
            for index in range(3)
        ]
        made = sampler.sample(requests, [condition] * 3, None, version=0)[0]
        records += [trajectory.record.columns() for trajectory in made]
        uids += [uid] * 3
    columns: dict[str, Any] = {
        "clean": torch.stack([record["clean"] for record in records]),
        "sigmas": torch.nested.as_nested_tensor([record["sigmas"] for record in records], layout=torch.jagged),
        "uid": uids,
    }
    return tu.get_tensordict(columns, {"conditions": conditions, "sampling": SAMPLING})


def moved_engine(path: Path, **options: Any) -> DiffusersFSDPEngine:
    """Engine whose trained weights, old policy and reference differ."""
    digen = {"loss": LOSS, "advantage": {"scale": "group"}} | options.pop("digen", {})
    engine = make_engine(path, digen=digen, optim={"clip_grad": 1e9}, **options)
    scale = 0.1 if options.get("model") else 0.02
    perturb(engine, scale, seed=1)
    engine.copies.keep("old")
    perturb(engine, scale, seed=2)
    return engine


def plain_module(engine: DiffusersFSDPEngine, path: Path, policy: str) -> Any:
    state = weights(engine, policy=policy)
    lora = engine._is_lora
    return plain_lora(path, engine.model_config.lora_config(), state) if lora else plain_transformer(path, state)


def serial_gradient(engine: DiffusersFSDPEngine, path: Path, batch: TensorDict, scale: str) -> dict[str, torch.Tensor]:
    """Gradient of DiffusionNFT's loss, one row at a time, with a plain module for each policy."""
    current, old = (plain_module(engine, path, policy) for policy in ("current", "old"))
    modules = {"velocity": current, "old_velocity": old, "reference_velocity": plain_transformer(path)}
    uids, conditions = tu.get(batch, "uid"), tu.get(batch, "conditions")
    advantages = group_advantages(torch.tensor(REWARDS, dtype=torch.float64), uids, scale=scale)
    model, losses = load_model(path), []
    for sample, uid in enumerate(uids):
        clean = batch["clean"][sample]
        for point, sigma in enumerate(batch["sigmas"][sample]):
            noise = point_noise(engine.digen.seed, uid, sample % 3, point, clean.shape)
            noisy = clean + sigma * (noise - clean)
            values = {"clean": clean, "noisy": noisy, "sigma": sigma, "advantage": advantages[sample]}
            for name, module in modules.items():
                found = model.velocity(
                    module, noisy[None], sigma[None], [conditions[uid][0]], None, 1.0, SAMPLING.geometry
                )[0]
                values[name] = found if name == "velocity" else found.detach()
            losses.append(slow_row(values, engine.digen.loss_settings))
    torch.stack(losses).mean().backward()
    return gradient_of(current)


@pytest.fixture(scope="module")
def batch(one_rank: None, tiny_qwen_image: Path) -> TensorDict:
    return make_clean_batch(tiny_qwen_image)


@pytest.mark.parametrize("model", [{}, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("scale", ["group", "batch"])
def test_the_gradient_is_that_of_plain_modules_one_row_at_a_time(
    tiny_qwen_image: Path, batch: TensorDict, model: dict, scale: str
):
    engine = moved_engine(tiny_qwen_image, model=model, digen={"advantage": {"scale": scale}})
    expected = serial_gradient(engine, tiny_qwen_image, batch, scale)
    found, metrics = committed(engine, batch, (("g1",), ("g0",)), REWARDS)
    assert metrics["num_rows"] == 15 and metrics["num_late_samples"] == (3 if scale == "batch" else 0)
    assert metrics["old_distance"] > 0 and metrics["reference_distance"] > 0
    assert not any(name.startswith("rollout_") for name in metrics), "nothing was recorded to compare with"
    assert_close(found, expected, 2e-5)


@pytest.mark.parametrize("tile", [(1, 1), (2, 2), (100, 100)])
@pytest.mark.parametrize("reduce", ["tile", "batch"])
def test_tiles_fragments_and_reduction_change_nothing(
    tiny_qwen_image: Path, batch: TensorDict, tile: tuple[int, int], reduce: str
):
    tsp = {"samples_per_tile": tile[0], "steps_per_tile": tile[1], "reduce": reduce}
    found, _ = committed(moved_engine(tiny_qwen_image, digen={"tsp": tsp}), batch, (("g1",), ("g0",)), REWARDS)
    expected, _ = committed(moved_engine(tiny_qwen_image), batch, WHOLE, REWARDS)
    assert_close(found, expected, 1e-5)


def test_the_old_policy_follows_each_batch_and_survives_a_checkpoint(
    tiny_qwen_image: Path, batch: TensorDict, tmp_path: Path
):
    """Decay 1 - 0.0075 is that of `delayed` after 76 steps; the engine has taken 75."""
    digen = {"loss": LOSS | {"old_policy": "delayed"}}
    engine = moved_engine(tiny_qwen_image, digen=digen)
    engine.state.num_updates = 75
    before = {name: shard.clone() for name, shard in engine.copies["old"].shards.items()}
    committed(engine, batch, WHOLE, REWARDS)
    trained = local_weights(engine)
    for name, shard in engine.copies["old"].shards.items():
        expected = 0.0075 * before[name] + 0.9925 * trained[name]
        torch.testing.assert_close(shard, expected, rtol=1e-5, atol=1e-7)
    engine.save_checkpoint(str(tmp_path / "step"))
    resumed = make_engine(tiny_qwen_image, digen=digen)
    resumed.load_checkpoint(str(tmp_path / "step"), del_local_after_load=False)
    assert_equal(weights(resumed, policy="old"), weights(engine, policy="old"))
    assert_equal(weights(resumed, policy="current"), weights(engine, policy="current"))


def test_a_step_without_a_finite_gradient_and_an_abort_leave_the_old_policy(tiny_qwen_image: Path, batch: TensorDict):
    engine = moved_engine(tiny_qwen_image)
    before = weights(engine, policy="old")
    groups = begin(engine, batch, REWARDS)
    engine.accumulate(fragment(groups, "g0"))
    engine.abort()
    assert_equal(weights(engine, policy="old"), before)
    broken = batch.clone()
    broken["clean"] = batch["clean"] * torch.nan
    _, metrics = committed(engine, broken, WHOLE, REWARDS)
    assert metrics["num_skipped_updates"] == 1
    assert_equal(weights(engine, policy="old"), before)


@pytest.mark.parametrize("model", [{}, LORA], ids=["full", "lora"])
def test_replicas_and_assisting_trainers_generate_with_the_old_policy(
    tiny_qwen_image: Path, batch: TensorDict, model: dict
):
    engine = moved_engine(tiny_qwen_image, model=model)
    assert_equal(weights(engine), weights(engine, policy="old"))  # what is exported if no policy is named
    groups = begin(engine, batch, REWARDS)
    engine.accumulate(fragment(groups, "g0"))
    open_gradient, trained = peek(engine), weights(engine, policy="current")
    assisted = generate(engine)
    after = peek(engine)
    assert all(torch.equal(after[name], open_gradient[name]) for name in open_gradient)
    assert_equal(weights(engine, policy="current"), trained)
    other = make_engine(tiny_qwen_image, model=model)
    assert not torch.allclose(assisted, generate(other))
    perturb(other, 0.1 if model else 0.02, seed=1)  # the weights of `old`
    torch.testing.assert_close(assisted, generate(other), rtol=1e-4, atol=1e-5)
    engine.abort()
