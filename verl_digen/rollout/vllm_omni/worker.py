# SPDX-License-Identifier: Apache-2.0
"""Extension of vLLM-Omni's worker: receives new weights, and knows which version it runs.

    begin_update        a thread receives the buckets: into host memory while generation continues, or, live, into the
                        network, while the server admits nothing
    seal_weights        checks that full weights are complete and have the network's names and shapes
    commit_weights      loads them unless they are; a barrier call (`engine.BARRIER`), alone between trajectories
    commit_adapter      registers the LoRA adapter of one update; each request names its adapter, so nothing waits

| silent fault | check |
| --- | --- |
| a tensor is lost, duplicated or corrupted in transfer | number and checksum of the tensors sent |
| a tensor is missing, unknown or of another shape | the checkpoint's names and shapes |
| vLLM-Omni skips a tensor, e.g. of a layer that LoRA has wrapped | the checksum of the network after loading |
| vLLM-Omni keeps an older adapter of the same id | one id per update, and the answer of `add_adapter` |
| a module of an adapter has no layer | the adapter is activated at registration: modules bound = modules sent |
| a layer has not the adapter's numbers | the checksum of the layers after that |

A staged update is compared before the loaded weights change, and after an error the old ones keep serving. With tensor
parallelism a worker holds shards, whose checksum differs from the update's. The server requires that the sum over the
workers changes with it.
"""

import time
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.distributed import HashStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage] - public, says its doc
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm_omni.diffusion.sched.interface import DiffusionSchedulerOutput
from vllm_omni.diffusion.worker.diffusion_worker import CustomPipelineWorkerExtension
from vllm_omni.platforms import current_omni_platform

from verl_digen.inputs.images import PromptInputs
from verl_digen.models import load_model
from verl_digen.models.base import DiffusionModel
from verl_digen.models.checkpoint import load_network
from verl_digen.models.kernels import compute_exactly
from verl_digen.models.pixels import decode_in
from verl_digen.platforms.device_memory import accelerator_name
from verl_digen.rollout.birth import SeenDevice, visible_device
from verl_digen.rollout.vllm_omni.recorder import OTHER_MODULES, RecordingPipeline
from verl_digen.rollout.vllm_omni.requests import Published, Taken, adapter_request
from verl_digen.rollout.vllm_omni.settings import address
from verl_digen.types import Condition
from verl_digen.user_modules import import_user_modules
from verl_digen.weights.checksum import Checksum, Manifest, checksum
from verl_digen.weights.gloo import TIMEOUT, open_store
from verl_digen.weights.host_copies import HostPool
from verl_digen.weights.receiver import OLD_WEIGHTS_SERVE, Live, Update, tensors_of_update
from verl_digen.weights.receiving import Named, Receiving

NO_LIMIT = 1 << 16
"""Number of adapters at which vLLM-Omni evicts the least recently used one; never reached."""
HOST = "127.0.0.1"


class vLLMOmniColocateWorkerExtension(CustomPipelineWorkerExtension):
    """Mixin for vLLM-Omni's worker (`worker_extension_cls`)."""

    model_runner: Any
    lora_manager: Any
    od_config: Any
    device: torch.device
    local_rank: int
    rank: int

    _sealed: tuple[Published, Manifest, Update] | None = None
    """Sealed full weights, not yet committed."""
    _receiving: tuple[Receiving, Update] | None = None
    """Update being received, and its destination."""
    _shapes: dict[str, torch.Size] | None = None
    """Expected tensor shapes; read at the first update (all updates of a run are of the same kind)."""

    def init_device(self) -> None:
        """Import the user's modules, create the default process group over a store that listens only on loopback, then
        run vLLM-Omni's method."""
        import_user_modules(self.od_config.custom_pipeline_args["external_lib"])
        num_workers = self.od_config.num_gpus
        torch.distributed.init_process_group(
            backend=current_omni_platform.dist_backend,
            store=loopback_store(self.od_config.master_port, rank=self.rank, num_workers=num_workers),
            rank=self.rank,
            world_size=num_workers,
        )
        super().init_device()  # type: ignore[misc]

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the pipeline; its VAE then decodes in the dtype in which a `diffusers` replica's does."""
        compute_exactly(self.od_config.dtype)
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        if self.model_runner.pipeline is None:  # it is loaded later
            return
        vae, dtype = self.model_runner.pipeline.vae, self._model.decoder_dtype(self.od_config.dtype)
        decode_in(vae, dtype)
        if dtype != self.od_config.dtype:  # in which its weights may have been loaded
            stored = load_network(self._model.path / "vae", self._model.index["vae"][1], dtype)
            vae.load_state_dict(stored.state_dict())

    def init_lora_manager(self) -> None:
        """Create vLLM-Omni's LoRA manager without its eviction: `commit_adapter` drops adapters itself."""
        super().init_lora_manager()  # type: ignore[misc]
        if self.lora_manager is not None:
            self.lora_manager.max_cached_adapters = NO_LIMIT

    def sleep(self, level: int = 1) -> int:
        """Run vLLM-Omni's method without the embeddings of prompts, which lie on the device and would stay there."""
        self.model_runner.clear_prompt_embed_cache()
        return super().sleep(level)  # type: ignore[misc]

    # -- receiving ----------------------------------------------------------------------------------------
    def begin_update(self, sockets: str, use_shm: bool, timeout_s: float, is_live: bool) -> None:
        """Start to receive the buckets sent by this worker's trainer rank, at the sender's `sockets_of`. An unfinished
        older update, whose sender was lost, is cancelled. `is_live`: load full weights into the network as they arrive;
        no sample runs meanwhile."""
        if self._receiving is not None:
            self._receiving[0].abandon()
        if is_live:
            self._require_unwrapped()
        into = Live(self._expected_shapes(None), self._load) if is_live else HostPool(self.device)
        update = Update(lambda name: self.od_config.dtype, into)
        receiving = Receiving(
            address(sockets, self.local_rank), self.device, update.take, use_shm=use_shm, timeout_s=timeout_s
        )
        self._receiving = receiving, update

    def _load(self, bucket: Named) -> set[str]:
        """Load tensors of an update -> vLLM-Omni's names of what it loaded."""
        return self.model_runner.pipeline.load_weights((self._name(name), tensor) for name, tensor in bucket)

    def _require_unwrapped(self) -> None:
        wrapped = next((name for name, module in self._modules() if isinstance(module, BaseLayerWithLoRA)), None)
        if wrapped is not None:
            raise RuntimeError(
                "full weights were sent to a replica that serves a LoRA adapter, whose layers would skip them, e.g. "
                f"{wrapped}; send the adapter alone, or merged weights from the first update on "
                f"(actor_rollout_ref.model.lora.merge=true); {OLD_WEIGHTS_SERVE}"
            )

    def _wait_for_arrival(self, manifest: Manifest) -> Update:
        if self._receiving is None:
            raise RuntimeError("begin_update must come before a commit")
        (receiving, update), self._receiving = self._receiving, None
        receiving.finish(manifest)
        return update

    # -- full weights -------------------------------------------------------------------------------------
    def seal_weights(self, manifest: Manifest, published: Published) -> None:
        """Check the received full weights and make them ready for `commit_weights`, as the update `published`.
        RuntimeError if the tensors do not match the network's; names them, and the weights that serve now."""
        update = self._wait_for_arrival(manifest)
        self._require_unwrapped()
        update.check_complete(self._expected_shapes(None))
        self._sealed = published, manifest, update

    def commit_weights(self) -> Taken:
        """Load the newest sealed full weights, unless they were loaded as they arrived, and check the network.
        RuntimeError if nothing is sealed; or the network differs from the tensors sent, and the message says that it
        holds neither the old nor the new weights."""
        started_s = time.perf_counter()
        if self._sealed is None:
            raise RuntimeError("no weight update is waiting to be loaded; seal one first")
        (published, manifest, update), self._sealed = self._sealed, None
        self._pipeline.prefixes.clear()
        sent = update.loaded_checksum(manifest.checksum)
        held = self._check_loaded(sent, update.finish(self._load))
        self._pipeline.weight_version = published.version
        return Taken(published, sent, held, time.perf_counter() - started_s)

    def _check_loaded(self, sent: int, loaded: set[str]) -> int:
        """Check that every parameter was loaded, with the numbers that were sent -> checksum of what was loaded.
        vLLM-Omni fuses tensors but changes none of their numbers, so the checksums before and after are equal. (An
        update holds some buffers; those are loaded, too.)"""
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
        dtype = self.od_config.dtype
        found = checksum(tensor.to(dtype) for name, tensor in held.items() if name in loaded)
        if self._is_whole and found != sent:
            raise RuntimeError(
                "vLLM-Omni did not load all of an update: the network's checksum differs from what was sent. Its "
                "weights are neither the old nor the new ones; the replica must be started again"
            )
        return found

    # -- adapters -----------------------------------------------------------------------------------------
    def commit_adapter(
        self, manifest: Manifest, config: LoraConfig, published: Published, kept: frozenset[int]
    ) -> Taken:
        """Register the received adapter under the serial of `published`. Adapters that no request in flight uses
        (`kept`: the serials that are used) are dropped. RuntimeError if the update does not match the adapter of
        `config`, or vLLM-Omni did not register all of it; names the tensors or modules. Older adapters still serve."""
        started_s = time.perf_counter()
        update = self._wait_for_arrival(manifest)
        update.check_complete(self._expected_shapes(config))
        adapter = self._to_vllm(update.staged, config, published.serial)
        for serial in self.lora_manager.list_adapters():
            if serial not in kept:
                self.lora_manager.remove_adapter(serial)
        sent, held = self._register(published, adapter, update.staged)
        serials = self.lora_manager.list_adapters()
        self._pipeline.adapter_versions = {
            serial: version
            for serial, version in {**self._pipeline.adapter_versions, published.serial: published.version}.items()
            if serial in serials
        }
        return Taken(published, sent, held, time.perf_counter() - started_s)

    def _register(
        self, published: Published, adapter: tuple[LoRAModel, PEFTHelper], staged: Mapping[str, Tensor]
    ) -> tuple[int, int]:
        """Register an adapter with vLLM-Omni and activate it once, which binds its modules to layers -> checksums of
        what was sent and of what the layers hold. Every step activates the adapter of its own requests, so requests in
        flight are not affected."""
        request = adapter_request(published)
        modules = frozenset(adapter[0].loras)
        self._pipeline.incoming_adapter = adapter
        self._pipeline.bound_modules = frozenset()
        try:
            if not self.lora_manager.add_adapter(request):
                raise RuntimeError(
                    f"vLLM-Omni kept an older adapter in place of update {published.serial} (version "
                    f"{published.version}); the old weights keep serving"
                )
            try:
                self.lora_manager.set_active_adapter(request)
            except ValueError as error:  # of vLLM-Omni 0.30, which compares before it asks the pipeline
                raise RuntimeError(
                    f"modules of the adapter have no layer that takes them: {error}; {OTHER_MODULES}"
                ) from error
            bound = self._pipeline.bound_modules
            if not modules or bound != modules:
                raise RuntimeError(
                    f"vLLM-Omni bound {len(bound)} of the {len(modules)} modules of an adapter to layers, not e.g. "
                    f"{min(modules - bound, default='any')}; the old weights keep serving"
                )
            return self._check_bound(staged, adapter[1].vllm_lora_scaling_factor)
        except Exception:
            self.lora_manager.remove_adapter(published.serial)
            raise
        finally:
            self._pipeline.incoming_adapter = None

    def _check_bound(self, staged: Mapping[str, Tensor], scaling: float) -> tuple[int, int]:
        """Check that the layers hold the active adapter -> checksums of what was sent, and of what they hold. `staged`:
        the adapter as it was sent. `scaling`: factor that vLLM multiplies into B."""
        adapted: dict[str, Any] = {name: one for name, one in self._modules() if isinstance(one, BaseLayerWithLoRA)}
        held = checksum(
            slot[0] for layer in adapted.values() for slot in (*layer.lora_a_stacked, *layer.lora_b_stacked)
        )
        layers, sent = {name for name, _ in self._modules()}, Checksum()
        for name, tensor in staged.items():
            layer, which = self._place(name, layers)
            numbers = tensor.to(self.od_config.dtype)
            # a layer of several slices that has one adapter holds its A once per slice, and a part of B in each
            copies = len(adapted[layer].lora_a_stacked) if which == "lora_A" and layer in adapted else 1
            for _ in range(copies):
                sent.add(numbers if which == "lora_A" else numbers * scaling)
        if self._is_whole and sent.value != held:
            raise RuntimeError(
                f"an adapter with checksum {sent.value:x} did not reach the layers, which hold {held:x}; the old "
                "weights keep serving"
            )
        return sent.value, held

    def _place(self, name: str, layers: set[str]) -> tuple[str, str]:
        """vLLM-Omni's layer, and `lora_A` or `lora_B`, of an adapter's tensor."""
        module, which, _ = name.removeprefix("base_model.model.").rsplit(".", 2)
        return _layer_name(self._name(module), layers), which

    def _to_vllm(self, staged: dict[str, Tensor], config: LoraConfig, adapter_id: int) -> tuple[LoRAModel, PEFTHelper]:
        """peft's adapter in vLLM's format, with vLLM-Omni's layer names."""
        layers = {name for name, _ in self._modules()}
        tensors, adapted = {}, set()
        for name, tensor in staged.items():
            layer, which = self._place(name, layers)
            adapted.add(layer)
            # a copy: vLLM multiplies the scaling into B in place, and what was sent is compared afterwards
            tensors[f"{layer}.{which}.weight"] = tensor.to(self.od_config.dtype, copy=True)
        helper = PEFTHelper(
            r=config.r, lora_alpha=config.lora_alpha, target_modules=sorted(adapted), use_rslora=config.use_rslora
        )
        model = LoRAModel.from_lora_tensors(adapter_id, tensors, helper, device="cpu", dtype=self.od_config.dtype)
        return model, helper

    def _activate_step_lora(self, scheduler_output: DiffusionSchedulerOutput) -> None:
        """Run vLLM-Omni's method, then set the weight version from the active adapter."""
        super()._activate_step_lora(scheduler_output)  # type: ignore[misc]
        if self.lora_manager is not None and self.lora_manager._active_adapter_id is not None:
            self._pipeline.weight_version = self._pipeline.adapter_versions[self.lora_manager._active_adapter_id]

    # -- queries ------------------------------------------------------------------------------------------
    def encode(self, prompts: tuple[PromptInputs, ...]) -> list[Condition]:
        """Conditions of prompts; computed between two steps of the running batch, or concurrently (`engine.ASIDE`)."""
        return [self._pipeline.encode_condition(inputs) for inputs in prompts]

    def state(self) -> tuple[dict[str, int], str | None]:
        """(`hits`, `misses` and `size` of the cache of prompt embeddings, the accelerator's name or None on a CPU)."""
        return self.model_runner.get_prompt_embed_cache_stats(), accelerator_name()

    def visible_devices(self) -> list[SeenDevice]:
        """Devices of the replica's workers, by rank; on a CPU, logical ones. vLLM-Omni returns only rank 0's answer."""
        devices = [visible_device(self.local_rank)] * self.od_config.num_gpus
        torch.distributed.all_gather_object(devices, devices[0])
        return devices

    @property
    def _is_whole(self) -> bool:
        """True if this worker holds all numbers of each layer."""
        return self.od_config.parallel_config.tensor_parallel_size == 1

    @property
    def _pipeline(self) -> RecordingPipeline:
        return self.model_runner.pipeline

    @cached_property
    def _model(self) -> DiffusionModel:
        return load_model(self.od_config.model)

    @property
    def _networks(self) -> dict[str, nn.Module]:
        """Trained networks, by attribute name in the pipeline."""
        return {name: getattr(self.model_runner.pipeline, name) for name in self._model.experts}

    def _modules(self) -> Iterator[tuple[str, nn.Module]]:
        """All modules of the trained networks, with their names in the pipeline."""
        for network, root in self._networks.items():
            for name, module in root.named_modules():
                yield f"{network}.{name}", module

    def _name(self, name: str) -> str:
        """The pipeline's name for an update's `name`; with several networks, updates already prefix the network's."""
        (first, *others) = self._model.experts
        return name if others else f"{first}.{name}"

    def _expected_shapes(self, config: LoraConfig | None) -> dict[str, torch.Size]:
        if self._shapes is None:
            network = self._model.load_structure(self.od_config.dtype)
            if config is not None:
                network = get_peft_model(network, config)  # type: ignore[arg-type]
            self._shapes = {name: tensor.shape for name, tensor in tensors_of_update(network).items()}
        return self._shapes


def _layer_name(module: str, layers: set[str]) -> str:
    """vLLM-Omni's name for diffusers' layer `module`: a `Sequential` may be replaced there by its first member."""
    parent, _, number = module.rpartition(".")
    return parent if number == "0" and module not in layers and parent in layers else module


def loopback_store(port: int, *, rank: int, num_workers: int) -> Store:
    """Rendezvous store of worker `rank`; a single worker needs no port. All workers are on one node, so it listens on
    loopback, where other machines cannot reach it."""
    if num_workers == 1:
        return HashStore()
    # another worker may have to load its part of the model first
    return open_store(HOST, port) if rank == 0 else TCPStore(HOST, port, is_master=False, timeout=TIMEOUT)
