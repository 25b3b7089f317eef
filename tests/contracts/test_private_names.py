# SPDX-License-Identifier: Apache-2.0
"""Private and undocumented names of other projects that this one uses, each held by what it does.

| name | used in | relied on |
| --- | --- | --- |
| FSDP2 `_get_fsdp_state`, `_fsdp_param_groups`, `fsdp_params` | engine/fsdp2.py | a record of every parameter |
| FSDP2 `FSDPParamGroup.unshard`, `_to_sharded` | engine/whole_groups.py | one more group (test_whole_base.py) |
| FSDP2 `sharded_param`, `_unsharded_param`, `unsharded_accumulated_grad` | engine/gradients.py | a gradient's places |
| FSDP2 `_root_post_backward_final_callback` | engine/gradients.py | reduces what no backward reduced |
| FSDP2 `reset_iter_state`, before 2.13 what it resets | engine/fsdp2.py | a failed forward or backward is over |
| FSDP2 `_is_root` | engine/gathered.py | there is a root from the first forward on |
| FSDP2 `DefaultAllGather`, `DefaultReduceScatter` | engine/rejoin.py | its collectives (test_two_ranks_tight.py) |
| FSDP2 `_mp_policy` | engine/build.py | read at every forward; its `cast_forward_inputs` |
| torch `Module._apply` | engine/offload.py | moves every tensor of a module (tests/engine/test_offload.py) |
| FSDPMemTracker `memory_tracking`, `_FSDPModMemStats` | tests/plan/fake_engine.py | an expert that does not run |
| FSDP2 `mp_policy` of a parameter | engine/gradients.py | the reduce dtype |
| FSDP2 `init_dtype_attrs` of a parameter | engine/build.py | called by the first forward; the dtype that is gathered |
| peft `BaseTunerLayer._disable_adapters` | engine/policies.py | a forward without it, `requires_grad` untouched |
| verl `TrainingWorker._postprocess_output` | engine/worker.py | metrics as `update` returns them |
| verl `EngineRegistry._engines`, `RolloutReplicaRegistry._registry` | tools/checkup/machine.py | dicts of names |
| verl `CheckpointEngineRegistry._registry` | preflight/pools.py | a dict of names, and the names of verl's engines |
| verl `_ROLLOUT_REGISTRY` | plugin.py | a dict of (name, mode) |
| verl `RolloutReplica._server_handle`, `_server_address` | rollout/replica.py | what the public properties return |
| verl `register`'s attributes of a method | engine/worker.py | dispatch and `blocking` are kept with the method |
| TransferQueue `KVBatchMeta` and the `kv_*` calls | store/, trainer/ | names of fields and parameters |
| Ray `ActorUnavailableError`, `ActorDiedError`, `RayActorError` | agent_loop/, trainer/ | which is a kind of which |
| Ray `_private.state.actors` | processes/actors.py | an actor that starts again (tests/processes/test_workers.py) |
| Ray `_private.services.find_bootstrap_address`, `_private.utils.get_num_cpus` | cluster.py | two functions |
| Ray `ActorHandle._actor_id` | trainer/replicas.py | the id that an ActorUnavailableError names |
| Ray `ActorHandle.__ray_call__` | trainer/lanes.py | runs a function in any actor (tests/trainer/test_replicas.py) |
| TransferQueue client `_loop` | store/client.py | runs its blocking calls (tests/e2e/test_hangs.py) |
| Hydra `JobReturn._return_value` | preflight/callback.py | the exception, unraised |
| omegaconf `_get_node`, `_is_none` | config/load.py | a child as a node, not as its value |
| TensorBoard `_get_file_writer` | observe/trackers.py | encoded pictures as they are |
| plotly `package_data/plotly.min.js` | report/page.py | one script that fetches nothing (tests/report) |
| diffusers `_repeated_blocks`, `_no_split_modules` | models/kernels.py | blocks (tests/models/test_kernels.py) |
| torch `_dynamo.config`, `_functorch.config` | models/kernels.py | two names; unknown ones raise |
| diffusers `_unpack_latents`, `_prepare_latent_image_ids` | models/ | the packing of two pipelines |
| diffusers `_encode_vae_image`, `_pack_latents` | models/ | latents of images (tests/models) |
| diffusers `_patchify_latents`, `_unpatchify_latents`, `_resize_if_exceeds_area` | models/ | FLUX.2's (tests/models) |
| diffusers `_get_image_latents`, `_get_image_embeds` | models/ | an image of HunyuanVideo 1.5 (tests/models) |
| diffusers `_cp_plan`, `ContextParallelConfig`, -`Input`, -`Output` | models/ | tokens split and gathered by a plan |
| verl `use_remove_padding`, `use_ulysses_sp`, `is_mp_src_rank_with_outputs` | engine/ | ranks that share rows |

`test_overrides.py` has the methods we override, `tests/vllm_omni` what we use of vLLM-Omni.
"""

import inspect
import re
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import diffusers
import pytest
import torch
import verl  # noqa: F401 - first: it loads the plugin
from diffusers import ModelMixin
from packaging.version import Version
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from tests.engine.harness import process_group
from verl_digen.engine.fsdp2 import groups_of, parameters_of, reset, units_of


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with process_group(0, 1, str(tmp_path_factory.mktemp("rendezvous") / "store")):
        yield


# -- FSDP2 ----------------------------------------------------------------------------------------------------------
class Breakable(nn.Linear):
    fails_in: str | None = None

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if self.fails_in == "forward":
            raise ArithmeticError("half-way")
        if self.fails_in == "backward":
            rows.register_hook(fail)
        return super().forward(rows)


def fail(grad: torch.Tensor) -> None:
    raise ArithmeticError("half-way")


class Layers(nn.Module):
    """Two units under a root."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = Breakable(3, 3), Breakable(3, 3)
        self.seen_dtype: torch.dtype | None = None

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.seen_dtype = rows.dtype
        return self.second(self.first(rows))


def sharded(module: Layers, **policy: Any) -> Layers:
    for part in (module.first, module.second, module):
        fully_shard(part, mp_policy=MixedPrecisionPolicy(**policy))
    return module


def sharded_as_one(module: Layers) -> Layers:
    for part in ([module.first, module.second], module):
        fully_shard(part)
    return module


ROWS = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))


def reference_gradient() -> torch.Tensor:
    plain = Layers()
    plain(ROWS).square().sum().backward()
    assert plain.first.weight.grad is not None
    return plain.first.weight.grad


def gradient(module: Layers) -> torch.Tensor | None:
    grad = cast("Any", module.first.weight.grad)
    return None if grad is None else grad.full_tensor()


def test_fsdp2_keeps_one_record_per_parameter_in_the_groups_of_its_units(one_rank):
    module = sharded(Layers())
    assert [len(groups_of(unit)) for unit in units_of(module)] == [0, 1, 1], "the root has no parameter of its own"
    assert [record.sharded_param for record in parameters_of(module)] == list(module.parameters())
    assert all(record.sharded_param.requires_grad for record in parameters_of(module))


def test_fsdp2_keeps_modules_that_share_a_unit_in_one_group(one_rank):
    module = sharded_as_one(Layers())
    root, unit = units_of(module)
    assert groups_of(root) == [] and len(groups_of(unit)) == 1
    assert len(parameters_of(module)) == 4


def test_fsdp2_puts_a_gradient_that_waits_beside_the_unsharded_parameters_and_the_root_callback_reduces_it(one_rank):
    module = sharded(Layers())
    cast("Any", module).set_requires_gradient_sync(False)
    module(ROWS).square().sum().backward()
    assert gradient(module) is None
    record, _ = parameters_of(module.first)
    waiting = record.unsharded_accumulated_grad or record._unsharded_param.grad
    assert torch.allclose(waiting, reference_gradient())
    cast("Any", module).set_requires_gradient_sync(True)
    state_of(module)._root_post_backward_final_callback()
    found = gradient(module)
    assert found is not None and torch.allclose(found, reference_gradient())


def test_fsdp2_accumulates_in_the_reduce_dtype_what_waits(one_rank):
    module = sharded(Layers(), param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    cast("Any", module).set_requires_gradient_sync(False)
    module(ROWS).square().sum().backward()
    record, _ = parameters_of(module.first)
    assert record.unsharded_accumulated_grad.dtype is torch.float32
    assert (record.mp_policy.reduce_dtype, record.mp_policy.param_dtype) == (torch.float32, torch.bfloat16)


@pytest.mark.parametrize(
    ("made", "part", "fails_in"),
    [(sharded, "second", "forward"), (sharded, "second", "backward"), (sharded_as_one, "first", "forward")],
)
def test_fsdp2_trains_again_after_a_failure_half_way_and_a_reset(one_rank, made, part, fails_in):
    module = made(Layers())
    assert not state_of(module)._is_root
    module(ROWS).sum().backward()
    assert state_of(module)._is_root, "set by the first forward"
    module.zero_grad()
    between_steps = passing(module)
    failing = getattr(module, part)
    failing.fails_in = fails_in
    with pytest.raises(ArithmeticError):
        module(ROWS).square().sum().backward()
    assert not isinstance(failing.weight, DTensor), "left as it was gathered"
    failing.fails_in = None
    reset(module)
    assert all(isinstance(parameter, DTensor) for parameter in module.parameters())
    assert passing(module) == between_steps
    module(ROWS).square().sum().backward()
    found = gradient(module)
    assert found is not None and torch.allclose(found, reference_gradient())


@pytest.mark.parametrize("casts", [True, False])
def test_fsdp2_reads_its_policy_for_the_inputs_at_every_forward(one_rank, casts):
    module = sharded(Layers(), param_dtype=torch.bfloat16)
    for part in (module.first, module.second, module):
        state = state_of(part)
        state._mp_policy = replace(state._mp_policy, cast_forward_inputs=casts)
    module(ROWS if casts else ROWS.bfloat16())
    assert module.seen_dtype is torch.bfloat16
    if not casts:
        with pytest.raises(RuntimeError):  # fp32 rows meet bf16 weights
            module(ROWS)


def test_fsdp2_gathers_a_frozen_parameter_in_the_dtype_that_its_record_is_given_before_the_first_forward(one_rank):
    module = Layers().requires_grad_(False)
    for part in (module.first, module.second, module):
        fully_shard(part, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16), reshard_after_forward=False)
    record, *others = parameters_of(module.first)
    own = record.init_dtype_attrs
    record.init_dtype_attrs = lambda policy: own(replace(policy, param_dtype=None))
    with pytest.raises(RuntimeError):  # a weight in fp32 and a bias in bf16
        module(ROWS.bfloat16())
    assert record.unsharded_param.dtype is torch.float32
    assert others and all(other.unsharded_param.dtype is torch.bfloat16 for other in others)


def passing(module: nn.Module) -> list[Any]:
    """State that FSDP2 keeps while a forward and a backward run. A CPU shows little of what is wrong with it."""
    root, *_ = units_of(module)
    found = [root._state_ctx.iter_forward_root, root._state_ctx.post_backward_final_callback_queued]
    found += [root._comm_ctx.all_gather_state, list(root._comm_ctx.post_forward_order)]
    for unit in units_of(module):
        found += [unit._training_state, set(unit._modules_to_run_forward)]
        for group in groups_of(unit):
            found += [group._training_state, group._sharded_state, list(group._post_forward_indices)]
            found += [group._all_gather_result, group._post_reduce_event, group._all_reduce_state]
    return found


def state_of(part: nn.Module) -> Any:
    return cast("Any", part)._get_fsdp_state()


# -- peft -----------------------------------------------------------------------------------------------------------
def test_peft_runs_without_the_adapter_and_lets_it_train_all_the_same():
    from peft import LoraConfig, get_peft_model
    from peft.tuners.tuners_utils import BaseTunerLayer

    base = nn.Sequential(nn.Linear(3, 3))
    expected = base(ROWS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it knows no such architecture
        adapted: Any = get_peft_model(cast("Any", base), LoraConfig(target_modules=["0"], init_lora_weights=False))
    layer = next(part for part in adapted.modules() if isinstance(part, BaseTunerLayer))
    trained = {name for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    assert not torch.allclose(adapted(ROWS), expected)
    layer._disable_adapters = True
    assert torch.equal(adapted(ROWS), expected)
    layer._disable_adapters = False
    assert not torch.allclose(adapted(ROWS), expected)
    assert {name for name, parameter in adapted.named_parameters() if parameter.requires_grad} == trained != set()


# -- verl -----------------------------------------------------------------------------------------------------------
def test_verl_turns_an_engines_output_into_metrics():
    from verl.utils import tensordict_utils as tu
    from verl.workers.engine_workers import TrainingWorker

    class Engine:
        def get_data_parallel_group(self) -> None:
            return None

    worker: Any = object.__new__(TrainingWorker)
    worker.engine, worker.flops_counter, worker.device_name = Engine(), None, "cpu"
    output = {"loss": [1.0, 2.0], "metrics": {"grad_norm": torch.tensor(4.0), "lr": 0.1, "kl": [0.5]}}
    made = worker._postprocess_output(
        output, global_token_num=None, delta_time=0.0, forward_only=False, images_seqlens=None
    )
    metrics = tu.get(made, "metrics")
    assert (metrics["loss"], metrics["grad_norm"], metrics["lr"], metrics["kl"]) == (3.0, 4.0, 0.1, [0.5])


def test_verls_engines_for_weights_between_pools_are_the_known_ones() -> None:
    from verl.checkpoint_engine import CheckpointEngineRegistry

    from verl_digen.preflight.pools import VERLS_ENGINES

    files = Path(inspect.getfile(CheckpointEngineRegistry)).parent.glob("*_checkpoint_engine.py")
    registered = {name for file in files for name in re.findall(r'Registry\.register\("(\w+)"\)', file.read_text())}
    assert registered == {*VERLS_ENGINES}
    assert "naive" in CheckpointEngineRegistry._registry


def test_verls_registries_are_dicts_that_hold_what_the_plugin_filed():
    from verl.workers.engine import EngineRegistry
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    import verl_digen.trainer.register  # noqa: F401 - files the engines
    from verl_digen.rollout.registry import REPLICAS

    assert set(REPLICAS) <= set(RolloutReplicaRegistry._registry)
    assert ("diffusers", "async") in _ROLLOUT_REGISTRY
    assert "fsdp2" in EngineRegistry._engines["diffusion_model"]


def test_a_replicas_server_is_what_its_properties_return():
    from verl_digen.rollout.replica import DiffusersReplica

    replica: Any = object.__new__(DiffusersReplica)
    replica._server_handle, replica._server_address = "handle", "address"
    assert (replica.server_handle, replica.server_address) == ("handle", "address")


# -- TransferQueue --------------------------------------------------------------------------------------------------
def test_transfer_queues_calls_have_the_parameters_that_are_given_by_name():
    import transfer_queue as tq

    given = {
        "kv_batch_put": {"keys", "partition_id", "fields", "tags"},
        "async_kv_batch_put": {"keys", "partition_id", "fields", "tags"},
        "async_kv_put": {"key", "partition_id", "tag"},
        "kv_batch_get": {"keys", "partition_id", "select_fields"},
        "kv_clear": {"keys", "partition_id"},
        "kv_list": {"partition_id"},
    }
    for name, names in given.items():
        assert names <= set(inspect.signature(getattr(tq, name)).parameters), name
        assert inspect.iscoroutinefunction(getattr(tq, name)) == name.startswith("async_")


def test_a_batch_of_transfer_queues_is_made_of_keys_and_tags():
    from transfer_queue import KVBatchMeta

    batch = KVBatchMeta(partition_id="train", keys=["a", "b"], tags=[{"reward": 1.0}, {"reward": 2.0}])
    assert (batch.partition_id, batch.keys, len(batch)) == ("train", ["a", "b"], 2)
    assert [tag["reward"] for tag in batch.tags] == [1.0, 2.0]


# -- Ray, Hydra, omegaconf, TensorBoard, diffusers ------------------------------------------------------------------
def test_a_blip_and_a_death_of_an_actor_are_told_apart_and_both_are_actor_errors():
    from ray.exceptions import ActorDiedError, ActorUnavailableError, RayActorError, RayError, RayTaskError

    assert issubclass(ActorUnavailableError, RayActorError) and issubclass(ActorDiedError, RayActorError)
    assert not issubclass(ActorUnavailableError, ActorDiedError) and not issubclass(
        ActorDiedError, ActorUnavailableError
    )
    assert issubclass(RayActorError, RayError) and issubclass(RayTaskError, RayError)
    assert not issubclass(RayTaskError, RayActorError), "an exception in a method is not the death of its actor"


def test_hydra_keeps_the_exception_of_a_job_without_raising_it():
    from hydra.core.utils import JobReturn, JobStatus

    failed, error = JobReturn(), ValueError("why")
    failed.return_value, failed.status = error, JobStatus.FAILED
    assert failed._return_value is error
    with pytest.raises(ValueError, match="why"):
        _ = failed.return_value


def test_omegaconf_hands_out_children_as_nodes():
    from omegaconf import DictConfig, OmegaConf

    config = OmegaConf.create({"section": {"key": 1}, "nothing": DictConfig(None), "key": 2})
    section, nothing = config._get_node("section"), config._get_node("nothing")
    assert isinstance(section, DictConfig) and not section._is_none()
    assert isinstance(nothing, DictConfig) and nothing._is_none(), "config['nothing'] is None"
    assert not isinstance(config._get_node("key"), DictConfig)


def test_tensorboard_takes_a_summary_that_was_made_elsewhere(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        writer._get_file_writer().add_summary(Summary(value=[Summary.Value(tag="a", simple_value=2.0)]), 7)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("a")] == [(7, 2.0)]


def test_diffusers_packs_latents_as_its_pipelines_say():
    from diffusers import FluxPipeline, QwenImagePipeline

    packed = torch.arange(2 * 6 * 16, dtype=torch.float32).reshape(2, 6, 16)  # 2 x 3 patches of 2 x 2 latents
    unpacked = QwenImagePipeline._unpack_latents(packed, height=32, width=48, vae_scale_factor=8)
    assert unpacked.shape == (2, 4, 1, 4, 6)
    assert torch.equal(unpacked[0, :, 0, 0, 0], packed[0, 0, ::4]), "a patch is channels x 2 x 2"
    ids = FluxPipeline._prepare_latent_image_ids(1, 2, 3, torch.device("cpu"), torch.float32)
    assert ids.tolist() == [[0.0, row, column] for row in (0.0, 1.0) for column in (0.0, 1.0, 2.0)]


def test_diffusers_plans_say_where_tokens_are_split_and_gathered():
    from diffusers import QwenImageTransformer2DModel, WanTransformer3DModel
    from diffusers.models._modeling_parallel import ContextParallelConfig, ContextParallelInput, ContextParallelOutput

    for network in (QwenImageTransformer2DModel, WanTransformer3DModel):
        plan = network._cp_plan
        assert isinstance(plan["proj_out"], ContextParallelOutput)
        assert all(isinstance(part, ContextParallelOutput | dict) for part in plan.values())
        split = [part for parts in plan.values() if isinstance(parts, dict) for part in parts.values()]
        assert split and all(isinstance(part, ContextParallelInput) for part in split)
    assert ContextParallelConfig(ulysses_degree=2).mesh_dim_names == ("ring", "ulysses")
    assert {"config", "cp_plan"} <= inspect.signature(WanTransformer3DModel.enable_parallelism).parameters.keys()


def test_verl_wants_packed_text_where_ranks_share_rows():
    """If it does not any more, `ShardedTransformer` need not say that there is."""
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

    source = inspect.getsource(FSDPEngine.__init__)
    assert "ulysses_sequence_parallel_size > 1 and not self.use_remove_padding" in source


def test_settings_of_torch_compile_have_the_values_that_compiled_blocks_change():
    assert torch._dynamo.config.recompile_limit >= 8
    assert torch._functorch.config.donated_buffer in (True, False)
    with pytest.raises(AttributeError):
        torch._dynamo.config.recompile_limits = 8


@pytest.mark.skipif(Version(diffusers.__version__) < Version("0.42"), reason="earlier ones count a CPU")
def test_diffusers_counts_no_device_on_a_cpu():
    """When this fails, remove patches/diffusers_cpu_devices.py."""
    assert "rank % torch.accelerator.device_count()" in inspect.getsource(ModelMixin)
