#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Train the tiny model and show how it gets better. Arguments go to verl:
#   examples/quickstart.sh trainer.total_training_steps=3
# Trains and generates on all accelerators of this machine, up to 8, or on its CPU with two ranks that share the cores.
# Shows the run's own lines; everything verl and Ray print is in RUN_DIR/console.log.
set -euo pipefail
cd "$(dirname "$0")/.."

# the machine's devices come first, so that an argument can ask for less
devices="$(python -W ignore -m verl_digen.tools.checkup.quickstart)"
set -- ${devices:+"$devices"} "$@"
run_dir="outputs/digen/quickstart-$(date +%Y-%m-%d_%H-%M-%S)"
mkdir -p "$run_dir"
echo "Training the tiny model with verl's main entry; everything it prints is in $run_dir/console.log"
echo "  python -m verl.trainer.main_ppo recipe=digen_quickstart trainer.default_local_dir=$run_dir $*"
echo "The first step takes about 40 s: Ray, TransferQueue, trainer ranks, replicas and workers start."

set +e # the pipe's status is looked at below
PYTHONUNBUFFERED=1 python -m verl.trainer.main_ppo recipe=digen_quickstart \
    trainer.default_local_dir="$run_dir" "$@" 2>&1 |
    tee -i "$run_dir/console.log" | # Ctrl-C ends the run, whose last line says how to go on
    (trap '' INT && exec grep --line-buffered -oE '(step [0-9]+/|validation after |verl-digen: ).*')
status=${PIPESTATUS[0]}
set -e

if [ "$status" -eq 130 ]; then
    exit 130
fi
if [ "$status" -ne 0 ]; then
    echo "The run failed; the end of $run_dir/console.log:" >&2
    tail -n 30 "$run_dir/console.log" >&2
    exit 1
fi
echo
echo "Look at   $run_dir/images/before_after.png"
echo "Metrics   $run_dir/metrics.jsonl, and: .venv/bin/tensorboard --logdir $run_dir/tensorboard"
