#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Train the tiny model and show how it gets better. Arguments go to `digen train`:
#   examples/quickstart.sh trainer.total_training_steps=3
# Trains and generates on all accelerators of this machine, up to 8, or on its CPU with two ranks that share the cores.
set -euo pipefail
cd "$(dirname "$0")/.."

# the machine's devices come first, so that an argument can ask for less
devices="$(python -W ignore -m verl_digen.tools.checkup.training)"
run_dir="outputs/digen/quickstart-$(date +%Y-%m-%d_%H-%M-%S)"
exec digen train digen_quickstart trainer.default_local_dir="$run_dir" ${devices:+"$devices"} "$@"
