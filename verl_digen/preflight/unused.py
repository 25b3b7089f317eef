# SPDX-License-Identifier: Apache-2.0
"""Keys without effect: of verl's those that no code path of our runs reads, with the key to use in place of each, and
under `digen:` those that a switch of their section turns off.

- verl's text training reads them, so a user who sets one expects something of it. A run refuses any other value than
  verl's default, or that of our recipes.
- What belongs to a feature that is refused as a whole (critic, distillation, served reward model) is not listed.

Invariants (tests/plugin/test_malformed_starts.py): every key is one of verl's, and every recipe has the expected value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_digen.config import DigenConfig, digen_config
from verl_digen.preflight.pools import COLOCATED
from verl_digen.preflight.recipes import typed_keys
from verl_digen.preflight.unknown import verls_default
from verl_digen.reward.named import has_custom

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"

UNUSED: Mapping[str, str] = {
    "the legacy trainer has no hook for diffusion": "trainer: use_v1",
    "digen.num_logged_images says how many validation prompts are shown, in images/ and in the run's trackers": (
        "trainer: log_val_generations validation_data_dir"
    ),
    "there is no critic, and the actor would not be trained until then; leave it out": "trainer: critic_warmup",
    "there is no critic; trainer.max_actor_ckpt_to_keep counts checkpoints": "trainer: max_critic_ckpt_to_keep",
    "checkpoints are written under trainer.default_local_dir alone; copy them": "trainer: default_hdfs_dir",
    "no code of verl's waits for it any more; leave it out": "trainer: ray_wait_register_center_timeout",
    "it belongs to a trainer of verl's; leave it out, recipe=...+disaggregated has separate pools": (
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
        "pad_to_length; actor_rollout_ref.ref: log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu; "
        f"{ROLLOUT}: log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu"
    ),
    "a prompt is encoded once for its whole group by itself; leave it out": f"{ACTOR}: use_prefix_grouper",
    "actor_rollout_ref.model.target_modules and exclude_modules say what trains": f"{ACTOR}: freeze_vision_tower",
    "mini-batches are taken in the order of the prompts, which data.shuffle shuffles": f"{ACTOR}: shuffle",
    "digen.seed is the seed of everything": f"{ACTOR}: data_loader_seed; {ROLLOUT}: seed",
    f"{ACTOR}.optim.clip_grad is the largest norm of the gradient": f"{ACTOR}: grad_clip",
    f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size is the key of sequence parallelism": (
        f"{ACTOR}: ulysses_sequence_parallel_size"
    ),
    f"weights are trained in {ACTOR}.fsdp_config.model_dtype": f"{ACTOR}: qat.enable fsdp_config.qat.enable",
    "checkpoints are written before the next step begins; leave it out": f"{ACTOR}.checkpoint: async_save",
    "digen.tsp.reduce says when gradients are reduced": f"{ACTOR}.fsdp_config: use_no_sync_for_gradient_accumulation",
    "it is an option of fsdp, and diffusion runs on fsdp2": f"{ACTOR}.fsdp_config: use_orig_params forward_prefetch",
    "the blocks of the transformer are wrapped; leave it out": f"{ACTOR}.fsdp_config.wrap_policy: min_num_params",
    "replicas serve requests; leave it out": f"{ROLLOUT}: mode",
    "digen.sde and digen.sampling say how samples are drawn, digen.seed with what noise": (
        f"{ROLLOUT}: temperature top_k top_p do_sample"
    ),
    "validation is deterministic: digen.sampling.val_num_steps and val_true_cfg_scale": (
        f"{ROLLOUT}.val_kwargs: temperature top_k top_p do_sample"
    ),
    "the model's own limit on a prompt is checked before the run starts": (
        f"{ROLLOUT}: prompt_length max_model_len; data: max_prompt_length"
    ),
    "longer prompts than the model reads are refused, or left out with data.filter_overlong_prompts=true": (
        "data: truncation"
    ),
    "a diffusion run makes no text, leave it out": (
        f"{ROLLOUT}: response_length ignore_eos disaggregation.enabled enable_rollout_routing_replay; data: "
        "max_response_length"
    ),
    "digen.rollout.max_batch_size is what a replica denoises together": (
        f"{ROLLOUT}: max_num_batched_tokens max_num_seqs enable_chunked_prefill"
    ),
    "digen.rollout.embed_cache_size prompts stay encoded": f"{ROLLOUT}: enable_prefix_caching",
    "digen.rollout.max_batch_size is what a replica denoises together; `digen plan` says what fits": (
        f"{ROLLOUT}: gpu_memory_utilization"
    ),
    "log-probs are always recorded; digen.loss.old_log_probs says which ones count": f"{ROLLOUT}: calculate_log_probs",
    "digen.sde.law says what a log-prob is": f"{ROLLOUT}: logprobs_mode",
    "digen.queue.extra_prompts begins groups beyond the batch": f"{ROLLOUT}: over_sample_rate; data: gen_batch_size",
    "a sample is one generation; leave it out": f"{ROLLOUT}.multi_turn: enable",
    f"{ROLLOUT}.tensor_model_parallel_size is the size of a replica": f"{ROLLOUT}: expert_parallel_size",
    f"{ROLLOUT}.free_cache_engine gives a replica's memory to the trainer": f"{ROLLOUT}: multi_stage_wake_up",
    f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes bounds what is gathered": (
        f"{ROLLOUT}: layered_summon"
    ),
    "the checkpoint's own tokenizers are used": "data: tokenizer",
    "prompt files have the columns prompt, negative_prompt, data_source, reward_model, extra_info": (
        "data: video_key return_full_prompt return_raw_input_ids"
    ),
    "it runs code that a language model wrote; name a reward function": "reward.sandbox_fusion: url",
}
"""Remedy -> the keys that have it, `SECTION: NAME NAME`."""

OURS: Mapping[str, Any] = {
    "trainer.v1.sampler.sync_refill_failed_groups": True,
    "algorithm.adv_estimator": "grpo",
    f"{ACTOR}.use_dynamic_bsz": True,
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": 1,
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 1,
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": 1,
    f"{ROLLOUT}.prompt_length": 512,
    f"{ROLLOUT}.response_length": 512,
}
"""Values of the recipes that are not verl's defaults."""

REFUSED: Mapping[str, str] = {
    "critic.enable": "a group's own rewards are its baseline (digen.advantage); leave it out",
    "distillation.enabled": "recipe opd distils, from an adapter (digen.loss.teacher); leave it out",
}
"""Features of verl's that our runs do not have, and the remedy."""


def unused_keys() -> Iterator[tuple[str, Any, str]]:
    """(key, value that a run may have, remedy)."""
    for remedy, sections in UNUSED.items():
        for section, _, names in (part.partition(": ") for part in sections.split("; ")):
            for key in (f"{section}.{name}" for name in names.split()):
                yield key, OURS[key] if key in OURS else verls_default(key), remedy


def unused_problems(config: DictConfig) -> list[str]:
    """A paragraph for each of these keys that has another value."""
    problems = []
    for key, value, remedy in unused_keys():
        path, _, name = key.rpartition(".")
        section = OmegaConf.select(config, path) or {}
        if name in section and (given := section[name]) != value:
            shown = "null" if value is None else str(value).lower() if isinstance(value, bool) else value
            problems.append(
                f"{key} must be {shown}, because it has no effect on a diffusion model, got {given!r}; {remedy}"
            )
    for key, remedy in REFUSED.items():
        if given := OmegaConf.select(config, key):
            problems.append(f"{key} must be false, got {given!r}; {remedy}")
    return problems


DEFAULTS = DigenConfig()


@dataclass(frozen=True)
class Switch:
    """Condition under which the keys of a section are read."""

    section: str
    is_on: Callable[[DictConfig, DigenConfig], bool]
    why: str
    remedy: str
    key: str = ""
    """The section's own key that is the switch; where it is typed, keys of a recipe may stay."""
    prefix: str | tuple[str, ...] = ""
    """Starts of the names of the keys that it switches; "": all."""


def _separate(config: DictConfig, digen: DigenConfig) -> bool:
    return config.trainer.v1.trainer_mode != COLOCATED


TAKE_TURNS = "where trainer and replicas take turns on the same devices", "use recipe=...+disaggregated"
SWITCHES = (
    Switch("gap", _separate, *TAKE_TURNS),
    Switch("queue", _separate, *TAKE_TURNS),
    Switch(
        "staleness",
        lambda config, digen: digen.staleness.max_versions > 0,
        "with digen.staleness.max_versions=0",
        "set digen.staleness.max_versions=1",
    ),
    Switch(
        "tag",
        lambda config, digen: digen.tag.policy != "off",
        "with digen.tag.policy=off",
        "set digen.tag.policy=bts",
    ),
    Switch(
        "environment",
        lambda config, digen: digen.environment.is_on,
        "without an environment",
        "name one, digen.environment.name or digen.environment.path",
    ),
    Switch(
        "ema",
        lambda config, digen: digen.ema.enable,
        "with digen.ema.enable=false",
        "set digen.ema.enable=true",
        key="enable",
    ),
    Switch("kl", lambda config, digen: digen.kl.coef > 0, "with digen.kl.coef=0", "set digen.kl.coef", key="coef"),
    Switch(
        "sampling",
        lambda config, digen: digen.sampling.solver == "sa",
        "without digen.sampling.solver=sa",
        "choose that solver",
        key="solver",
        prefix="sa_",
    ),
    *(
        Switch(
            *("window", lambda config, digen, kind=kind: digen.window.kind == kind),
            *(f"without digen.window.kind={kind}", "set it", "kind", names),
        )
        for kind, names in (("consecutive", ("size", "range", "shift_")), ("fraction", "fraction"))
    ),
    Switch(
        "branches",
        lambda config, digen: bool(digen.branches.splits),
        "without digen.branches.splits",
        "set them",
        key="splits",
    ),
    Switch(
        "rollout",
        lambda config, digen: config.actor_rollout_ref.rollout.name != "vllm_omni",
        "with replicas that vLLM-Omni runs",
        "use actor_rollout_ref.rollout.name=diffusers",
        prefix="encoders",
    ),
    *(
        Switch(
            "rollout",
            lambda config, digen: config.actor_rollout_ref.rollout.name != "trainer",
            "with actor_rollout_ref.rollout.name=trainer, whose network is the trainer's",
            f"set digen.{key}, or actor_rollout_ref.rollout.name=diffusers",
            prefix=key,
        )
        for key in ("attention_backend", "compile")
    ),
    Switch(
        "rollout",
        lambda config, digen: digen.rollout.encoders == "before",
        "without digen.rollout.encoders=before",
        "set that",
        prefix="conditions_",
    ),
    Switch(
        "reward",
        lambda config, digen: has_custom(config),
        "without a reward function of your own",
        "name it, reward.custom_reward_function.path",
        prefix="custom_",
    ),
)


def effect_problems(config: DictConfig) -> list[str]:
    """A paragraph for each key that has another value than its default, and that this run does not read."""
    digen = digen_config(config)
    return [
        problem
        for switch in SWITCHES
        if not switch.is_on(config, digen)
        for problem in _changed(switch, digen, typed_keys(config, f"digen.{switch.section}"))
    ]


def _changed(switch: Switch, digen: DigenConfig, typed: set[str]) -> Iterator[str]:
    section, default = (getattr(each, switch.section) for each in (digen, DEFAULTS))
    names: list[Any] = [field.name for field in fields(section) if field.name.startswith(switch.prefix)]
    for name in names:
        given, expected = getattr(section, name), getattr(default, name)
        if given != expected and (name in typed or switch.key not in typed):
            value = "null" if expected is None else str(expected).lower()
            yield (
                f"digen.{switch.section}.{name} must be {value} {switch.why}, because it has no effect there, got "
                f"{given!r}; {switch.remedy}"
            )
