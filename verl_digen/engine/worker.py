# SPDX-License-Identifier: Apache-2.0
"""verl's actor-rollout worker, training diffusion samples.

    begin(...), accumulate(fragment) ..., commit() | abort()       one logical batch = one optimizer step
      called identically on every rank with names and numbers; each rank fetches the samples of its own rows

    assist(requests)                                               in between: generate samples, current weights
    evaluate(fragments)                                            before: log-probs, for several steps on the samples

    update_actor(rows), compute_log_prob(rows), compute_ref_log_prob(rows)     verl's, see `engine.verl_batches`

Weight updates, checkpoints, rollout handles and dispatch are verl's. What does not block gives one reference per rank.
"""

import os
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import count
from typing import Any

import ray
import torch
from tensordict import TensorDict
from verl.single_controller.base.decorator import Dispatch, Execute, make_nd_compute_dataproto_dispatch_fn, register
from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_name, set_expandable_segments
from verl.utils.distributed import initialize_global_process_group_ray
from verl.utils.profiler import DistProfiler
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker

from verl_digen.algorithms.rows import Metric, Plain, plain
from verl_digen.engine import rendezvous
from verl_digen.engine.assistant import Assistant, RankGenerator
from verl_digen.engine.build import keep_fp32
from verl_digen.engine.engine import DiffusersFSDPEngine
from verl_digen.engine.fragment import FragmentSpec
from verl_digen.engine.rows import Fetch, fetch_samples
from verl_digen.engine.verl_batches import own_objective
from verl_digen.hardware.transfers import send_as_bytes
from verl_digen.inputs.images import PromptInputs
from verl_digen.platforms.device_memory import accelerator_name
from verl_digen.rollout.registry import REPLICAS, TRAINER
from verl_digen.rollout.replica import NoWeightsSent
from verl_digen.store.conditions import fetch_conditions
from verl_digen.types import Generation, SampleRequest, Stored


def ensure_process_group(timeout_s: int) -> None:
    """Start the process group before verl does, which names gloo twice on a CPU and fails, and sets no timeout of
    collectives (`actor_rollout_ref.nccl_timeout`)."""
    backend = "gloo" if get_device_name() == "cpu" else None
    initialize_global_process_group_ray(timeout_second=timeout_s, backend=backend)


def share_cpu_cores(num_replicas: int) -> None:
    """Limit each rank's threads on a CPU to its share of the cores, which `num_replicas` on this node share; every rank
    with all cores would be slow."""
    if get_device_name() == "cpu":
        ranks_here = int(os.environ.get("RAY_LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // (ranks_here + num_replicas)))


def stored_by_group(generations: Sequence[Generation]) -> list[tuple[str, Any]]:
    """Put samples into Ray's object store, group by group -> (uid, reference to the list of the group's samples)."""
    groups: dict[str, list[Generation]] = {}
    for generation in generations:
        groups.setdefault(generation.trajectory.facts.uid, []).append(generation)
    return [(uid, ray.put(found)) for uid, found in groups.items()]


class DiffusionWorker(ActorRolloutRefWorker):
    """One rank of verl's worker group, with methods for diffusion samples."""

    _assistant: Assistant
    """Exists only with `digen.tag.policy` other than off."""
    _generator: RankGenerator | None = None
    """None but for `actor_rollout_ref.rollout.name=trainer`."""

    @register(Dispatch.ALL_TO_ALL, Execute.RANK_ZERO)  # pyright: ignore[reportAttributeAccessIssue] - dynamic enums
    def free_port(self) -> int | None:
        """A port of rank 0's machine for the ranks to meet at, see `verl_digen.engine.rendezvous`."""
        return rendezvous.free_port()

    @register(dispatch_mode=rendezvous.AT_ONE_PORT)
    def init_model(self, port: int | None = None) -> None:
        """Meet the other ranks at `port`, which the worker group passes (None: at verl's), and build the engine and the
        rollout handle."""
        send_as_bytes()
        rendezvous.meet_at(port)
        ensure_process_group(self.config.nccl_timeout)
        share_cpu_cores(0 if self._is_rollout else self.config.rollout.n_gpus_per_node)
        super().init_model()
        if self._is_actor:
            # else tiles of many sizes leave gaps that no tensor fits into; verl's update_weights does the same, but is
            # not called without replicas on these devices
            set_expandable_segments(True)
            self.trainer.set_loss_fn(own_objective)
            name = self.config.rollout.name
            self.engine.wire_dtype = PrecisionType.to_dtype(self.config.rollout.dtype)
            if name != "vllm_omni":  # which computes in one dtype
                keep_fp32(self.engine.module, self.engine.model.spec.transformer)
            if name == TRAINER:
                self._generator = RankGenerator(self.engine, self.engine.wire_dtype)
            if self.engine.digen.tag.policy != "off":
                self._assistant = Assistant(self.engine, decoder_dtype=self.engine.wire_dtype)
        if self._is_rollout and self.config.rollout.name in REPLICAS:
            # our replicas load the checkpoint for any rollout.load_format, so an adapter needs no base sent first
            self.base_sync_done = True

    # -- generation without replicas ----------------------------------------------------------------------
    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)  # pyright: ignore[reportAttributeAccessIssue]
    async def update_weights(self, global_steps: int, mode: str = "auto") -> Any:
        """verl's `update_weights`. A rank that generates itself sends nothing: rank 0 tells the server the version."""
        if self._generator is None:
            return await super().update_weights(global_steps, mode)
        self._generator.renew()
        if self.rank == 0:
            assert isinstance(self.rollout, NoWeightsSent)
            self.rollout.server.find_successor()
            await self.rollout.server.call("activate", global_steps)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)  # pyright: ignore[reportAttributeAccessIssue]
    @DistProfiler.annotate(color="blue", role="actor_draw")
    def draw(
        self, requests: Sequence[SampleRequest], coming: Sequence[PromptInputs], version: int
    ) -> tuple[list[tuple[int, Any]], dict[str, Any]]:
        """Generate this rank's share of the requests, see `RankGenerator.draw` -> (place in `requests`, where the
        sample is stored, or the error) of each; and `RankGenerator.facts`."""
        assert self._generator is not None
        drawn = self._generator.draw(requests, coming, version)
        stored = dict(stored_by_group([one for _, one in drawn if not isinstance(one, ValueError)]))
        numbers: defaultdict[str, Iterator[int]] = defaultdict(count)
        answers = [
            (place, one if isinstance(one, ValueError) else Stored(stored[uid], next(numbers[uid])))
            for place, one in drawn
            for uid in (requests[place].uid,)
        ]
        return answers, self._generator.facts()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)  # pyright: ignore[reportAttributeAccessIssue]
    def rest(self) -> None:
        """Free the device memory that only generation needs."""
        assert self._generator is not None
        self._generator.rest()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # pyright: ignore[reportAttributeAccessIssue]
    def export_policy(self, name: str) -> None:
        """Choose the policy that `update_weights` sends from now on, see `verl_digen.engine.copies`."""
        self.engine.exports = name

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # pyright: ignore[reportAttributeAccessIssue]
    def keep_checkpoints(self, paths: Sequence[str]) -> None:
        """Keep the checkpoints at `paths` from now on, and no others beyond the newest, see
        `DiffusersCheckpointManager.kept`."""
        self.engine.checkpoint_manager.kept = frozenset(paths)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # pyright: ignore[reportAttributeAccessIssue]
    def device_name(self) -> str | None:
        """The accelerator's name; None on a CPU."""
        return accelerator_name()

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    def compute_ref_log_prob(self, data: TensorDict) -> TensorDict | None:
        """verl's `compute_ref_log_prob`; the reference is a policy of the actor's engine, and no engine of its own."""
        tu.assign_non_tensor(data, policy="reference", compute_loss=False)
        return self.compute_log_prob(data)

    # -- one logical batch, fragment by fragment ----------------------------------------------------------
    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)  # pyright: ignore[reportAttributeAccessIssue]
    def begin(self, num_samples: int, num_rows: int, partition: str, scale: float | None = None) -> None:
        """Open a logical batch, see `DiffusersFSDPEngine.begin`; TransferQueue's `partition` holds the samples' rows
        until it is closed."""
        self.engine.begin(num_samples, num_rows, fetch=self._fetch_from(partition), scale=scale)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)  # pyright: ignore[reportAttributeAccessIssue]
    def keep_old(self) -> None:
        """Copy the weights as policy `old`, see `DiffusersFSDPEngine.keep_old`."""
        self.engine.keep_old()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)  # pyright: ignore[reportAttributeAccessIssue]
    @DistProfiler.annotate(color="blue", role="actor_evaluate")
    def evaluate(self, fragments: Sequence[FragmentSpec], partition: str) -> dict[str, dict[int, float]]:
        """Log-probs of the rows that this rank would train, see `DiffusersFSDPEngine.evaluate`."""
        return self.engine.evaluate(fragments, self._fetch_from(partition))

    def _fetch_from(self, partition: str) -> Fetch:
        return partial(fetch_samples, self.engine.points, partition)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)  # pyright: ignore[reportAttributeAccessIssue]
    @DistProfiler.annotate(color="red", role="actor_accumulate")
    def accumulate(self, fragment: FragmentSpec) -> dict[str, float]:
        """Add a fragment's gradient, see `DiffusersFSDPEngine.accumulate`. Returns its counts, the same on every rank,
        and `accumulate_s`."""
        started_s = time.perf_counter()
        counts = self.engine.accumulate(fragment)
        return {**counts, "accumulate_s": time.perf_counter() - started_s}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)  # pyright: ignore[reportAttributeAccessIssue]
    @DistProfiler.annotate(color="blue", role="actor_assist")
    def assist(self, requests: tuple[SampleRequest, ...], version: int) -> list[tuple[str, Any]]:
        """Generate this rank's share of the requests, see `Assistant.assist` -> of each group in it (uid, reference to
        the list of its samples). The samples record the weight version. Only with `digen.tag.policy` other than off.
        The prompts' conditions must be in TransferQueue."""
        conditions = fetch_conditions([request.condition_key for request in requests])
        return stored_by_group(self._assistant.assist(requests, conditions, version=version))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)  # pyright: ignore[reportAttributeAccessIssue]
    @DistProfiler.annotate(color="red", role="actor_commit")
    def commit(self, more: bool = False) -> Plain:
        """Take the optimizer step, see `DiffusersFSDPEngine.commit`. Returns metrics, the same on all ranks."""
        outputs = self.engine.commit(more=more)
        metrics: dict[str, Metric] = outputs.pop("metrics")
        of_verl = self.trainer._postprocess_output(  # the ranks' loss, and memory
            outputs | {"metrics": {}}, global_token_num=None, delta_time=0.0, forward_only=False, images_seqlens=None
        )
        if not more:
            self.trainer.profiler.step()
        for name, value in tu.get(of_verl, "metrics").items():
            metrics[name] = Metric(torch.tensor(value, dtype=torch.float64), "max" if "max" in name else "mean")
        return plain(metrics)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)  # pyright: ignore[reportAttributeAccessIssue]
    def abort(self) -> None:
        """Close the logical batch as if it had never been, see `DiffusersFSDPEngine.abort`. Does not block, because a
        rank may hang in a collective with one that failed."""
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
