# SPDX-License-Identifier: Apache-2.0
"""Base of the servers of our own back ends: requests in, batches out. Method names are verl's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from verl_digen.hardware.transfers import send_as_bytes
from verl_digen.processes.bundles import outcomes
from verl_digen.rollout.batcher import Answers, RequestBatcher
from verl_digen.types import Generation, SampleRequest


class BatchingServer:
    """A server actor that collects requests into batches.

    Args:
        max_batch_size: samples of a batch. wait_s: see `RequestBatcher`.
    """

    def __init__(self, *, max_batch_size: int, wait_s: float):
        send_as_bytes()
        self._batcher = RequestBatcher(self._generate_batch, max_batch_size=max_batch_size, wait_s=wait_s)

    async def _generate_batch(self, requests: Sequence[SampleRequest], should_stop: Callable[[], bool]) -> Answers:
        """Run a batch -> its answers, for which the next batch does not wait."""
        raise NotImplementedError

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

    async def generate_all(self, requests: Sequence[SampleRequest]) -> list[Any]:
        """Generate samples -> `outcomes`."""
        return await outcomes([self._batcher.submit(request) for request in requests])

    async def abort_request(self, request_id: str) -> None:
        """Cancel the sample `UID_INDEX`: its caller gets `Withdrawn`."""
        uid, _, index = request_id.rpartition("_")
        self._batcher.withdraw(uid, int(index))

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        """Stop starting batches. Work in flight is finished, not discarded."""
        self._batcher.pause()

    async def resume_generation(self) -> None:
        """Start batches again."""
        self._batcher.resume()

    async def clear_kv_cache(self) -> None:
        """No-op: diffusion has no KV cache."""

    release_kv_cache = resume_kv_cache = clear_kv_cache

    async def start_profile(self, **kwargs: Any) -> None:
        """No-op: generation is profiled through verl's profiler of the trainer ranks."""

    stop_profile = start_profile

    async def ready(self) -> bool:
        """True once the constructor is done."""
        return True
