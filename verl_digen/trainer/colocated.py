# SPDX-License-Identifier: Apache-2.0
"""Generation and training in turn, on the same devices.

    submit P prompts ----> agent loop workers ----> replicas, reward workers      [P*G requests in flight]
         |                                               |
    GroupReplayBuffer.sample  <---- finished groups -----+   waits; replaces failed groups, bounded
         |
    replicas sleep
         |
    train_batch               mini-batches and epochs, one optimizer step each     (verl_digen.trainer.updates)
         |
    on_step_end               version v+1 to every replica, which wakes up

| who waits | for whom | bound |
| --- | --- | --- |
| driver | agent loop workers (groups) | P groups, at most `digen.max_refills_per_step` replacements |
| agent loop worker | replica, then reward worker | its own samples |
| replica | no one: batches what is queued | callers wait, so P*G |

Invariant: in one step every sample has version `global_steps - 1`.
"""

import logging
import time
from collections.abc import Mapping
from typing import Any

from tensordict import TensorDict
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.utils.debug import marked_timer

from verl_digen.algorithms.objectives import find_objective
from verl_digen.config.pool_sizes import num_trainer_devices
from verl_digen.data.rows import prompt_batch
from verl_digen.engine.ledger import batch_scale
from verl_digen.errors import RunStopped
from verl_digen.reward.named import pool_entries
from verl_digen.store.keys import CONDITIONS, TRAIN, SampleName
from verl_digen.store.samples import clear, from_batch, list_partition
from verl_digen.trainer.base import DiffusionTrainer
from verl_digen.trainer.generating import begin_generating
from verl_digen.trainer.replay_buffer import GroupReplayBuffer
from verl_digen.trainer.replicas import start_replica
from verl_digen.trainer.step_result import StepResult
from verl_digen.trainer.timelines import ColocatedTimeline, hosts_of
from verl_digen.trainer.turns import RewardProcesses, Turns, num_events, require_same_places, turn_metrics
from verl_digen.trainer.updates import fragment_samples, group_rewards, mini_batches, train_batch
from verl_digen.types import GroupTags, SampleTag

logger = logging.getLogger(__name__)

NAME = "digen_colocated"
"""`trainer.v1.trainer_mode`."""


class ColocatedTrainer(DiffusionTrainer):
    """Trainer of one pool. With `actor_rollout_ref.rollout.name=trainer` the one replica is the ranks themselves
    (`verl_digen.trainer.generating`)."""

    replay_buffer: GroupReplayBuffer
    _turns: Turns | None = None
    """None without timeshared rewards."""

    def __init__(self, config: Any):
        begin_generating(config)
        super().__init__(config)

    def _setup(self) -> None:
        super()._setup()
        self._served_version = self.global_steps
        """Version of the weights that the replicas have, once `init` is over."""
        if self.digen.reward.timeshared:
            self._start_timeshared_rewards()
        self._timeline = ColocatedTimeline(
            self.run_dir,
            [entry.name for entry in pool_entries(self.digen.reward)],
            num_devices=num_trainer_devices(self.config),
            after=self.global_steps,
            host=hosts_of("the trainer's ranks", self.actor_rollout_wg.workers, self.digen.deadlines.answer_s),
        )

    def _start_timeshared_rewards(self) -> None:
        """Start rewards that share the trainer's devices, while the replicas sleep, and let each load once."""
        workers = self.reward_loop_manager.start_timeshared(self.llm_server_manager.rollout_resource_pool)
        for name, of_reward in workers.items():
            require_same_places(name, of_reward, self.actor_rollout_wg.workers)
        self._reward_processes = RewardProcesses(workers, self.digen.deadlines)
        self._reward_processes.wake()  # makes them, so that broken weights are reported now
        self._reward_processes.sleep()
        self._turns = Turns(
            self._reward_processes, sleep_replicas=self._sleep_replicas, wake_replicas=self._wake_replicas
        )
        self._validation.on_batch = self._turns.generate
        self._validation.on_poll = self._turns.observe

    def fit(self, agent_loop_manager: Any) -> None:
        self.replay_buffer.on_poll = self._on_poll
        super().fit(agent_loop_manager)

    def _on_poll(self, num_ended: int) -> None:
        """Called while the driver waits for groups; ends the wait by raising."""
        what = f"the groups of step {self.global_steps} ({num_ended} have ended)"
        if self._turns is None:
            return self._supervision.check_progress(num_ended, what)
        prompts = list_partition(TRAIN).prompts.values()
        self._supervision.check_progress(num_events(prompts), what)
        self._turns.observe(prompts)

    # -- one step -----------------------------------------------------------------------------------------
    def _run_step(self, timing_raw: dict) -> StepResult:
        self._step_began_s = time.time()
        with marked_timer("gen", timing_raw):
            groups = self._generate()
        objective = find_objective(self.digen.loss_name)
        samples = fragment_samples(groups, self.digen.select, group_rewards(self.config, self.digen))
        self._ranks.compute_s = 0.0
        with (
            self._timeline.working("train"),
            marked_timer("update_actor", timing_raw),
            self._supervision.watch("train", "training the batch"),
        ):
            training = self._supervision.run(
                train_batch(
                    self._ranks,
                    mini_batches(samples, self.config.actor_rollout_ref.actor.ppo_mini_batch_size),
                    num_epochs=self.config.actor_rollout_ref.actor.ppo_epochs,
                    scale=batch_scale(samples, self.digen.advantage),
                    keeps_old=objective.reads_old_weights(self.digen.loss_settings),
                    old=self.digen.denominator,
                )
            )
        tags = [tag for indices in groups.values() for tag in indices.values()]
        clear(CONDITIONS, sorted({key for tag in tags for key in tag.turn_keys}))
        return StepResult(
            samples={sample.key: tag for sample, tag in zip(samples, tags, strict=True)},
            training=training,
            train_s=self._ranks.compute_s,
            num_refilled_groups=self._num_refills,
        )

    def _generate(self) -> Mapping[str, GroupTags]:
        """Have P groups generated and scored, then put the replicas to sleep."""
        self._num_refills = 0
        self._supervision.patience.restart()
        self._add_batch_to_generate()
        batch, _ = self.replay_buffer.sample(
            global_steps=self.global_steps, partition_id=TRAIN, batch_size=self.config.data.train_batch_size
        )
        self.on_sample_end()
        groups: dict[str, dict[int, SampleTag]] = {}
        for tag in sorted(from_batch(batch).values(), key=lambda tag: SampleName.of(tag.facts)):
            groups.setdefault(tag.facts.uid, {})[tag.facts.sample_index] = tag
        return groups

    def _compute_metrics(self, batch: Any, metrics: dict, timing_raw: dict, global_steps: int, epoch: int) -> None:
        turns = self._reward_processes.take_turns() if self._turns is not None else []
        metrics.update(turn_metrics(turns))
        extent = self._step_began_s, self._step_began_s + timing_raw["step"]
        self._timeline.write(global_steps, self._result.samples, turns, extent=extent)
        super()._compute_metrics(batch, metrics, timing_raw, global_steps=global_steps, epoch=epoch)

    def _validate(self) -> dict[str, float]:
        with self._timeline.working("validate"):
            metrics = super()._validate()
        if self._turns is not None and self._validated_policy == self._behaviour:
            self._turns.generate()
        elif self._turns is not None:
            self._turns.end()  # on_validate_end wakes the replicas, with the weights of the other policy
        return metrics

    # -- prompts: verl's hooks ----------------------------------------------------------------------------
    def _fetch_one_gen_batch(self) -> TensorDict:
        drawn = self._draw_batch()
        self._drawn += drawn
        return prompt_batch(self._take_prompts(len(drawn)))

    def _add_prompts_to_generate(self, num_prompts: int) -> int:
        """Replace failed groups, up to the bound, unless a retry cannot help: no reward worker or replica is left."""
        failure = self.replay_buffer.last_failure
        if failure.ends_run:
            raise RunStopped(failure.error)
        self._num_refills += num_prompts
        limit = self.digen.most_group_refills(self.config.data.train_batch_size)
        if self._num_refills > limit:
            raise RunStopped(
                f"step {self.global_steps}: {self._num_refills} groups failed, more than the {limit} that "
                f"digen.max_refills_per_step allows; the last failure was: {failure.error}"
            )
        logger.warning("replacing %d failed groups: %s", num_prompts, failure.error)
        return super()._add_prompts_to_generate(num_prompts)

    # -- replicas -----------------------------------------------------------------------------------------
    def on_sample_end(self) -> None:
        if self._turns is not None:
            self._turns.end()
        with self._supervision.watch("load", "putting the replicas to sleep"):
            self._replicas.tell_living(super().on_sample_end)

    def on_step_end(self) -> None:
        self._end_if_asked()
        self._restart_lost_replicas()
        with self._timeline.working("publish"):
            self._update_replicas(super().on_step_end)
        self._served_version = self.global_steps

    def _save_checkpoint(self) -> None:
        with self._timeline.working("save"):
            super()._save_checkpoint()

    def _sleep_replicas(self) -> None:
        with self._supervision.watch("load", "putting the replicas to sleep"):
            self._replicas.tell_living(self.checkpoint_manager.sleep_replicas)

    def _wake_replicas(self) -> None:
        """Wake the replicas in the middle of a step, with the weights that they had."""
        self._update_replicas(lambda: self.checkpoint_manager.update_weights(self._served_version))

    def _restart_lost_replicas(self) -> None:
        """Start replicas in place of lost ones, while the others sleep."""
        living = {replica.replica_rank for replica in self.checkpoint_manager.replicas}
        self._ranks_without_replica = [rank for rank in range(self._replicas.num_replicas) if rank not in living]
        self._replicas.replace_lost()
        self._replicas.wait_started()
        self._replicas.add_started()

    async def _start_replica(self, number: int) -> Any:
        """Start a replica for the first rank without one."""
        rank = self._ranks_without_replica.pop(0)
        return await start_replica(self.llm_server_manager, rank, self.digen.deadlines.first_s, on_ranks=True)


register_trainer(NAME)(ColocatedTrainer)  # not as a decorator: verl's erases the class's type
