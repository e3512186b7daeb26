#!/usr/bin/env bash
# compute-sanitizer over small calls of every subpackage's kernels, on one GPU, which two ranks share: memcheck everywhere, racecheck of the
# kernels that wait for nobody (it counts accesses to shared memory, and each of their programs works alone).
#   bash scripts/sanitizer.sh FOLDER        writes FOLDER/sanitizer.json; exit status 1 if anything was reported or did not run
#   LIMIT_S bounds each of its two rounds (70)
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
limit=${LIMIT_S:-70}
# run NAME TOOL ARGUMENTS...: one process; TOOL is plain, memcheck or racecheck
run() {
  local name=$1 kind=$2
  shift 2
  local checked=("$tool" --tool "$kind" --target-processes all --print-limit 20 --error-exitcode 0)
  [ "$kind" != memcheck ] || checked+=(--report-api-errors no) # libraries ask the driver for functions that it lacks
  [ "$kind" != plain ] || checked=()
  timeout -k 5 "$limit" "${checked[@]}" "$python" -W ignore "$ops" "$@" >"$work/$name.log" 2>&1
  echo "$?" >"$work/$name.status"
}
# pair NAME TOOL ARGUMENTS...: two ranks, in the background
pair() {
  local name=$1 rank
  for rank in 0 1; do
    DITRON_SANITIZER_STORE=$work/store.$name RANK=$rank WORLD_SIZE=2 LOCAL_RANK=$rank LOCAL_WORLD_SIZE=2 \
      run "$name.$rank" "${@:2}" &
  done
}
# Compiled once without the tool, and shown to run by itself.
run plain.alone plain alone &
pair plain.peers plain peers
DITRON_PP_PATH=kernel pair plain.pp_kernels plain peers pp
wait
run alone memcheck alone &
run alone.races racecheck alone &
pair peers memcheck peers
DITRON_PP_PATH=kernel pair pp_kernels memcheck peers pp
wait
"$python" - "$work" "$folder/sanitizer.json" "$root/ditron_train" <<'PYTHON'
import ast, json, pathlib, re, sys
work, out, package = map(pathlib.Path, sys.argv[1:])
def kernels_of(package):
    """Names of the package's kernels: functions of Triton's that no other one calls or takes, but for those of lang, which users'
    kernels call."""
    jitted = [
        (path, node) for path in package.rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(mark) for mark in node.decorator_list)
    ]
    parts = [part for _, node in jitted for part in ast.walk(node)]
    within = {part.id for part in parts if isinstance(part, ast.Name)}
    within |= {part.attr for part in parts if isinstance(part, ast.Attribute)}
    return {node.name for path, node in jitted if not node.name.startswith("_") and path != package / "lang" / "memory.py"} - within


def first_words(lines):
    """The lines that name an error that ended the process, whatever stands behind them."""
    named = [i for i, line in enumerate(lines) if re.search("terminate called|what\\(\\)|Traceback|Error: |Fatal Python", line)]
    return [lines[i] for first in named[:3] for i in range(first, min(first + 8, len(lines)))][:24]


defined = kernels_of(package)
runs, checked_kernels = {}, set()
for log in sorted(work.glob("*.log")):
    text, is_plain = log.read_text(errors="replace"), log.stem.startswith("plain")
    summaries = re.findall(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", text)
    kernels = " ".join(re.findall(r"^kernels (.*)", text, re.M)).split()
    runs[log.stem] = {
        "ran": re.findall(r"^ran (\S+)", text, re.M),
        "status": int((work / f"{log.stem}.status").read_text()),
        "reported": sum(map(int, summaries)) if summaries else None,
        "first": [line for line in text.splitlines() if line.startswith("=========")][:40] if summaries != ["0"] else [],
        "named": first_words(text.splitlines()) if "SUMMARY: 0" not in text or "Aborted" in text else [],
        "said": text.splitlines()[-12:],
    }
    checked_kernels |= set() if is_plain else set(kernels)
checked = {name: run for name, run in runs.items() if not name.startswith("plain")}
is_clean = bool(checked_kernels) and all(run["reported"] == 0 and run["ran"] and run["status"] == 0 for run in checked.values())
left = sorted(defined - checked_kernels)
out.write_text(json.dumps({"clean": is_clean, "kernels": sorted(checked_kernels), "not_run": left, "runs": runs}, indent=1) + "\n")
for name, run in runs.items():
    print(f"{name}: ran {', '.join(run['ran']) or 'nothing'}; reported {run['reported']}; exit {run['status']}")
print(f"{len(checked_kernels)} kernels ran under a tool; not run: {', '.join(left) or 'none'}")
empty = ", ".join(name for name, run in checked.items() if not run["ran"]) or "every run"
if not checked_kernels:
    print(f"nothing was checked: {empty}: no kernel ran under compute-sanitizer", file=sys.stderr)
sys.exit(not is_clean)
PYTHON
