"""Calls whose number of rows varies: families, bits at each number of rows, times of the job's own calls."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from ditron_train.policy import job_times
from ditron_train.policy.job_times import JobTimes
from ditron_train.policy.lengths import Family
from ditron_train.runtime.sizes import top_of_range
from tests.support.processes import run_workers


def test_ranges_of_rows_are_eighths_of_an_octave() -> None:
    tops = sorted({top_of_range(rows) for rows in range(1, 8193)})
    assert all(top_of_range(rows) >= rows for rows in range(1, 8193))
    assert [top_of_range(top) for top in tops] == tops  # the top of a range is in it
    assert [top for top in tops if top > 4096] == list(range(4608, 8193, 512))
    assert all(after <= before * 9 / 8 for before, after in zip(tops[16:], tops[17:]))


def test_a_few_fixed_lengths_are_decided_one_by_one() -> None:
    family = Family("op", None)
    assert [family.starts_to_vary(rows, None) for rows in (64, 32, 64, 32, 48, 64, 33)] == [False] * 4 + [True] * 3
    announced = Family("op", None)
    assert announced.starts_to_vary(64, 128)


class _Event:
    """An event on a clock that tests advance."""

    now_us = 0.0
    is_over = True

    def __init__(self) -> None:
        self.at_us: float | None = None

    def record(self) -> None:
        self.at_us = _Event.now_us

    def query(self) -> bool:
        return _Event.is_over

    def elapsed_time(self, end: _Event) -> float:
        assert self.at_us is not None and end.at_us is not None
        return (end.at_us - self.at_us) / 1e3


def _passed(us: float, result: Any = None) -> Any:
    _Event.now_us += us
    return result


class _Delay(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, us):
        ctx.us = us
        return _passed(us, x * 2)

    @staticmethod
    def backward(ctx, grad):
        return _passed(2 * ctx.us, grad * 2), None


def _series(native_us: list[float], fused_us: list[float], calls: int, rows: int = 10) -> tuple[Any, ...]:
    """Times of one rank's calls, forward and backward; what was decided after how many calls."""
    job_times._event, saved = _Event, job_times._event
    try:
        times, steps = JobTimes(dist.group.WORLD), {False: itertools.cycle(native_us), True: itertools.cycle(fused_us)}
        for number in range(calls):
            if times.is_due:
                times.look()
            if times.is_fused is not None:
                return times.is_fused, number, times.native_us, times.fused_us
            call = times.next_call(rows, True)
            x = torch.ones(3, requires_grad=True)
            y = call.run(x, lambda call=call, x=x: _Delay.apply(x, next(steps[call.is_fused])), lambda: None)
            assert torch.equal(y, torch.full((3,), 2.0))
            _passed(1000.0)  # what runs between forward and backward is not the layer's
            y.sum().backward()
            assert torch.equal(x.grad, torch.full((3,), 2.0))
        return None, calls, times.native_us, times.fused_us
    finally:
        job_times._event = saved


def _series_of_ranks(*by_rank: tuple[list[float], list[float], int]) -> tuple[Any, ...]:
    return _series(*by_rank[dist.get_rank()])


def test_the_faster_path_is_found_at_the_jobs_own_calls() -> None:
    quick = ([100.0, 101.0, 99.0], [90.0, 91.0, 89.0], 200)
    found = run_workers(2, _series_of_ranks, quick, quick)
    assert found == [(True, 28, pytest.approx(30.0), pytest.approx(27.0))] * 2  # of a row, forward and backward
    slow_once = run_workers(2, _series_of_ranks, quick, ([100.0, 101.0, 99.0], [110.0, 111.0, 109.0], 200))
    assert [one[0] for one in slow_once] == [False] * 2  # the slowest rank counts


def test_what_differs_by_less_than_its_noise_is_native_in_the_end() -> None:
    noisy = ([100.0, 140.0, 60.0], [99.0, 139.0, 59.0], 2000)
    ((is_fused, number, *_), _) = run_workers(2, _series_of_ranks, noisy, noisy)
    assert is_fused is False and number == 896


def test_events_that_are_not_over_are_waited_for_by_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_times, "_event", _Event)
    monkeypatch.setattr(job_times, "exchange", lambda group, mine: [mine, mine])
    times = JobTimes(None)
    monkeypatch.setattr(_Event, "is_over", False)
    while not times.is_due:
        times.next_call(8, False).run(torch.ones(1), lambda: _passed(5.0, torch.ones(1)), torch.ones)
    times.look()
    assert times.is_fused is None and not times.is_due
    monkeypatch.setattr(_Event, "is_over", True)
    while not times.is_due:
        call = times.next_call(8, False)
        call.run(torch.ones(1), lambda call=call: _passed(4.0 if call.is_fused else 5.0, torch.ones(1)), torch.ones)
    times.look()
    assert times.is_fused is True


def _proof_of(changes: str) -> list[bool]:
    """Whether products with so many rows are proven; the interpreter's own stand for a library that adds in order."""
    from ditron_train.gemm.ops import matmul_nn, matmul_nt
    from ditron_train.megatron.shared import product_proof
    from ditron_train.megatron.shared.product_proof import ProductProof

    class Library(ProductProof):
        def _forward(self, x, weight):
            half = x.shape[1] // 2
            if changes == "forward split" and len(x) == 130:  # as a library that splits the sum in two
                parts = matmul_nt(x[:, :half], weight[:, :half]), matmul_nt(x[:, half:], weight[:, half:])
                return parts[0] + parts[1]
            return matmul_nt(x, weight)

        def _dgrad_product(self, grad, weight):
            product = matmul_nn(grad, weight)
            if changes == "dgrad" and len(grad) == 130:
                product.view(torch.int16)[129, 3] ^= 1
            return product

    assert product_proof._COMPARED_ROWS % product_proof._ROWS == 0
    proof = Library((96, 128), torch.bfloat16, torch.device("cpu"), by_te=False)
    parts = proof.parts(takes_library_dgrad=False)
    return [all(bool(part.run(rows)) for part in parts) for rows in (1, 128, 130, 300)]


@pytest.mark.parametrize("changes, expected", [("", True), ("forward split", False), ("dgrad", False)])
def test_another_order_of_a_sum_is_seen_at_the_rows_that_have_it(changes: str, expected: bool) -> None:
    pytest.importorskip("megatron.core")
    ((found, _),) = [run_workers(2, _proof_of, changes)]
    assert found == [True, True, expected, True]


def _ask(family_rows: list[int]) -> list[tuple[str, bool]]:
    """A gate's answers for an op with families, which is proven by a stand-in; the second rank differs at 40 rows."""
    from ditron_train.policy import Op, lengths
    from ditron_train.policy.decide import Decision
    from ditron_train.policy.gate import Gate
    from ditron_train.policy.op import ProofPart

    asked: list[str] = []

    def agree_on_rows(context, rows, flags):
        asked.append(f"agree {rows}")
        dist.all_reduce(flags, op=dist.ReduceOp.MIN)
        return [flag != 0 for flag in flags.tolist()]

    lengths.agree_on_rows = agree_on_rows

    class Context:
        rank, world_size, device = dist.get_rank(), dist.get_world_size(), torch.device("cpu")

        def vary_lengths(self, most_rows):
            asked.append(f"vary {most_rows}")

    class Stand(Op):
        name = "tp stand"

        def inputs(self, call):
            return (call.x,)

        def native(self, call):
            raise AssertionError

        fused = native

        def family(self, call):
            return ("kind",), len(call.x)

        def make_context(self, call):
            return Context()

        def decide(self, call, context):
            asked.append(f"decide {len(call.x)}")
            return Decision(True, "of this test", True, None, None)

        def bits_proof(self, call, context):
            return [ProofPart(lambda rows: torch.tensor(rows != 40 or dist.get_rank() == 0))]

    from ditron_train.policy import lengths

    gate, group = Gate(), dist.group.WORLD
    with mock.patch.object(lengths, "compares", lambda device: True):
        calls = [SimpleNamespace(x=torch.ones(rows, 4), group=group) for rows in family_rows]
        answers = [gate.answer_for(Stand(), call) for call in calls]
    return [*asked, *((answer.reason or "fused") for answer in answers)]


def test_bits_are_proven_once_for_each_number_of_rows() -> None:
    found = run_workers(2, _ask, [16, 24, 16, 32, 40, 32, 40, 48])
    assert found[0] == found[1]
    different = "at 40 rows its bits would not be those of the library's products on this machine"
    fused = ["fused"]
    asked = ["decide 16", "decide 24", "vary None", "decide 32", "agree 32", "agree 40", "agree 48"]
    assert found[0] == [*asked, *fused * 4, different, "fused", different, "fused"]


def test_parts_of_a_proof_are_divided_over_the_ranks() -> None:
    from ditron_train.policy.lengths import _takers

    assert _takers([58.0, 58.0, 29.0, 29.0, 12.0, 12.0, 8.0], 2) == [0, 1, 0, 1, 0, 1, 0]
    assert _takers([1.0, None, 3.0, None], 4) == [1, None, 0, None]  # what has no work is all ranks'
    assert _takers([], 2) == []
    works, loads = [float(work) for work in range(1, 41)], [0.0] * 8
    for work, rank in zip(works, _takers(works, 8)):
        assert rank is not None
        loads[rank] += work
    assert max(loads) <= 1.05 * sum(loads) / 8
