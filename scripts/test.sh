#!/usr/bin/env bash
# Installs what the tests need and runs the CPU tests; arguments go to pytest.
set -euo pipefail
source "$(dirname "$0")/common.sh"
prepare test
cd "$ROOT"
export TRITON_INTERPRET=1 OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES=
exec "$PY" -m pytest --ignore=tests/gpu "$@"
