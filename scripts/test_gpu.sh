#!/usr/bin/env bash
# Runs the GPU tests under torchrun, bit for bit against Megatron and NCCL, on 2, 4 or 8 GPUs; arguments go to pytest.
#   bash scripts/test_gpu.sh [--ranks 8] [pytest arguments]          NUM_GPUS=2 limits the number of GPUs
# With more ranks than GPUs several share each one: data movement and the order of sums, without NCCL and without any measure of time.
set -euo pipefail
source "$(dirname "$0")/common.sh"
wanted=
if [ "${1:-}" = --ranks ]; then
  wanted=${2:-}
  case $wanted in 2 | 4 | 8) ;; *) die "--ranks takes 2, 4 or 8" ;; esac
  shift 2
fi
prepare test
cd "$ROOT"
gpus=$(num_gpus)
[ "$gpus" != 0 ] || die "no GPU here: scripts/test.sh runs the CPU tests"
ranks=${wanted:-1}
if [ -z "$wanted" ]; then
  limit=${NUM_GPUS:-$gpus}
  while [ $((2 * ranks)) -le "$limit" ] && [ "$ranks" -lt 8 ]; do ranks=$((2 * ranks)); done # shapes divide by these
fi
if [ "$ranks" -gt "$gpus" ]; then
  echo "$ranks ranks share $gpus GPUs: tests that need a GPU for every rank are skipped"
  export DITRON_TIMEOUT_S=${DITRON_TIMEOUT_S:-300}
elif [ "$ranks" -lt "$gpus" ]; then
  echo "on $ranks of $gpus GPUs"
fi
exec "$PY" scripts/launch.py "$ranks" -m pytest tests/gpu "$@"
