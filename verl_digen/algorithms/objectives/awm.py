# SPDX-License-Identifier: Apache-2.0
"""`awm` and `awm_off_policy`: advantage-weighted matching. PPO's clip of a forward-process surrogate of the log-prob,
beside distances to the reference and to an average of the policy. Needs final latents alone.

Source: AWM, arXiv 2509.25050, and its code, whose recipes take one optimizer step per batch: the ratio is 1, and
the gradient is -A times the surrogate's. With `awm_off_policy` the average samples, and the ratio is the one to it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from verl_digen.algorithms.ema import Decay
from verl_digen.algorithms.objectives.objective import ClampedConfig, register_objective
from verl_digen.algorithms.objectives.ratio import clamped_advantage, ppo_clip, ratio_metrics, ratio_of
from verl_digen.algorithms.rows import LossInputs, LossOutput
from verl_digen.algorithms.sde import latent_mean
from verl_digen.require import In, OneOf, require_one_of

FLOOR = 1e-10
"""Added to an error before a root is taken of it, whose slope is infinite at 0."""
WEIGHTINGS: Mapping[str, Callable[[Tensor, Tensor, float], Tensor]] = {
    "uniform": lambda error, sigma, power: -error,
    "t": lambda error, sigma, power: -error * sigma,
    "t**2": lambda error, sigma, power: -error * sigma**2,
    "huber": lambda error, sigma, power: -((error + FLOOR).sqrt() - FLOOR**0.5) * sigma,
    "ghuber": lambda error, sigma, power: -((error + FLOOR) ** power - FLOOR**power) * sigma / power,
}
"""`weighting` -> (errors [N], sigmas [N], power) -> surrogate log-probs [N], all fp64."""
KL_WEIGHTINGS: Mapping[str, Callable[[Tensor], Tensor | float]] = {
    "uniform": lambda sigma: 1.0,
    "elbo": lambda sigma: (1 - sigma.clamp(max=0.99)) / (2 * 0.49 * sigma),  # 1 / (2 s^2), s of law flow at eta 0.7
}
"""`kl_weighting` -> weights [N] of the distances, from sigmas [N]."""
AVERAGES = {"linear": Decay(0.001, 0.3), "constant": Decay(0.3, 0.3)}
"""`average` -> decay of the average after k optimizer steps."""


@dataclass(frozen=True)
class AwmConfig(ClampedConfig):
    weighting: str = "ghuber"
    """Surrogate log-prob of the flow error e at noise level t. uniform: -e. t: -e t. t**2: -e t^2. huber: -t sqrt(e).
    ghuber: -t e^power / power, in all published recipes. Upper case is read as lower case."""
    power: Annotated[float, In("(0, inf)")] = 0.25
    """ghuber: exponent of the error."""
    clip_range: Annotated[float, In("(0, inf)")] = 1.0
    """The ratio is clipped to 1 +- this. 1 in the published recipes, where the ratio is 1; 1e-4 in Flow-Factory."""
    kl_coef: Annotated[float, In("[0, inf)"), "0 switches it off"] = 0.003
    """Weight of the distance to the reference. 0.001 (GenEval), 0.003 (OCR), 1e-4 (PickScore); 0 saves its forward."""
    ema_kl_coef: Annotated[float, In("[0, inf)"), "0 switches it off"] = 1.0
    """Weight of the distance to the EMA; 0 saves its forward and its memory."""
    average: Annotated[str, OneOf(AVERAGES)] = "linear"
    """Decay of the EMA after k optimizer steps, once per batch. linear: min(0.001 k, 0.3). constant: 0.3."""
    kl_weighting: str = "uniform"
    """Weight of both distances, mean[(v - v')^2]. uniform: 1, in all recipes. elbo: 1 / (2 s^2), as in an SDE step
    with eta 0.7."""
    advantage_clip: Annotated[float, In("(0, inf)"), "5 is AWM's; the loss divides by it"] = 5.0
    advantage_max: Annotated[float, In("(0, inf)")] = 1.0
    """Clamped advantages are scaled to +- this."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require_one_of("digen.loss.weighting", self.weighting.lower(), WEIGHTINGS)
        require_one_of("digen.loss.kl_weighting", self.kl_weighting.lower(), KL_WEIGHTINGS)

    @property
    def clip_widths(self) -> Mapping[str, float]:
        return {"clip_range": self.clip_range}

    @property
    def distances(self) -> Mapping[str, float]:
        """Policies whose distance counts -> weight."""
        coefs = {"reference": self.kl_coef, "ema": self.ema_kl_coef}
        return {policy: coef for policy, coef in coefs.items() if coef > 0}

    @property
    def more_latents(self) -> tuple[str, ...]:
        return tuple(f"{policy}_velocity" for policy in self.distances)

    @property
    def copies(self) -> Mapping[str, Decay]:
        return {"ema": AVERAGES[self.average]} if self.ema_kl_coef > 0 else {}


@dataclass(frozen=True)
class AwmOffPolicyConfig(AwmConfig):
    """Settings of `awm_off_policy`: the average is policy `old`, which generates the samples."""

    @property
    def distances(self) -> Mapping[str, float]:
        return {"old" if policy == "ema" else policy: coef for policy, coef in super().distances.items()}

    @property
    def more_latents(self) -> tuple[str, ...]:
        return tuple(name for name in super().more_latents if name != "old_velocity")  # the clip reads it in any case

    @property
    def copies(self) -> Mapping[str, Decay]:
        return {"old": AVERAGES[self.average]}


LATENTS = ("clean", "noise", "velocity", "old_velocity")
DECLARED = {"points": "forward", "columns": ("advantage", "sigma"), "latents": LATENTS, "off_policy": True}


@register_objective("awm_off_policy", config=AwmOffPolicyConfig, behaviour="old", **DECLARED)
@register_objective("awm", config=AwmConfig, **DECLARED)
def matching_clip(rows: LossInputs, config: AwmConfig) -> LossOutput:
    """PPO's clip of exp(l - l_old), plus kl_coef D(v, v_ref) + ema_kl_coef D(v, v_ema), D = w mean[(v - v')^2]."""
    now, old = (surrogate(rows, name, config) for name in ("velocity", "old_velocity"))
    log_ratio = (now - old.detach()).float()
    advantage = clamped_advantage(rows, config) * (config.advantage_max / config.advantage_clip)
    low, high = 1 - config.clip_range, 1 + config.clip_range
    per_row = ppo_clip(ratio_of(log_ratio), advantage, low, high)
    metrics = ratio_metrics(rows, log_ratio, low, high) | {"surrogate_log_prob": rows.mean_metric(now.float())}
    for policy, coef in config.distances.items():
        distance = latent_mean((rows["velocity"] - rows[f"{policy}_velocity"]).square())
        per_row = per_row + coef * KL_WEIGHTINGS[config.kl_weighting.lower()](rows["sigma"]) * distance
        metrics[f"{policy}_distance"] = rows.mean_metric(distance)
    return LossOutput(rows.mean(per_row), metrics)


def surrogate(rows: LossInputs, velocity: str, config: AwmConfig) -> Tensor:
    """[N] fp64: surrogate log-prob of x_0 under the policy whose velocity this is."""
    target = rows["noise"].double() - rows["clean"].double()
    error = latent_mean((rows[velocity].double() - target).square())
    return WEIGHTINGS[config.weighting.lower()](error, rows["sigma"].double(), config.power)
