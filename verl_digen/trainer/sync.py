# SPDX-License-Identifier: Apache-2.0
"""The colocated, synchronous trainer: verl's v1 loop with the token-level parts replaced.

    fit (verl) -> step (verl) -> _step_once (verl):

    submit P prompts ----> agent loop workers ----> replicas, reward workers      [P*G requests in flight]
         |                                               |
    GroupReplayBuffer.sample  <---- finished groups -----+   waits; replaces failed groups, bounded
         |
    _balance_batch            one fixed order of the samples, whatever order they finished in
    _compute_advantage        from the rewards in the tags; writes one number per sample
    _update_actor             the engine trains on the rows; one optimizer step per logical batch
         |
    on_step_end (verl)        version v+1 to every replica

| who waits | for whom | bound |
| --- | --- | --- |
| driver | agent loop workers (groups) | P groups, at most `digen.max_refills_per_step` replacements |
| agent loop worker | replica, then reward worker | its own samples |
| replica | no one: batches what is queued | callers wait, so P*G |

Invariants: weight version = committed optimizer steps; in one step every sample has version `global_steps - 1`.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import ray
import torch
import transfer_queue as tq
from omegaconf import open_dict
from ray.exceptions import RayError
from tensordict import TensorDict
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils import tensordict_utils as tu
from verl.utils.debug import marked_timer

from verl_digen.agent_loop.chunks import describe
from verl_digen.agent_loop.server_manager import AsyncDiffusionServerManager
from verl_digen.algorithms.advantages import group_advantages
from verl_digen.config import digen_config
from verl_digen.data.rows import prompt_batch, prompt_rows
from verl_digen.engine.worker import DiffusionWorker
from verl_digen.errors import DeadlineMissed, ProcessLost, RunStopped, plain
from verl_digen.observe.metrics import perf_metrics, reward_metrics, staleness_metrics, training_metrics
from verl_digen.observe.metrics_file import MetricsFile
from verl_digen.observe.progress import progress_line
from verl_digen.pipeline.conditions import CONDITION_PARTITION
from verl_digen.pipeline.keys import parse_key
from verl_digen.pipeline.queue_calls import cancel_calls, controller
from verl_digen.platforms.placement import TypedPools, check_placement
from verl_digen.reward.manager import DiffusionRewardLoopManager
from verl_digen.schedulers.deadlines import Bound, CallKind, Deadlines
from verl_digen.schedulers.types import TRAINER
from verl_digen.trainer.agreement import check_log_prob_gap
from verl_digen.trainer.checkpoint import (
    DriverState,
    load_driver_state,
    load_open_prompts,
    publish,
    save_driver_state,
    way_to_resume,
)
from verl_digen.trainer.heartbeats import Heartbeats
from verl_digen.trainer.loop_thread import LoopThread, within
from verl_digen.trainer.patience import Patience
from verl_digen.trainer.replay_buffer import GroupReplayBuffer
from verl_digen.trainer.replicas import (
    end_processes,
    forget_lost_replicas,
    replica_device,
    replica_metrics,
    silent_replicas,
    update_living_replicas,
)
from verl_digen.trainer.restarts import Restarts, start_colocated
from verl_digen.trainer.utilisation import ROW_FORWARD, PoolDevices, step_utilisation
from verl_digen.trainer.validation import allow_no_prompts, draw_pictures, validation_metrics, validation_uid
from verl_digen.trainer.watchdog import Watchdog
from verl_digen.types import TRAJECTORY_COLUMNS

logger = logging.getLogger(__name__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "INFO"))

NAME = "digen_colocated"
"""`trainer.v1.trainer_mode`."""


class FlowGRPOTrainerSync(PPOTrainerSync):
    """Colocated synchronous FlowGRPO (and relatives) on diffusion models."""

    replay_buffer: GroupReplayBuffer
    agent_loop_manager: Any
    checkpoint_manager: Any

    _enable_hybrid_replicas = True
    """verl's switch: replicas on the trainer's devices."""

    # verl's base class branches on this name and reads trainer.v1[name]; ours behaves as "sync" does
    trainer_mode = property(lambda self: "sync", lambda self, value: None)  # type: ignore[assignment]

    def __init__(self, config: Any):
        allow_no_prompts(config)
        super().__init__(config)
        self.digen = digen_config(config)
        self.run_dir = Path(config.trainer.default_local_dir)
        self._num_prompts_drawn = 0
        self._drawn: list[dict[str, Any]] = []
        """Prompts that were drawn and not used yet."""
        self._num_refills = 0
        self._pictures: Any = None
        self._started_s = time.time()
        self._first_step: int | None = None
        self._step_began_s = 0.0
        """Unix seconds, on the clock of the timeline."""
        os.environ.setdefault("TENSORBOARD_DIR", str(self.run_dir / "tensorboard"))
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self._metrics_file = MetricsFile(self.run_dir / "metrics.jsonl")

    # -- setting up ---------------------------------------------------------------------------------------
    def init(self) -> None:
        """Start all processes, load the models, send the first weights (verl's `init`).

        Raises:
            DeadlineMissed: it took longer than `digen.deadlines.setup_s`.
        """
        bound = Bound(self.digen.deadlines.setup_s, "digen.deadlines.setup_s")
        within(bound, super().init, what="starting the processes and loading the models")

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        for role in self.role_worker_mapping:
            self.role_worker_mapping[role] = ray.remote(DiffusionWorker)
        self.resource_pool_manager = TypedPools(
            self.resource_pool_manager.resource_pool_spec,
            self.resource_pool_manager.mapping,
            accelerator=self.digen.placement.trainer_accelerator,
        )

    def _setup(self) -> None:
        self._loop = LoopThread("driver")
        self._deadlines = Deadlines(self.digen.deadlines)
        self._watchdog = Watchdog(
            self._loop.begin,
            end_silent_replicas=self._end_silent_replicas,
            end_all=self._end_all,
        )
        self._heartbeats = Heartbeats(self._loop.begin, self.digen.deadlines, cancel_calls)
        self._patience = Patience(self.digen.deadlines, self._loop.time)
        check_placement(self.config, self.digen, is_disaggregated=not self._enable_hybrid_replicas)
        # Ours first: its workers start while trainer ranks and replicas do. verl builds its own inside _setup, from a
        # module global: let it build one without workers, and put ours in its place.
        reward_loop_manager = DiffusionRewardLoopManager(self.config)
        reward = self.config.reward
        num_reward_workers = reward.num_workers
        with open_dict(self.config):
            reward.num_workers = 0
            super()._setup()
            reward.num_workers = num_reward_workers
        self.reward_loop_manager = reward_loop_manager
        self.llm_server_manager = AsyncDiffusionServerManager.adopt(self.llm_server_manager)
        self._restarts = self._make_restarts()

    def _make_restarts(self) -> Restarts:
        """Make the object that restarts replicas; needs the first ones."""
        return Restarts(
            self._loop.begin,
            self._start_replica,
            num_replicas=len(self.checkpoint_manager.replicas),
            max_restarts=self.digen.rollout.max_restarts,
            start_s=self.digen.deadlines.start_s,
        )

    async def _start_replica(self, number: int) -> Any:
        """Start a replica for the first rank without one."""
        return await start_colocated(
            self.llm_server_manager, self._ranks_without_replica.pop(0), self.digen.deadlines.start_s
        )

    # -- deadlines ----------------------------------------------------------------------------------------
    @contextmanager
    def _watch(self, kind: CallKind, what: str) -> Iterator[None]:
        """Bound blocking calls of verl's, and learn from their durations."""
        began_s = self._loop.time()
        with self._watchdog.watch(f"step {self.global_steps}: {what}", self._deadlines.bound(kind, TRAINER)):
            yield
        self._deadlines.observe(kind, TRAINER, seconds=self._loop.time() - began_s)

    @contextmanager
    def _watch_files(self, what: str) -> Iterator[None]:
        """Bound the writing or reading of a checkpoint."""
        bound = Bound(self.digen.deadlines.save_s, "digen.deadlines.save_s")
        with self._watchdog.watch(what, bound):
            yield

    async def _end_silent_replicas(self) -> list[str]:
        silent = await silent_replicas(self.checkpoint_manager.replicas, self.digen.deadlines)
        for replica in silent:
            end_processes(replica)
        return [replica.server_address for replica in silent]

    def _end_all(self) -> None:
        for worker in self.actor_rollout_wg.workers:
            ray.kill(worker)
        for replica in self.checkpoint_manager.replicas:
            end_processes(replica)

    def fit(self, agent_loop_manager: Any) -> None:
        """Run verl's loop.

        Raises:
            RunStopped: a remote task failed or its process died, or a deadline was missed. The message says how to
                resume.
        """
        with self._ends_explained():
            self._watch_processes(agent_loop_manager.agent_loop_workers)
            super().fit(agent_loop_manager)

    @contextmanager
    def _ends_explained(self) -> Iterator[None]:
        """Raise any exception that ends the run as RunStopped, with the way to resume."""
        try:
            yield
        except (DeadlineMissed, ProcessLost) as error:
            raise RunStopped(f"{error}; {way_to_resume(self.run_dir)}") from error
        except (RayError, CancelledError) as error:
            if self._heartbeats.lost is not None:  # it ended the call
                raise RunStopped(f"{self._heartbeats.lost}; {way_to_resume(self.run_dir)}") from error
            if isinstance(cause := plain(error), RunStopped):
                raise cause from error
            logger.error("step %d failed", self.global_steps, exc_info=error)
            raise RunStopped(
                f"step {self.global_steps} failed: {describe(error)}; {way_to_resume(self.run_dir)}"
            ) from error

    def _watch_processes(self, agent_loop_workers: Sequence[Any]) -> None:
        """Detect lost processes wherever the driver waits."""
        self._heartbeats.watch("TransferQueue's controller", controller())
        for number, worker in enumerate(agent_loop_workers):
            self._heartbeats.watch(f"agent loop worker {number}", worker)

        def on_poll(num_ended: int) -> None:
            self._heartbeats.check()
            what = f"the groups of step {self.global_steps} ({num_ended} have ended)"
            self._patience.check(num_ended, what)

        self.replay_buffer.on_poll = on_poll

    # -- prompts ------------------------------------------------------------------------------------------
    def _fetch_one_gen_batch(self) -> TensorDict:
        batch = self._draw_batch()
        self._drawn += prompt_rows(batch)
        return prompt_batch(self._take_prompts(len(batch)))

    def _take_prompts(self, count: int) -> list[dict[str, Any]]:
        """Take the next rows; first those that the run before a resume had drawn and not trained."""
        while len(self._drawn) < count:
            self._drawn += prompt_rows(self._draw_batch())
        rows, self._drawn = self._drawn[:count], self._drawn[count:]
        return rows

    def _draw_batch(self) -> TensorDict:
        """Draw verl's next batch, numbered so that noise and windows are equal in every run and after every resume."""
        batch = super()._fetch_one_gen_batch()
        uids = [f"p{self._num_prompts_drawn + index:08d}" for index in range(len(batch))]
        self._num_prompts_drawn += len(batch)
        tu.assign_non_tensor_stack(batch, "uid", uids)
        return batch

    def prepare_step(self) -> dict:
        self._num_refills = 0
        self._patience.restart()
        return super().prepare_step()

    def _add_prompts_to_generate(self, num_prompts: int) -> int:
        """Replace failed groups, up to the bound."""
        self._num_refills += num_prompts
        limit = self.digen.most_group_refills(self.config.data.train_batch_size)
        if self._num_refills > limit:
            raise RunStopped(
                f"step {self.global_steps}: {self._num_refills} groups failed, more than the {limit} that "
                f"digen.max_refills_per_step allows; the last failure was: {self.replay_buffer.last_error}"
            )
        logger.warning("replacing %d failed groups: %s", num_prompts, self.replay_buffer.last_error)
        return super()._add_prompts_to_generate(num_prompts)

    def on_sample_end(self) -> None:
        forget_lost_replicas(self.checkpoint_manager, self.llm_server_manager, self.digen.deadlines, self._loop.run)
        with self._watch("load", "putting the replicas to sleep"):
            super().on_sample_end()

    def on_step_end(self) -> None:
        self._restart_lost_replicas()
        self._update_replicas(super().on_step_end)

    def _restart_lost_replicas(self) -> None:
        """Start replicas in place of lost ones, while the others sleep."""
        living = {replica.replica_rank for replica in self.checkpoint_manager.replicas}
        self._ranks_without_replica = [rank for rank in range(self._restarts.num_replicas) if rank not in living]
        self._restarts.replace_lost(len(living))
        self._restarts.wait()
        self._add_started_replicas()

    def _add_started_replicas(self) -> None:
        """Add replicas that were started in place of lost ones: they get weights and validation samples from now on."""
        started = self._restarts.take_ready()
        if started:
            self.checkpoint_manager.add_replicas(started)
            servers = {replica.server_address: replica.server_handle for replica in started}
            added = self.llm_server_manager.global_load_balancer.add_servers.remote(servers)
            ray.get(added, timeout=self.digen.deadlines.answer_s)

    def _update_replicas(self, update: Callable[[], Any]) -> None:
        """Have `update` send the newest weights to every living replica."""
        with self._watch("publish", "sending weights to the replicas"):
            update_living_replicas(
                self.checkpoint_manager, self.llm_server_manager, update, self.digen.deadlines, self._loop.run
            )

    # -- one step -----------------------------------------------------------------------------------------
    def _balance_batch(self, batch: Any, metrics: dict, **unused: Any) -> Any:
        """Put the samples in one order, by group and index; verl shards them equally over the ranks."""
        order = sorted(range(len(batch.keys)), key=lambda position: parse_key(batch.keys[position]))
        batch.keys = [batch.keys[position] for position in order]
        batch.tags = [batch.tags[position] for position in order]
        return batch

    def _compute_old_log_prob(self, batch: Any, metrics: dict) -> Any:
        """Do nothing: the workers compute old log-probs, where the update's own first pass cannot serve as such."""
        return batch

    def _compute_advantage(self, batch: Any, metrics: dict) -> Any:
        rewards = torch.tensor([tag["reward"] for tag in batch.tags], dtype=torch.float32)
        config = self.digen.advantage
        advantages = group_advantages(rewards, _groups(batch), scale=config.scale, ddof=config.ddof, eps=config.eps)
        tq.kv_batch_put(
            keys=batch.keys,
            partition_id=batch.partition_id,
            fields=TensorDict({"advantages": advantages.unsqueeze(1)}, batch_size=len(batch.keys)),
        )
        metrics["advantage/abs_mean"] = advantages.abs().mean().item()
        metrics["advantage/abs_max"] = advantages.abs().max().item()
        return batch

    def _update_actor(self, batch: Any, metrics: dict) -> Any:
        batch.fields = [*TRAJECTORY_COLUMNS, "uid", "advantages", "rm_scores"]
        with self._watch("train", "training the batch"):
            output = self.actor_rollout_wg.update_actor(batch)
        metrics.update(training_metrics(output["metrics"]))
        check_log_prob_gap(metrics, self.digen.rollout.max_log_prob_gap, step=self.global_steps)
        tq.kv_clear(keys=list(dict.fromkeys(_groups(batch))), partition_id=CONDITION_PARTITION)
        return batch

    # -- what the user sees -------------------------------------------------------------------------------
    def _compute_metrics(self, batch: Any, metrics: dict, timing_raw: dict, global_steps: int, epoch: int) -> None:
        saving_s = timing_raw.get("save_checkpoint", 0.0)
        metrics.update(reward_metrics(batch.tags, _groups(batch)))
        metrics.update(staleness_metrics(batch.tags, trained_version=global_steps - 1))
        metrics.update(
            perf_metrics(
                batch.tags,
                step_s=timing_raw["step"] - saving_s,
                train_s=metrics.pop("actor/update_s"),
                sync_s=timing_raw["update_weights"],
                num_devices=self._get_n_gpus_for_throughput(),
                training=self._training_intervals(),
                since_s=self._step_began_s,
            )
        )
        if ROW_FORWARD in metrics:  # absent on virtual devices
            num_forwards = self._num_generated(len(batch.tags), metrics) * self.digen.sampling.num_steps
            metrics.update(step_utilisation(metrics, num_forwards=num_forwards, **self._pool_devices))
        metrics["perf/save_s"] = saving_s
        metrics["rollout/num_restarts"] = float(self._restarts.num_begun)
        metrics["rollout/refilled_groups"] = float(self._num_refills)
        metrics.update(replica_metrics(self.checkpoint_manager, self.digen.deadlines, published=global_steps))
        metrics["training/global_step"] = global_steps
        metrics["training/epoch"] = epoch
        self._metrics_file.append(global_steps, metrics)
        logger.info(
            progress_line(
                metrics,
                step=global_steps,
                num_steps=self.total_training_steps,
                remaining_s=self._remaining_s(global_steps),
            )
        )

    def _num_generated(self, num_samples: int, metrics: dict[str, float]) -> int:
        """Number of a step's samples that the replicas generated."""
        return num_samples

    def _device_counts(self) -> dict[str, int]:
        """Pool -> number of devices; here both pools are the same devices."""
        return dict.fromkeys(("trainer", "generator"), self._get_n_gpus_for_throughput())

    @cached_property
    def _pool_devices(self) -> dict[str, PoolDevices]:
        names = {
            "trainer": self.actor_rollout_wg.device_name()[0],
            "generator": replica_device(self.checkpoint_manager, self.digen.deadlines),
        }
        counts = self._device_counts()
        return {pool: PoolDevices(counts[pool], name) for pool, name in names.items()}

    def _training_intervals(self) -> list[tuple[float, float]] | None:
        """(start, end) of the engine's calls, if they overlapped generation; else None."""
        return None

    def _remaining_s(self, step: int) -> float:
        """Estimate the time to the end from the pace since this process's first step, validations included."""
        if self._first_step is None:
            self._first_step = step
            self._started_s = time.time() - self.timing_raw["step"]
        done = step - self._first_step + 1
        return (time.time() - self._started_s) / done * (self.total_training_steps - step)

    def on_validate_begin(self) -> None:
        if self.digen.ema.validate:
            self._serve(average=True)

    def on_validate_end(self) -> None:
        if self.digen.ema.validate:
            self._serve(average=False)

    def _serve(self, *, average: bool) -> None:
        """Have the replicas generate with the averaged weights, or with the current ones again."""
        with self._watch("publish", "exporting the averaged weights"):
            self.actor_rollout_wg.export_average(average)
        self._update_replicas(lambda: self.checkpoint_manager.update_weights(self.global_steps))

    def _validate(self) -> dict[str, float]:
        tags: dict[str, Any] = {}
        num_samples = 0
        for rows in self.val_dataloader:
            uids = [validation_uid(index) for index in rows["index"]]
            num_samples += len(uids) * self.config.actor_rollout_ref.rollout.val_kwargs.n
            batch = tu.get_tensordict(rows)
            tu.assign_non_tensor_stack(batch, "uid", uids)
            tu.assign_non_tensor_data(batch, "global_steps", self.global_steps)
            tu.assign_non_tensor_data(batch, "validate", True)
            status = {"is_prompt": True, "status": "pending", "global_steps": self.global_steps}
            tq.kv_batch_put(keys=uids, partition_id="val", tags=[dict(status) for _ in uids])
            self.agent_loop_manager.generate_sequences(batch)
            reasons = self._wait_for_validation(uids, tags)
            for reason in reasons:
                logger.warning("a validation prompt failed: %s", reason)
            if len(reasons) == len(uids):
                raise RunStopped(
                    f"validation at step {self.global_steps}: every prompt failed; the last: {reasons[-1]}"
                )
        self._finish_pictures()
        self._pictures = draw_pictures(
            self.run_dir,
            self.global_steps,
            tags,
            self.digen.num_logged_images,
            to_tensorboard="tensorboard" in self.config.trainer.logger,
        )
        metrics = validation_metrics(tags, num_samples)
        if self._first_step is None:  # before the first step; later ones are part of their step's metrics
            self._metrics_file.append(self.global_steps, metrics)
        logger.info(
            "validation after %d steps: reward %.4f over %d pictures",
            self.global_steps,
            metrics["val/reward"],
            len(tags),
        )
        if self.global_steps >= self.total_training_steps:
            self._finish_pictures()
        return metrics

    def _finish_pictures(self) -> None:
        """Wait for the pictures of the last validation, if there was one."""
        if self._pictures is not None:
            ray.get(self._pictures, timeout=self.digen.deadlines.save_s)

    def _wait_for_validation(self, uids: list[str], tags: dict[str, Any]) -> list[str]:
        """Wait for the prompts, move their samples' tags into `tags`, clear them; returns the reasons of failures.

        Raises:
            DeadlineMissed: no prompt ended for `digen.deadlines.no_progress_s`. A hung replica is detected earlier.
        """
        self._patience.restart()
        while True:
            self._heartbeats.check()
            statuses = tq.kv_list("val")["val"]
            ended = [uid for uid in uids if statuses[uid]["status"] in ("finished", "failure")]
            if len(ended) == len(uids):
                break
            what = f"validation after step {self.global_steps} ({len(ended)} of {len(uids)} prompts have ended)"
            self._patience.check(len(ended), what)
            time.sleep(self.replay_buffer.poll_interval)
        reasons = [statuses[uid]["error"] for uid in uids if statuses[uid]["status"] == "failure"]
        samples = {key: tag for key, tag in statuses.items() if "reward" in tag}
        tags.update(samples)
        tq.kv_clear(keys=[*uids, *samples], partition_id="val")
        return reasons

    def _log_rollout_data(self, batch: Any, timing_raw: dict, rollout_data_dir: str) -> None:
        """Write prompts, rewards and seeds of a step as JSONL to `trainer.rollout_data_dir`."""
        with marked_timer("dump_rollout_generations", timing_raw):
            self._dump_generations(
                inputs=[tag["prompt"] for tag in batch.tags],
                outputs=[f"seed {tag['seed']}" for tag in batch.tags],
                gts=[None] * len(batch.tags),
                scores=[tag["reward"] for tag in batch.tags],
                reward_extra_infos_dict={"key": list(batch.keys)},
                dump_path=rollout_data_dir,
            )

    # -- checkpoint and resume ----------------------------------------------------------------------------
    def _save_checkpoint(self) -> None:
        """Write verl's checkpoint; the pointer is replaced only when everything is on disk."""
        step_dir = self.run_dir / f"global_step_{self.global_steps}"
        try:
            with self._watch_files(f"writing the checkpoint of step {self.global_steps}"):
                self.actor_rollout_wg.save_checkpoint(
                    str(step_dir / "actor"),
                    None,
                    self.global_steps,
                    max_ckpt_to_keep=self.config.trainer.max_actor_ckpt_to_keep,
                )
            save_driver_state(
                step_dir,
                DriverState(self._num_prompts_drawn),
                self.train_dataloader.state_dict(),
                self._open_prompts(),
            )
            publish(self.run_dir, self.global_steps)
        except DeadlineMissed:
            raise
        except (OSError, RuntimeError) as error:
            raise RunStopped(
                f"the checkpoint of step {self.global_steps} could not be written under trainer.default_local_dir="
                f"{str(self.run_dir)!r} ({plain(error)}); the previous checkpoint is intact: free some space and start "
                "again with trainer.resume_mode=auto"
            ) from error
        self.checkpoint_callback.on_save(
            trainer=self, global_step=self.global_steps, checkpoint_dir=str(step_dir), async_save=False
        )

    def _open_prompts(self) -> Sequence[Mapping[str, Any]]:
        """Rows that were drawn and not trained by the end of a step."""
        return self._drawn

    def _load_checkpoint(self) -> None:
        with self._watch_files("reading a checkpoint"):
            super()._load_checkpoint()
        self._metrics_file.keep_until(self.global_steps)
        if self.global_steps > 0:
            step_dir = self.run_dir / f"global_step_{self.global_steps}"
            if self.config.trainer.resume_mode == "resume_path":
                step_dir = Path(self.config.trainer.resume_from_path)
            self._num_prompts_drawn = load_driver_state(step_dir).num_prompts_drawn
            self._drawn = load_open_prompts(step_dir)
            logger.info("resumed from %s after %d steps", step_dir, self.global_steps)


register_trainer(NAME)(FlowGRPOTrainerSync)  # not as a decorator: verl's erases the class's type


def _groups(batch: Any) -> list[str]:
    """Each sample's group id."""
    return [parse_key(key).uid for key in batch.keys]
