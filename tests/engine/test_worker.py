# SPDX-License-Identifier: Apache-2.0
"""verl's worker around the engine, in this process and without Ray; conditions are passed in, not fetched."""

from __future__ import annotations

import math
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf
from tensordict import TensorDict
from verl.single_controller.base.decorator import MAGIC_ATTR
from verl.utils import tensordict_utils as tu
from verl.workers.engine_workers import ActorRolloutRefWorker

from tests.engine.harness import assert_equal, digen_section, make_batch, make_engine, train, weights, with_mask
from verl_digen.engine.loss import DiffusionLoss
from verl_digen.engine.worker import DiffusionWorker, combine_updates

GROUP_SIZE = 3
FP32 = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}


def make_config(path: Path, prompts_per_update: int = 2, epochs: int = 1, **digen) -> DictConfig:
    """verl's own defaults with a diffusion model in them."""
    config = OmegaConf.create((files("verl.trainer.config") / "_generated_ppo_trainer.yaml").read_text())
    assert isinstance(config, DictConfig)
    section = config.actor_rollout_ref
    section.model = {
        "_target_": "verl_digen.model_config.DiffusionModelConfig",
        "path": str(path),
        "digen": digen_section(**digen),
    }
    section.actor.strategy = section.actor.fsdp_config.strategy = "fsdp2"
    section.actor.fsdp_config.mixed_precision = FP32
    section.actor.fsdp_config.use_torch_compile = False
    section.actor.optim.lr = 1e-3
    section.actor.optim.lr_warmup_steps = 4
    section.actor.ppo_mini_batch_size = prompts_per_update
    section.actor.ppo_epochs = epochs
    section.actor.ppo_micro_batch_size_per_gpu = section.rollout.log_prob_micro_batch_size_per_gpu = 1
    section.rollout.n = GROUP_SIZE
    section.rollout.dtype = "float32"
    return section


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Environment variables that Ray gives a worker; at the end, destroys the process group of the first worker."""
    store = tmp_path_factory.mktemp("rendezvous") / "store"
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "LOCAL_RANK"):
            patch.setenv(name, "0")
        for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            patch.setenv(name, "1")
        patch.setenv("RAY_LOCAL_WORLD_SIZE", "1000")
        patch.setenv("MASTER_ADDR", "127.0.0.1")
        patch.setenv("MASTER_PORT", "0")  # read by verl, not used
        patch.setenv("DIST_INIT_METHOD", f"file://{store}")
        yield
        dist.destroy_process_group()


def make_worker(path: Path, **options) -> DiffusionWorker:
    worker = DiffusionWorker(make_config(path, **options), role="actor")
    worker.init_model()
    return worker


@pytest.fixture(scope="module")
def batch(tiny_qwen_image: Path) -> TensorDict:
    return make_batch(tiny_qwen_image, group_size=GROUP_SIZE)


def test_init_starts_gloo_shares_the_cores_and_sets_our_loss(environment: None, tiny_qwen_image: Path):
    worker = make_worker(tiny_qwen_image)
    assert dist.get_backend() == "gloo"
    assert torch.get_num_threads() == 1  # of a thousand ranks on this machine
    assert isinstance(worker.trainer.loss_fn, DiffusionLoss)
    assert worker.engine.wire_dtype == torch.float32  # rollout.dtype


def test_one_update_is_one_step_on_the_whole_batch(environment: None, tiny_qwen_image: Path, batch: TensorDict):
    worker = make_worker(tiny_qwen_image)
    metrics = worker.update(batch)
    assert worker.engine.state.num_updates == 1
    assert metrics["ratio_deviation_max"] == 0.0
    assert metrics["num_rows"] == 18
    assert metrics["lr"] == pytest.approx(1e-3 * 1 / 4)  # warm-up: 0 for the first step, then a quarter
    assert "perf/max_memory_allocated_gb" in metrics
    engine = make_engine(tiny_qwen_image, optim={"lr_warmup_steps": 4})
    train(engine, batch)
    assert_equal(weights(worker.engine), weights(engine))


def test_mini_batches_and_epochs_recompute_old_log_probs(environment: None, tiny_qwen_image: Path, batch: TensorDict):
    worker = make_worker(tiny_qwen_image, prompts_per_update=1, epochs=2)
    worker.engine.optimizer.param_groups[0]["lr"] = 1e-3  # no warm-up, so that the first step moves
    metrics = worker.update(batch)
    assert worker.engine.state.num_updates == 4
    assert metrics["num_rows"] == 2 * 18
    assert metrics["ratio_deviation_max"] > 1e-5
    assert metrics["lr"] == pytest.approx(1e-3 / 4)  # moved once


@pytest.mark.parametrize(("loss", "num_forwards"), [("flow_grpo", 2), ("decoupled_ppo", 2), ("tis", 0), ("gspo", 0)])
def test_mini_batches_compute_old_log_probs_for_losses_that_read_them(
    environment: None, tiny_qwen_image: Path, batch: TensorDict, loss: str, num_forwards: int
):
    worker = make_worker(tiny_qwen_image, prompts_per_update=1, loss_name=loss)
    infer, calls = worker.engine.infer_batch, []
    worker.engine.infer_batch = lambda data: calls.append(data) or infer(data)  # type: ignore[method-assign]
    worker.update(batch)
    assert len(calls) == num_forwards


def test_recomputed_log_probs_give_a_first_ratio_of_exactly_one(environment: None, tiny_qwen_image: Path):
    worker = make_worker(tiny_qwen_image, old_log_probs="recompute", tsp={"samples_per_tile": 2, "steps_per_tile": 2})
    metrics = worker.update(with_mask(make_batch(tiny_qwen_image, group_size=3), [1, 0, 1, 1, 0, 1]))
    assert metrics["num_rows"] == 12
    assert metrics["ratio_deviation_max"] == metrics["ratio_deviation_min"] == 0.0


def test_log_probs_come_back_in_verl_s_form(environment: None, tiny_qwen_image: Path, batch: TensorDict):
    output = make_worker(tiny_qwen_image).trainer.infer_batch(batch)
    assert output.batch_size == torch.Size([6])
    torch.testing.assert_close(output["log_probs"], batch["log_probs"], rtol=0, atol=2e-6)
    assert tu.get(output, "metrics")["loss"] == 0


def test_average_is_exported_while_asked_for(environment: None, tiny_qwen_image: Path, batch: TensorDict):
    worker = make_worker(tiny_qwen_image, ema={"enable": True, "every_steps": 100})
    start = weights(worker.engine)
    worker.engine.optimizer.param_groups[0]["lr"] = 1e-3
    worker.update(batch)
    trained = weights(worker.engine)
    worker.export_average(True)
    assert_equal(weights(worker.engine), start)
    worker.export_average(False)
    assert_equal(weights(worker.engine), trained)
    assert any(not torch.equal(value, start[name]) for name, value in trained.items())


@pytest.mark.parametrize("name", ["init_model", "update_actor", "compute_log_prob"])
def test_dispatch_is_verl_s(name: str):
    def dispatch(worker: type) -> object:
        mode = getattr(getattr(worker, name), MAGIC_ATTR)["dispatch_mode"]
        return {key: (part.func, part.args) for key, part in mode.items()} if isinstance(mode, dict) else mode

    assert dispatch(DiffusionWorker) == dispatch(ActorRolloutRefWorker)


def test_metrics_of_updates_combine_by_name():
    outputs = [
        {"loss": 1.0, "gap_max": [2.0, 2.0], "gap_min": [0.0, 0.0], "num_rows": [4.0, 4.0]},
        {"loss": 3.0, "gap_max": [1.0, 1.0], "gap_min": [-1.0, -1.0], "num_rows": [2.0, 2.0], "lr": 0.5},
    ]
    assert combine_updates(outputs) == {"loss": 2, "gap_max": 2, "gap_min": -1, "num_rows": 6, "lr": 0.5}
    assert math.isnan(combine_updates([{"grad_norm": math.nan}])["grad_norm"])
