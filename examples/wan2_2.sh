#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# DanceGRPO on Wan2.2 T2V A14B, both experts, LoRA: examples/wan2_2.sh PROMPTS VALIDATION_PROMPTS [KEY=VALUE ...]
#
# GPUs       8 of 96 GB: the plan says 85.5 GB, of which the two experts are 57. On 80 GB: examples/wan2_2_ti2v.sh.
#            Ask again: digen plan recipe=digen_wan2_2 gpus=8 gpu_mem=96
# Downloads  Wan-AI/Wan2.2-T2V-A14B-Diffusers, once per node: 34 B parameters with encoder and VAE, of 2 bytes each
#            (4 where they are published in fp32).
# Minutes    Not measured. Calculated: a step takes at least 260 s for 96 videos of 33 frames, 240 x 416, at 40 %
#            of the peak of 8 H100.
# You see    A validation, then a line per step with the reward, which should rise; what it reaches was not
#            measured. rollout/log_prob_gap_max stays small. In outputs/digen/wan2_2/images: before_after.png, the
#            same prompts and noise over time as filmstrips, and step_*/val-*.gif, which TensorBoard plays too.
#
# Prompt files: one prompt per line, or JSONL, or parquet. The reward is one that needs no model: pictures that compress
# well. For your own: 'digen.reward.functions={}' reward.custom_reward_function.path=FILE
# A checkpoint is saved every 30 steps (trainer.save_freq) and after the last one; the newest two are kept.
set -euo pipefail
usage="usage: $0 PROMPTS VALIDATION_PROMPTS [KEY=VALUE ...]"
exec python -m verl.trainer.main_ppo recipe=digen_wan2_2 \
    data.train_files="${1:?$usage}" data.val_files="${2:?$usage}" \
    'digen.reward.functions={jpeg_compressibility: 1.0}' \
    trainer.n_gpus_per_node=8 "${@:3}"
