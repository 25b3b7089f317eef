# SPDX-License-Identifier: Apache-2.0
"""Logical batches by fragments on two ranks against the serial loop on one; bytes gathered; sizes of gradients."""

from pathlib import Path
from typing import Any

import pytest
from torch.distributed.tensor import DTensor

from tests.engine.cases import CASES, REWARDS, SHARED, Case
from tests.engine.harness import (
    LORA,
    Gathers,
    begin,
    described,
    fetch_from,
    fragment,
    gathered,
    make_batch,
    make_engine,
    on_two_ranks,
    perturb,
    samples_of,
    stepped_gradients,
    train,
)
from verl_digen.algorithms.rows import numbers
from verl_digen.engine.fragment import FragmentSpec
from verl_digen.engine.fsdp2 import gathered_bytes, parameters_of
from verl_digen.engine.gradients import eps_numbers

pytestmark = pytest.mark.slow


def committed(path: Path, folder: Path) -> dict[str, Any]:
    return {name: CASES[name].committed(path) for name in SHARED}


def fetched_keys(path: Path, folder: Path) -> Any:
    """Keys that each rank fetches of a fragment of 6 + 3 rows, and of one with a single row."""
    engine = make_engine(path, digen={"advantage": {"scale": "group"}})
    batch = Case().make_batch(path)
    groups = samples_of(batch, REWARDS)
    fetched: list[list[str]] = []
    fetch = fetch_from(batch)

    def recording(samples):
        fetched.append([sample.key for sample in samples])
        return fetch(samples)

    engine.begin(7, 10, recording)
    engine.accumulate(fragment(groups, "g2", "g1"))
    engine.accumulate(FragmentSpec("one row", (described("0", "x", 1.0, 1, condition_key="g0"),)))
    metrics = numbers(engine.commit()["metrics"])
    return gathered(fetched), metrics


def gathers(path: Path, folder: Path) -> dict[str, Any]:
    """Bytes that a rank gathers in three tiles, of weights that stay after a forward and of those that do not."""
    found: dict[str, Any] = {}
    for name, reshards in (("kept", False), ("dropped", True)):
        tsp = {"samples_per_tile": 3, "steps_per_tile": 1}
        engine = make_engine(path, fsdp={"reshard_after_forward": reshards}, digen={"tsp": tsp})
        groups = begin(engine, Case().make_batch(path), REWARDS)
        with Gathers() as mode:
            engine.accumulate(fragment(groups, *groups))
        is_sharded = all(isinstance(parameter, DTensor) for parameter in engine.module.parameters())
        num_tiles = numbers(engine.commit()["metrics"])["num_tiles"]
        found |= {"all": gathered_bytes(parameters_of(engine.module)), name: (mode.num_bytes, num_tiles, is_sharded)}
    return found


# -- sizes of the gradient's entries -------------------------------------------------------------------------
NAMES = ("grad_rms", "grad_rms_to_eps", "eps_bound_share")


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


@pytest.fixture(scope="module")
def two_ranks(tiny_qwen_image: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    scenarios = [committed, fetched_keys, gathers, sizes]
    return on_two_ranks(scenarios, tiny_qwen_image, tmp_path_factory.mktemp("two_ranks"))


@pytest.mark.parametrize("name", SHARED)
def test_committed_gradient_is_that_of_the_serial_loop(
    two_ranks: dict, one_rank: None, tiny_qwen_image: Path, name: str
):
    CASES[name].assert_serial(tiny_qwen_image, *two_ranks["committed"][name])


def test_tiles_share_gathered_weights_that_stay_after_a_forward(two_ranks: dict):
    found = two_ranks["gathers"]
    (kept, num_tiles, kept_is_sharded), (dropped, _, dropped_is_sharded) = found["kept"], found["dropped"]
    assert num_tiles > 1 and kept_is_sharded and dropped_is_sharded
    assert found["all"] <= kept < 1.05 * found["all"], "once, and padding"
    assert dropped > num_tiles * kept


def test_each_rank_fetches_the_samples_of_its_rows_alone(two_ranks: dict):
    keys, metrics = two_ranks["fetched_keys"]
    # g2 has samples 6, 7, 8 of two rows, g1 3, 4, 5 of one: rows 6 6 7 7 8 | 8 3 4 5, and then row 0 | none
    assert keys == [[["6", "7", "8"], ["0"]], [["8", "3", "4", "5"], ["0"]]]
    assert metrics["num_rows"] == 10
    assert metrics["num_pad_rows"] == 1  # of the rank without a row


def test_sizes_are_weighted_by_elements():
    found = eps_numbers([(4.0, 1), (3e-14, 3)], eps=1e-8, clip_factor=0.5)
    assert found["grad_rms"] == pytest.approx(0.5 * (4 / 4) ** 0.5)
    assert found["grad_rms_to_eps"] == pytest.approx(found["grad_rms"] / 1e-8)
    assert found["eps_bound_share"] == 3 / 4, "an RMS of 1e-7 is below 10 eps / 0.5"
    assert eps_numbers([], eps=1e-8, clip_factor=1.0) == {name: 0.0 for name in NAMES}


def test_rms_is_of_the_gradient_that_adam_sees(one_rank: None, tiny_qwen_image: Path):
    engine = make_engine(tiny_qwen_image, optim={"clip_grad": 1e-3})
    with stepped_gradients(engine) as found:
        metrics = train(engine, make_batch(tiny_qwen_image, group_size=2))[0]["metrics"]
    moved = [value.double() for value in found.values() if value.any()]
    expected = (sum(value.square().sum().item() for value in moved) / sum(value.numel() for value in moved)) ** 0.5
    assert metrics["grad_norm"] > 1e-3 and metrics["grad_rms"] == pytest.approx(expected, rel=1e-5)
    assert metrics["grad_rms_to_eps"] == pytest.approx(expected / 1e-8, rel=1e-5)


def test_an_optimizer_without_eps_has_no_such_number(one_rank: None, tiny_qwen_image: Path):
    engine = make_engine(tiny_qwen_image, optim={"optimizer": "SGD", "betas": [0.9, 0.999]})
    assert not {*NAMES} & train(engine, make_batch(tiny_qwen_image, group_size=2))[0]["metrics"].keys()


def test_two_ranks_find_the_sizes_of_one(two_ranks: dict, one_rank: None, tiny_qwen_image: Path):
    found = two_ranks["sizes"]
    assert found["sharded"] == pytest.approx(sizes_of(tiny_qwen_image), rel=1e-4)
    assert found["replicated"] == pytest.approx(found["sharded"], rel=1e-4)
    assert found["lora"] == pytest.approx(sizes_of(tiny_qwen_image, model=LORA), rel=1e-4)
