# SPDX-License-Identifier: Apache-2.0
"""Methods of verl, Hydra and torch that we override: they exist there, and ours take what theirs are called with.

A method that is renamed upstream would silently leave ours behind as dead code. `OVERRIDDEN` is the whole list; a class
that overrides another method, or one that is gone upstream, fails. Tested elsewhere: hooks whose callers, and
the platform's members, are in `test_verl_surface.py`; vLLM-Omni's names.
"""

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from typing import Any

import pytest
import verl
import verl.trainer.ppo.v1  # noqa: F401 - the order in which verl imports us

import verl_digen

FOREIGN = ("verl", "peft", "ray", "transfer_queue", "torch", "hydra")
SKIPPED = ("vllm_omni", "verl_digen.recipes", "verl_digen.patches", "verl_digen.platforms.cpu")

OVERRIDDEN = {
    "agent_loop.episode:EnvironmentAgentLoop": "run",
    "agent_loop.manager:DiffusionAgentLoopWorker": "generate_sequences _run_prompt",
    "agent_loop.manager:DiffusionAgentLoopManager": "_init_agent_loop_workers",
    "agent_loop.server_manager:DiffusionServerClient": "generate",
    "agent_loop.server_manager:DiffusionServerManager": "get_client",
    "agent_loop.single_turn:DiffusionSingleTurnAgentLoop": "run",
    "engine.checkpoint:DiffusersCheckpointManager": "save_checkpoint load_checkpoint",
    "engine.checkpoint:WholeFolder": "prepare_local_plan prepare_global_plan finish",
    "engine.engine:DiffusersFSDPEngine": "initialize train_mode eval_mode save_checkpoint load_checkpoint "
    "train_batch forward_backward_batch",
    "engine.saved_state:SavedState": "read_metadata",
    "engine.verl_batches:VerlBatches": "forward_backward_batch forward_step lr_scheduler_step",
    "engine.sharded:ShardedTransformer": "initialize _build_module _build_lora_module _build_fsdp_module "
    "_build_optimizer disable_adapter to optimizer_step get_per_tensor_param",
    "model_config:DiffusionModelConfig": "_mutable_fields",
    "engine.whole_base:InPlaceParam": "init_all_gather_outputs free_unsharded_param reset_sharded_param",
    "engine.worker:DiffusionWorker": "init_model compute_ref_log_prob update_weights",
    "models.checkpoint:Experts": "forward",
    "models.fused_layers:FusedNorm": "forward",
    "models.fused_layers:LoraLinear": "forward",
    "models.fused_layers:_Sum": "forward backward _backward_cls",
    "models.kernels:Int8Linear": "forward",
    "models.kernels:_Product": "forward setup_context backward _backward_cls",
    "config.placement:TypedPools": "create_resource_pool",
    "preflight.callback:Preflight": "on_run_start on_job_start on_job_end",
    "recipe_source:RecipeSlot": "scheme load_config is_config is_group available list",
    "recipe_source:RecipeSource": "scheme load_config is_config is_group available list",
    "recipe_source:RecipeSearchPath": "manipulate_search_path",
    "reward.manager:DiffusionRewardManager": "run_single",
    "reward.manager:DiffusionRewardLoopWorker": "_init_reward_fn compute_score",
    "reward.manager:DiffusionRewardLoopManager": "_init_reward_loop_workers reward_loop_worker_handles "
    "compute_rm_score",
    "rollout.replica:DiffusersServerAdapter": "resume release update_weights",
    "rollout.replica:NoWeightsSent": "resume release update_weights",
    "rollout.birth:PlacedReplica": "get_ray_class_with_init_args max_concurrency",
    "rollout.replica:DiffusersReplica": "launch_servers",
    "trainer.disaggregated:DisaggregatedTrainer": "on_step_end _setup _get_n_gpus_for_throughput on_step_begin step "
    "on_validate_begin _compute_metrics _validate _save_checkpoint",
    "facade:RayFlowGRPOTrainer": "init_workers fit",
    "trainer.staged:StagedCheckpointManager": "update_weights",
    "trainer.replay_buffer:GroupReplayBuffer": "_evict_terminal_groups",
    "trainer.base:DiffusionTrainer": "init _init_resource_pool_mgr _setup get_llm_client fit step _compute_metrics "
    "on_validate_begin on_validate_end _validate _log_rollout_data _save_checkpoint _load_checkpoint",
    "trainer.generating:TrainerReplica": "init_hybrid launch_servers",
    "trainer.colocated:ColocatedTrainer": "fit _fetch_one_gen_batch _add_prompts_to_generate on_sample_end on_step_end "
    "_setup _compute_metrics _validate _save_checkpoint",
    "weights.gloo:GlooEngine": "prepare build_topology init_process_group finalize send_weights receive_weights",
    "weights.receiving:BoundedReceiver": "_init_socket",
    "weights.sending:BoundedSender": "_init_socket _cleanup",
}
"""Class -> names that it overrides of a foreign base."""


def our_classes() -> Iterator[tuple[str, type]]:
    for module in pkgutil.walk_packages(verl_digen.__path__, "verl_digen."):
        if any(name in module.name for name in SKIPPED):
            continue
        loaded = importlib.import_module(module.name)
        for name, value in vars(loaded).items():
            if inspect.isclass(value) and (value.__module__, value.__name__) == (module.name, name):  # no alias
                yield f"{module.name.removeprefix('verl_digen.')}:{name}", value


def foreign_method(cls: type, name: str) -> Any:
    """The attribute of the nearest foreign base; None if none has it."""
    for base in cls.__mro__[1:]:
        if base.__module__.partition(".")[0] in FOREIGN and name in vars(base):
            return vars(base)[name]
    return None


SET_LATER = {"_abc_impl", "_class_initialized", "_is_protocol"}
"""Attributes that Python, or verl where an object is made, sets on a class of ours."""


def overridden_by(cls: type) -> set[str]:
    return {
        name
        for name in vars(cls)
        if not name.startswith("__") and name not in SET_LATER and foreign_method(cls, name) is not None
    }


def load(target: str) -> type:
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(f"verl_digen.{module}"), name)


def test_the_list_is_complete():
    found = {target: overridden_by(cls) for target, cls in our_classes()}
    assert {target: names for target, names in found.items() if names} == {
        target: set(names.split()) for target, names in OVERRIDDEN.items()
    }


@pytest.mark.parametrize("target", OVERRIDDEN)
def test_ours_take_the_arguments_that_theirs_take(target):
    """However verl calls the method, the call reaches ours: ours takes as many positional arguments, and every name."""
    cls = load(target)
    for name in OVERRIDDEN[target].split():
        ours, theirs = inspect.getattr_static(cls, name), foreign_method(cls, name)
        if not callable(inspect.unwrap(getattr(theirs, "__func__", theirs))) or inspect.isclass(theirs):
            continue
        wanted = parameters(theirs)
        taken = parameters(ours)
        kinds = {parameter.kind for parameter in taken}
        if inspect.Parameter.VAR_KEYWORD in kinds:
            continue
        named = {parameter.name for parameter in wanted if parameter.kind not in VARIABLE} - {RAYS_OWN}
        lacking = named - {parameter.name for parameter in taken}
        assert not lacking, f"{target}.{name}: verl's has {sorted(lacking)}"
        needed = {parameter.name for parameter in taken if parameter.default is parameter.empty}
        if target.startswith("trainer."):
            assert needed <= {parameter.name for parameter in wanted}, f"{target}.{name}: verl passes less"


RAYS_OWN = "_ray_trace_ctx"
"""A parameter that Ray adds to the methods of a class when it makes an actor of it."""
VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def parameters(method: Any) -> list[inspect.Parameter]:
    function = inspect.unwrap(getattr(method, "__func__", method))
    return [value for name, value in inspect.signature(function).parameters.items() if name not in ("self", "cls")]
