# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of two ranks on 1, 2 and 4 ranks, and on shards that lie elsewhere: the same state, the same run."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor

from tests.engine.harness import (
    LORA,
    assert_close,
    assert_equal,
    full,
    make_batch,
    make_engine,
    on_ranks,
    on_two_ranks,
    perturb,
    train,
    weights,
)
from tests.engine.sequence_cases import CASES, batch_of, build
from tests.grid import in_grid
from verl_digen.engine.copies import CURRENT, local_shard
from verl_digen.engine.engine import DiffusersFSDPEngine
from verl_digen.engine.saved_state import METADATA

pytestmark = [pytest.mark.slow, pytest.mark.long]

EXPERTS = CASES["wan2.2_a14b"]
OPTIM = {"lr_warmup_steps": 4, "override_optimizer_config": {"eps": 1e-3}}
"""AdamW whose first steps are not the signs of gradients, some of which are rounding alone."""
EMA = {"ema": {"enable": True, "every_steps": 1}}
RUNS: dict[str, dict[str, Any]] = {
    "full": {"digen": EMA | {"kl": {"coef": 0.1}}},
    "lora": {"digen": EMA, "model": LORA},
    "experts": {"digen": EMA | {"sampling": {"height_px": 64, "width_px": 64, "num_frames": 5}}},
}
KEEPS_OLD = {"digen": EMA | {"loss": {"name": "diffusion_nft"}}}
STEPS = 3
RTOL = 1e-6
"""Relative to each tensor's norm; sums in another order make 5e-8."""


def make(name: str, path: Path, **changes: Any) -> tuple[DiffusersFSDPEngine, TensorDict]:
    """An engine of the run `name`, and its batch."""
    if name == "experts":
        path = path.parent / "experts"
        batch = batch_of(EXPERTS, path)
    else:
        batch = make_batch(path, group_size=2)
    return make_engine(path, optim=OPTIM, **RUNS[name] | changes), batch


def whole_state(engine: DiffusersFSDPEngine) -> dict[str, Tensor]:
    """Weights, average and moments, each gathered, and all counters."""
    found = {f"weight {name}": value for name, value in weights(engine, policy=CURRENT).items()}
    assert {value.dtype for value in found.values()} == {torch.float32}
    for policy in engine.copies:
        found |= {f"{policy} {name}": value for name, value in weights(engine, policy=policy).items()}
    for number, group in enumerate(engine.optimizer.param_groups):
        for place, parameter in enumerate(group["params"]):
            state = engine.optimizer.state.get(parameter, {})
            found |= {f"{key} {number} {place}": full(value).clone() for key, value in state.items()}
    counters = [engine.state.num_updates, engine.state.num_skipped, engine.lr_scheduler.last_epoch]
    found["counters"] = torch.tensor([*counters, *engine.lr_scheduler.get_last_lr()], dtype=torch.float64)
    return found


def actor(folder: Path, name: str) -> str:
    return str(folder / name / "actor")


# -- what ranks run -----------------------------------------------------------------------------------------
def saved_by_two(path: Path, folder: Path) -> dict[str, tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Each run's state when it was saved, and after further steps without a break."""
    results = {}
    for name in RUNS:
        engine, batch = make(name, path)
        perturb(engine)
        train(engine, batch, STEPS)
        engine.save_checkpoint(actor(folder, name))
        before = whole_state(engine)
        train(engine, batch, STEPS)
        results[name] = before, whole_state(engine)
    replicas, _ = make("full", path, fsdp={"fsdp_size": 1})
    replicas.load_checkpoint(actor(folder, "full"))
    keeps_old = make_engine(path, **KEEPS_OLD)
    perturb(keeps_old)
    for name, engine in (("replicated", replicas), ("old", keeps_old)):
        engine.save_checkpoint(actor(folder, name))
        results[name] = whole_state(engine), {}
    return results


def resumed(path: Path, folder: Path) -> dict[str, tuple[dict[str, Tensor], dict[str, Tensor]]]:
    """Each run's state when it was loaded, and after further steps."""
    results = {}
    for name in RUNS:
        engine, batch = make(name, path)
        engine.load_checkpoint(actor(folder, name))
        before = whole_state(engine)
        train(engine, batch, STEPS)
        results[name] = before, whole_state(engine)
    for name, engine in (("replicated", make("full", path)[0]), ("old", make_engine(path, **KEEPS_OLD))):
        engine.load_checkpoint(actor(folder, name))
        results[name] = whole_state(engine), {}
    return results


def shares(path: Path, folder: Path) -> list[tuple[int, int, int]]:
    """Per rank: bytes of its shards, bytes read for them, and the largest tensor read."""
    engine, _ = make("full", path)
    read, load = [], torch.load

    def counted(*args: Any, **given: Any) -> Any:
        read.append(loaded := load(*args, **given))
        return loaded

    torch.load = counted
    try:
        engine.load_checkpoint(actor(folder, "full"))
    finally:
        torch.load = load
    tensors = [value for value in read if isinstance(value, Tensor)]
    moments = [value for state in engine.optimizer.state.values() for value in state.values() if value.ndim]
    live = [*engine.module.state_dict().values(), *engine.copies["average"].tensors.values(), *moments]
    live += engine.copies["reference"].tensors.values() if "reference" in engine.copies.state_dict() else []
    sizes = [sum(local_shard(value).nbytes for value in live), sum(value.nbytes for value in tensors)]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (*sizes, max(value.nbytes for value in tensors)))
    return gathered


def moments_of_their_own(path: Path, folder: Path) -> list[list[float]]:
    """A value of an optimizer that each rank has for itself, after it was saved and loaded."""
    engine, batch = make("full", path)
    train(engine, batch)
    parameter = engine.optimizer.param_groups[0]["params"][0]
    engine.optimizer.state[parameter]["odd"] = torch.full((3,), float(dist.get_rank()))
    engine.save_checkpoint(actor(folder, "odd"))
    other, _ = make("full", path)
    other.load_checkpoint(actor(folder, "odd"))
    odd: list[Any] = [None] * 2
    dist.all_gather_object(odd, other.optimizer.state[other.optimizer.param_groups[0]["params"][0]]["odd"].tolist())
    return odd


def load_that_fails_on_rank_1(path: Path, folder: Path) -> list[str]:
    """Message of each rank."""
    broken = copied(folder, "full", "broken", lambda: dist.get_rank() == 0)
    dist.barrier()
    if dist.get_rank() == 1:
        cut(broken / "__1_0.distcp")
    dist.barrier()
    with pytest.raises(ValueError) as error:
        make("full", path)[0].load_checkpoint(str(broken))
    messages = [""] * 2
    dist.all_gather_object(messages, str(error.value))
    return messages


def copied(folder: Path, name: str, to: str, mine: Callable[[], bool] = lambda: True) -> Path:
    """Copy of a run's checkpoint."""
    if mine():
        shutil.copytree(actor(folder, name), folder / to)
    return folder / to


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


# -- the checkpoints ----------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def checkpoint(tiny_qwen_image: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Path of the tiny Qwen-Image, with the experts of Wan2.2 beside it."""
    folder = tmp_path_factory.mktemp("networks")
    (folder / "qwen_image").symlink_to(tiny_qwen_image)
    build(EXPERTS, folder / "experts")
    return folder / "qwen_image"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def two_ranks(checkpoint: Path, folder: Path) -> dict[str, Any]:
    """The runs that are saved, and those that go on by as many ranks."""
    return on_two_ranks([saved_by_two, resumed, moments_of_their_own, load_that_fails_on_rank_1], checkpoint, folder)


@pytest.fixture(scope="module")
def unbroken(two_ranks: dict[str, Any]) -> dict[str, tuple[dict[str, Tensor], dict[str, Tensor]]]:
    return two_ranks["saved_by_two"]


@pytest.fixture(scope="module")
def one(unbroken: Any, one_rank: None, checkpoint: Path, folder: Path) -> dict[str, Any]:
    return {"resumed": resumed(checkpoint, folder), "shares": shares(checkpoint, folder)}


@pytest.fixture(scope="module")
def four(unbroken: Any, checkpoint: Path, folder: Path) -> dict[str, Any]:
    return on_ranks(4, [resumed, shares], checkpoint, folder)


ONE_AND_FOUR = ["one", *in_grid(["four"])]


# -- the same run -------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", RUNS)
def test_as_many_ranks_continue_bitwise(two_ranks: dict, unbroken: dict, name: str):
    for found, expected in zip(two_ranks["resumed"][name], unbroken[name], strict=True):
        assert_equal(found, expected)


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("ranks", ONE_AND_FOUR)
def test_another_number_of_ranks_loads_what_was_saved_and_trains_what_the_unbroken_run_does(
    request: pytest.FixtureRequest, unbroken: dict, ranks: str, name: str
):
    (loaded, trained), (saved, expected) = request.getfixturevalue(ranks)["resumed"][name], unbroken[name]
    assert_equal(loaded, saved)
    weights_of = {key: value for key, value in expected.items() if key.split()[0] in ("weight", "average")}
    assert_close({key: trained[key] for key in weights_of}, weights_of, RTOL)
    assert_equal({"counters": trained["counters"]}, {"counters": expected["counters"]})
    moved = [(expected[key] - saved[key]).norm() / saved[key].norm() for key in weights_of if saved[key].norm() > 0]
    assert torch.stack(moved).quantile(0.25) > 100 * RTOL, "so much do the steps change, of each of two experts"
    kinds = {"weight", "average", "step", "exp_avg", "exp_avg_sq", "counters"}
    assert {key.split()[0] for key in expected} == kinds | ({"reference"} if name == "full" else set())


@pytest.mark.parametrize("ranks", ["two_ranks", *ONE_AND_FOUR])
def test_replicas_and_shards_load_each_other(request: pytest.FixtureRequest, unbroken: dict, ranks: str):
    assert_equal(unbroken["replicated"][0], unbroken["full"][0])
    assert_equal(request.getfixturevalue(ranks)["resumed"]["replicated"][0], unbroken["full"][0])


@pytest.mark.parametrize("ranks", ONE_AND_FOUR)
def test_copies_that_an_objective_keeps_are_loaded(request: pytest.FixtureRequest, unbroken: dict, ranks: str):
    expected = unbroken["old"][0]
    assert_equal(request.getfixturevalue(ranks)["resumed"]["old"][0], expected)
    assert not torch.equal(expected["old img_in.weight"], expected["weight img_in.weight"])


@pytest.mark.parametrize("ranks", ONE_AND_FOUR)
def test_a_rank_reads_the_shards_that_overlap_with_its_own(request: pytest.FixtureRequest, ranks: str):
    found = request.getfixturevalue(ranks)["shares"]
    for own, read, largest in found:
        assert read == own if len(found) == 1 else own <= read <= 2.2 * own, "of two saved shards one"
        assert largest <= own / 4, "one saved shard at a time"


def test_moments_that_are_not_like_their_parameter_stay_with_their_rank(
    two_ranks: dict, one_rank: None, checkpoint: Path, folder: Path
):
    assert two_ranks["moments_of_their_own"] == [[0.0, 0.0, 0.0], [1.0, 1.0, 1.0]]
    message = r"state as tensors of the parameters' shapes .*, got 'odd'; resume on the number of ranks that saved"
    with pytest.raises(ValueError, match=message):
        make("full", checkpoint)[0].load_checkpoint(actor(folder, "odd"))


def test_ranks_of_another_number_keep_their_random_state(one: Any, checkpoint: Path, folder: Path):
    engine, _ = make("lora", checkpoint)
    torch.manual_seed(7)
    before = torch.get_rng_state()
    engine.load_checkpoint(actor(folder, "lora"))
    assert torch.equal(torch.get_rng_state(), before)


# -- damaged checkpoints ------------------------------------------------------------------------------------


def remove_a_file(folder: Path) -> None:
    (folder / "__1_0.distcp").unlink()


def cut_a_file(folder: Path) -> None:
    cut(folder / "__1_0.distcp")


def cut_the_index(folder: Path) -> None:
    cut(folder / METADATA)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove_a_file, r"all files of one save, whole, got FileNotFoundError: .*__1_0\.distcp' on rank 0; copy"),
        (cut_a_file, r"must hold all files of one save, whole, got .*; copy .*, or take an earlier one"),
        (cut_the_index, r"must hold all files of one save, whole, got .*; copy them again"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_damaged_checkpoint_is_refused(
    one: Any, checkpoint: Path, folder: Path, tmp_path: Path, damage: Callable[[Path], None], message: str
):
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    damage(tmp_path / "full" / "actor")
    engine, _ = make("full", checkpoint)
    with pytest.raises(ValueError, match=message):
        engine.load_checkpoint(actor(tmp_path, "full"))


def test_a_file_that_one_rank_cannot_read_is_an_error_on_all(two_ranks: dict):
    first, second = two_ranks["load_that_fails_on_rank_1"]
    assert first == second and "must hold all files of one save, whole, got" in first
