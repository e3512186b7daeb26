#!/usr/bin/env bash
# Runs one benchmark on all GPUs (2 CPU processes without any): bash scripts/bench.sh tp [arguments of the bench]
set -euo pipefail
source "$(dirname "$0")/common.sh"
[ $# -gt 0 ] || die "name a benchmark: bash scripts/bench.sh tp"
prepare bench
processes=${NUM_GPUS:-$(num_gpus)}
if [ "$processes" = 0 ]; then
  processes=2
  export TRITON_INTERPRET=1 OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES=
fi
exec "$PY" "$ROOT/scripts/launch.py" "$processes" -m ditron_train bench "$@"
