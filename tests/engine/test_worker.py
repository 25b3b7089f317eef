# SPDX-License-Identifier: Apache-2.0
"""verl's worker around the engine, in this process and without Ray; conditions are passed in, not fetched."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf
from tensordict import TensorDict
from verl.single_controller.base.decorator import MAGIC_ATTR, Dispatch
from verl.utils import tensordict_utils as tu
from verl.workers.engine_workers import ActorRolloutRefWorker

from tests.engine.cases import REWARDS, Case
from tests.engine.harness import (
    all_picks,
    assert_equal,
    digen_section,
    fragment,
    log_probs,
    make_batch,
    make_engine,
    num_rows_of,
    perturb,
    read_samples,
    samples_of,
    train,
    weights,
    with_advantages,
)
from verl_digen.algorithms.rows import from_plain, numbers
from verl_digen.engine import worker as worker_module
from verl_digen.engine.rows import make_rows
from verl_digen.engine.verl_batches import pack_rows
from verl_digen.engine.worker import DiffusionWorker

GROUP_SIZE = 3
FP32 = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}


def make_config(path: Path, optim: Mapping[str, Any] = MappingProxyType({}), **digen) -> DictConfig:
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
    section.actor.optim.update(optim)
    section.actor.ppo_micro_batch_size_per_gpu = section.rollout.log_prob_micro_batch_size_per_gpu = 1
    section.rollout.name = "diffusers"
    section.rollout.n = GROUP_SIZE
    section.rollout.dtype = "float32"
    section.nccl_timeout = 777
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


def test_init_starts_gloo_and_shares_the_cores_and_the_average_is_exported_while_asked_for(
    environment: None, tiny_qwen_image: Path, batch: TensorDict
):
    worker = make_worker(tiny_qwen_image, ema={"enable": True, "every_steps": 100})
    assert dist.get_backend() == "gloo"
    group = dist.group.WORLD._get_backend(torch.device("cpu"))
    assert group.options._timeout == timedelta(seconds=777)
    assert torch.get_num_threads() == 1  # of a thousand ranks on this machine
    assert worker.engine.wire_dtype == torch.float32  # rollout.dtype
    start = weights(worker.engine)
    worker.engine.optimizer.param_groups[0]["lr"] = 1e-3
    train(worker.engine, batch)
    trained = weights(worker.engine)
    worker.export_policy("average")
    assert_equal(weights(worker.engine), start)
    worker.export_policy("current")
    assert_equal(weights(worker.engine), trained)
    assert any(not torch.equal(value, start[name]) for name, value in trained.items())


def test_fragments_are_one_update_on_the_whole_batch(
    environment: None, tiny_qwen_image: Path, monkeypatch: pytest.MonkeyPatch
):
    """Samples come from the batch; `tests/store` has TransferQueue."""
    batch = Case().make_batch(tiny_qwen_image)
    monkeypatch.setattr(worker_module, "fetch_samples", lambda points, partition, samples: read_samples(batch, samples))
    worker, engine = make_worker(tiny_qwen_image), make_engine(tiny_qwen_image, optim={"lr_warmup_steps": 4})
    groups = samples_of(batch, REWARDS)
    for _ in range(2):
        worker.begin(len(REWARDS), num_rows_of(groups), "train")
        counts = worker.accumulate(fragment(groups, "g0", "g1", "g2"))
        metrics = numbers(from_plain(worker.commit()))
        train(engine, with_advantages(batch, REWARDS, "batch", 5.0))
    assert counts["num_rows"] == 18 and counts["accumulate_s"] > 0
    assert metrics["lr"] == pytest.approx(1e-3 * 2 / 4)
    assert metrics["num_rows"] == 18 and metrics["ratio_deviation_max"] == 0.0 and metrics["num_fragments"] == 1
    assert {"loss", "grad_norm", "policy_loss", "num_skipped_updates", "perf/max_memory_allocated_gb"} <= metrics.keys()
    assert all(isinstance(value, float | int) for value in metrics.values())
    assert_equal(weights(worker.engine), weights(engine))


@pytest.mark.parametrize("name", ["begin", "accumulate", "assist", "commit", "abort"])
def test_every_rank_gets_the_same_call_and_none_blocks_the_driver(name: str):
    attributes = getattr(getattr(DiffusionWorker, name), MAGIC_ATTR)
    assert (attributes["dispatch_mode"], attributes["blocking"]) == (Dispatch.ONE_TO_ALL, False)  # pyright: ignore[reportAttributeAccessIssue]


def test_init_model_is_passed_to_every_rank_as_verls_is_after_the_port():
    ours, verls = (getattr(kind.init_model, MAGIC_ATTR) for kind in (DiffusionWorker, ActorRolloutRefWorker))
    assert verls["dispatch_mode"] == Dispatch.ONE_TO_ALL
    assert {**ours, "dispatch_mode": None} == {**verls, "dispatch_mode": None}
    group = SimpleNamespace(world_size=2, free_port=lambda: 20_001)
    assert ours["dispatch_mode"]["dispatch_fn"](group) == (([20_001, 20_001],), {})


# -- verl's methods on rows ---------------------------------------------------------------------------------
def test_verl_s_methods_train_and_evaluate_rows(environment: None, tiny_qwen_image: Path, batch: TensorDict):
    plain_steps = {"optimizer": "SGD", "lr": 0.1, "weight_decay": 0.0, "lr_warmup_steps": 0}
    worker = make_worker(tiny_qwen_image, optim=plain_steps, kl={"coef": 0.3}, loss={"clip_range": 0.5})
    other = make_worker(tiny_qwen_image, optim=plain_steps, kl={"coef": 0.3}, loss={"clip_range": 0.5})
    for engine in (worker.engine, other.engine):
        perturb(engine)
    samples = replace(read_samples(batch), advantages=batch["advantages"])
    rows = pack_rows(make_rows(worker.engine.points, samples, all_picks(samples)))
    reference = worker.compute_ref_log_prob(rows.copy())
    torch.testing.assert_close(reference["log_probs"], batch["log_probs"].flatten(), rtol=0, atol=2e-6)
    before = worker.compute_log_prob(tu.assign_non_tensor(rows.copy(), compute_loss=False))["log_probs"]
    expected = torch.cat(log_probs(worker.engine, batch))
    torch.testing.assert_close(before, expected, rtol=0, atol=1e-6)

    rows["old_log_probs"], compared = before, batch.copy()
    compared["old_log_probs"] = before.reshape(6, 3)
    keys = {"mini_batch_size": 9, "epochs": 1, "seed": 1, "dataloader_kwargs": {"shuffle": False}}
    metrics = tu.get(worker.update_actor(tu.assign_non_tensor(rows, **keys)), "metrics")
    for half in ([0, 1, 2], [3, 4, 5]):
        train(other.engine, tu.index_select_tensor_dict(compared, half))
    for name, value in weights(other.engine).items():
        torch.testing.assert_close(weights(worker.engine)[name], value, rtol=0, atol=2e-6)
    assert len(metrics["loss"]) == len(metrics["policy_loss"]) == 2
    assert metrics["lr"][-1] == other.engine.learning_rate()
