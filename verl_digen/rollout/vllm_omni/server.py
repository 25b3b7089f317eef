# SPDX-License-Identifier: Apache-2.0
"""The server actor of a `vllm_omni` replica: verl's vLLM server, with vLLM-Omni's engine behind its methods.

- One device: the engine runs in this process. More (tensor parallel): its workers are processes of their own.
- A request is admitted while the gate is open. `abort_all_requests` closes the gate and lets what is under way finish;
  a weight update does not need it (`engine.py`).
- `sleep` drains first, is level 1, and fails if a worker does not acknowledge it.
- No port is opened, unless `digen.rollout.http.enable=true` (`http.py`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from typing import Any

import ray
import torch
from peft import LoraConfig
from verl.plugin.platform import get_platform
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.torch_dtypes import PrecisionType
from verl.workers.rollout.replica import RolloutMode
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer
from vllm_omni.entrypoints.async_omni import AsyncOmni

from verl_digen.models import load_model
from verl_digen.rollout.placed import cpu_threads
from verl_digen.rollout.recording import experts_of, generation_facts
from verl_digen.rollout.vllm_omni.arguments import check_taken, engine_arguments
from verl_digen.rollout.vllm_omni.recorder import RECORDED
from verl_digen.rollout.vllm_omni.requests import RecordingOrder, adapter_request, to_prompt, to_sampling_params
from verl_digen.types import Condition, Generation, SampleRequest
from verl_digen.weights.manifest import Manifest

logger = logging.getLogger(__name__)


class vLLMOmniHttpServer(vLLMHttpServer):
    """See the module; constructor and method names are verl's."""

    engine: AsyncOmni

    def _init_model_config(self, model_config: Any) -> Any:
        return omega_conf_to_dataclass(model_config)

    def _validate_configs(self) -> None:
        """Diffusion has no context length."""

    async def launch_server(
        self, master_address: str | None = None, master_port: int | None = None, dp_rpc_port: int | None = None
    ) -> None:
        """Load the model and start the engine; the arguments, for replicas of several nodes, are not used."""
        self.digen = self.model_config.digen
        self.global_steps = 0
        self._model = load_model(self.model_config.local_path)
        self._latents_dtype = PrecisionType.to_dtype(self.digen.rollout.latents_dtype)
        self._sends_adapter = self.model_config.adapter_config() is not None
        self._gate = asyncio.Event()
        self._gate.set()
        self._in_flight: Counter[int] = Counter()
        self._finished = asyncio.Condition()
        self._is_asleep = False
        self._sealed_version = 0
        self._adapter_load_s = 0.0
        self._last_update: dict[str, float] = {}
        self._api: asyncio.Task[None] | None = None
        if get_platform().device_name == "cpu":
            torch.set_num_threads(
                cpu_threads(
                    num_neighbours=self.digen.rollout.num_neighbours,
                    num_devices=self.config.n_gpus_per_node,
                    is_standalone=self.rollout_mode == RolloutMode.STANDALONE,
                )
            )
        arguments = engine_arguments(
            self.config, self.model_config, can_sleep=self.rollout_mode != RolloutMode.STANDALONE
        )
        http = self.digen.rollout.http
        serve_http_api = _load_http_api() if http.enable else None
        # its constructor starts an event loop of its own in a thread, and waits for it
        self.engine = await asyncio.to_thread(lambda: AsyncOmni(**arguments))
        check_taken(self.config, self.engine.get_diffusion_od_config())
        if serve_http_api is not None:
            self._server_port, self._api = await serve_http_api(self.engine, self.model_config.local_path, http)
            self._server_address = http.host

    def get_server_address(self) -> tuple[str, Any]:
        """(host, port) of the HTTP API; without one a name that only tells replicas apart."""
        if self._server_port is None:
            return self._server_address, f"replica-{self.replica_rank}"
        return self._server_address, self._server_port

    # -- generation ---------------------------------------------------------------------------------------
    async def generate(  # type: ignore[override]
        self,
        request_id: str,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        image_data: list[Any] | None = None,
        video_data: list[Any] | None = None,
        **kwargs: Any,
    ) -> Generation:
        """Generate one sample. The request is `sampling_params["request"]`; the signature is verl's.

        Raises:
            RuntimeError: the engine failed the request; its message.
        """
        request: SampleRequest = sampling_params["request"]
        await self._gate.wait()
        version = self.global_steps  # an adapter's request keeps it; full weights may change while it waits its turn
        self._in_flight[version] += 1
        try:
            record = (await self._run(request_id, request, version)).multimodal_output["trajectory"][RECORDED]
        finally:
            self._in_flight[version] -= 1
            async with self._finished:
                self._finished.notify_all()
        return Generation(
            trajectory=record["trajectory"],
            pixels=record["pixels"],
            condition=record["condition"],
            negative_condition=record["negative_condition"],
            extra_fields=generation_facts(
                version=record["trajectory"].last_version,
                started_s=record["start_s"],
                ended_s=record["end_s"],
                experts=experts_of(self._model, record["trajectory"]),
            ),
        )

    async def _run(self, request_id: str, request: SampleRequest, version: int) -> Any:
        order = RecordingOrder(request, self.digen.seed, self._latents_dtype)
        adapter = adapter_request(version) if self._sends_adapter else None
        last = None
        async for output in self.engine.generate(
            to_prompt(request), request_id=request_id, sampling_params_list=[to_sampling_params(order, adapter)]
        ):
            last = output
        if last is not None and last.error:
            await self._leave_if_dead()
            raise RuntimeError(
                f"vLLM-Omni failed sample {request.uid}_{request.sample_index} on replica {self.replica_rank}: "
                f"{last.error}"
            )
        if last is None or "trajectory" not in last.multimodal_output:  # what an abort leaves
            raise RuntimeError(f"sample {request.uid}_{request.sample_index} was aborted")
        return last

    async def _leave_if_dead(self) -> None:
        """End this process if its engine is dead; then requests go to other replicas in place of failing here."""
        try:
            await self.engine.check_health()
        except Exception as error:
            logger.critical("the engine of replica %d is dead, the replica leaves: %s", self.replica_rank, error)
            ray.actor.exit_actor()

    async def abort_request(self, request_id: str, reset_prefix_cache: bool = True) -> dict[str, Any]:
        """Drop one request at its next step; if its pipeline runs in one go, its batch goes on without a reader."""
        await self.engine.abort(request_id)
        return {"aborted": True, "request_id": request_id}

    async def encode(self, request: SampleRequest) -> tuple[Condition, Condition | None]:
        """The conditions of the request's prompt and, with guidance, of its negative prompt, on the CPU; while others
        are generated. For the trainer, which has no encoder and generates samples of the group too.

        Raises:
            ValueError: the encoder refuses a prompt.
        """
        try:
            conditions = (await self._call_workers("encode", request.texts))[0]  # every worker says the same
        except RuntimeError as error:
            raise ValueError(f"the prompts of group {request.uid} cannot be encoded: {error}") from error
        return conditions[0], conditions[1] if request.sampling.is_guided else None

    # -- weights ------------------------------------------------------------------------------------------
    async def begin_update(self, use_shm: bool) -> None:
        """Let every worker take what its counterpart will send."""
        await self._call_workers("begin_update", use_shm)

    async def seal_update(self, manifest: Manifest, adapter: LoraConfig | None) -> None:
        """What was sent is complete, for `activate_weights` to take.

        Args:
            adapter: its config, if a LoRA adapter was sent and not full weights.

        Raises:
            RuntimeError: the update is not what it should be; names the tensors. The old weights keep serving.
        """
        if adapter is None:
            await self._call_workers("seal_weights", manifest)
        else:
            kept = await self._versions_to_keep()
            self._adapter_load_s = max(await self._call_workers("commit_adapter", manifest, adapter, kept))
        self._sealed_version = manifest.version

    async def activate_weights(self) -> int:
        """Make the newest sealed version the current one -> which it is. Full weights: between trajectories."""
        started_s = time.perf_counter()
        version = self._sealed_version
        load_s = self._adapter_load_s if self._sends_adapter else max(await self._call_workers("commit_weights"))
        self.global_steps = version
        drain_s = max(0.0, time.perf_counter() - started_s - load_s)
        self._last_update = {"update_s": drain_s + load_s, "load_s": load_s, "drain_s": drain_s}
        return version

    async def commit_update(self, manifest: Manifest, adapter: LoraConfig | None) -> None:
        """`seal_update` and `activate_weights`, where trainer and replica take turns."""
        await self.seal_update(manifest, adapter)
        await self.activate_weights()

    async def _versions_to_keep(self) -> frozenset[int]:
        """The current version and those that requests in flight name, when there is room for one more."""

        def live() -> frozenset[int]:
            return frozenset(+self._in_flight) | {self.global_steps}

        async with self._finished:
            await self._finished.wait_for(lambda: len(live()) < self.digen.rollout.num_kept_adapters)
        return live()

    async def _call_workers(self, method: str, *args: Any) -> list[Any]:
        """Each worker's answer; RuntimeError with its message if the call failed."""
        (answer,) = await self.engine.collective_rpc(method, args=args)  # one stage
        if isinstance(answer, dict) and "error" in answer:
            raise RuntimeError(f"replica {self.replica_rank}: {answer['error']}")
        return answer

    # -- around a step ------------------------------------------------------------------------------------
    async def wait_for_requests_to_drain(self) -> None:
        """Return when nothing is under way."""
        async with self._finished:
            await self._finished.wait_for(lambda: self._in_flight.total() == 0)

    async def sleep(self) -> None:
        """Give the device memory back; requests wait until `wake_up`."""
        if self.rollout_mode == RolloutMode.STANDALONE or not self.config.free_cache_engine or self._is_asleep:
            return
        self._gate.clear()
        await self.wait_for_requests_to_drain()
        self._is_asleep = True
        _check_acknowledged(await self.engine.sleep(level=1), "go to sleep", self.replica_rank)

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Take the device memory back and serve; there is nothing but weights to wake."""
        if self._is_asleep:
            _check_acknowledged(await self.engine.wake_up(), "wake up", self.replica_rank)
            self._is_asleep = False
        self._gate.set()

    async def abort_all_requests(self, reset_prefix_cache: bool = True, reject_request: bool = False) -> dict[str, Any]:
        """Admit no more requests. What is under way is finished, not discarded."""
        self._gate.clear()
        return {"aborted_count": 0, "request_ids": []}

    async def resume_engine_generation(self) -> None:
        """The engine was not stopped; `open_submission_gate` follows."""

    async def open_submission_gate(self) -> None:
        """Admit requests again."""
        if not self._is_asleep:
            self._gate.set()

    async def clear_kv_cache(self) -> None:
        """Diffusion has no KV cache."""

    async def release_kv_cache(self) -> None:
        """Diffusion has no KV cache."""

    async def resume_kv_cache(self) -> None:
        """Diffusion has no KV cache."""

    async def check_health(self) -> dict[str, Any]:
        """What this replica is doing; raises if its engine is dead."""
        await self.engine.check_health()
        (cache,) = await self._call_workers("prompt_cache_stats")
        device, *_ = await self._call_workers("device_name")
        return {
            "version": self.global_steps,
            "num_running": self._in_flight.total(),
            "is_asleep": self._is_asleep,
            "prompt_cache": cache,
            "last_update": self._last_update,
            "device": device,
        }


def _load_http_api() -> Any:
    try:
        from verl_digen.rollout.vllm_omni.http import serve_http_api  # vLLM's whole web server
    except ImportError as error:
        raise ValueError(
            f"digen.rollout.http.enable=true needs what vLLM-Omni's web server imports, and {error.name} is missing; "
            "install it, or set digen.rollout.http.enable=false"
        ) from error
    return serve_http_api


def _check_acknowledged(acks: list[Any], what: str, replica_rank: int) -> None:
    """vLLM-Omni reports a failed sleep in its answer and goes on."""
    errors = [ack.error_msg for ack in acks if ack.status != "SUCCESS"]
    if errors or not acks:
        raise RuntimeError(f"replica {replica_rank} did not {what}: {'; '.join(map(str, errors)) or 'no answer'}")
