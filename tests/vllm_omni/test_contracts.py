# SPDX-License-Identifier: Apache-2.0
"""Undocumented behaviour of vLLM and vLLM-Omni that this project relies on. No engine is started.

These tests fail first with another version; each names the code that would break without an error. What breaks with
one, such as a method with other arguments, the other tests of this folder find.
"""

import copy
import inspect
import queue
from contextlib import nullcontext
from dataclasses import fields, replace
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm_omni.diffusion.data import DiffusionOutput, OmniDiffusionConfig
from vllm_omni.diffusion.diffusion_engine import DiffusionEngine, DiffusionExecutionMode, _RpcTask
from vllm_omni.diffusion.distributed.autoencoders.autoencoder_kl_qwenimage import DistributedAutoencoderKLQwenImage
from vllm_omni.diffusion.lora.manager import DiffusionLoRAManager
from vllm_omni.diffusion.request import OmniDiffusionRequest
from vllm_omni.diffusion.sched.interface import DiffusionRequestStatus
from vllm_omni.diffusion.worker import diffusion_worker

import verl_digen
from tests.vllm_omni.conftest import RUN_SEED, SAMPLING, begin_recording, request
from verl_digen.algorithms.window import Window
from verl_digen.inputs.audio import Audio
from verl_digen.patches import vllm_omni_picture_processor
from verl_digen.rollout.vllm_omni import edit_pipelines, engine, pipeline
from verl_digen.rollout.vllm_omni.edit_pipelines import EditRecording
from verl_digen.rollout.vllm_omni.engine import BarrierQueue, BarrierRequestScheduler, BarrierStepScheduler
from verl_digen.rollout.vllm_omni.pipeline import recording_class
from verl_digen.rollout.vllm_omni.recorder import RECORDED, RecordingPipeline
from verl_digen.rollout.vllm_omni.requests import (
    ORDER,
    Published,
    RecordingOrder,
    adapter_request,
    to_prompt,
    to_sampling_params,
)
from verl_digen.rollout.vllm_omni.settings import ALLOWED
from verl_digen.rollout.vllm_omni.step_mode import StepRecordingMixin
from verl_digen.rollout.vllm_omni.worker import vLLMOmniColocateWorkerExtension
from verl_digen.types import Burst, Geometry


def engine_request(
    number: int = 0, *, published: Published | None = None, is_recorded: bool = True, burst: Burst | None = None
) -> Any:
    """A sample's request as vLLM-Omni's engine receives it."""
    asked = replace(request(number), burst=burst)
    adapter = None if published is None else adapter_request(published)
    params = to_sampling_params(RecordingOrder(asked, RUN_SEED, torch.float32), adapter)
    if not is_recorded:
        params.extra_args.pop(ORDER)
    return OmniDiffusionRequest(prompt=to_prompt(asked), sampling_params=params, request_id=f"r{number}")


def scheduler_of(kind: type, max_num_seqs: int = 4) -> Any:
    scheduler = kind()
    scheduler.initialize(SimpleNamespace(max_num_seqs=max_num_seqs, parallel_config=None, diffusion_kv_mode=None))
    return scheduler


def scheduled(scheduler: Any) -> list[str]:
    return list(scheduler.schedule().scheduled_request_ids)


# -- the scheduler and its barrier (engine.py) ------------------------------------------------------------
def test_a_held_scheduler_starts_nothing_keeps_what_runs_and_starts_the_rest_later():
    scheduler = scheduler_of(BarrierStepScheduler)
    scheduler.add_request(engine_request(0))
    assert scheduled(scheduler) == ["r0"] and scheduler.num_running_requests() == 1
    scheduler.add_request(engine_request(1))
    scheduler.is_held = True
    assert scheduled(scheduler) == ["r0"] and scheduler.has_requests()
    scheduler._running.clear()
    assert not scheduler.has_requests(), "the engine's loop sleeps"
    scheduler.is_held = False
    assert scheduler.has_requests()


def test_requests_of_two_adapters_never_share_a_batch():
    scheduler = scheduler_of(BarrierStepScheduler)
    for number, serial in enumerate((2, 2, 3)):
        scheduler.add_request(engine_request(number, published=Published(serial, 7)))
    assert scheduled(scheduler) == ["r0", "r1"]


def test_vllm_omnis_copy_of_a_requests_parameters_holds_the_same_order():
    params = engine_request(0).sampling_params
    assert copy.deepcopy(params).extra_args[ORDER] is params.extra_args[ORDER]


def test_requests_with_and_without_an_order_never_share_a_batch():
    scheduler = scheduler_of(BarrierRequestScheduler)
    for number, is_recorded in enumerate((True, True, False)):
        scheduler.add_request(engine_request(number, is_recorded=is_recorded))
    assert scheduled(scheduler) == ["r0", "r1"]


def test_a_batch_with_all_requests_that_were_announced_waits_for_no_further_one():
    scheduler = scheduler_of(BarrierRequestScheduler, max_num_seqs=8)
    scheduler.od_config.request_batch_max_wait_ms = 250.0

    def ends_after(waited_s: float) -> bool:
        decision = scheduler.get_admission_wait_decision(now=0.0)
        assert decision.should_wait
        return scheduler.should_end_admission_wait(decision, now=waited_s, stable_since=0.0)

    scheduler.add_request(engine_request(0, burst=Burst("a", 2)))
    assert not ends_after(0.001) and ends_after(0.06)
    scheduler.add_request(engine_request(1, burst=Burst("a", 2)))
    assert ends_after(0.001)
    assert scheduled(scheduler) == ["r0", "r1"]
    for number in (3, 4, 5):
        scheduler.add_request(engine_request(number, burst=Burst("b", 3)))
    scheduler._running.clear()
    assert set(scheduler._waiting) == {"r3", "r4", "r5"} and ends_after(0.001)


def test_requests_that_come_together_take_their_first_step_together(monkeypatch):
    scheduler = scheduler_of(BarrierStepScheduler)
    scheduler.add_request(engine_request(0, burst=Burst("a", 2)))
    assert scheduled(scheduler) == [] and not scheduler.has_requests(), "the engine's loop sleeps"
    scheduler.add_request(engine_request(1, burst=Burst("a", 2)))
    assert scheduler.has_requests() and scheduled(scheduler) == ["r0", "r1"]
    scheduler.add_request(engine_request(2, burst=Burst("b", 2)))
    assert scheduled(scheduler) == ["r0", "r1"] and scheduler.has_requests()
    scheduler._running.clear()
    monkeypatch.setattr(engine, "BURST_WAIT_S", 0.0)
    assert scheduler.has_requests() and scheduled(scheduler) == ["r2"], "the other one never comes"
    scheduler._running.clear()
    monkeypatch.setattr(engine, "BURST_WAIT_S", 600.0)
    scheduler.add_request(engine_request(3, burst=Burst("b", 2)))
    assert scheduled(scheduler) == [], "it is the first of two, as what came before has ended"


@pytest.mark.parametrize("kind", [BarrierStepScheduler, BarrierRequestScheduler])
def test_groups_that_do_not_share_batches_run_one_after_the_other(kind):
    scheduler = scheduler_of(kind)
    for number in (0, 1, 3, 4):  # two of each group
        scheduler.add_request(engine_request(number, burst=Burst(str(number // 3), 2)))
    assert scheduled(scheduler) == ["r0", "r1"]
    scheduler._running.clear()
    assert scheduled(scheduler) == ["r3", "r4"]


class BareEngine(engine.VersionedEngine):
    """An engine without a model: its queue of calls, and an executor that records them."""

    def __init__(self, scheduler: Any):
        self.scheduler = scheduler
        self._rpc_queue = BarrierQueue(scheduler)
        self.called: list[str] = []
        self.executor = SimpleNamespace(collective_rpc=lambda method, **kwargs: self.called.append(method))

    def call(self, method: str) -> Any:
        task = _RpcTask(method=method, args=(), kwargs=None, deadline=None, unique_reply_rank=None)
        self._rpc_queue.put(task)
        return task.future


def test_the_engines_loop_takes_calls_one_by_one_and_leaves_a_barrier_call_while_samples_run():
    scheduler = scheduler_of(BarrierStepScheduler)
    engine = BareEngine(scheduler)
    scheduler.add_request(engine_request(0))
    scheduled(scheduler)
    engine.call("encode")
    done = engine.call("commit_weights")
    engine._process_rpc_queue()
    assert engine.called == ["encode"] and scheduler.is_held and not done.done()
    scheduler._running.clear()
    engine._process_rpc_queue()
    assert engine.called == ["encode", "commit_weights"] and not scheduler.is_held and done.done()


def test_an_engine_that_stops_fails_every_call_that_waits():
    scheduler = scheduler_of(BarrierStepScheduler)
    engine = BareEngine(scheduler)
    scheduler._running.append("r0")
    waiting = engine.call("commit_weights")
    engine._fail_pending_rpcs(RuntimeError("stopping"))
    with pytest.raises(RuntimeError, match="stopping"):
        waiting.result(timeout=0)


def test_the_engine_makes_its_scheduler_and_queue_in_methods_that_can_be_overridden():
    engine: Any = DiffusionEngine.__new__(DiffusionEngine)
    engine.od_config = SimpleNamespace(max_num_seqs=1, parallel_config=None, request_batch_max_wait_ms=0)
    engine.execution_mode = DiffusionExecutionMode.STEP_BATCH
    ours = BarrierStepScheduler()
    engine._init_scheduler(SimpleNamespace(max_num_seqs=1, parallel_config=None, diffusion_kv_mode=None), ours)
    assert engine.scheduler is ours
    engine._init_runtime_state()
    assert isinstance(engine._rpc_queue, queue.Queue) and engine._rpc_queue.empty()
    for name in ("_init_process_hooks", "_init_scheduler", "_init_runtime_state", "_process_rpc_queue"):
        assert f"self.{name}(" in inspect.getsource(DiffusionEngine), f"nobody calls {name}"


# -- adapters (worker.py, recorder.py) --------------------------------------------------------------------
class Pipeline(nn.Module):
    """A network of two layers, with the hooks of `RecordingPipeline`."""

    def __init__(self) -> None:
        from vllm.model_executor.layers.linear import ReplicatedLinear

        super().__init__()
        self.transformer = nn.ModuleDict({name: ReplicatedLinear(8, 8, bias=False) for name in ("first", "second")})
        for parameter in self.parameters():
            nn.init.normal_(parameter)
        self.incoming: Any = None
        self.bound: frozenset[str] = frozenset()

    def _load_diffusion_lora_adapter(self, *, lora_request: Any, lora_path: str, dtype: torch.dtype) -> Any:
        return self.incoming

    def _validate_diffusion_lora_binding(self, *, lora_model: Any, bound_lora_names: frozenset[str]) -> None:
        self.bound = bound_lora_names


def adapter(serial: int, *modules: str) -> tuple[LoRAModel, PEFTHelper]:
    names = [f"transformer.{module}" for module in modules]
    tensors = {}
    for name in names:
        tensors[f"{name}.lora_A.weight"] = torch.full((4, 8), float(serial))
        tensors[f"{name}.lora_B.weight"] = torch.ones(8, 4)
    helper = PEFTHelper(r=4, lora_alpha=8, target_modules=names, use_rslora=False)
    return LoRAModel.from_lora_tensors(serial, tensors, helper, device="cpu", dtype=torch.float32), helper


def manager_of(pipeline: Any) -> Any:
    return DiffusionLoRAManager(pipeline, torch.device("cpu"), torch.float32, max_cached_adapters=8)


def register(manager: Any, serial: int, *modules: str) -> bool:
    manager.pipeline.incoming = adapter(serial, *modules)
    return manager.add_adapter(adapter_request(Published(serial, 1)))


def test_vllm_names_an_adapters_modules_by_its_tensors():
    assert set(adapter(1, "first", "second")[0].loras) == {"transformer.first", "transformer.second"}


def test_an_adapter_id_is_registered_once_and_the_answer_says_so(one_worker):
    manager = manager_of(Pipeline())
    assert register(manager, 2, "first") is True
    assert register(manager, 2, "second") is False, "the first one is kept, and nothing else is said"
    assert register(manager, 3, "first") is True
    assert manager.list_adapters() == [2, 3]
    assert manager.remove_adapter(2) is True and manager.list_adapters() == [3]
    assert isinstance(manager.pipeline.transformer["first"], BaseLayerWithLoRA)


def test_activating_binds_modules_by_name_and_says_which(one_worker):
    manager = manager_of(Pipeline())
    register(manager, 2, "first", "second")
    manager.set_active_adapter(adapter_request(Published(2, 1)))
    assert manager.pipeline.bound == {"transformer.first", "transformer.second"}
    assert manager._active_adapter_id == 2
    register(manager, 3, "first", "elsewhere")
    says = nullcontext() if version("vllm-omni").startswith("0.28.") else pytest.raises(ValueError, match="elsewhere")
    manager.pipeline.bound = frozenset()
    with says:  # 0.28 leaves out a module without a layer and says nothing
        manager.set_active_adapter(adapter_request(Published(3, 1)))
    assert "transformer.elsewhere" not in manager.pipeline.bound


def test_more_adapters_than_the_cache_holds_push_the_oldest_out(one_worker):
    manager = manager_of(Pipeline())
    manager.max_cached_adapters = 2
    for serial in (2, 3, 4):
        register(manager, serial, "first")
    assert manager.list_adapters() == [3, 4], "so `vLLMOmniColocateWorkerExtension` sets no limit"


# -- the worker and its extension (worker.py) -------------------------------------------------------------
def test_an_extension_comes_before_the_worker_and_can_override_its_start():
    wrapper: Any = diffusion_worker.WorkerWrapperBase.__new__(diffusion_worker.WorkerWrapperBase)
    wrapper.base_worker_class = diffusion_worker.DiffusionWorker
    wrapper.custom_pipeline_args = {"pipeline_class": "x"}
    wrapper.uses_custom_pipeline = True  # what 0.30 asks
    wrapper.worker_extension_cls = vLLMOmniColocateWorkerExtension
    extended = wrapper._prepare_worker_class()
    assert extended.__mro__[1:3] == (vLLMOmniColocateWorkerExtension, diffusion_worker.CustomPipelineWorkerExtension)
    for name in ("init_device", "init_lora_manager", "_activate_step_lora"):
        assert getattr(extended, name) is getattr(vLLMOmniColocateWorkerExtension, name)
        assert callable(getattr(diffusion_worker.DiffusionWorker, name))
    assert callable(extended.re_init_pipeline)


def test_a_worker_first_imports_the_users_modules():
    worker: Any = vLLMOmniColocateWorkerExtension.__new__(vLLMOmniColocateWorkerExtension)
    worker.od_config = SimpleNamespace(custom_pipeline_args={"external_lib": "nosuch"})
    with pytest.raises(ValueError, match=r"model\.external_lib must name modules that can be imported, got 'nosuch'"):
        worker.init_device()


@pytest.mark.parametrize("part", ["latents", "pixels", "sound"])
@pytest.mark.parametrize(("number", "is_refused"), [(0.5, False), (torch.nan, True), (torch.inf, True)])
def test_a_record_says_that_its_numbers_are_not_finite(part, number, is_refused):
    asked = replace(request(2), window=Window((), ()), wants_latents=True)
    pipeline = RecordingPipeline()
    recording = begin_recording(pipeline, asked, (2, 3))
    recording.log_probs = [torch.zeros(())] * asked.sampling.num_steps
    pixels, waveform = torch.zeros(1, 3, 4, 4), np.zeros((1, 8), np.float32)
    place = {"latents": recording.latents, "pixels": pixels, "sound": waveform}[part]
    place[(0,) * place.ndim] = number
    output = DiffusionOutput(output=pixels)
    pipeline.finish_recording(recording, output, Audio(waveform, 8000))
    assert output.output is not None
    error, generation = (output.output["payload"]["trajectory"][RECORDED][name] for name in ("error", "generation"))
    recording.latents.fill_(5.0)
    assert not (generation.latents.final == 5.0).any(), "vLLM-Omni writes into latents"
    assert (error is not None) == is_refused and (not is_refused or f"finite {part}" in str(error))


# -- pipelines (pipeline.py, edit_pipelines.py) ------------------------------------------------------------
def test_kontext_ignores_the_output_type_of_a_request():
    """When this fails, remove `forward_recorded` of `edit_pipelines.py`."""
    own = recording_class("FluxKontextPipeline").__bases__[1]
    assert "req.sampling_params.output_type" not in inspect.getsource(own.forward)


def test_the_package_has_the_rfcs_names_of_vllm_omni():
    for name, module in verl_digen.RFC_NAMES.items():
        if "vllm_omni" in module:
            assert getattr(verl_digen, name).__module__ == f"verl_digen.{module}"
    assert verl_digen.QwenImagePipelineWithLogProb is pipeline.RecordingQwenImagePipeline
    assert issubclass(pipeline.QwenImagePipelineWithLogProb, RecordingPipeline)


def test_requests_with_other_images_never_share_a_batch():
    scheduler = scheduler_of(BarrierRequestScheduler)
    sizes = [((64, 96),), ((64, 96),), ((96, 64),), (), ((64, 96), (64, 96))]
    for number, sources in enumerate(sizes):
        asked = engine_request(number)
        order = asked.sampling_params.extra_args[ORDER]
        sampling = replace(order.request.sampling, geometry=Geometry(64, 64, 1, sources))
        asked.sampling_params.extra_args[ORDER] = replace(order, request=replace(order.request, sampling=sampling))
        scheduler.add_request(asked)
    for running in (["r0", "r1"], ["r2"], ["r3"], ["r4"]):
        assert scheduled(scheduler) == running
        for finished in running:
            scheduler.finish_requests(finished, DiffusionRequestStatus.FINISHED_COMPLETED)
            scheduler.pop_request_state(finished)


@pytest.mark.parametrize(
    ("pipeline", "module", "network"),
    [
        ("FluxKontextPipeline", "flux.flux_transformer", "FluxKontextTransformer2DModel"),
        ("FluxPipeline", "flux.flux_transformer", "FluxTransformer2DModel"),
        ("HunyuanVideo15Pipeline", "hunyuan_video.hunyuan_video_15_transformer", "HunyuanVideo15Transformer3DModel"),
    ],
)
def test_a_network_names_its_packed_layers_where_no_lora_manager_looks(pipeline, module, network):
    """When this fails, remove `_name_packed_layers`."""
    import importlib

    found = getattr(importlib.import_module(f"vllm_omni.diffusion.models.{module}"), network)
    assert found.packed_modules_mapping
    assert not hasattr(found, "stacked_params_mapping")


# -- settings (settings.py) -------------------------------------------------------------------------------
def test_settings_that_are_passed_on_are_fields_of_the_engines_config_or_of_its_start():
    known = {field.name for field in fields(OmniDiffusionConfig)}
    elsewhere = {"diffusion_attention_backend", "fa_deterministic", "init_timeout", "stage_init_timeout"}
    assert ALLOWED.keys() - known <= elsewhere


@pytest.mark.parametrize("mixin", [StepRecordingMixin, EditRecording])
def test_the_vae_of_a_qwen_image_pipeline_decodes_without_3d_convolutions(tiny_qwen_image, monkeypatch, mixin):
    """It is diffusers', loaded by the pipeline's constructor; `verl_digen.models.qwen_image.take_one_frame`."""

    class Pipeline:
        def __init__(self, *, od_config, prefix):
            self.vae = DistributedAutoencoderKLQwenImage.from_pretrained(tiny_qwen_image / "vae")

    model = SimpleNamespace(pipeline_parts=lambda: {"processor": None})
    monkeypatch.setattr(edit_pipelines, "load_model", lambda path: model)
    monkeypatch.setattr(DistributedAutoencoderKLQwenImage, "init_distributed", lambda vae: None)
    monkeypatch.setattr(vllm_omni_picture_processor, "made_of_pictures", lambda *given: nullcontext())
    config = SimpleNamespace(model="", custom_pipeline_args={"decode_batch_size": 1})
    vae = type("Recording", (mixin, Pipeline), {})(od_config=config).vae
    monkeypatch.setattr(nn.Conv3d, "_conv_forward", None)
    assert vae.decode(torch.zeros(1, vae.config.z_dim, 1, 4, 4), return_dict=False)[0].isfinite().all()


def test_a_recording_begins_with_the_latents_that_another_kept_and_never_writes_into_them():
    pipeline, window = RecordingPipeline(), Window((2, 3), (2, 3))
    asked = replace(request(0, replace(SAMPLING, shared_initial_noise=True)), window=window)
    first, second, third = (begin_recording(pipeline, replace(asked, sample_index=one), (2, 3)) for one in range(3))
    assert pipeline.steps_to_run(first) == 2
    first.log_probs, first.predicted = [torch.zeros(())] * 2, object()
    pipeline.keep_prefix(first)
    kept = first.latents.clone()
    assert first.predicted is None, "the window's first step is stochastic"
    for one in (first, second):
        one.latents.fill_(5.0)
    for one in (second, third):
        assert pipeline.steps_to_run(one) == 0 and one.num_shared_steps == one.num_taken == 2
        assert torch.equal(one.latents, kept)
        one.latents.fill_(5.0)
