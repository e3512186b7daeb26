"""Benchmarks with another Triton in turns with the one that is installed: are bits equal, and what takes longer?

    python scripts/compare_tritons.py /folder/of/triton-3.9 --bench "tp --part ag_gemm" --bench gemm

The folder is what ``pip install --no-deps --target FOLDER triton==3.9.0`` makes. The turns are installed, other,
other, installed, each in processes of their own, since a GPU gets slower as it gets warm. Of each benchmark it prints
the geometric mean over its rows of the other Triton's time over the installed one's (of the fused path, and of
stock Megatron, which tells how quiet the machine was), and whether the fused path had Megatron's bits in all turns.
The exit status is 1 where it had not, or a turn failed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
# What Megatron's jobs set before CUDA and NCCL start.
_MEGATRON = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0", "NCCL_ALGO": "Ring"}
# Run by each process of a turn: all benchmarks, one after the other, in one process group.
_TURN = """
import json, os, shlex, sys, torch, torch.distributed as dist
import triton
from ditron_train import cli
output, *benches = sys.argv[1:]
gpu = torch.cuda.is_available()
if gpu:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
dist.init_process_group("nccl" if gpu else "gloo")
failed = 0
for bench in benches:
    try:
        status = cli.main(["bench", *shlex.split(bench), "--output", output])
    except Exception as error:
        print(f"{bench}: {type(error).__name__}: {error}", file=sys.stderr)
        status = 2
    failed |= status != 0
if dist.get_rank() == 0:
    print(f"triton {triton.__version__}")
dist.barrier()
dist.destroy_process_group()
sys.exit(failed)
"""


def _turn(site: Path | None, number: int, folder: Path, arguments: argparse.Namespace) -> bool:
    """Runs every benchmark once; whether all of them had Megatron's bits."""
    script, output = folder / "turn.py", folder / f"turn{number}"
    script.write_text(_TURN)
    path = [*([str(site)] if site else []), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [sys.executable, ROOT / "scripts" / "launch.py", str(arguments.ranks), script, output, *arguments.bench]
    environment = {**_MEGATRON, **os.environ, "PYTHONPATH": os.pathsep.join(path)}
    done = subprocess.run([str(word) for word in command], env=environment, capture_output=True, text=True)
    printed = done.stdout.strip().splitlines()
    print(f"turn {number}: {printed[-1] if printed else 'nothing printed'}, status {done.returncode}", flush=True)
    if done.returncode:
        print("\n".join(done.stderr.strip().splitlines()[-15:]), flush=True)
    return done.returncode == 0


def _rows(output: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """By benchmark the rows of one turn, each by everything that is not measured."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for path in sorted(output.rglob("*.json")):
        for row in json.loads(path.read_text())["rows"]:
            named = {
                key: value for key, value in row.items() if isinstance(value, (str, int)) and key not in _MEASURED
            }
            found.setdefault(path.stem, {})[json.dumps(named, sort_keys=True)] = row
    return found


_MEASURED = ("bitwise_equal", "comm_sms", "commit", "peer")


def _mean(values: Iterable[float]) -> float:
    logarithms = [math.log(value) for value in values]
    return math.exp(sum(logarithms) / len(logarithms)) if logarithms else math.nan


def _show(turns: list[dict[str, dict[str, dict[str, Any]]]]) -> bool:
    """One line a benchmark; whether all bits were equal."""
    all_equal = True
    for bench in sorted(set().union(*turns)):
        shared = sorted(set.intersection(*(set(turn.get(bench, {})) for turn in turns)))
        rows = [[turn[bench][key] for turn in turns] for key in shared]
        equal = bool(rows) and all(row["bitwise_equal"] for four in rows for row in four)
        all_equal &= equal
        ratios = {
            column: [math.sqrt(b[column] * c[column] / (a[column] * d[column])) for a, b, c, d in rows]
            for column in ("ditron_us", "native_us")
        }
        fused, native = ratios["ditron_us"], ratios["native_us"]
        print(
            f"{bench}: {len(rows)} rows, bits {'equal' if equal else 'DIFFER'}, fused path {_mean(fused):.4f}, ",
            end="",
        )
        print(f"native {_mean(native):.4f}")
        for ratio, key in sorted(zip(fused, shared), reverse=True)[:2]:
            print(f"    most: {ratio:.3f} {key}")
    return all_equal


def main() -> int:
    """Runs the four turns and shows what came out."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("site", type=Path, help="folder with the other Triton")
    parser.add_argument("--bench", action="append", required=True, help="benchmark and its options (may be repeated)")
    parser.add_argument("--ranks", type=int, default=2, help="processes (default %(default)s)")
    parser.add_argument("--output", type=Path, help="folder of each turn's results (default: none is kept)")
    arguments = parser.parse_args()
    if not (arguments.site / "triton").is_dir():
        parser.error(f"{arguments.site} holds no triton")
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.output or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        sites = (None, arguments.site.resolve(), arguments.site.resolve(), None)
        good = [_turn(site, number, folder, arguments) for number, site in enumerate(sites)]
        equal = _show([_rows(folder / f"turn{number}") for number in range(len(sites))])
    return 0 if all(good) and equal else 1


if __name__ == "__main__":
    sys.exit(main())
