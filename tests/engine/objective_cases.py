# SPDX-License-Identifier: Apache-2.0
"""Every objective on the toy: settings under which each of its terms counts, samples, engines whose policies all
differ, and the expected gradient, one row at a time in float64 by the papers' formulas.

Samples of two groups come from one weight version and those of the third from the version before, so that recorded
log-probs are those of two policies.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from peft.utils import SAFETENSORS_WEIGHTS_NAME
from safetensors.torch import save_file
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils as tu

from tests import forward_losses, path_losses
from tests.engine.harness import EMPTY, NUM_STEPS, SAMPLING, columns_of, local_weights, make_engine, perturb, unbound
from tests.engine.slow_gradient import leaves, velocity
from tests.engine.toy import LORA, TEXT_WIDTH, ToyNetwork, toy_weights
from verl_digen.algorithms.advantages import group_advantages
from verl_digen.algorithms.forward import NoiseLevels, point_noise
from verl_digen.algorithms.objectives import find_objective
from verl_digen.algorithms.window import Window
from verl_digen.engine.engine import DiffusersFSDPEngine
from verl_digen.models import load_model
from verl_digen.sampling.requests import ODE_ONLY
from verl_digen.sampling.sampler import Sampler
from verl_digen.types import SampleRequest

Weights = Mapping[str, Tensor]
"""Trainable weights by the checkpoint's names."""

LOSSES = path_losses.LOSSES | forward_losses.LOSSES
GROUP_SIZE = 3
REWARDS = [1.0, 9.0, 3.0, 5.0, 4.0, 4.5, 0.0, 0.0, 25.0]
"""Three groups of three. Widely spread: some centred rewards exceed the clip before they are divided by the scale."""
WINDOWS = ((0, 1, 2), (1,), (0, 2))
LEVELS = ((0, 2.5, 3), (1,), (0.5, 3))
"""Trained steps, or noise levels, of each group: 18 rows."""
TEACHER_ALPHA = 5
"""`lora_alpha` of the teacher's adapter, another one than the student's."""
VERSIONS = (1, 1, 0)
"""Weight version that generated each group; version 1 trains."""
SEED = 11
"""`digen.seed`."""


@dataclass(frozen=True)
class ObjectiveCase:
    """One objective, with settings under which none of its terms is lost in rounding."""

    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    scale: str = "batch"
    flavour: str = "plain"
    """plain, or lora: see `toy_weights`."""
    kl: Mapping[str, Any] = field(default_factory=dict)
    decays: Mapping[str, float] = field(default_factory=dict)
    """Copy that follows -> its decay after 76 optimizer steps."""
    has_bound: bool = True
    """True: some rows are beyond a bound of the loss, and others within."""
    has_teacher: bool = False

    def make_engine(self, folder: Path, **digen: Any) -> DiffusersFSDPEngine:
        """Engine on the checkpoint's weights."""
        section: dict[str, Any] = {
            "seed": SEED,
            "loss": {"name": self.name, **self.settings},
            "advantage": {"scale": self.scale},
            "kl": dict(self.kl),
        }
        if self.has_teacher:
            section["loss"]["teacher"] = teacher_folder(folder)
        model = LORA if self.flavour == "lora" else {}
        return make_engine(folder, digen=section | digen, model=model, optim={"clip_grad": 1e9})


def teacher_weights() -> Weights:
    """The teacher's adapter, all numbers of which differ from the student's; with the student's alpha."""
    return moved(toy_weights("lora"), seed=31, scale=0.3)


def teacher_folder(folder: Path) -> str:
    """Folder of the teacher beside the checkpoint, which the first call writes."""
    teacher = folder.parent / "teacher"
    if not teacher.exists():
        config = LoraConfig(r=LORA["lora_rank"], lora_alpha=TEACHER_ALPHA, target_modules=LORA["target_modules"])
        config.save_pretrained(str(teacher))
        factors = {"lora_A": 1.0, "lora_B": LORA["lora_alpha"] / TEACHER_ALPHA}
        tensors = {
            f"base_model.model.{name.replace('.default', '')}": factors[name.split(".")[-3]] * value
            for name, value in teacher_weights().items()
        }
        save_file(tensors, teacher / SAFETENSORS_WEIGHTS_NAME)
    return str(teacher)


CLIP = {"clip_range": 0.05, "advantage_clip": 1.2}
"""The advantages' clip is less than the largest advantage of every scale."""
CASES = {
    "awm": ObjectiveCase("awm", {"clip_range": 0.05, "kl_coef": 0.3, "ema_kl_coef": 0.2}, decays={"ema": 0.076}),
    "awm_off_policy": ObjectiveCase(
        "awm_off_policy",
        {"clip_range": 0.05, "kl_coef": 0.3, "ema_kl_coef": 0.2, "average": "constant"},
        flavour="lora",
        decays={"old": 0.3},
    ),
    "cispo": ObjectiveCase("cispo", {"low": 0.05, "high": 0.05}, flavour="lora"),
    "cispo_masked": ObjectiveCase("cispo", {"low": 0.05, "high": 0.05, "mask": True}, scale="group"),
    "dance_grpo": ObjectiveCase("dance_grpo", CLIP, scale="max_group"),
    "decoupled_ppo": ObjectiveCase("decoupled_ppo", {**CLIP, "cap": 1.05}),
    "dgpo": ObjectiveCase(
        "dgpo", {"beta": 4.0, "clip": 0.15}, flavour="lora", kl={"coef": 0.3, "kind": "velocity"}, decays={"old": 0.076}
    ),
    "dgpo_before_its_switch": ObjectiveCase(
        "dgpo", {"beta": 4.0, "clip": 0.15, "switch_step": 100}, scale="group", decays={"old": 0.0}
    ),
    "diffusion_nft": ObjectiveCase(
        "diffusion_nft", {"beta": 0.7, "kl_coef": 0.3}, scale="group", decays={"old": 0.076}, has_bound=False
    ),
    "diffusion_nft_delayed": ObjectiveCase(
        "diffusion_nft",
        {"beta": 0.7, "kl_coef": 0.3, "old_policy": "delayed"},
        flavour="lora",
        decays={"old": 0.0075},
        has_bound=False,
    ),
    "flow_dppo": ObjectiveCase("flow_dppo", {"kl_threshold": 1e-3}),
    "flow_grpo": ObjectiveCase("flow_grpo", CLIP, kl={"coef": 0.3, "kind": "flow_grpo"}),
    "grpo_guard": ObjectiveCase("grpo_guard", {**CLIP, "clip_range": 0.02}, flavour="lora"),
    "gspo": ObjectiveCase("gspo", CLIP, kl={"coef": 0.3, "kind": "exact"}),
    "kimi": ObjectiveCase("kimi", {"tau": 0.3, "advantage_clip": 1.2}, has_bound=False),
    "longcat": ObjectiveCase("longcat", CLIP, scale="none", kl={"coef": 0.3, "kind": "longcat"}),
    "offline_dpo": ObjectiveCase("offline_dpo", {"beta": 50.0}, scale="none", flavour="lora"),
    "online_dpo": ObjectiveCase("online_dpo", {"beta": 50.0}, scale="none"),
    "online_dpo_renewed": ObjectiveCase(
        "online_dpo", {"beta": 50.0, "reference_every": 38}, scale="none", decays={"reference": 0.0}
    ),
    "opd": ObjectiveCase("opd", flavour="lora", has_bound=False, has_teacher=True),
    "opd_velocity": ObjectiveCase(
        "opd",
        {"kind": "velocity"},
        flavour="lora",
        kl={"coef": 0.3, "kind": "velocity"},
        has_bound=False,
        has_teacher=True,
    ),
    "reinforce": ObjectiveCase("reinforce", {"advantage_clip": 1.2}, scale="group", flavour="lora", has_bound=False),
    "tis": ObjectiveCase("tis", {"low": 0.95, "high": 1.05}),
    "topr": ObjectiveCase("topr", {"threshold": 4.2}, scale="max_group"),
    "weighted_topr": ObjectiveCase("weighted_topr", {"threshold": 4.2, "positive_weight": 0.7, "negative_weight": 1.9}),
}
"""Label -> case; one per objective at least, see `tests/engine/test_invariants.py`."""


# -- samples ------------------------------------------------------------------------------------------------
def requests_of(points: str, group: int) -> list[SampleRequest]:
    """Requests that a replica gets for one group."""
    sampling = replace(SAMPLING, true_cfg_scale=1.0)
    window = Window((0, 1, 2), WINDOWS[group]) if points == "path" else ODE_ONLY
    levels = None if points == "path" else NoiseLevels(LEVELS[group])
    return [
        SampleRequest(f"g{group}", index, EMPTY, EMPTY, window, sampling, noise_levels=levels)
        for index in range(GROUP_SIZE)
    ]


def condition_of(group: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(group)
    return {"embeds": torch.randn(2 + group, TEXT_WIDTH, generator=generator)}


def network_of(weights: Weights) -> ToyNetwork:
    network = ToyNetwork()
    network.load_state_dict(dict(weights))
    return network


def moved(weights: Weights, seed: int, scale: float = 0.1) -> Weights:
    """The weights, each with noise."""
    generator = torch.Generator().manual_seed(seed)
    return {name: value + scale * torch.randn(value.shape, generator=generator) for name, value in weights.items()}


@cache
def make_batch(folder: Path, points: str) -> TensorDict:
    """9 samples in 3 groups, denoised by the networks of two weight versions; read-only."""
    model, start = load_model(folder), toy_weights("plain")
    versions = [network_of(moved(start, seed)) for seed in (21, 22)]
    records, uids, conditions = [], [], {}
    for group, version in enumerate(VERSIONS):
        sampler = Sampler(
            model, versions[version], run_seed=SEED, device=torch.device("cpu"), latents_dtype=torch.float32
        )
        condition = condition_of(group)
        made, _ = sampler.sample(requests_of(points, group), [condition] * GROUP_SIZE, None, version=version)
        records += [trajectory.record.columns() for trajectory in made]
        uids += [f"g{group}"] * GROUP_SIZE
        conditions[f"g{group}"] = condition, None
    return tu.get_tensordict({"uid": uids, **columns_of(records)}, {"conditions": conditions, "sampling": SAMPLING})


# -- engines ------------------------------------------------------------------------------------------------
def moved_engine(case: ObjectiveCase, folder: Path, **digen: Any) -> tuple[DiffusersFSDPEngine, dict[str, Weights]]:
    """(engine whose policies all differ, this rank's part of their weights by name). Policy `old` is a copy that
    follows, or the weights before the first of several optimizer steps."""
    engine, scale = case.make_engine(folder, **digen), 0.3 if case.flavour == "lora" else 0.05
    policies: dict[str, Weights] = {"reference": toy_weights(case.flavour)}
    if case.has_teacher:
        policies["teacher"] = teacher_weights()
    for seed, policy in enumerate(dict.fromkeys(("old", *engine.digen.loss_settings.copies)), start=1):
        perturb(engine, scale, seed=seed)
        policies[policy] = local_weights(engine)
        engine.copies.keep(policy)
    perturb(engine, scale, seed=9)
    policies["current"] = local_weights(engine)
    return engine, policies


# -- expected gradient --------------------------------------------------------------------------------------
def expected(
    case: ObjectiveCase, engine: DiffusersFSDPEngine, policies: Mapping[str, Weights], batch: TensorDict
) -> tuple[float, dict[str, Tensor]]:
    """(loss, gradient) of the batch, from one row at a time. One rank."""
    weights = {policy: leaves(values) for policy, values in policies.items()}
    rows = list(_rows(case, engine, weights, batch))
    loss = LOSSES[case.name](rows, engine.digen.loss_settings)
    if case.kl:
        loss = loss + case.kl["coef"] * torch.stack([_kl(case.kl["kind"], row) for row in rows]).mean()
    loss.backward()
    return loss.item(), {name: value.grad for name, value in weights["current"].items() if value.grad is not None}


def _rows(
    case: ObjectiveCase, engine: DiffusersFSDPEngine, weights: Mapping[str, Weights], batch: TensorDict
) -> Iterator[dict[str, Any]]:
    """Inputs of each row that trains."""
    uids = tu.get(batch, "uid")
    columns = {**unbound(batch), "uid": uids, "conditions": tu.get(batch, "conditions")}
    advantages = group_advantages(torch.tensor(REWARDS, dtype=torch.float64), uids, scale=case.scale)
    for sample, uid in enumerate(uids):
        first = sample // GROUP_SIZE * GROUP_SIZE
        if sample - first not in engine.digen.select(REWARDS[first : first + GROUP_SIZE]):
            continue
        for point in range(len(columns["sigmas"][sample])):
            row: dict[str, Any] = {"advantage": advantages[sample], "reward": torch.tensor(REWARDS[sample]).double()}
            row |= {"sample": sample, "group": uid, "point": point}
            if find_objective(case.name).points == "path":
                yield row | _path_row(case, engine, weights, columns, sample, point)
            else:
                yield row | _forward_row(case, weights, columns, sample, point)


def _path_row(
    case: ObjectiveCase,
    engine: DiffusersFSDPEngine,
    weights: Mapping[str, Weights],
    columns: Mapping[str, Any],
    sample: int,
    point: int,
) -> dict[str, Tensor]:
    """One recorded step under law flow."""
    position = int(columns["positions"][sample][point])
    x, x_next = (columns["latents"][sample][place].double() for place in (position, position + 1))
    sigma, sigma_next = (columns[name][sample][point].double() for name in ("sigmas", "next_sigmas"))
    sigma_max, dt = columns["sigma_max"][sample].double().squeeze(), sigma_next - sigma
    s = SAMPLING.noise_level * torch.sqrt(sigma / (1 - (sigma_max if sigma == 1 else sigma)))
    std = s * torch.sqrt(-dt)
    row = {"sigma": sigma, "sigma_next": sigma_next, "sigma_max": sigma_max, "s": s, "std": std}
    for policy, v in _velocities(case, weights, columns, sample, x, sigma):
        mean = x * (1 + s**2 / (2 * sigma) * dt) + v * (1 + s**2 * (1 - sigma) / (2 * sigma)) * dt
        log_prob = (-((x_next - mean) ** 2) / (2 * std**2) - torch.log(std) - 0.5 * math.log(2 * math.pi)).mean()
        row |= {f"{policy}velocity": v, f"{policy}mean": mean, f"{policy}log_prob": log_prob}
    row["behaviour_log_prob"] = columns["log_probs"][sample][point].double()
    if engine.digen.denominator == "rollout":
        row["old_log_prob"] = row["behaviour_log_prob"]
    return row


def _forward_row(
    case: ObjectiveCase, weights: Mapping[str, Weights], columns: Mapping[str, Any], sample: int, point: int
) -> dict[str, Tensor]:
    """Clean latents, noised again at one level."""
    clean, sigma = columns["clean"][sample], columns["sigmas"][sample][point]
    source = 0 if find_objective(case.name).shares_noise else sample % GROUP_SIZE
    noise = point_noise(SEED, columns["uid"][sample], source, point, clean.shape)
    noisy = clean + sigma * (noise - clean)
    row = {"clean": clean.double(), "noise": noise.double(), "noisy": noisy.double(), "sigma": sigma.double()}
    for policy, v in _velocities(case, weights, columns, sample, noisy.double(), sigma.double()):
        row[f"{policy}velocity"] = v
    return row


def _velocities(
    case: ObjectiveCase,
    weights: Mapping[str, Weights],
    columns: Mapping[str, Any],
    sample: int,
    x: Tensor,
    sigma: Tensor,
) -> Iterator[tuple[str, Tensor]]:
    """(prefix of a policy's inputs, its velocity), with gradient for the one that trains."""
    text = columns["conditions"][columns["uid"][sample]][0]["embeds"].double().mean(dim=0)
    for policy, values in weights.items():
        v = velocity(case.flavour, values, x, sigma.item(), text)
        yield ("", v) if policy == "current" else (f"{policy}_", v.detach())


def _kl(kind: str, row: Mapping[str, Any]) -> Tensor:
    """The KL term of one row."""
    if kind == "velocity":
        return ((row["velocity"] - row["reference_velocity"]) ** 2).mean()
    distance = ((row["mean"] - row["reference_mean"]) ** 2).mean()
    if kind == "longcat":
        return path_losses.step_weight(row) ** 2 * distance / (2 * row["std"] ** 2)
    return distance / (2 * (row["s"] if kind == "flow_grpo" else row["std"]) ** 2)


def old_log_probs(
    case: ObjectiveCase, engine: DiffusersFSDPEngine, policies: Mapping[str, Weights], batch: TensorDict
) -> Sequence[Tensor]:
    """Log-probs of each sample's steps under policy `old`, as the driver sends them to later optimizer steps."""
    weights = {policy: leaves(values) for policy, values in policies.items()}
    found: list[list[float]] = [[] for _ in REWARDS]
    for row in _rows(case, engine, weights, batch):
        found[row["sample"]].append(row["old_log_prob"].item())
    return [torch.tensor(values) for values in found]


assert NUM_STEPS == 1 + max(max(window) for window in WINDOWS) + 1 == 4
