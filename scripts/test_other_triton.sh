#!/usr/bin/env bash
# Kernels and compile checks on another Triton than the environment's, some 4 minutes on 2 cores: another version from
# commit to commit.
#   [TRITON=3.9.0] bash scripts/test_other_triton.sh
# It is installed beside the environment, in .tritons (TRITONS names another folder), and found before it. If no
# package index gives it, nothing is tested, and one line says so.
set -euo pipefail
source "$(dirname "$0")/common.sh"
prepare test
cd "$ROOT"
versions=(3.7.1 3.8.0 3.9.0) # the partners of torch 2.12 to 2.15; constraints.txt has 3.6
number=$((16#$(git rev-parse --short=6 HEAD 2>/dev/null || echo 0))) # a shallow clone counts no commits
triton=${TRITON:-${versions[$((number % 3))]}}
tag=$("$PY" -c 'import sys; print("python-%d.%d" % sys.version_info[:2])')
site=${TRITONS:-$ROOT/.tritons}/$triton-$tag

if [ ! -e "$site/complete" ]; then
  rm -rf "$site"
  mkdir -p "$site"
  "$PY" "$ROOT/scripts/package_hashes.py" "triton==$triton" >"$site/files.txt" || exit 1
  if ! said=$("$PY" -m pip install --quiet --no-deps --require-hashes --target "$site" -r "$site/files.txt" 2>&1); then
    ! grep -q "DO NOT MATCH THE HASHES" <<<"$said" || die "triton $triton is another file than hashes.txt knows: $said"
    echo "triton $triton is not tested: $(tail -n 1 <<<"$said")"
    exit 0
  fi
  touch "$site/complete"
fi
export PYTHONPATH="$site:$ROOT" OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES=
found=$("$PY" -c 'import triton; print(triton.__version__)')
[ "$found" = "$triton" ] || die "triton $found is imported, $triton is in $site"
echo "triton $triton: kernels for sm_90, and the interpreter"
status=0
"$PY" -m pytest -q -p no:cacheprovider tests/compile -k "sm_90 or recorded" || status=$?
TRITON_INTERPRET=1 "$PY" -m pytest -q -p no:cacheprovider tests/lang tests/gemm/test_ops.py tests/runtime/test_launch.py \
  tests/policy/test_self_check.py tests/tp/test_tp_ops.py || status=$?
exit "$status"
