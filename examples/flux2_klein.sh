#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Flow-GRPO on FLUX.2 [klein] base 4B, LoRA: examples/flux2_klein.sh PROMPTS VALIDATION_PROMPTS [KEY=VALUE ...]
#
# GPUs       8 of 80 GB: the plan says 54.9 GB, most of it tiles that fill what is there. Ask again: digen plan
#            recipe=digen_flux2_klein gpus=8 gpu_mem=80
# Downloads  black-forest-labs/FLUX.2-klein-base-4B, once per node: 8 B parameters with encoder and VAE, of 2 bytes each
#            (4 where they are published in fp32).
# Minutes    Not measured. Calculated: a step takes at least 189 s for 576 pictures, at 40 % of the peak of 8 H100.
# You see    A validation, then a line per step with the reward, which should rise; what it reaches was not
#            measured. rollout/log_prob_gap_max stays small. In outputs/digen/flux2_klein/images: before_after.png,
#            the same prompts and noise over time, each picture beside its images.
#
# Prompt files: JSONL or parquet with the columns prompt and images (docs/data.md). The reward is one that needs no model:
# pictures that compress well. For your own: 'digen.reward.functions={}' reward.custom_reward_function.path=FILE
# An edit should follow its instruction and keep the rest (docs/rewards.md): e.g. judge and image_similarity, 0.8 and 0.2.
# A checkpoint is saved every 30 steps (trainer.save_freq) and after the last one; the newest two are kept.
set -euo pipefail
usage="usage: $0 PROMPTS VALIDATION_PROMPTS [KEY=VALUE ...]"
exec python -m verl.trainer.main_ppo recipe=digen_flux2_klein \
    data.train_files="${1:?$usage}" data.val_files="${2:?$usage}" \
    'digen.reward.functions={jpeg_compressibility: 1.0}' \
    trainer.n_gpus_per_node=8 "${@:3}"
