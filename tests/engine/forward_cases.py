# SPDX-License-Identifier: Apache-2.0
"""Objectives of forward points in the engine: settings under which every term counts, batches, expected gradients; for
one rank and for two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
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
    begin,
    fragment,
    full,
    make_engine,
    perturb,
    weights,
)
from tests.engine.off_policy import gradient_of
from tests.engine.serial import plain_lora, plain_transformer
from tests.forward_losses import slow_loss
from verl_digen.algorithms.advantages import group_advantages
from verl_digen.algorithms.forward import NoiseLevels, point_noise
from verl_digen.algorithms.metric import numbers
from verl_digen.engine.engine import DiffusersFSDPEngine
from verl_digen.engine.export import plain_name
from verl_digen.engine.fragment import FragmentSample
from verl_digen.models import load_model
from verl_digen.sampling.requests import ODE_ONLY
from verl_digen.sampling.sampler import Sampler
from verl_digen.types import SampleRequest

Groups = dict[str, list[FragmentSample]]

REWARDS = [1.0, 9.0, 3.0, 5.0, 4.0, 4.5]
TIES = [2.0, 2.0, 2.0, 7.0, 7.0, 7.0]
LEVELS = ((0, 2.5, 3), (1, 3))
"""Levels of two groups of three samples: 15 rows."""
WHOLE = (("g0", "g1"),)
"""Order of one fragment."""


@dataclass(frozen=True)
class ForwardCase:
    """One objective, with settings under which none of its terms is lost in rounding."""

    name: str
    settings: dict[str, Any]
    scale: str = "group"
    model: str = "full"

    @property
    def digen(self) -> dict[str, Any]:
        return {"loss": {"name": self.name, **self.settings}, "advantage": {"scale": self.scale}}

    def make_engine(self, path: Path) -> DiffusersFSDPEngine:
        """Engine on the checkpoint's weights."""
        model = LORA if self.model == "lora" else {}
        return make_engine(path, digen=self.digen, model=model, optim={"clip_grad": 1e9})


CASES = {
    "nft": ForwardCase("diffusion_nft", {"beta": 0.7, "kl_coef": 0.3}),
    "nft_lora": ForwardCase("diffusion_nft", {"beta": 0.7, "kl_coef": 0.3}, scale="batch", model="lora"),
    "awm": ForwardCase("awm", {"clip_range": 0.05, "kl_coef": 0.3, "ema_kl_coef": 0.2}, scale="batch"),
    "awm_off_policy": ForwardCase("awm_off_policy", {"clip_range": 0.05, "average": "constant"}, model="lora"),
    "dgpo": ForwardCase("dgpo", {"beta": 4.0, "clip": 0.15}, model="lora"),
    "online_dpo": ForwardCase("online_dpo", {"beta": 200.0}, scale="none"),
    "online_dpo_renewed": ForwardCase("online_dpo", {"beta": 200.0, "reference_every": 2}, scale="none", model="lora"),
}
SHAPES = [
    ((2, 2), "fragment", (("g1",), ("g0",))),
    ((1, 1), "batch", WHOLE),
    ((100, 100), "tile", WHOLE),
]
"""(samples and points of a tile, `digen.tsp.reduce`, order)."""


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


def moved_engine(path: Path, case: ForwardCase) -> DiffusersFSDPEngine:
    """Engine whose trained weights, reference, old policy and other copies all differ."""
    engine, scale = case.make_engine(path), 0.1 if case.model == "lora" else 0.02
    for seed, policy in enumerate(dict.fromkeys(("old", *engine.digen.loss_settings.copies)), start=1):
        perturb(engine, scale, seed=seed)
        engine.copies.keep(policy)
    perturb(engine, scale, seed=9)
    return engine


def start(engine: DiffusersFSDPEngine, batch: TensorDict, rewards: Sequence[float]) -> Groups:
    """Open a logical batch; samples that the objective does not select have no rows."""
    groups = begin(engine, batch, list(rewards))
    for uid, samples in groups.items():
        chosen = {*engine.digen.select([sample.reward for sample in samples])}
        groups[uid] = [
            sample if number in chosen else replace(sample, num_steps=0) for number, sample in enumerate(samples)
        ]
    return groups


def trained(
    engine: DiffusersFSDPEngine, batch: TensorDict, order: Sequence[Sequence[str]] = WHOLE
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """(gradient, metrics) of the batch, without a step: the engine stays as it is."""
    found: dict[str, torch.Tensor] = {}

    def look() -> float:
        for name, parameter in engine.module.named_parameters():
            if parameter.grad is not None:
                found[plain_name(name)] = full(parameter.grad).clone()
        return 0.0

    groups = start(engine, batch, REWARDS)
    for uids in order:
        engine.accumulate(fragment(groups, *uids))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "optimizer_step", look)
        patch.setattr(engine, "lr_scheduler_step", lambda: 0.0)
        kept = dict(engine.copies)
        metrics = numbers(engine.commit()["metrics"])
        engine.copies._weights.update(kept)
    return found, metrics


def reshape(engine: DiffusersFSDPEngine, tile: tuple[int, int], reduce: str) -> None:
    """Train in tiles of this many samples and points from now on."""
    tsp = replace(engine.digen.tsp, samples_per_tile=tile[0], steps_per_tile=tile[1], reduce=reduce)
    engine.digen = engine.forward.digen = replace(engine.digen, tsp=tsp)
    engine.planner.tsp, engine._reduce = tsp, None


def gradients_by_shape(path: Path) -> dict[str, Any]:
    """Gradient of each case in its first shape, on the ranks that there are."""
    batch, found = make_clean_batch(path), {}
    for name, case in CASES.items():
        engine = moved_engine(path, case)
        tile, reduce, order = SHAPES[0]
        reshape(engine, tile, reduce)
        found[name] = trained(engine, batch, order)[0]
    return found


def plain_module(engine: DiffusersFSDPEngine, path: Path, policy: str) -> Any:
    state = weights(engine, policy=policy)
    return (
        plain_lora(path, engine.model_config.lora_config(), state)
        if engine._is_lora
        else plain_transformer(path, state)
    )


def serial_gradient(engine: DiffusersFSDPEngine, path: Path, batch: TensorDict) -> dict[str, torch.Tensor]:
    """Gradient with every row in a forward of its own, a plain module for each policy, and the slow loss of all."""
    policies = [policy for policy in ("old", *engine.digen.loss_settings.copies) if policy in engine.copies]
    modules = {"velocity": plain_module(engine, path, "current"), "reference_velocity": plain_transformer(path)}
    modules |= {f"{policy}_velocity": plain_module(engine, path, policy) for policy in policies}
    uids, conditions = tu.get(batch, "uid"), tu.get(batch, "conditions")
    advantages = group_advantages(torch.tensor(REWARDS, dtype=torch.float64), uids, scale=engine.digen.advantage.scale)
    model, rows = load_model(path), []
    for sample, uid in enumerate(uids):
        clean, group = batch["clean"][sample], sample // 3 * 3
        if sample - group not in engine.digen.select(REWARDS[group : group + 3]):
            continue
        for point, sigma in enumerate(batch["sigmas"][sample]):
            source = 0 if engine.objective.shares_noise else sample % 3
            noise = point_noise(engine.digen.seed, uid, source, point, clean.shape)
            noisy = clean + sigma * (noise - clean)
            values: dict[str, Any] = {"clean": clean, "noise": noise, "noisy": noisy, "sigma": sigma}
            values |= {"advantage": advantages[sample], "group": uid, "point": point}
            for name, module in modules.items():
                found = model.velocity(
                    module, noisy[None], sigma[None], [conditions[uid][0]], None, 1.0, SAMPLING.geometry
                )[0]
                values[name] = found if name == "velocity" else found.detach()
            rows.append(values)
    slow_loss(engine.digen.loss_name, rows, engine.digen.loss_settings).backward()
    return gradient_of(modules["velocity"])
