# Sourced by the scripts: finds a Python, sets up .venv (VENV names another folder) and leaves its interpreter in $PY.
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

die() {
  echo "error: $*" >&2
  exit 1
}

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3 python3.11 python3.12 python}; do
    if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  die "no Python 3.11 or 3.12 found (tried: ${PYTHON:-python3 python3.11 python3.12 python}); PYTHON=/path/to/python names one"
}

prepare() { # purpose: quickstart, test or bench
  local outer venv
  outer=$(find_python) || exit 1
  venv=${VENV:-.venv}
  "$outer" scripts/environment.py "$venv" "$1" || exit 1
  PY=$(cd "$venv/bin" && pwd)/python
}

num_gpus() {
  "$PY" -c 'import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)'
}
