"""The comparison with golden records can fail: each kind of change is made, and found by name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from tests.golden.cases import records_of
from tests.support import golden
from tests.support.compile_check import CompileReport, KernelSpec, compile_specs
from tests.support.processes import run_workers_once

PRODUCTS, COPIES = "muon products", "tp ag_gemm copy 16+16+16+16, 4 ranks"


def _changed_records(name: str, change: str) -> dict[str, list[str]]:
    """A case's records on this rank, with the package changed."""
    from ditron_train.optim import products
    from ditron_train.runtime.launch import KernelLaunch
    from ditron_train.stream import copies

    init, launch, addmm, in_order = KernelLaunch.__init__, KernelLaunch.__call__, products.addmm, copies._in_order

    def other_constant(self, kernel, num_programs, constants, **options):
        init(
            self,
            kernel,
            num_programs,
            {**constants, **{name: 7 for name in constants if name == "GROUP_M"}},
            **options,
        )

    def dropped(self, *arguments, **options):
        if self._kernel.__name__ != "addmm_kernel":
            launch(self, *arguments, **options)

    def swapped(add, a, b, **options):
        return addmm(b, a, add, **options)

    patches = {
        "constant": mock.patch.object(KernelLaunch, "__init__", other_constant),
        "dropped launch": mock.patch.object(KernelLaunch, "__call__", dropped),
        "swapped operand": mock.patch.object(
            products, "addmm", lambda add, a, b, **options: addmm(b, a, add, **options)
        ),
        "order of copies": mock.patch.object(
            copies, "_in_order", lambda chunks, source: in_order(list(chunks)[::-1], source)
        ),
        "nothing": mock.patch.object(copies, "_in_order", in_order),
    }
    with patches[change]:
        return records_of([name])


def _changes(name: str, change: str, world: int) -> list[str]:
    outcomes = run_workers_once(world, _changed_records, name, change)
    assert all(outcome.ok for outcome in outcomes), [outcome.traceback for outcome in outcomes]
    found = {f"{key}, rank {one.rank}": lines for one in outcomes for key, lines in one.value.items()}
    return golden.differences(golden.read_calls(), found, found)


@pytest.mark.skipif(bool(golden.other_versions()), reason="recorded with other versions")
@pytest.mark.parametrize(
    "name, world, change, recorded, found",
    [
        (PRODUCTS, 1, "constant", "GROUP_M=8", "GROUP_M=7"),
        (PRODUCTS, 1, "dropped launch", "launch addmm_kernel", "bits"),
        (PRODUCTS, 1, "swapped operand", "desc(x:", "desc(b:"),
        (COPIES, 4, "order of copies", "copy S10", "copy S10"),
        (PRODUCTS, 1, "nothing", "", ""),
    ],
)
def test_a_change_of_calls_is_found(name: str, world: int, change: str, recorded: str, found: str) -> None:
    lines = _changes(name, change, world)
    if change == "nothing":
        assert not lines
        return
    assert [line.splitlines()[0].split(", from")[0] for line in lines] == [
        f"changed: {name}, call {call}, rank {rank}" for rank in range(world) for call in (1, 3)
    ]
    for line in lines:
        _, before, after = line.splitlines()
        assert recorded in before and found in after and before.split()[1:] != after.split()[1:]


HELPER = """
@triton.jit
def add(x, y):
    return x + y * FACTOR
"""
KERNEL = """
@triton.jit
def kernel(out, x, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(out + offsets, add(tl.load(x + offsets), offsets))
"""
HEAD = "import triton\nimport triton.language as tl\nFACTOR = tl.constexpr({factor})\n"


def test_ptx_is_compared_without_its_place_in_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Comments, docstrings and modules do not matter; a constant does."""
    head, other = HEAD.format(factor=3), HEAD.format(factor=5)
    documented = KERNEL.replace("    offsets =", '    """What it does."""\n    # Why.\n    offsets =', 1)
    modules = {
        "golden_whole": head + HELPER + KERNEL,
        "golden_documented": '"""A module."""\n' + head + "# A comment.\n\n" + HELPER + "\n\n" + documented,
        "golden_helper": head + HELPER,
        "golden_moved": "from golden_helper import add\n" + head + KERNEL,
        "golden_changed": other + HELPER + KERNEL,
    }
    for name, source in modules.items():
        (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    names = [name for name in modules if name != "golden_helper"]
    arguments = {"out": "*i32", "x": "*i32"}
    targets = ("sm_80", "sm_90", "sm_100")
    specs = [KernelSpec(one, f"{one}:kernel", arguments, {"BLOCK": 128}, targets=targets) for one in names]
    reports = compile_specs(specs)
    assert not any(report.error for report in reports.values()), reports
    for target in targets:
        whole, documented, moved, changed = (golden.normalized_ptx(reports[name, target].asm) for name in names)
        assert whole == documented == moved != changed and "golden" not in whole and ".loc" not in whole


def _report(**changes: object) -> CompileReport:
    good = dict(name="a", target="sm_90", error=None, asm="add.s32 %r1, %r2, %r3;", num_registers=32, spill_bytes=0)
    return CompileReport(**{**good, **changes})


@pytest.mark.parametrize(
    "field, value",
    [
        ("asm", "add.s32 %r1, %r3, %r2;"),
        ("num_registers", 40),
        ("spill_bytes", 8),
        ("shared_bytes", 64),
        ("error", "no"),
    ],
)
def test_a_change_of_a_kernel_is_found(field: str, value: object) -> None:
    recorded = golden.kernel_entries([_report(), _report(target="sm_80")])
    assert len(recorded) == 2 and not golden.differences(recorded, recorded, recorded)
    found = golden.kernel_entries([_report(**{field: value}), _report(target="sm_80"), _report(target="hip")])
    (line,) = golden.differences(recorded, found, recorded)
    assert line.startswith("changed: a sm_90\n    recorded ")


def test_what_is_missing_or_new_is_named_and_comparing_nothing_fails() -> None:
    recorded = {"a sm_90": "1", "b sm_90": "2", "c sm_90": "3"}
    assert golden.differences(recorded, {"a sm_90": "1", "d sm_90": "4"}, {"a sm_90", "b sm_90"}) == [
        "missing: b sm_90 is recorded and was not found",
        "new: d sm_90 is not recorded",
    ]
    for before, found in (({}, {"a sm_90": "1"}), (recorded, {}), ({}, {})):
        with pytest.raises(ValueError, match="no golden entry was compared"):
            golden.differences(before, found, before)


@pytest.mark.usefixtures("warm_python")
@pytest.mark.parametrize("words", [["--only", "no such case"], ["--only", "no such case", "--part", "kernels"]])
def test_the_script_fails_where_nothing_is_compared(words: list[str]) -> None:
    script = Path(__file__).parent.parent.parent / "scripts" / "golden.py"
    done = subprocess.run([sys.executable, str(script), *words], capture_output=True, text=True)
    assert done.returncode == 1 and "no golden entry was compared" in done.stderr


def test_equal_ranks_are_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(golden, "CALLS", tmp_path / "calls.json")
    entries = {f"case, call 1, rank {rank}": ["launch a", f"launch {rank // 2}"] for rank in range(4)}
    golden.write_calls(entries)
    assert golden.read_calls() == entries and (tmp_path / "calls.json").read_text().count("launch a") == 2
