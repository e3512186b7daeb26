#!/usr/bin/env bash
# Installs what the tests need and runs the CPU tests; arguments go to pytest.
#
# Without arguments three parts run concurrently, since processes of a test wait for one another and for deadlines: one part alone
# leaves much of two cores idle. The output of the second and the third is printed after that of the first.
set -euo pipefail
source "$(dirname "$0")/common.sh"
prepare test
cd "$ROOT"
export TRITON_INTERPRET=1 OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES=
[ $# = 0 ] || exec "$PY" -m pytest --ignore=tests/gpu "$@"

unset PYTHONDONTWRITEBYTECODE # hundreds of processes would each compile the package
waiting=(tests/faults tests/nodes tests/policy tests/reach tests/harness tests/golden tests/cpu tests/pp tests/symm)
layers=(tests/native tests/examples)
logs=$(mktemp -d)
"$PY" -m pytest -p no:cacheprovider "${waiting[@]}" >"$logs/waiting" 2>&1 &
parts=($!)
"$PY" -m pytest -p no:cacheprovider "${layers[@]}" >"$logs/layers" 2>&1 &
parts+=($!)
trap 'kill -INT "${parts[@]}" 2>/dev/null || true; wait || true; rm -rf "$logs"' EXIT
status=0
"$PY" -m pytest --ignore=tests/gpu "${waiting[@]/#/--ignore=}" "${layers[@]/#/--ignore=}" || status=$?
for part in "${parts[@]}"; do
    wait "$part" || status=$?
done
trap 'rm -rf "$logs"' EXIT
cat "$logs/waiting" "$logs/layers"
exit "$status"
