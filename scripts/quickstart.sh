#!/usr/bin/env bash
# Trains a small GPT with Megatron-core twice, natively and with ditron_train, and compares every step.
#   bash scripts/quickstart.sh [--data FILE] [more flags of examples/megatron/quickstart.py]
# All GPUs of this machine if there are any, else 2 CPU processes (NUM_PROCESSES) with Triton's interpreter.
set -euo pipefail
source "$(dirname "$0")/common.sh"
start=$SECONDS
prepare quickstart
echo "[quickstart] environment ready after $((SECONDS - start)) s"
processes=${NUM_GPUS:-$(num_gpus)}
if [ "$processes" = 0 ]; then
  processes=${NUM_PROCESSES:-2}
  export TRITON_INTERPRET=1 OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES=
fi
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
exec "$PY" "$ROOT/scripts/launch.py" "$processes" "$ROOT/examples/megatron/quickstart.py" "$@"
