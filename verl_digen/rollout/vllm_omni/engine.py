# SPDX-License-Identifier: Apache-2.0
"""vLLM-Omni's diffusion engine with a version barrier (`engine_backend`).

A call of a method in `BARRIER` waits until no trajectory is under way, while waiting requests keep waiting; then it
runs, and they start. So an update lands between trajectories and throws no work away.

Example, two requests denoising (running), one waiting:

    collective_rpc("commit_weights")   # no new admissions
    ... both finish                    # the waiting one has not started
    commit_weights runs                # alone
    the waiting one starts             # under the new weights

Pipelines without step execution denoise a whole batch in one call. There the barrier waits for that batch, and so would
every other call, with the requests that come after it: vLLM-Omni reads its messages in order. Those in `ASIDE` do not
wait if the worker is in this process: they run beside the batch, in the thread that asks.

A probe (`RecordingOrder.is_probe`) is the next request to start, and runs alone: who shares a batch decides about last
bits, and a probe of the same weights must give the same numbers.

Invariant (tests/vllm_omni): whenever updates come, no trajectory has two versions and none is lost.
"""

from __future__ import annotations

import queue
from dataclasses import replace
from typing import Any

from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.diffusion.diffusion_engine import DiffusionEngine, DiffusionExecutionMode, _RpcTask
from vllm_omni.diffusion.executor.uniproc_executor import UniProcDiffusionExecutor
from vllm_omni.diffusion.request import OmniDiffusionRequest
from vllm_omni.diffusion.sched import RequestScheduler, StepScheduler
from vllm_omni.diffusion.sched.base_scheduler import BaseScheduler
from vllm_omni.diffusion.sched.interface import RequestBatchSamplingParamsKey, SchedulerRequestState

from verl_digen.rollout.vllm_omni.recorder import RECORDED
from verl_digen.rollout.vllm_omni.requests import ORDER

BARRIER = frozenset({"commit_weights"})
"""Worker methods that change the weights trajectories are made with."""


ASIDE = frozenset({"begin_update", "seal_weights", "encode", "prompt_cache_stats", "device_name"})
"""Worker methods that leave alone what a batch under way reads."""


class BarrierScheduler(BaseScheduler):
    """A scheduler of vLLM-Omni that can be told to admit nothing for a while, and runs probes first and alone."""

    is_held = False

    def add_request(self, request: OmniDiffusionRequest) -> str:
        request_id = super().add_request(request)
        if _is_probe(request):
            self._waiting.remove(request_id)
            self._waiting.appendleft(request_id)
        return request_id

    def _can_schedule_waiting(self, state: SchedulerRequestState) -> bool:
        if self.is_held or (self._running and (_is_probe(state.req) or self._runs_probe())):
            return False
        return super()._can_schedule_waiting(state)

    def _runs_probe(self) -> bool:
        return any(_is_probe(self._request_states[request_id].req) for request_id in self._running)

    def has_requests(self) -> bool:
        """False with nothing but held requests, so that the engine's loop sleeps."""
        return bool(self._running) if self.is_held else super().has_requests()


class BarrierStepScheduler(BarrierScheduler, StepScheduler):
    """For pipelines with step execution."""


class BarrierRequestScheduler(BarrierScheduler, RequestScheduler):
    """For the others; requests that are recorded are batched with their like alone."""

    def _build_sampling_params_key(self, request: OmniDiffusionRequest) -> RequestBatchSamplingParamsKey:
        key = super()._build_sampling_params_key(request)
        if ORDER not in request.sampling_params.extra_args:
            return key
        return replace(key, condition_key=(ORDER, *(key.condition_key or ())))


class BarrierQueue(queue.Queue[_RpcTask]):
    """Calls for the workers, in order; one in `BARRIER` is not handed out while trajectories are under way.

    Only the engine's loop takes from it, and only that loop starts trajectories.
    """

    def __init__(self, scheduler: BarrierScheduler):
        super().__init__()
        self._scheduler = scheduler
        self.is_closing = False
        """True hands out everything, for an engine that stops."""

    def get_nowait(self) -> _RpcTask:
        with self.mutex:
            waits = bool(self.queue) and self.queue[0].method in BARRIER and not self.is_closing
            self._scheduler.is_held = waits and self._scheduler.num_running_requests() > 0
        if self._scheduler.is_held:
            raise queue.Empty
        return super().get_nowait()


class VersionedEngine(DiffusionEngine):
    """See the module."""

    scheduler: BarrierScheduler
    _rpc_queue: BarrierQueue

    def _init_scheduler(self, od_config: OmniDiffusionConfig, scheduler: Any = None, *args: Any, **kwargs: Any) -> None:
        if scheduler is None:
            is_stepwise = self.execution_mode == DiffusionExecutionMode.STEP_BATCH
            scheduler = BarrierStepScheduler() if is_stepwise else BarrierRequestScheduler()
        super()._init_scheduler(od_config, scheduler, *args, **kwargs)

    def _init_runtime_state(self) -> None:
        super()._init_runtime_state()
        self._rpc_queue = BarrierQueue(self.scheduler)

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        unique_reply_rank: int | None = None,
    ) -> Any:
        is_stepwise = self.execution_mode == DiffusionExecutionMode.STEP_BATCH
        if method in ASIDE and not is_stepwise and isinstance(self.executor, UniProcDiffusionExecutor):
            return self.executor.collective_rpc(method, timeout, args, kwargs, unique_reply_rank)
        return super().collective_rpc(method, timeout, args, kwargs, unique_reply_rank)

    def _fail_pending_rpcs(self, exc: BaseException) -> None:
        self._rpc_queue.is_closing = True
        super()._fail_pending_rpcs(exc)

    def _init_process_hooks(self, od_config: OmniDiffusionConfig) -> None:
        """A recorded request's output is finished as it is; the pipeline's own post-processing makes PIL pictures."""
        super()._init_process_hooks(od_config)
        post_process = self.post_process_func
        if post_process is None:
            return

        def keep_records(output: Any, **kwargs: Any) -> Any:
            return output if _is_record(output) else post_process(output, **kwargs)

        self.post_process_func = keep_records


def _is_probe(request: OmniDiffusionRequest) -> bool:
    """False for a request without an order (a warm-up)."""
    extra = request.sampling_params.extra_args
    return ORDER in extra and extra[ORDER].is_probe


def _is_record(output: Any) -> bool:
    """True for what `RecordingPipeline.finish_recording` made."""
    if not isinstance(output, dict) or "payload" not in output:
        return False
    payload = output["payload"]
    return "trajectory" in payload and RECORDED in payload["trajectory"]
