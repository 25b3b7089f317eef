# SPDX-License-Identifier: Apache-2.0
"""The table of verl's keys: values of keys that our runs read (`VALUES`), and replacements of keys that they do not
(`UNUSED`). Keys under `digen:` are in `verl_digen.config`.

A bound without a meaning of its own catches typos; its constant says how it was chosen. A user who sets an unused key
expects something of it, so a run refuses any other value than verl's default, or our recipes' (`OURS`). Keys of a
feature that is refused as a whole (`REFUSED`, a served reward model) are not listed.

Invariants (tests/plugin/test_malformed_starts.py): every key is one of verl's, and every recipe has the value that an
unused one must have.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import accumulate, chain
from pathlib import Path
from typing import Annotated, Any, Literal

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError

from verl_digen.preflight.pools import SIZES
from verl_digen.preflight.start_config import StartConfig
from verl_digen.preflight.unread import keys_of, verls_default
from verl_digen.require import as_typed, suggestion

MAX_DEVICES = 100_000
"""More than any cluster has."""
MAX_COUNT = 10**9
"""Prompts, samples, steps: more than a run can make in years."""
MAX_LORA_RANK = 4096
"""The width of the widest network here is 5120; an adapter of that rank is no longer smaller than the weights."""

STRICT = ConfigDict(strict=True, allow_inf_nan=False)


def _never_or_positive(value: int) -> int:
    if value != -1 and value < 1:
        raise ValueError("must be -1 or >= 1")
    return value


def _inside_its_folder(value: str) -> str:
    if not value.strip() or Path(value).is_absolute() or ".." in Path(value).parts:
        raise ValueError("must be a name, or a path below the folder of all runs")
    return value


Devices = Annotated[int, Field(ge=1, le=MAX_DEVICES)]
Count = Annotated[int, Field(ge=1, le=MAX_COUNT)]
FewWorkers = Annotated[int, Field(ge=1, le=4096)]
Group = Annotated[int, Field(ge=2, le=10**6)]
Megabytes = Annotated[int, Field(ge=1, le=1_000_000)]
Blocks = Annotated[int, Field(ge=0)] | Literal["auto", "all", "none"]
CountOrAll = Annotated[int, AfterValidator(_never_or_positive)]
Warmup = Annotated[int, Field(ge=-1, le=MAX_COUNT)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Dtype = Literal["float32", "fp32", "bfloat16", "bf16", "float16", "fp16"]
Text = Annotated[str, Field(min_length=1)]
Names = Annotated[list[Text], Field(min_length=1)]
Name = Annotated[str, AfterValidator(_inside_its_folder)]
Storage = Literal["SimpleStorage", "MooncakeStore", "Yuanrong"]
"""TransferQueue's storage backends."""
Contents = list[Literal["model", "optimizer", "extra", "hf_model"]]
Tool = Literal["nsys", "npu", "torch", "torch_memory", "precision_debugger"]
Precision = dict[Literal["param_dtype", "reduce_dtype", "buffer_dtype"], Dtype]
Logger = Literal[
    "wandb", "mlflow", "swanlab", "vemlp_wandb", "tensorboard", "console", "clearml", "trackio", "file", "rl_insight"
]
"""verl's `Tracking.supported_backend`, without the name that it calls deprecated."""
WORDS = (
    ("Value error, ", ""),
    ("Input should", "must"),
    ("String should", "must"),
    ("List should", "must"),
    ("greater than or equal to", ">="),
    ("less than or equal to", "<="),
    ("greater than", ">"),
    ("less than", "<"),
    ("a valid string", "a text"),
    ("a valid boolean", "true or false"),
    ("a valid integer", "a whole number"),
    ("a valid dictionary", "a mapping"),
    ("a valid ", "a "),
    ("must have at least 1 character", "must not be empty"),
    ("must have at least 1 item after validation, not 0", "must not be empty"),
)
"""pydantic's words -> ours."""

MODEL, ACTOR, ROLLOUT = "actor_rollout_ref.model", "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
REWARD_MODEL = "reward.reward_model"
NEVER = "give a number of steps, or -1 for never"
DEVICES = "give the devices of a node, and the nodes"
REWARD_POOL = "give the nodes, and the devices of each, of a pool for the model's servers or the reward workers"
WITH_POOL, WITH_MODEL = f"{REWARD_MODEL}.enable_resource_pool=true", f"{REWARD_MODEL}.enable=true"


@dataclass(frozen=True)
class Value:
    """A key, its allowed values, and the remedy for any other value."""

    type: Any
    remedy: str
    where: str | None = None
    """`KEY=VALUE`: applies only if that other key has that value. None: always."""

    @cached_property
    def adapter(self) -> TypeAdapter[Any]:
        """Validator of values; to make one takes as long as a check."""
        return TypeAdapter(self.type, config=STRICT)


def _switches(section: str, names: str) -> dict[str, Value]:
    return {f"{section}.{name}": Value(bool, "give true or false") for name in names.split()}


VALUES: dict[str, Value] = {
    **_switches("trainer", "val_before_train val_only balance_batch del_local_ckpt_after_load"),
    **_switches("data", "shuffle filter_overlong_prompts validation_shuffle"),
    **_switches(MODEL, "enable_gradient_checkpointing enable_activation_offload use_shm"),
    **_switches(f"{ACTOR}.fsdp_config", "param_offload optimizer_offload reshard_after_forward"),
    **_switches(ROLLOUT, "free_cache_engine enforce_eager"),
    **_switches(REWARD_MODEL, "enable enable_resource_pool"),
    "trainer.nnodes": Value(Devices, DEVICES),
    "trainer.n_gpus_per_node": Value(Devices, DEVICES),
    "trainer.total_epochs": Value(Count, "give the passes over data.train_files"),
    "trainer.total_training_steps": Value(Count | None, "give the optimizer steps; null counts trainer.total_epochs"),
    "trainer.test_freq": Value(CountOrAll, NEVER),
    "trainer.save_freq": Value(CountOrAll, NEVER),
    "trainer.max_actor_ckpt_to_keep": Value(Count | None, "give the checkpoints to keep; null keeps all"),
    "trainer.logger": Value(list[Logger] | Logger, "give e.g. [tensorboard] or [console,wandb]"),
    "trainer.project_name": Value(Name, "change trainer.default_local_dir to write elsewhere"),
    "trainer.experiment_name": Value(Name, "change trainer.default_local_dir to write elsewhere"),
    "trainer.default_local_dir": Value(Text, "give the folder of the run"),
    "trainer.resume_mode": Value(Literal["auto", "disable", "resume_path"], "auto goes on after the last checkpoint"),
    "trainer.rollout_data_dir": Value(Text | None, "give a folder; null writes nothing"),
    "trainer.esi_redundant_time": Value(NotNegative, "give seconds; 0 is verl's default"),
    "data.train_batch_size": Value(Count, "give the prompts of a step"),
    "data.train_max_samples": Value(CountOrAll, "-1 takes all prompts"),
    "data.val_max_samples": Value(CountOrAll, "-1 takes all prompts"),
    "data.val_batch_size": Value(Count | None, "null takes all validation prompts at once"),
    "data.dataloader_num_workers": Value(Annotated[int, Field(ge=0, le=4096)], "0 reads in the driver, and is enough"),
    "data.seed": Value(int | None, "leave it out: it is digen.seed"),
    "actor_rollout_ref.nccl_timeout": Value(Count, "give seconds; 1800 suits most runs"),
    "global_profiler.tool": Value(Tool | None, "null profiles nothing"),
    "global_profiler.steps": Value(list[Count] | None, "give the steps to profile, e.g. [2,3]; null profiles none"),
    "ray_kwargs.ray_init": Value(dict, "leave it out, or give single arguments, e.g. +ray_kwargs.ray_init.num_gpus=8"),
    "ray_kwargs.ray_init.runtime_env": Value(
        dict, "leave it out, or set +ray_kwargs.ray_init.runtime_env.env_vars.NAME"
    ),
    f"{MODEL}.path": Value(Text, "give a checkpoint in the diffusers format, a folder or a repository of the hub"),
    f"{MODEL}.lora_rank": Value(Annotated[int, Field(ge=0, le=MAX_LORA_RANK)], "0 trains all weights, 32 is usual"),
    f"{MODEL}.lora_alpha": Value(Count, "twice actor_rollout_ref.model.lora_rank is usual"),
    f"{MODEL}.recompute_blocks": Value(Blocks, "auto recomputes as few as memory asks for"),
    f"{MODEL}.int8_base": Value(bool, "true keeps the frozen base in int8"),
    f"{MODEL}.whole_base": Value(bool | Literal["auto"], "auto keeps the base whole where there is room"),
    f"{MODEL}.external_lib": Value(Text | list[Text] | None, "give the names of modules that can be imported"),
    f"{MODEL}.target_modules": Value(Text | Names | None, "null takes the model's own list"),
    f"{MODEL}.exclude_modules": Value(Text | list[Text] | None, "give names or a regular expression, or null"),
    f"{MODEL}.lora_adapter_path": Value(Text | None, "give the folder of an adapter, or null"),
    f"{ACTOR}.strategy": Value(Literal["fsdp2"], "diffusion models are sharded by FSDP2; leave it out"),
    f"{ACTOR}.ppo_mini_batch_size": Value(Count, "leave it out: one optimizer step per batch"),
    f"{ACTOR}.ppo_epochs": Value(Annotated[int, Field(ge=1, le=1000)], "1 is on-policy"),
    f"{ACTOR}.optim.lr": Value(NotNegative, "3e-4 is usual with LoRA, 1e-5 for all weights"),
    f"{ACTOR}.optim.weight_decay": Value(NotNegative, "1e-4 is flow_grpo's"),
    f"{ACTOR}.optim.clip_grad": Value(Positive, "1.0 is usual"),
    f"{ACTOR}.optim.betas": Value(
        Annotated[list[Annotated[float, Field(ge=0, lt=1)]], Field(min_length=2, max_length=2)], "[0.9,0.999] is usual"
    ),
    f"{ACTOR}.optim.lr_scheduler_type": Value(Literal["constant", "cosine"], "choose one of these"),
    f"{ACTOR}.optim.warmup_style": Value(None, f"set {ACTOR}.optim.lr_scheduler_type, its name now"),
    f"{ACTOR}.optim.lr_warmup_steps": Value(Warmup | None, "-1 takes the ratio"),
    f"{ACTOR}.optim.lr_warmup_steps_ratio": Value(Fraction, "give the share of all steps, 0 to 1"),
    f"{ACTOR}.optim.min_lr_ratio": Value(Fraction | None, "give the share of the learning rate, 0 to 1"),
    f"{ACTOR}.optim.num_cycles": Value(NotNegative, "0.5 is half a cosine"),
    f"{ACTOR}.optim.optimizer": Value(Text, "AdamW is usual"),
    f"{ACTOR}.optim.optimizer_impl": Value(Text, "give the module of the optimizer, e.g. torch.optim"),
    f"{ACTOR}.fsdp_config.model_dtype": Value(Dtype, "bf16 for a frozen base, fp32 to train all weights"),
    f"{ACTOR}.fsdp_config.fsdp_size": Value(CountOrAll, "-1 shards over all ranks"),
    f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size": Value(Devices, "1 runs each row on one device"),
    f"{ACTOR}.fsdp_config.mixed_precision": Value(Precision | None, "e.g. {param_dtype: bf16, reduce_dtype: fp32}"),
    f"{ACTOR}.optim.override_optimizer_config": Value(dict | None, "give optimizer arguments, e.g. {foreach: false}"),
    f"{ACTOR}.checkpoint.save_contents": Value(Contents, "give e.g. [model,optimizer,extra]"),
    f"{ACTOR}.checkpoint.load_contents": Value(Contents, "leave it out: what was saved is loaded"),
    f"{ROLLOUT}.n": Value(Group, "an advantage compares the samples of one prompt; flow_grpo uses 24"),
    f"{ROLLOUT}.nnodes": Value(Annotated[int, Field(ge=0, le=MAX_DEVICES)], DEVICES),
    f"{ROLLOUT}.n_gpus_per_node": Value(Devices, DEVICES),
    **{f"{ROLLOUT}.{size}": Value(Devices, "1 is the default") for size in SIZES},
    f"{ROLLOUT}.dtype": Value(Dtype, "bfloat16 is usual"),
    f"{ROLLOUT}.engine_kwargs": Value(
        dict, "leave it out, or set +actor_rollout_ref.rollout.engine_kwargs.vllm_omni.NAME"
    ),
    f"{ROLLOUT}.val_kwargs.n": Value(Annotated[int, Field(ge=1, le=10**6)], "1 sample of each prompt is usual"),
    f"{ROLLOUT}.agent.num_workers": Value(FewWorkers, "one for each node is enough"),
    f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes": Value(Megabytes, "2048 is verl's default"),
    "reward.num_workers": Value(FewWorkers, "8 is verl's default"),
    "reward.reward_manager.source": Value(Literal["importlib"], "leave it out: verl's own managers score text"),
    **{f"{REWARD_MODEL}.{name}": Value(Devices, REWARD_POOL, WITH_POOL) for name in ("nnodes", "n_gpus_per_node")},
    **{f"{REWARD_MODEL}.rollout.{size}": Value(Devices, "give a server's devices", WITH_MODEL) for size in SIZES},
    "actor_rollout_ref.hybrid_engine": Value(bool, "leave it to the recipes"),
    "transfer_queue.backend.storage_backend": Value(Storage, "SimpleStorage needs nothing installed beside it"),
    "transfer_queue.backend.SimpleStorage.num_data_storage_units": Value(FewWorkers, "8 is verl's default"),
    "transfer_queue.backend.SimpleStorage.total_storage_size": Value(Count, "100000 is verl's default"),
}

READ = ("reward.custom_reward_function.path", "reward.reward_manager.module.path", f"{MODEL}.lora.rank")
"""Keys of further sections, which an empty line of a yaml file would take away; rules check their values."""

UNUSED: Mapping[str, str] = {
    "the legacy trainer has no hook for diffusion": "trainer: use_v1",
    "digen.num_logged_images says how many validation prompts are shown, in images/ and in the run's trackers": (
        "trainer: log_val_generations validation_data_dir"
    ),
    "there is no critic, and the actor would not be trained until then; leave it out": "trainer: critic_warmup",
    "there is no critic; trainer.max_actor_ckpt_to_keep counts checkpoints": "trainer: max_critic_ckpt_to_keep",
    "checkpoints are written only under trainer.default_local_dir; copy them": "trainer: default_hdfs_dir",
    "verl no longer waits for it; leave it out": "trainer: ray_wait_register_center_timeout",
    "it belongs to another trainer of verl; leave it out, recipe=...+disaggregated has separate pools": (
        "trainer.v1: colocate_async.num_warmup_batches separate_async.num_warmup_batches "
        "separate_async.parameter_sync_step"
    ),
    "digen.tag.policy lets the trainer generate": "trainer.v1.separate_async.hybrid_rollout: enable_switch",
    "digen.staleness says how old samples may be": (
        "trainer.v1.sampler: max_off_policy_threshold max_off_policy_strategy"
    ),
    "digen.max_refills_per_step bounds the groups made again": "trainer.v1.sampler: sync_refill_failed_groups",
    "digen.advantage says how rewards become advantages": "algorithm: adv_estimator gamma lam use_pf_ppo",
    "digen.advantage.scale=none turns the division by the std off": "algorithm: norm_adv_by_std_in_grpo",
    "digen.kl.coef is the weight of the KL term, digen.kl.kind its kind": (
        "algorithm: use_kl_in_reward kl_penalty kl_ctrl.type kl_ctrl.kl_coef kl_ctrl.horizon "
        f"kl_ctrl.target_kl; {ACTOR}: use_kl_loss kl_loss_coef kl_loss_type"
    ),
    "digen.queue.drop_zero_spread drops groups without a signal": "algorithm.filter_groups: enable",
    "digen.loss.name=tis and its relatives correct for stale samples, see digen.loss": (
        "algorithm.rollout_correction: rollout_is rollout_is_threshold rollout_rs rollout_rs_threshold "
        "rollout_is_batch_normalize"
    ),
    "digen.loss.old_log_probs=rollout takes the recorded log-probs": "algorithm.rollout_correction: bypass_mode",
    "digen.loss.name is the policy loss, beside its settings": (
        f"algorithm.rollout_correction: loss_type; {ACTOR}: tau_pos tau_neg policy_loss.loss_mode "
        "policy_loss.clip_cov_ratio policy_loss.clip_cov_lb policy_loss.clip_cov_ub policy_loss.kl_cov_ratio "
        "policy_loss.ppo_kl_coef policy_loss.dro_beta"
    ),
    "digen.loss.clip_range and digen.loss.clip_range_high clip the ratio": (
        f"{ACTOR}: clip_ratio clip_ratio_low clip_ratio_high clip_ratio_c"
    ),
    "every row, a sample at a timestep, weighs the same; digen.window says which timesteps train": (
        f"{ACTOR}: loss_agg_mode loss_scale_factor"
    ),
    "a denoising step has no distribution over tokens; digen.sde.noise_level says how far samples spread": (
        f"{ACTOR}: entropy_coeff calculate_entropy calculate_sum_pi_squared entropy_checkpointing "
        "entropy_from_logits_with_chunking entropy_from_logits_chunk_size"
    ),
    "digen.tsp.samples_per_tile and digen.tsp.steps_per_tile are the size of a forward": (
        f"{ACTOR}: use_dynamic_bsz ppo_micro_batch_size ppo_micro_batch_size_per_gpu ppo_max_token_len_per_gpu "
        f"pad_to_length; {ROLLOUT}: log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu "
        "log_prob_use_dynamic_bsz log_prob_max_token_len_per_gpu"
    ),
    "a prompt is encoded once for its whole group by itself; leave it out": f"{ACTOR}: use_prefix_grouper",
    "actor_rollout_ref.model.target_modules and exclude_modules say what trains": f"{ACTOR}: freeze_vision_tower",
    "mini-batches are taken in the order of the prompts, which data.shuffle shuffles": f"{ACTOR}: shuffle",
    "digen.seed is the seed of everything": f"{ACTOR}: data_loader_seed; {ROLLOUT}: seed full_determinism",
    f"{ACTOR}.optim.clip_grad is the largest norm of the gradient": f"{ACTOR}: grad_clip",
    f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size is the key of sequence parallelism": (
        f"{ACTOR}: ulysses_sequence_parallel_size"
    ),
    f"{ACTOR}.fsdp_config.model_dtype is what trains": f"{ACTOR}: qat.enable fsdp_config.qat.enable fsdp_config.dtype",
    "checkpoints are written before the next step begins; leave it out": f"{ACTOR}.checkpoint: async_save",
    "digen.tsp.reduce says when gradients are reduced": f"{ACTOR}.fsdp_config: use_no_sync_for_gradient_accumulation",
    "it is an option of fsdp, and diffusion runs on fsdp2": f"{ACTOR}.fsdp_config: use_orig_params forward_prefetch",
    "the blocks of the transformer are wrapped; leave it out": f"{ACTOR}.fsdp_config.wrap_policy: min_num_params",
    "replicas load the checkpoint and serve requests; leave it out": f"{ROLLOUT}: mode load_format",
    f"{ROLLOUT}.engine_kwargs.vllm_omni has arguments of the engine": f"{ROLLOUT}.engine_kwargs: vllm sglang trtllm",
    "digen.sde and digen.sampling say how samples are drawn, digen.seed with what noise": (
        f"{ROLLOUT}: temperature top_k top_p do_sample"
    ),
    "validation is deterministic: digen.sampling.val_num_steps and val_true_cfg_scale": (
        f"{ROLLOUT}.val_kwargs: temperature top_k top_p do_sample"
    ),
    "the model's own limit on a prompt is checked before the run starts": (
        f"{ROLLOUT}: prompt_length max_model_len; data: max_prompt_length filter_overlong_prompts_workers"
    ),
    "longer prompts are refused, or left out with data.filter_overlong_prompts=true": "data: truncation",
    "a diffusion run makes no text, leave it out": (
        f"{ROLLOUT}: response_length ignore_eos disaggregation.enabled enable_rollout_routing_replay; data: "
        "max_response_length"
    ),
    "digen.rollout.embed_cache_size prompts stay encoded": f"{ROLLOUT}: enable_prefix_caching",
    "digen.rollout.max_batch_size is what a replica denoises together; `digen plan` says what fits": (
        f"{ROLLOUT}: max_num_batched_tokens max_num_seqs enable_chunked_prefill gpu_memory_utilization "
        "cudagraph_capture_sizes scheduling_policy"
    ),
    "digen.sampling.outside.fp8 multiplies in fp8": f"{ROLLOUT}: quantization quantization_config_file",
    "metrics.jsonl and `digen timeline` show it": f"{ROLLOUT}: trace.backend prometheus.enable disable_log_stats",
    f"{ACTOR}.fsdp_config.param_offload keeps weights on the host": f"{ACTOR}.fsdp_config: offload_policy",
    f"the actor's ranks predict for the reference, as {ACTOR} says; leave it out": "actor_rollout_ref.ref: *",
    "it keeps batches of text; leave it out": "skip: rollout.enable rollout_tq.enable async_rollout.enable",
    "log-probs are always recorded; digen.loss.old_log_probs says which ones count": f"{ROLLOUT}: calculate_log_probs",
    "digen.sde.law says what a log-prob is": f"{ROLLOUT}: logprobs_mode",
    "digen.queue.extra_prompts begins groups beyond the batch": f"{ROLLOUT}: over_sample_rate; data: gen_batch_size",
    "a sample is one generation; leave it out": f"{ROLLOUT}.multi_turn: enable",
    f"{ROLLOUT}.tensor_model_parallel_size is the size of a replica": f"{ROLLOUT}: expert_parallel_size",
    f"{ROLLOUT}.free_cache_engine gives a replica's memory to the trainer": f"{ROLLOUT}: multi_stage_wake_up",
    f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes bounds what is gathered": (
        f"{ROLLOUT}: layered_summon"
    ),
    "the checkpoint's own tokenizers and processors are used": (
        "data: tokenizer trust_remote_code apply_chat_template_kwargs mm_processor_kwargs image_patch_size"
    ),
    "prompt files have the columns prompt, negative_prompt, data_source, reward_model, extra_info": (
        "data: video_key audio_key reward_fn_key return_full_prompt return_raw_input_ids return_raw_chat "
        "return_multi_modal_inputs"
    ),
    "it runs code that a language model wrote; name a reward function": "reward.sandbox_fusion: url",
}
"""Remedy -> the keys that have it, `SECTION: NAME NAME`; * stands for all of the section."""

OURS: Mapping[str, Any] = {
    "trainer.v1.sampler.sync_refill_failed_groups": True,
    "algorithm.adv_estimator": "grpo",
    f"{ACTOR}.use_dynamic_bsz": True,
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": 1,
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": 1,
    f"{ROLLOUT}.prompt_length": 512,
    f"{ROLLOUT}.response_length": 512,
}
"""Values of the recipes that are not verl's defaults."""

REFUSED: Mapping[str, str] = {
    "critic.enable": "a group's own rewards are its baseline (digen.advantage); leave it out",
    "distillation.enabled": "recipe opd distils, from an adapter (digen.loss.teacher); leave it out",
}
"""Features of verl that our runs do not have, and the remedy."""


def unused_keys() -> Iterator[tuple[str, Any, str]]:
    """(key, value that a run may have, which may be an interpolation, remedy)."""
    for remedy, sections in UNUSED.items():
        for section, _, names in (part.partition(": ") for part in sections.split("; ")):
            listed = keys_of(DictConfig(verls_default(section))) if names == "*" else names.split()
            for key in (f"{section}.{name}" for name in listed if not name.endswith("_target_")):
                value = OURS[key] if key in OURS else verls_default(key)
                if not isinstance(value, dict) or not value:
                    yield key, value, remedy


def unused_problems(run: StartConfig) -> list[str]:
    """A paragraph for each of these keys that has another value."""
    problems = []
    section_of = cache(partial(OmegaConf.select, run.config))
    for key, value, remedy in unused_keys():
        path, _, name = key.rpartition(".")
        section = section_of(path)
        if section is None or name not in section:
            continue
        given, expected = section[name], OmegaConf.create([value], parent=section)[0]
        if given != expected:
            problems.append(
                f"{key} must be {as_typed(expected)}, because it has no effect on a diffusion model, got {given!r}; "
                f"{remedy}"
            )
    for key, remedy in REFUSED.items():
        if given := OmegaConf.select(run.config, key):
            problems.append(f"{key} must be false, got {given!r}; {remedy}")
    return problems


def value_problems(config: DictConfig) -> dict[str, str | None]:
    """Keys of `VALUES` with a value they may not have -> a paragraph; None where another entry of the result says it:
    the key's value is an interpolation of that one. A section that is no mapping is an entry in place of its keys."""
    problems: dict[str, str | None] = {}
    keys = (*VALUES, *READ, *REFUSED, *(key for key, *_ in unused_keys()))
    parents = (accumulate(key.split(".")[:-1], "{}.{}".format) for key in keys)  # of a.b.c: a and a.b
    sections = {name: OmegaConf.select(config, name) for name in dict.fromkeys(chain.from_iterable(parents))}
    broken = [name for name, section in sections.items() if not OmegaConf.is_dict(section)]
    for key in keys:
        section = next((name for name in broken if key.startswith(f"{name}.")), None)
        if section is not None:
            given = _select(config, section)
            problems[section] = f"{section} must be a section with keys of its own, got {given!r}; leave it out"
        elif key in VALUES and ((where := VALUES[key].where) is None or _holds(config, where)):
            _check(sections[key.rpartition(".")[0]], key, VALUES[key], problems)
    return problems


def _check(section: DictConfig, key: str, value: Value, problems: dict[str, str | None]) -> None:
    name = key.rpartition(".")[2]
    node: Any = section._get_node(name, validate_access=False)
    source = str(node._value()) if node is not None and node._is_interpolation() else ""
    if any(f"{other}}}" in source or f"{other}," in source for other in problems):
        problems[key] = None
        return
    if "${hydra:" in source or "${now:" in source:
        problems[key] = f"{key} must be one value for all processes, got {source!r}; write the value itself"
        return
    try:
        given = _select(section, name)
        value.adapter.validate_python(given)
    except OmegaConfBaseException as error:  # an interpolation that leads nowhere
        problems[key] = f"{key} must have a value, but {source}: {str(error).splitlines()[0]}; {value.remedy}"
    except ValidationError as error:
        problems[key] = _paragraph(key, given, error.errors(include_url=False), value.remedy)


def _paragraph(key: str, given: Any, errors: list[Any], remedy: str) -> str:
    """pydantic's first error, of the alternative that came closest, in this project's form."""
    first = max(
        errors, key=lambda error: (sum(isinstance(part, int) for part in error["loc"]), error["type"] == "too_short")
    )
    rule = first["msg"]
    for theirs, ours in WORDS:
        rule = rule.replace(theirs, ours)
    wrong = first["input"]
    within = "" if wrong is given or wrong == given else f" in {given!r}"
    expected = first["ctx"]["expected"] if first["type"] == "literal_error" else ""
    names = expected.replace(" or ", ", ").replace("'", "").split(", ")
    hint = suggestion(str(wrong), names) if expected else ""
    return f"{key} {rule}, got {wrong!r}{within}; {hint}{remedy}"


def _holds(config: DictConfig, condition: str) -> bool:
    key, _, value = condition.partition("=")
    return str(_select(config, key)).lower() == value


def _select(config: DictConfig, key: str) -> Any:
    value = OmegaConf.select(config, key)
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
