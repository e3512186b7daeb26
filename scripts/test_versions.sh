#!/usr/bin/env bash
# Runs tests on one pair of torch and triton, and with one Megatron-core, in a clean environment of its own.
#   TORCH=2.15.0 TRITON=3.9.0 bash scripts/test_versions.sh [pytest arguments]      (default: the kernels' subpackages)
#   Without TRITON it is the one that the CUDA build of this torch asks for.
#   MEGATRON_LM=/path/of/a/checkout bash scripts/test_versions.sh quickstart        (tp, sp, ep, pp, muon, one by one)
#   PYTHON names the interpreter, VENVS the folder of environments (default: .venvs; one is made once a pair).
#   A build of torch with CUDA brings some 3 GB of libraries; a CPU build is taken if there is one.
set -euo pipefail
source "$(dirname "$0")/common.sh"
outer=$(find_python)
torch=${TORCH:-2.13.0} triton=${TRITON:-}
if [ -z "$triton" ]; then
  triton=3.6.0 # what constraints.txt has beside the CPU build
  [ -z "${TORCH:-}" ] || triton=$("$outer" -c "import sys; sys.path[:0] = [sys.argv[1]]; import environment
print(environment.triton_for(sys.argv[2]))" "$ROOT/scripts" "$torch")
fi
python=$("$outer" -c 'import sys; print(*sys.version_info[:2], sep=".")')
venv=${VENVS:-$ROOT/.venvs}/torch-$torch-triton-$triton-python-$python
PY=$venv/bin/python

if [ ! -e "$venv/complete" ]; then
  "$outer" -m venv --clear "$venv"
  pins=("torch==$torch" packaging rich setuptools numpy matplotlib pytest pytest-timeout hypothesis psutil einops)
  [ "${triton%.*}" != 3.6 ] || pins+=("numpy<2.4") # its interpreter breaks with later ones
  "$PY" -m pip install --quiet "${pins[@]/#torch==$torch/torch==$torch+cpu}" 2>"$venv/said" ||
    "$PY" -m pip install --quiet "${pins[@]}" || die "pip has no torch $torch for Python $python: see above and $venv/said"
  # A build of torch with CUDA pins its own triton, and megatron-core asks for more than it needs.
  "$PY" -m pip install --quiet --no-deps "triton==$triton" "megatron-core==0.16.1"
  touch "$venv/complete"
fi
cd "$ROOT"
export TRITON_INTERPRET=1 OMP_NUM_THREADS=1 CUDA_VISIBLE_DEVICES= CUDA_DEVICE_MAX_CONNECTIONS=1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
[ -z "${MEGATRON_LM:-}" ] || ln -s "$(cd "$MEGATRON_LM" && pwd)/megatron" "$work" # not its package tests
export PYTHONPATH="$ROOT:$work"
"$PY" -c "import torch, triton; from ditron_train.runtime.versions import check_versions, find_versions; check_versions()
print('versions:', ', '.join(f'{name} {version}' for name, version in find_versions().items() if version))"

if [ "${1:-}" != quickstart ]; then
  [ $# != 0 ] || set -- tests/lang tests/gemm tests/symm tests/stream tests/tp tests/pp tests/optim tests/runtime
  "$PY" -m pytest -q -p no:cacheprovider "$@"
  exit
fi
status=0
for run in "tp" "sp --sp 2 --tp 1" "ep --ep 2 --tp 1 --experts 4" "pp --pp 2 --tp 1" "muon --tp 1 --optimizer muon"; do
  read -ra words <<<"$run"
  "$PY" scripts/launch.py 2 examples/megatron/quickstart.py --steps 2 --out "$work/out" "${words[@]:1}" >"$work/said" 2>&1 || status=1
  verdict=$(sed -n '/^BITWISE IDENTICAL: /p' "$work/said")
  echo "quickstart, ${words[0]}: ${verdict:-failed}"
  [ -n "$verdict" ] || tail -n 20 "$work/said"
done
exit "$status"
