#!/usr/bin/env bash
# Runs the GPU tests under torchrun, bit for bit against Megatron and NCCL, on 2, 4 or 8 GPUs; arguments go to pytest.
#   bash scripts/test_gpu.sh [pytest arguments]          NUM_GPUS=2 limits the number of GPUs
set -euo pipefail
source "$(dirname "$0")/common.sh"
prepare test
cd "$ROOT"
gpus=${NUM_GPUS:-$(num_gpus)}
[ "$gpus" != 0 ] || die "no GPU here: scripts/test.sh runs the CPU tests"
ranks=1
while [ $((2 * ranks)) -le "$gpus" ] && [ "$ranks" -lt 8 ]; do ranks=$((2 * ranks)); done # shapes divide by these
[ "$ranks" = "$gpus" ] || echo "on $ranks of $gpus GPUs"
exec "$PY" scripts/launch.py "$ranks" -m pytest tests/gpu "$@"
