# SPDX-License-Identifier: Apache-2.0
"""verl's actor-rollout worker, training diffusion samples.

    begin(...), accumulate(fragment) ..., commit() | abort()       one logical batch = one optimizer step
      called identically on every rank with names and numbers; each rank fetches the samples of its own rows

    assist(requests)                                               in between: generate samples, current weights

    update_actor(samples of this rank)                             for several optimizer steps on the same samples
      conditions fetched by uid -> split into mini-batches -> per epoch and mini-batch: one optimizer step
      the learning rate moves once per call

Weight updates, checkpoints, rollout handles and dispatch are verl's.
"""

from __future__ import annotations

import logging
import os
import time
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_name
from verl.utils.profiler import DistProfiler
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

from verl_digen.engine.assistant import Assistant
from verl_digen.engine.engine import DiffusersFSDPEngine
from verl_digen.engine.fragment import FragmentSpec, fetch_samples
from verl_digen.engine.loss import DiffusionLoss
from verl_digen.pipeline.conditions import fetch_conditions
from verl_digen.platforms.device_name import accelerator_name
from verl_digen.rollout.registry import REPLICAS
from verl_digen.types import Generation, SampleRequest

logger = logging.getLogger(__name__)


def ensure_process_group() -> None:
    """Start the process group on a CPU before verl does: verl would name gloo twice and fail."""
    if get_device_name() == "cpu" and not dist.is_initialized():
        dist.init_process_group(
            backend="gloo",
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            init_method=os.environ.get("DIST_INIT_METHOD"),
        )


def share_cpu_cores(num_replicas: int) -> None:
    """Limit each rank's threads on a CPU to its share of the cores; every rank with all cores would be slow.

    Args:
        num_replicas: replicas on this node that generate while the ranks train.
    """
    if get_device_name() == "cpu":
        ranks_here = int(os.environ.get("RAY_LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // (ranks_here + num_replicas)))


class DiffusionWorker(ActorRolloutRefWorker):
    """See the module."""

    _assistant: Assistant
    """Exists only with `digen.tag.policy` other than off."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # pyright: ignore[reportAttributeAccessIssue] - a dynamic enum
    def init_model(self) -> None:
        """Build the engine and the rollout handle."""
        ensure_process_group()
        share_cpu_cores(0 if self._is_rollout else self.config.rollout.n_gpus_per_node)
        super().init_model()
        if self._is_actor:
            self.trainer.set_loss_fn(DiffusionLoss(self.engine.digen))
            self.engine.wire_dtype = PrecisionType.to_dtype(self.config.rollout.dtype)
            if self.engine.digen.tag.policy != "off":
                rollout = self.engine.digen.rollout
                self._assistant = Assistant(
                    self.engine,
                    latents_dtype=PrecisionType.to_dtype(rollout.latents_dtype),
                    decoder_dtype=self.engine.wire_dtype,
                )
        if self._is_rollout and self.config.rollout.name in REPLICAS:
            # our replicas load the checkpoint for any rollout.load_format, so an adapter needs no base sent first
            self.base_sync_done = True

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # pyright: ignore[reportAttributeAccessIssue]
    def export_average(self, enabled: bool) -> None:
        """Choose whether `update_weights` sends the EMA copy instead of the current weights, from now on."""
        self.engine.exports_average = enabled

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # pyright: ignore[reportAttributeAccessIssue]
    def device_name(self) -> str | None:
        """The accelerator's name; None on a CPU."""
        return accelerator_name()

    # -- one logical batch, fragment by fragment ----------------------------------------------------------
    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)  # pyright: ignore[reportAttributeAccessIssue]
    def begin(self, num_samples: int, num_rows: int, partition: str) -> None:
        """Open a logical batch, see `DiffusersFSDPEngine.begin`. Non-blocking: one reference per rank.

        Args:
            partition: TransferQueue partition that holds the samples' rows until the batch is closed.
        """
        self.engine.begin(num_samples, num_rows, fetch=partial(fetch_samples, partition))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)  # pyright: ignore[reportAttributeAccessIssue]
    @DistProfiler.annotate(color="red", role="actor_accumulate")
    def accumulate(self, fragment: FragmentSpec) -> dict[str, float]:
        """Add a fragment's gradient, see `DiffusersFSDPEngine.accumulate`. Returns its counts and `accumulate_s`.

        Non-blocking: one reference per rank. Counts are totals over all ranks, the same on every rank.
        """
        started_s = time.perf_counter()
        counts = self.engine.accumulate(fragment)
        return {**counts, "accumulate_s": time.perf_counter() - started_s}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)  # pyright: ignore[reportAttributeAccessIssue]
    @DistProfiler.annotate(color="blue", role="actor_assist")
    def assist(self, requests: tuple[SampleRequest, ...], version: int) -> list[Generation]:
        """Generate this rank's share of requests of one group, see `Assistant.generate`.

        Only with `digen.tag.policy` other than off. The prompt's conditions must be in TransferQueue.

        Args:
            version: weight version, recorded with the samples.
        """
        condition, negative_condition = fetch_conditions([requests[0].uid])[requests[0].uid]
        return self._assistant.generate(requests, condition, negative_condition, version=version)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)  # pyright: ignore[reportAttributeAccessIssue]
    @DistProfiler.annotate(color="red", role="actor_commit")
    def commit(self) -> dict[str, float]:
        """Take the optimizer step, see `DiffusersFSDPEngine.commit`. Returns metrics as `update` does. Non-blocking:
        one reference per rank."""
        outputs = self.engine.commit()
        metrics = self.trainer._postprocess_output(
            outputs, global_token_num=None, delta_time=0.0, forward_only=False, images_seqlens=None
        )
        return combine_updates([tu.get(metrics, "metrics")])

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)  # pyright: ignore[reportAttributeAccessIssue]
    def abort(self) -> None:
        """Close the logical batch as if it had never been, see `DiffusersFSDPEngine.abort`; one reference per rank at
        once, because a rank may hang in a collective with one that failed."""
        self.engine.abort()

    @property
    def trainer(self) -> TrainingWorker:
        """verl's worker around the engine; only in a worker with the actor's role."""
        assert self.actor is not None
        return self.actor

    @property
    def engine(self) -> DiffusersFSDPEngine:
        """The training engine of this rank."""
        engine = self.trainer.engine
        assert isinstance(engine, DiffusersFSDPEngine)
        return engine

    @property
    def mini_batch_size(self) -> int:
        """Samples of one optimizer step on this rank: ppo_mini_batch_size * rollout.n / ranks, rounded up."""
        num_samples = self.config.actor.ppo_mini_batch_size * self.config.rollout.n
        return -(-num_samples // self.engine.get_data_parallel_size())

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    @DistProfiler.annotate(color="blue", role="actor_compute_log_prob")
    def compute_log_prob(self, data: TensorDict) -> TensorDict:
        """`log_probs` [B, K] of the recorded steps under the current weights.

        Args:
            data: see `verl_digen.engine.rows.read_samples`, without conditions, which are fetched by uid.
        """
        return self.trainer.infer_batch(_with_conditions(data)).cpu()

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    @DistProfiler.annotate(color="red", role="actor_update", scheduled=True)
    def update_actor(self, data: TensorDict) -> TensorDict:
        """Train on this rank's samples; every rank has the same number. Returns `metrics` of `update`, and `update_s`.

        Args:
            data: see `verl_digen.engine.rows.read_samples`, without conditions, which are fetched by uid.
        """
        data = _with_conditions(data)
        started_s = time.perf_counter()
        metrics = self.update(data)
        metrics["update_s"] = time.perf_counter() - started_s
        return tu.get_tensordict(tensor_dict={}, non_tensor_dict={"metrics": metrics})

    def update(self, data: TensorDict) -> dict[str, float]:
        """Train `ppo_epochs` epochs over the mini-batches of `data`, in order, one optimizer step each.

        Old log-probs are computed first if later optimizer steps need them and `data` has no such column.

        Returns:
            Metrics, the same on all ranks; see `combine_updates`.
        """
        mini_batches = [
            tu.index_select_tensor_dict(data, indices)
            for indices in torch.arange(len(data)).split(self.mini_batch_size)
        ]
        num_updates = len(mini_batches) * self.config.actor.ppo_epochs
        with self.engine.train_mode():
            needs_old = self.engine.digen.denominator in ("first_pass", "recompute")
            if num_updates > 1 and needs_old and "old_log_probs" not in data:
                for mini_batch in mini_batches:
                    mini_batch["old_log_probs"] = self.engine.infer_batch(mini_batch)["model_output"]["log_probs"]
            outputs = []
            for number in range(num_updates):
                mini_batch = mini_batches[number % len(mini_batches)]
                tu.assign_non_tensor(
                    mini_batch, update_lr_scheduler=number == num_updates - 1, disable_auto_offload=True
                )
                outputs.append(tu.get(self.trainer.train_batch(mini_batch), "metrics"))
                self.trainer.profiler.step()
        return combine_updates(outputs)


def combine_updates(outputs: list[dict[str, Any]]) -> dict[str, float]:
    """Combine metrics of several optimizer steps: `_max` and `_min` by max and min, `num_*` by sum, others by mean.

    `rollout_*` compare with the log-probs of generation; they come from the first step: later ones train newer weights.

    Args:
        outputs: per metric a number, or a list with every rank's value, which are equal.
    """
    series: dict[str, list[float]] = {}
    for output in outputs:
        for name, value in output.items():
            series.setdefault(name, []).append(value[0] if isinstance(value, list) else value)
    return {name: _combine(name, values) for name, values in series.items()}


def _combine(name: str, values: list[float]) -> float:
    if name.startswith("rollout_"):
        return values[0]
    if name.endswith("_max"):
        return max(values)
    if name.endswith("_min"):
        return min(values)
    return sum(values) if name.startswith("num_") else sum(values) / len(values)


def _with_conditions(data: TensorDict) -> TensorDict:
    return tu.assign_non_tensor(data, conditions=fetch_conditions(list(tu.get(data, "uid"))))
