# SPDX-License-Identifier: Apache-2.0
"""Generation by a rank where there is no replica: `actor_rollout_ref.rollout.name=trainer`.

Between batches the rank's network stays where it is; while it trains, encoders and decoders have no device memory.
Encoders that wait on the host take the place of everything else on the device for the time of one encoding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from verl.utils.device import get_device_name
from verl.utils.torch_dtypes import PrecisionType

from verl_digen.engine.assistant import Assistant
from verl_digen.engine.engine import DiffusersFSDPEngine
from verl_digen.inputs.images import PromptInputs
from verl_digen.platforms import device_memory
from verl_digen.platforms.module_memory import DeviceMemory, name_on_node
from verl_digen.rollout.encoders import Encoders
from verl_digen.types import Generation, SampleRequest


class RankGenerator:
    """See the module.

    Args:
        dtype: `actor_rollout_ref.rollout.dtype`, of encoders and decoders.
    """

    def __init__(self, engine: DiffusersFSDPEngine, dtype: torch.dtype):
        rollout, device, name = engine.digen.rollout, engine.forward.device, name_on_node()
        self._encoders = Encoders(engine.model, dtype, device, rollout, name)
        latents_dtype = PrecisionType.to_dtype(rollout.latents_dtype)
        self.assistant = Assistant(engine, latents_dtype=latents_dtype, decoder_dtype=dtype)
        decoders = [*self.assistant.decoder.modules, *self.assistant.audio_decoder.modules]
        self._decoders = DeviceMemory(decoders, device, name and f"{name}-decoders")
        self._encoders.alternate_with(_RankMemory(engine, self._decoders))
        self._frees_memory = device.type != "cpu"

    def draw(
        self, requests: Sequence[SampleRequest], coming: Sequence[PromptInputs], version: int
    ) -> list[tuple[int, Generation | ValueError]]:
        """Generate this rank's share of `requests`, see `Assistant.generate`.

        Args:
            coming: prompts of later requests, which are encoded in the same turn of encoders that wait on the host.
        """
        prompts = self._encoders.prompts
        if self._encoders.wait_on_host:
            prompts.prepare([inputs for request in requests for inputs in request.branches], coming)
        return self.assistant.generate(requests, prompts, version=version)

    def facts(self) -> dict[str, Any]:
        """State of the rank for its server: `prompt_cache`, and how many samples `fitted` together, None if unknown."""
        return {"prompt_cache": self._encoders.prompts.stats(), "fitted": self.assistant.fitting.size}

    def rest(self) -> None:
        """Free the device memory of encoders and decoders."""
        if self._frees_memory:
            self._decoders.release()
            self._encoders.sleep()
            device_memory.release_cached()

    def renew(self) -> None:
        """Allocate it again, for other weights than before."""
        self.assistant.forget_weights()
        if self._frees_memory:
            self._decoders.restore()
            self._encoders.wake()


class _RankMemory:
    """Device memory of a rank that generates, but for its encoders."""

    def __init__(self, engine: DiffusersFSDPEngine, decoders: DeviceMemory):
        self._engine, self._decoders = engine, decoders

    def release(self, *, changed: Callable[[], Iterable[Tensor]]) -> None:
        self._decoders.release()
        self._engine.to("cpu", model=True, optimizer=True, grad=False)

    def restore(self) -> None:
        self._engine.to(get_device_name(), model=True, optimizer=True, grad=False)
        self._decoders.restore()
