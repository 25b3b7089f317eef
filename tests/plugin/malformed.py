# SPDX-License-Identifier: Apache-2.0
"""Malformed starts, each with the key that its message must name; and unusual ones that are valid.

A start is what is typed after `recipe=digen_flowgrpo` and the overrides of `runnable`; `TMP` is a folder of the test.
"""

TRAINER, ACTOR, ROLLOUT, MODEL = (
    "trainer",
    "actor_rollout_ref.actor",
    "actor_rollout_ref.rollout",
    "actor_rollout_ref.model",
)


def _each(key: str, *values: str) -> list[tuple[str, str]]:
    return [(f"{key}={value}", key) for value in values]


def _all(keys: str, *values: str) -> list[tuple[str, str]]:
    return [one for key in keys.split() for one in _each(key, *values)]


NUMBERS = [
    *_all(f"{ACTOR}.ppo_mini_batch_size {ACTOR}.fsdp_config.ulysses_sequence_parallel_size", "0", "-1"),
    *_all(f"{ROLLOUT}.val_kwargs.n {ROLLOUT}.n_gpus_per_node {ROLLOUT}.tensor_model_parallel_size", "0", "-1", "two"),
    *_all(f"{ROLLOUT}.agent.num_workers {ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes", "0", "-5", "2GB"),
    *_all("trainer.n_gpus_per_node trainer.nnodes reward.num_workers", "0", "-1", "null", "eight"),
    *_all(
        f"{ACTOR}.ppo_epochs trainer.total_epochs trainer.max_actor_ckpt_to_keep trainer.total_training_steps",
        "0",
        "-1",
    ),
    *_all("digen.rollout.max_batch_size digen.tsp.samples_per_tile digen.advantage.best_of", "0", "-1"),
    *_all("digen.rollout.embed_cache_size digen.logged_groups_every", "0", "-1"),
    *_each("transfer_queue.backend.SimpleStorage.num_data_storage_units", "0", "-1", "null"),
    *_all(f"{ACTOR}.fsdp_config.fsdp_size trainer.test_freq", "0", "-2", "all"),
    *_all("digen.max_refills_per_step digen.num_logged_images digen.num_logged_groups", "-1"),
    *_all("data.dataloader_num_workers", "-1"),
    *_each(f"{ROLLOUT}.n", "2.5", "1e10", "abc", "0", "1", "-3", "null", "[4]", "999999999"),
    *_each("data.train_batch_size", "null", "many", "0", "-8", "4.0", "1e3", "100000000000"),
    *_all(f"trainer.save_freq {ACTOR}.optim.lr_warmup_steps data.seed", "often", "2.5"),
    *_each(f"{MODEL}.lora_rank", "-1", "big", "2.5", "1000000", "true"),
    *_each(f"{ACTOR}.optim.lr", "nan", "inf", "-1", "abc", "null", "true"),
    *_all(f"{ACTOR}.optim.weight_decay {ACTOR}.optim.clip_grad {ACTOR}.optim.lr_warmup_steps_ratio", "nan", "-0.1"),
    *_each(f"{ACTOR}.optim.betas", "0.9", "[0.9]", "[0.9,1.0]", "[0.9,0.99,0.999]", "null"),
    *_all("digen.sde.noise_level digen.advantage.eps digen.loss.clip_range digen.reward.timeout_s", "nan", "inf", "0"),
    *_all("digen.kl.coef digen.rollout.batch_wait_s", "nan", "inf", "-0.1"),
    *_all("digen.reward.recipe_functions.jpeg_compressibility digen.reward.custom_weight", "nan", "inf"),
    *_all("digen.loss.advantage_clip digen.window.fraction", "nan", "0"),
    *_all(f"digen.sampling.guidance_scale {MODEL}.lora_alpha", "nan", "-1"),
    *_each("digen.sampling.true_cfg_scale", "nan", "inf", "0.5", "-4", "1e9"),
    *_all("digen.sampling.height_px digen.sampling.num_steps digen.sampling.num_frames", "0", "-64", "99999999999"),
    *_each("digen.sampling.val_num_steps", "1", "5000"),
    *_each("digen.reward.max_retries", "-1", "1000000000"),
    *_each("digen.advantage.ddof", "2"),
    *_each("digen.seed", "99999999999999999999"),
    *_each("transfer_queue.backend.storage_backend", "SimpleStorag", "null"),
    *_each("actor_rollout_ref.nccl_timeout", "0", "abc", "null"),
    *_all("data.filter_overlong_prompts trainer.balance_batch trainer.del_local_ckpt_after_load", "maybe"),
    *_all(f"{ACTOR}.fsdp_config.mixed_precision {ACTOR}.optim.override_optimizer_config global_profiler.steps", "5"),
    *_all(f"{ROLLOUT}.engine_kwargs ray_kwargs.ray_init.runtime_env", "5"),
]
"""Out of range, not finite, or no number at all."""

NAMES = [
    *_each(f"{ROLLOUT}.dtype", "float99", "int4", "null", "16"),
    *_each(f"{ROLLOUT}.name", "difusers", "sglang", "null"),
    *_each(f"{ROLLOUT}.checkpoint_engine.backend", "bogus", "digen_gloo"),
    *_each(f"{ROLLOUT}.agent.agent_loop_manager_class", "no.such.Class", "null", "5"),
    *_each(f"{ACTOR}.fsdp_config.model_dtype", "int4", "float", "null"),
    *_each(f"{ACTOR}.strategy", "fsdp", "megatron", "null"),
    *_each(f"{ACTOR}.checkpoint.save_contents", "[hf_modl]", "model", "null", "5"),
    *_each(f"{ACTOR}.optim.lr_scheduler_type", "linear", "null"),
    (f"+{ACTOR}.optim.override_optimizer_config.epss=1e-15", f"{ACTOR}.optim.override_optimizer_config"),
    *_each(f"{MODEL}.external_lib", "nosuch", "[nosuch]", "5"),
    *_each(f"{MODEL}.target_modules", "[to_qq]", "nothing.*like.*it", "'('", "5", "[]", "''"),
    *_each(f"{MODEL}.exclude_modules", "[no_such_part]", "*"),
    *_each(f"{MODEL}.path", "5", "nowhere", "null", "[a]", "TMP", "''", "TMP/file"),
    *_each(f"{MODEL}.lora_adapter_path", "nowhere", "5", "TMP"),
    ("+actor_rollout_ref.model.lora_rnk=4", f"{MODEL}.lora_rnk"),
    ("+actor_rollout_ref.model.lora.alfa=alfa", f"{MODEL}.lora"),
    (f"{ACTOR}.fsdp_config.mixed_precision.param_dtype=int3", f"{ACTOR}.fsdp_config.mixed_precision"),
    *_each(f"{ACTOR}.optim.optimizer", "AdamWW", "lr_scheduler"),
    *_each(f"{ACTOR}.optim.optimizer_impl", "no.such", "''"),
    *_each("global_profiler.tool", "nosuch"),
    *_each("trainer.checkpoint_callback_class", "nosuch.X", "json"),
    *_each("trainer.logger", "[tensorbord]", "tensorbord", "5", "[console,5]"),
    *_each("trainer.resume_mode", "maybe", "null", "true", "resume_path"),
    *_each("trainer.resume_from_path", "TMP/global_step_3", "5"),
    *_each("trainer.device", "gpu", "tpu"),
    *_each("trainer.v1.trainer_mode", "foo", "sync", "digen_disaggregated"),
    *_each("trainer.project_name", "../../x", "/etc/x", "null", "''", "5"),
    *_each("trainer.experiment_name", "a/../../../b", "[x]"),
    *_each("trainer.default_local_dir", "''", "TMP/loop", "TMP/loop/run"),
    *_each("data.train_files", "''", "[]", "nan", "[[a]]", "TMP", "TMP/loop", "TMP/loop/x.txt", "hf://words", "a.xlsx"),
    *_each("data.prompt_key", "''", "5", "null", "images"),
    *_each("trainer.default_local_dir", "null", "TMP/file", "TMP/file/below", "/proc/x", "5"),
    *_each("trainer.rollout_data_dir", "TMP/file", "5"),
    *_all("trainer.val_only trainer.val_before_train", "maybe", "1"),
    *_each("reward.reward_manager.source", "register"),
    *_each("data.custom_cls.name", "NoSuchDataset", "null"),
    *_each("data.custom_cls.path", "nowhere.py", "null"),
    *_each("trainer.v1.sampler.custom_sampler.name", "NoSuchSampler", "null"),
    *_each("actor_rollout_ref.hybrid_engine", "false", "null", "maybe"),
    *_each("digen.loss.name", "ppo", "flow-grpo", "5"),
    *_each("digen.forward.first_step", "-1", "0.5"),
    *_each("digen.forward.until", "0", "1.5", "nan"),
    *_all("digen.forward.kind digen.kl.kind digen.window.kind digen.sde.law digen.tsp.reduce", "nosuch"),
    *_all("digen.rollout.latents_dtype digen.loss.old_log_probs digen.tag.policy digen.advantage.scale", "nosuch"),
    *_each("digen.advantage.best_of", "1000", "half"),
    *_each("digen.sampling.solver", "heun", "dpm2", "sa"),
    *_each("digen.sampling.val_solver", "heun", "sa"),
    *_each("digen.sampling.sa_noise", "-1", "nan"),
    *_each("digen.sampling.sa_low", "0.95", "-1"),
    *_each("digen.sampling.outside.cache", "1", "-0.1", "nan", "0.1"),
    *_each("digen.sampling.outside.solver_after", "0", "2", "half", "0.5"),
    *_each("digen.sampling.outside.cache_max_skips", "0", "3"),
]
"""Unknown names, and paths that lead nowhere."""

ADDED_UNKNOWN = [
    ("+trainer.save_frq=3", "did you mean trainer.save_freq?"),
    ("+trainer.a_key_of_my_own=1", "e.g. +mine.a_key_of_my_own=..."),
    ("+trainer={save_frq: 3}", "did you mean trainer.save_freq?"),
    ("+trainer.v1.sampler.sampler_kwrgs.a=1", "did you mean trainer.v1.sampler.sampler_kwargs"),
    ("+trainer.v1.sampler.sampler_kwargs.group_size=4", "sampler_kwargs.group_size must be a key that is read"),
    ("+trainer.v1.sync.parameter_sync_step=2", "did you mean trainer.v1.separate_async.parameter_sync_step"),
    ("+data.train_file=x", "did you mean data.train_files"),
    ("+data.custom_cls.nam=x", "did you mean data.custom_cls.name"),
    ("+actor_rollout_ref.rollout.temprature=1", f"did you mean {ROLLOUT}.temperature"),
    ("+actor_rollout_ref.rollout.engine_kwarg.vllm_omni.a=1", f"did you mean {ROLLOUT}.engine_kwargs"),
    ("+actor_rollout_ref.actor.optim.learning_rate=1e-3", f"{ACTOR}.optim.learning_rate must be a key that is read"),
    (
        "+actor_rollout_ref.actor.fsdp_config.mixed_precison.param_dtype=bf16",
        f"did you mean {ACTOR}.fsdp_config.mixed_",
    ),
    ("+actor_rollout_ref.actr.optim.lr=1", "did you mean actor_rollout_ref.actor"),
    ("+algorithm.clip_range=1e-4", "did you mean digen.loss.clip_range"),
    ("+reward.custom_reward_function.reward_kwarg.scale=2", "did you mean reward.custom_reward_function.reward_kwargs"),
    ("+transfer_queue.metrics.prt=1", "did you mean transfer_queue.metrics.port"),
    ("+save_freq=3", "did you mean trainer.save_freq"),
    ("+lr=1e-3", "did you mean actor_rollout_ref.actor.optim.lr"),
    ("+dat.train_batch_size=4", "did you mean data"),
]
"""(a key that is added and that nothing reads, a part of the message)."""

ADDED = [
    "+ray_kwargs.ray_init._temp_dir=/tmp",
    "+ray_kwargs.ray_init.address=local",
    "++ray_kwargs.ray_init.ignore_reinit_error=true",
    "+ray_kwargs.ray_init.runtime_env.env_vars.VLLM_LOGGING_LEVEL=INFO",
    "+ray_kwargs.ray_init.resources={mine: 1}",
    f"+{ROLLOUT}.engine_kwargs.vllm_omni.vae_use_tiling=true",
    f"+{ROLLOUT}.checkpoint_engine.engine_kwargs.naive.a=1",
    f"+{ROLLOUT}.custom.a_key_of_my_agent=1",
    f"+{ACTOR}.optim.override_optimizer_config.foreach=false",
    f"+{ACTOR}.optim.override_optimizer_config={{foreach: false}}",
    f"+{ACTOR}.fsdp_config.wrap_policy.transformer_layer_cls_to_wrap=[Block]",
    f"++{ACTOR}.fsdp_config.mixed_precision={{param_dtype: fp32, reduce_dtype: fp32, buffer_dtype: fp32}}",
    f"+{ACTOR}.profiler.tool_config.torch.contents=[cpu]".replace("+", "++"),
    f"+{MODEL}.lora.rank=4",
    "+global_profiler.global_tool_config.nsys.worker_nsight_options.trace=cuda".replace("+", "++"),
    "+transfer_queue.backend.Mine.address=here",
    "++trainer.save_freq=5",
    "+mine.key=1",
    "+workflow.repeat_times=1",
    "+note='a key of my own'",
    "++hydra.job.chdir=false",
]
"""Keys that verl's users add."""

SECTIONS = [
    *_each("trainer", "5", "null"),
    *_each("digen", "5", "null"),
    *_each("ray_kwargs", "null"),
    *_each("ray_kwargs.ray_init", "5"),
    *_all("data algorithm trainer.v1 reward.custom_reward_function", "null"),
    *_each("reward.reward_model", "5"),
    *_each(f"{ROLLOUT}.agent", "null"),
    *_each(f"{ACTOR}.optim", "3e-4"),
    *_each(f"{ACTOR}.checkpoint", "hf_model"),
    ("~trainer.nnodes", "trainer.nnodes"),
    ("~data.train_batch_size", "data.train_batch_size"),
    ("~actor_rollout_ref.actor.optim.lr", f"{ACTOR}.optim.lr"),
    ("trainer.nnodes=${nosuch}", "trainer.nnodes"),
    ("trainer.experiment_name=a${now:%m}", "trainer.experiment_name must be one value"),
    ("trainer.default_local_dir=TMP/${hydra:job.num}", "trainer.default_local_dir must be one value"),
    ("data.train_batch_size=${oc.env:NO_SUCH_VARIABLE}", "data.train_batch_size"),
]
"""Values in place of sections, keys taken out, interpolations that lead nowhere."""

WITHOUT_EFFECT = [
    *_each("digen.gap.enable", "false"),
    *_each("digen.staleness.fraction", "0.5"),
    *_all("digen.queue.drop_zero_spread distillation.enabled", "true"),
    *_all("digen.gap.slots_per_replica digen.tag.chunk_size", "4"),
    *_each("digen.placement.generator_accelerator", "H100"),
    *_each("critic.enable", "true", "maybe"),
    *_each("reward.reward_model.enable", "true", "maybe"),
    *_all("skip.rollout.enable skip.rollout_tq.enable skip.async_rollout.enable", "true"),
    *_all(f"{ROLLOUT}.prometheus.enable actor_rollout_ref.ref.fsdp_config.param_offload", "true"),
    *_all("actor_rollout_ref.ref.ulysses_sequence_parallel_size actor_rollout_ref.ref.fsdp_config.fsdp_size", "2"),
    *_each("actor_rollout_ref.ref.strategy", "fsdp"),
    *_all(f"{ACTOR}.fsdp_config.offload_policy {ROLLOUT}.full_determinism", "true"),
    *_each(f"{ACTOR}.fsdp_config.dtype", "float16"),
    *_each(f"{ROLLOUT}.load_format", "safetensors"),
    (f"+{ROLLOUT}.engine_kwargs.vllm.enable_lora=true", f"{ROLLOUT}.engine_kwargs.vllm"),
    *_each("data.reward_fn_key", "source"),
    *_each(f"{ROLLOUT}.quantization", "fp8"),
    *_each(f"{ROLLOUT}.trace.backend", "mlflow"),
    *_each(f"{ACTOR}.optim.warmup_style", "cosine", "nosuch"),
    *_each("algorithm.adv_estimator", "gae", "nosuch", "null"),
]
"""Keys that are read, but not in this run; and features that our runs do not have."""

ACROSS_KEYS = [
    *_each(f"{ACTOR}.ppo_mini_batch_size", "3"),
    *_each(f"{ROLLOUT}.tensor_model_parallel_size", "2"),
    *_each("data.train_max_samples", "3", "0", "-2", "all"),
    *_each("digen.num_logged_groups", "all"),
    *_each("digen.reward.stop_on_hacking", "true", "often"),
    *_each("ray_kwargs.ray_init.num_cpus", "1", "all"),
    *_each("ray_kwargs.ray_init.num_gpus", "0", "-1", "many", "null"),
    *_each("digen.sampling.height_px", "33"),
    *_each("digen.sampling.guidance_scale", "3.5"),
    *_each("digen.sampling.image_px", "8"),
    *_each("digen.sampling.size_from_image", "true"),
    *_each("data.val_files", "null"),
    *_each("data.val_max_samples", "0", "half"),
    *_all(f"{ROLLOUT}.data_parallel_size {ROLLOUT}.pipeline_model_parallel_size", "2"),
    *_each("digen.loss.tau", "0.2"),
    *_each("digen.loss.clip_rnage", "1e-4"),
    *_each("digen.tag.policy", "bts"),
    *_each("digen.staleness.max_versions", "1"),
]
"""Numbers that conflict with others of the run."""

ALONE = [*ACROSS_KEYS, *NAMES, *SECTIONS, *WITHOUT_EFFECT]
"""(override, key that the message names), a start for each."""


SERVER = "{weight: 1, reward: server, protocol: http_scorer, url: 'http://h:1'}"

TOGETHER = [
    (
        (f"{ROLLOUT}.name=trainer", f"{ACTOR}.fsdp_config.param_offload=true"),
        f"{ACTOR}.fsdp_config.param_offload must be false with {ROLLOUT}.name=trainer",
    ),
    (
        (f"{ROLLOUT}.name=diffusers", f"{MODEL}.lora_rank=4", f"{MODEL}.int8_base=true"),
        f"{MODEL}.int8_base must be false where replicas generate",
    ),
    (
        (f"{ROLLOUT}.name=trainer", "recipe=digen_flowgrpo+disaggregated"),
        f"trainer.v1.trainer_mode must be digen_colocated with {ROLLOUT}.name=trainer, whose replicas are",
    ),
    (
        (f"{ROLLOUT}.name=trainer", "digen.window.kind=consecutive", "digen.sampling.outside.cache=0.1"),
        f"digen.sampling.outside.cache must be left out with {ROLLOUT}.name=trainer",
    ),
    (
        (
            *(f"{ROLLOUT}.name=trainer", "trainer.n_gpus_per_node=2", "digen.window.kind=consecutive"),
            "digen.sampling.shared_initial_noise=true",
        ),
        f"digen.sampling.shared_initial_noise and digen.sampling.outside must be left out with {ROLLOUT}.name=trainer",
    ),
    (
        (f"{ROLLOUT}.name=trainer", "digen.rollout.compile=true"),
        f"digen.rollout.compile must be null with {ROLLOUT}.name=trainer",
    ),
    (
        (
            "digen.reward.recipe_functions.diversity={weight: 1, timeshare: true}",
            *(f"{ROLLOUT}.val_kwargs.n=2", f"{ROLLOUT}.free_cache_engine=false"),
        ),
        f"{ROLLOUT}.free_cache_engine must be true with digen.reward.recipe_functions.diversity.timeshare=true",
    ),
    (
        (f"digen.reward.functions={{mine: {{jpeg_quality: 0, {SERVER[1:]}}}",),
        "digen.reward.functions.mine.jpeg_quality must lie in [1, 100], got 0",
    ),
    (("digen.reward.functions={yes_no: 1.0}",), "functions.yes_no.url must name a server where reward.reward_model."),
    ((f"{MODEL}.target_modules={{a: b}}",), "must be a text, got {'a': 'b'}; null takes the model's own list"),
    (
        ("trainer.n_gpus_per_node=4", f"{ACTOR}.fsdp_config.fsdp_size=3"),
        "fsdp_size must divide the trainer's ranks (4)",
    ),
    (
        ("trainer.n_gpus_per_node=1", f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size=2"),
        "ulysses_sequence_parallel_size must divide the trainer's ranks (1): that many ranks share a row",
    ),
    (
        (f"{ACTOR}.ulysses_sequence_parallel_size=2",),
        "fsdp_config.ulysses_sequence_parallel_size is the key of sequence parallelism",
    ),
    (("trainer.val_only=true", "trainer.val_before_train=false"), "trainer.val_before_train must be true with"),
    (("data.val_files=null", "trainer.val_before_train=false"), "(trainer.test_freq=20), got nothing; set data.val_"),
    (("data.val_files=null", "trainer.test_freq=-1"), "(trainer.val_before_train=true), got nothing; set data.val_"),
]
"""(overrides of which each is valid by itself, a part of the message)."""


def batches() -> list[list[tuple[str, str]]]:
    """Distribute `NUMBERS` over few starts: a key, and a section under `digen:`, is reported once per start."""
    dealt: list[dict[str, tuple[str, str]]] = []
    for override, key in NUMBERS:
        slot = ".".join(key.split(".")[:-1][:2]) if key.startswith("digen.") else key
        batch = next((batch for batch in dealt if slot not in batch), None)
        if batch is None:
            dealt.append(batch := {})
        batch[slot] = (override, key)
    return [list(batch.values()) for batch in dealt]


SEPARATE_MALFORMED = [
    *_each(f"{ROLLOUT}.nnodes", "0", "-1", "null"),
    *_each(f"{ROLLOUT}.n_gpus_per_node", "0", "eight"),
    *_each(f"{ROLLOUT}.checkpoint_engine.backend", "bogus", "naive", "null"),
    *_each(f"{ROLLOUT}.checkpoint_engine.custom_backend_module", "nosuch"),
    *_each("actor_rollout_ref.hybrid_engine", "true"),
    *_each("digen.gap.chunk_size", "0", "some"),
    *_each("digen.gap.slots_per_replica", "0"),
    *_each("digen.queue.extra_prompts", "100000000"),
    *_each("digen.gap.max_groups_per_fragment", "0", "many"),
    *_each("digen.queue.extra_prompts", "-1"),
    *_each("digen.staleness.max_versions", "-1", "5"),
    *_each("digen.staleness.fraction", "nan", "0", "2", "0.5"),
]
"""(override, key) like `ALONE`, for a start with `recipe=digen_flowgrpo+disaggregated`."""

RECIPES = [
    ("recipe=disaggregated", "recipe=digen_flowgrpo+disaggregated"),
    ("recipe=vllm_omni", "recipe=digen_flowgrpo+vllm_omni"),
    ("model_engine=megatron", "model_engine must be dp"),
    ("recipe=ocr", "recipe must begin with the recipe of an algorithm or a model"),
    ("recipe=digen_quickstart+digen_sd3", "choose one of digen_quickstart, digen_sd3"),
    ("recipe=digen_flowgrpo+digen_dancegrpo", "choose one of digen_flowgrpo, digen_dancegrpo"),
    ("recipe=disaggregated+digen_quickstart", "name recipe=digen_quickstart+disaggregated"),
    ("recipe=vllm_omni+digen_sd3+flowgrpo_fast", "name recipe=digen_sd3+vllm_omni+flowgrpo_fast"),
    ("recipe=digen_quickstart+digen_quickstart", "name recipe=digen_quickstart"),
]
"""(recipes as typed, the remedy)."""


def apart(words: list[str]) -> list[list[str]]:
    """Distribute overrides over few starts, so that no key is below another one of the same start."""
    dealt: list[list[str]] = []
    for word in words:
        key = word.lstrip("+").partition("=")[0]
        taken = ([other.lstrip("+").partition("=")[0] for other in start] for start in dealt)
        free = (
            not any(f"{key}.".startswith(f"{own}.") or f"{own}.".startswith(f"{key}.") for own in keys)
            for keys in taken
        )
        place = next((start for start, is_free in zip(dealt, free, strict=True) if is_free), None)
        if place is None:
            dealt.append(place := [])
        place.append(word)
    return dealt


NO_VALIDATION = ("trainer.test_freq=-1", "trainer.val_before_train=false")

UNUSUAL = [
    (),
    (f"{ACTOR}.optim.lr=0",),
    (f"{ACTOR}.optim.lr_scheduler_type=cosine", f"{ACTOR}.optim.lr_warmup_steps=10", f"{ACTOR}.optim.min_lr_ratio=0.1"),
    (f"{ACTOR}.optim.betas=[0,0.99]",),
    (f"{ACTOR}.ppo_mini_batch_size=2", f"{ACTOR}.ppo_epochs=3"),
    (f"{ACTOR}.checkpoint.save_contents=[model,hf_model]",),
    (f"{ROLLOUT}.n=${{data.train_batch_size}}",),
    (f"{MODEL}.lora_rank=4", f"{MODEL}.target_modules=all-linear"),
    (f"{MODEL}.lora_rank=4", f"{MODEL}.target_modules='.*to_[qk]'", f"{MODEL}.exclude_modules='.*add_.*'"),
    (f"{MODEL}.external_lib=[json,math]",),
    ("data.train_max_samples=4",),
    ("data.val_files=null", *NO_VALIDATION),
    (f"{ACTOR}.optim.optimizer=SGD",),
    ("trainer.n_gpus_per_node=4", f"{ACTOR}.fsdp_config.fsdp_size=2"),
    ("trainer.n_gpus_per_node=4", f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size=2"),
    ("global_profiler.steps=[1,2]", "global_profiler.tool=torch"),
    ("data.val_files=null", *NO_VALIDATION, "data.filter_overlong_prompts=true"),
    ("trainer.val_only=true",),
    ("trainer.logger=[]",),
    ("trainer.logger=[console,tensorboard,file]",),
    ("trainer.total_training_steps=1", "trainer.test_freq=1", "trainer.save_freq=1"),
    ("trainer.project_name=a/b", "trainer.experiment_name='a name with spaces, and 图'"),
    ("trainer.default_local_dir=TMP/new/folder", "trainer.rollout_data_dir=TMP/rollouts"),
    ("trainer.max_actor_ckpt_to_keep=1",),
    ("digen.loss.advantage_clip=inf",),
    ("digen.loss.name=dgpo", "digen.loss.clip=inf"),
    ("digen.seed=-7",),
    ("digen.reward.recipe_functions.jpeg_compressibility=0", "digen.reward.recipe_functions.jpeg_incompressibility=1"),
    ("digen.sampling.negative_prompt=''",),
    ("digen.window.kind=consecutive", "digen.window.range=[0,3]", "digen.window.size=1", "digen.sampling.solver=dpm2"),
    (
        "digen.window.kind=consecutive",
        "digen.window.range=[0,2]",
        "digen.window.size=1",
        "digen.sampling.outside.solver_after=0.5",
    ),
    (
        "digen.window.kind=consecutive",
        "digen.window.range=[0,1]",
        "digen.window.size=1",
        "digen.sampling.outside.cache=0.1",
    ),
    ("digen.max_refills_per_step=null",),
    ("digen.num_logged_images=0", "data.seed=3", "reward.num_workers=3", "trainer.logger=console", f"{ROLLOUT}.n=5"),
    ("digen.reward.recipe_functions.jpeg_compressibility={weight: 1, num_workers: 2, num_gpus: 0.5, batch_wait_s: 0}",),
    (
        "digen.reward.combine=gdpo",
        "digen.reward.functions={jpeg_compressibility: 1, jpeg_incompressibility: {weight: 0.5}}",
    ),
    ("digen.reward.recipe_functions.diversity=0.1", f"{ROLLOUT}.val_kwargs.n=2"),
    ("digen.reward.recipe_functions.diversity={weight: 1, timeshare: true}", f"{ROLLOUT}.val_kwargs.n=2"),
    *map(tuple, apart(ADDED)),
    ("hydra.run.dir=TMP/hydra",),
]
"""Starts that a run must not refuse."""

SEPARATE_UNUSUAL = [
    (),
    (f"{ROLLOUT}.n_gpus_per_node=3",),
    ("digen.tag.policy=always", "digen.tag.chunk_size=2"),
    ("digen.staleness.max_versions=1", "digen.staleness.fraction=0.25"),
    ("digen.gap.enable=false", "digen.queue.replicate_prompts=false"),
    ("digen.queue.drop_zero_spread=true", "digen.queue.extra_prompts=2"),
]
