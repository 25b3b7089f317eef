# SPDX-License-Identifier: Apache-2.0
"""A `vllm_omni` replica and its server actor: verl's vLLM server, with vLLM-Omni's engine behind its methods.

- One device: the engine runs in this process. More (tensor parallel): its workers are separate processes, which
  rendezvous on a loopback port (`worker.loopback_store`). No other port is opened.
- A request is admitted while the gate is open. `abort_all_requests` closes the gate and lets requests in flight finish;
  a weight update does not need it (`engine.py`).
- A replica whose engine is dead or hung exits, so that the run sees it as lost.
"""

import asyncio
import logging
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from peft import LoraConfig
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.rollout.replica import RolloutMode
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica
from vllm.lora.request import LoRARequest
from vllm_omni.entrypoints.async_omni import AsyncOmni

from verl_digen.hardware.transfers import send_as_bytes
from verl_digen.models import load_model
from verl_digen.models.text import only_text
from verl_digen.processes.actors import while_alive
from verl_digen.processes.bundles import outcomes
from verl_digen.rollout.birth import BornOnDevices, PlacedReplica, SeenDevice, cpu_threads, drop_launcher_variables
from verl_digen.rollout.vllm_omni.arguments import check_taken, engine_arguments
from verl_digen.rollout.vllm_omni.recorder import RECORDED
from verl_digen.rollout.vllm_omni.requests import (
    START,
    Published,
    RecordingOrder,
    Taken,
    adapter_request,
    to_prompt,
    to_sampling_params,
)
from verl_digen.sampling.outputs import ImageOutput
from verl_digen.sampling.recording import with_experts
from verl_digen.sampling.requests import request_id, text_request
from verl_digen.types import Condition, Generation, SampleRequest
from verl_digen.weights.checksum import Manifest
from verl_digen.weights.receiver import NOT_WHOLE

logger = logging.getLogger(__name__)


class vLLMOmniHttpServer(vLLMHttpServer):
    """verl's server with another engine; constructor and method names are verl's."""

    engine: AsyncOmni

    def _init_model_config(self, model_config: Any) -> Any:
        return omega_conf_to_dataclass(model_config)

    def _validate_configs(self) -> None:
        """No-op: diffusion has no context length."""

    async def launch_server(
        self, master_address: str | None = None, master_port: int | None = None, dp_rpc_port: int | None = None
    ) -> None:
        """Load the model and start the engine. The arguments are for replicas of several nodes and are not used."""
        self.digen = self.model_config.digen
        self._model = load_model(self.model_config.local_path)
        # a group has one prompt: it is checked once, not once per sample
        self._check_prompt = lru_cache(self.digen.rollout.embed_cache_size)(self._model.load_prompt_check())
        self._takes_images = self._model.spec.num_images[1] > 0
        self._latents_dtype = PrecisionType.to_dtype(self.digen.rollout.latents_dtype)
        self._sends_adapter = self.model_config.adapter_config() is not None
        self._init_state()
        send_as_bytes()
        num_threads = cpu_threads(self.digen.rollout.num_neighbours, self.config.n_gpus_per_node, self.rollout_mode)
        if num_threads:
            torch.set_num_threads(num_threads)
        arguments = engine_arguments(
            self.config, self.model_config, can_sleep=self.rollout_mode != RolloutMode.STANDALONE
        )
        drop_launcher_variables()
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # loopback of Linux: all workers are on this node
        # the constructor starts its own event loop in a thread and waits for it
        self.engine = await asyncio.to_thread(lambda: AsyncOmni(**arguments))
        check_taken(arguments, self.config, self.engine.get_diffusion_od_config())

    def _init_state(self) -> None:
        """The state before the first request and the first update."""
        self.global_steps = 0
        self._gate = asyncio.Event()
        self._gate.set()
        self._in_flight: Counter[Published] = Counter()
        self._ended_s = 0.0
        """When a request ended last, on the event loop's clock."""
        self._finished = asyncio.Condition()
        self._is_asleep = False
        self._last_serial = START.serial
        self._sealed = self._served = START
        self._adapter = Taken(START, sent=0, held=0, load_s=0.0)
        self._taken: tuple[int, int] | None = None
        """Checksums of the last update: as it was sent, and the sum of what the workers hold."""
        self._beginning, self._activating, self._sealing = asyncio.Lock(), asyncio.Lock(), asyncio.Lock()
        self._update_id = ""
        """Id of the update that was begun last."""
        self._is_arriving = False
        """True from the begin of an update until it is sealed."""
        self._update_ended = asyncio.Event()
        self._is_whole = True
        """False from the first to the last tensor of a live update, and after one that failed."""
        self._last_update: dict[str, float] = {}

    def get_server_address(self) -> tuple[str, Any]:
        """The node's address and, as no port is open, a name that is unique among the replicas."""
        return self._server_address, f"replica-{self.replica_rank}"

    async def visible_devices(self) -> list[SeenDevice]:
        """The device of each engine worker."""
        (devices,) = await self._call_workers("visible_devices")
        return devices

    # -- generation ---------------------------------------------------------------------------------------
    async def generate(  # type: ignore[override]
        self,
        request_id: str,
        prompt_ids: list[int] | str,
        sampling_params: dict[str, Any] | None = None,
        image_data: list[Any] | None = None,
        video_data: list[Any] | None = None,
        **kwargs: Any,
    ) -> Generation:
        """Generate one sample: the `SampleRequest` in `sampling_params["request"]`, as the project's client sends it,
        or the text `prompt_ids`, as in the RFC, with arguments of `text_request`. The signature is verl's; the answer
        to a text is an `ImageOutput`.

        ValueError if the encoder refuses a prompt, numbers are not finite, or there is neither a text nor a request; no
        other request is affected. RuntimeError, with the engine's message, if the engine failed the request.
        """
        given = {} if sampling_params is None else sampling_params
        if "request" in given:
            return await self._generate(request_id, given["request"])
        if not isinstance(prompt_ids, str):
            raise ValueError(f"a prompt must be a text, got {type(prompt_ids).__name__}; a pipeline encodes it itself")
        request = text_request(self.digen, request_id, prompt_ids, **given)
        return ImageOutput.of(await self._generate(request_id, request))

    async def generate_all(self, requests: Sequence[SampleRequest]) -> list[Any]:
        """Generate samples -> `outcomes`."""
        return await outcomes([self._generate(request_id(one.uid, one.sample_index), one) for one in requests])

    async def _generate(self, request_id: str, request: SampleRequest) -> Generation:
        for inputs in request.branches:  # here, because in the engine an error would fail all requests of the same step
            self._check_prompt(inputs.text if self._takes_images else only_text(inputs))
        await self._gate.wait()
        if not self._is_whole:
            raise RuntimeError(f"a weight update was interrupted: {NOT_WHOLE}")
        order = RecordingOrder(request, self.digen.seed, self._latents_dtype)
        # with adapters, the request keeps the update served now; full weights may change while it is queued
        record = await self._record(request_id, order, self._served)
        if record["error"] is not None:
            raise record["error"]
        made: Generation = record["generation"]
        return replace(made, trajectory=with_experts(self._model, made.trajectory))

    async def _record(self, request_id: str, order: RecordingOrder, published: Published) -> dict[str, Any]:
        """Run one request and return its record (`RecordingPipeline.finish_recording`); counts it as in flight. The
        replica leaves if neither it nor another one ends for `digen.deadlines.first_s`."""
        adapter = adapter_request(published) if self._sends_adapter else None
        sample = f"sample {order.request.uid}_{order.request.sample_index}"
        timeout_s, loop = self.digen.deadlines.first_s, asyncio.get_running_loop()
        began_s = loop.time()

        async def check() -> None:
            if loop.time() - max(began_s, self._ended_s) >= timeout_s:
                why = f"nor any other ended for digen.deadlines.first_s={timeout_s:g} s, so its engine counts as hung"
                self._leave(f"neither {sample} {why}")

        self._in_flight[published] += 1
        try:
            output = await while_alive(self._last_output(request_id, order, adapter), lambda: timeout_s, check)
        except Exception as error:  # vLLM-Omni raises the errors of a failed request and of a dead engine here
            await self._leave_if_dead()
            raise RuntimeError(f"vLLM-Omni failed {sample} on replica {self.replica_rank}: {error}") from error
        finally:
            self._in_flight[published] -= 1
            self._ended_s = loop.time()
            async with self._finished:
                self._finished.notify_all()
        if output is None or "trajectory" not in output.multimodal_output:  # the result of an abort
            raise RuntimeError(f"{sample} was aborted")
        return output.multimodal_output["trajectory"][RECORDED]

    async def _last_output(self, request_id: str, order: RecordingOrder, adapter: LoRARequest | None) -> Any:
        last = None
        async for output in self.engine.generate(
            to_prompt(order.request), request_id=request_id, sampling_params_list=[to_sampling_params(order, adapter)]
        ):
            last = output
        return last

    async def _leave_if_dead(self) -> None:
        """Exit if the engine is dead, so that requests go to other replicas instead of failing here."""
        try:
            await self.engine.check_health()
        except Exception as error:
            self._leave(f"its engine is dead: {error}")

    def _leave(self, reason: str) -> None:
        """Kill the engine workers and exit, even with a hung thread; the run sees a lost replica."""
        logger.critical("replica %d leaves the run: %s", self.replica_rank, reason)
        for worker in multiprocessing.active_children():
            worker.kill()
        os._exit(1)

    async def abort_request(self, request_id: str, reset_prefix_cache: bool = True) -> dict[str, Any]:
        """Cancel one request at its next step. A pipeline without step execution finishes it and drops the result."""
        await self.engine.abort(request_id)
        return {"aborted": True, "request_id": request_id}

    async def encode(self, request: SampleRequest) -> tuple[Condition, Condition | None]:
        """Encode the request's prompt and, with guidance, its negative prompt, into conditions on the CPU; also while
        samples are generated. For the trainer, which has no encoder and generates samples of the group too. ValueError
        if the encoder refuses a prompt."""
        try:
            conditions = (await self._call_workers("encode", request.branches))[0]  # equal on every worker
        except RuntimeError as error:
            raise ValueError(f"the prompts of group {request.uid} cannot be encoded: {error}") from error
        return conditions[0], conditions[1] if request.sampling.is_guided else None

    # -- weights ------------------------------------------------------------------------------------------
    async def begin_update(self, sockets: str, use_shm: bool, is_live: bool, update_id: str) -> None:
        """Have every worker receive the buckets from its trainer rank, at the sender's `sockets_of`. An older update
        that was interrupted is cancelled. `is_live`: load them as they arrive; drains first, and admits no request
        before the update is committed. Idempotent: a repeated call does not cut off ranks that send already."""
        async with self._beginning:
            if update_id == self._update_id:
                return
            if is_live:
                self._gate.clear()
                await self.wait_for_requests_to_drain()
                self._is_whole = False
            await self._call_workers("begin_update", sockets, use_shm, self.digen.rollout.update_timeout_s, is_live)
            self._is_arriving, self._update_id = True, update_id

    async def until_update_ends(self) -> None:
        """Return when the next update is sealed. Its senders watch this call, those of other ranks than the leader's
        perhaps before the update has begun: it fails when this process dies."""
        await self._update_ended.wait()

    async def seal_update(self, manifest: Manifest, adapter: LoraConfig | None) -> None:
        """Check that the update is complete; `activate_weights` makes it the current one. `adapter`: its config, if a
        LoRA adapter was sent and not full weights. Idempotent. RuntimeError if the update does not match the network or
        the manifest; names the tensors, and the weights that serve now."""
        async with self._sealing:
            if self._is_arriving or manifest.version != self._sealed.version:  # else a retry: the answer was lost
                await self._seal(manifest, adapter)

    async def _seal(self, manifest: Manifest, adapter: LoraConfig | None) -> None:
        self._is_arriving = False
        self._last_serial += 1
        published = Published(self._last_serial, manifest.version)
        self._update_ended.set()
        self._update_ended = asyncio.Event()
        if adapter is None:
            await self._call_workers("seal_weights", manifest, published)
        else:
            kept = await self._serials_to_keep()
            answers = await self._call_workers("commit_adapter", manifest, adapter, published, kept)
            self._adapter = self._slowest(answers)
        self._sealed = published

    async def activate_weights(self) -> int:
        """Make the newest sealed update the current one -> its version. Full weights are loaded between trajectories.
        Idempotent."""
        async with self._activating:
            if self._sealed == self._served != START:  # a retry: the first answer was lost
                return self._served.version
            started_s = time.perf_counter()
            # workers may have sealed a newer update while this one waited for trajectories: they load the newer one
            taken = self._adapter if self._sends_adapter else self._slowest(await self._call_workers("commit_weights"))
            self._served = taken.published
            self.global_steps = taken.published.version
            drain_s = max(0.0, time.perf_counter() - started_s - taken.load_s)
            self._last_update = {"load_s": taken.load_s, "drain_s": drain_s}
            return taken.published.version

    def _slowest(self, answers: list[Taken]) -> Taken:
        """The answer of the worker that took longest to load. RuntimeError if the update differs from the last one, and
        the numbers that the workers hold do not. (A worker that holds whole layers has compared them with the update
        itself.)"""
        slowest = max(answers, key=lambda taken: taken.load_s)
        before, self._taken = self._taken, (slowest.sent, sum(taken.held for taken in answers))
        if before is not None and before[0] != slowest.sent and before[1] == self._taken[1]:
            raise RuntimeError(
                f"replica {self.replica_rank} took version {slowest.published.version}, and its workers hold the "
                "numbers that they held before: vLLM-Omni loaded nothing of it; the replica must be started again"
            )
        return slowest

    async def commit_update(self, manifest: Manifest, adapter: LoraConfig | None) -> None:
        """`seal_update`, then `activate_weights`, and admit requests again; for a replica that shares devices with the
        trainer."""
        await self.seal_update(manifest, adapter)
        await self.activate_weights()
        self._is_whole = True
        self._gate.set()

    async def _serials_to_keep(self) -> frozenset[int]:
        """Wait for room for one more adapter -> serials of the current update and those used by requests in flight."""

        def live() -> frozenset[int]:
            return frozenset(published.serial for published in (*+self._in_flight, self._served))

        async with self._finished:
            await self._finished.wait_for(lambda: len(live()) < self.digen.rollout.num_kept_adapters)
        return live()

    async def _call_workers(self, method: str, *args: Any) -> list[Any]:
        """Each worker's answer. RuntimeError if the call failed; has the worker's message."""
        (answer,) = await self.engine.collective_rpc(method, args=args)  # one stage
        if isinstance(answer, dict) and "error" in answer:
            raise RuntimeError(f"replica {self.replica_rank}: {answer['error']}")
        return answer

    # -- around a step ------------------------------------------------------------------------------------
    async def wait_for_requests_to_drain(self) -> None:
        """Return when no request is in flight."""
        async with self._finished:
            await self._finished.wait_for(lambda: self._in_flight.total() == 0)

    async def sleep(self) -> None:
        """Drain, then free the device memory; requests wait until `wake_up`."""
        if self.rollout_mode == RolloutMode.STANDALONE or not self.config.free_cache_engine or self._is_asleep:
            return
        self._gate.clear()
        await self.wait_for_requests_to_drain()
        self._is_asleep = True
        _check_acknowledged(await self.engine.sleep(level=1), "go to sleep", self.replica_rank)

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Restore the weights to device memory and serve. `tags` is ignored: there are only weights to wake."""
        if self._is_asleep:
            _check_acknowledged(await self.engine.wake_up(), "wake up", self.replica_rank)
            self._is_asleep = False
        if self._is_whole:
            self._gate.set()

    async def abort_all_requests(self, reset_prefix_cache: bool = True, reject_request: bool = False) -> dict[str, Any]:
        """Admit no more requests. Requests in flight are finished, not discarded."""
        self._gate.clear()
        return {"aborted_count": 0, "request_ids": []}

    async def resume_engine_generation(self) -> None:
        """No-op: the engine was not stopped; `open_submission_gate` follows."""

    async def open_submission_gate(self) -> None:
        """Admit requests again."""
        if not self._is_asleep:
            self._gate.set()

    async def clear_kv_cache(self) -> None:
        """No-op: diffusion has no KV cache."""

    release_kv_cache = resume_kv_cache = clear_kv_cache

    async def check_health(self) -> dict[str, Any]:
        """State of this replica; raises if its engine is dead."""
        await self.engine.check_health()
        (cache, device), *_ = await self._call_workers("state")
        return {
            "version": self.global_steps,
            "received_version": self._sealed.version,
            "num_running": self._in_flight.total(),
            "is_asleep": self._is_asleep,
            "prompt_cache": cache,
            "last_update": self._last_update,
            "device": device,
        }


vLLMOmniHttpServerBase = vLLMOmniHttpServer
"""The RFC's name of the class before `ray.remote`, which verl's replica applies."""


def _check_acknowledged(acks: list[Any], what: str, replica_rank: int) -> None:
    """Raise RuntimeError unless all workers acknowledge: vLLM-Omni reports a failed sleep only in its answer."""
    errors = [ack.error_msg for ack in acks if ack.status != "SUCCESS"]
    if errors or not acks:
        raise RuntimeError(f"replica {replica_rank} did not {what}: {'; '.join(map(str, errors)) or 'no answer'}")


class vLLMOmniReplica(PlacedReplica, vLLMReplica):
    """A replica of `actor_rollout_ref.rollout.tensor_model_parallel_size` devices on one node."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.server_class = BornOnDevices(vLLMOmniHttpServer)

    async def launch_servers(self) -> None:
        """Run verl's method, then check the devices that the engine's workers found."""
        await super().launch_servers()
        await self.require_devices(await self.servers[0].visible_devices.remote())

    def _get_server_name_prefix(self) -> str:
        """`{rollout.name}_`, by which verl's `ServerAdapter` looks servers up."""
        return "vllm_omni_"
