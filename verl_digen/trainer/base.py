# SPDX-License-Identifier: Apache-2.0
"""Base of the trainers of both placements: processes, prompts, validation, checkpoints, metrics.

    fit (verl) -> on_step_begin, step, on_step_end, ... (verl's hooks) -> _compute_metrics

Invariant: weight version = logical batches trained = verl's `global_steps`.
"""

import logging
import os
import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import ray
from omegaconf import open_dict
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils.debug import marked_timer

from verl_digen.agent_loop.server_manager import DiffusionServerManager
from verl_digen.algorithms.objectives import find_objective
from verl_digen.config import digen_config
from verl_digen.config.placement import TypedPools, check_placement
from verl_digen.config.pool_sizes import has_reward_model
from verl_digen.data.rows import prompt_rows
from verl_digen.data.splits import name_splits
from verl_digen.engine.checkpoint import remove_earlier
from verl_digen.engine.copies import AVERAGE, CURRENT
from verl_digen.engine.driver_checkpoint import (
    DriverState,
    digest,
    export_checkpoint,
    load_driver_state,
    load_open_prompts,
    publish,
    save_driver_state,
    save_run_description,
)
from verl_digen.engine.worker import DiffusionWorker
from verl_digen.errors import DeadlineMissed, RunStopped, plain
from verl_digen.observe.health import gap_metrics
from verl_digen.observe.metrics import training_metrics
from verl_digen.observe.run_files import STOP, checkpoint_dir
from verl_digen.processes.deadlines import Bound, Deadlines
from verl_digen.processes.relays import Route, end_relays, ranks_of
from verl_digen.processes.supervision import LoopThread, Supervision, within
from verl_digen.reward.manager import DiffusionRewardLoopManager
from verl_digen.reward.named import find as find_reward
from verl_digen.rollout.registry import TRAINER
from verl_digen.store.client import cancel_calls
from verl_digen.store.keys import TRAIN, group_uid
from verl_digen.store.samples import to_batch
from verl_digen.trainer.encoding import encode_before
from verl_digen.trainer.nodes import fetch_on_all_nodes, keep_for_good
from verl_digen.trainer.replicas import Replicas, required_processes
from verl_digen.trainer.run_output import RunOutput
from verl_digen.trainer.step_result import StepResult, check_log_prob_gap, result_metrics, utilisation
from verl_digen.trainer.updates import TrainerRanks
from verl_digen.trainer.validation import Validation, allow_no_prompts, take_all_steps
from verl_digen.trainer.watch import RewardWatch
from verl_digen.types import PromptRow

REWARD_POOL = "reward_pool"
"""verl's name of the pool of `reward.reward_model`."""

logger = logging.getLogger(__name__)
logging.getLogger("verl_digen").setLevel(os.getenv("VERL_LOGGING_LEVEL", "INFO"))


class DiffusionTrainer(PPOTrainerSync):
    """verl's synchronous trainer with our processes, and `_run_step` in place of its step."""

    agent_loop_manager: Any
    checkpoint_manager: Any
    train_dataset: Any

    _enable_hybrid_replicas = True
    """verl's switch: replicas on the trainer's devices."""

    # verl's base class branches on this name and reads trainer.v1[name]; ours behave as "sync" does
    trainer_mode = property(lambda self: "sync", lambda self, value: None)  # type: ignore[assignment]

    def __init__(self, config: Any):
        allow_no_prompts(config)
        take_all_steps(config)
        name_splits(config)
        self.digen = digen_config(config)
        super().__init__(config)
        self.run_dir = Path(config.trainer.default_local_dir)
        self._num_prompts_drawn = 0
        self._drawn: list[PromptRow] = []
        """Prompts that were drawn and not used yet."""
        self._started_s = time.time()
        self._first_step: int | None = None
        self._step_began_s = 0.0
        """Unix seconds, on the clock of the timeline."""
        os.environ.setdefault("TENSORBOARD_DIR", str(self.run_dir / "tensorboard"))
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self._output = RunOutput(config, self.digen, self.run_dir)
        self._watch = RewardWatch(self.digen.reward, self.run_dir)

    # -- setting up ---------------------------------------------------------------------------------------
    def init(self) -> None:
        """Start all processes, load the models, send the first weights (verl's `init`). DeadlineMissed after
        `digen.deadlines.setup_s`."""
        bound = Bound(self.digen.deadlines.setup_s, "digen.deadlines.setup_s")
        within(bound, self._start, what="starting the processes and loading the models")

    def _start(self) -> None:
        super().init()
        keep_for_good(self.actor_rollout_wg.workers)

    def _init_resource_pool_mgr(self) -> None:
        # not above: an agent loop worker, which imports verl's trainers and so ours, would import its own module again
        from verl_digen.agent_loop.manager import start_workers

        encode_before(self.config, self.digen, (self.train_dataset, self.val_dataset))
        # while the ranks start: importing verl takes each worker many seconds, and needs no replica
        self._loop_workers = start_workers(self.config.actor_rollout_ref.rollout.agent.num_workers)
        super()._init_resource_pool_mgr()
        self.role_worker_mapping = dict.fromkeys(self.role_worker_mapping, ray.remote(DiffusionWorker))
        spec = self.resource_pool_manager.resource_pool_spec
        self.resource_pool_manager = TypedPools(
            # the servers of a reward model have their devices by the time that verl counts what is free
            {name: nodes for name, nodes in spec.items() if name != REWARD_POOL or not has_reward_model(self.config)},
            self.resource_pool_manager.mapping,
            accelerator=self.digen.placement.trainer_accelerator,
        )

    def _setup(self) -> None:
        scores_groups = any(find_reward(entry).scope == "group" for entry in self.digen.reward.entries)
        self._supervision = Supervision(
            Deadlines(self.digen.deadlines, self.digen.reward.score_s, scores_groups),
            loop=LoopThread("driver"),
            step=lambda: self.global_steps,
            end_silent_replicas=lambda: self._replicas.end_silent(),
            end_all=self._end_all,
            cancel_queue_calls=cancel_calls,
        )
        check_placement(self.config, self.digen, is_disaggregated=not self._enable_hybrid_replicas)
        fetch_on_all_nodes(self.config, is_disaggregated=not self._enable_hybrid_replicas)
        # Ours first: its workers start while trainer ranks and replicas do. verl builds its own inside _setup, from a
        # module global: let it build one without workers and servers, and put ours in its place.
        reward_loop_manager = DiffusionRewardLoopManager(self.config)
        reward, model = self.config.reward, self.config.reward.reward_model
        num_reward_workers, has_reward_model = reward.num_workers, model.enable
        with open_dict(self.config):
            reward.num_workers, model.enable = 0, False
            super()._setup()
            reward.num_workers, model.enable = num_reward_workers, has_reward_model
        self.reward_loop_manager = reward_loop_manager
        draws_itself = self.config.actor_rollout_ref.rollout.name == TRAINER
        self.llm_server_manager = DiffusionServerManager.adopt(self.llm_server_manager, keeps_one_server=draws_itself)
        self._rank_processes = ranks_of(self.actor_rollout_wg, answer_s=self.digen.deadlines.answer_s)
        self._ranks = TrainerRanks(self._rank_processes)
        self._validation = Validation(self.config, self.digen, self._supervision)

    def get_llm_client(self) -> Any:
        """verl's `get_llm_client`; its main makes the manager of the agent loop workers with what this client holds."""
        client: Any = super().get_llm_client()
        client.loop_workers, self._loop_workers = self._loop_workers, []
        return client

    @abstractmethod
    async def _start_replica(self, number: int) -> Any:
        """Start a replica in place of a lost one; `number` counts the replicas of the run."""

    def fit(self, agent_loop_manager: Any) -> None:
        """Run verl's loop. RunStopped if a remote task failed or its process died, or a deadline was missed."""
        with self._supervision.ends_explained():
            self._supervision.watch_processes(required_processes(agent_loop_manager.agent_loop_workers))
            super().fit(agent_loop_manager)
            self._validation.drawing.finish()
            self._output.finish()

    @cached_property
    def _replicas(self) -> Replicas:
        return Replicas(
            self.checkpoint_manager,
            self.llm_server_manager,
            self.digen.deadlines,
            self._supervision.loop,
            workers=self._route_to_workers,
            start=self._start_replica,
            max_restarts=self.digen.rollout.max_restarts,
        )

    @cached_property
    def _route_to_workers(self) -> Route:
        """The way to the replicas' workers: of weights, and of signs of life."""
        return Route(self.digen.deadlines.answer_s)

    def _end_all(self) -> None:
        for worker in self.actor_rollout_wg.workers:
            ray.kill(worker)
        end_relays(self._rank_processes)
        self._replicas.end_all()

    # -- prompts ------------------------------------------------------------------------------------------
    def _take_prompts(self, count: int) -> list[PromptRow]:
        """Take the next prompts; first those that the run before a resume had drawn and not trained."""
        while len(self._drawn) < count:
            self._drawn += self._draw_batch()
        rows, self._drawn = self._drawn[:count], self._drawn[count:]
        return rows

    def _draw_batch(self) -> list[PromptRow]:
        """Draw verl's next batch, numbered so that noise and windows are equal in every run and after every resume."""
        first = self._num_prompts_drawn
        rows = [
            replace(row, uid=group_uid(first + number))
            for number, row in enumerate(prompt_rows(super()._fetch_one_gen_batch()))
        ]
        self._num_prompts_drawn += len(rows)
        return rows

    def _update_replicas(self, update: Callable[[], Any]) -> None:
        """Have `update` send the newest weights to every living replica."""
        with self._supervision.watch("publish", "sending weights to the replicas"):
            self._replicas.tell_living(update)

    # -- one step -----------------------------------------------------------------------------------------
    def step(self, metrics: dict, timing_raw: dict) -> Any:
        """Run one step, up to its last optimizer step; verl's loop ends it (`on_step_end`)."""
        self._result = result = self._run_step(timing_raw)
        limit = self.digen.rollout.max_log_prob_gap
        check_log_prob_gap(training_metrics(result.training), limit, step=self.global_steps)
        return to_batch(TRAIN, result.samples, self.global_steps)

    @abstractmethod
    def _run_step(self, timing_raw: dict) -> StepResult:
        """Generate, score and train the samples of a step."""

    def _compute_metrics(self, batch: Any, metrics: dict, timing_raw: dict, global_steps: int, epoch: int) -> None:
        saving_s = timing_raw.get("save_checkpoint", 0.0)
        found = result_metrics(
            self._result,
            trained_version=global_steps - 1,
            step_s=timing_raw["step"] - saving_s,
            sync_s=timing_raw["update_weights"],
            num_devices=self._get_n_gpus_for_throughput(),
            training=self._training_intervals(),
            since_s=self._step_began_s,
        )
        found |= utilisation(self._result, found, num_steps=self.digen.num_generation_steps, devices=self._pool_devices)
        found |= {
            **gap_metrics(found, self._output.clip_width),
            "perf/save_s": saving_s,
            **self._replicas.metrics(published=global_steps),
            "training/global_step": global_steps,
            "training/epoch": epoch,
        }
        metrics.update(found)
        self._output.on_step(
            global_steps,
            metrics,
            self._result.samples,
            self._wandb,
            num_steps=self.total_training_steps,
            remaining_s=self._remaining_s(global_steps),
        )

    @property
    def _wandb(self) -> Any | None:
        """The module `wandb` of verl's tracker; None if the run does not log there."""
        return self.logger.logger.get("wandb")

    def _training_intervals(self) -> Sequence[tuple[float, float]] | None:
        """(start, end) of the engine's calls of the step, if they overlapped generation; else None."""
        return None

    def _device_counts(self) -> dict[str, int]:
        """Pool -> number of devices; here both pools are the same devices."""
        return dict.fromkeys(("trainer", "generator"), self._get_n_gpus_for_throughput())

    @cached_property
    def _pool_devices(self) -> dict[str, tuple[int, str | None]]:
        names = {"trainer": self.actor_rollout_wg.device_name()[0], "generator": self._replicas.device()}
        counts = self._device_counts()
        return {pool: (counts[pool], name) for pool, name in names.items()}

    def _remaining_s(self, step: int) -> float:
        """Estimate the time to the end from the pace since this process's first step, validations included."""
        if self._first_step is None:
            self._first_step = step
            self._started_s = time.time() - self.timing_raw["step"]
        done = step - self._first_step + 1
        return (time.time() - self._started_s) / done * (self.total_training_steps - step)

    # -- validation ---------------------------------------------------------------------------------------
    def on_validate_begin(self) -> None:
        if self._validated_policy != self._behaviour:
            self._serve(self._validated_policy)

    def on_validate_end(self) -> None:
        if self._validated_policy != self._behaviour:
            self._serve(self._behaviour)

    @property
    def _behaviour(self) -> str:
        """Policy that generates training samples."""
        return find_objective(self.digen.loss_name).behaviour

    @property
    def _validated_policy(self) -> str:
        """Policy that validation draws with. With stale samples the replicas are busy with the next batch, and keep
        theirs."""
        if self.digen.staleness.max_versions > 0:
            return self._behaviour
        return AVERAGE if self.digen.ema.validate else CURRENT

    def _serve(self, policy: str) -> None:
        """Have the replicas generate with the weights of `policy`."""
        with self._supervision.watch("publish", f"exporting the weights of policy {policy}"):
            self.actor_rollout_wg.export_policy(policy)
        self._update_replicas(lambda: self.checkpoint_manager.update_weights(self.global_steps))

    def _validate(self) -> dict[str, float]:
        generate = self.agent_loop_manager.generate_sequences
        metrics = self._validation.run(self.val_dataloader, generate, step=self.global_steps, wandb=self._wandb)
        metrics |= self._watch_rewards(metrics)
        if not self._step_began_s:  # before the first step; later ones are part of their step's metrics
            self._output.on_validation(self.global_steps, metrics)
        return metrics

    def _watch_rewards(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Compare the gold rewards of a validation with the trained reward -> `hacking/*`; may end the run's loop."""
        if not self.digen.reward.golds:
            return {}
        watched, stops = self._watch.observe(self.global_steps, metrics)
        if self.digen.reward.stop_on_hacking:
            with self._supervision.watch("files", "keeping the checkpoint of the best validation"):
                self.actor_rollout_wg.keep_checkpoints(self._watch.kept_checkpoints)
        if stops:
            self.total_training_steps = self.global_steps  # verl's loop ends after this step
        return watched

    def _log_rollout_data(self, batch: Any, timing_raw: dict, rollout_data_dir: str) -> None:
        """Write prompts, seeds, rewards and their parts of a step as JSONL to `trainer.rollout_data_dir`."""
        tags = self._result.tags
        names = dict.fromkeys(name for tag in tags for name in tag.parts)
        parts = {f"reward/{name}": [tag.parts.get(name) for tag in tags] for name in names}
        with marked_timer("dump_rollout_generations", timing_raw):
            self._dump_generations(
                inputs=[tag.prompt for tag in tags],
                outputs=[f"seed {tag.facts.seed}" for tag in tags],
                gts=[None] * len(tags),
                scores=[tag.reward for tag in tags],
                reward_extra_infos_dict={"key": list(self._result.samples)} | parts,
                dump_path=rollout_data_dir,
            )

    # -- checkpoint and resume ----------------------------------------------------------------------------
    def _end_if_asked(self) -> None:
        """End the run after this step, where `RUN_DIR/stop` asks for it, and save it if the run saves at all."""
        stop = self.run_dir / STOP
        if stop.exists():
            stop.rmdir() if stop.is_dir() else stop.unlink()
            self.total_training_steps = self.global_steps  # verl's loop ends after this step
            if self.config.trainer.save_freq > 0 and "save_checkpoint" not in self.timing_raw:
                with marked_timer("save_checkpoint", self.timing_raw):
                    self._save_checkpoint()

    def _save_checkpoint(self) -> None:
        """Write verl's checkpoint; the pointer is replaced only when everything is on disk, and an only checkpoint is
        removed only after that."""
        step_dir = checkpoint_dir(self.run_dir, self.global_steps)
        num_kept = self.config.trainer.max_actor_ckpt_to_keep
        try:
            with self._supervision.watch("files", "writing the checkpoint"):
                self.actor_rollout_wg.save_checkpoint(
                    str(step_dir / "actor"), None, self.global_steps, max_ckpt_to_keep=num_kept
                )
            driver = DriverState(self._num_prompts_drawn, digest(self.train_dataset.prompts))
            save_driver_state(step_dir, driver, self.train_dataloader.state_dict(), self._open_prompts())
            save_run_description(step_dir, self.config)
            if "hf_model" in self.config.actor_rollout_ref.actor.checkpoint.save_contents:
                export_checkpoint(step_dir)
            publish(self.run_dir, self.global_steps)
            if num_kept == 1:
                kept = self._watch.kept_checkpoints if self.digen.reward.stop_on_hacking else ()
                remove_earlier(step_dir / "actor", 0, kept)
        except DeadlineMissed:
            raise
        except (OSError, RuntimeError) as error:
            raise RunStopped(
                f"the checkpoint of step {self.global_steps} could not be written under trainer.default_local_dir="
                f"{str(self.run_dir)!r} ({plain(error)}); make room on that disk, or name a folder on another "
                "that all nodes mount; older checkpoints are untouched"
            ) from error
        self.checkpoint_callback.on_save(
            trainer=self, global_step=self.global_steps, checkpoint_dir=str(step_dir), async_save=False
        )

    def _open_prompts(self) -> Sequence[PromptRow]:
        """Prompts that were drawn and not trained by the end of a step."""
        return self._drawn

    def _load_checkpoint(self) -> None:
        self.global_steps = 0  # verl's method says the same, after the watch has asked
        trainer = self.config.trainer
        if trainer.resume_from_path is not None:  # verl reads the step at its end
            trainer.resume_from_path = str(Path(trainer.resume_from_path))
        try:
            with self._supervision.watch("files", "reading a checkpoint"):
                super()._load_checkpoint()
        except ValueError as error:
            raise RunStopped(str(plain(error))) from error
        rows = self._output.keep_until(self.global_steps)
        if self.global_steps > 0:
            step_dir = Path(trainer.resume_from_path or checkpoint_dir(self.run_dir, self.global_steps))
            state = load_driver_state(step_dir)
            self._num_prompts_drawn = state.num_prompts_drawn
            self._drawn = load_open_prompts(step_dir)
            if state.drawn_from != digest(self.train_dataset.prompts):
                self._init_dataloader()
                logger.warning(
                    "data.train_files has other prompts than those that %s was drawn from: they are drawn from their "
                    "start, after %d that were drawn before",
                    *(step_dir, len(self._drawn)),
                )
            self._watch.load(rows)
            if self.digen.reward.stop_on_hacking:
                self.actor_rollout_wg.keep_checkpoints(self._watch.kept_checkpoints)
            logger.info("resumed from %s after %d steps", step_dir, self.global_steps)
