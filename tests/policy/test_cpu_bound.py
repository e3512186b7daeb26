"""Ops that take the host longer: stock Megatron where a job shows that the job is CPU-bound, the same on all ranks."""

from __future__ import annotations

import logging
import sys
import types

import pytest
import torch
import torch.distributed as dist

from ditron_train.policy import cpu_bound as cpu_bound_module
from ditron_train.policy.cpu_bound import cpu_bound_of
from ditron_train.policy.gate import Gate
from ditron_train.policy.plan import Entry
from tests.support.processes import run_workers

gate_module = sys.modules["ditron_train.policy.gate"]  # the package has an object of that name


class _Device:
    """Counts as a GPU."""

    type = "cuda"


class _Stream:
    """A current stream that has run everything at every ``period``-th look, 0: at none; behind ``warm_up`` looks at
    none."""

    def __init__(self, period: int, warm_up: int = sys.maxsize) -> None:
        self.looks, self._period, self._warm_up = 0, period, warm_up

    def query(self) -> bool:
        self.looks += 1
        return bool(self._period) and self.looks <= self._warm_up and self.looks % self._period == 0


class _Op:
    """An op of 2 ranks that the device gains 50 us from."""

    name, log_name, logs_native, decides_forward, is_observed = "tp test", "tp test", True, False, False
    runs_concurrently = False

    def __init__(self, longer_us: float, looks_at_host: bool) -> None:
        self._longer_us, self.looks_at_host = longer_us, looks_at_host

    def key(self, call):
        return (call,)

    def group(self, call):
        return dist.group.WORLD

    def device(self, call):
        return _Device()

    def family(self, call):
        return None

    def unsupported_reason(self, call):
        return None

    def make_context(self, call):
        return "context"

    def decide(self, call, context):
        return Entry(True, "faster", True, 150.0, 100.0, self._longer_us)

    def describe_shape(self, call):
        return "at 3 "


def _calls(
    periods,
    longer_us,
    policy="strict",
    looks_at_host=True,
    num_calls=100,
    min_windows=1,
    ages_s=(1e9, 1e9),
    warm_up=sys.maxsize,
):
    """After which call of the op the fused path no longer ran, how often the stream was looked at, and the log."""
    stream, lines = _Stream(periods[dist.get_rank()], warm_up), []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("ditron_train").addHandler(handler)
    op, one = _Op(longer_us, looks_at_host), Gate()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DITRON_POLICY", policy)
        patch.setattr(gate_module, "self_check", lambda group, device: None)
        patch.setattr(gate_module, "is_capturing", lambda device: False)
        patch.setattr(cpu_bound_module, "is_capturing", lambda device: False)
        patch.setattr(cpu_bound_module, "_MIN_WINDOWS", min_windows)
        patch.setattr(cpu_bound_module.CpuBound, "age_s", ages_s[dist.get_rank()])
        patch.setattr(torch.cuda, "current_stream", lambda device: stream)
        patch.setattr(gate_module, "log_native", lambda name, reason: lines.append(reason))
        ran = [one.context_for(op, 3) is not None for _ in range(num_calls)]
    logging.getLogger("ditron_train").removeHandler(handler)
    assert ran == sorted(ran, reverse=True)
    return sum(ran), stream.looks, lines


@pytest.mark.parametrize(
    "periods, longer_us, is_native",
    [
        ((1, 1), 60.0, True),  # late at each call
        ((0, 0), 1000.0, False),  # never late
        ((0, 2), 40.0, True),  # one rank is late at every second call, so at all of them what it takes longer counts
        ((4, 4), 15.0, False),  # at three calls of four it loses 15 us, at the others it gains 50
        ((4, 4), 18.0, True),
        ((2, 2), 1.0, True),  # at all
    ],
)
def test_a_cpu_bound_turns_the_answer_on_all_ranks(periods, longer_us, is_native):
    for ran, looks, lines in run_workers(2, _calls, periods, longer_us):
        assert ran == (44 if is_native else 100) and looks == 32
        assert [f"takes {longer_us:.0f} us longer for it; the device gains 50 us" in line for line in lines] == [
            True
        ] * is_native


@pytest.mark.parametrize(
    "ages_s, warm_up, last, num_looks",
    [
        ((1e9, 1e9), 32, None, 96),  # late in the first window, not in the second, of 64 looks
        ((1e9, 1e9), 96, None, 224),
        ((1e9, 1e9), sys.maxsize, 236, 224),  # late in three, and nobody is in the first steps any more
        ((0.0, 1e9), sys.maxsize, 236, 224),  # one rank knows
        ((0.0, 0.0), sys.maxsize, 4076, 4064),
    ],
)
def test_a_cpu_bound_of_the_first_steps_is_looked_at_again(ages_s, warm_up, last, num_looks):
    num_calls = 4100
    for ran, looks, lines in run_workers(2, _calls, (1, 1), 60.0, "strict", True, num_calls, 3, ages_s, warm_up):
        assert (ran, looks) == (num_calls if last is None else last, num_looks)
        assert len(lines) == (last is not None)


@pytest.mark.parametrize(
    "longer_us, policy, looks_at_host",
    [(0.0, "strict", True), (1000.0, "bits", True), (1000.0, "force", True), (1000.0, "strict", False)],
)
def test_nobody_looks_where_it_would_change_nothing(longer_us, policy, looks_at_host):
    assert run_workers(2, _calls, (1, 1), longer_us, policy, looks_at_host) == [(100, 0, [])] * 2


def test_backwards_are_looked_at_too_and_captures_are_not(monkeypatch):
    stream, is_captured = _Stream(1), False
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(cpu_bound_module, "is_capturing", lambda device: is_captured)
    watch = cpu_bound_of(Entry(True, "", True, 150.0, 100.0, 400.0), _Device())
    for _ in range(12):
        watch.count()
    watch.look()
    assert stream.looks == 0, "the first calls compile and compare"
    for _ in range(10):
        watch.count()
        stream._period = 0
        watch.look()
        stream._period = 1
    assert stream.looks == 20 and not watch.is_over
    is_captured = True
    watch.count()
    watch.look()
    is_captured = False
    with torch.no_grad():
        watch.count()  # of an evaluation
    assert stream.looks == 20 and watch.lateness() == 0.5
    watch.count()
    watch.look()
    assert stream.looks == 20, "what was said holds"
    assert watch.unsupported_reason(0.03) is None
    assert "CPU-bound at 15% of its calls (nothing was queued at 5%)" in watch.unsupported_reason(0.05)


def test_the_op_at_which_lateness_shows_speaks_for_the_others(monkeypatch):
    """Behind attention nothing is ever seen to be late, behind a norm it is."""
    stream = _Stream(0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(cpu_bound_module, "is_capturing", lambda device: False)
    device = _Device()
    norm, attention = (cpu_bound_of(Entry(True, "", True, 150.0, 100.0, 400.0), device) for _ in range(2))
    elsewhere = cpu_bound_of(Entry(True, "", True, 150.0, 100.0, 400.0), _Device())
    for call in range(44):
        for watch, period in ((norm, 2), (attention, 0), (elsewhere, 1)):
            stream._period, stream.looks = period, call
            watch.count()
    assert norm.lateness() == attention.lateness() == 0.5 and elsewhere.lateness() == 1.0
    assert norm.looks_on(0.0) and attention.lateness() == 0.5, "its last window speaks, too"
    del norm
    assert attention.lateness() == 0.5, "and behind its decision"
    assert attention.looks_on(0.0) and attention.lateness() == 0.0, "but not for one that is past its first calls"
    assert 0.0 < attention.age_s < 60.0
    early = cpu_bound_of(Entry(True, "", True, 150.0, 100.0, 400.0), device)
    assert early.lateness() == 0.5
    monkeypatch.setattr(cpu_bound_module, "_RECENT_S", 0.0)
    assert early.lateness() == 0.0, "nor for long"


def test_a_look_up_counts_but_never_ends_a_window(monkeypatch):
    """So all ranks come to the exchange at the end of one by ``answer_for``."""
    stream = _Stream(0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(cpu_bound_module, "is_capturing", lambda device: False)
    watch, one = cpu_bound_of(Entry(True, "", True, 150.0, 100.0, 400.0), _Device()), Gate()
    answer = one._answers[("tp test", None)] = gate_module.Answer("context", cpu_bound=watch)
    assert [one.recall(("tp test", None)) for _ in range(43)] == [answer] * 43 and not watch.is_over
    with torch.no_grad():
        assert one.recall(("tp test", None)) is answer
    assert [one.recall(("tp test", None)) for _ in range(3)] == [None] * 3 and not watch.is_over
    watch.count()
    assert watch.is_over and stream.looks == 32


@pytest.mark.parametrize(
    "entry, device",
    [
        (Entry(True, "", True, None, None), _Device()),
        (Entry(True, "", True, 150.0, 100.0, 0.0), _Device()),
        (Entry(True, "", True, 150.0, 100.0, 400.0), types.SimpleNamespace(type="cpu")),
    ],
)
def test_no_look_without_times_or_without_a_gpu(entry, device):
    assert cpu_bound_of(entry, device) is None
