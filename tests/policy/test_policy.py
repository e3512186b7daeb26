"""Decisions: wrong bits and slow variants fall back, ranks agree, plans are kept, refused and written."""

import contextlib
import itertools
import json
import logging
import os
import random
import time
import weakref
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from ditron_train.policy import check_plan, decide, forget_plans, switches
from ditron_train.policy import plan as plan_module
from ditron_train.policy import probe as probe_module
from ditron_train.policy.decide import _judge, _suits
from ditron_train.policy.plan import Entry, Plan, fingerprint, load_plan
from ditron_train.policy.probe import Observation, same_bits
from ditron_train.runtime.errors import NotSupportedError, SettingError
from tests.support.processes import run_workers


@pytest.mark.parametrize(
    "mode, seen, expected, words",
    [
        ("strict", Observation(True, 100.0, 80.0), True, "faster (80 us, native 100 us)"),
        ("strict", Observation(True, 100.0, 120.0), False, "not faster (120 us, native 100 us)"),
        ("strict", Observation(True, 100.0, 100.0), False, "not faster"),
        (
            "strict",
            Observation(True, 100.0, 80.0, False),
            False,
            "by more than its times differ (80 us, native 100 us)",
        ),
        ("strict", Observation(False, 100.0, 50.0), False, "bits would not be"),
        ("bits", Observation(True, None, None), True, "bits are those"),
        ("bits", Observation(False, None, None), False, "bits would not be"),
        ("fast", Observation(False, 100.0, 50.0), True, "faster"),
        ("fast", Observation(True, 100.0, 150.0), False, "not faster"),
        ("strict", Observation(None, None, None), True, "interpreter"),
    ],
)
def test_judgement(mode, seen, expected, words):
    decision = _judge(mode, seen)
    assert decision.use_ditron is expected and words in decision.reason


class _FakeDevice:
    """A device that is measured like a GPU while its tensors are on the CPU."""

    type = "cuda"


def _observe(wrong_on, slow_on, also_wrong_on=None, times=None, needs_bits=True, host_counts=False, idle_us=80.0):
    """What a probe says where one rank computes a wrong bit, of its own data or of other data, and where one rank is
    slow; ``times``: of each turn, over and over. The host takes 80 us longer for the fused path, and a device that is
    idle ``idle_us``."""
    rank = dist.get_rank()
    exact = torch.arange(6.0)
    wrong = exact.clone()
    wrong[3] = torch.nextafter(wrong[3], torch.tensor(9.0))
    fused = (wrong if rank == wrong_on else exact,)
    native = (exact,)
    extra_cases = (lambda: (exact,), lambda: (wrong if rank == also_wrong_on else exact,))
    names = {id(native): "native", id(fused): "fused"}
    fused_us = 150.0 if rank == slow_on else 50.0
    turns = times or {"native": [[90.0, 91.0], [109.0, 120.0]], "fused": [[fused_us, fused_us], [fused_us, 900.0]]}
    times = {name: itertools.cycle(one) for name, one in turns.items()}
    saved = probe_module.times_us, torch.cuda.synchronize, torch.tensor

    def times_us(run, device, group, launches_us, is_ahead):
        name = names[id(run())]
        launches_us.append({"native": 20.0, "fused": 100.0}[name])
        return [one + idle_us * (name == "fused" and not is_ahead) for one in next(times[name])]

    probe_module.times_us = times_us
    torch.cuda.synchronize = lambda device=None: None
    torch.tensor = lambda data, device=None, **options: saved[2](data, **options)
    try:
        options = dict(group=dist.group.WORLD, device=_FakeDevice(), extra_cases=[extra_cases], needs_bits=needs_bits)
        options["host_counts"] = host_counts
        return probe_module.probe(lambda: native, lambda: fused, **options)
    finally:
        probe_module.times_us, torch.cuda.synchronize, torch.tensor = saved


def test_one_wrong_bit_or_one_slow_rank_decides_for_all():
    longer = 80.0  # of the host
    assert run_workers(2, _observe, None, None) == [Observation(True, 100.0, 50.0, True, longer)] * 2
    once = [Observation(False, 100.0, 50.0, False, longer)] * 2  # not asked once more
    assert run_workers(2, _observe, 1, None) == once
    assert run_workers(2, _observe, None, 0) == [Observation(True, 100.0, 150.0, True, longer)] * 2
    assert run_workers(2, _observe, None, None, 1) == once


def test_the_host_counts_where_it_is_not_ahead():
    """What is faster where the host is ahead has to be faster on an idle device, too, and the other way round."""
    seen = run_workers(2, _observe, None, None, None, None, True, True)
    assert seen == [Observation(True, 100.0, 130.0)] * 2
    assert not _judge("strict", seen[0]).use_ditron
    slow = run_workers(2, _observe, None, 0, None, None, True, True)
    assert slow == [Observation(True, 100.0, 150.0)] * 2
    quick = {"native": [[110.0, 111.0]], "fused": [[10.0, 11.0]]}
    assert run_workers(2, _observe, None, None, None, quick, True, True) == [Observation(True, 110.5, 90.5)] * 2
    late = {"native": [[110.0, 111.0]], "fused": [[150.0, 151.0]]}
    for host_counts, fused_us in ((True, 150.5), ("alone", 230.5)):
        seen = run_workers(2, _observe, None, None, None, late, True, host_counts)
        assert seen == [Observation(True, 110.5, fused_us)] * 2
    # What gains on an idle device must not lose where the host is ahead.
    for times, fused_us in ((late, 150.5), ({**late, "fused": [[100.0, 101.0]]}, 20.5)):
        seen = run_workers(2, _observe, None, None, None, times, True, "alone", -80.0)
        assert seen == [Observation(True, 110.5, fused_us)] * 2


class _CachingAllocator:
    """A GPU of which torch holds 24 MiB in all: 16 are a job's, in a segment of 20; the other 4 are a segment that
    can be given back."""

    def __init__(self, free_mib: int) -> None:
        self.free_mib, self.unused_segments_mib, self.reserved_mib = free_mib, 4, 24

    def empty_cache(self) -> None:
        self.free_mib += self.unused_segments_mib
        self.reserved_mib -= self.unused_segments_mib
        self.unused_segments_mib = 0

    def mock(self, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(torch.cuda, "empty_cache", self.empty_cache)
        patch.setattr(torch.cuda, "mem_get_info", lambda device: (self.free_mib << 20, 80 << 30))
        patch.setattr(torch.cuda, "memory_reserved", lambda device: self.reserved_mib << 20)
        patch.setattr(torch.cuda, "memory_allocated", lambda device: 16 << 20)


def _check_memory(free_mib, needed_mib):
    """What a rank says of a GPU on which so much is free, and 4 MiB more that torch can give back."""
    with pytest.MonkeyPatch.context() as patch:  # this process runs other tests' workers, too
        _CachingAllocator(free_mib[dist.get_rank()]).mock(patch)
        try:
            probe_module.check_memory(needed_mib[dist.get_rank()] << 20, torch.device("cpu"), dist.group.WORLD)
        except NotSupportedError as error:
            return str(error)
    return None


@pytest.mark.parametrize(
    "free_mib, needed_mib, missing",
    [
        ((100, 100), (104, 104), None),
        ((100, 60), (100, 100), 36),
        ((100, 100), (50, 120), 16),
        ((100, 100), (104, 106), 2),  # 4 MiB of a segment in use are free, too, but serve nothing large
    ],
)
def test_where_one_rank_has_too_little_memory_no_rank_compares(free_mib, needed_mib, missing):
    words = missing and f"a rank has {missing} MiB of memory too few to compare"
    assert run_workers(2, _check_memory, free_mib, needed_mib) == [words] * 2


class _Event:
    """What a GPU records, of calls that take it 1 ms."""

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        pass

    def elapsed_time(self, end):
        return 1.0


def test_times_of_the_device_and_of_launches(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    for name in ("_sleep", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda *arguments: None)
    monkeypatch.setattr(torch, "zeros", lambda *size, device: None)
    monkeypatch.setattr(probe_module.dist, "all_reduce", lambda *tensors, group: None)
    launches_us: list[float] = []
    times = probe_module.times_us(lambda: time.sleep(0.002), _FakeDevice(), None, launches_us)
    assert set(times) == {1000.0} and len(times) == len(launches_us)
    assert all(2000.0 <= one < 500_000.0 for one in launches_us)


@pytest.mark.parametrize("is_ahead", [True, False])
def test_the_device_is_held_or_idle_where_a_call_begins(monkeypatch, is_ahead):
    logged: list[str] = []
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(_Event, "record", lambda self: logged.append("event"))
    for name in ("_sleep", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda *arguments, name=name: logged.append(name))
    monkeypatch.setattr(torch, "zeros", lambda *size, device: None)
    monkeypatch.setattr(probe_module.dist, "all_reduce", lambda *tensors, group: logged.append("barrier"))
    calls = len(probe_module.times_us(lambda: logged.append("run"), _FakeDevice(), None, None, is_ahead))
    begun = ["_sleep", "barrier"] if is_ahead else ["barrier", "synchronize"]
    assert logged == [*begun, "event", "run", "event", "synchronize"] * (calls + probe_module._WARM_UPS)


# Of rounds of two turns; natively 20 to 40 us in all of them.
_NATIVE = [[24.0, 40.0], [26.0, 30.0], [22.0, 36.0], [30.0, 20.0]]
_NOISE = {
    "luck of the first round": ([[22.0, 23.0], [25.0, 22.0], *([[30.0, 45.0], [25.0, 28.0]] * 3)], False),
    "a little faster in every round": ([[22.0, 38.0], [24.0, 28.0], [20.0, 34.0], [28.0, 19.0]], True),
    "a little faster in every second round": ([[22.0, 38.0], [24.0, 28.0], [24.0, 38.0], [32.0, 22.0]], False),
    "a little slower in every round": ([[26.0, 42.0], [28.0, 32.0], [24.0, 38.0], [32.0, 22.0]], False),
    "slower": ([[44.0, 60.0], [46.0, 70.0]], False),
    "faster beyond the spread": ([[12.0, 21.0], [14.0, 18.0], [10.0, 26.0], [19.0, 12.0]], True),
    "faster, with a call that was late": ([[12.0, 13.0], [14.0, 90.0]], True),
}


@pytest.mark.parametrize("name", _NOISE)
def test_native_stays_where_times_differ_by_no_more_than_calls_do(name):
    fused, is_faster = _NOISE[name]
    seen = run_workers(2, _observe, None, None, None, {"native": _NATIVE, "fused": fused})
    assert [_judge("strict", one).use_ditron for one in seen] == [is_faster] * 2
    assert seen[0].is_clear is (is_faster or name == "slower")


def test_ratios_of_rounds_by_chance():
    """Of series in which nothing is faster one of fifty looks so; of those with 1.8 % to gain, on a GPU whose clock
    moves by 1.1 % from round to round, nearly all do in twelve rounds, and half in six."""
    chance = random.Random(7)
    found = {}
    for gain in (0.0, 0.018):
        series = [[1 - gain + chance.gauss(0.0, 0.011) for _ in range(12)] for _ in range(2000)]
        for most in (6, 12):
            found[gain, most] = sum(
                any(probe_module._faster_by_round(one[:rounds]) for rounds in range(1, most + 1)) for one in series
            )
    assert 5 <= found[0.0, 6] < found[0.0, 12] <= 60
    assert found[0.018, 6] < 1400 and found[0.018, 12] > 1900


@pytest.mark.parametrize("ratio, of_call_us, rounds", [(0.99, 30.0, 12), (1.01, 30.0, 6), (0.99, 30_000.0, 6)])
def test_more_rounds_where_fused_seems_faster_and_calls_are_short(monkeypatch, ratio, of_call_us, rounds):
    """Of rounds that differ by more than the two do, and never say anything for sure."""
    asked = []

    def times_us(run, device, group, launches_us, is_ahead):
        asked.append(run)
        swing = 0.7 if (len(asked) - 1) // 4 % 2 else 1.3
        return [of_call_us * swing * spread * (ratio if run == "fused" else 1.0) for spread in (0.9, 1.0, 1.1)]

    monkeypatch.setattr(probe_module, "times_us", times_us)
    monkeypatch.setattr(probe_module, "_most_of_ranks", lambda mine, device, group: list(mine))
    monkeypatch.setattr(probe_module, "_faster_by_round", lambda ratios: False)
    equal, native_us, fused_us, is_clear, _ = probe_module._compared_us(
        "native", "fused", None, None, True, True, True
    )
    assert equal and not is_clear and (fused_us < native_us) is (ratio < 1) and len(asked) == 4 * rounds


def test_fast_asks_as_often_where_bits_differ():
    """Of times that are apart by the last round alone: the first has late calls on both sides."""
    fused = [[12.0, 90.0], [14.0, 80.0], *([[10.0, 12.0]] * 6)]
    times = {"native": _NATIVE, "fused": fused}
    once, often = (run_workers(2, _observe, 1, None, None, times, needs)[0] for needs in (True, False))
    assert not once.bits_equal and not _judge("fast", once).use_ditron
    assert not often.bits_equal and _judge("fast", often).use_ditron


def test_equal_bits_of_a_jobs_data():
    plain, nan = torch.tensor([1.0, 2.0]), torch.tensor([1.0, float("nan")])
    assert same_bits([plain, nan], [plain.clone(), nan.clone()])
    assert not same_bits([nan], [plain]) and not same_bits([nan], [nan.flip(0)])
    assert not same_bits([plain], [plain, plain]) and not same_bits([plain], [plain[:1]])


def _never():
    raise AssertionError("must not run")


def _decide_with_plan(folder, mode, broken_rank):
    """Returns the decision and what of the fused path ran; the plan of `broken_rank` says the opposite of the
    others'."""
    rank, calls = dist.get_rank(), []
    path = os.path.join(folder, "plan.json")
    os.environ.update(DITRON_PLAN=path, DITRON_POLICY=mode)
    forget_plans()
    try:
        check_plan()
        dist.barrier()
        if rank == broken_rank:
            from ditron_train.policy.decide import _plan

            for key, entry in _plan().entries.items():
                _plan().entries[key] = Entry(not entry.use_ditron, "tampered", None, None, None)
        decision = decide(
            "tp op 1x2",
            _never,
            lambda: calls.append("fused") or [],
            group=dist.group.WORLD,
            device=torch.device("cpu"),
            extra_cases=[(_never, lambda: calls.append("also") or [])],
        )
        dist.barrier()
        return decision, calls
    finally:
        del os.environ["DITRON_PLAN"], os.environ["DITRON_POLICY"]
        forget_plans()


def test_plan_is_written_read_and_overruled_where_ranks_disagree(tmp_path):
    path = tmp_path / "plan.json"
    first = run_workers(2, _decide_with_plan, str(tmp_path), "strict", None)
    content = json.loads(path.read_text())
    assert content["made_with"]["torch"] == torch.__version__
    assert list(content["decisions"]) == ["tp op 1x2 on 2 ranks (strict)"]
    assert [decision.use_ditron for decision, _ in first] == [True, True]

    content["decisions"]["tp op 1x2 on 2 ranks (strict)"].update(use_ditron=False, reason="from the plan")
    path.write_text(json.dumps(content))
    second = run_workers(2, _decide_with_plan, str(tmp_path), "strict", None)
    assert all((decision.reason, calls) == ("from the plan", []) for decision, calls in second)
    third = run_workers(2, _decide_with_plan, str(tmp_path), "strict", 1)
    assert all("interpreter" in decision.reason and calls == ["fused"] for decision, calls in third)
    content["decisions"]["tp op 1x2 on 2 ranks (strict)"].update(use_ditron=True)
    path.write_text(json.dumps(content))
    fourth = run_workers(2, _decide_with_plan, str(tmp_path), "strict", None)
    assert all((decision.reason, calls) == ("from the plan", ["fused", "also"]) for decision, calls in fourth)


def test_a_decision_is_of_the_policy_that_it_was_made_under(tmp_path):
    """A path that ``fast`` accepted may have other bits: ``bits`` decides again, and adds its decision to the file."""
    path = tmp_path / "plan.json"
    run_workers(2, _decide_with_plan, str(tmp_path), "fast", None)
    content = json.loads(path.read_text())
    content["decisions"]["tp op 1x2 on 2 ranks (fast)"].update(reason="from the plan")
    path.write_text(json.dumps(content))
    for decision, _ in run_workers(2, _decide_with_plan, str(tmp_path), "bits", None):
        assert decision.reason != "from the plan"
    assert list(json.loads(path.read_text())["decisions"]) == [f"tp op 1x2 on 2 ranks ({m})" for m in ("bits", "fast")]


def _refused(folder):
    try:
        _decide_with_plan(folder, "strict", None)
    except SettingError as error:
        return str(error)
    return "accepted"


def test_plan_of_other_groups_is_refused_on_every_rank(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # as in the workers: a plan depends on it
    path = tmp_path / "plan.json"
    entry = dict(use_ditron=True, reason="", bits_equal=True, native_us=2.0, ditron_us=1.0)
    decisions = {"tp op 1x2 on 8 ranks (strict)": entry}
    path.write_text(json.dumps({"format": "ditron_train plan 3", "made_with": fingerprint(), "decisions": decisions}))
    assert all("on 8 ranks, here it is 2 ranks" in message for message in run_workers(2, _refused, str(tmp_path)))
    other = {
        "tp another op 1x2 on 2 ranks, ring (strict)": entry
    }  # all that a job decided that was ended in its first step
    path.write_text(json.dumps({"format": "ditron_train plan 3", "made_with": fingerprint(), "decisions": other}))
    assert run_workers(2, _refused, str(tmp_path)) == ["accepted"] * 2
    path.unlink()
    decisions["sp op 1x2 on 8 ranks (strict)"] = decisions["tp op 3x4 on 2 ranks (strict)"] = entry
    path.write_text(json.dumps({"format": "ditron_train plan 3", "made_with": fingerprint(), "decisions": decisions}))
    assert run_workers(2, _refused, str(tmp_path)) == ["accepted"] * 2


def test_plan_of_other_groups_is_refused_from_the_command_line_alone(tmp_path, monkeypatch):
    path = tmp_path / "plan.json"
    entry = dict(use_ditron=True, reason="", bits_equal=True, native_us=2.0, ditron_us=1.0)
    decisions = {"tp op 1x2 on 8 ranks, ring (strict)": entry, "tp op 1x2 on 4 ranks (bits)": entry}
    path.write_text(json.dumps({"format": "ditron_train plan 3", "made_with": fingerprint(), "decisions": decisions}))
    monkeypatch.setenv("DITRON_PLAN", str(path))
    monkeypatch.setenv("DITRON_POLICY", "strict")
    forget_plans()
    check_plan({"tp": 8, "sp": 4})
    for sizes in ({"tp": 4}, {"tp": 80}):
        with pytest.raises(SettingError, match=r"holds decisions of tp on 8 ranks, ring, here it is \d+ ranks"):
            check_plan(sizes)
    monkeypatch.setenv("DITRON_POLICY", "bits")
    check_plan({"tp": 4})
    forget_plans()


@contextlib.contextmanager
def _switched(name, batch_invariant):
    """One of the process's switches, as a job may set it behind its arguments."""
    matmul = torch.backends.cuda.matmul
    if name == "deterministic":
        torch.use_deterministic_algorithms(True)
    elif name == "batch invariant":
        batch_invariant[0] = True
    elif name is not None:
        before = getattr(matmul, name)
        setattr(matmul, name, not before)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        batch_invariant[0] = False
        if name is not None and name.startswith("allow"):
            setattr(matmul, name, before)


SWITCHES = {
    None: "(strict)", "batch invariant": "(strict; batch invariant)", "deterministic": "(strict; deterministic)",
    "allow_bf16_reduced_precision_reduction": "(strict; bf16 sums in full)",
    "allow_fp16_reduced_precision_reduction": "(strict; fp16 sums in full)",
    "allow_fp16_accumulation": "(strict; fp16 accumulation)",
}  # fmt: skip


def _decide_with_switches(folder):
    """The reasons of decisions with no switch and with each of them: made, and then from a plan whose reasons are its
    keys."""
    from ditron_train.policy import add_switch
    from ditron_train.policy.decide import _plan

    os.environ["DITRON_PLAN"], batch_invariant, reasons = os.path.join(folder, "plan.json"), [False], []
    add_switch("batch invariant", lambda: batch_invariant[0])
    forget_plans()
    try:
        for _ in range(2):
            for name in SWITCHES:
                with _switched(name, batch_invariant):
                    given = dict(group=dist.group.WORLD, device=torch.device("cpu"))
                    reasons.append(decide("tp op 1x2", _never, lambda: [], **given).reason)
            entries = _plan().entries
            entries.update({key: Entry(True, key, None, None, None) for key in entries})
    finally:
        del os.environ["DITRON_PLAN"]
        forget_plans()
    return reasons


def test_a_decision_is_of_the_switches_that_it_was_made_under(tmp_path):
    made = ["in the interpreter nothing is compared"] * len(SWITCHES)
    kept = [f"tp op 1x2 on 2 ranks {words}" for words in SWITCHES.values()]
    assert run_workers(2, _decide_with_switches, str(tmp_path)) == [made + kept] * 2
    assert set(json.loads((tmp_path / "plan.json").read_text())["decisions"]) == set(kept)


def test_another_blas_is_a_switch(monkeypatch):
    for name, expected in (("Default", ()), ("Cublas", ()), ("Cublaslt", ("other blas",))):
        monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", lambda: SimpleNamespace(name=name))  # noqa: B023
        assert switches() == expected


@pytest.mark.parametrize(
    "variable", ["CUBLASLT_WORKSPACE_SIZE", "NVTE_EXT_MARGIN_SM", "NVTE_USE_CUTLASS_GROUPED_GEMM", "NCCL_MAX_CTAS"]
)
def test_a_plan_is_of_one_environment(tmp_path, monkeypatch, variable):
    monkeypatch.delenv(variable, raising=False)
    path = tmp_path / "plan.json"
    Plan(path, {}).add("pp send_recv 64 bytes on 2 ranks (strict)", Entry(True, "faster", True, 2.0, 1.0))
    monkeypatch.setenv(variable, "4")
    with pytest.raises(SettingError, match=f"{variable} was absent, is 4"):
        load_plan(path)


def test_a_plan_knows_the_environment_that_its_job_began_with(tmp_path, monkeypatch):
    """Megatron deletes and sets variables of NCCL's between the start, where a plan is read, and what is added."""
    monkeypatch.setenv("NCCL_COLLNET_ENABLE", "1")
    path = tmp_path / "plan.json"
    plan = load_plan(path)
    plan.add("tp a on 2 ranks (strict)", Entry(True, "faster", True, 2.0, 1.0))
    monkeypatch.delenv("NCCL_COLLNET_ENABLE")
    plan.add("tp b on 2 ranks (strict)", Entry(True, "faster", True, 2.0, 1.0))
    with pytest.raises(SettingError, match="NCCL_COLLNET_ENABLE was 1, is absent"):
        load_plan(path)
    monkeypatch.setenv("NCCL_COLLNET_ENABLE", "1")  # the next start
    assert len(load_plan(path).entries) == 2


@pytest.mark.parametrize(
    "place, read, suits",
    [
        ("4 ranks", "4 ranks", True),
        ("4 ranks", "4 ranks, ring", True),  # of a layer over nodes, or another dispatcher of the subpackage
        ("4 ranks, ring", "4 ranks", True),
        ("4 ranks, ring", "4 ranks, tree", False),
        ("4 ranks", "8 ranks", False),
        ("4 ranks, ring", "8 ranks, ring", False),
    ],
)
def test_which_groups_a_plan_is_for(place, read, suits):
    assert _suits(place, read) is suits


def test_force_runs_fused_once_and_is_not_planned(tmp_path):
    found = run_workers(2, _decide_with_plan, str(tmp_path), "force", None)
    forced = (True, "forced", ["fused", "also"])
    assert all((decision.use_ditron, decision.reason, calls) == forced for decision, calls in found)
    assert not (tmp_path / "plan.json").exists()


@pytest.mark.parametrize(
    "text, words",
    [
        ("not json", "no JSON"),
        ("[" * 100_000, "no JSON"),
        ("[]", "is not a plan of this version"),
        ('{"format": "something else"}', "is not a plan of this version"),
        ('{"format": "ditron_train plan 3", "made_with": {"torch": "1.0"}, "decisions": {}}', "stale"),
    ],
)
def test_bad_plans_are_refused(tmp_path, monkeypatch, text, words):
    path = tmp_path / "plan.json"
    path.write_text(text)
    monkeypatch.setenv("DITRON_PLAN", str(path))
    forget_plans()
    with pytest.raises(SettingError, match=words):
        check_plan()


def _decide_for_groups_that_go(folder):
    """Which of the groups before are still held when the next one's decision is there."""
    os.environ["DITRON_PLAN"] = os.path.join(folder, "plan.json")
    forget_plans()
    gone, held = [], []
    try:
        for _ in range(3):
            group = dist.new_group([0, 1])
            decide("tp op 1x2", _never, lambda: [], group=group, device=torch.device("cpu"))
            held.append([number for number, reference in enumerate(gone) if reference() is not None])
            gone.append(weakref.ref(group))
            dist.destroy_process_group(group)
            del group
    finally:
        del os.environ["DITRON_PLAN"]
        forget_plans()
    return held


def test_decisions_by_a_plan_hold_no_group_that_was_destroyed(tmp_path):
    assert run_workers(2, _decide_for_groups_that_go, str(tmp_path)) == [[[], [], []]] * 2


def test_stale_plan_names_what_changed(tmp_path):
    path = tmp_path / "plan.json"
    made_with = {**fingerprint(), "torch": "1.2.3"}
    path.write_text(json.dumps({"format": "ditron_train plan 3", "made_with": made_with, "decisions": {}}))
    with pytest.raises(SettingError, match=f"torch was 1.2.3, is {torch.__version__.split('+')[0]}"):
        load_plan(path)


def test_a_plan_made_with_cuda_bindings_is_not_taken_without_them(tmp_path, monkeypatch):
    """With them cuBLAS multiplies column layers' gradients, else the GEMM that stores to peers: other bits at some
    shapes."""
    path = tmp_path / "plan.json"
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28))
    monkeypatch.setattr(plan_module, "driver_version", lambda: "580")
    for first, other in ((True, False), (False, True)):
        path.unlink(missing_ok=True)
        monkeypatch.setattr(plan_module, "has_driver", lambda has=first: has)
        Plan(path, {}).add("tp op on 2 ranks (strict)", Entry(True, "faster", True, 2.0, 1.0))
        assert len(load_plan(path).entries) == 1
        monkeypatch.setattr(plan_module, "has_driver", lambda has=other: has)
        with pytest.raises(SettingError, match="copy engines was .*cuda-bindings is missing"):
            load_plan(path)


def test_a_plan_is_of_one_way_to_move_data_and_one_tuning_table(tmp_path, monkeypatch):
    path, table = tmp_path / "plan.json", tmp_path / "mine.json"
    table.write_text("{}")
    Plan(path, {}).add("pp send_recv 64 bytes on 2 ranks (strict)", Entry(True, "faster", True, 2.0, 1.0))
    monkeypatch.setenv("DITRON_PP_PATH", "auto")  # as where it is unset
    assert len(load_plan(path).entries) == 1
    for variable, value, words in (
        ("DITRON_PP_PATH", "kernel", "DITRON_PP_PATH was absent, is kernel"),
        ("DITRON_TUNING", "off", "DITRON_TUNING was absent, is off"),
        ("DITRON_TUNING", str(table), "DITRON_TUNING was absent, is table [0-9a-f]{12}"),
    ):
        with monkeypatch.context() as set_here, pytest.raises(SettingError, match=words):
            set_here.setenv(variable, value)
            load_plan(path)
    monkeypatch.setenv("DITRON_TUNING", str(table))
    path.unlink()
    Plan(path, {}).add("pp send_recv 64 bytes on 2 ranks (strict)", Entry(True, "faster", True, 2.0, 1.0))
    assert len(load_plan(path).entries) == 1
    table.write_text("{ }")
    with pytest.raises(SettingError, match="DITRON_TUNING was table .*, is table"):
        load_plan(path)


def test_damaged_decisions_and_unwritable_paths(tmp_path):
    path = tmp_path / "plan.json"
    content = {
        "format": "ditron_train plan 3",
        "made_with": fingerprint(),
        "decisions": {"tp op on 2 ranks (strict)": {"use_ditron": True}},
    }
    path.write_text(json.dumps(content))
    with pytest.raises(SettingError, match="cannot be read"):
        load_plan(path)
    entry = dict(use_ditron=True, reason="", bits_equal=True, native_us=2.0, ditron_us=1.0)
    path.write_text(json.dumps({**content, "decisions": {"xp op on 2 ranks (strict)": entry}}))
    with pytest.raises(SettingError, match="an op that is not known: 'xp op on 2 ranks"):
        load_plan(path)
    for wrong in ({**entry, "use_ditron": "no"}, {**entry, "reason": None}):
        path.write_text(json.dumps({**content, "decisions": {"tp op on 2 ranks (strict)": wrong}}))
        with pytest.raises(SettingError, match="does not say whether to use the fused path"):
            load_plan(path)
    for wrong in ({"native_us": "2"}, {"ditron_us": [1.0]}, {"host_longer_us": None}, {"native_us": True}):
        path.write_text(json.dumps({**content, "decisions": {"tp op on 2 ranks (strict)": {**entry, **wrong}}}))
        with pytest.raises(SettingError, match="holds times that are no numbers"):
            load_plan(path)
    path.write_text(json.dumps({**content, "made_with": None}))
    with pytest.raises(SettingError, match="does not say what it was made with"):
        load_plan(path)
    with pytest.raises(SettingError, match="not a writable folder"):
        load_plan(tmp_path / "missing" / "plan.json")


def test_a_plan_of_no_file_is_refused(tmp_path):
    """A pipe would be waited for for ever; a name may be too long for a file."""
    os.mkfifo(tmp_path / "pipe.json")
    with pytest.raises(SettingError, match="cannot read the plan .*no regular file"):
        load_plan(tmp_path / "pipe.json")
    with pytest.raises(SettingError, match="cannot read the plan .*File name too long"):
        load_plan(tmp_path / ("n" * 256))


def test_a_plan_leaves_nothing_beside_it(tmp_path):
    path = tmp_path / f"{'n' * 250}.json"
    plan = Plan(path, {})
    for key in ("tp a on 2 ranks (strict)", "tp b on 2 ranks (strict)"):
        plan.add(key, Entry(True, "", True, 2.0, 1.0))
    assert list(tmp_path.iterdir()) == [path] and len(load_plan(path).entries) == 2


def test_a_plan_that_cannot_be_added_to_is_said_once(tmp_path, caplog):
    plan = Plan(tmp_path / "missing" / "plan.json", {})
    caplog.set_level("INFO", "ditron_train")
    for key in ("tp a on 2 ranks (strict)", "tp b on 2 ranks (strict)"):
        plan.add(key, Entry(True, "", True, 2.0, 1.0))
    assert len(plan.entries) == 2 and caplog.text.count("is not added to: No such file") == 1


def _lines_of_two_decisions():
    """What is logged where the same op is decided about twice under ``force``."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("ditron_train").addHandler(handler)
    logging.getLogger("ditron_train.policy").setLevel(logging.INFO)  # ``verify`` asks for less
    os.environ["DITRON_POLICY"] = "force"
    for _ in range(2):
        decide("tp an op 8x8", lambda: [], lambda: [], group=dist.group.WORLD, device=torch.device("cpu"))
    os.environ.pop("DITRON_POLICY")
    return lines


def test_what_becomes_fused_is_said_once_on_the_first_rank():
    assert run_workers(2, _lines_of_two_decisions) == [["tp an op 8x8 on 2 ranks (force): fused, forced"], []]


def test_groups_write_into_one_plan(tmp_path):
    path = tmp_path / "plan.json"
    first, last = Plan(path, {}), Plan(path, {})
    first.add("tp qkv on 2 ranks (strict)", Entry(True, "", True, 2.0, 1.0))
    last.add("tp output on 2 ranks (strict)", Entry(False, "", True, 1.0, 2.0))
    assert list(load_plan(path).entries) == ["tp output on 2 ranks (strict)", "tp qkv on 2 ranks (strict)"]
