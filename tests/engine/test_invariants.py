# SPDX-License-Identifier: Apache-2.0
"""Invariants of training, for every objective that the package registers.

An objective without a case in `tests/engine/objective_cases.py` fails here by its name. The reference of the gradient
takes one row at a time, in float64, by the papers' formulas; it shares only the toy's network with the engine.
"""

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from tests.engine.harness import (
    are_equal,
    assert_close,
    assert_equal,
    fetch_from,
    fragment,
    num_rows_of,
    on_two_ranks,
    samples_of,
    weights,
)
from tests.engine.objective_cases import (
    CASES,
    GROUP_SIZE,
    LOSSES,
    REWARDS,
    ObjectiveCase,
    Weights,
    expected,
    make_batch,
    moved_engine,
    old_log_probs,
)
from tests.engine.objective_runs import (
    SHAPES,
    OnRanks,
    Resumed,
    assisted,
    by_mini_batches,
    generate_as_replica,
    on_the_ranks,
    policies_of,
    random_order,
    rehearse,
    reshape,
    resume,
    start,
    state_of,
    step,
    trained,
    without_old,
)
from tests.engine.toy import PIPELINE, Toy, build_toy
from verl_digen import models
from verl_digen.algorithms.objectives import find_objective, objective_names
from verl_digen.algorithms.objectives.objective import OLD
from verl_digen.algorithms.rows import numbers
from verl_digen.config import DigenConfig
from verl_digen.engine.engine import DiffusersFSDPEngine
from verl_digen.engine.export import plain_name
from verl_digen.engine.loss import DiffusionLoss

NAMES = [name for name in objective_names() if find_objective(name).compute.__module__.startswith("verl_digen.")]
LABELS = [label for name in NAMES for label in ([one for one, case in CASES.items() if case.name == name] or [name])]
TOLERANCE = 5e-5
TIES = [2.0, 2.0, 2.0, 7.0, 7.0, 7.0, 0.0, 0.0, 0.0]
BOUNDS = ("clip_fraction", "dropped_fraction", "implicit_accuracy")
"""Metrics that say how many rows are beyond a bound."""


@dataclass(frozen=True)
class Prepared:
    """One case, with an engine that no test changes."""

    case: ObjectiveCase
    engine: DiffusersFSDPEngine
    policies: dict[str, Weights]
    """Weights of the engine's policies."""
    batch: TensorDict
    loss: float
    gradient: dict[str, Tensor]
    """Expected."""


def sent_by(engine: DiffusersFSDPEngine) -> dict[str, Tensor]:
    """Weights that replicas get, by the checkpoint's names."""
    return {plain_name(name): value for name, value in weights(engine).items()}


def case_of(label: str) -> ObjectiveCase:
    if label not in CASES or CASES[label].name not in LOSSES:
        pytest.fail(
            f"the objective {label!r} needs a case in tests/engine/objective_cases.py, with settings under which each "
            "of its terms counts, and its formula in tests/path_losses.py or tests/forward_losses.py"
        )
    return CASES[label]


@pytest.fixture(scope="module")
def toy(one_rank: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a forward of the toy is shorter than what threads take to begin
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(models.MODELS, PIPELINE, f"{Toy.__module__}:{Toy.__name__}")
        yield build_toy(tmp_path_factory.mktemp("invariants") / "toy", num_experts=1)
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module")
def prepared(toy: Path) -> Callable[[str], Prepared]:
    @cache
    def prepare(label: str) -> Prepared:
        case = case_of(label)
        points = find_objective(case.name).points
        batch = make_batch(toy, points)
        engine, policies = moved_engine(case, toy)
        if points == "path":
            batch = batch.copy()
            old = old_log_probs(case, engine, policies, batch)
            batch["old_log_probs"] = torch.nested.as_nested_tensor(old, layout=torch.jagged)
        loss, gradient = expected(case, engine, policies, batch)
        return Prepared(case, engine, policies, batch, loss, gradient)

    return prepare


@pytest.fixture(scope="module")
def resumed(
    toy: Path, prepared: Callable[[str], Prepared], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Resumed]:
    @cache
    def run(label: str) -> Resumed:
        one = prepared(label)
        return resume(one.case, toy, without_old(one.batch), tmp_path_factory.mktemp(label))

    return run


@pytest.fixture(scope="module")
def two_ranks(
    toy: Path, prepared: Callable[[str], Prepared], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, OnRanks]:
    folder = tmp_path_factory.mktemp("two_ranks")
    for label in CASES:
        torch.save(prepared(label).batch, folder / f"{label}.pt")
    return on_two_ranks([on_the_ranks], toy, folder)[on_the_ranks.__name__]


@pytest.mark.parametrize("label", LABELS)
def test_the_gradient_is_that_of_the_serial_loop_however_rows_are_cut(prepared: Callable[[str], Prepared], label: str):
    """Compare tiles, ways to reduce, one fragment (as colocated) and fragments in any order (as with GAP)."""
    one, rng = prepared(label), random.Random(label)
    num_rows = 12 if one.case.name in ("online_dpo", "offline_dpo") else 18
    for number, (samples, points, reduce, order) in enumerate(SHAPES):
        reshape(one.engine, samples, points, reduce)
        rehearse(one.engine, one.batch)
        seen = trained(one.engine, one.batch, order if number % 2 == 0 else random_order(rng))
        assert_close(seen.gradient, one.gradient, TOLERANCE)
        assert seen.metrics["num_rows"] == num_rows
        loss = seen.metrics["policy_loss"] + one.case.kl.get("coef", 0.0) * seen.metrics.get("kl", 0.0)
        assert loss == pytest.approx(one.loss, rel=1e-4, abs=1e-6) or one.case.name == "dgpo"
        bounds = [seen.metrics[name] for name in BOUNDS if name in seen.metrics]
        assert one.case.has_bound == any(0 < bound < 1 for bound in bounds), bounds


@pytest.mark.parametrize("label", LABELS)
def test_mini_batches_add_up_to_the_batch(prepared: Callable[[str], Prepared], label: str):
    """Colocated training with a mini-batch per group, without the steps in between."""
    one = prepared(label)
    reshape(one.engine, *SHAPES[0][:3])
    parts = by_mini_batches(one.engine, one.batch)
    num_rows = sum(part.metrics["num_rows"] for part in parts)
    total = {
        name: torch.stack([part.gradient[name] * (part.metrics["num_rows"] / num_rows) for part in parts]).sum(0)
        for name in one.gradient
    }
    assert_close(total, one.gradient, TOLERANCE)


@pytest.mark.parametrize("label", LABELS)
def test_a_trainer_that_assists_leaves_the_gradient_and_generates_what_a_replica_would(
    prepared: Callable[[str], Prepared], label: str
):
    one = prepared(label)
    reshape(one.engine, *SHAPES[0][:3])
    without = trained(one.engine, one.batch, SHAPES[0][3])
    is_still, seen, made = assisted(one.engine, one.batch, SHAPES[0][3])
    assert is_still and are_equal(seen.gradient, without.gradient) and seen.metrics == without.metrics
    policy = one.policies[one.engine.objective.behaviour]
    assert_equal({name.replace(".default", ""): value for name, value in policy.items()}, sent_by(one.engine))
    for found, sent in zip(made, generate_as_replica(one.engine), strict=True):
        assert (found.facts.uid, found.facts.sample_index, found.facts.seed) == (
            sent.facts.uid,
            sent.facts.sample_index,
            sent.facts.seed,
        )
        columns = sent.record.columns()
        for name, value in found.record.columns().items():
            torch.testing.assert_close(value, columns[name], rtol=0, atol=1e-5)


@pytest.mark.parametrize("label", LABELS)
def test_an_abort_and_a_gradient_that_is_not_finite_leave_every_policy(
    prepared: Callable[[str], Prepared], label: str, caplog: pytest.LogCaptureFixture
):
    one = prepared(label)
    before, kept = state_of(one.engine), dict(one.engine.copies)
    groups = start(one.engine, one.batch)
    one.engine.accumulate(fragment(groups, "g0"))
    one.engine.abort()
    assert_equal(state_of(one.engine), before)
    broken = one.batch.copy()
    column = "clean" if "clean" in broken else "latents"
    broken[column] = broken[column] * torch.nan
    metrics = step(one.engine, broken)
    assert metrics["num_skipped_updates"] == 1 and math.isnan(metrics["grad_norm"])
    assert "optimizer step skipped" in caplog.text
    assert f"what digen.loss.name={one.engine.digen.loss_name} returns" in caplog.text
    one.engine.copies.update(kept)
    after = state_of(one.engine)
    assert after.pop("counters")[1] == before.pop("counters")[1] + 1
    assert_equal(after, before)


@pytest.mark.parametrize("label", LABELS)
def test_samples_of_an_earlier_version_train_as_far_as_the_objective_says(
    prepared: Callable[[str], Prepared], label: str
):
    """Recorded log-probs of the third group are those of the version before."""
    one = prepared(label)
    engine, strict, objective = one.engine, one.engine.digen, one.engine.objective
    compares = objective.points == "path" and objective.reads_old_weights(strict.loss_settings)
    allowed = 0 if compares else 2 if objective.off_policy else 1

    def stale(max_versions: int) -> DigenConfig:
        return replace(strict, staleness=replace(strict.staleness, max_versions=max_versions))

    if allowed < 2:
        with pytest.raises(ValueError, match=r"digen\.staleness\.max_versions"):
            DiffusionLoss(stale(allowed + 1))
    if allowed:
        engine.digen = engine.forward.digen = stale(allowed)
        try:
            _, gradient = expected(one.case, engine, one.policies, one.batch)
            assert_close(trained(engine, one.batch, SHAPES[0][3]).gradient, gradient, TOLERANCE)
        finally:
            engine.digen = engine.forward.digen = strict


@pytest.mark.parametrize("label", LABELS)
def test_a_resumed_run_continues_bitwise_with_all_policies(resumed: Callable[[str], Resumed], label: str):
    run = resumed(label)
    assert are_equal(run.resumed, run.straight)
    assert not are_equal(run.between["current"], run.before["current"])
    if OLD in find_objective(case_of(label).name).columns:  # the batch's first optimizer step is its only one
        assert run.metrics["ratio_deviation_max"] == run.metrics["ratio_deviation_min"] == 0.0


@pytest.mark.parametrize("label", LABELS)
def test_copies_follow_each_batch_by_their_schedule(resumed: Callable[[str], Resumed], label: str):
    case, run = case_of(label), resumed(label)
    assert {*case.decays, "current"} == {*run.between}
    for policy, decay in case.decays.items():
        for name, value in run.between[policy].items():
            wanted = decay * run.before[policy][name] + (1 - decay) * run.between["current"][name]
            torch.testing.assert_close(value, wanted, rtol=1e-5, atol=1e-7)


def test_copies_follow_after_the_last_optimizer_step_on_a_batch(toy: Path):
    engine, policies = moved_engine(CASES["awm_off_policy"], toy)
    groups = samples_of(batch := make_batch(toy, "forward"), REWARDS)
    for uid in groups:
        engine.begin(GROUP_SIZE, num_rows_of({uid: groups[uid]}), fetch_from(batch))
        engine.accumulate(fragment(groups, uid))
        engine.commit(more=uid != "g2")
    found = policies_of(engine)
    for name, value in found["old"].items():
        wanted = 0.3 * policies["old"][name] + 0.7 * found["current"][name]
        torch.testing.assert_close(value, wanted, rtol=1e-5, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("label", LABELS)
def test_two_ranks_do_what_one_does(two_ranks: dict[str, OnRanks], prepared: Callable[[str], Prepared], label: str):
    one, found = prepared(label), two_ranks[label]
    assert_close(found.seen.gradient, one.gradient, TOLERANCE)
    assert found.is_still, "generation in between changed the open gradient"
    assert found.is_resumed, "the resumed run is another one"


def test_a_batch_of_ties_takes_no_step_and_the_next_one_trains(toy: Path):
    case, batch = CASES["online_dpo"], make_batch(toy, "forward")
    engine, other = (case.make_engine(toy) for _ in range(2))
    before = state_of(engine)
    for num_planned in (None, 0):  # as on separate pools, and in turn
        groups = start(engine, batch, TIES)
        if num_planned is not None:
            engine.abort()
            engine.begin(len(TIES), num_planned, lambda samples: pytest.fail("a sample without rows was fetched"))
        engine.accumulate(fragment(groups, "g2", "g0", "g1"))
        metrics = numbers(engine.commit(more=True)["metrics"])
        assert (metrics["num_empty_updates"], metrics["num_rows"], metrics["grad_norm"]) == (1, 0, 0)
        assert_equal(state_of(engine), before)
    one, two = step(engine, batch), step(other, batch)
    assert one == two and one["num_empty_updates"] == 0 and one["num_rows"] == 12
    assert_equal(state_of(engine), state_of(other))
