# SPDX-License-Identifier: Apache-2.0
"""The server actor of a `diffusers` replica: holds the whole pipeline and answers generation requests.

Method names are verl's for a rollout server. New weights are received and sealed while batches run; the driver's
`activate_weights` loads them, all at once, between two batches (`RequestBatcher.exclusive`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from verl.plugin.platform import get_platform
from verl.utils.torch_dtypes import PrecisionType

from verl_digen.models import load_model
from verl_digen.platforms.device_name import accelerator_name
from verl_digen.rollout.batcher import RequestBatcher
from verl_digen.rollout.fingerprint import PROMPT, fingerprint
from verl_digen.rollout.prompt_cache import PromptCache
from verl_digen.sampling.recording import experts_of
from verl_digen.sampling.sampler import Sampler
from verl_digen.types import Condition, Generation, SampleRequest, move_condition
from verl_digen.weights.probe import Probe, is_probe_due
from verl_digen.weights.receiver import WeightReceiver

logger = logging.getLogger(__name__)


class DiffusersServer:
    """See the module.

    Args:
        config: verl's rollout config. model_config: `DiffusionModelConfig`.
        visible_devices: value for the platform's visible-devices variable.
        num_threads: CPU threads of this process; 0 leaves torch's default.
    """

    def __init__(self, config: Any, model_config: Any, visible_devices: str, num_threads: int):
        platform = get_platform()
        os.environ[platform.visible_devices_envvar()] = visible_devices
        if num_threads:
            torch.set_num_threads(num_threads)
        self._device = torch.device(platform.device_name)
        digen = model_config.digen
        dtype = PrecisionType.to_dtype(config.dtype)
        self._model = load_model(model_config.local_path)
        self._transformer = self._model.load_transformer(dtype).to(self._device)
        self._weights = WeightReceiver(self._transformer, model_config.adapter_config(), self._model.experts)
        self._encoder = self._model.load_encoder(dtype, self._device)
        self._prompts = PromptCache(self._encoder, digen.rollout.embed_cache_size)
        self._decode = self._model.load_decoder(dtype, self._device)
        self._last_update: dict[str, float] = {}
        self._probe_every = digen.rollout.probe_every
        self._probe_condition: Condition | None = None
        """Encoded at the first probe."""
        self._probes: deque[Probe] = deque(maxlen=2)
        self._num_updates = 0
        self._sampler = Sampler(
            self._model,
            self._weights.module,
            run_seed=digen.seed,
            device=self._device,
            latents_dtype=PrecisionType.to_dtype(digen.rollout.latents_dtype),
        )
        self._batcher = RequestBatcher(
            self._generate_batch,
            max_batch_size=digen.rollout.max_batch_size,
            wait_s=digen.rollout.batch_wait_s,
        )
        # one thread: the device does one thing at a time, and the event loop stays responsive
        self._compute = ThreadPoolExecutor(max_workers=1, thread_name_prefix="denoise")
        self._encoding = ThreadPoolExecutor(max_workers=1, thread_name_prefix="encode")
        self._version = 0
        self._sealed_version: int | None = None

    # -- generation ---------------------------------------------------------------------------------------
    async def generate(
        self,
        request_id: str,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        image_data: list[Any] | None = None,
        video_data: list[Any] | None = None,
    ) -> Generation:
        """Generate one sample. The request is `sampling_params["request"]`; the signature is verl's."""
        return await self._batcher.submit(sampling_params["request"])

    async def abort_request(self, request_id: str) -> None:
        """Cancel the sample `UID_INDEX`: its caller gets `Withdrawn`."""
        uid, _, index = request_id.rpartition("_")
        self._batcher.withdraw(uid, int(index))

    async def encode(self, request: SampleRequest) -> tuple[Condition, Condition | None]:
        """Encode the request's prompt and, with guidance, its negative prompt, into conditions on the CPU; also while a
        batch runs. For the trainer, which has no encoder and generates samples of the group too.

        Raises:
            ValueError: the encoder refuses a prompt.
        """
        return await asyncio.get_running_loop().run_in_executor(self._encoding, self._encode, request)

    def _encode(self, request: SampleRequest) -> tuple[Condition, Condition | None]:
        known = self._prompts.lookup(request.texts)
        found: list[Condition] = []
        for text in request.texts:
            condition = known[text]
            if isinstance(condition, ValueError):
                raise condition
            found.append(move_condition(condition, "cpu"))
        return found[0], found[1] if len(found) > 1 else None

    async def _generate_batch(
        self, requests: Sequence[SampleRequest], should_stop: Callable[[], bool]
    ) -> list[Generation | ValueError]:
        return await asyncio.get_running_loop().run_in_executor(self._compute, self._generate, requests, should_stop)

    def _generate(
        self, requests: Sequence[SampleRequest], should_stop: Callable[[], bool]
    ) -> list[Generation | ValueError]:
        """Samples in the order of `requests`; the encoder's error for a request whose prompt it refuses."""
        started_s = time.time()
        known = self._prompts.lookup([text for request in requests for text in request.texts])
        refused: dict[int, ValueError] = {}
        readable: list[SampleRequest] = []
        conditions: list[list[Condition]] = []
        for position, request in enumerate(requests):
            found = [known[text] for text in request.texts]
            usable = [condition for condition in found if not isinstance(condition, ValueError)]
            if len(usable) == len(found):
                readable.append(request)
                conditions.append(usable)
            else:
                refused[position] = next(error for error in found if isinstance(error, ValueError))
        samples = iter(self._denoise(readable, conditions, started_s, should_stop) if readable else ())
        return [refused[position] if position in refused else next(samples) for position in range(len(requests))]

    def _denoise(
        self,
        requests: Sequence[SampleRequest],
        conditions: Sequence[Sequence[Condition]],
        started_s: float,
        should_stop: Callable[[], bool],
    ) -> list[Generation]:
        """Generate samples. `conditions` per sample: the prompt's, then with guidance the negative prompt's."""
        positive = [known[0] for known in conditions]
        negative = [known[1] for known in conditions] if len(conditions[0]) > 1 else None
        trajectories, latents = self._sampler.sample(
            requests, positive, negative, version=self._version, should_stop=should_stop
        )
        pixels = self._decode(latents, requests[0].sampling.geometry)
        ended_s = time.time()
        return [
            Generation(
                trajectory=replace(trajectory, last_version=self._version),
                pixels=pixels[index],
                started_s=started_s,
                ended_s=ended_s,
                experts=experts_of(self._model, trajectory),
                condition=move_condition(positive[index], "cpu") if request.wants_condition else None,
                negative_condition=(
                    move_condition(negative[index], "cpu") if request.wants_condition and negative else None
                ),
            )
            for index, (request, trajectory) in enumerate(zip(requests, trajectories, strict=True))
        ]

    # -- weights ------------------------------------------------------------------------------------------
    async def receive_weights(self, named_tensors: dict[str, Tensor]) -> None:
        """Stage one bucket of the next version; the loaded weights do not change."""
        self._weights.stage(named_tensors)

    async def seal_weights(self, version: int, num_tensors: int) -> None:
        """Declare the received tensors complete, as version `version`, ready for `activate_weights`. Idempotent.

        Raises:
            RuntimeError: a tensor is missing, unknown or of another shape; the old weights keep serving.
        """
        if not self._weights.is_staged and version == self._sealed_version:
            return  # a retry: the first answer was lost
        self._weights.seal(num_tensors)
        self._sealed_version = version

    async def activate_weights(self) -> int:
        """Load the newest sealed version between two batches -> its version. Idempotent.

        After the first updates and every `digen.rollout.probe_every`-th, takes a probe, which `check_health` reports.
        """
        asked_s = time.perf_counter()
        async with self._batcher.exclusive():
            if not self._weights.is_sealed and self._version == self._sealed_version:
                return self._version  # a retry: the first answer was lost
            began_s = time.perf_counter()
            self._weights.switch()
            assert self._sealed_version is not None  # switch found an update
            self._version = self._sealed_version
            if is_probe_due(self._num_updates, self._probe_every):
                self._probes.append(await self._on_device(self._take_probe))
        self._num_updates += 1
        load_s, drain_s = time.perf_counter() - began_s, began_s - asked_s
        self._last_update = {"update_s": drain_s + load_s, "load_s": load_s, "drain_s": drain_s}
        return self._version

    async def probe(self) -> Probe:
        """Run the network on fixed inputs with its current weights, between two batches."""
        async with self._batcher.exclusive():
            return await self._on_device(self._take_probe)

    def _take_probe(self) -> Probe:
        if self._probe_condition is None:
            (self._probe_condition,) = self._encoder([PROMPT])
        computed = fingerprint(self._model, self._weights.module, self._probe_condition)
        return self._weights.probe(self._version, computed)

    async def _on_device(self, function: Callable[[], Any]) -> Any:
        """Call `function` in the compute thread."""
        return await asyncio.get_running_loop().run_in_executor(self._compute, function)

    async def commit_weights(self, version: int, num_tensors: int) -> None:
        """`seal_weights`, then `activate_weights`; for a replica that shares devices with the trainer."""
        await self.seal_weights(version, num_tensors)
        await self.activate_weights()

    # -- what verl calls around a step --------------------------------------------------------------------
    async def sleep(self) -> None:
        """Free the device memory after the running batch; requests wait until `wake_up`."""
        self._batcher.pause()
        async with self._batcher.exclusive():
            if self._device.type != "cpu":
                self._weights.module.to("cpu")
                get_platform().empty_cache()

    async def wake_up(self) -> None:
        """Move the weights back to the device and serve."""
        async with self._batcher.exclusive():
            self._weights.module.to(self._device)
        self._batcher.resume()

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        """Stop starting batches. Work in flight is finished, not discarded."""
        self._batcher.pause()

    async def resume_generation(self) -> None:
        """Start batches again."""
        self._batcher.resume()

    async def clear_kv_cache(self) -> None:
        """No-op: diffusion has no KV cache."""

    async def release_kv_cache(self) -> None:
        """No-op: diffusion has no KV cache."""

    async def resume_kv_cache(self) -> None:
        """No-op: diffusion has no KV cache."""

    async def start_profile(self, **kwargs: Any) -> None:
        """No-op: replicas are profiled through verl's profiler of the trainer ranks."""

    async def stop_profile(self) -> None:
        """See `start_profile`."""

    async def check_health(self) -> dict[str, Any]:
        """State of this replica; see `verl_digen.trainer.replicas.replica_metrics`."""
        return {
            "version": self._version,
            "received_version": self._sealed_version,
            "prompt_cache": self._prompts.stats(),
            "last_update": self._last_update,
            "probes": tuple(self._probes),
            "device": accelerator_name(),
        }

    async def ready(self) -> bool:
        """True once the constructor is done."""
        return True
