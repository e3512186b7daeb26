"""Every kernel that a room lists compiles for each target, fits, does not spill and signals as it must."""

from __future__ import annotations

import pytest

from tests.support.compile_check import CompileReport, KernelSpec, check_report, compile_specs, unguarded_releases


@pytest.fixture(scope="module")
def reports(compilations):
    return {key: report for compilation in compilations for key, report in compilation.reports(1100.0).items()}


@pytest.mark.timeout(1200)
def test_kernel(spec, target, reports):
    check_report(spec, reports[spec.name, target])


BARRIER, WRITE = "\tbar.sync \t0;", "\tst.global.v4.b32 [%rd1], {%r1};"
RELEASE, ACQUIRE = "\tatom.global.release.sys.exch.b32 %r1, [%rd2], %r3;", "\tld.acquire.sys.global.b32 %r1, [%rd2];"


@pytest.mark.parametrize(
    "lines, num_unguarded",
    [
        ([WRITE, BARRIER, RELEASE], 0),
        ([WRITE, RELEASE], 1),
        ([BARRIER, WRITE, RELEASE], 1),
        ([BARRIER, "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd1, {%r1}], [%r2];", RELEASE], 1),
        ([WRITE, "\t// bar.sync 0;", "\tst.release.sys.global.u32 [%rd1], %r1;"], 1),
        ([WRITE, BARRIER, "\tst.release.sys.global.u32 [%rd1], %r1;"], 0),
        ([WRITE, BARRIER, "\tred.release.gpu.global.add.u32 [%rd1], 1;", RELEASE], 1),
        ([WRITE, BARRIER, ACQUIRE], 0),
    ],
)
def test_a_release_without_a_barrier_is_found(lines, num_unguarded):
    assert len(unguarded_releases("\n".join([".visible .entry kernel(", *lines]))) == num_unguarded


@pytest.mark.parametrize(
    "change, words",
    [
        ({"error": "CompilationError: no"}, "does not compile"),
        ({"spill_bytes": 8}, "spills 8 bytes"),
        ({"spill_bytes": None}, "no spills at all"),
        ({"shared_bytes": 300_000}, "shared memory"),
        ({"asm": "\n".join([WRITE, BARRIER, RELEASE])}, "not stated"),
        ({"asm": "\t@%p1 st.global.b16 [ %rd1 + 0 ], { %rs1 };"}, "one by one"),
    ],
)
def test_the_check_can_fail(change, words):
    spec = KernelSpec("kernel", "module:kernel", {})
    good = dict(name="kernel", target="sm_90", error=None, asm="", num_registers=32, spill_bytes=0, shared_bytes=1024)
    check_report(spec, CompileReport(**good))
    with pytest.raises(AssertionError, match=words):
        check_report(spec, CompileReport(**{**good, **change}))
    signalling = KernelSpec("kernel", "module:kernel", {}, signals=True)
    with pytest.raises(AssertionError, match="release is missing"):
        check_report(signalling, CompileReport(**good))
    check_report(signalling, CompileReport(**{**good, "asm": "\n".join([WRITE, BARRIER, RELEASE, ACQUIRE])}))


def test_a_kernel_that_does_not_compile_is_reported_with_its_error():
    spec = KernelSpec("broken", "ditron_train.gemm.kernels:gemm_kernel", {}, targets=("sm_90",))
    assert compile_specs([spec])["broken", "sm_90"].error
