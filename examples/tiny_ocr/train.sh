#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Teach the tiny Qwen-Image of this folder to spell, with the OCR reward, once per seed:
#   examples/tiny_ocr/train.sh 1 2 3
# Killed, the same command goes on from the newest checkpoints. Shows the runs' own lines; everything verl and Ray print
# is in outputs/digen/tiny_ocr-SEED/console.log.
set -euo pipefail
cd "$(dirname "$0")/../.."

if [ ! -f examples/tiny_ocr/checkpoint/model_index.json ]; then
    python examples/tiny_ocr/pretrain.py --output examples/tiny_ocr --snapshots outputs/tiny_ocr_pretraining
fi
for seed in "${@:-1}"; do
    run_dir="outputs/digen/tiny_ocr-$seed"
    mkdir -p "$run_dir"
    echo "Seed $seed: everything the run prints is in $run_dir/console.log"
    PYTHONUNBUFFERED=1 python -m verl.trainer.main_ppo recipe=digen_tiny_ocr digen.seed="$seed" \
        trainer.resume_mode=auto trainer.default_local_dir="$run_dir" 2>&1 |
        tee -i -a "$run_dir/console.log" |
        (trap '' INT && grep --line-buffered -oE '(step [0-9]+/|validation after |verl-digen: ).*' || true)
done
