# SPDX-License-Identifier: Apache-2.0
import math
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.path_losses import slow_loss, step_weight
from verl_digen.algorithms.ema import Decay
from verl_digen.algorithms.kl import KINDS, kl_loss
from verl_digen.algorithms.objectives import (
    ClampedConfig,
    ClipConfig,
    LossConfig,
    LossOutput,
    best_and_worst,
    default_config,
    find_objective,
    objective_names,
    policy_loss,
    register_objective,
)
from verl_digen.algorithms.objectives.diffusion_nft import DiffusionNftConfig
from verl_digen.algorithms.rows import LossInputs, combine_tiles, numbers

ORACLES = Path(__file__).parents[1] / "fixtures" / "oracles"
OF_PATHS = [name for name in objective_names() if find_objective(name).points == "path" and name != "opd"]
"""Losses of log-probs."""
POLICY_INPUTS = ("log_prob", "old_log_prob", "advantage")


def some_inputs(num_rows=12, seed=0):
    generator = torch.Generator().manual_seed(seed)
    old = -0.2 + 0.1 * torch.randn(num_rows, generator=generator)
    return {
        "log_prob": old + 1e-3 * torch.randn(num_rows, generator=generator),
        "old_log_prob": old,
        "behaviour_log_prob": old + 1e-3 * torch.randn(num_rows, generator=generator),
        "trajectory_log_ratio": 1e-3 * torch.randn(num_rows, generator=generator),
        "reward": torch.randn(num_rows, generator=generator),
        "advantage": 2 * torch.randn(num_rows, generator=generator),
        "mean": torch.randn(num_rows, 3, 4, generator=generator),
        "reference_mean": torch.randn(num_rows, 3, 4, generator=generator),
        "velocity": torch.randn(num_rows, 3, 4, generator=generator),
        "reference_velocity": torch.randn(num_rows, 3, 4, generator=generator),
        "std": 0.1 + torch.rand(num_rows, generator=generator),
        "sigma": torch.cat([torch.ones(1), torch.full((num_rows - 1,), 0.5)]),
        "sigma_next": 0.49 - 0.1 * torch.rand(num_rows, generator=generator),
        "sigma_max": torch.full((num_rows,), 0.9),
        "teacher_mean": torch.randn(num_rows, 3, 4, generator=generator),
        "teacher_velocity": torch.randn(num_rows, 3, 4, generator=generator),
        "noise_rate": 0.2 + torch.rand(num_rows, generator=generator),
        "old_mean": torch.randn(num_rows, 3, 4, generator=generator),
        "old_velocity": torch.randn(num_rows, 3, 4, generator=generator),
        "clean": torch.randn(num_rows, 3, 4, generator=generator),
        "noisy": torch.randn(num_rows, 3, 4, generator=generator),
        "noise": torch.randn(num_rows, 3, 4, generator=generator),
        "ema_velocity": torch.randn(num_rows, 3, 4, generator=generator),
        "group_weight": torch.rand(num_rows, generator=generator),
        "pair_margin": 1e-3 * torch.randn(num_rows, generator=generator),
    }


def gradient(output: LossOutput, tensor):
    return torch.autograd.grad(output.loss, tensor, retain_graph=True)[0]


def test_loss_kl_and_gradient_agree_with_flow_grpo():
    oracle = {name: torch.from_numpy(np.asarray(v)) for name, v in np.load(ORACLES / "loss_flow_grpo.npz").items()}
    expected = {name.removeprefix("ppo_cr1e-4_b0.04_"): value for name, value in oracle.items()}
    log_prob = oracle["log_prob_new"].requires_grad_()
    inputs = {"log_prob": log_prob, "old_log_prob": oracle["log_prob_old"], "advantage": oracle["advantages"]}
    policy = policy_loss("flow_grpo", inputs, ClipConfig(clip_range=1e-4, advantage_clip=5.0))
    means = {"mean": oracle["mean"], "reference_mean": oracle["mean_ref"]}
    kl = kl_loss("flow_grpo", means | {"noise_rate": oracle["std_dev_t"].flatten()})
    exact = dict(rtol=1e-6, atol=0.0)
    torch.testing.assert_close(policy.loss, expected["policy_loss"].squeeze(), **exact)
    torch.testing.assert_close(kl.loss, expected["kl_loss"].squeeze(), **exact)
    torch.testing.assert_close(policy.loss + 0.04 * kl.loss, expected["loss"].squeeze(), **exact)
    torch.testing.assert_close(gradient(policy, log_prob), expected["dloss_dlogprob"], rtol=1e-6, atol=1e-8)
    deviations = expected["ratio"] - 1
    torch.testing.assert_close(policy.metrics["ratio_deviation_max"].value, deviations.max(), atol=2e-7, rtol=0)
    torch.testing.assert_close(policy.metrics["ratio_deviation_min"].value, deviations.min(), atol=2e-7, rtol=0)
    torch.testing.assert_close(policy.metrics["ratio_deviation"].value, deviations.mean(), atol=2e-7, rtol=0)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("flow_grpo", {}),
        ("flow_grpo", {"clip_range": 1e-3, "clip_range_high": 4e-3, "advantage_clip": 1.0}),
        ("dance_grpo", {"clip_range": 1e-3, "advantage_clip": 1.0}),
        ("grpo_guard", {"clip_range": 0.02}),
        ("longcat", {"clip_range": 1e-3, "advantage_clip": 1.0}),
    ],
    ids=str,
)
def test_loss_and_gradient_are_those_of_the_formula(name, settings):
    """The last row is padding, which lies at the end of a schedule."""
    inputs, config = some_inputs(40), replace(default_config(name), **settings)
    inputs["mean"] = inputs["old_mean"] + 0.1 * inputs["mean"]
    inputs["sigma_next"][-1] = inputs["sigma"][-1]
    leaves = [inputs[key].requires_grad_() for key in ("log_prob", "mean")]
    output = policy_loss(name, inputs | {"mask": torch.arange(40) < 39}, config)
    expected = slow_loss(name, inputs, config, range(39))
    assert output.loss.item() == pytest.approx(expected.item(), rel=2e-6)
    for found, wanted in zip(
        *(torch.autograd.grad(loss, leaves, allow_unused=True) for loss in (output.loss, expected)), strict=True
    ):
        if wanted is not None:
            torch.testing.assert_close(found, wanted, rtol=2e-5, atol=1e-7)
    assert 0 < numbers(output.metrics)["clip_fraction"] < 1
    if name == "longcat":
        weights = [step_weight({key: column[row] for key, column in inputs.items()}) for row in range(39)]
        assert output.metrics["step_weight"].value.item() == pytest.approx(sum(weights) / 39, rel=1e-5)


def test_sides_of_the_ratio_are_counted_by_the_advantage_s_sign():
    inputs = {
        "log_prob": torch.tensor([0.1, 0.2, -0.1, 0.0, 0.3, torch.nan]),
        "old_log_prob": torch.zeros(6),
        "advantage": torch.tensor([1.0, 2.0, 1.0, -1.0, -3.0, -1.0]),
        "mask": torch.tensor([1.0, 1, 1, 1, 1, 0]),
        "num_rows": 10,
    }
    found = numbers(policy_loss("flow_grpo", inputs, ClipConfig()).metrics)
    assert found["ratio_above_fraction"] == pytest.approx(3 / 10)
    assert found["ratio_below_fraction"] == pytest.approx(1 / 10)
    assert found["ratio_sign_positive"] == pytest.approx((1 + 1 - 1) / 10)
    assert found["ratio_sign_negative"] == pytest.approx((0 + 1) / 10)
    assert found["advantage_positive_fraction"] == pytest.approx(3 / 10)
    assert found["advantage_negative_fraction"] == pytest.approx(2 / 10)


def every_loss(inputs):
    for name in objective_names():
        config = default_config(name)
        yield policy_loss(name, inputs, replace(config, clip_range=1e-3) if isinstance(config, ClipConfig) else config)
    for kind in KINDS:
        yield kl_loss(kind, inputs)


def test_losses_gradients_and_metrics_of_fragments_add_up_to_the_batch():
    leaves = ("log_prob", "mean", "velocity")
    batch = {name: tensor.requires_grad_(name in leaves) for name, tensor in some_inputs(12).items()}
    batch["mask"] = torch.ones(12)
    batch["mask"][[3, 7]] = 0
    fragments = [
        {name: tensor[rows] for name, tensor in batch.items()} | {"num_rows": torch.tensor(10)}
        for rows in (slice(0, 5), slice(5, 6), slice(6, 12))
    ]
    for whole, *shares in zip(every_loss(batch), *map(every_loss, fragments), strict=True):
        total = sum(share.loss for share in shares)
        torch.testing.assert_close(total, whole.loss, rtol=1e-5, atol=1e-7)
        for leaf in (batch[name] for name in leaves):
            expected, got = (
                torch.autograd.grad(loss, leaf, retain_graph=True, allow_unused=True)[0] for loss in (whole.loss, total)
            )
            if expected is not None:
                torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-8)
        combined = combine_tiles(share.metrics for share in shares)
        assert numbers(combined) == pytest.approx(numbers(whole.metrics), rel=1e-5, abs=1e-8)


@pytest.mark.parametrize("garbage", [0.0, math.nan, math.inf, 1e30])
def test_padding_rows_add_nothing_whatever_their_columns_hold(garbage):
    inputs = some_inputs(6)
    padded = {name: torch.cat([t, torch.zeros_like(t[:2])]) for name, t in inputs.items()}
    for name, tensor in padded.items():
        if tensor.dim() == 1:
            tensor[6:] = garbage
        padded[name] = tensor.requires_grad_()
    padded["mask"] = torch.tensor([True] * 6 + [False] * 2)
    for plain, output in zip(every_loss(inputs), every_loss(padded), strict=True):
        torch.testing.assert_close(output.loss, plain.loss)
        assert numbers(output.metrics) == pytest.approx(numbers(plain.metrics))
        for gradient in torch.autograd.grad(
            output.loss, [t for t in padded.values() if t.requires_grad], allow_unused=True
        ):
            assert gradient is None or (gradient.isfinite().all() and not gradient[6:].any())


def test_a_tile_of_padding_alone_has_loss_0():
    for output in every_loss(some_inputs(3) | {"mask": torch.zeros(3)}):
        assert output.loss == 0


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("log_ratio", [-1e4, -100.0, 100.0, 1e4])
@pytest.mark.parametrize("name", OF_PATHS)
def test_extreme_ratios_are_finite_in_value_and_gradient(name: str, log_ratio: float, advantage: float):
    log_prob = torch.tensor([log_ratio, 0.0], requires_grad=True)
    inputs = {
        "log_prob": log_prob,
        "old_log_prob": torch.tensor([log_ratio / 2, 0.0]),
        "behaviour_log_prob": torch.zeros(2),
        "trajectory_log_ratio": log_prob.detach(),
        "advantage": torch.full((2,), advantage),
        "reward": torch.full((2,), -1.0),
        "std": torch.ones(2),
        "sigma": torch.ones(2),
        "sigma_next": torch.zeros(2),
        "sigma_max": torch.zeros(2),
        "mean": torch.zeros(2, 3),
        "old_mean": torch.zeros(2, 3),
    }
    output = policy_loss(name, inputs, default_config(name))
    assert output.loss.isfinite() and all(math.isfinite(value) for value in numbers(output.metrics).values())
    far, near = gradient(output, log_prob).tolist()
    assert math.isfinite(far) and near == pytest.approx(-advantage / 2)
    if name in ("flow_grpo", "dance_grpo", "decoupled_ppo", "gspo", "grpo_guard", "longcat"):
        assert far == 0.0


@pytest.mark.parametrize("settings", [{}, {"clip_range": 1e-3, "low": 1e-3, "high": 1e-3, "mask": True}], ids=str)
@pytest.mark.parametrize("name", OF_PATHS)
def test_a_loss_is_filed_as_homogeneous_in_the_advantage_if_and_only_if_it_is(name, settings):
    inputs = some_inputs(30)
    default = default_config(name).unclamped()
    config = replace(default, **{key: value for key, value in settings.items() if hasattr(default, key)})
    log_prob = inputs["log_prob"].requires_grad_()
    one = policy_loss(name, inputs, config)
    for factor in (0.02, 37.5):
        many = policy_loss(name, inputs | {"advantage": factor * inputs["advantage"]}, config)
        is_proportional = torch.allclose(many.loss, factor * one.loss, rtol=1e-5, atol=0) and torch.allclose(
            gradient(many, log_prob), factor * gradient(one, log_prob), rtol=1e-5, atol=0
        )
        assert is_proportional == find_objective(name).homogeneous


def test_low_precision_inputs_are_reduced_in_fp32():
    inputs = some_inputs()
    half = {name: tensor.bfloat16() for name, tensor in inputs.items()}
    full = {name: tensor.float() for name, tensor in half.items()}
    for low, high in zip(every_loss(half), every_loss(full), strict=True):
        assert low.loss.dtype == torch.float32
        assert torch.equal(low.loss, high.loss)


def test_metrics_carry_no_graph():
    inputs = some_inputs()
    for name in ("log_prob", "mean", "velocity"):
        inputs[name].requires_grad_()
    for output in every_loss(inputs):
        assert not any(metric.value.requires_grad for metric in output.metrics.values())


def test_kl_kinds_are_what_their_formulas_say():
    inputs = some_inputs(4)
    double = {name: tensor.double() for name, tensor in inputs.items()}
    of_means = (double["mean"] - double["reference_mean"]).square().flatten(1).mean(1)
    exact = of_means / (2 * double["std"] ** 2)
    weights = torch.tensor([step_weight({key: column[row] for key, column in double.items()}) for row in range(4)])
    expected = {
        "flow_grpo": of_means / (2 * double["noise_rate"] ** 2),
        "exact": exact,
        "velocity": (double["velocity"] - double["reference_velocity"]).square(),
        "longcat": weights**2 * exact,
    }
    assert set(expected) == set(KINDS)
    for kind, values in expected.items():
        torch.testing.assert_close(kl_loss(kind, inputs).loss, values.mean().float(), rtol=1e-6, atol=0)
        equal = {"reference_mean": inputs["mean"], "reference_velocity": inputs["velocity"]}
        assert kl_loss(kind, inputs | equal).loss == 0


def test_a_missing_input_is_an_error_naming_what_is_there():
    inputs = some_inputs()
    with pytest.raises(ValueError, match=r"policy loss 'flow_grpo' needs old_log_prob; its inputs hold log_prob, mask"):
        policy_loss("flow_grpo", {k: inputs["log_prob"] for k in ("log_prob", "mask", "advantage")}, ClipConfig())
    with pytest.raises(ValueError, match=r"KL kind 'exact' needs std, reference_mean; its inputs hold mean$"):
        kl_loss("exact", {"mean": inputs["mean"]})


@pytest.mark.parametrize("name", ["log_prob", "advantage", "mask", "std"])
def test_a_column_of_another_shape_is_an_error(name):
    inputs = some_inputs() | {"mask": torch.ones(12)}
    for shape in ((12, 1), (11,), ()):
        with pytest.raises(ValueError, match="of shape"):
            list(every_loss(inputs | {name: torch.ones(shape)}))


def test_an_unknown_name_is_an_error_listing_the_known_ones():
    with pytest.raises(ValueError, match=r"unknown policy loss 'ppo'; known losses: awm, .*flow_grpo"):
        policy_loss("ppo", {}, ClipConfig())
    assert set(find_objective("flow_grpo").inputs_for(ClipConfig())) == set(POLICY_INPUTS)


def test_a_registered_loss_is_found_checked_and_called():
    @register_objective("mine", columns=("log_prob", "advantage"))
    def mine(rows, config):
        return LossOutput(rows.mean(-rows["advantage"] * rows["log_prob"]), {})

    inputs = {"log_prob": torch.tensor([1.0, 2.0]), "advantage": torch.tensor([3.0, 4.0])}
    assert policy_loss("mine", inputs, default_config("mine")).loss == -5.5
    assert "mine" in objective_names()
    objective = find_objective("mine")
    assert not objective.homogeneous and not objective.off_policy  # unless it says so
    with pytest.raises(ValueError, match="needs advantage"):
        policy_loss("mine", {"log_prob": torch.ones(2)}, ClampedConfig())
    with pytest.raises(ValueError, match="'flow_grpo' exists already"):
        register_objective("flow_grpo", columns=("log_prob",))(mine)


def test_an_input_that_a_loss_did_not_declare_is_named_with_those_that_it_did():
    rows = LossInputs.check("test", {"log_prob": torch.zeros(2)}, columns=("log_prob",))
    with pytest.raises(ValueError, match="of those that it declares, log_prob, got 'advantage'; add it to its columns"):
        _ = rows["advantage"]


def test_a_loss_that_returns_a_tensor_is_told_what_to_return():
    given = {"log_prob": torch.ones(2)}
    wrong = {
        "mine": (lambda rows: rows["log_prob"].sum(), ", got 'Tensor'"),
        "rowwise": (lambda rows: LossOutput(rows["log_prob"], {}), r" of a scalar, got torch.Size\(\[2\]\)"),
        "plain": (lambda rows: LossOutput(rows["log_prob"].sum(), {"x": 1.0}), r" of Metrics, got {'x': 1.0}"),
    }
    for name, (compute, told) in wrong.items():
        register_objective(name, columns=("log_prob",))(lambda rows, config, compute=compute: compute(rows))
        with pytest.raises(ValueError, match=rf"policy loss '{name}' must return a LossOutput{told}; write return"):
            policy_loss(name, given, ClampedConfig())


def test_a_loss_without_a_gradient_is_told_before_the_backward():
    @register_objective("mine", columns=("log_prob",))
    def mine(rows, config):
        return LossOutput(rows.mean(rows["log_prob"].detach()), {})

    assert policy_loss("mine", {"log_prob": torch.ones(2)}, ClampedConfig()).loss == 1
    with pytest.raises(ValueError, match=r"'mine' must return a LossOutput whose loss has a gradient, got tensor"):
        policy_loss("mine", {"log_prob": torch.ones(2, requires_grad=True)}, ClampedConfig())


def test_a_loss_that_a_run_cannot_call_is_refused():
    with pytest.raises(
        ValueError, match=r"the loss 'mine' must be a function, got .* \(TypeError: too many .* def loss"
    ):
        register_objective("mine", columns=("reward",))(lambda rows: rows["reward"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(columns=("log_probs",)), "columns of the objective 'mine' must be one of advantage, .*, got 'log_probs'"),
        (dict(latents=("new_mean",)), "latents of the objective 'mine' must be one of latents, .*, got 'new_mean'"),
        (dict(columns=("mean",)), "columns of the objective 'mine' must be one of"),
        (dict(columns=("reward",), points="paths"), "points of the objective 'mine' must be one of path, forward, got"),
        (dict(), "an objective must have a name and an input"),
        (
            dict(columns="reward"),
            r"columns of an objective must be a tuple of names, got 'reward'; write \('reward',\)",
        ),
        (dict(columns=("reward",), config=int), "config of an objective must be a class of LossConfig, got"),
        (dict(columns=("reward",), laws="flow"), "laws of an objective must be a tuple of names, got 'flow'"),
        (dict(columns=("reward",), laws=("flows",)), "laws of the objective 'mine' must be one of .*did you mean flow"),
        (dict(columns=("reward",), behaviour="older"), "behaviour of the objective 'mine' must be one of current, old"),
        (dict(columns=("reward",), source="data", points="forward"), "source of the objective 'mine' must be one of"),
        (
            dict(columns=("reward",)),
            r"must have log_prob or mean or velocity, which .*, got \('reward',\); add what the",
        ),
        (dict(columns=("reward",), points="forward"), "inputs of the objective 'mine' must have velocity, which alone"),
        (dict(columns=("reward",), select=4), "select of the objective 'mine' must be a function, got 4 "),
        (dict(columns=("reward",), select=best_and_worst), r"must be a function, got .* 'count'\); write def select"),
    ],
)
def test_a_loss_that_asks_for_what_training_does_not_have_is_refused_when_it_is_registered(arguments, message):
    with pytest.raises(ValueError, match=message):
        register_objective("mine", **arguments)(lambda rows, config: None)
    assert "mine" not in objective_names()


@dataclass(frozen=True)
class FollowedConfig(LossConfig):
    """Settings with a copy of the weights."""

    @property
    def copies(self):
        return {"ema": Decay(0.001, 0.3)}


def test_an_objective_may_read_its_own_copies_and_serves_one_that_it_has():
    latents = ("velocity", "ema_velocity")
    register_objective("mine", config=FollowedConfig, points="forward", latents=latents)(lambda rows, config: None)
    assert find_objective("mine").inputs_for(FollowedConfig()) == latents
    with pytest.raises(ValueError, match=r"latents of the objective 'other' must be one of .*, got 'ema_velocity'"):
        register_objective("other", points="forward", latents=latents)(lambda rows, config: None)
    serves_none = register_objective("other", config=FollowedConfig, latents=("velocity",), behaviour="old")
    with pytest.raises(ValueError, match=r"behaviour of the objective 'other' must be current because .* no copy"):
        serves_none(lambda rows, config: None)
    serves_another = register_objective("other", config=DiffusionNftConfig, points="forward", latents=("velocity",))
    with pytest.raises(ValueError, match=r"behaviour of the objective 'other' must be old because .* a copy `old`"):
        serves_another(lambda rows, config: None)


BAD_SETTINGS = [
    ("flow_grpo", {"clip_range": 0.0}, r"clip_range must lie in \(0, 1\), got 0.0"),
    ("flow_grpo", {"clip_range": 1.0}, r"clip_range must lie in \(0, 1\)"),
    ("flow_grpo", {"clip_range": math.nan}, r"clip_range must lie in \(0, 1\)"),
    ("flow_grpo", {"clip_range_high": -1e-4}, "clip_range_high must be null or > 0"),
    ("flow_grpo", {"advantage_clip": 0.0}, "advantage_clip must be > 0"),
    ("tis", {"low": -0.1}, r"low and digen.loss.high must be .* got \(-0.1, 1.0\); 0 and 1"),
    ("tis", {"low": 2.0}, r"low and .* got \(2.0, 1.0\)"),
    ("tis", {"low": 0.0, "high": 0.0}, "low and"),
    ("tis", {"high": math.inf}, "low and"),
    ("cispo", {"low": 0.0}, r"low must lie in \(0, 1\], got 0.0; 0.1 is the default"),
    ("cispo", {"high": math.nan}, "high must be > 0 and finite, got nan; 0.1 is the default"),
    ("topr", {"threshold": math.inf}, "threshold must be finite, got inf; .*reinforce or tis"),
    ("weighted_topr", {"positive_weight": 0.0}, "positive_weight must be > 0 and finite"),
    ("weighted_topr", {"negative_weight": -1.0}, "negative_weight must be >= 0 and finite"),
    ("decoupled_ppo", {"cap": 0.9}, "cap must be >= 1 and finite, got 0.9; a sample of the weights before"),
    ("kimi", {"tau": -0.1}, "tau must be >= 0 and finite, got -0.1"),
    ("flow_dppo", {"kl_threshold": 0.0}, "kl_threshold must be > 0 and finite, got 0.0"),
    ("awm", {"weighting": "sigma"}, "weighting must be one of uniform, t, .* got 'sigma'"),
    ("awm", {"kl_weighting": "t"}, "kl_weighting must be one of uniform, elbo, got 't'"),
    ("awm", {"power": 0.0}, "power must be > 0 and finite, got 0.0"),
    ("awm", {"clip_range": math.nan}, "clip_range must be > 0 and finite, got nan"),
    ("awm", {"kl_coef": -1.0}, "kl_coef must be >= 0 and finite, got -1.0"),
    ("awm", {"ema_kl_coef": math.inf}, "ema_kl_coef must be >= 0 and finite, got inf"),
    ("awm", {"advantage_clip": math.inf}, "advantage_clip must be > 0 and finite, got inf.* divides by it"),
    ("dgpo", {"beta": 0.0}, "beta must be > 0 and finite, got 0.0"),
    ("dgpo", {"clip": math.nan}, "clip must be > 0, got nan"),
    ("grpo_guard", {"clip_range": -2e-6}, r"clip_range must lie in \(0, 1\), got -2e-06"),
    ("longcat", {"clip_range": 1.5}, r"clip_range must lie in \(0, 1\), got 1.5"),
    ("offline_dpo", {"beta": -5000.0}, "beta must be > 0 and finite, got -5000.0"),
    ("online_dpo", {"beta": math.inf}, "beta must be > 0 and finite, got inf"),
    ("diffusion_nft", {"beta": 0.0}, "beta must be > 0 and finite, got 0.0"),
    ("diffusion_nft", {"kl_coef": math.nan}, "kl_coef must be >= 0 and finite, got nan"),
    ("diffusion_nft", {"advantage_clip": math.inf}, "advantage_clip must be > 0 and finite, got inf.* divides by it"),
    ("diffusion_nft", {"mode": "some"}, "mode must be one of all, positive_only, .* got 'some'"),
    ("diffusion_nft", {"old_policy": "ema"}, "old_policy must be one of copy, linear, delayed, got 'ema'"),
]


@pytest.mark.parametrize(("name", "values", "message"), BAD_SETTINGS)
def test_a_bad_setting_is_an_error_that_names_the_key(name, values, message):
    with pytest.raises(ValueError, match=f"digen.loss.{message}"):
        replace(default_config(name), **values)


# -- losses that read the step's mean before the update -----------------------------------------------------
def test_flow_dppo_leaves_out_rows_that_would_move_on():
    """Rows: moved on up, back, moved on down, too close to count, exactly at the threshold."""
    std = torch.full((5,), 0.5)
    distance = torch.tensor([0.1, 0.1, 0.1, 1e-3, 0.1])
    inputs = {
        "log_prob": torch.tensor([0.1, -0.1, -0.1, 0.1, 0.1], requires_grad=True),
        "old_log_prob": torch.zeros(5),
        "advantage": torch.tensor([7.0, 1.0, -1.0, 1.0, 1.0]),
        "std": std,
        "mean": distance[:, None].expand(5, 3),
        "old_mean": torch.zeros(5, 3),
    }
    at_threshold = (distance[4].square() / (2 * std[4].square())).item()
    config = replace(default_config("flow_dppo"), kl_threshold=at_threshold)
    output = policy_loss("flow_dppo", inputs, config)
    found = gradient(output, inputs["log_prob"])
    ratio = inputs["log_prob"].detach().exp()
    expected = -inputs["advantage"] * ratio / 5  # the mean is over all rows; 7 is not clamped
    torch.testing.assert_close(found, torch.where(torch.tensor([0, 1, 0, 1, 0]).bool(), expected, 0.0))
    assert output.metrics["clip_fraction"].value.item() == pytest.approx(3 / 5)
    assert output.metrics["divergence_max"].value.item() == pytest.approx(at_threshold)
