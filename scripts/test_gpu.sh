#!/usr/bin/env bash
# Runs the GPU tests under torchrun, bit for bit against Megatron and NCCL; arguments go to pytest.
#   bash scripts/test_gpu.sh [pytest arguments]          NUM_GPUS=2 limits the number of GPUs
set -euo pipefail
source "$(dirname "$0")/common.sh"
prepare test
gpus=${NUM_GPUS:-$(num_gpus)}
[ "$gpus" != 0 ] || die "no GPU here: scripts/test.sh runs the CPU tests"
exec "$PY" scripts/launch.py "$gpus" -m pytest tests/gpu "$@"
