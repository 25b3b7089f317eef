# SPDX-License-Identifier: Apache-2.0
"""Ranks that share rows against one rank: same velocities, log-probs, gradients and weights, on every architecture."""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.engine import cases
from tests.engine.harness import (
    assert_close,
    begin,
    fragment,
    gathered,
    make_batch,
    make_engine,
    on_ranks,
    perturb,
    process_group,
    stepped_gradients,
)
from tests.engine.sequence_cases import CASES, build, gradient_and_log_probs
from tests.engine.test_assistant import assert_same, assist, by_sampler

pytestmark = pytest.mark.slow
GRADIENT_RTOL = 1e-5
LOG_PROB_ATOL = 1e-6


@dataclass(frozen=True)
class Ranks:
    """Ranks of a run, of which `size` share each row."""

    case: str
    num_ranks: int
    size: int
    is_lora: bool = False
    is_offloaded: bool = False
    """Inputs of recomputed blocks wait in host memory."""

    def __str__(self) -> str:
        kind = ("LoRA" if self.is_lora else "full") + (", offloaded" if self.is_offloaded else "")
        return f"{self.case}, {kind}, {self.num_ranks} ranks, {self.size} share a row"


TWO = Ranks("hunyuan_video", 2, 2)
"""The quick one: prompts are split, masked and padded."""
GRID = (
    Ranks("hunyuan_video", 2, 2, is_lora=True, is_offloaded=True),
    Ranks("hunyuan_video", 4, 2),
    Ranks("hunyuan_video15", 2, 2, is_lora=True),
    Ranks("wan2.1", 4, 4),
    Ranks("wan2.2_a14b", 2, 2),
    Ranks("hunyuan_video", 2, 2, is_lora=True),
    Ranks("hunyuan_video", 4, 4),
    Ranks("hunyuan_video15", 2, 2),
    Ranks("wan2.1", 2, 2),
    Ranks("wan2.1", 2, 2, is_lora=True),
    Ranks("wan2.1", 4, 2, is_lora=True),
    Ranks("wan2.2_ti2v_5b", 2, 2),
    Ranks("qwen_image", 2, 2),
    Ranks("qwen_image_edit_plus", 2, 2, is_lora=True),
    Ranks("flux_dev", 2, 2),
)


def evaluated(path: Path, folder: Path) -> dict[str, Any]:
    asked = Ranks(**json.loads((folder / "asked.json").read_text()))
    options = {"is_lora": asked.is_lora, "is_offloaded": asked.is_offloaded}
    return gradient_and_log_probs(CASES[asked.case], path, asked.size, **options)


def compare(asked: Ranks, folder: Path) -> None:
    """Assert that the ranks find what one rank finds."""
    case = CASES[asked.case]
    path = build(case, folder / "checkpoint", num_heads=max(2, asked.size))
    (folder / "asked.json").write_text(json.dumps(asdict(asked)))
    with process_group(0, 1, str(folder / "store")):
        one = gradient_and_log_probs(case, path, 1, is_lora=asked.is_lora)
    found = on_ranks(asked.num_ranks, [evaluated], path, folder)["evaluated"]
    for ours, theirs in zip(found["log_probs"], one["log_probs"], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=LOG_PROB_ATOL)
    kept = {name for name, value in one["gradient"].items() if not is_cancelled(name, value, one["gradient"])}
    assert_close(of_names(found["gradient"], kept), of_names(one["gradient"], kept), GRADIENT_RTOL)
    assert found["gradient"].keys() == one["gradient"].keys()
    for name in ("num_rows", "prompt_tokens", "advantage_abs_mean", "policy_loss"):
        assert found["metrics"][name] == pytest.approx(one["metrics"][name], rel=GRADIENT_RTOL), name


def is_cancelled(name: str, value: Tensor, gradient: dict[str, Tensor]) -> bool:
    """True for a bias that softmax cancels: its gradient is rounding."""
    largest = max(other.norm() for other in gradient.values())
    return name.endswith("to_k.bias") and bool(value.norm() < 1e-7 * largest)


def of_names(gradient: dict[str, Tensor], names: set[str]) -> dict[str, Tensor]:
    return {name: gradient[name] for name in names}


def test_two_ranks_that_share_rows_have_the_gradient_of_one(tmp_path: Path) -> None:
    compare(TWO, tmp_path)


@pytest.mark.long
@pytest.mark.grid
@pytest.mark.parametrize("asked", GRID, ids=str)
def test_ranks_that_share_rows_have_the_gradient_of_one(asked: Ranks, tmp_path: Path) -> None:
    compare(asked, tmp_path)


# -- two groups of two ranks: what an engine does besides one forward and backward --------------------------------
SHARED = {"ulysses_sequence_parallel_size": 2}
BY_FRAGMENTS = ("max_group_scale", "full_kl_unsharded", "lora_kl", "guided", "replicated")


def committed(path: Path, folder: Path) -> dict[str, Any]:
    found = {}
    for name in BY_FRAGMENTS:
        case = cases.CASES[name]
        found[name] = replace(case, fsdp=case.fsdp | SHARED).committed(path)
    return found


def trajectories(path: Path, folder: Path) -> dict[str, Tensor]:
    """Gradient of a loss over whole trajectories, some of whose ratios are clipped."""
    loss, tiles = {"name": "gspo", "clip_range": 0.05}, {"samples_per_tile": 2, "steps_per_tile": 2}
    fsdp = SHARED if dist.get_world_size() > 1 else {}
    engine = make_engine(path, digen={"loss": loss, "tsp": tiles}, fsdp=fsdp, optim={"clip_grad": 1e9})
    perturb(engine)
    batch = make_batch(path, windows=cases.WINDOWS)
    earlier = [values + 0.1 * (-1) ** number for number, values in enumerate(batch["log_probs"].unbind())]
    batch["log_probs"] = torch.nested.as_nested_tensor(earlier, layout=torch.jagged)
    groups = begin(engine, batch, cases.REWARDS)
    for uid in ("g2", "g0", "g1"):
        engine.accumulate(fragment(groups, uid))
    with stepped_gradients(engine) as found:
        engine.commit()
    return found


def assisted(path: Path, folder: Path) -> Any:
    """(samples of each rank, samples of one sampler) of 3 requests."""
    engine = make_engine(path, fsdp=SHARED)
    return gathered(assist(engine, 3)), by_sampler(engine, 3)


@pytest.fixture(scope="module")
def four_ranks(tiny_qwen_image: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("four_ranks")
    return on_ranks(4, [committed, trajectories, assisted], tiny_qwen_image, folder)


@pytest.mark.long
@pytest.mark.parametrize("name", BY_FRAGMENTS)
def test_fragments_on_ranks_that_share_rows_add_up_to_the_serial_loop(
    four_ranks: dict, one_rank: None, tiny_qwen_image: Path, name: str
):
    cases.CASES[name].assert_serial(tiny_qwen_image, *four_ranks["committed"][name])


@pytest.mark.long
def test_a_loss_over_whole_trajectories_counts_shared_rows_once(
    four_ranks: dict, one_rank: None, tiny_qwen_image: Path, tmp_path: Path
):
    assert_close(four_ranks["trajectories"], trajectories(tiny_qwen_image, tmp_path), 2e-5)


@pytest.mark.long
def test_the_first_of_ranks_that_share_rows_returns_the_samples(four_ranks: dict):
    by_rank, expected = four_ranks["assisted"]
    assert [len(found) for found in by_rank] == [2, 0, 1, 0]
    found = sorted((sample for part in by_rank for sample in part), key=lambda one: one.trajectory.facts.sample_index)
    for generation, trajectory in zip(found, expected, strict=True):
        assert_same(generation, trajectory)
