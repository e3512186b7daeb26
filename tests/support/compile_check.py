"""Compiles kernels for GPUs that are not there, and checks what came out: spills, shared memory, fences, barriers.

Triton decides at decoration whether a function is interpreted, so a process that runs the interpreter cannot compile:
``Compilation`` does it in one process of its own, for a list of specs. On a machine with neither GPU nor driver this
works for sm_80, sm_90, sm_100 and gfx942.

A room of the package lists its kernels as ``SPECS`` in ``tests/compile/specs_<room>.py``; the tests there compile
every one for each of its targets and run ``check_report``.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import namedtuple
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ditron_train.runtime.launch import COMPILE_OPTIONS
from tests.support.carried_bounds import carried_bounds
from tests.support.patience import HANG_S

TARGETS = ("sm_80", "sm_90", "sm_100", "hip")
_ALIGNED = [["tt.divisibility", 16]]
_NO_SPILL_TARGETS = ("sm_90",)
_VECTOR_TARGETS = ("sm_90", "sm_100")  # for sm_80 a descriptor's tile is moved as the mask of its edges has it
_SHARED_LIMIT_BYTES = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "hip": 64 << 10}
# A store or atomic that makes earlier writes of its thread visible.
_RELEASE = re.compile(r"\b(?:st|atom|red)\.(?:[a-z0-9_]+\.)*(?:release|acq_rel)\b")
_ACQUIRE = re.compile(r"\b(?:ld|atom)\.(?:[a-z0-9_]+\.)*(?:acquire|acq_rel)\b")
_BARRIER = re.compile(r"\b(?:bar\.sync|barrier\.sync)\b")
# A load or store of one element of two bytes: a thread can move eight of them.
_ONE_BY_ONE = re.compile(r"\b(?:ld|st)\.(?:[a-z0-9_:]+\.)*global\.(?:[a-z0-9_:]+\.)*[bu]16\b")
_WRITE = re.compile(r"\b(?:st\.(?:[a-z0-9_]+\.)*global|cp\.async\.bulk\.(?:tensor\.[0-9]d\.)?global|red\.|atom\.)")

# What orders memory between blocks and GPUs, and what is copied in bulk.
_ORDERED = re.compile(r"(?<![\w.])(ld|st|atom|red|fence|cp)\.([a-z0-9_.:]+)")


@dataclass(frozen=True)
class KernelSpec:
    """One kernel with the types of its arguments: what a launch would have specialised.

    Attributes:
        name: What tests call it.
        kernel: ``package.module:function``.
        signature: Type of each argument that is not a constexpr: ``*bf16``, ``i32``, ``fp32``,
            ``tensordesc<bf16[128,64]>``; of a ``NamedTuple`` a dict of the types of its fields.
        constexprs: Values of the others; of a ``NamedTuple`` a dict of its fields. ``TARGET`` is filled in if the
            kernel, or such a tuple, takes it.
        num_warps: As the launch; a dict by target if it differs, with ``default``.
        num_stages: As the launch; likewise.
        targets: Which of ``TARGETS`` to compile for.
        aligned: Arguments whose address or value is a multiple of 16; None for all pointers, and all integers that the
            kernel specialises on. Of a tuple's fields it is always all.
        signals: Whether it must hold a release and an acquire on CUDA targets (a kernel with neither states False;
            None checks only that every release it has comes after a barrier).
        max_spill_bytes: Allowed on sm_90.
        max_single_loads: Of elements one by one: those of a bias, of which a thread needs few columns.
    """

    name: str
    kernel: str
    signature: dict[str, str | dict[str, str]]
    constexprs: dict[str, Any] = field(default_factory=dict)
    num_warps: int | dict[str, int] = 8
    num_stages: int | dict[str, int] = 3
    targets: tuple[str, ...] = TARGETS
    aligned: tuple[str, ...] | None = None
    signals: bool | None = False
    max_spill_bytes: int = 0
    max_single_loads: int = 0


@dataclass(frozen=True)
class CompileReport:
    """What one compilation gave.

    Attributes:
        name: Of the spec.
        target: One of ``TARGETS``.
        error: Why it did not compile, or None.
        asm: PTX or AMDGCN text.
        num_registers: Per thread; None if no assembler is at hand (hip).
        spill_bytes: Stores and loads to local memory; None likewise.
        shared_bytes: Shared memory of a program.
        carried_bounds: See ``tests.support.carried_bounds``.
    """

    name: str
    target: str
    error: str | None
    asm: str = ""
    num_registers: int | None = None
    spill_bytes: int | None = None
    shared_bytes: int = 0
    carried_bounds: Sequence[str] = ()


def unguarded_releases(ptx: str) -> list[str]:
    """Release instructions that are not preceded by a block barrier since the last write to global memory.

    Without the barrier only the releasing thread's own writes are published. Order of the text stands for order of
    execution: right for the straight code around a signal. A release inside another's poll loop does not occur here.
    """
    lines = [line.split("//")[0] for line in ptx.splitlines()]
    found = []
    for index, line in enumerate(lines):
        if not _RELEASE.search(line):
            continue
        for before in reversed(lines[:index]):
            if _BARRIER.search(before):
                break
            if _WRITE.search(before) or ".entry" in before:
                found.append(line.strip())
                break
    return found


def memory_order(ptx: str) -> str:
    """The acquires, releases, fences and bulk copies of a kernel in their order, with their scopes; as text.

    What a version of Triton may choose freely is left out: how an atomic whose result nobody reads is spelt, fences of
    a block's own shared memory, and where it waits for its own copies.
    """
    found: list[tuple[str, int]] = []
    for line in ptx.splitlines():
        match = _ORDERED.search(line.split("//")[0])
        what = _ordering(match[1], match[2].split(".")) if match else None
        if what and found and found[-1][0] == what:
            found[-1] = what, found[-1][1] + 1
        elif what:
            found.append((what, 1))
    return "; ".join(f"{count} x {what}" if count > 1 else what for what, count in found)


def _ordering(operation: str, parts: list[str]) -> str | None:
    scope = next((part for part in parts if part in ("cta", "cluster", "gpu", "sys")), "block")
    if operation == "fence":
        if parts[0] == "proxy":
            return None if parts[-1].startswith("shared") else f"proxy fence {parts[-1]}"
        return f"fence {parts[0]} {scope}"
    if operation == "cp":
        shared = next((index for index, part in enumerate(parts) if part.startswith("shared")), None)
        if parts[:2] != ["async", "bulk"] or shared is None:
            return None
        return "bulk load" if shared < parts.index("global") else "bulk store"
    kind = next((part for part in parts if part in ("acquire", "release", "acq_rel")), None)
    return f"{kind} {scope}" if kind else None


def check_report(spec: KernelSpec, report: CompileReport) -> None:
    """Asserts that a kernel compiled, fits, does not spill on sm_90, moves whole vectors and signals as it must.

    Raises:
        AssertionError: Names the kernel, the target and what is wrong.
    """
    where = f"{report.name} for {report.target}"
    assert report.error is None, f"{where} does not compile: {report.error}"
    assert not report.carried_bounds, f"{where}: Triton may lose {report.carried_bounds}, which bound a loop inside"
    limit = _SHARED_LIMIT_BYTES[report.target]
    assert report.shared_bytes <= limit, (
        f"{where}: {report.shared_bytes} bytes of shared memory, the device has {limit}"
    )
    if report.target in _NO_SPILL_TARGETS:
        assert report.spill_bytes is not None, f"{where}: the assembler reported no spills at all"
        assert report.spill_bytes <= spec.max_spill_bytes, f"{where} spills {report.spill_bytes} bytes"
    if report.target == "hip":
        return
    single = _ONE_BY_ONE.findall(report.asm) if report.target in _VECTOR_TARGETS else []
    assert len(single) <= spec.max_single_loads, f"{where} moves elements one by one: {len(single)} times {single[0]}"
    unguarded = unguarded_releases(report.asm)
    assert not unguarded, f"{where}: no barrier between the last global write and {unguarded}"
    if spec.signals is not None:
        releases, acquires = bool(_RELEASE.search(report.asm)), bool(_ACQUIRE.search(report.asm))
        assert releases == spec.signals, (
            f"{where}: a release is {'missing' if spec.signals else 'there but not stated'}"
        )
        assert acquires == spec.signals, (
            f"{where}: an acquire is {'missing' if spec.signals else 'there but not stated'}"
        )


class Compilation:
    """Compiles every spec for each of its targets in a process of its own, meanwhile.

    Args:
        specs: What to compile.
        niceness: Of the process until ``hurry``: 19 takes what time others leave over.
    """

    def __init__(self, specs: Iterable[KernelSpec], *, niceness: int = 0) -> None:
        self._specs = list(specs)
        self._niceness = niceness
        self._folder = tempfile.TemporaryDirectory()
        self._answers: list[str] = []
        self._start(self._specs)

    @property
    def process_id(self) -> int:
        """Of the process that compiles now."""
        return self._process.pid

    def _start(self, specs: Sequence[KernelSpec]) -> None:
        environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
        environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
        number = len(self._answers)
        names = ("request.json", "answers", "said.txt")
        request, answers, self._said = (os.path.join(self._folder.name, f"{number}.{name}") for name in names)
        with open(request, "w") as file:
            json.dump([asdict(spec) for spec in specs], file)
        open(answers, "w").close()
        self._answers.append(answers)
        command = [sys.executable, "-m", "tests.support.compile_check", request, answers, str(self._niceness)]
        with open(self._said, "w") as logged:
            self._process = subprocess.Popen(command, env=environment, stdout=logged, stderr=subprocess.STDOUT)

    def _read(self) -> dict[tuple[str, str], CompileReport]:
        """The reports so far; a line that is being written does not count."""
        lines: list[str] = []
        for answers in self._answers:
            with open(answers) as file:
                lines += [line for line in file if line.endswith("\n")]
        found = [CompileReport(**json.loads(line)) for line in lines]
        return {(report.name, report.target): report for report in found}

    def hurry(self) -> None:
        """Has what is left compiled at this process's own priority: on a busy machine a nice one hardly comes on."""
        if self._niceness == 0 or self._process.poll() is not None:
            return
        self._process.kill()
        self._process.wait()
        self._niceness = 0
        done = self._read()
        left = [
            replace(spec, targets=tuple(target for target in spec.targets if (spec.name, target) not in done))
            for spec in self._specs
        ]
        self._start([spec for spec in left if spec.targets])

    def reports(self, stall_s: float = HANG_S) -> dict[tuple[str, str], CompileReport]:
        """Waits for the reports by (name, target), as long as one comes after the other.

        Raises:
            RuntimeError: The process died; holds the end of what it said.
            TimeoutError: There was no new report for ``stall_s``.
        """
        self.hurry()
        try:
            num_reports, deadline_s = -1, 0.0
            while True:
                ended, reports = self._process.poll() is not None, self._read()
                if ended:
                    break
                if len(reports) > num_reports:
                    num_reports, deadline_s = len(reports), time.monotonic() + stall_s
                if time.monotonic() > deadline_s:
                    raise TimeoutError(f"no kernel was compiled for {stall_s:g} s, after {num_reports} of them")
                time.sleep(0.1)
            if self._process.returncode != 0:
                with open(self._said) as logged:
                    words = logged.read()[-2000:]
                raise RuntimeError(f"the compiling process ended with {self._process.returncode}: {words}")
            return reports
        finally:
            self.stop()

    def stop(self) -> None:
        """Ends the process, if it still runs."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        self._folder.cleanup()


def compile_specs(specs: Iterable[KernelSpec]) -> dict[tuple[str, str], CompileReport]:
    """``Compilation``'s reports.

    Raises:
        RuntimeError, TimeoutError: As ``Compilation.reports``.
    """
    return Compilation(specs).reports()


def _by_target(value: Any, target: str) -> int:
    return value.get(target, value["default"]) if isinstance(value, dict) else value


def _gpu_target(target: str):
    from triton.backends.compiler import GPUTarget

    if target == "hip":
        return GPUTarget("hip", "gfx942", 64)
    return GPUTarget("cuda", int(target.removeprefix("sm_")), 32)


def _assemble(ptx: str, target: str) -> str:
    """What ptxas says of a PTX text."""
    from triton.backends.nvidia.compiler import get_ptxas  # which of its two depends on Triton's version

    arch = int(target.removeprefix("sm_"))
    name = f"sm_{arch}a" if arch >= 90 else f"sm_{arch}"
    with tempfile.TemporaryDirectory() as folder:
        source = os.path.join(folder, "kernel.ptx")
        with open(source, "w") as file:
            file.write(ptx)
        command = [get_ptxas(arch).path, "-v", f"--gpu-name={name}", source, "-o", source + ".cubin"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stderr


def _assembler_facts(logged: str) -> tuple[int, int]:
    """(registers, spilled bytes) in what ptxas said."""
    spills = sum(int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", logged))
    return max(int(n) for n in re.findall(r"Used (\d+) registers", logged)), spills


def _as_tuples(value: Any) -> Any:
    """A dict as a ``NamedTuple`` of its values, a list as a tuple."""
    if isinstance(value, dict):
        return namedtuple("Fields", value)(*map(_as_tuples, value.values()))
    return tuple(map(_as_tuples, value)) if isinstance(value, (list, tuple)) else value


def _aligned_parts(kinds: tuple, path: tuple[int, ...]) -> dict[tuple[int, ...], list]:
    """What Triton is told of the parts of a tuple, by where they are."""
    found: dict[tuple[int, ...], list] = {}
    for index, kind in enumerate(kinds):
        if isinstance(kind, tuple):
            found |= _aligned_parts(kind, (*path, index))
        elif _can_align(kind):
            found[(*path, index)] = _ALIGNED
    return found


def _constants(value: Any, target: str) -> Any:
    """A constexpr as the kernel takes it; a dict of names in capitals is a tuple of constexprs, ``TARGET`` among them
    the target."""
    import triton.language as tl

    if isinstance(value, dict) and all(name.isupper() for name in value):
        fields = {name: target if name == "TARGET" else part for name, part in value.items()}
        return namedtuple("Fields", fields)(*map(tl.constexpr, fields.values()))
    return _as_tuples(value)


def _can_align(kind: str) -> bool:
    return kind.startswith("*") or kind in ("i32", "i64")


def _compile_one(spec: KernelSpec, target: str) -> CompileReport:
    import triton
    from triton.compiler import ASTSource

    module, function = spec.kernel.split(":")
    kernel = getattr(importlib.import_module(module), function)
    constexprs = {name: _constants(value, target) for name, value in spec.constexprs.items()}
    if "TARGET" in kernel.arg_names and "TARGET" not in constexprs:
        constexprs["TARGET"] = target
    unspecialised = {kernel.arg_names[i] if isinstance(i, int) else i for i in kernel.do_not_specialize or ()}
    signature, attrs = {}, {}
    for index, name in enumerate(kernel.arg_names):
        kind = spec.signature.get(name)
        if kind is None:
            signature[name] = "constexpr"
            if name not in constexprs:
                constexprs[name] = kernel.params[index].default
        elif isinstance(kind, dict):
            signature[name] = _as_tuples(kind)
            attrs.update(_aligned_parts(signature[name], (index,)))
        else:
            signature[name] = kind
            is_specialised = kind.startswith("*") or name not in unspecialised
            if _can_align(kind) and is_specialised and (spec.aligned is None or name in spec.aligned):
                attrs[(index,)] = _ALIGNED
    options = dict(
        num_warps=_by_target(spec.num_warps, target), num_stages=_by_target(spec.num_stages, target), **COMPILE_OPTIONS
    )
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attrs)
    triton.knobs.nvidia.dump_ptxas_log = True
    with contextlib.redirect_stdout(io.StringIO()) as logged:
        compiled = triton.compile(source, target=_gpu_target(target), options=options)
    facts = (compiled.metadata.shared, carried_bounds(compiled.asm["ttir"]))
    if target == "hip":
        return CompileReport(spec.name, target, None, compiled.asm["amdgcn"], None, None, *facts)
    # Triton has assembled it just now, or has it from its cache and says nothing.
    registers, spills = _assembler_facts(logged.getvalue() or _assemble(compiled.asm["ptx"], target))
    return CompileReport(spec.name, target, None, compiled.asm["ptx"], registers, spills, *facts)


def _main(request: str, answers: str, niceness: str) -> None:
    os.nice(int(niceness))
    with open(request) as file:
        specs = [KernelSpec(**entry) for entry in json.load(file)]
    with open(answers, "a") as file:
        for spec in specs:
            for target in spec.targets:
                try:
                    report = _compile_one(spec, target)
                except Exception as error:  # any compiler error belongs in the report of this kernel, not of all
                    report = CompileReport(spec.name, target, f"{type(error).__name__}: {error}"[:2000])
                file.write(json.dumps(asdict(report)) + "\n")
                file.flush()


if __name__ == "__main__":
    _main(*sys.argv[1:])
