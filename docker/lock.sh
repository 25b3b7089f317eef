#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Write anew the versions that the image installs: docker/lock.sh   (needs uv and a network; run it when setup.py changes)
# requirements-EXTRAS.txt is for Python 3.12 on x86_64; other platforms: PLATFORM=aarch64-manylinux_2_28 docker/lock.sh
set -euo pipefail
cd "$(dirname "$0")/.."

uv="$(command -v uv || echo .venv/bin/uv)"
for extras in rewards rewards,vllm-omni; do
    options=()
    for extra in ${extras//,/ }; do
        options+=(--extra "$extra")
    done
    UV_FIND_LINKS="" "$uv" pip compile --quiet --no-config --no-header --no-annotate --python-version 3.12 \
        --python-platform "${PLATFORM:-x86_64-manylinux_2_28}" "${options[@]}" \
        --output-file "docker/requirements-$extras.txt" setup.py docker/requirements.in
done
