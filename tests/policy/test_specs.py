"""Every op is declared once: an op that is declared for this test is there in every tool, and every declared op keeps
what `Op` says."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from triton.runtime.errors import OutOfResources

sys.path.insert(0, str(Path(__file__).parent))
from bodies_held import held_and_said  # noqa: E402
from bodies_specs import (  # noqa: E402
    DoubledGather,
    ask_failing_gate,
    ask_gate,
    ask_gate_of_another_version,
    asked_and_recorded,
    bad_calls_are_refused,
    doctor_names_the_op,
    fail_during_an_exchange,
    names_of_cases,
    run_tool,
    run_tool_of_room,
    same_bits,
    warnings_of_another_version,
)

from ditron_train.policy import op as op_module  # noqa: E402
from ditron_train.runtime.errors import NotSupportedError  # noqa: E402
from ditron_train.tools.postmortem.diverge import find_divergence  # noqa: E402
from ditron_train.tools.postmortem.files import read_folder  # noqa: E402
from ditron_train.tools.results import read_results  # noqa: E402
from tests.support.processes import run_workers, run_workers_once  # noqa: E402

SPECS = ["tp doubled_gather", *names_of_cases()]
#: Bytes of a message; gradients that their parameters have; what Megatron's dispatchers are called with.
ANY_SHAPE = (
    "pp send_recv",
    "muon step",
    "adam whole step",
    "ep dispatch",
    "ep combine",
    "ep flex_dispatch",
    "ep flex_combine",
)
TABLES_BYTES = 1 << 14  # what ops need whatever their sizes
QUICK = ("--repetitions", "1")
IN_A_JOB = {"DITRON_TEST_RAISES": ""}


def test_the_gate_decides_about_it_once_a_shape() -> None:
    assert run_workers(2, ask_gate) == [[True] * 4] * 2


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), OutOfResources(229376, 101376, "shared memory")]
)
def test_a_gpu_on_which_it_cannot_be_tried_is_native(error: Exception) -> None:
    words = f"the fused path cannot run here: {type(error).__name__}: {error}"
    assert run_workers(2, ask_failing_gate, error) == [words] * 2


@pytest.mark.parametrize("policy, asks", [("strict", True), ("fast", True), ("bits", True), ("force", False)])
def test_memory_is_asked_for_in_front_of_what_a_comparison_makes(monkeypatch, policy: str, asks: bool) -> None:
    """A rank that ran out of memory while it makes data would leave the others in a collective."""
    asked: list[object] = []
    op = DoubledGather()

    def check_memory(num_bytes: int, device: torch.device, group: object) -> None:
        asked.append((num_bytes, device.type, group))
        raise NotSupportedError("a rank has too little")

    monkeypatch.setenv("DITRON_POLICY", policy)
    monkeypatch.setattr(op_module, "check_memory", check_memory)
    for name, value in (("group", "a group"), ("device", torch.device("cuda", 0)), ("peak_bytes", 77)):
        monkeypatch.setattr(op, name, lambda call, value=value: value, raising=False)
    monkeypatch.setattr(op, "trial", lambda call, context: pytest.fail("it made data"), raising=False)
    with pytest.raises(NotSupportedError if asks else pytest.fail.Exception):
        op.decide(None, None)
    assert asked == [(77, "cuda", "a group")] * asks


def test_code_for_another_version_of_a_library_is_native() -> None:
    """In a job, on all ranks; under ``force`` it is an error."""
    for reason in run_workers(2, ask_gate_of_another_version, (0, 1), env=IN_A_JOB):
        assert reason is not None and reason.startswith("the fused path cannot run here: TypeError: "), reason
    with pytest.raises(Exception, match="a_new_name"):
        run_workers(2, ask_gate_of_another_version, (0, 1), env={**IN_A_JOB, "DITRON_POLICY": "force"})


def test_an_unforeseen_error_is_raised_in_tests() -> None:
    """Else a fault of this package would pass as stock Megatron."""
    with pytest.raises(TypeError, match="a_new_name"):
        run_workers(2, ask_gate_of_another_version, (0, 1))


def test_a_job_warns_of_an_unforeseen_error_once() -> None:
    """On rank 0, with the op, the error's type and its text."""
    (line,), others = run_workers(2, warnings_of_another_version, env=IN_A_JOB)
    assert line.startswith("tp other_version runs natively, ") and "TypeError: " in line and "a_new_name" in line
    assert others == []


def test_code_that_fails_on_one_rank_is_its_error(tmp_path: Path) -> None:
    """It asks the others whether they have met it, too; they wait for it elsewhere, and never come."""
    env = {**IN_A_JOB, "DITRON_TIMEOUT_S": "3", "DITRON_POSTMORTEM": str(tmp_path)}
    found = run_workers_once(2, ask_gate_of_another_version, (0,), env=env)
    assert "rank 1 waited 3 s for rank 0" in found[1].traceback, found
    assert type(found[0].error).__name__ == "TypeError" and "a_new_name" in found[0].traceback, found
    divergence = find_divergence(read_folder(tmp_path))
    assert divergence is not None and (divergence.kind, divergence.ranks) == ("raised", (0,)), divergence


def test_an_error_of_some_ranks_is_raised_if_the_others_exchange_something_else() -> None:
    """Otherwise this rank would go on natively, and the others by the fused path."""
    assert run_workers(3, fail_during_an_exchange, (0, 2), env=IN_A_JOB) == [
        "raised: of one rank",
        "",
        "raised: of one rank",
    ]
    (words,) = set(run_workers(3, fail_during_an_exchange, (0, 1, 2), env=IN_A_JOB))
    assert words == "the fused path cannot run here: TypeError: of one rank"


def test_what_all_ranks_have_met_is_in_no_record(tmp_path: Path) -> None:
    found = run_workers_once(2, asked_and_recorded, (0, 1), env={**IN_A_JOB, "DITRON_POSTMORTEM": str(tmp_path)})
    assert [outcome.value for outcome in found] == [("running", None)] * 2, found


@pytest.mark.parametrize("name", [name for name in SPECS if name not in ANY_SHAPE])
def test_comparing_it_holds_no_more_memory_than_it_says(name: str) -> None:
    """Where a rank has less, none compares: one that ran out of memory would leave the others in a collective."""
    for of_rank in run_workers(2, held_and_said, name):
        assert not [one for one in of_rank if one[1] > one[2] + TABLES_BYTES], of_rank


def test_bench_measures_it(tmp_path: Path) -> None:
    words = ("--part", "doubled_gather", *QUICK, "--warmup", "0", "--output", str(tmp_path))
    assert run_workers(2, run_tool, "bench.tp", *words) == [0, 0]
    _, rows = read_results(next(tmp_path.glob("*/tp.json")))
    assert [(row.op, row.model, row.bitwise_equal) for row in rows] == [("doubled_gather", "test", True)]


def _verify_wrong(*words: str) -> int:
    return run_tool("verify.verifier", *words, wrong=1.0)


def test_verify_compares_it(tmp_path: Path) -> None:
    words = ("--packages", "tp", "--row", "8", "8", "8")
    model = "-- --hidden-size 16 --ffn-hidden-size 32 --num-attention-heads 2 --seq-length 16 --swiglu".split()
    output = ("--output", str(tmp_path))
    assert run_workers(2, run_tool, "verify.verifier", *words, *QUICK, *output, *model) == [0, 0]
    _, rows = read_results(next(tmp_path.glob("*/verify.json")))
    assert "doubled_gather" in {row.op for row in rows} and all(row.bitwise_equal for row in rows)
    assert run_workers(2, _verify_wrong, *words, *QUICK, *model) == [1, 1]


def test_tune_tries_its_candidates(tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    words = ("--op", "doubled_gather", *QUICK, "--rounds", "1", "--output", str(path))
    assert run_workers(2, run_tool, "tune.tuner", *words) == [0, 0]
    (entry,) = json.loads(path.read_text())["choices"]["2 ranks"]["doubled_gather"].values()
    assert entry["choice"] in ("twice", "plus") and entry["tried"] == 2 and entry["ditron_us"] > 0


def test_trace_records_it(tmp_path: Path) -> None:
    words = ("--op", "doubled_gather", "--output", str(tmp_path))
    assert run_workers(2, run_tool, "trace.tracer", *words) == [0, 0]
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == [f"doubled_gather{end}" for end in ("-fused.json", "-native.json")]


def test_doctor_names_it() -> None:
    assert run_workers(1, doctor_names_the_op) == [True]


@pytest.mark.parametrize("room", ["sp", "ep", "pp", "muon"])
def test_the_bench_of_its_room_measures_it(room: str, tmp_path: Path) -> None:
    words = ("--part", "doubled_gather", *QUICK, "--warmup", "0", "--output", str(tmp_path))
    assert run_workers(2, run_tool_of_room, room, *words) == [0, 0]
    _, rows = read_results(next(tmp_path.glob(f"*/{room}.json")))
    assert [(row.op, row.bitwise_equal) for row in rows] == [("doubled_gather", True)]


@pytest.mark.parametrize("name", SPECS)
def test_both_paths_of_an_op_have_the_same_bits(name: str) -> None:
    assert run_workers(2, same_bits, name) == [True, True]


@pytest.mark.parametrize("name", [name for name in SPECS if name not in ANY_SHAPE])
def test_bad_calls_are_the_same_error_on_every_rank(name: str) -> None:
    assert run_workers(2, bad_calls_are_refused, name) == [True, True]
