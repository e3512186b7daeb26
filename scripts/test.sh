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

unset PYTHONDONTWRITEBYTECODE # hundreds of processes would each compile the package

parts=("tests/tools/compare tests/examples tests/megatron_plugin tests/native"
  "tests/tools tests/nodes tests/policy tests/reach tests/faults tests/harness tests/hook tests/docs")
said=$(mktemp -d)
running=()
trap 'kill -INT "${running[@]}" 2>/dev/null || true; wait; rm -rf "$said"' EXIT
ignored=(--ignore=tests/gpu)
for part in "${parts[@]}"; do
  read -ra folders <<<"$part"
  "$PY" -m pytest -p no:cacheprovider "${ignored[@]}" "${folders[@]}" >"$said/${#running[@]}" 2>&1 &
  running+=($!)
  ignored+=("${folders[@]/#/--ignore=}") # what a part has run, later ones leave out
done
status=0
"$PY" -m pytest "${ignored[@]}" || status=$?
for part in "${running[@]}"; do wait "$part" || status=$?; done
cat "$said"/*
exit "$status"
