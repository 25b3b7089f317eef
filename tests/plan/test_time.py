# SPDX-License-Identifier: Apache-2.0
import pytest

from tests.plan.runs import make_run
from verl_digen.algorithms.forward import ForwardConfig
from verl_digen.algorithms.outside import Outside
from verl_digen.algorithms.window import WindowConfig
from verl_digen.config import AdvantageConfig, GapConfig, KlConfig, SamplingConfig
from verl_digen.tools.plan.split import plan_time

FORWARD = 100e12
SAMPLES, STEPS, ROWS = 32, 10, 9
ALL = {"advantage": AdvantageConfig()}


def test_a_step_by_hand():
    time = plan_time(make_run(), "H100", 0.4, 1.0)
    assert time.generating_flops == SAMPLES * STEPS * FORWARD
    assert time.training_flops == SAMPLES * ROWS * 4 * FORWARD
    assert time.generating_s == pytest.approx(time.generating_flops / (8 * 0.4 * 989e12))
    assert time.step_s == pytest.approx(time.generating_s + time.training_s)


def test_pools_overlap_only_with_the_pipeline():
    split = plan_time(make_run(is_split=True), "H100", 0.4, 1.0)
    assert split.step_s == max(split.generating_s, split.training_s)
    barrier = plan_time(make_run(is_split=True, digen={"gap": GapConfig(enable=False)}), "H100", 0.4, 1.0)
    assert barrier.step_s == pytest.approx(split.generating_s + split.training_s)


def test_steps_that_the_solver_passes_over_cost_nothing_and_those_of_the_cache_count():
    window = WindowConfig(kind="consecutive", size=2, range=(2, 4))

    def flops(outside: Outside) -> float:
        digen = {"window": window, "sampling": SamplingConfig(num_steps=STEPS, outside=outside)}
        return plan_time(make_run(digen=digen), None, 0.4, 1.0).generating_flops / (SAMPLES * FORWARD)

    assert flops(Outside()) == flops(Outside(cache=0.1)) == STEPS
    assert flops(Outside(solver_before=0.5, solver_after=0.5)) == 1 + 2 + 3


@pytest.mark.parametrize(
    ("digen", "forwards"),
    [
        ({"kl": KlConfig(coef=0.1), "loss": {"old_log_probs": "recompute"}}, 2),
        ({"loss": {"name": "gspo"}}, 1),
        ({"loss": {"name": "opd"}}, 1),
    ],
)
def test_what_a_loss_compares_with_costs_forwards(digen, forwards):
    """A reference and recomputed log-probs, whole trajectories, a teacher."""
    assert plan_time(make_run(digen=digen), None, 0.4, 1.0).training_flops == SAMPLES * ROWS * (4 + forwards) * FORWARD


@pytest.mark.parametrize(
    ("digen", "num_trained"),
    [
        ({"advantage": AdvantageConfig(best_of=2)}, 8),
        ({"advantage": AdvantageConfig(best_of=100)}, SAMPLES),
        ({"loss": {"name": "online_dpo"}}, 8),
    ],
)
def test_only_selected_samples_train_and_all_are_generated(digen, num_trained):
    """Four groups of eight."""
    run = make_run(digen=digen)
    assert (run.settings.num_samples, run.settings.num_trained_samples) == (SAMPLES, num_trained)
    found, of_all = plan_time(run, None, 0.4, 1.0), plan_time(make_run(digen=digen | ALL), None, 0.4, 1.0)
    assert found.generating_flops == SAMPLES * STEPS * FORWARD
    if "loss" not in digen:
        assert found.training_flops * SAMPLES == of_all.training_flops * num_trained


def test_frozen_weights_need_no_gradient_of_their_own():
    assert plan_time(make_run(lora=True), None, 0.4, 1.0).training_flops == SAMPLES * ROWS * (2 + 0.6 + 0.8) * FORWARD


def test_an_unknown_device_has_no_seconds():
    time = plan_time(make_run(), None, 0.4, 1.0)
    assert time.generating_s is None and time.training_s is None and time.step_s is None


def test_half_of_the_blocks_recomputed_cost_half_a_forward():
    assert plan_time(make_run(), None, 0.4, 0.5).training_flops == SAMPLES * ROWS * 3.5 * FORWARD


def test_pictures_of_a_data_set_are_not_denoised():
    digen = {"loss": {"name": "offline_dpo"}, "forward": ForwardConfig(kind="logit_normal", num_points=1)}
    time = plan_time(make_run(digen=digen), "H100", 0.4, 1.0)
    assert time.generating_flops == time.generating_s == 0 and time.training_flops > 0
