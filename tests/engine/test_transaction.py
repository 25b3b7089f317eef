# SPDX-License-Identifier: Apache-2.0
"""A logical batch trained fragment by fragment, on one rank, against the serial loop over rows."""

import itertools
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torch.distributed.tensor import DTensor

from tests.engine.cases import CASES, REWARDS, SHARED, Case
from tests.engine.harness import (
    LORA,
    all_picks,
    assert_close,
    assert_equal,
    begin,
    described,
    fetch_from,
    fragment,
    generate,
    make_engine,
    peek,
    samples_of,
    stepped_gradients,
    train,
    weights,
    with_advantages,
)
from tests.engine.teacher import teacher_folder
from verl_digen.algorithms.advantages import group_advantages
from verl_digen.algorithms.objectives import ClampedConfig, register_objective
from verl_digen.algorithms.rows import LossInputs, LossOutput, numbers
from verl_digen.engine import gradients
from verl_digen.engine.engine import DiffusersFSDPEngine
from verl_digen.engine.fragment import FragmentSpec
from verl_digen.engine.rows import PathPoints, make_rows

pytestmark = [pytest.mark.usefixtures("one_rank"), pytest.mark.slow]


@pytest.fixture(scope="module")
def batch(tiny_qwen_image: Path) -> TensorDict:
    return Case().make_batch(tiny_qwen_image)


# -- the gradient -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", sorted(CASES.keys() - {*SHARED}))
def test_committed_gradient_is_that_of_the_serial_loop(tiny_qwen_image: Path, name: str):
    CASES[name].assert_serial(tiny_qwen_image, *CASES[name].committed(tiny_qwen_image))


def test_distillation_alone_waits_for_no_rewards(tiny_qwen_image: Path, batch: TensorDict):
    """Although `digen.advantage.scale=batch`, no scale divides the distance."""
    digen = {"loss": {"name": "opd", "teacher": teacher_folder(tiny_qwen_image)}}
    engine = make_engine(tiny_qwen_image, digen=digen, model=LORA)
    groups = begin(engine, batch, REWARDS)
    engine.accumulate(fragment(groups, "g0"))
    engine.accumulate(fragment(groups, "g1", "g2"))
    metrics = numbers(engine.commit()["metrics"])
    assert metrics["num_late_samples"] == 0 and metrics["policy_loss"] == metrics["teacher_kl"] > 0


def test_a_loss_that_is_not_homogeneous_trains_with_the_last_group(
    tiny_qwen_image: Path, batch: TensorDict, caplog: pytest.LogCaptureFixture
):
    @register_objective("squared_for_test", columns=("log_prob", "advantage"))
    def squared(rows: LossInputs, config: ClampedConfig) -> LossOutput:
        return LossOutput(rows.mean(rows["log_prob"] * rows["advantage"].square()), {})

    digen = {"loss": {"name": "squared_for_test", "advantage_clip": 1.0}}
    engine, other = make_engine(tiny_qwen_image, digen=digen), make_engine(tiny_qwen_image, digen=digen)
    groups = begin(engine, batch, REWARDS)
    assert "digen.loss.name=squared_for_test is not proportional" in caplog.text
    assert engine.accumulate(fragment(groups, "g0")) == {"num_rows": 0, "num_held_samples": 3}
    assert engine.accumulate(fragment(groups, "g2")) == {"num_rows": 0, "num_held_samples": 6}
    assert engine.accumulate(fragment(groups, "g1")) == {"num_rows": 18, "num_held_samples": 0}
    with stepped_gradients(engine) as found:
        metrics = numbers(engine.commit()["metrics"])
        assert metrics["num_late_samples"] == 6 and metrics["advantage_num_nonzero"] == 8, "one is its group's mean"
        sizes = group_advantages(torch.tensor(REWARDS), [number // 3 for number in range(9)]).abs().clamp(max=1)
        assert metrics["advantage_effective_samples"] == pytest.approx((sizes.sum() ** 2 / (sizes**2).sum()).item())
    with stepped_gradients(other) as expected:
        train(other, with_advantages(batch, REWARDS, "batch", math.inf))
    assert_close(found, expected, 1e-5)


def test_a_loss_may_read_latents(tiny_qwen_image: Path, batch: TensorDict):
    """-A log π by the density's own formula from x', its mean and its std, against the loss that reads log π."""

    @register_objective(
        "density_for_test", columns=("std", "advantage"), latents=("mean", "next_latents"), homogeneous=True
    )
    def density(rows: LossInputs, config: ClampedConfig) -> LossOutput:
        squared = (rows["next_latents"] - rows["mean"]).square().flatten(1).mean(1)
        advantage = rows["advantage"].clamp(-config.advantage_clip, config.advantage_clip)
        return LossOutput(rows.mean(advantage * squared / (2 * rows["std"].square())), {})

    def gradient(loss_name: str) -> dict[str, torch.Tensor]:
        engine = make_engine(tiny_qwen_image, digen={"loss": {"name": loss_name}, "kl": {"coef": 0.3}})
        groups = begin(engine, batch, REWARDS)
        engine.accumulate(fragment(groups, "g0", "g1", "g2"))
        with stepped_gradients(engine) as found:
            engine.commit()
        return found

    found = gradient("density_for_test")
    assert any(bool(value.ne(0).any()) for value in found.values())
    assert_close(found, gradient("reinforce"), 1e-5)


# -- commit and abort -------------------------------------------------------------------------------------


class OutOfMemory(Exception):
    """Stands for an exception of a device half-way."""


def fail_in_forward(engine: DiffusersFSDPEngine) -> Callable[[], None]:
    """Make the second block's forward fail at its third call; returns a function that removes the failure."""
    return block_of(engine).register_forward_pre_hook(third_call()).remove


def fail_in_backward(engine: DiffusersFSDPEngine) -> Callable[[], None]:
    """Fail in the third backward; returns how to undo it."""
    return block_of(engine).register_full_backward_pre_hook(third_call()).remove


def third_call() -> Callable[..., None]:
    """A hook that fails when it is called for the third time."""
    calls = itertools.count()

    def hook(*unused: object) -> None:
        if next(calls) == 2:
            raise OutOfMemory

    return hook


def block_of(engine: DiffusersFSDPEngine) -> nn.Module:
    return next(module for name, module in engine.module.named_modules() if name.endswith("transformer_blocks.1"))


def test_illegal_calls_are_refused_by_name(tiny_qwen_image: Path, batch: TensorDict, tmp_path: Path):
    engine = make_engine(tiny_qwen_image)
    groups = samples_of(batch, REWARDS)
    for call in (lambda: engine.accumulate(fragment(groups, "g0")), engine.commit, engine.abort):
        with pytest.raises(RuntimeError, match="needs an open logical batch, got none; call begin first"):
            call()
    with pytest.raises(RuntimeError, match="at least one sample, and rows or none, got 0 and 0; begin"):
        engine.begin(0, 0, fetch_from(batch))
    begin(engine, batch, REWARDS)
    with pytest.raises(RuntimeError, match="needs at least one group to commit, got none; call abort"):
        engine.commit()
    engine.abort()

    begin(engine, batch, REWARDS)
    engine.accumulate(fragment(groups, "g0"))
    held = {key: value.clone() for key, value in gradients.take(engine.module).items()}
    gradients.put(engine.module, dict(held))
    refused = {
        "begin needs": lambda: begin(engine, batch, REWARDS),
        "training needs": engine.train_mode,
        "save_checkpoint needs": lambda: engine.save_checkpoint(str(tmp_path)),
        "load_checkpoint needs": lambda: engine.load_checkpoint(str(tmp_path)),
        "fragment g0 came twice": lambda: engine.accumulate(fragment(groups, "g0")),
        "a group trains once": lambda: engine.accumulate(FragmentSpec("new", tuple(groups["g0"]))),
        "3 trained steps and 1 experts": lambda: engine.accumulate(
            FragmentSpec("experts", (described("x", "x", 0.0, 3, experts=(0,)),))
        ),
        "begun for 9 samples": lambda: engine.accumulate(
            FragmentSpec("many", tuple(described(f"x{index}", "x", 0.0, 1) for index in range(7)))
        ),
    }
    for message, call in refused.items():
        with pytest.raises(RuntimeError, match=message):
            call()
    found = gradients.take(engine.module)  # none of them touched the gradient
    assert found.keys() == held.keys() and all(torch.equal(found[key], held[key]) for key in held)
    gradients.put(engine.module, found)
    engine.accumulate(fragment(groups, "g1", "g2"))
    engine.commit()


@pytest.mark.parametrize("reduce", ["tile", "batch"])
def test_rehearsing_a_tile_leaves_the_open_gradient(tiny_qwen_image: Path, batch: TensorDict, reduce: str):
    """Also if it fails half-way, as for lack of memory; with parameters that stay gathered after a forward."""
    engine = make_engine(tiny_qwen_image, digen={"tsp": {"reduce": reduce}}, fsdp={"reshard_after_forward": False})
    groups = begin(engine, batch, REWARDS)
    fetched = fetch_from(batch)(groups["g0"])
    rows = make_rows(PathPoints(), fetched, all_picks(fetched))
    engine.planner.rehearse(rows)
    assert peek(engine) == {}
    engine.accumulate(fragment(groups, "g1"))
    held = {key: piece.clone() for key, piece in peek(engine).items()}
    engine.planner.rehearse(rows)
    for fail in (fail_in_forward, fail_in_backward):
        stop = fail(engine)
        for _ in range(2):
            engine.planner.rehearse(rows)
        with pytest.raises(OutOfMemory):
            engine.planner.rehearse(rows)
        stop()
        assert all(isinstance(parameter, DTensor) for parameter in engine.module.parameters())
        engine.planner.rehearse(rows)
        assert_equal(peek(engine), held)
    engine.abort()


def test_what_is_offloaded_stays_on_the_device_while_a_batch_is_open(tiny_qwen_image: Path, batch: TensorDict):
    offloaded = make_engine(tiny_qwen_image, fsdp={"param_offload": True, "optimizer_offload": True})
    plain = make_engine(tiny_qwen_image)
    moves: list[tuple[bool, bool]] = []
    move = offloaded.to

    def to(device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        moves.append((model, optimizer))
        move(device, model=model, optimizer=optimizer, grad=grad)

    offloaded.to = to  # type: ignore[method-assign]
    for engine in (offloaded, plain):
        groups = begin(engine, batch, REWARDS)
        assert engine.mode == "train"
        engine.accumulate(fragment(groups, "g1"))
        generate(engine)
        engine.accumulate(fragment(groups, "g0", "g2"))
        assert engine is plain or moves == [(True, True)]
        engine.commit()
        assert engine.mode is None
    assert moves == [(True, True)] * 2  # loaded by begin, offloaded by commit
    begin(offloaded, batch, REWARDS)
    offloaded.abort()
    assert moves == [(True, True)] * 4
    assert_equal(weights(offloaded), weights(plain))
