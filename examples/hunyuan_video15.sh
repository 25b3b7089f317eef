#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# DanceGRPO on HunyuanVideo 1.5, all weights: examples/hunyuan_video15.sh PROMPTS VALIDATION_PROMPTS [KEY=VALUE ...]
#
# GPUs       8 of 80 GB: the plan says 66.0 GB, half of it tiles that fill what is there, and up to 163 GB of host
#            memory. Ask again: digen plan recipe=digen_hunyuan_video15 gpus=8 gpu_mem=80
# Downloads  hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-480p_t2v, once per node: 17 B parameters with encoders
#            and VAE, of 2 bytes each (4 where they are published in fp32).
# Minutes    Not measured. Calculated: a step takes at least 443 s for 96 videos of 53 frames, 480 x 480, at 40 %
#            of the peak of 8 H100.
# You see    A validation, then a line per step with the reward, which should rise; what it reaches was not
#            measured. rollout/log_prob_gap_max stays small. In outputs/digen/hunyuan_video15/images:
#            before_after.png, the same prompts and noise over time as filmstrips, and step_*/val-*.gif, which
#            TensorBoard plays too.
#
# Prompt files: one prompt per line, or JSONL, or parquet. The reward is one that needs no model: pictures that compress
# well. For your own: 'digen.reward.functions={}' reward.custom_reward_function.path=FILE
# A checkpoint is saved every 30 steps (trainer.save_freq) and after the last one; the newest two are kept.
set -euo pipefail
usage="usage: $0 PROMPTS VALIDATION_PROMPTS [KEY=VALUE ...]"
exec python -m verl.trainer.main_ppo recipe=digen_hunyuan_video15 \
    data.train_files="${1:?$usage}" data.val_files="${2:?$usage}" \
    'digen.reward.functions={jpeg_compressibility: 1.0}' \
    trainer.n_gpus_per_node=8 "${@:3}"
