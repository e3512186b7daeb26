#!/usr/bin/env bash
# compute-sanitizer over small calls of every room's kernels, on one GPU, which two ranks share: memcheck everywhere, racecheck of the
# kernels that wait for nobody.
#   bash scripts/sanitizer.sh FOLDER        writes FOLDER/sanitizer.json; exit status 1 where anything was reported or did not run
set -uo pipefail
folder=${1:?names the folder of the summary}
python=${PY:-python3}
root=$(cd "$(dirname "$0")/.." && pwd)
tool=$(command -v compute-sanitizer || ls /usr/local/cuda*/bin/compute-sanitizer 2>/dev/null | head -1)
[ -n "$tool" ] || { echo "error: compute-sanitizer is not on the PATH" >&2; exit 2; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$folder"
export CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-0} DITRON_TIMEOUT_S=300 DITRON_POSTMORTEM=off CUDA_DEVICE_MAX_CONNECTIONS=1
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH} UB_SKIPMC=1 PYTORCH_NO_CUDA_MEMORY_CACHING=1 OMP_NUM_THREADS=1
ops=$root/tests/gpu/sanitized_ops.py
# sanitize NAME TOOL ARGUMENTS...: one process
sanitize() {
  local name=$1 kind=$2
  shift 2
  timeout "${LIMIT_S:-70}" "$tool" --tool "$kind" --target-processes all --print-limit 20 --error-exitcode 0 \
    "$python" -W ignore "$ops" "$@" >"$work/$name.log" 2>&1
  echo "$?" >"$work/$name.status"
}
# Compiled once without the tool, and shown to run by itself.
pair() {
  export DITRON_SANITIZER_STORE=$work/store.$1
  local rank
  for rank in 0 1; do
    if [ "$1" = plain ]; then
      RANK=$rank WORLD_SIZE=2 LOCAL_RANK=$rank LOCAL_WORLD_SIZE=2 timeout 60 "$python" -W ignore "$ops" peers >"$work/plain.$rank.log" 2>&1 &
    else
      RANK=$rank WORLD_SIZE=2 LOCAL_RANK=$rank LOCAL_WORLD_SIZE=2 sanitize "peers.$rank" memcheck peers &
    fi
  done
  wait
}
"$python" -W ignore "$ops" alone >"$work/plain.log" 2>&1
pair plain
sanitize alone memcheck alone &
sanitize alone.races racecheck alone &
wait
pair memcheck
"$python" - "$work" "$folder/sanitizer.json" <<'PYTHON'
import json, pathlib, re, sys
work, out = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
runs = {}
for log in sorted(work.glob("*.log")):
    text = log.read_text(errors="replace")
    summaries = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", text)
    status = work / f"{log.stem}.status"
    runs[log.stem] = {
        "ran": re.findall(r"^ran (\S+)", text, re.M),
        "status": int(status.read_text()) if status.exists() else None,
        "reported": sum(map(int, summaries)) if summaries else None,
        "first": [line for line in text.splitlines() if line.startswith("=========")][:25] if summaries != ["0"] else [],
        "said": text.splitlines()[-6:],
    }
checked = {name: run for name, run in runs.items() if not name.startswith("plain")}
is_clean = all(run["reported"] == 0 and run["ran"] for run in checked.values())
out.write_text(json.dumps({"clean": is_clean, "runs": runs}, indent=1) + "\n")
for name, run in runs.items():
    print(f"{name}: ran {', '.join(run['ran']) or 'nothing'}; reported {run['reported']}; exit {run['status']}")
sys.exit(not is_clean)
PYTHON
