#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#SBATCH --job-name=verl-digen
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --output=%x-%j.log
#SBATCH --signal=B:TERM@120
#
# A Ray cluster on all nodes of an allocation, and a run on it:
#   sbatch --nodes=4 examples/clusters/slurm.sh PROMPTS VALIDATION_PROMPTS [KEY=VALUE ...]
#
# Ray starts on the first node, then on the others; the run begins when all are there. When the run ends, or Ray on any
# node, or the time limit is near, everything ends, with the run's exit code if it has one. With
# trainer.resume_mode=auto the same command goes on from the newest checkpoint.
#
# Settings, all optional: RECIPE (digen_qwen_image), RUN_DIR (outputs/JOB_NAME, on storage that all nodes mount),
# RAY_PORT (6379), START_TIMEOUT_S (600). Activate the environment, the same on all nodes, before sbatch or here.
set -euo pipefail
usage="usage: sbatch $0 PROMPTS VALIDATION_PROMPTS [KEY=VALUE ...]"
prompts="${1:?$usage}" validation="${2:?$usage}"

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head="${nodes[0]}"
export RAY_ADDRESS="$head:${RAY_PORT:-6379}" # the run connects to this cluster; without it, it would start its own
# A token of the job's: without, Ray's head asks for one that an earlier run left in ~/.ray, and nothing else sends it
export RAY_AUTH_MODE="${RAY_AUTH_MODE:-token}" RAY_AUTH_TOKEN="${RAY_AUTH_TOKEN:-$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')}"

on() { # NODE COMMAND ..., with & behind it, so that $! is srun; the steps of a node share its devices and cores
    exec srun --overlap --nodes=1 --ntasks=1 --cpu-bind=none --nodelist="$1" "${@:2}"
}

parts=() # processes of this script: a step per node, and the run
# shellcheck disable=SC2329 # called by the trap
finish() {
    local status=$?
    trap - EXIT TERM INT
    kill -TERM "${parts[@]}" 2>/dev/null || true
    local until_s=$((SECONDS + 30))
    while [ -n "$(jobs -pr)" ] && [ "$SECONDS" -lt "$until_s" ]; do
        sleep 1
    done
    kill -KILL "${parts[@]}" 2>/dev/null || true
    exit "$status"
}
trap finish EXIT
trap 'exit 143' TERM INT

stop() {
    echo "$0: $1" >&2
    exit 1
}

deadline=$((SECONDS + ${START_TIMEOUT_S:-600}))
wait_until() { # WHAT COMMAND ...
    until "${@:2}" >/dev/null 2>&1; do
        [ "$(jobs -pr | wc -l)" -eq "${#parts[@]}" ] || stop "Ray ended on a node while it waited for $1; see above"
        [ "$SECONDS" -lt "$deadline" ] || stop "no $1 after ${START_TIMEOUT_S:-600} s; a larger START_TIMEOUT_S waits longer"
        sleep 1
    done
}
# shellcheck disable=SC2329 # called by wait_until
all_nodes() {
    local alive
    alive="$(ray list nodes --address="$RAY_ADDRESS" --filter=state=ALIVE --format=json | grep -c '"node_id"')"
    [ "$alive" -ge "${#nodes[@]}" ]
}

on "$head" ray start --head --port="${RAY_PORT:-6379}" --block &
parts+=($!)
wait_until "Ray on $head" ray health-check --address="$RAY_ADDRESS"
for node in "${nodes[@]:1}"; do
    on "$node" ray start --address="$RAY_ADDRESS" --block &
    parts+=($!)
done
wait_until "Ray on ${#nodes[@]} nodes" all_nodes

on "$head" python -m verl.trainer.main_ppo recipe="${RECIPE:-digen_qwen_image}" \
    data.train_files="$prompts" data.val_files="$validation" \
    'digen.reward.recipe_functions={jpeg_compressibility: 1.0}' \
    trainer.nnodes="${#nodes[@]}" trainer.n_gpus_per_node="${SLURM_GPUS_ON_NODE:-8}" \
    trainer.default_local_dir="${RUN_DIR:-outputs/$SLURM_JOB_NAME}" trainer.resume_mode=auto "${@:3}" &
run=$!
parts+=("$run")

status=0
wait -n "${parts[@]}" || status=$?
! jobs -pr | grep -qx "$run" || stop "Ray ended on a node during the run; see above"
exit "$status"
