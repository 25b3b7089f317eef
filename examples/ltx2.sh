#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# DanceGRPO on LTX-2, video with sound, LoRA: examples/ltx2.sh PROMPTS VALIDATION_PROMPTS [KEY=VALUE ...]
#
# GPUs       8 of 141 GB: the plan says 100.0 GB, most of it a tile that fills what is there, and up to 148 GB of host
#            memory. Ask again: digen plan recipe=digen_ltx2 gpus=8 device=H200 gpu_mem=141
# Downloads  Lightricks/LTX-2, once per node: 34 B parameters with encoders and VAEs, of 2 bytes each (4 where they are
#            published in fp32).
# Minutes    Not measured. Calculated: a step takes at least 205 s for 96 videos of 49 frames, 512 x 768, at 40 %
#            of the peak of 8 H200.
# You see    A validation, then a line per step with the reward, which should rise; what it reaches was not
#            measured. rollout/log_prob_gap_max stays small. In outputs/digen/ltx2/images: before_after.png, the same
#            prompts and noise over time as filmstrips, step_*/val-*.gif and, with their sound, step_*/val-*.wav.
#
# Prompt files: one prompt per line, or JSONL, or parquet. The reward is one that needs no model: pictures that compress
# well. It does not hear the sound: docs/rewards.md says how one of your own does.
# For your own: 'digen.reward.functions={}' reward.custom_reward_function.path=FILE
# A checkpoint is saved every 30 steps (trainer.save_freq) and after the last one; the newest two are kept.
set -euo pipefail
usage="usage: $0 PROMPTS VALIDATION_PROMPTS [KEY=VALUE ...]"
exec python -m verl.trainer.main_ppo recipe=digen_ltx2 \
    data.train_files="${1:?$usage}" data.val_files="${2:?$usage}" \
    'digen.reward.functions={jpeg_compressibility: 1.0}' \
    trainer.n_gpus_per_node=8 "${@:3}"
