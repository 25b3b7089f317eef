# SPDX-License-Identifier: Apache-2.0
"""Random logical batches on 1 to 4 ranks, against the gradient of the slow reference.

Each seed is a batch: groups, samples, trained steps, fragments and their order, samples that were planned and never
came, settings of the loss and of `digen.tsp`, the kind of engine, and calls that must leave no trace: refused
fragments, generation in between, an exception half-way and the abort after it.

Four processes run all of them, in process groups of 4, of 3 and 1, and of 2 and 2. They are forks of a process that has
imported the libraries (`tests.engine.harness`); this one may have threads of autograd, which a fork cannot run beside.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.multiprocessing.spawn import start_processes

from tests.engine.cases import optimizer_state
from tests.engine.harness import SIZE_PX, are_equal, make_engine, peek, process_group
from tests.engine.random_batches import FLAVOURS, FLAVOURS_ON, Accident, RandomBatch, draw
from tests.engine.slow_gradient import SIGMAS, expected
from tests.engine.toy import LATENTS, TEXT_WIDTH, build_toy, register_toy
from tests.grid import IN_GRID
from verl_digen.algorithms.rows import numbers
from verl_digen.engine.engine import DiffusersFSDPEngine
from verl_digen.engine.export import plain_name
from verl_digen.engine.fragment import FragmentSample
from verl_digen.engine.fsdp2 import reshard
from verl_digen.engine.rows import Fetch, Samples
from verl_digen.types import Geometry

pytestmark = pytest.mark.slow

SEEDS = range(209)
NUM_IN_CI = 44
"""Number of seeds that CI trains; the others are in the grid."""
RANKS = (1, 2, 1, 3, 2, 1, 4, 2, 1, 3, 2)
"""Number of ranks of seeds 0 to 10, then repeating: more ranks take longer."""
TOLERANCE = 1e-5
"""Largest error, as a share of the sum over rows of the norms of their gradients; fp32."""
TIMEOUT_S = 600
"""Timeout of one collective, so that a missing rank is an error."""


def num_ranks_of(seed: int) -> int:
    """Number of ranks, 1 to 4."""
    return RANKS[seed % len(RANKS)]


@cache
def batch_of(seed: int) -> RandomBatch:
    """The batch of this seed."""
    return draw(seed, num_ranks_of(seed))


def teams(process: int, seeds: Iterable[int]) -> Iterator[tuple[int, int, str, Sequence[int]]]:
    """(ranks, rank, name, some of the seeds) of the process groups that `process` belongs to, one after the other.

    All four; then three of them, and the fourth as a group of its own; then two and two.
    """
    on = {count: [seed for seed in seeds if num_ranks_of(seed) == count] for count in range(1, 5)}
    yield 4, process, "all", on[4]
    yield (3, process, "three", on[3]) if process < 3 else (1, 0, "single", on[1])
    yield 2, process % 2, f"pair{process // 2}", on[2][process // 2 :: 2]


# -- on a rank ------------------------------------------------------------------------------------------------
@dataclass
class Trained:
    """A rank's view of a batch after its commit."""

    gradient: dict[str, Tensor]
    """The rank's shards, as the optimizer step found them, by the checkpoint's names."""
    metrics: dict[str, float]
    problems: list[str]
    """Broken invariants."""


class Failure(Exception):
    """Stands for an exception of a device, or of a fetch, half-way."""


def work(process: int, folder: Path) -> None:
    """Train the batches of this process's teams, and leave a file {seed: Trained} of each."""
    torch.set_num_threads(1)
    register_toy()
    batches: dict[int, RandomBatch] = torch.load(folder / "batches", weights_only=False)
    for num_ranks, rank, team, seeds in teams(process, batches):
        if not seeds:
            continue
        os.environ["LOCAL_RANK"] = str(rank)
        with process_group(rank, num_ranks, str(folder / f"store {team}"), timeout_s=TIMEOUT_S):
            flavours = dict.fromkeys(batches[seed].flavour for seed in seeds)
            engines = {flavour: make_toy_engine(folder, flavour) for flavour in flavours}
            found = {}
            for seed in seeds:
                try:
                    found[seed] = train(engines[batches[seed].flavour], batches[seed])
                except Exception as error:
                    raise RuntimeError(str(batches[seed])) from error
            torch.save(found, folder / f"trained {team} {rank}")


def make_toy_engine(folder: Path, flavour: str) -> DiffusersFSDPEngine:
    """Toy engine with a KL reference, for batches that have a KL term."""
    num_experts = 2 if flavour == "experts" else 1
    options = {"digen": {"kl": {"coef": 1.0}}, "optim": {"optimizer": "SGD", "clip_grad": 1e9}} | FLAVOURS[flavour]
    return make_engine(folder / f"toy {num_experts}", **options)


def configure(engine: DiffusersFSDPEngine, batch: RandomBatch) -> None:
    """Give the engine the batch's settings and weights, as if it had been built with them."""
    engine.digen = engine.forward.digen = batch.digen
    engine.planner.tsp = batch.digen.tsp
    engine._reduce = None
    reshard(engine.module)
    with torch.no_grad():
        for name, parameter in engine.module.named_parameters():
            if parameter.requires_grad:
                assert isinstance(parameter, DTensor)
                weight = batch.weights[plain_name(name)]
                layout = parameter.device_mesh, parameter.placements
                parameter.to_local().copy_(distribute_tensor(weight, *layout, src_data_rank=None).to_local())


def train(engine: DiffusersFSDPEngine, batch: RandomBatch) -> Trained:
    """Train the batch; retry if the first attempt failed."""
    configure(engine, batch)
    trained = Trained({}, {}, [])
    num_steps = 0

    def on_step(*unused: Any) -> None:
        nonlocal num_steps
        num_steps += 1
        for name, parameter in engine.module.named_parameters():
            if parameter.grad is not None:
                assert isinstance(parameter.grad, DTensor)
                trained.gradient[plain_name(name)] = parameter.grad.to_local().clone()

    before = optimizer_state(engine)
    optimizer: Any = engine.optimizer
    handle = optimizer.register_step_pre_hook(on_step)
    try:
        trained.metrics = commit_in_the_end(engine, batch, before, trained.problems)
    finally:
        handle.remove()
    num_counted, _, num_scheduled = (optimizer_state(engine)["counters"] - before["counters"])[:3].tolist()
    if not num_steps == num_counted == num_scheduled == 1:
        trained.problems.append(f"{num_steps} steps, {num_counted} counted, {num_scheduled} of the schedule")
    return trained


def commit_in_the_end(
    engine: DiffusersFSDPEngine, batch: RandomBatch, before: dict[str, Tensor], problems: list[str]
) -> dict[str, float]:
    """Metrics of the commit. An attempt that fails is aborted, and must leave everything as it was `before`."""
    if batch.accident is not None:
        with failing(engine, batch.accident) as before_fetch, suppress(Failure):
            return attempt(engine, batch, before_fetch, problems)
        calls = {"accumulate": lambda: engine.accumulate(batch.fragments[0]), "commit": engine.commit}
        for name, call in (calls | {"assisting": engine.assisting().__enter__}).items():
            if not is_refused(call, "an earlier call on this logical batch failed"):
                problems.append(f"{name} after a failure")
        engine.abort()
        after = optimizer_state(engine)
        problems += [f"{name} after abort" for name, value in after.items() if not torch.equal(value, before[name])]
    return attempt(engine, batch, lambda: None, problems)


def attempt(
    engine: DiffusersFSDPEngine, batch: RandomBatch, before_fetch: Callable[[], None], problems: list[str]
) -> dict[str, float]:
    """Run one attempt from begin to commit; returns the commit's metrics."""
    fetch = fetch_from(batch)

    def fetched(samples: Sequence[FragmentSample]) -> Samples:
        before_fetch()
        return fetch(samples)

    engine.begin(batch.num_samples, batch.num_rows, fetched)
    for call in batch.calls:
        if call.fragment is None:
            held = {key: value.clone() for key, value in peek(engine).items()}
            assist(engine, fails=call.kind == "failing assist")
            if not are_equal(peek(engine), held):
                problems.append(f"{call.kind} changed the open gradient")
        elif call.kind == "train":
            engine.accumulate(call.fragment)
        elif not is_refused(lambda fragment=call.fragment: engine.accumulate(fragment)):
            problems.append(f"{call.fragment} was not refused")
    return numbers(engine.commit()["metrics"])


@contextmanager
def failing(engine: DiffusersFSDPEngine, accident: Accident) -> Iterator[Callable[[], None]]:
    """Context in which the fetch, forward or backward of this number fails. Yields a hook to call before a fetch."""
    left = accident.number

    def strike(*unused: Any) -> None:
        nonlocal left
        if engine.module.training:  # not while it generates
            left -= 1
            if left == -1:
                raise Failure

    block = next(module for name, module in engine.module.named_modules() if name.endswith("block"))
    handles = []
    if accident.where == "forward":
        handles.append(block.register_forward_pre_hook(strike))
    if accident.where == "backward":
        handles.append(block.register_full_backward_pre_hook(strike))
    try:
        yield strike if accident.where == "fetch" else lambda: None
    finally:
        for handle in handles:
            handle.remove()


def assist(engine: DiffusersFSDPEngine, *, fails: bool) -> None:
    """Run a forward of each network, as generation does."""
    latents, condition = torch.ones(1, *LATENTS), {"embeds": torch.ones(1, TEXT_WIDTH)}
    geometry = Geometry(SIZE_PX, SIZE_PX)
    with suppress(Failure), engine.assisting() as module:
        for sigmas in (SIGMAS[1:2], SIGMAS[4:5])[: len(engine.model.experts)]:
            engine.model.velocity(module, latents, sigmas, [condition], None, 1.0, geometry)
        if fails:
            raise Failure


def is_refused(call: Callable[[], Any], message: str = "") -> bool:
    """True if the call raises an error with this message."""
    try:
        call()
    except (RuntimeError, ValueError) as error:
        return message in str(error)
    return False


def fetch_from(batch: RandomBatch) -> Fetch:
    """A `Fetch` from the batch instead of TransferQueue."""

    def fetch(samples: Sequence[FragmentSample]) -> Samples:
        recorded = [batch.samples[sample.key] for sample in samples]
        steps = [torch.tensor(sample.steps, dtype=torch.int64) for sample in recorded]
        is_guided = batch.digen.sampling.true_cfg_scale > 1
        return Samples(
            described=samples,
            columns={
                "latents": [sample.latents for sample in recorded],
                "positions": steps,
                "sigmas": [SIGMAS[own] for own in steps],
                "next_sigmas": [SIGMAS[own + 1] for own in steps],
                "sigma_max": [SIGMAS[1:2] for _ in steps],
                "log_probs": [sample.log_probs for sample in recorded],
            },
            conditions={
                uid: ({"embeds": positive}, {"embeds": negative} if is_guided else None)
                for uid, (positive, negative) in batch.conditions.items()
            },
            advantages=torch.zeros(len(samples)),
        )

    return fetch


# -- results --------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def batches(request: pytest.FixtureRequest) -> dict[int, RandomBatch]:
    """Batches of the selected tests, by seed: a single seed takes seconds."""
    chosen = [item for item in request.session.items if isinstance(item, pytest.Function) and item.path == request.path]
    parameters: list[dict[str, Any]] = [item.callspec.params for item in chosen if hasattr(item, "callspec")]
    return {seed: batch_of(seed) for seed in sorted(one["seed"] for one in parameters)}


@pytest.fixture(scope="module")
def trained(batches: dict[int, RandomBatch], tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[Trained]]:
    """Results of each rank, by seed."""
    folder = tmp_path_factory.mktemp("properties")
    for num_experts in (1, 2):
        build_toy(folder / f"toy {num_experts}", num_experts=num_experts)
    torch.save(batches, folder / "batches")
    start_processes(work, args=(folder,), nprocs=4, start_method="forkserver")
    by_seed: dict[int, list[Trained]] = {}
    for file in sorted(folder.glob("trained *")):
        for seed, one in torch.load(file, weights_only=False).items():
            by_seed.setdefault(seed, []).append(one)
    return by_seed


@pytest.mark.parametrize(
    "seed", [*SEEDS[:NUM_IN_CI], *(pytest.param(seed, marks=IN_GRID) for seed in SEEDS[NUM_IN_CI:])]
)
def test_committed_gradient_is_that_of_the_slow_way(
    batches: dict[int, RandomBatch], trained: dict[int, list[Trained]], seed: int
):
    batch, ranks = batches[seed], trained[seed]
    assert [rank.problems for rank in ranks] == [[]] * batch.num_ranks, str(batch)
    right = expected(batch)
    rounding = {name: TOLERANCE * magnitude for name, magnitude in right.magnitude.items()}
    for gradient in whole_gradients(batch, ranks):
        for name, value in right.gradient.items():
            # a network that no row runs has no gradient
            found = gradient.get(name, torch.zeros_like(value)).double()
            error = (found - value).norm().item()
            assert error <= rounding[name], f"{name} is off by {error / right.magnitude[name]:.1e}: {batch}"
    norm = torch.stack([value.norm() for value in right.gradient.values()]).norm().item()
    for rank in ranks:
        metrics = rank.metrics
        loss = metrics["policy_loss"] + batch.digen.kl.coef * metrics.get("kl", 0.0)
        assert metrics["policy_loss"] == pytest.approx(right.policy_loss, rel=0, abs=TOLERANCE * right.loss_magnitude)
        assert loss == pytest.approx(right.loss, rel=0, abs=TOLERANCE * right.loss_magnitude)
        assert metrics["grad_norm"] == pytest.approx(norm, rel=0, abs=sum(rounding.values()))
        assert metrics["num_rows"] == batch.num_trained_rows
        assert metrics["num_fragments"] == len(batch.fragments)


def whole_gradients(batch: RandomBatch, ranks: Sequence[Trained]) -> list[dict[str, Tensor]]:
    """The gradient, assembled from the ranks' shards; one per rank if every rank has it whole."""
    if batch.flavour == "replicated":
        return [rank.gradient for rank in ranks]
    return [{name: torch.cat([rank.gradient[name] for rank in ranks]) for name in ranks[0].gradient}]


def test_the_seeds_draw_what_the_engine_may_meet():
    batches = [batch_of(seed) for seed in SEEDS]
    assert {(batch.num_ranks, batch.flavour) for batch in batches} == {
        (num_ranks, flavour) for num_ranks, flavours in FLAVOURS_ON.items() for flavour in flavours
    }
    for reduce in ("tile", "fragment", "batch", "auto"):
        assert len({(batch.flavour, batch.digen.kl.coef) for batch in batches if batch.digen.tsp.reduce == reduce}) == 8
    late = [batch for batch in batches if batch.digen.advantage.scale in ("batch", "max_group")]
    assert sum(len(batch.fragments) > 1 and batch.digen.kl.coef > 0 for batch in late) > 20
    assert {batch.accident.where for batch in batches if batch.accident} == {"fetch", "forward", "backward"}
    assert len({call.why for batch in batches for call in batch.calls if call.kind == "refuse"}) == 7
    of_trees = [batch for batch in batches if any(one.described.facts.nodes for one in batch.samples.values())]
    assert {batch.digen.advantage.scale for batch in of_trees} == {"batch", "max_group", "group", "none"}
    assert {batch.num_ranks for batch in of_trees} == {1, 2, 3, 4}
    assert sum(any(one.described.skipped for one in batch.samples.values()) for batch in of_trees) > 15
