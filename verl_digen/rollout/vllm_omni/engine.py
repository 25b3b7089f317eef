# SPDX-License-Identifier: Apache-2.0
"""vLLM-Omni's diffusion engine with a version barrier (`engine_backend`).

A call of a method in `BARRIER` blocks new admissions and waits until no trajectory is in flight; then it runs, and the
waiting requests start. So an update lands between trajectories, none has two versions, and no work is lost.

Pipelines without step execution denoise a whole batch in one call. The barrier waits for that batch; so would every
other call and the requests behind it, because vLLM-Omni reads its messages in order. Calls in `ASIDE` do not wait if
the worker is in this process: they run concurrently with the batch, in the caller's thread.
"""

import queue
import time
from dataclasses import replace
from typing import Any

from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.diffusion.diffusion_engine import DiffusionEngine, DiffusionExecutionMode, _RpcTask
from vllm_omni.diffusion.executor.uniproc_executor import UniProcDiffusionExecutor
from vllm_omni.diffusion.request import OmniDiffusionRequest
from vllm_omni.diffusion.sched import RequestScheduler, StepScheduler
from vllm_omni.diffusion.sched.base_scheduler import BaseScheduler
from vllm_omni.diffusion.sched.interface import RequestBatchSamplingParamsKey, SchedulerRequestState

from verl_digen.rollout.batcher import Bursts
from verl_digen.rollout.vllm_omni.recorder import RECORDED
from verl_digen.rollout.vllm_omni.requests import ORDER
from verl_digen.types import Burst, SampleRequest

BARRIER = frozenset({"commit_weights"})
"""Worker methods that change the weights that trajectories are generated with."""

ASIDE = frozenset({"begin_update", "seal_weights", "encode", "state"})
"""Worker methods that do not change anything a running batch reads."""

BURST_WAIT_S = 0.05
"""Longest wait in s of a request for those that it comes together with; if they never come, the engine's loop, which
sleeps meanwhile, sees it within 1 s."""


class BarrierScheduler(BaseScheduler):
    """vLLM-Omni's scheduler with a hold flag that stops admissions; runs groups one after the other where their
    requests say so (`SampleRequest.batch_group`)."""

    is_held = False

    def __init__(self) -> None:
        super().__init__()
        self._bursts = Bursts()

    def add_request(self, request: OmniDiffusionRequest) -> str:
        self._bursts.forget_all_but(map(self._burst_of, [*self._running, *self._waiting]))
        request_id = super().add_request(request)
        self._bursts.arrive(self._burst_of(request_id))
        return request_id

    def _can_schedule_waiting(self, state: SchedulerRequestState) -> bool:
        if self.is_held:
            return False
        if self._running and _batch_group(state.req) != _batch_group(self._request_states[self._running[0]].req):
            return False
        return super()._can_schedule_waiting(state)

    def _burst_of(self, request_id: str) -> Burst | None:
        state = self._request_states.get(request_id)
        request = None if state is None else _sample_request(state.req)
        return None if request is None else request.burst

    def has_requests(self) -> bool:
        """False if all requests are held, so that the engine's loop sleeps."""
        return bool(self._running) if self.is_held else super().has_requests()


class BarrierStepScheduler(BarrierScheduler, StepScheduler):
    """Scheduler for pipelines with step execution. Requests that come together begin together, in one forward: the
    first ones wait for the others, at most `BURST_WAIT_S`."""

    def _can_schedule_waiting(self, state: SchedulerRequestState) -> bool:
        return not self._awaits_others(state.request_id) and super()._can_schedule_waiting(state)

    def _awaits_others(self, request_id: str) -> bool:
        burst = self._burst_of(request_id)
        if burst is None or self._bursts.are_complete([burst]):
            return False
        return time.perf_counter() - self._request_states[request_id].queued_at < BURST_WAIT_S

    def has_requests(self) -> bool:
        """False, too, while the next one waits for others: the last of them wakes the engine's loop."""
        if not self._running and self._waiting and self._awaits_others(self._waiting[0]):
            return False
        return super().has_requests()


class BarrierRequestScheduler(BarrierScheduler, RequestScheduler):
    """Scheduler for the other pipelines. Recorded and unrecorded requests never share a batch, nor do requests whose
    prompts have other numbers or sizes of images. A batch with all requests that were announced to come together
    (`SampleRequest.burst`) waits for no further one."""

    def should_end_admission_wait(self, decision: Any, *, now: float, stable_since: float) -> bool:
        if self._waiting and self._bursts.are_complete(map(self._burst_of, self._waiting)):
            return True
        return super().should_end_admission_wait(decision, now=now, stable_since=stable_since)

    def _build_sampling_params_key(self, request: OmniDiffusionRequest) -> RequestBatchSamplingParamsKey:
        key = super()._build_sampling_params_key(request)
        if ORDER not in request.sampling_params.extra_args:
            return key
        sources = request.sampling_params.extra_args[ORDER].request.sampling.geometry.sources
        return replace(key, condition_key=(ORDER, *sources, *(key.condition_key or ())))


class BarrierQueue(queue.Queue[_RpcTask]):
    """FIFO of calls for the workers; a call in `BARRIER` stays queued while trajectories are in flight. Only the
    engine's loop reads it, and only that loop starts trajectories."""

    def __init__(self, scheduler: BarrierScheduler):
        super().__init__()
        self._scheduler = scheduler
        self.is_closing = False
        """True: the barrier is off, because the engine is stopping."""

    def get_nowait(self) -> _RpcTask:
        with self.mutex:
            waits = bool(self.queue) and self.queue[0].method in BARRIER and not self.is_closing
            self._scheduler.is_held = waits and self._scheduler.num_running_requests() > 0
        if self._scheduler.is_held:
            raise queue.Empty
        return super().get_nowait()


class VersionedEngine(DiffusionEngine):
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

    def collective_rpc(self, method: str, *args: Any, **kwargs: Any) -> Any:
        is_stepwise = self.execution_mode == DiffusionExecutionMode.STEP_BATCH
        if method in ASIDE and not is_stepwise and isinstance(self.executor, UniProcDiffusionExecutor):
            return self.executor.collective_rpc(method, *args, **kwargs)
        return super().collective_rpc(method, *args, **kwargs)

    def _fail_pending_rpcs(self, exc: BaseException) -> None:
        self._rpc_queue.is_closing = True
        super()._fail_pending_rpcs(exc)

    def _init_process_hooks(self, od_config: OmniDiffusionConfig) -> None:
        """Skip two hooks of the pipeline: the pre-processing of images for a request with an order, whose recording
        reads them itself, and the post-processing, which makes PIL pictures, for the output of a recorded request."""
        super()._init_process_hooks(od_config)
        pre_process, post_process = self.pre_process_func, self.post_process_func

        def keep_orders(request: OmniDiffusionRequest) -> OmniDiffusionRequest:
            return request if ORDER in request.sampling_params.extra_args else pre_process(request)

        if pre_process is not None:
            self.pre_process_func = keep_orders
        if post_process is None:
            return

        def keep_records(output: Any, **kwargs: Any) -> Any:
            return output if _is_record(output) else post_process(output, **kwargs)

        self.post_process_func = keep_records


def _batch_group(request: OmniDiffusionRequest) -> str | None:
    asked = _sample_request(request)
    return None if asked is None else asked.batch_group


def _sample_request(request: OmniDiffusionRequest) -> SampleRequest | None:
    """The request of an order; None without one (a warm-up)."""
    extra = request.sampling_params.extra_args
    return extra[ORDER].request if ORDER in extra else None


def _is_record(output: Any) -> bool:
    """True for an output of `RecordingPipeline.finish_recording`."""
    if not isinstance(output, dict) or "payload" not in output:
        return False
    payload = output["payload"]
    return "trajectory" in payload and RECORDED in payload["trajectory"]
