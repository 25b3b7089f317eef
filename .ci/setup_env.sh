#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Make .venv ready: .ci/setup_env.sh [EXTRAS]   (EXTRAS: dev, or dev,vllm-omni)
#
# Needs python3 (3.10 to 3.12). Quick when nothing is to do: a stamp holds the checksum of what the environment is made of.
# Settings, all optional:
#   VENV             the environment's folder, if not .venv
#   TORCH_VERSION    PyTorch, if not 2.13.0
#   TORCH_INDEX      package index to take PyTorch from (the official one for your accelerator, say)
#   UV_FIND_LINKS    folder of wheels; PIP_FIND_LINKS is taken where it is not set. A PyTorch wheel in it goes first
# Without them, uv picks the PyTorch build by itself: the one for this machine's driver, or the CPU one.
set -euo pipefail
cd "$(dirname "$0")/.."

TORCH="torch==${TORCH_VERSION:-2.13.0}"
extra="${1:-}"
venv="${VENV:-.venv}"
stamp="$venv/.ready${extra:+-$extra}"
inputs="$(cat setup.py pyproject.toml .ci/setup_env.sh | cksum) $TORCH ${TORCH_INDEX:-}"
if [ -x "$venv/bin/pip" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$inputs" ]; then
    exit 0
fi

fits() { "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; }

if ! [ -x "$venv/bin/pip" ]; then
    for python in python3 python3.12 python3.11 python3.10; do
        fits "$python" && break
        python=""
    done
    if [ -z "$python" ]; then
        echo ".ci/setup_env.sh: verl needs Python 3.10, 3.11 or 3.12, and none of them was found; install one" >&2
        exit 1
    fi
    "$python" -m venv "$venv" || { rm -rf "$venv"; exit 1; }
fi

if [ -z "${UV_FIND_LINKS:-}" ] && [ -n "${PIP_FIND_LINKS:-}" ]; then
    export UV_FIND_LINKS="${PIP_FIND_LINKS// /,}" # pip separates with blanks, uv with commas
fi
export UV_COMPILE_BYTECODE=1 # a run starts many processes, which would compile everything anew

torch_options=()
if [ -n "${TORCH_INDEX:-}" ]; then
    torch_options=(--index "$TORCH_INDEX")
elif ! compgen -G "${UV_FIND_LINKS:-/nowhere}/torch-*.whl" >/dev/null; then
    torch_options=(--torch-backend auto)
fi

with_uv() {
    [ -x "$venv/bin/uv" ] || "$venv/bin/python" -m pip install --quiet uv || return
    "$venv/bin/uv" pip install --python "$venv/bin/python" "${torch_options[@]}" "$TORCH" --editable ".${extra:+[$extra]}"
}
with_pip() {
    "$venv/bin/python" -m pip install ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} "$TORCH" --editable ".${extra:+[$extra]}"
}

echo "Setting up $venv${extra:+ with extra $extra} (once; takes minutes)" >&2
if ! with_uv; then
    echo ".ci/setup_env.sh: uv could not do it, trying pip" >&2
    with_pip
fi

# vLLM brings these, and there are builds of them for a PyTorch with CUDA alone: with a CPU build they cannot be
# imported, and whoever looks for them takes that for an error. Nothing here needs them.
misfits=(torchvision torchcodec torchaudio)
if [[ "$extra" == *vllm-omni* ]] && "$venv/bin/python" -c 'import sys, torch; sys.exit(torch.version.cuda is not None)'; then
    "$venv/bin/uv" pip uninstall --python "$venv/bin/python" "${misfits[@]}" ||
        "$venv/bin/python" -m pip uninstall --yes "${misfits[@]}"
fi
echo "$inputs" >"$stamp"
