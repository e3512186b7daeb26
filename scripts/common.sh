# Sourced by the scripts: finds a Python, sets up .venv (VENV names another folder) and leaves its interpreter in $PY, the checkout
# in $ROOT. The current folder stays: files that are named on the command line are the caller's.
unset CDPATH # or cd would look, and speak, elsewhere
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd) || exit 1

die() {
  echo "error: $*" >&2
  exit 1
}

find_python() {
  local candidate candidates=(python3 python3.12 python3.13 python3.11 python3.10 python)
  [ -z "${PYTHON:-}" ] || candidates=("$PYTHON")
  for candidate in "${candidates[@]}"; do
    if "$candidate" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] < (3, 14))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  die "no Python 3.10 to 3.13 found (tried: ${candidates[*]}); PYTHON=/path/to/python names one"
}

prepare() { # purpose: quickstart, bench, test or ci
  local outer venv
  outer=$(find_python) || exit 1
  venv=${VENV:-$ROOT/.venv}
  "$outer" "$ROOT/scripts/environment.py" "$venv" "$1" || exit 1
  PY=$(cd "$venv/bin" && pwd)/python
}

num_gpus() {
  "$PY" -c 'import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)'
}
