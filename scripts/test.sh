#!/usr/bin/env bash
# Installs what the tests need and runs the CPU tests; arguments go to pytest.
#
# Without arguments three parts run beside each other, since processes of a test wait for one another: one part alone
# leaves a quarter of two cores idle. What the others say is printed behind the last of the parts, which is all the rest.
set -euo pipefail
source "$(dirname "$0")/common.sh"
prepare test
cd "$ROOT"
export TRITON_INTERPRET=1 OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES=
[ $# = 0 ] || exec "$PY" -m pytest --ignore=tests/gpu "$@"

parts=("tests/native" "tests/tools tests/nodes tests/examples tests/megatron_plugin tests/reach tests/faults")
said=$(mktemp -d)
running=()
end_all() {
  for part in "${running[@]}"; do
    kill -INT "$part" 2>/dev/null || true
    wait "$part" || true
  done
  rm -rf "$said"
}
trap end_all EXIT
ignored=(--ignore=tests/gpu)
for number in "${!parts[@]}"; do
  read -ra folders <<<"${parts[number]}"
  "$PY" -m pytest -p no:cacheprovider "${folders[@]}" >"$said/$number" 2>&1 &
  running+=($!)
  ignored+=("${folders[@]/#/--ignore=}")
done
status=0
"$PY" -m pytest "${ignored[@]}" || status=$?
for number in "${!parts[@]}"; do
  wait "${running[number]}" || status=$?
  cat "$said/$number"
done
running=()
exit "$status"
