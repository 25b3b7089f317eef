# SPDX-License-Identifier: Apache-2.0
"""Save all or nothing, resume bitwise."""

import resource
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from tensordict import TensorDict

from tests.engine.harness import LORA, RefusesToBeWritten, assert_equal, make_batch, make_engine, train, weights
from verl_digen.config import DigenConfig
from verl_digen.engine.saved_state import METADATA, SavedState
from verl_digen.errors import RunStopped
from verl_digen.observe.run_files import POINTER, newest_checkpoint
from verl_digen.trainer.colocated import ColocatedTrainer

pytestmark = pytest.mark.usefixtures("one_rank")

EMA = {"ema": {"enable": True, "every_steps": 2}}


@pytest.fixture(scope="module")
def batch(tiny_qwen_image: Path) -> TensorDict:
    return make_batch(tiny_qwen_image, group_size=2)


def test_resumed_run_continues_bitwise(tiny_qwen_image: Path, tmp_path: Path, batch: TensorDict):
    options = {"model": LORA, "digen": EMA | {"kl": {"coef": 0.1}}, "optim": {"lr_warmup_steps": 4}}
    straight, first = make_engine(tiny_qwen_image, **options), make_engine(tiny_qwen_image, **options)
    train(first, batch, 3)
    first.save_checkpoint(str(tmp_path / "step_3"), global_step=3)
    drawn = torch.rand(3)

    expected = train(straight, batch, 6)[-1]
    resumed = make_engine(tiny_qwen_image, **options)
    resumed.load_checkpoint(str(tmp_path / "step_3"), del_local_after_load=False)
    assert torch.equal(torch.rand(3), drawn)
    found = train(resumed, batch, 3)[-1]

    assert_equal(weights(resumed), weights(straight))
    assert_equal(weights(resumed, policy="average"), weights(straight, policy="average"))
    assert found["metrics"] == expected["metrics"]
    assert resumed.lr_scheduler.get_last_lr() == straight.lr_scheduler.get_last_lr()
    assert resumed.state.num_updates == 6


def test_a_resumed_run_takes_its_own_learning_rate_and_settings_at_the_place_of_the_schedule(
    tiny_qwen_image: Path, tmp_path: Path, batch: TensorDict
):
    first = make_engine(tiny_qwen_image, model=LORA, optim={"lr": 1e-3, "lr_warmup_steps": 4})
    train(first, batch, 3)
    first.save_checkpoint(str(tmp_path / "step_3"))
    other = {"lr": 1e-4, "lr_warmup_steps": 5, "weight_decay": 0.5, "betas": (0.8, 0.9)}
    resumed = make_engine(tiny_qwen_image, model=LORA, optim=other | {"override_optimizer_config": {"eps": 1e-15}})
    resumed.load_checkpoint(str(tmp_path / "step_3"), del_local_after_load=False)
    (group,) = resumed.optimizer.param_groups
    assert (group["weight_decay"], group["betas"], group["eps"]) == (0.5, (0.8, 0.9), 1e-15)
    rates = [resumed.learning_rate(), *(one["metrics"]["lr"] for one in train(resumed, batch, 3))]
    assert rates == pytest.approx([0.6e-4, 0.8e-4, 1e-4, 1e-4])


def test_checkpoint_of_an_adapter_leaves_the_base_out(tiny_qwen_image: Path, tmp_path: Path, batch: TensorDict):
    engine = make_engine(tiny_qwen_image, model=LORA)
    train(engine, batch)
    engine.save_checkpoint(str(tmp_path / "step"))
    saved = SavedState(tmp_path / "step")
    assert saved.shapes and all("lora_" in entry for entry in saved.entries if entry != "rank/0")
    resumed = make_engine(tiny_qwen_image, model=LORA)
    resumed.load_checkpoint(str(tmp_path / "step"), del_local_after_load=False)
    assert_equal(weights(resumed), weights(engine))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": LORA, "fsdp": {"model_dtype": "bf16"}}, "for other base weights than .*model_dtype"),
        ({"model": LORA | {"lora_rank": 2}}, r"14 tensors .* got 14, which differ e\.g\. in .*lora_A"),
        ({"model": LORA | {"target_modules": ["attn.to_q"]}}, "tensors that the run trains, got 14"),
        ({}, "the 77 tensors that the run trains, got 14"),
    ],
    ids=["dtype", "rank", "targets", "full"],
)
def test_checkpoint_of_another_adapter_or_base_is_refused(
    tiny_qwen_image: Path, tmp_path: Path, changes: dict, message: str
):
    make_engine(tiny_qwen_image, model=LORA).save_checkpoint(str(tmp_path / "step"))
    with pytest.raises(ValueError, match=message):
        make_engine(tiny_qwen_image, **changes).load_checkpoint(str(tmp_path / "step"), del_local_after_load=False)


def test_shards_saved_on_any_device_are_loaded_on_the_host(tiny_qwen_image: Path, tmp_path: Path, monkeypatch):
    engine = make_engine(tiny_qwen_image, model=LORA)
    engine.save_checkpoint(str(tmp_path / "step"))
    devices = []
    load = torch.load
    monkeypatch.setattr(
        torch, "load", lambda *args, **given: devices.append(given.get("map_location")) or load(*args, **given)
    )
    engine.load_checkpoint(str(tmp_path / "step"), del_local_after_load=False)
    assert devices == [None, *["cpu"] * 14], "first rank/0, whose tensors were saved from the host"


def test_checkpoints_of_earlier_starts_count_in_the_same_run(tiny_qwen_image: Path, tmp_path: Path):
    def start(run: str, *steps: int, resumed: Path | None = None) -> list[int]:
        engine = make_engine(tiny_qwen_image)
        if resumed is not None:
            engine.load_checkpoint(str(resumed), del_local_after_load=False)
        for step in steps:
            engine.save_checkpoint(str(tmp_path / run / f"step_{step}" / "actor"), max_ckpt_to_keep=2)
        return sorted(int(path.name[5:]) for path in (tmp_path / run).glob("step_*"))

    assert start("run", 8, 9, 10) == [9, 10]
    assert start("run", 11, resumed=tmp_path / "run" / "step_10" / "actor") == [10, 11]
    assert start("other", 11, resumed=tmp_path / "run" / "step_11" / "actor") == [11]
    assert start("run", 10, resumed=tmp_path / "run" / "step_10" / "actor") == [10, 11], "later steps stay"


def test_a_kept_checkpoint_stays_and_does_not_count(tiny_qwen_image: Path, tmp_path: Path):
    engine = make_engine(tiny_qwen_image)

    def save(step: int) -> list[int]:
        engine.save_checkpoint(str(tmp_path / f"step_{step}" / "actor"), max_ckpt_to_keep=2)
        return [number for number in range(1, 6) if (tmp_path / f"step_{number}").exists()]

    assert save(1) == [1]
    engine.checkpoint_manager.kept = frozenset({str(tmp_path / "step_1" / "actor")})
    assert save(2) == [1, 2] and save(3) == [1, 2, 3] and save(4) == [1, 3, 4]
    engine.checkpoint_manager.kept = frozenset({str(tmp_path / "step_3" / "actor")})
    assert save(5) == [3, 4, 5], "the one that was kept is an old one now"


def test_the_checkpoint_that_a_resume_takes_stays_beside_a_newer_one_without_the_driver_s_part(
    tiny_qwen_image: Path, tmp_path: Path
):
    engine = make_engine(tiny_qwen_image)
    (tmp_path / POINTER).write_text("1")
    for step, left in ((1, [1]), (2, [1, 2]), (3, [1, 3]), (4, [1, 4])):
        engine.save_checkpoint(str(tmp_path / f"step_{step}" / "actor"), max_ckpt_to_keep=2)
        assert [number for number in range(1, 5) if (tmp_path / f"step_{number}").exists()] == left


def test_saving_a_step_again_replaces_it(tiny_qwen_image: Path, tmp_path: Path, batch: TensorDict):
    engine = make_engine(tiny_qwen_image)
    engine.save_checkpoint(str(tmp_path / "step"))
    (tmp_path / "step" / "stale").touch()
    train(engine, batch)
    engine.save_checkpoint(str(tmp_path / "step"))
    assert not (tmp_path / "step" / "stale").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["step"]


def test_leftover_of_a_killed_save_goes_with_the_next(tiny_qwen_image: Path, tmp_path: Path):
    (tmp_path / "step.partial").mkdir()
    (tmp_path / "step.partial" / "__7_0.distcp").touch()
    make_engine(tiny_qwen_image).save_checkpoint(str(tmp_path / "step"))
    assert [path.name for path in tmp_path.iterdir()] == ["step"]
    assert {path.name for path in (tmp_path / "step").iterdir()} == {METADATA, "__0_0.distcp"}


@pytest.mark.parametrize("written", ["__0_0.distcp", "model_world_size_1_rank_0.pt"])
def test_an_unfinished_folder_and_one_of_an_earlier_format_are_refused(
    tiny_qwen_image: Path, tmp_path: Path, written: str
):
    engine = make_engine(tiny_qwen_image)
    engine.save_checkpoint(str(tmp_path / "step"))
    if written.endswith(".pt"):
        (tmp_path / "step" / written).touch()
    else:
        (tmp_path / "step" / METADATA).rename(tmp_path / "step" / f"{METADATA}.tmp")
    with pytest.raises(ValueError, match=r"run `digen export` of the version|without \.metadata, which is"):
        engine.load_checkpoint(str(tmp_path / "step"))


def test_failed_save_leaves_the_old_checkpoint(tiny_qwen_image: Path, tmp_path: Path, batch: TensorDict):
    engine = make_engine(tiny_qwen_image)
    engine.save_checkpoint(str(tmp_path / "step"))
    saved = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "step").iterdir()}
    train(engine, batch)
    engine.optimizer.state[engine.optimizer.param_groups[0]["params"][0]]["unsavable"] = RefusesToBeWritten()
    with pytest.raises(RuntimeError, match="No space left on device on rank 0"):
        engine.save_checkpoint(str(tmp_path / "step"))
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "step").iterdir()} == saved
    assert [path.name for path in tmp_path.iterdir()] == ["step"]
    make_engine(tiny_qwen_image).load_checkpoint(str(tmp_path / "step"), del_local_after_load=False)


def test_full_disk_raises_and_leaves_nothing(tiny_qwen_image: Path, tmp_path: Path):
    engine, limits = make_engine(tiny_qwen_image), resource.getrlimit(resource.RLIMIT_FSIZE)
    # no file of this process may grow beyond; Python ignores the signal
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(RuntimeError, match="File too large on rank 0"):
            engine.save_checkpoint(str(tmp_path / "actor"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


class Saving(ColocatedTrainer):
    """The project's trainer that keeps one checkpoint, with one real engine as its ranks."""

    def __init__(self, run_dir: Path, engine: Any):
        trainer = {"max_actor_ckpt_to_keep": 1}
        checkpoint = {
            "actor": {"checkpoint": {"save_contents": []}},
            "model": {"path": None, "lora_adapter_path": None},
        }
        self.config = OmegaConf.create({"trainer": trainer, "actor_rollout_ref": checkpoint})
        self.digen, self.run_dir = DigenConfig(), run_dir
        self._num_prompts_drawn, self._drawn, self.train_dataset = 0, [], SimpleNamespace(prompts=[])
        self.train_dataloader: Any = SimpleNamespace(state_dict=dict)
        self.actor_rollout_wg: Any = SimpleNamespace(save_checkpoint=engine.save_checkpoint)
        self._supervision: Any = SimpleNamespace(watch=lambda *what: nullcontext())
        self._timeline: Any = SimpleNamespace(working=lambda what: nullcontext())
        self.checkpoint_callback: Any = SimpleNamespace(on_save=lambda **save: None)

    def save(self, step: int) -> list[int]:
        self.global_steps = step
        self._save_checkpoint()
        return self.saved

    @property
    def saved(self) -> list[int]:
        return sorted(int(path.name.removeprefix("global_step_")) for path in self.run_dir.glob("global_step_*"))


def test_the_only_checkpoint_stays_until_the_next_one_is_whole(tiny_qwen_image: Path, tmp_path: Path):
    trainer = Saving(tmp_path, make_engine(tiny_qwen_image))
    assert trainer.save(1) == [1]
    in_the_way = tmp_path / "global_step_2" / "data.pt"  # the ranks can write their part, the driver cannot
    in_the_way.mkdir(parents=True)
    with pytest.raises(RunStopped, match=r"of step 2 could not be written .* make room .* older checkpoints are unt"):
        trainer.save(2)
    assert newest_checkpoint(tmp_path) == tmp_path / "global_step_1" and 1 in trainer.saved
    in_the_way.rmdir()
    assert trainer.save(2) == [2] and trainer.save(3) == [3]
