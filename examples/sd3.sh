#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Flow-GRPO on Stable Diffusion 3.5 medium, LoRA: examples/sd3.sh PROMPTS VALIDATION_PROMPTS [KEY=VALUE ...]
#
# GPUs       8 of 80 GB: the plan says 68.1 GB, most of it tiles that fill what is there. On 24 GB with
#            digen.rollout.max_batch_size=1 digen.rollout.decode_batch_size=1 digen.rollout.embed_cache_size=64
#            actor_rollout_ref.actor.fsdp_config.param_offload=true (21.5 GB). Ask again: digen plan
#            recipe=digen_sd3 gpus=8 gpu_mem=80
# Downloads  stabilityai/stable-diffusion-3.5-medium, once per node: 7.9 B parameters with encoders and VAE, of 2
#            bytes each (4 where they are published in fp32). Accept its licence on the hub and run `huggingface-cli
#            login` first.
# Minutes    Not measured on 8. Calculated: a step takes at least 66 s for 576 pictures; 14 s with
#            recipe=[digen_sd3,flowgrpo_fast], at 21 % of the peak of 8 H100, the share that one reached.
# You see    A validation, then a line per step with the reward, which should rise; what it reaches was not
#            measured. rollout/log_prob_gap_max stays small. In outputs/digen/sd3/images: before_after.png, the same
#            prompts and noise over time.
#
# Prompt files: one prompt per line, or JSONL, or parquet. The reward is one that needs no model: pictures that compress
# well. For your own: 'digen.reward.functions={}' reward.custom_reward_function.path=FILE
# A checkpoint is saved every 30 steps (trainer.save_freq) and after the last one; the newest two are kept.
set -euo pipefail
usage="usage: $0 PROMPTS VALIDATION_PROMPTS [KEY=VALUE ...]"
exec python -m verl.trainer.main_ppo recipe=digen_sd3 \
    data.train_files="${1:?$usage}" data.val_files="${2:?$usage}" \
    'digen.reward.functions={jpeg_compressibility: 1.0}' \
    trainer.n_gpus_per_node=8 "${@:3}"
