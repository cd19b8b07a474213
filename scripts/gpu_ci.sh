#!/usr/bin/env bash
# Tests and figures of one GPU, in at most 15 minutes, in an environment that has torch for CUDA (vLLM and Ray, if they
# are to be tried): benchmarks/gpu_ci.py says what of it fails. PYTHON names another interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."
if ! nvidia-smi -L > /dev/null 2>&1; then
  echo "no NVIDIA GPU is visible here (nvidia-smi -L fails)" >&2
  exit 1
fi
exec "${PYTHON:-python3}" -m benchmarks.gpu_ci "$@"
