"""Where the time went, by made traces."""

from __future__ import annotations

import json

import pytest

from ditron_train.tools.trace.phases import alike_us, at_best, kernel_differences, phases_us, short_name
from ditron_train.tools.trace.timeline import read_chrome_trace
from tests.support.made_traces import FUSED, NATIVE


def read(folder, *traces):
    path = folder / "trace.json"
    for events in traces:
        path.write_text(json.dumps({"traceEvents": events}))
        yield read_chrome_trace(path)


def test_what_goes_on_in_a_step(tmp_path):
    native, fused = read(tmp_path, NATIVE, FUSED)
    assert list(phases_us(native).values()) == [600, 360, 40, 200, 150, 50, 40]
    assert list(phases_us(fused).values()) == [500, 420, 40, 100, 20, 20, 0]


def test_the_clock_shows_in_what_both_ran_alike(tmp_path):
    slow = [{**event, "ts": 1.05 * event["ts"], "dur": 1.05 * event["dur"]} for event in NATIVE]
    native, slower, fused = read(tmp_path, NATIVE, slow, FUSED)
    # The first GEMM has a reduce-scatter beside it: the addition and the second GEMM are left, of which the names and
    # numbers agree.
    assert alike_us(native, native) == (100, 100)
    assert alike_us(native, slower) == pytest.approx((100, 105))
    assert alike_us(native, fused) is None


def test_kernels_whose_time_differs_most(tmp_path):
    native, fused = read(tmp_path, NATIVE, FUSED)
    first, second, *others = kernel_differences(native, fused)
    assert (first.name, first.counts, first.us) == ("nvjet_sm90_tst_320x128_64x3_1x2_h_bz_coopB_TNT", (2, 0), (360, 0))
    assert (second.name, second.counts, second.us) == ("ag_gemm_kernel", (0, 1), (0, 320))
    assert len(others) == 7 and len(kernel_differences(native, fused, 3)) == 3
    assert [k.difference_us for k in kernel_differences(fused, fused)] == [0] * 5


@pytest.mark.parametrize(
    "name, short",
    [
        ("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "ncclDevKernel_AllGather_RING_LL"),
        ("Memcpy PtoP (Device -> Device)", "Memcpy PtoP (Device -> Device)"),
        ("at::cuda::(anonymous namespace)::spin_kernel(long)", "spin_kernel"),
        (
            "void at::native::elementwise_kernel<4, at::f(at::T&)::{lambda()#3}>(int, X)",
            "elementwise_kernel<4, f(T&)::{lambda()#3}>",
        ),
        ("ag_gemm_kernel", "ag_gemm_kernel"),
        ("k" * 80, "k" * 53 + "..."),
    ],
)
def test_short_names(name, short):
    assert short_name(name) == short


def test_what_hiding_can_reach(tmp_path):
    native, fused = read(tmp_path, NATIVE, FUSED)
    assert at_best(native, fused) == (
        "with none of the 150 us that nothing hides natively the call takes 450 instead of 600 us: at best 1.33x; "
        "fused took 500 us: 1.20x"
    )
    alone, _ = read(tmp_path, NATIVE[:2], FUSED)
    assert at_best(alone, alone) == "natively nothing but communication ran; fused took 100 us: 1.00x"
