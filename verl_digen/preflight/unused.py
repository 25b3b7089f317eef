# SPDX-License-Identifier: Apache-2.0
"""Keys of verl's that no code path of our runs reads, and the key to use in place of each.

- verl's text training reads them, so a user who sets one expects something of it. A run refuses any other value than
  that of our recipes.
- What belongs to a feature that is refused as a whole (critic, distillation, served reward model) is not listed.

Invariants (tests/plugin/test_malformed_starts.py): every key is one of verl's, and every recipe has the value in the
table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf

A, R, T = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "trainer"

TILE = "digen.tsp.samples_per_tile and digen.tsp.steps_per_tile are the size of a forward"
CLIP = "digen.loss.clip_range and digen.loss.clip_range_high clip the ratio"
LOSS = "digen.loss.name is the policy loss, beside its settings"
KL = "digen.kl.coef is the weight of the KL term, digen.kl.kind its kind"
MEAN = "every row, a sample at a timestep, weighs the same; digen.window says which timesteps train"
NO_TOKENS = "a denoising step has no distribution over tokens; digen.sde.noise_level says how far samples spread"
SAMPLER = "digen.sde and digen.sampling say how samples are drawn, digen.seed with what noise"
VALIDATION = "validation is deterministic: digen.sampling.val_num_steps and val_true_cfg_scale"
BATCH = "digen.rollout.max_batch_size is what a replica denoises together"
ADVANTAGE = "digen.advantage says how rewards become advantages"
STALE = "digen.staleness says how old samples may be"
OFF_POLICY = "digen.loss.name=tis and its relatives correct for stale samples, see digen.loss"
PROMPTS = "the model's own limit on a prompt is checked before the run starts"
COLUMNS = "prompt files have the columns prompt, negative_prompt, data_source, reward_model, extra_info"
NO_TEXT = "a diffusion run makes no text, leave it out"
PICTURES = "digen.num_logged_images says how many validation prompts are shown, in images/ and in the run's trackers"
SEED = "digen.seed is the seed of everything"
SEQUENCE = f"{A}.fsdp_config.ulysses_sequence_parallel_size is the key of sequence parallelism"
DTYPE = f"weights are trained in {A}.fsdp_config.model_dtype"
FSDP1 = "it is an option of fsdp, and diffusion runs on fsdp2"
OWN_MODE = "it belongs to a trainer of verl's; leave it out, recipe=...+disaggregated has separate pools"

UNUSED: Mapping[str, tuple[Any, str]] = {
    f"{T}.use_v1": (True, "the legacy trainer has no hook for diffusion"),
    f"{T}.log_val_generations": (0, PICTURES),
    f"{T}.validation_data_dir": (None, PICTURES),
    f"{T}.critic_warmup": (0, "there is no critic, and the actor would not be trained until then; leave it out"),
    f"{T}.max_critic_ckpt_to_keep": (None, "there is no critic; trainer.max_actor_ckpt_to_keep counts checkpoints"),
    f"{T}.default_hdfs_dir": (None, "checkpoints are written under trainer.default_local_dir alone; copy them"),
    f"{T}.ray_wait_register_center_timeout": (300, "no code of verl's waits for it any more; leave it out"),
    f"{T}.v1.colocate_async.num_warmup_batches": (1, OWN_MODE),
    f"{T}.v1.separate_async.num_warmup_batches": (1, OWN_MODE),
    f"{T}.v1.separate_async.parameter_sync_step": (4, OWN_MODE),
    f"{T}.v1.separate_async.hybrid_rollout.enable_switch": (False, "digen.tag.policy lets the trainer generate"),
    f"{T}.v1.sampler.max_off_policy_threshold": (8, STALE),
    f"{T}.v1.sampler.max_off_policy_strategy": ("drop", STALE),
    f"{T}.v1.sampler.sync_refill_failed_groups": (True, "digen.max_refills_per_step bounds the groups made again"),
    "algorithm.adv_estimator": ("grpo", ADVANTAGE),
    "algorithm.norm_adv_by_std_in_grpo": (True, "digen.advantage.scale=none turns the division by the std off"),
    "algorithm.gamma": (1.0, ADVANTAGE),
    "algorithm.lam": (1.0, ADVANTAGE),
    "algorithm.use_kl_in_reward": (False, KL),
    "algorithm.kl_penalty": ("kl", KL),
    "algorithm.kl_ctrl.type": ("fixed", KL),
    "algorithm.kl_ctrl.kl_coef": (0.001, KL),
    "algorithm.kl_ctrl.horizon": (10000, KL),
    "algorithm.kl_ctrl.target_kl": (0.1, KL),
    "algorithm.use_pf_ppo": (False, ADVANTAGE),
    "algorithm.filter_groups.enable": (False, "digen.queue.drop_zero_spread drops groups without a signal"),
    "algorithm.rollout_correction.rollout_is": (None, OFF_POLICY),
    "algorithm.rollout_correction.rollout_is_threshold": (2.0, OFF_POLICY),
    "algorithm.rollout_correction.rollout_rs": (None, OFF_POLICY),
    "algorithm.rollout_correction.rollout_rs_threshold": (None, OFF_POLICY),
    "algorithm.rollout_correction.bypass_mode": (
        False,
        "digen.loss.old_log_probs=rollout takes the recorded log-probs",
    ),
    "algorithm.rollout_correction.loss_type": ("ppo_clip", LOSS),
    "algorithm.rollout_correction.rollout_is_batch_normalize": (False, OFF_POLICY),
    f"{A}.use_kl_loss": (False, KL),
    f"{A}.kl_loss_coef": (0.001, KL),
    f"{A}.kl_loss_type": ("low_var_kl", KL),
    f"{A}.clip_ratio": (0.2, CLIP),
    f"{A}.clip_ratio_low": (0.2, CLIP),
    f"{A}.clip_ratio_high": (0.2, CLIP),
    f"{A}.clip_ratio_c": (3.0, CLIP),
    f"{A}.tau_pos": (1.0, LOSS),
    f"{A}.tau_neg": (1.05, LOSS),
    f"{A}.policy_loss.loss_mode": ("vanilla", LOSS),
    f"{A}.policy_loss.clip_cov_ratio": (0.0002, LOSS),
    f"{A}.policy_loss.clip_cov_lb": (1.0, LOSS),
    f"{A}.policy_loss.clip_cov_ub": (5.0, LOSS),
    f"{A}.policy_loss.kl_cov_ratio": (0.0002, LOSS),
    f"{A}.policy_loss.ppo_kl_coef": (0.1, LOSS),
    f"{A}.policy_loss.dro_beta": (None, LOSS),
    f"{A}.loss_agg_mode": ("token-mean", MEAN),
    f"{A}.loss_scale_factor": (None, MEAN),
    f"{A}.entropy_coeff": (0, NO_TOKENS),
    f"{A}.calculate_entropy": (False, NO_TOKENS),
    f"{A}.calculate_sum_pi_squared": (False, NO_TOKENS),
    f"{A}.entropy_checkpointing": (False, NO_TOKENS),
    f"{A}.entropy_from_logits_with_chunking": (False, NO_TOKENS),
    f"{A}.entropy_from_logits_chunk_size": (2048, NO_TOKENS),
    f"{A}.use_dynamic_bsz": (True, TILE),
    f"{A}.ppo_micro_batch_size": (None, TILE),
    f"{A}.ppo_micro_batch_size_per_gpu": (1, TILE),
    f"{A}.ppo_max_token_len_per_gpu": (16384, TILE),
    f"{A}.pad_to_length": (False, TILE),
    f"{A}.use_prefix_grouper": (False, "a prompt is encoded once for its whole group by itself; leave it out"),
    f"{A}.freeze_vision_tower": (False, "actor_rollout_ref.model.target_modules and exclude_modules say what trains"),
    f"{A}.shuffle": (False, "mini-batches are taken in the order of the prompts, which data.shuffle shuffles"),
    f"{A}.data_loader_seed": (42, SEED),
    f"{A}.grad_clip": (1.0, f"{A}.optim.clip_grad is the largest norm of the gradient"),
    f"{A}.ulysses_sequence_parallel_size": (1, SEQUENCE),
    f"{A}.qat.enable": (False, DTYPE),
    f"{A}.checkpoint.async_save": (False, "checkpoints are written before the next step begins; leave it out"),
    f"{A}.fsdp_config.use_no_sync_for_gradient_accumulation": (
        False,
        "digen.tsp.reduce says when gradients are reduced",
    ),
    f"{A}.fsdp_config.qat.enable": (False, DTYPE),
    f"{A}.fsdp_config.use_orig_params": (False, FSDP1),
    f"{A}.fsdp_config.forward_prefetch": (False, FSDP1),
    f"{A}.fsdp_config.wrap_policy.min_num_params": (0, "the blocks of the transformer are wrapped; leave it out"),
    "actor_rollout_ref.ref.log_prob_micro_batch_size": (None, TILE),
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": (1, TILE),
    f"{R}.log_prob_micro_batch_size": (None, TILE),
    f"{R}.log_prob_micro_batch_size_per_gpu": (1, TILE),
    f"{R}.mode": ("async", "replicas serve requests; leave it out"),
    f"{R}.temperature": (1.0, SAMPLER),
    f"{R}.top_k": (-1, SAMPLER),
    f"{R}.top_p": (1, SAMPLER),
    f"{R}.do_sample": (True, SAMPLER),
    f"{R}.seed": (42, SEED),
    f"{R}.val_kwargs.temperature": (0, VALIDATION),
    f"{R}.val_kwargs.top_k": (-1, VALIDATION),
    f"{R}.val_kwargs.top_p": (1.0, VALIDATION),
    f"{R}.val_kwargs.do_sample": (False, VALIDATION),
    f"{R}.prompt_length": (512, PROMPTS),
    f"{R}.response_length": (512, NO_TEXT),
    f"{R}.ignore_eos": (False, NO_TEXT),
    f"{R}.max_model_len": (None, PROMPTS),
    f"{R}.max_num_batched_tokens": (8192, BATCH),
    f"{R}.max_num_seqs": (256, BATCH),
    f"{R}.enable_chunked_prefill": (True, BATCH),
    f"{R}.enable_prefix_caching": (True, "digen.rollout.embed_cache_size prompts stay encoded"),
    f"{R}.gpu_memory_utilization": (0.5, BATCH + "; `digen plan` says what fits"),
    f"{R}.calculate_log_probs": (True, "log-probs are always recorded; digen.loss.old_log_probs says which ones count"),
    f"{R}.logprobs_mode": ("processed_logprobs", "digen.sde.law says what a log-prob is"),
    f"{R}.over_sample_rate": (0, "digen.queue.extra_prompts begins groups beyond the batch"),
    f"{R}.multi_turn.enable": (False, "a sample is one generation; leave it out"),
    f"{R}.expert_parallel_size": (1, f"{R}.tensor_model_parallel_size is the size of a replica"),
    f"{R}.disaggregation.enabled": (False, NO_TEXT),
    f"{R}.enable_rollout_routing_replay": (False, NO_TEXT),
    f"{R}.multi_stage_wake_up": (False, f"{R}.free_cache_engine gives a replica's memory to the trainer"),
    f"{R}.layered_summon": (False, f"{R}.checkpoint_engine.update_weights_bucket_megabytes bounds what is gathered"),
    "data.max_prompt_length": (512, PROMPTS),
    "data.max_response_length": (512, NO_TEXT),
    "data.truncation": ("error", f"{PROMPTS}; data.filter_overlong_prompts=true leaves longer ones out"),
    "data.gen_batch_size": (None, "digen.queue.extra_prompts begins groups beyond the batch"),
    "data.tokenizer": (None, "the checkpoint's own tokenizers are used"),
    "data.video_key": ("videos", COLUMNS),
    "data.return_full_prompt": (False, COLUMNS),
    "data.return_raw_input_ids": (False, COLUMNS),
    "reward.sandbox_fusion.url": (None, "it runs code that a language model wrote; name a reward function"),
}
"""Key -> its value in every recipe of ours, and what to use in its place."""

REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "critic.enable": ((None, False), "a group's own rewards are its baseline (digen.advantage); leave it out"),
    "distillation.enabled": ((False,), "recipe opd distils, from an adapter (digen.loss.teacher); leave it out"),
}
"""Features of verl's that our runs do not have: key -> values that switch them off, and the remedy."""


def unused_problems(config: DictConfig) -> list[str]:
    """A paragraph for each of these keys that has another value."""
    problems = []
    for key, (value, remedy) in UNUSED.items():
        path, _, name = key.rpartition(".")
        section = OmegaConf.select(config, path) or {}
        if name in section and (given := section[name]) != value:
            problems.append(
                f"{key} must be {_typed(value)}, because it has no effect on a diffusion model, got {given!r}; {remedy}"
            )
    for key, (values, remedy) in REFUSED.items():
        given = OmegaConf.select(config, key, default=values[0])
        if given not in values:
            problems.append(f"{key} must be false, got {given!r}; {remedy}")
    return problems


def _typed(value: Any) -> str:
    """A value as the user types it."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)
