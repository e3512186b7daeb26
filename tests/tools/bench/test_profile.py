"""``bench profile`` in CPU processes: a profile that can be read, of rates that were measured."""

from __future__ import annotations

import argparse
import dataclasses
import math
from pathlib import Path

import pytest

from ditron_train.runtime.errors import SettingError
from ditron_train.runtime.profiles import default_rates, profile_named, profile_of_device, read_profile
from ditron_train.tools.bench import profile
from ditron_train.tools.bench.profile_fp8 import fp8_calls
from ditron_train.tools.predict.fit import fit_profile
from ditron_train.tools.predict.rows import estimate_of
from ditron_train.tools.results import Row
from ditron_train.tools.session import bench_session
from tests.support.processes import run_workers

FP8_OPS = ("fp8_forward", "fp8_gradient", "fp8_block", "fp8_block_wgrad")


def _run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    profile.add_arguments(parser)
    return profile.run(parser.parse_args([*words, "--repetitions", "2", "--warmup", "1"]))


def test_a_profile_of_two_processes(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    assert run_workers(2, _run, "--output", str(path)) == [0, 0]
    mine, before = read_profile(path), default_rates("interpreter")
    assert mine.machine.target == "interpreter" and mine.made_with["ranks"] == "2"
    measured = (
        "gemm_tflops", "memory_gbps", "reorder_gbps", "nccl_pair_gbps", "attention_tflops", "fp8_speed", "cast_gbps",
    )  # fmt: skip
    assert all(getattr(mine.rates, name) != getattr(before, name) for name in measured)
    assert mine.rates.message_us == before.message_us  # nothing was timed that would show it


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="cannot write the profile"):
        _run("--output", str(tmp_path / "none" / "mine.json"))


class StandIn:
    """A library that refuses what it is told to, and says what it was asked for."""

    cast_bytes = {"tensorwise": 6, "blockwise": 4}

    def __init__(self, refused: str = "") -> None:
        self.refused, self.asked = refused, []

    def product(self, x, weight, recipe, *, gradient):
        self.asked.append((tuple(x.shape), tuple(weight.shape), recipe, gradient))
        if recipe == self.refused:
            raise RuntimeError("no such product\nof this library")
        return lambda: None

    def cast(self, x, recipe):
        return lambda: None


def _calls(refused: str) -> tuple[list[str], list[tuple], list[int]]:
    options = argparse.Namespace(repetitions=2, warmup=1)
    with bench_session("profile", options) as session:
        library = StandIn(refused if session.rank == 1 else "")
        calls = fp8_calls(session, library, [(64, 32, 128)], [(64, 128)])
        casts = [dict(sizes)["num_bytes"] for op, _, sizes in calls if op == "fp8_cast"]
        return [op for op, _, sizes in calls if dict(sizes).get("n") == 32], library.asked, casts


@pytest.mark.parametrize("refused", ["", "blockwise"])
def test_what_one_rank_cannot_multiply_in_fp8_is_measured_on_none(refused: str) -> None:
    kinds = [(recipe, gradient) for recipe in ("tensorwise", "blockwise") for gradient in (False, True)]
    for ops, asked, casts in run_workers(2, _calls, refused):
        assert asked == [((64, 128), (32, 128), *kind) for kind in kinds]
        assert ops == ["fp8_forward", "fp8_gradient"] + ([] if refused else ["fp8_block", "fp8_block_wgrad"])
        assert casts == [6 * 64 * 128, 4 * 64 * 128]


@pytest.mark.parametrize(
    ("rate", "value"),
    [("fp8_speed", 1.7), ("fp8_split_share", 0.8), ("fp8_block_share", 0.75), ("fp8_block_wgrad_share", 0.6),
     ("cast_gbps", 2100.0)],
)  # fmt: skip
def test_a_fit_finds_the_rates_of_fp8(rate: str, value: float) -> None:
    """Rows that the model itself makes with another rate, at the sizes that are measured on GPUs."""
    h200 = profile_named("h200")
    wanted = dataclasses.replace(h200, rates=dataclasses.replace(h200.rates, **{rate: value}))
    sizes = [(op, dict(zip("mnk", shape))) for op in ("gemm_nt", *FP8_OPS) for shape in profile._GEMMS]
    sizes += [(op, {"num_bytes": mb << 20}) for op in ("fp8_cast", "fp8_transpose") for mb in (128, 512)]
    rows = []
    for op, shape in sizes:
        row = Row(
            op=op, direction="forward", model="profile", world_size=1, dtype="bfloat16", shape=shape, native_us=1.0,
            ditron_us=1.0, bitwise_equal=True, comm_sms=0,
        )  # fmt: skip
        us = estimate_of(row, wanted).native_us
        rows.append(dataclasses.replace(row, native_us=us, ditron_us=us))
    found = fit_profile(h200, rows, estimate_of, farthest=math.inf)
    assert getattr(found.rates, rate) == pytest.approx(value, rel=0.03)


@pytest.mark.parametrize("factor", [1e-30, 1e30])
def test_a_rate_that_rows_leave_open_stays_readable(tmp_path: Path, factor: float) -> None:
    """A busy machine may time one product as if it took no time, or forever."""
    h200 = profile_named("h200")
    shape = dict(zip("mnk", profile._GEMMS[0]))
    row = Row(
        op="gemm_nt", direction="forward", model="profile", world_size=1, dtype="bfloat16", shape=shape,
        native_us=factor, ditron_us=factor, bitwise_equal=True, comm_sms=0,
    )  # fmt: skip
    found = fit_profile(h200, [row, dataclasses.replace(row, op="fp8_forward")], estimate_of, farthest=math.inf)
    assert found != h200
    found.save(tmp_path / "mine.json")
    assert read_profile(tmp_path / "mine.json") == found


@pytest.mark.parametrize(
    "device, name",
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100", "h100"),
        ("NVIDIA A100-SXM4-40GB", "a100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA A100-PCIE-40GB", None),
        ("NVIDIA H100 NVL", None),
        ("CPU x86_64", None),
    ],
)
def test_the_profile_of_a_device_by_its_full_name(device: str, name: str | None) -> None:
    """Cards on PCIe have other links than modules, and no profile."""
    assert profile_of_device(device) == (None if name is None else profile_named(name))
