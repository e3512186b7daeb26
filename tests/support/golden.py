"""Golden records: what kernels are compiled to and what calls do, as it was when somebody last looked at it.

``tests/golden/kernels.json`` has an entry for each kernel and CUDA target: a hash of its PTX, its registers, the bytes
that it spills and its shared memory. ``tests/golden/calls.json`` has one for each case of ``tests/golden/cases.py``
and each rank: what ``tests.support.call_recorder`` saw. A refactoring changes no entry; ``scripts/golden.py`` compares
and records.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from tests.support.compile_check import CompileReport

FOLDER = Path(__file__).resolve().parent.parent / "golden"
KERNELS, CALLS = FOLDER / "kernels.json", FOLDER / "calls.json"
#: PTX and the registers that its assembler takes are those of one Triton; constraints.txt has it.
TRITON = "3.6"

#: What calls depend on beside this package.
VERSIONS = ("torch", "triton", "megatron-core")

_PINNED = re.compile(r"^([\w-]+)==([\w.]+)$", re.MULTILINE)
_COMMENT = re.compile(r"//.*")
_DEBUG_LABEL = re.compile(r"\$L__(?:tmp|func_begin|func_end)\d+:")
_WITHOUT_MEANING = (".loc", ".file", ".version", ".section")


def normalized_ptx(ptx: str) -> str:
    """The instructions and declarations of a kernel: no comments, no debug information, no version of PTX.

    Where the kernel's source is and in which lines is in debug information alone; names of functions that are inlined
    are, too.
    """
    kept = []
    for line in ptx.splitlines():
        line = _COMMENT.sub("", line).strip()
        if line.startswith(".section") and ".debug" in line:  # debug sections are the last ones
            break
        if line and not line.startswith(_WITHOUT_MEANING) and not _DEBUG_LABEL.fullmatch(line):
            kept.append(line)
    return "\n".join(kept)


def kernel_entries(reports: Iterable[CompileReport]) -> dict[str, str]:
    """By ``"<kernel> <target>"``, for CUDA targets: hash of the PTX, registers, spills, shared memory."""
    entries = {}
    for report in reports:
        if report.target == "hip":
            continue
        digest = hashlib.sha256(normalized_ptx(report.asm).encode()).hexdigest()[:16]
        figures = f"{report.num_registers} registers, {report.spill_bytes} B spilled, {report.shared_bytes} B shared"
        entries[f"{report.name} {report.target}"] = f"{digest}: {figures}" if report.error is None else "no code"
    return entries


def differences(recorded: Mapping[str, Any], found: Mapping[str, Any], expected: Iterable[str]) -> list[str]:
    """What differs, an entry a line.

    Args:
        recorded: The golden entries.
        found: Those of this run.
        expected: Keys of the entries that this run should have made: those of ``recorded`` that are not among them
            were not looked for.

    Raises:
        ValueError: Nothing was compared.
    """
    expected = {*expected}
    compared = [key for key in found if key in recorded]
    lines = [f"changed: {key}{_change(recorded[key], found[key])}" for key in compared if recorded[key] != found[key]]
    lines += [f"missing: {key} is recorded and was not found" for key in recorded if key in expected - {*found}]
    lines += [f"new: {key} is not recorded" for key in found if key not in recorded]
    if not compared:
        raise ValueError("no golden entry was compared: " + ("; ".join(lines[:20]) or "there is none"))
    return lines


def name_of(key: str) -> str:
    """The kernel or case that an entry is about."""
    return key.rpartition(", call ")[0] or key.rpartition(" ")[0]


def _change(before: Any, after: Any) -> str:
    """The first line that differs, of an entry that is a list of lines."""
    if isinstance(before, str):
        return f"\n    recorded {before}\n    found    {after}"
    length = max(len(before), len(after))
    padded = [[*lines, *["(nothing)"] * (length - len(lines))] for lines in (before, after)]
    place = next(index for index, pair in enumerate(zip(*padded)) if pair[0] != pair[1])
    return f", from line {place} of {len(before)}\n    recorded {padded[0][place]}\n    found    {padded[1][place]}"


def read_kernels() -> dict[str, str]:
    """The golden entries of kernels; none if nothing was recorded."""
    return json.loads(KERNELS.read_text()) if KERNELS.exists() else {}


def write_kernels(entries: Mapping[str, str]) -> None:
    """One line an entry, sorted."""
    KERNELS.write_text(json.dumps(dict(sorted(entries.items())), indent=0) + "\n")


def read_calls() -> dict[str, list[str]]:
    """The golden entries of calls, by case, call and rank; none if nothing was recorded."""
    grouped = json.loads(CALLS.read_text()) if CALLS.exists() else {}
    return {
        f"{call}, rank {rank}": lines
        for call, by_ranks in grouped.items()
        for ranks, lines in by_ranks.items()
        for rank in ranks.split()
    }


def write_calls(entries: Mapping[str, list[str]]) -> None:
    """One line an event, sorted by case; ranks with equal records are written once."""
    grouped: dict[str, dict[tuple[str, ...], list[str]]] = {}
    for key, lines in sorted(entries.items()):
        call, _, rank = key.rpartition(", rank ")
        grouped.setdefault(call, {}).setdefault(tuple(lines), []).append(rank)
    written = {call: {" ".join(ranks): lines for lines, ranks in one.items()} for call, one in grouped.items()}
    CALLS.write_text(json.dumps(written, indent=0) + "\n")


def other_versions() -> str:
    """Which packages are not those of constraints.txt, with which calls were recorded; empty if all are."""
    pinned = dict(_PINNED.findall((FOLDER.parent.parent / "constraints.txt").read_text()))
    here = {name: metadata.version(name).partition("+")[0] for name in VERSIONS}
    return ", ".join(f"{name} {here[name]}" for name in VERSIONS if here[name] != pinned[name])
