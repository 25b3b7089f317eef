# SPDX-License-Identifier: Apache-2.0
"""Generation and training at the same time, on separate pools; strictly on-policy but for `digen.staleness`.

    step          the conductor: chunks out, fragments in, one commit              (verl_digen.trainer.conductor);
                  then version v+1 to every replica, which takes it between two chunks
    checkpoint    written by the trainer's ranks (verl's loop), while replicas load v+1 and generate for the next step
    on_step_end   the timeline of the step to disk

The conductor runs in a thread of its own, so that replicas are fed between steps too. Prompts are drawn only while the
main thread waits for it, in a step or when weights are published: what a checkpoint says about prompts does not depend
on how far the next batch has come.

Invariant (tests/e2e): without stale samples the weights equal the colocated trainer's, to float tolerance.
"""

import itertools
import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.debug import marked_timer

from verl_digen.agent_loop.server_manager import DiffusionServerManager
from verl_digen.config.pool_sizes import num_data_parallel_ranks, num_reward_devices
from verl_digen.errors import ReplicasLost, describe
from verl_digen.observe.timeline.analysis import step_metrics
from verl_digen.observe.timeline.file import TimelineFile
from verl_digen.observe.timeline.interval import Interval, Lane
from verl_digen.observe.timeline.recorder import Recorder
from verl_digen.reward.named import pool_entries
from verl_digen.sampling.requests import batch_rules, condition_key, rows_per_group
from verl_digen.schedulers.durations import MeasuredDurations
from verl_digen.schedulers.planner import BatchPlanner
from verl_digen.schedulers.rules import BatchRules
from verl_digen.store.conditions import own_condition_keys
from verl_digen.store.keys import CONDITIONS, TRAIN, SampleName
from verl_digen.store.samples import clear
from verl_digen.trainer.base import DiffusionTrainer
from verl_digen.trainer.conductor import Conductor
from verl_digen.trainer.pools import GeneratorPool, TrainerPool
from verl_digen.trainer.published import BatchOutcome
from verl_digen.trainer.replicas import end_processes, start_replica
from verl_digen.trainer.staged import StagedCheckpointManager
from verl_digen.trainer.step_result import StepResult
from verl_digen.trainer.timelines import Joining, call_intervals, hosts_of
from verl_digen.trainer.updates import group_rewards
from verl_digen.types import PromptRow

logger = logging.getLogger(__name__)

NAME = "digen_disaggregated"
"""`trainer.v1.trainer_mode`."""


class DisaggregatedTrainer(DiffusionTrainer):
    """Trainer on separate pools."""

    # -- setting up ---------------------------------------------------------------------------------------
    def _setup(self) -> None:
        self._enable_hybrid_replicas = False  # verl's switch: no replicas on the trainer's devices
        super()._setup()
        server_manager: Any = DiffusionServerManager.create(config=self.config)  # verl awaits it by itself
        self.llm_server_manager = server_manager
        self.checkpoint_manager = StagedCheckpointManager(
            config=omega_conf_to_dataclass(self.config.actor_rollout_ref.rollout.checkpoint_engine),
            actor_wg=self.actor_rollout_wg,
            replicas=self.llm_server_manager.get_replicas(),
            ranks=self._rank_processes,
            route=self._route_to_workers,
            load_s=self.digen.deadlines.answer_s,
        )
        self._validation.replace_all_lost = self._replace_all_lost
        self._recorder = Recorder()
        self._driver = Lane("driver", 0, socket.gethostname(), 0)
        self._conductor: Conductor | None = None
        self._condition_keys: set[str] = set()
        """Keys of published conditions that are not cleared yet."""
        self._previous_intervals: list[Interval] = []
        self._reward_names = [entry.name for entry in pool_entries(self.digen.reward)]
        self._num_devices = self._device_counts()
        self._timeline_file = TimelineFile(self.run_dir / "timeline.jsonl", self._num_devices)
        self._timeline_file.keep_until(self.global_steps)

    def _device_counts(self) -> dict[str, int]:
        """Pool -> number of devices; pools without devices are left out."""
        rollout, num_reward = self.config.actor_rollout_ref.rollout, num_reward_devices(self.config, self.digen.reward)
        return {
            "trainer": self.config.trainer.nnodes * self.config.trainer.n_gpus_per_node,
            "generator": rollout.nnodes * rollout.n_gpus_per_node,
            **({"reward": num_reward} if num_reward else {}),
        }

    def _get_n_gpus_for_throughput(self) -> int:
        return sum(self._num_devices.values())

    def _rules(self) -> BatchRules:
        return batch_rules(
            self.digen,
            num_prompts=self.config.data.train_batch_size,
            group_size=self.config.actor_rollout_ref.rollout.n,
            num_trainer_ranks=num_data_parallel_ranks(self.config),
        )

    def _make_conductor(self) -> Conductor:
        """Make the conductor; needs the agent loop workers."""
        rollout = self.config.actor_rollout_ref.rollout
        num_prompts, first_batch = self.config.data.train_batch_size, self.global_steps - 1
        planner = BatchPlanner(
            self._rules(),
            MeasuredDurations(),
            first_batch=first_batch,
            num_batches=self.total_training_steps - first_batch,
        )
        host = hosts_of("the trainer's ranks", self.actor_rollout_wg.workers, self.digen.deadlines.answer_s)
        self._joined: list[Joining] = []
        """All replicas that have had slots."""
        replicas = [self._make_slots(replica) for replica in self.checkpoint_manager.replicas]
        self._generator = GeneratorPool(
            self.agent_loop_manager.agent_loop_workers,
            trainer=self._ranks,
            end_replica=self._end_replica,
            condition_key=partial(condition_key, self.digen),
            deadlines=self.digen.deadlines,
        )
        num_samples = num_prompts * rollout.n
        return Conductor(
            planner,
            self._generator,
            TrainerPool(
                self._ranks,
                num_samples=num_samples,
                num_rows=num_prompts * rows_per_group(self.digen, rollout.n),
                select=self.digen.select,
                rewards_of=group_rewards(self.config, self.digen),
            ),
            self._draw_prompts,
            replicas=replicas,
            deadlines=self._supervision.deadlines,
            recorder=self._recorder,
            trainer_lane=Lane("trainer", 0, host, self._num_devices["trainer"]),
            reward_lane=Lane("reward", 0, self._driver.host, num_reward_devices(self.config, self.digen.reward)),
        )

    def _make_slots(self, replica: Any) -> Joining:
        """Make slots for a replica without any: new names, in a lane that no other living replica has."""
        address = replica.server_address
        lanes = {one.replica: one.lane for one in self._joined}
        if address not in lanes:
            living = {other.server_address for other in self.checkpoint_manager.replicas}
            taken = {lane.index for other, lane in lanes.items() if other in living}
            number = next(number for number in itertools.count() if number not in taken)
            host = hosts_of(f"the servers of replica {address}", replica.servers, self.digen.deadlines.answer_s)
            lanes[address] = Lane("generator", number, host, replica.world_size)
        lane = lanes[address]
        first = len(self._joined) * self.digen.slots_per_replica
        slots = [f"{lane.index:04d}/{first + index}" for index in range(self.digen.slots_per_replica)]
        self._joined.append(Joining(address, replica.server_handle, lane, slots))
        return self._joined[-1]

    async def _start_replica(self, number: int) -> Any:
        return await start_replica(self.llm_server_manager, number, self.digen.deadlines.first_s, on_ranks=False)

    async def _end_replica(self, hung: Joining) -> None:
        for replica in self.checkpoint_manager.replicas:
            if replica.server_address == hung.replica:
                end_processes(replica)

    def _draw_prompts(self, batch: int, count: int) -> list[str]:
        rows = self._take_prompts(count)
        for row in rows:
            self._generator.add_prompt(batch, row)
        return [row.uid for row in rows]

    def _open_prompts(self) -> Sequence[PromptRow]:
        assert self._conductor is not None
        return [*self._generator.open_prompts(), *super()._open_prompts()]

    # -- one step -----------------------------------------------------------------------------------------
    def on_step_begin(self) -> None:
        super().on_step_begin()
        self._step_began_s = self._recorder.now_s()

    def _run_step(self, timing_raw: dict) -> StepResult:
        """Run one logical batch, up to its optimizer step."""
        if self._conductor is None:
            self._conductor = self._make_conductor()
        outcome = self._run_batch(self._conductor)
        self._generator.forget_batch(outcome.report.batch)
        self._clear(outcome)
        return StepResult(
            samples={
                SampleName.of(tag.facts).key: tag for tags in outcome.groups.values() for _, tag in sorted(tags.items())
            },
            training=outcome.metrics,
            train_s=self._ranks.compute_s,
            num_refilled_groups=outcome.report.num_group_refills,
            num_assisted=outcome.report.num_assisted,
            facts=_report_metrics(outcome),
        )

    def _run_batch(self, conductor: Conductor) -> BatchOutcome:
        """Run the batch; where every replica is lost in it, wait for one that is started, and go on."""
        while (outcome := self._supervision.run(conductor.run_batch())) is None:
            version = conductor.planner.published
            try:
                self._send(version)
                joining = self._join_replicas()
                if not joining:
                    raise ReplicasLost
            except BaseException:
                self._supervision.run(conductor.abort())
                raise
            self._supervision.run(conductor.publish(version, joining=joining))
        return outcome

    def _send(self, version: int) -> None:
        """Send the trainer's weights to every replica, which takes them between two chunks."""
        self._update_replicas(lambda: self.checkpoint_manager.stage_weights(version))

    def _update_replicas(self, update: Callable[[], Any]) -> None:
        """Have `update` send weights to every replica. While all are lost, wait for one that is started; ReplicasLost
        if `digen.rollout.max_restarts` is used up."""
        while True:
            self._replicas.add_started()
            try:
                return super()._update_replicas(update)
            except ReplicasLost:
                self._replicas.replace_lost()
                if not self._replicas.is_starting:
                    raise
            logger.warning("every replica is lost: the run waits for one that is started")
            self._supervision.run(self._replicas.one_started())

    def _replace_all_lost(self) -> bool:
        """If no replica is alive, wait for one that has the weights to validate -> True."""
        try:
            self._replicas.forget_lost()
        except ReplicasLost:
            self._update_replicas(lambda: self.checkpoint_manager.update_weights(self.global_steps))
            return True
        return False

    def _clear(self, outcome: BatchOutcome) -> None:
        """Clear what is no longer read, but for the rows of trained samples, which verl's loop clears at the end of the
        step. Conditions stay while a prompt of an unfinished batch has the same."""
        published = outcome.published
        self._condition_keys |= published.condition_keys | own_condition_keys(published.doubtful_groups)
        unused = self._condition_keys - self._generator.condition_keys()
        self._condition_keys -= unused
        clear(CONDITIONS, sorted(unused))
        if unwanted := outcome.unwanted:
            clear(TRAIN, [name.key for name in unwanted])

    def step(self, metrics: dict, timing_raw: dict) -> Any:
        batch = super().step(metrics, timing_raw)
        self._publish()  # verl's loop writes the checkpoint next; replicas do not wait for it
        return batch

    def _publish(self) -> None:
        """Send the committed weights to every replica, and have them begin what they may of the next batch."""
        assert self._conductor is not None
        with (
            self._recorder.interval(
                "publish", self._conductor.trainer_lane, step=self.global_steps, version=self.global_steps
            ),
            marked_timer("update_weights", self.timing_raw),
        ):
            self._send(self.global_steps)
        living = {replica.server_address for replica in self.checkpoint_manager.replicas}
        lost = [slot for replica in self._joined if replica.replica not in living for slot in replica.slots]
        self._supervision.run(self._conductor.publish(self.global_steps, lost, self._join_replicas()))
        self._replicas.replace_lost()

    def on_step_end(self) -> None:
        self._end_if_asked()
        self._close_timeline()
        if self.global_steps >= self.total_training_steps and not self.digen.environment.is_on:
            logger.info("would another split be faster? digen simulate --run %s --device TYPE", self.run_dir)

    def _join_replicas(self) -> list[Joining]:
        """Have every living replica without a slot in the plan load the newest weights, and make slots for it."""
        assert self._conductor is not None
        has_slot = self._conductor.planner.has_slot
        planned = {replica.replica for replica in self._joined if any(map(has_slot, replica.slots))}
        joining: list[Joining] = []
        for replica in self.checkpoint_manager.replicas:
            if replica.server_address in planned:
                continue
            try:
                ray.get(replica.server_handle.activate_weights.remote(), timeout=self.digen.deadlines.answer_s)
            except (RayActorError, GetTimeoutError) as error:
                logger.warning("replica %s does not join: %s", replica.server_address, describe(error))
                continue
            joining.append(self._make_slots(replica))
        return joining

    def on_validate_begin(self) -> None:
        """Drain the slots: validation uses the newest weights, on otherwise idle replicas."""
        if self._conductor is not None:
            self._supervision.run(self._conductor.drain())
        super().on_validate_begin()

    def _save_checkpoint(self) -> None:
        assert self._conductor is not None
        with self._recorder.interval("save", self._conductor.trainer_lane, step=self.global_steps):
            super()._save_checkpoint()

    def _validate(self) -> dict[str, float]:
        with self._recorder.interval("validate", self._driver, step=self.global_steps):
            metrics = super()._validate()
        # Written now, since no step may follow; kept for the next step, whose first chunks may be among them.
        self._previous_intervals = [*self._previous_intervals, *self._write_intervals()]
        return metrics

    def _write_intervals(self, *own: Interval) -> list[Interval]:
        """Write what was recorded since the last call, and `own`, to disk."""
        intervals = [*self._recorder.drain(), *own]
        self._timeline_file.append(intervals)
        return intervals

    def _close_timeline(self) -> None:
        """Write the step's intervals to disk, and keep the metrics made of them for the step's other metrics."""
        end_s = self._recorder.now_s()
        calls = call_intervals(
            self._result.samples.values(), self._reward_names, self._driver.host, step=self.global_steps
        )
        step = Interval("step", self._driver, self.global_steps, self._step_began_s, end_s)
        intervals = self._write_intervals(step, *calls)
        recent = [*self._previous_intervals, *intervals]
        self._timeline_metrics = step_metrics(recent, self.global_steps, self._num_devices)
        self._previous_intervals = intervals

    def _training_intervals(self) -> list[tuple[float, float]]:
        return [
            (interval.start_s, interval.end_s)
            for interval in self._previous_intervals
            if interval.kind in ("train", "commit") and interval.step == self.global_steps
        ]

    def _compute_metrics(self, batch: Any, metrics: dict, timing_raw: dict, global_steps: int, epoch: int) -> None:
        metrics.update(self._timeline_metrics)
        super()._compute_metrics(batch, metrics, timing_raw, global_steps=global_steps, epoch=epoch)


def _report_metrics(outcome: BatchOutcome) -> Mapping[str, float]:
    report = outcome.report
    return {
        "batch/num_groups": float(report.num_groups),
        "batch/num_samples": float(report.num_samples),
        "batch/num_fragments": float(report.num_fragments),
        "batch/refilled_samples": float(report.num_sample_refills),
        "batch/reissued_samples": float(report.num_reissued),
        "batch/late_samples": float(report.num_late),
        "tag/num_assists": float(report.num_assists),
        "tag/assisted_samples": float(report.num_assisted),
        "bts/num_searches": float(report.num_searches),
        "bts/decision_ms_max": 1e3 * outcome.slowest_decision_s,
        **({} if report.prediction_error is None else {"bts/prediction_error": report.prediction_error}),
        **{f"batch/dropped_groups_{reason}": float(count) for reason, count in report.dropped.items()},
    }


register_trainer(NAME)(DisaggregatedTrainer)  # not as a decorator: verl's erases the class's type
