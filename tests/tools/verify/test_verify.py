"""``verify`` on CPU processes: equal bits pass, one wrong bit on one rank fails on all, bad input is refused."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ditron_train.runtime.errors import SettingError
from ditron_train.symm.arena import close_all_arenas
from ditron_train.tools.cases import Shape
from ditron_train.tools.cases.muon import MUON_STEP
from ditron_train.tools.cases.pp import MESSAGES, message_shapes
from ditron_train.tools.catalog import PACKAGES, cases_of
from ditron_train.tools.nothing_compared import NothingComparedError
from ditron_train.tools.results import read_results
from ditron_train.tools.timing import Timing
from ditron_train.tools.verify import packages
from ditron_train.tools.verify import verifier as verify_run
from ditron_train.tools.verify.cases import model_cases, model_sizes, random_cases, shape_cases
from ditron_train.tools.verify.outcome import RESULTS, Outcome
from ditron_train.tools.verify.result_table import _summary
from ditron_train.tools.verify.verifier import add_arguments, run
from tests.support import tool_arguments
from tests.support.patience import HANG_S
from tests.support.processes import run_workers


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return tool_arguments.parse(parser, ["--repetitions", "1", "--warmup", "0", *words])


def _run(*words: str) -> int:
    return run(arguments(*words))


def _run_with_one_wrong_bit(kind: str, *words: str) -> int:
    """Our op of ``kind`` returns a result whose last bit is off in one place, on rank 1 alone."""
    from ditron_train.megatron.tp import spec

    name = f"{kind}_linear"
    right = getattr(spec, name)

    def wrong(x: torch.Tensor, weight: torch.Tensor, **options: object) -> torch.Tensor:
        y = right(x, weight, **options)
        if dist.get_rank() == 1:
            y = y.clone()
            y.view(-1).data[-1] = torch.nextafter(y.view(-1).data[-1], torch.tensor(torch.inf))
        return y

    setattr(spec, name, wrong)
    try:
        return run(arguments(*words))
    finally:
        setattr(spec, name, right)


def _refused(*words: str) -> str:
    try:
        run(arguments(*words))
    except SettingError as error:
        return str(error)
    return "accepted"


@pytest.mark.slow
def test_a_layer_under_stress(tmp_path: Path) -> None:
    words = ("--repeat", "2", "--poison", "--straggler-ms", "5", "--output", str(tmp_path))
    small = "-- --hidden-size 32 --num-attention-heads 2 --seq-length 32 --padded-vocab-size 64 --swiglu".split()
    assert run_workers(2, _run, *words, *small) == [0, 0]
    (path,) = tmp_path.glob("*/verify.json")
    stamp, rows = read_results(path)
    assert [row.model for row in rows] == ["qkv", "proj", "fc1", "fc2", "output"]
    assert all(row.bitwise_equal for row in rows)
    assert "every bit is equal" in stamp.settings["summary"] and "10 comparisons" in stamp.settings["summary"]


@pytest.mark.slow
def test_layers_without_sequence_parallelism_under_stress(tmp_path: Path) -> None:
    small = ("--row", "32", "32", "32", "--no-sequence-parallel")
    words = ("--repeat", "2", "--straggler-ms", "5", "--poison", "--output", str(tmp_path))
    assert run_workers(2, _run, *small, *words) == [0, 0]
    _, rows = read_results(next(tmp_path.glob("*/verify.json")))
    assert {row.op for row in rows} == {"row_linear_ar"}
    column = (*small, "--column", "32", "32", "32")
    sentence = "nothing was compared: tp column: it runs natively here, by the policy"
    assert run_workers(2, _said_of_nothing, *column) == [sentence] * 2
    assert all(row.bitwise_equal for row in rows)
    assert run_workers(2, _run, "--row", "32", "32", "32", "--output", str(tmp_path)) == [0, 0]
    _, both = read_results(next(tmp_path.glob("*/verify.json")))  # rows of other ops stay in the file
    assert sorted(row.op for row in both) == ["row_linear", "row_linear_ar"]


def test_random_shapes_start_near_the_wrap_and_are_summed_up() -> None:
    words = ("--random", "6", "--seed", "3", "--largest", "32")
    assert run_workers(2, _run_random, *words) == [(0, "6 shapes: 6 fused (6 comparisons), 0 natively")] * 2


def _run_packages(is_wrong: bool, is_cut_short: bool, *words: str) -> int | str:
    """Messages of a small model; they arrive with a wrong value on rank 1, or the second pattern of them is not
    reached."""
    with _messages_alone() as patch:
        if is_wrong:
            patch.setattr(MESSAGES.op, "fused", _wrong_message(lambda: True))
        if is_cut_short:
            patch.setattr(MESSAGES, "shapes_of_model", _one_and_then_the_end())
        try:
            return run(arguments(*words, "--packages", "pp"))
        except KeyboardInterrupt as error:
            return str(error)


@contextmanager
def _messages_alone() -> Iterator[pytest.MonkeyPatch]:
    """Without the steps of a pipeline, which take longer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packages, "_layer_rows", lambda room, session, model, fp8: ())
        yield patch


def _wrong_message(is_wrong: Callable[[], bool]) -> Callable[..., Any]:
    right = MESSAGES.op.fused

    def fused(call: Any, context: Any) -> Callable[..., list[torch.Tensor]]:
        def function(data: torch.Tensor) -> list[torch.Tensor]:
            wrong = dist.get_rank() if is_wrong() else 0
            return [one.clone().add_(wrong) for one in right(call, context)(data)]

        return function

    return fused


def _one_and_then_the_end() -> Callable[..., Iterable[Shape]]:
    """Sizes for the check in front of all; then one, behind which the run is cut short."""
    first, _ = message_shapes(1e5)
    answers = iter(([first], _until_cut(first)))
    return lambda model, world_size: next(answers)


def _until_cut(shape: Shape) -> Iterator[Shape]:
    yield shape
    raise KeyboardInterrupt("cut")


def test_other_packages(tmp_path: Path) -> None:
    words = ("--random", "3", "--largest", "8", "--output", str(tmp_path))
    assert run_workers(2, _run_packages, False, False, *words) == [0, 0]
    stamp, rows = read_results(next(tmp_path.glob("*/verify.json")))
    assert [row.model for row in rows] == ["ring", "pairs"] and stamp.settings["packages"] == "pp"
    assert stamp.settings["summary"] == "2 rows of other ops (2 comparisons); every bit is equal"
    assert run_workers(2, _run_packages, True, False, *words) == [1, 1]


def _run_with_a_late_difference(folder: str) -> int:
    """The third comparison of a message differs, on rank 1 alone, and no other."""
    calls: list[int] = []

    def is_third() -> bool:
        calls.append(1)
        return len(calls) == 5  # two comparisons of the row's own come first

    with _messages_alone() as patch:
        patch.setattr(MESSAGES.op, "fused", _wrong_message(is_third))
        return run(
            arguments("--random", "1", "--packages", "pp", "--repeat", "3", "--straggler-ms", "2", "--output", folder)
        )


def test_other_packages_under_stress(tmp_path: Path) -> None:
    assert run_workers(2, _run_with_a_late_difference, str(tmp_path)) == [1, 1]
    stamp, rows = read_results(next(tmp_path.glob("*/verify.json")))
    assert [row.bitwise_equal for row in rows] == [False, True]
    assert stamp.settings["summary"] == "2 rows of other ops (8 comparisons); 1 different"


def test_what_is_cut_short_leaves_what_was_compared(tmp_path: Path) -> None:
    words = ("--row", "8", "8", "8", "--output", str(tmp_path))
    assert run_workers(2, _run_packages, False, True, *words) == ["cut", "cut"]
    stamp, rows = read_results(next(tmp_path.glob("*/verify.json")))
    assert [row.model for row in rows] == ["custom", "ring"]
    summary = stamp.settings["summary"]
    assert summary.startswith("1 shape: 1 fused") and "1 row of other ops (1 comparison)" in summary


def test_packages_take_the_models_sizes() -> None:
    words = (
        "--hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 8 --num-query-groups 2 --group-query-attention "
        "--seq-length 32 --num-experts 4 --moe-router-topk 1 --moe-ffn-hidden-size 96 --swiglu"
    )
    model = model_sizes(words.split(), True)
    (projection, *_) = cases_of("sp")
    assert list(projection.shapes_of_model(model, 2)[0].sizes.values()) == [32, 8, 2, 8]
    dispatch = cases_of("ep")[0].shapes_of_model(model, 2)
    assert [list(shape.sizes.values()) for shape in dispatch] == [[32, 64, 96, 4, 1]] * 2
    assert [shape.model for shape in dispatch] == ["custom", "custom, Zipf 1"]
    assert [shape.sizes["num_bytes"] for shape in MESSAGES.shapes_of_model(model, 2)] == [4096, 4096]
    (step,) = MUON_STEP.shapes_of_model(model, 2)
    assert step.options["layer"] == ((96, 64), (64, 64), (256, 64), (64, 128))
    for world_size in (2, 4, 8):  # the small model of machines without a GPU
        packages.check_packages(packages.parse_packages("all"), model_sizes([], False), world_size)
    for room, world_size, error in (
        ("sp", 4, "groups 2, .* divide"),
        ("ep", 3, "4 experts"),
        ("pp", 3, "even number"),
    ):
        with pytest.raises(SettingError, match=error):
            packages.check_packages([room], model, world_size)


def test_help_says_which_packages_are_all() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    logged = " ".join(parser.format_help().split())
    assert (
        f"{', '.join(PACKAGES)}; all: {', '.join(packages.parse_packages('all'))} (default: the linear layers"
        in logged
    )


@pytest.mark.slow
def test_every_room(tmp_path: Path) -> None:
    words = "--packages all --repeat 1 --straggler-ms 1 --column 8 8 8".split()
    model = (
        "-- --hidden-size 64 --ffn-hidden-size 128 --num-attention-heads 16 --num-query-groups 8 --seq-length 32 "
        "--group-query-attention --swiglu"
    )
    assert run_workers(2, _run, *words, "--output", str(tmp_path), *model.split()) == [0, 0]
    stamp, rows = read_results(next(tmp_path.glob("*/verify.json")))
    ops = {
        "all_gather_attention",
        "column_linear",
        "gathered_experts",
        "to_heads",
        "to_sequence",
        "gemm_a2a",
        "a2a_gemm",
        "qkv_projection",
        "output_projection",
        "dispatch",
        "combine",
        "flex_dispatch",
        "flex_combine",
        "group_gemm",
        "group_dgrad",
        "group_wgrad",
        "moe_layer",
        "send_recv",
        "pipeline_step",
        "muon_step",
        "cross_entropy",
        "embedding",
    }
    assert {row.op for row in rows} == ops and all(row.bitwise_equal for row in rows)
    others = len(rows) - 1
    assert stamp.settings["summary"].endswith(
        f"{others} rows of other ops ({2 * others} comparisons); every bit is equal"
    )


def _run_with_plan(folder: str) -> tuple[int, list[str]]:
    """The decisions that a run of verify leaves behind."""
    path = Path(folder) / "plan.json"
    try:
        status = _run("--column", "16", "8", "8", "--plan", str(path))
        dist.barrier()
        return status, list(json.loads(path.read_text())["decisions"])
    finally:
        os.environ.pop("DITRON_PLAN"), os.environ.pop("DITRON_POLICY")


def test_a_plan_for_a_job(tmp_path: Path) -> None:
    expected = (0, ["tp column 8x8 4x8 float32 on 2 ranks (strict)"])
    assert run_workers(2, _run_with_plan, str(tmp_path)) == [expected] * 2
    assert "not a writable folder" in run_workers(2, _refused, "--plan", str(tmp_path / "missing" / "plan.json"))[0]


def _run_random(*words: str) -> tuple[int, str]:
    """The exit status and what was found, of epochs that cross the wrap."""
    close_all_arenas()
    reports = []
    with pytest.MonkeyPatch.context() as patch:
        made = verify_run.Report
        patch.setattr(verify_run, "Report", lambda *given: reports.append(made(*given)) or reports[0])
        status = run(arguments(*words, "--first-epoch", str(2**31 - 8)))
    summary = _summary(reports[0].random, 1)
    return status, summary.partition(";")[0]


def _said_of_nothing(*words: str) -> int | str:
    """The exit status, or the sentence that says what was not compared."""
    try:
        return run(arguments(*words))
    except NothingComparedError as error:
        return str(error)
    finally:
        os.environ.pop("DITRON_PLAN", None), os.environ.pop("DITRON_POLICY", None)


def test_one_rank_has_nothing_to_compare(tmp_path: Path) -> None:
    advice = "it needs at least 2 ranks (use torchrun --nproc-per-node 2 -m ditron_train verify)"
    plan = ("--plan", str(tmp_path / "plan.json"))
    for words, names in (
        (("--row", "8", "8", "8"), "tp row"),
        (("--row", "8", "8", "8", "--column", "8", "8", "8"), "tp column, tp row"),
        (("--row", "8", "8", "8", *plan), "tp row"),
        (("--random", "1", "--largest", "8"), "--random"),
    ):
        assert run_workers(1, _said_of_nothing, *words) == [f"nothing was compared: {names}: {advice}"], words
    assert run_workers(2, _said_of_nothing, "--row", "8", "8", "8") == [0, 0]


def _natively(*words: str) -> int | str:
    """With a gate that leaves everything native, as under a NCCL algorithm that is not a ring."""
    from ditron_train.tools.verify import compare

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare.gate, "context_for", lambda spec, call: None)
        return _said_of_nothing(*words)


def test_ranks_that_ran_all_of_it_natively_compared_nothing(tmp_path: Path) -> None:
    sentence = "nothing was compared: tp row: it runs natively here, by the policy"
    assert run_workers(2, _natively, "--row", "8", "8", "8") == [sentence] * 2
    plan = ("--plan", str(tmp_path / "plan.json"))
    assert run_workers(2, _natively, "--row", "8", "8", "8", *plan) == [0, 0], "the plan says so"


def _without_rows(*words: str) -> int | str:
    with _messages_alone() as patch:
        patch.setattr(MESSAGES, "no_row_reason", lambda call: "a layer would not run it")
        return _said_of_nothing(*words)


def test_a_subpackage_without_a_row_is_named() -> None:
    words = ("--row", "8", "8", "8", "--packages", "pp")
    assert (
        run_workers(2, _without_rows, *words) == ["nothing was compared: pp: it runs natively here, by the policy"] * 2
    )


@pytest.mark.usefixtures("warm_python")
def test_the_exit_status_of_the_command_is_2() -> None:
    command = [sys.executable, "-m", "ditron_train", "verify", "--row", "8", "8", "8"]
    env = dict(os.environ, TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=HANG_S)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.count("nothing was compared: tp row: it needs at least 2 ranks") == 1


def test_time_limit_of_random_shapes() -> None:
    assert run_workers(2, _run, "--random", "100000", "--largest", "16", "--seconds", "0.5") == [0, 0]


@pytest.mark.parametrize("kind", ["column", "row"])
def test_one_wrong_bit_on_one_rank_fails_on_all(kind: str) -> None:
    shape = (f"--{kind}", "32", "32", "32")
    assert run_workers(2, _run_with_one_wrong_bit, kind, *shape) == [1, 1]
    assert run_workers(2, _run, *shape) == [0, 0]


SMALL = ("--", *"--hidden-size 32 --num-attention-heads 4 --seq-length 32".split())


def test_bad_input_is_refused_on_every_rank() -> None:
    assert (
        run_workers(2, _refused, "--column", "31", "32", "32")
        == ["custom column 31x32x32 does not divide over 2 ranks: M and N have to"] * 2
    )
    bad = [
        ("--repeat", "0"),
        ("--random", "-1"),
        ("--", "--hidden-size", "33", "--num-attention-heads", "2"),
        ("--", "--hidden-size", "1", "--num-attention-heads", "2", "--seq-length", "8"),
        ("--seconds", "0"),
        ("--first-epoch", "-1"),
        ("--largest", "0"),
        ("--row", "4", "0", "4"),
        ("--repetitions", "0"),
        ("--output", "/proc/nowhere"),
        ("--packages", "tp,xp"),
        (*SMALL, "--num-experts", "0"),
        ("--packages", "ep", *SMALL, "--num-experts", "3"),
        ("--seed", "-1"),
        ("--seed", str(2**32)),
        ("--straggler-ms", "nan"),
        ("--straggler-ms", "inf"),
        ("--straggler-ms", "-1"),
        ("--seconds", "nan"),
        ("--seconds", "inf"),
    ]
    for words in bad:
        messages = run_workers(2, _refused, *words)
        assert messages[0] == messages[1] != "accepted"
    assert "ep takes 2 ranks or more" in run_workers(1, _refused, "--packages", "ep")[0]


def test_model_from_megatrons_arguments() -> None:
    words = (
        "--hidden-size 1024 --ffn-hidden-size 4096 --num-attention-heads 16 --num-query-groups 4 --seq-length 512 "
        "--group-query-attention"
    ).split()
    cases = model_cases(model_sizes([*words, "--micro-batch-size", "2", "--swiglu"], True), torch.bfloat16)
    assert [(c.name, c.kind, c.m, c.n, c.k) for c in cases] == [
        ("qkv", "column", 1024, 1536, 1024),
        ("proj", "row", 1024, 1024, 1024),
        ("fc1", "column", 1024, 8192, 1024),
        ("fc2", "row", 1024, 1024, 4096),
    ]
    plain = model_cases(model_sizes([*words, "--kv-channels", "32"], True), torch.bfloat16)
    assert plain[0].n == (16 + 8) * 32 and plain[1].k == 512 and plain[2].n == 4096
    llama = model_cases(model_sizes([], True), torch.bfloat16)
    assert (llama[0].n, llama[2].n, llama[3].k) == (10240, 57344, 28672)


def test_random_cases_divide_and_repeat_by_seed() -> None:
    for on_gpu in (False, True):
        for world_size in (2, 3, 8):
            cases = list(random_cases(300, 7, world_size, on_gpu))
            assert (
                cases
                == list(random_cases(300, 7, world_size, on_gpu))
                != list(random_cases(300, 8, world_size, on_gpu))
            )
            for case in cases:
                x, weight = case.local_shapes(world_size)
                assert min(*x, *weight) >= 1 and x[1] == weight[1]
            assert {case.kind for case in cases} == {"column", "row"}
            assert any(case.k % 8 for case in cases), "unaligned shapes are the normal case"


def test_verdicts() -> None:
    (case,) = shape_cases(arguments("--row", "8", "8", "8"), torch.bfloat16)
    same = dict.fromkeys(RESULTS, 0)
    quick, slow = Timing(1.0, 0.0), Timing(2.0, 0.0)
    assert Outcome(case, True, same, {"native": slow, "fused": quick}).verdict == "fused"
    assert Outcome(case, True, same, {"native": quick, "fused": slow}).verdict == "fused, slower"
    assert Outcome(case, False, same).verdict == "native"
    assert Outcome(case, True, {**same, "wgrad": 1}, {"native": slow, "fused": quick}).verdict == "DIFFERENT"


def test_what_the_interpreter_would_compute_for_hours_is_refused() -> None:
    (logged,) = run_workers(
        1, _refused, "--", *"--hidden-size 8192 --num-attention-heads 64 --seq-length 8192".split()
    )
    assert "would take about" in logged and "hours" in logged and "choose smaller sizes" in logged
