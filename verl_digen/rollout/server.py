# SPDX-License-Identifier: Apache-2.0
"""The server actor of a `diffusers` replica: holds the whole pipeline and answers generation requests.

New weights of a replica with its own devices are staged and sealed while batches run; the driver's `activate_weights`
loads them, all at once, between two batches (`RequestBatcher.exclusive`). Those of a replica that takes turns with the
trainer are loaded as they arrive; from the first to the last of them no batch starts, and after an update that failed
none runs before a whole one has come (`WeightReceiver`).

While the server sleeps, transformer, text encoders and VAE have no device memory (`DeviceMemory`). Trained weights are
not kept: the trainer wakes a server only to send all of them.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

from verl.plugin.platform import get_platform

from verl_digen.platforms.device_memory import accelerator_name
from verl_digen.platforms.module_memory import DeviceMemory, name_on_node
from verl_digen.rollout.batcher import BatchingServer
from verl_digen.rollout.birth import SeenDevice, visible_device
from verl_digen.rollout.encoders import Conditions, Encoders, conditions_of
from verl_digen.rollout.network import load_network, open_checkpoint
from verl_digen.rollout.samples import Answers, SampleMaker
from verl_digen.sampling.prefix import PrefixCache
from verl_digen.types import Condition, SampleRequest
from verl_digen.weights.checksum import Manifest
from verl_digen.weights.receiving import Receiving


class DiffusersServer(BatchingServer):
    """Server by verl's rollout config and a `DiffusionModelConfig`; method names are verl's. `num_threads`: CPU threads
    of this process; 0 leaves torch's default. `reserved_bytes`: see `Fitting`."""

    def __init__(self, config: Any, model_config: Any, num_threads: int, reserved_bytes: int = 0):
        # one thread: the device does one thing at a time, and the event loop stays responsive
        self._compute = ThreadPoolExecutor(max_workers=1, thread_name_prefix="denoise")
        self._encoding = ThreadPoolExecutor(max_workers=1, thread_name_prefix="encode")
        self._answering = ThreadPoolExecutor(max_workers=1, thread_name_prefix="answer")
        digen = model_config.digen
        super().__init__(max_batch_size=digen.rollout.batch_size, wait_s=digen.rollout.batch_wait_s)
        checkpoint = open_checkpoint(config, model_config, num_threads)
        self._encoders = Encoders(*checkpoint, digen.rollout, name_on_node())
        self._prompts = self._encoders.prompts
        self._network = load_network(checkpoint, model_config)
        self._weights = self._network.weights
        self._prefixes = PrefixCache()
        self._samples = SampleMaker.of_network(self._network, self._prompts.lookup, digen, self._prefixes)
        self._samples.fitting.reserved_bytes = reserved_bytes
        self._memory = DeviceMemory(self._samples.modules, checkpoint.device, name_on_node())
        self._encoders.alternate_with(self._memory, self._weights.tensors)
        self._frees_memory = checkpoint.device.type != "cpu"
        """On the CPU, the host copies that sleeping needs would take as much memory as it frees."""
        self._last_update: dict[str, float] = {}
        self._version = 0
        self._update_timeout_s = digen.rollout.update_timeout_s
        self._receiving: Receiving | None = None
        """Update that is under way."""
        self._update_id = ""
        """Id of the update that was begun last."""
        self._sealed_version: int | None = None
        """Version of the last sealed update; None before the first."""
        self._update_ended = asyncio.Event()
        self._updating = asyncio.Lock()
        self._sealing = asyncio.Lock()
        """Held by a seal, and while a sealed update is loaded."""

    # -- generation ---------------------------------------------------------------------------------------
    async def encode(self, request: SampleRequest) -> tuple[Condition, Condition | None]:
        """Encode the request's prompt and, with guidance, its negative prompt, into conditions on the CPU; also while a
        batch runs. For the trainer, which has no encoder and generates samples of the group too. ValueError if the
        encoder refuses a prompt."""
        look_up = self._prompts.find if self._encoders.wait_on_host else self._prompts.lookup
        known = await asyncio.get_running_loop().run_in_executor(self._encoding, self._when_awake, look_up, request)
        if known is None:  # the encoders' turn on the device is between two batches
            known = await self._on_device(lambda: self._encode(request))
        positive, *negative = conditions_of(known, request)
        return positive, negative[0] if negative else None

    def _encode(self, request: SampleRequest) -> Conditions:
        self._weights.require_whole()  # a live update may be arriving where the encoders would be
        return self._when_awake(self._prompts.lookup, request)

    def _when_awake(self, look_up: Callable[..., Any], request: SampleRequest) -> Any:
        if self._memory.is_released:
            raise RuntimeError("a sleeping replica cannot encode a prompt; wake it first")
        return look_up(request.branches)

    async def _generate_batch(
        self, requests: Sequence[SampleRequest], should_stop: Callable[[], bool]
    ) -> Awaitable[Answers]:
        answer = await self._on_device(lambda: self._generate(requests, should_stop))
        if self._samples.fitting.size is not None:
            self._batcher.max_batch_size = self._samples.fitting.size
        return asyncio.get_running_loop().run_in_executor(self._answering, answer)

    def _generate(self, requests: Sequence[SampleRequest], should_stop: Callable[[], bool]) -> Callable[[], Answers]:
        self._weights.require_whole()
        if self._encoders.wait_on_host:
            others = (inputs for request in self._batcher.waiting for inputs in request.branches)
            self._prompts.prepare([inputs for request in requests for inputs in request.branches], others)
        return self._samples.make(requests, self._version, should_stop)

    # -- weights ------------------------------------------------------------------------------------------
    async def begin_update(self, handle: str, use_shm: bool, is_live: bool, update_id: str) -> None:
        """Start to receive an update (arguments as in `verl_digen.weights.sending.Wire`), in place of an unfinished
        one. A live update starts between two batches, and no other starts before it is committed. Idempotent."""
        if is_live:
            self._batcher.pause()
        async with self._batcher.exclusive() if is_live else nullcontext(), self._updating:
            if update_id == self._update_id:
                return  # a retry: the first answer was lost
            if self._receiving is not None:
                await asyncio.to_thread(self._receiving.abandon)
            self._update_ended.set()
            self._update_ended = asyncio.Event()
            device = self._network.device
            take = self._weights.begin_live() if is_live else self._weights.begin_staged(device)
            self._receiving = Receiving(handle, device, take, use_shm=use_shm, timeout_s=self._update_timeout_s)
            self._update_id = update_id

    async def until_update_ends(self) -> None:
        """Return when the update that is under way is sealed, or another has begun. The sender watches this call: it
        fails when this process dies."""
        await self._update_ended.wait()

    async def seal_update(self, manifest: Manifest) -> None:
        """Wait for the last tensor and declare the update complete, ready for `activate_weights`. Idempotent.
        RuntimeError if a tensor is missing, unknown, of another shape, or not what was sent. If the update was staged,
        the old weights keep serving; else the replica serves nothing until a whole update has come."""
        async with self._sealing, self._updating:
            if self._receiving is None:
                if manifest.version == self._sealed_version:
                    return  # a retry: the first answer was lost
                raise RuntimeError("begin_update must come before seal_update")
            receiving, self._receiving = self._receiving, None
            try:
                await asyncio.to_thread(receiving.finish, manifest)
                self._weights.seal(manifest.checksum)
            finally:
                self._update_ended.set()
            self._sealed_version = manifest.version

    async def activate_weights(self) -> int:
        """Load the newest sealed version between batches -> its version; raises as `switch`. Idempotent."""
        asked_s = time.perf_counter()
        if self._sealed_version is None:
            raise RuntimeError("no weight update is waiting to be taken; seal one first")
        async with self._batcher.exclusive(), self._sealing:
            if not self._weights.is_sealed and self._version == self._sealed_version:
                return self._version  # a retry: the first answer was lost
            began_s = time.perf_counter()
            await self._on_device(self._weights.switch)
            self._prefixes.clear()
            self._network.fp8.clear()
            self._version = self._sealed_version
            load_s, drain_s = time.perf_counter() - began_s, began_s - asked_s
            self._last_update = {"load_s": load_s, "drain_s": drain_s}
            return self._version

    async def _on_device(self, function: Callable[[], Any]) -> Any:
        """Call `function` in the compute thread."""
        return await asyncio.get_running_loop().run_in_executor(self._compute, function)

    async def commit_update(self, manifest: Manifest) -> None:
        """`seal_update`, then `activate_weights`, and start batches again; for a replica that shares devices with the
        trainer. Idempotent."""
        await self.seal_update(manifest)
        await self.activate_weights()
        self._batcher.resume()

    # -- what verl calls around a step --------------------------------------------------------------------
    async def sleep(self) -> None:
        """Free the device memory after the running batch; requests wait until `wake_up`."""
        self._batcher.pause()
        async with self._batcher.exclusive():
            if self._frees_memory:
                await self._on_device(self._release)

    def _release(self) -> None:
        """Free the device memory; the trained weights are undefined until the next update."""
        platform = get_platform()
        platform.synchronize()
        self._network.fp8.clear()
        self._memory.release(replaced=self._weights.lose)
        self._encoders.sleep()
        platform.synchronize()
        platform.empty_cache()

    def _restore(self) -> None:
        self._memory.restore()
        self._encoders.wake()
        get_platform().synchronize()

    async def wake_up(self) -> None:
        """Allocate the device memory again. If it was freed, the next update starts the batches, else they start."""
        async with self._batcher.exclusive():
            if self._memory.is_released:
                await self._on_device(self._restore)
        if self._weights.is_whole:
            self._batcher.resume()

    async def check_health(self) -> dict[str, Any]:
        """State of this replica; see `verl_digen.trainer.replicas.Replicas.metrics`."""
        return {
            "version": self._version,
            "received_version": self._sealed_version,
            "prompt_cache": self._prompts.stats(),
            "last_update": self._last_update,
            "device": accelerator_name(),
        }

    async def visible_devices(self) -> list[SeenDevice]:
        """The device of this replica, in a list."""
        return [visible_device(0)]
