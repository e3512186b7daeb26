#!/usr/bin/env bash
# Installs what the tests need and runs the CPU tests; arguments go to pytest.
#
# Without arguments two halves run beside each other, since processes of a test wait for one another: one after the other they left
# a quarter of two cores idle (23.8 minutes instead of 16.9). What the second half says is printed behind the first.
set -euo pipefail
source "$(dirname "$0")/common.sh"
prepare test
cd "$ROOT"
export TRITON_INTERPRET=1 OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES=
[ $# = 0 ] || exec "$PY" -m pytest --ignore=tests/gpu "$@"

unset PYTHONDONTWRITEBYTECODE # hundreds of processes would each compile the package
jobs_of_megatron=(tests/tools/compare tests/examples tests/megatron_plugin tests/native)
said=$(mktemp)
"$PY" -m pytest -p no:cacheprovider "${jobs_of_megatron[@]}" >"$said" 2>&1 &
half=$!
trap 'kill -INT "$half" 2>/dev/null || true; wait "$half" || true; rm -f "$said"' EXIT
status=0
"$PY" -m pytest --ignore=tests/gpu "${jobs_of_megatron[@]/#/--ignore=}" || status=$?
wait "$half" || status=$?
trap 'rm -f "$said"' EXIT
cat "$said"
exit "$status"
