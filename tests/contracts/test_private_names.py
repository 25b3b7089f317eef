# SPDX-License-Identifier: Apache-2.0
"""Private and undocumented names of other projects that this one uses, each held by what it does.

| name | used in | relied on |
| --- | --- | --- |
| FSDP2 `_get_fsdp_state`, `_fsdp_param_groups`, `fsdp_params` | engine/fsdp2.py | a record of every parameter |
| FSDP2 `sharded_param`, `_unsharded_param`, `unsharded_accumulated_grad` | engine/gradients.py | a gradient's places |
| FSDP2 `_root_post_backward_final_callback` | engine/gradients.py | reduces what no backward reduced |
| FSDP2 `reset_iter_state`, before 2.13 what it resets | engine/fsdp2.py | a failed forward or backward is over |
| FSDP2 `_is_root` | engine/fsdp2.py | there is a root from the first forward on |
| FSDP2 `_mp_policy` | engine/build.py | read at every forward; its `cast_forward_inputs` |
| torch `Module._apply` | engine/offload.py | moves every tensor of a module (tests/engine/test_offload.py) |
| FSDPMemTracker `memory_tracking`, `_FSDPModMemStats` | tests/plan/fake_engine.py | an expert that does not run |
| FSDP2 `mp_policy` of a parameter | engine/gradients.py | the reduce dtype |
| FSDP2 `init_dtype_attrs` of a parameter | engine/build.py | called by the first forward; the dtype that is gathered |
| peft `BaseTunerLayer._disable_adapters` | engine/policies.py | a forward without it (tests/engine) |
| verl `TrainingWorker._postprocess_output` | engine/worker.py | a commit's metrics (tests/engine/test_worker.py) |
| verl `EngineRegistry._engines`, `RolloutReplicaRegistry._registry` | tools/checkup/machine.py | names (tests/plugin) |
| verl `CheckpointEngineRegistry._registry` | preflight/pools.py | a dict of names, and the names of verl's engines |
| verl `_ROLLOUT_REGISTRY` | plugin.py | a dict of (name, mode) (test_verl_surface.py) |
| verl `RolloutReplica._server_handle`, `_server_address` | rollout/replica.py | what the public properties return |
| verl `register`'s attributes of a method | engine/worker.py | dispatch and `blocking` are kept with the method |
| TransferQueue `KVBatchMeta` and the `kv_*` calls | store/, trainer/ | names of fields and parameters (tests/store) |
| Ray `ActorUnavailableError`, `ActorDiedError`, `RayActorError` | agent_loop/, trainer/ | kinds (tests/chaos) |
| Ray `_private.state.actors` | processes/actors.py | an actor that starts again (tests/processes/test_workers.py) |
| Ray `_private.services.find_bootstrap_address`, `_private.utils.get_num_cpus` | processes/cluster.py | two functions |
| Ray `_private.worker._post_init_hooks` | preflight/callback.py | called after Ray has taken SIGTERM |
| Ray `setup_worker.py`, and its `os.execvp` | processes/forks.py | run by `sys.executable` (tests/e2e) |
| Ray `ActorHandle._actor_id` | trainer/replicas.py | the id that an ActorUnavailableError names |
| Ray `ActorHandle.__ray_call__` | trainer/timelines.py | runs a function in an actor (tests/trainer/test_replicas.py) |
| TransferQueue client `_loop` | store/client.py | runs its blocking calls (tests/e2e/test_hangs.py) |
| Hydra `JobReturn._return_value` | preflight/callback.py | the exception, unraised |
| omegaconf `_get_node`, `_is_none` | config/load.py, preflight/ | a child as a node (tests/plugin) |
| TensorBoard `_get_file_writer` | observe/trackers.py | encoded pictures as they are (tests/observe) |
| plotly `package_data/plotly.min.js` | report/page.py | one script that fetches nothing (tests/report) |
| diffusers `_repeated_blocks`, `_no_split_modules` | models/kernels.py | blocks (tests/models/test_kernels.py) |
| torch `_dynamo.config`, `_functorch.config` | models/kernels.py | unknown names raise (tests/models/test_kernels.py) |
| diffusers `_unpack_latents`, `_prepare_latent_image_ids` | models/ | the packing of two pipelines (tests/models) |
| diffusers `_encode_vae_image`, `_pack_latents` | models/ | latents of images (tests/models) |
| diffusers `_patchify_latents`, `_unpatchify_latents`, `_resize_if_exceeds_area` | models/ | FLUX.2's (tests/models) |
| diffusers `_get_image_latents`, `_get_image_embeds` | models/ | an image of HunyuanVideo 1.5 (tests/models) |
| diffusers `_cp_plan`, `ContextParallelConfig`, -`Input`, -`Output` | models/ | the plan of a split (tests/models) |
| verl `use_remove_padding`, `use_ulysses_sp`, `is_mp_src_rank_with_outputs` | engine/ | ranks that share rows |

`test_overrides.py` has the methods we override, `tests/vllm_omni` what we use of vLLM-Omni.
"""

import inspect
import re
import subprocess
import sys
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
from verl_digen.engine.gradients import reduce_pending


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
    waiting = (
        record._unsharded_param.grad if record.unsharded_accumulated_grad is None else record.unsharded_accumulated_grad
    )
    assert torch.allclose(waiting, reference_gradient())
    cast("Any", module).set_requires_gradient_sync(True)
    reduce_pending(module)
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


# -- verl -----------------------------------------------------------------------------------------------------------


def test_verls_engines_for_weights_between_pools_are_the_known_ones() -> None:
    from verl.checkpoint_engine import CheckpointEngineRegistry

    from verl_digen.preflight.pools import VERLS_ENGINES

    files = Path(inspect.getfile(CheckpointEngineRegistry)).parent.glob("*_checkpoint_engine.py")
    registered = {name for file in files for name in re.findall(r'Registry\.register\("(\w+)"\)', file.read_text())}
    assert registered == {*VERLS_ENGINES, "delta_sharded"}, "which sends differences"
    assert "naive" in CheckpointEngineRegistry._registry


def test_a_replicas_server_is_what_its_properties_return():
    from verl_digen.rollout.replica import DiffusersReplica

    replica: Any = object.__new__(DiffusersReplica)
    replica._server_handle, replica._server_address = "handle", "address"
    assert (replica.server_handle, replica.server_address) == ("handle", "address")


# -- Hydra and diffusers --------------------------------------------------------------------------------------------
TERMINATED = """
import os, signal, sys, ray
from ray._private.worker import _post_init_hooks
_post_init_hooks.append(lambda: signal.signal(signal.SIGTERM, lambda *given: sys.exit(7)))
ray.init(num_cpus=1, include_dashboard=False)
os.kill(os.getpid(), signal.SIGTERM)
"""


def test_ray_calls_its_hooks_after_it_has_taken_sigterm():
    done = subprocess.run([sys.executable, "-c", TERMINATED], capture_output=True, text=True, timeout=300)
    assert done.returncode == 7, done.stderr


def test_hydra_keeps_the_exception_of_a_job_without_raising_it():
    from hydra.core.utils import JobReturn, JobStatus

    failed, error = JobReturn(), ValueError("why")
    failed.return_value, failed.status = error, JobStatus.FAILED
    assert failed._return_value is error
    with pytest.raises(ValueError, match="why"):
        _ = failed.return_value


def test_verl_wants_packed_text_where_ranks_share_rows():
    """If it does not any more, `ShardedTransformer` need not say that there is."""
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

    source = inspect.getsource(FSDPEngine.__init__)
    assert "ulysses_sequence_parallel_size > 1 and not self.use_remove_padding" in source


@pytest.mark.skipif(Version(diffusers.__version__) < Version("0.42"), reason="earlier ones count a CPU")
def test_diffusers_counts_no_device_on_a_cpu():
    """When this fails, remove patches/diffusers_cpu_devices.py."""
    assert "rank % torch.accelerator.device_count()" in inspect.getsource(ModelMixin)
