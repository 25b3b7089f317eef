# SPDX-License-Identifier: Apache-2.0
"""What a vLLM-Omni worker can do beside generating: take new weights, and tell which version it runs.

    begin_update        a thread takes the buckets and keeps them aside in host memory; generation goes on
    seal_weights        full weights that were taken in are complete and fit
    commit_weights      loads them; a barrier call (`engine.BARRIER`), alone between trajectories
    commit_adapter      a LoRA adapter for one version; requests name the one they want, so nothing has to wait

What was taken in is compared first: names and shapes with the checkpoint's network, a checksum with the sender's.
Nothing has changed when that raises, and the old weights keep serving.

| what could go wrong silently | what tells it |
| --- | --- |
| a tensor is lost, doubled or damaged on the way | number and checksum of what was sent |
| a tensor is missing, unknown or of another shape | the checkpoint's names and shapes |
| vLLM-Omni skips a tensor, e.g. that of a layer LoRA has wrapped | the checksum of the network after loading |
| a module of an adapter finds no layer | `RecordingPipeline._validate_diffusion_lora_binding` |
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm_omni.diffusion.sched.interface import DiffusionSchedulerOutput
from vllm_omni.diffusion.worker.diffusion_worker import CustomPipelineWorkerExtension

from verl_digen.models import load_model
from verl_digen.models.base import DiffusionModel
from verl_digen.platforms.device_name import accelerator_name
from verl_digen.rollout.vllm_omni.recorder import RecordingPipeline
from verl_digen.rollout.vllm_omni.requests import adapter_request, version_of_adapter
from verl_digen.types import Condition
from verl_digen.weights.checksum import checksum
from verl_digen.weights.manifest import Manifest
from verl_digen.weights.receiver import compare_with, tensors_of_update

NO_LIMIT = 1 << 16
"""Adapters that vLLM-Omni keeps before it drops the one that was used least recently."""


class WeightReceiverExtension(CustomPipelineWorkerExtension):
    """Mixed into vLLM-Omni's worker (`worker_extension_cls`)."""

    model_runner: Any
    lora_manager: Any
    od_config: Any
    device: torch.device
    local_rank: int

    _staged: dict[str, Tensor]
    _checksum = 0
    """Of what is staged."""
    _sealed: tuple[Manifest, dict[str, Tensor]] | None = None
    """Full weights to load."""
    _receiving: threading.Thread | None = None
    _receive_error: BaseException | None = None
    _shapes: dict[str, torch.Size] | None = None
    """Of an update, read when the first one comes; all that get so far are of one kind."""

    def init_lora_manager(self) -> None:
        """vLLM-Omni's; but which adapter goes when is said by `commit_adapter`, who knows what requests need."""
        super().init_lora_manager()  # type: ignore[misc]
        if self.lora_manager is not None:
            self.lora_manager.max_cached_adapters = NO_LIMIT

    # -- taking in ----------------------------------------------------------------------------------------
    def begin_update(self, use_shm: bool) -> None:
        """Start to take the buckets that this worker's counterpart sends."""
        if self._receiving is not None and self._receiving.is_alive():
            raise RuntimeError("an update is being received already; a sender sends one at a time")
        self._staged = {}
        self._receive_error = None
        self._receiving = threading.Thread(target=self._receive, args=(use_shm,), name="receive-weights", daemon=True)
        self._receiving.start()

    def _receive(self, use_shm: bool) -> None:
        def stage(named_tensors: list[tuple[str, Tensor]], is_last: bool) -> None:
            # copied: the bucket is used again
            self._staged.update({name: tensor.to("cpu", copy=True) for name, tensor in named_tensors})

        try:
            BucketedWeightReceiver(zmq_handle(self.local_rank), self.device, use_shm).receive_weights(stage)
            self._checksum = checksum(self._staged.values())
        except BaseException as error:  # told by the commit, which waits for this thread
            self._receive_error = error

    def _take_staged(self, manifest: Manifest) -> dict[str, Tensor]:
        if self._receiving is None:
            raise RuntimeError("begin_update must come before a commit")
        self._receiving.join()
        self._receiving = None
        staged, self._staged = self._staged, {}
        if self._receive_error is not None:
            raise RuntimeError(f"an update could not be received: {self._receive_error}") from self._receive_error
        if (len(staged), self._checksum) != (manifest.num_tensors, manifest.checksum):
            raise RuntimeError(
                f"{manifest.num_tensors} tensors with checksum {manifest.checksum:x} were sent, but {len(staged)} with "
                f"checksum {self._checksum:x} arrived; the old weights keep serving"
            )
        return staged

    # -- full weights -------------------------------------------------------------------------------------
    def seal_weights(self, manifest: Manifest) -> None:
        """The full weights that were taken in are complete; `commit_weights` loads them.

        Raises:
            RuntimeError: what was sent is not what is loaded; names the tensors. The old weights keep serving.
        """
        staged = self._take_staged(manifest)
        wrapped = next((name for name, module in self._modules() if isinstance(module, BaseLayerWithLoRA)), None)
        if wrapped is not None:
            raise RuntimeError(
                "full weights were sent to a replica that serves a LoRA adapter, whose layers would skip them, e.g. "
                f"{wrapped}; send the adapter alone, or merged weights from the first update on "
                "(actor_rollout_ref.model.lora.merge=true). The old weights keep serving"
            )
        compare_with(staged, self._expected_shapes(None))
        self._sealed = manifest, staged

    def commit_weights(self) -> float:
        """Load the full weights that were sealed last -> seconds it took.

        Raises:
            RuntimeError: nothing is sealed; or the network is not what was sent, and the message says that it is
                neither the old nor the new one.
        """
        started_s = time.perf_counter()
        if self._sealed is None:
            raise RuntimeError("no weight update is waiting to be loaded; seal one first")
        (manifest, sealed), self._sealed = self._sealed, None
        loaded = self.model_runner.pipeline.load_weights((self._name(name), tensor) for name, tensor in sealed.items())
        self._check_loaded(sealed, loaded)
        self._pipeline.weight_version = manifest.version
        return time.perf_counter() - started_s

    def _check_loaded(self, staged: dict[str, Tensor], loaded: set[str]) -> None:
        """Every parameter was loaded, and with the numbers that were sent.

        vLLM-Omni fuses tensors but changes none of their numbers; so checksums before and after are equal. (Of buffers,
        an update holds some; those are loaded, too.) With tensor parallelism each worker has a part of the numbers, and
        only the names are compared.
        """
        held, parameters = {}, set()
        for network, module in self._networks.items():
            held |= {f"{network}.{name}": tensor for name, tensor in module.state_dict().items()}
            parameters |= {f"{network}.{name}" for name, _ in module.named_parameters()}
        skipped = parameters - loaded
        if skipped:
            raise RuntimeError(
                f"vLLM-Omni loaded nothing into {len(skipped)} of the network's parameters, e.g. {min(skipped)}. Its "
                "weights are neither the old nor the new ones; the replica must be started again"
            )
        if self.od_config.parallel_config.tensor_parallel_size > 1:
            return
        dtype = self.od_config.dtype
        sent = checksum(tensor.to(dtype) for tensor in staged.values())
        if sent != checksum(tensor.to(dtype) for name, tensor in held.items() if name in loaded):
            raise RuntimeError(
                "vLLM-Omni did not load all of an update: the network's checksum is not that of what was sent. Its "
                "weights are neither the old nor the new ones; the replica must be started again"
            )

    # -- adapters -----------------------------------------------------------------------------------------
    def commit_adapter(self, manifest: Manifest, config: LoraConfig, kept: frozenset[int]) -> float:
        """Register the adapter that was taken in, for requests that name its version -> seconds it took.

        Args:
            kept: versions that requests in flight name; adapters of others are dropped.

        Raises:
            RuntimeError: what was sent is not the adapter of `config`; names the tensors. Versions before it are
                still served.
        """
        started_s = time.perf_counter()
        staged = self._take_staged(manifest)
        compare_with(staged, self._expected_shapes(config))
        adapter = self._to_vllm(staged, config, adapter_request(manifest.version).lora_int_id)
        for adapter_id in self.lora_manager.list_adapters():
            if version_of_adapter(adapter_id) not in kept:
                self.lora_manager.remove_adapter(adapter_id)
        self._pipeline.incoming_adapter = adapter
        try:
            self.lora_manager.add_adapter(adapter_request(manifest.version))
        finally:
            self._pipeline.incoming_adapter = None
        return time.perf_counter() - started_s

    def _to_vllm(self, staged: dict[str, Tensor], config: LoraConfig, adapter_id: int) -> tuple[LoRAModel, PEFTHelper]:
        """peft's adapter in vLLM's words, under the names of the layers as vLLM-Omni has them."""
        layers = {name for name, _ in self._modules()}
        tensors, adapted = {}, set()
        for name, tensor in staged.items():
            module, which, _ = name.removeprefix("base_model.model.").rsplit(".", 2)
            layer = _layer_name(self._name(module), layers)
            adapted.add(layer)
            tensors[f"{layer}.{which}.weight"] = tensor
        helper = PEFTHelper(
            r=config.r, lora_alpha=config.lora_alpha, target_modules=sorted(adapted), use_rslora=config.use_rslora
        )
        model = LoRAModel.from_lora_tensors(adapter_id, tensors, helper, device="cpu", dtype=self.od_config.dtype)
        return model, helper

    def _activate_step_lora(self, scheduler_output: DiffusionSchedulerOutput) -> None:
        """vLLM-Omni's, and the version of the adapter that this step runs with."""
        super()._activate_step_lora(scheduler_output)  # type: ignore[misc]
        if self.lora_manager is not None and self.lora_manager._active_adapter_id is not None:
            self._pipeline.weight_version = version_of_adapter(self.lora_manager._active_adapter_id)

    # -- what is asked of it ------------------------------------------------------------------------------
    def encode(self, texts: tuple[str, ...]) -> list[Condition]:
        """The conditions of prompts, between two steps of what is under way, or beside it (`engine.ASIDE`)."""
        return [self._pipeline.encode_condition(text) for text in texts]

    def prompt_cache_stats(self) -> dict[str, int]:
        """`hits`, `misses` and `size` of the cache of prompt embeddings."""
        return self.model_runner.get_prompt_embed_cache_stats()

    def device_name(self) -> str | None:
        """The accelerator's name; None on a CPU."""
        return accelerator_name()

    @property
    def _pipeline(self) -> RecordingPipeline:
        return self.model_runner.pipeline

    @cached_property
    def _model(self) -> DiffusionModel:
        return load_model(self.od_config.model)

    @property
    def _networks(self) -> dict[str, nn.Module]:
        """What is trained, by the names of the pipeline's attributes."""
        return {name: getattr(self.model_runner.pipeline, name) for name in self._model.experts}

    def _modules(self) -> Iterator[tuple[str, nn.Module]]:
        """All modules of what is trained, by their names in the pipeline."""
        for network, root in self._networks.items():
            for name, module in root.named_modules():
                yield f"{network}.{name}", module

    def _name(self, name: str) -> str:
        """The pipeline's name of what an update calls `name`: with several networks that begins with theirs."""
        (first, *others) = self._model.experts
        return name if others else f"{first}.{name}"

    def _expected_shapes(self, config: LoraConfig | None) -> dict[str, torch.Size]:
        if self._shapes is None:
            network = self._model.load_transformer(self.od_config.dtype, meta=True)
            if config is not None:
                network = get_peft_model(network, config)  # type: ignore[arg-type]
            self._shapes = {name: tensor.shape for name, tensor in tensors_of_update(network).items()}
        return self._shapes


def _layer_name(module: str, layers: set[str]) -> str:
    """diffusers' name of a layer as vLLM-Omni has it: there the first member of a `Sequential` may stand for it all."""
    parent, _, number = module.rpartition(".")
    return parent if number == "0" and module not in layers and parent in layers else module


def zmq_handle(local_rank: int) -> str:
    """Where the counterpart of this worker sends; verl's sender (`ServerAdapter.zmq_handle`) makes the same name."""
    job_id, replica_rank = os.environ["VERL_RAY_JOB_ID"], os.environ["VERL_REPLICA_RANK"]
    return f"ipc:///tmp/rl-colocate-zmq-{job_id}-replica-{replica_rank}-rank-{local_rank}.sock"
