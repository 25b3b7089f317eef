# SPDX-License-Identifier: Apache-2.0
"""Size of the gradient's entries against Adam's eps; on one rank and on two, sharded and replicated."""

from pathlib import Path
from typing import Any

import pytest
from tensordict import TensorDict

from tests.engine.harness import LORA, make_batch, make_engine, on_two_ranks, perturb, stepped_gradients, train
from verl_digen.engine.gradient_sizes import GradientSizes, eps_numbers

NAMES = ("grad_rms", "grad_rms_to_eps", "eps_bound_share")


@pytest.fixture(scope="module")
def batch(tiny_qwen_image: Path) -> TensorDict:
    return make_batch(tiny_qwen_image, group_size=2)


def test_sizes_are_weighted_by_elements():
    sizes = GradientSizes(squares=(4.0, 3e-16, 0.0), counts=(1, 3, 6))
    assert sizes.rms() == pytest.approx((4 / 4) ** 0.5)
    assert sizes.share_below(1e-7) == 3 / 4  # an RMS of 1e-8; a parameter without gradient does not count
    found = eps_numbers(sizes, eps=1e-8, clip_factor=0.5)
    assert found["grad_rms"] == pytest.approx(0.5 * (4 / 4) ** 0.5)
    assert found["grad_rms_to_eps"] == pytest.approx(found["grad_rms"] / 1e-8) and found["eps_bound_share"] == 3 / 4
    assert GradientSizes((0.0,), (2,)).share_below(1.0) == 0.0


def test_rms_is_of_the_gradient_that_adam_sees(one_rank: None, tiny_qwen_image: Path, batch: TensorDict):
    engine = make_engine(tiny_qwen_image, optim={"clip_grad": 1e-3})
    with stepped_gradients(engine) as found:
        metrics = train(engine, batch)[0]["metrics"]
    moved = [value.double() for value in found.values() if value.any()]
    expected = (sum(value.square().sum().item() for value in moved) / sum(value.numel() for value in moved)) ** 0.5
    assert metrics["grad_norm"] > 1e-3 and metrics["grad_rms"] == pytest.approx(expected, rel=1e-5)
    assert metrics["grad_rms_to_eps"] == pytest.approx(expected / 1e-8, rel=1e-5)


def test_an_optimizer_without_eps_has_no_such_number(one_rank: None, tiny_qwen_image: Path, batch: TensorDict):
    engine = make_engine(tiny_qwen_image, optim={"optimizer": "SGD", "betas": [0.9, 0.999]})
    assert not {*NAMES} & train(engine, batch)[0]["metrics"].keys()


def sizes_of(path: Path, **options: Any) -> dict[str, float]:
    engine = make_engine(path, **options)
    perturb(engine)
    metrics = train(engine, make_batch(path, group_size=2))[0]["metrics"]
    return {name: metrics[name] for name in NAMES}


def sizes(path: Path, folder: Path) -> dict[str, dict[str, float]]:
    return {
        "sharded": sizes_of(path),
        "replicated": sizes_of(path, fsdp={"fsdp_size": 1}),
        "lora": sizes_of(path, model=LORA),
    }


@pytest.mark.slow
def test_two_ranks_find_the_sizes_of_one(one_rank: None, tiny_qwen_image: Path, tmp_path: Path):
    found = on_two_ranks([sizes], tiny_qwen_image, tmp_path)["sizes"]
    assert found["sharded"] == pytest.approx(sizes_of(tiny_qwen_image), rel=1e-4)
    assert found["replicated"] == pytest.approx(found["sharded"], rel=1e-4)
    assert found["lora"] == pytest.approx(sizes_of(tiny_qwen_image, model=LORA), rel=1e-4)
