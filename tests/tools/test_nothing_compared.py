"""Tools that compared nothing fail, and say what was not compared."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch

from ditron_train.tools.bench import pp, tp
from ditron_train.tools.cases.pp import MESSAGES
from ditron_train.tools.nothing_compared import NothingComparedError, require_compared
from ditron_train.tools.session import BenchSession, bench_session
from ditron_train.tools.timing import Timing
from ditron_train.tools.trace.record import record_op
from ditron_train.tools.tune import tuner
from tests.support.processes import run_workers

ROOT = Path(__file__).parents[2]


def test_the_rule() -> None:
    require_compared({}, "nobody asked")
    require_compared({"tp": 1, "ep": 20}, "both ran")
    with pytest.raises(NothingComparedError, match="^nothing was compared: tp, pp: for a reason$"):
        require_compared({"tp": 0, "ep": 20, "pp": 0}, "for a reason")


def _said(function, *given, **named) -> object:
    try:
        return function(*given, **named)
    except NothingComparedError as error:
        return str(error)


def _row(session: BenchSession, equal: bool | None):
    times = dict.fromkeys(("native", "fused"), Timing(1.0, 0.0))
    return session.row("an_op", "forward", "a model", {"m": 1}, times, equal)


def _of_sessions() -> list[object]:
    found: list[object] = []
    for equals, part in (
        ((), None),
        ((None,), None),
        ((None, True), None),
        ((True, False), None),
        ((True,), ["other"]),
    ):
        arguments = argparse.Namespace(repetitions=1, warmup=0, output=None, part=part)
        with bench_session("tp", arguments) as session:
            for equal in equals:
                session.add(_row(session, equal))
            session.num_compared["another_op"] += 0
            found.append((_said(session.finish), len(session.rows)))
    return found


def test_a_benchmark_without_a_compared_row_fails() -> None:
    why = "the log says why it is not measured here"
    nothing = f"nothing was compared: bench tp: {why}"
    named = f"nothing was compared: another_op: {why}"
    assert run_workers(1, _of_sessions) == [[(nothing, 0), (nothing, 0), (0, 1), (1, 2), (named, 1)]]


def _of_layers() -> list[object]:
    """`equal_layer` with a fused path that ran on one rank, on none, and with bits that differ on one rank."""
    from ditron_train.megatron.plugin.fused_calls import FUSED_CALLS

    with bench_session("tp", argparse.Namespace(repetitions=1, warmup=0)) as session:
        one = torch.ones(2)

        def fused(ranks, value=one):
            FUSED_CALLS._counts["tp"] += session.rank in ranks
            FUSED_CALLS._counts["ep"] += 1  # of another feature
            return [value]

        found = [
            session.equal_layer("tp", lambda _, r=ranks: fused(r), lambda _: [one]) for ranks in ((0, 1), (1,), ())
        ]
        other = one + session.rank
        found.append(session.equal_layer("tp", lambda _: fused((0, 1), other), lambda _: [one]))
        with pytest.raises(AssertionError, match="there is nothing to compare"):
            session.equal([], [])
        return found


def test_a_layer_that_ran_natively_is_not_equal_to_itself() -> None:
    assert run_workers(2, _of_layers) == [[True, True, None, False]] * 2


def _bench(name: str, *words: str) -> object:
    module = {"tp": tp, "pp": pp}[name]
    parser = argparse.ArgumentParser()
    module.add_arguments(parser)
    return _said(module.run, parser.parse_args([*words, "--repetitions", "1", "--warmup", "0"]))


def test_a_part_that_is_not_measured_here_fails() -> None:
    """A layer of megatron-core has rows on GPUs alone."""
    (logged,) = run_workers(1, _bench, "tp", "--part", "layer")
    assert logged == "nothing was compared: bench tp: the log says why it is not measured here"


def _bench_of_a_native_op() -> object:
    with mock.patch.object(MESSAGES, "no_row_reason", lambda call: "a layer leaves it native"):
        return _bench("pp", "--part", "send_recv", "--mb", "0.001")


def test_an_op_that_layers_leave_native_is_named() -> None:
    logged = run_workers(2, _bench_of_a_native_op)
    assert logged == ["nothing was compared: send_recv: the log says why it is not measured here"] * 2


def _tune(folder: str, *words: str) -> object:
    parser = argparse.ArgumentParser()
    tuner.add_arguments(parser)
    return _said(tuner.run, parser.parse_args(["--output", f"{folder}/t.json", *words]))


def test_tune_without_a_shape_fails(tmp_path: Path) -> None:
    (logged,) = run_workers(1, _tune_without_shapes, str(tmp_path), "--op", "dispatch")
    assert logged == "nothing was compared: dispatch: it has no shape here"
    (logged,) = run_workers(1, _tune_without_shapes, str(tmp_path))
    assert logged == "nothing was compared: tune: it has no shape here"
    assert not list(tmp_path.iterdir())


def _tune_without_shapes(folder: str, *words: str) -> object:
    with mock.patch.object(tuner, "_shapes_of", lambda *_: []), mock.patch.object(tuner, "_gemms_of", lambda *_: []):
        return _tune(folder, *words)


def _trace_of_native(folder: str) -> list[object]:
    """An op that a layer leaves native, and a layer all of which runs natively."""
    from ditron_train.megatron.plugin.fused_calls import FUSED_CALLS

    with (
        mock.patch.object(MESSAGES, "asks_gate", True),
        mock.patch.object(MESSAGES, "no_row_reason", lambda call: "a layer leaves it native"),
    ):
        found = [_said(record_op, "send_recv", None, Path(folder))]
    with mock.patch.object(FUSED_CALLS, "take", dict):
        return [*found, _said(record_op, "moe_layer", None, Path(folder))]


def test_a_trace_of_native_beside_native_is_refused(tmp_path: Path) -> None:
    layer = "nothing was compared: moe_layer: no fused call ran in the layer (the log says why)"
    op = "nothing was compared: send_recv: a layer leaves it native"
    assert run_workers(2, _trace_of_native, str(tmp_path)) == [[op, layer]] * 2
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("warm_python")
@pytest.mark.parametrize("kernels, status", [("kernels a_kernel\n", 0), ("", 1)], ids=["some", "none"])
def test_a_sanitizer_that_saw_no_kernel_fails(tmp_path: Path, kernels: str, status: int) -> None:
    """The summary of ``scripts/sanitizer.sh``, on logs of runs that are clean."""
    text = (ROOT / "scripts" / "sanitizer.sh").read_text()
    script = re.search(r"<<'PYTHON'\n(.*)\nPYTHON", text, re.S)
    assert script is not None
    (tmp_path / "alone.log").write_text(f"ran gemm\n{kernels}========= ERROR SUMMARY: 0 errors\n")
    (tmp_path / "alone.status").write_text("0")
    words = [str(tmp_path), str(tmp_path / "out.json"), str(ROOT / "ditron_train")]
    done = subprocess.run([sys.executable, "-c", script[1], *words], capture_output=True, text=True)
    assert done.returncode == status, done.stdout + done.stderr
    assert ("nothing was checked: every run: no kernel ran" in done.stderr) == bool(status)
