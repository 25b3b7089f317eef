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
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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
from verl_digen.engine.copies import CURRENT
from verl_digen.engine.engine import DiffusersFSDPEngine
from verl_digen.engine.resharding import OtherRanks
from verl_digen.engine.saved_ranks import SavedRanks, laid_out, narrowed

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


def shares(path: Path, folder: Path) -> list[tuple[int, int, int, int]]:
    """Per rank: bytes of its shards, bytes read for them, bytes allocated in all, and the largest allocation."""
    engine, _ = make("full", path)
    live = engine.module.state_dict()
    found = OtherRanks(SavedRanks(Path(actor(folder, "full"))), live)
    with Allocations() as allocations:
        for name, value in live.items():
            found.shard(name, value)
        state = found.optimizer_state(engine.optimizer)
        for copy in found.copies(found.read("digen_state")["copies"]).values():
            assert all(shard is not None for shard in copy.values())
    moments = [value for values in state["state"].values() for key, value in values.items() if key != "step"]
    own = sum(value.to_local().nbytes for value in (*live.values(), *live.values(), *moments))
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (own, found.num_bytes, allocations.total, allocations.largest))
    return gathered


def load_that_fails_on_rank_1(path: Path, folder: Path) -> list[str]:
    """Message of each rank."""
    broken = copied(folder, "full", "broken", lambda: dist.get_rank() == 0)
    dist.barrier()
    if dist.get_rank() == 1:
        cut(broken / "optim_world_size_2_rank_1.pt")
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


class Allocations(TorchDispatchMode):
    """Bytes of tensors that operators make, views left out."""

    total = largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        given = {_storage(value) for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)}
        for value in tree_leaves(made):
            if isinstance(value, Tensor) and not isinstance(value, DTensor) and _storage(value) not in given:
                self.total, self.largest = self.total + value.nbytes, max(self.largest, value.nbytes)
        return made


def _storage(value: Tensor) -> int:
    return (value.to_local() if isinstance(value, DTensor) else value).untyped_storage().data_ptr()


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
    return on_two_ranks([saved_by_two, resumed, load_that_fails_on_rank_1], checkpoint, folder)


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
def test_a_rank_reads_its_own_shards_and_holds_no_others(request: pytest.FixtureRequest, ranks: str):
    found = request.getfixturevalue(ranks)["shares"]
    whole = sum(own for own, *_ in found)
    for own, read, allocated, largest in found:
        assert read == own <= 1.1 * whole / len(found)
        assert allocated <= 1.5 * own + 4096, "each shard once, its moments once more; and the number of steps"
        assert largest <= own / 4


def test_ranks_of_another_number_keep_their_random_state(one: Any, checkpoint: Path, folder: Path):
    engine, _ = make("lora", checkpoint)
    torch.manual_seed(7)
    before = torch.get_rng_state()
    engine.load_checkpoint(actor(folder, "lora"))
    assert torch.equal(torch.get_rng_state(), before)


# -- base weights -------------------------------------------------------------------------------------------
def test_an_adapter_on_another_base_is_refused(one: Any, checkpoint: Path, folder: Path):
    engine, _ = make("lora", checkpoint, fsdp={"model_dtype": "bf16"})
    with pytest.raises(ValueError, match=r"for other base weights than those of .*model_dtype"):
        engine.load_checkpoint(actor(folder, "lora"))


# -- damaged checkpoints ------------------------------------------------------------------------------------


def removes(kind: str, *ranks: int) -> Callable[[Path], None]:
    """Damage: files of this kind are not there."""
    return lambda folder: [(folder / f"{kind}_world_size_2_rank_{rank}.pt").unlink() for rank in ranks] and None


def cut_weights(folder: Path) -> None:
    cut(folder / "model_world_size_2_rank_1.pt")


def add_a_file_of_four_ranks(folder: Path) -> None:
    shutil.copy(folder / "model_world_size_2_rank_1.pt", folder / "model_world_size_4_rank_1.pt")


def mix_saves(folder: Path) -> None:
    file = folder / "digen_state_world_size_2_rank_1.pt"
    torch.save(torch.load(file, weights_only=False) | {"num_updates": 2}, file)


def swap_weights(folder: Path) -> None:
    shutil.copy(folder.parents[1] / "replicated" / "actor" / "model_world_size_2_rank_1.pt", folder)


def keep_moments_in_other_tensors(folder: Path) -> None:
    for rank in range(2):
        file = folder / f"optim_world_size_2_rank_{rank}.pt"
        saved = torch.load(file, weights_only=False)
        for values in saved["state"].values():
            values["exp_avg"] = torch.zeros(3)
        torch.save(saved, file)


def drop_a_parameter(folder: Path) -> None:
    file = folder / "optim_world_size_2_rank_0.pt"
    saved = torch.load(file, weights_only=False)
    saved["param_groups"][0]["params"].pop()
    torch.save(saved, file)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            removes("model", 1),
            r"model of all 2 ranks, got 'a folder without model_world_size_2_rank_1\.pt'; copy the files of",
        ),
        (removes("optim", 1), r"optimizer of all 2 ranks, got 'a folder without optim_world_size_2_rank_1\.pt'; copy"),
        (removes("optim", 0, 1), r"optimizer of all 2 ranks, .*save_contents must have had optimizer"),
        (removes("model", 0, 1), r"weights that one run saved, got 'files of no ranks'; .* must have had model"),
        (cut_weights, r"model_world_size_2_rank_1\.pt' must be a whole file of a checkpoint, got .*; copy it again"),
        (add_a_file_of_four_ranks, r"one run saved, got 'files of 2 and of 4 ranks'; take a folder as it was saved"),
        (mix_saves, r"one save and count the same optimizer steps, got 3 in rank 0's, 2 in rank 1's; copy the files"),
        (swap_weights, r"of rank 1 must be a shard of \(\d+.*, got \(\d+.*; copy the files of one save"),
        (keep_moments_in_other_tensors, r"state as tensors of .*, got \"'exp_avg' of type Tensor\"; resume on 2 ranks"),
        (drop_a_parameter, r"optimizer of the 77 tensors that this run trains, got 'that of 76'; train the same"),
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
    assert first == second and "optim_world_size_2_rank_1.pt' must be a whole file" in first


# -- layouts ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("rows", [1, 2, 5, 8, 12])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 7])
def test_parts_are_those_of_torch_chunk(rows: int, num_ranks: int):
    value = torch.arange(rows * 3).view(rows, 3)
    found = laid_out(value.shape, torch.arange(num_ranks), [Shard(0)])
    expected = dict(enumerate(value.chunk(num_ranks)))
    assert found.keys() == expected.keys()
    for rank, part in found.items():
        assert torch.equal(narrowed(value, part.offsets, part.sizes), expected[rank])


def test_of_replicas_the_first_ranks_hold_the_parts():
    mesh = torch.tensor([[0, 1], [2, 3]])
    assert laid_out((4, 2), mesh, [Replicate(), Shard(0)]).keys() == {0, 1}
    assert laid_out((4, 2), mesh, [Shard(0), Replicate()]).keys() == {0, 2}
    both = laid_out((4, 6), mesh, [Shard(1), Shard(0)])
    assert [(*part.offsets, *part.sizes) for part in both.values()] == [
        *((0, 0, 2, 3), (2, 0, 2, 3)),
        *((0, 3, 2, 3), (2, 3, 2, 3)),
    ]


def test_a_layout_that_fsdp2_does_not_make_is_refused():
    with pytest.raises(ValueError, match=r"sharded or replicated, got .*; save it again"):
        laid_out((4,), torch.arange(2), [Partial()])
