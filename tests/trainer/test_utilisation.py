# SPDX-License-Identifier: Apache-2.0
import pytest

from tests.tags import make_tag
from verl_digen.trainer.step_result import StepResult, utilisation
from verl_digen.trainer.utilisation import PoolDevices, step_utilisation

METRICS = {
    "actor/num_rows": 40.0,
    "actor/row_forward_flops": 1e13,
    "actor/row_training_flops": 3e13,
    "perf/train_s": 2.0,
    "perf/generate_s": 4.0,
}


def test_each_pool_is_measured_by_its_own_work_time_and_devices():
    found = step_utilisation(
        METRICS,
        num_forwards=80,
        trainer=PoolDevices(2, "NVIDIA H100 80GB HBM3"),
        generator=PoolDevices(4, "NVIDIA H20"),
    )
    assert found == pytest.approx(
        {
            "perf/tflops_per_device/trainer": 40 * 3e13 / 2.0 / 2 / 1e12,
            "perf/mfu/trainer": 40 * 3e13 / 2.0 / 2 / 989e12,
            "perf/tflops_per_device/generator": 80 * 1e13 / 4.0 / 4 / 1e12,
            "perf/mfu/generator": 80 * 1e13 / 4.0 / 4 / 148e12,
        }
    )


@pytest.mark.parametrize("name", [None, "Some Accelerator 9000"])
def test_a_device_without_a_known_peak_has_no_share_of_it(name):
    device = PoolDevices(1, name)
    found = step_utilisation(METRICS, num_forwards=80, trainer=device, generator=device)
    assert sorted(found) == ["perf/tflops_per_device/generator", "perf/tflops_per_device/trainer"]


def test_shared_skipped_and_assisted_steps_are_no_forwards_of_the_generators():
    tags = {f"g_{index}_0": make_tag(num_shared_steps=2 * index, num_skipped_steps=index) for index in range(3)}
    result = StepResult(tags, {}, 2.0, 0, num_assisted=1)
    device = PoolDevices(1, None)
    found = utilisation(result, METRICS, num_steps=10, devices={"trainer": device, "generator": device})
    num_forwards = (3 - 1) * 10 - (2 + 4) - (1 + 2)
    assert found["perf/tflops_per_device/generator"] == pytest.approx(num_forwards * 1e13 / 4.0 / 1e12)
